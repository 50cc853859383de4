"""Cross-entropy of a linear head in chunks of rows: only the logits of one chunk exist.

Forward also computes the gradients, chunk by chunk, while the logits exist. They are those of a sum of losses, whose
slopes are near 1, so float16 needs no loss scale; backward multiplies them by the incoming gradient, which has it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import check_whole
from dilated_attention_pytorch.core.modes import first_derivatives_only
from dilated_attention_pytorch.functional import autocast_inputs
from dilated_attention_pytorch.kernels.loss import cross_entropy_

Reduction = Literal["mean", "sum"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 4096,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight).float(), targets)` that holds the logits of `chunk` rows at most.

    Args:
        hidden: `(..., E)`.
        weight: `(vocab, E)`, perhaps shared with an embedding.
        targets: `(...)`, whole numbers below `vocab`; rows of `ignore_index` do not count.
        chunk: rows whose logits exist at the same time.
        label_smoothing: the share of a target's probability that is spread evenly over all classes.
        z_loss: weight of an additional loss per row, the squared logarithm of its softmax's denominator.
        soft_cap: `soft_cap * tanh(logits / soft_cap)` takes the place of the logits.
        reduction: `mean` over the rows that count, or `sum`.

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
    check_whole("chunk", chunk, least=1)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if z_loss < 0.0:
        raise ValueError(f"z_loss must be 0 or more, got {z_loss}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"soft_cap must be above 0, got {soft_cap}: leave it out for logits without a cap")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, got {reduction!r}: a loss for each row needs no chunks")
    dtype = autocast_inputs(hidden[:0])[0].dtype
    counted = targets.flatten() != ignore_index
    how = {"smoothing": label_smoothing, "z_weight": z_loss, "cap": soft_cap}
    total = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2), weight, targets.flatten().where(counted, 0), counted, chunk, how, dtype
    )
    return total / counted.sum() if reduction == "mean" else total


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over rows that count. `dtype` is that of the products, `how` are the arguments of `cross_entropy_`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        counted: Tensor,
        chunk: int,
        how: dict[str, Any],
        dtype: torch.dtype,
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden, head = hidden.detach(), weight.detach().to(dtype)
        total = hidden.new_zeros((), dtype=exact)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(head, dtype=exact) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in slices(len(hidden), chunk):
                x = hidden[rows].to(dtype)
                logits = x @ head.T  # (chunk, vocab), then their gradient
                gradient = wants_hidden or wants_weight
                total += cross_entropy_(logits, targets[rows], counted[rows], gradient=gradient, **how).sum()
                if grad_hidden is not None:
                    grad_hidden[rows] = logits @ head
                if grad_weight is not None:
                    grad_weight += logits.T @ x
                del logits  # before the next chunk's are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @first_derivatives_only("a chunked loss (loss_chunk)")
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, *(None,) * 5


def slices(total: int, rows: int) -> list[slice]:
    """Slices of at most `rows` rows that cover `total` rows; at least one, which may be empty."""
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)] or [slice(0, 0)]
