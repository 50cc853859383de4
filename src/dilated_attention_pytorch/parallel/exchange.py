"""An exchange: one branch's shared segments under one scheme. And how rows attend to rows of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.pool import Loans
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.kernels import blocks
from dilated_attention_pytorch.kernels.blocks import Block, Keep
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment
from dilated_attention_pytorch.parallel.wire import GridRows, Wire


@dataclass
class Pass:
    """The forward pass of a call on a rank's shard: its inputs, and the lender of buffers for messages and sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    seed: Tensor | None
    resources: Resources
    take: Loans

    name = "forward"


@dataclass
class BackwardPass(Pass):
    """The backward pass, which has the merged out and lse, and the gradients of both."""

    out: Tensor
    lse: Tensor
    do: Tensor
    through_lse: Tensor | None

    name = "backward"

    @cached_property
    def delta(self) -> Tensor:
        delta = (self.do.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(-1)
        return delta if self.through_lse is None else delta - self.through_lse


Grads = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""


class Exchange:
    """What one branch's shared segments need of other ranks: `begin` starts the messages, `end_` waits for them.

    Between the two the rank computes what it can alone. A buffer goes back to `x.take` only after its messages have
    arrived. `segments` are those that this rank shares, each with a number that is the same on all ranks.
    """

    def __init__(
        self, call: Call, index: int, wire: Wire, segments: Sequence[tuple[int, SharedSegment]], ranks: RankGroup
    ) -> None:
        self.call, self.index, self.wire, self.segments, self.ranks = call, index, wire, segments, ranks
        self.scale = call.softmax_scale(wire.head_dim)
        shards = wire.shards
        # The position of token 0 of the rank's tensors, if all of them were in this piece.
        self.first = {
            piece: shards.bounds(piece)[0] - shards.held_at(piece).start for piece in shards.pieces_of(ranks.rank)
        }

    def tag(self, number: int, step: int) -> int:
        """The tag of a message: different for all messages that may be under way from one rank to another."""
        steps, branches = 2 * self.ranks.size, len(self.call.spec.branches)
        return (number * steps + step) * branches + self.index

    def post(self, sends: Iterable[Mail], receives: Iterable[Mail], x: Pass) -> Posted:
        return self.ranks.post(sends, receives, (x.name, self.index), x.resources.profile)

    def begin(self, x: Pass) -> Any:
        raise NotImplementedError

    def end_forward(self, begun: Any, x: Pass, out: Tensor, lse: Tensor) -> None:
        """Merge what this rank's rows see of the segments into `out` and `lse`."""
        raise NotImplementedError

    def end_backward(self, begun: Any, x: BackwardPass, grads: Grads) -> None:
        """Add to the gradients of the rank's q, k and v."""
        raise NotImplementedError

    def keep(
        self, x: Pass, rows: GridRows, group: int, queries: Callable[[Tensor], Tensor], keys: Callable[[Tensor], Tensor]
    ) -> Keep | None:
        """Dropout's factor for one query head per key/value head, as on a single device.

        `queries` and `keys` give the positions of numbered rows.
        """
        if x.seed is None:
            return None
        seed, call, dtype = x.seed, self.call, sum_dtype(x.q)
        batch_rows = positions([rows.rows], seed.device)
        heads = positions([rows.heads], seed.device) * self.wire.groups + group + call.head_offset

        def keep(segments: slice, i: Tensor, j: Tensor) -> Tensor:
            ones = (1,) * (i.dim() - 2)
            kept = keep_mask(
                seed,
                call.dropout_p,
                rows=batch_rows[segments].view(-1, 1, *ones),
                heads=heads.view(-1, *ones),
                branch=self.index,
                queries=queries(i),
                keys=keys(j),
            )
            return kept.to(dtype) / (1.0 - call.dropout_p)

        return keep

    def attend(
        self,
        x: Pass,
        rows: GridRows,
        inputs: tuple[Tensor, Tensor, Tensor],
        keys: Sequence[range],
        out: Tensor,
        lse: Tensor,
        is_causal: bool = False,
    ) -> None:
        """Merge what query rows `(S, M, heads, groups, D)` see of keys `(S, M', heads, 1, D)` into their out and lse.

        `inputs` are q, k and v; `keys` are the positions of the keys. The rows see all of them, or under causality
        those that are not later.
        """
        q, k, v = inputs
        for g in range(self.wire.groups):
            keep = self._keep_at(x, rows, g, keys)
            with x.resources.workspaces() as take:
                block = Block(self.scale, is_causal, keep)
                found = blocks.partial(q[:, :, :, g], k.squeeze(3), v.squeeze(3), block, take)
                merge_(out[:, :, :, g], lse[:, :, :, g], *found)

    def gradients(
        self,
        x: BackwardPass,
        rows: GridRows,
        dq: Tensor,
        inputs: Sequence[Tensor],
        keys: Sequence[range],
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Add to `dq` of query rows, and give dk and dv of the keys that they see, which `x.take` lends.

        `inputs` are q, k, v, do, lse, delta, and the merged out, if there is one.
        """
        q, k, v, do, lse, delta, *merged = inputs
        dk, dv = (x.take(y.shape, dtype=sum_dtype(y), device=y.device).zero_() for y in (k, v))
        k, v = k.squeeze(3), v.squeeze(3)
        for g in range(self.wire.groups):
            keep = self._keep_at(x, rows, g, keys)
            out = merged[0][:, :, :, g] if merged and x.through_lse is None else None
            do_g, q_g, lse_g, delta_g = (y[:, :, :, g] for y in (do, q, lse, delta))
            with x.resources.workspaces() as take:
                block = Block(self.scale, is_causal, keep)
                found = blocks.gradients(do_g, q_g, k, v, out, delta_g, lse_g, block, take)
                for total, grad in zip((dq[:, :, :, g], dk.squeeze(3), dv.squeeze(3)), found):
                    total += grad
        return dk, dv

    def _keep_at(self, x: Pass, rows: GridRows, group: int, keys: Sequence[range]) -> Keep | None:
        if x.seed is None:
            return None
        i, j = positions([rows.grid], x.seed.device), positions(keys, x.seed.device)
        return self.keep(x, rows, group, i.__getitem__, j.__getitem__)


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])
