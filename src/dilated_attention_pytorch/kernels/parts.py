"""A dilated attention as dense attention on strided views.

Dilation is a row stride: the rows that one head reads in a branch are `x.unflatten(0, (S, w))[:, offset::r]`. So every
branch splits into a few *parts*, each a batch of `S` equal dense attentions over `M` rows, and a part's tensors are
views: nothing is gathered, nothing scattered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.entries import spans_key
from dilated_attention_pytorch.core.pattern import grid_rows, heads_by_offset
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.core.spans import documents, segment_number

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides, and the distance from a tensor's first element."""


@dataclass(frozen=True)
class Part:
    """`segments` equal segments, from token `start` of batch rows `rows`, as the KV heads `heads` read them."""

    branch: int
    rows: slice
    start: int
    first_segment: int  # its number in the batch row, or with lengths among all segments: see `segment_number`
    segments: int  # S
    segment_length: int  # w, or the length of a shorter last segment
    dilation_rate: int  # r
    offset: int  # of the first of its heads
    offset_step: int  # from each head to the next: 0 or 1
    heads: range  # KV heads
    first: bool  # no earlier branch has these heads: their rows still hold the empty partial

    def place(self, shape: torch.Size, strides: tuple[int, ...], group: int, groups: int) -> Place:
        """Where the part's rows lie in a `(B, N, H, ...)` tensor, as `(S, M, heads, ...)`.

        A tensor of query heads is viewed at head number `group` of the `groups` that share a KV head.
        """
        by_batch, by_token, by_head, *rest = strides
        w, r = self.segment_length, self.dilation_rate
        batches = self.rows.stop - self.rows.start
        if batches > 1 and self.segments > 1:
            # One stride must serve for segments within a batch row and across batch rows.
            assert by_batch == self.segments * w * by_token, (self, strides)
        by_segment = w * by_token if self.segments > 1 else by_batch
        first = self.rows.start * by_batch + (self.start + self.offset) * by_token
        return (
            (batches * self.segments, grid_rows(w, r, self.offset), len(self.heads), *shape[3:]),
            (by_segment, r * by_token, self.heads.step * groups * by_head + self.offset_step * by_token, *rest),
            first + (self.heads.start * groups + group) * by_head,
        )

    def origins(self, device: torch.device) -> Tensor:
        """`(S, heads)`: the position in its batch row of a segment's first grid row; the others follow at the rate."""
        starts = self.start + self.segment_length * torch.arange(self.segments, device=device)
        offsets = self.offset + self.offset_step * torch.arange(len(self.heads), device=device)
        return starts.repeat(self.rows.stop - self.rows.start)[:, None] + offsets

    def batch_rows(self, device: torch.device) -> Tensor:
        """`(S,)`: the batch row of each of the part's segments."""
        return torch.arange(self.rows.start, self.rows.stop, device=device).repeat_interleave(self.segments)

    def query_heads(self, group: int, groups: int, device: torch.device) -> Tensor:
        """`(heads,)`: the query heads that are number `group` of their key/value heads."""
        return torch.arange(self.heads.start, self.heads.stop, self.heads.step, device=device) * groups + group


class Parts:
    """The parts of a call, branch by branch, and where they lie in tensors; equal calls share them.

    Iterating gives `(number, part, group)`, where `group` counts the query heads that share a key/value head. A view
    made in one step from its place takes a fraction of the time of slicing, which for many short documents would take
    as long as the attention itself.
    """

    def __init__(self, call: Call, spans: Tensor | None, shape: torch.Size, kv_heads: int) -> None:
        self.parts = tuple(_parts(call, spans, shape, kv_heads))
        self._kv_heads, self._groups = kv_heads, shape[2] // kv_heads
        self._places: dict[tuple[Any, ...], list[Place]] = {}

    @property
    def estimated_bytes(self) -> int:
        """For a cache: with the places of a few kinds of tensor, which calls add."""
        return len(self.parts) * _BYTES_PER_PART

    def __iter__(self) -> Iterator[tuple[int, Part, int]]:
        return ((i, part, g) for i, part in enumerate(self.parts) for g in range(self._groups))

    def viewer(self, x: Tensor) -> Callable[..., Tensor]:
        """`view(i, group)`: the rows of part `i` in `x`, `(B, N, H, ...)`, as `(S, M, heads, ...)`.

        Of a tensor of query heads, it has the head number `group` of each key/value head.
        """
        shape, strides = x.shape, x.stride()
        groups = shape[2] // self._kv_heads
        kind = shape[2:], strides
        places = self._places.get(kind)
        if places is None:
            if len(self._places) >= _MOST_KINDS_OF_TENSOR:
                self._places.clear()
            places = [part.place(shape, strides, g, groups) for part in self.parts for g in range(groups)]
            self._places[kind] = places
        begin = x.storage_offset()

        def view(index: int, group: int = 0) -> Tensor:
            sizes, strides, distance = places[index * groups + group]
            return x.as_strided(sizes, strides, begin + distance)

        return view


_MOST_KINDS_OF_TENSOR = 32
_BYTES_PER_PART = 800


def parts_for(call: Call, spans: Tensor | None, shape: torch.Size, kv_heads: int, resources: Resources) -> Parts:
    """The parts of a `(B, N, H, D)` call, remembered where there is a cache."""
    lengths = None if resources.cache is None else spans_key(spans)
    if lengths is None:
        return Parts(call, spans, shape, kv_heads)
    key = (call.spec, call.table, call.head_offset, call.total_heads, shape[:3], kv_heads, lengths)
    return resources.remember("parts", key, lambda: Parts(call, spans, shape, kv_heads))


def _parts(call: Call, spans: Tensor | None, shape: torch.Size, kv_heads: int) -> Iterator[Part]:
    """The parts of a `(B, N, H, D)` call, branch by branch."""
    B, N, H, _ = shape
    table = call.offsets(H, kv_heads)
    found = documents(spans, B, N)
    for index, branch in enumerate(call.spec.branches):
        w, r = branch.segment_length, branch.dilation_rate
        is_first = [all(earlier[h] is None for earlier in table[:index]) for h in range(kv_heads)]
        by_offset = [(offset, 0, range(kv_heads)[heads]) for offset, heads in heads_by_offset(table[index])]
        across = _across_offsets(by_offset, is_first)
        for rows, start, segments, length, document in _equal_segments(found, B, N, w):
            first = start // w if spans is None else segment_number(rows.start, start, document, w, N)
            as_long = len({grid_rows(length, r, offset) for offset, _, _ in by_offset}) == 1
            for offset, step, heads in across if as_long and len(across) < len(by_offset) else by_offset:
                if grid_rows(length, r, offset):
                    yield Part(
                        index, rows, start, first, segments, length, r, offset, step, heads, is_first[heads.start]
                    )


Group = tuple[int, int, range]
"""The offset of the first of some heads, the step from each head's offset to the next one's, and the heads."""


def _across_offsets(by_offset: list[Group], is_first: list[bool]) -> list[Group]:
    """The same heads in groups that have every offset once; still by offset if one stride does not serve for that.

    Fewer groups make fewer calls of more heads, which threads can share.

    >>> _across_offsets([(0, 0, range(0, 3, 2)), (1, 0, range(1, 4, 2))], [True] * 4)
    [(0, 1, range(0, 2)), (0, 1, range(2, 4))]
    """
    groups = sorted((offset, heads) for offset, _, heads in by_offset)
    offsets = [offset for offset, _ in groups]
    steps = {after[1][0] - before[1][0] for before, after in itertools.pairwise(groups)}
    alike = len({(len(heads), heads.step) for _, heads in groups}) == 1
    evenly = len(steps) == 1 and min(steps) > 0 and offsets == list(range(offsets[0], offsets[0] + len(offsets)))
    if not alike or not evenly or len({is_first[h] for _, heads in groups for h in heads}) > 1:
        return by_offset
    (step,) = steps
    return [(offsets[0], 1, range(h, h + step * (len(groups) - 1) + 1, step)) for h in groups[0][1]]


def _equal_segments(
    found: list[tuple[slice, int, int, int]], batch: int, tokens: int, w: int
) -> Iterator[tuple[slice, int, int, int, int]]:
    """`(batch rows, start, segments, length, document)` of runs that can be viewed as one batch of segments.

    `found` are the documents, as `documents` gives them.
    """
    for rows, start, n, document in found:
        full, tail = divmod(n, w)
        if full:
            together = full == 1 or full * w == tokens or rows.stop - rows.start == 1
            for run in [rows] if together else [slice(b, b + 1) for b in range(batch)]:
                yield run, start, full, w, document
        if tail:
            yield rows, start + full * w, 1, tail, document
