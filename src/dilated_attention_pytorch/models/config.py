"""The sizes of a LongNet, as one frozen value that is saved beside its weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from dilated_attention_pytorch.core.checks import COUNT, POSITIVE, SIZE, check_divides, check_fields
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout, stated_branches
from dilated_attention_pytorch.nn.multihead import Norm
from dilated_attention_pytorch.nn.transformer import Activation

Positions = Literal["rotary", "xpos", "none"]
EncoderPositions = Literal["none", "rotary", "coordinates"]
Pooling = Literal["mean", "attention", "cls"]

_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_RATES = (1, 2, 4, 6, 12)


class ModelFields(TypedDict, total=False):
    """The fields of `ModelConfig`, as the keywords of a model."""

    vocab_size: int
    d_model: int
    num_heads: int
    num_kv_heads: int | None
    num_layers: int
    num_decoder_layers: int
    dim_feedforward: int
    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    head_layout: HeadLayout
    stagger: bool
    positions: Positions
    scale_base: float
    dropout: float
    attention_dropout: float
    activation_dropout: float
    activation: Activation
    norm: Norm
    layer_norm_eps: float
    qk_norm: bool
    tie_weights: bool
    logit_soft_cap: float | None
    max_length: int | None


class EncoderFields(ModelFields, total=False):
    """The fields of `EncoderConfig`, as the keywords of a model."""

    input_dim: int
    num_classes: int
    pooling: Pooling
    cls_rows: int | None
    tile_size: float
    grids: int


def feed_forward_width(d_model: int, activation: Activation) -> int:
    """The default of `dim_feedforward`, which gives about the same number of parameters with every activation."""
    if activation == "swiglu":
        return -(-8 * d_model // (3 * 128)) * 128
    return 4 * d_model


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of `LongNetLM` and `LongNet`; the defaults are the LongNet paper's base model.

    `num_layers` is the number of layers of `LongNetLM` and of `LongNet`'s encoder; `num_decoder_layers` that of
    `LongNet`'s decoder, 0 for an encoder alone. `max_length` replaces `segment_lengths` and `dilation_rates`: they are
    then those of `branches_for(max_length, heads, is_causal=True)`, which connect this many tokens, or with xPos those
    of `branches_for(max_length, heads)`; state the latter for a `LongNet` without a decoder, which is not causal, or
    use `LongNetEncoder`. `dim_feedforward=0` means four times `d_model`, or with `activation="swiglu"`, which has a
    third matrix, two thirds of that, rounded up to a multiple of 128. `stagger` lengthens the segments of every other
    layer, as `DilatedSpec.staggered` does.

    The defaults follow MAGNETO; `norm="rms"`, `activation="swiglu"`, `num_kv_heads`, `qk_norm` and `logit_soft_cap`
    are choices of later models. `qk_norm` scales queries and keys by an RMS norm over each head.
    `logit_soft_cap=c` returns `c * tanh(logits / c)`. `vocab_size`, `tie_weights` and `logit_soft_cap` apply to
    `LongNetLM` only.

    >>> ModelConfig(d_model=128, num_heads=4, num_layers=2).dim_feedforward
    512
    >>> ModelConfig(d_model=768, activation="swiglu", norm="rms", num_kv_heads=4, qk_norm=True).dim_feedforward
    2048
    >>> ModelConfig(d_model=128, num_heads=4, max_length=100_000).segment_lengths
    (1407, 2048, 131072)
    """

    vocab_size: int = 256
    d_model: int = setting(768, "width of the model")
    num_heads: int = setting(12, "attention heads")
    num_kv_heads: int | None = setting(None, "key/value heads, if fewer: grouped queries (default: --num-heads)")
    num_layers: int = setting(12, "layers")
    num_decoder_layers: int = 12
    dim_feedforward: int = 0
    segment_lengths: tuple[int, ...] = setting(_LENGTHS, "segment lengths, one per branch", short="segments")
    dilation_rates: tuple[int, ...] = setting(_RATES, "dilation rates, one per branch", short="rates")
    head_layout: HeadLayout = "interleaved"
    stagger: bool = setting(False, "lengthen the segments of every other layer, so that borders rarely coincide")
    positions: Positions = "rotary"
    scale_base: float = 512.0  # the distance over which xPos lets scores decay
    dropout: float = setting(0.0, "dropout of embeddings and layers")
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0  # within feed-forward networks: none, as in torchscale
    activation: Activation = setting("gelu", "activation of feed-forward networks")
    norm: Norm = setting("layer", "layer norm or RMS norm, everywhere in the model")
    layer_norm_eps: float = 1e-5
    qk_norm: bool = setting(False, "scale queries and keys by an RMS norm over each head")
    tie_weights: bool = setting(True, "use the embedding as the head's weight")
    logit_soft_cap: float | None = setting(
        None, "cap logits at c: c * tanh(logits / c) (default: no cap)", range=POSITIVE
    )
    max_length: InitVar[int | None] = None
    _is_causal: ClassVar[bool] = True

    def __post_init__(self, max_length: int | None) -> None:
        lengths: Sequence[int] | None = None if self.segment_lengths is _LENGTHS else self.segment_lengths
        rates: Sequence[int] | None = None if self.dilation_rates is _RATES else self.dilation_rates
        check_fields(self, num_decoder_layers=SIZE, dim_feedforward=SIZE, segment_lengths=COUNT, dilation_rates=COUNT)
        if max_length is not None:
            heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
            # xPos decays anew where the borders of all branches meet, which those for causal attention rarely do.
            is_causal = self._is_causal and self.positions != "xpos"
            lengths, rates = stated_branches(
                lengths, rates, max_length, heads=heads, head_layout=self.head_layout, is_causal=is_causal
            )
            object.__setattr__(self, "segment_lengths", tuple(lengths))
            object.__setattr__(self, "dilation_rates", tuple(rates))
        width = self.dim_feedforward or feed_forward_width(self.d_model, self.activation)
        object.__setattr__(self, "dim_feedforward", width)
        check_divides("num_heads", self.num_heads, "d_model", self.d_model)
        if self.num_kv_heads is not None:
            check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        if len(set(self.specs)) < 1 + self.stagger:
            raise ValueError(
                f"stagger lengthens segments by 23/16, and {list(self.segment_lengths)} would stay as they are: use "
                "segments of 3 tokens or more, or leave stagger out"
            )

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec.of(self.segment_lengths, self.dilation_rates, self.head_layout)

    def spec_of(self, layer: int) -> DilatedSpec:
        """The pattern of a layer, by its number."""
        return self.spec.of_layer(layer, self.stagger)

    @property
    def specs(self) -> tuple[DilatedSpec, ...]:
        """The patterns that layers take in turn."""
        return (self.spec_of(0), self.spec_of(1)) if self.stagger else (self.spec,)

    @property
    def pattern_in_words(self) -> str:
        """The pattern of the layers, for people.

        >>> ModelConfig(max_length=8192, stagger=True).pattern_in_words
        'segments [1407, 2048, 8192] with rates [1, 1, 6], 23/16 as long in every other layer'
        """
        return f"{self.spec}{', 23/16 as long in every other layer' if self.stagger else ''}"

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> ModelConfig:
        """The config saved at `path`; an error names what is unknown or missing."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no model config at {path}: name the folder of save_pretrained, of a checkpoint or of a run"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path} is not a model config: {error}") from None
        return cls.from_dict(values, path)

    @classmethod
    def from_dict(cls, values: Any, source: Path) -> ModelConfig:
        if not isinstance(values, dict):
            raise ValueError(f"{source} is not a model config: it holds {type(values).__name__}")
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(
                f"{source} has keys that {cls.__name__} does not know, {sorted(unknown)}: it belongs to another kind "
                "of model, or to another version"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"{source} is not a model config: {error}") from None


# Not a string, as annotations here are: Python 3.10's `get_type_hints` refuses an `InitVar` in one.
ModelConfig.__annotations__["max_length"] = InitVar[int | None]

_LONGEST = 262_144  # rows that an encoder connects if neither its length nor its branches are stated
# Fields of `ModelConfig` that have no meaning in an encoder.
_NOT_OF_ENCODERS = ("vocab_size", "num_decoder_layers", "scale_base", "tie_weights", "logit_soft_cap")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Sizes of `LongNetEncoder`: the fields of `ModelConfig` that an encoder has, and its own.

    `input_dim` is the size of the embeddings, and `num_classes` the number of outputs, 0 for none. Unless
    `segment_lengths` and `dilation_rates` are stated, `branches_for` chooses branches that connect every two of
    `max_length` rows, by default of 262,144.

    `positions="coordinates"` adds sines and cosines of the two coordinates of each row, as Prov-GigaPath does:
    coordinates are in pixels, `tile_size` pixels are one tile, and there are at most `grids` tiles along a side.

    `cls_rows` is the number of learned rows before each sequence. By default there are none, and with `pooling="cls"`
    one for each grid of the largest rate; see `LongNetEncoder`.

    >>> config = EncoderConfig(input_dim=1536, d_model=192, num_heads=4, num_layers=2, max_length=50_000, pooling="cls")
    >>> config.segment_lengths, config.dilation_rates, config.cls_rows
    ((2048, 4096, 65536), (1, 2, 4), 4)
    """

    input_dim: int = setting(1536, "size of the embeddings", range=COUNT)
    num_decoder_layers: int = 0
    num_classes: int = setting(0, range=SIZE)
    positions: EncoderPositions = setting("none", "positions of rows: from coordinates, rotary by order, or none")  # type: ignore[assignment]
    pooling: Pooling = setting("mean", "how rows become one embedding")
    cls_rows: int | None = setting(None, range=SIZE)
    tile_size: float = setting(256.0, range=POSITIVE)
    grids: int = setting(1000, range=COUNT)
    _is_causal: ClassVar[bool] = False

    def __post_init__(self, max_length: int | None) -> None:
        if max_length is None and self.segment_lengths is _LENGTHS and self.dilation_rates is _RATES:
            max_length = _LONGEST
        super().__post_init__(max_length)
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        if stated := [name for name in _NOT_OF_ENCODERS if getattr(self, name) != defaults[name]]:
            raise ValueError(f"an encoder of embeddings has no {', '.join(stated)}: leave it out, or use LongNetLM")
        if self.cls_rows is None:
            object.__setattr__(self, "cls_rows", max(self.dilation_rates) if self.pooling == "cls" else 0)
        if self.pooling == "cls" and not self.cls_rows:
            raise ValueError("pooling='cls' takes its result from CLS rows, got cls_rows=0: leave cls_rows out")
