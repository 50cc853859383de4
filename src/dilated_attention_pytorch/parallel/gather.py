"""Gather: every rank of a segment fetches the grid rows of K and V that its queries see, and attends to them at once.

Forward, each rank sends its packed rows to the ranks that see them: `2(R - 1)u` bytes arrive. Backward, the rows come
again rather than being kept, and each rank sends the gradients that it finds back to the rows' owners, who add them up.
A rank that holds several chunks of a segment attends from each of them, also to its own other chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.parallel.exchange import BackwardPass, BlockOf, Exchange, Pass
from dilated_attention_pytorch.parallel.group import Mail, Posted
from dilated_attention_pytorch.parallel.sharding import SharedSegment
from dilated_attention_pytorch.parallel.wire import GridRows, HeldRows

Buffers = dict[int, Tensor]
"""Packed rows by the chunk that holds them."""
Parts = dict[int, dict[int, list[Tensor]]]
"""Unpacked rows by chunk and offset."""


class Round(NamedTuple):
    """Messages of one rank that are under way together: chunks, and the ranks that they go to or come from.

    Backward, the gradients of the chunks that came go to their owners, and those of the rank's own chunks return.
    """

    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]
    returns: list[tuple[int, int]]


def gather_rounds(segment: SharedSegment, rank: int, is_causal: bool) -> list[Round]:
    """All chunks in one round, from their owners."""
    sends = [(chunk, to) for chunk in segment.chunks_of(rank) for to in segment.viewers(chunk, is_causal)]
    receives = [(chunk, segment.shards.rank_of(chunk)) for chunk in segment.fetched_by(rank, is_causal)]
    return [Round(sends, receives, returns=sends)]


@dataclass(frozen=True)
class Share:
    """A shared segment as one rank sees it, by chunk."""

    number: int
    segment: SharedSegment
    own: dict[int, HeldRows]
    seen: dict[int, HeldRows]  # of other ranks
    rounds: list[Round]

    def round(self, number: int) -> Round:
        return self.rounds[number] if number < len(self.rounds) else Round([], [], [])


class Seen(NamedTuple):
    """Keys and values `(S, M, heads, 1, D)` that queries of one chunk see, at one offset."""

    chunk: int
    offset: int
    rows: GridRows  # of the queries
    k: Tensor
    v: Tensor
    holders: dict[int, int]  # how many of the keys each chunk of the segment holds, in order
    block: BlockOf
    lead: int = 0  # rows of the block before the first query


@dataclass
class Moving:
    """Rows under way, by segment: what this rank sends, until it has left, and what it receives."""

    posted: Posted
    held: list[Buffers]
    received: list[Buffers]

    def settle(self, x: Pass) -> list[Buffers]:
        """The rows that came; the buffers of those that left go back."""
        self.posted.wait()
        for buffers in self.held:
            x.take.give_back(*buffers.values())
            buffers.clear()
        return self.received


class Gather(Exchange):
    plan_rounds: Callable[..., list[Round]] = staticmethod(gather_rounds)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        wire, rank = self.wire, self.ranks.rank
        self.shares = []
        for number, segment in self.segments:
            rounds = self.plan_rounds(segment, rank, wire.is_causal)
            own = {chunk: HeldRows(wire, segment, chunk) for chunk in segment.chunks_of(rank)}
            seen = {chunk: HeldRows(wire, segment, chunk) for one in rounds for chunk, _ in one.receives}
            self.shares.append(Share(number, segment, own, seen, rounds))
        self.rounds = max(len(share.rounds) for share in self.shares)

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        """What travels forward, and again before backward."""
        return x.k, x.v

    def begin(self, x: Pass) -> Moving:
        held = []
        for share in self.shares:
            leaving = dict.fromkeys(chunk for chunk, _ in share.round(0).sends)
            held.append({chunk: share.own[chunk].pack(self.sent(x), self.first[chunk], x.take) for chunk in leaving})
        return self._post(0, held, x)

    def _post(self, number: int, held: list[Buffers], x: Pass) -> Moving:
        """Start the messages of one round, which sends rows that this rank holds."""
        sends, receives, received = [], [], []
        for share, mine in zip(self.shares, held):
            one = share.round(number)
            buffers = {chunk: share.seen[chunk].buffer(self.sent(x), x.take) for chunk, _ in one.receives}
            sends += [Mail(to, mine[chunk], self.tag(share.number, chunk)) for chunk, to in one.sends]
            receives += [Mail(rank, buffers[chunk], self.tag(share.number, chunk)) for chunk, rank in one.receives]
            received.append(buffers)
        return Moving(self.post(sends, receives, x), held, received)

    def _arrivals(self, moving: Moving, x: Pass) -> Iterator[tuple[int, list[Buffers]]]:
        """The rows that arrive in each round, by segment; those of the next round are under way."""
        for number in range(self.rounds):
            received = moving.settle(x)
            moving = self._post(number + 1, received, x)
            yield number, received
        moving.settle(x)

    def end_forward(self, begun: Moving, x: Pass, out: Tensor, lse: Tensor) -> None:
        for _, received in self._arrivals(begun, x):
            for share, buffers in zip(self.shares, received):
                self._merge(share, buffers, x, out, lse)

    def _merge(self, share: Share, buffers: Buffers, x: Pass, out: Tensor, lse: Tensor) -> None:
        """Merge what the rank's rows of a segment see; no view of the rows that came outlives this."""
        for seen in self.seen(share, buffers, x):
            q, own_out, own_lse = (seen.rows.view(y, self.first[seen.chunk]) for y in (x.q, out, lse))
            self.attend(x, (q, seen.k, seen.v), seen.block, own_out, own_lse, seen.lead)

    def end_backward(self, begun: Moving, x: BackwardPass, grads: Sequence[Tensor]) -> None:
        dq, *own = grads
        returning: list[tuple[HeldRows, int, Tensor]] = []
        sent: list[Mail] = []
        posted = self.post((), (), x)

        def settle() -> None:
            posted.wait()
            x.take.give_back(*(mail.buffer for mail in sent))
            for held, chunk, buffer in returning:
                held.add_to(own, buffer, self.first[chunk])
                x.take.give_back(buffer)

        for number, received in self._arrivals(begun, x):
            found, back = [], []
            for share, buffers in zip(self.shares, received):
                found += self._found(share, buffers, x, dq, own)
                back += [(share, chunk, rank) for chunk, rank in share.round(number).returns]
            settle()
            sent = found
            returning = [(share.own[chunk], chunk, share.own[chunk].buffer(own, x.take)) for share, chunk, _ in back]
            receives = [
                Mail(rank, buffer, self.tag(share.number, chunk))
                for (share, chunk, rank), (_, _, buffer) in zip(back, returning)
            ]
            posted = self.post(sent, receives, x)
        settle()

    def _found(self, share: Share, buffers: Buffers, x: BackwardPass, dq: Tensor, own: Sequence[Tensor]) -> list[Mail]:
        """The gradients of the rows that came, to be sent to their owners; those of the rank's own rows are added."""
        packed = {chunk: share.seen[chunk].buffer(own, x.take).zero_() for chunk in buffers}
        into = {chunk: share.seen[chunk].unpack(buffer, own) for chunk, buffer in packed.items()}
        for seen in self.seen(share, buffers, x):
            q, do, delta, lse, out, own_dq = (
                seen.rows.view(y, self.first[seen.chunk]) for y in (x.q, x.do, x.delta, x.lse, x.out, dq)
            )
            inputs = (q, seen.k, seen.v, do, delta, lse, out)
            found = self.gradients(x, inputs, seen.block, own_dq, seen.lead)
            for holder, *parts in zip(seen.holders, *(grad.split(list(seen.holders.values()), 1) for grad in found)):
                if holder in into:
                    totals = into[holder][seen.offset]
                else:
                    totals = [share.own[holder][seen.offset].view(y, self.first[holder]) for y in own]
                for total, part in zip(totals, parts):
                    total += part
            x.take.give_back(*found)
        rank_of = self.wire.shards.rank_of
        return [Mail(rank_of(chunk), buffer, self.tag(share.number, chunk)) for chunk, buffer in packed.items()]

    def seen(self, share: Share, buffers: Buffers, x: Pass) -> Iterator[Seen]:
        """What the rank's rows of a segment see of the rows that came, by chunk and offset."""
        parts = self.parts(share, buffers, x, with_own=len(share.own) > 1)
        held = share.own | share.seen
        for chunk, own in share.own.items():
            others = [other for other in share.segment.sources(chunk, self.wire.is_causal) if other in parts]
            for offset, rows in own.items():
                grids = {other: held[other][offset].grid for other in others if offset in parts[other]}
                if grids:
                    k, v = (joined([parts[holder][offset][i] for holder in grids]) for i in range(2))
                    holders = {holder: len(grid) for holder, grid in grids.items()}
                    yield Seen(chunk, offset, rows, k, v, holders, self.dense(x, rows, [*grids.values()]))

    def parts(self, share: Share, buffers: Buffers, x: Pass, *, with_own: bool) -> Parts:
        """The rows that came, and the rank's own."""
        like = self.sent(x)
        found = {chunk: share.seen[chunk].unpack(buffer, like) for chunk, buffer in buffers.items()}
        for chunk, held in share.own.items() if with_own else ():
            first = self.first[chunk]
            found[chunk] = {offset: [rows.view(y, first) for y in like] for offset, rows in held.items()}
        return found


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
