"""Model sizes by name."""

from __future__ import annotations

from typing import Any

from dilated_attention_pytorch.models.config import ModelConfig

VOCABULARY = 50_304  # GPT-2's, up to a multiple of 128

_SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 16),
    "1.3b": (24, 2048, 16),
    "2.7b": (32, 2560, 20),
    "6b": (32, 4096, 32),
}


def model_size(name: str, **changes: Any) -> ModelConfig:
    """A model of this size; `changes` are fields of its config.

    >>> model_size("1.3b", vocab_size=256).d_model
    2048
    """
    if name not in _SHAPES:
        raise ValueError(f"a model's size is one of {', '.join(_SHAPES)}, got {name!r}")
    layers, width, heads = _SHAPES[name]
    given = {"vocab_size": VOCABULARY, "num_layers": layers, "d_model": width, "num_heads": heads, **changes}
    return ModelConfig(**given)


MODEL_SIZES: dict[str, ModelConfig] = {name: model_size(name) for name in _SHAPES}
