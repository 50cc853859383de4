"""Who holds what when a sequence is cut into contiguous shards: pure mathematics, no tensors and no communication.

Positions are global. A branch's segment that lies inside one shard is that rank's own affair; one that a shard boundary
cuts is *shared*, and each of its ranks holds some of its grid rows. Phases never restart at a shard: position `p` is on
the grid when `(p - segment start) mod r` is the head's offset.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, OffsetTable

Document = tuple[range, int, int]
"""The batch rows it stands in, its start and its end."""

Spans = tuple[tuple[int, int], ...]
"""`(start, end)` of documents in tokens of the shard: one a batch row, or any number in a single row."""


def even_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """The default cut: `ceil(tokens / ranks)` tokens a rank, and what is left for the last ones, down to none.

    >>> even_lengths(10, 4)
    (3, 3, 3, 1)
    """
    most = -(-tokens // ranks)
    return tuple(min(most, max(0, tokens - most * rank)) for rank in range(ranks))


@dataclass(frozen=True)
class Shards:
    """A sequence cut into contiguous pieces, one a rank, of any lengths.

    >>> Shards((3, 3, 1)).bounds(2)
    (6, 7)
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or any(length < 0 for length in self.lengths):
            raise ValueError(f"shard lengths must be whole numbers from 0 on, one a rank, got {list(self.lengths)}")

    @cached_property
    def edges(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    @property
    def tokens(self) -> int:
        return self.edges[-1]

    def bounds(self, rank: int) -> tuple[int, int]:
        return self.edges[rank], self.edges[rank + 1]

    def holders(self, start: int, stop: int) -> tuple[int, ...]:
        """The ranks that hold any of the positions `[start, stop)`."""
        first = bisect_right(self.edges, start) - 1
        last = bisect_left(self.edges, stop)
        return tuple(rank for rank in range(first, last) if self.lengths[rank])


@dataclass(frozen=True)
class SharedSegment:
    """A segment `[start, stop)` of the batch rows `rows` that more than one rank holds a piece of."""

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


@dataclass(frozen=True)
class LocalCall:
    """What a rank computes alone, as one call of an engine on its shard: its rows against its own keys.

    `spans` is None for whole rows. `table` shifts the offsets of a branch where the shard begins within a segment.
    """

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
    """The calls that compute each of a rank's rows against the keys it holds, each pair once.

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
    first, last = shards.bounds(rank)
    whole = ((0, last - first),) * batch
    return tuple(LocalCall(None if spans == whole else spans, tuple(rows)) for spans, rows in calls.items())


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


def zigzag_order(tokens: int, ranks: int) -> list[int]:
    """The tokens in rank order: entry `i` is the token that stands at place `i` when balanced shards follow each other.

    Chunks are `ceil(tokens / (2 * ranks))` long, the last ones shorter; `zigzag_lengths` has the shards' lengths.

    >>> zigzag_order(8, 2)
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    edges = Shards(even_lengths(tokens, 2 * ranks)).edges
    return [token for chunk in zigzag_chunks(ranks) for token in range(edges[chunk], edges[chunk + 1])]


def zigzag_places(tokens: int, ranks: int) -> list[int]:
    """The inverse of `zigzag_order`: entry `t` is the place of token `t`."""
    places = [0] * tokens
    for place, token in enumerate(zigzag_order(tokens, ranks)):
        places[token] = place
    return places


def zigzag_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """How many tokens each rank has in rank order.

    >>> zigzag_lengths(7, 2)
    (3, 4)
    """
    chunks = even_lengths(tokens, 2 * ranks)
    return tuple(chunks[k] + chunks[2 * ranks - 1 - k] for k in range(ranks))
