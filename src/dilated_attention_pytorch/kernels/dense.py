"""Dense attention with its lse on `(S, M, H, D)` views, forward and backward: what a part is computed with.

What the chunked ones return is a workspace from `take`: the caller adds it up before it ends the lease.
Keys may be fewer or more than queries, except where it is causal.

`forward` gives the partial `(out, lse)`. `backward` takes the *merged* out (through `delta`) and lse of the whole
problem, so that a part's share of the gradients needs nothing that forward did not save:

    P  = exp(scale * q.k - lse)         dv = (P * keep)^T do
    dS = P * (keep * do.v - delta)      dq = scale * dS k,  dk = scale * dS^T q
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dilated_attention_pytorch.core.pool import Take

# Scores held at once by the chunked path, whatever the sequence length: 16 MiB in float32, several times that with
# dropout, whose hash is kept in int64.
_SCORES_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 256

Keep = Callable[[slice, Tensor, Tensor], Tensor]
"""`keep(segments, rows, keys)`: the factor of dropout, 0 or 1 / (1 - p); numbers of grid rows that broadcast to
`(S, H, ..., rows, keys)`."""


def flash_fits(q: Tensor, scale: float) -> bool:
    """Whether PyTorch's CPU flash kernel computes this: it takes strided rows and gives the lse."""
    # It scales after masking, so that a causal -inf would turn to nan or +inf under a scale that is not positive.
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and scale > 0


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=is_causal, scale=scale
    )
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    # Where all scores of a row are nan or -inf, the kernel may give out = 0 and lse = 0. Then the score of the first
    # key, which every row sees, is not finite either: 0 times it adds nan there, and nothing where 0 is the true lse.
    doubtful = (lse == 0).nonzero(as_tuple=True)
    if len(doubtful[0]):
        segments, _, heads = doubtful
        nothing = (q[doubtful] * k[segments, 0, heads]).sum(-1).mul_(0.0)
        lse[doubtful] += nothing
        out[doubtful] += nothing[:, None]
    return out, lse


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, out = (x.transpose(1, 2) for x in (do, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, out, lse.contiguous().transpose(1, 2), 0.0, is_causal, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def chunked_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, keep: Keep | None, take: Take
) -> tuple[Tensor, Tensor]:
    out, lse = (take(shape, dtype=q.dtype, device=q.device) for shape in (q.shape, q.shape[:-1]))
    for segments, rows, keys in _chunks(q, k.shape[1], is_causal):
        scores = _scores(q[segments, rows], k[segments, keys], scale, rows, is_causal)
        chunk_lse = scores.logsumexp(-1)
        weights = scores.sub_(chunk_lse.unsqueeze(-1)).exp_()
        if keep is not None:
            weights *= keep(segments, *_numbers(rows, keys, q.device))
        out[segments, rows] = torch.einsum("shij,sjhd->sihd", weights, v[segments, keys])
        lse[segments, rows] = chunk_lse.transpose(1, 2)
    return out, lse


def chunked_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
    keep: Keep | None,
    take: Take,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (take(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dk.zero_()
    dv.zero_()
    for segments, rows, keys in _chunks(q, k.shape[1], is_causal):
        kept_k, kept_v, kept_do = k[segments, keys], v[segments, keys], do[segments, rows]
        scores = _scores(q[segments, rows], kept_k, scale, rows, is_causal)
        weights = scores.sub_(lse[segments, rows].transpose(1, 2).unsqueeze(-1)).exp_()
        d_weights = torch.einsum("sihd,sjhd->shij", kept_do, kept_v)
        dropped = weights
        if keep is not None:
            factor = keep(segments, *_numbers(rows, keys, q.device))
            dropped = weights * factor
            d_weights *= factor
        dv[segments, keys] += torch.einsum("shij,sihd->sjhd", dropped, kept_do)
        d_scores = d_weights.sub_(delta[segments, rows].transpose(1, 2).unsqueeze(-1)).mul_(weights).mul_(scale)
        dq[segments, rows] = torch.einsum("shij,sjhd->sihd", d_scores, kept_k)
        dk[segments, keys] += torch.einsum("shij,sihd->sjhd", d_scores, q[segments, rows])
    return dq, dk, dv


def _numbers(rows: slice, keys: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    i = torch.arange(rows.start, rows.stop, device=device)
    return i[None, None, :, None], torch.arange(keys.stop, device=device)[None, None, None, :]


def _chunks(q: Tensor, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    S, M, H, _ = q.shape
    rows = max(1, min(M, _ROWS_AT_ONCE, _SCORES_AT_ONCE // (keys * H)))
    segments = max(1, _SCORES_AT_ONCE // (keys * H * rows))
    for s in range(0, S, segments):
        for i in range(0, M, rows):
            end = min(i + rows, M)
            yield slice(s, s + segments), slice(i, end), slice(0, end if is_causal else keys)


def _scores(q: Tensor, k: Tensor, scale: float, rows: slice, is_causal: bool) -> Tensor:
    scores = torch.einsum("sihd,sjhd->shij", q, k).mul_(scale)
    if is_causal:
        i = torch.arange(rows.start, rows.stop, device=q.device)
        future = torch.arange(k.shape[1], device=q.device) > i[:, None]
        scores.masked_fill_(future, -torch.inf)
    return scores
