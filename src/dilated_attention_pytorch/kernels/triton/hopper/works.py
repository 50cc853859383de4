"""How the programs of the forward kernel share out the tiles of query rows.

A *work* is `(batch row, segment, head, place)`: a tile of query rows, or under causality a pair of them, taken one
after the other. Program `i` of `P` has the works number `i`, `i + P`, `i + 2 P` and so on. `sizes` is the kernel's.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def work_at(number, sizes, CAUSAL: gl.constexpr):
    """`(batch row, segment, head, place)` of the number-th work: a tile of query rows, or two if causal."""
    _, _, _, _, heads, _, tiles, slots_per_row, _, _, _ = sizes
    places = (tiles + 1) // 2 if CAUSAL else tiles
    unit = number // places
    slot = unit // heads
    return slot // slots_per_row, slot % slots_per_row, unit % heads, number % places


@gluon.jit
def _later(work, step, sizes, CAUSAL: gl.constexpr):
    """The work that is `step`, itself written as a work, later: added like digits, as divisions take long."""
    _, _, _, _, heads, _, tiles, slots_per_row, _, _, _ = sizes
    places = (tiles + 1) // 2 if CAUSAL else tiles
    b, segment, head, place = work
    place += step[3]
    over = place >= places
    place = gl.where(over, place - places, place)
    head += step[2] + gl.where(over, 1, 0)
    over = head >= heads
    head = gl.where(over, head - heads, head)
    segment += step[1] + gl.where(over, 1, 0)
    over = segment >= slots_per_row
    segment = gl.where(over, segment - slots_per_row, segment)
    return b + step[0] + gl.where(over, 1, 0), segment, head, place


@gluon.jit
def next_work(work, second, step, sizes, CAUSAL: gl.constexpr):
    """What a program does after a work, or after the first tile of a pair: a work, and whether it is at the second."""
    if CAUSAL:
        b, segment, head, place = _later(work, step, sizes, CAUSAL)
        stays = second == 0
        b = gl.where(stays, work[0], b)
        segment = gl.where(stays, work[1], segment)
        head = gl.where(stays, work[2], head)
        place = gl.where(stays, work[3], place)
        return (b, segment, head, place), second ^ 1
    else:
        return _later(work, step, sizes, CAUSAL), second


@gluon.jit
def tile_of(work, second, sizes, CAUSAL: gl.constexpr):
    """The query tile of a work.

    Under causality a program takes two tiles in a row, one from either end of a segment, so that all get as much to do.
    A tile in the middle is its own partner: then the second one is the tile behind the last one, which has no rows.
    """
    _, _, _, _, _, _, tiles, _, _, _, _ = sizes
    _, _, _, near = work
    if CAUSAL:
        far = tiles - 1 - near
        return gl.where(second == 0, far, gl.where(near == far, tiles, near))
    else:
        return near


@gluon.jit
def offset_of(work, offsets, sizes):
    """The offset of a work's head, of which `offsets` has one for every query head."""
    _, _, _, _, _, first_head, _, _, _, _, _ = sizes
    _, _, head, _ = work
    return gl.load(offsets + first_head + head)


@gluon.jit
def segment_rows(sizes):
    """The lengths of a whole segment and of a batch row's last one, divided by the rate: quotients and remainders."""
    N, _, W, rate, _, _, _, slots_per_row, _, _, _ = sizes
    last = N - (slots_per_row - 1) * W
    return W // rate, W % rate, last // rate, last % rate


@gluon.jit
def place_of(work, offset, rows, sizes):
    """`(batch row, head, first token, rows)` of a work whose head has this offset; no rows past the last work."""
    _, _, W, _, _, first_head, _, slots_per_row, batch, _, _ = sizes
    b, segment, head, _ = work
    whole, rest, last_whole, last_rest = rows
    is_last = segment == slots_per_row - 1
    # The size of range(offset, length, rate), where offset < rate.
    count = gl.where(is_last, last_whole, whole) + gl.where(offset < gl.where(is_last, last_rest, rest), 1, 0)
    count = gl.where((offset < 0) | (b >= batch), 0, count)
    return b, first_head + head, segment * W + offset, count
