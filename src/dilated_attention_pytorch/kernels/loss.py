"""Cross-entropy of a chunk of logits, and its gradient in their place: by a Triton kernel on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.engine import why_not


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    counted: Tensor,
    *,
    smoothing: float = 0.0,
    z_weight: float = 0.0,
    cap: float | None = None,
    gradient: bool = True,
) -> Tensor:
    """The loss of each row, float32 (float64 for float64), 0 where a row is not counted.

    Args:
        logits: `(rows, classes)`; with `gradient` they are overwritten by the gradient of the sum of the losses.
        targets: `(rows,)` int64, below the number of classes even in rows that are not counted.
        counted: `(rows,)` bool.
        smoothing: the share of a target's probability that is spread evenly over all classes.
        z_weight: the weight of the squared log of the softmax's denominator in the loss.
        cap: `cap * tanh(logits / cap)` takes the place of the logits.
        gradient: False leaves the logits as they are.

    >>> logits = torch.randn(2, 5)
    >>> loss = cross_entropy_(logits.clone(), torch.tensor([1, 4]), torch.tensor([True, True]))
    >>> torch.testing.assert_close(loss.mean(), torch.nn.functional.cross_entropy(logits, torch.tensor([1, 4])))
    """
    if logits.is_cuda and logits.dtype != torch.float64 and why_not("triton", logits.device, logits.dtype, 64) is None:
        from dilated_attention_pytorch.kernels.triton import loss

        return loss.cross_entropy_(logits, targets, counted, smoothing, z_weight, cap, gradient)
    return plain_cross_entropy_(logits, targets, counted, smoothing, z_weight, cap, gradient)


def plain_cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    counted: Tensor,
    smoothing: float,
    z_weight: float,
    cap: float | None,
    gradient: bool,
) -> Tensor:
    """`cross_entropy_` by PyTorch's operators."""
    y = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=gradient)
    if cap is not None:
        y = y.div(cap).tanh_().mul_(cap)
    lse = y.logsumexp(-1)
    at = targets[:, None]
    loss = lse - (1.0 - smoothing) * y.gather(1, at)[:, 0]
    if smoothing:
        loss -= smoothing * y.mean(-1)
    if z_weight:
        loss += z_weight * lse.square()
    if gradient:
        bent = None if cap is None else 1.0 - (y / cap).square()
        y.sub_(lse[:, None]).exp_()  # the probabilities
        if z_weight:
            y.mul_(1.0 + 2.0 * z_weight * lse[:, None])
        if smoothing:
            y.sub_(smoothing / y.shape[1])
        y.scatter_add_(1, at, y.new_full((), smoothing - 1.0).expand(at.shape))
        if bent is not None:
            y.mul_(bent)
        logits.copy_(y.mul_(counted[:, None]))
    return loss.where(counted, 0.0)
