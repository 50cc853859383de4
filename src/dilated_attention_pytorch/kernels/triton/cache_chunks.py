"""Many new tokens and a bounded cache: storing them, and putting cached rows back before them; a launch each.

A ring keeps, at place c, the newest grid row whose number is c modulo its capacity (`core.cache_rows`). So a program
of `store_kernel` takes some places of one ring, and looks whether their newest rows are among the new tokens.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core.cache_rows import CacheState
from dilated_attention_pytorch.kernels.triton.decode import ring_of, ring_tables
from dilated_attention_pytorch.kernels.triton.launching import is_elsewhere
from dilated_attention_pytorch.kernels.triton.primitives import load_rows, store_rows

_ROWS = 64  # of a program


def store(key: Tensor, value: Tensor, state: CacheState) -> None:
    """Put the grid rows of new tokens into their places; what a newer one overwrites is not written at all."""
    if state.rows.branches:
        most = max(branch.capacity for branch in state.rows.branches)
        _launch(store_kernel, most, key, value, state, ())


def after_cached(key: Tensor, value: Tensor, state: CacheState, before: int) -> tuple[Tensor, Tensor]:
    """Keys and values of new tokens after `before` more: cached rows at their places, zeros between them.

    Of the tokens before, a branch shows none but the rows that it keeps.
    """
    tokens = before + key.shape[1]
    k, v = (x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in (key, value))
    _launch(after_cached_kernel, tokens, key, value, state, (k, v, before))
    return k, v


def _launch(kernel, rows: int, key: Tensor, value: Tensor, state: CacheState, more: tuple) -> None:
    """A program for each batch row, branch or all of them, key/value head, and `_ROWS` of so many rows."""
    if is_elsewhere(key):
        with torch.cuda.device(key.device):
            return _launch(kernel, rows, key, value, state, more)
    B, m, kv_heads, D = key.shape
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    branches, heads = ring_tables(state.rows, key)
    tiles = triton.cdiv(rows, _ROWS)
    programs = B * kv_heads * tiles * (branches.shape[0] if kernel is store_kernel else 1)
    kernel[(programs,)](
        key,
        value,
        state.keys,
        state.values,
        state.lengths,
        branches,
        heads,
        *key.stride()[:3],
        *value.stride()[:3],
        state.rows.total,
        branches.shape[0],
        kv_heads,
        m,
        tiles,
        *more,
        D=D,
        BLOCK_D=triton.next_power_of_2(D),
        BLOCK_R=_ROWS,
    )


UNSPECIALIZED = ("rows", "branch_count", "Hkv", "m", "tiles")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def store_kernel(
    K, V, Keys, Values, lengths, branches, heads,
    k_b, k_n, k_h, v_b, v_n, v_h, rows, branch_count, Hkv, m, tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = pid % tiles
    branch = (pid // tiles) % branch_count
    head = (pid // tiles // branch_count) % Hkv
    b = (pid // tiles // branch_count // Hkv).to(tl.int64)
    W, rate, M, C, offset, first = ring_of(branches, heads, branch, head, Hkv)
    begin = tl.load(lengths + b)
    end = begin + m
    if offset < 0 or end <= 0 or tile * BLOCK_R >= C:
        return
    place = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    newest = (end - 1) // W * M + tl.minimum((end - 1) % W // rate, M - 1)
    number = newest - (newest - place + C) % C
    within = number % M * rate + offset
    position = number // M * W + within
    # The last row of a segment may be one that this head has not.
    new = (place < C) & (number >= 0) & (within < W) & (position >= tl.maximum(begin, 0)) & (position < end)
    token = tl.where(new, position - begin, m)  # beyond the new ones: not loaded
    head64 = head.to(tl.int64)
    k = load_rows(K + b * k_b + head64 * k_h, token, k_n, D, BLOCK_D, m, True)
    v = load_rows(V + b * v_b + head64 * v_h, token, v_n, D, BLOCK_D, m, True)
    ring = (b * rows + first) * D
    place = tl.where(new, place, C)  # beyond the ring: not stored
    store_rows(Keys + ring, place, D, D, BLOCK_D, C, k)
    store_rows(Values + ring, place, D, D, BLOCK_D, C, v)


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "before"))
def after_cached_kernel(
    K, V, Keys, Values, lengths, branches, heads,
    k_b, k_n, k_h, v_b, v_n, v_h, rows, branch_count, Hkv, m, tiles, WholeK, WholeV, before,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = pid % tiles
    head = (pid // tiles) % Hkv
    b = (pid // tiles // Hkv).to(tl.int64)
    begin = tl.load(lengths + b)
    t = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    position = begin - before + t
    # Where the row lies in the cache, by any branch that keeps it: they keep the same.
    none = rows  # beyond the cache: not loaded
    place = tl.full([BLOCK_R], 0, tl.int64) + none
    for branch in tl.range(0, branch_count):
        W, rate, M, C, offset, first = ring_of(branches, heads, branch, head, Hkv)
        within = position % W
        is_open = (t < before) & (position >= begin // W * W)
        kept = is_open & (offset >= 0) & (within % rate == offset)
        place = tl.where(kept, first + (position // W * M + within // rate) % C, place)
    head64 = head.to(tl.int64)
    token = tl.where(t >= before, t - before, m)
    cached, whole = b * rows * D, (b * (before + m) * Hkv + head64) * D
    k = load_rows(Keys + cached, place, D, D, BLOCK_D, none, True)
    k += load_rows(K + b * k_b + head64 * k_h, token, k_n, D, BLOCK_D, m, True)
    v = load_rows(Values + cached, place, D, D, BLOCK_D, none, True)
    v += load_rows(V + b * v_b + head64 * v_h, token, v_n, D, BLOCK_D, m, True)
    store_rows(WholeK + whole, t, Hkv * D, D, BLOCK_D, before + m, k)
    store_rows(WholeV + whole, t, Hkv * D, D, BLOCK_D, before + m, v)
