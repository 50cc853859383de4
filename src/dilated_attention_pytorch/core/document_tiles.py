"""Which tiles the documents of a call with lengths keep: those that each document would keep alone.

All segments of all documents are numbered (`segment_number`). Their grids of tiles follow each other, so that a *row of
tiles* belongs to one segment. Sizes here follow from shapes alone, and lengths are read on their device only: nothing
waits for it, and a CUDA graph chooses again whenever it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.block_pattern import (
    TILES_AT_ONCE,
    SparsePatternConfig,
    choose_tiles,
    preference,
    tiles_of,
)
from dilated_attention_pytorch.core.call import wide_dtype
from dilated_attention_pytorch.core.spans import segment_number
from dilated_attention_pytorch.core.spec import Branch

# Elements of the inputs that are gathered at once.
_ELEMENTS_AT_ONCE = 1 << 24

Chosen = tuple[Tensor, Tensor]
"""The kept key tiles of every row of tiles, `(rows, K)`, ascending and filled up; and how many each row keeps."""


class TileRows(NamedTuple):
    """The rows of tiles of all segments, as heads at `C` offsets read them."""

    grids: Tensor  # (C, S): the first row of each segment's grid
    token: Tensor  # (C, R): where the row's segment starts for these heads, counted over all batch rows
    grid_rows: Tensor  # (C, R): of the row's segment
    first: Tensor  # (C, R): the first row of the row's grid
    tile: Tensor  # (C, R): the row's number in its grid
    tiles: Tensor  # (C, R): the size of its grid; 0 for rows that no segment has


def tile_rows(
    spans: Tensor, batch: int, tokens: int, branch: Branch, offsets: Sequence[int], block_size: int
) -> TileRows:
    """The rows of tiles of a branch for heads at these offsets."""
    w, r = min(branch.segment_length, tokens), branch.dilation_rate
    start, length = _segments(spans, batch, tokens, w)
    # Not a copy from the CPU, which a CUDA graph could not capture.
    offset = torch.cat([torch.full((1, 1), o, device=spans.device) for o in offsets])
    grid_rows = -((offset - length) // r).clamp_max(0)  # (C, S)
    tiles = tiles_of(grid_rows, block_size)
    ends = tiles.cumsum(1)
    rows = torch.arange(batch * tokens // (r * block_size) + len(start), device=spans.device).expand(len(offsets), -1)
    segment = torch.searchsorted(ends, rows.contiguous(), right=True)
    here = segment < len(start)
    segment = segment.clamp_max(len(start) - 1)
    first = (ends - tiles).gather(1, segment)
    return TileRows(
        ends - tiles,
        start[segment] + offset,
        grid_rows.gather(1, segment),
        first,
        torch.where(here, rows - first, 0),
        torch.where(here, tiles.gather(1, segment), 0),
    )


def _segments(spans: Tensor, batch: int, tokens: int, w: int) -> tuple[Tensor, Tensor]:
    """`(S,)`: the first token, counted over all batch rows, and the length of every number of a segment.

    A number that no segment has comes with length 0.
    """
    if not len(spans):
        spans = spans.new_zeros(1, 2)
    begin, end = spans.long().clamp(0, tokens).unbind(1)
    document = torch.arange(len(spans), device=spans.device)
    batch_row = document if batch > 1 else torch.zeros_like(document)
    first = segment_number(batch_row, begin, document, w, tokens)  # ascends
    number = torch.arange(batch * tokens // w + len(spans), device=spans.device)
    document = (torch.searchsorted(first, number, right=True) - 1).clamp_min(0)
    before = (number - first[document]) * w  # in the document
    length = ((end - begin)[document] - before).clamp(0, w)
    start = (batch_row * tokens + begin)[document] + before
    return start, torch.where(before < 0, 0, length)


def by_position(config: SparsePatternConfig, rows: TileRows, most: int, branch: int, is_causal: bool) -> Chosen:
    """The tiles of a pattern that depends on positions only, row by row of every offset; grids have up to `most`."""
    chosen = []
    drawn = None
    if config.pattern_type == "random":
        drawn = _drawn(config, most, branch, rows.tile.device)
    for tile, tiles in zip(*(x.flatten().split(max(1, TILES_AT_ONCE // most)) for x in (rows.tile, rows.tiles))):
        preferred = preference(config, most, tile, branch) if drawn is None else drawn[tile].long()
        chosen.append(choose_tiles(config, preferred, tile, tiles[:, None], is_causal))
    kept, counts = map(torch.cat, zip(*chosen))
    return kept, counts


def _drawn(config: SparsePatternConfig, most: int, branch: int, device: torch.device) -> Tensor:
    """What `random` orders tiles by, for every row of the largest grid; a smaller one has the first of these numbers.

    Drawn on the CPU, and therefore remembered.
    """

    def draw() -> Tensor:
        return preference(config, most, torch.arange(most, device="cpu"), branch).to(device, torch.int32)

    return plans.remember("block layout", ("random", config.seed, branch, most, device), draw)


def by_content(
    config: SparsePatternConfig, rows: TileRows, most: int, query: Tensor, key: Tensor, rate: int, scale: float,
    is_causal: bool,
) -> Chosen:  # fmt: skip
    """The tiles with the highest products of mean query and mean key, row by row of every query head.

    `query` and `key` are `(B, N, C, group, D)`, one head per offset; keys have `group` 1. Under causality a tile's
    query is its first row instead.
    """
    q = _pooled(query, rows, config.block_size, rate, first_row=is_causal)  # (C, group, R, D)
    k = _pooled(key, rows, config.block_size, rate)
    C, group, R, _ = q.shape
    # A row's keys lie within `most` rows of it, so `most` rows meet three times as many.
    batches = tiles_of(R, most)
    q = F.pad(q, (0, 0, 0, batches * most - R)).unflatten(2, (batches, most))
    k = F.pad(k, (0, 0, most, (batches + 1) * most - R)).unfold(2, 3 * most, most)  # (C, 1, batches, D, 3 * most)
    first, tile, tiles = (
        F.pad(x, (0, batches * most - R)).view(C, 1, batches, most) for x in (rows.first, rows.tile, rows.tiles)
    )
    at = first - torch.arange(-1, batches - 1, device=q.device)[:, None] * most  # among the keys that its batch meets
    number = torch.arange(most, device=q.device)
    chosen = []
    at_once = max(1, TILES_AT_ONCE // (C * group * most * most))
    for few in (slice(s, s + at_once) for s in range(0, batches, at_once)):
        scores = q[:, :, few] @ k[:, :, few] * scale
        own = (at[:, :, few, :, None] + number).clamp(0, 3 * most - 1).expand(-1, group, -1, -1, -1)
        ranks = scores.gather(-1, own).sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        kept, counts = choose_tiles(config, ranks, tile[:, :, few], tiles[:, :, few, :, None], is_causal)
        chosen.append((kept, counts.expand(kept.shape[:-1])))
    kept, counts = (torch.cat(x, 2).flatten(2, 3)[:, :, :R] for x in zip(*chosen))
    return kept.flatten(0, 2), counts.flatten()


def _pooled(x: Tensor, rows: TileRows, block_size: int, rate: int, first_row: bool = False) -> Tensor:
    """`(C, group, R, D)`: the mean, or the first, of the grid rows of every row of tiles; 0 where there are none."""
    C, group, D = x.shape[2:]
    dtype = wide_dtype(x.dtype)
    within = torch.arange(1 if first_row else block_size, device=x.device)
    heads = torch.arange(C, device=x.device)[:, None, None]
    pooled = []
    at_once = max(1, _ELEMENTS_AT_ONCE // (C * group * D * len(within)))
    for token, grid_rows, tile, tiles in zip(
        *(part.split(at_once, 1) for part in (rows.token, rows.grid_rows, rows.tile, rows.tiles))
    ):
        row = tile[..., None] * block_size + within  # (C, rows, block)
        here = (row < grid_rows[..., None]) & (tiles[..., None] > 0)
        at = torch.where(here, token[..., None] + row * rate, 0)
        found = torch.where(here[..., None, None], x.flatten(0, 1)[at, heads], 0)  # (C, rows, block, group, D)
        pooled.append(found.sum(2, dtype=dtype) / here.sum(2).clamp_min(1)[..., None, None])
    return torch.cat(pooled, 1).transpose(1, 2)
