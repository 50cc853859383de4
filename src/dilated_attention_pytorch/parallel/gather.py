"""Gather: every rank of a segment gets the grid rows of K and V that its queries see, and attends to them at once.

Forward, each rank sends its packed rows to the ranks that see them: `2(R - 1)u` bytes arrive. Backward, the rows come
again rather than being kept, and each rank sends the gradients it finds back to the rows' owners, who add them up.
A rank that holds several pieces of a segment attends from each, also to its own other ones, which do not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch.parallel.blocks import Block, Exchange, Piece, Rows, Tensors
from dilated_attention_pytorch.parallel.costs import addressees, fetched_pieces, held_pieces, sources
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment

Buffers = dict[int, Tensor]
"""Packed rows by the piece that holds them."""


@dataclass
class Fetched:
    """Rows under way: those of this rank, and buffers for those of others, by segment."""

    posted: Posted
    sent: list[Tensor]
    received: list[Buffers]

    def settle(self, x: Tensors) -> list[Buffers]:
        """The rows that came; the buffers of those that were sent go back."""
        self.posted.wait()
        x.take.give_back(*self.sent)
        self.sent.clear()
        return self.received


@dataclass(frozen=True)
class Share:
    """A segment as one rank sees it; blocks by piece."""

    segment: SharedSegment
    tags: dict[int, int]
    own: dict[int, Block]
    seen: dict[int, Block]  # other ranks'
    sources: dict[int, list[int]]  # the pieces that each of its own sees
    to: dict[int, list[int]]  # the ranks that see each of its own


class Gather(Exchange):
    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: RankGroup) -> None:
        super().__init__(rows, segments, ranks)
        wire, causal, shards = rows.wire, rows.wire.is_causal, rows.wire.shards
        self.shares = []
        for number, segment in segments:
            mine = held_pieces(shards, segment, ranks.rank)
            seen = fetched_pieces(shards, segment, ranks.rank, causal)
            self.shares.append(
                Share(
                    segment,
                    {piece: self.tag(number, piece) for piece in segment.ranks},
                    {piece: Block(wire, segment, piece) for piece in mine},
                    {piece: Block(wire, segment, piece) for piece in seen},
                    {piece: sources(segment, piece, causal) for piece in mine},
                    {piece: addressees(shards, segment, piece, causal) for piece in mine},
                )
            )
        self.rows_of = {
            piece: replace(rows, first=shards.bounds(piece)[0] - shards.held_at(piece).start)
            for piece in shards.pieces_of(ranks.rank)
        }
        self.rank_of = shards.rank_of
        self.trailing: tuple[tuple[int, ...], ...] = ((wire.head_dim,),) * 2
        self.groups: tuple[int, ...] = (1, 1)

    def sent(self, x: Tensors) -> tuple[Tensor, ...]:
        """What travels forward, and again before backward; gradients are of K and V in any case."""
        return x.k, x.v

    def begin_forward(self, x: Tensors) -> Fetched:
        return self._fetch(x, "forward")

    def begin_backward(self, x: Tensors) -> Fetched:
        return self._fetch(x, "backward")

    def _fetch(self, x: Tensors, stage: str) -> Fetched:
        sends, receives, sent, received = [], [], [], []
        for share in self.shares:
            for piece, to in share.to.items():
                if to:
                    packed = self._pack(share, piece, x)
                    sends += [Mail(rank, packed, share.tags[piece]) for rank in to]
                    sent.append(packed)
            blocks = share.seen.items()
            buffers = {piece: block.buffer(self.trailing, self.groups, x.k, x.take) for piece, block in blocks}
            receives += [Mail(self.rank_of(piece), buffer, share.tags[piece]) for piece, buffer in buffers.items()]
            received.append(buffers)
        return Fetched(self.post(sends, receives, stage, x), sent, received)

    def end_forward(self, begun: Fetched, x: Tensors) -> None:
        for share, buffers in zip(self.shares, begun.settle(x)):
            self.attend(share, buffers, x)
            x.take.give_back(*buffers.values())

    def end_backward(self, begun: Fetched, x: Tensors) -> None:
        sends, receives, returned = [], [], []
        for share, buffers in zip(self.shares, begun.settle(x)):
            grads = {piece: _gradients_of(block, x).zero_() for piece, block in share.seen.items()}
            into = {piece: _gradients_in(share.seen[piece], grad, x) for piece, grad in grads.items()}
            for offset, holders, found in self.gradients(share, buffers, x):
                split = [grad.split(list(holders.values()), 1) for grad in found]
                for at, holder in enumerate(holders):
                    totals = (
                        into[holder][offset]
                        if holder in into
                        else self.views(share.own[holder][offset], holder, x.dk, x.dv)
                    )
                    for total, grad in zip(totals, split):
                        total += grad[at]
                x.take.give_back(*found)
            x.take.give_back(*buffers.values())
            sends += [Mail(self.rank_of(piece), grad, share.tags[piece]) for piece, grad in grads.items()]
            back = [(piece, rank, _gradients_of(share.own[piece], x)) for piece, to in share.to.items() for rank in to]
            receives += [Mail(rank, buffer, share.tags[piece]) for piece, rank, buffer in back]
            returned.append(back)
        self.post(sends, receives, "backward", x).wait()
        x.take.give_back(*(mail.buffer for mail in sends))
        for share, back in zip(self.shares, returned):
            for piece, _, buffer in back:
                add_gradients(share.own[piece], buffer, x, self.rows_of[piece].first)
                x.take.give_back(buffer)

    def attend(self, share: Share, buffers: Buffers, x: Tensors) -> None:
        """Merge what this rank's rows of a segment see of the pieces that came."""
        for mine, _, queries, k, v, grids in self._joined(share, buffers, x):
            self.rows_of[mine].forward(x, queries, k, v, [*grids.values()])

    def gradients(
        self, share: Share, buffers: Buffers, x: Tensors
    ) -> Iterator[tuple[int, dict[int, int], tuple[Tensor, Tensor]]]:
        """An offset, how many of its rows each piece holds, and these rows' dk and dv in order; adds to dq."""
        for mine, offset, queries, k, v, grids in self._joined(share, buffers, x):
            found = self.rows_of[mine].backward(x, queries, k, v, [*grids.values()])
            yield offset, {piece: len(grid) for piece, grid in grids.items()}, found

    def _joined(
        self, share: Share, buffers: Buffers, x: Tensors
    ) -> Iterator[tuple[int, int, Piece, Tensor, Tensor, dict[int, range]]]:
        """The rank's own rows, by piece and offset, with all keys and values they see, and the grids of these."""
        parts = self.parts(share, buffers, x if len(share.own) > 1 else None)
        blocks = share.own | share.seen
        for mine, seen in share.sources.items():
            for offset, rows in share.own[mine].items():
                holders = [piece for piece in seen if offset in parts[piece]]
                if holders:
                    k, v = (joined([parts[piece][offset][i] for piece in holders]) for i in range(2))
                    yield mine, offset, rows, k, v, {piece: blocks[piece][offset].grid for piece in holders}

    def parts(self, share: Share, buffers: Buffers, own: Tensors | None) -> dict[int, dict[int, list[Tensor]]]:
        """By piece and offset: the rows that came, and those of the rank's `own` tensors."""
        found = {
            piece: share.seen[piece].unpack(buffer, self.trailing, self.groups) for piece, buffer in buffers.items()
        }
        if own is not None:
            for piece, block in share.own.items():
                found[piece] = {offset: self.views(rows, piece, *self.sent(own)) for offset, rows in block.items()}
        return found

    def views(self, rows: Piece, piece: int, *tensors: Tensor) -> list[Tensor]:
        """A piece's rows of the rank's tensors, of which the third, if any, has query heads."""
        first = self.rows_of[piece].first
        return [rows.view(x, first, groups=groups) for x, groups in zip(tensors, self.groups)]

    def _pack(self, share: Share, piece: int, x: Tensors) -> Tensor:
        return share.own[piece].pack(self.sent(x), self.rows_of[piece].first, self.groups, x.take)


def _gradients_of(block: Block, x: Tensors) -> Tensor:
    """A buffer for a block's packed gradients of K and V."""
    return block.buffer(((x.dk.shape[3],),) * 2, (1, 1), x.dk, x.take)


def _gradients_in(block: Block, buffer: Tensor, x: Tensors) -> dict[int, list[Tensor]]:
    """Views of packed gradients of K and V, by offset."""
    return block.unpack(buffer, ((x.dk.shape[3],),) * 2, (1, 1))


def add_gradients(own: Block, buffer: Tensor, x: Tensors, first: int) -> None:
    """Add packed gradients of a rank's own rows to its dk and dv."""
    for offset, views in _gradients_in(own, buffer, x).items():
        for total, view in zip((x.dk, x.dv), views):
            own[offset].view(total, first).add_(view)


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
