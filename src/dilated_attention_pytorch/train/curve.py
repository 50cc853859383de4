"""The loss curve of a run: a picture where matplotlib is installed, a line of text everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.pages import plots

_LEVELS = "▁▂▃▄▅▆▇█"


def draw_curve(records: Sequence[dict[str, Any]], baselines: Mapping[str, float], path: Path) -> Path | None:
    """A PNG of bits per byte over steps, beside baselines by name, or None without matplotlib (extra `viz`)."""
    if not plots.matplotlib_is_installed():
        return None
    curves = {
        label: [(record["step"], record[key]) for record in records if key in record]
        for key, label in (("bits", "training"), ("validation_bits", "validation"))
    }
    drawn = {label: points for label, points in curves.items() if points}
    plots.save(path, plots.curves(drawn, "step", "bits per byte", baselines, dots=["validation"], width=8))
    return path


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as a line of block characters, averaged down to `width`.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_LEVELS[round((mean - low) / span * (len(_LEVELS) - 1))] for mean in means)
