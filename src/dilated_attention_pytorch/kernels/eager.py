"""Dilated attention out of PyTorch's own operators: any device, any dtype, memory linear in the sequence length.

Forward walks the parts and merges each partial into views of one `(out, lse)`; backward walks them again with the
merged pair and adds each part's gradients into views of dq, dk, dv. Low precision is computed and accumulated in
float32: on a CPU that is also the faster way, since its bf16 flash backward is several times slower than its float32.
`by_vendor` computes each part by the GPU vendor's flash kernel instead, in the precision of the inputs; what that
cannot do is refused before (`vendor.refuse`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import BlockLayout
from dilated_attention_pytorch.core.block_pattern import tiles_of
from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.core.spec import Call
from dilated_attention_pytorch.kernels import dense, tiles, vendor
from dilated_attention_pytorch.kernels.parts import Part, partition_for

_tf32_lock = threading.Lock()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    spans: Tensor | None,
    seed: Tensor | None,
    layout: BlockLayout | None = None,
    resources: Resources = NO_RESOURCES,
    by_vendor: bool = False,
    followed: bool = False,
) -> tuple[Tensor, Tensor]:
    """`followed` keeps to operators that PyTorch's forward mode differentiates: the inputs carry tangents."""
    with resources.workspaces() as take, tf32(call.allow_tf32, query.device):
        q, k, v = (_working(x, take, as_is=by_vendor) for x in (query, key, value))
        kv_heads = k.shape[2]
        groups, scale = q.shape[2] // kv_heads, call.softmax_scale(q.shape[3])
        out = _sums_of(query, _precision(query), take, call)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
        flash = layout is None and seed is None and not followed and dense.flash_fits(q, scale)
        partition = partition_for(call, spans, q.shape, kv_heads, resources.cache)
        view_q, view_out, view_lse = (partition.viewer(x, groups) for x in (q, out, lse))
        view_k, view_v = partition.viewer(k), partition.viewer(v)
        for i, part in enumerate(partition.parts):
            part_k, part_v = view_k(i), view_v(i)
            for g in range(groups):
                inputs = view_q(i, g), part_k, part_v, scale, call.is_causal
                with resources.workspaces() as take_for_part:
                    if by_vendor:
                        partial = vendor.forward(*inputs)
                    elif flash:
                        partial = dense.flash_forward(*inputs)
                    else:
                        keep = _keep(part, call, seed, kv_heads, g, groups, q.dtype)
                        if layout is None:
                            partial = dense.chunked_forward(*inputs, keep, take_for_part)
                        else:
                            tiling = _tiling(part, call, layout, inputs[0], kv_heads, g, groups)
                            partial = tiles.forward(*inputs, keep, take_for_part, tiling)
                    so_far = view_out(i, g), view_lse(i, g)
                    if part.first:
                        so_far[0].copy_(partial[0])
                        so_far[1].copy_(partial[1])
                    else:
                        merge_(*so_far, *partial)
        return (out if call.partial else out.to(query.dtype)), by_head(lse)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    spans: Tensor | None,
    seed: Tensor | None,
    layout: BlockLayout | None = None,
    resources: Resources = NO_RESOURCES,
    by_vendor: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    with resources.workspaces() as take, tf32(call.allow_tf32, query.device):
        do, q, k, v, merged = (_working(x, take, as_is=by_vendor) for x in (grad_out, query, key, value, out))
        kv_heads = k.shape[2]
        groups, scale = q.shape[2] // kv_heads, call.softmax_scale(q.shape[3])
        dq, dk, dv = (_sums_of(x, _precision(x), take, call) for x in (query, key, value))
        lse = lse.contiguous()  # by row, so that batches of segments are views
        flash = by_vendor or (layout is None and seed is None and grad_lse is None and dense.flash_fits(q, scale))
        products = None if flash else take(q.shape, dtype=q.dtype, device=q.device)
        delta = lse if flash else torch.mul(do, merged, out=products).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        partition = partition_for(call, spans, q.shape, kv_heads, resources.cache)
        views = [partition.viewer(x, groups) for x in (do, q, lse, merged, delta, dq)]
        view_do, view_q, view_lse, view_out, view_delta, view_dq = views
        view_k, view_v, view_dk, view_dv = (partition.viewer(x) for x in (k, v, dk, dv))
        for i, part in enumerate(partition.parts):
            part_k, part_v = view_k(i), view_v(i)
            for g in range(groups):
                inputs = view_do(i, g), view_q(i, g), part_k, part_v
                with resources.workspaces() as take_for_part:
                    if flash:
                        kernel = vendor.backward if by_vendor else dense.flash_backward
                        grads = kernel(*inputs, view_out(i, g), view_lse(i, g), scale, call.is_causal)
                    else:
                        keep = _keep(part, call, seed, kv_heads, g, groups, q.dtype)
                        rows = *inputs, view_delta(i, g), view_lse(i, g)
                        if layout is None:
                            grads = dense.chunked_backward(*rows, scale, call.is_causal, keep, take_for_part)
                        else:
                            tiling = _tiling(part, call, layout, inputs[1], kv_heads, g, groups)
                            grads = tiles.backward(*rows, scale, call.is_causal, keep, take_for_part, tiling)
                    for total, grad in zip((view_dq(i, g), view_dk(i), view_dv(i)), grads):
                        total += grad
        if call.partial:
            return dq, dk, dv
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def by_head(lse: Tensor) -> Tensor:
    """`(B, N, H)`, laid out in memory as `(B, H, N)`: as fused kernels write and read it."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def _sums_of(x: Tensor, dtype: torch.dtype, take: Take, call: Call) -> Tensor:
    """Zeros like `x` to add into: a workspace if they are of another dtype than the result, else the result itself."""
    if x.dtype == dtype or call.partial:
        return torch.zeros(x.shape, dtype=dtype, device=x.device)
    return take(x.shape, dtype=dtype, device=x.device).zero_()


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _working(x: Tensor, take: Take, *, as_is: bool = False) -> Tensor:
    """In the precision of the computation, or as it is, with rows that can be cut into segments by views."""
    dtype = x.dtype if as_is else _precision(x)
    batches_follow = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if x.dtype == dtype and x.stride(-1) == 1 and batches_follow:
        return x
    return take(x.shape, dtype=dtype, device=x.device).copy_(x)


def _keep(
    part: Part, call: Call, seed: Tensor | None, kv_heads: int, group: int, groups: int, dtype: torch.dtype
) -> dense.Keep | None:
    if seed is None:
        return None
    origins = part.origins(seed.device) + call.first_position
    batch_rows = part.batch_rows(seed.device)
    heads = part.query_heads(kv_heads, group, groups, seed.device) + call.head_offset

    def keep(segments: slice, rows: Tensor, keys: Tensor) -> Tensor:
        ones = (1,) * (rows.dim() - 2)
        origin = origins[segments].view(-1, len(heads), *ones)
        kept = keep_mask(
            seed,
            call.dropout_p,
            rows=batch_rows[segments].view(-1, 1, *ones),
            heads=heads.view(-1, *ones),
            branch=part.branch,
            queries=origin + rows * part.dilation_rate,
            keys=origin + keys * part.dilation_rate,
        )
        return kept.to(dtype) / (1.0 - call.dropout_p)

    return keep


def _tiling(
    part: Part, call: Call, layout: BlockLayout, q: Tensor, kv_heads: int, group: int, groups: int
) -> tiles.Tiling:
    """The part's kept tiles: of one grid where all its segments and heads share it."""
    branch = layout.branches[part.branch]
    assert branch is not None
    first = part.start // call.spec.branches[part.branch].segment_length
    segments = torch.arange(first, first + part.segments, device=q.device)
    segments = segments.repeat(part.rows.stop - part.rows.start)[:, None]
    heads = part.query_heads(kv_heads, group, groups, q.device)[None]
    batch_rows = part.batch_rows(q.device)[:, None]
    if not branch.rows_per_batch_row:
        segments, heads, batch_rows = segments[:1], heads[:, :1], batch_rows[:1]
    kept = branch.kept_keys(batch_rows, segments, heads, tiles_of(q.shape[1], layout.block_size))
    return tiles.Tiling(kept, layout.block_size)


@contextmanager
def tf32(allow: bool | None, device: torch.device) -> Iterator[None]:
    """PyTorch's own setting, or `allow` for as long as the block runs; the setting is the process's, hence the lock."""
    if allow is None or device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    # Since 2.9 PyTorch refuses to read the old switch once the new one is set.
    new = hasattr(matmul, "fp32_precision")
    name, value = ("fp32_precision", "tf32" if allow else "ieee") if new else ("allow_tf32", allow)
    with _tf32_lock:
        before = getattr(matmul, name)
        setattr(matmul, name, value)
        try:
            yield
        finally:
            setattr(matmul, name, before)
