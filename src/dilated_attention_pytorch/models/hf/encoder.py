"""`LongNetEncoder` as a model of transformers: config, sequence classification, Auto classes."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from dilated_attention_pytorch.models.config import EncoderConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.hf.longnet import (
    LongNetLayer,
    LongNetPreTrainedModel,
    refuse_unknown,
    take_pattern,
    take_sizes,
)
from dilated_attention_pytorch.models.hf.pattern import FIELD, pattern_values, read_pattern
from dilated_attention_pytorch.nn.positions import SlidePositions

# Fields of `EncoderConfig` that have another name here, or that an encoder does not have.
_ELSEWHERE = {
    "segment_lengths", "dilation_rates", "head_layout", "num_classes", "vocab_size", "num_decoder_layers",
    "scale_base", "tie_weights", "logit_soft_cap",
}  # fmt: skip
_OWN = {field.name: field.default for field in dataclasses.fields(EncoderConfig) if field.name not in _ELSEWHERE}


class LongNetEncoderConfig(PreTrainedConfig):
    """The sizes of a `LongNetEncoder`, with the names and defaults of `EncoderConfig`, as a config of transformers.

    `num_labels` is the number of outputs.

    >>> config = LongNetEncoderConfig(input_dim=24, d_model=64, num_heads=4, num_layers=2, max_length=5000)
    >>> config.encoder_config().dilation_rates, config.encoder_config().num_classes
    ((1, 2, 4), 2)
    """

    model_type = "longnet_encoder"
    attribute_map = {  # noqa: RUF012 (as transformers has it)
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
    }

    def __init__(self, **values: Any) -> None:
        sizes = take_sizes(values, self.attribute_map, _OWN)
        pattern, stated = take_pattern(values, "max_length")
        if pattern is None:
            checked = EncoderConfig(**sizes, **stated)
            pattern, sizes["cls_rows"] = pattern_values(checked.spec), checked.cls_rows
        super().__init__(**values)
        for name, value in sizes.items():
            setattr(self, name, value)
        setattr(self, FIELD, pattern)

    def encoder_config(self) -> EncoderConfig:
        """The same sizes as an `EncoderConfig`, checked."""
        own = {name: getattr(self, name) for name in _OWN}
        return EncoderConfig(**own, **read_pattern(self).keywords, num_classes=self.num_labels)

    @classmethod
    def of(cls, config: EncoderConfig, **values: Any) -> LongNetEncoderConfig:
        """The config of a `LongNetEncoder`; `values` are settings of transformers, such as `id2label`."""
        own = {name: getattr(config, name) for name in _OWN} | {FIELD: pattern_values(config.spec)}
        return cls(**own, **({} if "id2label" in values else {"num_labels": config.num_classes}), **values)


class _EncoderBody(LongNetEncoder):
    """A `LongNetEncoder` whose layers checkpoint themselves."""

    _layer_class = LongNetLayer

    def _run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return layer(*args, **kwargs)


class LongNetForSequenceClassification(LongNetPreTrainedModel):
    """A `LongNetEncoder` with the loss and files of transformers, on sequences of embeddings.

    >>> config = LongNetEncoderConfig(input_dim=24, d_model=32, num_heads=4, num_layers=1, max_length=500, num_labels=3)
    >>> import torch
    >>> model = LongNetForSequenceClassification(config)
    >>> model(inputs_embeds=torch.randn(2, 100, 24), labels=torch.tensor([0, 2])).logits.shape
    torch.Size([2, 3])
    """

    config_class = LongNetEncoderConfig
    base_model_prefix = "encoder"

    def __init__(self, config: LongNetEncoderConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = _EncoderBody(config.encoder_config())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Compute the table of positions, which files do not hold; layers initialise themselves."""
        if isinstance(module, SlidePositions):
            module.compute()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        coordinates: Tensor | None = None,
        labels: Tensor | None = None,
        **keywords: Any,
    ) -> SequenceClassifierOutput:
        """Logits `(sequences, num_labels)`; with `labels`, the loss too.

        Args:
            inputs_embeds: `(B, N, input_dim)`, or packed sequences with `cu_seq_lens_q`, `(1, N, input_dim)`.
            attention_mask: `(B, N)`, 1 for rows and 0 for padding.
            coordinates: `(B, N, 2)`, with `positions="coordinates"`.
            labels: `(sequences,)`: classes, or numbers if `num_labels` is 1.
        """
        refuse_unknown(keywords, {"cu_seq_lens_q", "num_items_in_batch"})
        padding = None if attention_mask is None else ~attention_mask.bool()
        packed = keywords.get("cu_seq_lens_q")
        logits = self.encoder(inputs_embeds, coordinates, key_padding_mask=padding, cu_seqlens=packed)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    @classmethod
    def from_encoder(cls, model: LongNetEncoder, **values: Any) -> LongNetForSequenceClassification:
        """The same model for transformers, with copies of its weights; `values` go to `LongNetEncoderConfig`."""
        if model.head is None:
            raise ValueError("this encoder has no classes: build it with num_classes")
        like = model.input.weight
        made = cls(LongNetEncoderConfig.of(model.config, **values)).to(device=like.device, dtype=like.dtype)
        made.encoder.load_state_dict(model.state_dict())
        return made.train(model.training)


def register_encoder_classes() -> None:
    """Let `AutoConfig` and `AutoModelForSequenceClassification` know the model type `longnet_encoder`."""
    AutoConfig.register(LongNetEncoderConfig.model_type, LongNetEncoderConfig, exist_ok=True)
    AutoModelForSequenceClassification.register(LongNetEncoderConfig, LongNetForSequenceClassification, exist_ok=True)
