"""Block layouts: the kept tiles of every branch, compressed by rows and by columns.

Each segment and head of a branch has a *grid of tiles*, `T x T` tiles over the segment's grid rows. All grids of a
branch are stacked, so that one number identifies a *row* of tiles. Compressed by rows (CSR), the key tiles of row `i`
are `keys[key_first[i] : key_first[i + 1]]`. By columns (CSC), the query tiles that see key tile `i` are
`queries[query_first[i] : query_first[i + 1]]`. Both ascend, and count from the first tile of their grid.

If a pattern depends on positions only, all segments, heads and batch rows with the same number of tiles share a grid.
Such layouts are built on the CPU and remembered. `content_adaptive` has a grid for each of them, built on the tensors'
device without waiting for it. Documents with lengths have grids of their own segments, also built on the device:
`document_tiles` chooses their tiles, and the lists have room for any lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.block_pattern import (
    TILES_AT_ONCE,
    SparsePatternConfig,
    budget,
    choose_tiles,
    preference,
    tiles_of,
    visible_tiles,
)
from dilated_attention_pytorch.core.call import Call, wide_dtype
from dilated_attention_pytorch.core.checks import SIZE, checked
from dilated_attention_pytorch.core.document_tiles import by_content, by_position, tile_rows
from dilated_attention_pytorch.core.entries import spans_key
from dilated_attention_pytorch.core.pattern import check_table, grid_rows, heads_by_offset, segments
from dilated_attention_pytorch.core.plans import Remembers, check_cache
from dilated_attention_pytorch.core.spans import check_spans
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, OffsetTable


class BranchLayout(NamedTuple):
    """The kept tiles of one branch, int32; rows are numbered over all grids."""

    grids: Tensor  # (S, H): the first row of the grid of a segment and query head; with lengths by `segment_number`
    rows_per_batch_row: int  # from a grid to that of the next batch row; 0 if batch rows share their grids, or lengths
    key_first: Tensor  # (rows + 1,)
    keys: Tensor  # (kept tiles,)
    query_first: Tensor
    queries: Tensor
    query_turns: Tensor  # as long as `queries`: how many key tiles follow in that query tile's list of keys

    @property
    def key_lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lists of a kernel that walks over key tiles."""
        return self.grids, self.key_first, self.keys

    @property
    def query_lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lists of a kernel that walks over query tiles."""
        return self.grids, self.query_first, self.queries

    def kept_keys(self, b: Tensor, segments: Tensor, heads: Tensor, tiles: int) -> Tensor:
        """`(..., tiles, K)`: the key tiles of every query tile of `(...)` grids, padded with -1.

        `b, segments, heads` are batch rows, segments and query heads, and broadcast together.
        """
        first = self.grids[segments, heads].long() + b * self.rows_per_batch_row
        rows = first[..., None] + torch.arange(tiles, device=first.device)
        start, end = self.key_first[rows].long(), self.key_first[rows + 1].long()
        at = start[..., None] + torch.arange(int((end - start).max()), device=first.device)
        return torch.where(at < end[..., None], self.keys[at.clamp_max(self.keys.shape[0] - 1)].long(), -1)

    def mask(self, b: int, segment: int, head: int, tiles: int) -> Tensor:
        """`(tiles, tiles)` bool: which tiles of a grid are kept."""
        at = torch.tensor([b, segment, head], device=self.keys.device)
        kept = self.kept_keys(at[0], at[1], at[2], tiles)
        written = torch.zeros(tiles, tiles + 1, dtype=torch.bool, device=kept.device)
        return written.scatter_(1, torch.where(kept < 0, tiles, kept), True)[:, :tiles]


class BlockLayout(NamedTuple):
    """The kept tiles of every branch; None for a branch that no head is on."""

    block_size: int
    branches: tuple[BranchLayout | None, ...]


def layout_without_memory(spec: DilatedSpec, config: SparsePatternConfig) -> BlockLayout:
    """A layout on the device `meta`, for which the same kernels are compiled as for any other with such tiles."""
    some = torch.empty(1, dtype=torch.int32, device="meta")
    branch = BranchLayout(some, 0, some, some, some, some, some)
    return BlockLayout(config.block_size, (branch,) * len(spec.branches))


def allowed_pairs(
    layout: BlockLayout,
    spec: DilatedSpec,
    offsets: OffsetTable,
    b: int,
    n: int,
    first_segments: Sequence[int] | None = None,
) -> Tensor:
    """`(branches, H, n, n)` bool: which pairs of batch row `b` lie in a kept tile. O(n^2): for tests and references.

    Of a document with lengths, `first_segments` are the numbers of its first segment in each branch.
    """
    allowed = torch.zeros(len(spec.branches), len(offsets[0]), n, n, dtype=torch.bool, device="cpu")
    for index, head, segment, at in grids_of(spec, offsets, n):
        tile = torch.arange(len(at), device="cpu") // layout.block_size
        branch = layout.branches[index]
        assert branch is not None
        segment += 0 if first_segments is None else first_segments[index]
        mask = branch.mask(b, segment, head, tiles_of(len(at), layout.block_size)).cpu()
        positions = torch.tensor(at, device="cpu")
        allowed[index, head, positions[:, None], positions] = mask[tile[:, None], tile]
    return allowed


@checked(n=SIZE)
def keys_seen(
    layout: BlockLayout, spec: DilatedSpec, offsets: OffsetTable, n: int, *, is_causal: bool = False
) -> Tensor:
    """`(n, H)`: how many (branch, key) pairs each row sees through kept tiles, in the first batch row.

    >>> spec = DilatedSpec.of([64], [1])
    >>> config = SparsePatternConfig("local_window", sparsity_ratio=0.5, block_size=16)
    >>> layout = layout_for(spec, 64, spec.offsets(1), config, True, torch.device("cpu"))
    >>> keys_seen(layout, spec, spec.offsets(1), 64, is_causal=True)[[0, 15, 16, 63], 0]
    tensor([ 1, 16,  1, 32])
    """
    check_table(spec, offsets)
    if len(layout.branches) != len(spec.branches):
        raise ValueError(
            f"layout and spec must have equally many branches, got {len(layout.branches)} and {len(spec.branches)}: "
            "make the layout with layout_for(spec, ...)"
        )
    seen = torch.zeros(n, len(offsets[0]), dtype=torch.long, device="cpu")
    size = layout.block_size
    known: dict[tuple[int, int, int], Tensor] = {}
    for index, head, segment, at in grids_of(spec, offsets, n):
        branch = layout.branches[index]
        assert branch is not None
        grid = index, int(branch.grids[segment, head]), len(at)
        if grid not in known:
            tiles = tiles_of(len(at), size)
            mask = branch.mask(0, segment, head, tiles).cpu()
            keys = torch.full((tiles,), size, device="cpu")
            keys[-1] = len(at) - (tiles - 1) * size
            row = torch.arange(len(at), device="cpu")
            known[grid] = (mask * keys).sum(-1)[row // size]
            if is_causal:  # in its own tile a row sees the keys up to its own position
                known[grid] = known[grid] - keys[row // size] + row % size + 1
        seen[at.start : at.stop : at.step, head] += known[grid]
    return seen


def grids_of(spec: DilatedSpec, offsets: OffsetTable, n: int) -> Iterator[tuple[int, int, int, range]]:
    """Branch, head, segment and tokens of every grid that has rows."""
    for index, (branch, row) in enumerate(zip(spec.branches, offsets)):
        for (segment, (start, length)), (head, offset) in itertools.product(
            enumerate(segments(n, branch.segment_length)), enumerate(row)
        ):
            if offset is not None and offset < length:
                yield index, head, segment, range(start + offset, start + length, branch.dilation_rate)


@checked()
def layout_of(
    call: Call, query: Tensor, key: Tensor, cache: Remembers | None = None, spans: Tensor | None = None
) -> BlockLayout:
    """The layout of a call with a block pattern, remembered if there is a cache.

    With `spans`, each document keeps the tiles that it would keep alone.
    """
    config = call.sparse
    if config is None:
        raise ValueError("layout_of takes a call with a sparse_config, got one without: it keeps every tile")
    check_cache(cache)
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query and key must be (batch, tokens, heads, head_dim), got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    B, N, H, kv_heads, device = *query.shape[:3], key.shape[2], query.device
    if spans is not None and check_spans(spans, B).device != device:
        raise ValueError(f"query and spans must share a device, got {device} and {spans.device}")

    def build() -> BlockLayout:
        if spans is not None:
            branches = range(len(call.spec.branches))
            found = [_branch_of_documents(call, config, i, query.detach(), key.detach(), spans) for i in branches]
            return BlockLayout(config.block_size, tuple(found))
        if config.depends_on_content:
            return _layout_from_content(call, config, query.detach(), key.detach())
        return layout_for(call.spec, N, call.query_head_offsets(H, kv_heads), config, call.is_causal, device)

    lengths = spans_key(spans)
    if config.depends_on_content:
        # Autocast may have ended when backward chooses again, and must not change the choice.
        with torch.autocast(device.type, enabled=False):
            return build()
    if cache is None or lengths is None:
        return build()
    heads = (call.table, call.head_offset, call.total_heads, H, kv_heads)
    kind = (call.spec, config, call.is_causal, heads, N, device)
    return cache.remember("block layout", kind if spans is None else (*kind, B, lengths), build)


@checked(tokens=SIZE)
def layout_for(
    spec: DilatedSpec,
    tokens: int,
    offsets: OffsetTable,
    config: SparsePatternConfig,
    is_causal: bool,
    device: torch.device,
) -> BlockLayout:
    """The layout of a pattern that does not depend on content, for query heads at these offsets.

    >>> spec = DilatedSpec.of([64], [1])
    >>> config = SparsePatternConfig("local_window", sparsity_ratio=0.5, block_size=16)
    >>> layout_for(spec, 64, spec.offsets(1), config, False, torch.device("cpu")).branches[0].mask(0, 0, 0, 4).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    check_table(spec, offsets)
    branches: list[BranchLayout | None] = []
    for index, (branch, row) in enumerate(zip(spec.branches, offsets)):
        tiles = _tiles(branch, row, tokens, config.block_size)
        sizes = sorted(set(tiles.flatten().tolist()) - {0})
        if not sizes:
            branches.append(None)
            continue
        starts = dict(zip(sizes, itertools.accumulate(sizes, initial=0)))
        chosen = [tiles_by_position(config, size, index, is_causal) for size in sizes]
        width = max(kept.shape[1] for kept, _ in chosen)
        kept = torch.cat([F.pad(kept, (0, width - kept.shape[1])) for kept, _ in chosen])
        counts = torch.cat([count for _, count in chosen])
        first = torch.cat([torch.full((size,), starts[size], device="cpu") for size in sizes])
        grids = torch.tensor([[starts.get(size, 0) for size in row] for row in tiles.tolist()], device="cpu")
        branches.append(_compressed(grids, 0, first, kept, counts, int(counts.sum()), config, device))
    return BlockLayout(config.block_size, tuple(branches))


def tiles_by_position(config: SparsePatternConfig, tiles: int, branch: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The kept key tiles of every row of a grid, padded with `tiles`, and how many each row keeps."""
    size = torch.tensor([[tiles]], device="cpu")
    chosen = [
        choose_tiles(config, preference(config, tiles, rows, branch), rows, size, is_causal)
        for rows in torch.arange(tiles, device="cpu").split(max(1, TILES_AT_ONCE // tiles))
    ]
    kept, counts = map(torch.cat, zip(*chosen))
    return kept, counts


def _tiles(branch: Branch, offsets: tuple[int | None, ...], tokens: int, block_size: int) -> Tensor:
    """`(S, H)`: how many tiles each segment has for each head; 0 where a head is absent or has no rows."""
    absent = torch.zeros(len(range(0, tokens, branch.segment_length)), dtype=torch.int64, device="cpu")
    rows = [absent if o is None else _rows_on_grid(branch, o, tokens, absent.device) for o in offsets]
    return tiles_of(torch.stack(rows, 1), block_size)


def _compressed(
    grids: Tensor, rows_per_batch_row: int, first: Tensor, kept: Tensor, counts: Tensor, entries: int,
    config: SparsePatternConfig, device: torch.device,
) -> BranchLayout:  # fmt: skip
    """The kept tiles `(rows, K)` as CSR and CSC; `first` is the first row of each row's grid.

    The lists have `entries` places, at least one for each kept tile.
    """
    if entries >= 1 << 31:
        raise ValueError(
            f"{entries:,} kept tiles are more than 32-bit pointers count: "
            f"take a block_size above {config.block_size} or a smaller sparsity_ratio than {config.sparsity_ratio}"
        )
    rows = counts.shape[0]
    every = torch.arange(rows + 1, device=counts.device)
    key_first = F.pad(counts.cumsum(0), (1, 0))
    number = torch.arange(entries, device=counts.device)
    row = torch.searchsorted(key_first, number, right=True) - 1  # of each entry; `rows` where there is none
    is_entry, row = row < rows, row.clamp_max(rows - 1)
    place = (number - key_first[row]).clamp_max(kept.shape[1] - 1)
    keys = kept[row, place]
    column, order = torch.where(is_entry, first[row] + keys, rows).sort(stable=True)
    queries, turns = (row - first[row])[order], (counts[row] - 1 - place)[order]
    lists = (grids, key_first, keys, torch.searchsorted(column, every), queries, turns)
    grids, *rest = (x.to(device, torch.int32) for x in lists)
    return BranchLayout(grids, rows_per_batch_row, *rest)


def _layout_from_content(call: Call, config: SparsePatternConfig, query: Tensor, key: Tensor) -> BlockLayout:
    """The tiles with the highest products of mean query and mean key; nothing here waits for the device.

    Under causality a tile's query is its first row instead, which must not depend on the rows after it.
    """
    (B, N, H), kv_heads, device = query.shape[:3], key.shape[2], query.device
    group = H // kv_heads
    query, key = query.unflatten(2, (kv_heads, group)), key.unsqueeze(3)  # (B, N, Hkv, group, D), (B, N, Hkv, 1, D)
    branches: list[BranchLayout | None] = []
    for branch, offsets in zip(call.spec.branches, call.offsets(H, kv_heads)):
        tiles = _tiles(branch, offsets, N, config.block_size)
        S, T = tiles.shape[0], int(tiles.max())
        if T == 0:
            branches.append(None)
            continue
        K = int(budget(config, torch.tensor(T, device="cpu")))
        kept = torch.full((B, S, kv_heads, group, T, K), T, device=device)
        counts = torch.zeros((B, S, kv_heads, group, T), dtype=torch.int64, device=device)
        for offset, heads in heads_by_offset(offsets):
            kept[:, :, heads], counts[:, :, heads] = tiles_by_content(
                call, config, query[:, :, heads], key[:, :, heads], branch, offset, T
            )
        starts = torch.arange(B * S * H, device=device) * T
        grids, first = starts[: S * H].view(S, H), starts.repeat_interleave(T)
        present = sum(offset is not None for offset in offsets)
        entries = B * present * group * _most_kept(config, S * T, T, call.is_causal)
        found = kept.flatten(0, 4), counts.flatten()
        branches.append(_compressed(grids, S * H * T, first, *found, entries, config, device))
    return BlockLayout(config.block_size, tuple(branches))


def _branch_of_documents(
    call: Call, config: SparsePatternConfig, index: int, query: Tensor, key: Tensor, spans: Tensor
) -> BranchLayout | None:
    """The tiles of one branch that each document would keep alone; nothing here waits for the device.

    A list of rows of tiles belongs to one query head where content chooses, else to all heads at an offset.
    """
    (B, N, H), kv_heads, branch = query.shape[:3], key.shape[2], call.spec.branches[index]
    group, w, r = H // kv_heads, min(branch.segment_length, N), branch.dilation_rate
    # An offset of w has no rows.
    offsets = [w if offset is None else offset for offset in call.offsets(H, kv_heads)[index]]
    present = [head for head, offset in enumerate(offsets) if offset < w]
    if not present:
        return None
    most = tiles_of(grid_rows(w, r, min(offsets)), config.block_size)
    if config.depends_on_content:
        heads, per_offset = slice(present[0], present[-1] + 1), group
        listed = offsets[heads]
        rows = tile_rows(spans, B, N, branch, listed, config.block_size)
        q, k = query.unflatten(2, (kv_heads, group))[:, :, heads], key[:, :, heads, None]
        chosen = by_content(config, rows, most, q, k, r, call.softmax_scale(q.shape[-1]), call.is_causal)
        list_of = [head - heads.start * group for head in range(H)]
    else:
        listed, per_offset = sorted({offsets[head] for head in present}), 1
        rows = tile_rows(spans, B, N, branch, listed, config.block_size)
        chosen = by_position(config, rows, most, index, call.is_causal)
        list_of = [listed.index(offset) if offset < w else -1 for offset in offsets for _ in range(group)]
    lists, R = len(listed) * per_offset, rows.tile.shape[1]
    starts = torch.arange(lists, device=query.device).view(-1, per_offset, 1) * R
    first = (starts + rows.first[:, None]).flatten()
    grids = (starts + rows.grids[:, None]).flatten(0, 1)  # (lists, S)
    grids = torch.stack([grids[n if 0 <= n < lists else 0] for n in list_of], 1)  # absent heads read none
    entries = lists * _most_kept(config, R, most, call.is_causal)
    return _compressed(grids, 0, first, *chosen, entries, config, query.device)


def _most_kept(config: SparsePatternConfig, rows: int, tiles: int, is_causal: bool) -> int:
    """The most tiles that `rows` rows of grids of up to `tiles` tiles can keep, in whole grids as far as possible."""
    rows_of_grid, size = torch.arange(tiles, device="cpu"), torch.tensor([[tiles]], device="cpu")
    kept = budget(config, visible_tiles(rows_of_grid, size, is_causal)).cumsum(-1)
    whole, rest = divmod(rows, tiles)
    return whole * int(kept[-1]) + (int(kept[rest - 1]) if rest else 0)


def tiles_by_content(
    call: Call, config: SparsePatternConfig, query: Tensor, key: Tensor, branch: Branch, offset: int, most: int
) -> tuple[Tensor, Tensor]:
    """The kept key tiles of every segment's grid, `(B, S, heads, group, most, K)`, and how many each row keeps.

    `query` and `key` are `(B, N, heads, group, D)`, of heads at one offset; keys have `group` 1.
    """
    pooled_q = _pooled(query, branch, offset, config.block_size, most, first_row=call.is_causal)
    pooled_k = _pooled(key, branch, offset, config.block_size, most)
    on_grid = _rows_on_grid(branch, offset, query.shape[1], query.device)
    tiles = tiles_of(on_grid, config.block_size).view(1, -1, 1, 1, 1, 1)
    B, S, heads, group, T, D = pooled_q.shape
    rows, chosen = torch.arange(T, device=query.device), []
    at_once = max(1, TILES_AT_ONCE // (B * heads * group * T * T))
    for few in (slice(s, s + at_once) for s in range(0, S, at_once)):
        scores = pooled_q[:, few] @ pooled_k[:, few].transpose(-1, -2) * call.softmax_scale(D)
        ranks = scores.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        kept, counts = choose_tiles(config, ranks, rows, tiles[:, few], call.is_causal)
        chosen.append((kept, counts.expand(kept.shape[:-1])))
    kept, counts = (torch.cat(x, 1) for x in zip(*chosen))
    return kept, counts


def _pooled(x: Tensor, branch: Branch, offset: int, block_size: int, T: int, first_row: bool = False) -> Tensor:
    """`(B, S, heads, group, T, D)`: the mean, or the first, of every tile's rows; 0 for a tile without rows."""
    w, r = branch.segment_length, branch.dilation_rate
    on_grid = _rows_on_grid(branch, offset, x.shape[1], x.device)  # (S,)
    S = on_grid.shape[0]
    filled = _filled(x, S * w).unflatten(1, (S, w))[:, :, offset::r]
    filled = filled[:, :, : T * block_size].transpose(1, 2)
    filled = _filled(filled, T * block_size).unflatten(1, (T, block_size))  # (B, T, block, S, heads, group, D)
    dtype = wide_dtype(x.dtype)
    if first_row:
        pooled = filled[:, :, 0].to(dtype)
    else:
        rows = (on_grid - torch.arange(T, device=x.device)[:, None] * block_size).clamp(1, block_size)  # (T, S)
        pooled = filled.sum(2, dtype=dtype) / rows[:, :, None, None, None]
    return pooled.permute(0, 2, 3, 4, 1, 5)


def _filled(x: Tensor, rows: int) -> Tensor:
    """`x` with zeros appended to its second dimension, up to `rows`."""
    if x.shape[1] == rows:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, rows - x.shape[1]))


def _rows_on_grid(branch: Branch, offset: int, tokens: int, device: torch.device) -> Tensor:
    """`(S,)`: the grid rows of each segment."""
    starts = torch.arange(0, tokens, branch.segment_length, device=device)
    length = (tokens - starts).clamp_max(branch.segment_length)
    return -((offset - length) // branch.dilation_rate).clamp_max(0)
