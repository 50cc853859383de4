"""What a shared segment costs on the wire and in memory under each scheme, exactly, and the rule that chooses one.

With `u` the bytes of one rank's grid rows of K, and R ranks, a rank receives forward `2(R - 1)u` by gather and by ring,
and `4u(R - 1)/R` and the rows' lse by all-to-all. Under causality earlier ranks need nothing of later ones, and gather
and ring leave that out. Gradients and lse travel in the dtype they are summed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from dilated_attention_pytorch.core.checks import NOT_NEGATIVE, check_choice, check_whole, checked
from dilated_attention_pytorch.core.spec import Branch, Call
from dilated_attention_pytorch.parallel.sharding import (
    Document,
    Shards,
    SharedSegment,
    check_token_layout,
    shared_segments,
)

Scheme = Literal["auto", "gather", "ring", "all_to_all"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
# What gathered rows of one branch may take on a rank before they hop round a ring instead.
MEMORY_BUDGET = 2 << 30


class Traffic(NamedTuple):
    """Bytes."""

    sent: int
    received: int

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]
        return Traffic(self.sent + other[0], self.received + other[1])


@dataclass(frozen=True)
class Wire:
    """What one branch of a call puts on the wire: offsets of its key/value heads, and the sizes of what travels."""

    branch: Branch
    offsets: tuple[int | None, ...]
    groups: int  # query heads a key/value head
    head_dim: int
    itemsize: int
    sum_itemsize: int
    is_causal: bool
    shards: Shards

    def rows(self, segment: SharedSegment, rank: int, heads: range | None = None) -> int:
        """The (batch row, grid row, key/value head) triples that a rank holds, of all heads or of some."""
        mine = self.offsets if heads is None else self.offsets[heads.start : heads.stop]
        rate = self.branch.dilation_rate
        counts = {o: len(segment.grid(self.shards, rank, rate, o)) for o in {*mine} if o is not None}
        return len(segment.rows) * sum(counts[o] for o in mine if o is not None)

    def bytes_of(self, segment: SharedSegment, rank: int) -> int:
        """`u`: a rank's grid rows of K."""
        place = segment.rows.start, segment.start, rank
        if place not in self._bytes:
            self._bytes[place] = self.rows(segment, rank) * self.head_dim * self.itemsize
        return self._bytes[place]

    @cached_property
    def _bytes(self) -> dict[tuple[int, int, int], int]:
        """Sums over ranks of sums over ranks ask for the same bytes again and again."""
        return {}

    def head_share(self, segment: SharedSegment, rank: int) -> range:
        """The key/value heads that a rank computes under all-to-all."""
        share = len(self.offsets) // len(segment.ranks)
        index = segment.ranks.index(rank)
        return range(index * share, (index + 1) * share)


def wires_of(
    call: Call,
    shards: Shards,
    documents: Sequence[Document],
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> Iterator[tuple[int, tuple[SharedSegment, ...], Wire]]:
    """The branches of a call that pieces share, by number, each with its shared segments."""
    for index, (branch, offsets) in enumerate(zip(call.spec.branches, call.offsets(heads, kv_heads))):
        segments = shared_segments(branch, shards, documents)
        if segments and any(offset is not None for offset in offsets):
            groups = heads // kv_heads
            sums = max(4, itemsize)
            yield index, segments, Wire(branch, offsets, groups, head_dim, itemsize, sums, call.is_causal, shards)


def sources(segment: SharedSegment, rank: int, is_causal: bool) -> list[int]:
    """The other ranks whose rows a rank's queries see; the other pieces, where a rank holds several."""
    return [j for j in segment.ranks if j != rank and (j < rank or not is_causal)]


def viewers(segment: SharedSegment, rank: int, is_causal: bool) -> list[int]:
    """The other ranks whose queries see a rank's rows; the other pieces, where a rank holds several."""
    return [j for j in segment.ranks if j != rank and (j > rank or not is_causal)]


def held_pieces(shards: Shards, segment: SharedSegment, rank: int) -> list[int]:
    """The pieces of a segment that a rank holds."""
    return [piece for piece in shards.pieces_of(rank) if piece in segment.ranks]


def fetched_pieces(shards: Shards, segment: SharedSegment, rank: int, is_causal: bool) -> list[int]:
    """The pieces of other ranks that a rank's queries see: each comes once, whichever of its own pieces see it."""
    mine = held_pieces(shards, segment, rank)
    seen = sources(segment, mine[-1], is_causal) if mine else []
    return [piece for piece in seen if shards.rank_of(piece) != rank]


def addressees(shards: Shards, segment: SharedSegment, piece: int, is_causal: bool) -> list[int]:
    """The other ranks whose queries see a piece's rows."""
    ranks = {shards.rank_of(viewer) for viewer in viewers(segment, piece, is_causal)}
    return sorted(ranks - {shards.rank_of(piece)})


def neighbours(segment: SharedSegment, rank: int, is_causal: bool) -> tuple[int | None, int | None]:
    """The ranks before and after one on the ring; under causality nothing goes from the last one to the first."""
    at, ranks = segment.ranks.index(rank), segment.ranks
    before = ranks[at - 1] if at or not is_causal else None
    after = ranks[(at + 1) % len(ranks)] if at + 1 < len(ranks) or not is_causal else None
    return before, after


def segment_traffic(scheme: str, wire: Wire, segment: SharedSegment, rank: int, *, backward: bool) -> Traffic:
    """The bytes that a rank sends and receives for one shared segment, forward or backward."""
    return {"gather": _gather, "ring": _ring, "all_to_all": _all_to_all}[scheme](wire, segment, rank, backward)


def _gather(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> Traffic:
    mine, theirs = _gathered(wire, segment, rank)
    if not backward:
        return Traffic(mine, theirs)
    # The rows come again, and their gradients go back.
    return Traffic(mine + _summed(wire, theirs), theirs + _summed(wire, mine))


def _gathered(wire: Wire, segment: SharedSegment, rank: int) -> tuple[int, int]:
    """The bytes of K and V that a rank sends, as often as it sends them, and those that it fetches."""
    shards, causal = wire.shards, wire.is_causal
    mine = held_pieces(shards, segment, rank)
    sent = sum(2 * wire.bytes_of(segment, i) * len(addressees(shards, segment, i, causal)) for i in mine)
    return sent, sum(2 * wire.bytes_of(segment, j) for j in fetched_pieces(shards, segment, rank, causal))


def _ring(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> Traffic:
    before, after = neighbours(segment, rank, wire.is_causal)
    arrive = [2 * wire.bytes_of(segment, j) for j in sources(segment, rank, wire.is_causal)]
    leave = [] if after is None else [2 * wire.bytes_of(segment, j) for j in sources(segment, after, wire.is_causal)]
    if not backward:
        return Traffic(sum(leave), sum(arrive))
    # Gradients of a block travel with it from its first visitor on, and from its last visitor home.
    carried = [2 * wire.bytes_of(segment, j) for j in sources(segment, rank, wire.is_causal) if j != before]
    if viewers(segment, rank, wire.is_causal):
        carried.append(2 * wire.bytes_of(segment, rank))
    return Traffic(sum(leave) + _summed(wire, sum(arrive)), sum(arrive) + _summed(wire, sum(carried)))


def _all_to_all(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> Traffic:
    others = [j for j in segment.ranks if j != rank]
    # (row, KV head) pairs: mine that others compute, and theirs that I compute
    out = sum(wire.rows(segment, rank, wire.head_share(segment, j)) for j in others)
    back = sum(wire.rows(segment, j, wire.head_share(segment, rank)) for j in others)
    there, again = _swapped(wire, backward)
    return Traffic(out * there + back * again, back * there + out * again)


def _swapped(wire: Wire, backward: bool) -> tuple[int, int]:
    """Bytes a (row, key/value head) under all-to-all: to the rank that computes it, and back."""
    heads, item, total = wire.groups, wire.itemsize * wire.head_dim, wire.sum_itemsize * wire.head_dim
    if backward:  # q, k, v, do, lse and delta there; dq, dk, dv back
        return 2 * (heads + 1) * item + 2 * heads * wire.sum_itemsize, (heads + 2) * total
    return (heads + 2) * item, heads * (item + wire.sum_itemsize)  # q, k, v there; out and lse back


def _summed(wire: Wire, size: int) -> int:
    return size // wire.itemsize * wire.sum_itemsize


@checked()
def branch_traffic(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], rank: int, *, backward: bool = False
) -> Traffic:
    """The bytes that a rank sends and receives for one branch."""
    check_choice("scheme", scheme, SCHEMES[1:])
    check_whole("rank", rank, least=0, most=wire.shards.size - 1)
    mine = [s for s in segments if held_pieces(wire.shards, s, rank)]
    traffic = (segment_traffic(scheme, wire, segment, rank, backward=backward) for segment in mine)
    return sum(traffic, start=Traffic(0, 0))


def gathered_bytes(wire: Wire, segments: Sequence[SharedSegment], rank: int) -> int:
    """The memory that other ranks' K and V take on a rank under gather."""
    return branch_traffic("gather", wire, segments, rank).received


def message_bytes(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], rank: int, *, backward: bool = False
) -> int:
    """The memory that message buffers of one branch take at once on a rank, forward or backward."""
    mine = [segment for segment in segments if held_pieces(wire.shards, segment, rank)]
    held = {"gather": _gather_buffers, "ring": _ring_buffers, "all_to_all": _all_to_all_buffers}[scheme]
    return sum(held(wire, segment, rank, backward) for segment in mine)


def _gather_buffers(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> int:
    sent, fetched = _gathered(wire, segment, rank)
    if backward:  # what was sent is gone when gradients of what came go back, and those of one's own come
        return fetched + _summed(wire, fetched) + _summed(wire, sent)
    mine = held_pieces(wire.shards, segment, rank)
    to_send = [i for i in mine if addressees(wire.shards, segment, i, wire.is_causal)]
    return fetched + sum(2 * wire.bytes_of(segment, i) for i in to_send)


def _ring_buffers(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> int:
    blocks = sorted(2 * wire.bytes_of(segment, j) for j in sources(segment, rank, wire.is_causal))
    own = 2 * wire.bytes_of(segment, rank) if viewers(segment, rank, wire.is_causal) else 0
    # One's own and the first; then the first, the one in use and the one that is coming.
    held = max(own + sum(blocks[-1:]), sum(blocks[-3:]))
    # The gradients found here, earlier visitors' of that block, and those that come: of the next block, or one's own.
    return held + (_summed(wire, max(own + sum(blocks[-2:]), sum(blocks[-3:]))) if backward else 0)


def _all_to_all_buffers(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> int:
    there, again = _swapped(wire, backward)
    here = sum(wire.rows(segment, j, wire.head_share(segment, rank)) for j in segment.ranks)
    away = wire.rows(segment, rank) - wire.rows(segment, rank, wire.head_share(segment, rank))
    # Rows that leave beside those that come; then these beside their results, and one's own that come back.
    return max((away + here) * there, here * (there + again) + away * again)


def why_not_all_to_all(wire: Wire, segments: Sequence[SharedSegment]) -> str | None:
    for segment in segments:
        if len(wire.offsets) % len(segment.ranks):
            return (
                f"segment [{segment.start}, {segment.stop}) of branch {wire.branch} lies on {len(segment.ranks)} "
                f"ranks, which do not divide the {len(wire.offsets)} key/value heads"
            )
    return None


def check_scheme(scheme: str, token_layout: str = "contiguous") -> None:
    """Refuse what is no scheme, or none for a layout of the tokens."""
    check_choice("scheme", scheme, SCHEMES)
    check_token_layout(token_layout)
    if token_layout != "contiguous" and scheme not in ("auto", "gather"):
        raise ValueError(
            f"scheme {scheme!r} takes contiguous shards, and token_layout is {token_layout!r}: pass scheme='gather', "
            "or leave token_layout out"
        )


def check_gathered(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], budget: int, what: str, way_out: str
) -> None:
    """Refuse what `auto` can only gather, and the budget does not let it."""
    gathered = max(gathered_bytes(wire, segments, rank) for rank in range(wire.shards.size))
    if scheme == "auto" and gathered > budget:
        raise ValueError(
            f"gathered rows of branch {wire.branch} take {gathered} bytes on a rank, over the memory_budget of "
            f"{budget}, and {what} only gathers: raise memory_budget, or {way_out}"
        )


@checked(budget=NOT_NEGATIVE)
def choose_scheme(scheme: str, wire: Wire, segments: Sequence[SharedSegment], budget: int = MEMORY_BUDGET) -> str:
    """The scheme that runs a branch with shared segments; the same on every rank, since it weighs all of them.

    all_to_all where the ranks divide the heads and the busiest rank then receives less than by gather; else gather
    where the gathered rows fit the budget on every rank; else ring. A scheme given by name is taken, or refused with a
    reason. In the zigzag layout it is gather, or an error where that does not fit.
    """
    if not segments:
        raise ValueError("a scheme is chosen for segments that ranks share, got none")
    if wire.shards.ranks is not None:
        check_scheme(scheme, "zigzag")
        way_out = "leave shards contiguous, whose rows can go round a ring"
        check_gathered(scheme, wire, segments, budget, "token_layout 'zigzag'", way_out)
        return "gather"
    check_scheme(scheme)
    reason = why_not_all_to_all(wire, segments)
    if scheme == "all_to_all" and reason is not None:
        raise ValueError(f"scheme 'all_to_all' cannot take this call: {reason}; gather or ring can")
    if scheme != "auto":
        return scheme
    ranks = {rank for segment in segments for rank in segment.ranks}
    gathered = max(gathered_bytes(wire, segments, rank) for rank in ranks)
    if reason is None and max(branch_traffic("all_to_all", wire, segments, r).received for r in ranks) < gathered:
        return "all_to_all"
    return "gather" if gathered <= budget else "ring"
