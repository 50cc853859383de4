"""What a shared segment costs on the wire and in memory under each scheme, exactly, and the rule that chooses one.

With `u` the bytes of one rank's grid rows of K, and R ranks, a rank receives forward `2(R - 1)u` by gather and by ring,
and `4u(R - 1)/R` and the rows' lse by all-to-all. Under causality earlier ranks need nothing of later ones, and gather
and ring leave that out. Gradients and lse travel in the dtype they are summed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from dilated_attention_pytorch.core.checks import NOT_NEGATIVE, check_choice, check_whole, checked
from dilated_attention_pytorch.parallel.gather import Round, gather_rounds
from dilated_attention_pytorch.parallel.ring import ring_rounds
from dilated_attention_pytorch.parallel.sharding import SharedSegment, check_token_layout
from dilated_attention_pytorch.parallel.wire import Traffic, Wire

Scheme = Literal["auto", "gather", "ring", "all_to_all"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
# What the gathered rows of one branch may take on a rank before they go round a ring instead.
MEMORY_BUDGET = 2 << 30


@checked()
def branch_traffic(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], rank: int, *, backward: bool = False
) -> Traffic:
    """The bytes that a rank sends and receives for one branch."""
    check_choice("scheme", scheme, SCHEMES[1:])
    check_whole("rank", rank, least=0, most=wire.shards.size - 1)
    traffic = Traffic(0, 0)
    for segment in _shared_by(wire, segments, rank):
        if scheme == "all_to_all":
            traffic += _all_to_all(wire, segment, rank, backward)
            continue
        for one in _rounds(scheme, wire, segment, rank):
            sent, received, returned = (_bytes(wire, segment, chunks) for chunks in one)
            traffic += Traffic(sent, received)
            if backward:  # the rows come again, and their gradients go back
                traffic += Traffic(_summed(wire, received), _summed(wire, returned))
    return traffic


def message_bytes(
    scheme: str, wire: Wire, segments: Sequence[SharedSegment], rank: int, *, backward: bool = False
) -> int:
    """The memory that message buffers of one branch take at once on a rank, forward or backward."""
    held = _all_to_all_buffers if scheme == "all_to_all" else _buffers_of_rounds
    return sum(held(scheme, wire, segment, rank, backward) for segment in _shared_by(wire, segments, rank))


def gathered_bytes(wire: Wire, segments: Sequence[SharedSegment], rank: int) -> int:
    """The memory that other ranks' K and V take on a rank under gather."""
    return branch_traffic("gather", wire, segments, rank).received


def _shared_by(wire: Wire, segments: Sequence[SharedSegment], rank: int) -> list[SharedSegment]:
    return [segment for segment in segments if segment.chunks_of(rank)]


def _rounds(scheme: str, wire: Wire, segment: SharedSegment, rank: int) -> list[Round]:
    plan = {"gather": gather_rounds, "ring": ring_rounds}[scheme]
    return plan(segment, rank, wire.is_causal)


def _bytes(wire: Wire, segment: SharedSegment, messages: Sequence[tuple[int, int]]) -> int:
    """The bytes of K and V in some messages."""
    return sum(2 * wire.bytes_of(segment, chunk) for chunk, _ in messages)


def _summed(wire: Wire, size: int) -> int:
    """The bytes of the gradients of so many bytes of rows."""
    return size // wire.itemsize * wire.sum_itemsize


def _buffers_of_rounds(scheme: str, wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> int:
    rounds = _rounds(scheme, wire, segment, rank)
    held = sum(2 * wire.bytes_of(segment, chunk) for chunk in {chunk for chunk, _ in rounds[0].sends})
    received = [_bytes(wire, segment, one.receives) for one in rounds]
    most = held + received[0]
    returning = 0  # gradients of the round before, on their way
    for number, (one, came) in enumerate(zip(rounds, received)):
        beside = came + sum(received[number + 1 : number + 2])  # what came, and what is coming
        if backward:
            found, back = _summed(wire, came), _summed(wire, _bytes(wire, segment, one.returns))
            most = max(most, beside + found + max(returning, back))
            returning = found + back
        else:
            most = max(most, beside)
    return most


def _all_to_all(wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> Traffic:
    others = [j for j in segment.ranks if j != rank]
    # (row, key/value head) pairs: mine that others compute, and theirs that I compute
    out = sum(wire.rows(segment, rank, wire.head_share(segment, j)) for j in others)
    back = sum(wire.rows(segment, j, wire.head_share(segment, rank)) for j in others)
    there, again = _swapped(wire, backward)
    return Traffic(out * there + back * again, back * there + out * again)


def _swapped(wire: Wire, backward: bool) -> tuple[int, int]:
    """Bytes per (row, key/value head) under all-to-all: to the rank that computes it, and back."""
    heads, item, total = wire.groups, wire.itemsize * wire.head_dim, wire.sum_itemsize * wire.head_dim
    if backward:  # q, k, v, do, lse and delta there; dq, dk, dv back
        return 2 * (heads + 1) * item + 2 * heads * wire.sum_itemsize, (heads + 2) * total
    return (heads + 2) * item, heads * (item + wire.sum_itemsize)  # q, k, v there; out and lse back


def _all_to_all_buffers(scheme: str, wire: Wire, segment: SharedSegment, rank: int, backward: bool) -> int:
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
