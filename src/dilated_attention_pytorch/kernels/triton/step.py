"""Kernels of a decoding step: one token per row through a layer in five launches, whose time is reading the weights.

`embed_kernel` begins a step: embeddings, and the angles of the new positions. `linear_kernel` computes
`residual + activation(norm(x) W' + b)` for up to three matrices side by side. Every program normalises a single row
again, which costs less than a launch; `norm_kernel` normalises several rows first. `triton.token` attends.

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
from dilated_attention_pytorch.kernels.triton.launching import Launch
from dilated_attention_pytorch.kernels.triton.plan import allows_tf32, precision_of

_MOST_ROWS = 64  # of a tile; more rows read the weights again
_PROGRAMS = 132  # one for each multiprocessor of an H200
_NORMS = {None: 0, "layer": 1, "rms": 2}
_ROW_TILE = 32_768  # numbers of W that a program of one row holds at once
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "silu": 3, "swiglu": 4}


def overlap(device: torch.device) -> dict[str, bool]:
    """Settings of a kernel that may start while the one before it still runs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0) or not hasattr(tl_cuda, "gdc_wait"):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_the_kernel_before(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl_cuda.gdc_wait()


@triton.jit
def let_the_next_kernel_start(OVERLAP: tl.constexpr):
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
        return Launch(embed_kernel, B, (E, factor, period), settings)

    x = torch.empty(B, E, dtype=embedding.dtype, device=device)
    angles = torch.empty(4 if xpos else 2, B, half, dtype=torch.float32, device=device)
    frequencies = lengths if turns is None else turns.frequencies
    zeta = turns.log2_zeta if xpos else frequencies
    plans.remember("decode table", key, make)(tokens, embedding, lengths, frequencies, zeta, x, angles)
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
    wait_for_the_kernel_before(OVERLAP)
    let_the_next_kernel_start(OVERLAP)
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
        return _linear_launch(M, K, sizes, gated, eps, settings | overlap(x.device))

    launch = plans.remember("decode table", key, make)
    y = torch.empty(M, sizes[0] if gated else sum(sizes), dtype=dtype, device=x.device)
    three = [*weights, *weights[:1] * (3 - len(weights))]
    biases = [x if bias is None else bias for bias in (*biases, *[None] * (3 - len(biases)))]
    launch(x, *three, *biases, *(x if one is None else one for one in (gain, shift, residual)), y)
    return y


def _normed_rows(x: Tensor, kind: str, gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    M, K = x.shape
    settings = {"NORM": _NORMS[kind], "SHIFT": shift is not None, "BLOCK_K": triton.next_power_of_2(K), "num_warps": 4}
    key = (_normed_rows, M, K, eps, x.dtype, x.device, *settings.values())
    launch = plans.remember("decode table", key, lambda: Launch(norm_kernel, M, (K, eps), settings | overlap(x.device)))
    y = torch.empty_like(x)
    launch(x, gain, gain if shift is None else shift, y)
    return y


@triton.jit
def norm_kernel(X, Gain, Shift, Y, K, eps, NORM: tl.constexpr, SHIFT: tl.constexpr, BLOCK_K: tl.constexpr,
                OVERLAP: tl.constexpr):  # fmt: skip
    let_the_next_kernel_start(OVERLAP)
    k = tl.arange(0, BLOCK_K)
    gain, shift = _gain_and_shift(Gain, Shift, k, K, NORM, SHIFT)
    wait_for_the_kernel_before(OVERLAP)
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
        block_n = next((n for n in (16, 8) if n <= most and sum(parts) // n >= _PROGRAMS - 4), min(4, most))
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
    let_the_next_kernel_start(OVERLAP)
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
        wait_for_the_kernel_before(OVERLAP)
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
        wait_for_the_kernel_before(OVERLAP)
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
