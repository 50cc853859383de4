"""Where and in which order a team works in backward: who takes which key tile, which query tiles it meets, and when.

See `backward` for what teams and turns are.
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_N = gl.constexpr(128)  # rows of a key tile
TURNS_PER_UNIT = gl.constexpr(1 << 16)  # more than the key tiles of a segment: `launch.takes_branch`


class Sizes(NamedTuple):
    """What the functions of the backward kernel share. Heads are key/value heads, each of `group` query heads."""

    N: Any
    H: Any  # query heads
    W: Any
    rate: Any
    heads: Any  # on this branch, from first_head on
    first_head: Any
    rows: Any  # of the longest segment, rounded up to whole tiles
    slots_per_row: Any
    units: Any  # (segment, head) pairs
    teams: Any
    team_size: Any
    lag: Any
    group: Any
    skipped: Any  # and periods: see `core.folding`
    periods: Any


class Lists(NamedTuple):
    """What a block layout keeps: see `triton.block_sparse`."""

    grids: Any
    first: Any  # where each key tile's list of query tiles starts
    queries: Any
    turns: Any  # of each entry of `queries`: how many key tiles add to it before
    key_first: Any  # where each query tile's list of key tiles starts
    rows_per_batch_row: Any


@gluon.jit
def locate(unit, sizes, offsets, lines, DOCUMENTS: gl.constexpr):
    """`(batch row, head, first token, rows)` of the unit-th (segment, key/value head).

    Where documents have lengths, `lines` has a line for every segment: see `triton.documents`.
    """
    slot = unit // sizes.heads
    head = sizes.first_head + unit % sizes.heads
    offset = gl.load(offsets + head)
    if DOCUMENTS:
        line = lines + 8 + slot * 8
        b = gl.load(line)
        start = gl.load(line + 1)
        count = gl.load(line + 2) + gl.where(offset < gl.load(line + 3), 1, 0)
    else:
        b = slot // sizes.slots_per_row
        start = slot % sizes.slots_per_row * sizes.W
        length = gl.minimum(sizes.W, sizes.N - start)
        count = (length - offset + sizes.rate - 1) // sizes.rate
    count = gl.where(offset < 0, 0, count)
    return b, head, start + offset, count


@gluon.jit
def key_tile_of(round, member, team_size, key_tiles, SPARSE: gl.constexpr):
    """A member's key tile of a round, if that is below `key_tiles`.

    Back and forth, so that under causality all get as much to do. With a block layout from the last tile to the first.
    """
    if SPARSE:
        place = round * team_size + member
        return gl.where(place < key_tiles, key_tiles - 1 - place, key_tiles)
    return round * team_size + gl.where(round % 2 == 0, member, team_size - 1 - member)


class Hole(NamedTuple):
    """The query tiles that a key tile does not meet: from `begin` to before `end`."""

    begin: Any
    end: Any


@gluon.jit
def hole_of(key_tile, query_tiles, sizes, CAUSAL: gl.constexpr, FOLDED: gl.constexpr, BLOCK_M: gl.constexpr):
    """Under causality the query tiles before the key tile. Where rows are skipped, also those of its finer segment."""
    begin = key_tile * 0
    end = begin
    if CAUSAL:
        end = key_tile * BLOCK_N // BLOCK_M
    if FOLDED:
        own = key_tile * BLOCK_N // gl.maximum(sizes.skipped, 1) * sizes.skipped // BLOCK_M
        if not CAUSAL:
            begin = own
        end = gl.maximum(end, gl.minimum(own + sizes.skipped // BLOCK_M, query_tiles))
    return Hole(begin, end)


@gluon.jit
def steps_around(hole, query_tiles, group):
    """How many query tiles, over the heads of a group, are outside of a hole."""
    return group * (query_tiles - (hole.end - hole.begin))


@gluon.jit
def has_work(tile, tiles, steps, FOLDED: gl.constexpr):
    """Whether there is such a tile, and anything for it to meet."""
    if FOLDED:
        return (tile < tiles) & (steps > 0)
    else:
        return tile < tiles


@gluon.jit
def first_step(hole, query_tiles, member, sizes, FOLDED: gl.constexpr):
    """Where a member enters the ring of the group's query tiles: `(head within the group, query tile)`."""
    start = member * stride(query_tiles, sizes)
    return _outside(start // query_tiles, start % query_tiles, hole, query_tiles, sizes.group, FOLDED)


@gluon.jit
def next_query_tile(g, tile, hole, query_tiles, group, FOLDED: gl.constexpr):
    tile += 1
    leaves = tile == query_tiles
    g = gl.where(leaves, g + 1, g)
    return _outside(gl.where(g == group, 0, g), gl.where(leaves, 0, tile), hole, query_tiles, group, FOLDED)


@gluon.jit
def _outside(g, tile, hole, query_tiles, group, FOLDED: gl.constexpr):
    """The tile itself, or the first one behind the hole that it is in, of the next head if the hole is at the end."""
    tile = gl.where((tile >= hole.begin) & (tile < hole.end), hole.end, tile)
    if FOLDED:  # else the hole begins at tile 0 and never reaches the last tile
        leaves = tile == query_tiles
        g = gl.where(leaves, g + 1, g)
        g = gl.where(g == group, 0, g)
        tile = gl.where(leaves, gl.where(hole.begin == 0, hole.end, 0), tile)
    return g, tile


@gluon.jit
def stride(query_tiles, sizes):
    return gl.maximum(1, gl.minimum(sizes.lag, sizes.group * query_tiles // sizes.team_size))


@gluon.jit
def _own_key_tiles(tile, key_tiles, sizes, BLOCK_M: gl.constexpr):
    """The key tiles in a query tile's segment of the finer branch: the first, and the end."""
    first = tile * BLOCK_M // gl.maximum(sizes.skipped, 1) * sizes.skipped // BLOCK_N
    return first, gl.minimum(first + sizes.skipped // BLOCK_N, key_tiles)


@gluon.jit
def additions_to(tile, key_tiles, sizes, CAUSAL: gl.constexpr, FOLDED: gl.constexpr, BLOCK_M: gl.constexpr):
    """How many key tiles add to a query tile."""
    additions = key_tiles
    if CAUSAL:
        additions = gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // BLOCK_N + 1, key_tiles)
    if FOLDED:
        own, end = _own_key_tiles(tile, key_tiles, sizes, BLOCK_M)
        additions = gl.where(sizes.skipped > 0, own, additions) if CAUSAL else key_tiles - (end - own)
    return additions


@gluon.jit
def _overlap(low, high, begin, end):
    """How many numbers are in [low, high) and in [begin, end)."""
    return gl.maximum(gl.minimum(high, end) - gl.maximum(low, begin), 0)


@gluon.jit
def turn_of(
    g, tile, round, member, key_tiles, query_tiles, sizes,
    CAUSAL: gl.constexpr, FOLDED: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """How many additions to a query tile come before this member's of this round.

    All of the rounds before; and of this round those by the members that enter the ring between here and the tile:
    `near` is the last to enter before it, then come `near - 1`, ... 0, and, round the ring, the last member and so on.
    Under causality only some members of a round have a key tile that the query tile sees: `here` of them, the first
    ones or, in odd rounds, the last. Without causality, members whose key tile is in the query tile's own segment of
    the finer branch do not add: of all key tiles, those in [own, end).
    """
    team_size = sizes.team_size
    done = round * team_size  # key tiles of the rounds before
    last = key_tiles
    if CAUSAL:
        last = additions_to(tile, key_tiles, sizes, CAUSAL, FOLDED, BLOCK_M)
    before = gl.minimum(done, last)
    here = gl.minimum(gl.maximum(last - done, 0), team_size)
    odd = round % 2 == 1
    low = gl.where(odd, team_size - here, 0)  # the members that add are [low, high)
    high = gl.where(odd, team_size, here)
    near = gl.minimum((g * query_tiles + tile) // stride(query_tiles, sizes), team_size - 1)
    ahead = _overlap(member + 1, near + 1, low, high)  # members in (member, near]
    at_front = _overlap(0, near + 1, low, high)
    at_back = _overlap(member + 1, team_size, low, high)
    if FOLDED and not CAUSAL:
        own, end = _own_key_tiles(tile, key_tiles, sizes, BLOCK_M)
        before -= _overlap(0, done, own, end)
        low = gl.where(odd, done + team_size - end, own - done)  # the members that do not add are [low, high)
        high = gl.where(odd, done + team_size - own, end - done)
        ahead -= _overlap(member + 1, near + 1, low, high)
        at_front -= _overlap(0, near + 1, low, high)
        at_back -= _overlap(member + 1, team_size, low, high)
    return before + gl.where(member <= near, ahead, at_front + at_back)


@gluon.jit
def grid_of(lists, unit, g, sizes):
    """The first row, in a layout's lists, of the grid of a unit's segment and its g-th query head."""
    slot = unit // sizes.heads
    head = (sizes.first_head + unit % sizes.heads) * sizes.group + g
    grid = gl.load(lists.grids + slot % sizes.slots_per_row * sizes.H + head)
    return grid + slot // sizes.slots_per_row * lists.rows_per_batch_row


@gluon.jit
def listed(lists, grid, key_tile, query_tiles, BLOCK_M: gl.constexpr):
    """Where the list of the rows that keep a key tile starts, and how many query tiles of BLOCK_M rows it comes to."""
    PIECES: gl.constexpr = BLOCK_N // BLOCK_M
    row = grid + key_tile
    start = gl.load(lists.first + row)
    end = gl.load(lists.first + row + 1)
    # The last query tile of a segment may have fewer pieces, and can only end a list.
    ragged = query_tiles % PIECES != 0
    last = gl.load(lists.queries + end - 1, mask=ragged & (end > start), other=-1)
    return start, (end - start) * PIECES - gl.maximum((last + 1) * PIECES - query_tiles, 0)


@gluon.jit
def total_steps(lists, unit, left, key_tile, query_tiles, sizes, BLOCK_M: gl.constexpr):
    """How many query tiles a key tile meets over all heads of the group, `left` of them of the first."""
    total = left
    for g in range(1, sizes.group):
        _, steps = listed(lists, grid_of(lists, unit, g, sizes), key_tile, query_tiles, BLOCK_M)
        total += steps
    return total


@gluon.jit
def next_listed(lists, unit, g, start, at, left, key_tile, query_tiles, sizes, BLOCK_M: gl.constexpr):
    """The next step of a walk over lists, which exists: `(g, start, at, left)` after it, its entry and query tile."""
    PIECES: gl.constexpr = BLOCK_N // BLOCK_M
    while left == 0:  # this head's list is through
        g += 1
        at = 0
        start, left = listed(lists, grid_of(lists, unit, g, sizes), key_tile, query_tiles, BLOCK_M)
    entry = start + at // PIECES
    tile = gl.load(lists.queries + entry) * PIECES + at % PIECES
    return g, start, at + 1, left - 1, entry, tile
