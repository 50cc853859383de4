"""The state of PyTorch around a call: tracing, forward mode, TF32."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Keywords of an operator that reads values on the host, which it cannot do while a CUDA graph is recorded: a compiled
# graph leaves it out of its recordings. Older PyTorch has no tag for this.
READS_VALUES: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_tf32_lock = threading.Lock()


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, which breaks the graph of a compiled caller and runs eagerly.

    `torch.compiler.disable` would import the compiler now; this imports it when the function is first called.
    """
    return _disable_dynamo(function)


def is_plain(*tensors: Tensor) -> bool:
    """Whether only autograd watches a call of these tensors: no tracer, mode, transform or subclass of tensors does.

    Only such calls may look things up and remember them.
    """
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and not tensors[0].is_meta
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )


def has_tangents(*tensors: Tensor) -> bool:
    """Whether one of these tensors has a tangent; under `torch.compile` and `torch.func`, whether forward mode is on.

    >>> x = torch.ones(2)
    >>> with forward_ad.dual_level():
    ...     has_tangents(x), has_tangents(x, forward_ad.make_dual(x, x))
    (False, True)
    """
    if forward_ad._current_level < 0:
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True  # a wrapper may hide tangents, and a tracer cannot look for them
    if not torch._C._is_fwd_grad_enabled():
        return False
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView):
        return True  # within a tracer, where PyTorch cannot unpack a tensor to look
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def refuse_tangents(what: str, *tensors: Tensor) -> None:
    """Raise if a tensor has a tangent: PyTorch would take a lost tangent for zero."""
    if has_tangents(*tensors):
        raise NotImplementedError(
            f"{what} computes no forward-mode derivatives (torch.func.jvp, torch.func.jacfwd, "
            "torch.autograd.forward_ad): use reverse mode, or an eager dilated_attention on whole sequences"
        )


def first_derivatives_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the `backward` of an autograd function: differentiating its gradients again raises an error.

    PyTorch's `once_differentiable` lets a constant gradient of the output pass, and the second derivative is then zero.

    >>> class Cube(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x**3
    ...     @staticmethod
    ...     @first_derivatives_only("a cube")
    ...     def backward(ctx, grad):
    ...         return 3 * ctx.saved_tensors[0] ** 2 * grad
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (slope,) = torch.autograd.grad(Cube.apply(x), x, create_graph=True)
    >>> slope.item()
    12.0
    >>> slope.backward()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: a cube has first derivatives only: do not differentiate its gradient ...
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled code refuses by itself
                return found
            followed = torch.empty(0, requires_grad=True)
            return _FirstDerivatives.apply(what, followed, *(found if isinstance(found, tuple) else (found,)))

        return once

    return decorated


class _FirstDerivatives(torch.autograd.Function):
    """The identity on gradients; its own backward is the error. `followed` makes autograd follow the results."""

    @staticmethod
    def forward(ctx: Any, what: str, followed: Tensor, *found: Tensor | None) -> Any:
        ctx.what = what
        return tuple(None if x is None else x.view_as(x) for x in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise no_second_derivatives(ctx.what)


def no_second_derivatives(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} has first derivatives only: do not differentiate its gradient or its tangent again "
        "(create_graph=True, torch.func.hessian), or take differences of gradients"
    )


def tf32_is_on() -> bool:
    """Whether PyTorch lets float32 products on GPUs round to TF32, by either of its settings.

    >>> tf32_is_on() in (True, False)
    True
    """
    matmul = torch.backends.cuda.matmul
    # PyTorch 2.9 and newer raise if `allow_tf32` is read after `fp32_precision` was set.
    stated = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if stated is None else stated == "tf32"


@contextmanager
def tf32(allow: bool | None, device: torch.device) -> Iterator[None]:
    """Within the block, TF32 as `allow` says; None keeps PyTorch's setting, which is global: hence the lock."""
    if allow is None or device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    new = hasattr(matmul, "fp32_precision")
    name, value = ("fp32_precision", "tf32" if allow else "ieee") if new else ("allow_tf32", allow)
    with _tf32_lock:
        before = getattr(matmul, name)
        setattr(matmul, name, value)
        try:
            yield
        finally:
            setattr(matmul, name, before)
