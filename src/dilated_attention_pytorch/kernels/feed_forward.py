"""`linear(layer_norm(gelu(hidden)))`, the second half of a feed-forward network, as one operator of compiled layers.

The compiler's own kernels for GELU and the norm read a row several times and compute `erf` each time; on an H200 they
took more than twice as long. Backward computes the normed rows again from the hidden ones, so the operator does not
keep them, as the compiler does.
"""

# No postponed annotations: torch.library reads the types to make the operators' schemas.
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.core.modes import refuse_tangents

# The most features: the kernels hold a row in registers. They use tuples, which Triton has from 3.3 (PyTorch 2.7) on.
WIDEST = 8192 if torch.__version__ >= "2.7" else 0


def fuses(hidden: Tensor, norm: nn.Module, linear: nn.Module) -> bool:
    """Whether `gelu_norm_linear` takes the place of these modules: where `torch.compile` compiles them for a GPU.

    Modules of another class (quantized, with an adapter), sharded weights and hooks are left to themselves.
    """
    hooks = (part._forward_hooks or part._forward_pre_hooks for part in (norm, linear))
    return (
        torch.compiler.is_dynamo_compiling()  # not under export, whose programs should need no package
        and hidden.is_cuda
        and hidden.dtype != torch.float64
        and hidden.shape[-1] <= WIDEST
        and type(norm) is nn.LayerNorm
        and type(linear) is nn.Linear
        and type(linear.weight) is nn.Parameter
        and linear.weight.requires_grad
        and not any(hooks)
        and (linear.weight.dtype == hidden.dtype or torch.is_autocast_enabled(hidden.device.type))
    )


def gelu_norm_linear(hidden: Tensor, norm: nn.Module, linear: nn.Linear) -> Tensor:
    """`linear(norm(gelu(hidden)))`, for `(..., features)` and a layer norm."""
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = linear.weight.to(hidden.dtype), linear.bias.to(hidden.dtype)
    rows = hidden.flatten(0, -2)
    out, _, _ = gelu_norm_linear_op(rows, norm.weight, norm.bias, norm.eps, weight, bias)
    return out.unflatten(0, hidden.shape[:-1])


@torch.library.custom_op("dilated_attention_pytorch::gelu_norm_linear", mutates_args=())
def gelu_norm_linear_op(
    hidden: Tensor, gain: Tensor, shift: Tensor, eps: float, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, mean, rstd)` of rows `(rows, features)`; the last two are each row's, float32."""
    from dilated_attention_pytorch.kernels.triton import feed_forward

    refuse_tangents("a compiled feed-forward network", hidden, gain, shift, weight, bias)
    normed, mean, rstd = feed_forward.forward(hidden.contiguous(), gain, shift, eps)
    return F.linear(normed, weight, bias), mean, rstd


@torch.library.custom_op("dilated_attention_pytorch::gelu_norm_linear_backward", mutates_args=())
def gelu_norm_linear_backward(
    grad: Tensor, hidden: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of hidden rows, gain, shift, weight and bias."""
    from dilated_attention_pytorch.kernels.triton import feed_forward

    d_hidden = grad @ weight
    normed, d_gain, d_shift = feed_forward.backward_(d_hidden, hidden.contiguous(), gain, shift, mean, rstd)
    return d_hidden, d_gain, d_shift, grad.T @ normed, grad.sum(0)


@gelu_norm_linear_op.register_fake
def _(hidden: Tensor, gain: Tensor, shift: Tensor, eps: float, weight: Tensor, bias: Tensor) -> Any:
    rows = hidden.shape[0]
    out = hidden.new_empty(rows, weight.shape[0])
    return out, *(hidden.new_empty(rows, dtype=torch.float32) for _ in range(2))


@gelu_norm_linear_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_gain, d_shift, d_weight = (torch.empty_like(x) for x in (gain, shift, weight))
    return hidden.new_empty(hidden.shape), d_gain, d_shift, d_weight, weight.new_empty(weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, gain, shift, _, weight, _ = inputs
    ctx.save_for_backward(hidden, gain, shift, *output[1:], weight)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    d_hidden, d_gain, d_shift, d_weight, d_bias = gelu_norm_linear_backward(grad, *ctx.saved_tensors)
    return d_hidden, d_gain, d_shift, None, d_weight, d_bias


gelu_norm_linear_op.register_autograd(_backward, setup_context=_save)
