"""What one attention layer costs on any number of GPUs: bytes, memory and work, and the time they take at given rates.

Bytes, messages and work are computed by the functions that the ranks themselves use. What needs a rate, or a guess at
how kernels work inside, is kept apart and called modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.checks import (
    COUNT,
    MOST_ENTRIES,
    POSITIVE,
    SIZE,
    check_choice,
    check_divides,
    check_fields,
    checked,
)
from dilated_attention_pytorch.core.pattern import grid_rows, training_bytes, visible_pairs
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec
from dilated_attention_pytorch.parallel.costs import (
    MEMORY_BUDGET,
    branch_traffic,
    check_scheme,
    choose_scheme,
    message_bytes,
)
from dilated_attention_pytorch.parallel.sharding import (
    TOKEN_LAYOUTS,
    Shards,
    SharedSegment,
    local_calls,
)
from dilated_attention_pytorch.parallel.wire import Traffic, Wire, wires_of

DTYPES = ("bfloat16", "float16", "float32", "float64")
# What kernels reach on an H200 in bfloat16 with heads of 64, and one 400-gigabit port per GPU.
TFLOPS, LINK_GBPS = 400.0, 400.0
BACKWARD_WORK = 2.5  # of the forward's
_TABLE = {"least": 1, "most": MOST_ENTRIES}


@dataclass(frozen=True, kw_only=True)
class Job:
    """An attention layer, its sequence, and the machines that `make_plan` plans for.

    `tflops` is the rate at which a GPU computes attention's own FLOPs; `link_gbps` the gigabits per second that it
    sends while it receives equally many.
    """

    spec: DilatedSpec
    tokens: int
    gpus: int
    heads: int = setting(12, "query heads", range=_TABLE)
    kv_heads: int | None = setting(None, "key/value heads (default: the query heads)", range=_TABLE)
    head_dim: int = setting(64, "features per head")
    dtype: str = setting("bfloat16", "bfloat16, float16, float32 or float64")
    batch: int = setting(1, "sequences")
    layers: int = setting(1, "attention layers", range=COUNT)
    is_causal: bool = setting(False, "a row sees only itself and earlier rows", flag="causal")
    scheme: str = setting("auto", "auto, gather, ring or all_to_all")
    memory_budget: int = setting(MEMORY_BUDGET, "bytes that auto may use for gathered rows", range=SIZE)
    token_layout: str = setting("contiguous", "contiguous or zigzag shards")
    tflops: float = setting(TFLOPS, "TFLOP/s of attention per GPU; in bfloat16 an H200 reaches 400", range=POSITIVE)
    link_gbps: float = setting(
        LINK_GBPS, "gigabits per second that a GPU sends while it receives as many", range=POSITIVE
    )

    def __post_init__(self) -> None:
        check_fields(self, tokens=COUNT, gpus=_TABLE)
        check_divides("kv_heads", self.key_heads, "heads", self.heads)
        check_choice("dtype", self.dtype, DTYPES)
        check_scheme(self.scheme, self.token_layout)

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def call(self) -> Call:
        return Call(spec=self.spec, is_causal=self.is_causal)

    def shards(self, token_layout: str | None = None) -> Shards:
        return Shards.cut(self.tokens, self.gpus, token_layout or self.token_layout)


@dataclass(frozen=True)
class BranchPlan:
    """One branch: how its rows travel, on how many ranks a segment lies at most, and each rank's bytes."""

    branch: Branch
    scheme: str | None  # None: nothing travels
    ranks: int
    forward: tuple[Traffic, ...]
    backward: tuple[Traffic, ...]


@dataclass(frozen=True)
class RankPlan:
    """One rank: bytes of one layer, but `saved`, of all; FLOPs and seconds of one forward and one backward of a layer.

    `saved` is q, k, v, out and lse; `gradients` those of q, k, v and out, and delta. Modelled: `sums`, float32 totals
    of what is in a shorter dtype; `workspace`, what attending to rows of other ranks takes; the seconds.
    """

    tokens: int
    saved: int
    gradients: int
    messages_forward: int
    messages_backward: int
    sums: int
    workspace: int
    forward: Traffic
    backward: Traffic
    flops: int
    flops_on_fetched: int
    seconds_forward: float
    seconds_backward: float

    @property
    def peak(self) -> int:
        """In the last layer's backward, when all layers' tensors are saved."""
        return self.saved + self.gradients + self.messages_backward + self.sums + self.workspace


@dataclass(frozen=True)
class Plan:
    job: Job
    branches: tuple[BranchPlan, ...]
    ranks: tuple[RankPlan, ...]
    balance: dict[str, float]
    """The busiest rank's work over the mean, by token layout."""

    @property
    def fullest(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def step_seconds(self) -> float:
        """Forward and backward of all layers; a step waits for its slowest rank."""
        slowest = (max(getattr(rank, f"seconds_{stage}") for rank in self.ranks) for stage in ("forward", "backward"))
        return self.job.layers * sum(slowest)


@checked()
def make_plan(job: Job) -> Plan:
    """Everything about a job, for every rank.

    >>> plan = make_plan(Job(spec=DilatedSpec.of([8192, 1_048_576], [1, 512]), tokens=1_048_576, gpus=64))
    >>> [(branch.scheme, branch.forward[0].received) for branch in plan.branches]
    [(None, 0), ('gather', 6193152)]
    """
    shards = job.shards()
    documents = [(range(job.batch), 0, job.tokens)]
    shape = (job.heads, job.key_heads, job.head_dim, job.itemsize)
    shared = {index: (segments, wire) for index, segments, wire in wires_of(job.call, shards, documents, *shape)}
    schemes = {i: choose_scheme(job.scheme, wire, found, job.memory_budget) for i, (found, wire) in shared.items()}
    everyone = range(job.gpus)
    branches = []
    for index, branch in enumerate(job.spec.branches):
        found, wire = shared.get(index, ((), None))
        traffic: list[tuple[Traffic, ...]] = [(Traffic(0, 0),) * job.gpus] * 2
        if wire is not None:
            traffic = [
                tuple(branch_traffic(schemes[index], wire, found, rank, backward=backward) for rank in everyone)
                for backward in (False, True)
            ]
        ranks = max((len({shards.rank_of(chunk) for chunk in segment.ranks}) for segment in found), default=1)
        branches.append(BranchPlan(branch, schemes.get(index) if ranks > 1 else None, ranks, *traffic))
    exchanges = [(index, schemes[index], wire, segments) for index, (segments, wire) in shared.items()]
    done = tuple(_rank(job, shards, branches, exchanges, rank) for rank in everyone)
    return Plan(job, tuple(branches), done, {layout: _balance(job, layout) for layout in TOKEN_LAYOUTS})


Exchanges = Sequence[tuple[int, str, Wire, Sequence[SharedSegment]]]
"""Branch, scheme, and what it shares."""


def _rank(job: Job, shards: Shards, branches: Sequence[BranchPlan], exchanges: Exchanges, rank: int) -> RankPlan:
    tokens, one, keys = job.batch * shards.tokens_of(rank), job.head_dim, job.key_heads
    saved = tokens * (2 * (job.heads + keys) * one * job.itemsize + 4 * job.heads)
    both = training_bytes(tokens, job.heads, one, kv_heads=keys, itemsize=job.itemsize)
    mine = []
    for index, scheme, wire, segments in exchanges:
        found = [segment for segment in segments if segment.chunks_of(rank)]
        if found:
            mine.append((index, scheme, wire, found))
    messages = [
        sum(message_bytes(scheme, wire, found, rank, backward=backward) for _, scheme, wire, found in mine)
        for backward in (False, True)
    ]
    workspaces = (_workspace(scheme, wire, s, rank) for _, scheme, wire, found in mine for s in found)
    forward, backward = (
        sum((getattr(branch, stage)[rank] for branch in branches), start=Traffic(0, 0))
        for stage in ("forward", "backward")
    )
    pairs, on_fetched = _pairs(job, shards, rank), 0
    for _, scheme, wire, found in mine:
        came = sum(_fetched_pairs(scheme, wire, segment, rank) for segment in found)
        on_fetched += came
        if scheme == "all_to_all":  # some heads of all rows of these segments, instead of all heads of its own rows
            pairs += came - sum(_pairs_in(wire, segment, rank) for segment in found)
    alone = pairs - on_fetched
    return RankPlan(
        tokens=shards.tokens_of(rank),
        saved=job.layers * saved,
        gradients=both - saved,
        messages_forward=messages[0],
        messages_backward=messages[1],
        sums=_sums(job, shards, mine, rank),
        workspace=max(workspaces, default=0),
        forward=forward,
        backward=backward,
        flops=4 * one * pairs,
        flops_on_fetched=4 * one * on_fetched,
        seconds_forward=_seconds(job, alone, on_fetched, forward, Traffic(0, 0)),
        seconds_backward=_seconds(
            job, BACKWARD_WORK * alone, BACKWARD_WORK * on_fetched, forward, _less(backward, forward)
        ),
    )


def _sums(job: Job, shards: Shards, mine: Exchanges, rank: int) -> int:
    """dq, dk and dv of the shard in float32, if they are of a shorter dtype, and those of one more call beside them."""
    if not mine:
        return 0
    swapped = frozenset(index for index, scheme, _, _ in mine if scheme == "all_to_all")
    table = job.call.offsets(job.heads, job.key_heads)
    documents = [(range(job.batch), 0, job.tokens)]
    calls = sorted(
        len(local.at)
        for chunk in shards.chunks_of(rank)
        for local in local_calls(job.spec, table, shards, documents, job.batch, chunk, swapped)
    )
    whole = calls and calls[-1] == shards.tokens_of(rank)
    beside = max(calls[:-1] if whole else calls, default=0)
    sums = max(4, job.itemsize)
    tokens = beside + (shards.tokens_of(rank) if job.itemsize < sums else 0)
    return job.batch * tokens * (job.heads + 2 * job.key_heads) * job.head_dim * sums


def _pairs(job: Job, shards: Shards, rank: int) -> int:
    """The (query, key) pairs of a rank's query rows, over all branches and query heads."""
    pairs = 0
    for branch, offsets in zip(job.spec.branches, job.call.offsets(job.heads, job.key_heads)):
        for offset, heads in Counter(offsets).items():
            for start, stop in map(shards.bounds, shards.chunks_of(rank)):
                seen = visible_pairs(branch, offset, job.tokens, is_causal=job.is_causal, start=start, stop=stop)
                pairs += heads * seen
    return job.batch * pairs * (job.heads // job.key_heads)


def _pairs_in(wire: Wire, segment: SharedSegment, rank: int, *, fetched: bool = False) -> int:
    """The pairs of a rank's query rows in a shared segment: all, or those whose keys lie on other chunks."""
    pairs, length = 0, segment.stop - segment.start
    for offset, heads in Counter(o for o in wire.offsets if o is not None).items():
        for chunk in segment.chunks_of(rank):
            start, stop = (position - segment.start for position in segment.held(chunk))
            earlier, until, every = (
                grid_rows(position, wire.branch.dilation_rate, offset) for position in (start, stop, length)
            )
            mine = until - earlier
            own = mine * (mine + 1) // 2 if wire.is_causal else mine * mine
            other = mine * (earlier if wire.is_causal else every - mine)
            pairs += heads * (other if fetched else own + other)
    return len(segment.rows) * pairs * wire.groups


def _fetched_pairs(scheme: str, wire: Wire, segment: SharedSegment, rank: int) -> int:
    """The pairs that a rank can compute only when rows of other chunks have come."""
    if scheme != "all_to_all":
        return _pairs_in(wire, segment, rank, fetched=True)
    share, length = wire.head_share(segment, rank), segment.stop - segment.start
    whole = Branch(length, wire.branch.dilation_rate)
    pairs = sum(
        heads * visible_pairs(whole, offset, length, is_causal=wire.is_causal)
        for offset, heads in Counter(wire.offsets[share.start : share.stop]).items()
    )
    return len(segment.rows) * pairs * wire.groups


def _workspace(scheme: str, wire: Wire, segment: SharedSegment, rank: int) -> int:
    """Copies in float32 of the rows of one offset that attend and are attended to, and gradients of both, backward."""
    most, rate = 0, wire.branch.dilation_rate
    for offset, heads in Counter(o for o in wire.offsets if o is not None).items():
        width = len(segment.rows) * heads * wire.head_dim
        if scheme == "all_to_all":
            rows = sum(len(segment.grid(chunk, rate, offset)) for chunk in segment.ranks)
            width = -(-width // len(segment.ranks))
            most = max(most, rows * width * (4 * wire.itemsize + 3 * wire.sum_itemsize))
            continue
        sees = segment.fetched_by(rank, wire.is_causal)
        blocks = [len(segment.grid(chunk, rate, offset)) for chunk in sees]
        keys = max(blocks, default=0) if scheme == "ring" else sum(blocks)
        queries = max(len(segment.grid(chunk, rate, offset)) for chunk in segment.chunks_of(rank))
        copies = 2 * wire.itemsize if scheme == "gather" and len(blocks) > 1 else 0
        working = wire.sum_itemsize if wire.itemsize < wire.sum_itemsize else 0
        per_key = copies + 2 * working + 4 * wire.sum_itemsize  # k, v; their gradients, in all and of one call
        per_query = 3 * working + wire.sum_itemsize  # q, do, out; dq
        most = max(most, width * (keys * per_key + queries * per_query))
    return most


def _less(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(max(0, one.sent - other.sent), max(0, one.received - other.received))


def _seconds(job: Job, alone: float, on_fetched: float, fetched: Traffic, returned: Traffic) -> float:
    """Rows come while the rank computes its own pairs; then it attends to them; then gradients go home."""
    link = job.link_gbps * 1e9 / 8
    own, later = (4 * job.head_dim * pairs / (job.tflops * 1e12) for pairs in (alone, on_fetched))
    return max(own, max(fetched) / link) + later + max(returned) / link


def _balance(job: Job, layout: str) -> float:
    work = [_pairs(job, job.shards(layout), rank) for rank in range(job.gpus)]
    return max(work) * len(work) / sum(work)
