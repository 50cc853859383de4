"""Backward of one branch against the merged out and lse, without atomics: every gradient row has one writer.

    p  = exp(s - lse);  dp = do v^T;  ds = p * (dp - delta)
    dv = p^T do;  dk = scale * ds^T q  (a program owns key rows and walks the queries that see them)
    dq = scale * ds k                  (a program owns query rows and walks the keys that they see)

with `delta = sum(do * out) - dlse`, computed once for all branches. A later branch adds to what is there. With a block
layout (PIECES > 0) what a program walks is a list of tiles. Where branches are folded into each other (FOLDED), p
counts as often as `core.folding` says, and rows are left out.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from dilated_attention_pytorch.kernels.triton.block_sparse import kept_tiles, key_steps, query_steps, row_of_step
from dilated_attention_pytorch.kernels.triton.primitives import (
    LOG2_E,
    UNSPECIALIZED,
    dropout_key_word,
    dropout_row_word,
    is_in_document,
    keeps,
    load_rows,
    locate_tile,
    outside_own,
    row_levels,
    store_rows,
)


@triton.jit(do_not_specialize=("N", "H", "documents", "zeros_at", "zeros"))
def delta_kernel(
    Out, Do, Dlse, Delta, Workspace, Spans, do_b, do_n, do_h, dl_b, dl_n, dl_h, N, H, documents, zeros_at, zeros,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr, LISTED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """`delta`, `(B, H, N)`, of BLOCK_M rows of one head; and the zeros that other kernels want in the workspace.

    Where documents have lengths (LISTED), rows outside of them have none.
    """
    tiles = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0)
    for first in range(pid * BLOCK_M, zeros, tl.num_programs(0) * BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        tl.store(Workspace + zeros_at + at, 0.0, mask=at < zeros)
    rows = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (pid // tiles % H).to(tl.int64)
    b = (pid // tiles // H).to(tl.int64)
    if LISTED:
        inside = is_in_document(Spans, b, tl.minimum(rows, N - 1), documents, N, PACKED)
        if tl.max(inside.to(tl.int32)) == 0:
            return
    out = load_rows(Out + (b * N * H + head) * D, rows, H * D, D, BLOCK_D, N, True).to(tl.float32)
    do = load_rows(Do + b * do_b + head * do_h, rows, do_n, D, BLOCK_D, N, True).to(tl.float32)
    delta = tl.sum(out * do, 1)
    if HAS_DLSE:
        pointers = Dlse + b * dl_b + head * dl_h + rows.to(tl.int64) * dl_n
        delta -= tl.load(pointers, mask=rows < N, other=0.0)
    tl.store(Delta + (b * H + head) * N + rows, delta, mask=rows < N)


@triton.jit
def _visit_queries(
    dk, dv, k, v, q_base, do_base, q_stride, do_stride, lse_base, delta_base, keys, first, last, tiles, count, seed,
    b, dropout_head, key_word, position, rate, qk_scale, keep_scale, threshold, row_level, key_level, before,
    hole,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """Rows [first, last), or where PIECES are given the steps [first, last) of a list of tiles."""
    STEP: tl.constexpr = 1 if PIECES else BLOCK_M
    for step in tl.range(first, last, STEP):
        start = row_of_step(tiles, step, BLOCK_M, PIECES) if PIECES else step
        if FOLDED:
            start += tl.where(step < before, 0, hole)
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_base, rows, q_stride, D, BLOCK_D, count, MASKED)
        do = load_rows(do_base, rows, do_stride, D, BLOCK_D, count, MASKED)
        s = tl.dot(k, q.T, input_precision=PRECISION)
        if MASKED:
            lse = tl.load(lse_base + rows.to(tl.int64) * rate, mask=rows < count, other=0.0) * LOG2_E
        else:
            lse = tl.load(lse_base + rows.to(tl.int64) * rate) * LOG2_E
        below = lse[None, :]
        if FOLDED:
            below -= tl.minimum(key_level[:, None], row_level[None, :])
        p = tl.exp2(s * qk_scale - below)  # (keys, rows)
        if MASKED:
            sees = (keys[:, None] < count) & (rows[None, :] < count)
            if CAUSAL:
                sees = sees & (keys[:, None] <= rows[None, :])
            p = tl.where(sees, p, 0.0)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            row_word = dropout_row_word(seed, b, dropout_head, position + rows * rate)
            kept = keeps(row_word[None, :], key_word[:, None], threshold)
            dropped = tl.where(kept, p * keep_scale, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        if MASKED:
            delta = tl.load(delta_base + rows.to(tl.int64) * rate, mask=rows < count, other=0.0)
        else:
            delta = tl.load(delta_base + rows.to(tl.int64) * rate)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _visit_keys(
    dq, q, do, lse, delta, k_base, v_base, k_stride, v_stride, rows, first, last, tiles, count, row_word, position,
    rate, qk_scale, keep_scale, threshold, row_level, key_level, before, hole,
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
        v = load_rows(v_base, keys, v_stride, D, BLOCK_D, count, MASKED)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        below = lse[:, None]
        if FOLDED:
            below -= tl.minimum(row_level[:, None], key_level[None, :])
        p = tl.exp2(s * qk_scale - below)  # (rows, keys)
        if MASKED:
            sees = (keys[None, :] < count) & (rows[:, None] < count)
            if CAUSAL:
                sees = sees & (keys[None, :] <= rows[:, None])
            p = tl.where(sees, p, 0.0)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        if DROPOUT:
            kept = keeps(row_word[:, None], dropout_key_word(position + keys * rate)[None, :], threshold)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(
    Q, K, V, Do, Lse, Delta, Dk, Dv, lines, offsets, seed, grids, first, kept,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h,
    N, H, W, rate, heads, first_head, tiles, slots_per_row, head_offset, first_position, scale, keep_scale,
    threshold, rows_per_batch_row, skipped, periods,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, CONTINUES: tl.constexpr, LISTED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """A tile of key rows of one KV head; `heads` and `first_head` count KV heads here."""
    tile, kv_head, segment, b, token, count = locate_tile(
        offsets, lines, N, W, rate, heads, first_head, tiles, slots_per_row, 1, LISTED, False
    )
    first_key = tile * BLOCK_N  # under causality the first keys are seen by most rows: longest first
    if first_key >= count:
        return
    keys = first_key + tl.arange(0, BLOCK_N)
    position = first_position + token  # what dropout draws from
    kv64 = kv_head.to(tl.int64)
    kv_heads = H // GROUP
    k = load_rows(K + b * k_b + token * k_n + kv64 * k_h, keys, rate * k_n, D, BLOCK_D, count, True)
    v = load_rows(V + b * v_b + token * v_n + kv64 * v_h, keys, rate * v_n, D, BLOCK_D, count, True)
    key_word = keys.to(tl.uint32)
    if DROPOUT:
        key_word = dropout_key_word(position + keys * rate)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Query tiles that the mask cuts through, then whole ones, then the ragged end.
    if CAUSAL:
        first_row = first_key // BLOCK_M * BLOCK_M
        unmasked = tl.minimum(tl.cdiv(first_key + BLOCK_N, BLOCK_M) * BLOCK_M, count)
    else:
        first_row = 0
        unmasked = 0
    whole = tl.maximum(unmasked, count // BLOCK_M * BLOCK_M)
    if first_key + BLOCK_N > count:  # keys past the end must be masked everywhere
        if CAUSAL:
            unmasked = count
        whole = unmasked
    last = count
    row_level, key_level = key_word, key_word
    before, hole = 0, 0
    if FOLDED:
        phase = tl.load(offsets + kv_heads + kv_head)
        key_level = row_levels(keys, phase, periods)
        row_level = row_levels(tl.arange(0, BLOCK_M), phase, periods)  # of every tile: periods divide its rows
        if CAUSAL:  # the rows of later segments of the finer branch
            later = tl.where(skipped > 0, (first_key // tl.maximum(skipped, 1) + 1) * skipped, 0)
            first_row = tl.maximum(first_row, tl.minimum(later, count))
            unmasked = tl.maximum(unmasked, first_row)
            whole = tl.maximum(whole, unmasked)
        else:
            whole, last, before, hole = outside_own(first_key, whole, last, count, skipped, False)
    query_tiles = kept
    for g in tl.static_range(GROUP):
        head = kv64 * GROUP + g
        q_base = Q + b * q_b + token * q_n + head * q_h
        do_base = Do + b * do_b + token * do_n + head * do_h
        lse_base = Lse + (b * H + head) * N + token
        delta_base = Delta + (b * H + head) * N + token
        dropout_head = head + head_offset
        if PIECES:
            own_tile = first_key // (BLOCK_M * PIECES)
            start, listed = kept_tiles(grids, first, own_tile, b, segment, head, H, rows_per_batch_row)
            query_tiles = kept + start
            first_row, unmasked, whole, last = query_steps(listed, first_key, BLOCK_M, PIECES, CAUSAL)
        if CAUSAL:
            dk, dv = _visit_queries(
                dk, dv, k, v, q_base, do_base, rate * q_n, rate * do_n, lse_base, delta_base, keys, first_row, unmasked,
                query_tiles, count, seed, b, dropout_head, key_word, position, rate, scale * LOG2_E, keep_scale,
                threshold, row_level, key_level, before, hole,
                D, BLOCK_D, BLOCK_M, True, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
            )  # fmt: skip
        dk, dv = _visit_queries(
            dk, dv, k, v, q_base, do_base, rate * q_n, rate * do_n, lse_base, delta_base, keys, unmasked, whole,
            query_tiles, count, seed, b, dropout_head, key_word, position, rate, scale * LOG2_E, keep_scale,
            threshold, row_level, key_level, before, hole,
            D, BLOCK_D, BLOCK_M, False, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
        )  # fmt: skip
        dk, dv = _visit_queries(
            dk, dv, k, v, q_base, do_base, rate * q_n, rate * do_n, lse_base, delta_base, keys, whole, last,
            query_tiles, count, seed, b, dropout_head, key_word, position, rate, scale * LOG2_E, keep_scale,
            threshold, row_level, key_level, before, hole,
            D, BLOCK_D, BLOCK_M, True, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
        )  # fmt: skip
    dk *= scale
    into = ((b * N + token) * kv_heads + kv64) * D
    if CONTINUES:
        dk += load_rows(Dk + into, keys, rate * kv_heads * D, D, BLOCK_D, count, True).to(tl.float32)
        dv += load_rows(Dv + into, keys, rate * kv_heads * D, D, BLOCK_D, count, True).to(tl.float32)
    store_rows(Dk + into, keys, rate * kv_heads * D, D, BLOCK_D, count, dk)
    store_rows(Dv + into, keys, rate * kv_heads * D, D, BLOCK_D, count, dv)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(
    Q, K, V, Do, Lse, Delta, Dq, lines, offsets, seed, grids, first, kept,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h,
    N, H, W, rate, heads, first_head, tiles, slots_per_row, head_offset, first_position, scale, keep_scale,
    threshold, rows_per_batch_row, skipped, periods,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, CONTINUES: tl.constexpr, LISTED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """A tile of query rows of one query head."""
    tile, head, segment, b, token, count = locate_tile(
        offsets, lines, N, W, rate, heads, first_head, tiles, slots_per_row, GROUP, LISTED, True
    )
    first_row = tile * BLOCK_M
    if first_row >= count:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    position = first_position + token  # what dropout draws from
    head64 = head.to(tl.int64)
    q = load_rows(Q + b * q_b + token * q_n + head64 * q_h, rows, rate * q_n, D, BLOCK_D, count, True)
    do = load_rows(Do + b * do_b + token * do_n + head64 * do_h, rows, rate * do_n, D, BLOCK_D, count, True)
    k_base = K + b * k_b + token * k_n + (head64 // GROUP) * k_h
    v_base = V + b * v_b + token * v_n + (head64 // GROUP) * v_h
    at = (b * H + head64) * N + token + rows.to(tl.int64) * rate
    lse = tl.load(Lse + at, mask=rows < count, other=0.0) * LOG2_E
    delta = tl.load(Delta + at, mask=rows < count, other=0.0)
    row_word = rows.to(tl.uint32)
    if DROPOUT:
        row_word = dropout_row_word(seed, b, head + head_offset, position + rows * rate)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
        key_level = row_levels(tl.arange(0, BLOCK_N), phase, periods)
        whole, last, before, hole = outside_own(first_row, whole, last, count, skipped, CAUSAL)
        if last == 0:
            return
    dq = _visit_keys(
        dq, q, do, lse, delta, k_base, v_base, rate * k_n, rate * v_n, rows, 0, whole, key_tiles, count, row_word,
        position, rate, scale * LOG2_E, keep_scale, threshold, row_level, key_level, before, hole,
        D, BLOCK_D, BLOCK_N, False, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
    )  # fmt: skip
    dq = _visit_keys(
        dq, q, do, lse, delta, k_base, v_base, rate * k_n, rate * v_n, rows, whole, last, key_tiles, count, row_word,
        position, rate, scale * LOG2_E, keep_scale, threshold, row_level, key_level, before, hole,
        D, BLOCK_D, BLOCK_N, True, CAUSAL, DROPOUT, PRECISION, PIECES, FOLDED,
    )  # fmt: skip
    dq *= scale
    into = Dq + ((b * N + token) * H + head64) * D
    if CONTINUES:
        dq += load_rows(into, rows, rate * H * D, D, BLOCK_D, count, True).to(tl.float32)
    store_rows(into, rows, rate * H * D, D, BLOCK_D, count, dq)
