"""Grid rows of a shared segment: cut out of a shard, packed for the wire, and attended to, forward and backward.

A *block* is what one rank holds of a segment. Heads with the same offset have the same rows, so a block is one piece of
rows and heads an offset; the rows of several ranks at one offset, one after another, are that offset's rows in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.memory_pool import Loans, Take
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.pattern import heads_by_offset
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.core.spec import Call
from dilated_attention_pytorch.kernels import dense, vendor
from dilated_attention_pytorch.parallel.costs import Wire
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment


@dataclass(frozen=True)
class Piece:
    """The grid positions that heads of one offset have within a block; `heads` are key/value heads."""

    rows: range
    grid: range
    heads: range

    def view(self, x: Tensor, first: int, group: int | None = None, groups: int = 1) -> Tensor:
        """The piece of `(B, L, H, ...)`, whose token 0 is at position `first`, as `(S, M, heads, ...)`.

        With a `group`, `x` has query heads, and the piece is that of each key/value head's `group`-th one; without, it
        is that of all of them, `(S, M, heads, groups, ...)`, for `groups` above 1.
        """
        grid = slice(self.grid.start - first, self.grid.stop - first, self.grid.step)
        x = x[self.rows.start : self.rows.stop, grid]
        if group is not None or groups > 1:
            x = x.unflatten(2, (-1, groups))
        x = x[:, :, self.heads.start : self.heads.stop : self.heads.step]
        return x if group is None else x[:, :, :, group]

    @property
    def count(self) -> int:
        return len(self.rows) * len(self.grid) * len(self.heads)

    def shape(self) -> tuple[int, int, int]:
        return len(self.rows), len(self.grid), len(self.heads)


class Block(dict[int, Piece]):
    """A rank's pieces by offset; offsets of which it holds no rows are not there."""

    def __init__(self, wire: Wire, segment: SharedSegment, rank: int, heads: range | None = None) -> None:
        heads = range(len(wire.offsets)) if heads is None else heads
        for offset, found in heads_by_offset(wire.offsets[heads.start : heads.stop]):
            grid = segment.grid(wire.shards, rank, wire.branch.dilation_rate, offset)
            if grid:
                super().__setitem__(offset, Piece(segment.rows, grid, heads[found]))
        self.rows = sum(piece.count for piece in self.values())

    def pack(self, tensors: Sequence[Tensor], first: int, groups: Sequence[int], take: Take) -> Tensor:
        """The block's rows of tensors `(B, L, heads, ...)` as one flat buffer, piece by piece; see `unpack`."""
        trailing = [tuple(x.shape[3:]) for x in tensors]
        buffer = self.buffer(trailing, groups, tensors[0], take)
        for offset, parts in self.unpack(buffer, trailing, groups).items():
            for part, x, g in zip(parts, tensors, groups):
                part.copy_(self[offset].view(x, first, groups=g))
        return buffer

    def unpack(
        self, buffer: Tensor, trailing: Sequence[tuple[int, ...]], groups: Sequence[int]
    ) -> dict[int, list[Tensor]]:
        """Views of a packed buffer: by offset, a `(S, M, heads, [groups,] ...)` tensor for each that was packed."""
        found, at = {}, 0
        for offset, piece in self.items():
            parts = []
            for end, g in zip(trailing, groups):
                shape = (*piece.shape(), *((g,) if g > 1 else ()), *end)
                size = torch.Size(shape).numel()
                parts.append(buffer[at : at + size].view(shape))
                at += size
            found[offset] = parts
        return found

    def buffer(self, trailing: Sequence[tuple[int, ...]], groups: Sequence[int], like: Tensor, take: Take) -> Tensor:
        """A packed buffer from `take`, uninitialised, of the dtype of `like`."""
        return take((self.size(trailing, groups),), dtype=like.dtype, device=like.device)

    def size(self, trailing: Sequence[tuple[int, ...]], groups: Sequence[int]) -> int:
        """The elements of a packed buffer."""
        return self.rows * sum(torch.Size(end).numel() * g for end, g in zip(trailing, groups))


@dataclass
class Tensors:
    """A pass's tensors on a rank's shard. Forward has out and lse to merge into; backward has them merged, and more."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    seed: Tensor | None
    backend: str
    do: Tensor
    through_lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    resources: Resources
    take: Loans  # of buffers for messages and sums, which end with the pass or before it

    @cached_property
    def delta(self) -> Tensor:
        delta = (self.do.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1)
        return delta if self.through_lse is None else delta - self.through_lse


@dataclass(frozen=True)
class Rows:
    """How one branch of a call attends to rows that came over the wire."""

    call: Call
    index: int
    wire: Wire
    first: int  # the position of the shard's first token

    def keep(
        self, seed: Tensor | None, queries: Piece, keys: Sequence[range], group: int, dtype: torch.dtype
    ) -> dense.Keep | None:
        """Dropout's factor between query rows and the keys at some positions, as on a single device."""
        if seed is None:
            return None
        device, call = seed.device, self.call
        i, j = _positions([queries.grid], device), _positions(keys, device)
        rows = _positions([queries.rows], device)[:, None, None, None]
        heads = (_positions([queries.heads], device) * self.wire.groups + group)[:, None, None] + call.head_offset

        def keep(segments: slice, some: Tensor, seen: Tensor) -> Tensor:
            kept = keep_mask(
                seed,
                call.dropout_p,
                rows=rows[segments],
                heads=heads,
                branch=self.index,
                queries=i[some],
                keys=j[seen],
            )
            return kept.to(dtype) / (1.0 - call.dropout_p)

        return keep

    def forward(self, x: Tensors, piece: Piece, k: Tensor, v: Tensor, keys: Sequence[range]) -> None:
        """Merge a piece's own query rows' attention to `(S, M', heads, D)` keys, all visible, into out and lse."""
        for g in range(self.wire.groups):
            q, out, lse = (piece.view(y, self.first, g, self.wire.groups) for y in (x.q, x.out, x.lse))
            keep = self.keep(x.seed, piece, keys, g, lse.dtype)
            with x.resources.workspaces() as take:
                scale = self.call.softmax_scale(q.shape[-1])
                merge_(out, lse, *block_forward(q, k, v, scale, False, keep, take))

    def backward(self, x: Tensors, piece: Piece, k: Tensor, v: Tensor, keys: Sequence[range]) -> tuple[Tensor, Tensor]:
        """Add to the piece's dq, and give its share of the gradients of those keys and values, which `x.take` lent."""
        dk, dv = (x.take(y.shape, dtype=x.lse.dtype, device=y.device).zero_() for y in (k, v))
        for g in range(self.wire.groups):
            q, do, out, lse, delta, dq = (
                piece.view(y, self.first, g, self.wire.groups) for y in (x.q, x.do, x.out, x.lse, x.delta, x.dq)
            )
            keep = self.keep(x.seed, piece, keys, g, lse.dtype)
            merged = out if x.through_lse is None else None
            scale = self.call.softmax_scale(q.shape[-1])
            with x.resources.workspaces() as take:
                grads = block_backward(do, q, k, v, merged, delta, lse, scale, False, keep, take)
                for total, grad in zip((dq, dk, dv), grads):
                    total += grad
        return dk, dv


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, keep: dense.Keep | None, take: Take
) -> tuple[Tensor, Tensor]:
    """The partial `(out, lse)` of dense attention on `(S, M, H, D)` tensors, in float32 or float64.

    It may be a workspace of `take`, as in `block_backward`.
    """
    if keep is None and vendor.fits(q, scale):
        return vendor.forward(q, k, v, scale, is_causal)
    q, k, v = (_working(x, take) for x in (q, k, v))
    if keep is None and dense.flash_fits(q, scale):
        return dense.flash_forward(q, k, v, scale, is_causal)
    return dense.chunked_forward(q, k, v, scale, is_causal, keep, take)


def block_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    delta: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
    keep: dense.Keep | None,
    take: Take,
) -> tuple[Tensor, Tensor, Tensor]:
    """A partial's share of dq, dk, dv, from the merged lse and delta; the merged `out` lets it be flash attention."""
    if keep is None and out is not None and vendor.fits(q, scale):
        return vendor.backward(do, q, k, v, out, lse, scale, is_causal)
    do, q, k, v = (_working(x, take) for x in (do, q, k, v))
    if keep is None and out is not None and dense.flash_fits(q, scale):
        return dense.flash_backward(do, q, k, v, _working(out, take), lse, scale, is_causal)
    return dense.chunked_backward(do, q, k, v, delta, lse, scale, is_causal, keep, take)


def _working(x: Tensor, take: Take) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return x
    return take(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def _positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])


class Exchange:
    """One branch's shared segments under one scheme: `begin_` starts messages, `end_` waits where it needs them.

    Between the two the rank computes what is its own. A buffer goes back to `x.take` only after its messages were
    waited for. `segments` are those that this rank shares, each with a number
    that is the same on all ranks.
    """

    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: RankGroup) -> None:
        self.rows = rows
        self.ranks = ranks
        self.segments = segments

    def tag(self, number: int, step: int = 0) -> int:
        """What marks a message: no two that may be under way between two ranks have the same."""
        steps, branches = 2 * self.ranks.size, len(self.rows.call.spec.branches)
        return (number * steps + step) * branches + self.rows.index

    def post(self, sends: Iterable[Mail], receives: Iterable[Mail], stage: str, x: Tensors) -> Posted:
        return self.ranks.post(sends, receives, (stage, self.rows.index), x.resources.profile)

    def begin_forward(self, x: Tensors) -> Any:
        raise NotImplementedError

    def end_forward(self, begun: Any, x: Tensors) -> None:
        """Merge into `x.out` and `x.lse` what this rank's rows see of the segments."""
        raise NotImplementedError

    def begin_backward(self, x: Tensors) -> Any:
        raise NotImplementedError

    def end_backward(self, begun: Any, x: Tensors) -> None:
        """Add to `x.dq`, `x.dk` and `x.dv`."""
        raise NotImplementedError
