"""What a rank of `test_ranks` does: `rank_worker SCENARIO FOLDER [train ...]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter

from dilated_attention_pytorch import cli
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train import loop
from dilated_attention_pytorch.train.ranks import exit_process
from dilated_attention_pytorch.train.step import Stepper

RANK = int(os.environ.get("RANK", "0"))
# Everything that leaves the mathematics as it is.
EXACT = "--accumulate 2 --checkpointing selective --offload --mlp-tile 5 --loss-chunk 7".split()  # noqa: SIM905


# Of a run of which only the losses are compared: one checkpoint.
LOSSES = ["--checkpoint-every", "8"]

# What later models do instead of MAGNETO.
LATER = """
    --norm rms --activation swiglu --num-kv-heads 2 --qk-norm --no-tie-weights --logit-soft-cap 15 --stagger
    --optimizer muon
""".split()  # noqa: SIM905


def at_step(number: int, act) -> None:
    """Let rank 1 act just before a step."""
    real = Stepper.step

    def step_with_act(stepper, batch, step):
        if step == number and RANK == 1:
            act()
        return real(stepper, batch, step)

    Stepper.step = step_with_act


def share(folder: Path, flags: list[str]) -> None:
    """Several runs in one launch, and the errors that every rank must tell."""
    real = Stepper.step
    assert main([*flags, "--out", str(folder / "fsdp"), "--monitors", "jsonl"]) == 0
    loop.draw_curve = lambda *_: None  # once is enough
    every_second, flags = flags, [*flags, *LOSSES]
    assert main([*flags, "--out", str(folder / "ddp"), "--engine", "ddp"]) == 0
    assert main(["train", "--resume", str(folder / "from-one"), "--engine", "fsdp"]) == 0
    assert main([*flags, "--out", str(folder / "later-fsdp"), *LATER]) == 0
    assert main([*flags, "--out", str(folder / "later-ddp"), "--engine", "ddp", *LATER, *EXACT]) == 0
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    assert main([*flags, "--out", str(folder / "stopped")]) == 128 + signal.SIGTERM
    Stepper.step = real
    assert main(["train", "--resume", str(folder / "stopped"), "--engine", "ddp"]) == 0
    assert main([*flags, "--out", str(folder / "fsdp-exact"), *EXACT]) == 0
    assert main([*flags, "--out", str(folder / "ddp-exact"), "--engine", "ddp", *EXACT]) == 0
    assert main([*flags, "--out", str(folder / "sequence-exact"), "--sequence-parallel", "2", *EXACT]) == 0
    at_step(5, lambda: signal.raise_signal(signal.SIGTERM))
    assert main([*flags, "--out", str(folder / "fp16"), "--precision", "fp16", *EXACT]) == 128 + signal.SIGTERM
    Stepper.step = real
    assert main(["train", "--resume", str(folder / "fp16"), "--accumulate", "1"]) == 0
    broken_on_one_rank(folder, flags)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    if RANK == 1:
        FileSystemWriter.write_data = full_disk
    assert main([*every_second, "--out", str(folder / "failed"), "--steps", "30"]) == 1


def broken_on_one_rank(folder: Path, flags: list[str]) -> None:
    """The loss of rank 1 is not a number in its third step alone."""
    real, calls = Stepper.loss, []

    def broken(self, *batch):
        calls.append(batch)
        return real(self, *batch) * (float("nan") if RANK == 1 and len(calls) == 3 else 1.0)

    Stepper.loss = broken
    assert main([*flags, "--out", str(folder / "broken")]) == 0
    Stepper.loss = real


def kill(folder: Path, flags: list[str]) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        at_step(6, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert main(flags) == 0
    assert main([*flags, "--out", str(folder / "unlike"), "--seed", str(RANK)]) == 1


def hang(folder: Path, flags: list[str]) -> None:
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    # Begin together: the time that a Python takes to start must not count as silence.
    (folder / f"ready-{RANK}").touch()
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
    sys.argv[1:] = [*flags, "--out", str(folder / "hung"), "--timeout-seconds", "10"]
    cli.entry()


def four(folder: Path, flags: list[str]) -> None:
    """Four ranks resume what two began, and share sequences, heads and parameters in several ways."""
    real, losses = Stepper.step, [*flags, *LOSSES]
    assert main(["train", "--resume", str(folder / "four")]) == 0
    loop.draw_curve = lambda *_: None
    assert main([*losses, "--out", str(folder / "sequence"), "--sequence-parallel", "4", "--monitors", "jsonl"]) == 0
    assert main([*losses, "--out", str(folder / "sequence-data"), "--sequence-parallel", "2"]) == 0
    both = ["--sequence-parallel", "2", "--tensor-parallel", "2"]
    assert main([*losses, "--out", str(folder / "sequence-tensor-exact"), *both, *EXACT]) == 0
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    assert main([*flags, "--out", str(folder / "sequence-tensor"), *both]) == 128 + signal.SIGTERM
    Stepper.step = real
    assert main(["train", "--resume", str(folder / "sequence-tensor")]) == 0
    assert main(["train", "--resume", str(folder / "one-to-tensor"), *both]) == 0
    assert main(["train", "--resume", str(folder / "one-to-ddp"), "--sequence-parallel", "2", "--engine", "ddp"]) == 0
    assert main([*losses, "--out", str(folder / "later-tensor"), *both, *LATER]) == 0
    assert main(["train", "--resume", str(folder / "later-one-to-tensor"), "--tensor-parallel", "2"]) == 0
    assert main([*flags, "--out", str(folder / "three"), "--tensor-parallel", "3"]) == 1
    assert main([*flags, "--out", str(folder / "odd"), "--batch-size", "6"]) == 1


def pack(folder: Path, flags: list[str]) -> None:
    """Two ranks share packed sequences, or the tokens of each; what the first cannot read, all refuse."""
    assert main([*flags, "--out", str(folder / "data")]) == 0
    assert main([*flags, "--out", str(folder / "sequence"), "--sequence-parallel", "2", "--engine", "ddp"]) == 0
    assert main([*flags, "--out", str(folder / "micro"), "--batch-size", "4", "--accumulate", "2"]) == 0
    tokenizer = Path(flags[flags.index("--tokenizer") + 1])
    (folder / f"read-{RANK}").touch()
    while not all((folder / f"read-{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
    tokenizer.unlink(missing_ok=True)
    assert main([*flags, "--out", str(folder / "wrong")]) == 1


if __name__ == "__main__":
    scenario, folder, *flags = sys.argv[1:]
    {"share": share, "kill": kill, "hang": hang, "four": four, "pack": pack}[scenario](Path(folder), flags)
    exit_process(0)  # a run that ended in an error leaves its group
