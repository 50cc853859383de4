"""Gather for kept tiles: a rank's rows of a shared segment attend to the tiles that the whole segment's pattern keeps.

Tiles are numbered over the segment's grid rows, whoever holds them, so that a boundary between pieces may lie within
one. The rows of all ranks come as in `gather`; where content chooses the tiles, the queries come too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import tiles_by_content, tiles_by_position
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig, tiles_of
from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.spec import Branch
from dilated_attention_pytorch.kernels import tiles
from dilated_attention_pytorch.kernels.dense import Keep
from dilated_attention_pytorch.parallel.blocks import Piece, Rows, Tensors
from dilated_attention_pytorch.parallel.gather import Buffers, Gather, Share, joined
from dilated_attention_pytorch.parallel.group import RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment


@dataclass(frozen=True)
class _Grid:
    """The rows of a segment at one offset, as far as some of this rank's queries may see them: `(S, M, heads, D)`."""

    offset: int
    piece: Piece  # those queries' rows
    first: int  # their positions less their places among the rank's tokens
    before: int  # how many rows of the grid come before them
    origin: int  # the position of the grid's first row
    total: int  # the grid's rows, seen or not
    holders: dict[int, int]  # how many of them each piece of the segment holds, in order
    k: Tensor
    v: Tensor
    q: Tensor | None  # (S, M, heads, groups, D), where content chooses

    @property
    def rows(self) -> slice:
        return slice(self.before, self.before + len(self.piece.grid))


class SparseGather(Gather):
    def __init__(self, rows: Rows, segments: Sequence[tuple[int, SharedSegment]], ranks: RankGroup) -> None:
        super().__init__(rows, segments, ranks)
        assert rows.call.sparse is not None
        self.config: SparsePatternConfig = rows.call.sparse
        if self.config.depends_on_content:
            self.trailing, self.groups = ((rows.wire.head_dim,),) * 3, (1, 1, rows.wire.groups)
        self.kept: dict[int, Tensor] = {}

    def sent(self, x: Tensors) -> tuple[Tensor, ...]:
        return (x.k, x.v, x.q) if self.config.depends_on_content else (x.k, x.v)

    def attend(self, share: Share, buffers: Buffers, x: Tensors) -> None:
        call, groups = self.rows.call, self.rows.wire.groups
        for grid in self._grids(share, buffers, x):
            for g, tiling in enumerate(self._tilings(grid)):
                q, out, lse = (grid.piece.view(y, grid.first, g, groups) for y in (x.q, x.out, x.lse))
                with x.resources.workspaces() as take:
                    found = tiles.forward(
                        self._in_tiles(q, grid).to(lse.dtype),
                        grid.k.to(lse.dtype),
                        grid.v.to(lse.dtype),
                        call.softmax_scale(q.shape[-1]),
                        call.is_causal,
                        self._keep(x.seed, grid, g, lse.dtype),
                        take,
                        tiling,
                    )
                    merge_(out, lse, *(y[:, self._lead(grid) :] for y in found))

    def gradients(
        self, share: Share, buffers: Buffers, x: Tensors
    ) -> Iterator[tuple[int, dict[int, int], tuple[Tensor, Tensor]]]:
        for grid in self._grids(share, buffers, x):
            yield grid.offset, grid.holders, self._gradients(grid, x)

    def _gradients(self, grid: _Grid, x: Tensors) -> tuple[Tensor, Tensor]:
        """Adds to the grid's own dq; gives dk and dv of all its rows."""
        call, groups = self.rows.call, self.rows.wire.groups
        dk, dv = (x.take(y.shape, dtype=x.lse.dtype, device=y.device).zero_() for y in (grid.k, grid.v))
        for g, tiling in enumerate(self._tilings(grid)):
            do, q, lse, delta, dq = (
                grid.piece.view(y, grid.first, g, groups) for y in (x.do, x.q, x.lse, x.delta, x.dq)
            )
            with x.resources.workspaces() as take:
                found = tiles.backward(
                    self._in_tiles(do, grid).to(lse.dtype),
                    self._in_tiles(q, grid).to(lse.dtype),
                    grid.k.to(lse.dtype),
                    grid.v.to(lse.dtype),
                    self._in_tiles(delta, grid),
                    self._in_tiles(lse, grid),
                    call.softmax_scale(q.shape[-1]),
                    call.is_causal,
                    self._keep(x.seed, grid, g, lse.dtype),
                    take,
                    tiling,
                )
                for total, grad in zip((dq, dk, dv), (found[0][:, self._lead(grid) :], *found[1:])):
                    total += grad
        return dk, dv

    def _grids(self, share: Share, buffers: Buffers, x: Tensors) -> Iterator[_Grid]:
        parts = self.parts(share, buffers, x)
        segment, rate = share.segment, self.rows.wire.branch.dilation_rate
        blocks = share.own | share.seen
        for mine, seen in share.sources.items():
            for offset, piece in share.own[mine].items():
                pieces = [number for number in sorted((mine, *seen)) if offset in parts[number]]
                rows = zip(*(parts[number][offset] for number in pieces))
                k, v, *queries = (joined([*one]) for one in rows)
                # A single query head a key/value head stands there without a dimension of its own.
                q = queries[0].reshape(*k.shape[:3], -1, k.shape[3]) if queries else None
                holders = {number: len(blocks[number][offset].grid) for number in pieces}
                yield _Grid(
                    offset,
                    piece,
                    self.rows_of[mine].first,
                    sum(count for number, count in holders.items() if number < mine),
                    segment.start + offset,
                    len(range(segment.start + offset, segment.stop, rate)),
                    holders,
                    k,
                    v,
                    q,
                )

    def _tilings(self, grid: _Grid) -> Iterator[tiles.Tiling]:
        """The kept tiles of those queries' rows, for each query head of the key/value heads."""
        size, groups = self.config.block_size, self.rows.wire.groups
        first, last = grid.rows.start // size, tiles_of(grid.rows.stop, size)
        if grid.q is None:
            total = tiles_of(grid.total, size)
            if total not in self.kept:
                found, _ = tiles_by_position(self.config, total, self.rows.index, self.rows.call.is_causal)
                self.kept[total] = torch.where(found < total, found, -1)[None, None]
            kept = self.kept[total][:, :, first:last].to(grid.k.device)
            for _ in range(groups):
                yield tiles.Tiling(kept, size, first)
            return
        rows = grid.k.shape[1]
        most = tiles_of(rows, size)
        # One segment whose rows are all on the grid.
        chosen, _ = tiles_by_content(self.rows.call, self.config, grid.q, grid.k.unsqueeze(3), Branch(rows, 1), 0, most)
        chosen = torch.where(chosen < most, chosen, -1)[:, 0, :, :, first:last]  # (S, heads, groups, T, K)
        for g in range(groups):
            yield tiles.Tiling(chosen[:, :, g], size, first)

    def _lead(self, grid: _Grid) -> int:
        """The rows of the first tile that are in an earlier piece."""
        return grid.before % self.config.block_size

    def _in_tiles(self, x: Tensor, grid: _Grid) -> Tensor:
        """Rows `(S, M, ...)`, after zeros for the rows of their first tile that are in an earlier piece."""
        lead = self._lead(grid)
        return x if lead == 0 else torch.cat([x.new_zeros((x.shape[0], lead, *x.shape[2:])), x], 1)

    def _keep(self, seed: Tensor | None, grid: _Grid, group: int, dtype: torch.dtype) -> Keep | None:
        """Dropout's factor, as on a single device."""
        if seed is None:
            return None
        call, rate = self.rows.call, self.rows.wire.branch.dilation_rate
        rows = torch.tensor(grid.piece.rows, device=seed.device)
        heads = torch.tensor(grid.piece.heads, device=seed.device) * self.rows.wire.groups + group
        heads = heads + call.head_offset

        def keep(segments: slice, queries: Tensor, keys: Tensor) -> Tensor:
            kept = keep_mask(
                seed,
                call.dropout_p,
                rows=rows[segments].view(-1, 1, 1, 1, 1),
                heads=heads.view(-1, 1, 1, 1),
                branch=self.rows.index,
                queries=grid.origin + queries * rate,
                keys=grid.origin + keys * rate,
            )
            return kept.to(dtype) / (1.0 - call.dropout_p)

        return keep
