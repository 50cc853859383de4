"""Gather for kept tiles: a rank's rows of a shared segment attend to the tiles that the whole segment's pattern keeps.

Tiles are numbered over the segment's grid rows, whichever rank holds them, so a tile may span two pieces. The rows of
all ranks come as in `gather`; where content chooses the tiles, the queries come too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import tiles_by_content, tiles_by_position
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig, tiles_of
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.spec import Branch
from dilated_attention_pytorch.kernels import blocks
from dilated_attention_pytorch.kernels.blocks import Block, Keep
from dilated_attention_pytorch.kernels.tiles import Tiling
from dilated_attention_pytorch.parallel.exchange import BackwardPass, Pass
from dilated_attention_pytorch.parallel.gather import Buffers, Gather, Share, joined
from dilated_attention_pytorch.parallel.sharding import sources
from dilated_attention_pytorch.parallel.wire import GridRows


@dataclass(frozen=True)
class _Grid:
    """The rows of a segment at one offset, as far as queries of one piece may see them: `(S, M, heads, groups, D)`."""

    offset: int
    piece: int
    rows: GridRows  # of these queries
    before: int  # how many rows of the grid come before the queries
    origin: int  # the position of the grid's first row
    total: int  # the grid's rows, seen or not
    holders: dict[int, int]  # how many of the rows each piece of the segment holds, in order
    k: Tensor
    v: Tensor
    q: Tensor | None  # where content chooses the tiles


class SparseGather(Gather):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.call.sparse is not None
        self.config: SparsePatternConfig = self.call.sparse
        self.kept: dict[int, Tensor] = {}

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        return (x.k, x.v, x.q) if self.config.depends_on_content else (x.k, x.v)

    def merge_rows(self, share: Share, buffers: Buffers, x: Pass, out: Tensor, lse: Tensor) -> None:
        for grid in self._grids(share, buffers, x):
            views = [grid.rows.view(y, self.first[grid.piece]) for y in (x.q, out, lse)]
            for g, tiling in enumerate(self._tilings(grid)):
                q, own_out, own_lse = (y[:, :, :, g] for y in views)
                with x.resources.workspaces() as take:
                    inputs = (self._in_tiles(q, grid).to(lse.dtype), *_keys(grid, lse.dtype))
                    keep = self._keep(x, grid, g)
                    block = Block(self.scale, self.call.is_causal, keep, tiling)
                    found = blocks.partial(*inputs, block, take)
                    merge_(own_out, own_lse, *(y[:, self._lead(grid) :] for y in found))

    def found_gradients(
        self, share: Share, buffers: Buffers, x: BackwardPass, dq: Tensor
    ) -> Iterator[tuple[int, dict[int, int], tuple[Tensor, Tensor]]]:
        for grid in self._grids(share, buffers, x):
            dk, dv = (x.take(y.shape, dtype=x.lse.dtype, device=y.device).zero_() for y in (grid.k, grid.v))
            views = [grid.rows.view(y, self.first[grid.piece]) for y in (x.do, x.q, x.delta, x.lse, dq)]
            for g, tiling in enumerate(self._tilings(grid)):
                do, q, delta, lse, own_dq = (y[:, :, :, g] for y in views)
                with x.resources.workspaces() as take:
                    do, q, delta, lse = (self._in_tiles(y, grid).to(x.lse.dtype) for y in (do, q, delta, lse))
                    k, v = _keys(grid, lse.dtype)
                    keep = self._keep(x, grid, g)
                    block = Block(self.scale, self.call.is_causal, keep, tiling)
                    found = blocks.gradients(do, q, k, v, None, delta, lse, block, take)
                    own_dq += found[0][:, self._lead(grid) :]
                    for total, grad in zip((dk, dv), found[1:]):
                        total.squeeze(3).add_(grad)
            yield grid.offset, grid.holders, (dk, dv)

    def _grids(self, share: Share, buffers: Buffers, x: Pass) -> Iterator[_Grid]:
        parts = self.parts(share, buffers, x, with_own=True)
        segment, rate = share.segment, self.wire.branch.dilation_rate
        blocks = share.own | share.seen
        for piece, own in share.own.items():
            seen = sorted((piece, *sources(segment, piece, self.wire.is_causal)))
            for offset, rows in own.items():
                holders = {other: len(blocks[other][offset].grid) for other in seen if offset in parts[other]}
                k, v, *queries = (joined([*column]) for column in zip(*(parts[other][offset] for other in holders)))
                before = sum(count for other, count in holders.items() if other < piece)
                origin = segment.start + offset
                total = len(range(origin, segment.stop, rate))
                yield _Grid(offset, piece, rows, before, origin, total, holders, k, v, queries[0] if queries else None)

    def _tilings(self, grid: _Grid) -> Iterator[Tiling]:
        """The kept tiles of the queries' rows, for each query head of the key/value heads."""
        size, groups = self.config.block_size, self.wire.groups
        first, last = grid.before // size, tiles_of(grid.before + len(grid.rows.grid), size)
        if grid.q is None:
            total = tiles_of(grid.total, size)
            if total not in self.kept:
                found, _ = tiles_by_position(self.config, total, self.index, self.call.is_causal)
                self.kept[total] = torch.where(found < total, found, -1)[None, None]
            kept = self.kept[total][:, :, first:last].to(grid.k.device)
            for _ in range(groups):
                yield Tiling(kept, size, first)
            return
        rows = grid.k.shape[1]
        most = tiles_of(rows, size)
        # One segment whose rows are all on the grid.
        chosen, _ = tiles_by_content(self.call, self.config, grid.q, grid.k, Branch(rows, 1), 0, most)
        chosen = torch.where(chosen < most, chosen, -1)[:, 0, :, :, first:last]  # (S, heads, groups, T, K)
        for g in range(groups):
            yield Tiling(chosen[:, :, g], size, first)

    def _lead(self, grid: _Grid) -> int:
        """The rows of the first tile that are in an earlier piece."""
        return grid.before % self.config.block_size

    def _in_tiles(self, x: Tensor, grid: _Grid) -> Tensor:
        """Rows `(S, M, ...)`, after zeros for the rows of their first tile that are in an earlier piece."""
        lead = self._lead(grid)
        return x if lead == 0 else torch.cat([x.new_zeros((x.shape[0], lead, *x.shape[2:])), x], 1)

    def _keep(self, x: Pass, grid: _Grid, group: int) -> Keep | None:
        def position(number: Tensor) -> Tensor:
            return grid.origin + number * self.wire.branch.dilation_rate

        return self.keep(x, grid.rows, group, position, position)


def _keys(grid: _Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return grid.k.squeeze(3).to(dtype), grid.v.squeeze(3).to(dtype)
