"""Attention of new tokens against a bounded cache: the output of a full causal forward, from the rows that it holds.

The output of the new tokens is the merge of two partials: one over the cached rows of the *open* segment, in which the
new tokens begin, and one over the new tokens themselves. Then the new tokens are stored.

- Up to `_MOST_AT_ONCE` tokens take one code path for all positions, which may differ between batch rows. Shapes are
  static and nothing waits for the device, so the step can be compiled and captured in a CUDA graph.
- A longer chunk has three cases. From the position on at which all branches begin a segment, it is an ordinary call of
  the operator. Before that position, if the chunk is long compared with the open segments, the cached rows are put back
  in front of it and the whole is one call. Otherwise each branch cuts the chunk where the open segment ends, and only
  the queries of the open segment attend to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.cache_rows import BranchRows, CacheRows, CacheState, rings_on
from dilated_attention_pytorch.core.call import Call, Inputs, wide_dtype
from dilated_attention_pytorch.core.merge import merge, merge_
from dilated_attention_pytorch.core.modes import READS_VALUES, is_plain, refuse_tangents, tf32
from dilated_attention_pytorch.core.pattern import common_period, heads_by_offset, visible
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.core.spec import OffsetTable
from dilated_attention_pytorch.kernels import blocks
from dilated_attention_pytorch.kernels.engine import choose_engine
from dilated_attention_pytorch.kernels.op import attend, unwritten

_MOST_AT_ONCE = 64
_MOST_AGAIN = 0.5  # the most tokens before a chunk, as a share of it, that are computed again instead of merged


class Turns(NamedTuple):
    """The constants of rotary positions, in float64 `(D/2,)`: the angles of position 1.

    For xPos also the base-2 logarithms of the factors that scale position `scale_base`; positions count within
    `period`.
    """

    frequencies: Tensor
    log2_zeta: Tensor | None = None
    period: int = 1
    scale_base: float = 1.0


class NewTokens(NamedTuple):
    """Query, key and value of new tokens."""

    query: Tensor  # (B, m, H, D)
    key: Tensor  # (B, m, Hkv, D)
    value: Tensor

    def of_row(self, b: int) -> NewTokens:
        """The tokens of batch row `b`."""
        return NewTokens(*(x[b : b + 1] for x in self))

    def tokens(self, first: int, end: int) -> NewTokens:
        """The tokens number `[first, end)` of every batch row."""
        return NewTokens(*(x[:, first:end] for x in self))


def attend_cached(new: NewTokens, state: CacheState, call: Call, resources: Resources) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the new tokens, `(B, m, H, D)` and `(B, m, H)`, which are stored in `state`."""
    refuse_tangents("attention to a cache", *new)
    if not new.query.numel():
        return unwritten(new.query)
    if is_plain(new.query, state.keys):
        return _attend_cached(new, state, call, resources)
    keys, values, lengths, rows, _ = state
    # With the branches and offsets of the cache, the call describes all of the cache but `rewindable`.
    own = replace(call, spec=rows.spec, table=rows.offsets)
    text, scale, *_ = own.encode()
    op = attend_cached_op if new.query.shape[1] <= _MOST_AT_ONCE else attend_cached_chunk_op
    return op(*new, keys, values, lengths, text, scale, rows.rewindable)


def _attend_traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    call: str,
    scale: float | None,
    rewindable: int,
) -> tuple[Tensor, Tensor]:
    decoded = Call.decode(call, scale, 0.0, 1.0)
    assert decoded.table is not None
    state = CacheState(keys, values, lengths, CacheRows(decoded.spec, decoded.table, rewindable))
    out, lse = _attend_cached(NewTokens(query, key, value), state, decoded, NO_RESOURCES)
    return out.contiguous(), lse.contiguous()


def _attend_fake(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))


def _traced_op(name: str, **settings: Any) -> Any:
    """In a compiled graph, what chooses an engine and reads lengths is one operator."""
    op = torch.library.custom_op(
        f"dilated_attention_pytorch::{name}", _attend_traced, mutates_args=("keys", "values"), **settings
    )
    op.register_fake(_attend_fake)
    return op


attend_cached_op = _traced_op("attend_cached")
attend_cached_chunk_op = _traced_op("attend_cached_chunk", **READS_VALUES)


def _attend_cached(new: NewTokens, state: CacheState, call: Call, resources: Resources) -> tuple[Tensor, Tensor]:
    query, key, value = new
    m, D, backend = query.shape[1], query.shape[3], call.backend
    if backend in ("reference", "vendor"):
        raise ValueError(f"backend {backend!r} computes whole sequences and takes no cache: use 'eager' or 'auto'")
    engine = choose_engine(backend, query.device, query.dtype, D)
    if m > _MOST_AT_ONCE:
        at = state.lengths.tolist() if state.known is None else list(state.known)
        out, lse = _attend_chunk(at, new, state, replace(call, backend=engine), resources)
        _store_chunk(at, key, value, state, engine)
        return out, lse
    scale = call.softmax_scale(D)
    if engine == "triton":
        from dilated_attention_pytorch.kernels.triton.decode import decode

        return decode(query, key, value, state, scale, call.allow_tf32)
    with tf32(call.allow_tf32, query.device):
        if m == 1:  # stored first, it is one of the cached rows
            store(key, value, state)
            out, lse = cached_partial(query, state, state.lengths + 1, scale)
        else:
            out, lse = cached_partial(query, state, state.lengths, scale)
            out, lse = merge(out, lse, *own_partial(query, key, value, state, scale))
            store(key, value, state)
    return out.to(query.dtype), lse


def embed_rows(
    tokens: Tensor, embedding: Tensor, factor: float, lengths: Tensor, turns: Turns | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor] | None]:
    """`factor` times the embeddings of tokens `(B,)`, and `rotations` for `attend_token`, in one launch of Triton."""
    from dilated_attention_pytorch.kernels.triton import step

    return step.embed(tokens, embedding, factor, lengths, turns)


def linear_rows(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    norm: tuple[str, Tensor, Tensor | None, float] | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual + activation(norm(x) W' + b)` of a few rows `(B, K)`, in one launch of Triton.

    Several matrices give their columns side by side; with `swiglu` the second one gates the first. `norm` is its kind,
    `layer` or `rms`, gain, shift and epsilon. All tensors are contiguous and of one dtype.
    """
    from dilated_attention_pytorch.kernels.triton import step

    return step.linear(x, weights, biases, norm=norm, activation=activation, residual=residual)


def attend_token(
    qkv: Tensor,
    state: CacheState,
    scale: float,
    counters: Tensor,
    *,
    rotations: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The output `(B, H * D)` of one new token per row, which is stored, in one launch of Triton.

    `qkv` is `(B, (H + 2 Hkv) * D)`, `rotations` are cos and sin for queries and for keys, `(B, D / 2)` each, and
    `qk_norm` is the gains and the epsilon of the norms before it. `counters` are at least `B * Hkv` zeros of int32,
    which it overwrites. The lengths stay as they are.
    """
    from dilated_attention_pytorch.kernels.triton import token

    return token.attend_token(qkv, state, scale, counters, rotations=rotations, qk_norm=qk_norm, allow_tf32=allow_tf32)


def store(key: Tensor, value: Tensor, state: CacheState) -> None:
    """Store the grid rows of a few new tokens; rows that a newer one would overwrite are not written."""
    B, m = key.shape[:2]
    keys, values, lengths, rows, _ = state
    rings = rings_on(rows, key)
    position = (lengths[:, None] + torch.arange(m, device=key.device)).unsqueeze(-1)  # (B, m, 1)
    number = rings.number(position)  # (B, m, rings)
    kept = rings.on_grid(position) & (number > number[:, -1:] - rings.capacity)
    place = torch.where(kept, number % rings.capacity + rings.first, rows.unread)
    batch_rows = torch.arange(B, device=key.device)[:, None, None]
    for stored, x in ((keys, key), (values, value)):
        stored[batch_rows, place] = x[:, :, rings.head]


def _store_chunk(at: list[int], key: Tensor, value: Tensor, state: CacheState, engine: str) -> None:
    """`store` for many tokens from positions `at` on, which the host knows."""
    if engine == "triton":
        from dilated_attention_pytorch.kernels.triton import cache_chunks

        cache_chunks.store(key, value, state)
        return
    if len(set(at)) > 1:
        for b in range(len(at)):
            _store_chunk(at[b : b + 1], key[b : b + 1], value[b : b + 1], state.of_row(b), engine)
        return
    begin, end = at[0], at[0] + key.shape[1]
    for branch in state.rows.branches if end > 0 else ():
        w, r, C = branch.segment_length, branch.dilation_rate, branch.capacity
        oldest = max(0, branch.number(end - 1) - C + 1)
        rings = [(branch.stored(stored), x) for stored, x in ((state.keys, key), (state.values, value))]
        for segment in range(max(oldest // branch.rows, max(begin, 0) // w), (end - 1) // w + 1):
            for offset, heads in heads_by_offset(branch.offsets):
                zero = segment * w + offset  # where row 0 of the segment stands
                first = max(0, oldest - segment * branch.rows, -((zero - max(begin, 0)) // r))
                count = len(range(zero + first * r, min(end, (segment + 1) * w), r))
                place = (segment * branch.rows + first) % C
                for start, length, to in ((0, min(count, C - place), place), (C - place, count - (C - place), 0)):
                    if length > 0:
                        rows = slice(
                            zero + (first + start) * r - begin, zero + (first + start + length - 1) * r - begin + 1, r
                        )
                        for ring, x in rings:
                            ring[:, heads, to : to + length] = x[:, rows, branch.every(heads)].transpose(1, 2)


def cached_partial(query: Tensor, state: CacheState, held: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` over the cached rows of tokens before `held`, `(B,)`; in float32, or float64."""
    B, m, H, _ = query.shape
    keys, values, lengths, rows, _ = state
    q = query.to(wide_dtype(query.dtype)) * scale
    out = torch.zeros_like(q)
    lse = torch.full((B, m, H), -torch.inf, dtype=q.dtype, device=q.device)
    position = (lengths[:, None] + torch.arange(m, device=q.device)).unsqueeze(-1)  # (B, m, 1)
    rings = rings_on(rows, q)
    segment = position // rings.segment_length
    # Tokens of the query's segment that it sees in the cache, and how many of them are rows of the ring.
    tokens = torch.minimum(position + 1, held[:, None, None]) - segment * rings.segment_length
    count = (tokens - rings.offset + (rings.dilation_rate - 1)) // rings.dilation_rate
    count = torch.where(rings.on_grid(position), count, 0)  # (B, m, rings)
    group = _group(query, rows)
    for together in rows.branches_by_heads:
        first, last = together[0].heads.start * group, together[0].heads.stop * group
        part = q[:, :, first:last].unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # (B, heads, group, m, D)
        scores = []
        for branch in together:
            mine = slice(branch.ring, branch.ring + len(branch.offsets))
            begins = segment[..., mine.start, None] * branch.rows  # (B, m, 1)
            row = (torch.arange(branch.capacity, device=q.device) - begins) % branch.capacity  # (B, m, C)
            sees = row[:, None] < count[..., mine].transpose(1, 2).unsqueeze(-1)  # (B, heads, m, C)
            k = branch.stored(keys).to(q.dtype).unsqueeze(2)  # (B, heads, 1, C, D)
            scores.append((part @ k.transpose(-1, -2)).masked_fill_(~sees.unsqueeze(2), -torch.inf))
        v = [branch.stored(values).to(q.dtype).unsqueeze(2) for branch in together]
        partial = _softmax(torch.cat(scores, -1), v)
        out[:, :, first:last], lse[:, :, first:last] = _as_rows(*partial)
    return out, lse


def own_partial(query: Tensor, key: Tensor, value: Tensor, state: CacheState, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` over the new tokens themselves: a key that several branches show counts as often."""
    m, rows = query.shape[1], state.rows
    position = state.lengths[:, None] + torch.arange(m, device=query.device)  # (B, m)
    i, j = position[:, :, None], position[:, None, :]
    real = (i >= 0) & (j >= 0)
    times = [
        sum(
            visible(branch, offset, i, j, is_causal=True).to(query.dtype)
            for branch, offset in zip(rows.spec.branches, offsets)
            if offset is not None
        )
        for offsets in zip(*rows.offsets)
    ]
    query, key, value = (x.to(wide_dtype(x.dtype)) for x in (query, key, value))
    none = torch.zeros_like(real, dtype=query.dtype)
    shown = torch.stack([real * (none + count) for count in times], dim=1)  # (B, Hkv, m, m)
    q = query.unflatten(2, (-1, _group(query, rows))).permute(0, 2, 3, 1, 4)  # (B, Hkv, group, m, D)
    k, v = (x.transpose(1, 2).unsqueeze(2) for x in (key, value))  # (B, Hkv, 1, m, D)
    scores = (q @ k.transpose(-1, -2)).mul_(scale) + shown.log().unsqueeze(2)
    return _as_rows(*_softmax(scores, [v]))


def _softmax(scores: Tensor, values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of rows, some of which may see nothing; `values` are those of consecutive ranges of keys."""
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest.masked_fill(highest == -torch.inf, 0.0)).exp_()
    total = weights.sum(-1, keepdim=True)
    ranges = weights.split([v.shape[-2] for v in values], dim=-1)
    out = ranges[0] @ values[0]
    for some, v in zip(ranges[1:], values[1:]):
        out += some @ v
    # The highest score of a row adds 1 to its total, so that less than 1 means that it sees nothing.
    return out / total.clamp_min(1.0), (highest + total.log()).squeeze(-1)


def _as_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From `(B, heads, group, m, ...)` to `(B, m, heads * group, ...)`."""
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def _group(query: Tensor, rows: CacheRows) -> int:
    return query.shape[2] // len(rows.offsets[0])


def _attend_chunk(
    at: list[int], new: NewTokens, state: CacheState, call: Call, resources: Resources
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of many tokens from positions `at` on, one for each batch row."""
    m = new.query.shape[1]
    if max(at) <= 0:  # nothing is cached yet
        spans = torch.tensor([[min(-p, m), m] for p in at], device=new.query.device) if any(at) else None
        return _attend_new(new, call, resources, spans)
    if len(set(at)) == 1:
        return _attend_chunk_at(at[0], new, state, call, resources)
    by_row = [_attend_chunk(at[b : b + 1], new.of_row(b), state.of_row(b), call, resources) for b in range(len(at))]
    return torch.cat([out for out, _ in by_row]), torch.cat([lse for _, lse in by_row])


def _attend_chunk_at(
    begin: int, new: NewTokens, state: CacheState, call: Call, resources: Resources
) -> tuple[Tensor, Tensor]:
    query, key, value = new
    m, rows = query.shape[1], state.rows
    period = common_period(rows.spec)
    before = begin % period  # tokens since all branches began a segment
    if before == 0:  # the cache is out of sight
        return _attend_new(new, call, resources)
    if before <= m * _MOST_AGAIN:
        count = min(m, period - before)  # what comes after these does not see the cache
        padded = F.pad(query[:, :count], (0, 0, 0, 0, before, 0))
        k, v = _after_cached(key[:, :count], value[:, :count], state, begin, before, call.backend)
        out, lse = _attend_new(NewTokens(padded, k, v), call, resources)
        out, lse = out[:, before:], lse[:, before:]
        if count == m:
            return out, lse
        rest = _attend_new(new.tokens(count, m), call, resources)
        return torch.cat([out, rest[0]], 1), torch.cat([lse, rest[1]], 1)
    open_tokens = [min(m, -begin % branch.segment_length) for branch in rows.spec.branches]
    out = torch.zeros_like(query, dtype=wide_dtype(query.dtype))
    lse = torch.full(out.shape[:3], -torch.inf, dtype=out.dtype, device=out.device)
    for count in sorted(set(open_tokens)):
        # Branches whose open segments end together are one call before that end, and one after it.
        together = [i for i, tokens in enumerate(open_tokens) if tokens == count]
        for first, end, table in (
            (0, count, _table(rows, together, begin)),
            (count, m, _table(rows, together, None)),
        ):
            if first < end:
                part = replace(call, table=table, partial=True)
                partial = _attend_new(new.tokens(first, end), part, resources)
                merge_(out[:, first:end], lse[:, first:end], *partial)
    scale = call.softmax_scale(query.shape[3])
    with resources.workspaces() as take, tf32(call.allow_tf32, query.device):
        for branch in rows.branches:
            count = open_tokens[branch.index]
            if count:
                _merge_cached_(out[:, :count], lse[:, :count], query[:, :count], state, begin, branch, scale, take)
    return out.to(query.dtype), lse


def _attend_new(new: NewTokens, call: Call, resources: Resources, spans: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of tokens that see each other only."""
    out, lse = attend(call, Inputs(*new, spans), resources, return_lse=True)
    return out, lse


def _after_cached(
    key: Tensor, value: Tensor, state: CacheState, begin: int, before: int, engine: str
) -> tuple[Tensor, Tensor]:
    """Keys and values from position `begin` on, after `before` more: cached rows at their places, zeros between them.

    Of the tokens before, a branch shows none but the rows that it keeps.
    """
    if engine == "triton":
        from dilated_attention_pytorch.kernels.triton import cache_chunks

        return cache_chunks.after_cached(key, value, state, before)
    k, v = (F.pad(x, (0, 0, 0, 0, before, 0)) for x in (key, value))
    for branch in state.rows.branches:
        segment, within = divmod(begin, branch.segment_length)
        first = segment * branch.rows % branch.capacity
        for offset, heads in heads_by_offset(branch.offsets):
            held = len(range(offset, within, branch.dilation_rate))
            places = slice(before - within + offset, before, branch.dilation_rate)
            for whole, stored in ((k, state.keys), (v, state.values)) if held else ():
                kept = _unrolled(branch.stored(stored)[:, heads], first, held)
                whole[:, places, branch.every(heads)] = kept.transpose(1, 2)
    return k, v


def _table(rows: CacheRows, branches: list[int], begin: int | None) -> OffsetTable:
    """The offsets on some branches only, as seen from position `begin` within their segments."""

    def shifted(offset: int | None, w: int, r: int) -> int | None:
        return offset if offset is None or begin is None else (offset - begin % w) % r

    return tuple(
        tuple(shifted(offset, branch.segment_length, branch.dilation_rate) if i in branches else None for offset in row)
        for i, (branch, row) in enumerate(zip(rows.spec.branches, rows.offsets))
    )


def _merge_cached_(
    out: Tensor, lse: Tensor, q: Tensor, state: CacheState, begin: int, branch: BranchRows, scale: float, take: Take
) -> None:
    """Add what queries of the open segment, from position `begin` on, see in the cache: all of the segment's rows."""
    r, group = branch.dilation_rate, _group(q, state.rows)
    segment, within = divmod(begin, branch.segment_length)
    first = segment * branch.rows % branch.capacity
    for offset, heads in heads_by_offset(branch.offsets):
        held, at = len(range(offset, within, r)), (offset - within) % r  # cached rows, the first query on the grid
        if held == 0 or at >= q.shape[1]:
            continue
        k, v = (_unrolled(branch.stored(x)[:, heads], first, held).transpose(1, 2) for x in (state.keys, state.values))
        mine = branch.every(heads)
        for g in range(group):
            queries = slice(mine.start * group + g, (mine.stop - 1) * group + g + 1, mine.step * group)
            partial = blocks.partial(q[:, at::r, queries], k, v, blocks.Block(scale), take)
            merge_(out[:, at::r, queries], lse[:, at::r, queries], *partial)


def _unrolled(ring: Tensor, first: int, count: int) -> Tensor:
    """`count` rows of a `(B, heads, capacity, D)` ring, from row `first` on; a view if they are contiguous."""
    end = first + count - ring.shape[2]
    if end <= 0:
        return ring[:, :, first : first + count]
    return torch.cat([ring[:, :, first:], ring[:, :, :end]], dim=2)
