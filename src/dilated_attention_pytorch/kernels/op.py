"""The one operator behind every attention here: forward over branches, backward against the merged out and lse.

It is opaque to autograd, `torch.compile`, export and checkpointing, and saves q, k, v, out and lse once, however many
branches there are. Engines differ in speed only; `backend` names the one that runs.

`attend` is what to call. Tracers, tensor subclasses and dispatch modes see a registered operator; a plain eager call
goes straight to the same code, because the registered operator's way through the dispatcher and Python's autograd takes
several times as long as a short sequence takes on a GPU.
"""

# No postponed annotations: torch.library reads the types to make the operators' schemas.
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dilated_attention_pytorch.core.reference import reference_backward, reference_forward
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout, Problem
from dilated_attention_pytorch.kernels import eager
from dilated_attention_pytorch.kernels.ladder import choose_backend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    problem: Problem,
    backend: str,
    plain: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`out`, or `(out, lse)`, of a call that `functional` has validated; `plain` says what `is_plain` does."""
    if not plain:
        both = attend_op(query, key, value, spans, seed, *_settings(problem, backend))
    elif torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Attend.apply(query, key, value, spans, seed, return_lse, problem, backend)
    else:
        both = _forward(query, key, value, spans, seed, problem, backend)
    return both if return_lse else both[0]


def is_plain(*tensors: Tensor) -> bool:
    """Whether nothing but autograd watches a call of these tensors."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
        and tensors[0].device.type != "meta"
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )


class _Attend(torch.autograd.Function):
    """The operator's autograd for plain calls."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any, return_lse: bool, *rest: Any
    ) -> Any:
        out, lse = _forward(query, key, value, spans, seed, *rest)
        ctx.rest = rest
        ctx.save_for_backward(query, key, value, out, lse, spans, seed)
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():
            # Under create_graph the gradient itself is recorded; the operator then refuses to be differentiated.
            grads = _gradients(ctx, attend_backward, _settings(*ctx.rest), grad_out, grad_lse)
        else:
            grads = _gradients(ctx, _backward, ctx.rest, grad_out, grad_lse)
        return (*grads, None, None, None, None, None)


@torch.library.custom_op("dilated_attention_pytorch::attend", mutates_args=())
def attend_op(
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
    problem = _problem(
        segment_lengths, dilation_rates, head_layout, is_causal, scale, dropout_p, head_offset, total_heads, allow_tf32
    )
    return _forward(query, key, value, spans, seed, problem, backend)


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
    return _backward(grad_out, grad_lse, query, key, value, out, lse, spans, seed, problem, backend)


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    B, N, H, _ = query.shape
    lse = query.new_empty((B, H, N), dtype=lse_dtype(query.dtype)).transpose(1, 2)  # as _by_head
    return query.new_empty(query.shape), lse


@attend_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, spans, seed, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, spans, seed)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, run: Any, rest: Sequence[Any], grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, spans, seed = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return None, None, None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    return run(grad_out, grad_lse, query, key, value, out, lse, spans, seed, *rest)


def _operator_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _gradients(ctx, attend_backward, ctx.settings, grad_out, grad_lse)
    return (*grads, None, None, *(None for _ in ctx.settings))


attend_op.register_autograd(_operator_backward, setup_context=_save)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor | None, seed: Tensor | None, problem: Problem, backend: str
) -> tuple[Tensor, Tensor]:
    backend = choose_backend(backend, query.device, query.dtype, query.shape[3])
    with no_autocast(query.device.type):
        if backend == "reference":
            out, lse = reference_forward(query, key, value, problem, spans, seed)
            return out.to(query.dtype), _by_head(lse.to(lse_dtype(query.dtype)))
        if backend == "triton":
            from dilated_attention_pytorch.kernels.triton import engine

            return engine.forward(query, key, value, problem, spans, seed)
        out, lse = eager.forward(query, key, value, problem, spans, seed)
        return out, _by_head(lse)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    problem: Problem,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backend = choose_backend(backend, query.device, query.dtype, query.shape[3])
    with no_autocast(query.device.type):
        if backend == "reference":
            grads = reference_backward(grad_out, grad_lse, query, key, value, problem, spans, seed)
            return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)
        if backend == "triton":
            from dilated_attention_pytorch.kernels.triton import engine

            return engine.backward(grad_out, grad_lse, query, key, value, out, lse, problem, spans, seed)
        return eager.backward(grad_out, grad_lse, query, key, value, out, lse, problem, spans, seed)


# For calls that another autograd function joins from several: without autograd of their own.
forward, backward = _forward, _backward


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast has done its work in `functional`; inside, it would turn float32 sums into low-precision ones."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _by_head(lse: Tensor) -> Tensor:
    """`(B, N, H)`, laid out in memory as `(B, H, N)`: as fused kernels write and read it."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _settings(problem: Problem, backend: str) -> tuple[Any, ...]:
    """A problem as the operators take it: in numbers and words."""
    spec = problem.spec
    assert problem.table is None, "a rank's share of a call is not an operator's"
    return (
        spec.segment_lengths, spec.dilation_rates, spec.head_layout, problem.is_causal, problem.scale,
        problem.dropout_p, problem.head_offset, problem.total_heads, problem.allow_tf32, backend,
    )  # fmt: skip


def _problem(segment_lengths: Sequence[int], dilation_rates: Sequence[int], *settings: Any) -> Problem:
    return _remembered_problem(tuple(segment_lengths), tuple(dilation_rates), *settings)


@functools.lru_cache(maxsize=1024)
def _remembered_problem(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_layout: HeadLayout,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
) -> Problem:
    return Problem(
        spec=DilatedSpec.of(segment_lengths, dilation_rates, head_layout),
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        head_offset=head_offset,
        total_heads=total_heads,
        allow_tf32=allow_tf32,
    )
