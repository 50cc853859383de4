"""Forward-mode derivatives: which tensors carry a tangent, and the error if a tangent would be lost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


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
