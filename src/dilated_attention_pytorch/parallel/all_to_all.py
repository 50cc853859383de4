"""Dilated all-to-all: a segment's ranks swap rows for heads, each attends to all rows of its heads, and they swap back.

Forward, the grid rows of q, k and v go to the ranks that compute their heads, and the rows of out and lse come back:
`4u(R - 1)/R` bytes and the lse arrive. Backward, q, k, v, do, the merged lse and delta go, and dq, dk, dv come back.
The ranks must divide the key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

Buffers = list[dict[int, Tensor]]
"""Packed rows by swap and by rank."""


class _Swap(NamedTuple):
    """A shared segment, by rank: rows of one rank, of the heads that another rank computes."""

    number: int
    away: dict[int, HeldRows]  # this rank's rows of the heads that each rank computes
    here: dict[int, HeldRows]  # each rank's rows of the heads that this rank computes


@dataclass
class _Moving:
    posted: Posted
    sent: list[Tensor]
    received: Buffers

    def settle(self, x: Pass) -> Buffers:
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
        first, sent = self.first[self.ranks.rank], _sent(x)
        packed = [{rank: held.pack(sent, first, x.take) for rank, held in swap.away.items()} for swap in self.swaps]
        return self._move(packed, [swap.here for swap in self.swaps], sent, 0, x)

    def _move(
        self, mine: Buffers, theirs: list[dict[int, HeldRows]], like: Sequence[Tensor], step: int, x: Pass
    ) -> _Moving:
        """Send each buffer to its rank and receive `theirs`; what is for this rank itself stays."""
        me = self.ranks.rank
        sends, receives, received = [], [], []
        for swap, packed, wanted in zip(self.swaps, mine, theirs):
            tag = self.tag(swap.number, step)
            buffers = {rank: held.buffer(like, x.take) for rank, held in wanted.items() if rank != me}
            sends += [Mail(rank, buffer, tag) for rank, buffer in packed.items() if rank != me]
            receives += [Mail(rank, buffer, tag) for rank, buffer in buffers.items()]
            received.append({**buffers, me: packed[me]})
        return _Moving(self.post(sends, receives, x), [mail.buffer for mail in sends], received)

    def _results(
        self, begun: _Moving, like: Sequence[Tensor], x: Pass, compute: Callable[..., Sequence[Tensor]]
    ) -> Iterator[tuple[HeldRows, Tensor]]:
        """`compute(x, rows, *tensors)` of the rows of all ranks; then the packed results of this rank's own rows.

        Results are like the tensors of `like`.
        """
        results = []
        for swap, packed in zip(self.swaps, begun.settle(x)):
            made = {rank: held.buffer(like, x.take) for rank, held in swap.here.items()}
            came, into = (
                {rank: held.unpack(buffers[rank], tensors) for rank, held in swap.here.items()}
                for buffers, tensors in ((packed, _sent(x)), (made, like))
            )
            for offset in sorted({offset for held in swap.here.values() for offset in held}):
                held = {rank: rows[offset] for rank, rows in swap.here.items() if offset in rows}
                (first, *_), (*_, last) = held.values(), held.values()
                rows = replace(first, grid=range(first.grid.start, last.grid.stop, first.grid.step))
                whole = [torch.cat(column, 1) for column in zip(*(came[rank][offset] for rank in held))]
                for i, result in enumerate(compute(x, rows, *whole)):
                    for rank, part in zip(held, result.split([len(one.grid) for one in held.values()], 1)):
                        into[rank][offset][i].copy_(part)
            x.take.give_back(*packed.values())
            results.append(made)
        back = self._move(results, [swap.away for swap in self.swaps], like, 1, x)
        for swap, packed in zip(self.swaps, back.settle(x)):
            yield from ((held, packed[rank]) for rank, held in swap.away.items())
            x.take.give_back(*packed.values())

    def end_forward(self, begun: _Moving, x: Pass, out: Tensor, lse: Tensor) -> None:
        like, first = (x.q, lse), self.first[self.ranks.rank]
        for held, packed in self._results(begun, like, x, self._attend):
            for offset, (own_out, own_lse) in held.unpack(packed, like).items():
                rows = held[offset]
                merge_(rows.view(out, first), rows.view(lse, first), own_out.to(out.dtype), own_lse)

    def end_backward(self, begun: _Moving, x: BackwardPass, grads: Sequence[Tensor]) -> None:
        for held, packed in self._results(begun, grads, x, self._gradients):
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
        """The call of a segment of rate 1."""
        call, rows = self.call, q.shape[1]
        settings: dict[str, Any] = {"is_causal": call.is_causal, "allow_tf32": call.allow_tf32, "backend": call.backend}
        key = ("dense", rows, self.scale, *settings.values())
        return plans.remember("call", key, lambda: Call.of([rows], [1], scale=self.scale, partial=True, **settings))


def _sent(x: Pass) -> tuple[Tensor, ...]:
    """What goes to the ranks that compute."""
    return (x.q, x.k, x.v, x.do, x.lse, x.delta) if isinstance(x, BackwardPass) else (x.q, x.k, x.v)
