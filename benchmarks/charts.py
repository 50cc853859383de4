"""Charts that only benchmarks draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dilated_attention_pytorch.pages.plots import COLOURS, SERIES, TIP, add_legend, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def bars(
    groups: Sequence[tuple[str, Sequence[float]]], series: Sequence[str], unit: str, limits: Sequence[float] = ()
) -> Figure:
    """Horizontal bars: one group below each label, with one bar per series; dashed lines at `limits`."""
    thick = 0.6 / len(series)
    figure, axes = new_figure(4.9, 0.8 + len(groups) * (0.18 + 0.13 * len(series)))
    for index, name in enumerate(series):
        values = [values[index] for _, values in groups]
        at = [row + (index + 0.5) * thick - 0.2 for row in range(len(groups))]
        drawn = axes.barh(at, values, thick, label=name, color=SERIES[index % len(SERIES)])
        if not limits:
            axes.bar_label(drawn, fmt=_figure, padding=3, fontsize=7)
        for bar, (label, _), value, row in zip(drawn, groups, values, at):
            bar.set_gid(f"{TIP}{label}, {name}: {value:.4g} {unit}")
            if limits:  # which would cross the values at the ends of bars, and the names above them
                place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": 7}
                axes.annotate(_figure(value), (1, row), **place)
                axes.vlines(limits, row - thick / 2, row + thick / 2, COLOURS["limit"], "--", linewidth=1)
    for row, (label, _) in enumerate(groups):
        axes.annotate(label, (0, row - 0.24), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
    axes.set(yticks=[], xlabel=unit)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.margins(x=0.15 if limits else 0.1)
    add_legend(figure)
    return figure


def _figure(value: float) -> str:
    """Three digits or more, without an exponent for large values.

    >>> _figure(0.02061), _figure(989.4), _figure(1204.6)
    ('0.0206', '989', '1,205')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
