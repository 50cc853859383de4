"""Who holds what when a sequence is cut into pieces: pure mathematics, no tensors and no communication.

A rank holds one piece, its contiguous shard, or in the zigzag layout an early one and a late one. Positions are global.
A branch's segment that lies inside one piece is that rank's own affair; one that a boundary cuts is *shared*, and each
of its pieces holds some of its grid rows. Phases never restart at a piece: position `p` is on the grid when
`(p - segment start) mod r` is the head's offset.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal, get_args

from dilated_attention_pytorch.core.checks import (
    MOST_ENTRIES,
    MOST_LISTED,
    MOST_TOKENS,
    SIZE,
    check_choice,
    check_fields,
    check_sequence,
    check_whole,
    checked,
)
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, OffsetTable

TokenLayout = Literal["contiguous", "zigzag"]
TOKEN_LAYOUTS: tuple[str, ...] = get_args(TokenLayout)

Document = tuple[range, int, int]
"""The batch rows it stands in, its start and its end."""

Spans = tuple[tuple[int, int], ...]
"""`(start, end)` of documents in tokens of the shard: one a batch row, or any number in a single row."""


_LISTED = {"least": 0, "most": MOST_LISTED}  # tokens that are listed one by one
_RANKS = {"least": 1, "most": MOST_ENTRIES}


@checked(tokens=SIZE, ranks=_RANKS)
def even_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """The default cut: `ceil(tokens / ranks)` tokens a rank, and what is left for the last ones, down to none.

    >>> even_lengths(10, 4)
    (3, 3, 3, 1)
    """
    most = -(-tokens // ranks)
    return tuple(min(most, max(0, tokens - most * rank)) for rank in range(ranks))


def check_token_layout(layout: str) -> None:
    check_choice("token_layout", layout, TOKEN_LAYOUTS)


@dataclass(frozen=True)
class Shards:
    """A sequence cut into contiguous pieces of any lengths: one a rank, unless `ranks` says which rank has which.

    >>> Shards((3, 3, 1)).bounds(2)
    (6, 7)
    >>> zigzag = Shards.zigzag(16, 4)
    >>> zigzag.lengths, zigzag.ranks
    ((2, 2, 2, 4, 2, 2, 2), (0, 1, 2, 3, 2, 1, 0))
    >>> [(zigzag.bounds(piece), zigzag.held_at(piece)) for piece in zigzag.pieces_of(1)]
    [((2, 4), range(0, 2)), ((12, 14), range(2, 4))]
    """

    lengths: tuple[int, ...]
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, lengths=SIZE, ranks=SIZE)
        if not self.lengths:
            raise ValueError("shard lengths must have one entry per rank, got none")
        if self.ranks is not None and (
            len(self.ranks) != len(self.lengths) or {*self.ranks} != {*range(max(self.ranks) + 1)}
        ):
            raise ValueError(
                f"ranks must say for each of the {len(self.lengths)} pieces which rank has it, counted from 0 without "
                f"gaps, got {list(self.ranks)}"
            )

    @classmethod
    @checked(tokens=SIZE, ranks=_RANKS)
    def zigzag(cls, tokens: int, ranks: int) -> Shards:
        """The balanced layout; the last rank's two chunks follow each other, and are one piece."""
        chunks = even_lengths(tokens, 2 * ranks)
        middle = chunks[ranks - 1] + chunks[ranks]
        lengths = (*chunks[: ranks - 1], middle, *chunks[ranks + 1 :])
        return cls(lengths, (*range(ranks), *reversed(range(ranks - 1))))

    @classmethod
    def cut(cls, tokens: int, ranks: int, layout: str = "contiguous") -> Shards:
        """A sequence as a layout cuts it by default."""
        check_token_layout(layout)
        return cls.of((zigzag_lengths if layout == "zigzag" else even_lengths)(tokens, ranks), layout)

    @classmethod
    def of(cls, lengths: Sequence[int], layout: str = "contiguous") -> Shards:
        """The shards of ranks that have these many tokens each."""
        check_token_layout(layout)
        check_sequence("lengths", lengths, partial(check_whole, least=0, most=MOST_TOKENS))
        if layout == "contiguous":
            return cls(tuple(lengths))
        balanced = zigzag_lengths(sum(lengths), len(lengths))
        if tuple(lengths) != balanced:
            raise ValueError(
                f"token_layout 'zigzag' fixes the tokens of each rank, for {sum(lengths)} tokens {list(balanced)}, got "
                f"{list(lengths)}: cut the sequence by zigzag_order and zigzag_lengths"
            )
        return cls.zigzag(sum(lengths), len(lengths))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.lengths if self.ranks is None else self._pieces)

    def rank_of(self, piece: int) -> int:
        return piece if self.ranks is None else self.ranks[piece]

    def pieces_of(self, rank: int) -> tuple[int, ...]:
        """The pieces that a rank holds, in the order in which they follow each other in its tensors."""
        if self.ranks is None:
            return (rank,)
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for piece, rank in enumerate(self.ranks or ()):
            found[rank] = (*found.get(rank, ()), piece)
        return found

    def held_at(self, piece: int) -> range:
        """Where a piece stands among its rank's tokens."""
        before = sum(self.lengths[other] for other in self.pieces_of(self.rank_of(piece)) if other < piece)
        return range(before, before + self.lengths[piece])

    def tokens_of(self, rank: int) -> int:
        return sum(self.lengths[piece] for piece in self.pieces_of(rank))

    @cached_property
    def edges(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    @property
    def tokens(self) -> int:
        return self.edges[-1]

    def bounds(self, piece: int) -> tuple[int, int]:
        return self.edges[piece], self.edges[piece + 1]

    def holders(self, start: int, stop: int) -> tuple[int, ...]:
        """The pieces that have any of the positions `[start, stop)`."""
        first = bisect_right(self.edges, start) - 1
        last = bisect_left(self.edges, stop)
        return tuple(piece for piece in range(first, last) if self.lengths[piece])


@dataclass(frozen=True)
class SharedSegment:
    """A segment `[start, stop)` of the batch rows `rows` that lies on more than one piece.

    `ranks` are its pieces, which in contiguous shards are ranks; so is each `rank` here.
    """

    rows: range
    start: int
    stop: int
    ranks: tuple[int, ...]

    def held(self, shards: Shards, rank: int) -> tuple[int, int]:
        """The piece of it that a rank holds."""
        first, last = shards.bounds(rank)
        return max(self.start, first), min(self.stop, last)

    def grid(self, shards: Shards, rank: int, rate: int, offset: int) -> range:
        """The positions on a head's grid that a rank holds.

        >>> SharedSegment(range(1), 0, 12, (0, 1)).grid(Shards((5, 7)), 1, 4, 1)
        range(5, 12, 4)
        """
        first, last = self.held(shards, rank)
        return range(first + (offset - (first - self.start)) % rate, last, rate)


@checked()
def shared_segments(branch: Branch, shards: Shards, documents: Sequence[Document]) -> tuple[SharedSegment, ...]:
    """The segments of a branch that shard boundaries cut, in one order for all ranks.

    >>> [(s.start, s.stop, s.ranks) for s in shared_segments(Branch(4, 1), Shards((6, 6)), [(range(1), 0, 12)])]
    [(4, 8, (0, 1))]
    """
    w = branch.segment_length
    found = []
    for rows, start, end in documents:
        inner = shards.edges[bisect_right(shards.edges, start) : bisect_left(shards.edges, end)]
        cut = sorted({(edge - start) // w for edge in inner if (edge - start) % w})
        for first in (start + index * w for index in cut):
            stop = min(first + w, end)
            ranks = shards.holders(first, stop)
            if len(ranks) > 1:
                found.append(SharedSegment(rows, first, stop, ranks))
    return tuple(found)


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


@dataclass(frozen=True)
class LocalCall:
    """What a rank computes alone, as one call of an engine on some tokens of its shard: their rows against their keys.

    `at` are those tokens, and `spans` the documents in them, None for whole rows. `table` shifts the offsets of a
    branch where the shard begins within a segment.
    """

    at: range
    spans: Spans | None
    table: OffsetTable


def local_calls(
    spec: DilatedSpec,
    table: OffsetTable,
    shards: Shards,
    documents: Sequence[Document],
    batch: int,
    rank: int,
    without_shared: frozenset[int] = frozenset(),
) -> tuple[LocalCall, ...]:
    """The calls that compute each of a rank's rows against the keys it holds, each pair once; of a piece's likewise.

    The tokens of a shard from the first boundary of a segment on are documents as on a single device. What comes before
    that is the rest of a segment that began on an earlier rank: a document with shifted offsets. Branches that cut a
    shard alike share a call. Of the branches in `without_shared` the pieces of shared segments are left out.
    """
    calls: dict[Spans, list[tuple[int | None, ...]]] = {}
    absent = tuple(None for _ in table[0])
    for index, branch in enumerate(spec.branches):
        pieces = _pieces(branch, shards, documents, rank, index not in without_shared)
        for shift, spans in _spans_by_shift(pieces, batch):
            shifted = tuple(None if o is None else (o - shift) % branch.dilation_rate for o in table[index])
            if any(o is not None for o in shifted):
                calls.setdefault(spans, [absent] * len(table))[index] = shifted
    return tuple(_local_call(spans, tuple(rows), batch) for spans, rows in calls.items())


def _local_call(spans: Spans, table: OffsetTable, batch: int) -> LocalCall:
    """A call on no more tokens than it computes, because results are as long as a call's tokens."""
    first = min(start for start, end in spans if start < end)
    last = max(end for _, end in spans)
    moved = tuple((start - first, end - first) if start < end else (0, 0) for start, end in spans)
    return LocalCall(range(first, last), None if moved == ((0, last - first),) * batch else moved, table)


def _pieces(
    branch: Branch, shards: Shards, documents: Sequence[Document], rank: int, with_shared: bool
) -> list[tuple[range, int, int, int]]:
    """`(batch rows, start, end, shift)` in tokens of the shard; each piece's segments start at its own start."""
    w, r = branch.segment_length, branch.dilation_rate
    first, last = shards.bounds(rank)
    pieces = []
    for rows, start, end in documents:
        begin, stop = max(start, first), min(end, last)
        if begin >= stop:
            continue
        boundary = min(begin + -(begin - start) % w, stop)  # where the first segment starts that the shard begins
        cut = stop if stop == end else max(boundary, stop - (stop - start) % w)  # from here on it is shared
        if begin < boundary and with_shared:
            pieces.append((rows, begin - first, boundary - first, (begin - start) % w % r))
        if boundary < (stop if with_shared else cut):
            pieces.append((rows, boundary - first, (stop if with_shared else cut) - first, 0))
    return pieces


def _spans_by_shift(pieces: list[tuple[range, int, int, int]], batch: int) -> list[tuple[int, Spans]]:
    """Pieces as the engines take them: several documents only in a single row, else one a row, (0, 0) for none."""
    if batch == 1:
        rows_of: dict[int, list[tuple[int, int]]] = {}
        for _, start, end, shift in pieces:
            rows_of.setdefault(shift, []).append((start, end))
        return [(shift, tuple(sorted(spans))) for shift, spans in rows_of.items()]
    layers: dict[tuple[int, bool], dict[int, tuple[int, int]]] = {}
    for rows, start, end, shift in pieces:
        # What continues an earlier rank's segment and what follows it stand in one row: two calls, even at one shift.
        layers.setdefault((shift, start == 0), {}).update(dict.fromkeys(rows, (start, end)))
    return [(shift, tuple(taken.get(row, (0, 0)) for row in range(batch))) for (shift, _), taken in layers.items()]


def zigzag_chunks(ranks: int) -> tuple[int, ...]:
    """The order of `2 * ranks` equal chunks of a sequence in which rank k gets chunks `k` and `2 * ranks - 1 - k`.

    Under causality the row at `p` of a global branch sees about `p` keys: a rank that has one early chunk and its late
    mirror image has as much work as any other, where contiguous shards leave the last rank with nearly twice the mean.

    >>> zigzag_chunks(3)
    (0, 5, 1, 4, 2, 3)
    """
    return tuple(chunk for k in range(ranks) for chunk in (k, 2 * ranks - 1 - k))


@checked(tokens=_LISTED, ranks=_RANKS)
def zigzag_order(tokens: int, ranks: int) -> list[int]:
    """The tokens in rank order: entry `i` is the token that stands at place `i` when balanced shards follow each other.

    Chunks are `ceil(tokens / (2 * ranks))` long, the last ones shorter; `zigzag_lengths` has the shards' lengths.

    >>> zigzag_order(8, 2)
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    edges = Shards(even_lengths(tokens, 2 * ranks)).edges
    return [token for chunk in zigzag_chunks(ranks) for token in range(edges[chunk], edges[chunk + 1])]


@checked(tokens=_LISTED, ranks=_RANKS)
def zigzag_places(tokens: int, ranks: int) -> list[int]:
    """The inverse of `zigzag_order`: entry `t` is the place of token `t`."""
    places = [0] * tokens
    for place, token in enumerate(zigzag_order(tokens, ranks)):
        places[token] = place
    return places


@checked(tokens=SIZE, ranks=_RANKS)
def zigzag_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """How many tokens each rank has in rank order.

    >>> zigzag_lengths(7, 2)
    (3, 4)
    """
    chunks = even_lengths(tokens, 2 * ranks)
    return tuple(chunks[k] + chunks[2 * ranks - 1 - k] for k in range(ranks))
