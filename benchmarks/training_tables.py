"""The rows of the suites `capacity` and `techniques`, as they are printed and as the page has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilated_attention_pytorch.train.memory import MemoryOptions

CAPACITY = ["model", "what", "tokens", "tokens/s", "step, s", "peak GiB", "model, GiB", "model/peak", "options"]
TECHNIQUES = [
    "technique", "against", "peak GiB", "peak", "beyond weights and state", "weights and state", "step, ms", "time",
    "model/peak", "claimed",
]  # fmt: skip
WITHIN = 0.10  # of the measured peak, for the memory model


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def capacity_row(line: dict[str, Any]) -> list[str]:
    """One step; a failed one says why in the place of its time."""
    what = {"dilated": "this attention", "dense": "dense attention"}.get(line["kind"], line["kind"])
    if "longest_segment" in line and line["kind"] != "dense":
        what += f", segments to {line['longest_segment']:,}"
    head = [line["size"], f"{what}, {line['cap_bytes'] / 2**30:.0f} GiB", f"{line['tokens']:,}"]
    predicted = "" if line["kind"] == "dense" else f"{line['predicted_bytes'] / 2**30:.1f}"
    if "failed" in line:
        return [*head, "", line["failed"], "", predicted, "", MemoryOptions(**line["options"]).stated()]
    peak = line["peak_bytes"]
    return [
        *head,
        f"{line['tokens_per_second']:,.0f}",
        f"{line['seconds']:.2f}",
        "" if peak is None else f"{peak / 2**30:.1f}",
        predicted,
        "" if peak is None or not predicted else f"{line['predicted_bytes'] / peak:.3f}",
        MemoryOptions(**line["options"]).stated(),
    ]


def technique_row(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[str]:
    """One technique beside the line that it is held against."""
    if "failed" in line:
        return [line["technique"], line["against"], "", "", "", "", line["failed"], "", "", line["claimed"]]
    base = next((one for one in lines if one["technique"] == line["against"] and "failed" not in one), None)
    peak, held, predicted = line["peak_bytes"], line["held_bytes"], line["predicted_bytes"]
    beside = None if peak is None or base is None else base
    return [
        line["technique"],
        line["against"],
        "" if peak is None else f"{peak / 2**30:.2f}",
        "" if beside is None else _change(peak, beside["peak_bytes"]),
        "" if beside is None else _change(peak - held, beside["peak_bytes"] - beside["held_bytes"]),
        "" if beside is None else _change(held, beside["held_bytes"]),
        f"{line['seconds'] * 1e3:.1f}",
        "" if base is None else _change(line["seconds"], base["seconds"]),
        "" if peak is None or predicted is None else f"{predicted / peak:.3f}",
        line["claimed"],
    ]


def capacity_notes(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What the figures say, in sentences."""
    checked = [
        line["predicted_bytes"] / line["peak_bytes"]
        for line in lines
        if line["kind"] != "dense" and line.get("peak_bytes")
    ]
    notes = []
    if checked:
        worst = max(checked, key=lambda ratio: abs(ratio - 1))
        met = "met" if abs(worst - 1) <= WITHIN else "NOT MET"
        notes.append(f"{met}: the memory model within {WITHIN:.0%} of the measured peak; farthest {worst:.3f}")
    rates = {line["kind"]: line["tokens_per_second"] for line in reversed(lines) if "tokens_per_second" in line}
    if {"dilated", "dense"} <= rates.keys():
        notes.append(
            f"tokens/s of this attention over those of dense attention: {rates['dilated'] / rates['dense']:.2f}"
        )
    return notes


def _change(value: float, base: float) -> str:
    return f"x {value / base:.2f}" if base else ""
