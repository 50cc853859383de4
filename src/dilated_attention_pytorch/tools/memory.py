"""Memory of the live process: what holds it, how it changes over time, and freeing what is not in use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import POSITIVE, checked
from dilated_attention_pytorch.core.plans import global_caches
from dilated_attention_pytorch.core.pool import WorkspacePool, get_global_memory_pool
from dilated_attention_pytorch.measuring import host_memory, peak_resident, resident, size
from dilated_attention_pytorch.pages.plots import check_picture, write_timeline


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU: allocated to tensors, reserved by PyTorch's allocator, peak, free and total."""

    device: int
    allocated: int
    reserved: int
    most_allocated: int
    free: int
    total: int

    @property
    def of_others(self) -> int:
        """Bytes of other processes, contexts and libraries: neither free nor reserved by this process's allocator."""
        return max(0, self.total - self.free - self.reserved)


@dataclass(frozen=True)
class MemoryReading:
    """Memory at one moment, `seconds` after the start of the series that the reading belongs to."""

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
    """Memory now, on the host and on the GPUs that this process uses; `began` is the start of a series.

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
    """The GPUs on which this process has memory. Asking another one would start a context there."""
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
    """Memory that a live tensor holds; views share one entry. `role` is one of `ROLES`."""

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
    """Every tensor that Python can reach, largest first, with its role.

    Roles come from the live parameters and optimizers. A tensor that only autograd's graph holds is not listed.
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
        # Views with a role decide the role of their memory, else the largest view does.
        if key not in found or _rank(x, roles) > _rank(found[key][1], roles):
            found[key] = storage.nbytes(), x
    listed = [
        LiveTensor(count, tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device), _role(x, roles))
        for count, x in found.values()
    ]
    return sorted(listed, key=lambda one: -one.bytes)


def _parts(x: Tensor) -> list[Tensor]:
    """The tensor and its inner tensors: torchao's 8-bit state consists of codes, scales and a table."""
    inner = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else []
    return [x, *(part for name in inner for part in _parts(getattr(x, name)))]


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor. Touching the whole would make the ranks wait for each other."""
    with torch.no_grad():
        return x.to_local() if hasattr(x, "to_local") else x.detach()


def own_memory(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor on this rank; None for meta, sparse and torch.compile's fake tensors."""
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
    """All live objects of these classes in this process."""
    known: dict[type, bool] = {}  # by type, because `isinstance` would run code of lazy objects and proxies
    for one in gc.get_objects():
        kind = type(one)
        if kind not in known:
            known[kind] = issubclass(kind, kinds)
        if known[kind]:
            yield one


def memory_facts(reading: MemoryReading) -> dict[str, dict[str, Any]]:
    """A reading as the facts of a report, with the counters of the allocators."""
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


def global_pools() -> list[WorkspacePool]:
    return [get_global_memory_pool(lightweight) for lightweight in (False, True)]


def memory_cleanup() -> int:
    """Free unused memory, and return the bytes given back to the GPU driver and the operating system.

    Garbage is collected first, because it may hold memory. Then the idle workspaces of the global pools and the
    patterns in the global caches are freed, and last what the allocators of PyTorch and the C library hold in reserve.
    Nothing in use is touched; patterns are made again when they are needed.

    >>> memory_cleanup() >= 0
    True
    """
    before = read_memory()
    gc.collect()
    for pool in global_pools():
        pool.release_idle()
    for cache in global_caches():
        cache.clear()
    if before.gpus:
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc keeps freed memory and can be asked
        ctypes.CDLL(None).malloc_trim(0)
    after = read_memory()
    freed = max(0, before.host - after.host)
    reserved = {gpu.device: gpu.reserved for gpu in after.gpus}
    return freed + sum(max(0, gpu.reserved - reserved.get(gpu.device, 0)) for gpu in before.gpus)


@checked(interval=POSITIVE)
def monitor_memory_realtime(
    interval: float = 0.5, *, out: str | Path | None = None, picture: str | Path | None = None, quiet: bool = False
) -> MemoryMonitor:
    """Print the memory in use; as a context manager, sample it every `interval` seconds until the block ends.

    Args:
        interval: seconds between samples.
        out: a file that gets each sample as a JSON line, at once.
        picture: a `.svg` or `.png` of the series, drawn at the end by matplotlib.
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
    """Samples memory in a thread between `start` and `stop`, and once at either end, into `readings`."""

    @checked(interval=POSITIVE)
    def __init__(
        self, interval: float = 0.5, *, out: str | Path | None = None, picture: str | Path | None = None
    ) -> None:
        if picture is not None:
            check_picture(Path(picture))  # fail now, not after hours
        self.interval = interval
        self.readings: list[MemoryReading] = []
        self._out = None if out is None else Path(out)
        self._picture = None if picture is None else Path(picture)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._began = 0.0

    def start(self) -> MemoryMonitor:
        if self._thread is not None:
            raise RuntimeError("this monitor is already running: stop it first, or make another")
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text("")
        self.readings, self._failure = [], None
        self._ended.clear()
        self._began = time.perf_counter()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="memory monitor", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> list[MemoryReading]:
        """End the sampling, draw the picture and return the samples. Raises an error that ended the sampling."""
        if self._thread is None:
            raise RuntimeError("this monitor is not running: start it, or use it in a with statement")
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        self._sample()
        if self._picture is not None:
            write_timeline(self._picture, self.series(), "memory of this process")
        return self.readings

    def __enter__(self) -> MemoryMonitor:
        return self.start()

    def __exit__(self, *error: Any) -> None:
        try:
            self.stop()
        except Exception:
            if error[0] is None:  # an error of the block matters more
                raise

    @property
    def peak(self) -> MemoryReading:
        """The sample with the most memory: on the GPUs if there are any, else on the host."""
        if not self.readings:
            raise RuntimeError("there is no sample yet: start the monitor first")
        return max(self.readings, key=lambda one: (sum(gpu.allocated for gpu in one.gpus), one.host))

    def series(self) -> dict[str, list[tuple[float, int]]]:
        """Curves of bytes over seconds, by name."""
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
        if self._out is not None:
            with self._out.open("a") as lines:
                lines.write(json.dumps(asdict(reading)) + "\n")
