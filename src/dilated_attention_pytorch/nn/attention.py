"""Dilated attention as modules on `(B, N, H, D)` tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout
from dilated_attention_pytorch.functional import check_backend, dilated_attention, refuse_dense_mask


class DilatedAttention(nn.Module):
    """LongNet's dilated attention without parameters; see `functional.dilated_attention` for what it computes.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        softmax_scale: of the scores; `D ** -0.5` by default.
        attention_dropout: probability of dropping an attention weight while training.
        head_layout: `interleaved`, `blocked` or `grouped`.
        backend: `auto`, or the engine to run.
        allow_tf32: TF32 for float32 on a GPU; None follows PyTorch's setting.
        enable_profiling: names each call in `torch.profiler` traces.
        enable_memory_pool, lightweight_pool, use_pattern_cache: this release has neither pool nor cache; asking for one
            is an error.

    >>> attention = DilatedAttention(segment_lengths=[16, 64], dilation_rates=[1, 4])
    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 100, 4, 8])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        head_layout: HeadLayout = "interleaved",
        backend: str = "auto",
        allow_tf32: bool | None = None,
        enable_profiling: bool = False,
        enable_memory_pool: bool = False,
        lightweight_pool: bool = False,
        use_pattern_cache: bool = False,
    ) -> None:
        super().__init__()
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {attention_dropout}")
        if enable_memory_pool or lightweight_pool:
            raise ValueError("this release has no workspace pool: leave enable_memory_pool and lightweight_pool False")
        if use_pattern_cache:
            raise ValueError("a branch is a row stride and needs no cached indices: leave use_pattern_cache False")
        check_backend(backend)
        self.spec = DilatedSpec.of(segment_lengths, dilation_rates, head_layout)
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.backend = backend
        self.allow_tf32 = allow_tf32
        self.enable_profiling = enable_profiling
        self.enable_memory_pool = enable_memory_pool
        self.use_pattern_cache: bool = use_pattern_cache
        self._memory_pool = None
        self._pattern_cache = None

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
        refuse_dense_mask(attn_mask)
        if query.dim() == 4:
            spans = document_spans(
                query.shape[0],
                query.shape[1],
                seqlens=seqlens,
                cu_seqlens=cu_seqlens,
                key_padding_mask=key_padding_mask,
                spans=spans,
            )
        if not self.enable_profiling:
            return self.attend(query, key, value, is_causal=is_causal, spans=spans)
        with torch.profiler.record_function(repr(self)):
            return self.attend(query, key, value, is_causal=is_causal, spans=spans)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, spans: Tensor | None) -> Tensor:
        """The one seam: what a subclass replaces to attend across devices or tiles."""
        return dilated_attention(
            query,
            key,
            value,
            self.spec.segment_lengths,
            self.spec.dilation_rates,
            is_causal=is_causal,
            spans=spans,
            **self.call_settings(),
        )

    def call_settings(self) -> dict[str, Any]:
        """What the module says about every call of the function."""
        return {
            "scale": self.softmax_scale,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "head_layout": self.spec.head_layout,
            "allow_tf32": self.allow_tf32,
            "backend": self.backend,
        }

    def extra_repr(self) -> str:
        shown = [f"segment_lengths={list(self.segment_lengths)}", f"dilation_rates={list(self.dilation_rates)}"]
        if self.softmax_scale is not None:
            shown.append(f"softmax_scale={self.softmax_scale}")
        if self.attention_dropout:
            shown.append(f"attention_dropout={self.attention_dropout}")
        if self.spec.head_layout != "interleaved":
            shown.append(f"head_layout={self.spec.head_layout!r}")
        if self.backend != "auto":
            shown.append(f"backend={self.backend!r}")
        return ", ".join(shown)


class ImprovedDilatedAttention(DilatedAttention):
    """`DilatedAttention` that uses TF32 for float32 on GPUs that have it, unless `use_tf32=False`."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        use_tf32: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, attention_dropout=dropout, allow_tf32=use_tf32, **settings)
        self.use_tf32 = use_tf32
