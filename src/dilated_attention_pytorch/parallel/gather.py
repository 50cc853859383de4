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
from dilated_attention_pytorch.parallel.comm import Mail, Posted, Ranks
from dilated_attention_pytorch.parallel.costs import addressees, fetched_pieces, held_pieces, sources
from dilated_attention_pytorch.parallel.sharding import SharedSegment

Buffers = dict[int, Tensor]
"""Packed rows by the piece that holds them."""


@dataclass(frozen=True)
class _Share:
    """A segment as one rank sees it; blocks by piece."""

    tags: dict[int, int]
    own: dict[int, Block]
    seen: dict[int, Block]  # other ranks'
    sources: dict[int, list[int]]  # the pieces that each of its own sees
    to: dict[int, list[int]]  # the ranks that see each of its own


class Gather(Exchange):
    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: Ranks) -> None:
        super().__init__(rows, segments, ranks)
        wire, causal, shards = rows.wire, rows.wire.is_causal, rows.wire.shards
        self.shares = []
        for number, segment in segments:
            mine = held_pieces(shards, segment, ranks.rank)
            seen = fetched_pieces(shards, segment, ranks.rank, causal)
            self.shares.append(
                _Share(
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
        self.trailing, self.groups = ((wire.head_dim,),) * 2, (1, 1)

    def begin_forward(self, x: Tensors) -> tuple[Posted, list[Buffers]]:
        return self._fetch(x, "forward")

    def begin_backward(self, x: Tensors) -> tuple[Posted, list[Buffers]]:
        return self._fetch(x, "backward")

    def _fetch(self, x: Tensors, stage: str) -> tuple[Posted, list[Buffers]]:
        sends, receives, fetched = [], [], []
        for share in self.shares:
            for piece, to in share.to.items():
                if to:
                    packed = self._pack(share, piece, x)
                    sends += [Mail(rank, packed, share.tags[piece]) for rank in to]
            buffers = {piece: x.k.new_empty(self._size(block)) for piece, block in share.seen.items()}
            receives += [Mail(self.rank_of(piece), buffer, share.tags[piece]) for piece, buffer in buffers.items()]
            fetched.append(buffers)
        return self.ranks.post(sends, receives, (stage, self.rows.index)), fetched

    def end_forward(self, begun: tuple[Posted, list[Buffers]], x: Tensors) -> None:
        posted, fetched = begun
        posted.wait()
        for share, buffers in zip(self.shares, fetched):
            for mine, queries, k, v, grids, _ in self._joined(share, buffers, x):
                self.rows_of[mine].forward(x, queries, k, v, grids)

    def end_backward(self, begun: tuple[Posted, list[Buffers]], x: Tensors) -> None:
        posted, fetched = begun
        posted.wait()
        sends, receives, returned = [], [], []
        for share, buffers in zip(self.shares, fetched):
            grads = {piece: x.dk.new_zeros(self._size(block)) for piece, block in share.seen.items()}
            into = {piece: self._unpack(share.seen[piece], grad) for piece, grad in grads.items()}
            for mine, queries, k, v, grids, holders in self._joined(share, buffers, x):
                found = [
                    grad.split([len(grid) for grid in grids], 1)
                    for grad in self.rows_of[mine].backward(x, queries, k, v, grids)
                ]
                for at, (holder, offset) in enumerate(holders):
                    totals = (
                        into[holder][offset]
                        if holder in into
                        else self._views(share.own[holder][offset], holder, x.dk, x.dv)
                    )
                    for total, grad in zip(totals, found):
                        total += grad[at]
            sends += [Mail(self.rank_of(piece), grad, share.tags[piece]) for piece, grad in grads.items()]
            back = [
                (piece, rank, x.dk.new_empty(self._size(share.own[piece])))
                for piece, to in share.to.items()
                for rank in to
            ]
            receives += [Mail(rank, buffer, share.tags[piece]) for piece, rank, buffer in back]
            returned.append(back)
        self.ranks.post(sends, receives, ("backward", self.rows.index)).wait()
        for share, back in zip(self.shares, returned):
            for piece, _, buffer in back:
                add_gradients(share.own[piece], buffer, x, self.rows_of[piece].first)

    def _joined(
        self, share: _Share, buffers: Buffers, x: Tensors
    ) -> Iterator[tuple[int, Piece, Tensor, Tensor, list[range], list[tuple[int, int]]]]:
        """Each of the rank's own rows with all the keys and values they see, their grids and which piece holds them."""
        parts = {piece: self._unpack(share.seen[piece], buffer) for piece, buffer in buffers.items()}
        for piece, block in share.own.items() if len(share.own) > 1 else ():
            parts[piece] = {offset: self._views(rows, piece, x.k, x.v) for offset, rows in block.items()}
        blocks = share.own | share.seen
        for mine, seen in share.sources.items():
            for offset, rows in share.own[mine].items():
                holders = [piece for piece in seen if offset in parts[piece]]
                if holders:
                    k, v = (_cat([parts[piece][offset][i] for piece in holders]) for i in range(2))
                    grids = [blocks[piece][offset].grid for piece in holders]
                    yield mine, rows, k, v, grids, [(piece, offset) for piece in holders]

    def _unpack(self, block: Block, buffer: Tensor) -> dict[int, list[Tensor]]:
        return block.unpack(buffer, self.trailing, self.groups)

    def _views(self, rows: Piece, piece: int, *tensors: Tensor) -> list[Tensor]:
        return [rows.view(x, self.rows_of[piece].first) for x in tensors]

    def _pack(self, share: _Share, piece: int, x: Tensors) -> Tensor:
        return share.own[piece].pack((x.k, x.v), self.rows_of[piece].first, x.k.dtype, self.groups)

    def _size(self, block: Block) -> int:
        return block.size(self.trailing, self.groups)


def add_gradients(own: Block, buffer: Tensor, x: Tensors, first: int) -> None:
    """Add packed gradients of a rank's own rows to its dk and dv."""
    trailing = ((x.dk.shape[3],),) * 2
    for offset, views in own.unpack(buffer, trailing, (1, 1)).items():
        for total, view in zip((x.dk, x.dv), views):
            own[offset].view(total, first).add_(view)


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
