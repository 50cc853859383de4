"""The pattern of a model in its config: `config.dilated_attention`, plain values that JSON keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout

FIELD = "dilated_attention"
# A window that no text fills, so that transformers' caches keep every key. There is no other way to have none: layers
# whose window is None rotate otherwise in some models.
NO_WINDOW = 2**40


def write_pattern(
    config: Any,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: HeadLayout = "interleaved",
) -> None:
    """State the pattern in `config`, which saves it with the model."""
    spec = DilatedSpec.of(segment_lengths, dilation_rates, head_layout)
    values = {
        "segment_lengths": list(spec.segment_lengths),
        "dilation_rates": list(spec.dilation_rates),
        "head_layout": spec.head_layout,
    }
    setattr(config, FIELD, values)


def is_no_window(window: int | None) -> bool:
    return window is None or window >= NO_WINDOW


def read_pattern(config: Any) -> DilatedSpec:
    """The pattern that `config` states."""
    values = getattr(config, FIELD, None)
    if values is None:
        raise ValueError(
            f'attn_implementation="dilated" finds no config.{FIELD} in {type(config).__name__}: state the pattern as '
            f'config.{FIELD} = {{"segment_lengths": [2048, 8192], "dilation_rates": [1, 4]}}, or switch the model with '
            "use_dilated_attention(model, segment_lengths, dilation_rates)"
        )
    try:
        return DilatedSpec.of(**values)
    except TypeError as error:
        raise ValueError(
            f"config.{FIELD} holds segment_lengths, dilation_rates and, if not interleaved, head_layout; "
            f"got {values!r}: {error}"
        ) from None
