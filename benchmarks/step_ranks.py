"""Training steps on two ranks, against the same steps in one process: their losses must agree.

`bench step --ranks` starts this module under torchrun: gloo on the CPU, NCCL where there are two GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import run_on_ranks
from benchmarks.suite import Record, Table, Verdict, append_line
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.data import Batch
from dilated_attention_pytorch.train.memory import MemoryOptions, make_optimizer, prepare
from dilated_attention_pytorch.train.presets import model_preset
from dilated_attention_pytorch.train.ranks import join_ranks
from dilated_attention_pytorch.train.step import Stepper

RANKS, STEPS = 2, 5
# How two ranks share a step: parameters, copies of the model, sequences, or heads.
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp"},
    "fsdp, muon": {"engine": "fsdp", "optimizer": "muon"},
    "ddp": {"engine": "ddp"},
    "sequence parallel": {"engine": "fsdp", "sequence": RANKS},
    "tensor parallel": {"engine": "fsdp", "tensor": RANKS},
    "tensor parallel, muon": {"engine": "fsdp", "tensor": RANKS, "optimizer": "muon"},
}
_TINY = ModelConfig(d_model=32, num_heads=2, num_layers=2, segment_lengths=(64, 256), dilation_rates=(1, 2))
_TOKENS = {"cuda": 32_768, "cpu": 256}
_WITHIN = {"cuda": 2e-2, "cpu": 1e-4}  # of the losses: bfloat16 and float32 round sums in another order


def measure(device: str) -> Iterator[Record]:
    """One record per way: the losses of its steps, and of the same steps in one process."""
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        raise ValueError(f"--ranks needs {RANKS} GPUs, and there are {torch.cuda.device_count()}: pass --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "lines.jsonl"
        run_on_ranks(RANKS, "benchmarks.step_ranks", device, str(results))
        for line in map(json.loads, results.read_text().splitlines()):
            alone = train(device, WAYS[line["model"]].get("optimizer", "adamw"))
            yield {**line, "alone": alone["losses"], "within": _WITHIN[device]}


def train(device: str, optimizer: Any = "adamw", engine: Any = "fsdp", sequence: int = 1, tensor: int = 1) -> Record:
    """Losses of some steps, the same on all ranks, and on GPUs the rate of the fastest step."""
    cuda, tokens = device == "cuda", _TOKENS[device]
    config = TrainConfig(
        model=model_preset("125m", sequence_length=tokens) if cuda else _TINY,
        memory=MemoryOptions(optimizer=optimizer, loss_chunk=16_384, precision="bf16" if cuda else "fp32"),
        batch_size=RANKS,
        sequence_length=tokens,
        steps=STEPS,
        warmup_steps=0,
        learning_rate=1e-3 if cuda else 1e-2,
        engine=engine,
    )
    with join_ranks(device, 120.0, sequence=sequence, tensor=tensor) as ranks:
        torch.manual_seed(0)
        model = ranks.share(prepare(LongNetLM(config.model, device=ranks.device), config.memory), engine)
        updates = make_optimizer(model, config.memory, lr=config.learning_rate)
        stepper = Stepper(model, updates, config, ranks)
        losses, seconds = [], []
        # The same tokens in every step, which the model learns: losses that do not move would show no update.
        drawn = torch.randint(256, (RANKS, tokens + 1), generator=torch.Generator().manual_seed(0))
        for step in range(1, STEPS + 1):
            began = time.perf_counter()
            losses.append(stepper.step(Batch(drawn[:, :-1], drawn[:, 1:]), step)().loss)
            seconds.append(ranks.gather(time.perf_counter() - began).max().item())
    rate = RANKS * tokens / min(seconds) if cuda else None
    return {"size": "125m" if cuda else "tiny", "tokens": tokens, "losses": losses, "tokens_per_second": rate}


def table(machine: str, records: Sequence[Record]) -> Table:
    words = (
        f"{machine}. {RANKS} ranks train on {RANKS} sequences per step, beside one process on the same sequences: the "
        "largest difference of their losses."
    )
    found = Table("A training step on ranks", [words], ["ranks share by", "tokens", "steps", "difference", "tokens/s"])
    for x in records:
        rate = "" if x["tokens_per_second"] is None else f"{x['tokens_per_second']:,.0f}"
        found.rows.append([x["model"], f"{x['tokens']:,}", str(len(x["losses"])), f"{_difference(x):.1e}", rate])
    return found


def verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    for x in records:
        text = f"{x['model']}: losses within {x['within']:g} of those of one process; {_difference(x):.1e}"
        yield Verdict(_difference(x) <= x["within"], text)


def _difference(record: Record) -> float:
    return max(abs(a / b - 1) for a, b in zip(record["losses"], record["alone"]))


if __name__ == "__main__":
    for name, how in WAYS.items():
        found = train(sys.argv[1], **how)
        if os.environ["RANK"] == "0":
            append_line(Path(sys.argv[2]), {"model": name, "ranks": RANKS, **found})
