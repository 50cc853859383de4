"""Entries of the table of plans, whose values stay on the device where they were made; and keys for tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

Device = torch.device | str | None
Value = TypeVar("Value")


class Entry:
    """A value, the device that `get` returns it on by default, and what orders its readers on a GPU."""

    __slots__ = (
        "bytes", "copies", "event", "hits", "home", "next", "on_gpu", "pinned", "size", "stream", "used", "value",
    )  # fmt: skip

    def __init__(self, value: Any, home: torch.device | None = None) -> None:
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        self.value = value
        self.home = home or (tensors[0].device if tensors else torch.device("cpu"))
        self.hits, self.used, self.pinned = 0, next(CLOCK), False
        self.copies: dict[torch.device, Entry] = {}  # the hot copies, in a cache with two tiers
        self.next: Hashable = None  # the key that was asked for after this one
        self.bytes = sum(x.nbytes for x in tensors)
        self.size = 0  # bytes of the key and all of the value, set where a table stores it
        self.on_gpu = [x for x in tensors if x.is_cuda]
        if self.on_gpu:
            self.stream = torch.cuda.current_stream(self.on_gpu[0].device)
            self.event: Any = None if torch.cuda.is_current_stream_capturing() else self.stream.record_event()

    @classmethod
    def copied(cls, pattern: Any) -> Entry:
        """An entry with a copy of the pattern on the CPU."""
        pinned = torch.cuda.is_available()  # only copies from pinned memory run while the host goes on

        def keep(x: Tensor) -> Tensor:
            if x.is_meta:
                raise ValueError("a pattern must have values to keep, got a tensor on the device meta")
            if x.layout != torch.strided:
                raise ValueError(f"a pattern must be dense, got a tensor of layout {x.layout}: pass its to_dense()")
            kept = x.detach().to("cpu", copy=True)
            return kept.pin_memory() if pinned else kept

        home = next((x.device for x in tree_leaves(pattern) if isinstance(x, Tensor)), None)
        return cls(tree_map_only(Tensor, keep, pattern), home)

    def copy_for(self, device: Device) -> Any:
        return copy_to(self.shared(), self.home if device is None else device)

    def shared(self) -> Any:
        """The value itself, ready for the current stream to read."""
        if self.on_gpu and torch.cuda.is_current_stream_capturing():
            # A capture begins on an idle device, and must not wait for what happened before it.
            _captured[id(self)] = self
        elif self.on_gpu and (stream := torch.cuda.current_stream(self.on_gpu[0].device)) != self.stream:
            stream.wait_event(self.event)
            for x in self.on_gpu:
                x.record_stream(stream)
        return self.value


CLOCK = itertools.count()  # orders uses of entries
_captured: dict[int, Any] = {}  # what captured CUDA graphs read


def copy_to(value: Any, device: Device) -> Any:
    """The value with copies of its tensors on `device`; the host waits only for copies to the CPU."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True, non_blocking=not x.is_cuda), value)


def size_of(*values: Any) -> int:
    """Bytes of values and of what they refer to, each object counted once: tensors' memory and Python objects.

    An object that grows while it is used, or has many parts, states its `estimated_bytes`. What objects of other
    packages refer to is not counted.

    >>> size_of(torch.zeros(1000)) - size_of(torch.zeros(0))
    4000
    """
    total, seen, left = 0, set(), list(values)
    while left:
        value = left.pop()
        if value is None or isinstance(value, type) or id(value) in seen:
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, Tensor):
            total += value.nbytes if value.layout is torch.strided else value._nnz() * value.element_size()
        elif hasattr(value, "estimated_bytes"):
            total += value.estimated_bytes
        elif isinstance(value, dict):
            left += value.keys()
            left += value.values()
        elif isinstance(value, (tuple, list, set, frozenset)):
            left += value
        elif type(value).__module__.startswith("dilated_attention_pytorch."):
            left += getattr(value, "__dict__", {}).values()
            left += [
                getattr(value, name, None) for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())
            ]
    return total


def lasting(device: torch.device, make: Callable[[], Value]) -> Value:
    """`make()`, for constants that outlive a CUDA graph.

    What a thread allocates while it records a graph belongs to that graph, so another thread makes these.
    """
    if device.type != "cuda":
        return make()

    def make_and_wait() -> Value:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            made = make()
            torch.cuda.current_stream(device).synchronize()
        return made

    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(make_and_wait).result()


_tables: dict[tuple[torch.device, tuple[Any, ...]], Tensor] = {}


def lasting_table(device: torch.device, rows: tuple[Any, ...]) -> Tensor:
    """An int32 tensor that is never freed. Plans are, but a captured CUDA graph reads their tables at every replay."""
    if (device, rows) not in _tables:
        made = lasting(device, lambda: torch.tensor(rows, dtype=torch.int32, device=device))
        _tables.setdefault((device, rows), made)  # another thread may have been first
    return _tables[device, rows]


def keep_while_read(x: Tensor) -> None:
    """Keep what a kernel on the current stream reads: until the kernel is done, or for good in a captured graph."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[id(x)] = x
    elif x.is_cuda:
        x.record_stream(torch.cuda.current_stream(x.device))


class SameTensor:
    """A key that equals only the same, unchanged tensor: for tensors on a GPU, whose values the host must wait for.

    It does not keep the tensor alive. It misses changes that PyTorch does not count (through `.data`, a collective or a
    custom kernel), so use it for tensors that are made once and passed on, such as spans.
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
    """The key of tables made of spans: on a CPU their content, elsewhere the tensor itself; `()` for no spans.

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
