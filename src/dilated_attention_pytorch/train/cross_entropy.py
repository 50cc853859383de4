"""Cross-entropy of a linear head in chunks of rows: only the logits of one chunk exist, forward and backward.

Forward keeps the log of the softmax denominators, one number per row. Backward computes the logits of a chunk again:
gradients made in forward would miss the loss scale that float16 needs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilated_attention_pytorch.functional import autocast_inputs

Reduction = Literal["mean", "sum"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 4096,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    soft_cap: float | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight).float(), targets)` that holds the logits of `chunk` rows at most.

    Args:
        hidden: `(..., E)`.
        weight: `(vocab, E)`, perhaps shared with an embedding.
        targets: `(...)`, whole numbers below `vocab`; rows of `ignore_index` do not count.
        chunk: rows whose logits exist at the same time.
        label_smoothing: the share of a target's probability that is spread evenly over all classes.
        reduction: `mean` over the rows that count, or `sum`.
        soft_cap: replaces logits by `soft_cap * tanh(logits / soft_cap)`.

    Returns:
        The loss, in float32 (float64 for float64). Products run in autocast's dtype where it is on; sums over rows and
        classes, and the gradient of `weight` over chunks, are float32.

    >>> hidden, weight = torch.randn(2, 10, 8), torch.randn(100, 8)
    >>> targets = torch.randint(100, (2, 10))
    >>> loss = linear_cross_entropy(hidden, weight, targets, chunk=4)
    >>> plain = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    >>> torch.testing.assert_close(loss, plain)
    """
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (..., E) and weight (vocab, E), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:-1] or targets.is_floating_point():
        raise ValueError(
            f"targets must be whole numbers of shape {tuple(hidden.shape[:-1])}, one per row of hidden, got "
            f"{targets.dtype} {tuple(targets.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, got {reduction!r}: a loss for each row needs no chunks")
    if soft_cap is not None and soft_cap <= 0.0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}")
    dtype = autocast_inputs(hidden[:0])[0].dtype
    counted = targets.flatten() != ignore_index
    rest = chunk, label_smoothing, soft_cap, dtype
    total = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2), weight, targets.flatten().where(counted, 0), counted, *rest
    )
    return total / counted.sum() if reduction == "mean" else total


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over rows that count. `dtype` is that of the products."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        counted: Tensor,
        chunk: int,
        smoothing: float,
        soft_cap: float | None,
        dtype: torch.dtype,
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        head = weight.detach().to(dtype)
        lse = hidden.new_empty(len(hidden), dtype=exact)
        total = hidden.new_zeros((), dtype=exact)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in slices(len(hidden), chunk):
                logits = (hidden.detach()[rows].to(dtype) @ head.T).to(exact)  # (chunk, vocab)
                if soft_cap is not None:
                    logits.div_(soft_cap).tanh_().mul_(soft_cap)
                torch.logsumexp(logits, -1, out=lse[rows])
                loss = lse[rows] - (1.0 - smoothing) * logits.gather(1, targets[rows, None])[:, 0]
                if smoothing:
                    loss -= smoothing * logits.mean(-1)
                total += loss.where(counted[rows], 0.0).sum()
        ctx.save_for_backward(hidden, weight, targets, counted, lse)
        ctx.rest = chunk, smoothing, soft_cap, dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, targets, counted, lse = ctx.saved_tensors
        chunk, smoothing, soft_cap, dtype = ctx.rest
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = lse.dtype
        head = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        scale = grad * counted  # (rows,)
        ratio: Tensor | None = None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in slices(len(hidden), chunk):
                x = hidden[rows].to(dtype)
                slope = (x @ head.T).to(exact)  # (chunk, vocab): the logits
                if soft_cap is not None:
                    ratio = slope.div_(soft_cap).tanh_()
                    slope = ratio * soft_cap
                slope = slope.sub_(lse[rows, None]).exp_()  # the probabilities
                if smoothing:
                    slope -= smoothing / len(weight)
                at = targets[rows, None]
                slope.scatter_add_(1, at, slope.new_full((), smoothing - 1.0).expand(at.shape))
                if ratio is not None:
                    slope.mul_(ratio.square_().neg_().add_(1.0))  # the derivative of the cap
                    ratio = None
                slope = slope.mul_(scale[rows, None]).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = slope @ head
                if grad_weight is not None:
                    grad_weight += slope.T @ x
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 6


def slices(total: int, rows: int) -> list[slice]:
    """Slices of at most `rows` rows that cover `total` rows; at least one, which may be empty."""
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)] or [slice(0, 0)]
