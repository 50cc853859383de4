"""The pattern in a model's config, `config.dilated_attention`, in plain values; and which models can have one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from dilated_attention_pytorch.core.spec import DilatedSpec

FIELD = "dilated_attention"
# A window that no text fills, so that transformers' caches keep every key. A window of None would not do: in some
# models it changes how a layer rotates.
NO_WINDOW = 2**40


def pattern_values(spec: DilatedSpec) -> dict[str, Any]:
    """The value of `config.dilated_attention` for this pattern."""
    return {
        "segment_lengths": list(spec.segment_lengths),
        "dilation_rates": list(spec.dilation_rates),
        "head_layout": spec.head_layout,
    }


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


def require_interface(subject: Any) -> None:
    """Raise unless `attn_implementation` chooses the attention of a model, or of the models of a config."""
    if isinstance(subject, torch.nn.Module):
        can_set = getattr(subject, "_can_set_attn_implementation", lambda: False)()
        name = None if can_set else type(subject).__name__
    else:
        name = _class_without_interface(type(subject))
    if name is not None:
        raise ValueError(
            f"{name} computes attention by itself and not through transformers' AttentionInterface, so that nothing "
            "would be switched: use a model that does, such as Llama, Qwen, Mistral or ModernBERT"
        )


# A constant in a trace: tracing would follow it into the source files that it reads.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _class_without_interface(config_class: type) -> str | None:
    return _read_class_without_interface(config_class)


@functools.cache
def _read_class_without_interface(config_class: type) -> str | None:
    try:
        known = MODEL_MAPPING[config_class]
    except (KeyError, ValueError):  # not in the mapping, or there by a name that transformers does not have
        return None
    for model_class in known if isinstance(known, (list, tuple)) else (known,):
        # A placeholder for a class whose packages are missing has no such method.
        if not getattr(model_class, "_can_set_attn_implementation", lambda: True)():
            return str(model_class.__name__)
    return None
