"""How the programs of the forward kernel share out the tiles of query rows.

A *work* is a tile of query rows, or under causality a pair of them, taken one after the other. Program `i` of `P` has
the works number `i`, `i + P`, `i + 2 P` and so on.
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
    batch: Any
    programs: Any
    group: Any


class Work(NamedTuple):
    b: Any
    segment: Any
    head: Any
    place: Any


class Place(NamedTuple):
    """The grid rows of a work's segment and head: `count` tokens from `token` on."""

    b: Any
    head: Any
    token: Any
    count: Any


@gluon.jit
def work_at(number, sizes, CAUSAL: gl.constexpr):
    places = (sizes.tiles + 1) // 2 if CAUSAL else sizes.tiles
    unit = number // places
    slot = unit // sizes.heads
    return Work(slot // sizes.slots_per_row, slot % sizes.slots_per_row, unit % sizes.heads, number % places)


@gluon.jit
def _later(work, step, sizes, CAUSAL: gl.constexpr):
    """The work that is `step`, itself written as a work, later: added like digits, as divisions take long."""
    places = (sizes.tiles + 1) // 2 if CAUSAL else sizes.tiles
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
def tile_of(work, second, sizes, CAUSAL: gl.constexpr):
    """The query tile of a work.

    Under causality a program takes two tiles in a row, one from either end of a segment, so that all get as much to do.
    A tile in the middle is its own partner: then the second one is the tile behind the last one, which has no rows.
    """
    if CAUSAL:
        far = sizes.tiles - 1 - work.place
        return gl.where(second == 0, far, gl.where(work.place == far, sizes.tiles, work.place))
    else:
        return work.place


@gluon.jit
def offset_of(work, offsets, sizes):
    """The offset of a work's head, of which `offsets` has one for every query head."""
    return gl.load(offsets + sizes.first_head + work.head)


@gluon.jit
def segment_rows(sizes):
    """The lengths of a whole segment and of a batch row's last one, divided by the rate: quotients and remainders."""
    last = sizes.N - (sizes.slots_per_row - 1) * sizes.W
    return sizes.W // sizes.rate, sizes.W % sizes.rate, last // sizes.rate, last % sizes.rate


@gluon.jit
def place_of(work, offset, rows, sizes):
    """The place of a work whose head has this offset; no rows past the last work."""
    whole, rest, last_whole, last_rest = rows
    is_last = work.segment == sizes.slots_per_row - 1
    # The size of range(offset, length, rate), where offset < rate.
    count = gl.where(is_last, last_whole, whole) + gl.where(offset < gl.where(is_last, last_rest, rest), 1, 0)
    count = gl.where((offset < 0) | (work.b >= sizes.batch), 0, count)
    return Place(work.b, sizes.first_head + work.head, work.segment * sizes.W + offset, count)
