"""Switch a model of transformers to dilated attention, and fine-tune it at growing lengths."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModel

from dilated_attention_pytorch.core.checks import COUNT, check_fields, checked
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout, stated_branches
from dilated_attention_pytorch.models.hf.attention import NAME, attends_causally, register
from dilated_attention_pytorch.models.hf.pattern import (
    FIELD,
    NO_WINDOW,
    is_no_window,
    pattern_values,
    require_interface,
)

ModelOrConfig = TypeVar("ModelOrConfig")


@checked()
def use_dilated_attention(
    model: ModelOrConfig,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    head_layout: HeadLayout = "interleaved",
    *,
    max_length: int | None = None,
    replace_sliding_window: bool = False,
) -> ModelOrConfig:
    """Switch a model, or a config for models yet to be made, to this pattern, in place; returns it.

    `max_length` replaces segments and rates: `branches_for` chooses branches that connect this many tokens, those for
    causal attention if some of the model's attention is causal. Weights stay as they are. Another call changes the
    pattern. Layers with a sliding window cannot be dilated as well: `replace_sliding_window`, on a config only, gives
    them the dilated pattern instead; they keep their positions.
    """
    register()
    is_model = isinstance(model, torch.nn.Module)
    config: Any = getattr(model, "config", None) if is_model else model
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"use_dilated_attention takes a model or a config of transformers, got {type(model).__name__}")
    text = config.get_text_config()
    require_interface(model if is_model else text)
    chosen: dict[str, Any] = {}
    if max_length is not None:
        chosen["heads"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        chosen["is_causal"] = _is_causal(model if isinstance(model, torch.nn.Module) else _on_meta(config))
    branches = stated_branches(segment_lengths, dilation_rates, max_length, head_layout=head_layout, **chosen)
    spec = DilatedSpec.of(*branches, head_layout)  # before anything is changed
    windows = _windows(text)
    if windows and (is_model or not replace_sliding_window):
        raise ValueError(
            f"{type(text).__name__} has {windows}, and layers of a sliding window cannot be dilated as well: call "
            "use_dilated_attention(config, ..., replace_sliding_window=True) on its config and make the model from that"
        )
    if windows:
        _remove_windows(text)
    setattr(text, FIELD, pattern_values(spec))
    # Only the text part of a model with several, such as images and text.
    parts = [part for part in getattr(config, "sub_configs", {}) if getattr(config, part, None) is text]
    implementation = {parts[0]: NAME} if parts else NAME
    # transformers does not save the attention's name, but reads this field: a saved model is loaded as it was.
    config.attn_implementation = implementation
    if is_model:
        model.set_attn_implementation(implementation)  # type: ignore[attr-defined]
    else:
        config._attn_implementation = implementation
    return model


def _on_meta(config: Any) -> torch.nn.Module:
    """A model of this config without weights: its attention says whether it is causal."""
    try:
        with torch.device("meta"):  # with an attention that is always installed
            return AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception as error:
        raise ValueError(
            f"max_length takes a model, or a config from which AutoModel makes one; of {type(config).__name__} it "
            f"cannot ({error}): pass the model, or state segment_lengths and dilation_rates"
        ) from error


def _is_causal(model: torch.nn.Module) -> bool:
    return any(attends_causally(module) for module in model.modules() if hasattr(module, "is_causal"))


def _windows(config: Any) -> str:
    """The config's sliding windows or chunks that its layers use, in words; empty if there are none."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        others = set(kinds) - {"full_attention"}
        if is_no_window(getattr(config, "sliding_window", None)):
            others.discard("sliding_attention")
        return f"layer_types {', '.join(sorted(others))}" if others else ""
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None) is not None and getattr(config, "use_sliding_window", True):
            return f"{name}={getattr(config, name)}"
    return ""


def _remove_windows(config: Any) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        config.sliding_window = None
        return
    foreign = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention")})
    if foreign:
        raise ValueError(
            f"{type(config).__name__} has layers of {', '.join(foreign)}, which cannot be replaced: only attention "
            "with a sliding window can"
        )
    # Kinds of layers stay: some models also decide by them how to rotate (Gemma3, ModernBERT, Olmo3) or whether to
    # (Cohere2, Exaone4).
    config.sliding_window = NO_WINDOW
    if hasattr(config, "local_attention"):
        config.local_attention = 2 * NO_WINDOW  # ModernBERT takes half of it as its window


@dataclass(frozen=True)
class Stage:
    """A length to train at, and the pattern there."""

    length: int
    spec: DilatedSpec

    def __post_init__(self) -> None:
        check_fields(self, length=COUNT)


@checked(lengths=COUNT, segment_lengths=COUNT, dilation_rates=COUNT)
def growing_lengths(
    lengths: Sequence[int],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: HeadLayout = "interleaved",
) -> Iterator[Stage]:
    """Stages of rising length, each with the branches that fit into it; the last branch may be cut to the length.

    >>> for stage in growing_lengths([1024, 8192], [512, 2048, 8192], [1, 4, 16]):
    ...     print(stage.length, stage.spec.segment_lengths, stage.spec.dilation_rates)
    1024 (512, 1024) (1, 4)
    8192 (512, 2048, 8192) (1, 4, 16)
    """
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths must rise from at least 1, got {list(lengths)}")
    branches = sorted(
        DilatedSpec.of(segment_lengths, dilation_rates, head_layout).branches, key=lambda b: b.segment_length
    )
    for length in lengths:
        used = []
        for branch in branches:
            used.append((min(branch.segment_length, length), branch.dilation_rate))
            if branch.segment_length >= length:
                break
        yield Stage(length, DilatedSpec.of([w for w, _ in used], [r for _, r in used], head_layout))


@checked()
def fine_tune_at_growing_lengths(model: Any, tokens: Tensor, stages: Sequence[Stage], arguments: Any) -> list[float]:
    """Fine-tune a causal model stage by stage with `transformers.Trainer`; returns the training loss of each stage.

    Args:
        model: a causal model with `attn_implementation="dilated"`; it keeps the pattern of the last stage.
        tokens: `(N,)`, text as one row of tokens, which each stage cuts into blocks of its length.
        stages: those of `growing_lengths`.
        arguments: the `TrainingArguments` of each stage.
    """
    from transformers import Trainer

    if tokens.dim() != 1:
        raise ValueError(f"tokens are one row of text, (N,), got {tuple(tokens.shape)}")
    losses = []
    for stage in stages:
        if tokens.shape[0] < stage.length:
            raise ValueError(f"a stage needs {stage.length} tokens of text, got {tokens.shape[0]}: use a longer text")
        use_dilated_attention(model, **stage.spec.keywords)
        _make_room(model.config.get_text_config(), stage.length)
        blocks = tokens[: tokens.shape[0] // stage.length * stage.length].view(-1, stage.length)
        data = [{"input_ids": block, "labels": block} for block in blocks]
        losses.append(Trainer(model=model, args=arguments, train_dataset=data).train().training_loss)
    return losses


def _make_room(config: Any, length: int) -> None:
    known = getattr(config, "max_position_embeddings", None)
    if known is not None and known < length:
        config.max_position_embeddings = length  # rotary positions continue as config.rope_parameters says
