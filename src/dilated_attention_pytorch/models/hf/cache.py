"""Our bounded cache as a `Cache` of transformers, for `generate(past_key_values=...)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dilated_attention_pytorch.core.checks import checked, shown
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.functional import autocast_inputs
from dilated_attention_pytorch.models.hf.masks import MaskFacts
from dilated_attention_pytorch.models.hf.pattern import read_pattern
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

_ANNOUNCED = "_dilated_cache_layer"


def layer_of(key: Tensor) -> DilatedLayer | None:
    """The cache layer that `update` attached to these new keys, if any."""
    return getattr(key, _ANNOUNCED, None)


class DilatedLayer(CacheLayerMixin):
    """One layer's `DilatedKVCache`, made when the first keys show heads, dtype and device.

    transformers first updates a cache and then attends to its keys. A bounded cache must be read before it is written,
    so both happen in one step: `update` returns only the new keys, with this layer attached, and the attention function
    calls `attend` with the queries.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, spec: DilatedSpec, batch: int, rewindable: int, is_first: bool) -> None:
        super().__init__()
        self.spec = spec
        self.batch_size = batch
        self.rewindable = rewindable
        self.tokens = 0  # with padding, as transformers counts
        self.held: DilatedKVCache | None = None
        self._is_first = is_first
        self._awaits_attention = False

    @property
    def is_croppable(self) -> bool:
        return self.rewindable > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.announce(key_states.shape[0], key_states.shape[2])
        setattr(key_states, _ANNOUNCED, self)
        return key_states, value_states

    def announce(self, batch: int, new: int) -> None:
        """Count new tokens before attention; `attended` confirms them."""
        if batch != self.batch_size:
            raise ValueError(
                f"the cache is for a batch of {self.batch_size}, the input is for {batch}: make it with "
                f"dilated_cache(model, batch={batch}); beams and returned sequences count as rows"
            )
        if self._awaits_attention:
            raise ValueError(
                f"the newest of the {self.tokens} tokens that this cache counts never reached it: either its model's "
                'attention is not dilated, or changes keys after the cache (use attn_implementation="dilated", or '
                "another cache), or the call before failed (reset() the cache and begin again with the first token)"
            )
        self._awaits_attention = True
        self.tokens += new

    def attended(self) -> None:
        self._awaits_attention = False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, facts: MaskFacts, spec: DilatedSpec, scale: float | None
    ) -> Tensor:
        """The rows `(B, m, H, D)` of the tokens that `update` announced."""
        if spec != self.spec:
            raise ValueError(f"the cache is for {self.spec}, this attention is {spec}: make it with dilated_cache")
        if self.held is None:
            (kept,) = autocast_inputs(key)
            self.held = DilatedKVCache(
                **spec.keywords,
                batch=self.batch_size,
                num_heads=query.shape[2],
                num_kv_heads=key.shape[2],
                head_dim=query.shape[3],
                rewindable=self.rewindable,
                dtype=kept.dtype,
                device=kept.device,
            )
        self.go_on(facts, query.shape[1])
        rows = self.held.attend(query, key, value, scale=scale)
        self.attended()
        return rows

    def go_on(self, facts: MaskFacts, new: int) -> None:
        """Set where each row's tokens begin, from the mask of the `new` tokens."""
        before = self.tokens - new
        assert self.held is not None
        if facts.documents is not None:
            raise ValueError("a bounded cache has one document in each row: leave it out for packed documents")
        if facts.begin is None and before:
            raise ValueError(
                f"the model gave its attention no mask, so that nothing says where the {new} new tokens lie after the "
                f"{before} in the cache: such a model cannot use it"
            )
        if facts.spans is None:
            self.held.go_on_from(before)
            return
        if not self._ends_with_new(facts, new):
            raise ValueError("a bounded cache goes on at the end of every row: pad on the left, or use another cache")
        lengths = before - facts.spans[:, 0]
        if self._is_first and before and not torch.compiler.is_compiling():
            moved = (lengths != self.held.lengths) & (self.held.lengths > 0)
            if bool(moved.any()):
                raise ValueError(
                    f"row {int(moved.int().argmax())} of attention_mask begins elsewhere than when the cache took its "
                    "tokens: use one cache for one batch of prompts, and reset() it before the next"
                )
        self.held.lengths.copy_(lengths)

    def _ends_with_new(self, facts: MaskFacts, new: int) -> bool:
        assert facts.spans is not None
        if facts.begin is None:
            return not bool((facts.spans[:, 1] != new).any())
        if facts.order is None:
            return True
        place = torch.arange(self.tokens - new, self.tokens, device=facts.order.device)
        return not bool(((facts.order[:, -new:] != place) & (place >= facts.spans[:, :1])).any())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.tokens  # `update` returns only the new keys

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.10

    def reset(self) -> None:
        self.tokens = 0
        self._awaits_attention = False
        if self.held is not None:
            self.held.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held is not None:
            self.held.reorder(beam_idx.to(self.held.lengths.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens; a positive number says how many remain, as before transformers 5.10."""
        back = -tokens_to_remove if tokens_to_remove <= 0 else max(self.tokens - tokens_to_remove, 0)
        if back and self.held is not None:
            self.held.rewind(back)
            self.tokens -= back

    def offload(self) -> None:
        raise ValueError("a bounded cache stays on its device: it is small, so make it without offloading")

    prefetch = offload

    def _another_batch(self, *args: Any) -> None:
        raise ValueError(f"a bounded cache keeps its batch of {self.batch_size}: make one for the batch you want")

    batch_repeat_interleave = batch_select_indices = _another_batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch={self.batch_size}, tokens={self.tokens}, held={self.held!r})"


class DilatedCache(Cache):
    """A bounded cache for every layer: its bytes do not grow with the tokens. Make it with `dilated_cache`."""

    layers: list[DilatedLayer]

    @checked()
    def __init__(self, spec: DilatedSpec, num_layers: int, batch: int, rewindable: int = 0) -> None:
        super().__init__(layers=[DilatedLayer(spec, batch, rewindable, index == 0) for index in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values; 0 before the first token."""
        return sum(layer.held.nbytes for layer in self.layers if layer.held is not None)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the cache has {len(self.layers)} layers, the model asks for layer {layer_idx}: make it with "
                "dilated_cache(model, batch) for this model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@checked()
def dilated_cache(model: Any, batch: int, *, rewindable: int = 0) -> DilatedCache:
    """A bounded cache for `model.generate(..., past_key_values=...)` or `model(..., past_key_values=...)`.

    Args:
        model: a causal model with `attn_implementation="dilated"`, or a `LongNetForCausalLM`.
        batch: the number of rows; beams and `num_return_sequences` count as rows.
        rewindable: how many tokens can be taken back, for assisted generation.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TypeError(f"model must be a model of transformers, got {shown(model)}")
    config = model.config.get_text_config()
    if config.model_type != "longnet" and config._attn_implementation != "dilated":
        raise ValueError(
            f"a bounded cache serves dilated attention, this model's is {config._attn_implementation!r}: load it with "
            'attn_implementation="dilated" or switch it with use_dilated_attention'
        )
    return DilatedCache(read_pattern(config), config.num_hidden_layers, batch, rewindable)
