"""Dilated attention on a rank's shard of a sequence: agree with the other ranks, plan, compute, exchange, merge.

Forward starts every message, computes what the rank can alone with the engines of a single device, then merges what
came. Backward does the same against the merged out and lse. Whatever the scheme, forward saves q, k, v, out and lse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.checks import check_instance, check_tensor, check_whole
from dilated_attention_pytorch.core.dropout import draw_seed
from dilated_attention_pytorch.core.modes import first_derivatives_only, refuse_tangents, tf32, untraced
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.core.pool import Loans
from dilated_attention_pytorch.core.reach import warn_of_reach
from dilated_attention_pytorch.core.replay import replayed
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spans import documents as documents_of
from dilated_attention_pytorch.core.spec import HeadLayout
from dilated_attention_pytorch.functional import autocast_inputs, checked_call, dilated_attention
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.parallel.exchange import AllToAll, Exchange, Gather, SparseGather
from dilated_attention_pytorch.parallel.group import Agreed, RankGroup, ranks_of
from dilated_attention_pytorch.parallel.passes import BackwardPass, LocalCall, Pass
from dilated_attention_pytorch.parallel.schemes import MEMORY_BUDGET, Scheme, check_scheme, choose_scheme
from dilated_attention_pytorch.parallel.sharding import Document, Shards, TokenLayout, local_calls
from dilated_attention_pytorch.parallel.wire import wires_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_SETTINGS = (
    "segment_lengths", "dilation_rates", "head_layout", "is_causal", "scale", "dropout_p", "head_offset",
    "total_heads", "allow_tf32", "sparse_config", "backend",
)  # fmt: skip
_LENGTHS = ("seqlens", "cu_seqlens", "spans", "key_padding_mask")


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
    """`functional.dilated_attention` on a sequence that is cut into contiguous shards of any lengths, one per rank.

    Args:
        query, key, value: the rank's shard, `(B, L, H, D)` and `(B, L, Hkv, D)`; the first rank has the first tokens.
        group, mesh, axis, ranks: the ranks, as a process group, a mesh with an axis of that name, or from `ranks_of`;
            by default the default group. Without one, or with one rank, this is `dilated_attention`.
        scheme: how rows travel where a segment lies on several ranks: `gather`, `ring` or `all_to_all`; `auto` chooses
            for each branch by bytes and memory (`schemes.choose_scheme`).
        memory_budget: bytes that `auto` lets a branch's gathered rows take on a rank.
        shard_lengths: the tokens of every rank. If they are stated, ranks compare equal calls only once; otherwise they
            compare every call, through the store of the process group.
        token_layout: with `zigzag` a rank holds an early and a late chunk, in the order of `zigzag_order`, which
            evens out causal work; by `gather` only.
        seqlens, cu_seqlens, spans: of the whole sequence in token order, the same on every rank.
        key_padding_mask: `(B, L)`, of the rank's own tokens.
        sparse_config: keeps some tiles of every branch, those of the whole sequence; rows travel by `gather`.
        dropout_p: as on a single device. The first rank draws the seed.
        resources: a cache and a pool that calls share; None is the global cache, because making a plan always costs
            more than finding it.
        The other arguments are those of `dilated_attention`.

    Returns:
        The rank's rows: `(B, L, H, D)`, and the lse `(B, L, H)` if asked.

    Every rank must make the same call, and run its backward pass if any rank does. If calls differ, or a rank fails,
    all ranks raise an error.
    """
    arguments: dict[str, Any] = locals()
    ranks = ranks_of(group, mesh, axis) if ranks is None else check_instance("ranks", ranks, RankGroup)
    if torch.compiler.is_compiling() and ranks.size > 1:
        return _untraced(**arguments)
    settings = {name: arguments[name] for name in _SETTINGS}
    lengths = {name: arguments[name] for name in _LENGTHS if arguments[name] is not None}
    if ranks.size == 1:
        check_scheme(scheme, token_layout)
        settings |= {**lengths, "return_lse": return_lse, "resources": resources}
        return dilated_attention(query, key, value, **settings)
    own: list[int] = []
    described: dict[str, object] = {}
    error, length, known = None, 0, None
    try:  # an error of this rank's call must reach the other ranks
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, x)
        query, key, value = autocast_inputs(query, key, value)
        call = checked_call(query, key, value, **settings)
        refuse_tangents("attention across ranks", query, key, value)
        check_scheme(scheme, token_layout)
        check_whole("memory_budget", memory_budget, least=0)
        length = query.shape[1]
        _check_across_ranks(ranks, call, lengths, length, scheme, shard_lengths)
        own, described = described_lengths(query.shape[0], length, lengths)
        if shard_lengths is not None and not own:  # a mask is each rank's own, and may be wrong at any call
            known = tuple(shard_lengths)
        described |= {
            "dtype": query.dtype,
            "device": query.device.type,
            "batch": query.shape[:1],
            "heads": query.shape[2:3],
            "key/value heads": key.shape[2:3],
            "head_dim": query.shape[3:],
            "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)),
            "scheme": scheme,
            "memory_budget": memory_budget,
            "token_layout": token_layout,
            **settings,
            "segment_lengths": list(segment_lengths),
            "dilation_rates": list(dilation_rates),
        }
    except Exception as wrong:
        error = wrong
    agreed = ranks.agree(described, length, error, known, own)
    # All ranks make the same call: what follows is right on all of them, or the same error.
    with ranks.agreement.told(alike=(TypeError, ValueError)):
        batch, shards = query.shape[0], Shards.of(agreed.lengths, token_layout)
        if shards.tokens == 0 or batch == 0:  # on every rank
            settings["return_lse"] = return_lse
            return dilated_attention(query, key, value, **settings)
        spans = spans_of_all(batch, shards, lengths, agreed.own)
        seed = ranks.share_from_first(draw_seed(query.device)) if dropout_p > 0.0 else None
        documents = tuple(
            (range(rows.start, rows.stop), start, start + tokens)
            for rows, start, tokens, _ in documents_of(spans, batch, shards.tokens)
        )
        shard_call = ShardCall(
            call, shards, documents, query.shape, key.shape[2], query.element_size(), query.device, scheme,
            memory_budget,
        )  # fmt: skip
        resources = Resources(get_global_pattern_cache()) if resources is None else resources
        plan = shard_plan_for(ranks, shard_call, resources)
    out, lse = _Sharded.apply(query, key, value, seed, plan, resources, ranks, agreed)
    return (out, lse) if return_lse else out


_untraced = untraced(sharded_dilated_attention)


def _check_across_ranks(
    ranks: RankGroup, call: Call, lengths: dict[str, Any], tokens: int, scheme: str, shard_lengths: Sequence[int] | None
) -> None:
    """Refuse what only one device can compute, and shard lengths that contradict this rank's shard."""
    if call.backend == "reference":
        raise ValueError(
            "backend 'reference' computes whole sequences on one device: gather them, or use auto or eager"
        )
    if call.sparse is not None and scheme not in ("auto", "gather"):
        raise ValueError(f"kept tiles travel by gather, got scheme={scheme!r}: use auto or gather")
    if shard_lengths is not None and (len(shard_lengths) != ranks.size or shard_lengths[ranks.rank] != tokens):
        raise ValueError(
            f"shard_lengths must state the tokens of each of the {ranks.size} ranks, {tokens} for rank {ranks.rank}, "
            f"got {list(shard_lengths)}"
        )


def described_lengths(batch: int, tokens: int, lengths: dict[str, Tensor]) -> tuple[list[int], dict[str, object]]:
    """What only this rank knows of the stated lengths, and what must be the same on all ranks.

    A mask describes the rank's own tokens: only the rank knows where the valid tokens of each batch row start and end.
    """
    if "key_padding_mask" not in lengths:
        return [], {name: x.tolist() for name, x in lengths.items()}
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join([*lengths][:2])} both state the lengths: pass one of them")
    found = document_spans(batch, tokens, cache=None, **lengths) if tokens else torch.zeros(batch, 2, dtype=torch.int64)
    assert found is not None
    return found.flatten().tolist(), {"key_padding_mask": "given"}


def spans_of_all(
    batch: int, shards: Shards, lengths: dict[str, Tensor], theirs: Sequence[Sequence[int]]
) -> Tensor | None:
    """The spans of the whole sequence, from its lengths, or from the spans that each rank's own mask leaves."""
    if "key_padding_mask" not in lengths:
        return document_spans(batch, shards.tokens, cache=None, **lengths) if lengths else None
    joined = []
    for b in range(batch):
        valid = []
        for chunk, edge in enumerate(shards.edges[:-1]):
            held = shards.held_at(chunk)
            start, end = theirs[shards.rank_of(chunk)][2 * b : 2 * b + 2]
            start, end = max(start, held.start), min(end, held.stop)
            if start < end:
                valid.append((edge + start - held.start, edge + end - held.start))
        for (_, end), (start, _) in pairwise(valid):
            if start != end:
                raise ValueError(
                    f"key_padding_mask row {b} has a hole at {end} of the whole sequence: valid tokens must form one "
                    "span; pack with cu_seqlens instead"
                )
        joined.append((valid[0][0], valid[-1][1]) if valid else (0, 0))
    return torch.tensor(joined, dtype=torch.int64).view(batch, 2)


class ShardCall(NamedTuple):
    """A call on a rank's shard: everything that its plan depends on."""

    call: Call
    shards: Shards
    documents: tuple[Document, ...]
    shape: torch.Size  # of the rank's query
    kv_heads: int
    itemsize: int
    device: torch.device
    scheme: str
    memory_budget: int


class ShardPlan(NamedTuple):
    """One rank's part of a call: what it computes alone, longest first, and what it exchanges."""

    calls: tuple[LocalCall, ...]
    exchanges: tuple[Exchange, ...]
    allow_tf32: bool | None


def shard_plan_for(ranks: RankGroup, shard_call: ShardCall, resources: Resources) -> ShardPlan:
    """The plan of a call on these ranks, remembered if there is a cache."""
    return resources.remember("ring schedule", (ranks, shard_call), lambda: _plan(ranks, shard_call))


def _plan(ranks: RankGroup, shard_call: ShardCall) -> ShardPlan:
    call, shards, documents, shape, kv_heads, itemsize, device, stated_scheme, budget = shard_call
    batch, tokens, heads, head_dim = shape
    if ranks.rank == 0:
        longest = max((stop - start for _, start, stop in documents), default=0)
        warn_of_reach(call.spec, longest, (call.total_heads or heads) * kv_heads // heads, is_causal=call.is_causal)
    exchanges: list[Exchange] = []
    elsewhere = set()
    for index, segments, wire in wires_of(call, shards, documents, heads, kv_heads, head_dim, itemsize):
        kept = call.sparse is not None
        scheme = choose_scheme(stated_scheme, wire, segments, budget, kept_tiles=kept)
        if kept or scheme == "all_to_all":  # its exchange computes all pairs of shared segments
            elsewhere.add(index)
        mine = [(number, segment) for number, segment in enumerate(segments) if segment.chunks_of(ranks.rank)]
        if mine:
            made: type[Exchange] = SparseGather if kept else AllToAll if scheme == "all_to_all" else Gather
            exchanges.append(made(scheme, call, index, wire, mine, ranks))
    table = call.offsets(heads, kv_heads)
    found = [
        (chunk, local)
        for chunk in shards.chunks_of(ranks.rank)
        for local in local_calls(call.spec, table, shards, documents, batch, chunk, frozenset(elsewhere))
    ]
    partial = bool(exchanges) or len(found) > 1 or any(len(local.at) < tokens for _, local in found)
    calls = []
    for chunk, local in sorted(found, key=lambda one: -len(one[1].at)):
        before, position = shards.held_at(chunk).start, shards.bounds(chunk)[0] + local.at.start
        own = replace(call, table=local.table, first_position=position, partial=partial)
        spans = None if local.spans is None else torch.tensor(local.spans, device=device)
        calls.append(LocalCall(range(before + local.at.start, before + local.at.stop), own, spans))
    return ShardPlan(tuple(calls), tuple(exchanges), call.allow_tf32)


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seed: Tensor | None,
        plan: ShardPlan,
        resources: Resources,
        ranks: RankGroup,
        agreed: Agreed,
    ) -> tuple[Tensor, ...]:
        out, lse = replayed(_run, plan, ranks, resources, lambda take: Pass(query, key, value, seed, resources, take))
        ctx.save_for_backward(query, key, value, out, lse, seed)
        ctx.rest = plan, resources, ranks, agreed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivatives_only("attention across ranks")
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, out, lse, seed = ctx.saved_tensors
        # Without a gradient of its own a rank still owes the others theirs.
        do = torch.zeros_like(out) if grad_out is None else grad_out
        plan, resources, ranks, agreed = ctx.rest
        ranks.begin(agreed, "backward")

        def backward(take: Loans) -> Pass:
            return BackwardPass(query, key, value, seed, resources, take, out, lse, do, grad_lse)

        return (*_run(plan, ranks, resources, backward), None, None, None, None, None)


def _run(plan: ShardPlan, ranks: RankGroup, resources: Resources, begin: Callable[[Loans], Pass]) -> tuple[Tensor, ...]:
    """A pass of a call: `(out, lse)` or `(dq, dk, dv)` of a rank's rows."""
    # Other ranks must hear of an error if they wait for this rank's rows.
    waited_for = ranks.agreement.told() if plan.exchanges else nullcontext()
    with waited_for, resources.message_buffers() as take:
        x = begin(take)
        begun = [exchange.begin(x) for exchange in plan.exchanges]
        totals: Sequence[Tensor] | None = None
        for local in plan.calls:
            found = x.alone(local)
            if totals is None and len(local.at) == x.q.shape[1]:
                totals = found  # of all the rank's rows
            else:
                totals = x.nothing() if totals is None else totals
                x.fold([local.of(y) for y in totals], found)
            del found  # before the next call allocates as much
        totals = x.nothing() if totals is None else totals
        with op.no_autocast(x.q.device.type), tf32(plan.allow_tf32, x.q.device):
            for exchange, pending in zip(plan.exchanges, begun):
                exchange.end(pending, x, totals)
        return x.finished(totals)
