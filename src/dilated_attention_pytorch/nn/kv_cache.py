"""Causal decoding from cached keys and values.

`DilatedKVCache` holds only what later tokens can still see. `attend_full_cache` attends to a cache that holds every
token, as those of other libraries do: it picks the grid rows that a bounded cache would hold, in its order, and runs
the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.cache_rows import CacheRows, CacheState, decode_table, rings_on
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.checks import (
    MOST_TOKENS,
    check_divides,
    check_instance,
    check_whole,
    check_whole_numbers,
    checked,
)
from dilated_attention_pytorch.core.modes import has_tangents, is_plain
from dilated_attention_pytorch.core.reach import warn_of_reach
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout
from dilated_attention_pytorch.functional import autocast_inputs, checked_call, dilated_attention
from dilated_attention_pytorch.kernels.decode import NewTokens, attend_cached


class DilatedKVCache:
    """The keys and values of one attention layer that later tokens can see: at most `sum(w / r)` rows per head.

    Its size does not depend on the number of tokens. Tensors keep their shapes and addresses, so that a step with a few
    tokens can be compiled or captured in a CUDA graph.

    Args:
        segment_lengths, dilation_rates, head_layout: as in the attention it serves.
        batch, num_heads, head_dim, num_kv_heads: of its tensors; `num_kv_heads` is `num_heads` by default.
        padding: `(B,)`, the number of left-padded tokens per row; the grid starts after them.
        rewindable: how many tokens `rewind` can always take back, for speculative decoding; it takes a few more rows.
        head_offset, total_heads: under head sharding, as in `functional.dilated_attention`.
        dtype, device: of keys and values.

    >>> cache = DilatedKVCache([16, 128], [1, 4], batch=1, num_heads=4, head_dim=8)
    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> prompt = cache.attend(q[:, :99], k[:, :99], v[:, :99])
    >>> cache.attend(q[:, 99:], k[:, 99:], v[:, 99:]).shape
    torch.Size([1, 1, 4, 8])
    >>> cache.lengths, cache.nbytes
    (tensor([100]), 12352)
    """

    @checked()
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        batch: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        head_layout: HeadLayout = "interleaved",
        padding: Tensor | None = None,
        rewindable: int = 0,
        head_offset: int = 0,
        total_heads: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        self.spec = DilatedSpec.of(segment_lengths, dilation_rates, head_layout)
        self.batch, self.num_heads, self.num_kv_heads, self.head_dim = batch, num_heads, num_kv_heads, head_dim
        self.head_offset, self.total_heads = head_offset, total_heads
        call = Call(spec=self.spec, is_causal=True, head_offset=head_offset, total_heads=total_heads)
        self.rows = CacheRows(self.spec, call.offsets(num_heads, num_kv_heads), rewindable)
        # Zeros: rows that are not written yet have weight 0, and 0 times uninitialised memory may be NaN.
        self.keys = torch.zeros(batch, self.rows.total, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self.keys.device)
        self._longest = torch.zeros_like(self.lengths)  # as of the last time that lengths shrank
        # The lengths as counted on the host, valid while the tensor of lengths has this version.
        self._known: tuple[tuple[int, ...], Tensor, int] | None = None
        # Whether a recorded graph may change the lengths, which the host cannot count.
        self.replayed = False
        self.reset(padding)

    @property
    def rewindable(self) -> int:
        return self.rows.rewindable

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, from the first token on."""
        return self.keys.nbytes + self.values.nbytes

    def reset(self, padding: Tensor | None = None) -> None:
        """Forget every token; `padding` describes the next prompt."""
        before = (0,) * self.batch
        if padding is None:
            self.lengths.zero_()
        else:
            before = tuple((-self._check_per_row("padding", padding).long()).tolist())
            if max(before) > 0:
                raise ValueError(f"padding must count left-padded tokens, at least 0 per row, got {padding.tolist()}")
            self.lengths.copy_(-padding.long())
        self._longest.copy_(self.lengths)
        self._note_recording(self.lengths)
        self._count(before)

    def go_on_from(self, tokens: int) -> None:
        """Continue every row after its first `tokens` tokens, for a model that counts them itself."""
        every = (check_whole("tokens", tokens, least=0, most=MOST_TOKENS),) * self.batch
        if self.known_lengths == every:
            return
        self._note_longest()
        self.lengths.fill_(tokens)
        self._note_recording(self.lengths)
        self._count(every)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        allow_tf32: bool | None = None,
        backend: str = "auto",
        resources: Resources = NO_RESOURCES,
    ) -> Tensor:
        """The output of a full causal forward for the next `m` tokens, `(B, m, H, D)`; the cache then holds them.

        `key` and `value` are `(B, m, Hkv, D)`; `m` is 1 in decoding, or the length of a prompt or a part of it.
        """
        check_instance("resources", resources, Resources)
        query, key, value = autocast_inputs(query, key, value)
        call = checked_call(
            query, key, value, **self.spec.keywords, is_causal=True, scale=scale, head_offset=self.head_offset,
            total_heads=self.total_heads, allow_tf32=allow_tf32, backend=backend,
        )  # fmt: skip
        self._check(query, key, value)
        self._note_recording(query)
        known = self.known_lengths
        if query.shape[1] > 1 and is_plain(query):  # only for a prompt, as the check costs time
            heads = (self.total_heads or self.num_heads) * self.num_kv_heads // self.num_heads
            warn_of_reach(self.spec, max(known or (0,)) + query.shape[1], heads, is_causal=True)
        state = CacheState(self.keys, self.values, self.lengths, self.rows, known)
        out, _ = attend_cached(NewTokens(query, key, value), state, call, resources)
        self.lengths.add_(query.shape[1])
        if known is not None:
            self._count(tuple(length + query.shape[1] for length in known))
        return out

    def _note_recording(self, x: Tensor) -> None:
        """Note that a graph is being recorded: when it is replayed, lengths change and the host does not see it."""
        if not is_plain(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.replayed = True

    def _count(self, lengths: tuple[int, ...]) -> None:
        tensor = self.lengths
        self._known = None if tensor.is_inference() else (lengths, tensor, tensor._version)

    @property
    def known_lengths(self) -> tuple[int, ...] | None:
        """The lengths as the host counted them, or None if something else may have changed them."""
        if self.replayed or self._known is None:
            return None
        lengths, tensor, version = self._known
        return lengths if tensor is self.lengths and tensor._version == version else None

    def __getstate__(self) -> dict[str, Any]:
        # The tensors of a copy have versions of their own.
        return {**self.__dict__, "_known": None}

    def rewind(self, tokens: int | Tensor) -> None:
        """Take back the last tokens: one number for all rows, or `(B,)`; waits for the device."""
        back, remaining = self.check_rewind(tokens)
        self._note_longest()
        self.lengths.sub_(back)
        self._count(remaining)

    def check_rewind(self, tokens: int | Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Raise unless `rewind` can take back these tokens; returns their number and what remains, per row."""
        if isinstance(tokens, Tensor) and tokens.dim():
            self._check_per_row("tokens", tokens)
        else:
            tokens = check_whole("tokens", tokens, least=0, most=MOST_TOKENS)
        back = torch.as_tensor(tokens, device=self.lengths.device).expand(self.batch)
        found = list(zip(back.tolist(), self.lengths.tolist(), self._longest.maximum(self.lengths).tolist()))
        for b, (count, length, longest) in enumerate(found):
            if not 0 <= count <= max(length, 0):
                raise ValueError(f"row {b} of the cache has {max(length, 0)} tokens to rewind, got {count}")
            for branch in self.rows.branches:
                if count and branch.overwritten(length - count, longest):
                    raise ValueError(
                        f"rewinding row {b} by {count} tokens, from {length} to {length - count}, needs rows of branch "
                        f"(w={branch.segment_length}, r={branch.dilation_rate}) that later tokens have overwritten: "
                        f"make the cache with rewindable={longest - length + count} (it has {self.rewindable}), or "
                        "reset it and run the tokens again"
                    )
        return back, tuple(length - count for count, length, _ in found)

    def take_back(self, tokens: int) -> None:
        """Rewind all rows by at most `rewindable` tokens that the last calls added; does not wait for the device."""
        check_whole("tokens", tokens, least=0, most=self.rewindable)
        if tokens:
            self._note_longest()
            self.lengths.sub_(tokens)

    def _note_longest(self) -> None:
        torch.maximum(self._longest, self.lengths, out=self._longest)

    def reorder(self, rows: Tensor) -> None:
        """Make row `b` a copy of row `rows[b]`, in place, as beam search does."""
        self._check_per_row("rows", rows)
        if rows.device.type == "cpu" and is_plain(rows) and not all(0 <= row < self.batch for row in rows.tolist()):
            raise ValueError(f"reorder takes rows from 0 to {self.batch - 1}, got {rows.tolist()}")
        for state in (self.keys, self.values, self.lengths, self._longest):
            state.copy_(state.index_select(0, rows))
        self._note_recording(self.lengths)
        self._known = None

    def _check_per_row(self, name: str, x: Any) -> Tensor:
        """Refuse anything but a tensor that has one whole number per row."""
        if check_whole_numbers(name, x).is_meta and not torch.compiler.is_compiling():
            raise ValueError(f"{name} must have values, got a tensor on the device meta")
        if x.shape != (self.batch,):
            raise ValueError(f"{name} must be ({self.batch},), one number per row, got {tuple(x.shape)}")
        return x

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        mine = (self.batch, self.num_heads, self.num_kv_heads, self.head_dim)
        theirs = (query.shape[0], query.shape[2], key.shape[2], query.shape[3])
        if theirs != mine:
            raise ValueError(
                f"the cache is for (batch, heads, key/value heads, head_dim) = {mine}, the tensors are {theirs}: "
                "make a cache for them"
            )
        if query.device != self.keys.device or query.dtype != self.keys.dtype:
            raise ValueError(
                f"the cache holds {self.keys.dtype} on {self.keys.device}, the tensors are {query.dtype} on "
                f"{query.device}: make the cache with their dtype and device"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise ValueError(
                "a bounded cache keeps no gradients: call it within torch.no_grad(), or without a cache; prefix tuning "
                "trains earlier keys and values, for which models of transformers have DynamicCache"
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({list(self.spec.segment_lengths)}, {list(self.spec.dilation_rates)}, "
            f"batch={self.batch}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, head_layout={self.spec.head_layout!r}, rewindable={self.rewindable}, "
            f"dtype={self.keys.dtype}, device={str(self.keys.device)!r})"
        )


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
) -> Tensor:
    """The causal output of `m` new tokens, `(B, m, H, D)`, equal to that of a full forward, with its gradients.

    Args:
        query: `(B, m, H, D)`, of the tokens at `[begin, begin + m)`.
        key, value: `(B, n, Hkv, D)` of all tokens, the new ones included; later ones are ignored.
        begin: a scalar tensor, the position of the first new token in every row.
        start: `(B,)`, the number of padded tokens per row, which precede its first token.
        spec: the pattern.
        order: `(B, begin + m)`, if there is padding elsewhere too: the tokens of each row, the padded ones first.
        dropout_p: probability of dropping an attention weight.

    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> last, first = torch.tensor(99), torch.tensor([0])
    >>> attend_full_cache(q[:, 99:], k, v, last, first, DilatedSpec.of([16, 128], [1, 4])).shape
    torch.Size([1, 1, 4, 8])
    """
    query, key, value = inputs = autocast_inputs(query, key, value)
    B, m, n = query.shape[0], query.shape[1], key.shape[1]
    if n < m:
        raise ValueError(f"key and value must include the {m} new tokens, got {n} tokens")
    differentiated = has_tangents(*inputs) or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
    if order is not None:
        key, value = reordered(key, order), reordered(value, order)
    # A single new token is the last of its row in any order; several may include padding.
    if not (differentiated or dropout_p or not query.numel() or (order is not None and m > 1)):
        new = key[:, :m], value[:, :m]
        call = checked_call(query, *new, **spec.keywords, is_causal=True, scale=scale)
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
    settings = {**spec.keywords, "scale": scale, "dropout_p": dropout_p}
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
    # Segments are cut to the keys, rounded up so that few sizes occur.
    spec = _cut(call.spec, 1 << (key.shape[1] - 1).bit_length())
    rows = CacheRows(spec, call.offsets(query.shape[2], key.shape[2]))
    head, w, within = decode_table(_held_rows, rows, key)
    lengths = begin - start
    position = lengths.clamp_min(0)[:, None] // w * w + within + start[:, None]  # (B, rows)
    # Rows that the segment has not reached yet get another token, up to the newest one, which no query sees: later
    # memory may be uninitialised, and a weight of 0 times NaN is NaN.
    position = position.clamp_min(0).minimum(new[-1])
    batch_row = torch.arange(key.shape[0], device=key.device)[:, None]
    held = CacheState(key[batch_row, position, head], value[batch_row, position, head], lengths, rows)
    out, _ = attend_cached(NewTokens(query, new_key, new_value), held, call, NO_RESOURCES)
    return out


@lru_cache(256)
def _cut(spec: DilatedSpec, longest: int) -> DilatedSpec:
    return DilatedSpec.of([min(w, longest) for w in spec.segment_lengths], spec.dilation_rates, spec.head_layout)


def _held_rows(rows: CacheRows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Head, segment length and position within its segment of each row of a bounded cache, `(rows.total,)` each."""
    rings = rings_on(rows, torch.empty(0, device=device))
    head, offset, w, r, _, _, first = (x.repeat_interleave(rings.capacity) for x in rings)
    within = (torch.arange(len(first), device=device) - first) * r + offset
    return F.pad(head, (0, 1)), F.pad(w, (0, 1), value=1), F.pad(within, (0, 1))  # the last row is never read
