"""How the programs of the forward kernel share out the tiles of query rows.

A *work* is a tile of query rows, or under causality a pair of them, taken one after the other. Program `i` of `P` has
the works number `i`, `i + P`, `i + 2 P` and so on.

Where documents have lengths (DOCUMENTS), works are lines of a list that `triton.documents` made: `segment` then counts
stretches of it of `tiles` lines (twice as many `tiles` as lines if causal), and all heads take a stretch before any
takes the next, so that they find its keys in L2.
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Sizes(NamedTuple):
    """What the functions of the forward kernel share. Heads are query heads."""

    N: Any
    H: Any
    W: Any
    rate: Any
    heads: Any  # on this branch, from first_head on
    first_head: Any
    tiles: Any  # of query rows per segment
    slots_per_row: Any
    batch: Any  # rows of the batch, or lines of the list
    programs: Any
    group: Any
    skipped: Any  # and periods: see `core.folding`
    periods: Any


class Work(NamedTuple):
    b: Any
    segment: Any
    head: Any
    place: Any


class Line(NamedTuple):
    """What must be loaded for a work: its head's offset, and its line of the list if there is one."""

    offset: Any
    b: Any
    start: Any
    rows: Any  # the segment's length, divided by the rate
    rest: Any
    near: Any


class Place(NamedTuple):
    """The grid rows of a work's segment and head: `count` tokens from `token` on."""

    b: Any
    head: Any
    token: Any
    count: Any


class Lists(NamedTuple):
    """What a block layout keeps: see `triton.block_sparse`."""

    grids: Any
    first: Any  # where each query tile's list of key tiles starts
    keys: Any
    rows_per_batch_row: Any


@gluon.jit
def _places(sizes, CAUSAL: gl.constexpr):
    return (sizes.tiles + 1) // 2 if CAUSAL else sizes.tiles


@gluon.jit
def work_at(number, sizes, CAUSAL: gl.constexpr):
    places = _places(sizes, CAUSAL)
    unit = number // places
    slot = unit // sizes.heads
    return Work(slot // sizes.slots_per_row, slot % sizes.slots_per_row, unit % sizes.heads, number % places)


@gluon.jit
def _later(work, step, sizes, CAUSAL: gl.constexpr):
    """The work that is `step`, itself written as a work, later: added like digits, as divisions take long."""
    places = _places(sizes, CAUSAL)
    place = work.place + step.place
    over = place >= places
    place = gl.where(over, place - places, place)
    head = work.head + (step.head + gl.where(over, 1, 0))
    over = head >= sizes.heads
    head = gl.where(over, head - sizes.heads, head)
    segment = work.segment + (step.segment + gl.where(over, 1, 0))
    over = segment >= sizes.slots_per_row
    segment = gl.where(over, segment - sizes.slots_per_row, segment)
    return Work(work.b + step.b + gl.where(over, 1, 0), segment, head, place)


@gluon.jit
def next_work(work, second, step, sizes, CAUSAL: gl.constexpr):
    """What a program does after a work, or after the first tile of a pair: a work, and whether it is at the second."""
    if CAUSAL:
        later = _later(work, step, sizes, CAUSAL)
        stays = second == 0
        b = gl.where(stays, work.b, later.b)
        segment = gl.where(stays, work.segment, later.segment)
        head = gl.where(stays, work.head, later.head)
        place = gl.where(stays, work.place, later.place)
        return Work(b, segment, head, place), second ^ 1
    else:
        return _later(work, step, sizes, CAUSAL), second


@gluon.jit
def exists(work, sizes, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Whether there is such a work, or it and all later ones are past the last."""
    if DOCUMENTS:
        return work.segment * _places(sizes, CAUSAL) < sizes.batch  # other heads may have more of this stretch
    else:
        return work.b < sizes.batch


@gluon.jit
def line_of(work, offsets, lines, sizes, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr):
    """`offsets` has one for every query head."""
    offset = gl.load(offsets + sizes.first_head + work.head)
    if DOCUMENTS:
        number = work.segment * _places(sizes, CAUSAL) + work.place
        line = lines + 8 + number * 8
        here = number < sizes.batch
        b = gl.load(line, mask=here, other=0)
        start = gl.load(line + 1, mask=here, other=0)
        rows = gl.load(line + 2, mask=here, other=0)
        rest = gl.load(line + 3, mask=here, other=0)
        return Line(offset, b, start, rows, rest, gl.load(line + 4, mask=here, other=0))
    else:
        return Line(offset, work.b, work.segment, work.segment, work.segment, work.place)


@gluon.jit
def tile_of(line, second, sizes, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr):
    """The query tile of a work.

    Under causality a program takes two tiles in a row, one from either end of a segment, so that all get as much to do.
    A tile in the middle is its own partner: then the second one is the tile behind the last one, which has no rows.
    """
    if CAUSAL:
        tiles = sizes.tiles
        if DOCUMENTS:
            # At least one, also past the last line, where it has no rows.
            tiles = gl.maximum((line.rows + gl.where(line.rest > 0, 1, 0) + BLOCK_M - 1) // BLOCK_M, 1)
        far = tiles - 1 - line.near
        return gl.where(second == 0, far, gl.where(line.near == far, tiles, line.near))
    else:
        return line.near


@gluon.jit
def segment_rows(sizes):
    """The lengths of a whole segment and of a batch row's last one, divided by the rate: quotients and remainders."""
    last = sizes.N - (sizes.slots_per_row - 1) * sizes.W
    return sizes.W // sizes.rate, sizes.W % sizes.rate, last // sizes.rate, last % sizes.rate


@gluon.jit
def place_of(work, line, rows, sizes, DOCUMENTS: gl.constexpr):
    """The place of a work; no rows past the last one."""
    if DOCUMENTS:
        count = gl.where(line.offset < 0, 0, line.rows + gl.where(line.offset < line.rest, 1, 0))
        return Place(line.b, sizes.first_head + work.head, line.start + line.offset, count)
    else:
        whole, rest, last_whole, last_rest = rows
        is_last = work.segment == sizes.slots_per_row - 1
        # The size of range(offset, length, rate), where offset < rate.
        last_count = gl.where(is_last, last_whole, whole)
        count = last_count + gl.where(line.offset < gl.where(is_last, last_rest, rest), 1, 0)
        count = gl.where((line.offset < 0) | (work.b >= sizes.batch), 0, count)
        return Place(work.b, sizes.first_head + work.head, work.segment * sizes.W + line.offset, count)


class Keys(NamedTuple):
    """The key tiles that a query tile meets: `steps` of them, those from step `before` on moved by `hole`."""

    steps: Any
    before: Any
    hole: Any


@gluon.jit
def keys_of(
    tile, count, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, FOLDED: gl.constexpr
):
    """The key tiles that a query tile sees, without those that a finer branch computes."""
    steps = key_tiles(tile * BLOCK_M + BLOCK_M, count, CAUSAL, BLOCK_N)
    before = steps
    hole = steps * 0
    if FOLDED:
        own = tile * BLOCK_M // gl.maximum(sizes.skipped, 1) * sizes.skipped // BLOCK_N
        if CAUSAL:
            steps = gl.where(sizes.skipped > 0, own, steps)
            before = steps
        else:
            before = own
            hole = gl.minimum(sizes.skipped // BLOCK_N, steps - own)
            steps -= hole
    return Keys(steps, before, hole)


@gluon.jit
def key_tile_at(keys, step):
    """The number of the key tile of a step."""
    return step + gl.where(step < keys.before, 0, keys.hole)


@gluon.jit
def key_tiles(end, count, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many key tiles the rows up to `end` see."""
    last = count
    if CAUSAL:
        last = gl.minimum(end, count)
    return (last + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def listed(lists, work, tile, place, sizes, BLOCK_M: gl.constexpr):
    """A query tile's list of key tiles: where it starts, and how many it has; none where there is no such tile."""
    there = tile * BLOCK_M < place.count
    row = gl.load(lists.grids + work.segment * sizes.H + place.head) + place.b * lists.rows_per_batch_row + tile
    start = gl.load(lists.first + row, mask=there, other=0)
    return start, gl.load(lists.first + row + 1, mask=there, other=0) - start


@gluon.jit
def row_pointers(Out, Lse, b, head, token, first_row, count, N, H, rate, D: gl.constexpr, scores, memory):
    """Of the 64 rows of a consumer in lse and out, and which of them exist."""
    BLOCK_D: gl.constexpr = memory.size_per_thread[1] * memory.threads_per_warp[1]
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    at = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, memory))
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, memory))
    b = b.to(gl.int64)
    lse_pointers = Lse + (b * H + head) * N + token + rows.to(gl.int64) * rate
    out_pointers = Out + ((b * N + token) * H + head) * D + columns[None, :]
    out_pointers += at.to(gl.int64)[:, None] * (rate * H * D)
    return lse_pointers, rows < count, out_pointers, (at < count)[:, None] & (columns < D)[None, :]


@gluon.jit
def rows_before(Out, Lse, b, head, token, first_row, count, N, H, rate, D: gl.constexpr, scores, memory):
    """The lse and out of a consumer's rows as earlier branches left them."""
    lse_pointers, lse_mask, out_pointers, out_mask = row_pointers(
        Out, Lse, b, head, token, first_row, count, N, H, rate, D, scores, memory
    )
    lse = gl.load(lse_pointers, mask=lse_mask, other=-float("inf"))
    return lse, gl.load(out_pointers, mask=out_mask, other=0.0)
