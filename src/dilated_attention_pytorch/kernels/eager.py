"""Dilated attention out of PyTorch's own operators: any device, any dtype, memory linear in the sequence length.

Forward walks the parts and merges each partial into views of one `(out, lse)`; backward walks them again with the
merged pair and adds each part's gradients into views of dq, dk, dv. Low precision is computed and accumulated in
float32: on a CPU that is also the faster way, since its bf16 flash backward is several times slower than its float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.spec import Problem
from dilated_attention_pytorch.kernels import dense
from dilated_attention_pytorch.kernels.parts import Part, parts

_tf32_lock = threading.Lock()


def forward(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, spans: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v = (_working(x) for x in (query, key, value))
    groups, scale = q.shape[2] // k.shape[2], problem.softmax_scale(q.shape[3])
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype, device=q.device)
    with tf32(problem.allow_tf32, q.device):
        for part in parts(problem, spans, q.shape, k.shape[2]):
            part_k, part_v = part.view(k), part.view(v)
            for g in range(groups):
                part_q = part.view(q, g, groups)
                if seed is None and dense.flash_fits(q, scale):
                    partial = dense.flash_forward(part_q, part_k, part_v, scale, problem.is_causal)
                else:
                    keep = _keep(part, problem, seed, k.shape[2], g, groups, q.dtype)
                    partial = dense.chunked_forward(part_q, part_k, part_v, scale, problem.is_causal, keep)
                so_far = part.view(out, g, groups), part.view(lse, g, groups)
                if part.first:
                    so_far[0].copy_(partial[0])
                    so_far[1].copy_(partial[1])
                else:
                    merge_(*so_far, *partial)
    return (out if problem.partial else out.to(query.dtype)), lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    spans: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, merged = (_working(x) for x in (grad_out, query, key, value, out))
    groups, scale = q.shape[2] // k.shape[2], problem.softmax_scale(q.shape[3])
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lse = lse.contiguous()  # by row, so that batches of segments are views
    flash = seed is None and grad_lse is None and dense.flash_fits(q, scale)
    delta = torch.empty(0) if flash else (do * merged).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    with tf32(problem.allow_tf32, q.device):
        for part in parts(problem, spans, q.shape, k.shape[2]):
            part_k, part_v = part.view(k), part.view(v)
            for g in range(groups):
                part_do, part_q, part_lse = (part.view(x, g, groups) for x in (do, q, lse))
                if flash:
                    part_out = part.view(merged, g, groups)
                    grads = dense.flash_backward(
                        part_do, part_q, part_k, part_v, part_out, part_lse, scale, problem.is_causal
                    )
                else:
                    keep = _keep(part, problem, seed, k.shape[2], g, groups, q.dtype)
                    part_delta = part.view(delta, g, groups)
                    grads = dense.chunked_backward(
                        part_do, part_q, part_k, part_v, part_delta, part_lse, scale, problem.is_causal, keep
                    )
                for total, grad in zip((part.view(dq, g, groups), part.view(dk), part.view(dv)), grads):
                    total += grad
    if problem.partial:
        return dq, dk, dv
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _working(x: Tensor) -> Tensor:
    """In the precision of the computation, with rows that can be cut into segments by views."""
    x = x if x.dtype == torch.float64 else x.float()
    batches_follow = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if x.stride(-1) == 1 and batches_follow else x.contiguous()


def _keep(
    part: Part, problem: Problem, seed: Tensor | None, kv_heads: int, group: int, groups: int, dtype: torch.dtype
) -> dense.Keep | None:
    if seed is None:
        return None
    positions = part.positions(seed.device) + problem.first_position  # (S, M)
    rows = part.batch_rows(seed.device)[:, None, None, None]
    heads = part.query_heads(kv_heads, group, groups, seed.device)[:, None, None] + problem.head_offset

    def keep(segments: slice, queries: slice, keys: slice) -> Tensor:
        kept = keep_mask(
            seed,
            problem.dropout_p,
            rows=rows[segments],
            heads=heads,
            branch=part.branch,
            queries=positions[segments, None, queries, None],
            keys=positions[segments, None, None, keys],
        )
        return kept.to(dtype) / (1.0 - problem.dropout_p)

    return keep


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
