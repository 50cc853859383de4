"""The rows of one branch that travel: the grid rows of shared segments, and the buffers they are packed into.

Which rank sends them to which is in `schemes`, which tensors they are rows of in `exchange`. Heads with the same offset
have the same grid rows, so a rank holds one set of rows and heads per offset. The rows of several ranks at one offset,
one after another, are the rows of the segment's grid in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.pattern import heads_by_offset
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.spec import Branch
from dilated_attention_pytorch.parallel.sharding import Document, Shards, SharedSegment, shared_segments


class Traffic(NamedTuple):
    """Bytes."""

    sent: int
    received: int

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        return Traffic(self.sent + other[0], self.received + other[1])


class Rows(NamedTuple):
    """The grid rows that a chunk holds of a shared segment, of all key/value heads or of some."""

    chunk: int
    heads: range | None = None


@dataclass(frozen=True)
class Wire:
    """One branch on the wire: the offsets of its key/value heads, and the sizes of what travels."""

    branch: Branch
    offsets: tuple[int | None, ...]
    groups: int  # query heads per key/value head
    head_dim: int
    itemsize: int
    sum_itemsize: int
    is_causal: bool
    shards: Shards

    def count(self, segment: SharedSegment, rows: Rows) -> int:
        """The number of (batch row, grid row, key/value head) triples in some rows."""
        key = segment.rows.start, segment.start, rows
        if key not in self._counts:
            offsets = self.offsets if rows.heads is None else self.offsets[rows.heads.start : rows.heads.stop]
            grids = (segment.grid(rows.chunk, self.branch.dilation_rate, o) for o in offsets if o is not None)
            self._counts[key] = len(segment.rows) * sum(map(len, grids))
        return self._counts[key]

    @cached_property
    def _counts(self) -> dict[tuple[int, int, Rows], int]:
        """Sums over all ranks, for each rank, count the same rows many times."""
        return {}

    def head_share(self, segment: SharedSegment, rank: int) -> range:
        """The key/value heads that a rank computes under all-to-all."""
        share = len(self.offsets) // len(segment.ranks)
        index = segment.ranks.index(rank)
        return range(index * share, (index + 1) * share)


def wires_of(
    call: Call, shards: Shards, documents: Sequence[Document], heads: int, kv_heads: int, head_dim: int, itemsize: int
) -> Iterator[tuple[int, tuple[SharedSegment, ...], Wire]]:
    """The branches of a call that ranks share: the branch's index, its shared segments, and what travels."""
    for index, (branch, offsets) in enumerate(zip(call.spec.branches, call.offsets(heads, kv_heads))):
        segments = shared_segments(branch, shards, documents)
        if segments and any(offset is not None for offset in offsets):
            groups, sums = heads // kv_heads, max(4, itemsize)
            yield index, segments, Wire(branch, offsets, groups, head_dim, itemsize, sums, call.is_causal, shards)


@dataclass(frozen=True)
class GridRows:
    """The grid positions of some batch rows that key/value heads of one offset have."""

    rows: range
    grid: range
    heads: range
    kv_heads: int  # of the whole call

    def view(self, x: Tensor, first: int) -> Tensor:
        """These rows of `(B, L, H, ...)`, whose token 0 is at position `first`: `(S, M, heads, groups, ...)`.

        `groups` are the heads of `x` per key/value head: 1 for keys and values.
        """
        grid = slice(self.grid.start - first, self.grid.stop - first, self.grid.step)
        x = x[self.rows.start : self.rows.stop, grid].unflatten(2, (self.kv_heads, -1))
        return x[:, :, self.heads.start : self.heads.stop : self.heads.step]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.rows), len(self.grid), len(self.heads)


class HeldRows(dict[int, GridRows]):
    """`Rows` by offset; offsets without any rows are left out.

    Rows of several tensors are packed into one flat buffer of bytes. Tensors like those that were packed say how to
    read it: they may differ in tokens and values only.
    """

    def __init__(self, wire: Wire, segment: SharedSegment, rows: Rows) -> None:
        self.kv_heads = len(wire.offsets)
        heads = range(self.kv_heads) if rows.heads is None else rows.heads
        for offset, found in heads_by_offset(wire.offsets[heads.start : heads.stop]):
            grid = segment.grid(rows.chunk, wire.branch.dilation_rate, offset)
            if grid:
                self[offset] = GridRows(segment.rows, grid, heads[found], self.kv_heads)
        self.rows = sum(torch.Size(rows.shape).numel() for rows in self.values())

    def buffer(self, like: Sequence[Tensor], take: Take) -> Tensor:
        """An uninitialised buffer of bytes from `take` for packed rows."""
        size = self.rows * sum(x.shape[2:].numel() // self.kv_heads * x.element_size() for x in like)
        return take((size,), dtype=torch.uint8, device=like[0].device)

    def pack(self, tensors: Sequence[Tensor], first: int, take: Take) -> Tensor:
        """These rows of tensors `(B, L, heads, ...)`."""
        buffer, own = self.buffer(tensors, take), self.views(tensors, first)
        for offset, parts in self.unpack(buffer, tensors).items():
            for part, x in zip(parts, own[offset]):
                part.copy_(x)
        return buffer

    def unpack(self, buffer: Tensor, like: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Views of packed rows by offset: one tensor `(S, M, heads, groups, ...)` for each that was packed."""
        found = {offset: [buffer] * len(like) for offset in self}
        end = 0
        # Tensors of a wide dtype first, so that every view is aligned.
        for i, x in sorted(enumerate(like), key=lambda one: -one[1].element_size()):
            begin, end = end, end + self.rows * (x.shape[2:].numel() // self.kv_heads) * x.element_size()
            values, at = buffer[begin:end].view(x.dtype), 0
            for offset, rows in self.items():
                shape = torch.Size((*rows.shape, x.shape[2] // self.kv_heads, *x.shape[3:]))
                found[offset][i] = values[at : at + shape.numel()].view(shape)
                at += shape.numel()
        return found

    def views(self, tensors: Sequence[Tensor], first: int) -> dict[int, list[Tensor]]:
        """These rows of tensors `(B, L, heads, ...)`, whose token 0 is at position `first`, by offset."""
        return {offset: [rows.view(x, first) for x in tensors] for offset, rows in self.items()}
