"""What PyTorch is doing around a call: tracing, forward mode, TF32."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_tf32_lock = threading.Lock()


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


def tf32_is_on() -> bool:
    """Whether PyTorch lets float32 products on GPUs round to TF32, in whichever way that was set.

    >>> tf32_is_on() in (True, False)
    True
    """
    matmul = torch.backends.cuda.matmul
    # PyTorch 2.9 and newer raise if `allow_tf32` is read after `fp32_precision` was set.
    stated = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if stated is None else stated == "tf32"


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
