"""Forward of one branch: rows are read and written in place, and the softmax of earlier branches is continued.

For a tile of query rows, over the key tiles of its segment (all, or up to the diagonal):

    s = scale * q k^T;  m' = max(m, rowmax s);  p = exp(s - m')
    l = l * exp(m - m') + rowsum p;  acc = acc * exp(m - m') + p v

starting from m = -inf, l = 0, acc = 0, or, where earlier branches have written the row, from m = lse, l = 1, acc = out.
In the end out = acc / l and lse = m + log l. With a block layout (PIECES > 0) the key tiles are those of a list. Where
branches are folded into each other (FOLDED), p counts as often as `core.folding` says, and keys are left out.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from dilated_attention_pytorch.kernels.triton.block_sparse import key_steps, row_of_step
from dilated_attention_pytorch.kernels.triton.primitives import (
    LN_2,
    LOG2_E,
    UNSPECIALIZED,
    dropout_key_word,
    dropout_row_word,
    keeps,
    load_rows,
    locate_tile,
    outside_own,
    row_levels,
    store_rows,
)


@triton.jit
def _visit_keys(
    acc, m, total, q, k_base, v_base, k_stride, v_stride, rows, first, last, tiles, count, row_word, key_start, rate,
    qk_scale, keep_scale, threshold, row_level, key_level, before, hole,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Keys [first, last), or where PIECES are given the steps [first, last) of a list of tiles."""
    STEP: tl.constexpr = 1 if PIECES else BLOCK_N
    for step in tl.range(first, last, STEP):
        start = row_of_step(tiles, step, BLOCK_N, PIECES) if PIECES else step
        if FOLDED:
            start += tl.where(step < before, 0, hole)
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, keys, k_stride, D, BLOCK_D, count, MASKED)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            sees = keys[None, :] < count
            if CAUSAL:
                sees = sees & (keys[None, :] <= rows[:, None])
            s = tl.where(sees, s, -float("inf"))
        # The scale is positive, so it may wait until after the maximum and become part of one multiply-add.
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        # Finite from the first tile on: every row sees that tile's first key.
        if FOLDED:
            level = tl.minimum(row_level[:, None], key_level[None, :])
            p = tl.exp2(s * qk_scale - (m_new[:, None] - level))
        else:
            p = tl.exp2(s * qk_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if DROPOUT:
            key_word = dropout_key_word(key_start + keys * rate)
            p = tl.where(keeps(row_word[:, None], key_word[None, :], threshold), p * keep_scale, 0.0)
        v = load_rows(v_base, keys, v_stride, D, BLOCK_D, count, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    Q, K, V, Out, Lse, lines, offsets, seed, grids, first, kept,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    N, H, W, rate, heads, first_head, tiles, slots_per_row, head_offset, first_position, qk_scale,
    keep_scale, threshold, rows_per_batch_row, skipped, periods,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, CONTINUES: tl.constexpr, LISTED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    tile, head, segment, b, token, count = locate_tile(
        offsets, lines, N, W, rate, heads, first_head, tiles, slots_per_row, GROUP, LISTED, True
    )
    first_row = tile * BLOCK_M  # under causality the last rows see most keys: longest first
    if first_row >= count:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    position = first_position + token  # what dropout draws from
    head64 = head.to(tl.int64)
    q_base = Q + b * q_b + token * q_n + head64 * q_h
    k_base = K + b * k_b + token * k_n + (head64 // GROUP) * k_h
    v_base = V + b * v_b + token * v_n + (head64 // GROUP) * v_h
    out_base = Out + ((b * N + token) * H + head64) * D
    lse_pointers = Lse + (b * H + head64) * N + token + rows.to(tl.int64) * rate

    q = load_rows(q_base, rows, rate * q_n, D, BLOCK_D, count, True)
    if CONTINUES:
        m = tl.load(lse_pointers, mask=rows < count, other=-float("inf")) * LOG2_E
        total = tl.where(m == -float("inf"), 0.0, 1.0)
        acc = load_rows(out_base, rows, rate * H * D, D, BLOCK_D, count, True).to(tl.float32)
    else:
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_word = rows.to(tl.uint32)
    if DROPOUT:
        row_word = dropout_row_word(seed, b, head + head_offset, position + rows * rate)

    # Whole key tiles that need no mask, then the rest.
    start, whole, last = key_steps(
        grids, first, first_row, count, b, segment, head, H, rows_per_batch_row,
        BLOCK_M, BLOCK_N, PIECES, CAUSAL,
    )  # fmt: skip
    key_tiles = kept + start if PIECES else kept
    row_level, key_level = row_word, row_word
    before, hole = 0, 0
    if FOLDED:
        phase = tl.load(offsets + (H + head) // GROUP)
        row_level = row_levels(rows, phase, periods)
        key_level = row_levels(tl.arange(0, BLOCK_N), phase, periods)  # of every tile: periods divide its rows
        whole, last, before, hole = outside_own(first_row, whole, last, count, skipped, CAUSAL)
        if last == 0:
            return
    acc, m, total = _visit_keys(
        acc, m, total, q, k_base, v_base, rate * k_n, rate * v_n, rows, 0, whole, key_tiles, count, row_word,
        position, rate, qk_scale, keep_scale, threshold, row_level, key_level, before, hole,
        D, BLOCK_D, BLOCK_N, False, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
    )  # fmt: skip
    acc, m, total = _visit_keys(
        acc, m, total, q, k_base, v_base, rate * k_n, rate * v_n, rows, whole, last, key_tiles, count, row_word,
        position, rate, qk_scale, keep_scale, threshold, row_level, key_level, before, hole,
        D, BLOCK_D, BLOCK_N, True, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
    )  # fmt: skip
    store_rows(out_base, rows, rate * H * D, D, BLOCK_D, count, acc / total[:, None])
    tl.store(lse_pointers, (m + tl.log2(total)) * LN_2, mask=rows < count)
