"""Attention by name and sequence length: a factory chooses the class, the cache and the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilated_attention_pytorch.core.resources import CACHE_FROM_TOKENS, POOL_FROM_TOKENS
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.nn.block_sparse import (
    BlockSparseDilatedAttention,
    BlockSparseMultiheadDilatedAttention,
)
from dilated_attention_pytorch.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention

ATTENTION_TYPES: dict[str, tuple[type[DilatedAttention], type[MultiheadDilatedAttention]]] = {
    "standard": (DilatedAttention, MultiheadDilatedAttention),
    "improved": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "block_sparse": (BlockSparseDilatedAttention, BlockSparseMultiheadDilatedAttention),
}
"""The classes by type: attention, and multihead around it. `auto` is `standard`, which changes no precision."""


def create_dilated_attention(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    attention_type: str = "auto",
    sequence_length: int | None = None,
    **settings: Any,
) -> DilatedAttention:
    """A `DilatedAttention`, or the class that `attention_type` names, with cache and pool where length pays.

    `sequence_length` is what the module will usually see; by default the longest segment. `use_pattern_cache`,
    `enable_memory_pool` and other settings that are stated are taken as stated.

    >>> attention = create_dilated_attention([2048, 4096], [1, 2], sequence_length=65_536)
    >>> attention.use_pattern_cache, attention.enable_memory_pool
    (True, True)
    """
    chosen = _chosen(attention_type, segment_lengths, sequence_length, settings)
    return _classes(attention_type)[0](segment_lengths, dilation_rates, **chosen)


def create_multihead_dilated_attention(
    embed_dim: int,
    num_heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    attention_type: str = "auto",
    sequence_length: int | None = None,
    **settings: Any,
) -> MultiheadDilatedAttention:
    """As `create_dilated_attention`, with projections around it.

    >>> attention = create_multihead_dilated_attention(32, 4, [512], [1], attention_type="improved")
    >>> type(attention).__name__, attention.use_pattern_cache, attention.enable_memory_pool
    ('ImprovedMultiheadDilatedAttention', False, False)
    """
    chosen = _chosen(attention_type, segment_lengths, sequence_length, settings)
    return _classes(attention_type)[1](embed_dim, num_heads, segment_lengths, dilation_rates, **chosen)


def _classes(attention_type: str) -> tuple[type[DilatedAttention], type[MultiheadDilatedAttention]]:
    name = "standard" if attention_type == "auto" else attention_type
    if name not in ATTENTION_TYPES:
        raise ValueError(f"attention_type must be one of auto, {', '.join(ATTENTION_TYPES)}, got {attention_type!r}")
    return ATTENTION_TYPES[name]


def _chosen(
    attention_type: str, segment_lengths: Sequence[int], sequence_length: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    if sequence_length is not None and sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    tokens = max(segment_lengths, default=1) if sequence_length is None else sequence_length
    pool = settings.get("lightweight_pool") or tokens >= POOL_FROM_TOKENS
    cache = (
        tokens >= CACHE_FROM_TOKENS or attention_type == "block_sparse"
    )  # a layout always costs more than its search
    return {"use_pattern_cache": cache, "enable_memory_pool": pool} | settings
