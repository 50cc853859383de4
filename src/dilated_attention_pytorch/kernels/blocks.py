"""Attention between a block of rows and a block of keys, both `(S, M, H, D)` views, forward and backward.

`partial` gives `(out, lse)`. `gradients` takes the *merged* out, lse and delta of the whole call, so that a block's
share of the gradients needs nothing that forward did not save:

    P  = exp(scale * q.k - lse)         dv = (P * keep)^T do
    dS = P * (keep * do.v - delta)      dq = scale * dS k,  dk = scale * dS^T q

The first of these that supports a block computes it: PyTorch's flash kernel for CUDA (`vendor`), its flash kernel for
CPUs, matrix products with one chunk of scores at a time. Results may lie in workspaces from `take`: add them up before
the lease ends. There may be fewer or more keys than rows, except under causality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call, Grads, Partial, wide_dtype
from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.kernels import vendor
from dilated_attention_pytorch.kernels.tiles import TileChunk
from dilated_attention_pytorch.kernels.tiles import Tiling as Tiling

# Scores held at once, whatever the sequence length: 16 MiB in float32, several times that with dropout, whose hash is
# kept in int64.
_SCORES_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 256

Keep = Callable[[slice, Tensor, Tensor], Tensor]
"""`keep(segments, rows, keys)`: the factor of dropout, 0 or 1 / (1 - p); rows and keys are numbers of grid rows that
broadcast to `(S, H, ..., rows, keys)`."""


def keep_by_position(
    seed: Tensor,
    call: Call,
    *,
    batch_rows: Tensor,
    heads: Tensor,
    queries: Callable[[slice, Tensor], Tensor],
    keys: Callable[[slice, Tensor], Tensor],
    dtype: torch.dtype,
) -> Keep:
    """Dropout of `(S,)` segments of batch rows and `(H,)` query heads of the call.

    `queries(segments, numbers)` and `keys(segments, numbers)` give the positions of numbered grid rows.
    """

    def keep(segments: slice, i: Tensor, j: Tensor) -> Tensor:
        ones = (1,) * (i.dim() - 2)
        survives = keep_mask(
            seed,
            call.dropout_p,
            rows=batch_rows[segments].view(-1, 1, *ones),
            heads=(heads + call.head_offset).view(-1, *ones),
            queries=queries(segments, i),
            keys=keys(segments, j),
        )
        return survives.to(dtype) / (1.0 - call.dropout_p)

    return keep


class Block(NamedTuple):
    """What rows see of keys: all, or those up to their own number, or the kept tiles; less what dropout drops."""

    scale: float
    is_causal: bool = False
    keep: Keep | None = None
    tiling: Tiling | None = None

    def is_fused(self, q: Tensor) -> bool:
        """Whether a flash kernel computes it."""
        # PyTorch's kernel for CPUs scales after masking: one that is not positive would turn -inf into nan or +inf.
        if self.keep is not None or self.tiling is not None or self.scale <= 0:
            return False
        return q.device.type == "cpu" or vendor.fits(q, self.scale)


def partial(q: Tensor, k: Tensor, v: Tensor, block: Block, take: Take, *, fused: bool = True) -> Partial:
    """`(out, lse)` in float32, or float64 for float64.

    `fused=False` keeps to operators that have forward-mode derivatives.
    """
    fused = fused and block.is_fused(q)
    if fused and vendor.fits(q, block.scale):
        return Partial(*vendor.forward(q, k, v, block.scale, block.is_causal))
    q, k, v = _working(q, take), _working(k, take), _working(v, take)
    if fused:
        return Partial(*cpu_flash_forward(q, k, v, block.scale, block.is_causal))
    rows, keys, tiling = q.shape[1], k.shape[1], block.tiling
    if tiling is not None:
        q, k, v = (tiling.cut(x, take) for x in (q, k, v))
    out, lse = (take(shape, dtype=q.dtype, device=q.device) for shape in (q.shape, q.shape[:-1]))
    for chunk in _chunks(q, keys, block):
        scores = _scores(q, k, chunk, block)
        chunk_lse = scores.logsumexp(-1)
        weights = scores.sub_(chunk_lse.unsqueeze(-1)).exp_()
        if block.keep is not None:
            weights *= block.keep(chunk.segments, chunk.row_numbers, chunk.key_numbers)
        chunk.rows(out).copy_(weights @ chunk.keys(v))
        chunk.rows(lse).copy_(chunk_lse)
    return Partial(out, lse) if tiling is None else Partial(tiling.join(out, rows), tiling.join(lse, rows))


def gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    delta: Tensor,
    lse: Tensor,
    block: Block,
    take: Take,
) -> Grads:
    """The block's share of dq, dk, dv. Without `out`, which flash kernels need, it is computed from `delta`.

    A gradient through the lse is in `delta` alone: then pass no `out`. With it, a fused block does not read `delta`.
    """
    fused = block.is_fused(q)
    if out is not None and fused and vendor.fits(q, block.scale):
        return Grads(*vendor.backward(do, q, k, v, out, lse, block.scale, block.is_causal))
    do, q, k, v = (_working(x, take) for x in (do, q, k, v))
    if out is not None and fused:
        return Grads(*cpu_flash_backward(do, q, k, v, _working(out, take), lse, block.scale, block.is_causal))
    rows, keys, tiling = q.shape[1], k.shape[1], block.tiling
    if tiling is not None:  # a row past the end has do = 0 and delta = 0, and adds nothing
        do, q, k, v, delta, lse = (tiling.cut(x, take) for x in (do, q, k, v, delta, lse))
    dq, dk, dv = (take(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dk.zero_()
    dv.zero_()
    for chunk in _chunks(q, keys, block):
        chunk_do, chunk_k = chunk.rows(do), chunk.keys(k)
        weights = _scores(q, k, chunk, block).sub_(chunk.rows(lse).unsqueeze(-1)).exp_()
        d_weights = chunk_do @ chunk.keys(v).transpose(-1, -2)
        dropped = weights
        if block.keep is not None:
            factor = block.keep(chunk.segments, chunk.row_numbers, chunk.key_numbers)
            dropped = weights * factor
            d_weights *= factor
        chunk.add(dv, dropped.transpose(-1, -2) @ chunk_do)
        d_scores = d_weights.sub_(chunk.rows(delta).unsqueeze(-1)).mul_(weights).mul_(block.scale)
        chunk.rows(dq).copy_(d_scores @ chunk_k)
        chunk.add(dk, d_scores.transpose(-1, -2) @ chunk.rows(q))
    grads = Grads(dq, dk, dv)
    return grads if tiling is None else Grads(*(tiling.join(x, n) for x, n in zip(grads, (rows, keys, keys))))


def _scores(q: Tensor, k: Tensor, chunk: Chunk | TileChunk, block: Block) -> Tensor:
    scores = chunk.rows(q) @ chunk.keys(k).transpose(-1, -2)
    scores.mul_(block.scale)
    return scores if chunk.hidden is None else scores.masked_fill_(chunk.hidden, -torch.inf)


class Chunk(NamedTuple):
    """Some rows of some segments, and the keys that they may see."""

    segments: slice
    at_rows: slice
    at_keys: slice
    row_numbers: Tensor  # (1, 1, rows, 1)
    key_numbers: Tensor  # (1, 1, 1, keys)
    hidden: Tensor | None  # broadcasts to (S, H, rows, keys); None where all is visible

    def rows(self, x: Tensor) -> Tensor:
        """The chunk's rows of `(S, M, H, ...)`, a view `(S, H, rows, ...)`."""
        return x[self.segments, self.at_rows].transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        return x[self.segments, self.at_keys].transpose(1, 2)

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add `(S, H, keys, D)` to the keys that it belongs to."""
        self.keys(total).add_(x)


def _chunks(q: Tensor, keys: int, block: Block) -> Iterator[Chunk] | Iterator[TileChunk]:
    if block.tiling is not None:
        yield from block.tiling.chunks(q, keys, block.is_causal)
        return
    S, M, H, _ = q.shape
    rows = max(1, min(M, _ROWS_AT_ONCE, _SCORES_AT_ONCE // (keys * H)))
    segments = max(1, _SCORES_AT_ONCE // (keys * H * rows))
    number = torch.arange(max(M, keys), device=q.device)
    for s in range(0, S, segments):
        for i in range(0, M, rows):
            at_rows = slice(i, min(i + rows, M))
            at_keys = slice(0, at_rows.stop if block.is_causal else keys)
            row_numbers, key_numbers = number[None, None, at_rows, None], number[None, None, None, at_keys]
            hidden = key_numbers > row_numbers if block.is_causal else None
            yield Chunk(slice(s, s + segments), at_rows, at_keys, row_numbers, key_numbers, hidden)


def sums_like(x: Tensor, take: Take, *, own: bool = False) -> Tensor:
    """Zeros like `x` in the dtype of sums, lent by `take` unless that is the dtype of `x`; `own` borrows nothing."""
    dtype = wide_dtype(x.dtype)
    if own or x.dtype == dtype:
        return torch.zeros(x.shape, dtype=dtype, device=x.device)
    return take(x.shape, dtype=dtype, device=x.device).zero_()


def _working(x: Tensor, take: Take) -> Tensor:
    """In the precision of the computation."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return take(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal, scale=scale
    )
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    # Where all scores of a row are nan or -inf, the kernel may return out = 0 and lse = 0. Then the score of the first
    # key, which every row sees, is not finite: adding 0 times it gives nan there, and leaves a true lse of 0 alone.
    doubtful = (lse == 0).nonzero(as_tuple=True)
    if len(doubtful[0]):
        segments, _, heads = doubtful
        nothing = (q[doubtful] * k[segments, 0, heads]).sum(-1).mul_(0.0)
        lse[doubtful] += nothing
        out[doubtful] += nothing[:, None]
    return out, lse


def cpu_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, out = (x.transpose(1, 2) for x in (do, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, out, lse.contiguous().transpose(1, 2), 0.0, is_causal, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
