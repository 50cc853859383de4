"""What the steps of a run came to, one record each: `metrics.jsonl`, the smoothed loss, steps that were skipped.

A record holds finite numbers only. One of a skipped step says `"skipped": 1`, and has a loss only if that was finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.models.weights import write_whole
from dilated_attention_pytorch.train.step import Outcome

BITS = 1.0 / math.log(2.0)
_FILE = "metrics.jsonl"
_MEMORY = 50  # steps over which the smoothed loss forgets
_HALVINGS = 16  # of the loss scale, from its first value down to 1


def record_of(
    step: int, outcome: Outcome, before: Sequence[dict[str, Any]], tokens_per_byte: float = 1.0
) -> dict[str, Any]:
    """The record of a step, given those of the steps before it.

    `loss_ema` is the mean of the losses so far, and after 50 of them their exponential moving average.

    >>> first = record_of(1, Outcome(4.0, 1.0), [])
    >>> record_of(2, Outcome(2.0, 1.0), [first])["loss_ema"]
    3.0
    """
    record: dict[str, Any] = {"step": step}
    if math.isfinite(outcome.loss):
        record |= {"loss": outcome.loss, "bits": outcome.loss * BITS * tokens_per_byte}
    if math.isfinite(outcome.gradient_norm):
        record["gradient_norm"] = outcome.gradient_norm
    average = before[-1].get("loss_ema") if before else None
    if outcome.is_broken:
        record["skipped"] = 1
    elif average is None:
        average = outcome.loss
    else:
        average += (outcome.loss - average) / min(step, _MEMORY)
    if average is not None:
        record["loss_ema"] = average
    return record


def check_broken(outcome: Outcome, records: Sequence[dict[str, Any]], allowed: int, saved: int) -> str:
    """What to say of a step that was skipped, the last of `records`; raises where that is one too many in a row.

    An overflow of float16 is one too many only after as many as it takes the loss scale to come down to 1.
    """
    row = 0
    while row < len(records) and "skipped" in records[-1 - row]:
        row += 1
    step = records[-1]["step"]
    numbers = f"the loss is {outcome.loss} and the gradient's norm {outcome.gradient_norm} at step {step}"
    if row <= (max(allowed, _HALVINGS) if outcome.is_overflow else allowed):
        why = "too large for float16, so the loss scale is halved" if outcome.is_overflow else f"{row} in a row"
        return f"skipped: {numbers} ({why})"
    raise FloatingPointError(
        f"{numbers}, after {row - 1} skipped steps before it: lower --learning-rate, or raise --skip-broken-steps; "
        + (f"step {saved} is the last checkpoint" if saved else "there is no checkpoint yet")
    )


def write_records(run: Path, records: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_whole(run / _FILE, lambda path: path.write_text(lines))


def read_records(run: Path) -> list[dict[str, Any]]:
    path = run / _FILE
    if not path.is_file():
        return []
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        _ = [record["step"] for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is broken ({error!r}): move it away to resume without the earlier curve") from None
    return records


def latest(records: Sequence[dict[str, Any]], key: str) -> float | None:
    """The value of a key in the last record that has it."""
    return next((record[key] for record in reversed(records) if key in record), None)
