"""Gather: every rank of a segment gets the grid rows of K and V that its queries see, and attends to them at once.

Forward, each rank sends its packed rows to the ranks that see them: `2(R - 1)u` bytes arrive. Backward, the rows come
again rather than being kept, and each rank sends the gradients it finds back to the rows' owners, who add them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.parallel.blocks import Block, Exchange, Piece, Rows, Tensors
from dilated_attention_pytorch.parallel.comm import Mail, Posted, Ranks
from dilated_attention_pytorch.parallel.costs import sources, viewers
from dilated_attention_pytorch.parallel.sharding import SharedSegment


@dataclass(frozen=True)
class Share:
    tag: int
    own: Block
    seen: dict[int, Block]  # by the rank that holds it
    viewers: list[int]


class Gather(Exchange):
    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: Ranks) -> None:
        super().__init__(rows, segments, ranks)
        wire, me = rows.wire, ranks.rank
        self.shares = [
            Share(
                self.tag(number),
                Block(wire, segment, me),
                {j: Block(wire, segment, j) for j in sources(segment, me, wire.is_causal)},
                viewers(segment, me, wire.is_causal),
            )
            for number, segment in segments
        ]
        self.trailing: tuple[tuple[int, ...], ...] = ((wire.head_dim,),) * 2
        self.groups: tuple[int, ...] = (1, 1)

    def sent(self, x: Tensors) -> tuple[Tensor, ...]:
        """What travels forward, and again before backward."""
        return x.k, x.v

    def begin_forward(self, x: Tensors) -> tuple[Posted, list[dict[int, Tensor]]]:
        return self._fetch(x, "forward")

    def begin_backward(self, x: Tensors) -> tuple[Posted, list[dict[int, Tensor]]]:
        return self._fetch(x, "backward")

    def _fetch(self, x: Tensors, stage: str) -> tuple[Posted, list[dict[int, Tensor]]]:
        sends, receives, fetched = [], [], []
        for share in self.shares:
            if share.viewers:
                packed = share.own.pack(self.sent(x), self.rows.first, x.k.dtype, self.groups)
                sends += [Mail(rank, packed, share.tag) for rank in share.viewers]
            buffers = {rank: x.k.new_empty(self._size(block)) for rank, block in share.seen.items()}
            receives += [Mail(rank, buffer, share.tag) for rank, buffer in buffers.items()]
            fetched.append(buffers)
        return self.ranks.post(sends, receives, (stage, self.rows.index)), fetched

    def end_forward(self, begun: tuple[Posted, list[dict[int, Tensor]]], x: Tensors) -> None:
        posted, fetched = begun
        posted.wait()
        for share, buffers in zip(self.shares, fetched):
            for piece, k, v, grids, _ in self._joined(share, buffers):
                self.rows.forward(x, piece, k, v, grids)

    def end_backward(self, begun: tuple[Posted, list[dict[int, Tensor]]], x: Tensors) -> None:
        posted, fetched = begun
        posted.wait()
        sends, receives, returned = [], [], []
        for share, buffers in zip(self.shares, fetched):
            grads = {rank: x.dk.new_empty(self._size(block)) for rank, block in share.seen.items()}
            for piece, k, v, grids, holders in self._joined(share, buffers):
                found = [
                    grad.split([len(grid) for grid in grids], 1) for grad in self.rows.backward(x, piece, k, v, grids)
                ]
                for at, (rank, offset) in enumerate(holders):
                    views = share.seen[rank].unpack(grads[rank], self.trailing, self.groups)[offset]
                    for view, grad in zip(views, found):
                        view.copy_(grad[at])
            sends += [Mail(rank, self._or_zero(share, rank, grad), share.tag) for rank, grad in grads.items()]
            back = {rank: x.dk.new_empty(self._size(share.own)) for rank in share.viewers}
            receives += [Mail(rank, buffer, share.tag) for rank, buffer in back.items()]
            returned.append(back)
        self.ranks.post(sends, receives, ("backward", self.rows.index)).wait()
        for share, back in zip(self.shares, returned):
            for buffer in back.values():
                add_gradients(share.own, buffer, x, self.rows.first)

    def _joined(
        self, share: Share, buffers: dict[int, Tensor]
    ) -> Iterator[tuple[Piece, Tensor, Tensor, list[range], list[tuple[int, int]]]]:
        """Each of the rank's own pieces with all the keys and values it sees, their grids and who holds them."""
        parts = {rank: share.seen[rank].unpack(buffer, self.trailing, self.groups) for rank, buffer in buffers.items()}
        for offset, piece in share.own.items():
            holders = [rank for rank in parts if offset in parts[rank]]
            if holders:
                k, v = (_cat([parts[rank][offset][i] for rank in holders]) for i in range(2))
                grids = [share.seen[rank][offset].grid for rank in holders]
                yield piece, k, v, grids, [(rank, offset) for rank in holders]

    def _or_zero(self, share: Share, rank: int, grad: Tensor) -> Tensor:
        """A packed gradient with zeros for the offsets of which this rank has no queries."""
        for offset, views in share.seen[rank].unpack(grad, self.trailing, self.groups).items():
            if offset not in share.own:
                for view in views:
                    view.zero_()
        return grad

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
