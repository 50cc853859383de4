"""Charts as SVG that takes its colours from the page it stands in, by the classes `s0`, `s1`, ... of its series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

COLOURS = 6


def bars_svg(
    bars: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], unit: str, limits: Sequence[float] = ()
) -> str:
    """Horizontal bars, a group a label with a bar a series; dashed lines at `limits`."""
    thick, gap, left, width, top = 11, 9, 400, 460, 40
    most = max([value for _, values in bars for value in values] + list(limits)) or 1.0
    parts, y = _legend(series, left), float(top)
    for label, values in bars:
        parts.append(_text(left - 8, y + thick * len(values) / 2 + 4, label, "end"))
        for index, value in enumerate(values):
            long = width * value / most
            title = f"{label}, {series[index]}: {value:.4g} {unit}"
            parts.append(
                f'<rect class="s{index % COLOURS}" x="{left}" y="{y:g}" width="{long:.1f}" height="{thick - 1}">'
                f"<title>{escape(title)}</title></rect>"
            )
            parts.append(_text(left + long + 5, y + thick - 2, f"{value:.3g}"))
            y += thick
        y += gap
    for limit in limits:
        x = left + width * limit / most
        parts.append(f'<line class="limit" x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{y - gap + 4:g}"/>')
    return _svg(left + width + 60, y, parts, unit)


def lines_svg(
    lines: Mapping[str, Sequence[tuple[float, float]]], series: Sequence[str], x_unit: str, y_unit: str
) -> str:
    """Points joined by lines over two logarithmic axes, with a grid at the powers of ten and the points' own x."""
    left, top, width, height = 56, 20 + 16 * len(lines), 320, 220
    points = [point for line in lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    low, high = math.log10(min(y for _, y in points)), math.log10(max(y for _, y in points))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x / xs[0]) / math.log(xs[-1] / xs[0])) if len(xs) > 1 else 0.5
        return left + width * across, top + height * (high - math.log10(y)) / (high - low)

    parts = []
    for power in range(low, high + 1):
        y = place(xs[0], 10.0**power)[1]
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{10.0**power:g}", "end"))
    for x in xs:
        across = place(x, 10.0**low)[0]
        parts.append(f'<line class="grid" x1="{across:.1f}" y1="{top}" x2="{across:.1f}" y2="{top + height}"/>')
        parts.append(_text(across, top + height + 14, _short(x), "middle"))
    for row, (name, line) in enumerate(lines.items()):
        colour = series.index(name) % COLOURS
        placed = [place(x, y) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="line s{colour}" points="{path}"/>')
        for (x, y), (along, up) in zip(sorted(line), placed):
            title = escape(f"{name}: {y:.4g} {y_unit} at {x:,.0f} {x_unit}")
            parts.append(
                f'<circle class="s{colour}" cx="{along:.1f}" cy="{up:.1f}" r="3"><title>{title}</title></circle>'
            )
        parts.append(f'<rect class="s{colour}" x="{left}" y="{4 + 16 * row}" width="10" height="10"/>')
        parts.append(_text(left + 15, 13 + 16 * row, name))
    parts.append(_text(left + width / 2, top + height + 30, f"{x_unit}; {y_unit} upward", "middle"))
    return _svg(left + width + 20, top + height + 38, parts, f"{y_unit} over {x_unit}")


Points = Sequence[tuple[float, float]]


def curves_svg(
    curves: Mapping[str, Points],
    x_unit: str,
    y_unit: str,
    limits: Mapping[str, float] | None = None,
    dots: Sequence[str] = (),
    width: int = 640,
) -> str:
    """Curves over two linear axes with round ticks; what is pointed at says its figures.

    `limits` are dashed lines across, by name. A curve named in `dots` shows its points; others have too many.
    """
    limits = limits or {}
    names = [*curves, *limits]
    left, top, height = 70, 20 + 16 * len(names), 240
    points = [point for curve in curves.values() for point in curve]
    x_ticks = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    levels = [y for _, y in points] + list(limits.values())
    y_ticks = _ticks(min(levels), max(levels))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + width * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]),
            top + height * (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]),
        )

    parts = []
    for tick in y_ticks:
        y = place(x_ticks[0], tick)[1]
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{tick:,.6g}", "end"))
    for tick in x_ticks:
        x = place(tick, y_ticks[0])[0]
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}"/>')
        parts.append(_text(x, top + height + 14, f"{tick:,.6g}", "middle"))
    for row, (name, level) in enumerate(limits.items(), len(curves)):
        y = place(x_ticks[0], level)[1]
        title = f"<title>{escape(f'{name}: {level:.4g} {y_unit}')}</title>"
        parts.append(f'<line class="limit" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}">{title}</line>')
        parts.append(f'<line class="limit" x1="{left}" y1="{9 + 16 * row}" x2="{left + 10}" y2="{9 + 16 * row}"/>')
        parts.append(_text(left + 15, 13 + 16 * row, f"{name}: {level:.4g}"))
    for index, (name, curve) in enumerate(curves.items()):
        colour, shown = index % COLOURS, "" if name in dots else " touch"
        placed = [(x, y, *place(x, y)) for x, y in curve]
        path = " ".join(f"{across:.1f},{up:.1f}" for _, _, across, up in placed)
        parts.append(f'<polyline class="line s{colour}" points="{path}"/>')
        for x, y, across, up in placed:
            title = escape(f"{name}: {y:.4g} {y_unit} at {x_unit} {x:,.6g}")
            dot = f'<circle class="s{colour}{shown}" cx="{across:.1f}" cy="{up:.1f}" r="3">'
            parts.append(f"{dot}<title>{title}</title></circle>")
        parts.append(f'<rect class="s{colour}" x="{left}" y="{4 + 16 * index}" width="10" height="10"/>')
        parts.append(_text(left + 15, 13 + 16 * index, name))
    parts.append(_text(left + width / 2, top + height + 30, f"{x_unit}; {y_unit} upward", "middle"))
    return _svg(left + width + 30, top + height + 38, parts, f"{y_unit} over {x_unit}")


def thinned(points: Points, most: int = 400) -> list[tuple[float, float]]:
    """At most so many points, each the mean of its neighbours.

    >>> thinned([(1, 2.0), (2, 4.0), (3, 0.0), (4, 2.0)], most=2)
    [(1.5, 3.0), (3.5, 1.0)]
    """
    count = min(most, len(points))
    edges = [len(points) * i // count for i in range(count + 1)] if count else [0]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`.

    >>> _ticks(0, 230)
    [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]
    >>> _ticks(3.0, 3.0)
    [2.0, 2.5, 3.0, 3.5, 4.0]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one number, but for rounding
        low, high = low - (abs(low) / 3 or 1.0), high + (abs(high) / 3 or 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _legend(series: Sequence[str], left: float) -> list[str]:
    parts, x = [], left
    for index, name in enumerate(series):
        parts.append(f'<rect class="s{index % COLOURS}" x="{x:g}" y="8" width="10" height="10"/>')
        parts.append(_text(x + 15, 17, name))
        x += 40 + 7 * len(name)
    return parts


def _short(x: float) -> str:
    """
    >>> _short(512), _short(131_072), _short(1 << 20)
    ('512', '128K', '1M')
    """
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if x >= size:
            return f"{x / size:g}{letter}"
    return f"{x:g}"


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    head = f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    return "\n".join([head, *parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
