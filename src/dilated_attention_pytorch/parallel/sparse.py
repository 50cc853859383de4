"""Gather for kept tiles: a rank's rows of a shared segment attend to the tiles that the whole segment's pattern keeps.

Tiles are numbered over the segment's grid rows, whichever rank holds them, so a tile may span two chunks. The rows of
all ranks come as in `gather`; where content chooses the tiles, the queries come too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import tiles_by_content, tiles_by_position
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig, tiles_of
from dilated_attention_pytorch.core.spec import Branch
from dilated_attention_pytorch.kernels.blocks import Block, Tiling
from dilated_attention_pytorch.parallel.exchange import BlockOf, Pass
from dilated_attention_pytorch.parallel.gather import Buffers, Gather, Seen, Share, joined
from dilated_attention_pytorch.parallel.wire import GridRows


class SparseGather(Gather):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.call.sparse is not None
        self.config: SparsePatternConfig = self.call.sparse
        self.kept: dict[int, Tensor] = {}

    def sent(self, x: Pass) -> tuple[Tensor, ...]:
        return (x.k, x.v, x.q) if self.config.depends_on_content else (x.k, x.v)

    def seen(self, share: Share, buffers: Buffers, x: Pass) -> Iterator[Seen]:
        """The rows of a segment's grid, the rank's own among them, as far as the queries of a chunk may see them."""
        parts = self.parts(share, buffers, x, with_own=True)
        blocks = share.own | share.seen
        for chunk, own in share.own.items():
            others = sorted((chunk, *share.segment.sources(chunk, self.wire.is_causal)))
            for offset, rows in own.items():
                holders = {other: len(blocks[other][offset].grid) for other in others if offset in parts[other]}
                k, v, *queries = (joined([*column]) for column in zip(*(parts[other][offset] for other in holders)))
                before = sum(count for other, count in holders.items() if other < chunk)
                tiles = self._tiles(share, offset, before, len(rows.grid), k, *queries)
                block = self._block(x, rows, share.segment.start + offset, tiles)
                yield Seen(chunk, offset, rows, k, v, holders, block, lead=before % self.config.block_size)

    def _block(self, x: Pass, rows: GridRows, origin: int, tiles: list[Tiling]) -> BlockOf:
        """The kept tiles of a grid whose first row is at position `origin`."""

        def position(number: Tensor) -> Tensor:
            return origin + number * self.wire.branch.dilation_rate

        def block(group: int) -> Block:
            keep = self.keep(x, rows, group, position, position)
            return Block(self.scale, self.call.is_causal, keep, tiles[group])

        return block

    def _tiles(
        self, share: Share, offset: int, before: int, rows: int, k: Tensor, q: Tensor | None = None
    ) -> list[Tiling]:
        """The kept tiles of `rows` rows that follow `before` others, for each query head of the key/value heads."""
        size, groups, segment = self.config.block_size, self.wire.groups, share.segment
        first, last = before // size, tiles_of(before + rows, size)
        if q is None:
            grid = range(segment.start + offset, segment.stop, self.wire.branch.dilation_rate)
            total = tiles_of(len(grid), size)
            if total not in self.kept:
                found, _ = tiles_by_position(self.config, total, self.index, self.call.is_causal)
                self.kept[total] = torch.where(found < total, found, -1)[None, None]
            return [Tiling(self.kept[total][:, :, first:last].to(k.device), size, first)] * groups
        most = tiles_of(k.shape[1], size)
        # One segment whose rows are all on the grid.
        whole = Branch(k.shape[1], 1)
        chosen, _ = tiles_by_content(self.call, self.config, q, k, whole, 0, most)
        chosen = torch.where(chosen < most, chosen, -1)[:, 0, :, :, first:last]  # (S, heads, groups, T, K)
        return [Tiling(chosen[:, :, g], size, first) for g in range(groups)]
