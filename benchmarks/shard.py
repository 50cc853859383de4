"""The suite `shard`: one rank's tokens of a sequence on 64 GPUs, measured on one device against its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product

import torch
import torch.distributed as dist

from benchmarks.cases import CPU, USUAL
from benchmarks.harness import Case, compare, measure
from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine, number
from dilated_attention_pytorch.nn import DilatedAttention
from dilated_attention_pytorch.parallel import RingDilatedAttention
from dilated_attention_pytorch.parallel.plan import Job, make_plan

GPUS = 64
TOKENS = {"cuda": 16_777_216, "cpu": 2048}  # on a GPU a 64th of a billion
HEADS = {"cuda": 4, "cpu": 2}  # with four, 16M tokens take 65 GiB
HEAD_DIM = 64
AS_FAST = 0.98


def _setup(options: Options) -> list[Case]:
    device = options.device
    branches = CPU if device == "cpu" else USUAL
    shape = {"heads": options.heads or HEADS[device], "head_dim": options.head_dim or HEAD_DIM, **branches}
    return [
        Case(tokens=tokens, is_causal=is_causal, backward=True, **shape)
        for tokens, is_causal in product(options.tokens or [TOKENS[device]], (False, True))
    ]


def _measure(case: Case, options: Options) -> Iterator[Record]:
    """The ring class in a world of one rank on one rank's tokens, by turns with the plain class, and the plan.

    Peak memory is measured on a GPU only, and the plan's time is a GPU's, at its default rate.
    """
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
    yield asdict(case) | {
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


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        table = Table(
            "One rank's shard beside its plan",
            [f"{machine}. Forward and backward of one attention layer; the ring class runs on one rank."],
            ["tokens", "heads", "causal", "ms", "plan, ms", "peak GiB", "plan, GiB", "ring over plain speed"],
        )
        for x in mine:
            case = [f"{x['tokens']:,}", f"{x['heads']} of {x['head_dim']}", "yes" if x["is_causal"] else "no"]
            times = [number(x["milliseconds"], 1), number(x["plan_milliseconds"], 1)]
            sizes = [number(x["peak_bytes"], 2, 1 << 30), number(x["plan_bytes"], 2, 1 << 30)]
            table.rows.append([*case, *times, *sizes, number(x["ring_speed"], 3)])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    worst = min(record["ring_speed"] for record in records)
    text = f"in a world of one rank, the ring class is at least {AS_FAST} as fast as the plain one; worst {worst:.3f}"
    yield Verdict(worst >= AS_FAST, text)


SUITE = Suite(
    name="shard",
    about="one rank's tokens of a long sequence against its plan, and the ring class against the plain one",
    flags=("device", "tokens", "heads", "head_dim"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("tokens", "heads", "head_dim", "is_causal"),
)
