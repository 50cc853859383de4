"""Cross-entropy of rows of logits, whose gradient takes their place: one program per row.

The program reads its row twice, the second time from L2, and writes it once. With `y` the logits, capped if asked,

    lse = log sum exp y;  loss = lse - (1 - smoothing) y[target] - smoothing mean(y) + z lse^2
    d loss / d y = (1 + 2 z lse) exp(y - lse) - (1 - smoothing) [target] - smoothing / V
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    """`cap * tanh(x / cap)`."""
    if CAPPED:
        small = 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E / cap)))  # 0 where x is large, 2 where it is very negative
        x = cap * (1.0 - small)
    return x


@triton.jit(do_not_specialize=("V", "row_stride"))
def cross_entropy_kernel(
    Logits, Targets, Counted, Loss, V, row_stride, smoothing, z_weight, cap,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = Logits + row * row_stride
    counted = tl.load(Counted + row)
    target = tl.load(Targets + row)
    m = -float("inf")
    total = 0.0
    summed = 0.0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = _capped(tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32), cap, CAPPED)
        summed += tl.sum(tl.where(at < V, y, 0.0))
        y = tl.where(at < V, y * LOG2_E, -float("inf"))
        m_new = tl.maximum(m, tl.max(y))
        total = total * tl.exp2(m - m_new) + tl.sum(tl.exp2(y - m_new))
        m = m_new
    lse = m + tl.log2(total)  # to the base 2
    is_class = (target >= 0) & (target < V)  # else the loss and its gradient are NaN, as nothing can be raised here
    chosen = _capped(tl.load(logits + target, mask=is_class, other=float("nan")).to(tl.float32), cap, CAPPED)
    nats = lse * LN_2
    loss = nats - (1.0 - smoothing) * chosen - smoothing * (summed / V) + z_weight * nats * nats
    tl.store(Loss + row, tl.where(counted, loss, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read by all
        steepness = tl.where(is_class, 1.0 + 2.0 * z_weight * nats, float("nan"))
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            y = _capped(tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32), cap, CAPPED)
            slope = steepness * tl.exp2(y * LOG2_E - lse) - smoothing / V
            slope -= tl.where(at == target, 1.0 - smoothing, 0.0)
            if CAPPED:
                slope *= 1.0 - (y / cap) * (y / cap)
            tl.store(logits + at, tl.where(counted, slope, 0.0).to(logits.dtype.element_ty), mask=at < V)


def cross_entropy_(
    logits: Tensor, targets: Tensor, counted: Tensor, smoothing: float, z_weight: float, cap: float | None,
    gradient: bool,
) -> Tensor:  # fmt: skip
    """As `kernels.loss.cross_entropy_`."""
    rows, V = logits.shape
    loss = logits.new_empty(rows, dtype=torch.float32)
    block = min(4096, triton.next_power_of_2(V))
    if rows:
        cross_entropy_kernel[(rows,)](
            logits, targets, counted, loss, V, logits.stride(0), smoothing, z_weight, cap or 1.0,
            BLOCK=block, CAPPED=cap is not None, GRADIENT=gradient, num_warps=8 if block > 1024 else 4,
        )  # fmt: skip
    return loss
