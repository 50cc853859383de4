"""Which keys each query sees, for any spec, block pattern and length: drawn and counted, with its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import BlockLayout, grids_of, keys_seen, layout_for, layout_of
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig, tiles_of
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.checks import COUNT, check_fields
from dilated_attention_pytorch.core.pattern import visible_pairs
from dilated_attention_pytorch.core.reach import reach_lines
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.core.spec import DilatedSpec

# A cell gets the first character whose share it exceeds.
_SHADES = ((2 / 3, "█"), (1 / 3, "▓"), (1 / 8, "▒"), (0.0, "░"))


@dataclass(frozen=True)
class View:
    """A pattern at a length, which `show` draws and counts."""

    spec: DilatedSpec
    tokens: int
    heads: int = setting(4, "number of heads", range=COUNT)
    head: int = setting(0, "the head to draw")
    head_dim: int = setting(64, "features per head, for the FLOPs")
    is_causal: bool = setting(False, "a row sees only itself and earlier rows", flag="causal")
    sparse: SparsePatternConfig | None = None
    layers: int = setting(12, "layers, for the reach", range=COUNT)

    def __post_init__(self) -> None:
        check_fields(self, tokens=COUNT)
        if not 0 <= self.head < self.heads:
            raise ValueError(f"head must be one of the {self.heads} heads, 0 to {self.heads - 1}, got {self.head}")
        if self.sparse is not None:
            object.__setattr__(self, "sparse", self.sparse.fitted(self.spec.segment_lengths))

    def layout(self) -> BlockLayout:
        """The block layout: without a pattern every tile is kept; content comes from random queries and keys."""
        if self.sparse is not None and self.sparse.depends_on_content:
            call = Call(spec=self.spec, is_causal=self.is_causal, sparse=self.sparse)
            generator = torch.Generator().manual_seed(self.sparse.seed)
            shape = (1, self.tokens, self.heads, self.head_dim)
            q, k = (torch.randn(shape, generator=generator) for _ in range(2))
            return layout_of(call, q, k)
        every_tile = SparsePatternConfig("local_window", sparsity_ratio=1.0, block_size=64)
        offsets = self.spec.offsets(self.heads)
        return layout_for(
            self.spec, self.tokens, offsets, self.sparse or every_tile, self.is_causal, torch.device("cpu")
        )

    @property
    def title(self) -> str:
        words = [f"segments {list(self.spec.segment_lengths)}", f"rates {list(self.spec.dilation_rates)}"]
        words += [f"{self.tokens:,} tokens", f"head {self.head} of {self.heads}"]
        words += ["causal"] if self.is_causal else []
        words += [self.spec.head_layout] if self.spec.head_layout != "interleaved" else []
        if self.sparse is not None:
            sparse = self.sparse
            words.append(f"{sparse.pattern_type} keeps {sparse.sparsity_ratio:g} in tiles of {sparse.block_size}")
            words += ["for random queries and keys"] if sparse.depends_on_content else []
        return ", ".join(words)


def density(view: View, rows: int, columns: int) -> Tensor:
    """`(rows, columns)`: for each cell of the picture, the share of its (query, key) pairs that the head sees.

    A pair counts once per branch that shows it, so a share may exceed 1.

    >>> density(View(DilatedSpec.of([4], [1]), tokens=8, heads=1), 2, 2)
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    n, layout = view.tokens, view.layout()
    block = layout.block_size
    rows, columns = min(rows, n), min(columns, n)
    seen = torch.zeros(rows, columns, dtype=torch.float64)
    for index, head, segment, at in grids_of(view.spec, view.spec.offsets(view.heads), n):
        if head != view.head:
            continue
        branch = layout.branches[index]
        assert branch is not None
        token = torch.tensor(at)
        row, column, tile = token * rows // n, token * columns // n, torch.arange(len(token)) // block
        tiles = tiles_of(len(token), block)
        mask = branch.mask(0, segment, head, tiles).double()
        if view.is_causal:  # within its own tile a row sees the keys up to its own, which are counted by distance
            mask.fill_diagonal_(0.0)
            for distance in range(min(block, len(token))):
                later = torch.arange(distance, len(token))
                later = later[later % block >= distance]
                seen.index_put_((row[later], column[later - distance]), torch.ones((), dtype=seen.dtype), True)
        seen += _tally(tile, row, tiles, rows).T @ mask @ _tally(tile, column, tiles, columns)
    token = torch.arange(n)
    height, width = (token * cells // n for cells in (rows, columns))
    return seen / torch.outer(height.bincount(minlength=rows), width.bincount(minlength=columns))


def _tally(tile: Tensor, cell: Tensor, tiles: int, cells: int) -> Tensor:
    """`(tiles, cells)`: how many rows of each tile lie in each cell."""
    return (tile * cells + cell).bincount(minlength=tiles * cells).view(tiles, cells).double()


def drawing(shares: Tensor) -> str:
    """A density in characters, darker where more is seen.

    >>> print(drawing(torch.tensor([[1.0, 0.0], [0.1, 0.5]])))
    █·
    ░▓
    """

    def character(share: float) -> str:
        return next((shade for least, shade in _SHADES if share > least), "·")

    return "\n".join("".join(map(character, row)) for row in shares.tolist())


def summary(view: View) -> list[str]:
    """Coverage, kept share, FLOPs, keys per row and reach, in words, counted exactly over all heads.

    The reach is that of the branches, without the block pattern.
    """
    n, spec = view.tokens, view.spec
    seen = keys_seen(view.layout(), spec, spec.offsets(view.heads), n, is_causal=view.is_causal)  # (n, H)
    pairs = int(seen.sum())
    whole = sum(
        visible_pairs(branch, offset, n, is_causal=view.is_causal)
        for branch, row in zip(spec.branches, spec.offsets(view.heads))
        for offset in row
    )
    every = view.heads * (n * (n + 1) // 2 if view.is_causal else n * n)
    flops, others = 4 * pairs * view.head_dim, f"dense attention takes {every / pairs:.2f}x"
    kept = []
    if view.sparse is not None:
        kept = [f"kept             {pairs / whole:.2%} of what the branches show without the block pattern"]
        others += f", the branches without the block pattern {whole / pairs:.2f}x"
    return [
        f"rows covered     {(seen > 0).double().mean().item():.2%} of all rows and heads",
        f"pairs seen       {pairs / every:.2%} of dense attention's, counted once per branch",
        *kept,
        f"forward          {flops / 1e9:,.4g} GFLOP with heads of {view.head_dim}; {others}",
        f"keys per row     {int(seen.min()):,} at least, {pairs / seen.numel():,.1f} on average, "
        f"{int(seen.max()):,} at most",
        *(
            f"{'reach' if not line else '':<17}{words}"
            for line, words in enumerate(reach_lines(spec, n, view.heads, view.layers, is_causal=view.is_causal))
        ),
    ]


def text(view: View, width: int = 64) -> Sequence[str]:
    """The title, the drawing and the summary, as lines. Characters are twice as high as wide."""
    lines = [view.title, "rows are queries, columns keys", ""]
    return [*lines, *drawing(density(view, max(1, width // 2), width)).splitlines(), "", *summary(view)]
