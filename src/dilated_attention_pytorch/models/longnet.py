"""LongNet: a causal language model, and an encoder-decoder (or encoder alone) on embeddings."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.core.checks import (
    COUNT,
    check_flag,
    check_instance,
    check_sequence,
    check_tensor,
    checked,
)
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.core.pattern import common_period
from dilated_attention_pytorch.files import check_files
from dilated_attention_pytorch.functional import autocast_inputs
from dilated_attention_pytorch.models.config import ModelConfig, ModelFields
from dilated_attention_pytorch.models.generation import Generates
from dilated_attention_pytorch.models.weights import CONFIG, WEIGHTS, load_model, load_newest, save_weights
from dilated_attention_pytorch.nn.attention import SharesResources
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.nn.multihead import NORMS
from dilated_attention_pytorch.nn.positions import DocumentSpans, RotaryPositions, XPosPositions
from dilated_attention_pytorch.nn.transformer import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    check_features,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model = TypeVar("Model", bound="Pretrained")
# Fields of the config that a layer takes under the same name.
_OF_LAYERS = (
    "d_model", "num_kv_heads", "dim_feedforward", "dropout", "attention_dropout", "activation_dropout", "activation",
    "norm", "layer_norm_eps", "qk_norm",
)  # fmt: skip
_recompute_layer: Callable[..., Tensor] = functools.partial(checkpoint, use_reentrant=False)


class Pretrained(SharesResources, nn.Module):
    """What all models share: a config, layers that can be checkpointed, saving and loading.

    Pass a `ModelConfig` or its fields. The other keywords are not part of the config: `use_pattern_cache`,
    `enable_memory_pool`, `lightweight_pool` and `enable_profiling` are passed on to the attention of every layer,
    `device` and `dtype` are those of the parameters.
    """

    _config_class: type[ModelConfig] = ModelConfig
    positions: RotaryPositions | None

    @checked()
    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        use_pattern_cache: bool = False,
        enable_memory_pool: bool = False,
        lightweight_pool: bool = False,
        enable_profiling: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Unpack[ModelFields],
    ) -> None:
        super().__init__()
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._shared = {
            "use_pattern_cache": use_pattern_cache,
            "enable_memory_pool": enable_memory_pool,
            "lightweight_pool": lightweight_pool,
            "enable_profiling": enable_profiling,
        }
        if config is not None and fields:
            raise TypeError(f"pass a config or its fields, not both: got a config and {sorted(fields)}")
        self.config = self._config_class(**fields) if config is None else config  # type: ignore[arg-type]
        if type(self.config) is not self._config_class:
            raise TypeError(
                f"{type(self).__name__} takes a config of type {self._config_class.__name__}, got "
                f"{type(self.config).__name__}"
            )
        self.gradient_checkpointing = False
        self._layers_per_checkpoint = 1
        self.spans = DocumentSpans()
        self._run_checkpointed: Callable[..., Tensor] = _recompute_layer
        self._build()

    def _build(self) -> None:
        """Make the layers that the config describes."""
        raise NotImplementedError

    @checked(every=COUNT)
    def gradient_checkpointing_enable(
        self, enable: bool = True, run: Callable[..., Tensor] | None = None, every: int = 1
    ) -> None:
        """Keep only the layers' inputs while training, and recompute the rest in backward.

        With `every=n`, keep only the input of every n-th layer; backward computes those between again, too.
        `run(layer, *args, **kwargs)` may keep other tensors, or keep them elsewhere; see `train.memory`.
        """
        self._layers_per_checkpoint = every
        self.gradient_checkpointing = enable
        self._run_checkpointed = _recompute_layer if run is None else run

    @checked()
    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` into `folder`, each atomically.

        If ranks shard the parameters, as after `parallelize`, all ranks make this call, and the first one writes.
        """
        save_weights(self, self.config.to_json(), Path(folder))

    @classmethod
    @checked()
    def from_pretrained(
        cls: type[Model], folder: str | Path, *, device: torch.device | str | None = None, **shared: Any
    ) -> Model:
        """The model in a folder of `save_pretrained`, in a checkpoint, or in the newest checkpoint of a training run.

        `shared` are `use_pattern_cache` and so on. The files of a checkpoint are compared with its checksums. Weights
        that do not fit the config are refused before memory is allocated for the model.
        """

        def load(folder: Path) -> Model:
            check_files(folder, (CONFIG, WEIGHTS))
            config = cls._config_class.from_json(folder / CONFIG)
            layers = config.num_layers + (config.num_decoder_layers if issubclass(cls, LongNet) else 0)
            return load_model(lambda: cls(config, **shared), layers, folder, device)

        return load_newest(Path(folder), load)[1]

    def _make_layers(self, layer_class: Callable[..., nn.Module], count: int, gamma: float) -> nn.ModuleList:
        c = self.config
        own = {name: getattr(c, name) for name in _OF_LAYERS} | {"nhead": c.num_heads, "gamma_init": gamma}
        own |= self._shared | self._factory
        return nn.ModuleList(layer_class(**own, **c.spec_of(number).keywords) for number in range(count))

    def _placed(self, x: Tensor, **lengths: Tensor | None) -> dict[str, Any]:
        """The spans and the rotation for all layers, from `seqlens`, `cu_seqlens` or a padding mask."""
        B, N = x.shape[:2]
        spans = self.spans(B, N, **lengths, cache=self._pattern_cache if is_plain(x) else None)
        return {"spans": spans, "rotation": None if self.positions is None else self.positions(B, N, spans, x.device)}

    def _check(self, name: str, x: Tensor) -> None:
        """Refuse a tensor that does not hold embeddings of this model."""
        check_features(name, x, self.config.d_model, dims=(3,))

    def _run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._run_checkpointed(layer, *args, **kwargs)
        return layer(*args, **kwargs)

    def _groups(self, layers: nn.ModuleList) -> Iterable[Any]:
        """The layers, or while checkpoints are farther apart, chains of layers that keep one input."""
        every = self._layers_per_checkpoint if self.gradient_checkpointing and self.training else 1
        if every == 1:
            return layers
        return [_Chain(list(layers)[first : first + every]) for first in range(0, len(layers), every)]


class _Chain:
    """Layers that run one after the other. Within a checkpoint that runs them again, each is a checkpoint too."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = _recompute_layer(layer, x, *args, **kwargs)
        return x


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Logits within `(-cap, cap)`; unchanged if `cap` is None."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def gain_alone(layers: int) -> float:
    """MAGNETO's `gamma_init` of an encoder alone or a decoder alone."""
    return math.sqrt(math.log(2 * layers)) if layers > 1 else 1.0


def _positions(config: ModelConfig) -> RotaryPositions | None:
    if config.positions == "none":
        return None
    if config.positions == "xpos":
        return XPosPositions(config.head_dim, period=common_period(*config.specs), scale_base=config.scale_base)
    return RotaryPositions(config.head_dim)


class LongNetLM(Generates, Pretrained):
    """A decoder-only language model with causal dilated attention: `(B, N)` tokens to `(B, N, vocab)` logits.

    >>> model = LongNetLM(d_model=32, num_heads=4, num_layers=2, segment_lengths=(16, 128), dilation_rates=(1, 4))
    >>> model(torch.randint(256, (2, 100))).shape
    torch.Size([2, 100, 256])
    """

    _layer_class = DilatedTransformerEncoderLayer

    def _build(self) -> None:
        c = self.config
        self.embedding = nn.Embedding(c.vocab_size, c.d_model, **self._factory)
        self.positions = _positions(c)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = self._make_layers(self._layer_class, c.num_layers, gain_alone(c.num_layers))
        self.norm = NORMS[c.norm](c.d_model, eps=c.layer_norm_eps, **self._factory)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False, **self._factory)
        if c.tie_weights:
            self.head.weight = self.embedding.weight
        # With inputs scaled by sqrt(d) and a tied head, embeddings and first logits then both have unit variance.
        nn.init.normal_(self.embedding.weight, std=c.d_model**-0.5)

    def forward(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Sequence[DilatedKVCache] | None = None,
        finish: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Logits `(B, N, vocab)` of the token that follows each position.

        `finish(hidden, weight)` replaces the head: it gets the final hidden states and the head's weight, for a loss
        that never holds the logits of all tokens. If the model has a `logit_soft_cap`, `finish` must apply it, and also
        gets it as the keyword `soft_cap`. It runs within `forward`, where sharded weights are gathered.
        """
        if finish is not None:
            check_instance("finish", finish, Callable)
        hidden = self.hidden(
            tokens, key_padding_mask=key_padding_mask, seqlens=seqlens, cu_seqlens=cu_seqlens, cache=cache
        )
        if finish is None:
            return self.logits(hidden)
        cap = self.config.logit_soft_cap
        return finish(hidden, self.head.weight, **({} if cap is None else {"soft_cap": cap}))

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `(..., vocab)` of final hidden states `(..., d_model)`."""
        return self.capped(self.head(hidden))

    def capped(self, logits: Tensor) -> Tensor:
        return soft_cap(logits, self.config.logit_soft_cap)

    def hidden(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Sequence[DilatedKVCache] | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """The final hidden states `(B, N, d_model)`, before the head.

        With a `cache` of `new_cache`, `tokens` are the next ones of its rows, which it then holds. `tokens` may also be
        embeddings `(B, N, d_model)`, as `self.embedding` returns them. Each layer's input is appended to `states`.
        """
        self._check_tokens(tokens, may_be_embedded=True)
        is_embedded = tokens.dim() == 3
        if cache is None:
            placed = self._placed(tokens, seqlens=seqlens, cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask)
        else:
            self._check_cache(cache, tokens)
            if any(x is not None for x in (seqlens, cu_seqlens, key_padding_mask)):
                raise ValueError("a cache knows the padding of its rows: pass no mask or lengths with it")
            position = cache[0].lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            placed = {"rotation": None if self.positions is None else self.positions.of(position.clamp_min(0))}
        embedded = tokens if is_embedded else self.embedding(tokens)
        x = self.dropout(embedded * self.config.d_model**0.5)  # (B, N, E)
        one_by_one = cache is not None or states is not None
        for i, layer in enumerate(self.layers if one_by_one else self._groups(self.layers)):
            if states is not None:
                states.append(x)
            held = {} if cache is None else {"cache": cache[i]}
            x = self._run(layer, x, is_causal=True, **placed, **held)
        return self.norm(x)

    def _check_tokens(self, tokens: Tensor, *, may_be_embedded: bool = False) -> None:
        if may_be_embedded and check_tensor("tokens", tokens).is_floating_point() and tokens.dim() == 3:
            self._check("tokens", tokens)
            return
        if check_tensor("tokens", tokens).dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"tokens must be (batch, tokens) of whole numbers (int64 or int32), got {tokens.dtype} "
                f"{tuple(tokens.shape)}"
            )
        # Reading the values would wait for a GPU, where PyTorch's own assertion reports them.
        if is_plain(tokens) and tokens.device.type == "cpu" and tokens.numel():
            least, most = (int(bound) for bound in tokens.aminmax())
            if least < 0 or most >= self.config.vocab_size:
                raise ValueError(
                    f"tokens must lie within the vocabulary, from 0 to {self.config.vocab_size - 1}, got "
                    f"{least if least < 0 else most}: raise vocab_size, or check the tokenizer"
                )

    @checked()
    def new_cache(
        self, batch: int, *, padding: Tensor | None = None, rewindable: int = 0, dtype: torch.dtype | None = None
    ) -> list[DilatedKVCache]:
        """An empty cache for each layer; `padding` and `rewindable` as in `DilatedKVCache`.

        `dtype` is that of keys and values; by default autocast's, or that of the parameters.
        """
        weight, c = self.embedding.weight, self.config
        return [
            DilatedKVCache(
                **c.spec_of(number).keywords,
                batch=batch,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                padding=padding,
                rewindable=rewindable,
                dtype=dtype or self._cache_dtype(),
                device=weight.device,
            )
            for number in range(len(self.layers))
        ]

    def _cache_dtype(self) -> torch.dtype:
        (like,) = autocast_inputs(self.embedding.weight[:0])
        return like.dtype

    def _check_cache(self, cache: Sequence[DilatedKVCache], tokens: Tensor) -> None:
        for i, one in enumerate(check_sequence("cache", cache)):
            check_instance(f"cache[{i}]", one, DilatedKVCache)
        if len(cache) != len(self.layers):
            raise ValueError(f"the model has {len(self.layers)} layers, the cache {len(cache)}: make it with new_cache")
        if cache[0].batch != tokens.shape[0] or cache[0].lengths.device != tokens.device:
            raise ValueError(
                f"the cache is for a batch of {cache[0].batch} on {cache[0].lengths.device}, the tokens are "
                f"{tuple(tokens.shape)} on {tokens.device}: make it with new_cache"
            )
        if torch.compiler.is_compiling():
            return
        layers: Any = self.layers
        theirs, specs = [one.spec for one in cache], [layer.self_attn.attention.spec for layer in layers]
        if theirs != specs:
            cached, own = (" and ".join(map(str, dict.fromkeys(some))) for some in (theirs, specs))
            raise ValueError(f"the cache is for {cached}, the model has {own}: make it with new_cache")
        known = [layer.known_lengths for layer in cache]
        if None not in known and len(set(known)) > 1:
            raise ValueError(
                f"the layers of the cache have had different numbers of tokens, {known}: a step was cut off, or some "
                "were rewound; rewind all to one length, or reset() them and run the tokens again"
            )


class LongNet(Pretrained):
    """An encoder-decoder on embeddings, `(B, N, E)`, or with `num_decoder_layers=0` an encoder alone.

    The decoder's self-attention is causal and dilated; its cross-attention is dense.

    >>> encoder = LongNet(
    ...     d_model=32, num_heads=4, num_layers=2, num_decoder_layers=0,
    ...     segment_lengths=(16, 128), dilation_rates=(1, 4)
    ... )
    >>> encoder(torch.randn(2, 100, 32)).shape
    torch.Size([2, 100, 32])
    """

    def _build(self) -> None:
        c = self.config
        N, M = c.num_layers, c.num_decoder_layers
        if M:
            encoder_gamma = math.sqrt(math.log(3 * M) * math.log(2 * N) / 3)
            decoder_gamma = math.sqrt(math.log(3 * M))
        else:
            encoder_gamma = decoder_gamma = gain_alone(N)
        if c.logit_soft_cap is not None:
            raise ValueError(
                f"logit_soft_cap={c.logit_soft_cap} caps logits, and a LongNet returns hidden states: leave it out, or "
                "use LongNetLM"
            )
        if c.positions == "xpos":
            raise ValueError("xPos grows towards later keys, which an encoder sees: use positions='rotary'")
        self.positions = _positions(c)
        self.encoder = self._make_layers(DilatedTransformerEncoderLayer, N, encoder_gamma)
        self.encoder_norm = NORMS[c.norm](c.d_model, eps=c.layer_norm_eps, **self._factory)
        self.decoder = self._make_layers(DilatedTransformerDecoderLayer, M, decoder_gamma)
        self.decoder_norm = NORMS[c.norm](c.d_model, eps=c.layer_norm_eps, **self._factory) if M else None

    def forward(
        self,
        src: Tensor,
        tgt: Tensor | None = None,
        *,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """The decoder's output on `tgt`, `(B, N of tgt, E)`; without a decoder, the encoder's on `src`.

        `seqlens` or `cu_seqlens` are the lengths of `src`, as in `dilated_attention`. `cu_seqlens` are for an encoder
        alone: the decoder's cross-attention sees all documents. `is_causal` applies to the decoder's self-attention,
        which is causal by default.
        """
        if is_causal is not None:
            check_flag("is_causal", is_causal)
        if self.decoder_norm is None:
            if tgt is not None or tgt_key_padding_mask is not None or is_causal is not None:
                raise ValueError(
                    "this LongNet is an encoder alone (num_decoder_layers=0): it takes no tgt, tgt_key_padding_mask or "
                    "is_causal"
                )
            return self.encode(src, src_key_padding_mask, seqlens=seqlens, cu_seqlens=cu_seqlens)
        if tgt is None:
            raise ValueError("an encoder-decoder needs tgt; for an encoder alone set num_decoder_layers=0")
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens are for an encoder alone, because a decoder's dense cross-attention sees all documents: "
                "pass a padded batch with seqlens or src_key_padding_mask"
            )
        self._check("tgt", tgt)
        self._check("src", src)
        if tgt.shape[0] != src.shape[0]:
            raise ValueError(f"src and tgt must have one batch size, got {src.shape[0]} and {tgt.shape[0]}")
        memory = self.encode(src, src_key_padding_mask, seqlens=seqlens)
        if seqlens is not None:  # which `encode` has checked
            src_key_padding_mask = torch.arange(src.shape[1], device=src.device) >= seqlens.to(src.device)[:, None]
        placed = self._placed(tgt, key_padding_mask=tgt_key_padding_mask)
        placed |= {"memory_key_padding_mask": src_key_padding_mask, "tgt_is_causal": is_causal is not False}
        for layer in self._groups(self.decoder):
            tgt = self._run(layer, tgt, memory, **placed)
        return self.decoder_norm(tgt)

    def encode(
        self,
        src: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The encoder's output, `(B, N, E)`."""
        self._check("src", src)
        placed = self._placed(src, key_padding_mask=key_padding_mask, seqlens=seqlens, cu_seqlens=cu_seqlens)
        for layer in self._groups(self.encoder):
            src = self._run(layer, src, **placed)
        return self.encoder_norm(src)
