"""A pass, forward or backward, over a rank's shard: what it computes alone or with other ranks' rows, and the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call, Inputs, Saved
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.pool import Loans
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.kernels import blocks, op
from dilated_attention_pytorch.kernels.blocks import Block

BlockOf = Callable[[int], Block]
"""What the rows of a query head see, by its number among the heads of its key/value head."""


class LocalCall(NamedTuple):
    """A call that a rank computes alone, on some of its tokens."""

    at: range
    call: Call
    spans: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        """Its tokens of `(B, L, ...)`."""
        return x if len(self.at) == x.shape[1] else x[:, self.at.start : self.at.stop]

    def inputs(self, x: Pass) -> Inputs:
        q, k, v = map(self.of, (x.q, x.k, x.v))
        return op.with_layout(self.call, Inputs(q, k, v, self.spans, x.seed), x.resources)


@dataclass
class Pass:
    """The forward pass of a call on a rank's shard. Its totals are out and lse, both of query rows.

    `take` lends the buffers of messages and sums.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seed: Tensor | None
    resources: Resources
    take: Loans

    name = "forward"
    query_totals = 2  # how many of the totals are of query rows; the others are of keys and values

    @property
    def of_queries(self) -> tuple[Tensor, ...]:
        """What `attend` takes of query rows."""
        return (self.q,)

    def nothing(self) -> tuple[Tensor, ...]:
        """Empty totals, to fold results into."""
        out = blocks.sums_like(self.q, self.take)
        return out, out.new_full(self.q.shape[:3], -torch.inf)

    def fold(self, totals: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Fold results for some rows into the totals of these rows."""
        (out, lse), (found_out, found_lse) = totals, found
        merge_(out, lse, found_out.to(out.dtype), found_lse)

    def finished(self, totals: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The totals as the pass returns them; none is lent."""
        out, lse = totals
        return out.to(self.q.dtype), lse

    def alone(self, local: LocalCall) -> tuple[Tensor, ...]:
        return op.partial(local.call, local.inputs(self), self.resources)

    def attend(
        self, rows: Sequence[Tensor], k: Tensor, v: Tensor, block: BlockOf, totals: Sequence[Tensor], lead: int = 0
    ) -> tuple[Tensor, ...]:
        """Fold what query rows `(S, M, heads, groups, D)` see of keys `(S, M', heads, 1, D)` into their totals.

        Returns results for the keys and values, which `take` lends: none forward. A block counts `lead` rows before
        the first query row.
        """
        (q,) = rows
        for g in range(q.shape[3]):
            with self.resources.workspaces() as take:
                found = blocks.partial(_after(lead, q[:, :, :, g]), k.squeeze(3), v.squeeze(3), block(g), take)
                merge_(*(y[:, :, :, g] for y in totals), *(y[:, lead:] for y in found))
        return ()


@dataclass
class BackwardPass(Pass):
    """The backward pass, against the merged out and lse. Its totals are dq, dk and dv."""

    out: Tensor
    lse: Tensor
    do: Tensor
    through_lse: Tensor | None  # the gradient of lse

    name = "backward"
    query_totals = 1

    @cached_property
    def delta(self) -> Tensor:
        delta = (self.do.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1)
        return delta if self.through_lse is None else delta - self.through_lse

    @property
    def of_queries(self) -> tuple[Tensor, ...]:
        # A gradient through the lse is in delta alone: then a kernel must not compute delta from out.
        out = () if self.through_lse is not None else (self.out,)
        return self.q, self.do, self.delta, self.lse, *out

    def nothing(self) -> tuple[Tensor, ...]:
        return tuple(blocks.sums_like(x, self.take) for x in (self.q, self.k, self.v))

    def fold(self, totals: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for total, grad in zip(totals, found):
            total += grad

    def finished(self, totals: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(total.to(x.dtype) for total, x in zip(totals, (self.q, self.k, self.v)))

    def alone(self, local: LocalCall) -> tuple[Tensor, ...]:
        through_lse = None if self.through_lse is None else local.of(self.through_lse)
        saved = Saved(local.inputs(self), local.of(self.out), local.of(self.lse))
        return op.gradients(local.call, saved, local.of(self.do), through_lse, self.resources)

    def attend(
        self, rows: Sequence[Tensor], k: Tensor, v: Tensor, block: BlockOf, totals: Sequence[Tensor], lead: int = 0
    ) -> tuple[Tensor, ...]:
        (dq,) = totals
        dk, dv = (self.take(y.shape, dtype=dq.dtype, device=y.device).zero_() for y in (k, v))
        for g in range(dq.shape[3]):
            q, do, delta, lse, *out = (_after(lead, y[:, :, :, g]) for y in rows)
            merged = out[0] if out else None
            with self.resources.workspaces() as take:
                found = blocks.gradients(do, q, k.squeeze(3), v.squeeze(3), merged, delta, lse, block(g), take)
                dq[:, :, :, g] += found.query[:, lead:]
                dk.squeeze(3).add_(found.key)
                dv.squeeze(3).add_(found.value)
        return dk, dv


def _after(lead: int, x: Tensor) -> Tensor:
    """Rows `(S, M, ...)` after `lead` rows of zeros."""
    return x if lead == 0 else torch.cat([x.new_zeros((x.shape[0], lead, *x.shape[2:])), x], 1)
