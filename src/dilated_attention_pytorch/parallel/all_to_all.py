"""Dilated all-to-all: a segment's ranks swap rows for heads, each attends to all rows of its heads, and they swap back.

Forward, the grid rows of q, k and v go to the ranks that compute their heads, and the rows of out and lse come back:
`4u(R - 1)/R` bytes and the lse arrive. Backward, q, k, v, do, the merged lse and delta go, and dq, dk, dv come back.
The ranks must divide the key/value heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.spec import Call, DilatedSpec
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.parallel.blocks import (
    Block,
    Exchange,
    Piece,
    Rows,
    Tensors,
    block_backward,
    block_forward,
)
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment

_ROWS, _SUMS, _RESULT, _LSE = range(4)  # steps of an exchange, for tags


@dataclass(frozen=True)
class _Swap:
    number: int
    away: dict[int, Block]  # this rank's rows of the heads that each rank computes
    here: dict[int, Block]  # each rank's rows of the heads that this rank computes


@dataclass
class _Moving:
    """Packed rows by rank: of this rank for the others, and of the others for this one."""

    posted: Posted
    sent: list[Tensor]
    buffers: list[list[dict[int, Tensor]]]  # by swap, then by what is packed together

    def settle(self, x: Tensors) -> list[list[dict[int, Tensor]]]:
        """The rows that came; the buffers of those that were sent go back."""
        self.posted.wait()
        x.take.give_back(*self.sent)
        self.sent.clear()
        return self.buffers


class AllToAll(Exchange):
    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: RankGroup) -> None:
        super().__init__(rows, segments, ranks)
        wire, me = rows.wire, ranks.rank
        self.swaps = [
            _Swap(
                number,
                {rank: Block(wire, segment, me, wire.head_share(segment, rank)) for rank in segment.ranks},
                {rank: Block(wire, segment, rank, wire.head_share(segment, me)) for rank in segment.ranks},
            )
            for number, segment in segments
        ]
        self.scale = rows.call.softmax_scale(wire.head_dim)

    def begin_forward(self, x: Tensors) -> _Moving:
        return self._send_rows([(x.q, x.k, x.v)], "forward", x)

    def end_forward(self, begun: _Moving, x: Tensors) -> None:
        moved = begun.settle(x)
        D, groups = self.rows.wire.head_dim, self.rows.wire.groups
        results = []
        for swap, (packed,) in zip(self.swaps, moved):
            parts = {r: b.unpack(packed[r], ((D,),) * 3, (groups, 1, 1)) for r, b in swap.here.items()}
            outs = {r: b.buffer(((D,),), (groups,), x.q, x.take) for r, b in swap.here.items()}
            lses = {r: b.buffer(((),), (groups,), x.lse, x.take) for r, b in swap.here.items()}
            for offset, piece, holders in _pieces(swap):
                q, k, v = (torch.cat([parts[r][offset][i] for r in holders], 1) for i in range(3))
                for whole, buffers, end in zip(self._attend(x, piece, q, k, v), (outs, lses), ((D,), ())):
                    _write([whole], swap, holders, offset, buffers, (end,), (groups,))
            results.append((outs, lses))
            x.take.give_back(*packed.values())
        back = self._send_back(results, "forward", x)
        for swap, (outs, lses) in zip(self.swaps, back):
            for rank, block in swap.away.items():
                out = block.unpack(outs[rank], ((D,),), (groups,))
                lse = block.unpack(lses[rank], ((),), (groups,))
                for offset, piece in block.items():
                    so_far = [piece.view(y, self.rows.first, groups=groups) for y in (x.out, x.lse)]
                    merge_(so_far[0], so_far[1], out[offset][0].to(x.out.dtype), lse[offset][0])
            x.take.give_back(*outs.values(), *lses.values())

    def begin_backward(self, x: Tensors) -> _Moving:
        return self._send_rows([(x.q, x.k, x.v, x.do), (x.lse, x.delta)], "backward", x)

    def end_backward(self, begun: _Moving, x: Tensors) -> None:
        moved = begun.settle(x)
        D, groups = self.rows.wire.head_dim, self.rows.wire.groups
        kinds = ((D,),) * 3, (groups, 1, 1)
        results = []
        for swap, (packed, sums) in zip(self.swaps, moved):
            parts = {r: b.unpack(packed[r], ((D,),) * 4, (groups, 1, 1, groups)) for r, b in swap.here.items()}
            stats = {r: b.unpack(sums[r], ((),) * 2, (groups,) * 2) for r, b in swap.here.items()}
            grads = {r: b.buffer(*kinds, x.dq, x.take) for r, b in swap.here.items()}
            for offset, piece, holders in _pieces(swap):
                q, k, v, do = (torch.cat([parts[r][offset][i] for r in holders], 1) for i in range(4))
                lse, delta = (torch.cat([stats[r][offset][i] for r in holders], 1) for i in range(2))
                found = self._gradients(x, piece, do, q, k, v, delta, lse)
                _write(found, swap, holders, offset, grads, *kinds)
            results.append((grads,))
            x.take.give_back(*packed.values(), *sums.values())
        back = self._send_back(results, "backward", x)
        for swap, (grads,) in zip(self.swaps, back):
            for rank, block in swap.away.items():
                for offset, views in block.unpack(grads[rank], *kinds).items():
                    for total, view, g in zip((x.dq, x.dk, x.dv), views, kinds[1]):
                        block[offset].view(total, self.rows.first, groups=g).add_(view)
            x.take.give_back(*grads.values())

    def _attend(self, x: Tensors, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Dense attention among all rows of a piece: as a segment of rate 1, or with dropout by its positions."""
        groups = self.rows.wire.groups
        if x.seed is None:
            out, lse = op.forward(_flat(q, groups), k, v, None, None, self._dense(q), x.backend, x.resources)
            return out.view(q.shape), lse.reshape(q.shape[:-1])
        out, lse = q.new_empty(q.shape, dtype=x.lse.dtype), q.new_empty(q.shape[:-1], dtype=x.lse.dtype)
        for g in range(groups):
            keep = self.rows.keep(x.seed, piece, [piece.grid], g, x.lse.dtype)
            causal = self.rows.call.is_causal
            with x.resources.workspaces() as take:
                partial = block_forward(_of_group(q, g, groups), k, v, self.scale, causal, keep, take)
                for total, found in zip((out, lse), partial):
                    _of_group(total, g, groups).copy_(found)
        return out, lse

    def _gradients(
        self, x: Tensors, piece: Piece, do: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor
    ) -> list[Tensor]:
        groups = self.rows.wire.groups
        if x.seed is None:
            # An engine subtracts the lse's gradient from sum(do * out): with no out, it is given delta that way.
            flat_do, flat_q, minus_delta, flat_lse = (_flat(y, groups) for y in (do, q, -delta, lse))
            nothing = torch.zeros_like(flat_do)
            rest = (None, None, self._dense(q), x.backend, x.resources)
            dq, dk, dv = op.backward(flat_do, minus_delta, flat_q, k, v, nothing, flat_lse, *rest)
            return [dq.view(q.shape), dk, dv]
        grads = [torch.zeros(y.shape, dtype=x.dq.dtype, device=y.device) for y in (q, k, v)]
        for g in range(groups):
            keep = self.rows.keep(x.seed, piece, [piece.grid], g, x.lse.dtype)
            part_do, part_q, part_delta, part_lse = (_of_group(y, g, groups) for y in (do, q, delta, lse))
            causal = self.rows.call.is_causal
            with x.resources.workspaces() as take:
                found = block_backward(
                    part_do, part_q, k, v, None, part_delta, part_lse, self.scale, causal, keep, take
                )
                for total, grad in zip((_of_group(grads[0], g, groups), *grads[1:]), found):
                    total += grad
        return grads

    def _dense(self, q: Tensor) -> Call:
        call = self.rows.call
        return _dense_problem(q.shape[1], call.is_causal, self.scale, call.allow_tf32)

    def _send_rows(self, packs: list[tuple[Tensor, ...]], stage: str, x: Tensors) -> _Moving:
        """Each group of tensors of one dtype as one message to each rank of a segment; what is for itself stays."""
        wire, me, first = self.rows.wire, self.ranks.rank, self.rows.first
        sends, receives, moved = [], [], []
        for swap in self.swaps:
            buffers = []
            for step, tensors in zip((_ROWS, _SUMS), packs):
                groups = [y.shape[2] // len(wire.offsets) for y in tensors]
                trailing = [tuple(y.shape[3:]) for y in tensors]
                tag = self.tag(swap.number, step)
                mine = {}
                for rank, block in swap.away.items():
                    packed = block.pack(tensors, first, groups, x.take)
                    if rank == me:
                        mine[rank] = packed
                    else:
                        sends.append(Mail(rank, packed, tag))
                for rank, block in swap.here.items():
                    if rank != me:
                        mine[rank] = block.buffer(trailing, groups, tensors[0], x.take)
                        receives.append(Mail(rank, mine[rank], tag))
                buffers.append(mine)
            moved.append(buffers)
        return _Moving(self.post(sends, receives, stage, x), [mail.buffer for mail in sends], moved)

    def _send_back(
        self, results: Sequence[tuple[dict[int, Tensor], ...]], stage: str, x: Tensors
    ) -> list[list[dict[int, Tensor]]]:
        """Results for each rank's rows go to it; what came of this rank's rows, by the rank that computed it."""
        me = self.ranks.rank
        sends, receives, back = [], [], []
        for swap, kinds in zip(self.swaps, results):
            mine = []
            for step, buffers in zip((_RESULT, _LSE), kinds):
                tag = self.tag(swap.number, step)
                got = {me: buffers[me]}
                for rank, block in swap.away.items():
                    if rank != me:
                        sends.append(Mail(rank, buffers[rank], tag))
                        size = (block.rows * self._row(stage, step),)
                        got[rank] = x.take(size, dtype=buffers[me].dtype, device=buffers[me].device)
                        receives.append(Mail(rank, got[rank], tag))
                mine.append(got)
            back.append(mine)
        self.post(sends, receives, stage, x).wait()
        x.take.give_back(*(mail.buffer for mail in sends))
        return back

    def _row(self, stage: str, step: int) -> int:
        """Elements of a result per row and key/value head."""
        groups, D = self.rows.wire.groups, self.rows.wire.head_dim
        if stage == "backward":
            return (groups + 2) * D
        return groups * D if step == _RESULT else groups


def _pieces(swap: _Swap) -> Iterator[tuple[int, Piece, list[int]]]:
    """Each offset of the heads computed here, the segment's whole piece of it, and the ranks that hold rows of it."""
    offsets = {offset for block in swap.here.values() for offset in block}
    for offset in sorted(offsets):
        holders = [rank for rank, block in swap.here.items() if offset in block]
        first, last = (swap.here[rank][offset] for rank in (holders[0], holders[-1]))
        yield offset, Piece(first.rows, range(first.grid.start, last.grid.stop, first.grid.step), first.heads), holders


def _of_group(x: Tensor, group: int, groups: int) -> Tensor:
    """One query head of each key/value head, of `(S, M, heads, [groups,] ...)`."""
    return x if groups == 1 else x[:, :, :, group]


def _flat(x: Tensor, groups: int) -> Tensor:
    """`(S, M, heads, groups, ...)` as `(S, M, query heads, ...)`."""
    return x if groups == 1 else x.flatten(2, 3)


# Remembered, because engines know a kind of call by its problem.
@functools.lru_cache(maxsize=1024)
def _dense_problem(rows: int, is_causal: bool, scale: float, allow_tf32: bool | None) -> Call:
    spec = DilatedSpec.of([rows], [1])
    return Call(spec=spec, is_causal=is_causal, scale=scale, allow_tf32=allow_tf32, partial=True)


def _write(
    results: Sequence[Tensor],
    swap: _Swap,
    holders: list[int],
    offset: int,
    buffers: dict[int, Tensor],
    trailing: Sequence[tuple[int, ...]],
    groups: Sequence[int],
) -> None:
    """Results of all rows into each rank's packed buffer."""
    lengths = [len(swap.here[rank][offset].grid) for rank in holders]
    split = [result.split(lengths, 1) for result in results]
    for at, rank in enumerate(holders):
        for view, parts in zip(swap.here[rank].unpack(buffers[rank], trailing, groups)[offset], split):
            view.copy_(parts[at])
