"""Attention of new tokens against a cache that holds every token, as the caches of other libraries do.

In such a cache a new token sees what a bounded cache would hold: the grid rows of its own segments. Those rows are
picked in the order of a bounded cache, and its kernels do the rest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.cache_rows import CacheRows, CacheState
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.modes import has_tangents, is_plain
from dilated_attention_pytorch.core.resources import NO_RESOURCES
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.functional import autocast_inputs, checked_call, dilated_attention
from dilated_attention_pytorch.kernels.decode import attend_cached


def attend_full_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begin: Tensor,
    start: Tensor,
    spec: DilatedSpec,
    *,
    order: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """The causal rows of `m` new tokens, `(B, m, H, D)`, equal to those of a full forward, with its gradients.

    Args:
        query: `(B, m, H, D)`, of the tokens at `[begin, begin + m)`.
        key, value: `(B, n, Hkv, D)` of all tokens, the new ones included; later ones are ignored.
        begin: a scalar tensor, the position of the first new token in every row.
        start: `(B,)`, the number of padded tokens per row, which precede its first token.
        spec: the pattern.
        order: `(B, begin + m)`, if padding stands elsewhere too: the tokens of each row, the padded ones first.
        dropout_p: probability of dropping an attention weight.

    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> last, first = torch.tensor(99), torch.tensor([0])
    >>> attend_full_cache(q[:, 99:], k, v, last, first, DilatedSpec.of([16, 128], [1, 4])).shape
    torch.Size([1, 1, 4, 8])
    """
    query, key, value = inputs = autocast_inputs(query, key, value)
    B, m, n = query.shape[0], query.shape[1], key.shape[1]
    if n < m:
        raise ValueError(f"the cache holds the new tokens too: it has {n} tokens, of which {m} are new")
    differentiated = has_tangents(*inputs) or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
    if order is not None:
        key, value = reordered(key, order), reordered(value, order)
    # A single new token is the last of its row in any order; of several, some may be padding.
    if not (differentiated or dropout_p or not query.numel() or (order is not None and m > 1)):
        new = key[:, :m], value[:, :m]
        call = checked_call(query, *new, **spec.keywords, is_causal=True, scale=scale, backend=backend)
        if is_plain(query, key):
            return _attend_full_cache(query, key, value, begin, start, call)
        text, scale, *_ = call.encode()
        return attend_full_cache_op(query, key, value, begin, start, text, scale)
    # A forward over all tokens: earlier tokens get queries of 0, and their rows are dropped.
    place = (begin + torch.arange(m, device=query.device)).expand(B, m)
    if order is not None:
        place = reordered(order.argsort(1), place)
    every = query.new_zeros(B, key.shape[1], *query.shape[2:])
    every = every.scatter(1, place[:, :, None, None].expand_as(query), query)
    spans = torch.stack([start, (begin + m).expand_as(start)], dim=1)
    settings = {**spec.keywords, "scale": scale, "dropout_p": dropout_p, "backend": backend}
    return reordered(dilated_attention(every, key, value, **settings, is_causal=True, spans=spans), place)


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """The tokens of `(B, n, ...)` in another `order`, `(B, m)`."""
    return x.take_along_dim(order.reshape(*order.shape, *[1] * (x.dim() - 2)), dim=1)


# An operator in a trace, because the rows to pick depend on values.
@torch.library.custom_op("dilated_attention_pytorch::attend_full_cache", mutates_args=())
def attend_full_cache_op(
    query: Tensor, key: Tensor, value: Tensor, begin: Tensor, start: Tensor, call: str, scale: float | None
) -> Tensor:
    return _attend_full_cache(query, key, value, begin, start, Call.decode(call, scale, 0.0, 1.0)).contiguous()


@attend_full_cache_op.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(query.shape)


def _attend_full_cache(query: Tensor, key: Tensor, value: Tensor, begin: Tensor, start: Tensor, call: Call) -> Tensor:
    new = begin + torch.arange(query.shape[1], device=query.device)
    new_key, new_value = key.index_select(1, new), value.index_select(1, new)
    rows, places = _rows_within(call, query.shape[2], key)
    lengths = begin - start
    held = CacheState(*_picked(places, key, value, lengths, start, new[-1]), lengths, rows)
    out, _ = attend_cached(query, new_key, new_value, held, call, NO_RESOURCES)
    return out


class _Places(NamedTuple):
    """Head, segment length and position within its segment of each place of a bounded cache, `(places,)` each."""

    head: Tensor
    segment_length: Tensor
    within: Tensor


def _picked(
    places: _Places, key: Tensor, value: Tensor, lengths: Tensor, start: Tensor, newest: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values `(B, places, D)` as a bounded cache holds them after `lengths` tokens.

    Places that the segment has not reached yet get another token, up to the newest one, which no query sees: later
    memory may be uninitialised, and a weight of 0 times NaN is NaN.
    """
    head, w, within = places
    position = lengths.clamp_min(0)[:, None] // w * w + within + start[:, None]  # (B, places)
    position = position.clamp_min(0).minimum(newest)
    batch_row = torch.arange(key.shape[0], device=key.device)[:, None]
    return key[batch_row, position, head], value[batch_row, position, head]


def _rows_within(call: Call, heads: int, key: Tensor) -> tuple[CacheRows, _Places]:
    """The rows of a bounded cache whose segments end with the keys, rounded up so that few sizes occur."""
    spec = _cut(call.spec, 1 << (key.shape[1] - 1).bit_length())
    rows = CacheRows(spec, call.offsets(heads, key.shape[2]))
    return rows, _places(rows, key.device)


@lru_cache(256)
def _cut(spec: DilatedSpec, longest: int) -> DilatedSpec:
    return DilatedSpec.of([min(w, longest) for w in spec.segment_lengths], spec.dilation_rates, spec.head_layout)


# Not in the table of plans: a step that is captured in a CUDA graph must find what an earlier call made.
@lru_cache(64)
def _places(rows: CacheRows, device: torch.device) -> _Places:
    head, segment_length, within = [], [], []
    for branch in rows.branches:
        count = len(branch.offsets)
        offset = torch.tensor(branch.offsets, device=device)[:, None]
        place = torch.arange(branch.capacity, device=device) * branch.dilation_rate + offset  # (heads, capacity)
        head.append((branch.heads.start + torch.arange(count, device=device)).repeat_interleave(branch.capacity))
        segment_length.append(torch.full((place.numel(),), branch.segment_length, device=device))
        within.append(place.flatten())
    one = torch.ones(1, dtype=torch.int64, device=device)  # the last place is never read
    return _Places(torch.cat([*head, one - 1]), torch.cat([*segment_length, one]), torch.cat([*within, one - 1]))
