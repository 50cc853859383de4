"""What a cache keeps: values that readers share or copy, ordered on GPUs, and the keys that tensors give."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

Device = torch.device | str | None


class Entry:
    """A value, the device that `get` gives it on by default, and what orders its readers on a GPU."""

    __slots__ = ("accesses", "bytes", "home", "next", "size", "value", "written")

    def __init__(self, value: Any, home: torch.device | None = None) -> None:
        self.value = value
        self.home = home
        self.accesses = 0
        self.next: Hashable = None  # the key that was asked for after this one
        tensors = _tensors(value)
        self.bytes = sum(x.numel() * x.element_size() for x in tensors)
        self.size = 0  # of the key and all of the value, where a cache holds it
        on_gpu = [x for x in tensors if x.is_cuda]
        self.written = _Written(on_gpu) if on_gpu else None

    @classmethod
    def copied(cls, pattern: Any) -> Entry:
        tensors = _tensors(pattern)
        pinned = torch.cuda.is_available()  # a copy to a GPU runs beside the host only from pinned memory

        def keep(x: Tensor) -> Tensor:
            if x.is_meta:
                raise ValueError("a pattern must have values to keep, got a tensor on the device meta")
            kept = x.detach().to("cpu", copy=True)
            return kept.pin_memory() if pinned else kept

        return cls(tree_map_only(Tensor, keep, pattern), tensors[0].device if tensors else None)

    def copy_for(self, device: Device) -> Any:
        device = self.home if device is None else device
        return copy_to(self.shared(), device)

    def shared(self) -> Any:
        """The value itself, for the current stream to read."""
        if self.written is not None:
            self.written.before_reading()
        return self.value


class _Written:
    """Tensors on a GPU and the point in their maker's stream after which they may be read."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._stream = torch.cuda.current_stream(tensors[0].device)
        self._event = self._stream.record_event()

    def before_reading(self) -> None:
        """Order the current stream behind the maker's, and keep the memory until the current stream is through."""
        stream = torch.cuda.current_stream(self._tensors[0].device)
        # A capture begins on an idle device, and must not wait for what happened before it.
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._event)
            for x in self._tensors:
                x.record_stream(stream)


def copy_to(value: Any, device: Device) -> Any:
    """The value with copies of its tensors on `device`; the host waits only for what it gets itself."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True, non_blocking=not x.is_cuda), value)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def size_of(*values: Any) -> int:
    """Bytes of values and of what they refer to, each object once: the tensors' memory and Python's own objects.

    An object that grows while it is used, or has many parts, states its `estimated_bytes` itself.

    >>> size_of(torch.zeros(1000)) - size_of(torch.zeros(0))
    4000
    """
    total, seen, left = 0, set(), list(values)
    while left:
        value = left.pop()
        if value is None or id(value) in seen or isinstance(value, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif hasattr(value, "estimated_bytes"):
            total += value.estimated_bytes
        elif isinstance(value, (int, float, str, bytes, range, slice)):
            continue
        elif isinstance(value, dict):
            left += value.keys()
            left += value.values()
        elif isinstance(value, (tuple, list, set, frozenset)):
            left += value
        else:
            left += getattr(value, "__dict__", {}).values()
            left += [getattr(value, name, None) for name in _slots(type(value))]  # type: ignore[arg-type]
    return total


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    declared = [getattr(one, "__slots__", ()) for one in kind.__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name != "__weakref__")


class SameTensor:
    """A key that equals only the same tensor, unchanged since: for values on a GPU, which reading would wait for.

    It does not keep the tensor alive. A change that PyTorch does not count (through `.data`, a collective, a kernel of
    one's own) goes unseen, so it is for tensors that are made once and passed on, such as spans.
    """

    __slots__ = ("_hash", "_tensor", "_version")

    def __init__(self, x: Tensor) -> None:
        self._tensor, self._version = TensorWeakRef(x), x._version
        self._hash = hash((id(x), self._version))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, SameTensor) or self._hash != other._hash or self._version != other._version:
            return False
        mine = self._tensor()
        return mine is not None and mine is other._tensor()


def spans_key(spans: Tensor | None) -> Hashable:
    """What tables made of spans are found by: on a CPU their content, elsewhere the tensor itself; `()` for no spans.

    None means that nothing may be remembered: for tensors whose changes PyTorch does not count, and while a CUDA graph
    is captured, which must make its own tables whenever it is replayed.
    """
    if spans is None:
        return ()
    if spans.device.type == "cpu":
        return tuple(spans.flatten().tolist())
    if spans.is_inference() or (spans.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return SameTensor(spans)
