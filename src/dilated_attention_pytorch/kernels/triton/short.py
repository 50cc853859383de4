"""Short sequences: all branches in one launch forward and two backward, because launching takes longer than computing.

Tokens with the same remainder modulo `classes`, the least common multiple of the rates, are on the same branches. A
program owns a tile of such tokens of one head, which lies in one segment of each branch, and walks one branch after the
other: nothing is cleared or merged in memory. The price is that a tile of `M` rows reaches over `M * classes` tokens,
and so shares few keys with its neighbours. `own_rows` says which calls can be cut like this, and `takes` when it pays.

The mathematics is that of `triton.forward` and `triton.backward`.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.entries import lasting, lasting_table
from dilated_attention_pytorch.core.spec import OffsetTable
from dilated_attention_pytorch.kernels.triton.launching import Launch
from dilated_attention_pytorch.kernels.triton.primitives import (
    LN_2,
    LOG2_E,
    dropout_key_word,
    dropout_row_word,
    keeps,
    load_rows,
    store_rows,
)
from dilated_attention_pytorch.kernels.triton.tuning import tiles_for

_MOST_PAIRS = 1 << 24  # of a query and a key, over all heads: with more, launching is the lesser part

_UNSPECIALIZED = ("N", "H", "classes", "tiles", "branches", "head_offset", "first_position", "threshold")


@triton.jit
def _own_tile(N, heads, classes, tiles, BLOCK: tl.constexpr):
    """A program's remainder, head, batch row, tokens, and the first and last of them. It has none if the first is N or
    more.
    """
    pid = tl.program_id(0)
    remainder = pid // tiles % classes
    head = (pid // tiles // classes % heads).to(tl.int64)
    b = (pid // tiles // classes // heads).to(tl.int64)
    first = remainder + pid % tiles * BLOCK * classes
    last = tl.minimum(first + (BLOCK - 1) * classes, remainder + (N - 1 - remainder) // classes * classes)
    return remainder, head, b, first + tl.arange(0, BLOCK) * classes, first, last


@triton.jit
def _grid(table, i, kv_heads, kv_head, remainder, first, N):
    """Of a branch's segment around token `first`: whether tokens with this remainder are on its grid, the grid's rate,
    first token and number of rows.
    """
    line = table + i * (kv_heads + 2)
    W = tl.load(line)
    rate = tl.load(line + 1)
    offset = tl.load(line + 2 + kv_head)
    start = first // W * W
    count = (tl.minimum(W, N - start) - offset + rate - 1) // rate
    return (offset >= 0) & (remainder % rate == offset), rate, start + offset, count


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def forward_kernel(
    Q, K, V, Out, Lse, table, seed, q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    N, H, classes, tiles, branches, head_offset, first_position, scale, keep_scale, threshold,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    remainder, head, b, tokens, first, last = _own_tile(N, H, classes, tiles, BLOCK_M)
    if first >= N:
        return
    kv = head // GROUP
    q = load_rows(Q + b * q_b + head * q_h, tokens, q_n, D, BLOCK_D, N, True)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_word = tokens.to(tl.uint32)
    if DROPOUT:
        row_word = dropout_row_word(seed, b, head + head_offset, first_position + tokens)
    for i in range(branches):
        is_on, rate, token, count = _grid(table, i, H // GROUP, kv, remainder, first, N)
        if is_on:
            k_base = K + b * k_b + token * k_n + kv * k_h
            v_base = V + b * v_b + token * v_n + kv * v_h
            end = count
            if CAUSAL:
                end = tl.minimum(count, (last - token) // rate + 1)
            for row in range(0, end, BLOCK_N):
                rows = row + tl.arange(0, BLOCK_N)
                keys = token + rows * rate
                sees = (rows < count)[None, :]
                if CAUSAL:
                    sees = sees & (keys[None, :] <= tokens[:, None])
                k = load_rows(k_base, rows, rate * k_n, D, BLOCK_D, count, True)
                s = tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2_E)
                s = tl.where(sees, s, -float("inf"))
                m_new = tl.maximum(m, tl.max(s, 1))
                base = tl.where(m_new == -float("inf"), 0.0, m_new)  # of rows that have seen no key yet
                p = tl.exp2(s - base[:, None])
                alpha = tl.exp2(m - base)
                total = total * alpha + tl.sum(p, 1)
                if DROPOUT:
                    key_word = dropout_key_word(first_position + keys)
                    p = tl.where(keeps(row_word[:, None], key_word[None, :], threshold), p * keep_scale, 0.0)
                v = load_rows(v_base, rows, rate * v_n, D, BLOCK_D, count, True)
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
                m = m_new
    total = tl.where(total == 0.0, 1.0, total)  # of rows that no branch covers: out is 0, and lse -inf
    store_rows(Out + (b * N * H + head) * D, tokens, H * D, D, BLOCK_D, N, acc / total[:, None])
    tl.store(Lse + (b * H + head) * N + tokens, (m + tl.log2(total)) * LN_2, mask=tokens < N)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def dq_kernel(
    Q, K, V, Out, Do, Dlse, Lse, Delta, Dq, table, seed,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h, dl_b, dl_n, dl_h,
    N, H, classes, tiles, branches, head_offset, first_position, scale, keep_scale, threshold,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """`dq` of a tile of query rows, and their `delta`, which `dkdv_kernel` reads."""
    remainder, head, b, tokens, first, last = _own_tile(N, H, classes, tiles, BLOCK_M)
    if first >= N:
        return
    kv = head // GROUP
    q = load_rows(Q + b * q_b + head * q_h, tokens, q_n, D, BLOCK_D, N, True)
    do = load_rows(Do + b * do_b + head * do_h, tokens, do_n, D, BLOCK_D, N, True)
    out = load_rows(Out + (b * N * H + head) * D, tokens, H * D, D, BLOCK_D, N, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(Dlse + b * dl_b + head * dl_h + tokens * dl_n, mask=tokens < N, other=0.0)
    at = (b * H + head) * N + tokens
    tl.store(Delta + at, delta, mask=tokens < N)
    lse = tl.load(Lse + at, mask=tokens < N, other=0.0) * LOG2_E
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_word = tokens.to(tl.uint32)
    if DROPOUT:
        row_word = dropout_row_word(seed, b, head + head_offset, first_position + tokens)
    for i in range(branches):
        is_on, rate, token, count = _grid(table, i, H // GROUP, kv, remainder, first, N)
        if is_on:
            k_base = K + b * k_b + token * k_n + kv * k_h
            v_base = V + b * v_b + token * v_n + kv * v_h
            end = count
            if CAUSAL:
                end = tl.minimum(count, (last - token) // rate + 1)
            for row in range(0, end, BLOCK_N):
                rows = row + tl.arange(0, BLOCK_N)
                keys = token + rows * rate
                sees = (rows < count)[None, :]
                if CAUSAL:
                    sees = sees & (keys[None, :] <= tokens[:, None])
                k = load_rows(k_base, rows, rate * k_n, D, BLOCK_D, count, True)
                v = load_rows(v_base, rows, rate * v_n, D, BLOCK_D, count, True)
                s = tl.dot(q, k.T, input_precision=PRECISION) * (scale * LOG2_E)
                p = tl.where(sees, tl.exp2(s - lse[:, None]), 0.0)
                dp = tl.dot(do, v.T, input_precision=PRECISION)
                if DROPOUT:
                    key_word = dropout_key_word(first_position + keys)
                    dp = tl.where(keeps(row_word[:, None], key_word[None, :], threshold), dp * keep_scale, 0.0)
                ds = p * (dp - delta[:, None])
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(Dq + (b * N * H + head) * D, tokens, H * D, D, BLOCK_D, N, dq * scale)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def dkdv_kernel(
    Q, K, V, Do, Lse, Delta, Dk, Dv, table, seed,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, do_b, do_n, do_h,
    N, H, classes, tiles, branches, head_offset, first_position, scale, keep_scale, threshold,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of a tile of key rows of one KV head."""
    kv_heads = H // GROUP
    remainder, kv, b, tokens, first, _ = _own_tile(N, kv_heads, classes, tiles, BLOCK_N)
    if first >= N:
        return
    k = load_rows(K + b * k_b + kv * k_h, tokens, k_n, D, BLOCK_D, N, True)
    v = load_rows(V + b * v_b + kv * v_h, tokens, v_n, D, BLOCK_D, N, True)
    key_word = tokens.to(tl.uint32)
    if DROPOUT:
        key_word = dropout_key_word(first_position + tokens)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(branches):
        is_on, rate, token, count = _grid(table, i, kv_heads, kv, remainder, first, N)
        if is_on:
            begin = 0
            if CAUSAL:
                begin = tl.maximum(first - token, 0) // rate // BLOCK_M * BLOCK_M
            for g in range(GROUP):
                head = kv * GROUP + g
                q_base = Q + b * q_b + token * q_n + head * q_h
                do_base = Do + b * do_b + token * do_n + head * do_h
                at = (b * H + head) * N + token
                for row in range(begin, count, BLOCK_M):
                    rows = row + tl.arange(0, BLOCK_M)
                    queries = token + rows * rate
                    sees = (rows < count)[None, :]
                    if CAUSAL:
                        sees = sees & (tokens[:, None] <= queries[None, :])
                    q = load_rows(q_base, rows, rate * q_n, D, BLOCK_D, count, True)
                    do = load_rows(do_base, rows, rate * do_n, D, BLOCK_D, count, True)
                    lse = tl.load(Lse + at + rows * rate, mask=rows < count, other=0.0) * LOG2_E
                    delta = tl.load(Delta + at + rows * rate, mask=rows < count, other=0.0)
                    s = tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2_E)
                    p = tl.where(sees, tl.exp2(s - lse[None, :]), 0.0)
                    dp = tl.dot(v, do.T, input_precision=PRECISION)
                    kept_p = p
                    if DROPOUT:
                        row_word = dropout_row_word(seed, b, head + head_offset, first_position + queries)
                        kept = keeps(row_word[None, :], key_word[:, None], threshold)
                        kept_p = tl.where(kept, p * keep_scale, 0.0)
                        dp = tl.where(kept, dp * keep_scale, 0.0)
                    dv = tl.dot(kept_p.to(do.dtype), do, dv, input_precision=PRECISION)
                    ds = p * (dp - delta[None, :])
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    into = (b * N * kv_heads + kv) * D
    store_rows(Dk + into, tokens, kv_heads * D, D, BLOCK_D, N, dk * scale)
    store_rows(Dv + into, tokens, kv_heads * D, D, BLOCK_D, N, dv)


def own_rows(call: Call, tokens: int) -> int:
    """The rows of a tile that lies in one segment of each branch; 0 if there is none of 16 rows or more.

    A block layout leaves out tiles of other rows, and a shard's segments may begin before its first token.
    """
    if call.sparse is not None or call.table is not None:
        return 0
    classes = math.lcm(*call.spec.dilation_rates)
    lengths = [w for w in call.spec.segment_lengths if w < tokens]
    return next((rows for rows in (64, 32, 16) if not any(w % (rows * classes) for w in lengths)), 0)


def takes(call: Call, batch: int, tokens: int, heads: int) -> bool:
    """Whether a call of whole rows can be computed in one launch, and is short enough for that to pay."""
    pairs = sum(min(branch.segment_length, tokens) * tokens // branch.dilation_rate**2 for branch in call.spec.branches)
    return own_rows(call, tokens) > 0 and batch * heads * pairs <= _MOST_PAIRS


class Short:
    """The launches of a call: `forward`, or, in a plan with a `grad_out`, `dq` and then `dkdv`."""

    def __init__(self, plan: Any, table: OffsetTable, grad_lse: Tensor | None) -> None:
        call, kv_heads = plan.call, plan.H // plan.group
        self.plan = plan
        rows = tuple(
            (min(branch.segment_length, plan.N), branch.dilation_rate, *(-1 if x is None else x for x in offsets))
            for branch, offsets in zip(call.spec.branches, table)
        )
        self.table = lasting_table(plan.device, rows)
        self.classes = math.lcm(*call.spec.dilation_rates)
        # (B, N, H) as kernels write it, (B, H, N). A result like it needs no transposition, which takes a microsecond.
        self.like_lse = lasting(
            plan.device,
            lambda: torch.empty(plan.B, plan.H, plan.N, dtype=torch.float32, device=plan.device).transpose(1, 2),
        )
        self.lse_strides = self.like_lse.stride()
        numbers = (len(rows), call.head_offset, call.first_position, plan.scale, plan.keep_scale, plan.threshold)
        if len(plan.strides) == 9:
            self.forward = self._launch(forward_kernel, "forward", plan.H, plan.strides, numbers, {})
            return
        dl = (0, 0, 0) if grad_lse is None else grad_lse.stride()
        more = {"HAS_DLSE": grad_lse is not None}
        self.dq = self._launch(dq_kernel, "dq", plan.H, (*plan.strides, *dl), numbers, more)
        self.dkdv = self._launch(dkdv_kernel, "dkdv", kv_heads, plan.strides, numbers, {})

    def _launch(
        self, kernel: Any, name: str, heads: int, strides: tuple[int, ...], numbers: tuple[float, ...], more: dict
    ) -> Launch:
        plan = self.plan
        found = tiles_for(name, plan.block_d, plan.itemsize, -(-plan.N // self.classes), plan.call.is_causal)
        own = min(found.own, own_rows(plan.call, plan.N))
        tiles = -(-plan.N // (own * self.classes))
        settings = {
            "D": plan.D,
            "GROUP": plan.group,
            "BLOCK_D": plan.block_d,
            "BLOCK_M": found.walk if name == "dkdv" else own,
            "BLOCK_N": own if name == "dkdv" else found.walk,
            "CAUSAL": plan.call.is_causal,
            "DROPOUT": plan.drops,
            "PRECISION": plan.precision,
            **more,
            "num_warps": 4,
            "num_stages": found.num_stages,
        }
        programs = tiles * self.classes * heads * plan.B
        return Launch(kernel, programs, (*strides, plan.N, plan.H, self.classes, tiles, *numbers), settings)
