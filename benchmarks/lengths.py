"""The suite `lengths`: padded and packed batches against whole rows with the same documents, by turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import compare
from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine
from dilated_attention_pytorch.functional import dilated_attention

SEGMENTS, RATES = (2048, 8192, 32_768), (1, 4, 12)
SHAPES = {"cpu": ((16, 2),), "cuda": ((64, 12), (128, 16))}  # head dims and heads
AS_FAST = 1.05  # what to reach on a GPU, where documents are long


class Batch(NamedTuple):
    """Documents of equal length in a batch of rows that have more room, or one after the other in one row."""

    documents: int
    tokens: int
    room: int
    packed: bool

    @property
    def title(self) -> str:
        kind = "packed" if self.packed else f"padded to {self.room:,}"
        return f"{self.documents:,} x {self.tokens:,} {kind}"

    def spans(self) -> list[tuple[int, int]]:
        first = self.tokens if self.packed else 0
        return [(i * first, i * first + self.tokens) for i in range(self.documents)]


BATCHES = {
    "cpu": (Batch(2, 100, 100, True), Batch(2, 100, 160, False)),
    "cuda": (
        Batch(8, 16_384, 16_384, True),
        Batch(8, 16_384, 16_384, False),
        Batch(8, 16_384, 32_768, False),
        Batch(1, 102_400, 1_048_576, False),
        Batch(256, 512, 512, True),
        Batch(4096, 32, 32, True),
    ),
}


def _cases(options: Options) -> list[tuple[Batch, int, int, bool, bool]]:
    shapes = itertools.product(SHAPES[options.device], (False, True), BATCHES[options.device], (False, True))
    return [(batch, dim, heads, causal, backward) for (dim, heads), causal, batch, backward in shapes]


def _measure(case: tuple[Batch, int, int, bool, bool], options: Options) -> Iterator[Record]:
    batch, head_dim, heads, is_causal, backward = case
    device = options.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def call(rows: int, tokens: int, spans: Tensor | None) -> Callable[[], object]:
        q, k, v, grad = (torch.randn(rows, tokens, heads, head_dim, dtype=dtype, device=device) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_(backward)

        def run() -> object:
            out = dilated_attention(q, k, v, SEGMENTS, RATES, is_causal=is_causal, spans=spans)
            return torch.autograd.grad(out, (q, k, v), grad) if backward else out

        return run

    rows, tokens = (1, batch.documents * batch.tokens) if batch.packed else (batch.documents, batch.room)
    whole = call(batch.documents, batch.tokens, None)
    found = compare(whole, call(rows, tokens, torch.tensor(batch.spans(), device=device)), device)
    yield {
        **batch._asdict(), "head_dim": head_dim, "heads": heads, "is_causal": is_causal, "backward": backward,
        "whole": found.off, "milliseconds": found.on, "ratio": found.ratio,
    }  # fmt: skip


def _batch(record: Record) -> Batch:
    return Batch(*(record[name] for name in Batch._fields))


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        words = f"{machine}. Segments {SEGMENTS}, rates {RATES}. `of whole` is the time over that of a batch of whole "
        words += "rows, one per document; what lies outside of documents must be cleared, which takes time too."
        table = Table(
            "Documents: padded and packed batches", [words], ["documents", "pass", "ms", "whole, ms", "of whole"]
        )
        for x in mine:
            kind = f"{'forward and backward' if x['backward'] else 'forward'}, D={x['head_dim']} H={x['heads']}"
            kind += ", causal" if x["is_causal"] else ""
            times = [f"{x['milliseconds']:.3f}", f"{x['whole']:.3f}", f"{x['ratio']:.2f}"]
            table.rows.append([_batch(x).title, kind, *times])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    """Batches without room to spare, of documents that are longer than a tile by far."""
    close = [x for x in records if x["tokens"] >= 4096 and (x["packed"] or x["room"] == x["tokens"])]
    if close:
        missed = [x for x in close if x["ratio"] > AS_FAST]
        worst = max(close, key=lambda x: x["ratio"])
        text = f"padded and packed at most {AS_FAST} of whole rows; {len(missed)} of {len(close)} take longer, at most "
        yield Verdict(not missed, text + f"{worst['ratio']:.2f} ({_batch(worst).title})")


SUITE = Suite(
    name="lengths",
    about="padded and packed batches against whole rows of the same documents; targets are for a GPU",
    flags=("device",),
    setup=_cases,
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=(*Batch._fields, "head_dim", "heads", "is_causal", "backward"),
)
