"""The protocol of engines, and the one place that chooses the engine of a call.

Engines differ in speed and rounding only. Each computes `(out, lse)` of a call, and its gradients from the saved inputs
and the merged result. The reference and eager engines accept every call.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.call import ENGINES, Call, Grads, Inputs, Partial, Saved, wide_dtype
from dilated_attention_pytorch.core.checks import check_device
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.reference import reference_backward, reference_forward
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.kernels import vendor
from dilated_attention_pytorch.kernels.eager import Eager, Vendor, by_head


class Engine(Protocol):
    """Computes calls. It remembers its plan of a call for equal calls."""

    def partial(self, call: Call, inputs: Inputs, resources: Resources) -> Partial:
        """`(out, lse)` in the inputs' dtype and float32 (float64 for float64); both wide if the call is `partial`."""

    def gradients(
        self, call: Call, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, resources: Resources
    ) -> Grads:
        """The gradients of query, key and value."""


class Reference:
    """The definition itself, in float64."""

    def partial(self, call: Call, inputs: Inputs, resources: Resources) -> Partial:
        query, key, value, spans, seed, layout, _ = inputs
        out, lse = reference_forward(query, key, value, call, spans, seed, layout)
        return Partial(out.to(query.dtype), by_head(lse.to(wide_dtype(query.dtype))))

    def gradients(
        self, call: Call, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, resources: Resources
    ) -> Grads:
        grads = reference_backward(call, saved.inputs, grad_out, grad_lse)
        return Grads(*(x.to(saved.inputs.query.dtype) for x in grads))


def engine_for(call: Call, inputs: Inputs) -> Engine:
    """The engine that runs a call."""
    if inputs.prepared is not None:
        return load_engine(inputs.prepared.engine)
    return load_engine(name_of_engine(call, inputs.query, inputs.query.device))


def name_of_engine(call: Call, query: Tensor, device: torch.device) -> str:
    block_size = None if call.sparse is None or not query.numel() else call.sparse.block_size
    return choose_engine(call.backend, device, query.dtype, query.shape[3], block_size)


def compile_kernels(
    call: Call, inputs: Inputs, device: torch.device | str | None, *, backward: bool
) -> list[tuple[str, float]]:
    """Compile what a call launches on a device: the names and seconds of the kernels, none if its engine has none.

    The inputs are on the device `meta`: only their shapes, strides and dtypes count.
    """
    place = _device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one that PyTorch finds, got {str(place)!r} with {torch.cuda.device_count()} GPUs: name "
            "the device that calls run on"
        )
    call.offsets(inputs.query.shape[2], inputs.key.shape[2])  # refuses heads that no pattern fits
    if name_of_engine(call, inputs.query, place) != "triton" or environment.triton_interprets():
        return []
    from dilated_attention_pytorch.kernels.triton.engine import Triton

    with torch.cuda.device(place):
        return Triton().compile(call, inputs, backward=backward)


@functools.cache
def load_engine(name: str) -> Engine:
    if name == "triton":  # an optional package
        from dilated_attention_pytorch.kernels.triton.engine import Triton

        return Triton()
    engines: dict[str, type[Engine]] = {"vendor": Vendor, "eager": Eager, "reference": Reference}
    return engines[name]()


def choose_engine(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
) -> str:
    """The engine that `backend` names. `auto` is Triton on a GPU if it supports the call, otherwise eager.

    `auto` never chooses `vendor`: our own kernels are as fast, and round less often.
    """
    kind = (device, dtype, head_dim, block_size)
    engine, told = backend, "the call names it"
    if backend == "auto":
        reason = why_not("triton", *kind) if device.type == "cuda" else "which on a CPU runs only calls that name it"
        engine, told = ("triton", "auto takes it on a GPU") if reason is None else ("eager", f"no triton, {reason}")
    elif (reason := why_not(backend, *kind)) is not None:
        able = [name for name in ENGINES if why_not(name, *kind) is None]
        raise ValueError(f"backend {backend!r} cannot take this call: {reason}; {' or '.join(able)} can")
    if debugging():
        _log_choice(engine, told, *kind)
    return engine


@functools.lru_cache(maxsize=1024)  # once per kind of call
def _log_choice(
    engine: str, told: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> None:
    tiles = "" if block_size is None else f", tiles of {block_size}"
    log.debug("engine %s for %s on %s, head_dim %d%s: %s", engine, dtype, device, head_dim, tiles, told)


def why_not(
    engine: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
) -> str | None:
    """Why an engine cannot take tensors of this kind, or None."""
    if engine == "vendor":
        if block_size is not None:
            return "PyTorch's flash kernel cannot skip tiles"
        return vendor.why_not(device, dtype, head_dim)
    if engine != "triton":
        return None
    if dtype == torch.float64:
        return "its kernels compute in float32, the tensors are float64"
    if head_dim % 8 or not 16 <= head_dim <= 256:
        return f"its kernels take a head_dim from 16 to 256 that is a multiple of 8, got {head_dim}"
    if block_size is not None and block_size < 16:
        return f"its kernels take tiles of 16 rows or more, got block_size={block_size}"
    return _triton_missing(device)


@functools.lru_cache
def _triton_missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if environment.triton_interprets():
        return None
    if device.type != "cuda":
        return f"Triton runs on GPUs, the tensors are on {device.type}"
    if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"its kernels need compute capability 8.0, this GPU has {torch.cuda.get_device_capability(device)}"
    return None


def backends(device: torch.device | str | None = None) -> dict[str, str]:
    """What can run here: each backend with `available`, or the reason why it is not.

    >>> backends("cpu")["eager"]
    'available'
    """
    place = _device(device)
    reasons = {name: why_not(name, place, torch.bfloat16, 64) for name in ENGINES}
    return {name: "available" if reason is None else reason for name, reason in reasons.items()}


def _device(stated: torch.device | str | None) -> torch.device:
    """The stated device, or a GPU if there is one."""
    return check_device("device", ("cuda" if torch.cuda.is_available() else "cpu") if stated is None else stated)
