"""The definition of correctness: dilated attention written out literally, in float64, over an explicit dense mask.

One softmax over all (branch, key) pairs:

    lse(p, h) = log sum_branch sum_j exp(scale * q.k)
    out(p, h) =     sum_branch sum_j exp(scale * q.k - lse) v_j

It takes O(N^2) time and memory: every other path is tested against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import BlockLayout, allowed_pairs
from dilated_attention_pytorch.core.call import Call, Grads, Inputs, check_shapes
from dilated_attention_pytorch.core.checks import checked
from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.pattern import dense_mask
from dilated_attention_pytorch.core.spans import check_spans, documents, segment_number


@checked()
def reference_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    spans: Tensor | None = None,
    seed: Tensor | None = None,
    layout: BlockLayout | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` in float64, `(B, N, H, D)` and `(B, N, H)`; differentiable by autograd.

    With a block layout, which must be made for the same spans, a row sees what its kept tiles show.

    >>> from dilated_attention_pytorch.core.spec import DilatedSpec
    >>> call = Call(spec=DilatedSpec.of([4, 16], [1, 4]), is_causal=True)
    >>> query, key, value = torch.randn(3, 1, 16, 4, 8).unbind(0)
    >>> out, lse = reference_forward(query, key, value, call)
    >>> torch.allclose(out[:, 0], value[:, 0].double())  # the first row sees only itself
    True
    """
    check_shapes(query, key, value)
    if query.is_complex() or key.is_complex() or value.is_complex():
        raise ValueError(f"query, key and value must be real, got {query.dtype}, {key.dtype} and {value.dtype}")
    if spans is not None and spans.device != query.device:
        raise ValueError(f"query and spans must share a device, got {query.device} and {spans.device}")
    if spans is not None:
        check_spans(spans, query.shape[0])
    if seed is not None and (seed.shape != (2,) or seed.dtype != torch.int64):
        raise ValueError(
            f"seed must be two words of int64, as draw_seed gives them, got {seed.dtype} {tuple(seed.shape)}"
        )
    B, N, H, D = query.shape
    query, key, value = (x.double() for x in (query, key, value))
    out = query.new_zeros(B, N, H, D)
    lse = query.new_full((B, N, H), -torch.inf)
    for b, tokens, sees in _rows_of_documents(call, query, key, spans, layout):
        weights, row_lse = _weights(query[b, tokens], key[b, tokens], call, sees)
        weights = weights * _dropout(call, seed, b, tokens, weights)
        v = _per_query_head(value[b, tokens], H)
        out[b, tokens] = _sum("ghij,jhd->ihd", weights, v, sees)
        lse[b, tokens] = row_lse.transpose(0, 1)
    return out, lse


def reference_backward(call: Call, inputs: Inputs, grad_out: Tensor, grad_lse: Tensor | None) -> Grads:
    """The gradients of query, key and value in float64, by the chain rule on the formula above."""
    H, D = inputs.query.shape[2:]
    grad_out, query, key, value = (x.double() for x in (grad_out, *inputs[:3]))
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    group = H // key.shape[2]
    for b, tokens, sees in _rows_of_documents(call, query, key, inputs.spans, inputs.layout):
        weights, _ = _weights(query[b, tokens], key[b, tokens], call, sees)
        dropout = _dropout(call, inputs.seed, b, tokens, weights)
        k, v = (_per_query_head(x[b, tokens], H) for x in (key, value))
        do = grad_out[b, tokens]
        d_weights = (torch.einsum("ihd,jhd->hij", do, v) * dropout).masked_fill(~sees, 0.0)
        delta = (d_weights * weights).sum((0, 3))  # (H, n): sum over every pair that the row's one softmax covers
        if grad_lse is not None:
            delta = delta - grad_lse[b, tokens].double().transpose(0, 1)
        d_scores = weights * (d_weights - delta[None, :, :, None]).masked_fill(~sees, 0.0) * call.softmax_scale(D)
        dq[b, tokens] = _sum("ghij,jhd->ihd", d_scores, k, sees)
        dk[b, tokens] = _sum("ghij,ihd->jhd", d_scores, query[b, tokens], sees).unflatten(1, (-1, group)).sum(2)
        dv[b, tokens] = _sum("ghij,ihd->jhd", weights * dropout, do, sees).unflatten(1, (-1, group)).sum(2)
    return Grads(dq, dk, dv)


def _rows_of_documents(
    call: Call, query: Tensor, key: Tensor, spans: Tensor | None, layout: BlockLayout | None
) -> Iterator[tuple[int, slice, Tensor]]:
    """The batch row, the tokens and the visible pairs, `(branches, H, n, n)` bool, of every document."""
    B, N, H, _ = query.shape
    offsets = call.query_head_offsets(H, key.shape[2])
    for rows, start, n, document in documents(spans, B, N):
        for b in range(rows.start, rows.stop):
            sees = dense_mask(call.spec, offsets, n, is_causal=call.is_causal, device=query.device)
            if layout is not None:
                first = [segment_number(b, start, document, w, N) for w in call.spec.segment_lengths]
                allowed = allowed_pairs(layout, call.spec, offsets, b, n, None if spans is None else first)
                sees = sees & allowed.to(query.device)
            yield b, slice(start, start + n), sees


def _sum(equation: str, weights: Tensor, x: Tensor, sees: Tensor) -> Tensor:
    """The einsum over visible pairs; a result is nan if a visible pair takes a value of `x` that is not finite."""
    if x.isfinite().all():
        return torch.einsum(equation, weights, x)
    touched = torch.einsum(equation, sees.to(x.dtype), (~x.isfinite()).to(x.dtype)) > 0
    return torch.einsum(equation, weights, x.nan_to_num(0.0, 0.0, 0.0)).masked_fill(touched, torch.nan)


def _weights(q: Tensor, k: Tensor, call: Call, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Of one document: the weights of all (branch, key) pairs, `(branches, H, n, n)`, and the lse, `(H, n)`.

    The weights of pairs that are not visible are 0.
    """
    H, D = q.shape[1:]
    scores = torch.einsum("ihd,jhd->hij", q, _per_query_head(k, H)) * call.softmax_scale(D)
    scores = scores.masked_fill(~sees, -torch.inf)  # (branches, H, n, n)
    covered = sees.any(3).any(0)  # (H, n)
    # An uncovered row has no finite score; a stand-in keeps both its value and its gradient from being nan.
    lse = scores.masked_fill(~covered[None, :, :, None], 0.0).logsumexp((0, 3))
    weights = (scores - lse[None, :, :, None]).exp().masked_fill(~sees, 0.0)
    return weights, lse.masked_fill(~covered, -torch.inf)


def _dropout(call: Call, seed: Tensor | None, b: int, tokens: slice, weights: Tensor) -> Tensor:
    """The factor of every weight: 0 if it is dropped, else 1 / (1 - p). It is the same in all branches."""
    if seed is None:
        return torch.ones_like(weights)
    positions = torch.arange(tokens.start, tokens.stop, device=weights.device)
    kept = keep_mask(
        seed,
        call.dropout_p,
        rows=torch.tensor(b, device=weights.device),
        heads=call.head_offset + torch.arange(weights.shape[1], device=weights.device)[:, None, None],
        queries=positions[:, None],
        keys=positions[None, :],
    )
    return kept.double() / (1.0 - call.dropout_p)


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)
