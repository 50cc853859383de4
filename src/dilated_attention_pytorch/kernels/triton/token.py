"""Attention of one new token per row to a bounded cache, in one launch.

`token_kernel` rotates the new query and key, stores key and value on the grids that they are on, and attends to the
cache. A program takes one split, some of the rows that a branch keeps for a head; the one that ends last combines all
splits of that head:

    lse_s = log sum_t exp(scale * q.k_t),    out_s = sum_t exp(scale * q.k_t - lse_s) v_t
    lse = log sum_s exp(lse_s),              out = sum_s exp(lse_s - lse) out_s

The splits are combined in their order, whichever ends last, so results are the same every time.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.cache_rows import CacheRows, CacheState
from dilated_attention_pytorch.core.entries import lasting
from dilated_attention_pytorch.kernels.triton.decode import combined, combining_step, ring_tables, splits_of, table
from dilated_attention_pytorch.kernels.triton.launching import Launch
from dilated_attention_pytorch.kernels.triton.plan import allows_tf32, precision_of
from dilated_attention_pytorch.kernels.triton.primitives import LN_2, LOG2_E, load_rows
from dilated_attention_pytorch.kernels.triton.step import (
    let_the_next_kernel_start,
    overlap,
    wait_for_the_kernel_before,
)

_FEW_HEADS = 128  # of all rows together: then splits are short, and their programs hold them at once
_SPLIT_ROWS = {True: (128, 64), False: (512,)}


def attend_token(
    qkv: Tensor,
    state: CacheState,
    scale: float,
    counters: Tensor,
    *,
    rotations: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    qk_norm: tuple[Tensor, Tensor, float] | None,
    allow_tf32: bool | None,
) -> Tensor:
    """See `kernels.decode.attend_token`."""
    keys, values, lengths, rows, _ = state
    B, D = keys.shape[0], keys.shape[2]
    kv_heads = len(rows.offsets[0])
    H = qkv.shape[1] // D - 2 * kv_heads
    tf32 = qkv.dtype == torch.float32 and allows_tf32(allow_tf32)
    eps = 0.0 if qk_norm is None else qk_norm[2]
    kind = (attend_token, rows, B, H, D, qkv.dtype, qkv.device, scale, tf32, rotations is None, qk_norm is None, eps)

    def make() -> tuple[Launch | Tensor, ...]:
        at_once = B * kv_heads <= _FEW_HEADS
        splits, split_rows = splits_of(rows, B * kv_heads, _SPLIT_ROWS[at_once])
        group, turns = H // kv_heads, _turns_of(rows, splits)
        settings = {
            "D": D, "BLOCK_D": triton.next_power_of_2(D), "GROUP": group,
            "BLOCK_M": max(16, triton.next_power_of_2(group)), "BLOCK_N": split_rows if at_once else 64,
            "BLOCK_S": triton.next_power_of_2(len(splits)), "STEP": combining_step(len(splits)),
            "AT_ONCE": at_once, "COMPACT": turns.compact,
            "ROTATED": rotations is not None, "NORMED": qk_norm is not None, "PRECISION": precision_of(tf32),
            "num_warps": 4, "num_stages": 2, **overlap(qkv.device),
        }  # fmt: skip
        numbers = (rows.total, len(turns.entries), kv_heads, len(splits), split_rows, scale, eps)
        launch = Launch(token_kernel, B * len(turns.entries), numbers, settings)
        tables = (turns.entries, turns.turns, turns.splits)
        return launch, ring_tables(rows, qkv)[1], *lasting(qkv.device, lambda: [table(x, qkv.device) for x in tables])

    launch, heads, entries, turns, splits = plans.remember("decode table", kind, make)
    line = (B, H, splits.shape[0])
    partial = torch.empty(*line, D, dtype=torch.float32, device=qkv.device)
    partial_lse = torch.empty(line, dtype=torch.float32, device=qkv.device)
    out = torch.empty(B, H * D, dtype=qkv.dtype, device=qkv.device)
    turned = rotations or (lengths,) * 4
    norms = (lengths,) * 2 if qk_norm is None else qk_norm[:2]
    launch(
        qkv, keys, values, partial, partial_lse, out, counters, lengths, entries, turns, splits, heads, *turned, *norms
    )
    return out


class _Turns(NamedTuple):
    """Which programs there are for the rows of a batch, and which heads they serve.

    A new token is on the grids of some heads only. Where every head is on the first branch at every position, a branch
    has as many programs per split as heads can have the same offset (`compact`); else one for every head.
    """

    compact: bool
    entries: list[tuple[int, ...]]  # of a program: split, first row, w, r, rows, capacity, its place in turns, step
    turns: list[tuple[int, ...]]  # head, offset and first row of its ring, of every offset's programs on every branch
    splits: list[tuple[int, ...]]  # branch, w, r


def _turns_of(rows: CacheRows, splits: list[tuple[int, int]]) -> _Turns:
    kv_heads = range(len(rows.offsets[0]))
    compact = bool(rows.branches) and rows.branches[0].offsets == (0,) * len(kv_heads)
    compact = compact and rows.branches[0].dilation_rate == 1
    entries, turns = [], []
    for i, branch in enumerate(rows.branches):
        rings = {h: branch.first + n * branch.capacity for n, h in enumerate(kv_heads[branch.heads])}
        every = [(h, branch.offsets[n], rings[h], 0) for n, h in enumerate(kv_heads[branch.heads])]
        missing = [] if compact else [(h, -1, 0, 0) for h in kv_heads if h not in rings]
        served = [[x for x in every + missing if x[1] == o or not compact] for o in range(branch.dilation_rate)]
        count = max(map(len, served))
        sizes = (branch.segment_length, branch.dilation_rate, branch.rows, branch.capacity)
        mine = [(split, first) for split, (of, first) in enumerate(splits) if of == i]
        entries += [(*one, *sizes, len(turns) + j, count) for one in mine for j in range(count)]
        turns += [line for some in served for line in some + [(-1, -1, 0, 0)] * (count - len(some))]
    if not rows.branches:  # nobody sees anything
        entries, turns = [(0, 0, 1, 1, 1, 1, h, 1) for h in kv_heads], [(h, -1, 0, 0) for h in kv_heads]
        return _Turns(False, entries, turns, [(0, 1, 1, 0)])
    of = [rows.branches[i] for i, _ in splits]
    listed = [(i, x.segment_length, x.dilation_rate, 0) for (i, _), x in zip(splits, of)]
    return _Turns(compact, entries, turns, listed)


@triton.jit
def _head_vector(X, Cos, Sin, Gain, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr,
                 NORMED: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """`(rows, D)` of heads at the pointers `X`, `(rows, 1)`: normed and rotated, in the order and with the rounding of
    PyTorch's operators; in float32."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    real = columns < D
    x = tl.load(X + columns, mask=real, other=0.0).to(tl.float32)
    share = 1.0
    if NORMED:
        share = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * share * tl.load(Gain + columns, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if ROTATED:
        half: tl.constexpr = D // 2
        other = tl.where(columns < half, columns + half, columns - half)
        y = tl.load(X + other, mask=real, other=0.0).to(tl.float32)
        if NORMED:
            y = (y * share * tl.load(Gain + other, mask=real, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        pair = tl.where(columns < half, columns, columns - half)
        cos = tl.load(Cos + pair, mask=real, other=0.0)
        sin = tl.load(Sin + pair, mask=real, other=0.0)
        x = (x * cos + tl.where(columns < half, -y, y) * sin).to(dtype).to(tl.float32)
    return x


@triton.jit
def _places(t, begins_at, end, C):
    """Where the rows t of the open segment are in a ring; those from `end` on are beyond it, and not loaded."""
    place = begins_at + t
    return tl.where(t < end, tl.where(place >= C, place - C, place), C)


@triton.jit
def _attend_rows(q, k, v, seen, highest, total, acc, scale, PRECISION: tl.constexpr):
    s = tl.where(seen[None, :], tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2_E), -float("inf"))
    higher = tl.maximum(highest, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    alpha = tl.exp2(highest - higher)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return higher, total * alpha + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=("rows", "entry_count", "Hkv", "split_count", "split_rows"))
def token_kernel(
    QKV, Keys, Values, Partial, PartialLse, Out, counters, lengths, entries, turns, splits, heads,
    CosQ, SinQ, CosK, SinK, GainQ, GainK, rows, entry_count, Hkv, split_count, split_rows, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, STEP: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr,
    AT_ONCE: tl.constexpr, COMPACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_the_next_kernel_start(OVERLAP)
    pid = tl.program_id(0)
    b = (pid // entry_count).to(tl.int64)
    entry = entries + pid % entry_count * 8
    split, first_row, W, rate = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    M, C, turn, step = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    position = tl.load(lengths + b)
    segment = tl.maximum(position, 0) // W
    within = tl.maximum(position, 0) - segment * W
    turn = turns + (turn + within % rate * step) * 4
    kv_head, offset, first = tl.load(turn), tl.load(turn + 1), tl.load(turn + 2)
    if kv_head < 0:
        return
    every = tl.arange(0, BLOCK_S)
    on_grid = every < split_count
    if COMPACT:  # splits of other branches have no program for this head
        line_of = splits + every * 4
        w, r = tl.load(line_of + 1, mask=on_grid, other=1), tl.load(line_of + 2, mask=on_grid, other=1)
        offsets = heads + (tl.load(line_of, mask=on_grid, other=0) * Hkv + kv_head) * 2
        on_grid &= tl.maximum(position, 0) % w % r == tl.load(offsets, mask=on_grid, other=-1)
    expected = tl.sum(on_grid.to(tl.int32), 0)
    dtype: tl.constexpr = QKV.dtype.element_ty

    lines = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + lines
    line = (b * (Hkv * GROUP) + head) * split_count
    newest = (within // rate).to(tl.int32)  # the row of the new token, if it is on the grid
    sees = (position >= 0) & (offset >= 0) & (within % rate == offset) & (first_row <= newest)
    if sees:
        columns = tl.arange(0, BLOCK_D)
        ring = (b * rows + first) * D
        begins_at = (segment * M % C).to(tl.int32)
        end = tl.minimum(first_row + split_rows, newest)
        if AT_ONCE:
            place = _places(first_row + tl.arange(0, BLOCK_N), begins_at, end, C)
            keys = load_rows(Keys + ring, place, D, D, BLOCK_D, C, True)
            values = load_rows(Values + ring, place, D, D, BLOCK_D, C, True)
        wait_for_the_kernel_before(OVERLAP)
        q_rows = QKV + b * ((GROUP + 2) * Hkv * D) + head[:, None] * D
        q_rows = tl.where(lines[:, None] < GROUP, q_rows, QKV)
        angles = b * (D // 2)
        q = _head_vector(q_rows, CosQ + angles, SinQ + angles, GainQ, eps, D, BLOCK_D, ROTATED, NORMED, dtype)
        highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if newest < first_row + split_rows:  # the new token is one of these rows: from registers, and stored
            one = tl.zeros([1, 1], tl.int32)
            k_row = QKV + b * ((GROUP + 2) * Hkv * D) + (GROUP * Hkv + kv_head) * D + one
            k = _head_vector(k_row, CosK + angles, SinK + angles, GainK, eps, D, BLOCK_D, ROTATED, NORMED, dtype)
            v_row = QKV + b * ((GROUP + 2) * Hkv * D) + ((GROUP + 1) * Hkv + kv_head) * D
            v = tl.load(v_row + columns[None, :], mask=columns[None, :] < D, other=0.0)
            own = ring + _places(newest, begins_at, newest + 1, C) * D + columns[None, :]
            tl.store(Keys + own, k.to(dtype), mask=columns[None, :] < D)
            tl.store(Values + own, v, mask=columns[None, :] < D)
            highest = tl.sum(q * k, 1) * (scale * LOG2_E)
            total += 1.0
            acc += v.to(tl.float32)
        q = q.to(dtype)
        if AT_ONCE:
            t = first_row + tl.arange(0, BLOCK_N)
            highest, total, acc = _attend_rows(q, keys, values, t < end, highest, total, acc, scale, PRECISION)
        else:
            for row in tl.range(first_row, end, BLOCK_N):
                t = row + tl.arange(0, BLOCK_N)
                place = _places(t, begins_at, end, C)
                k = load_rows(Keys + ring, place, D, D, BLOCK_D, C, True)
                v = load_rows(Values + ring, place, D, D, BLOCK_D, C, True)
                highest, total, acc = _attend_rows(q, k, v, t < end, highest, total, acc, scale, PRECISION)
        real = (lines < GROUP)[:, None] & (columns[None, :] < D)
        tl.store(PartialLse + line + split, (highest + tl.log2(total)) * LN_2, mask=lines < GROUP)
        tl.store(Partial + (line + split)[:, None] * D + columns[None, :], acc / total[:, None], mask=real)
    else:
        wait_for_the_kernel_before(OVERLAP)
        tl.store(PartialLse + line + split, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=lines < GROUP)

    if COMPACT and split == 0:
        place = (b * (Hkv * GROUP) + head)[:, None] * split_count + every[None, :]
        unseen = (lines < GROUP)[:, None] & ((every < split_count) & ~on_grid)[None, :]
        tl.store(PartialLse + place, tl.full([BLOCK_M, BLOCK_S], -float("inf"), tl.float32), mask=unseen)
    # The program that ends last finds the results of all others in L2, where stores and the counter meet.
    tl.debug_barrier()
    ended = tl.atomic_add(counters + b * Hkv + kv_head, 1, sem="acq_rel")
    tl.debug_barrier()
    if ended == expected - 1:
        columns = tl.arange(0, BLOCK_D)
        for g in tl.range(0, GROUP):
            row = b * (Hkv * GROUP) + kv_head * GROUP + g
            out, _ = combined(Partial, PartialLse, row, split_count, D, BLOCK_D, BLOCK_S, STEP)
            tl.store(Out + row * D + columns, out.to(dtype), mask=columns < D)
