"""The one operator behind every attention here: forward over branches, backward against the merged out and lse.

It is opaque to autograd, `torch.compile`, export and checkpointing, and saves q, k, v, out and lse once, however many
branches there are. Engines differ in speed only; `backend` names the one that runs.
"""

# No postponed annotations: torch.library reads the types to make the operators' schemas.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.reference import reference_backward, reference_forward
from dilated_attention_pytorch.core.spec import DilatedSpec, Problem
from dilated_attention_pytorch.kernels import eager
from dilated_attention_pytorch.kernels.ladder import choose_backend


@torch.library.custom_op("dilated_attention_pytorch::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: str,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of a call that `functional` has validated."""
    problem = _problem(
        segment_lengths, dilation_rates, head_layout, is_causal, scale, dropout_p, head_offset, total_heads, allow_tf32
    )
    backend = choose_backend(backend, query.device, query.dtype, query.shape[3])
    # Autocast has done its work in `functional`; inside, it would turn float32 sums into low-precision ones.
    with torch.autocast(query.device.type, enabled=False):
        if backend == "reference":
            out, lse = reference_forward(query, key, value, problem, spans, seed)
            return out.to(query.dtype), _by_head(lse.to(lse_dtype(query.dtype)))
        if backend == "triton":
            from dilated_attention_pytorch.kernels.triton import engine

            return engine.forward(query, key, value, problem, spans, seed)
        out, lse = eager.forward(query, key, value, problem, spans, seed)
        return out, _by_head(lse)


@torch.library.custom_op("dilated_attention_pytorch::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: str,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`."""
    problem = _problem(
        segment_lengths, dilation_rates, head_layout, is_causal, scale, dropout_p, head_offset, total_heads, allow_tf32
    )
    backend = choose_backend(backend, query.device, query.dtype, query.shape[3])
    with torch.autocast(query.device.type, enabled=False):
        if backend == "reference":
            grads = reference_backward(grad_out, grad_lse, query, key, value, problem, spans, seed)
            return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)
        if backend == "triton":
            from dilated_attention_pytorch.kernels.triton import engine

            return engine.backward(grad_out, grad_lse, query, key, value, out, lse, problem, spans, seed)
        return eager.backward(grad_out, grad_lse, query, key, value, out, lse, problem, spans, seed)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    B, N, H, _ = query.shape
    lse = query.new_empty((B, H, N), dtype=lse_dtype(query.dtype)).transpose(1, 2)  # as _by_head
    return query.new_empty(query.shape), lse


@attend_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _by_head(lse: Tensor) -> Tensor:
    """`(B, N, H)`, laid out in memory as `(B, H, N)`: as fused kernels write and read it."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, spans, seed, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, spans, seed)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, spans, seed = ctx.saved_tensors
    rest = (None,) * (2 + len(ctx.settings))
    if grad_out is None and grad_lse is None:
        return (None, None, None, *rest)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = attend_backward(grad_out, grad_lse, query, key, value, out, lse, spans, seed, *ctx.settings)
    return (*grads, *rest)


attend.register_autograd(_backward, setup_context=_save)


def _problem(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: str,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
) -> Problem:
    return Problem(
        spec=DilatedSpec.of(segment_lengths, dilation_rates, head_layout),  # type: ignore[arg-type]
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        head_offset=head_offset,
        total_heads=total_heads,
        allow_tf32=allow_tf32,
    )
