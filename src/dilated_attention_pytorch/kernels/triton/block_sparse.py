"""Walking a list of kept tiles: what lets the kernels visit those tiles of a segment only.

A program's rows lie in one tile. Its *list* names the tiles that it meets, in ascending order: a query tile's key tiles
(CSR), or a key tile's query tiles (CSC). A tile is walked in PIECES of the kernel's own size, so a step is a piece, and
the steps of a list of n tiles are [0, n * PIECES). Where a mask is needed follows from the order: the ragged last tile
of a segment can only end a list, and under causality a tile's own number ends its list of keys and starts its list of
queries, for it is always kept. So whole tiles, without a mask, are one run of steps, as in the dense kernels.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def kept_tiles(grids, first, row_of_tile, b, segment, head, H, rows_per_batch_row):
    """The list of a tile of one batch row, segment and query head: where it starts, and how many tiles it has."""
    row = tl.load(grids + segment * H + head) + b * rows_per_batch_row + row_of_tile
    start = tl.load(first + row)
    return start, tl.load(first + row + 1) - start


@triton.jit
def row_of_step(tiles, step, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """The grid row where a step's piece, of BLOCK rows, starts."""
    return tl.load(tiles + step // PIECES) * (BLOCK * PIECES) + step % PIECES * BLOCK


@triton.jit
def key_steps(
    grids, first, first_row, count, b, segment, head, H, rows_per_batch_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The keys that rows [first_row, first_row + BLOCK_M) see: [0, whole) needs no mask, [whole, last) does.

    These are keys, or, with a layout, steps of a list of tiles. Where it starts comes first.
    """
    start = 0
    if PIECES:
        own_tile = first_row // (BLOCK_N * PIECES)
        start, listed = kept_tiles(grids, first, own_tile, b, segment, head, H, rows_per_batch_row)
        whole = (listed - 1) * PIECES
        last = whole + PIECES
        if CAUSAL:  # of its own tile a program's rows see the pieces up to their own end
            last = whole + tl.cdiv(first_row % (BLOCK_N * PIECES) + BLOCK_M, BLOCK_N)
    elif CAUSAL:
        whole = first_row // BLOCK_N * BLOCK_N
        last = tl.minimum(first_row + BLOCK_M, count)
    else:
        whole = count // BLOCK_N * BLOCK_N
        last = count
    return start, whole, last


@triton.jit
def query_steps(count, first_key, BLOCK_M: tl.constexpr, PIECES: tl.constexpr, CAUSAL: tl.constexpr):
    """Over the rows that keep a tile of keys: masked from `first`, whole from `unmasked`, masked from `whole` on."""
    if CAUSAL:
        first = first_key % (BLOCK_M * PIECES) // BLOCK_M
        unmasked = PIECES
    else:
        first = 0
        unmasked = 0
    return first, unmasked, tl.maximum(unmasked, (count - 1) * PIECES), count * PIECES
