"""Attention of new tokens against a bounded cache: the rows of a full causal forward, from what the cache keeps.

The new tokens' rows are the merge of two partials: over the cached rows of the segment that was open when they came,
and over the new tokens themselves. Then the new tokens are stored.

- A few tokens (`_MOST_AT_ONCE`) go one way whatever their positions, which may differ between batch rows: shapes are
  static and nothing waits for the device, so that the step can be compiled and captured in a CUDA graph.
- A longer chunk is cut, branch by branch, where the open segment ends: the pieces are ordinary problems of the
  operator, and only queries of the open segment meet the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.cache_rows import BranchRows, CacheRows, CacheState, Rings, rings_on
from dilated_attention_pytorch.core.memory_pool import Take
from dilated_attention_pytorch.core.merge import merge, merge_
from dilated_attention_pytorch.core.pattern import heads_by_offset, visible
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources, is_plain
from dilated_attention_pytorch.core.spec import DilatedSpec, OffsetTable, Problem
from dilated_attention_pytorch.kernels import dense
from dilated_attention_pytorch.kernels.eager import tf32
from dilated_attention_pytorch.kernels.ladder import choose_backend
from dilated_attention_pytorch.kernels.op import attend

_MOST_AT_ONCE = 64


def attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: CacheState,
    problem: Problem,
    backend: str,
    resources: Resources,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the new tokens, `(B, m, H, D)` and `(B, m, H)`, which are stored in `state`."""
    if is_plain(query, state.keys):
        return _attend_cached(query, key, value, state, problem, backend, resources)
    keys, values, lengths, rows = state
    return attend_cached_op(
        query,
        key,
        value,
        keys,
        values,
        lengths,
        rows.spec.segment_lengths,
        rows.spec.dilation_rates,
        rows.spec.head_layout,
        [_ABSENT if offset is None else offset for row in rows.offsets for offset in row],
        rows.rewindable,
        problem.softmax_scale(query.shape[3]),
        problem.allow_tf32,
        backend,
    )


_ABSENT = -1


# Where it is traced: a compiled graph takes what chooses an engine and looks at lengths as one operator.
@torch.library.custom_op("dilated_attention_pytorch::attend_cached", mutates_args=("keys", "values"))
def attend_cached_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: str,
    offsets: Sequence[int],
    rewindable: int,
    scale: float,
    allow_tf32: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    spec = DilatedSpec.of(segment_lengths, dilation_rates, head_layout)  # type: ignore[arg-type]
    flat = [None if offset == _ABSENT else offset for offset in offsets]
    heads = len(flat) // len(spec.branches)
    table = tuple(tuple(flat[i : i + heads]) for i in range(0, len(flat), heads))
    state = CacheState(keys, values, lengths, CacheRows(spec, table, rewindable))
    problem = Problem(spec=spec, is_causal=True, scale=scale, allow_tf32=allow_tf32, table=table)
    out, lse = _attend_cached(query, key, value, state, problem, backend, NO_RESOURCES)
    return out.contiguous(), lse.contiguous()


@attend_cached_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=dtype)


def _attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: CacheState,
    problem: Problem,
    backend: str,
    resources: Resources,
) -> tuple[Tensor, Tensor]:
    m, D = query.shape[1], query.shape[3]
    if backend == "reference":
        raise ValueError("backend 'reference' computes whole sequences, without a cache: use 'eager' or 'auto' with it")
    engine = choose_backend(backend, query.device, query.dtype, D)
    if m > _MOST_AT_ONCE:
        out, lse = _attend_chunk(query, key, value, state, problem, backend, resources)
        store(key, value, state)
        return out, lse
    scale = problem.softmax_scale(D)
    if engine == "triton":
        from dilated_attention_pytorch.kernels.triton.decode import decode

        return decode(query, key, value, state, scale, problem.allow_tf32)
    with tf32(problem.allow_tf32, query.device):
        if m == 1:  # stored first, it is one of the cached rows
            store(key, value, state)
            out, lse = cached_partial(query, state, state.lengths + 1, scale)
        else:
            out, lse = cached_partial(query, state, state.lengths, scale)
            out, lse = merge(out, lse, *own_partial(query, key, value, state, scale))
            store(key, value, state)
    return out.to(query.dtype), lse


def store(key: Tensor, value: Tensor, state: CacheState) -> None:
    """Put the grid rows of the new tokens into their places; what a newer one overwrites is not written at all."""
    rings, rows, m = rings_on(state.rows, key), state.rows, key.shape[1]
    if m <= _MOST_AT_ONCE:
        _store(key, value, state, rings, rings.head)
        return
    for branch in rows.branches:
        last = slice(-min(m, branch.reach), None)
        after = state._replace(lengths=state.lengths + (m - min(m, branch.reach)))
        _store(key[:, last], value[:, last], after, rings.of(branch), branch.heads)


def _store(key: Tensor, value: Tensor, state: CacheState, rings: Rings, heads: Tensor | slice) -> None:
    B, m = key.shape[:2]
    keys, values, lengths, rows = state
    position = (lengths[:, None] + torch.arange(m, device=key.device)).unsqueeze(-1)  # (B, m, 1)
    number = rings.number(position)  # (B, m, rings)
    kept = rings.on_grid(position) & (number > number[:, -1:] - rings.capacity)
    place = torch.where(kept, number % rings.capacity + rings.first, rows.unread)
    batch_rows = torch.arange(B, device=key.device)[:, None, None]
    for stored, x in ((keys, key), (values, value)):
        stored[batch_rows, place] = x[:, :, heads]


def cached_partial(query: Tensor, state: CacheState, held: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`(out, lse)` over the cached rows of tokens before `held`, `(B,)`; in float32, or float64."""
    B, m, H, _ = query.shape
    keys, values, lengths, rows = state
    q = _working(query) * scale
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
            k = _working(branch.stored(keys)).unsqueeze(2)  # (B, heads, 1, C, D)
            scores.append((part @ k.transpose(-1, -2)).masked_fill_(~sees.unsqueeze(2), -torch.inf))
        v = [_working(branch.stored(values)).unsqueeze(2) for branch in together]
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
    none = torch.zeros_like(real, dtype=query.dtype)
    shown = torch.stack([real * (none + count) for count in times], dim=1).to(_working(query).dtype)  # (B, Hkv, m, m)
    q = _working(query).unflatten(2, (-1, _group(query, rows))).permute(0, 2, 3, 1, 4)  # (B, Hkv, group, m, D)
    k, v = (_working(x).transpose(1, 2).unsqueeze(2) for x in (key, value))  # (B, Hkv, 1, m, D)
    scores = (q @ k.transpose(-1, -2)).mul_(scale) + shown.log().unsqueeze(2)
    return _as_rows(*_softmax(scores, [v]))


def _softmax(scores: Tensor, values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of rows of which some see nothing; the keys' values come in one or more pieces."""
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest.masked_fill(highest == -torch.inf, 0.0)).exp_()
    total = weights.sum(-1, keepdim=True)
    pieces = weights.split([v.shape[-2] for v in values], dim=-1)
    out = pieces[0] @ values[0]
    for piece, v in zip(pieces[1:], values[1:]):
        out += piece @ v
    # The highest score of a row adds 1 to its total, so that less than 1 means that it sees nothing.
    return out / total.clamp_min(1.0), (highest + total.log()).squeeze(-1)


def _as_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From `(B, heads, group, m, ...)` to `(B, m, heads * group, ...)`."""
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def _working(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _group(query: Tensor, rows: CacheRows) -> int:
    return query.shape[2] // len(rows.offsets[0])


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: CacheState,
    problem: Problem,
    backend: str,
    resources: Resources,
) -> tuple[Tensor, Tensor]:
    at, (B, m) = state.lengths.tolist(), query.shape[:2]
    if max(at) <= 0:  # nothing is cached yet
        spans = torch.tensor([[min(-p, m), m] for p in at], device=query.device) if any(at) else None
        return _whole(query, key, value, spans, problem, backend, resources)
    if len(set(at)) == 1:
        return _attend_chunk_at(at[0], query, key, value, state, problem, backend, resources)
    by_row = [
        _attend_chunk(query[b : b + 1], key[b : b + 1], value[b : b + 1], state.of_row(b), problem, backend, resources)
        for b in range(B)
    ]
    return torch.cat([out for out, _ in by_row]), torch.cat([lse for _, lse in by_row])


def _attend_chunk_at(
    begin: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: CacheState,
    problem: Problem,
    backend: str,
    resources: Resources,
) -> tuple[Tensor, Tensor]:
    m, rows = query.shape[1], state.rows
    open_tokens = [min(m, -begin % branch.segment_length) for branch in rows.spec.branches]
    if not any(open_tokens):  # every branch begins a segment: the cache is out of sight
        return _whole(query, key, value, None, problem, backend, resources)
    q = _working(query)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype, device=q.device)
    for count in sorted(set(open_tokens)):
        # Branches whose open segments end together are one problem before that end, and one after it.
        together = [i for i, tokens in enumerate(open_tokens) if tokens == count]
        for piece, table in (
            (slice(0, count), _table(rows, together, begin)),
            (slice(count, m), _table(rows, together, None)),
        ):
            if piece.start < piece.stop:
                part = _part_of(problem, table)
                q_piece, k_piece, v_piece = query[:, piece], key[:, piece], value[:, piece]
                partial = _whole(q_piece, k_piece, v_piece, None, part, backend, resources)
                merge_(out[:, piece], lse[:, piece], *partial)
    scale = problem.softmax_scale(query.shape[3])
    with resources.workspaces() as take, tf32(problem.allow_tf32, query.device):
        for branch in rows.branches:
            count = open_tokens[branch.index]
            if count:
                _merge_cached_(out[:, :count], lse[:, :count], q[:, :count], state, begin, branch, scale, take)
    return out.to(query.dtype), lse


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    problem: Problem,
    backend: str,
    resources: Resources,
) -> tuple[Tensor, Tensor]:
    out, lse = attend(query, key, value, spans, None, problem, backend, True, True, resources)
    return out, lse


def _table(rows: CacheRows, branches: list[int], begin: int | None) -> OffsetTable:
    """The offsets on some branches only, as seen from position `begin` within their segments."""

    def shifted(offset: int | None, w: int, r: int) -> int | None:
        return offset if offset is None or begin is None else (offset - begin % w) % r

    return tuple(
        tuple(shifted(offset, branch.segment_length, branch.dilation_rate) if i in branches else None for offset in row)
        for i, (branch, row) in enumerate(zip(rows.spec.branches, rows.offsets))
    )


def _part_of(problem: Problem, table: OffsetTable) -> Problem:
    return Problem(
        spec=problem.spec,
        is_causal=True,
        scale=problem.scale,
        allow_tf32=problem.allow_tf32,
        table=table,
        partial=True,
    )


def _merge_cached_(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    state: CacheState,
    begin: int,
    branch: BranchRows,
    scale: float,
    take: Take,
) -> None:
    """Add what queries of the open segment, from position `begin` on, see in the cache: all of the segment's rows."""
    w, r, C = branch.segment_length, branch.dilation_rate, branch.capacity
    group = _group(q, state.rows)
    segment, within = divmod(begin, w)
    first = segment * branch.rows % C
    for offset, heads in heads_by_offset(branch.offsets):
        held, at = len(range(offset, within, r)), (offset - within) % r
        if held == 0 or at >= q.shape[1]:
            continue
        k, v = (
            _working(_unrolled(branch.stored(x)[:, heads], first, held)).transpose(1, 2)
            for x in (state.keys, state.values)
        )
        for g in range(group):
            start, stop = branch.heads.start + heads.start, branch.heads.start + heads.stop
            mine = slice(start * group + g, (stop - 1) * group + g + 1, heads.step * group)
            part = q[:, at::r, mine]
            if dense.flash_fits(part, scale):
                partial = dense.flash_forward(part, k, v, scale, False)
            else:
                partial = dense.chunked_forward(part, k, v, scale, False, None, take)
            merge_(out[:, at::r, mine], lse[:, at::r, mine], *partial)


def _unrolled(ring: Tensor, first: int, count: int) -> Tensor:
    """`count` rows of a `(B, heads, capacity, D)` ring, from row `first` on."""
    end = first + count - ring.shape[2]
    if end <= 0:
        return ring[:, :, first : first + count]
    return torch.cat([ring[:, :, first:], ring[:, :, :end]], dim=2)
