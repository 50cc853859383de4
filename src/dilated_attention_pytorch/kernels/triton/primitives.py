"""What the kernels share: where a segment lies, its grid rows, tiles of it, and dropout's hash.

Row `t` of a segment, for a head with offset `o`, is the token
`start + o + t * r` of batch row `b`. Offsets into tensors are int64: 16M tokens of 12 heads of 64 pass 2^31 elements.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

# Numbers that vary from call to call: specialising on them (on being 1, or divisible by 16) would compile anew.
UNSPECIALIZED = (
    "N", "H", "W", "rate", "heads", "first_head", "tiles", "slots_per_row", "head_offset",
    "first_position", "threshold", "rows_per_batch_row", "skipped", "periods",
)  # fmt: skip

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate_tile(
    offsets, lines, N, W, rate, heads, first_head, tiles, slots_per_row,
    GROUP: tl.constexpr, LISTED: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """A program's `(tile, head, segment, batch row, first token, rows)`; `offsets` has one for every GROUP of heads.

    Tiles of one segment and head run side by side, so that they share its keys in L2. Where documents have lengths
    (LISTED), `lines` lists tiles, see `documents`, and every head takes `tiles` of them before the next one does.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    head = first_head + (pid // tiles) % heads
    slot = pid // tiles // heads
    segment = slot % slots_per_row
    offset = tl.load(offsets + head // GROUP)
    if LISTED:
        number = slot * tiles + tile
        here = number < tl.load(lines)
        line = lines + 8 + number * 8
        b = tl.load(line, mask=here, other=0).to(tl.int64)
        start = tl.load(line + 1, mask=here, other=0)
        count = tl.load(line + 2, mask=here, other=0) + (offset < tl.load(line + 3, mask=here, other=0)).to(tl.int32)
        tile = tl.load(line + 4, mask=here, other=0)
        segment = tl.load(line + 5, mask=here, other=0)
    else:
        if LAST_FIRST:
            tile = tiles - 1 - tile
        b = (slot // slots_per_row).to(tl.int64)
        start = segment * W
        count = (tl.minimum(W, N - start) - offset + rate - 1) // rate
    count = tl.where(offset < 0, 0, count)
    return tile, head, segment, b, (start + offset).to(tl.int64), count


@triton.jit
def row_levels(rows, phase, periods):
    """The base-2 logarithm of how many branches of a chain each grid row is on: see `core.folding`.

    The grids are nested, so a pair is on as many branches as whichever of its rows is on fewer.
    """
    # No period is longer than 8. So the counts of eight rows, two bits each, are one number per program, and since a
    # thread's columns of a tile are 8 apart, the compiler keeps few of their levels in registers.
    counts = (periods >> 1 & 1) * 0x1111 + (periods >> 2 & 1) * 0x0101 + (periods >> 3 & 1)  # of rows from phase on
    turn = (phase & 7) * 2
    counts = counts << turn | counts >> (16 - turn)
    count = counts >> (rows & 7) * 2 & 3
    return tl.where(count < 2, count.to(tl.float32), tl.where(count == 2, 1.5849625, 2.0))  # log2 of 1, 2, 3 and 4


@triton.jit
def outside_own(first, whole, last, count, skipped, CAUSAL: tl.constexpr):
    """The ranges [0, whole) and [whole, last) without the rows that a finer branch computes.

    These are its segment of `skipped` rows around row `first`. Returns the ends of both ranges, where this hole begins,
    and its size. Steps from there on must be moved by the size; under causality there are none.
    """
    before = first // tl.maximum(skipped, 1) * skipped
    after = tl.minimum(before + skipped, count)
    ends = (skipped > 0) & (CAUSAL | (after == count))
    whole = tl.where(ends, tl.minimum(whole, before), whole - tl.minimum(whole, after - before))
    last = tl.where(ends, before, last - (after - before))
    return whole, last, before, after - before


@triton.jit
def is_in_document(Spans, b, token, documents, N, PACKED: tl.constexpr):
    """Whether tokens of batch rows lie in a document; packed documents follow each other."""
    document = b
    if PACKED:
        document = token * 0  # the last one that starts at the token or before
        step = 1
        while step < documents:
            step *= 2
        while step > 0:
            later = document + step
            starts = tl.load(Spans + later * 2, mask=later < documents, other=N + 1)
            document = tl.where(starts <= token, later, document)
            step //= 2
    begin = tl.load(Spans + document * 2)
    return (begin <= token) & (token < tl.load(Spans + document * 2 + 1))


@triton.jit
def load_rows(base, rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, count, MASKED: tl.constexpr):
    """The tile `(rows, D)` at `base`; rows from `count` on, and columns from D on, are 0."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if D != BLOCK_D:
        if MASKED:
            return tl.load(pointers, mask=(rows[:, None] < count) & (columns[None, :] < D), other=0.0)
        return tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=rows[:, None] < count, other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(base, rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, count, tile):
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(rows[:, None] < count) & (columns[None, :] < D))


@triton.jit
def mix(word):
    """Wellons' lowbias32, as in `core.dropout`."""
    word = word.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def dropout_row_word(seed, b, head, queries):
    """What the hash of every key of a query row starts from, `(rows,)`."""
    golden = tl.full([1], 0x9E3779B9, tl.uint32)
    word = mix(tl.load(seed).to(tl.uint32) + golden)
    word = mix(word ^ mix(tl.load(seed + 1).to(tl.uint32) + golden))
    word = mix(word ^ mix(b.to(tl.uint32) + golden))
    word = mix(word ^ mix(head.to(tl.uint32) + golden))
    return mix(word ^ mix(queries.to(tl.uint32) + golden))


@triton.jit
def dropout_key_word(keys):
    return mix(keys.to(tl.uint32) + tl.full([1], 0x9E3779B9, tl.uint32))


@triton.jit
def keeps(row_word, key_word, threshold):
    """Whether each probability survives, for words that broadcast to the tile."""
    factor = mix(row_word + tl.full([1], 0x9E3779B9, tl.uint32)) | 1
    return factor * key_word + row_word >= threshold.to(tl.uint32)
