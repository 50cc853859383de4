"""Gather: every rank of a segment fetches the grid rows of K and V that its queries see, and attends to them at once.

Forward, each rank sends its packed rows to the ranks that see them: `2(R - 1)u` bytes arrive. Backward, the rows come
again rather than being kept, and each rank sends the gradients that it finds back to the rows' owners, who add them up.
A rank that holds several pieces of a segment attends from each of them, also to its own other pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.parallel.exchange import BackwardPass, Exchange, Grads, Pass
from dilated_attention_pytorch.parallel.group import Mail, Posted
from dilated_attention_pytorch.parallel.sharding import (
    Shards,
    SharedSegment,
    addressees,
    fetched_pieces,
    held_pieces,
    sources,
)
from dilated_attention_pytorch.parallel.wire import Block, GridRows

Buffers = dict[int, Tensor]
"""Packed rows by the piece that holds them."""
Parts = dict[int, dict[int, list[Tensor]]]
"""Unpacked rows by piece and offset."""


class Round(NamedTuple):
    """Messages of one rank that are under way together: pieces, and the ranks that they go to or come from.

    Backward, the gradients of the pieces that came go to their owners, and those of the rank's own pieces return.
    """

    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]
    returns: list[tuple[int, int]]


def gather_rounds(shards: Shards, segment: SharedSegment, rank: int, is_causal: bool) -> list[Round]:
    """All pieces in one round, from their owners."""
    held = held_pieces(shards, segment, rank)
    sends = [(piece, to) for piece in held for to in addressees(shards, segment, piece, is_causal)]
    fetched = fetched_pieces(shards, segment, rank, is_causal)
    return [Round(sends, [(piece, shards.rank_of(piece)) for piece in fetched], sends)]


@dataclass(frozen=True)
class Share:
    """A shared segment as one rank sees it; blocks by piece."""

    number: int
    segment: SharedSegment
    own: dict[int, Block]
    seen: dict[int, Block]  # of other ranks
    rounds: list[Round]

    def round(self, number: int) -> Round:
        return self.rounds[number] if number < len(self.rounds) else Round([], [], [])


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
        wire, shards, rank = self.wire, self.wire.shards, self.ranks.rank
        self.shares = []
        for number, segment in self.segments:
            rounds = self.plan_rounds(shards, segment, rank, wire.is_causal)
            own = {piece: Block(wire, segment, piece) for piece in held_pieces(shards, segment, rank)}
            seen = {piece: Block(wire, segment, piece) for one in rounds for piece, _ in one.receives}
            self.shares.append(Share(number, segment, own, seen, rounds))
        self.rounds = max(len(share.rounds) for share in self.shares)

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        """What travels forward, and again before backward."""
        return x.k, x.v

    def begin(self, x: Pass) -> Moving:
        held = []
        for share in self.shares:
            leaving = dict.fromkeys(piece for piece, _ in share.round(0).sends)
            held.append({piece: share.own[piece].pack(self.sent(x), self.first[piece], x.take) for piece in leaving})
        return self._post(0, held, x)

    def _post(self, number: int, held: list[Buffers], x: Pass) -> Moving:
        """Start the messages of one round, which sends rows that this rank holds."""
        sends, receives, received = [], [], []
        for share, mine in zip(self.shares, held):
            one = share.round(number)
            buffers = {piece: share.seen[piece].buffer(self.sent(x), x.take) for piece, _ in one.receives}
            sends += [Mail(to, mine[piece], self.tag(share.number, piece)) for piece, to in one.sends]
            receives += [Mail(rank, buffers[piece], self.tag(share.number, piece)) for piece, rank in one.receives]
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
                self.merge_rows(share, buffers, x, out, lse)

    def end_backward(self, begun: Moving, x: BackwardPass, grads: Grads) -> None:
        dq, *own = grads
        returning: list[tuple[Block, int, Tensor]] = []
        sent: list[Mail] = []
        posted = self.post((), (), x)

        def settle() -> None:
            posted.wait()
            x.take.give_back(*(mail.buffer for mail in sent))
            for block, piece, buffer in returning:
                block.add_to(own, buffer, self.first[piece])
                x.take.give_back(buffer)

        for number, received in self._arrivals(begun, x):
            found, back = [], []
            for share, buffers in zip(self.shares, received):
                found += self._found(share, buffers, x, dq, own)
                back += [(share, piece, rank) for piece, rank in share.round(number).returns]
            settle()
            sent = found
            returning = [(share.own[piece], piece, share.own[piece].buffer(own, x.take)) for share, piece, _ in back]
            receives = [
                Mail(rank, buffer, self.tag(share.number, piece))
                for (share, piece, rank), (_, _, buffer) in zip(back, returning)
            ]
            posted = self.post(sent, receives, x)
        settle()

    def _found(self, share: Share, buffers: Buffers, x: BackwardPass, dq: Tensor, own: Sequence[Tensor]) -> list[Mail]:
        """The gradients of the rows that came, to be sent to their owners; those of the rank's own rows are added."""
        packed = {piece: share.seen[piece].buffer(own, x.take).zero_() for piece in buffers}
        into = {piece: share.seen[piece].unpack(buffer, own) for piece, buffer in packed.items()}
        for offset, holders, found in self.found_gradients(share, buffers, x, dq):
            for holder, *parts in zip(holders, *(grad.split(list(holders.values()), 1) for grad in found)):
                if holder in into:
                    totals = into[holder][offset]
                else:
                    totals = [share.own[holder][offset].view(y, self.first[holder]) for y in own]
                for total, part in zip(totals, parts):
                    total += part
            x.take.give_back(*found)
        rank_of = self.wire.shards.rank_of
        return [Mail(rank_of(piece), buffer, self.tag(share.number, piece)) for piece, buffer in packed.items()]

    def merge_rows(self, share: Share, buffers: Buffers, x: Pass, out: Tensor, lse: Tensor) -> None:
        """Merge what this rank's rows of a segment see of the rows that came."""
        for piece, _, rows, k, v, grids in self._joined(share, buffers, x):
            q, own_out, own_lse = (rows.view(y, self.first[piece]) for y in (x.q, out, lse))
            self.attend(x, rows, (q, k, v), [*grids.values()], own_out, own_lse)

    def found_gradients(
        self, share: Share, buffers: Buffers, x: BackwardPass, dq: Tensor
    ) -> Iterator[tuple[int, dict[int, int], tuple[Tensor, Tensor]]]:
        """An offset, the number of its rows in each piece, and these rows' dk and dv in order; adds to dq."""
        for piece, offset, rows, k, v, grids in self._joined(share, buffers, x):
            q, do, lse, delta, out, own_dq = (
                rows.view(y, self.first[piece]) for y in (x.q, x.do, x.lse, x.delta, x.out, dq)
            )
            found = self.gradients(x, rows, own_dq, (q, k, v, do, lse, delta, out), [*grids.values()])
            yield offset, {holder: len(grid) for holder, grid in grids.items()}, found

    def _joined(
        self, share: Share, buffers: Buffers, x: Pass
    ) -> Iterator[tuple[int, int, GridRows, Tensor, Tensor, dict[int, range]]]:
        """The rank's own rows, by piece and offset, with all keys and values that they see, and the grids of these."""
        parts = self.parts(share, buffers, x, with_own=len(share.own) > 1)
        blocks = share.own | share.seen
        for piece, own in share.own.items():
            seen = [other for other in sources(share.segment, piece, self.wire.is_causal) if other in parts]
            for offset, rows in own.items():
                holders = [other for other in seen if offset in parts[other]]
                if holders:
                    k, v = (joined([parts[holder][offset][i] for holder in holders]) for i in range(2))
                    yield piece, offset, rows, k, v, {holder: blocks[holder][offset].grid for holder in holders}

    def parts(self, share: Share, buffers: Buffers, x: Pass, *, with_own: bool) -> Parts:
        """The rows that came, and the rank's own."""
        like = self.sent(x)
        found = {piece: share.seen[piece].unpack(buffer, like) for piece, buffer in buffers.items()}
        for piece, block in share.own.items() if with_own else ():
            first = self.first[piece]
            found[piece] = {offset: [rows.view(y, first) for y in like] for offset, rows in block.items()}
        return found


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
