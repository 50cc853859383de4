"""Workspaces that calls borrow and give back: large buffers, reused instead of allocated again.

A buffer belongs to one borrower from `checkout` to `give_back`, and no result of a call may share its memory. Within a
call, borrow with `lease`: its buffers go back when the block ends, even in an error.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import (
    COUNT,
    SIZE,
    check_device,
    check_flag,
    check_instance,
    check_tensor,
    check_whole,
    checked,
)
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.profile import LOCK, Profile

Result = TypeVar("Result")

LEAST_THRESHOLD = 1 << 20
# The threshold as a share of a device's memory. The host's allocator returns large buffers to the system, which clears
# their pages again. A GPU's allocator keeps them, so a pool pays only for buffers that it would have to search for:
# 160 MiB of 80 GiB. The allocator of pinned memory keeps them too, rounded up to powers of two: 64 MiB of 128 GiB.
_THRESHOLD_SHARES = {"cpu": 1 << 14, "cuda": 1 << 9, "pinned": 1 << 11}
_MOST_BYTES = 2**62
_STEPS = 16  # bucket sizes between powers of two: at most a sixteenth of a buffer is unused
_MOST_TOO_LARGE = 8  # times the size asked for: a small workspace must not take a block that a large one needs
_STALE_AFTER = 64  # checkouts


class WorkspacePool:
    """Buffers by device and bucketed size.

    Args:
        limit_bytes: what the pool may hold, idle and borrowed buffers together; None for no limit.
        threshold_bytes: smaller workspaces are left to PyTorch's allocator. None adapts it to the device's memory: a
            share of it, and at least 1 MiB.
        lightweight: keep every buffer until it is released, and leave a returned handle as it is. Otherwise a handle
            is emptied when it is given back, so that a later use fails instead of writing into another borrower's
            buffer, and buffers that stay idle for 64 checkouts are freed.

    On CUDA, buffers come from the pool's own `torch.cuda.MemPool`, and the stream of the next borrower waits for the
    stream that used the buffer last.

    >>> pool = WorkspacePool(threshold_bytes=1 << 20)
    >>> for _ in range(3):
    ...     with pool.lease() as take:
    ...         total = take((512, 1024), dtype=torch.float32, device="cpu").zero_()
    >>> stats = pool.get_stats()
    >>> stats["allocation_count"], round(stats["reuse_rate"], 2), stats["live_buffers"]
    (1, 0.67, 0)
    """

    @checked(limit_bytes=COUNT, threshold_bytes=COUNT)
    def __init__(
        self, *, limit_bytes: int | None = None, threshold_bytes: int | None = None, lightweight: bool = False
    ) -> None:
        least = LEAST_THRESHOLD if threshold_bytes is None else threshold_bytes
        if limit_bytes is not None and limit_bytes < least:
            raise ValueError(
                f"limit_bytes must be at least the smallest buffer, {least} bytes, got {limit_bytes}: raise it, or "
                "leave the pool off"
            )
        self.limit_bytes = limit_bytes
        self.threshold_bytes = threshold_bytes
        self.lightweight = lightweight
        self._profile = Profile()
        self._shelves: dict[tuple[torch.device, bool], _Shelf] = {}
        self._counts: Counter[str] = Counter()

    def __reduce__(self) -> Any:
        # A copy of a module shares the global pools; a pool of its own is made again, empty.
        if _global.get(self.lightweight) is self:
            return get_global_memory_pool, (self.lightweight,)
        settings = {name: getattr(self, name) for name in ("limit_bytes", "threshold_bytes", "lightweight")}
        return functools.partial(WorkspacePool, **settings), ()

    def threshold(self, device: torch.device | str, *, pinned: bool = False) -> int:
        """Bytes from which a workspace on this device, or in pinned memory of the host, is pooled."""
        if self.threshold_bytes is not None:
            return self.threshold_bytes
        place = device if isinstance(device, torch.device) else check_device("device", device)
        return self._shelf(place, check_flag("pinned", pinned)).threshold

    def lease(self, *, keep_after_error: bool = True, profile: Profile | None = None) -> Loans:
        """`take(shape, dtype=, device=)` within the block: an uninitialised buffer, from the pool or from PyTorch.

        PyTorch allocates workspaces below the threshold or beyond the limit, and all of them while a CUDA graph is
        captured, which must own its memory. `take.give_back(buffer)` ends a loan before the block does. Without
        `keep_after_error`, a block that fails leaves its buffers to what still uses them, such as a message under way,
        and the pool forgets them. `profile` notes the loans of a module.
        """
        return _Lease(self, keep_after_error, profile)

    @checked(shape=SIZE, dtype=None)  # of any dtype
    def checkout(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, *, pinned: bool = False
    ) -> Tensor:
        """A buffer of any size, uninitialised, that is the caller's until `give_back`."""
        check_instance("dtype", dtype, torch.dtype)
        size = _bucket(check_whole("the size of a buffer in bytes", _size(shape, dtype), most=_MOST_BYTES))
        if self.limit_bytes is not None and size > self.limit_bytes:
            raise ValueError(f"a buffer of {size} bytes is beyond the pool's limit of {self.limit_bytes}: raise it")
        buffer = self._checkout(shape, dtype, torch.device(device), pinned, None)
        if buffer is None:
            raise RuntimeError(
                f"the pool's limit of {self.limit_bytes} bytes leaves no room for {size} beside the buffers that are "
                "borrowed: give some back, or raise limit_bytes"
            )
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """End a loan. A tensor that is not on loan from this pool is refused."""
        with LOCK:
            block = self._end_loan(buffer)
            shelf = block.shelf
            if not self.lightweight:
                buffer.set_()  # type: ignore[call-overload]
            shelf.note_use(block)
            shelf.idle.append(block)
            stale = [] if self.lightweight else shelf.take_stale()
        if stale:
            log.debug("freed %d buffers on %s that lay idle", len(stale), shelf.device)
            shelf.free(stale)

    def abandon(self, buffer: Tensor) -> None:
        """End a loan without taking the memory back: it is freed with the last tensor that uses it."""
        with LOCK:
            block = self._end_loan(buffer)
        block.shelf.free([block])

    def _end_loan(self, buffer: Tensor) -> _Block:
        shelf, block = getattr(check_tensor("buffer", buffer), "_loan", (None, None))
        if shelf is None or shelf not in self._shelves.values():
            raise ValueError(
                f"a tensor of shape {tuple(buffer.shape)} was not borrowed from this pool: give back the tensor that "
                "checkout returned, not a view or a copy"
            )
        if block is None:
            raise ValueError("this buffer was given back already: a buffer has one owner, who returns it once")
        buffer._loan = (shelf, None)  # type: ignore[attr-defined]
        self._counts.subtract({"live_bytes": block.nbytes, "live_buffers": 1})
        return block

    @checked()
    def release_idle(self, device: torch.device | str | None = None) -> int:
        """Free the idle buffers of all devices, or of one; returns their number of bytes."""
        wanted = None if device is None else _numbered(torch.device(device))
        released = 0
        for shelf in list(self._shelves.values()):
            if wanted is None or shelf.device == wanted:
                with LOCK:
                    blocks, shelf.idle = shelf.idle, []
                    self._counts["cleanups"] += bool(blocks)
                released += sum(block.nbytes for block in blocks)
                shelf.free(blocks)
        return released

    def retrying(self, run: Callable[[], Result]) -> Result:
        """`run()`; if memory runs out, once more after freeing the pool's idle buffers."""
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not any(shelf.idle for shelf in list(self._shelves.values())):
                raise
        # Outside the handler: the error is gone, and with it the tensors that its traceback kept alive.
        log.debug("memory ran out: released %d idle bytes of the pool, trying once more", self.release_idle())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return run()

    def get_stats(self) -> dict[str, Any]:
        """`total_allocated, peak_allocated` (bytes held now and at most), `allocation_count, reuse_rate` and more.

        With loans of a module that has `enable_profiling`, also `profile`: their number, bytes and seconds.
        """
        with LOCK:
            stats: dict[str, Any] = {"total_allocated": self._held(), **{name: self._counts[name] for name in _COUNTS}}
        asked = stats["allocation_count"] + stats["reuse_count"]
        stats |= {"reuse_rate": stats["reuse_count"] / asked if asked else 0.0, "limit_bytes": self.limit_bytes}
        profile = self._profile.totals()
        return stats | {"profile": profile} if profile else stats

    def reset(self) -> None:
        """Free what is idle and restart the statistics; borrowed buffers stay with their owners."""
        self.release_idle()
        with LOCK:
            for name in ("allocation_count", "reuse_count", "cleanups"):
                self._counts[name] = 0
            self._counts["peak_allocated"] = self._held()
        self._profile.clear()

    def _held(self) -> int:
        """Bytes of all buffers, borrowed and idle."""
        return self._counts["live_bytes"] + sum(x.nbytes for shelf in self._shelves.values() for x in shelf.idle)

    def _shelf(self, device: torch.device, pinned: bool) -> _Shelf:
        device = _numbered(device)
        found = self._shelves.get((device, pinned))
        if found is None:
            with LOCK:
                found = self._shelves.setdefault((device, pinned), _Shelf(device, pinned))
        return found

    def _checkout(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pinned: bool, profile: Profile | None
    ) -> Tensor | None:
        """A buffer, or None where the limit leaves no room."""
        began = time.perf_counter()
        if pinned and (device.type != "cpu" or not torch.cuda.is_available()):
            raise ValueError(f"pinned is for host memory that a CUDA GPU copies from or to, got device {device}")
        shelf, size = self._shelf(device, pinned), _bucket(_size(shape, dtype))
        with LOCK:
            block = shelf.take(size)
            new = block is None
            if block is None:
                if not self._make_room(shelf, size):
                    return None
                block = self.retrying(lambda: shelf.allocate(size))
            count = "allocation_count" if new else "reuse_count"
            self._counts.update({"live_bytes": block.nbytes, "live_buffers": 1, count: 1})
            self._counts["peak_allocated"] = max(self._counts["peak_allocated"], self._held())
        waits_from = time.perf_counter()
        shelf.wait_until_free(block)
        waited = time.perf_counter() - waits_from
        with torch.inference_mode(False):
            # Not a view, which would keep the memory of a returned block alive as long as the handle.
            buffer = torch.empty(0, dtype=dtype, device=shelf.device)
            buffer.set_(block.memory.untyped_storage(), 0, tuple(shape))  # type: ignore[call-overload]
        buffer._loan = (shelf, block)  # type: ignore[attr-defined]
        if profile is not None:
            times = {"seconds": time.perf_counter() - began, "seconds_waiting": waited}
            for one in (self._profile, profile):
                one.add("loans", new=int(new), reused=int(not new), bytes=block.nbytes, **times)
        if debugging():
            log.debug("lent %d bytes on %s, %s", block.nbytes, shelf.device, "new" if new else "reused")
        return buffer

    def _make_room(self, shelf: _Shelf, size: int) -> bool:
        """Whether `size` more bytes fit within the limit, after freeing idle blocks, first from this shelf."""
        if self.limit_bytes is None:
            return True
        for other in (shelf, *self._shelves.values()):
            while other.idle and self._held() + size > self.limit_bytes:
                oldest = min(other.idle, key=lambda block: block.used_at)
                other.idle.remove(oldest)
                other.free([oldest])
        return self._held() + size <= self.limit_bytes


_COUNTS = ("peak_allocated", "allocation_count", "reuse_count", "live_buffers", "live_bytes", "cleanups")


class Loans:
    """Workspaces for the duration of a block, with the arguments of `torch.empty`; here from PyTorch's allocator."""

    __slots__ = ()

    def __enter__(self) -> Loans:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        pass

    def __call__(
        self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str, pin_memory: bool = False
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)

    def give_back(self, *buffers: Tensor) -> None:
        """End loans before the block does."""


Take = Loans  # for those who only take


class _Lease(Loans):
    """What one block borrows from a pool."""

    __slots__ = ("_keep_after_error", "_pool", "_profile", "_taken")

    def __init__(self, pool: WorkspacePool, keep_after_error: bool, profile: Profile | None) -> None:
        self._pool, self._keep_after_error, self._profile = pool, keep_after_error, profile
        self._taken: dict[int, Tensor] = {}

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        end = self._pool.give_back if error is None or self._keep_after_error else self._pool.abandon
        for buffer in self._taken.values():
            end(buffer)

    def __call__(
        self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str, pin_memory: bool = False
    ) -> Tensor:
        device = torch.device(device)
        large = _size(shape, dtype) >= self._pool.threshold(device, pinned=pin_memory)
        on_stream = pin_memory or device.type == "cuda"
        if large and not (on_stream and torch.cuda.is_current_stream_capturing()):
            buffer = self._pool._checkout(shape, dtype, device, pin_memory, self._profile)
            if buffer is not None:
                self._taken[id(buffer)] = buffer
                return buffer
        if self._profile is not None:
            self._profile.add("workspaces left to PyTorch", count=1, bytes=_size(shape, dtype))
        return super().__call__(shape, dtype=dtype, device=device, pin_memory=pin_memory)

    def give_back(self, *buffers: Tensor) -> None:
        for buffer in buffers:
            if self._taken.pop(id(buffer), None) is not None:
                self._pool.give_back(buffer)


@dataclass(slots=True, eq=False)
class _Block:
    """Bytes, when they were taken last, and on a GPU by which stream and until when."""

    memory: Tensor
    shelf: _Shelf
    used_at: int
    nbytes: int
    stream: Any = None
    until: Any = None


class _Shelf:
    """The idle blocks of one device, in the order of their return; allocates, orders and frees its memory."""

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self.device = device
        self.pinned = pinned
        self.clock = 0  # checkouts
        self.idle: list[_Block] = []
        share = _THRESHOLD_SHARES.get("pinned" if pinned else device.type, _THRESHOLD_SHARES["cpu"])
        self.threshold = max(LEAST_THRESHOLD, _memory_of(device) // share)
        self._blocks = 0  # allocated and not freed
        self._cuda_pool: Any = None

    def take(self, size: int) -> _Block | None:
        """The smallest idle block that fits: a larger one costs nothing, and parts of a call differ in size."""
        self.clock += 1
        # Of equal blocks, the one used last; of pinned ones, which copies may still read, the one used first.
        order = self.idle if self.pinned else reversed(self.idle)
        fitting = (block for block in order if size <= block.nbytes <= _MOST_TOO_LARGE * size)
        block = min(fitting, key=lambda block: block.nbytes, default=None)
        if block is None or (self.pinned and block.until is not None and not block.until.query()):
            return None  # before it writes to pinned memory, the host would have to wait for copies from it
        self.idle.remove(block)
        block.used_at = self.clock
        return block

    def take_stale(self) -> list[_Block]:
        """The blocks that have lain idle for long, taken off the shelf."""
        stale = [block for block in self.idle if self.clock - block.used_at > _STALE_AFTER]
        self.idle = [block for block in self.idle if block not in stale] if stale else self.idle
        return stale

    def allocate(self, size: int) -> _Block:
        own_memory: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cuda":
            # A pool of our own within the allocator, so that buffers that stay do not split blocks of others.
            if self._cuda_pool is None:
                self._cuda_pool = torch.cuda.MemPool()
            own_memory = torch.cuda.use_mem_pool(self._cuda_pool, self.device)
        with own_memory, torch.inference_mode(False):  # training cannot write to tensors of inference
            memory = torch.empty(size, dtype=torch.uint8, device=self.device, pin_memory=self.pinned)
        self._blocks += 1
        return _Block(memory, self, self.clock, size)

    def note_use(self, block: _Block) -> None:
        """Note up to where the stream of the borrower uses the block."""
        if self.device.type == "cuda":
            block.stream = torch.cuda.current_stream(self.device)
            block.until = block.stream.record_event(block.until)
        elif self.pinned:
            # Copies may still read it: the next borrower, which is the host, waits for them.
            block.until = torch.cuda.current_stream().record_event(block.until)

    def wait_until_free(self, block: _Block) -> None:
        if block.until is None:
            return
        if self.pinned:
            block.until.synchronize()
        elif torch.cuda.current_stream(self.device) != block.stream:
            torch.cuda.current_stream(self.device).wait_event(block.until)

    def free(self, blocks: list[_Block]) -> None:
        count = len(blocks)
        for block in blocks:
            if block.stream is not None:
                block.memory.record_stream(block.stream)
        blocks.clear()
        with LOCK:
            self._blocks -= count
            if not self._blocks:
                self._cuda_pool = None  # while it exists, PyTorch uses its memory for nothing else


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "DefaultCPUAllocator: can't allocate memory" in str(error)


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _bucket(size: int) -> int:
    """The size rounded up to one of 16 between powers of two, in multiples of 512.

    >>> _bucket(1), _bucket(1 << 20), _bucket((1 << 20) + 1)
    (512, 1048576, 1114112)
    """
    step = max(512, (1 << max(size - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-size // step) * step or step


def _numbered(device: torch.device) -> torch.device:
    """The device with its number, if it is a GPU: `cuda` alone is the current one."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return 0


_global: dict[bool, WorkspacePool] = {}


@checked()
def get_global_memory_pool(lightweight: bool = False) -> WorkspacePool:
    """The pool that modules with `enable_memory_pool=True` share; there is one more for `lightweight_pool=True`."""
    with LOCK:
        if lightweight not in _global:
            _global[lightweight] = WorkspacePool(lightweight=lightweight)
        return _global[lightweight]


def reset_global_memory_pool() -> None:
    """Free what the global pools hold idle, and restart their statistics; modules go on using them."""
    for pool in list(_global.values()):
        pool.reset()
