"""The loss curve of a run, and its folder as one HTML page without other files."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from dilated_attention_pytorch.measuring import size
from dilated_attention_pytorch.pages import plots
from dilated_attention_pytorch.pages.page import bullets, figures, marked, table, write_html
from dilated_attention_pytorch.train.monitor import flatten
from dilated_attention_pytorch.train.run_folder import RunFolder, read_run

_BITS = 1.0 / math.log(2.0)
# Charts beside the losses: the figure of a record, title, unit, and divisor.
_FIGURES = (
    ("learning_rate", "Learning rate", "learning rate", 1.0),
    ("tokens_per_second", "Speed", "tokens/s", 1.0),
    ("peak_memory_bytes", "Peak memory of the rank that holds most", "GiB", float(1 << 30)),
    ("gradient_norm", "Gradient norm, before clipping", "norm", 1.0),
)
_BASELINES = {"unigram_bits": "byte frequencies (unigram)", "bigram_bits": "byte pairs (bigram)"}
_LONGEST_SAMPLE = 4000
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
    lines = {_BASELINES.get(name, name): bits for name, bits in baselines.items()}
    plots.save(path, plots.curves(drawn, "step", "bits per byte", lines, dots=["validation"], width=8))
    return path


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as a line of block characters, averaged down to `width`.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    means = [mean for _, mean in plots.thinned([*enumerate(values)], width)]
    if not means:
        return ""
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_LEVELS[round((mean - low) / span * (len(_LEVELS) - 1))] for mean in means)


def write_run_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of the run in folder `run` to `out` (default: `report.html` in the folder); returns its path.

    A run that is in progress, interrupted or damaged is shown as far as it can be read.
    """
    found = read_run(run)
    path = run / "report.html" if out is None else out
    title = f"Run {run.resolve().name}"
    write_html(path, title, title, _body(found))
    return path


def _body(run: RunFolder) -> list[str]:
    body = [f"<p>{marked(_state(run))}</p>"]
    if run.damage:
        body += ["<h2>What cannot be read</h2>", bullets(run.damage)]
    body += [*_summary(run), *_curves(run), *_samples(run), *_checkpoints(run), *_starts(run)]
    if run.config:
        rows = [[f"`{name}`", str(value)] for name, value in flatten(run.config, ".").items()]
        body += ["<h2>Effective settings</h2>", table(["setting", "value"], rows)]
    return body


def _state(run: RunFolder) -> str:
    if run.steps is None:
        return f"Known up to step **{run.done:,}**; the number of steps is unknown."
    if run.done >= run.steps:
        return f"**Finished**: all {run.steps:,} steps."
    written = [
        path.stat().st_mtime for path in run.path.iterdir() if path.suffix in (".jsonl", ".json") and path.is_file()
    ]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(written, default=0.0)))
    resume = (
        f"if it is not running, continue it with `dilated-attention train --resume {run.path}`"
        if any(one.state == "whole" for one in run.saved)
        else "it has no whole checkpoint yet"
    )
    return f"**Not finished**: step {run.done:,} of {run.steps:,}, last written {when}; {resume}."


def _summary(run: RunFolder) -> list[str]:
    rows: list[list[str]] = []
    validation = _points(run, "validation_bits")
    if losses := _points(run, "loss"):
        last = losses[-1][1]
        rows.append(["training loss, last step", f"{last:.4f} nats ({last * _BITS:.4f} bits)"])
    if smooth := _points(run, "loss_ema"):
        rows.append(["training loss, moving average", f"{smooth[-1][1]:.4f} nats"])
    if validation:
        step, best = min(validation, key=lambda point: point[1])
        rows.append(["validation, last", f"{validation[-1][1]:.4f} bits per byte"])
        rows.append(["validation, best", f"{best:.4f} bits per byte, at step {step:,}"])
    rows += [[f"to beat: {name}", f"{bits:.4f} bits per byte"] for name, bits in _baselines(run).items()]
    if speed := _points(run, "tokens_per_second"):
        rows.append(["speed, median", f"{statistics.median(y for _, y in speed):,.0f} tokens/s"])
    if memory := _points(run, "peak_memory_bytes"):
        rows.append(["memory, peak", size(max(y for _, y in memory))])
    for name in ("parameters", "corpus"):
        if run.starts and name in run.starts[-1]:
            value = run.starts[-1][name]
            rows.append([name, f"{value:,}" if isinstance(value, int) else str(value)])
    return ["<h2>Figures</h2>", table(["", ""], rows)] if rows else []


def _curves(run: RunFolder) -> list[str]:
    losses = {
        "training": plots.thinned(_points(run, "bits") or _points(run, "loss", _BITS)),
        "training, moving average": plots.thinned(_points(run, "loss_ema", _BITS)),
        "validation": _points(run, "validation_bits"),
    }
    losses = {name: points for name, points in losses.items() if points}
    if not losses:
        return ["<h2>Curves</h2>", "<p>No step is recorded yet: records are written with every checkpoint.</p>"]
    chart = plots.curves(losses, "step", "bits per byte", _baselines(run), dots=["validation"])
    smaller = [
        (title, plots.curves({title: plots.thinned(points)}, "step", unit))
        for key, title, unit, scale in _FIGURES
        if (points := _points(run, key, 1 / scale))
    ]
    return ["<h2>Curves</h2>", figures([("Bits per byte over steps", chart), *smaller])]


def _samples(run: RunFolder) -> list[str]:
    body = ["<h2>Samples</h2>"] if run.samples else []
    for step, text in reversed(run.samples):
        cut = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]}..."
        body.append(f"<h3>After step {step:,}</h3><pre>{escape(cut)}</pre>")
    return body


def _checkpoints(run: RunFolder) -> list[str]:
    if not run.saved:
        return ["<h2>Checkpoints</h2>", "<p>There is none.</p>"]
    rows = [
        [f"`{one.path.name}`", f"{one.step:,}", one.state, size(one.bytes), ", ".join(one.files)] for one in run.saved
    ]
    return ["<h2>Checkpoints</h2>", table(["folder", "step", "state", "size", "holds"], rows)]


def _starts(run: RunFolder) -> list[str]:
    """One column per start, so that what changed between them is side by side."""
    if not run.starts:
        return []
    columns = [flatten({name: value for name, value in one.items() if name != "baselines"}, ".") for one in run.starts]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name.removeprefix("machine."), *(str(column.get(name, "")) for column in columns)] for name in names]
    head = ["", *(f"start {i + 1}" for i in range(len(columns)))]
    return ["<h2>Hardware and versions at each start</h2>", table(head, rows)]


def _points(run: RunFolder, key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """A figure of the records over steps, without values that cannot be drawn."""
    found = [(record["step"], record.get(key)) for record in run.records]
    return [(step, y * scale) for step, y in found if _is_drawable(y)]


def _is_drawable(y: Any) -> TypeGuard[float]:
    """Whether a figure is a finite number that does not overflow the axis of a chart."""
    return isinstance(y, (int, float)) and abs(y) < 1e300


def _baselines(run: RunFolder) -> dict[str, float]:
    stated = run.starts[-1].get("baselines") if run.starts else None
    if not isinstance(stated, dict):
        return {}
    return {_BASELINES.get(str(name), str(name)): bits for name, bits in stated.items() if _is_drawable(bits)}
