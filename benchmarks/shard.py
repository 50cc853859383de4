"""The suite `shard`: one rank's tokens of a sequence on 64 GPUs, measured on one device beside what `plan` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Case, compare, machine, measure
from benchmarks.results import describe
from benchmarks.runner import append_line
from benchmarks.suites import CPU, USUAL
from dilated_attention_pytorch.nn import DilatedAttention
from dilated_attention_pytorch.parallel import RingDilatedAttention
from dilated_attention_pytorch.parallel.plan import Job, make_plan

GPUS = 64
TOKENS = {"cuda": 16_777_216, "cpu": 2048}  # on a GPU a 64th of a billion
HEADS = {"cuda": 4, "cpu": 2}  # with four, 16M tokens take 65 GiB
HEAD_DIM = 64
AS_FAST = 0.98
_COLUMNS = (
    "tokens a rank", "heads", "causal", "ms", "plan, ms", "TFLOP/s", "peak GiB", "plan, GiB", "ring over plain speed",
)  # fmt: skip


def run_shard(
    device: str,
    tokens: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    out: Path | None = None,
) -> None:
    """Print a Markdown table of forward and backward of one layer, and append a JSON line a row to `out`.

    Peak memory is measured on a GPU only, and the plan's time is a GPU's, at its default rate.
    """
    found = machine(device)
    append_line(out, {"machine": found})
    print(describe(found))
    print(f"\n| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    shape: dict[str, Any] = {"heads": heads or HEADS[device], "head_dim": head_dim or HEAD_DIM}
    worst = float("inf")
    for is_causal in (False, True):
        branches = CPU if device == "cpu" else USUAL
        case = Case(tokens=tokens or TOKENS[device], is_causal=is_causal, backward=True, **shape, **branches)
        row = measure_shard(case)
        append_line(out, {"suite": "shard", **asdict(case), **row})
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        planned = "-" if row["plan_milliseconds"] is None else f"{row['plan_milliseconds']:.1f}"
        cells = (
            f"{case.tokens:,}", f"{case.heads} of {case.head_dim}", "yes" if is_causal else "no",
            f"{row['milliseconds']:.1f}", planned, f"{row['tflops']:.3g}", peak,
            f"{row['plan_bytes'] / 2**30:.2f}", f"{row['ring_speed']:.3f}",
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
        worst = min(worst, row["ring_speed"])
    met = "met" if worst >= AS_FAST else "NOT MET"
    print(
        f"\n{met}: in a world of one rank the ring class at least {AS_FAST} as fast as the plain one; worst {worst:.3f}"
    )


def measure_shard(case: Case) -> dict[str, Any]:
    """The ring class in a world of one rank on one rank's tokens, the plain class by turns with it, and the plan."""
    branches = case.segment_lengths, case.dilation_rates
    plan = make_plan(
        Job(
            spec=case.spec,
            tokens=GPUS * case.tokens,
            gpus=GPUS,
            heads=case.heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            is_causal=case.is_causal,
        )
    )
    with world_of_one(case.device):
        *inputs, do = case.tensors()

        def step(attention: DilatedAttention) -> Callable[[], object]:
            return lambda: torch.autograd.grad(attention(*inputs, is_causal=case.is_causal), inputs, do)

        ring, plain = step(RingDilatedAttention(*branches, ring_size=1)), step(DilatedAttention(*branches))
        timing = measure(ring, case.device)
        turns = compare(plain, ring, case.device)
    return {
        "milliseconds": timing.median,
        "peak_bytes": timing.peak_bytes,
        "tflops": case.flops / timing.median / 1e9,
        "plan_milliseconds": plan.step_seconds * 1e3 if case.device == "cuda" else None,
        "plan_bytes": plan.fullest.peak,
        "ring_speed": 1 / turns.ratio,
    }


@contextmanager
def world_of_one(device: str) -> Iterator[None]:
    """A process group of this process alone."""
    if dist.is_initialized():
        raise ValueError(
            "a shard is measured in a world of its own, and there is a process group already: run it alone"
        )
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
