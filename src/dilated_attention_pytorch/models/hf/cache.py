"""Our bounded cache as a `Cache` of transformers, for `generate(past_key_values=...)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class TokenCount:
    """The tokens that a cache has had, with padding, as transformers counts them: one count for all layers.

    torch.compile would recompile a step for every new value of a Python number. So a compiled step counts on the device
    only, and reads nothing on the host except whether there are earlier tokens.
    """

    def __init__(self) -> None:
        self._on_device: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        self._on_host: int | None = 0  # None: only the device knows
        self.is_empty = True
        self.follows = False  # whether there are tokens before the newest ones
        self.rows_begun = False  # whether every row is known to have a token that is no padding
        if self._on_device is not None:
            self._on_device.zero_()

    def place(self, device: torch.device) -> None:
        if self._on_device is None:
            self._on_device = static(torch.zeros((), dtype=torch.int64, device=device))

    def add(self, new: int) -> None:
        assert self._on_device is not None
        self._on_device.add_(new)
        self.follows, self.is_empty = not self.is_empty, False
        if torch.compiler.is_compiling():
            self._on_host = None
        elif self._on_host is not None:
            self._on_host += new

    def take_back(self, tokens: int) -> None:
        assert self._on_device is not None
        self._on_device.sub_(tokens)
        if self._on_host is not None:
            self._on_host -= tokens

    def tokens(self) -> int | Tensor:
        """The number; a tensor if only the device knows it."""
        if self.is_empty or self._on_device is None:
            return 0
        if not torch.compiler.is_compiling() and self._on_host is not None:
            return self._on_host
        return self._on_device.clone()


def static(x: Tensor) -> Tensor:
    """`x`, which a compiled model then reads and writes in place."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


def reads_masks(device: torch.device) -> bool:
    """Whether the mask of each new token is compared with the cache, which waits for a GPU."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


class DilatedLayer(CacheLayerMixin):
    """One layer's `DilatedKVCache`.

    transformers first updates a cache and then attends to its keys. A bounded cache must be read before it is written,
    so both happen in one step: `update` returns only the new keys, with this layer attached, and the attention function
    calls `attend` with the queries.
    """

    is_sliding = False
    is_compileable = True

    def __init__(
        self, spec: DilatedSpec, num_heads: int, batch: int, rewindable: int, count: TokenCount | None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self.batch_size = batch
        self.rewindable = rewindable
        self.held: DilatedKVCache | None = None
        self._is_first = count is None
        self.count = count or TokenCount()
        self._awaits_attention = False
        self._has_tokens = False

    @property
    def is_croppable(self) -> bool:
        return self.rewindable > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the cache for keys `(B, Hkv, m, D)`, unless there is one that fits them, or holds tokens."""
        (key,) = autocast_inputs(key_states[:0])  # for its dtype
        heads, dim = key.shape[1], key.shape[3]
        if self.held is not None:
            theirs = (self.held.num_kv_heads, self.held.head_dim, self.held.keys.dtype, self.held.keys.device)
            if theirs == (heads, dim, key.dtype, key.device) or self._has_tokens:
                return
        self.hold(
            DilatedKVCache(
                **self.spec.keywords,
                batch=self.batch_size,
                num_heads=self.num_heads,
                num_kv_heads=heads,
                head_dim=dim,
                rewindable=self.rewindable,
                dtype=key.dtype,
                device=key.device,
            )
        )

    def hold(self, held: DilatedKVCache) -> None:
        self.held, self.dtype, self.device = held, held.keys.dtype, held.keys.device
        self.is_initialized = True
        self.count.place(self.device)
        for x in (held.keys, held.values, held.lengths):
            static(x)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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
                f"the newest of the {self.count.tokens()} tokens that this cache counts never reached it: either its "
                'model\'s attention is not dilated, or changes keys after the cache (use attn_implementation="dilated",'
                " or another cache), or the call before failed (reset() the cache and begin again with the first token)"
            )
        self._awaits_attention = True
        if self._is_first:
            self.count.add(new)

    def attended(self) -> None:
        self._awaits_attention, self._has_tokens = False, True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, facts: MaskFacts, spec: DilatedSpec, scale: float | None
    ) -> Tensor:
        """The rows `(B, m, H, D)` of the tokens that `update` announced."""
        if spec != self.spec:
            raise ValueError(f"the cache is for {self.spec}, this attention has {spec}: make it with dilated_cache")
        if not self._awaits_attention:
            raise ValueError(
                "this model attends twice to the same new keys, as where layers share them, and a bounded cache takes "
                "them once: use another cache"
            )
        self.go_on(facts, query.shape[1])
        assert self.held is not None
        rows = self.held.attend(query, key, value, scale=scale)
        self.attended()
        return rows

    def go_on(self, facts: MaskFacts, new: int) -> None:
        """Set where each row's tokens begin, from the mask of the `new` tokens."""
        held, traced = self.held, torch.compiler.is_compiling()
        assert held is not None
        if facts.documents is not None:
            raise ValueError("a bounded cache has one document in each row: leave it out for packed documents")
        if facts.is_next or (traced and self.count.rows_begun):
            return  # the lengths are right
        if facts.begin is None and self.count.follows:
            raise ValueError(
                f"the model gave its attention no mask, so that nothing says where the {new} new tokens lie after the "
                f"{self.count.tokens() - new} in the cache: such a model cannot use it"
            )
        if facts.spans is None:
            self.count.rows_begun = True
            return
        if not self._ends_with_new(facts, new):
            raise ValueError("a bounded cache goes on at the end of every row: pad on the left, or use another cache")
        lengths = (0 if facts.begin is None else facts.begin) - facts.spans[:, 0]
        if self._is_first and not traced:
            moved = (lengths != held.lengths) & (held.lengths > 0)
            if bool(moved.any()):
                raise ValueError(
                    f"row {int(moved.int().argmax())} of attention_mask begins elsewhere than when the cache took its "
                    "tokens: use one cache for one batch of prompts, and reset() it before the next"
                )
            self.count.rows_begun = bool((lengths + new > 0).all())
        held.lengths.copy_(lengths)

    def _ends_with_new(self, facts: MaskFacts, new: int) -> bool:
        assert facts.spans is not None
        if facts.begin is None:
            return not bool((facts.spans[:, 1] != new).any())
        if facts.order is None:
            return True
        place = facts.begin + torch.arange(new, device=facts.order.device)
        return not bool(((facts.order[:, -new:] != place) & (place >= facts.spans[:, :1])).any())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """What `dilated_mask` gets: the new keys, which `update` returns; none if the next token needs no mask."""
        if query_length == 1 and self.count.rows_begun and not reads_masks(self.device):
            return 0, 0
        return query_length, self.count.tokens()

    def get_seq_length(self) -> int | Tensor:
        return self.count.tokens()

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.10

    def reset(self) -> None:
        self.count.reset()
        self._awaits_attention = self._has_tokens = False
        if self.held is not None:
            self.held.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held is not None:
            self.held.reorder(beam_idx.to(self.held.lengths.device))

    def offload(self) -> None:
        raise ValueError("a bounded cache stays on its device: it is small, so make it without offloading")

    prefetch = offload

    def _another_batch(self, *args: Any) -> None:
        raise ValueError(f"a bounded cache keeps its batch of {self.batch_size}: make one for the batch you want")

    batch_repeat_interleave = batch_select_indices = _another_batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch={self.batch_size}, tokens={self.count.tokens()}, held={self.held!r})"


class DilatedCache(Cache):
    """A bounded cache for every layer: its bytes do not grow with the tokens. Make it with `dilated_cache`.

    Its tensors keep their shapes and addresses. So `generate` compiles the step of a model with it, as with a
    `StaticCache`, and compiles it once.
    """

    layers: list[DilatedLayer]

    @checked()
    def __init__(
        self,
        spec: DilatedSpec,
        num_layers: int,
        num_heads: int,
        batch: int,
        rewindable: int = 0,
        stagger: bool = False,
    ) -> None:
        specs = (spec.of_layer(number, stagger) for number in range(1, num_layers))
        first = DilatedLayer(spec, num_heads, batch, rewindable, None)
        more = (DilatedLayer(one, num_heads, batch, rewindable, first.count) for one in specs)
        super().__init__(layers=[first, *more])
        self.step: Callable[..., Tensor] | None = None  # of `models.captured`, for a LongNet on a GPU

    def holding(self, caches: Sequence[DilatedKVCache]) -> DilatedCache:
        """This cache, with an empty `DilatedKVCache` for each layer."""
        self._caches = caches  # a lent one goes back to its model once nothing refers to it
        for layer, held in zip(self.layers, caches, strict=True):
            layer.hold(held)
        return self

    def begin_at(self, tokens: int) -> None:
        """Continue every row after `tokens` tokens, for a measurement: the keys and values stay as they are."""
        self.reset()
        count = self.layers[0].count
        count.add(tokens)
        count.rows_begun = True
        for layer in self.layers:
            if layer.held is not None:
                layer.held.go_on_from(tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(layer.held.nbytes for layer in self.layers if layer.held is not None)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the cache has {len(self.layers)} layers, the model asks for layer {layer_idx}: make it with "
                "dilated_cache(model, batch) for this model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back `-tokens_to_remove` tokens; a positive number says how many remain, as before transformers 5.10."""
        count = self.layers[0].count
        back = -tokens_to_remove if tokens_to_remove <= 0 else max(int(count.tokens()) - tokens_to_remove, 0)
        if back and not count.is_empty:
            caches = [layer.held for layer in self.layers if layer.held is not None]
            for one in {held.spec: held for held in caches}.values():  # all patterns, before any layer changes
                one.check_rewind(back)
            for held in caches:
                held.rewind(back)
            count.take_back(back)


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
    stagger = getattr(config, "stagger", False)  # a LongNet's
    sizes = (config.num_hidden_layers, config.num_attention_heads, batch, rewindable)
    cache = DilatedCache(read_pattern(config), *sizes, stagger=stagger)
    # A compiled model needs the tensors from the start. Layers whose keys have another shape or dtype make new ones.
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, heads, dim, model.dtype, model.device)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        for layer in cache.layers:
            layer.is_compileable = False  # PEFT rebuilds masks, and only knows dense ones where steps are compiled
    return cache
