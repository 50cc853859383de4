"""Memory of the live process: what is held, by what, over time; and giving back what nobody needs."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import POSITIVE, checked
from dilated_attention_pytorch.core.memory_pool import get_global_memory_pool
from dilated_attention_pytorch.core.pattern_cache import global_caches
from dilated_attention_pytorch.measuring import host_memory, peak_resident, resident
from dilated_attention_pytorch.tools.report import size

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU: what PyTorch's allocator lends and holds, now and at most, and what the driver still has."""

    device: int
    allocated: int
    reserved: int
    most_allocated: int
    free: int
    total: int

    @property
    def of_others(self) -> int:
        """What neither PyTorch's allocator here nor anybody's free memory is: other processes, contexts, libraries."""
        return max(0, self.total - self.free - self.reserved)


@dataclass(frozen=True)
class MemoryReading:
    """Memory at one moment. `seconds` count from the beginning of the series that it belongs to."""

    seconds: float
    host: int
    most_host: int
    host_available: int
    gpus: tuple[GpuMemory, ...] = ()

    def __str__(self) -> str:
        words = [
            f"GPU {gpu.device}: allocated {size(gpu.allocated)}, reserved {size(gpu.reserved)}, "
            f"most {size(gpu.most_allocated)}, free {size(gpu.free)}"
            for gpu in self.gpus
        ]
        words.append(f"host: {size(self.host)}, most {size(self.most_host)}, free {size(self.host_available)}")
        return "; ".join(words)


def read_memory(began: float | None = None) -> MemoryReading:
    """Memory now, on the host and on the GPUs that this process uses.

    >>> reading = read_memory()
    >>> reading.most_host >= reading.host > 0
    True
    """
    seconds = 0.0 if began is None else time.perf_counter() - began
    held = resident()
    return MemoryReading(
        round(seconds, 4), held, max(held, peak_resident()), host_memory().available, tuple(map(_read_gpu, _gpus()))
    )


def _gpus() -> list[int]:
    """The GPUs on which this process has memory: to ask another would start a context there."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    mine = {torch.cuda.current_device()}
    return [index for index in range(torch.cuda.device_count()) if index in mine or torch.cuda.memory_reserved(index)]


def _read_gpu(index: int) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(index)
    return GpuMemory(
        index,
        torch.cuda.memory_allocated(index),
        torch.cuda.memory_reserved(index),
        torch.cuda.max_memory_allocated(index),
        free,
        total,
    )


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that Python holds; views of one memory are one. `role` is `parameter`, `gradient`, ... or `tensor`."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    role: str

    def __str__(self) -> str:
        dims = " x ".join(map(str, self.shape)) or "scalar"
        return f"{size(self.bytes):>10}  {self.role:<15} {dims} {self.dtype} on {self.device}"


ROLES = ("parameter", "gradient", "optimizer state", "activation", "tensor")


def live_tensors() -> list[LiveTensor]:
    """Every tensor that Python can reach, largest first, with what it is for.

    Roles are read from the live modules and optimizers. What only autograd's graph holds is not among them.
    """
    roles: dict[int, str] = {}
    found: dict[tuple[str, int], tuple[int, Tensor]] = {}
    tensors: list[Tensor] = []
    for one in live_objects(Tensor, torch.optim.Optimizer):
        if isinstance(one, Tensor):
            tensors.append(one)
        else:
            states = [value for state in one.state.values() for value in state.values()]
            held = [part for value in states if isinstance(value, Tensor) for part in _parts(value)]
            roles |= {id(part): "optimizer state" for part in held}
    for x in tensors:
        if isinstance(x, nn.Parameter):
            roles.setdefault(id(x), "parameter")
        if x.is_leaf and x.requires_grad and x.grad is not None:
            roles[id(x.grad)] = "gradient"
            tensors.append(x.grad)
    for x in tensors:
        storage = own_memory(x)
        if storage is None:
            continue
        key = str(x.device), storage.data_ptr()
        # Of views, one with a role, else the largest, tells what the memory is for.
        if key not in found or _rank(x, roles) > _rank(found[key][1], roles):
            found[key] = storage.nbytes(), x
    listed = [
        LiveTensor(count, tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device), _role(x, roles))
        for count, x in found.values()
    ]
    return sorted(listed, key=lambda one: -one.bytes)


def _parts(x: Tensor) -> list[Tensor]:
    """The tensor, and those that it is made of: torchao's 8-bit state is codes, scales and a table."""
    inner = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else []
    return [x, *(part for name in inner for part in _parts(getattr(x, name)))]


def local_part(x: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank; to touch the whole would make ranks wait for each other."""
    with torch.no_grad():
        return x.to_local() if hasattr(x, "to_local") else x.detach()


def own_memory(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor on this rank, or None: meta and sparse tensors, and the fake ones of torch.compile."""
    try:
        storage = local_part(x).untyped_storage()
        has_memory = storage.device.type != "meta" and storage.nbytes() > 0 and storage.data_ptr() != 0
        return storage if has_memory else None
    except (NotImplementedError, RuntimeError):
        return None


def _role(x: Tensor, roles: dict[int, str]) -> str:
    return roles.get(id(x), "activation" if x.grad_fn is not None else "tensor")


def _rank(x: Tensor, roles: dict[int, str]) -> tuple[bool, int]:
    return _role(x, roles) != "tensor", x.numel()


def live_objects(*kinds: type) -> Iterator[Any]:
    """What of these kinds is alive in this process."""
    known: dict[type, bool] = {}  # asked once a type, and of the type: to ask a lazy object or a proxy would run it
    for one in gc.get_objects():
        kind = type(one)
        if kind not in known:
            known[kind] = issubclass(kind, kinds)
        if known[kind]:
            yield one


def memory_facts(reading: MemoryReading) -> dict[str, dict[str, Any]]:
    """A reading in words, with what the allocators count beside it."""
    facts: dict[str, dict[str, Any]] = {
        "host memory": {
            "this process, bytes": reading.host,
            "at most so far, bytes": reading.most_host,
            "available, bytes": reading.host_available,
            "in all, bytes": host_memory().total,
        }
    }
    for gpu in reading.gpus:
        stats = torch.cuda.memory_stats(gpu.device)
        facts[f"GPU {gpu.device} memory"] = {
            "allocated bytes": gpu.allocated,
            "reserved bytes": gpu.reserved,
            "most allocated bytes": gpu.most_allocated,
            "free bytes": gpu.free,
            "other processes and contexts, bytes": gpu.of_others,
            "in all, bytes": gpu.total,
            "in pieces of split blocks, bytes": stats.get("inactive_split_bytes.all.current", 0),
            "times the allocator had to flush its cache": stats.get("num_alloc_retries", 0),
            "out-of-memory errors": stats.get("num_ooms", 0),
        }
    return facts


def idle_in_pools() -> int:
    """Bytes that the global pools hold and nobody has borrowed."""
    stats = [get_global_memory_pool(lightweight).get_stats() for lightweight in (False, True)]
    return sum(one["total_allocated"] - one["live_bytes"] for one in stats)


def cache_facts() -> dict[str, Any]:
    stats = [cache.get_stats() for cache in global_caches()]
    hits, misses = (sum(one[name] for one in stats) for name in ("hits", "misses"))
    return {
        "patterns in the cache": sum(one["size"] for one in stats),
        "hit rate of the cache": f"{hits / max(hits + misses, 1):.0%}",
    }


def less_fragmentation() -> str:
    if any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS):
        return "expandable_segments is on already: keep shapes the same from step to step"
    return "start the process with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def memory_cleanup() -> int:
    """Free what nobody needs, and return how many bytes the GPUs' driver and the operating system got back.

    Garbage first, because it may hold memory; then the idle workspaces of the global pools and the patterns of the
    global cache; last what PyTorch's and the C library's allocators keep for later. Nothing that is in use is touched,
    and what was cached is made again when it is asked for.

    >>> memory_cleanup() >= 0
    True
    """
    before = read_memory()
    gc.collect()
    for lightweight in (False, True):
        get_global_memory_pool(lightweight).release_idle()
    for cache in global_caches():
        cache.clear()
    if before.gpus:
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    _trim_heap()
    after = read_memory()
    freed = max(0, before.host - after.host)
    reserved = {gpu.device: gpu.reserved for gpu in after.gpus}
    return freed + sum(max(0, gpu.reserved - reserved.get(gpu.device, 0)) for gpu in before.gpus)


def _trim_heap() -> None:
    """Give freed host memory back to the system, where the C library is one that keeps it and can be asked."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


@checked(interval=POSITIVE)
def monitor_memory_realtime(
    interval: float = 0.5, *, out: str | Path | None = None, picture: str | Path | None = None, quiet: bool = False
) -> MemoryMonitor:
    """Print what memory is in use now; as a context manager, sample it every `interval` seconds until the block ends.

    Args:
        interval: seconds between samples.
        out: a file that gets each sample as a JSON line, at once.
        picture: a `.svg` or `.png` of the series, drawn at the end; PNG needs matplotlib.
        quiet: print nothing.

    >>> with monitor_memory_realtime(0.01, quiet=True) as monitor:
    ...     x = torch.ones(1 << 20)
    >>> len(monitor.readings) >= 2, monitor.peak.host > 0
    (True, True)
    """
    monitor = MemoryMonitor(interval, out=out, picture=picture)
    if not quiet:
        print(read_memory())
    return monitor


class MemoryMonitor:
    """Samples memory in a thread between `start` and `stop`, with one sample at either end; `readings` has them all."""

    @checked(interval=POSITIVE)
    def __init__(
        self, interval: float = 0.5, *, out: str | Path | None = None, picture: str | Path | None = None
    ) -> None:
        if picture is not None:
            from dilated_attention_pytorch.tools.pictures import check_picture

            check_picture(Path(picture))  # now, rather than after hours
        self.interval = interval
        self.readings: list[MemoryReading] = []
        self._out = None if out is None else Path(out)
        self._picture = None if picture is None else Path(picture)
        self._file: TextIO | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._began = 0.0

    def start(self) -> MemoryMonitor:
        if self._thread is not None:
            raise RuntimeError("this monitor is running: stop it first, or make another")
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._out.open("w")
        self.readings, self._failure = [], None
        self._ended.clear()
        self._began = time.perf_counter()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="memory monitor", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> list[MemoryReading]:
        """End the sampling, draw the picture, and return the samples. An error of the sampling is raised here."""
        if self._thread is None:
            raise RuntimeError("this monitor is not running: start it, or use it in a with statement")
        self._ended.set()
        self._thread.join()
        self._thread = None
        try:
            if self._failure is not None:
                raise self._failure
            self._sample()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
        if self._picture is not None:
            from dilated_attention_pytorch.tools.pictures import write_timeline

            write_timeline(self._picture, self.series(), "memory of this process")
        return self.readings

    def __enter__(self) -> MemoryMonitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Exception:
            if error is None:  # else what went wrong in the block matters more
                raise

    @property
    def peak(self) -> MemoryReading:
        """The sample with the most memory: of the GPUs where there are any, else of the host."""
        if not self.readings:
            raise RuntimeError("there is no sample yet: start the monitor first")
        return max(self.readings, key=lambda one: (sum(gpu.allocated for gpu in one.gpus), one.host))

    def series(self) -> dict[str, list[tuple[float, int]]]:
        """Curves of bytes over seconds."""
        curves: dict[str, list[tuple[float, int]]] = {}
        for one in self.readings:
            curves.setdefault("host", []).append((one.seconds, one.host))
            for gpu in one.gpus:
                curves.setdefault(f"GPU {gpu.device} allocated", []).append((one.seconds, gpu.allocated))
                curves.setdefault(f"GPU {gpu.device} reserved", []).append((one.seconds, gpu.reserved))
        return curves

    def _run(self) -> None:
        try:
            while not self._ended.wait(self.interval):
                self._sample()
        except Exception as error:
            self._failure = error

    def _sample(self) -> None:
        reading = read_memory(self._began)
        self.readings.append(reading)
        if self._file is not None:
            self._file.write(json.dumps(asdict(reading)) + "\n")
            self._file.flush()
