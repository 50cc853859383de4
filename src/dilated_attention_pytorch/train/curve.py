"""The loss curve of a run: a picture where matplotlib is installed, a line of text everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.files import write_whole

_LEVELS = "▁▂▃▄▅▆▇█"


def draw_curve(records: Sequence[dict[str, Any]], baselines: Mapping[str, float], path: Path) -> Path | None:
    """A PNG of bits per byte over steps, beside baselines by name, or None without matplotlib (extra `viz`)."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, style in (("bits", "training", {"alpha": 0.5}), ("validation_bits", "validation", {"marker": "o"})):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    for (label, bits), dashes in zip(baselines.items(), cycle(("--", ":", "-."))):
        axes.axhline(bits, linestyle=dashes, color="gray", label=label)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
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
