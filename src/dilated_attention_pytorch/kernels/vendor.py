"""PyTorch's flash kernel for CUDA, with its lse, on `(S, M, H, D)` views: it computes `blocks` in low precision.

There may be fewer or more keys than queries. As in `blocks`, `backward` takes the *merged* out and lse of the whole
call and returns a part's share of the gradients. Results are float32, but the kernel has rounded them once to the
inputs' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fits(q: Tensor, scale: float) -> bool:
    """Whether PyTorch's flash kernel for CUDA computes this."""
    return q.is_cuda and scale > 0 and why_not(q.device, q.dtype, q.shape[-1]) is None


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why PyTorch's flash kernel for CUDA cannot take tensors of this kind, or None."""
    if device.type != "cuda":
        return f"PyTorch's flash kernel for CUDA runs on GPUs, the tensors are on {device.type}"
    if torch.version.cuda is None:
        return "PyTorch's flash kernel runs on NVIDIA GPUs, and this PyTorch is not built for them"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"PyTorch's flash kernel takes bfloat16 and float16, the tensors are {dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"PyTorch's flash kernel takes a head_dim of up to 256 that is a multiple of 8, got {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"PyTorch's flash kernel needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *(_dense_rows(x).transpose(1, 2) for x in (q, k, v)), 0.0, is_causal, False, scale=scale
    )
    return out.transpose(1, 2).float(), lse.transpose(1, 2)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = q.shape[1], k.shape[1]
    do, q, k, v, out = (_dense_rows(x.to(q.dtype)).transpose(1, 2) for x in (do, q, k, v, out))
    lse = lse.transpose(1, 2).contiguous()
    # Without documents and dropout there are no lengths and no seed.
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, out, lse, None, None, rows, keys, 0.0, is_causal, None, None, scale=scale
    )
    return dq.transpose(1, 2).float(), dk.transpose(1, 2).float(), dv.transpose(1, 2).float()


def _dense_rows(x: Tensor) -> Tensor:
    """The rows with a stride of 1 within each, which the kernel requires."""
    return x if x.stride(-1) == 1 else x.contiguous()
