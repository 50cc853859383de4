"""Every chart and picture of the project, drawn by matplotlib (the extra `viz`).

Functions whose name begins with `write` write a file, `.svg` or `.png`. `curves` returns a figure for `save`, or for
`inline_svg`, which embeds it in an HTML page in the page's own colours.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.core.row_weights import RowWeights
from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.models.slide_attention import on_slide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")
Points = Sequence[tuple[float, float]]
Curves = Mapping[str, Points]
Spans = Sequence[tuple[str, float, float]]

# Colours by their names in the style sheet of a page, which replaces them on dark screens.
COLOURS = {
    "ink": "#212529", "faint": "#dee2e6", "limit": "#c92a2a",
    "s0": "#1971c2", "s1": "#868e96", "s2": "#e8590c", "s3": "#9c36b5", "s4": "#2f9e44", "s5": "#c2255c",
    "s6": "#0c8599", "s7": "#b08400", "s8": "#7d5a3c",
}  # fmt: skip
SERIES = [colour for name, colour in COLOURS.items() if name.startswith("s")]
_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "dilated-attention", "font.sans-serif": ["DejaVu Sans"], "font.size": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": False,
    "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False,
    "grid.color": COLOURS["faint"], "axes.edgecolor": COLOURS["faint"], "axes.labelcolor": COLOURS["ink"],
    "text.color": COLOURS["ink"], "xtick.color": COLOURS["ink"], "ytick.color": COLOURS["ink"],
}  # fmt: skip
TIP = "\u00a6"  # precedes each tooltip in an artist's id; `inline_svg` turns them into titles


def check_picture(path: Path) -> None:
    """Raise if a picture of this name cannot be written here."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a picture is written as .svg or .png, got {str(path)!r}")
    _matplotlib()


def matplotlib_is_installed() -> bool:
    return find_spec("matplotlib") is not None


def _matplotlib() -> Any:
    return import_optional("matplotlib", "viz", "a chart")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Let a function draw in the project's style."""

    @functools.wraps(draw)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _matplotlib().rc_context(_SETTINGS):
            return draw(*args, **kwargs)

    return run


@styled
def save(path: Path, figure: Figure) -> None:
    """Write a figure atomically, in the format of its suffix."""
    check_picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix[1:]
    options: Any = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 120}
    write_whole(path, lambda partial: figure.savefig(partial, format=kind, bbox_inches="tight", **options))


@styled
def inline_svg(figure: Figure, label: str) -> str:
    """A figure as an `<svg>` element with tooltips, in the colours of the page."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True)
    root = ElementTree.fromstring(drawn.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in [name for name in element.attrib if "}" in name]:
            element.set(name.rpartition("}")[2], element.attrib.pop(name))
    for parent in [root, *root.findall("defs")]:
        for element in parent.findall("metadata") + parent.findall("style"):  # the style would apply to the whole page
            parent.remove(element)
    for group in root.iter("g"):
        _, *tips = group.attrib.pop("id", "").split(TIP)
        for mark, tip in zip([*group.iter("use")] or [*group.iter("path")], tips):
            ElementTree.SubElement(mark, "title").text = tip
    root.set("role", "img")
    root.set("aria-label", label)
    text = ElementTree.tostring(root, encoding="unicode")
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text


@styled
def curves(
    curves: Curves,
    x_unit: str,
    y_unit: str,
    limits: Mapping[str, float] | None = None,
    *,
    dots: Sequence[str] = (),
    log: bool = False,
    shares: bool = False,
    width: float = 4.9,
) -> Figure:
    """Named curves over linear or logarithmic axes; tooltips show the figures.

    `limits` are named dashed lines. Curves named in `dots` show their points, and so does a curve of one point. With
    `shares`, both axes go from 0 to 1. A telephone can show the default width.
    """
    figure, axes = new_figure(width, 3.4)
    for (name, points), colour in zip(curves.items(), cycle(SERIES)):
        points = sorted(points, key=lambda point: point[0])  # points above each other stay in their order
        shown = 1.0 if name in dots or len(points) == 1 else 0.0  # a hidden point still has a tooltip
        x, y = zip(*points)
        [line] = axes.plot(x, y, color=colour, label=name, marker="o", markersize=5, linewidth=1.5)
        line.set(markerfacecolor=(colour, shown), markeredgecolor="none")
        line.set_gid("".join(f"{TIP}{name}: {y:.4g} {y_unit} at {_at(x, x_unit)}" for x, y in points))
    for (name, level), dashes in zip((limits or {}).items(), cycle(("--", ":", "-."))):
        line = axes.axhline(level, color=COLOURS["limit"], linestyle=dashes, linewidth=1, label=f"{name}: {level:.4g}")
        line.set_gid(f"{TIP}{name}: {level:.4g} {y_unit}")
    axes.set(xlabel=x_unit, ylabel=y_unit)
    axes.grid()
    if shares:
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    if log:
        lengths = sorted({x for points in curves.values() for x, _ in points})
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(lengths, [short(x) for x in lengths])
        axes.set_xticks([], minor=True)
    if x_unit == "step":
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    add_legend(figure)
    return figure


def add_legend(figure: Figure) -> None:
    """Name what the first axes show above them, in as many columns as fit; a single curve needs no name.

    More than two lines of names make the figure higher, so that the axes keep their height.
    """
    names = figure.axes[0].get_legend_handles_labels()[1]
    if len(names) > 1:
        column = 32 + 4.7 * max(map(len, names))  # points
        ncols = max(1, int(72 * figure.get_figwidth() / column))
        figure.legend(loc="outside upper left", ncols=ncols)
        figure.set_figheight(figure.get_figheight() + 0.16 * max(0, -(-len(names) // ncols) - 2))


def _at(x: float, unit: str) -> str:
    """A value of the axis in words: `step 4`, but `512 tokens`."""
    return f"{x:,.0f} {unit}" if unit.endswith("s") else f"{unit} {x:,.6g}"


def thinned(points: Points, most: int = 400) -> list[tuple[float, float]]:
    """At most `most` points, each the mean of its neighbours.

    >>> thinned([(1, 2.0), (2, 4.0), (3, 0.0), (4, 2.0)], most=2)
    [(1.5, 3.0), (3.5, 1.0)]
    """
    count = min(most, len(points))
    edges = [len(points) * i // count for i in range(count + 1)] if count else [0]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def short(x: float) -> str:
    """A number of tokens in a few characters.

    >>> short(512), short(131_072), short(1 << 20), short(200_000)
    ('512', '128K', '1M', '200,000')
    """
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if x >= size and float(few := f"{x / size:.4g}") * size == x:
            return few + letter
    return f"{x:,.12g}"


@styled
def write_timeline(path: Path, curves: Curves, title: str, spans: Spans = ()) -> None:
    """Draw bytes over seconds as steps; every other one of the `spans`, (name, from, to), is shaded."""
    check_picture(path)
    figure, axes = new_figure(9, 4.5)
    most = max((y for curve in curves.values() for _, y in curve), default=0)
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    unit, scale = next((one for one in units if most >= one[1]), ("B", 1))
    for (name, curve), colour in zip(curves.items(), SERIES * len(curves)):
        peak = max((y for _, y in curve), default=0)
        label = f"{name}, at most {peak / scale:.4g} {unit}"
        axes.step([x for x, _ in curve], [y / scale for _, y in curve], where="post", label=label, color=colour)
    for index, (name, start, end) in enumerate(spans):
        axes.axvspan(start, end, color="black", alpha=0.06 if index % 2 == 0 else 0.0, linewidth=0)
        axes.annotate(name, (start, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set(title=title, xlabel="seconds", ylabel=unit, ylim=(0, None))
    axes.grid()
    if curves:
        figure.legend(loc="outside lower left")
    save(path, figure)


@styled
def write_density(path: Path, shares: Sequence[Sequence[float]], title: str, notes: Sequence[str]) -> None:
    """Draw which rows see which keys, darker where a cell's rows see more of its keys, with notes below."""
    check_picture(path)
    figure, plot = new_figure(8, 1 + 7.4 * len(shares) / len(shares[0]) + 0.16 * len(notes))
    # Even a small share is visible: a dilated branch covers few pairs of a cell.
    ink = [[0.0 if share <= 0 else min(1.0, 0.15 + 0.85 * share**0.5) for share in row] for row in shares]
    plot.imshow(ink, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    plot.set(title=title, ylabel="queries", xticks=[], yticks=[])
    plot.set_xlabel("\n".join(["keys", *notes]), loc="left", family="monospace")
    plot.spines[["top", "right"]].set_visible(True)
    save(path, figure)


def write_rows(
    path: str | Path, found: Mapping[tuple[int, int, int], RowWeights], tokens: int, title: str = "attention weights"
) -> None:
    """Draw what `functional.attention_rows` found: one strip per row and head, darker for larger weights."""
    if not found:
        raise ValueError("there is no row to draw: name rows in attention_rows")
    strips: list[list[float]] = []
    for weights in found.values():
        strip = row_shares(weights, tokens)
        strips += [strip] * 4 + [[0.0] * len(strip)]
    names = [f"batch row {b}, row {row}, head {head}" for b, row, head in found]
    write_density(Path(path), strips[:-1], title, [f"{tokens:,} keys; from the top:", *names])


def row_shares(found: RowWeights, tokens: int, cells: int = 128) -> list[float]:
    """The weight that falls into each of `cells` equal parts of the keys, divided by the largest of them."""
    cells = min(cells, tokens)
    totals = torch.zeros(cells, dtype=torch.float64)
    totals.index_add_(0, found.positions.cpu() * cells // tokens, found.weights.detach().double().cpu())
    return (totals / totals.max().clamp_min(1e-300)).tolist()


def write_slide(
    path: str | Path,
    weights: Tensor,
    coordinates: Tensor,
    tile_size: int = 256,
    title: str = "attention of the CLS token",
) -> None:
    """Draw weights of tiles, `(tiles,)`, on the slide: each tile at its place, darker for larger weights."""
    check_picture(Path(path))
    figure = slide_figure(weights, coordinates, tile_size, unit="weight", width=8)
    figure.suptitle(f"{title}: {weights.numel():,} tiles", x=0.01, ha="left", fontsize=10)
    save(Path(path), figure)


@styled
def slide_figure(
    weights: Tensor, coordinates: Tensor, tile_size: int, *, unit: str, least: float = 0.0, width: float = 4.2
) -> Figure:
    """Weights of tiles, `(tiles,)`, on the slide, with a colour bar that begins at `least`; elsewhere it is empty.

    A large slide is drawn in 192 x 192 cells, each as dark as its darkest tile.
    """
    if weights.dim() != 1:
        raise ValueError(
            f"a picture shows one weight per tile, got {tuple(weights.shape)}: take one layer and head, or a mean"
        )
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    both = torch.stack((weights.detach().float().cpu(), torch.ones(len(weights))))
    grids = on_slide(both, coordinates.cpu(), tile_size)  # weights, and numbers of tiles: (2, rows, columns)
    rows, columns = grids.shape[1:]
    grid, tiles = F.adaptive_max_pool2d(grids, (min(rows, 192), min(columns, 192)))
    figure, axes = new_figure(width, min(1.5 * width, 0.8 + (width - 1.2) * rows / columns))
    most = max(float(grid.max()), least * 1.001, 1e-30)
    drawn = axes.imshow(
        grid.masked_fill(tiles == 0, torch.nan).clamp_min(least).numpy(),
        cmap=LinearSegmentedColormap.from_list("tiles", ["#e3eef9", COLOURS["s0"], "#08306b"]),
        norm=PowerNorm(1.0 if least else 0.5, vmin=least, vmax=most),  # from 0 on, small weights are seen too
        extent=(0, columns, rows, 0),
        interpolation="nearest",
    )
    axes.set(xlabel="column of tiles", ylabel="row of tiles")
    axes.locator_params(integer=True, nbins=6)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(drawn, ax=axes, label=unit, shrink=0.8, aspect=30)
    bar.outline.set_visible(False)
    return figure


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of this size in inches, with its axes: one, or a list."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    return figure, axes[0] if len(axes) == 1 else list(axes)
