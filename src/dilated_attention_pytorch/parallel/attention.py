"""Dilated attention on a rank's shard of a sequence: agree with the other ranks, plan, compute, exchange, merge.

Forward starts every message, computes what the rank can alone with the engines of a single device, then merges what
came. Backward does the same against the merged out and lse. Whatever the scheme, forward saves q, k, v, out and lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilated_attention_pytorch.core.block_layout import BlockLayout, layout_for, layout_of
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.dropout import draw_seed
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spans import documents as documents_of
from dilated_attention_pytorch.core.spec import HeadLayout, Problem
from dilated_attention_pytorch.functional import (
    autocast_inputs,
    checked_problem,
    dilated_attention,
    refuse_lengths_of_tiles,
)
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.kernels.eager import by_head, tf32
from dilated_attention_pytorch.parallel.all_to_all import AllToAll
from dilated_attention_pytorch.parallel.blocks import Exchange, Rows, Tensors
from dilated_attention_pytorch.parallel.comm import Ranks, ranks_of
from dilated_attention_pytorch.parallel.costs import MEMORY_BUDGET, SCHEMES, Scheme, Wire, choose_scheme
from dilated_attention_pytorch.parallel.gather import Gather
from dilated_attention_pytorch.parallel.lengths import joined_spans, spans_of_own_mask
from dilated_attention_pytorch.parallel.ring import Ring
from dilated_attention_pytorch.parallel.sharding import Document, LocalCall, Shards, local_calls, shared_segments
from dilated_attention_pytorch.parallel.sparse import SparseGather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_EXCHANGES: dict[str, type[Exchange]] = {"gather": Gather, "ring": Ring, "all_to_all": AllToAll, "sparse": SparseGather}


def sharded_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    axis: str = "sequence",
    ranks: Ranks | None = None,
    scheme: Scheme = "auto",
    memory_budget: int = MEMORY_BUDGET,
    shard_lengths: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    head_layout: HeadLayout = "interleaved",
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    spans: Tensor | None = None,
    head_offset: int = 0,
    total_heads: int | None = None,
    allow_tf32: bool | None = None,
    sparse_config: SparsePatternConfig | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`functional.dilated_attention` of a sequence of which each rank holds a contiguous shard, of any length.

    Args:
        query, key, value: the rank's shard, `(B, L, H, D)` and `(B, L, Hkv, D)`; the first rank has the first tokens.
        group, mesh, axis, ranks: the ranks, as a process group, a mesh with an axis of that name, or from `ranks_of`;
            by default the default group. Without one, or with one rank, this is `dilated_attention`.
        scheme: how rows travel where a segment lies on several ranks: `gather`, `ring` or `all_to_all`; `auto` chooses
            for each branch by bytes and memory (`costs.choose_scheme`).
        memory_budget: bytes that `auto` lets a branch's gathered rows take on a rank.
        shard_lengths: the tokens of every rank. Ranks that state them check that they agree the first time only; else
            each call begins with a short message between hosts.
        seqlens, cu_seqlens, spans: of the whole sequence, the same on every rank.
        key_padding_mask: `(B, L)`, of the rank's own tokens.
        sparse_config: keeps some tiles of every branch, those of the whole sequence; rows travel by `gather`.
        dropout_p: which weights are dropped is drawn on the first rank, and is what a single device would draw.
        The other arguments are those of `dilated_attention`.

    Returns:
        The rank's rows: `(B, L, H, D)`, and the lse `(B, L, H)` if asked.

    Every rank must make the same call, and run its backward if any does.
    """
    ranks = ranks_of(group, mesh, axis) if ranks is None else ranks
    settings: dict[str, Any] = {
        "head_layout": head_layout,
        "is_causal": is_causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "head_offset": head_offset,
        "total_heads": total_heads,
        "allow_tf32": allow_tf32,
        "sparse_config": sparse_config,
        "backend": backend,
    }
    stated = {"seqlens": seqlens, "cu_seqlens": cu_seqlens, "spans": spans, "key_padding_mask": key_padding_mask}
    lengths: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
    branches = (segment_lengths, dilation_rates)
    if ranks.size == 1:
        settings |= {**lengths, "return_lse": return_lse}
        return dilated_attention(query, key, value, *branches, **settings)
    query, key, value = autocast_inputs(query, key, value)
    call: dict[str, object] = {}
    problem, mask_spans, error = None, [], None
    try:
        problem = checked_problem(query, key, value, *branches, **settings, may_be_empty=True)
        _check_settings(ranks, query, scheme, memory_budget, shard_lengths, backend)
        if lengths:
            refuse_lengths_of_tiles(sparse_config)
        if sparse_config is not None and scheme not in ("auto", "gather"):
            raise ValueError(f"kept tiles travel by gather, got scheme={scheme!r}: use auto or gather")
        if key_padding_mask is not None:
            mask_spans = spans_of_own_mask(query.shape[0], query.shape[1], lengths)
        call = _described(query, key, value, branches, settings, scheme, memory_budget, lengths)
    except (AttributeError, TypeError, ValueError) as wrong:
        error = wrong
    length = query.shape[1] if query.dim() > 1 else 0
    # A mask is each rank's own, and may be wrong at any call.
    known = None if shard_lengths is None or key_padding_mask is not None else tuple(shard_lengths)
    shards = Shards(ranks.agree(call, length, error, known))
    assert problem is not None
    if shards.tokens == 0:
        raise ValueError("an empty sequence has nothing to attend to: no rank has any tokens")
    if mask_spans:
        spans = joined_spans(ranks, shards, mask_spans)
    elif lengths:
        spans = document_spans(query.shape[0], shards.tokens, cache=None, **lengths)
    seed = ranks.share_from_first(draw_seed(query.device)) if dropout_p > 0.0 else None
    documents = tuple(
        (range(rows.start, rows.stop), start, start + length)
        for rows, start, length in documents_of(spans, query.shape[0], shards.tokens)
    )
    kind = (
        problem, shards, documents, query.shape, key.shape[2], query.element_size(), query.device, scheme,
        memory_budget,
    )  # fmt: skip
    plan = ranks.remember(kind, lambda: _plan(ranks, *kind))
    out, lse = _Sharded.apply(query, key, value, seed, plan, backend)
    return (out, lse) if return_lse else out


def _check_settings(
    ranks: Ranks, query: Tensor, scheme: str, budget: int, shard_lengths: Sequence[int] | None, backend: str
) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if budget < 0:
        raise ValueError(f"memory_budget must be a number of bytes from 0 on, got {budget}")
    if backend == "reference":
        raise ValueError(
            "backend 'reference' computes whole sequences on one device: gather them, or use auto or eager"
        )
    if shard_lengths is None:
        return
    if len(shard_lengths) != ranks.size or shard_lengths[ranks.rank] != query.shape[1]:
        raise ValueError(
            f"shard_lengths must state the tokens of each of the {ranks.size} ranks, {query.shape[1]} for rank "
            f"{ranks.rank}, got {list(shard_lengths)}"
        )


def _described(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    branches: tuple[Sequence[int], Sequence[int]],
    settings: dict[str, Any],
    scheme: str,
    memory_budget: int,
    lengths: dict[str, Tensor],
) -> dict[str, object]:
    """What must be the same on every rank for messages to meet."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return {
        **{name: "given" if name == "key_padding_mask" else value.tolist() for name, value in lengths.items()},
        "segment_lengths": list(branches[0]),
        "dilation_rates": list(branches[1]),
        "dtype": query.dtype,
        "device": query.device.type,
        "batch": query.shape[:1],
        "heads": query.shape[2:3],
        "key/value heads": key.shape[2:3],
        "head_dim": query.shape[3:],
        "requires_grad": grad,
        "scheme": scheme,
        "memory_budget": memory_budget,
        **settings,
    }


@dataclass(frozen=True)
class Call:
    """What a rank computes alone, on some of its tokens: all of them, unless tiles are kept."""

    problem: Problem
    spans: Tensor | None
    tokens: slice
    layout: BlockLayout | None = None

    def of(self, x: Tensor) -> Tensor:
        return x if self.tokens.stop - self.tokens.start == x.shape[1] else x[:, self.tokens].contiguous()

    def tiles(self, query: Tensor, key: Tensor) -> BlockLayout | None:
        sparse = self.problem.sparse
        if sparse is None or not sparse.depends_on_content:
            return self.layout
        return layout_of(self.problem, query, key)


@dataclass(frozen=True)
class Plan:
    """One rank's part of a kind of call: what it computes alone, and what it exchanges."""

    calls: tuple[Call, ...]
    exchanges: tuple[Exchange, ...]
    allow_tf32: bool | None


def _plan(
    ranks: Ranks,
    problem: Problem,
    shards: Shards,
    documents: tuple[Document, ...],
    shape: torch.Size,
    kv_heads: int,
    itemsize: int,
    device: torch.device,
    scheme: str,
    budget: int,
) -> Plan:
    batch, tokens, heads, head_dim = shape
    first, _ = shards.bounds(ranks.rank)
    table = problem.offsets(heads, kv_heads)
    exchanges: list[Exchange] = []
    elsewhere = set()
    for index, (branch, offsets) in enumerate(zip(problem.spec.branches, table)):
        segments = shared_segments(branch, shards, documents)
        if not segments or all(offset is None for offset in offsets):
            continue
        groups = heads // len(offsets)
        wire = Wire(branch, offsets, groups, head_dim, itemsize, max(4, itemsize), problem.is_causal, shards)
        chosen = "sparse" if problem.sparse is not None else choose_scheme(scheme, wire, segments, budget)
        if chosen in ("all_to_all", "sparse"):
            elsewhere.add(index)
        mine = [(number, segment) for number, segment in enumerate(segments) if ranks.rank in segment.ranks]
        if mine:
            exchanges.append(_EXCHANGES[chosen](Rows(problem, index, wire, first), mine, ranks))
    found = local_calls(problem.spec, table, shards, documents, batch, ranks.rank, frozenset(elsewhere))
    partial = bool(exchanges) or len(found) > 1
    calls = []
    for call in found:
        share = replace(problem, table=call.table, first_position=first, partial=partial)
        if problem.sparse is None:
            spans = None if call.spans is None else torch.tensor(call.spans, device=device)
            calls.append(Call(share, spans, slice(0, tokens)))
        else:
            calls.append(_call_on_tiles(share, call, tokens, heads, kv_heads, device))
    return Plan(tuple(calls), tuple(exchanges), problem.allow_tf32)


def _call_on_tiles(
    share: Problem, call: LocalCall, tokens: int, heads: int, kv_heads: int, device: torch.device
) -> Call:
    """A call on the whole segments that a shard has: a layout has no spans, so the tokens around them are left out."""
    start, stop = (0, tokens) if call.spans is None else call.spans[0]
    share = replace(share, first_position=share.first_position + start)
    layout = None
    if share.sparse is not None and not share.sparse.depends_on_content:
        offsets = share.query_head_offsets(heads, kv_heads)
        layout = layout_for(share.spec, stop - start, offsets, share.sparse, share.is_causal, device)
    return Call(share, None, slice(start, stop), layout)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, plan: Plan, backend: str
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(plan, query, key, value, seed, backend)
        ctx.save_for_backward(query, key, value, out, lse, seed)
        ctx.plan, ctx.backend = plan, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, out, lse, seed = ctx.saved_tensors
        # Without a gradient of its own a rank still owes the others theirs.
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = _backward(ctx.plan, grad_out, grad_lse, query, key, value, out, lse, seed, ctx.backend)
        return (*grads, None, None, None)


def _forward(
    plan: Plan, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    empty = query.new_empty(0)
    x = Tensors(query, key, value, empty, empty, seed, backend, empty, None, empty, empty, empty)
    begun = [exchange.begin_forward(x) for exchange in plan.exchanges]
    for call in plan.calls:
        q, k, v = (call.of(y) for y in (query, key, value))
        partial = op.forward(q, k, v, call.spans, seed, call.problem, backend, layout=call.tiles(q, k))
        if x.out is empty and q is query:
            x.out, x.lse = partial
        else:
            if x.out is empty:
                x.out, x.lse = _nothing(query)
            merge_(x.out[:, call.tokens], x.lse[:, call.tokens], *partial)
    if x.out is empty:
        x.out, x.lse = _nothing(query)
    with op.no_autocast(query.device.type), tf32(plan.allow_tf32, query.device):
        for exchange, pending in zip(plan.exchanges, begun):
            exchange.end_forward(pending, x)
    return x.out.to(query.dtype), x.lse


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """The out and lse of rows that see no key."""
    dtype = op.lse_dtype(query.dtype)
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    return out, torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)


def _backward(
    plan: Plan,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    def zeros() -> list[Tensor]:
        dtype = op.lse_dtype(query.dtype)
        return [torch.zeros(y.shape, dtype=dtype, device=y.device) for y in (query, key, value)]

    empty = query.new_empty(0)
    x = Tensors(query, key, value, out, lse, seed, backend, grad_out, grad_lse, empty, empty, empty)
    begun = [exchange.begin_backward(x) for exchange in plan.exchanges]
    for call in plan.calls:
        do, q, k, v, rows = (call.of(y) for y in (grad_out, query, key, value, out))
        dlse = None if grad_lse is None else call.of(grad_lse)
        merged = lse if q is query else by_head(call.of(lse))
        grads = op.backward(
            do, dlse, q, k, v, rows, merged, call.spans, seed, call.problem, backend, layout=call.tiles(q, k)
        )
        if x.dq is empty and q is query:
            x.dq, x.dk, x.dv = grads
        else:
            if x.dq is empty:
                x.dq, x.dk, x.dv = zeros()
            for total, grad in zip((x.dq, x.dk, x.dv), grads):
                total[:, call.tokens] += grad
    if x.dq is empty:
        x.dq, x.dk, x.dv = zeros()
    with op.no_autocast(query.device.type), tf32(plan.allow_tf32, query.device):
        for exchange, pending in zip(plan.exchanges, begun):
            exchange.end_backward(pending, x)
    return x.dq.to(query.dtype), x.dk.to(key.dtype), x.dv.to(value.dtype)
