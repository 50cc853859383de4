"""Dilated attention as torchscale computes it, with its padding: weights that torchscale trained expect this.

torchscale cuts each branch into segments of `min(w, N)` rows, fills up the last segment with rows of zeros, and every
segment to a multiple of the rate. A key of zeros has score 0 and value 0: it counts in the softmax and adds nothing to
the sum. So `c` keys of zeros are one more partial, `out = 0` and `lse = log c`, which `merge` adds.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.merge import merge
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.core.pattern import grid_rows
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, never_warn
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.nn.attention import DilatedAttention

Branches = tuple[Branch, ...]


def log_zero_keys(
    branches: Branches, tokens: int, heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The logarithm of the number of zero keys that each row of a non-causal call sees, `(tokens, heads)`.

    It is -inf for a row that sees none; None where no row sees any. Only the last segment of a branch has zero keys:
    `ceil(segment / r)` grid rows per head, fewer of them real.
    """
    counts = torch.zeros(tokens, heads, dtype=dtype, device=device)
    any_zeros = False
    for branch, offsets in zip(branches, DilatedSpec(branches, "blocked").offsets(heads)):
        segment, r = min(branch.segment_length, tokens), branch.dilation_rate
        start = (tokens - 1) // segment * segment
        for offset in {offset for offset in offsets if offset is not None}:
            zeros = -(-segment // r) - grid_rows(tokens - start, r, offset)
            if zeros and start + offset < tokens:
                any_zeros = True
                mine = slice(offsets.index(offset), len(offsets) - offsets[::-1].index(offset))
                counts[start + offset :: r, mine] += zeros
    return counts.log() if any_zeros else None


class PaddedAttention(DilatedAttention):
    """`DilatedAttention(head_layout="blocked")` with torchscale's padding counted in the softmax.

    Lengths cannot be stated: torchscale's attention ignores padding masks.

    Args:
        detached_merge: backward takes the weights of the branches as constants, as torchscale's does; this gives its
            gradients, by one attention per branch. False gives the true gradient of the same outputs, in one call.
        settings: those of `DilatedAttention` except `head_layout` and `attention_dropout`.

    >>> attention = PaddedAttention([16, 128], [1, 4])
    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> attention(q, k, v).shape
    torch.Size([1, 100, 4, 8])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        detached_merge: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, head_layout="blocked", **settings)
        if self.attention_dropout:
            raise ValueError(
                f"torchscale drops attention weights in eval() too, got attention_dropout={self.attention_dropout}: "
                "set it to 0, or leave exact_torchscale out"
            )
        self.detached_merge = detached_merge
        with warnings.catch_warnings():  # a branch alone leaves rows out, which others of the merge cover
            warnings.simplefilter("ignore")
            for branch in self.spec.branches:
                for alone in (branch, _filled_up(branch)):
                    DilatedSpec((alone,), "blocked")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, spans: Tensor | None) -> Tensor:
        if spans is not None:
            raise ValueError(
                "torchscale's attention knows no padding or packing, so its exact semantics have none: "
                "attend to one document at a time, or leave exact_torchscale out"
            )
        tokens = query.shape[1]
        # Where a rate does not divide its segment length, torchscale writes rows back at their padded positions.
        moved = tuple(b for b in self.spec.branches if b.segment_length % b.dilation_rate and b.segment_length < tokens)
        placed = tuple(b for b in self.spec.branches if b not in moved)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        detached = self.detached_merge and trains
        together = [(b,) for b in placed] if detached else [placed] if placed else []
        partials = [self._padded(query, key, value, branches, is_causal) for branches in together]
        partials += [self._moved(query, key, value, branch, is_causal) for branch in moved]
        dtype = partials[0][0].dtype
        if detached:
            # The weights of a merge depend on lse alone. Partials of many branches are rounded once, at the end.
            partials = [(out.to(lse.dtype), lse.detach()) for out, lse in partials]
        return functools.reduce(lambda a, b: merge(*a, *b), partials)[0].to(dtype)

    def _padded(
        self, query: Tensor, key: Tensor, value: Tensor, branches: Branches, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """The partial of some branches, with their zero keys; under causality no real row sees any."""
        out, lse = self._call(query, key, value, branches, is_causal)
        if is_causal:
            return out, lse
        asked = (branches, query.shape[1], query.shape[2], lse.dtype, lse.device)
        make = functools.partial(log_zero_keys, *asked)
        zeros = plans.remember("zero keys", asked, make) if is_plain(lse) else make()
        if zeros is None:
            return out, lse
        return merge(out, lse, out.new_zeros(()).expand_as(out), zeros.expand(lse.shape))

    def _moved(
        self, query: Tensor, key: Tensor, value: Tensor, branch: Branch, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """The partial of a branch whose segments are filled up to a multiple of the rate, each at its new place."""
        tokens, w = query.shape[1], branch.segment_length
        filled = _filled_up(branch)
        segments = -(-tokens // w)

        def lay_out(x: Tensor) -> Tensor:
            x = F.pad(x, (0, 0, 0, 0, 0, segments * w - tokens)).unflatten(1, (segments, w))
            return F.pad(x, (0, 0, 0, 0, 0, filled.segment_length - w)).flatten(1, 2)

        out, lse = self._call(lay_out(query), lay_out(key), lay_out(value), (filled,), is_causal)
        # A row of zeros that sees one key has lse 0, which torchscale takes for a row that is not on the grid.
        return out[:, :tokens], lse[:, :tokens].masked_fill(lse[:, :tokens] == 0, -torch.inf)

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, branches: Branches, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        spec = DilatedSpec(branches, "blocked")
        if branches != self.spec.branches:
            never_warn(spec)
        settings = self._settings(is_causal) | spec.keywords
        return dilated_attention(query, key, value, **settings, return_lse=True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, detached_merge={self.detached_merge}"


def _filled_up(branch: Branch) -> Branch:
    """The branch with segments of a multiple of its rate."""
    return Branch(-(-branch.segment_length // branch.dilation_rate) * branch.dilation_rate, branch.dilation_rate)
