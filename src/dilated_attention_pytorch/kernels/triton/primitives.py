"""What the kernels share: where a segment lies, its grid rows, tiles of it, and dropout's hash.

A *slot* is a segment of one document on one branch. Row `t` of a slot, for a head with offset `o`, is the token
`start + o + t * r` of batch row `b`. Offsets into tensors are int64: 16M tokens of 12 heads of 64 pass 2^31 elements.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

# Numbers that vary from call to call: specialising on them (on being 1, or divisible by 16) would compile anew.
UNSPECIALIZED = (
    "N", "H", "W", "rate", "heads", "first_head", "tiles", "slots_per_row", "head_offset",
    "first_position", "branch", "threshold", "rows_per_batch_row",
)  # fmt: skip

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def locate_slot(slot, table, N, W, slots_per_row, HAS_TABLE: tl.constexpr):
    """`(batch row, start, length)` of a slot: by arithmetic, or from the table when documents have lengths."""
    if HAS_TABLE:
        b = tl.load(table + slot * 3).to(tl.int64)
        start = tl.load(table + slot * 3 + 1)
        length = tl.load(table + slot * 3 + 2)
    else:
        b = (slot // slots_per_row).to(tl.int64)
        start = (slot % slots_per_row) * W
        length = tl.minimum(W, N - start)
    return b, start, length


@triton.jit
def locate_tile(
    offsets, table, N, W, rate, heads, first_head, tiles, slots_per_row, GROUP: tl.constexpr, HAS_TABLE: tl.constexpr
):
    """A program's `(tile, head, slot, batch row, first token, rows)`; `offsets` has one for every GROUP of heads.

    Tiles of one slot and head run side by side, so that they share its keys in L2.
    """
    pid = tl.program_id(0)
    head = first_head + (pid // tiles) % heads
    slot = pid // tiles // heads
    offset = tl.load(offsets + head // GROUP)
    b, start, length = locate_slot(slot, table, N, W, slots_per_row, HAS_TABLE)
    count = tl.where(offset < 0, 0, (length - offset + rate - 1) // rate)
    return pid % tiles, head, slot, b, (start + offset).to(tl.int64), count


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
def dropout_row_word(seed, b, head, branch, queries):
    """What the hash of every key of a query row starts from, `(rows,)`."""
    golden = tl.full([1], 0x9E3779B9, tl.uint32)
    word = mix(tl.load(seed).to(tl.uint32) + golden * (branch + 1))
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
    return mix(row_word ^ key_word).to(tl.int64) >= threshold
