"""Dilated attention by PyTorch's own operators: any device, any dtype, memory linear in the sequence length.

Forward walks the parts and merges each partial into views of one `(out, lse)`; backward walks them again with the
merged pair and adds each part's gradients into views of dq, dk, dv. Low precision is computed and accumulated in
float32: on a CPU that is also faster, because its bf16 flash backward is several times slower than its float32 one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import BlockLayout
from dilated_attention_pytorch.core.block_pattern import tiles_of
from dilated_attention_pytorch.core.call import Call, Grads, Inputs, Partial, Saved, wide_dtype
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.modes import tf32
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.kernels import blocks
from dilated_attention_pytorch.kernels.blocks import Block, Keep
from dilated_attention_pytorch.kernels.parts import Part, parts_for
from dilated_attention_pytorch.kernels.tiles import Tiling


class Eager:
    """The engine of PyTorch's own operators. It takes every call."""

    as_is = False  # whether a block is computed in the inputs' own precision

    def partial(
        self, call: Call, inputs: Inputs, resources: Resources = NO_RESOURCES, *, followed: bool = False
    ) -> Partial:
        """`followed` keeps to operators that PyTorch's forward mode differentiates: the inputs carry tangents."""
        self._refuse(call, inputs)
        query, spans = inputs.query, inputs.spans
        with resources.workspaces() as take, tf32(call.allow_tf32, query.device):
            q, k, v = (_as_segments(x, take, as_is=self.as_is) for x in inputs[:3])
            out = blocks.sums_like(query, take, own=call.partial)
            lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
            parts = parts_for(call, spans, q.shape, k.shape[2], resources)
            view_q, view_k, view_v, view_out, view_lse = (parts.viewer(x) for x in (q, k, v, out, lse))
            plain = _plain_block(call, inputs)
            for i, part, g in parts:
                so_far = view_out(i, g), view_lse(i, g)
                q_part = view_q(i, g)
                block = plain or _block(part, g, call, inputs, q_part)
                with resources.workspaces() as take_for_part:
                    found = blocks.partial(q_part, view_k(i), view_v(i), block, take_for_part, fused=not followed)
                    if part.first:
                        so_far[0].copy_(found.out)
                        so_far[1].copy_(found.lse)
                    else:
                        merge_(*so_far, *found)
            return Partial(out if call.partial else out.to(query.dtype), by_head(lse))

    def gradients(
        self,
        call: Call,
        saved: Saved,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        resources: Resources = NO_RESOURCES,
    ) -> Grads:
        inputs, out, lse = saved
        self._refuse(call, inputs, grad_lse)
        query, key, value = inputs[:3]
        with resources.workspaces() as take, tf32(call.allow_tf32, query.device):
            do, q, k, v, merged = (_as_segments(x, take, as_is=self.as_is) for x in (grad_out, query, key, value, out))
            sums = Grads(*(blocks.sums_like(x, take, own=call.partial) for x in (query, key, value)))
            lse = lse.contiguous()  # by row, so that batches of segments are views
            plain = _plain_block(call, inputs)
            if plain is not None and grad_lse is None and plain.is_fused(q):
                delta = lse  # not read
            else:
                delta = torch.mul(do, merged, out=take(q.shape, dtype=q.dtype, device=q.device)).sum(-1)
                delta = delta if grad_lse is None else delta - grad_lse
            parts = parts_for(call, inputs.spans, q.shape, k.shape[2], resources)
            view_do, view_q, view_out, view_delta, view_lse = (parts.viewer(x) for x in (do, q, merged, delta, lse))
            view_k, view_v, view_dq, view_dk, view_dv = (parts.viewer(x) for x in (k, v, *sums))
            for i, part, g in parts:
                q_part, out_part = view_q(i, g), view_out(i, g) if grad_lse is None else None
                block = plain or _block(part, g, call, inputs, q_part)
                with resources.workspaces() as take_for_part:
                    rows = view_do(i, g), q_part, view_k(i), view_v(i)
                    sums_of_rows = view_delta(i, g), view_lse(i, g)
                    grads = blocks.gradients(*rows, out_part, *sums_of_rows, block, take_for_part)
                    for total, grad in zip((view_dq(i, g), view_dk(i), view_dv(i)), grads):
                        total += grad
            return sums if call.partial else Grads(*(x.to(query.dtype) for x in sums))

    def _refuse(self, call: Call, inputs: Inputs, grad_lse: Tensor | None = None) -> None:
        """Raise where a call asks for what the engine does not compute."""


class Vendor(Eager):
    """The same walk, with every block by the GPU vendor's flash kernel in the precision of the inputs."""

    as_is = True

    def _refuse(self, call: Call, inputs: Inputs, grad_lse: Tensor | None = None) -> None:
        """Raise where a call asks for what the kernel does not compute as we define it."""
        for asked, what in (
            (inputs.seed is not None, f"dropout_p={call.dropout_p}: its dropout is another"),
            (call.softmax_scale(inputs.query.shape[3]) <= 0, f"scale={call.scale}: it must be above 0"),
            (grad_lse is not None, "a gradient through the lse"),
        ):
            if asked:
                raise ValueError(f"backend 'vendor' cannot take {what}; use 'auto', 'triton' or 'eager'")


def by_head(lse: Tensor) -> Tensor:
    """`(B, N, H)`, laid out in memory as `(B, H, N)`: as fused kernels write and read it."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def _as_segments(x: Tensor, take: Take, *, as_is: bool) -> Tensor:
    """`x` in the precision of the computation, or in its own (`as_is`), so that views can cut it into segments."""
    dtype = x.dtype if as_is else wide_dtype(x.dtype)
    batches_follow = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if x.dtype == dtype and x.stride(-1) == 1 and batches_follow:
        return x
    return take(x.shape, dtype=dtype, device=x.device).copy_(x)


def _plain_block(call: Call, inputs: Inputs) -> Block | None:
    """What the rows of every part see, where it is the same for all."""
    if inputs.seed is not None or inputs.layout is not None:
        return None
    return Block(call.softmax_scale(inputs.query.shape[3]), call.is_causal)


def _block(part: Part, group: int, call: Call, inputs: Inputs, q: Tensor) -> Block:
    """What a part's rows see, for the query heads number `group` of their key/value heads."""
    heads = part.query_heads(group, inputs.query.shape[2] // inputs.key.shape[2], q.device)
    keep = None if inputs.seed is None else _keep(part, call, inputs.seed, heads, q.dtype)
    tiling = None if inputs.layout is None else _tiling(part, call, inputs.layout, q.shape[1], heads)
    return Block(call.softmax_scale(q.shape[-1]), call.is_causal, keep, tiling)


def _keep(part: Part, call: Call, seed: Tensor, query_heads: Tensor, dtype: torch.dtype) -> Keep:
    origins = part.origins(seed.device) + call.first_position

    def positions(segments: slice, numbers: Tensor) -> Tensor:
        ones = (1,) * (numbers.dim() - 2)
        return origins[segments].view(-1, len(query_heads), *ones) + numbers * part.dilation_rate

    return blocks.keep_by_position(
        seed,
        call,
        batch_rows=part.batch_rows(seed.device),
        heads=query_heads,
        queries=positions,
        keys=positions,
        dtype=dtype,
    )


def _tiling(part: Part, call: Call, layout: BlockLayout, rows: int, query_heads: Tensor) -> Tiling:
    """The part's kept tiles: of one grid where positions choose, because its segments and heads have equal rows."""
    branch = layout.branches[part.branch]
    assert branch is not None
    assert call.sparse is not None
    device = query_heads.device
    segments = torch.arange(part.first_segment, part.first_segment + part.segments, device=device)
    segments = segments.repeat(part.rows.stop - part.rows.start)[:, None]
    heads, batch_rows = query_heads[None], part.batch_rows(device)[:, None]
    if not call.sparse.depends_on_content:
        segments, heads, batch_rows = segments[:1], heads[:, :1], batch_rows[:1]
    return Tiling(branch.kept_keys(batch_rows, segments, heads, tiles_of(rows, layout.block_size)), layout.block_size)
