"""Activations in host memory between forward and backward.

A tensor that a layer keeps is copied to a buffer in (pinned) host memory, on a separate stream while the next layer
computes. When backward reaches a layer, it fetches the tensors of that layer and of the layer before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import check_whole
from dilated_attention_pytorch.core.pool import LEAST_THRESHOLD, WorkspacePool, get_global_memory_pool

# Groups whose copies may be under way: one is copied while the next computes.
_IN_FLIGHT = 2
LAYERS_ON_DEVICE = _IN_FLIGHT + 1


class Offload:
    """Keeps tensors on the host: `group()` makes the hooks of one layer, for `saved_tensors_hooks`.

    Tensors below `least_bytes` stay where they are. Buffers come from `pool` (default: the global one), and return to
    it when autograd releases a tensor.

    >>> offload = Offload(least_bytes=1)
    >>> x = torch.randn(4, requires_grad=True)
    >>> with torch.autograd.graph.saved_tensors_hooks(*offload.group().hooks):
    ...     y = x.square().sum()
    >>> y.backward()
    >>> torch.equal(x.grad, 2 * x)
    True
    """

    def __init__(self, least_bytes: int = LEAST_THRESHOLD, pool: WorkspacePool | None = None) -> None:
        self.least_bytes = check_whole("least_bytes", least_bytes, least=1)
        self.pool = get_global_memory_pool() if pool is None else pool
        self._recent: deque[weakref.ref[OffloadGroup]] = deque()
        self._streams: dict[torch.device, Any] = {}

    def __reduce__(self) -> Any:
        # Copies in flight belong to the graphs of the original.
        return Offload, (self.least_bytes, self.pool)

    def group(self) -> OffloadGroup:
        """The tensors of one layer; this call frees the device's copies of the layers before the last two."""
        before = self._recent[-1] if self._recent else None
        group = OffloadGroup(self, before)
        self._recent.append(weakref.ref(group))
        while len(self._recent) > LAYERS_ON_DEVICE:
            done = self._recent.popleft()()
            if done is not None:
                done.leave_device()
        return group

    def stream(self, device: torch.device) -> Any:
        """The stream of copies to and from a GPU."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class OffloadGroup:
    """Tensors that are needed together. Autograd holds the parcels, and they hold the group."""

    def __init__(self, offload: Offload, before: weakref.ref[OffloadGroup] | None) -> None:
        self._offload = offload
        self._before = before
        self._parcels: list[weakref.ref[_Parcel]] = []

    @property
    def hooks(self) -> tuple[Any, Any]:
        """For `torch.autograd.graph.saved_tensors_hooks`."""
        return self.pack, self.unpack

    def pack(self, tensor: Tensor) -> Tensor | _Parcel:
        """The tensor's copy on the host, or the tensor itself if it is small; it must not be written to afterwards."""
        if tensor.nbytes < self._offload.least_bytes or isinstance(tensor, torch.nn.Parameter):
            return tensor
        parcel = _Parcel(self, self._offload, tensor)
        self._parcels.append(weakref.ref(parcel))
        return parcel

    def unpack(self, packed: Tensor | _Parcel) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return packed.take()

    def fetch(self) -> None:
        """Start copying the tensors that nobody has taken yet back to the device."""
        for parcel in self._alive():
            if not parcel.taken:
                parcel.fetch()

    def leave_device(self) -> None:
        """Wait for the copies to the host, and free what they were made from."""
        for parcel in self._alive():
            parcel.leave_device()

    def _alive(self) -> list[_Parcel]:
        return [parcel for found in self._parcels if (parcel := found()) is not None]


class _Parcel:
    """One tensor: on the host, and on the device until it leaves and after it is fetched."""

    def __init__(self, group: OffloadGroup, offload: Offload, tensor: Tensor) -> None:
        self._group = group  # lives as long as its parcels
        self._pool = offload.pool
        self._device = tensor.device
        self._stream = offload.stream(tensor.device) if tensor.is_cuda else None
        self._order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        self._on_device: Tensor | None = tensor.detach()
        self._version = tensor._version
        self.taken = False
        self._fetched = False  # whether `_on_device` came from the host, not from forward
        dense = tensor.detach().permute(self._order)
        self._host = self._pool.checkout(dense.shape, dense.dtype, "cpu", pinned=tensor.is_cuda)
        self._arrived = self._copy(dense, self._host)

    def __del__(self) -> None:
        # On the stream of the copies: the pool makes the next borrower of the buffer wait for it.
        if hasattr(self, "_host"):
            with self._on_stream():
                self._pool.give_back(self._host)

    def leave_device(self) -> None:
        if self._on_device is not None and not self._fetched:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._check_unchanged()
            self._on_device = None

    def fetch(self) -> None:
        if self._on_device is None:
            dense = torch.empty_like(self._host, device=self._device)
            self._arrived = self._copy(self._host, dense)
            inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
            self._on_device, self._fetched = dense.permute(inverse), True

    def take(self) -> Tensor:
        """The tensor, for the current stream; a fetched copy belongs to the caller."""
        self.fetch()
        self.taken = True  # a second backward of the same graph fetches it once more
        tensor = self._on_device
        assert tensor is not None
        if not self._fetched:
            self._check_unchanged()
            return tensor
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        self._on_device, self._fetched = None, False
        return tensor

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Copy after what the current stream does; returns the event of its end, or None if it is done."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            target.copy_(source, non_blocking=True)
        for x in (source, target):
            if x.is_cuda:
                x.record_stream(self._stream)  # if it is dropped before the copy ends
        return self._stream.record_event()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _check_unchanged(self) -> None:
        assert self._on_device is not None
        if self._on_device._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._on_device.shape)} was written to after it had been kept for backward: "
                "offloading copies it meanwhile, so leave out the in-place operation, or the offloading"
            )
