"""Which engine runs a call, and why the others cannot: the one place that decides it."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

import torch

from dilated_attention_pytorch.core.checks import check_choice, check_device
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.kernels import vendor

BACKENDS = ("triton", "vendor", "eager", "reference")


def choose_backend(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
) -> str:
    """The engine that `backend` names, or for `auto` the one to use: on a GPU Triton where it can, else eager.

    `vendor` is by name only: our own kernels are as fast, and round less often.
    """
    check_backend(backend)
    if debugging():
        _tell_choice(backend, device, dtype, head_dim, block_size)
    if backend == "auto":
        # Triton's interpreter, which runs on a CPU, is for tests that name it.
        can = device.type == "cuda" and why_not("triton", device, dtype, head_dim, block_size) is None
        return "triton" if can else "eager"
    reason = why_not(backend, device, dtype, head_dim, block_size)
    if reason is not None:
        able = [name for name in BACKENDS if why_not(name, device, dtype, head_dim, block_size) is None]
        raise ValueError(f"backend {backend!r} cannot take this call: {reason}; {' or '.join(able)} can")
    return backend


@functools.lru_cache(maxsize=1024)  # once per kind of call
def _tell_choice(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> None:
    kind = f"{dtype} on {device}, head_dim {head_dim}" + ("" if block_size is None else f", tiles of {block_size}")
    if backend != "auto":
        log.debug("engine %s for %s: the call names it", backend, kind)
        return
    reason = why_not("triton", device, dtype, head_dim, block_size)
    if reason is None and device.type == "cuda":
        log.debug("engine triton for %s: auto takes it on a GPU", kind)
    else:
        log.debug("engine eager for %s: no triton, %s", kind, reason or "whose interpreter is for calls that name it")


def check_backend(backend: str) -> None:
    check_choice("backend", backend, ("auto", *BACKENDS))


def why_not(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
) -> str | None:
    """Why a backend cannot take tensors of this kind, or None. Engines that are right take everything."""
    if backend == "vendor":
        if block_size is not None:
            return "PyTorch's flash kernel knows no tiles to leave out"
        return vendor.why_not(device, dtype, head_dim)
    if backend != "triton":
        return None
    if dtype == torch.float64:
        return "its kernels compute in float32, the tensors are float64"
    if head_dim % 8 or not 16 <= head_dim <= 256:
        return f"its kernels take a head_dim from 16 to 256 that is a multiple of 8, got {head_dim}"
    if block_size is not None and block_size < 16:
        return f"its kernels take tiles of 16 rows or more, got block_size={block_size}"
    return _triton_missing(device)


def backends(device: torch.device | str | None = None) -> dict[str, str]:
    """What can run here: each backend with `available`, or the reason why it is not.

    >>> backends("cpu")["eager"]
    'available'
    """
    place = check_device("device", ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    reasons = {name: why_not(name, place, torch.bfloat16, 64) for name in BACKENDS}
    return {name: "available" if reason is None else reason for name, reason in reasons.items()}


@functools.lru_cache
def _triton_missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"Triton runs on GPUs, the tensors are on {device.type}"
    if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"its kernels need compute capability 8.0, this GPU has {torch.cuda.get_device_capability(device)}"
    return None
