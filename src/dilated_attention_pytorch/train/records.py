"""What the steps of a run came to, one record each: the smoothed loss, steps that were skipped.

A record holds finite numbers only. One of a skipped step says `"skipped": 1`, and has a loss only if that was finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dilated_attention_pytorch.train.step import Outcome

BITS = 1.0 / math.log(2.0)
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


def latest(records: Sequence[dict[str, Any]], key: str) -> float | None:
    """The value of a key in the last record that has it."""
    return next((record[key] for record in reversed(records) if key in record), None)
