"""What one attention layer costs on any number of GPUs: bytes, memory and work, and the time they take at given rates.

Bytes, messages and work come from the functions that the ranks themselves use. Figures that need a rate, or a guess at
how kernels work inside, are called modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from dilated_attention_pytorch.core.pattern import training_bytes, visible_pairs
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec
from dilated_attention_pytorch.parallel.schemes import (
    MEMORY_BUDGET,
    branch_traffic,
    check_scheme,
    choose_scheme,
    message_bytes,
)
from dilated_attention_pytorch.parallel.sharding import TOKEN_LAYOUTS, Document, Shards, SharedSegment, local_calls
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

    @property
    def documents(self) -> list[Document]:
        return [(range(self.batch), 0, self.tokens)]

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
    """One rank: bytes, FLOPs of a forward pass and seconds, of one layer each, except that `saved` is of all layers.

    `saved` is q, k, v, out and lse; `gradients` are those of q, k, v and out, and delta. These are modelled: `sums`,
    float32 totals of tensors in a shorter dtype; `workspace`, for attending to rows of other ranks; the seconds.
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
        """Bytes in the backward pass of the last layer, when the tensors of all layers are saved."""
        return self.saved + self.gradients + self.messages_backward + self.sums + self.workspace


@dataclass(frozen=True)
class Plan:
    """What a job costs on every rank; `make_plan` makes it.

    >>> plan = make_plan(Job(spec=DilatedSpec.of([8192, 1_048_576], [1, 512]), tokens=1_048_576, gpus=64))
    >>> print(f"at most {plan.fullest.peak / 2**30:.2f} GiB on a rank")
    at most 0.36 GiB on a rank
    """

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
        slowest = (max(getattr(rank, f"seconds_{name}") for rank in self.ranks) for name in ("forward", "backward"))
        return self.job.layers * sum(slowest)


class _Shared(NamedTuple):
    """A branch that ranks share, and the segments that all of them, or one of them, share."""

    scheme: str
    wire: Wire
    segments: Sequence[SharedSegment]
    branch: int


@checked()
def make_plan(job: Job) -> Plan:
    """Plan a job: the bytes, memory, work and time of every rank.

    >>> plan = make_plan(Job(spec=DilatedSpec.of([8192, 1_048_576], [1, 512]), tokens=1_048_576, gpus=64))
    >>> [(branch.scheme, branch.forward[0].received) for branch in plan.branches]
    [(None, 0), ('gather', 6193152)]
    """
    shards = job.shards()
    shape = (job.heads, job.key_heads, job.head_dim, job.itemsize)
    shared = {
        index: _Shared(choose_scheme(job.scheme, wire, segments, job.memory_budget), wire, segments, index)
        for index, segments, wire in wires_of(job.call, shards, job.documents, *shape)
    }
    branches = []
    for index, branch in enumerate(job.spec.branches):
        one = shared.get(index)
        ranks = 1 if one is None else max(len({*map(shards.rank_of, segment.ranks)}) for segment in one.segments)
        traffic = (
            tuple(
                Traffic(0, 0) if one is None else branch_traffic(*one[:3], rank, backward=backward)
                for rank in range(job.gpus)
            )
            for backward in (False, True)
        )
        branches.append(BranchPlan(branch, None if one is None or ranks == 1 else one.scheme, ranks, *traffic))
    done = tuple(_rank(job, shards, branches, [*shared.values()], rank) for rank in range(job.gpus))
    return Plan(job, tuple(branches), done, {layout: _balance(job, layout) for layout in TOKEN_LAYOUTS})


def _rank(job: Job, shards: Shards, branches: Sequence[BranchPlan], shared: Sequence[_Shared], rank: int) -> RankPlan:
    tokens = job.batch * shards.tokens_of(rank)
    saved = tokens * (2 * (job.heads + job.key_heads) * job.head_dim * job.itemsize + 4 * job.heads)
    both = training_bytes(tokens, job.heads, job.head_dim, kv_heads=job.key_heads, itemsize=job.itemsize)
    held = (one._replace(segments=[s for s in one.segments if s.chunks_of(rank)]) for one in shared)
    mine = [one for one in held if one.segments]
    pairs, on_fetched = _pairs(job, shards, rank), 0
    for one in mine:
        for segment in one.segments:
            own_rows, fetched = _pairs_in(one.wire, segment, rank)
            if one.scheme == "all_to_all":  # some heads of all rows, instead of all heads of the rank's own rows
                fetched = _pairs_of_heads(one.wire, segment, rank)
                pairs += fetched - own_rows
            on_fetched += fetched
    forward, backward = (
        sum((getattr(branch, name)[rank] for branch in branches), start=Traffic(0, 0))
        for name in ("forward", "backward")
    )
    returned = Traffic(*(max(0, one - other) for one, other in zip(backward, forward)))
    flops = 4 * job.head_dim
    alone, later = flops * (pairs - on_fetched), flops * on_fetched
    return RankPlan(
        tokens=shards.tokens_of(rank),
        saved=job.layers * saved,
        gradients=both - saved,
        messages_forward=sum(message_bytes(*one[:3], rank, backward=False) for one in mine),
        messages_backward=sum(message_bytes(*one[:3], rank, backward=True) for one in mine),
        sums=_sums(job, shards, mine, rank),
        workspace=max((_workspace(one.scheme, one.wire, s, rank) for one in mine for s in one.segments), default=0),
        forward=forward,
        backward=backward,
        flops=flops * pairs,
        flops_on_fetched=later,
        seconds_forward=_seconds(job, alone, later, forward, Traffic(0, 0)),
        seconds_backward=_seconds(job, BACKWARD_WORK * alone, BACKWARD_WORK * later, forward, returned),
    )


def _sums(job: Job, shards: Shards, mine: Sequence[_Shared], rank: int) -> int:
    """Bytes of dq, dk and dv in float32, if their own dtype is shorter, and of the gradients of one call at a time."""
    if not mine:
        return 0
    swapped = frozenset(one.branch for one in mine if one.scheme == "all_to_all")
    table = job.call.offsets(job.heads, job.key_heads)
    calls = sorted(
        len(local.at)
        for chunk in shards.chunks_of(rank)
        for local in local_calls(job.spec, table, shards, job.documents, job.batch, chunk, swapped)
    )
    tokens, itemsize = shards.tokens_of(rank), max(4, job.itemsize)
    beside = max(calls[:-1] if calls[-1:] == [tokens] else calls, default=0)
    summed = beside + (tokens if job.itemsize < itemsize else 0)
    return job.batch * summed * (job.heads + 2 * job.key_heads) * job.head_dim * itemsize


def _pairs(job: Job, shards: Shards, rank: int) -> int:
    """The (query, key) pairs of a rank's query rows, over all branches and query heads."""
    pairs = 0
    for branch, offsets in zip(job.spec.branches, job.call.offsets(job.heads, job.key_heads)):
        for offset, heads in Counter(offsets).items():
            for start, stop in map(shards.bounds, shards.chunks_of(rank)):
                seen = visible_pairs(branch, offset, job.tokens, is_causal=job.is_causal, start=start, stop=stop)
                pairs += heads * seen
    return job.batch * pairs * (job.heads // job.key_heads)


def _pairs_in(wire: Wire, segment: SharedSegment, rank: int) -> tuple[int, int]:
    """The pairs of a rank's query rows in a shared segment: all, and those whose keys lie on other chunks."""
    pairs, fetched, length = 0, 0, segment.stop - segment.start
    whole = Branch(length, wire.branch.dilation_rate)
    for offset, heads in Counter(o for o in wire.offsets if o is not None).items():
        for chunk in segment.chunks_of(rank):
            start, stop = (position - segment.start for position in segment.held(chunk))
            seen = visible_pairs(whole, offset, length, is_causal=wire.is_causal, start=start, stop=stop)
            rows = len(segment.grid(chunk, whole.dilation_rate, offset))
            pairs += heads * seen
            fetched += heads * (seen - (rows * (rows + 1) // 2 if wire.is_causal else rows * rows))
    several = len(segment.rows) * wire.groups
    return several * pairs, several * fetched


def _pairs_of_heads(wire: Wire, segment: SharedSegment, rank: int) -> int:
    """The pairs of all rows of a shared segment and the heads that a rank computes under all-to-all."""
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


def _seconds(job: Job, alone: float, on_fetched: float, fetched: Traffic, returned: Traffic) -> float:
    """Rows come while the rank computes its own pairs; then it attends to them; then gradients return."""
    link, rate = job.link_gbps * 1e9 / 8, job.tflops * 1e12
    return max(alone / rate, max(fetched) / link) + on_fetched / rate + max(returned) / link


def _balance(job: Job, layout: str) -> float:
    work = [_pairs(job, job.shards(layout), rank) for rank in range(job.gpus)]
    return max(work) * len(work) / sum(work)
