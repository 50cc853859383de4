"""A few new tokens against a bounded cache, all branches in one launch: split, then combine.

A program takes one split, some of the rows that a branch keeps for a key/value head, and the queries of that head's
group: with few queries there would be too few programs otherwise. For its rows t of the open segment, which lie at
`(segment * rows + t) % capacity` of the head's ring, it leaves

    lse_s = log sum_t exp(scale * q.k_t),    out_s = sum_t exp(scale * q.k_t - lse_s) v_t

and a second kernel merges the splits of a row: lse = log sum_s exp(lse_s), out = sum_s exp(lse_s - lse) out_s.
`append_kernel` stores new tokens on the grids that they are on.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.cache_rows import CacheRows, CacheState, decode_table
from dilated_attention_pytorch.core.entries import lasting
from dilated_attention_pytorch.core.merge import merge
from dilated_attention_pytorch.core.modes import tf32
from dilated_attention_pytorch.kernels.decode import own_partial
from dilated_attention_pytorch.kernels.triton.launching import Launch, is_elsewhere
from dilated_attention_pytorch.kernels.triton.plan import allows_tf32, precision_of
from dilated_attention_pytorch.kernels.triton.primitives import LN_2, LOG2_E, load_rows

_PROGRAMS = 528  # four for each multiprocessor of an H200: as many splits as that takes
_SPLIT_ROWS = (512, 256, 128, 64)


def decode(
    query: Tensor, key: Tensor, value: Tensor, state: CacheState, scale: float, allow_tf32: bool | None
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the new tokens, which are stored; see `kernels.decode.attend_cached`."""
    if is_elsewhere(query):
        with torch.cuda.device(query.device):
            return decode(query, key, value, state, scale, allow_tf32)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    m = query.shape[1]
    keys, values, lengths, rows, _ = state
    described = (
        rows, query.shape, query.stride()[:3], key.stride()[:3], value.stride()[:3], query.dtype, query.device, scale,
        query.dtype == torch.float32 and allows_tf32(allow_tf32),
    )  # fmt: skip
    plan = plans.remember("decode table", described, lambda: _plan(*described))
    if m == 1:  # stored first, it is one of the cached rows
        plan.append(key, value, keys, values, lengths, plan.branches, plan.heads)
    partial = torch.empty(plan.partial_shape, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(plan.partial_shape[:-1], dtype=torch.float32, device=query.device)
    plan.split(query, keys, values, partial, partial_lse, lengths, plan.branches, plan.heads, plan.splits)
    out = torch.empty(query.shape, dtype=query.dtype if m == 1 else torch.float32, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    plan.combine(partial, partial_lse, out, lse)
    if m > 1:
        with tf32(allow_tf32, query.device):
            out, lse = merge(out, lse, *own_partial(query, key, value, state, scale))
        out = out.to(query.dtype)
        plan.append(key, value, keys, values, lengths, plan.branches, plan.heads)
    return out, lse


class _Plan(NamedTuple):
    """What equal calls share: launches, and tables on the device, which a captured CUDA graph reads again."""

    append: Launch
    split: Launch
    combine: Launch
    partial_shape: tuple[int, ...]
    branches: Tensor
    heads: Tensor
    splits: Tensor


def _plan(rows: CacheRows, shape, q_strides, k_strides, v_strides, dtype, device, scale, tf32) -> _Plan:
    B, m, H, D = shape
    kv_heads = len(rows.offsets[0])
    group = H // kv_heads
    branches = rows.branches
    block_d = triton.next_power_of_2(D)
    block_m = max(16, min(64, triton.next_power_of_2(m * group)))
    tiles = triton.cdiv(m * group, block_m)
    splits, split_rows = splits_of(rows, B * kv_heads * tiles)
    stored = (rows.total, max(1, len(branches)), kv_heads, m)
    shared = {"D": D, "BLOCK_D": block_d}
    split_settings = {
        "GROUP": group,
        "BLOCK_M": block_m,
        "BLOCK_N": min(64, split_rows),
        "PRECISION": precision_of(tf32),
        "num_warps": 4,
        "num_stages": 2,
    }
    split = Launch(
        split_kernel,
        B * kv_heads * tiles * len(splits),
        (*q_strides, *stored, len(splits), tiles, split_rows, 1 if m == 1 else 0, scale),
        shared | split_settings,
    )
    combine_settings = {"BLOCK_S": triton.next_power_of_2(len(splits)), "STEP": combining_step(len(splits))}
    return _Plan(
        Launch(append_kernel, B * m * kv_heads * stored[1], (*k_strides, *v_strides, *stored), shared),
        split,
        Launch(combine_kernel, B * m * H, (len(splits),), shared | combine_settings),
        (B, m, H, len(splits), D),
        *lasting(device, lambda: (*_ring_tables(rows, device), table(splits, device))),
    )


def splits_of(
    rows: CacheRows, programs_per_split: int, lengths: Sequence[int] = _SPLIT_ROWS
) -> tuple[list[tuple[int, int]], int]:
    """`(branch, first row)` of every split, and the rows of one: the longest splits that still keep the GPU busy."""

    def programs(length: int) -> int:
        return programs_per_split * sum(triton.cdiv(branch.rows, length) for branch in rows.branches)

    length = next((length for length in lengths if programs(length) >= _PROGRAMS), lengths[-1])
    splits = [(i, first) for i, branch in enumerate(rows.branches) for first in range(0, branch.rows, length)]
    return splits or [(0, 0)], length


def ring_tables(rows: CacheRows, like: Tensor) -> tuple[Tensor, Tensor]:
    """`(w, r, rows, capacity)` of every branch, and `(offset, first row)` of every key/value head on each of them.

    Where no head is on any branch, one that nobody is on stands for all.
    """
    return decode_table(_ring_tables, rows, like)


def _ring_tables(rows: CacheRows, device: torch.device) -> tuple[Tensor, Tensor]:
    kv_heads = range(len(rows.offsets[0]))
    branches = [(b.segment_length, b.dilation_rate, b.rows, b.capacity) for b in rows.branches]
    heads = [
        (branch.offsets[h - branch.heads.start], branch.first + (h - branch.heads.start) * branch.capacity)
        if branch.heads.start <= h < branch.heads.stop
        else (-1, 0)
        for branch in rows.branches
        for h in kv_heads
    ]
    return table(branches or [(1, 1, 1, 1)], device), table(heads or [(-1, 0) for _ in kv_heads], device)


def table(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


UNSPECIALIZED = ("rows", "branch_count", "Hkv", "m", "split_count", "tiles", "split_rows", "appended")


@triton.jit
def ring_of(branches, heads, branch, head, Hkv):
    """`(w, r, rows, capacity, offset, first row)` of a key/value head's ring on a branch: see `ring_tables`."""
    line = branches + branch * 4
    place = heads + (branch * Hkv + head) * 2
    return (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(place), tl.load(place + 1)
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def append_kernel(
    K, V, Keys, Values, lengths, branches, heads,
    k_b, k_n, k_h, v_b, v_n, v_h, rows, branch_count, Hkv, m,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token of one head on one branch, if it is a row of its grid and the newest of these tokens at its place."""
    pid = tl.program_id(0)
    branch = pid % branch_count
    head = (pid // branch_count) % Hkv
    i = (pid // branch_count // Hkv) % m
    b = (pid // branch_count // Hkv // m).to(tl.int64)
    W, rate, M, C, offset, first = ring_of(branches, heads, branch, head, Hkv)
    begin = tl.load(lengths + b)
    position = begin + i
    if offset < 0 or position < 0:
        return
    within = position % W
    newest = begin + m - 1
    number = position // W * M + within // rate
    if within % rate != offset or number <= newest // W * M + tl.minimum(newest % W // rate, M - 1) - C:
        return
    columns = tl.arange(0, BLOCK_D)
    real = columns < D
    place = (b * rows + first + number % C) * D + columns
    k = tl.load(K + b * k_b + i * k_n + head.to(tl.int64) * k_h + columns, mask=real, other=0.0)
    v = tl.load(V + b * v_b + i * v_n + head.to(tl.int64) * v_h + columns, mask=real, other=0.0)
    tl.store(Keys + place, k, mask=real)
    tl.store(Values + place, v, mask=real)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def split_kernel(
    Q, Keys, Values, Out, Lse, lengths, branches, heads, splits, q_b, q_n, q_h, rows, branch_count, Hkv,
    m, split_count, tiles, split_rows, appended, scale,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    split = pid % split_count
    tile = (pid // split_count) % tiles
    kv_head = (pid // split_count // tiles) % Hkv
    b = (pid // split_count // tiles // Hkv).to(tl.int64)
    branch = tl.load(splits + split * 2)
    first_row = tl.load(splits + split * 2 + 1)
    W, rate, M, C, offset, first = ring_of(branches, heads, branch, kv_head, Hkv)

    # Queries of a group lie side by side; what they see lies in the newest cached token's segment.
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i = lines // GROUP
    head = kv_head * GROUP + lines % GROUP
    begin = tl.load(lengths + b)
    held = begin + appended
    segment = tl.maximum(held - 1, 0) // W
    start = segment * W
    within = begin + i - start
    sees = (i < m) & (held > 0) & (offset >= 0) & (begin + i >= 0) & (within < W) & (within % rate == offset)
    tokens = tl.minimum(within + 1, held - start)
    count = tl.where(sees, (tokens - offset + rate - 1) // rate, 0).to(tl.int32)
    end = tl.minimum(first_row + split_rows, tl.max(count))

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    columns = tl.arange(0, BLOCK_D)
    q_rows = Q + b * q_b + i[:, None].to(tl.int64) * q_n + head[:, None].to(tl.int64) * q_h
    q = tl.load(q_rows + columns[None, :], mask=(i[:, None] < m) & (columns[None, :] < D), other=0.0)
    ring = (b * rows + first) * D
    begins_at = (segment * M % C).to(tl.int32)
    for row in tl.range(first_row, end, BLOCK_N):
        t = row + tl.arange(0, BLOCK_N)
        place = begins_at + t
        place = tl.where(place >= C, place - C, place)
        place = tl.where(t < end, place, C)  # beyond the ring: not loaded
        k = load_rows(Keys + ring, place, D, D, BLOCK_D, C, True)
        s = tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2_E)
        s = tl.where(t[None, :] < count[:, None], s, -float("inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        # A row that has seen nothing yet would take -inf from -inf.
        against = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(s - against[:, None])
        alpha = tl.exp2(highest - against)
        total = total * alpha + tl.sum(p, 1)
        v = load_rows(Values + ring, place, D, D, BLOCK_D, C, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        highest = higher
    seen = total != 0  # NaN is seen too
    line = ((b * m + i) * (Hkv * GROUP) + head) * split_count + split
    tl.store(
        Lse + line, tl.where(seen, (highest + tl.log2(tl.where(seen, total, 1.0))) * LN_2, -float("inf")), mask=i < m
    )
    out = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(
        Out + line[:, None] * D + columns[None, :], out, mask=seen[:, None] & (i[:, None] < m) & (columns[None, :] < D)
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    Partial, PartialLse, Out, Lse, split_count,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    out, lse = combined(Partial, PartialLse, line, split_count, D, BLOCK_D, BLOCK_S, STEP)
    columns = tl.arange(0, BLOCK_D)
    tl.store(Out + line * D + columns, out.to(Out.dtype.element_ty), mask=columns < D)
    tl.store(Lse + line, lse)


def combining_step(splits: int) -> int:
    """How many splits a program reads at once."""
    return min(64, triton.next_power_of_2(splits))


@triton.jit
def combined(
    Partial, PartialLse, line, split_count,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`(out, lse)` of one row of one head; a split that saw nothing has left no `out`.

    It reads L2, in which programs of the same launch leave theirs.
    """
    every = tl.arange(0, BLOCK_S)
    lines = PartialLse + line * split_count
    lse = tl.load(lines + every, mask=every < split_count, other=-float("inf"), cache_modifier=".cg")
    highest = tl.max(lse, 0)
    against = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.sum(tl.exp2((lse - against) * LOG2_E), 0)
    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, split_count, STEP):
        split = start + tl.arange(0, STEP)
        share = tl.load(lines + split, mask=split < split_count, other=-float("inf"), cache_modifier=".cg")
        weight = tl.exp2((share - against) * LOG2_E)
        real = (split[:, None] < split_count) & (columns[None, :] < D)
        place = (line * split_count + split[:, None]) * D + columns[None, :]
        partial = tl.load(Partial + place, mask=real, other=0.0, cache_modifier=".cg")  # does not wait for the share
        acc += tl.sum(weight[:, None] * tl.where(share[:, None] != -float("inf"), partial, 0.0), 0)
    seen = total != 0
    some = tl.where(seen, total, 1.0)
    return acc / some, tl.where(seen, against + tl.log2(some) * LN_2, -float("inf"))
