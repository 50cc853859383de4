"""Pictures of patterns: `./run docs`, or `python -m examples.pictures FOLDER`, draws those of the documentation."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.core.pattern import dense_mask, grid_rows, segments
from dilated_attention_pytorch.core.spec import HEAD_LAYOUTS, DilatedSpec
from dilated_attention_pytorch.pages.plots import COLOURS, add_legend, new_figure, save, short, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EMPTY, _BORDER = "#f1f3f5", "#495057"
_BRANCHES = ("#1971c2", "#e8590c", "#2f9e44", "#9c36b5", "#c2255c")
_WIDTH = 4.9  # inches: text of 8 points can still be read where a telephone shrinks a picture to its own width
_RESULTS = Path(__file__).parents[1] / "docs" / "performance.jsonl"
_DENSE, _WHOLE, _SHORT = "dense attention", "dilated, all tokens connected", "dilated, segments up to 8,192"
_COUNTS = (_EMPTY, "#a5d8ff", "#4dabf7", "#1971c2", "#0b3d6e")  # by the number of branches that show a key


def draw_documentation(folder: Path, results: Path = _RESULTS) -> list[Path]:
    """Write the pictures of `docs/` into `folder`; from `results`, the times and loss curves that were measured."""
    small = DilatedSpec.of([4, 8, 16], [1, 2, 4])
    paper = DilatedSpec.of([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    pictures = {
        "grids.svg": grids(small, 16, 4),
        "pattern.svg": pattern(small, 16, 0, 4),
        "pattern-causal.svg": pattern(small, 16, 1, 4, is_causal=True),
        "layouts.svg": layouts([4, 8, 16], [1, 2, 4], 8),
        "cost.svg": cost(paper),
        "reach.svg": reach([DilatedSpec.of([4, 8], [1, 2]), DilatedSpec.of([4, 8, 32], [1, 2, 4])], 32, 21, 4),
    }
    if measured := read_losses(results):
        pictures["losses.svg"] = losses(measured)
    if times := read_times(results):
        pictures["times.svg"] = time_over_tokens(times)
    for name, figure in pictures.items():
        save(folder / name, figure)
    return [folder / name for name in pictures]


def read_losses(results: Path) -> dict[str, list[float]]:
    """The losses of each variant of the 125m model that `bench curves` has measured, from its JSON lines."""
    lines = (json.loads(line) for line in results.read_text().splitlines() if '"suite": "curves"' in line)
    return {line["variant"]: line["losses"] for line in lines if line["size"] == "125m"}


def read_times(results: Path) -> dict[str, dict[int, float]]:
    """Milliseconds by tokens, forward and backward on a GPU, of dense attention and of ours, from JSON lines.

    The newest line counts. Ours are of two kinds: the longest segment covers the sequence, or is shorter.
    """
    case = {"device": "cuda", "heads": 12, "head_dim": 64, "backward": True, "is_causal": False, "dtype": "bfloat16"}
    found: dict[str, dict[int, float]] = {_DENSE: {}, _WHOLE: {}, _SHORT: {}}
    for line in map(json.loads, results.read_text().splitlines()):
        if line.get("suite") not in ("short", "attention") or line.get("head_layout") != "interleaved":
            continue
        if not case.items() <= line.items() or line.get("pattern") or not line.get("milliseconds"):
            continue
        longest, tokens = max(line["segment_lengths"]), line["tokens"]
        if line["contender"] == "dense, same tokens":
            found[_DENSE][tokens] = line["milliseconds"]
        elif line["contender"] == "ours" and (longest >= tokens or longest == 8192):
            found[_WHOLE if longest >= tokens else _SHORT][tokens] = line["milliseconds"]
    return found if all(found.values()) else {}


@styled
def time_over_tokens(times: Mapping[str, Mapping[int, float]]) -> Figure:
    """Milliseconds over tokens; the dashed line continues dense attention by its quadratic growth."""
    figure, axes = new_figure(_WIDTH, 3.1)
    for (name, measured), colour in zip(times.items(), (COLOURS["s2"], COLOURS["s0"], COLOURS["s1"])):
        axes.plot(*zip(*sorted(measured.items())), color=colour, marker="o", markersize=5, linewidth=1.8, label=name)
    last, longest = max(times[_DENSE]), max(max(measured) for measured in times.values())
    ends = times[_DENSE][last], times[_DENSE][last] * (longest / last) ** 2
    label = f"{_DENSE}, extrapolated"
    axes.plot((last, longest), ends, color=COLOURS["s2"], linestyle=":", linewidth=1.8, label=label)
    lengths = [512 * 4**i for i in range(5)] + [1 << 20]
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward and backward, ms")
    axes.set_xticks(lengths, [short(tokens) for tokens in lengths])
    axes.set_xticks([], minor=True)
    axes.set_yticks([0.1, 1, 10, 100, 1000, 10_000], ["0.1", "1", "10", "100", "1,000", "10,000"])
    axes.set_yticks([], minor=True)
    axes.grid()
    add_legend(figure)
    return figure


@styled
def losses(measured: Mapping[str, Sequence[float]]) -> Figure:
    """Loss curves over steps, and below the relative distance of each variant from the plain one."""
    figure, (above, below) = new_figure(4.9, 4.8, rows=2)
    for (name, values), colour in zip(measured.items(), _BRANCHES):
        steps = range(1, len(values) + 1)
        above.plot(steps, values, color=colour, linewidth=1, label=name)
        if "plain" in measured and name != "plain":
            apart = [100 * (value / plain - 1) for value, plain in zip(values, measured["plain"])]
            below.plot(steps, apart, color=colour, linewidth=1)
    above.set(ylabel="loss, nats per token")
    below.set(xlabel="step", ylabel="% above plain")
    add_legend(figure)
    return figure


@styled
def grids(spec: DilatedSpec, n: int, heads: int) -> Figure:
    """The tokens that each head reads in each branch: one row per head, with frames around segments."""
    figure, panels = new_figure(3.6, 0.3 + len(spec.branches) * (0.35 + 0.2 * heads), rows=len(spec.branches))
    for branch, offsets, colour, axes in zip(spec.branches, spec.offsets(heads), _BRANCHES, panels):
        w, r = branch.segment_length, branch.dilation_rate
        read = [[o is not None and i % w % r == o for i in range(n)] for o in offsets]
        _cells(axes, [[colour if cell else _EMPTY for cell in row] for row in read], list(segments(n, w)))
        axes.set(title=f"w = {w}, r = {r}", yticklabels=[f"head {h}" for h in range(heads)])
    return figure


@styled
def pattern(spec: DilatedSpec, n: int, head: int, heads: int, *, is_causal: bool = False) -> Figure:
    """Who sees whom for one head: each branch alone, then all of them; a darker cell is shown by more branches."""
    shown = dense_mask(spec, spec.offsets(heads), n, is_causal=is_causal)[:, head].int()  # (branches, n, n)
    figure, panels = new_figure(1.9 * (len(shown) + 1), 2.4, columns=len(shown) + 1)
    words = {"fontsize": 13}  # which a telephone shrinks most in this picture
    for branch, seen, colour, axes in zip(spec.branches, shown.tolist(), _BRANCHES, panels):
        _cells(axes, [[colour if cell else _EMPTY for cell in row] for row in seen], [(0, n)])
        axes.set_title(f"w = {branch.segment_length}, r = {branch.dilation_rate}", **words)
        axes.set_yticks([])
    counts = shown.sum(0).clamp(max=len(_COUNTS) - 1).tolist()
    _cells(panels[-1], [[_COUNTS[count] for count in row] for row in counts], [(0, n)])
    panels[-1].set_title("merged", **words)
    panels[-1].set_yticks([])
    panels[0].set_xlabel("keys", **words)
    panels[0].set_ylabel("queries", **words)
    return figure


@styled
def layouts(segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: int) -> Figure:
    """The offset of every head on every branch in the three head layouts; empty where a head is absent."""
    figure, panels = new_figure(
        3.6, 0.3 + len(HEAD_LAYOUTS) * (0.35 + 0.3 * len(segment_lengths)), rows=len(HEAD_LAYOUTS)
    )
    for layout, axes in zip(HEAD_LAYOUTS, panels):
        spec = DilatedSpec.of(segment_lengths, dilation_rates, layout)  # type: ignore[arg-type]
        offsets = spec.offsets(heads)
        _cells(axes, [[_EMPTY if o is None else colour for o in row] for row, colour in zip(offsets, _BRANCHES)])
        for b, h in ((b, h) for b, row in enumerate(offsets) for h, o in enumerate(row) if o is not None):
            axes.text(h + 0.5, b + 0.5, str(offsets[b][h]), color="white", ha="center", va="center")
        labels = [f"w = {branch.segment_length}, r = {branch.dilation_rate}" for branch in spec.branches]
        axes.set(title=layout, yticklabels=labels)
    return figure


@styled
def reach(specs: Sequence[DilatedSpec], n: int, row: int, heads: int, layers: int = 3) -> Figure:
    """The tokens that one row depends on after 1 to `layers` layers, of all heads, for each spec."""
    figure, panels = new_figure(_WIDTH, 0.2 + len(specs) * (0.35 + 0.14 * layers), rows=len(specs))
    for spec, axes in zip(specs, panels):
        sees = dense_mask(spec, spec.offsets(heads), n).flatten(0, 1).any(0)  # (n, n)
        reached, drawn = torch.arange(n) == row, []
        for _ in range(layers):
            reached = sees[reached].any(0)
            drawn.append([_BRANCHES[0] if found else _EMPTY for found in reached.tolist()])
            drawn[-1][row] = _BRANCHES[1]
        _cells(axes, drawn, list(segments(n, max(spec.segment_lengths))))
        words = f"segments {list(spec.segment_lengths)}, rates {list(spec.dilation_rates)}, {heads} heads"
        axes.set(title=words, yticklabels=[f"{depth} layer{'s' * (depth > 1)}" for depth in range(1, layers + 1)])
    return figure


@styled
def cost(spec: DilatedSpec) -> Figure:
    """The keys that a row sees in each branch beside the segment they are spread over."""
    figure, axes = new_figure(_WIDTH, 0.3 + 0.25 * len(spec.branches))
    lengths = spec.segment_lengths
    seen = [grid_rows(branch.segment_length, branch.dilation_rate, 0) for branch in spec.branches]
    spread = axes.barh(range(len(lengths)), lengths, 0.7, color=_EMPTY)
    axes.barh(range(len(lengths)), seen, 0.7, color=_BRANCHES[: len(lengths)])
    axes.bar_label(spread, [f"{keys:,} keys" for keys in seen], padding=6)
    axes.set(yticks=range(len(lengths)), xticks=[], xlim=(0, 1.25 * max(lengths)))
    axes.set_yticklabels([f"w = {branch.segment_length:,}, r = {branch.dilation_rate}" for branch in spec.branches])
    axes.invert_yaxis()
    _without_lines(axes)
    return figure


def _cells(axes: Axes, colours: Sequence[Sequence[str]], frames: Sequence[tuple[int, int]] = ()) -> None:
    """Square cells of these colours, the first row at the top; `frames`, (column, columns), around all rows."""
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path
    from matplotlib.transforms import Affine2D

    rows, columns = len(colours), len(colours[0])
    by_colour: dict[str, list[Path]] = {}
    for i, j in product(range(rows), range(columns)):
        square = Path.unit_rectangle().transformed(Affine2D().translate(j, i))
        by_colour.setdefault(colours[i][j], []).append(square)
    for colour, squares in by_colour.items():  # one outline per colour keeps files small
        axes.add_patch(PathPatch(Path.make_compound_path(*squares), facecolor=colour, edgecolor="white"))
    for start, length in frames:
        axes.add_patch(Rectangle((start, 0), length, rows, fill=False, edgecolor=_BORDER, clip_on=False))
    axes.set(xticks=[], yticks=[row + 0.5 for row in range(rows)], xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    _without_lines(axes)


def _without_lines(axes: Axes) -> None:
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    for path in draw_documentation(Path(sys.argv[1])):
        print(path)
