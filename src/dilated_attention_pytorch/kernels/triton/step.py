"""One token per row through a transformer layer in five launches: what it takes is reading the weights.

`embed_kernel` begins a step: embeddings, and the angles of the new positions. `linear_kernel` computes
`residual + activation(norm(x) W' + b)` for up to three matrices side by side. Every program normalises a single row
again, which costs less than a launch; `norm_kernel` normalises several rows first. `token_kernel` rotates the new query
and key, stores key and value on the grids that they are on, and attends to the cache; the split that ends last combines
all splits of a head:

    lse_s = log sum_t exp(scale * q.k_t),    out_s = sum_t exp(scale * q.k_t - lse_s) v_t
    lse = log sum_s exp(lse_s),              out = sum_s exp(lse_s - lse) out_s

The splits are combined in their order, whichever ends last, so results are the same every time.

From compute capability 9.0 on, every kernel starts while the one before it still runs, loads what no kernel of the step
writes, such as weights, and then waits for the results of the one before. It stores nothing before it has waited. A
kernel ends after it has waited, so whatever is launched later finds all earlier results.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.cache_rows import CacheState
from dilated_attention_pytorch.core.entries import lasting
from dilated_attention_pytorch.kernels.triton.decode import (
    combined,
    combining_step,
    ring_of,
    ring_tables,
    splits_of,
    table,
)
from dilated_attention_pytorch.kernels.triton.launching import Launch
from dilated_attention_pytorch.kernels.triton.plan import allows_tf32, precision_of
from dilated_attention_pytorch.kernels.triton.primitives import LN_2, LOG2_E, load_rows

_MOST_ROWS = 64  # of a tile; more rows read the weights again
_PROGRAMS = 132  # one for each multiprocessor of an H200
_FEW_HEADS = 128  # of all rows together: then splits are short, and their programs hold them at once
_SPLIT_ROWS = {True: (128, 64), False: (512,)}
_NORMS = {None: 0, "layer": 1, "rms": 2}
_ROW_TILE = 32_768  # numbers of W that a program of one row holds at once
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}


def overlap(device: torch.device) -> dict[str, bool]:
    """Settings of a kernel that may start while the one before it still runs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0) or not hasattr(tl_cuda, "gdc_wait"):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def _wait_for_the_kernel_before(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl_cuda.gdc_wait()


@triton.jit
def _let_the_next_kernel_start(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()


def embed(tokens, embedding, factor, lengths, turns):
    """See `kernels.decode.embed_rows`."""
    B, (_, E), device = tokens.shape[0], embedding.shape, embedding.device
    half = 0 if turns is None else turns.frequencies.shape[0]
    xpos = turns is not None and turns.log2_zeta is not None
    period, base = (turns.period, turns.scale_base) if xpos else (1, 1.0)
    key = (embed, B, E, half, xpos, period, base, factor, embedding.dtype, device)

    def make():
        settings = {"BLOCK_E": triton.next_power_of_2(E), "HALF": half, "XPOS": xpos, "SCALE_BASE": base}
        settings |= {"BLOCK_H": triton.next_power_of_2(max(half, 1)), "num_warps": 4, **overlap(device)}
        return _Launches(Launch(embed_kernel, B, (E, factor, period), settings))

    x = torch.empty(B, E, dtype=embedding.dtype, device=device)
    angles = torch.empty(4 if xpos else 2, B, half, dtype=torch.float32, device=device)
    frequencies = lengths if turns is None else turns.frequencies
    zeta = turns.log2_zeta if xpos else frequencies
    plans.remember("decode table", key, make).one(tokens, embedding, lengths, frequencies, zeta, x, angles)
    if turns is None:
        return x, None
    return x, tuple(angles) if xpos else (*angles, *angles)


@triton.jit(do_not_specialize=("period",))
def embed_kernel(
    Tokens, Embedding, lengths, Frequencies, Zeta, X, Angles, E, factor, period,
    BLOCK_E: tl.constexpr, HALF: tl.constexpr, XPOS: tl.constexpr, SCALE_BASE: tl.constexpr, BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # Kernels before this one, such as those that choose a token, may not let others start early: whatever starts after
    # this wait finds what they wrote.
    _wait_for_the_kernel_before(OVERLAP)
    _let_the_next_kernel_start(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    B = tl.num_programs(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    x = tl.load(Embedding + tl.load(Tokens + b) * E + e, mask=e < E, other=0.0).to(tl.float32) * factor
    tl.store(X + b * E + e, x.to(X.dtype.element_ty), mask=e < E)
    if HALF:
        i = tl.arange(0, BLOCK_H)
        position = tl.maximum(tl.load(lengths + b), 0)
        angle = position.to(tl.float64) * tl.load(Frequencies + i, mask=i < HALF, other=0.0)
        cos, sin = tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
        place = Angles + b * HALF + i
        if XPOS:
            centred = (2 * (position % period) - period).to(tl.float64) / tl.full([1], 2 * SCALE_BASE, tl.float64)
            scale = tl.exp2(centred * tl.load(Zeta + i, mask=i < HALF, other=0.0)).to(tl.float32)
            tl.store(place + 2 * B * HALF, cos * (1.0 / scale), mask=i < HALF)
            tl.store(place + 3 * B * HALF, sin * (1.0 / scale), mask=i < HALF)
            cos *= scale
            sin *= scale
        tl.store(place, cos, mask=i < HALF)
        tl.store(place + B * HALF, sin, mask=i < HALF)


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    norm: tuple[str, Tensor, Tensor | None, float] | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """See `kernels.decode.linear_rows`."""
    (M, K), dtype = x.shape, x.dtype
    if norm is not None and M > 1:
        x, norm = _normed_rows(x, *norm), None
    gated = activation == "swiglu"
    sizes = [weight.shape[0] for weight in weights]
    kind, gain, shift, eps = norm or (None, None, None, 0.0)
    settings = {
        "NORM": _NORMS[kind], "SHIFT": shift is not None, "BIAS": biases[0] is not None,
        "ACTIVATION": _ACTIVATIONS[activation], "RESIDUAL": residual is not None,
        "PRECISION": precision_of(dtype == torch.float32 and allows_tf32(None)),
    }  # fmt: skip
    key = (linear, M, K, *sizes, eps, dtype, x.device, *settings.values())

    def make():
        return _Launches(_linear_launch(M, K, sizes, gated, eps, settings | overlap(x.device)))

    launch = plans.remember("decode table", key, make)
    y = torch.empty(M, sizes[0] if gated else sum(sizes), dtype=dtype, device=x.device)
    three = [*weights, *weights[:1] * (3 - len(weights))]
    biases = [x if bias is None else bias for bias in (*biases, *[None] * (3 - len(biases)))]
    launch.one(x, *three, *biases, *(x if one is None else one for one in (gain, shift, residual)), y)
    return y


class _Launches:
    """A launch, as an entry of the table of plans."""

    estimated_bytes = 1 << 12

    def __init__(self, one: Launch) -> None:
        self.one = one


def _normed_rows(x: Tensor, kind: str, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    M, K = x.shape
    settings = {"NORM": _NORMS[kind], "SHIFT": shift is not None, "BLOCK_K": triton.next_power_of_2(K), "num_warps": 4}
    key = (_normed_rows, M, K, eps, x.dtype, x.device, *settings.values())
    launch = plans.remember(
        "decode table", key, lambda: _Launches(Launch(norm_kernel, M, (K, eps), settings | overlap(x.device)))
    )
    y = torch.empty_like(x)
    launch.one(x, gain, gain if shift is None else shift, y)
    return y


@triton.jit
def norm_kernel(X, Gain, Shift, Y, K, eps, NORM: tl.constexpr, SHIFT: tl.constexpr, BLOCK_K: tl.constexpr,
                OVERLAP: tl.constexpr):  # fmt: skip
    _let_the_next_kernel_start(OVERLAP)
    k = tl.arange(0, BLOCK_K)
    gain, shift = _gain_and_shift(Gain, Shift, k, K, NORM, SHIFT)
    _wait_for_the_kernel_before(OVERLAP)
    place = tl.program_id(0).to(tl.int64) * K + k
    x = tl.load(X + place, mask=k < K, other=0.0).to(tl.float32)
    tl.store(Y + place, _normed(x, gain, shift, k < K, K, eps, NORM).to(Y.dtype.element_ty), mask=k < K)


@triton.jit
def _gain_and_shift(Gain, Shift, k, K, NORM: tl.constexpr, SHIFT: tl.constexpr):
    gain = tl.zeros(k.shape, Gain.dtype.element_ty)
    shift = gain
    if NORM:
        gain = tl.load(Gain + k, mask=k < K, other=0.0)
        if SHIFT:
            shift = tl.load(Shift + k, mask=k < K, other=0.0)
    return gain, shift


@triton.jit
def _normed(x, gain, shift, real, K, eps, NORM: tl.constexpr):
    mean = 0.0
    if NORM == 1:
        mean = tl.sum(x, 0) / K
    away = tl.where(real, x - mean, 0.0)
    return away * tl.rsqrt(tl.sum(away * away, 0) / K + eps) * gain.to(tl.float32) + shift.to(tl.float32)


def _linear_launch(M: int, K: int, sizes: list[int], gated: bool, eps: float, settings: dict) -> Launch:
    parts = sizes[:1] if gated else sizes
    if M == 1:  # whole rows of W at once, all in flight before the program waits
        block_k = triton.next_power_of_2(K)
        most = max(1, min(16, _ROW_TILE // block_k // (2 if gated else 1)))
        block_n = next((n for n in (16, 8, 4, 2) if n <= most and sum(parts) // n >= _PROGRAMS - 4), 1)
        warps = 8 if block_n * block_k > 8192 else 4
        blocks = {"BLOCK_M": 1, "BLOCK_K": block_k, "BLOCK_N": block_n, "num_warps": warps}
    else:
        block_m = max(16, min(_MOST_ROWS, triton.next_power_of_2(M)))
        # Wide tiles read the rows less often; narrow ones keep all multiprocessors busy.
        block_n = next((n for n in (64, 32) if sum(parts) // n >= _PROGRAMS), 16)
        blocks = {"BLOCK_M": block_m, "BLOCK_K": 128, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 4}
    tiles = [triton.cdiv(size, blocks["BLOCK_N"]) for size in parts]
    numbers = (*sizes, *[0] * (3 - len(sizes)), K, M, sum(tiles), sum(parts), eps)
    shared = {"PARTS": len(parts), "ONE_ROW": M == 1}
    return Launch(linear_kernel, sum(tiles) * triton.cdiv(M, blocks["BLOCK_M"]), numbers, shared | settings | blocks)


@triton.jit(do_not_specialize=("M", "tiles"))
def linear_kernel(
    X, W0, W1, W2, B0, B1, B2, Gain, Shift, Residual, Y, N0, N1, N2, K, M, tiles, columns, eps,
    PARTS: tl.constexpr, ONE_ROW: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    _let_the_next_kernel_start(OVERLAP)
    pid = tl.program_id(0)
    tile = pid % tiles
    m = pid // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    W, B, N, first = W0, B0, N0, 0
    if PARTS == 3:
        tiles0, tiles1 = tl.cdiv(N0, BLOCK_N), tl.cdiv(N1, BLOCK_N)
        if tile >= tiles0 + tiles1:
            W, B, N, first = W2, B2, N2, N0 + N1
            tile -= tiles0 + tiles1
        elif tile >= tiles0:
            W, B, N, first = W1, B1, N1, N0
            tile -= tiles0
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n[:, None].to(tl.int64) * K
    dtype = X.dtype.element_ty
    bias, gate_bias = 0.0, 0.0
    if BIAS:
        bias = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 4:
            gate_bias = tl.load(B1 + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * columns + (first + n)[None, :]
    stored = (m[:, None] < M) & (n[None, :] < N)
    if ONE_ROW:
        k = tl.arange(0, BLOCK_K)
        here = (n[:, None] < N) & (k < K)[None, :]
        w = tl.load(W + rows + k[None, :], mask=here, other=0.0)
        if ACTIVATION == 4:
            w1 = tl.load(W1 + rows + k[None, :], mask=here, other=0.0)
        gain, shift = _gain_and_shift(Gain, Shift, k, K, NORM, SHIFT)
        _wait_for_the_kernel_before(OVERLAP)
        x = tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)
        if RESIDUAL:
            residual = tl.load(Residual + place, mask=stored, other=0.0).to(tl.float32)
        if NORM:
            x = _normed(x, gain, shift, k < K, K, eps, NORM).to(dtype).to(tl.float32)
        y = tl.sum(w.to(tl.float32) * x[None, :], 1)[None, :]
        gate = y
        if ACTIVATION == 4:
            gate = tl.sum(w1.to(tl.float32) * x[None, :], 1)[None, :]
    else:
        _wait_for_the_kernel_before(OVERLAP)
        if RESIDUAL:
            residual = tl.load(Residual + place, mask=stored, other=0.0).to(tl.float32)
        x_rows = X + m[:, None].to(tl.int64) * K
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            real = k[None, :] < K
            x = tl.load(x_rows + k[None, :], mask=(m[:, None] < M) & real, other=0.0)
            w = tl.load(W + rows + k[None, :], mask=(n[:, None] < N) & real, other=0.0)
            y = tl.dot(x, w.T, y, input_precision=PRECISION)
            if ACTIVATION == 4:
                w = tl.load(W1 + rows + k[None, :], mask=(n[:, None] < N) & real, other=0.0)
                gate = tl.dot(x, w.T, gate, input_precision=PRECISION)
    y += bias
    gate += gate_bias
    # Rounded where PyTorch's operators round.
    y = y.to(dtype).to(tl.float32)
    if ACTIVATION == 1:
        y = tl.maximum(y, 0.0)
    if ACTIVATION == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == 3:
        y = y * tl.sigmoid(y)
    if ACTIVATION == 4:
        gate = gate.to(dtype).to(tl.float32)
        y = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * y
    if RESIDUAL:
        y = y.to(dtype).to(tl.float32) + residual
    tl.store(Y + place, y.to(dtype), mask=stored)


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

    def make() -> tuple[_Launches, Tensor, Tensor, Tensor]:
        at_once = B * kv_heads <= _FEW_HEADS
        splits, split_rows = splits_of(rows, B * kv_heads, _SPLIT_ROWS[at_once])
        group, branches = H // kv_heads, max(1, len(rows.branches))
        settings = {
            "D": D, "BLOCK_D": triton.next_power_of_2(D), "GROUP": group,
            "BLOCK_M": max(16, triton.next_power_of_2(group)), "BLOCK_N": split_rows if at_once else 64,
            "BLOCK_S": triton.next_power_of_2(len(splits)), "STEP": combining_step(len(splits)), "AT_ONCE": at_once,
            "ROTATED": rotations is not None, "NORMED": qk_norm is not None, "PRECISION": precision_of(tf32),
            "num_warps": 4, "num_stages": 2, **overlap(qkv.device),
        }  # fmt: skip
        numbers = (rows.total, branches, kv_heads, len(splits), split_rows, scale, eps)
        listed = lasting(qkv.device, lambda: table(splits, qkv.device))
        launch = _Launches(Launch(token_kernel, B * kv_heads * len(splits), numbers, settings))
        return launch, *ring_tables(rows, qkv), listed

    launch, branches, heads, splits = plans.remember("decode table", kind, make)
    line = (B, H, splits.shape[0])
    partial = torch.empty(*line, D, dtype=torch.float32, device=qkv.device)
    partial_lse = torch.empty(line, dtype=torch.float32, device=qkv.device)
    out = torch.empty(B, H * D, dtype=qkv.dtype, device=qkv.device)
    turned = rotations or (lengths,) * 4
    norms = (lengths,) * 2 if qk_norm is None else qk_norm[:2]
    launch.one(
        qkv, keys, values, partial, partial_lse, out, counters, lengths, branches, heads, splits, *turned, *norms
    )
    return out


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


@triton.jit(do_not_specialize=("rows", "branch_count", "Hkv", "split_count", "split_rows"))
def token_kernel(
    QKV, Keys, Values, Partial, PartialLse, Out, counters, lengths, branches, heads, splits,
    CosQ, SinQ, CosK, SinK, GainQ, GainK, rows, branch_count, Hkv, split_count, split_rows, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, STEP: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr,
    AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    _let_the_next_kernel_start(OVERLAP)
    pid = tl.program_id(0)
    split = pid % split_count
    kv_head = (pid // split_count) % Hkv
    b = (pid // split_count // Hkv).to(tl.int64)
    branch = tl.load(splits + split * 2)
    first_row = tl.load(splits + split * 2 + 1)
    W, rate, M, C, offset, first = ring_of(branches, heads, branch, kv_head, Hkv)
    position = tl.load(lengths + b)
    dtype: tl.constexpr = QKV.dtype.element_ty

    lines = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + lines
    line = (b * (Hkv * GROUP) + head) * split_count
    segment = tl.maximum(position, 0) // W
    within = tl.maximum(position, 0) - segment * W
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
        _wait_for_the_kernel_before(OVERLAP)
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
        _wait_for_the_kernel_before(OVERLAP)
        tl.store(PartialLse + line + split, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=lines < GROUP)

    # The program that ends last finds the results of all others in L2, where stores and the counter meet.
    tl.debug_barrier()
    ended = tl.atomic_add(counters + b * Hkv + kv_head, 1, sem="acq_rel")
    tl.debug_barrier()
    if ended == split_count - 1:
        columns = tl.arange(0, BLOCK_D)
        for g in tl.range(0, GROUP):
            row = b * (Hkv * GROUP) + kv_head * GROUP + g
            out, _ = combined(Partial, PartialLse, row, split_count, D, BLOCK_D, BLOCK_S, STEP)
            tl.store(Out + row * D + columns, out.to(dtype), mask=columns < D)
