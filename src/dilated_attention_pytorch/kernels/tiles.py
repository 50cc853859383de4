"""The kept tiles of a block layout, for `blocks`: rows are copied into whole tiles, and keys gathered by tile.

Rows and keys become `(S, H, T, block, D)`. A chunk gathers the kept key tiles of some query tiles and is one batch of
matrix products. Only the scores of the kept tiles of one chunk exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_pattern import tiles_of
from dilated_attention_pytorch.core.pool import Take

# Scores, or elements of gathered keys, held at once: 16 MiB in float32, several times that with dropout.
_ELEMENTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Tiling:
    """The kept key tiles of every query tile, `(S or 1, H or 1, T, K)`, -1 where a row of tiles keeps fewer than K.

    The query tiles are those from number `first` on.
    """

    kept: Tensor
    block_size: int
    first: int = 0

    def cut(self, x: Tensor, take: Take) -> Tensor:
        """Rows `(S, M, H, ...)` as whole tiles `(S, H, T, block, ...)`, filled up with zeros."""
        S, M, H, *rest = x.shape
        T = tiles_of(M, self.block_size)
        tiles = take((S, H, T, self.block_size, *rest), dtype=x.dtype, device=x.device)
        rows = tiles.flatten(2, 3)
        rows[:, :, :M] = x.transpose(1, 2)
        rows[:, :, M:] = 0
        return tiles

    def join(self, tiles: Tensor, rows: int) -> Tensor:
        return tiles.flatten(2, 3)[:, :, :rows].transpose(1, 2)

    def chunks(self, q: Tensor, keys: int, is_causal: bool) -> Iterator[TileChunk]:
        """Chunks of tiles `q`, which see `keys` keys."""
        S, H, T, block, D = q.shape
        elements_per_row = H * self.kept.shape[3] * block * max(block, D)
        rows_at_once = max(1, min(T, _ELEMENTS_AT_ONCE // elements_per_row))
        segments_at_once = max(1, _ELEMENTS_AT_ONCE // (elements_per_row * rows_at_once))
        within = torch.arange(block, device=q.device)
        grid = torch.arange(S * H, device=q.device).view(S, H, 1, 1) * tiles_of(keys, block)
        for t in range(0, T, rows_at_once):
            tiles = slice(t, min(t + rows_at_once, T))
            numbers = (self.first + torch.arange(tiles.start, tiles.stop, device=q.device))[:, None] * block + within
            row_numbers = numbers[None, None, :, :, None]
            # Under causality early rows of tiles keep fewer: what none of these keeps is not gathered.
            kept = self.kept[:, :, tiles]
            kept = kept[..., : max(1, int((kept >= 0).sum(-1).max()))]
            tile = kept.clamp_min(0)
            key_numbers = (tile[..., None] * block + within).flatten(-2).unsqueeze(-2)
            hidden = (kept < 0).repeat_interleave(block, -1).unsqueeze(-2) | (key_numbers >= keys)
            if is_causal:
                hidden = hidden | (key_numbers > row_numbers)
            all_visible = not is_causal and not bool(hidden.any())
            for s in range(0, S, segments_at_once):
                segments = slice(s, min(s + segments_at_once, S))
                some = segments if kept.shape[0] > 1 else slice(0, 1)
                mask = None if all_visible else hidden[some]
                yield TileChunk(segments, tiles, grid[segments] + tile[some], mask, row_numbers, key_numbers[some])


class TileChunk(NamedTuple):
    """Some rows of tiles of some segments: where they are, the tiles that they keep, and which pairs are hidden."""

    segments: slice
    tiles: slice
    gathered: Tensor  # (S, H, R, K): where the kept tiles are among all of `flatten(0, 2)`
    hidden: Tensor | None  # broadcasts to (S, H, R, block, K * block); None where all is visible
    row_numbers: Tensor  # (1, 1, R, block, 1): of grid rows
    key_numbers: Tensor  # (S or 1, H or 1, R, 1, K * block)

    def rows(self, x: Tensor) -> Tensor:
        """The chunk's rows of `(S, H, T, block, ...)`, a view `(S, H, R, block, ...)`."""
        return x[self.segments, :, self.tiles]

    def keys(self, x: Tensor) -> Tensor:
        """The kept tiles of `(S, H, T, block, D)`: `(S, H, R, K * block, D)`."""
        tiles = x.flatten(0, 2).index_select(0, self.gathered.flatten())
        return tiles.view(*self.gathered.shape[:3], -1, x.shape[-1])

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add `(S, H, R, K * block, D)` to the tiles that it was taken from."""
        tiles, places = total.flatten(0, 2), self.gathered.flatten()
        x = x.reshape(-1, *tiles.shape[1:])
        if tiles.is_cuda:  # where index_add_ adds in any order
            tiles.index_put_((places,), x, accumulate=True)
        else:
            tiles.index_add_(0, places, x)
