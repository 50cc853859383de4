"""Who holds what when a sequence is cut into shards: pure mathematics, no tensors and no communication.

A rank's shard is one chunk of contiguous tokens, or in the zigzag layout an early and a late chunk. Positions are
global. A segment that lies inside one chunk concerns its rank alone. A segment that a boundary cuts is *shared*: each
of its chunks holds some of its grid rows. Phases never restart at a chunk: position `p` is on the grid when
`(p - segment start) mod r` is the head's offset.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

from dilated_attention_pytorch.core.checks import MOST_ENTRIES, MOST_LISTED, SIZE, check_choice, check_fields, checked
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, OffsetTable

TokenLayout = Literal["contiguous", "zigzag"]
TOKEN_LAYOUTS: tuple[str, ...] = get_args(TokenLayout)

Document = tuple[range, int, int]
"""Its batch rows, its start and its end."""

Spans = tuple[tuple[int, int], ...]
"""`(start, end)` of documents in tokens of the shard: one per batch row, or any number in a single row."""


_LISTED = {"least": 0, "most": MOST_LISTED}  # tokens that are listed one by one
_RANKS = {"least": 1, "most": MOST_ENTRIES}


@checked(tokens=SIZE, ranks=_RANKS)
def even_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """The default cut: `ceil(tokens / ranks)` tokens per rank, and what is left for the last ones, down to none.

    >>> even_lengths(10, 4)
    (3, 3, 3, 1)
    """
    most = -(-tokens // ranks)
    return tuple(min(most, max(0, tokens - most * rank)) for rank in range(ranks))


def check_token_layout(layout: str) -> None:
    check_choice("token_layout", layout, TOKEN_LAYOUTS)


@dataclass(frozen=True)
class Shards:
    """A sequence cut into contiguous chunks of any lengths: one per rank, unless `ranks` says which rank has which.

    >>> Shards((3, 3, 1)).bounds(2)
    (6, 7)
    >>> zigzag = Shards.zigzag(16, 4)
    >>> zigzag.lengths, zigzag.ranks
    ((2, 2, 2, 4, 2, 2, 2), (0, 1, 2, 3, 2, 1, 0))
    >>> [(zigzag.bounds(chunk), zigzag.held_at(chunk)) for chunk in zigzag.chunks_of(1)]
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
                f"ranks must say for each of the {len(self.lengths)} chunks which rank has it, counted from 0 without "
                f"gaps, got {list(self.ranks)}"
            )

    @classmethod
    @checked(tokens=SIZE, ranks=_RANKS)
    def zigzag(cls, tokens: int, ranks: int) -> Shards:
        """The balanced layout; the last rank's two chunks follow each other, and are one."""
        chunks = even_lengths(tokens, 2 * ranks)
        middle = chunks[ranks - 1] + chunks[ranks]
        lengths = (*chunks[: ranks - 1], middle, *chunks[ranks + 1 :])
        return cls(lengths, (*range(ranks), *reversed(range(ranks - 1))))

    @classmethod
    def cut(cls, tokens: int, ranks: int, layout: str = "contiguous") -> Shards:
        """A sequence as a layout cuts it by default."""
        check_token_layout(layout)
        return cls.zigzag(tokens, ranks) if layout == "zigzag" else cls(even_lengths(tokens, ranks))

    @classmethod
    @checked(lengths=SIZE)
    def of(cls, lengths: Sequence[int], layout: str = "contiguous") -> Shards:
        """The shards of ranks with these numbers of tokens."""
        check_token_layout(layout)
        if layout == "contiguous":
            return cls(tuple(lengths))
        shards = cls.zigzag(sum(lengths), len(lengths))
        balanced = [*map(shards.tokens_of, range(len(lengths)))]
        if [*lengths] != balanced:
            raise ValueError(
                f"token_layout 'zigzag' fixes the tokens of each rank, for {sum(lengths)} tokens {balanced}, got "
                f"{list(lengths)}: cut the sequence by zigzag_order and zigzag_lengths"
            )
        return shards

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._chunks)

    def rank_of(self, chunk: int) -> int:
        return chunk if self.ranks is None else self.ranks[chunk]

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks that a rank holds, in the order in which they follow each other in its tensors."""
        return self._chunks[rank]

    @cached_property
    def _chunks(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for chunk in range(len(self.lengths)):
            found.setdefault(self.rank_of(chunk), []).append(chunk)
        return found

    def held_at(self, chunk: int) -> range:
        """Where a chunk lies among its rank's tokens."""
        before = sum(self.lengths[other] for other in self.chunks_of(self.rank_of(chunk)) if other < chunk)
        return range(before, before + self.lengths[chunk])

    def tokens_of(self, rank: int) -> int:
        return sum(self.lengths[chunk] for chunk in self.chunks_of(rank))

    @cached_property
    def edges(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    @property
    def tokens(self) -> int:
        return self.edges[-1]

    def bounds(self, chunk: int) -> tuple[int, int]:
        return self.edges[chunk], self.edges[chunk + 1]

    def holders(self, start: int, stop: int) -> tuple[int, ...]:
        """The chunks that have any of the positions `[start, stop)`."""
        first = bisect_right(self.edges, start) - 1
        last = bisect_left(self.edges, stop)
        return tuple(chunk for chunk in range(first, last) if self.lengths[chunk])


@dataclass(frozen=True)
class SharedSegment:
    """A segment `[start, stop)` of the batch rows `rows` that lies on several chunks of the shards.

    `ranks` are those chunks; in contiguous shards they are ranks.

    >>> SharedSegment(range(1), 0, 12, (0, 1), Shards((5, 7))).grid(1, rate=4, offset=1)
    range(5, 12, 4)
    """

    rows: range
    start: int
    stop: int
    ranks: tuple[int, ...]
    shards: Shards

    def held(self, chunk: int) -> tuple[int, int]:
        """What a chunk holds of the segment."""
        first, last = self.shards.bounds(chunk)
        return max(self.start, first), min(self.stop, last)

    def grid(self, chunk: int, rate: int, offset: int) -> range:
        """The positions on a head's grid that a chunk holds."""
        first, last = self.held(chunk)
        return range(first + (offset - (first - self.start)) % rate, last, rate)

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks of the segment that a rank holds."""
        return [chunk for chunk in self.shards.chunks_of(rank) if chunk in self.ranks]

    def sources(self, chunk: int, is_causal: bool) -> list[int]:
        """The other chunks whose rows a chunk's queries see."""
        return [other for other in self.ranks if other != chunk and (other < chunk or not is_causal)]

    def fetched_by(self, rank: int, is_causal: bool) -> list[int]:
        """The chunks of other ranks that a rank's queries see: each comes once, whichever of its own chunks see it."""
        mine = self.chunks_of(rank)
        seen = self.sources(mine[-1], is_causal) if mine else []
        return [chunk for chunk in seen if self.shards.rank_of(chunk) != rank]

    def viewers(self, chunk: int, is_causal: bool) -> list[int]:
        """The other ranks whose queries see a chunk's rows."""
        others = {self.shards.rank_of(other) for other in self.ranks if other > chunk or not is_causal}
        return sorted(others - {self.shards.rank_of(chunk)})


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
                found.append(SharedSegment(rows, first, stop, ranks, shards))
    return tuple(found)


@dataclass(frozen=True)
class LocalTokens:
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
    chunk: int,
    without_shared: frozenset[int] = frozenset(),
) -> tuple[LocalTokens, ...]:
    """The calls that compute each of a chunk's rows against the keys in the chunk, each pair once.

    From the first start of a segment on, the chunk's tokens are documents as on a single device. What comes before is
    the rest of a segment that began on an earlier chunk: a document with shifted offsets. Branches that cut the chunk
    alike share a call. Of the branches in `without_shared`, shared segments are left out.
    """
    calls: dict[Spans, list[tuple[int | None, ...]]] = {}
    absent = tuple(None for _ in table[0])
    for index, branch in enumerate(spec.branches):
        runs = _runs(branch, shards, documents, chunk, index not in without_shared)
        for shift, spans in _spans_by_shift(runs, batch):
            shifted = tuple(None if o is None else (o - shift) % branch.dilation_rate for o in table[index])
            if any(o is not None for o in shifted):
                calls.setdefault(spans, [absent] * len(table))[index] = shifted
    return tuple(_local_tokens(spans, tuple(rows), batch) for spans, rows in calls.items())


def _local_tokens(spans: Spans, table: OffsetTable, batch: int) -> LocalTokens:
    """A call on no more tokens than it computes, because results are as long as a call's tokens."""
    first = min(start for start, end in spans if start < end)
    last = max(end for _, end in spans)
    moved = tuple((start - first, end - first) if start < end else (0, 0) for start, end in spans)
    return LocalTokens(range(first, last), None if moved == ((0, last - first),) * batch else moved, table)


def _runs(
    branch: Branch, shards: Shards, documents: Sequence[Document], chunk: int, with_shared: bool
) -> list[tuple[range, int, int, int]]:
    """`(batch rows, start, end, shift)` in tokens of the chunk; the segments of each run start at its own start."""
    w, r = branch.segment_length, branch.dilation_rate
    first, last = shards.bounds(chunk)
    runs = []
    for rows, start, end in documents:
        begin, stop = max(start, first), min(end, last)
        if begin >= stop:
            continue
        boundary = min(begin + -(begin - start) % w, stop)  # where the first segment starts that the chunk begins
        cut = stop if stop == end else max(boundary, stop - (stop - start) % w)  # from here on it is shared
        if begin < boundary and with_shared:
            runs.append((rows, begin - first, boundary - first, (begin - start) % w % r))
        if boundary < (stop if with_shared else cut):
            runs.append((rows, boundary - first, (stop if with_shared else cut) - first, 0))
    return runs


def _spans_by_shift(runs: list[tuple[range, int, int, int]], batch: int) -> list[tuple[int, Spans]]:
    """Runs as the engines take them: several documents only in a single row, else one per row, (0, 0) for none."""
    if batch == 1:
        rows_of: dict[int, list[tuple[int, int]]] = {}
        for _, start, end, shift in runs:
            rows_of.setdefault(shift, []).append((start, end))
        return [(shift, tuple(sorted(spans))) for shift, spans in rows_of.items()]
    layers: dict[tuple[int, bool], dict[int, tuple[int, int]]] = {}
    for rows, start, end, shift in runs:
        # What continues an earlier rank's segment and what follows it stand in one row: two calls, even at one shift.
        layers.setdefault((shift, start == 0), {}).update(dict.fromkeys(rows, (start, end)))
    return [(shift, tuple(taken.get(row, (0, 0)) for row in range(batch))) for (shift, _), taken in layers.items()]


@checked(tokens=_LISTED, ranks=_RANKS)
def zigzag_order(tokens: int, ranks: int) -> list[int]:
    """The tokens in rank order: entry `i` is the token at place `i` when the balanced shards follow each other.

    Of `2 * ranks` chunks of `ceil(tokens / (2 * ranks))` tokens, the last ones shorter, rank k has the chunks `k` and
    `2 * ranks - 1 - k`; `zigzag_lengths` gives the lengths of the shards. Under causality the row at `p` of a global
    branch sees about `p` keys: an early chunk and its late mirror image give all ranks equal work, whereas contiguous
    shards leave the last rank with nearly twice the mean.

    >>> zigzag_order(8, 2)
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    shards = Shards.zigzag(tokens, ranks)
    chunks = (chunk for rank in range(ranks) for chunk in shards.chunks_of(rank))
    return [token for chunk in chunks for token in range(*shards.bounds(chunk))]


@checked(tokens=_LISTED, ranks=_RANKS)
def zigzag_places(tokens: int, ranks: int) -> list[int]:
    """The inverse of `zigzag_order`: entry `t` is the place of token `t`."""
    order = zigzag_order(tokens, ranks)
    return sorted(range(tokens), key=order.__getitem__)


@checked(tokens=SIZE, ranks=_RANKS)
def zigzag_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """The number of tokens of each rank, in rank order.

    >>> zigzag_lengths(7, 2)
    (3, 4)
    """
    shards = Shards.zigzag(tokens, ranks)
    return tuple(map(shards.tokens_of, range(ranks)))
