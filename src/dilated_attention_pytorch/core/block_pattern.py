"""Which tiles a block-sparse attention keeps: a pattern orders the tiles, and a budget cuts the order off.

The grid rows of a segment, renumbered from 0, are cut into tiles of `block_size`; the last one may be shorter. A row of
query tiles can see all key tiles, or under causality those up to its own. It keeps its own tile and the first of the
others in the pattern's order, `sparsity_ratio` of all of them, rounded. So every row meets the ratio within one tile.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import COUNT, SIZE, check_fields
from dilated_attention_pytorch.core.settings import setting

PatternType = Literal[
    "local_window", "dilated_sparse", "global_local", "strided", "random", "hierarchical", "content_adaptive"
]
PATTERN_TYPES: tuple[str, ...] = get_args(PatternType)

Count = TypeVar("Count", int, Tensor)

# Patterns that are a window: if its size is stated, tiles outside it are never kept.
_WINDOWED = ("local_window", "global_local")

# The distance between classes of preference; the order within a class stays below it.
_CLASS = 1 << 56

_DEFAULT_BLOCK = 128

# Tiles to sort at once, which takes about 40 bytes for each.
TILES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class SparsePatternConfig:
    """Which tiles a block-sparse attention keeps.

    Args:
        pattern_type: which tiles a row prefers, after its own tile:
            `local_window`: the nearest tiles;
            `dilated_sparse`: tiles at distances 1, 2, 4, 8, ..., then 3, 6, 12, ..., then 5, 10, 20, ...;
            `global_local`: the segment's first tiles, then the nearest;
            `strided`: every `1 / sparsity_ratio`-th tile, counted from its own;
            `random`: tiles drawn from `seed`, different ones in every branch, the same for all heads;
            `hierarchical`: the nearest, where a tile whose number is a multiple of 2^l counts as 2^l times nearer;
            `content_adaptive`: the highest products of mean query and mean key, per batch row, segment and head. Under
            causality the query is the tile's first row, which knows nothing of later rows.
        sparsity_ratio: the fraction of the visible tiles that a row keeps; 0.1 keeps a tenth.
        block_size: rows and keys of a tile, a power of two; at least 16 for fused kernels. By default 128, or the
            largest power of two that fits the shortest segment of the attention.
        local_window_size: the grid rows around its own that a row prefers to the pattern's order. In `local_window` and
            `global_local` it is also the limit: a window that is smaller than the ratio allows keeps less.
        global_tokens: the first grid rows of a segment, which all rows prefer to everything but their own tile; by
            default one tile in `global_local` and none elsewhere.
        seed: of `random`.

    >>> SparsePatternConfig("local_window", sparsity_ratio=0.25, block_size=64).block_size
    64
    """

    pattern_type: PatternType = "dilated_sparse"
    sparsity_ratio: float = setting(0.1, "the fraction of tiles to keep", flag="ratio")
    # None becomes 128, or what `fitted` chooses. The help text is for `show`, whose default is 64.
    block_size: int = setting(None, "rows of a tile (default: 64)", range=COUNT, flag="block")
    local_window_size: int | None = setting(
        None, "grid rows around a row that are kept first", range=COUNT, flag="window"
    )
    global_tokens: int | None = setting(None, "first grid rows of a segment that all rows keep first", range=SIZE)
    seed: int = setting(0, "seed of the pattern random", range={"least": 0})
    adapts: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        if self.block_size is None:
            object.__setattr__(self, "block_size", _DEFAULT_BLOCK)
            object.__setattr__(self, "adapts", True)
        check_fields(self)
        if not 0.0 < self.sparsity_ratio <= 1.0:
            raise ValueError(
                f"sparsity_ratio is the fraction of tiles that is kept, above 0 and at most 1, got "
                f"{self.sparsity_ratio}: 0.1 is 90 % sparse"
            )
        object.__setattr__(self, "sparsity_ratio", float(self.sparsity_ratio))
        if self.block_size & (self.block_size - 1):
            below = 1 << (self.block_size.bit_length() - 1)
            raise ValueError(
                f"block_size must be a power of two, got {self.block_size}: take {below} or {2 * below} instead"
            )

    @property
    def depends_on_content(self) -> bool:
        return self.pattern_type == "content_adaptive"

    def fitted(self, segment_lengths: tuple[int, ...]) -> SparsePatternConfig:
        """The config with tiles that fit these segments; a stated `block_size` above a segment is refused.

        >>> SparsePatternConfig().fitted((48, 512)).block_size
        32
        """
        shortest = min(segment_lengths)
        if self.adapts:
            return replace(self, block_size=min(_DEFAULT_BLOCK, 1 << (shortest.bit_length() - 1)))
        if self.block_size > shortest:
            raise ValueError(
                f"block_size={self.block_size} is larger than the shortest segment, {shortest} tokens: "
                f"take a power of two up to {1 << (shortest.bit_length() - 1)}, or longer segments"
            )
        return self


def tiles_of(rows: Count, block_size: int) -> Count:
    """How many tiles `rows` grid rows make.

    >>> tiles_of(130, 64)
    3
    """
    return -(-rows // block_size)


def budget(config: SparsePatternConfig, visible: Tensor) -> Tensor:
    """How many of `visible` tiles are kept: the ratio's share, rounded, and at least the row's own.

    >>> budget(SparsePatternConfig(sparsity_ratio=0.25), torch.tensor([0, 1, 4, 6, 100]))
    tensor([ 0,  1,  1,  2, 25])
    """
    share = (config.sparsity_ratio * visible.double() + 0.5).floor().long()
    return torch.minimum(share.clamp_min(1), visible)


def preference(config: SparsePatternConfig, tiles: int, rows: Tensor, branch: int) -> Tensor:
    """`(rows, tiles)`: the pattern's order of key tiles, lowest first, for some rows of a grid of tiles.

    A larger grid orders the tiles that it shares with a smaller one alike: documents of any length read one order.
    """
    column = torch.arange(tiles, device=rows.device)
    distance = (rows[:, None] - column).abs()
    if config.pattern_type == "dilated_sparse":  # the odd part of the distance
        return distance // (distance & -distance).clamp_min(1)
    if config.pattern_type == "strided":  # the teeth of a comb: every k / ratio, rounded down
        k = (distance.double() * config.sparsity_ratio).floor()
        teeth = [((k + more) / config.sparsity_ratio).floor() == distance for more in (0, 1)]
        return (~(teeth[0] | teeth[1])).long()
    if config.pattern_type == "random":
        # One generator per row, so that a row's tiles do not depend on how many rows are drawn at once.
        generators = [torch.Generator().manual_seed(_mixed((config.seed, branch, row))) for row in rows.tolist()]
        drawn = [torch.randint(1 << 30, (tiles,), generator=one, device="cpu") for one in generators]
        return torch.stack(drawn)
    if config.pattern_type == "hierarchical":
        weight = column & -column
        weight[:1].fill_(1 << tiles.bit_length())  # 0 is a multiple of every power; an index would wait for the device
        return distance // weight
    return torch.zeros_like(distance)  # ties go to the nearest


def _mixed(words: tuple[int, ...]) -> int:
    """One 63-bit seed from several numbers (a Weyl sequence through the finaliser of splitmix64)."""
    mixed = 0
    for word in words:
        mixed = (mixed + word + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed >> 1


def choose_tiles(
    config: SparsePatternConfig, preferred: Tensor, rows: Tensor, tiles: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The kept key tiles of some rows of grids of tiles.

    Args:
        preferred: `(..., R, T)`, whole numbers below 2^30: what the pattern orders by, lowest first.
        rows: broadcasts over `(..., R)`: the numbers of the rows.
        tiles: broadcasts over `(..., R, 1)`: how many tiles a row's grid has, at most T; rows past them keep nothing.

    Returns:
        `(..., R, K)`, ascending, T where a row keeps fewer than K; and how many each keeps, `(..., R)`.
    """
    T = preferred.shape[-1]
    i, j = rows[..., None], torch.arange(T, device=rows.device)
    distance = (i - j).abs()
    visible = (j < tiles) & (i < tiles)
    if is_causal:
        visible = visible & (j <= i)
    window = -1 if config.local_window_size is None else -(-config.local_window_size // (2 * config.block_size))
    always = config.block_size if config.pattern_type == "global_local" else 0
    first = tiles_of(always if config.global_tokens is None else config.global_tokens, config.block_size)
    # Own tile, then global tiles, then the window, then what the pattern says; ties go to the nearest, then the past.
    rank = torch.where(distance <= window, 2, 3)
    rank = torch.where(j < first, 1, rank)
    rank = torch.where(distance == 0, 0, rank)
    if config.pattern_type in _WINDOWED and window >= 0:
        visible = visible & (rank < 3)
    within = torch.where(rank == 3, preferred, 0) * (2 * T + 2) + 2 * distance + (j > i)
    order = torch.where(visible, rank, 4) * _CLASS + within
    counts = torch.minimum(budget(config, visible_tiles(rows, tiles, is_causal)), visible.sum(-1))
    most = int(budget(config, torch.tensor(T, device="cpu")))
    kept = order.argsort(dim=-1, stable=True)[..., :most]
    kept = torch.where(torch.arange(most, device=rows.device) < counts[..., None], kept, T)
    return kept.sort(dim=-1).values, counts


def visible_tiles(rows: Tensor, tiles: Tensor, is_causal: bool) -> Tensor:
    """`(..., R)`: how many tiles a row of grids of `tiles`, `(..., R, 1)`, can see; the ratio is a fraction of them."""
    tiles = tiles.squeeze(-1)
    seen = rows + 1 if is_causal else tiles
    return torch.where(rows < tiles, seen, 0)
