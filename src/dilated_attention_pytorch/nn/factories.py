"""Factories that choose the class by name, and the cache and the pool by sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from dilated_attention_pytorch.core.checks import check_choice, check_sequence, check_whole
from dilated_attention_pytorch.core.resources import CACHE_FROM_TOKENS, POOL_FROM_TOKENS
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.nn.block_sparse import BlockSparseDilatedAttention, BlockSparseMultiheadDilatedAttention
from dilated_attention_pytorch.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention

ATTENTION_TYPES: dict[str, tuple[type[DilatedAttention], type[MultiheadDilatedAttention]]] = {
    "standard": (DilatedAttention, MultiheadDilatedAttention),
    "improved": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "block_sparse": (BlockSparseDilatedAttention, BlockSparseMultiheadDilatedAttention),
}
"""The classes by type: attention, and multihead around it; `parallel` adds `ring`, `distributed` and
`block_sparse_ring`. `auto` is `standard`, which changes no precision."""


@overload
def create_dilated_attention(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    /,
    *,
    attention_type: str = ...,
    sequence_length: int | None = ...,
    **settings: Any,
) -> DilatedAttention: ...
@overload
def create_dilated_attention(
    attention_type: str = ..., /, *pattern: Sequence[int], sequence_length: int | None = ..., **settings: Any
) -> DilatedAttention: ...
def create_dilated_attention(*args: Any, sequence_length: int | None = None, **settings: Any) -> DilatedAttention:
    """A `DilatedAttention`, or the class that `attention_type` names, with cache and pool for long sequences.

    Args:
        attention_type: `auto` (`standard`), `standard`, `improved`, `block_sparse`, `ring`, `distributed` or
            `block_sparse_ring`; by position it comes first.
        segment_lengths, dilation_rates: as the class takes them.
        sequence_length: the usual length of the inputs; by default the longest segment.
        settings: those of the class. A stated `use_pattern_cache` or `enable_memory_pool` overrides the choice.

    >>> attention = create_dilated_attention([2048, 4096], [1, 2], sequence_length=65_536)
    >>> attention.use_pattern_cache, attention.enable_memory_pool
    (True, True)
    >>> type(create_dilated_attention("ring", segment_lengths=[512], dilation_rates=[1])).__name__
    'RingDilatedAttention'
    """
    name, args = _type_of(args, settings)
    kind = ATTENTION_TYPES[name][0]
    if kind is DilatedAttention and "dropout" in settings:  # the name in all other classes
        if "attention_dropout" in settings:
            raise TypeError("dropout and attention_dropout both state the dropout of the attention: pass one of them")
        settings["attention_dropout"] = settings.pop("dropout")
    return kind(*args, **_chosen(name, args, sequence_length, settings))


@overload
def create_multihead_dilated_attention(
    embed_dim: int,
    num_heads: int,
    /,
    *pattern: Sequence[int],
    attention_type: str = ...,
    sequence_length: int | None = ...,
    **settings: Any,
) -> MultiheadDilatedAttention: ...
@overload
def create_multihead_dilated_attention(
    attention_type: str = ..., /, *sizes: Any, sequence_length: int | None = ..., **settings: Any
) -> MultiheadDilatedAttention: ...
def create_multihead_dilated_attention(
    *args: Any, sequence_length: int | None = None, **settings: Any
) -> MultiheadDilatedAttention:
    """Like `create_dilated_attention`, with projections: `embed_dim` and `num_heads` precede the pattern.

    >>> attention = create_multihead_dilated_attention(32, 4, [512], [1], attention_type="improved")
    >>> type(attention).__name__, attention.use_pattern_cache, attention.enable_memory_pool
    ('ImprovedMultiheadDilatedAttention', False, False)
    >>> create_multihead_dilated_attention("auto", 32, 4, segment_lengths=[512], dilation_rates=[1]).embed_dim
    32
    """
    name, args = _type_of(args, settings)
    return ATTENTION_TYPES[name][1](*args, **_chosen(name, args[2:], sequence_length, settings))


def _type_of(args: tuple[Any, ...], settings: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The type, given first or by name, and the arguments after it."""
    first = args and isinstance(args[0], str)
    if first and "attention_type" in settings:
        raise TypeError(
            f"attention_type is stated twice, got {args[0]!r} and {settings['attention_type']!r}: leave one out"
        )
    name = args[0] if first else settings.pop("attention_type", "auto")
    check_choice("attention_type", name, ["auto", *ATTENTION_TYPES])
    return "standard" if name == "auto" else name, args[1:] if first else args


def _chosen(
    name: str, pattern: tuple[Any, ...], sequence_length: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    if sequence_length is not None:
        tokens = check_whole("sequence_length", sequence_length, least=1)
    elif settings.get("max_length") is not None:
        tokens = check_whole("max_length", settings["max_length"], least=1)
    else:
        segments = pattern[0] if pattern else settings.get("segment_lengths")
        tokens = 1 if segments is None else max(check_sequence("segment_lengths", segments, check_whole), default=1)
    pool = settings.get("lightweight_pool") or tokens >= POOL_FROM_TOKENS
    chosen = {"enable_memory_pool": bool(pool)}
    if name in ("standard", "improved"):  # the others make layouts or schedules, which cost more than any lookup
        chosen["use_pattern_cache"] = tokens >= CACHE_FROM_TOKENS
    return chosen | settings
