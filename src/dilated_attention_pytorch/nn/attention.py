"""Dilated attention as modules on `(B, N, H, D)` tensors."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import BACKENDS
from dilated_attention_pytorch.core.checks import check_choice, check_flag, check_instance, check_tensor, checked
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.core.plans import PatternCache, get_global_pattern_cache
from dilated_attention_pytorch.core.pool import WorkspacePool, get_global_memory_pool
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout, stated_branches
from dilated_attention_pytorch.functional import autocast_inputs, dilated_attention, refuse_dense_mask
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

_NOT_PROFILING = nullcontext()


class AttentionSettings(TypedDict, total=False):
    """Keywords of `DilatedAttention` that a module around it takes too, and passes on."""

    softmax_scale: float | None
    head_layout: HeadLayout
    backend: str
    allow_tf32: bool | None
    enable_profiling: bool
    enable_memory_pool: bool
    lightweight_pool: bool
    use_pattern_cache: bool


class DilatedAttention(nn.Module):
    """LongNet's dilated attention without parameters; see `functional.dilated_attention` for what it computes.

    Args:
        segment_lengths, dilation_rates: one entry per branch.
        max_length: the longest sequence, instead of segments and rates: `branches_for` chooses branches that connect
            all its tokens.
        softmax_scale: factor of the scores; `D ** -0.5` by default.
        attention_dropout: probability of dropping an attention weight while training.
        head_layout: `interleaved`, `blocked` or `grouped`.
        backend: `auto`, or the engine to run.
        allow_tf32: TF32 for float32 on a GPU; None follows PyTorch's setting.
        enable_profiling: count calls, lookups and loans with their seconds and bytes (`get_profile`), and name each
            call in `torch.profiler` traces.
        enable_memory_pool: borrow large workspaces from the global pool, or with `lightweight_pool` from its simpler
            twin. On a CPU, bfloat16, float16, dropout and block sparsity need workspaces; plain float32 needs none. On
            a GPU only workspaces above 1/512 of its memory come from the pool.
        use_pattern_cache: share tables of lengths and segments between calls through the global cache.
        device, dtype: the device of the inputs, and their dtype after autocast; other inputs are refused. The module
            has no parameters. Both follow `module.to(...)`.

    >>> attention = DilatedAttention(segment_lengths=[16, 128], dilation_rates=[1, 4])
    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 100, 4, 8])
    """

    _place: Tensor | None
    sparse_config: SparsePatternConfig | None = None  # a subclass keeps only some tiles

    @checked()
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        max_length: int | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        head_layout: HeadLayout = "interleaved",
        backend: str = "auto",
        allow_tf32: bool | None = None,
        enable_profiling: bool = False,
        enable_memory_pool: bool = False,
        lightweight_pool: bool = False,
        use_pattern_cache: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if lightweight_pool and not enable_memory_pool:
            raise ValueError("lightweight_pool chooses the kind of pool: pass enable_memory_pool=True with it")
        check_choice("backend", backend, BACKENDS)
        branches = stated_branches(segment_lengths, dilation_rates, max_length, head_layout=head_layout)
        self.spec = DilatedSpec.of(*branches, head_layout)
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.backend = backend
        self.allow_tf32 = allow_tf32
        self.enable_profiling = enable_profiling
        self.enable_memory_pool = enable_memory_pool
        self.use_pattern_cache = use_pattern_cache
        self.lightweight_pool = lightweight_pool
        self._memory_pool = get_global_memory_pool(lightweight_pool) if enable_memory_pool else None
        self._pattern_cache: PatternCache | None = get_global_pattern_cache() if use_pattern_cache else None
        self._profile = Profile() if enable_profiling else None
        self._stated = tuple(name for name, x in (("device", device), ("dtype", dtype)) if x is not None)
        # An empty buffer, so that `module.to(...)` changes it as it moves parameters.
        place = torch.empty(0, device=device, dtype=dtype) if self._stated else None
        self.register_buffer("_place", place, persistent=False)

    @property
    def resources(self) -> Resources:
        """The cache, the pool and the counters of this module's calls."""
        if self._pattern_cache is None and self._memory_pool is None and self._profile is None:
            return NO_RESOURCES
        return Resources(self._pattern_cache, self._memory_pool, self._profile)

    def get_profile(self) -> dict[str, dict[str, float]]:
        """What `enable_profiling` has counted since the last `reset_profile`, by event.

        The events are `calls` of forward, with seconds on the host; `lookups of` each kind of entry in the pattern
        cache; `loans` from the memory pool and `workspaces left to PyTorch`; across ranks, the bytes of `messages` and
        the seconds spent waiting for them. Compiled calls are not counted.

        >>> attention = DilatedAttention([16, 128], [1, 4], use_pattern_cache=True, enable_profiling=True)
        >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
        >>> _ = attention(q, k, v), attention(q, k, v)
        >>> profile = attention.get_profile()
        >>> profile["calls"]["count"], profile["lookups of parts"]["hits"] >= 1
        (2, True)
        """
        if self._profile is None:
            raise ValueError("nothing is counted without enable_profiling=True: make the module with it")
        return self._profile.totals()

    def reset_profile(self) -> None:
        if self._profile is not None:
            self._profile.clear()

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return self.spec.segment_lengths

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        return self.spec.dilation_rates

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spans: Tensor | None = None,
    ) -> Tensor:
        """`(B, N, H, D)` from query `(B, N, H, D)` and key, value `(B, N, Hkv, D)`."""
        self._check_call(query, is_causal, attn_mask)
        lengths = self._lengths(
            query, key_padding_mask=key_padding_mask, seqlens=seqlens, cu_seqlens=cu_seqlens, spans=spans
        )
        with self._profiling():
            return self.attend(query, key, value, is_causal=is_causal, **lengths)

    def _check_call(self, query: Tensor, is_causal: bool, attn_mask: Tensor | None) -> None:
        refuse_dense_mask(attn_mask)
        check_flag("is_causal", is_causal)
        check_tensor("query", query)
        self._check_place(query)

    def _lengths(self, query: Tensor, **stated: Tensor | None) -> dict[str, Any]:
        """The lengths of a call as `attend` takes them."""
        if query.dim() != 4 or all(x is None for x in stated.values()):
            return {"spans": stated["spans"]}
        cache = self.resources if self._pattern_cache is not None and is_plain(query) else None
        return {"spans": document_spans(query.shape[0], query.shape[1], **stated, cache=cache)}

    def _profiling(self) -> AbstractContextManager[Any]:
        """Count a call and name it in traces if profiling is on and the call is not compiled."""
        if self._profile is None or torch.compiler.is_compiling():
            return _NOT_PROFILING
        return _counted_call(repr(self), self._profile)

    def _check_place(self, query: Tensor) -> None:
        """Refuse inputs on another device or of another dtype than stated."""
        if self._place is None:
            return
        found = autocast_inputs(query)[0]
        for name in self._stated:
            stated, given = getattr(self._place, name), getattr(found, name)
            if stated != given:
                raise ValueError(
                    f"this attention was made for {name}={stated}, got inputs of {given}: move them or the module with "
                    f".to(...), or leave {name} out"
                )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, spans: Tensor | None) -> Tensor:
        """Compute the call. A subclass overrides this to attend across ranks or in another way."""
        return dilated_attention(query, key, value, **self._settings(is_causal), spans=spans)

    def _settings(self, is_causal: bool) -> dict[str, Any]:
        """The keywords of `dilated_attention` that every call of this module states."""
        return {
            **self.spec.keywords,
            "is_causal": is_causal,
            "scale": self.softmax_scale,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "allow_tf32": self.allow_tf32,
            "sparse_config": self.sparse_config,
            "backend": self.backend,
            "resources": self.resources,
        }

    def attend_next(self, query: Tensor, key: Tensor, value: Tensor, cache: DilatedKVCache) -> Tensor:
        """The causal output `(B, m, H, D)` of the next `m` tokens, which the cache then holds."""
        check_instance("cache", cache, DilatedKVCache)
        if type(self).attend is not DilatedAttention.attend or self.sparse_config is not None:
            raise ValueError(
                f"a cache serves whole branches on one device, which {type(self).__name__} does not compute: "
                "decode with DilatedAttention"
            )
        if self.training and self.attention_dropout:
            raise ValueError("a cache is for inference, without attention_dropout: call eval() first")
        if cache.spec != self.spec:
            raise ValueError(f"the cache is for {cache.spec}, this attention has {self.spec}: make a cache for it")
        return cache.attend(
            query,
            key,
            value,
            scale=self.softmax_scale,
            allow_tf32=self.allow_tf32,
            backend=self.backend,
            resources=self.resources,
        )

    def extra_repr(self) -> str:
        shown = [f"segment_lengths={list(self.segment_lengths)}", f"dilation_rates={list(self.dilation_rates)}"]
        defaults = {
            "softmax_scale": None, "attention_dropout": 0.0, "head_layout": "interleaved", "backend": "auto",
            "use_pattern_cache": False, "enable_memory_pool": False, "lightweight_pool": False,
        }  # fmt: skip
        values = {"head_layout": self.spec.head_layout, **self.__dict__}
        shown += [f"{name}={values[name]!r}" for name, default in defaults.items() if values[name] != default]
        return ", ".join([*shown, *(f"{name}={getattr(self._place, name)}" for name in self._stated)])


class ImprovedDilatedAttention(DilatedAttention):
    """`DilatedAttention` that uses TF32 for float32 on GPUs that have it, unless `use_tf32=False`."""

    @checked()
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        dropout: float = 0.0,
        use_tf32: bool = True,
        **settings: Any,
    ) -> None:
        refuse_settings(self, settings, attention_dropout="pass dropout", allow_tf32="pass use_tf32")
        super().__init__(segment_lengths, dilation_rates, attention_dropout=dropout, allow_tf32=use_tf32, **settings)
        self.use_tf32 = use_tf32


def refuse_settings(module: nn.Module, settings: Collection[str], **instead: str) -> None:
    """Refuse keywords that a module does not take, and say what to do instead."""
    for name in instead.keys() & settings:
        raise TypeError(f"{type(module).__name__} has no {name}: {instead[name]}")


@contextmanager
def _counted_call(name: str, profile: Profile) -> Iterator[None]:
    began = time.perf_counter()
    with torch.profiler.record_function(name):
        yield
    profile.add("calls", count=1, seconds=time.perf_counter() - began)


class SharesResources:
    """Exposes the cache, the pool and the profile of the attention within a module as the module's own."""

    def _all_attention(self) -> Iterator[DilatedAttention]:
        assert isinstance(self, nn.Module)
        return (module for module in self.modules() if isinstance(module, DilatedAttention))

    @property
    def use_pattern_cache(self) -> bool:
        return next(self._all_attention()).use_pattern_cache

    @property
    def enable_memory_pool(self) -> bool:
        return next(self._all_attention()).enable_memory_pool

    def get_profile(self) -> dict[str, dict[str, float]]:
        """The sum of `DilatedAttention.get_profile` over all attention within."""
        total = Profile()
        for attention in self._all_attention():
            for event, amounts in attention.get_profile().items():
                total.add(event, **amounts)
        return total.totals()

    def reset_profile(self) -> None:
        for attention in self._all_attention():
            attention.reset_profile()

    @property
    def _pattern_cache(self) -> PatternCache | None:
        return next(self._all_attention())._pattern_cache

    @property
    def _memory_pool(self) -> WorkspacePool | None:
        return next(self._all_attention())._memory_pool
