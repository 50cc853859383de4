"""Dilated attention on a rank's shard of a sequence: agree with the other ranks, schedule, compute, exchange, merge.

Forward starts every message, computes what the rank can alone with the engines of a single device, then merges what
came. Backward does the same against the merged out and lse. Whatever the scheme, forward saves q, k, v, out and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilated_attention_pytorch.core.block_layout import BlockLayout, layout_for, layout_of
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import Call, Inputs, Saved
from dilated_attention_pytorch.core.checks import check_instance, check_tensor, check_whole
from dilated_attention_pytorch.core.dropout import draw_seed
from dilated_attention_pytorch.core.kept import kept
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.plans import Remembers, get_global_pattern_cache
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.reach import warn_of_reach
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spans import documents as documents_of
from dilated_attention_pytorch.core.spec import HeadLayout
from dilated_attention_pytorch.core.tangents import refuse_tangents
from dilated_attention_pytorch.functional import (
    autocast_inputs,
    checked_call,
    dilated_attention,
    refuse_lengths_of_tiles,
)
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.kernels.eager import tf32
from dilated_attention_pytorch.kernels.engine import lse_dtype
from dilated_attention_pytorch.parallel.all_to_all import AllToAll
from dilated_attention_pytorch.parallel.costs import (
    MEMORY_BUDGET,
    Scheme,
    check_gathered,
    check_scheme,
    choose_scheme,
)
from dilated_attention_pytorch.parallel.exchange import BackwardPass, Exchange, Pass
from dilated_attention_pytorch.parallel.gather import Gather
from dilated_attention_pytorch.parallel.group import Agreed, RankGroup, ranks_of
from dilated_attention_pytorch.parallel.lengths import joined_spans, spans_of_own_mask
from dilated_attention_pytorch.parallel.ring import Ring
from dilated_attention_pytorch.parallel.sharding import Document, Shards, TokenLayout, local_calls
from dilated_attention_pytorch.parallel.sparse import SparseGather
from dilated_attention_pytorch.parallel.wire import wires_of

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
    ranks: RankGroup | None = None,
    scheme: Scheme = "auto",
    memory_budget: int = MEMORY_BUDGET,
    shard_lengths: Sequence[int] | None = None,
    token_layout: TokenLayout = "contiguous",
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
    resources: Resources | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`functional.dilated_attention` of a sequence of which each rank holds a contiguous shard, of any length.

    Args:
        query, key, value: the rank's shard, `(B, L, H, D)` and `(B, L, Hkv, D)`; the first rank has the first tokens.
        group, mesh, axis, ranks: the ranks, as a process group, a mesh with an axis of that name, or from `ranks_of`;
            by default the default group. Without one, or with one rank, this is `dilated_attention`.
        scheme: how rows travel where a segment lies on several ranks: `gather`, `ring` or `all_to_all`; `auto` chooses
            for each branch by bytes and memory (`costs.choose_scheme`).
        memory_budget: bytes that `auto` lets a branch's gathered rows take on a rank.
        shard_lengths: the tokens of every rank. Calls that state them are compared with the other ranks' the first
            time only, others each time, through the store of the process group.
        token_layout: `zigzag`: a rank holds an early and a late chunk, one after the other, as `zigzag_order` has them,
            so that causal work is even; by `gather` only.
        seqlens, cu_seqlens, spans: of the whole sequence in token order, the same on every rank.
        key_padding_mask: `(B, L)`, of the rank's own tokens.
        sparse_config: keeps some tiles of every branch, those of the whole sequence; rows travel by `gather`.
        dropout_p: which weights are dropped is drawn on the first rank, and is what a single device would draw.
        resources: a cache and a pool that calls share; None is the global cache, whose schedules always cost more than
            to find them again.
        The other arguments are those of `dilated_attention`.

    Returns:
        The rank's rows: `(B, L, H, D)`, and the lse `(B, L, H)` if asked.

    Every rank must make the same call, and run its backward pass if any rank does. If calls differ, or a rank fails,
    all ranks raise an error.
    """
    ranks = ranks_of(group, mesh, axis) if ranks is None else check_instance("ranks", ranks, RankGroup)
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
        settings |= {**lengths, "return_lse": return_lse, "resources": resources}
        check_scheme(scheme, token_layout)
        return dilated_attention(query, key, value, *branches, **settings)
    local: dict[str, object] = {}
    call, mask_spans, error = None, [], None
    length, known = 0, None
    try:  # whatever is wrong with this rank's call, the others must hear of it
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, x)
        query, key, value = autocast_inputs(query, key, value)
        call = checked_call(query, key, value, *branches, **settings)
        refuse_tangents("attention across ranks", query, key, value)
        _check_settings(ranks, query, scheme, memory_budget, shard_lengths, token_layout, backend)
        if lengths:
            refuse_lengths_of_tiles(sparse_config)
        if sparse_config is not None and scheme not in ("auto", "gather"):
            raise ValueError(f"kept tiles travel by gather, got scheme={scheme!r}: use auto or gather")
        length = query.shape[1]
        if key_padding_mask is not None:
            mask_spans = spans_of_own_mask(query.shape[0], length, lengths)
        elif shard_lengths is not None:  # a mask is each rank's own, and may be wrong at any call
            known = tuple(shard_lengths)
        choices = {"scheme": scheme, "memory_budget": memory_budget, "token_layout": token_layout}
        local = _described(query, key, value, branches, {**settings, **choices}, lengths)
    except Exception as wrong:
        error = wrong
    agreed = ranks.agree(local, length, error, known, mask_spans)
    assert call is not None
    # Where all agree, what follows is right or wrong alike on every rank.
    with ranks.agreement.told(alike=(TypeError, ValueError)):
        shards = Shards.of(agreed.lengths, token_layout)
        if shards.tokens == 0 or query.shape[0] == 0:  # on every rank
            settings["return_lse"] = return_lse
            return dilated_attention(query, key, value, *branches, **settings)
        if mask_spans:
            spans = joined_spans(shards, agreed.own)
        elif lengths:
            spans = document_spans(query.shape[0], shards.tokens, cache=None, **lengths)
        seed = ranks.share_from_first(draw_seed(query.device)) if dropout_p > 0.0 else None
        documents = tuple(
            (range(rows.start, rows.stop), start, start + length)
            for rows, start, length in documents_of(spans, query.shape[0], shards.tokens)
        )
        kind = (
            call, shards, documents, query.shape, key.shape[2], query.element_size(), query.device, scheme,
            memory_budget,
        )  # fmt: skip
        if resources is None:
            resources = Resources(get_global_pattern_cache())
        schedule = schedule_for(ranks, kind, resources.cache)
    out, lse = _Sharded.apply(query, key, value, seed, schedule, resources, ranks, agreed)
    return (out, lse) if return_lse else out


def _check_settings(
    ranks: RankGroup,
    query: Tensor,
    scheme: str,
    budget: int,
    shard_lengths: Sequence[int] | None,
    token_layout: str,
    backend: str,
) -> None:
    check_scheme(scheme, token_layout)
    check_whole("memory_budget", budget, least=0)
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
        **settings,
    }


class LocalCall(NamedTuple):
    """What some of a rank's tokens compute alone; with a layout where positions choose the tiles that are kept."""

    at: range
    call: Call
    spans: Tensor | None
    layout: BlockLayout | None

    def of(self, x: Tensor) -> Tensor:
        """Its tokens of `(B, L, ...)`."""
        return x if len(self.at) == x.shape[1] else x[:, self.at.start : self.at.stop]

    def tiles(self, query: Tensor, key: Tensor) -> BlockLayout | None:
        sparse = self.call.sparse
        return layout_of(self.call, query, key) if sparse is not None and sparse.depends_on_content else self.layout


class Schedule(NamedTuple):
    """One rank's part of a kind of call: what it computes alone, longest first, and what it exchanges."""

    calls: tuple[LocalCall, ...]
    exchanges: tuple[Exchange, ...]
    allow_tf32: bool | None


def schedule_for(ranks: RankGroup, kind: tuple[Any, ...], cache: Remembers | None) -> Schedule:
    """The schedule of calls of a kind on these ranks, found again in the cache if there is one."""
    if cache is None:
        return _schedule(ranks, *kind)
    return cache.remember("ring schedule", (ranks, kind), lambda: _schedule(ranks, *kind))


def _schedule(
    ranks: RankGroup,
    call: Call,
    shards: Shards,
    documents: tuple[Document, ...],
    shape: torch.Size,
    kv_heads: int,
    itemsize: int,
    device: torch.device,
    scheme: str,
    budget: int,
) -> Schedule:
    batch, _, heads, head_dim = shape
    if ranks.rank == 0:
        longest = max((stop - start for _, start, stop in documents), default=0)
        warn_of_reach(call.spec, longest, (call.total_heads or heads) * kv_heads // heads)
    chunks = shards.chunks_of(ranks.rank)
    table = call.offsets(heads, kv_heads)
    exchanges: list[Exchange] = []
    elsewhere = set()
    for index, segments, wire in wires_of(call, shards, documents, heads, kv_heads, head_dim, itemsize):
        if call.sparse is None:
            chosen = choose_scheme(scheme, wire, segments, budget)
        else:
            chosen = "sparse"
            check_gathered(scheme, wire, segments, budget, "a block layout", "leave sparse_config out")
        if chosen in ("all_to_all", "sparse"):
            elsewhere.add(index)
        mine = [(number, segment) for number, segment in enumerate(segments) if {*chunks} & {*segment.ranks}]
        if mine:
            exchanges.append(_EXCHANGES[chosen](call, index, wire, mine, ranks))
    found = [
        (chunk, local)
        for chunk in chunks
        for local in local_calls(call.spec, table, shards, documents, batch, chunk, frozenset(elsewhere))
    ]
    partial = bool(exchanges) or len(found) > 1 or any(len(local.at) < shape[1] for _, local in found)
    calls = []
    for chunk, local in sorted(found, key=lambda one: -len(one[1].at)):
        before, position = shards.held_at(chunk).start, shards.bounds(chunk)[0] + local.at.start
        own = replace(call, table=local.table, first_position=position, partial=partial)
        spans = None if local.spans is None else torch.tensor(local.spans, device=device)
        layout = None
        if own.sparse is not None:
            assert spans is None, "kept tiles are of whole segments in all rows"
            if not own.sparse.depends_on_content:
                offsets = own.query_head_offsets(heads, kv_heads)
                layout = layout_for(own.spec, len(local.at), offsets, own.sparse, own.is_causal, device)
        calls.append(LocalCall(range(before + local.at.start, before + local.at.stop), own, spans, layout))
    return Schedule(tuple(calls), tuple(exchanges), call.allow_tf32)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seed: Tensor | None,
        schedule: Schedule,
        resources: Resources,
        ranks: RankGroup,
        agreed: Agreed,
    ) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            with resources.message_buffers() as take:
                return _forward(schedule, Pass(query, key, value, seed, resources, take))

        with _waited_for(ranks, schedule):
            out, lse = kept(compute)
        ctx.save_for_backward(query, key, value, out, lse, seed)
        ctx.rest = schedule, resources, ranks, agreed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, out, lse, seed = ctx.saved_tensors
        # Without a gradient of its own a rank still owes the others theirs.
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        schedule, resources, ranks, agreed = ctx.rest
        ranks.begin(agreed, "backward")
        with _waited_for(ranks, schedule), resources.message_buffers() as take:
            inputs = (query, key, value, seed, resources, take, out, lse, grad_out, grad_lse)
            grads = _backward(schedule, BackwardPass(*inputs))
        return (*grads, None, None, None, None, None, None)


def _waited_for(ranks: RankGroup, schedule: Schedule) -> AbstractContextManager[None]:
    """Tell the other ranks of an error if they wait for this rank's rows."""
    return ranks.agreement.told() if schedule.exchanges else nullcontext()


def _forward(schedule: Schedule, x: Pass) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of a rank's rows; neither is lent."""

    def run(local: LocalCall) -> tuple[Tensor, ...]:
        q, k, v = map(local.of, (x.q, x.k, x.v))
        return op.partial(local.call, Inputs(q, k, v, local.spans, x.seed, local.tiles(q, k)), x.resources)

    def nothing() -> tuple[Tensor, ...]:
        out = _sums(x.q, x.take)
        return out, out.new_full(x.q.shape[:3], -torch.inf)

    begun = [exchange.begin(x) for exchange in schedule.exchanges]
    out, lse = _over_calls(schedule, x, run, nothing, lambda total, found: merge_(*total, *found))
    with op.no_autocast(x.q.device.type), tf32(schedule.allow_tf32, x.q.device):
        for exchange, pending in zip(schedule.exchanges, begun):
            exchange.end_forward(pending, x, out, lse)
    return out.to(x.q.dtype), lse


def _backward(schedule: Schedule, x: BackwardPass) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` of a rank's rows; none is lent."""

    def run(local: LocalCall) -> tuple[Tensor, ...]:
        do, q, k, v, out, lse = map(local.of, (x.do, x.q, x.k, x.v, x.out, x.lse))
        through_lse = None if x.through_lse is None else local.of(x.through_lse)
        saved = Saved(Inputs(q, k, v, local.spans, x.seed, local.tiles(q, k)), out, lse)
        return op.gradients(local.call, saved, do, through_lse, x.resources)

    def nothing() -> tuple[Tensor, ...]:
        return tuple(_sums(y, x.take) for y in (x.q, x.k, x.v))

    def add(totals: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for total, grad in zip(totals, found):
            total += grad

    begun = [exchange.begin(x) for exchange in schedule.exchanges]
    dq, dk, dv = _over_calls(schedule, x, run, nothing, add)
    with op.no_autocast(x.q.device.type), tf32(schedule.allow_tf32, x.q.device):
        for exchange, pending in zip(schedule.exchanges, begun):
            exchange.end_backward(pending, x, (dq, dk, dv))
    return dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype)


def _over_calls(
    schedule: Schedule,
    x: Pass,
    run: Callable[[LocalCall], tuple[Tensor, ...]],
    nothing: Callable[[], tuple[Tensor, ...]],
    add: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
) -> tuple[Tensor, ...]:
    """The sum of what a rank computes alone; the first result is the sum so far if it has all of the rank's rows."""
    total = None
    for local in schedule.calls:
        found = run(local)
        if total is None and len(local.at) == x.q.shape[1]:
            total = found
        else:
            total = nothing() if total is None else total
            add([local.of(y) for y in total], found)
        del found  # before the next call makes as many
    return nothing() if total is None else total


def _sums(x: Tensor, take: Take) -> Tensor:
    """Zeros to add into: lent where the result has another dtype, otherwise the result itself."""
    dtype = lse_dtype(x.dtype)
    if x.dtype == dtype:
        return torch.zeros(x.shape, dtype=dtype, device=x.device)
    return take(x.shape, dtype=dtype, device=x.device).zero_()
