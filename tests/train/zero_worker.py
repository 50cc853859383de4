"""What a rank of `test_zero` does: `zero_worker SCENARIO FOLDER [train ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.parallel import Zero
from dilated_attention_pytorch.train import loop
from dilated_attention_pytorch.train.ranks import exit_process, join_ranks
from dilated_attention_pytorch.train.step import Stepper


def share(folder: Path, flags: list[str]) -> None:
    """All stages, one by sequences too, resumed, a loop of one's own, and what every rank must refuse."""
    loop.draw_curve = lambda *_: None
    # Beside stages and offload, everything that leaves the mathematics as it is.
    exact = "--accumulate 3 --checkpointing selective --offload --loss-chunk 7".split()  # noqa: SIM905
    tiled = [*exact, "--mlp-tile", "5"]
    for stage, offload in ((1, tiled), (2, ["--cpu-offload", *tiled])):
        run = ["--checkpoint-every", "4", "--engine", "deepspeed", "--zero-stage", str(stage), *offload]
        assert main([*flags, "--out", str(folder / f"stage-{stage}"), *run]) == 0
    halves = ["--sequence-parallel", "2", "--engine", "deepspeed", "--zero-stage", "3"]
    assert main([*flags, "--out", str(folder / "sequence"), *halves, *exact]) == 0
    broken_on_one_rank(folder, [*flags, "--engine", "deepspeed"])
    packed = ["--engine", "deepspeed", "--pack", "--accumulate", "3"]
    assert main([*flags, "--out", str(folder / "packed"), *packed]) == 0
    assert main([*flags, "--out", str(folder / "bf16"), "--engine", "deepspeed", "--precision", "bf16"]) == 0
    # Twice: the second time there is nothing left to do but to say so.
    for _ in range(2):
        assert main([*flags, "--out", str(folder / "stage-3"), "--options", str(folder / "options.json")]) == 0
    resumed = ["--engine", "deepspeed", "--zero-stage", "2", "--cpu-offload"]
    assert main(["train", "--resume", str(folder / "damaged"), *resumed]) == 0
    loop_of_ones_own()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.is_compatible = lambda *_, **__: False  # as where libaio is missing
    nvme = ["--engine", "deepspeed", "--nvme-offload", str(folder / "disk")]
    assert main([*flags, "--out", str(folder / "nvme"), *nvme]) == 1


def broken_on_one_rank(folder: Path, flags: list[str]) -> None:
    """The loss of rank 1 is not a number in its third step alone."""
    real, calls = Stepper.loss, []

    def broken(self, *batch):
        calls.append(batch)
        return real(self, *batch) * (float("nan") if dist.get_rank() == 1 and len(calls) == 3 else 1.0)

    Stepper.loss = broken
    assert main([*flags, "--out", str(folder / "broken"), "--checkpoint-every", "4"]) == 0
    Stepper.loss = real


def loop_of_ones_own() -> None:
    """The published way to DeepSpeed, with the configuration that `Zero` makes."""
    import deepspeed

    with join_ranks("cpu", 60.0):
        torch.manual_seed(0)
        model = LongNetLM(d_model=16, num_heads=2, num_layers=1, segment_lengths=(8,), dilation_rates=(1,))
        model_engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config=Zero(stage=3, cpu_offload=True).config(batch_size=2),
            dist_init_required=False,
        )
        tokens = torch.randint(256, (2, 17))
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model_engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
        assert losses[0] > losses[1] > losses[2]


def resume(folder: Path, flags: list[str]) -> None:
    """On more ranks than divide a tensor, and in another stage than the one that saved."""
    changes = ["--zero-stage", "3", "--mlp-tile", "0", "--accumulate", "2"]
    assert main(["train", "--resume", str(folder / "three"), "--engine", "deepspeed", *changes]) == 0
    assert main(["train", "--resume", str(folder / "mended")]) == 0


if __name__ == "__main__":
    scenario, folder, *flags = sys.argv[1:]
    {"share": share, "resume": resume}[scenario](Path(folder), flags)
    exit_process(0)  # a run that ended in an error leaves its group
