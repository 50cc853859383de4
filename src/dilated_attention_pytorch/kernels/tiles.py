"""Attention over kept tiles with its lse on `(S, M, H, D)` views, forward and backward: `dense` for a block layout.

Rows and keys are copied into whole tiles, `(S, H, T, block, D)`; a chunk gathers the kept key tiles of some query
tiles and is one batch of matrix products. No scores exist but those of a chunk's kept tiles. What is returned lies in
workspaces from `take`: the caller adds it up before it ends the lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_pattern import tiles_of
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.kernels.dense import Keep

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


@dataclass(frozen=True)
class _Chunk:
    """Some tile rows of some segments: where they are, the tiles they keep, and what of them is visible."""

    segments: slice
    tiles: slice
    gathered: Tensor  # (S, H, R, K): places of the kept tiles among all, for `flatten(0, 2)`
    sees: Tensor | None  # broadcasts to (S, H, R, block, K * block); None where all is visible
    rows: Tensor  # (1, 1, R, block, 1): numbers of the grid rows
    keys: Tensor  # (S or 1, H or 1, R, 1, K * block)

    def take(self, x: Tensor) -> Tensor:
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, keep: Keep | None, take: Take, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    rows, keys = q.shape[1], k.shape[1]
    q, k, v = (tiling.cut(x, take) for x in (q, k, v))
    out, lse = (take(shape, dtype=q.dtype, device=q.device) for shape in (q.shape, q.shape[:-1]))
    for chunk in _chunks(tiling, q, keys, is_causal):
        scores = _scores(q, k, scale, chunk)
        chunk_lse = scores.logsumexp(-1)
        weights = scores.sub_(chunk_lse.unsqueeze(-1)).exp_()
        if keep is not None:
            weights *= keep(chunk.segments, chunk.rows, chunk.keys)
        out[chunk.segments, :, chunk.tiles] = weights @ chunk.take(v)
        lse[chunk.segments, :, chunk.tiles] = chunk_lse
    return tiling.join(out, rows), tiling.join(lse, rows)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
    keep: Keep | None,
    take: Take,
    tiling: Tiling,
) -> tuple[Tensor, Tensor, Tensor]:
    """Against the merged lse and delta; a row past the end has do = 0 and delta = 0, and adds nothing."""
    rows, keys = q.shape[1], k.shape[1]
    do, q, k, v, delta, lse = (tiling.cut(x, take) for x in (do, q, k, v, delta, lse))
    dq, dk, dv = (take(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dk.zero_()
    dv.zero_()
    for chunk in _chunks(tiling, q, keys, is_causal):
        here = chunk.segments, slice(None), chunk.tiles
        weights = _scores(q, k, scale, chunk).sub_(lse[here].unsqueeze(-1)).exp_()
        d_weights = do[here] @ chunk.take(v).transpose(-1, -2)
        dropped = weights
        if keep is not None:
            factor = keep(chunk.segments, chunk.rows, chunk.keys)
            dropped = weights * factor
            d_weights *= factor
        chunk.add(dv, dropped.transpose(-1, -2) @ do[here])
        d_scores = d_weights.sub_(delta[here].unsqueeze(-1)).mul_(weights).mul_(scale)
        dq[here] = d_scores @ chunk.take(k)
        chunk.add(dk, d_scores.transpose(-1, -2) @ q[here])
    return tiling.join(dq, rows), tiling.join(dk, keys), tiling.join(dv, keys)


def _scores(q: Tensor, k: Tensor, scale: float, chunk: _Chunk) -> Tensor:
    scores = q[chunk.segments, :, chunk.tiles] @ chunk.take(k).transpose(-1, -2)
    scores.mul_(scale)
    if chunk.sees is not None:
        scores.masked_fill_(~chunk.sees, -torch.inf)
    return scores  # (S, H, R, block, K * block)


def _chunks(tiling: Tiling, q: Tensor, count: int, is_causal: bool) -> Iterator[_Chunk]:
    S, H, T, block, D = q.shape
    a_row = H * tiling.kept.shape[3] * block * max(block, D)
    rows_at_once = max(1, min(T, _ELEMENTS_AT_ONCE // a_row))
    segments_at_once = max(1, _ELEMENTS_AT_ONCE // (a_row * rows_at_once))
    within = torch.arange(block, device=q.device)
    grid = torch.arange(S * H, device=q.device).view(S, H, 1, 1) * tiles_of(count, block)
    for t in range(0, T, rows_at_once):
        tiles = slice(t, min(t + rows_at_once, T))
        rows = (tiling.first + torch.arange(tiles.start, tiles.stop, device=q.device))[:, None] * block + within
        rows = rows[None, None, :, :, None]
        # Under causality early rows of tiles keep fewer: what none of these keeps is not gathered.
        kept = tiling.kept[:, :, tiles]
        kept = kept[..., : max(1, int((kept >= 0).sum(-1).max()))]
        tile = kept.clamp_min(0)
        keys = (tile[..., None] * block + within).flatten(-2).unsqueeze(-2)
        there = (kept >= 0).repeat_interleave(block, -1).unsqueeze(-2)
        sees = there & (keys < count)
        if is_causal:
            sees = sees & (keys <= rows)
        whole = not is_causal and bool(sees.all())
        for s in range(0, S, segments_at_once):
            segments = slice(s, min(s + segments_at_once, S))
            some = segments if kept.shape[0] > 1 else slice(0, 1)
            mask = None if whole else sees[some]
            yield _Chunk(segments, tiles, grid[segments] + tile[some], mask, rows, keys[some])
