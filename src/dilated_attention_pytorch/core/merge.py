"""The algebra of partial attention results: the only place that combines `(out, lse)` pairs.

A partial is attention over some of the (branch, key) pairs of a row: `lse` is the log of its softmax denominator and
`out` its normalised sum. Merging is exact, associative and commutative; the empty partial is `out = 0, lse = -inf`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import check_tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The partial over both sets of pairs. `out` is `(..., D)`, `lse` is `(...)`; differentiable.

    >>> out, lse = merge(torch.zeros(1, 2), torch.tensor([-torch.inf]), torch.ones(1, 2), torch.tensor([0.5]))
    >>> out, lse
    (tensor([[1., 1.]]), tensor([0.5000]))
    """
    partials = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in partials.items():
        if not check_tensor(name, x).is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers, got {x.dtype}")
        if x.device != out_a.device:
            raise ValueError(f"partials must share a device, got {out_a.device} and {name} on {x.device}")
    if not (out_a.dim() and out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in partials.items())
        raise ValueError(f"out must be (..., D) and lse (...), alike in both partials, got {shapes}")
    weight, lse = _weigh(lse_a, lse_b)
    return torch.lerp(out_a.to(lse.dtype), out_b.to(lse.dtype), weight).to(out_a.dtype), lse


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """`merge` into the first pair, in place; the pair may be strided views."""
    weight, merged = _weigh(lse, lse_b)
    out.lerp_(out_b, weight)
    lse.copy_(merged)


def _weigh(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The second partial's share of the sum, exp(b) / (exp(a) + exp(b)), and the lse of both."""
    # Two empty partials meet as -inf - -inf: a stand-in keeps nan out of values and gradients.
    empty = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    a, b = lse_a.masked_fill(empty, 0.0), lse_b.masked_fill(empty, 0.0)
    return torch.sigmoid(b - a).unsqueeze(-1), torch.logaddexp(a, b).masked_fill(empty, -torch.inf)
