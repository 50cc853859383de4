"""Pictures of patterns as SVG, written without any plotting library.

`python -m dilated_attention_pytorch.tools.pictures FOLDER` draws the ones of the documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.pattern import dense_mask, grid_rows, segments
from dilated_attention_pytorch.core.row_weights import RowWeights
from dilated_attention_pytorch.core.spec import HEAD_LAYOUTS, DilatedSpec
from dilated_attention_pytorch.models.slide_attention import on_slide

_CELL, _GAP = 14, 18
_EMPTY, _BORDER, _INK = "#f1f3f5", "#495057", "#212529"
# One colour a branch; and shades for how many branches show a key.
_BRANCHES = ("#1971c2", "#e8590c", "#2f9e44", "#9c36b5", "#c2255c")
_COUNTS = (_EMPTY, "#a5d8ff", "#4dabf7", "#1971c2", "#0b3d6e")


def grids_svg(spec: DilatedSpec, n: int, heads: int) -> str:
    """Which tokens each head reads in each branch: a row a head, segment borders in between."""
    offsets = spec.offsets(heads)
    rows, y = [], _GAP
    for b, branch in enumerate(spec.branches):
        rows.append(_text(0, y, f"w = {branch.segment_length}, r = {branch.dilation_rate}"))
        y += 8
        for h in range(heads):
            offset = offsets[b][h]
            rows.append(_text(0, y + 11, f"head {h}"))
            for start, length in segments(n, branch.segment_length):
                read = range(offset, length, branch.dilation_rate) if offset is not None else range(0)
                colours = [_BRANCHES[b % len(_BRANCHES)] if i in read else _EMPTY for i in range(length)]
                rows += [_cell(50 + (start + i) * _CELL, y, colour) for i, colour in enumerate(colours)]
                rows.append(_frame(50 + start * _CELL, y, length * _CELL, _CELL))
            y += _CELL + 4
        y += _GAP
    return _svg(60 + n * _CELL, y, rows)


def pattern_svg(spec: DilatedSpec, n: int, head: int, heads: int, *, is_causal: bool = False) -> str:
    """Who sees whom for one head: each branch alone, then all of them; a darker cell is shown by more branches."""
    shown = dense_mask(spec, spec.offsets(heads), n, is_causal=is_causal)[:, head].int().tolist()  # (branches, n, n)
    panels: list[tuple[str, Callable[[int, int], str]]] = []
    for b, branch in enumerate(spec.branches):
        colour = _BRANCHES[b % len(_BRANCHES)]
        panels.append(
            (
                f"w = {branch.segment_length}, r = {branch.dilation_rate}",
                lambda i, j, b=b, colour=colour: colour if shown[b][i][j] else _EMPTY,  # type: ignore[misc]
            )
        )
    deepest = len(_COUNTS) - 1
    panels.append(("merged", lambda i, j: _COUNTS[min(deepest, sum(branch[i][j] for branch in shown))]))
    rows, side = [], n * _CELL
    for index, (title, colour_of) in enumerate(panels):
        x = index * (side + _GAP)
        rows.append(_text(x, 12, title))
        rows += [_cell(x + j * _CELL, 20 + i * _CELL, colour_of(i, j)) for i in range(n) for j in range(n)]
        rows.append(_frame(x, 20, side, side))
    rows.append(_text(0, side + 38, "rows: queries, columns: keys"))
    return _svg(len(panels) * (side + _GAP), side + 44, rows)


def density_svg(
    shares: Sequence[Sequence[float]], title: str, notes: Sequence[str], axes: tuple[str, str] = ("queries", "keys")
) -> str:
    """A map of who sees whom in cells, darker where a cell's rows see more of its keys; notes stand below.

    `axes` says what rows and columns are, where it is another map.
    """
    cell = max(2.0, 512 / len(shares[0]))
    width, height = cell * len(shares[0]), cell * len(shares)
    rows = [_text(0, 12, title)]
    for i, row in enumerate(shares):
        rows += [
            f'<rect x="{j * cell:g}" y="{20 + i * cell:g}" width="{cell:g}" height="{cell:g}" fill="{_shade(share)}"/>'
            for j, share in enumerate(row)
            if share > 0
        ]
    rows.append(_frame(0, 20, width, height))
    rows += [
        _text(0, 36 + height + 14 * i, note) for i, note in enumerate((f"rows: {axes[0]}, columns: {axes[1]}", *notes))
    ]
    longest = max(map(len, (title, *notes)))
    return _svg(max(width, 6 * longest) + 4, height + 40 + 14 * len(notes), rows)


def write_density(
    path: Path,
    shares: Sequence[Sequence[float]],
    title: str,
    notes: Sequence[str],
    axes: tuple[str, str] = ("queries", "keys"),
) -> None:
    """A density as a file, `.svg` or `.png`; PNG needs matplotlib."""
    if check_picture(path) == ".svg":
        _write(path, density_svg(shares, title, notes, axes))
        return
    figure = _figure(8, 9)
    plot = figure.add_subplot()
    plot.imshow([[_share_of_ink(share) for share in row] for row in shares], cmap="Blues", vmin=0, vmax=1)
    plot.set(title=title, xlabel=axes[1], ylabel=axes[0], xticks=[], yticks=[])
    plot.title.set_fontsize(8)
    figure.text(0.1, 0.02, "\n".join(notes), fontsize=8, family="monospace")
    _write(path, figure)


Curves = Mapping[str, Sequence[tuple[float, float]]]
Spans = Sequence[tuple[str, float, float]]


def timeline_svg(curves: Curves, title: str, spans: Spans = ()) -> str:
    """Bytes over seconds, a step a point, one colour a curve; `spans`, (name, from, to), are shaded by turns."""
    left, top, width, height = 70, 30, 640, 260
    unit, scale = _byte_unit(max((y for curve in curves.values() for _, y in curve), default=0))
    points = [point for curve in curves.values() for point in curve]
    ends = [x for x, _ in points] + [x for _, start, end in spans for x in (start, end)]
    first, last = min(ends, default=0.0), max(ends, default=1.0)
    most = max([y for _, y in points], default=0) or 1.0

    def across(x: float) -> float:
        return left + width * (x - first) / ((last - first) or 1.0)

    def up(y: float) -> float:
        return top + height * (1 - y / most)

    rows = [_text(0, 14, title)]
    for index, (name, start, end) in enumerate(spans):
        if index % 2 == 0:
            rows.append(_cell(across(start), top, _EMPTY, max(0.0, across(end) - across(start)), height))
        rows.append(_text(across(start) + 3, top + 12, name))
    for tick in range(5):
        y = most * tick / 4
        rows.append(_text(0, up(y) + 4, f"{y / scale:.3g} {unit}"))
        rows.append(_text(left + width * tick / 4 - 10, top + height + 16, f"{(last - first) * tick / 4:.3g} s"))
    for index, (name, curve) in enumerate(curves.items()):
        colour = _BRANCHES[index % len(_BRANCHES)]
        path: list[str] = []
        before = None
        for x, y in curve:
            path += [] if before is None else [f"{across(x):.1f},{up(before):.1f}"]
            path.append(f"{across(x):.1f},{up(y):.1f}")
            before = y
        rows.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        peak = max((y for _, y in curve), default=0)
        rows.append(_text(left, top + height + 34 + 14 * index, f"{name}, at most {peak / scale:.4g} {unit}", colour))
    rows.append(_frame(left, top, width, height))
    return _svg(left + width + 20, top + height + 44 + 14 * len(curves), rows)


def write_timeline(path: Path, curves: Curves, title: str, spans: Spans = ()) -> None:
    """Bytes over seconds as a file, `.svg` or `.png`; PNG needs matplotlib."""
    if check_picture(path) == ".svg":
        _write(path, timeline_svg(curves, title, spans))
        return
    figure = _figure(9, 4.5)
    axes = figure.add_subplot()
    unit, scale = _byte_unit(max((y for curve in curves.values() for _, y in curve), default=0))
    for name, curve in curves.items():
        axes.step([x for x, _ in curve], [y / scale for _, y in curve], where="post", label=name)
    for index, (name, start, end) in enumerate(spans):
        axes.axvspan(start, end, color="black", alpha=0.06 if index % 2 == 0 else 0.0, linewidth=0)
        axes.annotate(name, (start, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set(title=title, xlabel="seconds", ylabel=unit, ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _write(path, figure)


def check_picture(path: Path) -> str:
    """The ending of a picture's name, if a picture of that kind can be written here."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a picture is written as .svg or .png, got {str(path)!r}")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a PNG needs matplotlib: pip install matplotlib, or write .svg", name="matplotlib")
    return path.suffix


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _write(path: Path, picture: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(picture, str):
        path.write_text(picture)
    else:
        picture.savefig(path, dpi=120)


def _byte_unit(most: float) -> tuple[str, int]:
    return next((one for one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if most >= one[1]), ("B", 1))


def write_rows(
    path: Path, found: Mapping[tuple[int, int, int], RowWeights], tokens: int, title: str = "attention weights"
) -> None:
    """What `functional.attention_rows` found, as an `.svg` or `.png`: a strip a row and head, darker where more is."""
    if not found:
        raise ValueError("there is no row to draw: name rows in attention_rows")
    strips: list[list[float]] = []
    for weights in found.values():
        strip = row_shares(weights, tokens)
        strips += [strip] * 4 + [[0.0] * len(strip)]
    names = [f"batch row {b}, row {row}, head {head}" for b, row, head in found]
    write_density(path, strips[:-1], title, [f"{tokens:,} keys; from above:", *names])


def write_slide(
    path: str | Path,
    weights: Tensor,
    coordinates: Tensor,
    tile_size: int = 256,
    title: str = "attention of the CLS token",
) -> None:
    """Weights of tiles, `(tiles,)`, drawn where the tiles lie on the slide, darker where more is: `.svg` or `.png`."""
    if weights.dim() != 1:
        raise ValueError(
            f"a picture shows one weight a tile, got {tuple(weights.shape)}: choose a layer and a head, or take a mean"
        )
    grid = on_slide(weights.detach().float().cpu(), coordinates.cpu(), tile_size)
    # As many cells as a screen shows; the strongest of those that share one is what is looked for.
    cells = (min(grid.shape[0], 192), min(grid.shape[1], 192))
    shown = F.adaptive_max_pool2d(grid[None], cells)[0]
    shares = (shown / shown.max().clamp_min(torch.finfo(torch.float32).tiny)).tolist()
    notes = [f"{weights.numel():,} tiles, {grid.shape[0]:,} rows by {grid.shape[1]:,} columns"]
    write_density(Path(path), shares, title, notes, ("of tiles", "of tiles"))


def row_shares(found: RowWeights, tokens: int, cells: int = 128) -> list[float]:
    """The weight that falls into each of `cells` equal parts of the keys, over the largest of them."""
    cells = min(cells, tokens)
    totals = torch.zeros(cells, dtype=torch.float64)
    totals.index_add_(0, found.positions.cpu() * cells // tokens, found.weights.detach().double().cpu())
    return (totals / totals.max().clamp_min(1e-300)).tolist()


def _share_of_ink(share: float) -> float:
    """What is seen at all is drawn: a dilated branch shows a small share of its cells."""
    return 0.0 if share <= 0 else min(1.0, 0.15 + 0.85 * share**0.5)


def _shade(share: float) -> str:
    """Between the page's white and the first branch's blue."""
    ink = _share_of_ink(share)
    return "#" + "".join(f"{round(255 + ink * (end - 255)):02x}" for end in (0x0B, 0x3D, 0x6E))


def layouts_svg(segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: int) -> str:
    """The offset of every head on every branch in the three head layouts; empty where a head is absent."""
    rows, y, wide = [], _GAP, 26
    for layout in HEAD_LAYOUTS:
        spec = DilatedSpec.of(segment_lengths, dilation_rates, layout)  # type: ignore[arg-type]
        rows.append(_text(0, y, layout))
        y += 8
        for b, (branch, offsets) in enumerate(zip(spec.branches, spec.offsets(heads))):
            rows.append(_text(0, y + 13, f"w = {branch.segment_length}, r = {branch.dilation_rate}"))
            for h, offset in enumerate(offsets):
                colour = _EMPTY if offset is None else _BRANCHES[b % len(_BRANCHES)]
                rows.append(_cell(100 + h * wide, y, colour, wide, 18))
                if offset is not None:
                    rows.append(_text(100 + h * wide + 9, y + 13, str(offset), "#ffffff"))
            y += 21
        y += _GAP
    return _svg(110 + heads * wide, y, rows)


def reach_svg(specs: Sequence[DilatedSpec], n: int, row: int, heads: int, layers: int = 3) -> str:
    """The tokens that one row depends on after 1 to `layers` layers, of all heads, for each spec."""
    drawn, y = [], _GAP
    for spec in specs:
        sees = dense_mask(spec, spec.offsets(heads), n).flatten(0, 1).any(0)  # (n, n)
        words = f"segments {list(spec.segment_lengths)}, rates {list(spec.dilation_rates)}, {heads} heads"
        drawn.append(_text(0, y, words))
        reached = torch.arange(n) == row
        y += 8
        for depth in range(1, layers + 1):
            reached = sees[reached].any(0)
            drawn.append(_text(0, y + 11, f"{depth} layer{'s' * (depth > 1)}"))
            for token, found in enumerate(reached.tolist()):
                colour = _BRANCHES[1] if token == row else _BRANCHES[0] if found else _EMPTY
                drawn.append(_cell(56 + token * _CELL, y, colour))
            for start, length in segments(n, max(spec.segment_lengths)):
                drawn.append(_frame(56 + start * _CELL, y, length * _CELL, _CELL))
            y += _CELL + 4
        y += _GAP
    return _svg(66 + n * _CELL, y, drawn)


def cost_svg(spec: DilatedSpec) -> str:
    """Keys that a row sees in each branch beside the segment they are spread over."""
    rows, y, longest = [], _GAP, max(spec.segment_lengths)
    for b, branch in enumerate(spec.branches):
        seen = grid_rows(branch.segment_length, branch.dilation_rate, 0)
        reach = 400 * branch.segment_length / longest
        rows.append(_text(0, y + 11, f"w = {branch.segment_length:,}, r = {branch.dilation_rate}"))
        rows.append(_cell(130, y, _EMPTY, reach, _CELL))
        rows.append(_cell(130, y, _BRANCHES[b % len(_BRANCHES)], 400 * seen / longest, _CELL))
        rows.append(_text(140 + reach, y + 11, f"{seen:,} keys"))
        y += _CELL + 8
    return _svg(640, y + 4, rows)


def draw_documentation(folder: Path) -> list[Path]:
    """Write the pictures of `docs/` into `folder`."""
    small = DilatedSpec.of([4, 8, 16], [1, 2, 4])
    paper = DilatedSpec.of([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    pictures = {
        "grids.svg": grids_svg(small, 16, 4),
        "pattern.svg": pattern_svg(small, 16, 0, 4),
        "pattern-causal.svg": pattern_svg(small, 16, 1, 4, is_causal=True),
        "layouts.svg": layouts_svg([4, 8, 16], [1, 2, 4], 8),
        "cost.svg": cost_svg(paper),
        "reach.svg": reach_svg([DilatedSpec.of([4, 8], [1, 2]), DilatedSpec.of([4, 8, 32], [1, 2, 4])], 32, 21, 4),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / name).write_text(picture)
    return [folder / name for name in pictures]


def _svg(width: float, height: float, rows: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">'
    )
    background = f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, background, *rows, "</svg>", ""])


def _cell(x: float, y: float, colour: str, width: float = _CELL, height: float = _CELL) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="#ffffff"/>'


def _frame(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" stroke="{_BORDER}"/>'


def _text(x: float, y: float, text: str, colour: str = _INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}">{escape(text)}</text>'


if __name__ == "__main__":
    for path in draw_documentation(Path(sys.argv[1])):
        print(path)
