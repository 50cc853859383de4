"""What a rank of `test_zero` does: `zero_worker.py SCENARIO FOLDER [train ...]`, started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

from dilated_attention_pytorch.cli import main


def share(folder: Path, flags: list[str]) -> None:
    """All stages from the beginning, one by sequences, resumed, and what every rank must refuse."""
    for stage, offload in ((1, []), (2, ["--cpu-offload"])):
        run = ["--checkpoint-every", "10", "--engine", "deepspeed", "--zero-stage", str(stage), *offload]
        assert main([*flags, "--out", str(folder / f"stage-{stage}"), *run]) == 0
    halves = ["--sequence-parallel", "2", "--engine", "deepspeed", "--zero-stage", "3"]
    assert main([*flags, "--out", str(folder / "sequence"), *halves]) == 0
    # Twice: the second time there is nothing left to do but to say so.
    for _ in range(2):
        assert main([*flags, "--out", str(folder / "stage-3"), "--options", str(folder / "options.json")]) == 0
    resumed = ["--engine", "deepspeed", "--zero-stage", "2", "--cpu-offload"]
    assert main(["train", "--resume", str(folder / "damaged"), *resumed]) == 0
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.is_compatible = lambda *_, **__: False  # as where libaio is missing
    nvme = ["--engine", "deepspeed", "--nvme-offload", str(folder / "disk")]
    assert main([*flags, "--out", str(folder / "nvme"), *nvme]) == 1


def resume(folder: Path, flags: list[str]) -> None:
    """On more ranks than divide a tensor, and in another stage than the one that saved."""
    assert main(["train", "--resume", str(folder / "three"), "--engine", "deepspeed", "--zero-stage", "3"]) == 0


if __name__ == "__main__":
    scenario, folder, *flags = sys.argv[1:]
    {"share": share, "resume": resume}[scenario](Path(folder), flags)
