"""The algebra of partial attention results: the only place that combines `(out, lse)` pairs.

A partial is attention over some of the (branch, key) pairs of a row: `lse` is the log of its softmax denominator and
`out` its normalised sum. Merging is exact, associative and commutative; the empty partial is `out = 0, lse = -inf`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The partial over both sets of pairs. `out` is `(..., D)`, `lse` is `(...)`.

    >>> out, lse = merge(torch.zeros(1, 2), torch.tensor([-torch.inf]), torch.ones(1, 2), torch.tensor([0.5]))
    >>> out, lse
    (tensor([[1., 1.]]), tensor([0.5000]))
    """
    return torch.lerp(out_a, out_b, _weight_of_second(lse_a, lse_b)), torch.logaddexp(lse_a, lse_b)


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """`merge` into the first pair, in place; the pair may be strided views."""
    out.lerp_(out_b, _weight_of_second(lse, lse_b))
    # Not out=: logaddexp resizes a strided view instead of writing into it.
    lse.copy_(torch.logaddexp(lse, lse_b))


def _weight_of_second(lse_a: Tensor, lse_b: Tensor) -> Tensor:
    # exp(b) / (exp(a) + exp(b)); two empty partials give nan, whose weight does not matter since both outs are 0.
    return torch.sigmoid(lse_b - lse_a).nan_to_num_(0.0).unsqueeze(-1)
