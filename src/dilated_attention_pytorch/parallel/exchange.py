"""Exchanges: what one rank sends, receives and computes for the shared segments of one branch.

`schemes.rounds_of` plans the messages. `begin` starts them; then the rank computes what it can alone. `end` waits for
the rows of other ranks, computes with them, returns results to the owners of the rows, and folds in the results that
return for its own. In the forward pass of gather and ring no results return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.block_layout import tiles_by_content, tiles_by_position
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig, tiles_of
from dilated_attention_pytorch.core.call import Call, Inputs, Saved, wide_dtype
from dilated_attention_pytorch.core.spec import Branch
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.kernels.blocks import Block, Keep, Tiling, keep_by_position
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.passes import BackwardPass, BlockOf, Pass
from dilated_attention_pytorch.parallel.schemes import Messages, Round, rounds_of
from dilated_attention_pytorch.parallel.sharding import SharedSegment
from dilated_attention_pytorch.parallel.wire import GridRows, HeldRows, Rows, Wire

Buffers = dict[Rows, Tensor]
"""Packed rows."""
Parts = dict[Rows, dict[int, list[Tensor]]]
"""Rows of some tensors, by offset."""
Grids = dict[Rows, range]
"""The positions of rows, by holder, in order."""
Counted = tuple[BlockOf, int]
"""What query rows see, and how many rows of the block precede them."""
Found = tuple[int, dict[Rows, int], Sequence[Tensor]]
"""Results for rows at an offset: the number of rows of each holder, in order, and the tensors."""


class Share(NamedTuple):
    """A shared segment as one rank sees it; its number is the same on all ranks."""

    number: int
    segment: SharedSegment
    own: list[Rows]  # that the rank holds and computes with
    rounds: list[Round]
    held: dict[Rows, HeldRows]  # its own and all that it sends or receives

    def round(self, number: int) -> Round:
        return self.rounds[number] if number < len(self.rounds) else Round([], [], [])


class Moving(NamedTuple):
    """Messages under way: buffers that leave, and buffers that are filled, by segment."""

    posted: Posted
    sent: list[Buffers]
    received: list[list[tuple[Rows, Tensor]]]

    def settled(self, x: Pass) -> list[list[tuple[Rows, Tensor]]]:
        """Wait for all messages, give back the buffers that were sent, and hand over those that were received."""
        self.posted.wait()
        for buffers in self.sent:
            x.take.give_back(*buffers.values())
            buffers.clear()
        received = [*self.received]
        self.received.clear()
        return received


class Exchange:
    """The messages of one rank for the shared segments of one branch, and what it computes with them.

    A buffer goes back to `x.take` only after its messages have arrived. `segments` are the segments that this rank
    shares, each with its number.
    """

    def __init__(
        self,
        scheme: str,
        call: Call,
        index: int,
        wire: Wire,
        segments: Sequence[tuple[int, SharedSegment]],
        ranks: RankGroup,
    ) -> None:
        self.call, self.index, self.wire, self.ranks = call, index, wire, ranks
        self.scale = call.softmax_scale(wire.head_dim)
        shards = wire.shards
        # The position of token 0 of the rank's tensors, if all of them were in this chunk.
        self.first = {
            chunk: shards.bounds(chunk)[0] - shards.held_at(chunk).start for chunk in shards.chunks_of(ranks.rank)
        }
        self.shares = []
        for number, segment in segments:
            own, rounds = self.own_rows(segment), rounds_of(scheme, wire, segment, ranks.rank)
            moved = (rows for one in rounds for messages in one for rows, _ in messages)
            held = {rows: HeldRows(wire, segment, rows) for rows in (*own, *dict.fromkeys(moved))}
            self.shares.append(Share(number, segment, own, rounds, held))

    def own_rows(self, segment: SharedSegment) -> list[Rows]:
        """The rows that this rank holds and computes with."""
        raise NotImplementedError

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        """The tensors whose rows travel."""
        raise NotImplementedError

    def returned(self, x: Pass, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors like the results that return. These belong to the last of the totals."""
        raise NotImplementedError

    def compute(self, share: Share, came: Buffers, x: Pass, totals: Sequence[Tensor]) -> Iterator[Found]:
        """Compute with the rows that came: fold results for query rows into the totals, or yield them for holders."""
        raise NotImplementedError

    def begin(self, x: Pass) -> Moving:
        moves, sent = [], self.sent(x)
        for share in self.shares:
            leaving = dict.fromkeys(rows for rows, _ in share.round(0).sends)
            packed = {rows: share.held[rows].pack(sent, self.first[rows.chunk], x.take) for rows in leaving}
            moves.append((packed, share.round(0).sends, share.round(0).receives))
        return self._move(moves, sent, x)

    def end(self, begun: Moving, x: Pass, totals: Sequence[Tensor]) -> None:
        """Fold what this rank's rows see of the segments, and what other ranks found for them, into the totals.

        While the rank computes with the rows of one round, those of the next and the results of the last are under way.
        """
        like = self.returned(x, totals)
        moving, returning = begun, None
        for number in range(max(len(share.rounds) for share in self.shares)):
            received = [dict(came) for came in moving.settled(x)]
            following = [share.round(number + 1) for share in self.shares]
            moves = [(came, one.sends, one.receives) for came, one in zip(received, following)]
            moving = self._move(moves, self.sent(x), x)
            moves = []
            for share, came in zip(self.shares, received):
                found = self._results(share, came, like, x, totals)
                owners = [(rows, self.wire.shards.rank_of(rows.chunk)) for rows in found]
                moves.append((found, owners, share.round(number).returns))
            if like:
                self._fold(returning, like, x, totals)
                returning = self._move(moves, like, x)
        moving.settled(x)
        self._fold(returning, like, x, totals)

    def _move(self, moves: list[tuple[Buffers, Messages, Messages]], like: Sequence[Tensor], x: Pass) -> Moving:
        """Start messages, segment by segment: what leaves, where it goes, and what comes. They carry rows of `like`."""
        sends, receives, received = [], [], []
        for share, (packed, outgoing, incoming) in zip(self.shares, moves):
            sends += [self._mail(share, rows, rank, packed[rows]) for rows, rank in outgoing]
            coming = [(rows, share.held[rows].buffer(like, x.take)) for rows, _ in incoming]
            receives += [self._mail(share, rows, rank, to) for (rows, rank), (_, to) in zip(incoming, coming)]
            received.append(coming)
        posted = self.ranks.post(sends, receives, (x.name, self.index), x.resources.profile)
        return Moving(posted, [packed for packed, _, _ in moves], received)

    def _mail(self, share: Share, rows: Rows, rank: int, buffer: Tensor) -> Mail:
        """A message, whose tag differs from those of all others that may be under way between the same ranks."""
        number = share.number * 2 * self.ranks.size + rows.chunk
        return Mail(rank, buffer, number * len(self.call.spec.branches) + self.index)

    def _results(
        self, share: Share, came: Buffers, like: Sequence[Tensor], x: Pass, totals: Sequence[Tensor]
    ) -> Buffers:
        """The packed results for the rows that came; those for the rank's own rows are folded into the totals."""
        packed = {rows: share.held[rows].buffer(like, x.take).zero_() for rows in came if like}
        into = {rows: share.held[rows].unpack(buffer, like) for rows, buffer in packed.items()}
        for offset, holders, found in self.compute(share, came, x, totals):
            for rows, *parts in zip(holders, *(y.split([*holders.values()], 1) for y in found)):
                if rows in into:
                    for total, part in zip(into[rows][offset], parts):
                        total += part
                elif parts:
                    x.fold(self._own(share, rows, offset, totals[-len(parts) :]), parts)
        return packed

    def _fold(self, returning: Moving | None, like: Sequence[Tensor], x: Pass, totals: Sequence[Tensor]) -> None:
        """Fold the results that return for this rank's own rows into the last of the totals."""
        for share, received in zip(self.shares, returning.settled(x) if returning else ()):
            for rows, buffer in received:
                for offset, parts in share.held[rows].unpack(buffer, like).items():
                    x.fold(self._own(share, rows, offset, totals[-len(like) :]), parts)
                x.take.give_back(buffer)

    def _own(self, share: Share, rows: Rows, offset: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Some of this rank's own rows of its tensors."""
        return [share.held[rows][offset].view(y, self.first[rows.chunk]) for y in tensors]

    def parts(self, share: Share, came: Buffers, x: Pass) -> Parts:
        """The rows that came, and the rank's own."""
        like = self.sent(x)
        found = {rows: share.held[rows].unpack(buffer, like) for rows, buffer in came.items()}
        return found | {rows: share.held[rows].views(like, self.first[rows.chunk]) for rows in share.own}

    def dense(self, x: Pass, rows: GridRows, keys: Sequence[range], is_causal: bool = False) -> BlockOf:
        """Query rows that see keys at these positions: all of them, or under causality those that are not later."""
        if x.seed is None:
            block = Block(self.scale, is_causal)
            return lambda group: block
        i, j = positions([rows.grid], x.seed.device), positions(keys, x.seed.device)
        return lambda group: Block(self.scale, is_causal, self.keep(x, rows, group, i.__getitem__, j.__getitem__))

    def keep(
        self, x: Pass, rows: GridRows, group: int, queries: Callable[[Tensor], Tensor], keys: Callable[[Tensor], Tensor]
    ) -> Keep | None:
        """Dropout's factor for one query head per key/value head, as on a single device.

        `queries` and `keys` give the positions of numbered rows.
        """
        if x.seed is None:
            return None
        return keep_by_position(
            x.seed,
            self.call,
            batch_rows=positions([rows.rows], x.seed.device),
            heads=positions([rows.heads], x.seed.device) * self.wire.groups + group,
            queries=lambda _, numbers: queries(numbers),
            keys=lambda _, numbers: keys(numbers),
            dtype=wide_dtype(x.q.dtype),
        )


class Gather(Exchange):
    """Gather or ring: a rank's query rows attend to the keys and values that come.

    A rank that holds several chunks of a segment attends from each of them, also to its own other chunks. Each chunk's
    attention to itself is among the calls that the rank computes alone.
    """

    attends_to_itself = False

    def own_rows(self, segment: SharedSegment) -> list[Rows]:
        return [Rows(chunk) for chunk in segment.chunks_of(self.ranks.rank)]

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        return x.k, x.v

    def returned(self, x: Pass, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return totals[x.query_totals :]

    def compute(self, share: Share, came: Buffers, x: Pass, totals: Sequence[Tensor]) -> Iterator[Found]:
        parts = self.parts(share, came, x)
        for own in share.own:
            sees = share.segment.sources(own.chunk, self.wire.is_causal)
            sees = sorted([*sees, own.chunk]) if self.attends_to_itself else sees
            for offset in share.held[own]:
                grids = {r: share.held[r][offset].grid for r in map(Rows, sees) if offset in parts.get(r, ())}
                if not grids:
                    continue
                k, v, *rest = (joined(column) for column in zip(*(parts[holder][offset] for holder in grids)))
                block, lead = self.block(x, share, own, offset, grids, [k, *rest])
                rows, mine = (self._own(share, own, offset, y) for y in (x.of_queries, totals[: x.query_totals]))
                found = x.attend(rows, k, v, block, mine, lead)
                yield offset, {holder: len(grid) for holder, grid in grids.items()}, found
                x.take.give_back(*found)

    def block(self, x: Pass, share: Share, own: Rows, offset: int, grids: Grids, seen: list[Tensor]) -> Counted:
        """What a chunk's rows at an offset see of keys on these grids; `seen` are the keys, and queries that came."""
        return self.dense(x, share.held[own][offset], [*grids.values()]), 0


class SparseGather(Gather):
    """Gather for kept tiles: a chunk's rows attend to the tiles that the whole segment's pattern keeps.

    Tiles are numbered over the segment's grid rows, whichever rank holds them, so a tile may span two chunks. Where
    content chooses the tiles, the queries travel too.
    """

    attends_to_itself = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.call.sparse is not None
        self.config: SparsePatternConfig = self.call.sparse
        self.kept: dict[int, Tensor] = {}

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        return (x.k, x.v, x.q) if self.config.depends_on_content else (x.k, x.v)

    def block(self, x: Pass, share: Share, own: Rows, offset: int, grids: Grids, seen: list[Tensor]) -> Counted:
        k, *queries = seen
        rows, size, rate = share.held[own][offset], self.config.block_size, self.wire.branch.dilation_rate
        grid = range(share.segment.start + offset, share.segment.stop, rate)
        before = sum(len(held) for holder, held in grids.items() if holder.chunk < own.chunk)
        first, last = before // size, tiles_of(before + len(rows.grid), size)
        if not queries:
            total = tiles_of(len(grid), size)
            if total not in self.kept:
                found, _ = tiles_by_position(self.config, total, self.index, self.call.is_causal)
                self.kept[total] = torch.where(found < total, found, -1)[None, None]
            tiles = [Tiling(self.kept[total][:, :, first:last].to(k.device), size, first)] * self.wire.groups
        else:
            most, whole = tiles_of(k.shape[1], size), Branch(k.shape[1], 1)  # one segment, with all rows on its grid
            chosen, _ = tiles_by_content(self.call, self.config, queries[0], k, whole, 0, most)
            chosen = torch.where(chosen < most, chosen, -1)[:, 0, :, :, first:last]  # (S, heads, groups, T, K)
            tiles = [Tiling(chosen[:, :, g], size, first) for g in range(self.wire.groups)]

        def position(number: Tensor) -> Tensor:
            return grid.start + number * rate

        def block(group: int) -> Block:
            keep = self.keep(x, rows, group, position, position)
            return Block(self.scale, self.call.is_causal, keep, tiles[group])

        return block, before % size


class AllToAll(Exchange):
    """Dilated all-to-all: a segment's ranks swap rows for heads, attend to all rows of their heads, and swap back.

    Forward, q, k and v travel, and out and lse return. Backward, do, delta and lse travel too, and dq, dk, dv return.
    """

    def own_rows(self, segment: SharedSegment) -> list[Rows]:
        rank = self.ranks.rank
        return [Rows(rank, self.wire.head_share(segment, rank))]

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        return (x.q, x.k, x.v, x.do, x.delta, x.lse) if isinstance(x, BackwardPass) else (x.q, x.k, x.v)

    def returned(self, x: Pass, totals: Sequence[Tensor]) -> Sequence[Tensor]:
        return totals if isinstance(x, BackwardPass) else (x.q, totals[1])

    def compute(self, share: Share, came: Buffers, x: Pass, totals: Sequence[Tensor]) -> Iterator[Found]:
        """Dense attention among all rows of each grid."""
        parts = self.parts(share, came, x)
        for offset in sorted({offset for found in parts.values() for offset in found}):
            held = {rows: share.held[rows][offset] for rows in sorted(parts) if offset in parts[rows]}
            (first, *_), (*_, last) = held.values(), held.values()
            grid = replace(first, grid=range(first.grid.start, last.grid.stop, first.grid.step))
            q, k, v, *rest = (torch.cat(column, 1) for column in zip(*(parts[rows][offset] for rows in held)))
            if x.seed is None:
                found = self._attend(x, q, k, v, *rest)
            else:  # dropout depends on the positions
                dtype = wide_dtype(q.dtype)
                mine = [torch.zeros(q.shape, dtype=dtype, device=q.device)]
                if not rest:
                    mine.append(mine[0].new_full(q.shape[:-1], -torch.inf))
                block = self.dense(x, grid, [grid.grid], self.call.is_causal)
                found = (*mine, *x.attend((q, *rest), k, v, block, mine))
            yield offset, {rows: len(one.grid) for rows, one in held.items()}, found

    def _attend(self, x: Pass, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        inputs = Inputs(q.flatten(2, 3), k.squeeze(3), v.squeeze(3))
        if not rest:
            out, lse = op.partial(self._dense_call(q), inputs, x.resources)
            return out.view(q.shape), lse.reshape(q.shape[:-1])
        # An engine subtracts the lse's gradient from sum(do * out): with no out, it is given delta that way.
        do, delta, lse = (y.flatten(2, 3) for y in rest)
        saved = Saved(inputs, torch.zeros_like(do), lse)
        dq, dk, dv = op.gradients(self._dense_call(q), saved, do, -delta, x.resources)
        return dq.view(q.shape), dk.unsqueeze(3), dv.unsqueeze(3)

    def _dense_call(self, q: Tensor) -> Call:
        """The call of one whole segment at rate 1."""
        call, rows = self.call, q.shape[1]
        settings: dict[str, Any] = {"is_causal": call.is_causal, "allow_tf32": call.allow_tf32, "backend": call.backend}
        key = ("dense", rows, self.scale, *settings.values())
        return plans.remember("call", key, lambda: Call.of([rows], [1], scale=self.scale, partial=True, **settings))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], 1)


def positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])
