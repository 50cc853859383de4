"""What the kernels work on where documents have lengths, found on the device: segments, and tiles of their rows.

Nothing here waits for the device, and a CUDA graph makes its lists anew whenever it is replayed.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core.entries import keep_while_read, lasting, spans_key
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.kernels.triton.launching import Launch
from dilated_attention_pytorch.kernels.triton.primitives import is_in_document

_FEW_DOCUMENTS = 8192


class Works(NamedTuple):
    """What a list contains: one line per `tile` rows of a segment, or with `pairs` one line per two such tiles.

    Segments of at most `least` rows, or of more than `most`, have no lines. A row is a token that a head sees.
    """

    tile: int
    pairs: bool = False
    least: int = 0
    most: int = 1 << 30

    def capacity(self, branch) -> int:
        """The most lines that a list can have."""
        tokens = branch.plan.B * branch.plan.N
        segments = tokens // branch.w + branch.plan.documents
        return segments + (0 if self.tile >= self.most else tokens // (self.tile * branch.r))


class WorkLists:
    """The lists of a plan's launches, made by one launch.

    A list is int32 `(1 + lines, 8)`. Its first line holds the number of lines. Every other line holds the batch row and
    the start of a segment, its length divided by the rate as quotient and remainder, the tile, and the segment's number
    (`core.spans.segment_number`), which finds its grid in a block layout.
    """

    def __init__(self, plan, wanted: list) -> None:
        """`wanted` are pairs of a branch and its `Works`."""
        self._plan = plan
        self._kinds = [(branch.w, branch.r, *works, works.capacity(branch)) for branch, works in wanted]
        self._starts, self._lines = {}, 0  # equal lists are made once
        for kind in dict.fromkeys(self._kinds):
            self._starts[kind] = self._lines
            self._lines += 1 + kind[-1]
        rows = [[*map(int, kind), start] for kind, start in self._starts.items()]
        self._table = lasting(plan.device, lambda: torch.tensor(rows, dtype=torch.int32, device=plan.device))
        # Each program adds up what comes before its documents: few programs for very many, else many.
        block = 1 if plan.documents <= _FEW_DOCUMENTS else 64
        blocks = triton.cdiv(plan.documents, block)
        settings = {"PACKED": plan.B == 1, "DOCUMENTS": block, "LINES": 1024 // block}
        self._launch = Launch(_work_lists_kernel, blocks * len(rows), (plan.N, plan.documents, blocks), settings)

    def of(self, spans: Tensor, resources: Resources) -> list[Tensor]:
        """One list for each that is wanted."""
        lengths = None if resources.cache is None else spans_key(spans)
        if lengths is None:
            return self._make(spans)
        key = (self._plan.device, self._plan.B, self._plan.N, tuple(self._kinds), lengths)
        return resources.remember("segment table", key, lambda: self._make(spans))

    def _make(self, spans: Tensor) -> list[Tensor]:
        made = torch.empty((self._lines, 8), dtype=torch.int32, device=spans.device)
        keep_while_read(self._table)
        self._launch(spans.contiguous(), made, self._table)
        starts = [self._starts[kind] for kind in self._kinds]
        return [made[start : start + 1 + kind[-1]] for kind, start in zip(self._kinds, starts)]


def clear_outside(plan, spans: Tensor, *tensors: Tensor, lse: Tensor | None = None) -> None:
    """Set what lies outside of documents in tensors like the query, the key and the value to 0, in lse to -inf."""
    launch = plan.launches.get("clear")
    if launch is None:
        tokens = plan.B * plan.N
        sizes = [x.numel() // tokens for x in tensors]
        numbers = (tokens, plan.N, plan.H, plan.documents, sizes[0], sizes[-1])
        settings = {"PACKED": plan.B == 1, "TENSORS": len(tensors), "LSE": lse is not None, "ROWS": 16, "BLOCK": 512}
        launch = plan.launches["clear"] = Launch(_clear_kernel, triton.cdiv(tokens, 16), numbers, settings)
    first, second, third = (tensors * 3)[:3]
    launch(spans.contiguous(), first, second, third, first if lse is None else lse)


@triton.jit
def _lines(length, rate, tile, pairs, least, most):
    """How many lines a segment has."""
    rows = (length + rate - 1) // rate
    lines = (rows + tile - 1) // tile
    lines = tl.where(pairs != 0, (lines + 1) // 2, lines)
    return tl.where((rows > least) & (rows <= most), lines, 0)


@triton.jit
def _documents(Spans, number, documents, N, W, rate, tile, pairs, least, most):
    """`(begin, whole segments, tokens after them, lines of those)` of documents."""
    here = number < documents
    begin = tl.maximum(tl.load(Spans + number * 2, mask=here, other=0).to(tl.int32), 0)
    end = tl.minimum(tl.load(Spans + number * 2 + 1, mask=here, other=0).to(tl.int32), N)
    length = tl.maximum(end - begin, 0)
    rest = length % W
    return begin, length // W, rest, _lines(rest, rate, tile, pairs, least, most)


@triton.jit(do_not_specialize=("N", "documents", "blocks"))
def _work_lists_kernel(
    Spans, Works, Kinds, N, documents, blocks, PACKED: tl.constexpr, DOCUMENTS: tl.constexpr, LINES: tl.constexpr
):
    """The lines of DOCUMENTS documents. Those of later tiles come first, which under causality see more keys."""
    kind = Kinds + tl.program_id(0) // blocks * 8
    W, rate, tile, pairs = tl.load(kind), tl.load(kind + 1), tl.load(kind + 2), tl.load(kind + 3)
    least, most, capacity = tl.load(kind + 4), tl.load(kind + 5), tl.load(kind + 6)
    Works += tl.load(kind + 7).to(tl.int64) * 8
    first = tl.program_id(0) % blocks * DOCUMENTS
    per_whole = _lines(W, rate, tile, pairs, least, most)
    before = tl.zeros([1024], tl.int32)
    for start in tl.range(0, first, 1024):
        number = start + tl.arange(0, 1024)
        _, whole, _, after = _documents(Spans, number, documents, N, W, rate, tile, pairs, least, most)
        before += tl.where(number < first, whole * per_whole + after, 0)
    number = first + tl.arange(0, DOCUMENTS)
    begin, whole, rest, after = _documents(Spans, number, documents, N, W, rate, tile, pairs, least, most)
    count = whole * per_whole + after
    at = tl.sum(before) + tl.cumsum(count, 0) - count
    if first + DOCUMENTS >= documents:
        tl.store(Works, tl.minimum(tl.sum(before) + tl.sum(count), capacity))
    b = number * 0 if PACKED else number
    for start in tl.range(0, tl.max(count), LINES):
        line = start + tl.arange(0, LINES)[None, :]
        in_whole = line < (whole * per_whole)[:, None]
        segment = tl.where(in_whole, line // tl.maximum(per_whole, 1), whole[:, None])
        length = tl.where(in_whole, W, rest[:, None])
        place = line - tl.where(in_whole, segment, whole[:, None]) * per_whole
        pointers = Works + 8 + (at[:, None] + line) * 8
        here = (line < count[:, None]) & (at[:, None] + line < capacity)
        tl.store(pointers, b[:, None] + line * 0, mask=here)
        tl.store(pointers + 1, begin[:, None] + segment * W, mask=here)
        tl.store(pointers + 2, length // rate, mask=here)
        tl.store(pointers + 3, length % rate, mask=here)
        tl.store(pointers + 4, tl.where(in_whole, per_whole, after[:, None]) - 1 - place, mask=here)
        number_of_first = (b * N + begin) // W + number
        tl.store(pointers + 5, number_of_first[:, None] + segment, mask=here)


@triton.jit(do_not_specialize=("tokens", "N", "H", "documents"))
def _clear_kernel(
    Spans, First, Second, Third, Lse, tokens, N, H, documents, first_size, other_size,
    PACKED: tl.constexpr, TENSORS: tl.constexpr, LSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of all heads, which lie side by side in the tensors."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, token = at // N, at % N
    outside = (at < tokens) & ~is_in_document(Spans, tl.minimum(b, tokens // N - 1), token, documents, N, PACKED)
    if tl.max(outside.to(tl.int32)) == 0:
        return
    for start in tl.range(0, first_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = outside[:, None] & (column < first_size)[None, :]
        tl.store(First + at[:, None] * first_size + column[None, :], 0.0, mask=mask)
    if TENSORS > 1:
        for start in tl.range(0, other_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = outside[:, None] & (column < other_size)[None, :]
            tl.store(Second + at[:, None] * other_size + column[None, :], 0.0, mask=mask)
            tl.store(Third + at[:, None] * other_size + column[None, :], 0.0, mask=mask)
    if LSE:
        for head in tl.range(0, H):
            tl.store(Lse + (b * H + head) * N + token, -float("inf"), mask=outside)
