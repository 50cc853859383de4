"""`layer_norm(gelu(hidden))` of rows, and its gradient: each value is read once, and all sums are float32.

The gradient is computed from the hidden rows alone, so nothing else has to be kept. Its kernel also writes the normed
rows again, for the gradient of the weight that follows them.

A row is a few chunks of a power of two columns, all in registers. The sums over rows (the gradients of gain and shift)
are kept by a fixed number of programs and added in a fixed order.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108  (Triton joins tuples by `+`, and decides by an `if` before it compiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024


@triton.jit
def _gelu(h):
    """`(gelu(h), its derivative)`.

    The normal distribution by Abramowitz and Stegun 7.1.26: within 1e-7, with one exponential for both results.
    """
    bell = tl.exp2(h * h * -0.7213475204444817)  # exp(-h^2 / 2)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(h))
    tail = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * t * (0.254829592 + t * (-0.284496736 + t * tail)) * bell
    share = tl.where(h < 0.0, tail, 1.0 - tail)
    return h * share, share + h * (bell * 0.3989422804014327)


@triton.jit
def _load(pointer, at, F, EVEN: tl.constexpr):
    if EVEN:
        value = tl.load(pointer + at)
    else:
        value = tl.load(pointer + at, mask=at < F, other=0.0)
    return value


@triton.jit
def _store(pointer, at, value, F, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer + at, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=at < F)


@triton.jit
def forward_kernel(
    Hidden, Gain, Shift, Out, Mean, Rstd, F, eps, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNK)
    values = ()
    total = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        value, _ = _gelu(_load(Hidden + row * F, c * CHUNK + columns, F, EVEN).to(tl.float32))
        values = values + (value,)
        total += value
    mean = tl.sum(total) / F
    total = tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        away = values[c] - mean
        if not EVEN:
            away = tl.where(c * CHUNK + columns < F, away, 0.0)
        total += away * away
    rstd = 1.0 / tl.sqrt(tl.sum(total) / F + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for c in tl.static_range(CHUNKS):
        at = c * CHUNK + columns
        gain = _load(Gain, at, F, EVEN).to(tl.float32)
        shift = _load(Shift, at, F, EVEN).to(tl.float32)
        _store(Out + row * F, at, (values[c] - mean) * rstd * gain + shift, F, EVEN)


@triton.jit
def backward_kernel(
    Hidden, Grad, Gain, Shift, Mean, Rstd, Out, Sums, rows, F,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The gradient takes the place of `Grad`; each program walks rows and keeps their sums."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    start, step = first.to(tl.int64) * F, programs.to(tl.int64) * F
    columns = tl.arange(0, CHUNK)
    hidden, grad, gains, d_gain, d_shift = (), (), (), (), ()
    for c in tl.static_range(CHUNKS):
        at = c * CHUNK + columns
        hidden = hidden + (_load(Hidden + start, at, F, EVEN),)
        grad = grad + (_load(Grad + start, at, F, EVEN),)
        gains = gains + (_load(Gain, at, F, EVEN).to(tl.float32),)
        d_gain = d_gain + (tl.zeros((CHUNK,), tl.float32),)
        d_shift = d_shift + (tl.zeros((CHUNK,), tl.float32),)
    for row in range(first, rows, programs):
        # The next row travels while this one is computed; after the last one, that row again.
        following = tl.where(row + programs < rows, start + step, start)
        mean = tl.load(Mean + row)
        rstd = tl.load(Rstd + row)
        next_hidden, next_grad, normed, slopes, scaled, sum_gain, sum_shift = (), (), (), (), (), (), ()
        total = tl.zeros((CHUNK,), tl.float32)
        total_normed = tl.zeros((CHUNK,), tl.float32)
        for c in tl.static_range(CHUNKS):
            at = c * CHUNK + columns
            next_hidden = next_hidden + (_load(Hidden + following, at, F, EVEN),)
            next_grad = next_grad + (_load(Grad + following, at, F, EVEN),)
        for c in tl.static_range(CHUNKS):
            value, slope = _gelu(hidden[c].to(tl.float32))
            dy = grad[c].to(tl.float32)
            x = (value - mean) * rstd
            if not EVEN:
                x = tl.where(c * CHUNK + columns < F, x, 0.0)
            dx = dy * gains[c]
            total += dx
            total_normed += dx * x
            sum_gain = sum_gain + (d_gain[c] + dy * x,)
            sum_shift = sum_shift + (d_shift[c] + dy,)
            normed, slopes, scaled = normed + (x,), slopes + (slope,), scaled + (dx,)
        away = tl.sum(total) / F
        along = tl.sum(total_normed) / F
        for c in tl.static_range(CHUNKS):
            at = c * CHUNK + columns
            dh = rstd * (scaled[c] - away - normed[c] * along) * slopes[c]
            shift = _load(Shift, at, F, EVEN).to(tl.float32)
            _store(Out + start, at, normed[c] * gains[c] + shift, F, EVEN)
            _store(Grad + start, at, dh, F, EVEN)
        hidden, grad, d_gain, d_shift, start = next_hidden, next_grad, sum_gain, sum_shift, following
    for c in tl.static_range(CHUNKS):
        at = c * CHUNK + columns
        _store(Sums + first * F, at, d_gain[c], F, EVEN)
        _store(Sums + (programs + first) * F, at, d_shift[c], F, EVEN)


def _chunks(F: int) -> dict[str, int]:
    chunk = min(triton.next_power_of_2(F), _CHUNK if F % 4096 else 4096)
    return {"CHUNK": chunk, "CHUNKS": -(-F // chunk), "EVEN": F % chunk == 0, "num_warps": 16 if F >= 4096 else 8}


def forward(hidden: Tensor, gain: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows `(rows, F)`, and each row's mean and reciprocal standard deviation."""
    rows, F = hidden.shape
    out = torch.empty_like(hidden)
    mean, rstd = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if rows:
        forward_kernel[(rows,)](hidden, gain, shift, out, mean, rstd, F, eps, **_chunks(F))
    return out, mean, rstd


def backward_(
    grad: Tensor, hidden: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows, and the gradients of gain and shift; that of `hidden` takes the place of `grad`."""
    rows, F = hidden.shape
    programs = min(rows, 2 * torch.cuda.get_device_properties(grad.device).multi_processor_count if grad.is_cuda else 3)
    out = torch.empty_like(hidden)
    sums = hidden.new_empty((2, programs, F), dtype=torch.float32)
    if rows:
        backward_kernel[(programs,)](hidden, grad, gain, shift, mean, rstd, out, sums, rows, F, **_chunks(F))
    return out, *(one.sum(0).to(gain.dtype) for one in sums)
