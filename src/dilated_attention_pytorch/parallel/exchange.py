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
from dilated_attention_pytorch.kernels.engine import lse_dtype
from dilated_attention_pytorch.parallel.group import Mail, Posted, RankGroup
from dilated_attention_pytorch.parallel.sharding import SharedSegment
from dilated_attention_pytorch.parallel.wire import GridRows, Wire

BlockOf = Callable[[int], Block]
"""What the rows of a query head see, by its number among the heads of its key/value head."""


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
        # The position of token 0 of the rank's tensors, if all of them were in this chunk.
        self.first = {
            chunk: shards.bounds(chunk)[0] - shards.held_at(chunk).start for chunk in shards.chunks_of(ranks.rank)
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

    def end_backward(self, begun: Any, x: BackwardPass, grads: Sequence[Tensor]) -> None:
        """Add to the gradients of the rank's q, k and v."""
        raise NotImplementedError

    def attend(
        self, x: Pass, inputs: Sequence[Tensor], block: BlockOf, out: Tensor, lse: Tensor, lead: int = 0
    ) -> None:
        """Merge what query rows `(S, M, heads, groups, D)` see of keys `(S, M', heads, 1, D)` into their out and lse.

        `inputs` are q, k and v. A block counts `lead` rows before the first query row.
        """
        q, k, v = inputs
        for g in range(self.wire.groups):
            with x.resources.workspaces() as take:
                rows = _after(lead, q[:, :, :, g])
                found = blocks.partial(rows, k.squeeze(3), v.squeeze(3), block(g), take)
                merge_(out[:, :, :, g], lse[:, :, :, g], *(y[:, lead:] for y in found))

    def gradients(
        self, x: BackwardPass, inputs: Sequence[Tensor], block: BlockOf, dq: Tensor, lead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Add to `dq` of query rows, and give dk and dv of the keys that they see, which `x.take` lends.

        `inputs` are q, k, v, do, delta, lse, and the merged out, if there is one.
        """
        q, k, v, do, delta, lse, *merged = inputs
        dk, dv = (x.take(y.shape, dtype=lse.dtype, device=y.device).zero_() for y in (k, v))
        for g in range(self.wire.groups):
            of_group = [_after(lead, y[:, :, :, g]) for y in (do, q, delta, lse, *merged)]
            do_rows, q_rows, delta_rows, lse_rows, *out_rows = of_group
            out = out_rows[0] if out_rows and x.through_lse is None else None
            with x.resources.workspaces() as take:
                found = blocks.gradients(
                    do_rows, q_rows, k.squeeze(3), v.squeeze(3), out, delta_rows, lse_rows, block(g), take
                )
                dq[:, :, :, g] += found.query[:, lead:]
                dk.squeeze(3).add_(found.key)
                dv.squeeze(3).add_(found.value)
        return dk, dv

    def dense(self, x: Pass, rows: GridRows, keys: Sequence[range], is_causal: bool = False) -> BlockOf:
        """Query rows that see keys at these positions: all of them, or under causality those that are not later."""
        if x.seed is None:
            block = Block(self.scale, is_causal)
            return lambda group: block
        i, j = positions([rows.grid], x.seed.device), positions(keys, x.seed.device)
        return lambda group: Block(self.scale, is_causal, self.keep(x, rows, group, i.__getitem__, j.__getitem__))

    def keep(
        self, x: Pass, rows: GridRows, group: int, queries: Callable[[Tensor], Tensor], keys: Callable[[Tensor], Tensor]
    ) -> Keep | None:
        """Dropout's factor for one query head per key/value head, as on a single device.

        `queries` and `keys` give the positions of numbered rows.
        """
        if x.seed is None:
            return None
        seed, call, dtype = x.seed, self.call, lse_dtype(x.q.dtype)
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


def positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])


def _after(lead: int, x: Tensor) -> Tensor:
    """Rows `(S, M, ...)` after `lead` rows of zeros."""
    return x if lead == 0 else torch.cat([x.new_zeros((x.shape[0], lead, *x.shape[2:])), x], 1)
