"""Dilated all-to-all: a segment's ranks swap rows for heads, each attends to all rows of its heads, and they swap back.

Forward, the grid rows of q, k and v go to the ranks that compute their heads, and the rows of out and lse come back:
`4u(R - 1)/R` bytes and the lse arrive. Backward, q, k, v, do, the merged lse and delta go, and dq, dk, dv come back.
The ranks must divide the key/value heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.call import Call, Inputs, Saved
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.kernels.engine import lse_dtype
from dilated_attention_pytorch.parallel.exchange import BackwardPass, Exchange, Pass
from dilated_attention_pytorch.parallel.group import Mail, Posted
from dilated_attention_pytorch.parallel.wire import GridRows, HeldRows

Parcels = list[list[dict[int, Tensor]]]
"""Packed rows by swap, by parcel (tensors of one dtype are packed together), and by rank."""


@dataclass(frozen=True)
class _Swap:
    """A shared segment, by rank: rows of one rank, of the heads that another rank computes."""

    number: int
    away: dict[int, HeldRows]  # this rank's rows of the heads that each rank computes
    here: dict[int, HeldRows]  # each rank's rows of the heads that this rank computes

    def joined(self, packed: Sequence[dict[int, Tensor]], like: Sequence[Sequence[Tensor]]) -> Iterator[_Joined]:
        """The rows of all ranks, by offset of the heads that are computed here."""
        parts = {
            rank: [held.unpack(parcel[rank], tensors) for parcel, tensors in zip(packed, like)]
            for rank, held in self.here.items()
        }
        for offset in sorted({offset for held in self.here.values() for offset in held}):
            holders = [rank for rank, held in self.here.items() if offset in held]
            first, *_, last = (self.here[rank][offset] for rank in (holders[0], *holders))
            grid = range(first.grid.start, last.grid.stop, first.grid.step)
            rows = GridRows(first.rows, grid, first.heads, first.kv_heads)
            columns = zip(*([x for parcel in parts[rank] for x in parcel[offset]] for rank in holders))
            lengths = {rank: len(self.here[rank][offset].grid) for rank in holders}
            yield _Joined(offset, rows, lengths, [torch.cat(column, 1) for column in columns])


@dataclass(frozen=True)
class _Joined:
    """All rows of a segment at one offset, `(S, M, heads, groups, ...)`, and how many of them each rank holds."""

    offset: int
    rows: GridRows
    lengths: dict[int, int]
    tensors: list[Tensor]

    def split(self, result: Tensor, views: dict[int, dict[int, list[Tensor]]], column: int) -> None:
        """Write a result of all rows into each rank's packed rows."""
        for rank, part in zip(self.lengths, result.split(list(self.lengths.values()), 1)):
            views[rank][self.offset][column].copy_(part)


@dataclass
class _Moving:
    posted: Posted
    sent: list[Tensor]
    received: Parcels

    def settle(self, x: Pass) -> Parcels:
        """What came; the buffers of what was sent go back."""
        self.posted.wait()
        x.take.give_back(*self.sent)
        self.sent.clear()
        return self.received


class AllToAll(Exchange):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        wire, me = self.wire, self.ranks.rank
        self.swaps = [
            _Swap(
                number,
                {rank: HeldRows(wire, segment, me, wire.head_share(segment, rank)) for rank in segment.ranks},
                {rank: HeldRows(wire, segment, rank, wire.head_share(segment, me)) for rank in segment.ranks},
            )
            for number, segment in self.segments
        ]

    def begin(self, x: Pass) -> _Moving:
        first, parcels = self.first[self.ranks.rank], _sent(x)
        mine = [
            [{rank: held.pack(tensors, first, x.take) for rank, held in swap.away.items()} for tensors in parcels]
            for swap in self.swaps
        ]
        return self._move(mine, [swap.here for swap in self.swaps], parcels, 0, x)

    def _move(
        self, mine: Parcels, blocks: list[dict[int, HeldRows]], like: Sequence[Sequence[Tensor]], step: int, x: Pass
    ) -> _Moving:
        """Send each parcel to its rank and receive `blocks` like it; what is for this rank itself stays."""
        me = self.ranks.rank
        sends, receives, received = [], [], []
        for swap, parcels, theirs in zip(self.swaps, mine, blocks):
            came = []
            for number, (parcel, tensors) in enumerate(zip(parcels, like)):
                tag = self.tag(swap.number, step + number)
                buffers = {rank: held.buffer(tensors, x.take) for rank, held in theirs.items() if rank != me}
                sends += [Mail(rank, buffer, tag) for rank, buffer in parcel.items() if rank != me]
                receives += [Mail(rank, buffer, tag) for rank, buffer in buffers.items()]
                came.append({**buffers, me: parcel[me]})
            received.append(came)
        return _Moving(self.post(sends, receives, x), [mail.buffer for mail in sends], received)

    def _return(
        self, results: Parcels, like: Sequence[Sequence[Tensor]], x: Pass
    ) -> Iterator[tuple[HeldRows, list[Tensor]]]:
        """Send results to the ranks whose rows they are of; what came of this rank's rows, block by block."""
        moving = self._move(results, [swap.away for swap in self.swaps], like, len(_sent(x)), x)
        for swap, parcels in zip(self.swaps, moving.settle(x)):
            for rank, held in swap.away.items():
                yield held, [parcel[rank] for parcel in parcels]
            x.take.give_back(*(buffer for parcel in parcels for buffer in parcel.values()))

    def _computed(self, begun: _Moving, like: Sequence[Sequence[Tensor]], x: Pass, compute: Any) -> Parcels:
        """Results of `compute(rows, tensors)` for the rows of all ranks, packed for each of them."""
        results = []
        for swap, packed in zip(self.swaps, begun.settle(x)):
            made = [{rank: held.buffer(tensors, x.take) for rank, held in swap.here.items()} for tensors in like]
            views = [
                {rank: held.unpack(parcel[rank], tensors) for rank, held in swap.here.items()}
                for parcel, tensors in zip(made, like)
            ]
            for joined in swap.joined(packed, _sent(x)):
                found = iter(compute(joined.rows, *joined.tensors))
                for tensors, of_parcel in zip(like, views):
                    for column in range(len(tensors)):
                        joined.split(next(found), of_parcel, column)
            x.take.give_back(*(buffer for parcel in packed for buffer in parcel.values()))
            results.append(made)
        return results

    def end_forward(self, begun: _Moving, x: Pass, out: Tensor, lse: Tensor) -> None:
        like, first = ((x.q,), (lse,)), self.first[self.ranks.rank]
        results = self._computed(begun, like, x, functools.partial(self._attend, x))
        for held, packed in self._return(results, like, x):
            parts = [held.unpack(buffer, tensors) for buffer, tensors in zip(packed, like)]
            for offset, rows in held.items():
                (found_out,), (found_lse,) = (part[offset] for part in parts)
                merge_(rows.view(out, first), rows.view(lse, first), found_out.to(out.dtype), found_lse)

    def end_backward(self, begun: _Moving, x: BackwardPass, grads: Sequence[Tensor]) -> None:
        results = self._computed(begun, (grads,), x, functools.partial(self._gradients, x))
        for held, (packed,) in self._return(results, (grads,), x):
            held.add_to(grads, packed, self.first[self.ranks.rank])

    def _attend(self, x: Pass, rows: GridRows, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Dense attention among all rows of a grid."""
        if x.seed is not None:  # dropout depends on the positions
            out = torch.zeros(q.shape, dtype=lse_dtype(q.dtype), device=q.device)
            lse = out.new_full(q.shape[:-1], -torch.inf)
            self.attend(x, (q, k, v), self.dense(x, rows, [rows.grid], self.call.is_causal), out, lse)
            return out, lse
        out, lse = op.partial(self._dense_call(q), Inputs(q.flatten(2, 3), k.squeeze(3), v.squeeze(3)), x.resources)
        return out.view(q.shape), lse.reshape(q.shape[:-1])

    def _gradients(
        self, x: BackwardPass, rows: GridRows, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, ...]:
        if x.seed is not None:
            dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
            block = self.dense(x, rows, [rows.grid], self.call.is_causal)
            return dq, *self.gradients(x, (q, k, v, do, delta, lse), block, dq)
        # An engine subtracts the lse's gradient from sum(do * out): with no out, it is given delta that way.
        flat_do, flat_q, minus_delta, flat_lse = (y.flatten(2, 3) for y in (do, q, -delta, lse))
        saved = Saved(Inputs(flat_q, k.squeeze(3), v.squeeze(3)), torch.zeros_like(flat_do), flat_lse)
        dq, dk, dv = op.gradients(self._dense_call(q), saved, flat_do, minus_delta, x.resources)
        return dq.view(q.shape), dk.unsqueeze(3), dv.unsqueeze(3)

    def _dense_call(self, q: Tensor) -> Call:
        return _dense_call(q.shape[1], self.call.is_causal, self.scale, self.call.allow_tf32, self.call.backend)


def _sent(x: Pass) -> list[tuple[Tensor, ...]]:
    """What goes to the ranks that compute, by dtype."""
    if isinstance(x, BackwardPass):
        return [(x.q, x.k, x.v, x.do), (x.lse, x.delta)]
    return [(x.q, x.k, x.v)]


def _dense_call(rows: int, is_causal: bool, scale: float, allow_tf32: bool | None, backend: str) -> Call:
    settings: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "allow_tf32": allow_tf32,
        "backend": backend,
        "partial": True,
    }
    key = ("dense", rows, *settings.values())
    return plans.remember("call", key, lambda: Call.of([rows], [1], **settings))
