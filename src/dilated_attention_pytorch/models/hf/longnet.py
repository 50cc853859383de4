"""`LongNetLM` as a model of transformers: config, base model, causal language model, Auto classes."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from dilated_attention_pytorch.models.captured import lend_cache, step_for
from dilated_attention_pytorch.models.config import ModelConfig, feed_forward_width
from dilated_attention_pytorch.models.fused import KNOWN
from dilated_attention_pytorch.models.hf.cache import DilatedCache
from dilated_attention_pytorch.models.hf.masks import (
    MaskFacts,
    dilated_mask,
    of_one_document,
    packed_by_positions,
    read_mask,
)
from dilated_attention_pytorch.models.hf.pattern import FIELD, pattern_values, read_pattern
from dilated_attention_pytorch.models.longnet import LongNetLM, soft_cap
from dilated_attention_pytorch.models.weights import is_sharded, write_on_first_rank
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache, reordered
from dilated_attention_pytorch.nn.transformer import DilatedTransformerEncoderLayer

_PATTERN = ("segment_lengths", "dilation_rates", "head_layout")
# Fields of `ModelConfig` that have another name here, or that only an encoder-decoder has.
_ELSEWHERE = {*_PATTERN, "tie_weights", "num_decoder_layers"}
_OWN = {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name not in _ELSEWHERE}


def take_sizes(values: dict[str, Any], names: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Remove our sizes from a config's keywords, where they may have transformers' `names`, and return them."""
    values |= {ours: values.pop(theirs) for theirs, ours in names.items() if theirs in values}
    sizes = {name: values.pop(name, default) for name, default in defaults.items()}
    sizes["dim_feedforward"] = sizes["dim_feedforward"] or feed_forward_width(sizes["d_model"], sizes["activation"])
    return sizes


def take_pattern(values: dict[str, Any], *more: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Remove the pattern from a config's keywords: the value of its field, and the keywords that state it instead."""
    pattern = values.pop(FIELD, None)
    stated = {name: values.pop(name) for name in (*_PATTERN, *more) if name in values}
    if pattern is not None and stated:
        raise ValueError(f"{FIELD} and {', '.join(stated)} both state the pattern: pass one of them")
    return pattern, stated


class LongNetConfig(PreTrainedConfig):
    """The sizes of a `LongNetLM`, with the names and defaults of `ModelConfig`, as a config of transformers.

    >>> config = LongNetConfig(d_model=64, num_heads=4, num_layers=2, segment_lengths=[16, 64], dilation_rates=[1, 4])
    >>> config.model_config().segment_lengths
    (16, 64)
    """

    model_type = "longnet"
    attribute_map = {  # noqa: RUF012 (as transformers has it)
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "dim_feedforward",
    }

    def __init__(self, **values: Any) -> None:
        pattern, stated = take_pattern(values, "max_length")
        sizes = take_sizes(values, self.attribute_map, _OWN)
        if pattern is None:
            pattern = pattern_values(ModelConfig(**sizes, **stated).spec)
        super().__init__(**({"tie_word_embeddings": ModelConfig.tie_weights, "use_cache": True} | values))
        for name, value in sizes.items():
            setattr(self, name, value)
        setattr(self, FIELD, pattern)
        setattr(self, FIELD, pattern_values(read_pattern(self)))  # which refuses a wrong hand-written pattern

    def model_config(self) -> ModelConfig:
        """The same sizes as a `ModelConfig`, checked."""
        own = {name: getattr(self, name) for name in _OWN}
        return ModelConfig(**read_pattern(self).keywords, tie_weights=self.tie_word_embeddings, **own)

    @classmethod
    def of(cls, config: ModelConfig, **values: Any) -> LongNetConfig:
        """The config of a `LongNetLM`; `values` are settings of transformers, such as `eos_token_id`."""
        own = {name: getattr(config, name) for name in _OWN} | {FIELD: pattern_values(config.spec)}
        return cls(**own, tie_word_embeddings=config.tie_weights, **values)


# Further keywords of forward. Positions in a cache and the longest document are accepted and not needed.
_TAKEN = {
    "output_attentions", "output_hidden_states", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "cache_position",
}  # fmt: skip
_OF_THE_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}

_as_longnets: weakref.WeakKeyDictionary[nn.Module, LongNetLM] = weakref.WeakKeyDictionary()
_LONGER_DRAFTS = 64  # tokens by which transformers' schedules may lengthen an assistant's first draft


def refuse_unknown(keywords: dict[str, Any], known: set[str]) -> None:
    """Raise for keywords that would have no effect, such as those of other models."""
    unknown = sorted(name for name, value in keywords.items() if value is not None and name not in known)
    if unknown:
        raise TypeError(f"a LongNet does not take {', '.join(unknown)}: leave it out")


class LongNetLayer(GradientCheckpointingLayer, DilatedTransformerEncoderLayer):
    """A layer that transformers' `gradient_checkpointing_enable` reaches."""


KNOWN.add(LongNetLayer)  # it computes as its parent does


class _LongNetBody(LongNetLM):
    """A `LongNetLM` whose layers checkpoint themselves."""

    _layer_class = LongNetLayer

    def _run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return layer(*args, **kwargs)


class LongNetPreTrainedModel(PreTrainedModel):
    config_class = LongNetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LongNetLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_attention_backend = False  # its attention is dilated whatever attn_implementation says
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: layers initialise themselves after MAGNETO, and weights that a file lacks are an error."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As in transformers; if ranks shard the parameters, all of them make this call, and the first one writes."""

        def save(weights: dict[str, Any] | None) -> None:
            super(LongNetPreTrainedModel, self).save_pretrained(
                save_directory, is_main_process, weights, *args, **kwargs
            )

        if is_sharded(self) and state_dict is None:
            write_on_first_rank(self, save)
        else:
            save(state_dict)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, except that weights that are missing, left over or of another shape are an error."""
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
        wrong = {kind: sorted(map(str, info[kind])) for kind in kinds if info[kind]}
        if wrong:
            raise ValueError(f"the weights do not fit {cls.__name__}: {wrong}; use the folder of its save_pretrained")
        return (model, info) if wanted else model


class LongNetModel(LongNetPreTrainedModel):
    """The hidden states of a `LongNetLM`, `(B, N, d_model)`.

    >>> config = LongNetConfig(d_model=32, num_heads=4, num_layers=1, segment_lengths=[16, 64], dilation_rates=[1, 4])
    >>> LongNetModel(config)(torch.randint(256, (2, 100))).last_hidden_state.shape
    torch.Size([2, 100, 32])
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 (of a LongNetForCausalLM's folder)

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__(config)
        self.longnet = _LongNetBody(config.model_config())
        self.longnet.head = nn.Identity()  # type: ignore[assignment]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.longnet.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.longnet.embedding = value

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DilatedCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **keywords: Any,
    ) -> BaseModelOutputWithPast:
        """`attention_mask` states padding; `position_ids` that begin again, or `cu_seq_lens_q`, packed documents.

        `inputs_embeds` are `(B, N, d_model)` as `get_input_embeddings()` returns them; the model scales them by
        sqrt(d_model). With `use_cache=True` or `past_key_values`, the input holds the next tokens of a bounded cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("a LongNet takes either input_ids or inputs_embeds: pass one of them")
        refuse_unknown(keywords, _TAKEN)
        if keywords.get("output_attentions") or self.config.output_attentions:
            raise ValueError("a LongNet does not return attentions: leave out output_attentions")
        x = self.longnet.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        B, N = x.shape[:2]
        if use_cache and self.training and self.is_gradient_checkpointing:
            warnings.warn("a cache is incompatible with gradient checkpointing: setting use_cache=False", stacklevel=2)
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache(B)
        if past_key_values is not None:
            self._check_cache(past_key_values)
        packed = keywords.get("cu_seq_lens_q")
        if past_key_values is None or not torch.compiler.is_compiling():
            packed = self._packed(B, N, attention_mask, position_ids, packed)
        elif attention_mask is None and position_ids is not None and N > 1:
            x = of_one_document(x, position_ids.expand(B, N))
        facts = self._mask_facts(B, N, attention_mask, past_key_values, x.device)
        order = facts.order if facts.begin is None else None
        if order is not None:
            x = reordered(x, order)
        wanted = keywords.get("output_hidden_states")
        states: list[Tensor] | None = [] if (self.config.output_hidden_states if wanted is None else wanted) else None
        if past_key_values is None:
            padding = None if attention_mask is None else ~attention_mask.bool()
            if padding is not None and order is not None:
                padding = reordered(padding, order)
            hidden = self.longnet.hidden(x, key_padding_mask=padding, cu_seqlens=packed, states=states)
        elif packed is None:
            hidden = self._next(x, facts, past_key_values, states)
        else:
            raise ValueError("a bounded cache has one document in each row: leave it out for packed documents")
        every = None if states is None else (*states, hidden)
        if order is not None:
            back = order.argsort(1)
            hidden = reordered(hidden, back)
            every = None if every is None else tuple(reordered(state, back) for state in every)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values, hidden_states=every)

    def new_cache(
        self, batch: int, rewindable: int = 0, caches: Sequence[DilatedKVCache] | None = None
    ) -> DilatedCache:
        """An empty cache, of empty `caches` of the layers if you have some."""
        c = self.config
        cache = DilatedCache(read_pattern(c), c.num_layers, c.num_heads, batch, rewindable, stagger=c.stagger)
        return cache.holding(caches or self.longnet.new_cache(batch, rewindable=rewindable))

    def _packed(
        self,
        batch: int,
        tokens: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seq_lens: Tensor | None,
    ) -> Tensor | None:
        """The `cu_seqlens` of packed documents, from their lengths, or without a mask from positions."""
        if cu_seq_lens is not None:
            return cu_seq_lens
        if attention_mask is not None or position_ids is None or tokens == 1:
            return None
        documents = packed_by_positions(position_ids.expand(batch, tokens))
        if documents is None:
            return None
        if batch > 1:
            raise ValueError(f"packed documents come in one row, got {batch}: put the rows one after another")
        return torch.cat([documents[:1, 0], documents[:, 1]])

    def _mask_facts(
        self, B: int, N: int, attention_mask: Tensor | None, cache: DilatedCache | None, device: torch.device
    ) -> MaskFacts:
        """What the mask says about the rows of a cache, or about padding between tokens."""
        if attention_mask is not None and attention_mask.dim() == 4:
            return read_mask(attention_mask)
        if attention_mask is None and (cache is None or cache.layers[0].count.is_empty):
            return MaskFacts()
        if cache is None and torch.compiler.is_compiling():
            return MaskFacts()
        before = 0 if cache is None else cache.get_seq_length()
        keys = N if cache is None else cache.get_mask_sizes(N, 0)[0]
        mask = None if attention_mask is None else attention_mask.bool()
        return read_mask(dilated_mask(B, N, keys, before, before, attention_mask=mask, device=device))

    def _check_cache(self, cache: DilatedCache) -> None:
        if not isinstance(cache, DilatedCache):
            raise ValueError(
                f"a LongNet's cache is bounded, got {type(cache).__name__}: make it with dilated_cache(model, "
                "batch), or pass use_cache=True; for prefix tuning, which needs another, use prompt tuning"
            )
        specs = [self.longnet.config.spec_of(number) for number in range(len(self.longnet.layers))]
        theirs = [layer.spec for layer in cache.layers]
        if theirs != specs:
            cached, own = (
                f"{len(some)} layers of {' and '.join(map(str, dict.fromkeys(some)))}" for some in (theirs, specs)
            )
            raise ValueError(
                f"the cache is for {cached}, the model has {own}: make it with dilated_cache(model, batch)"
            )

    def _next(self, x: Tensor, facts: MaskFacts, cache: DilatedCache, states: list[Tensor] | None) -> Tensor:
        B, N = x.shape[:2]
        c = self.longnet.config
        like = x.new_empty(0, c.num_kv_heads or c.num_heads, 0, c.head_dim)  # as the keys
        for layer in cache.layers:
            layer.lazy_initialization(like, like)
            layer.announce(B, N)
            layer.go_on(facts, N)
        held = [layer.held for layer in cache.layers if layer.held is not None]
        hidden = self.longnet.hidden(x, cache=held, states=states)
        for layer in cache.layers:
            layer.attended()
        return hidden


class LongNetForCausalLM(LongNetPreTrainedModel, GenerationMixin):
    """A `LongNetLM` with the loss, `generate` and files of transformers.

    >>> config = LongNetConfig(d_model=32, num_heads=4, num_layers=1, segment_lengths=[16, 64], dilation_rates=[1, 4])
    >>> model = LongNetForCausalLM(config)
    >>> tokens = torch.randint(256, (2, 100))
    >>> model(tokens, labels=tokens).logits.shape
    torch.Size([2, 100, 256])
    """

    _tied_weights_keys = {"lm_head.weight": "model.longnet.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__(config)
        self.model = LongNetModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DilatedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **keywords: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `(B, N, vocab)`, or of the last `logits_to_keep` tokens; with `labels`, the loss too."""
        keywords.pop("tokenizer", None)  # of the stop strings of `generate`, which passes it on
        refuse_unknown(keywords, _TAKEN | _OF_THE_LOSS)
        if input_ids is not None and labels is None and not keywords and past_key_values is not None:
            logits = self._recorded_step(input_ids, past_key_values)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        passed = {name: keywords.pop(name) for name in _TAKEN if name in keywords} | {"return_dict": True}
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache, **passed
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = soft_cap(self.lm_head(out.last_hidden_state[:, keep]), self.config.logit_soft_cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **keywords)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    def _recorded_step(self, tokens: Tensor, cache: DilatedCache) -> Tensor | None:
        """The logits `(B, 1, vocab)` of the next token, by a recorded step as in `LongNetLM.generate`.

        None if the call needs a plain forward pass.
        """
        is_next = isinstance(cache, DilatedCache) and cache.get_mask_sizes(tokens.shape[1], 0)[0] == 0
        if not is_next or self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if self.config.output_hidden_states or self.config.output_attentions:
            return None
        model, held = self._as_longnet(), [layer.held for layer in cache.layers if layer.held is not None]
        if cache.step is None:
            cache.step = step_for(model, held, tokens)
        cache.layers[0].announce(*tokens.shape)
        logits = cache.step(model, tokens, held).clone()  # the next step overwrites them
        cache.layers[0].attended()
        return logits

    def _as_longnet(self) -> LongNetLM:
        """This model's modules as a `LongNetLM`, which is the same object every time."""
        found = _as_longnets.get(self)
        if found is None:
            found = _as_longnets[self] = copy.copy(self.model.longnet)
        found._modules = {**self.model.longnet._modules, "head": self.lm_head}
        found.training, found.config = self.training, self.model.longnet.config
        return found

    @staticmethod
    def create_masks_for_generate(
        inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: DilatedCache, **others: Any
    ) -> Tensor | None:
        """The mask that `generate` passes to forward, which reads it; None if forward does not need it."""
        return attention_mask if past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)[0] else None

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Steps are recorded as CUDA graphs; they are compiled only if you pass a `compile_config`."""
        return generation_config.compile_config is not None and bool(
            super()._valid_auto_compile_criteria(model_kwargs, generation_config)
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give `generate` a bounded cache; its default one would keep every token."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and bool((mask[:, -1] == 0).any()):
            raise ValueError(
                f"row {int((mask[:, -1] == 0).int().argmax())} of attention_mask ends in padding, where generate reads "
                "the next token: pad prompts on the left (padding_side='left')"
            )
        if generation_config.cache_implementation == "dynamic_full":  # early releases of transformers, for assistants
            generation_config.cache_implementation = None
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "a LongNet's cache is bounded: leave out cache_implementation="
                f"{generation_config.cache_implementation!r}"
            )
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        rewindable, new = 0, generation_config.max_new_tokens or max_cache_length
        if generation_config.is_assistant:
            rewindable = new + _LONGER_DRAFTS
        elif generation_mode == GenerationMode.ASSISTED_GENERATION:
            # A draft from the prompt has its stated length; an assistant's may grow to all new tokens.
            rewindable = generation_config.prompt_lookup_num_tokens or new
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        lent = lend_cache(self._as_longnet(), rows, rewindable=rewindable)
        model_kwargs["past_key_values"] = self.model.new_cache(rows, rewindable, lent)

    @classmethod
    def from_longnet(cls, model: LongNetLM, **values: Any) -> LongNetForCausalLM:
        """The same model for transformers, with copies of its weights; `values` go to `LongNetConfig`."""
        like = model.embedding.weight
        made = cls(LongNetConfig.of(model.config, **values)).to(device=like.device, dtype=like.dtype)
        tensors = {f"model.longnet.{name}": x for name, x in model.state_dict().items() if name != "head.weight"}
        made.load_state_dict(tensors | {"lm_head.weight": model.state_dict()["head.weight"]})
        return made.train(model.training)

    def to_longnet(self) -> LongNetLM:
        """The same model as a `LongNetLM`, with copies of its weights."""
        weight = self.lm_head.weight
        made = LongNetLM(self.config.model_config()).to(device=weight.device, dtype=weight.dtype)
        tensors = self.model.longnet.state_dict()
        made.load_state_dict({**tensors, "head.weight": weight.detach()})
        return made.train(self.training)


def register_auto_classes() -> None:
    """Let `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the model type `longnet`."""
    AutoConfig.register(LongNetConfig.model_type, LongNetConfig, exist_ok=True)
    AutoModel.register(LongNetConfig, LongNetModel, exist_ok=True)
    AutoModelForCausalLM.register(LongNetConfig, LongNetForCausalLM, exist_ok=True)
