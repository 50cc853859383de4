"""Ring: the grid rows of K and V go from rank to rank of a segment, and are merged as they come.

At hop t a rank holds the block of the rank t places before it. Bytes are those of gather; memory is one block in use
and one on its way, whatever the number of ranks. Backward, the blocks go round again, and the gradients of a block
follow it from its first visitor on; the last one sends them home. Under causality a block goes forward only, to the
segment's last rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dilated_attention_pytorch.parallel.blocks import Block, Exchange, Rows, Tensors
from dilated_attention_pytorch.parallel.costs import neighbours
from dilated_attention_pytorch.parallel.gather import add_gradients
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment


@dataclass
class _Circle:
    """A segment's ranks, in order, as one of them sees them."""

    number: int
    place: int
    size: int
    before: int | None
    after: int | None
    blocks: list[Block]  # by place
    is_causal: bool
    ranks: tuple[int, ...]

    def block_at(self, hop: int) -> int | None:
        """The place whose block this rank holds at a hop, its own at hop 0, or None."""
        at = self.place - hop
        if hop >= self.size or (self.is_causal and at < 0):
            return None
        return at % self.size

    def is_last_visit(self, hop: int) -> bool:
        """Whether the block that this rank holds at a hop goes no further."""
        return self.place == self.size - 1 if self.is_causal else hop == self.size - 1

    def home_hop(self) -> int:
        """After which hop the gradients of this rank's own block come home; 0 if nobody sees it."""
        return self.size - 1 - self.place if self.is_causal else self.size - 1


@dataclass
class _Hop:
    """The blocks of one hop on their way, by circle, and those of the hop before, which are being sent on."""

    posted: Posted
    buffers: list[Tensor | None]
    before: list[Tensor | None]

    def settle(self, x: Tensors) -> list[Tensor | None]:
        """The blocks of this hop; those of the hop before go back."""
        self.posted.wait()
        x.take.give_back(*_present(self.before))
        self.before.clear()
        return self.buffers


class Ring(Exchange):
    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: RankGroup) -> None:
        super().__init__(rows, segments, ranks)
        wire = rows.wire
        self.circles = [
            _Circle(
                number,
                segment.ranks.index(ranks.rank),
                len(segment.ranks),
                *neighbours(segment, ranks.rank, wire.is_causal),
                [Block(wire, segment, rank) for rank in segment.ranks],
                wire.is_causal,
                segment.ranks,
            )
            for number, segment in segments
        ]
        self.hops = max(circle.size for circle in self.circles) - 1
        self.trailing, self.groups = ((wire.head_dim,),) * 2, (1, 1)

    def begin_forward(self, x: Tensors) -> _Hop:
        return self._hop(1, self._own(x), x, "forward")

    def begin_backward(self, x: Tensors) -> _Hop:
        return self._hop(1, self._own(x), x, "backward")

    def end_forward(self, begun: _Hop, x: Tensors) -> None:
        for hop in range(1, self.hops + 1):
            held = begun.settle(x)
            begun = self._hop(hop + 1, held, x, "forward")
            for circle, buffer in zip(self.circles, held):
                block = circle.block_at(hop)
                if block is not None and buffer is not None:
                    self._visit(circle, circle.blocks[block], buffer, x, None)
        begun.settle(x)

    def end_backward(self, begun: _Hop, x: Tensors) -> None:
        carried: list[Tensor | None] = [None] * len(self.circles)
        sent: list[Tensor] = []
        coming = self.post((), (), "backward", x)
        for hop in range(1, self.hops + 1):
            held = begun.settle(x)
            begun = self._hop(hop + 1, held, x, "backward")
            found: list[Tensor | None] = []
            for circle, buffer in zip(self.circles, held):
                block = circle.block_at(hop)
                grads = None
                if block is not None and buffer is not None:
                    grads = x.take(buffer.shape, dtype=x.dk.dtype, device=x.dk.device).zero_()
                    self._visit(circle, circle.blocks[block], buffer, x, grads)
                found.append(grads)
            # Only now the gradients of earlier visitors are needed.
            coming.wait()
            for grads, earlier in zip(found, carried):
                if grads is not None and earlier is not None:
                    grads += earlier
            x.take.give_back(*sent, *_present(carried))
            sent.clear()
            coming, carried, home = self._pass_on(hop, found, x)
            sent = _present(found)
            if any(buffer is not None for buffer in home):
                coming.wait()
                for circle, buffer in zip(self.circles, home):
                    if buffer is not None:
                        add_gradients(circle.blocks[circle.place], buffer, x, self.rows.first)
                x.take.give_back(*_present(home))
        coming.wait()
        x.take.give_back(*sent, *_present(carried))
        begun.settle(x)

    def _own(self, x: Tensors) -> list[Tensor | None]:
        return [
            circle.blocks[circle.place].pack((x.k, x.v), self.rows.first, self.groups, x.take)
            if circle.after is not None
            else None
            for circle in self.circles
        ]

    def _hop(self, hop: int, held: list[Tensor | None], x: Tensors, stage: str) -> _Hop:
        """Send on what was held at the hop before, and receive what is held at this one."""
        sends, receives, buffers = [], [], []
        for circle, mine in zip(self.circles, held):
            tag = self.tag(circle.number, hop)
            if hop < circle.size and circle.after is not None and mine is not None:
                sends.append(Mail(circle.after, mine, tag))
            block, buffer = circle.block_at(hop), None
            if block is not None and circle.before is not None:
                buffer = circle.blocks[block].buffer(self.trailing, self.groups, x.k, x.take)
                receives.append(Mail(circle.before, buffer, tag))
            buffers.append(buffer)
        return _Hop(self.post(sends, receives, stage, x), buffers, held)

    def _pass_on(
        self, hop: int, found: list[Tensor | None], x: Tensors
    ) -> tuple[Posted, list[Tensor | None], list[Tensor | None]]:
        """Send gradients after their blocks, or home; receive those of the next hop's blocks, and one's own."""
        sends, receives = [], []
        carried: list[Tensor | None] = []
        home: list[Tensor | None] = []
        for circle, grads in zip(self.circles, found):
            tag = self.tag(circle.number, self.ranks.size + hop)
            block = circle.block_at(hop)
            if grads is not None and block is not None:
                to = circle.ranks[block] if circle.is_last_visit(hop) else circle.after
                assert to is not None
                sends.append(Mail(to, grads, tag))
            coming, buffer = circle.block_at(hop + 1), None
            if coming is not None and circle.before is not None:
                buffer = circle.blocks[coming].buffer(self.trailing, self.groups, x.dk, x.take)
                receives.append(Mail(circle.before, buffer, tag))
            carried.append(buffer)
            buffer = None
            if hop == circle.home_hop():
                last = circle.ranks[-1] if circle.is_causal else circle.before
                assert last is not None
                buffer = circle.blocks[circle.place].buffer(self.trailing, self.groups, x.dk, x.take)
                receives.append(Mail(last, buffer, tag))
            home.append(buffer)
        return self.post(sends, receives, "backward", x), carried, home

    def _visit(self, circle: _Circle, block: Block, buffer: Tensor, x: Tensors, grads: Tensor | None) -> None:
        """Attend to a block; with `grads`, its packed gradients are written there."""
        parts = block.unpack(buffer, self.trailing, self.groups)
        into = {} if grads is None else block.unpack(grads, self.trailing, self.groups)
        for offset, piece in circle.blocks[circle.place].items():
            if offset not in block:
                continue
            k, v = parts[offset]
            if grads is None:
                self.rows.forward(x, piece, k, v, [block[offset].grid])
            else:
                found = self.rows.backward(x, piece, k, v, [block[offset].grid])
                for view, grad in zip(into[offset], found):
                    view.copy_(grad)
                x.take.give_back(*found)


def _present(buffers: Sequence[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None]
