"""Schemes: which rows of a shared segment travel to which rank, what that costs exactly, and the rule that chooses one.

- gather: in a single round, each rank sends its rows of K and V to every rank that sees them. `2(R - 1)u` bytes
  arrive, with `u` the bytes of one rank's rows of K and R the number of ranks.
- ring: the same rows go from rank to rank. In round t a rank has the rows of the rank t places before it. The bytes are
  those of gather; memory is that of two ranks' rows, one in use and one on its way, for any number of ranks. Under
  causality rows only go forward, to the segment's last rank.
- all-to-all: each rank sends its rows of Q, K and V to the ranks that compute their heads, and gets its rows of out
  and lse back: `4u(R - 1)/R` bytes and the lse arrive. The ranks must divide the key/value heads.

Backward, the rows travel again rather than being kept, and their gradients return to their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from dilated_attention_pytorch.core.checks import NOT_NEGATIVE, check_choice, check_whole, checked
from dilated_attention_pytorch.parallel.sharding import SharedSegment, check_token_layout
from dilated_attention_pytorch.parallel.wire import Rows, Traffic, Wire

Scheme = Literal["auto", "gather", "ring", "all_to_all"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
# What the gathered rows of one branch may take on a rank before they go round a ring instead.
MEMORY_BUDGET = 2 << 30

Messages = list[tuple[Rows, int]]
"""Rows, and the rank that they go to or come from."""


class Round(NamedTuple):
    """Messages of one rank that are under way together.

    Results of the rows that it receives go to their owners; those of its own rows return from where they were computed.
    """

    sends: Messages
    receives: Messages
    returns: Messages


def _gather(wire: Wire, segment: SharedSegment, rank: int) -> list[Round]:
    causal = wire.is_causal
    sends = [(Rows(chunk), to) for chunk in segment.chunks_of(rank) for to in segment.viewers(chunk, causal)]
    receives = [(Rows(chunk), segment.shards.rank_of(chunk)) for chunk in segment.fetched_by(rank, causal)]
    return [Round(sends, receives, returns=sends)]


def _ring(wire: Wire, segment: SharedSegment, rank: int) -> list[Round]:
    ranks, size, causal = segment.ranks, len(segment.ranks), wire.is_causal
    at = ranks.index(rank)
    before, after = ranks[at - 1], ranks[(at + 1) % size]
    rounds = []
    for hop in range(1, size):
        # Under causality nothing passes from the last rank to the first.
        sends = [(Rows(ranks[at - hop + 1]), after)] if not causal or hop - 1 <= at < size - 1 else []
        receives = [(Rows(ranks[at - hop]), before)] if not causal or hop <= at else []
        returns = [(Rows(rank), ranks[(at + hop) % size])] if not causal or at + hop < size else []
        rounds.append(Round(sends, receives, returns))
    return rounds


def _all_to_all(wire: Wire, segment: SharedSegment, rank: int) -> list[Round]:
    others = [other for other in segment.ranks if other != rank]
    sends = [(Rows(rank, wire.head_share(segment, other)), other) for other in others]
    receives = [(Rows(other, wire.head_share(segment, rank)), other) for other in others]
    return [Round(sends, receives, returns=sends)]


def rounds_of(scheme: str, wire: Wire, segment: SharedSegment, rank: int) -> list[Round]:
    """The rounds of a rank for a shared segment; none if it holds nothing of it. Only gather allows several chunks."""
    if not segment.chunks_of(rank):
        return []
    plan = {"gather": _gather, "ring": _ring, "all_to_all": _all_to_all}[scheme]
    return plan(wire, segment, rank)


@checked()
def branch_traffic(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], rank: int, *, backward: bool = False
) -> Traffic:
    """The bytes that a rank sends and receives for one branch."""
    check_choice("scheme", scheme, SCHEMES[1:])
    check_whole("rank", rank, least=0, most=wire.shards.size - 1)
    out, back = _bytes_per_row(scheme, wire, backward)
    traffic = Traffic(0, 0)
    for segment in segments:
        for one in rounds_of(scheme, wire, segment, rank):
            sent, received, returned = (_count(wire, segment, messages) for messages in one)
            traffic += Traffic(sent * out + received * back, received * out + returned * back)
    return traffic


def message_bytes(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], rank: int, *, backward: bool = False
) -> int:
    """The peak memory of one branch's message buffers on a rank, forward or backward."""
    out, back = _bytes_per_row(scheme, wire, backward)
    total = 0
    for segment in segments:
        most = returning = 0  # returning: results of the round before, on their way
        rounds = rounds_of(scheme, wire, segment, rank)
        received = [_count(wire, segment, one.receives) for one in rounds]
        for number, (one, came) in enumerate(zip(rounds, received)):
            if number == 0:  # the rank's own rows leave, in one buffer for all ranks that they go to
                most = (sum(wire.count(segment, rows) for rows in {rows for rows, _ in one.sends}) + came) * out
            beside = (came + sum(received[number + 1 : number + 2])) * out  # what came, and what is coming
            found, returns = came * back, _count(wire, segment, one.returns) * back
            most = max(most, beside + found + max(returning, returns))
            returning = found + returns
        total += most
    return total


def _count(wire: Wire, segment: SharedSegment, messages: Messages) -> int:
    return sum(wire.count(segment, rows) for rows, _ in messages)


def _bytes_per_row(scheme: str, wire: Wire, backward: bool) -> tuple[int, int]:
    """Bytes per (row, key/value head) that travel to where they are needed, and bytes of the results that return.

    Gradients and lse travel in the dtype that they are summed in.
    """
    heads, row, summed_row = wire.groups, wire.itemsize * wire.head_dim, wire.sum_itemsize * wire.head_dim
    if scheme != "all_to_all":  # k, v; dk, dv
        return 2 * row, 2 * summed_row if backward else 0
    if backward:  # q, k, v, do, lse, delta; dq, dk, dv
        return 2 * (heads + 1) * row + 2 * heads * wire.sum_itemsize, (heads + 2) * summed_row
    return (heads + 2) * row, heads * (row + wire.sum_itemsize)  # q, k, v; out, lse


def _why_not_all_to_all(wire: Wire, segments: Sequence[SharedSegment]) -> str | None:
    for segment in segments:
        if len(wire.offsets) % len(segment.ranks):
            return (
                f"segment [{segment.start}, {segment.stop}) of branch {wire.branch} lies on {len(segment.ranks)} "
                f"ranks, which do not divide the {len(wire.offsets)} key/value heads"
            )
    return None


def check_scheme(scheme: str, token_layout: str = "contiguous") -> None:
    """Refuse an unknown scheme, or one that the token layout does not allow."""
    check_choice("scheme", scheme, SCHEMES)
    check_token_layout(token_layout)
    if token_layout != "contiguous" and scheme not in ("auto", "gather"):
        raise ValueError(
            f"scheme {scheme!r} needs contiguous shards, got token_layout={token_layout!r}: pass scheme='gather', or "
            "leave token_layout out"
        )


@checked(budget=NOT_NEGATIVE)
def choose_scheme(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], budget: int = MEMORY_BUDGET, *, kept_tiles: bool = False
) -> str:
    """The scheme that runs a branch with shared segments; the same on every rank, since it weighs all of them.

    all_to_all where the ranks divide the heads and the busiest rank then receives less than by gather; else gather
    where the gathered rows fit the budget on every rank; else ring. A scheme given by name is taken, or refused with a
    reason. Kept tiles and the zigzag layout take gather, or raise an error where it does not fit.
    """
    if not segments:
        raise ValueError("a scheme is chosen for segments that ranks share, got none")
    zigzag = wire.shards.ranks is not None
    check_scheme(scheme, "zigzag" if zigzag else "contiguous")
    reason = _why_not_all_to_all(wire, segments)
    if scheme == "all_to_all" and reason is not None:
        raise ValueError(f"scheme 'all_to_all' cannot take this call: {reason}; gather or ring can")
    if scheme != "auto":
        return scheme
    ranks = {wire.shards.rank_of(chunk) for segment in segments for chunk in segment.ranks}

    def most_received(scheme: str) -> int:
        return max(branch_traffic(scheme, wire, segments, rank).received for rank in ranks)

    gathered = most_received("gather")
    must_gather = zigzag or kept_tiles
    if reason is None and not must_gather and most_received("all_to_all") < gathered:
        return "all_to_all"
    if gathered <= budget:
        return "gather"
    if must_gather:
        what, way_out = "token_layout 'zigzag'", "leave shards contiguous, whose rows can go round a ring"
        if kept_tiles:
            what, way_out = "a block layout", "leave sparse_config out"
        raise ValueError(
            f"gathered rows of branch {wire.branch} take {gathered} bytes on a rank, over the memory_budget of "
            f"{budget}, and {what} only gathers: raise memory_budget, or {way_out}"
        )
    return "ring"
