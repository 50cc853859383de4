"""The suite `memory`: peak memory of forward and backward on the CPU at several lengths, each in a new process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine, number
from dilated_attention_pytorch.core.pattern import training_bytes
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.measuring import peak_resident

SEGMENTS, RATES, HEADS, HEAD_DIM = (2048, 4096, 8192), (1, 2, 4), 4, 64
LINEAR = 1.05  # the most that memory may grow by, over what tokens grow by


def _measure(tokens: int, options: Options) -> Iterator[Record]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak = pool.apply(peak_bytes, (tokens,))
    yield {"tokens": tokens, "peak_bytes": peak, "floor_bytes": training_bytes(tokens, HEADS, HEAD_DIM, itemsize=4)}


def peak_bytes(tokens: int) -> int:
    """What this process's memory grows by, inputs included, while it attends over `tokens`."""
    before = peak_resident()
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    out = dilated_attention(q, k, v, SEGMENTS, RATES, is_causal=True, backend="eager")
    out.backward(torch.ones_like(out))
    return peak_resident() - before


def growth_of_tokens(before: Record, after: Record) -> float:
    """What measured memory grew by, over what tokens grew by: 1 is linear, 2 quadratic where tokens double."""
    return (after["peak_bytes"] / before["peak_bytes"]) / (after["tokens"] / before["tokens"])


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        words = f"{machine}. Eager, float32, forward and backward, H={HEADS}, D={HEAD_DIM}, segments {SEGMENTS}, "
        words += f"rates {RATES}, causal. `of tokens` is the growth of the peak over the growth of tokens."
        head = ["tokens", "peak MiB", "floor MiB", "bytes/token", "growth", "of tokens"]
        table = Table("Peak memory on a CPU", [words], head)
        for before, x in zip([None, *mine], mine):
            sizes = [number(x["peak_bytes"], 0, 1 << 20), number(x["floor_bytes"], 0, 1 << 20)]
            grown = ["", ""]
            if before is not None:
                grown = [f"{x['peak_bytes'] / before['peak_bytes']:.2f}", f"{growth_of_tokens(before, x):.2f}"]
            table.rows.append([f"{x['tokens']:,}", *sizes, f"{x['peak_bytes'] / x['tokens']:,.0f}", *grown])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    grown = [growth_of_tokens(before, after) for before, after in pairwise(records)]
    if grown:
        text = f"peak memory grows at most {LINEAR} times as fast as tokens; at most {max(grown):.3f}"
        yield Verdict(max(grown) <= LINEAR, text)


SUITE = Suite(
    name="memory",
    about="peak memory of the eager backend on the CPU over lengths",
    flags=("tokens",),
    setup=lambda options: sorted(options.tokens) or [131_072, 262_144],
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("tokens",),
)
