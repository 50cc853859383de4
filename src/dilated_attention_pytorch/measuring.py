"""Time, memory and the machine they are measured on, for benchmarks and tools."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

DISTRIBUTION = "longnet-dilated-attention"  # the name for pip, which differs from that of the package


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, and on a GPU the peak bytes of PyTorch's allocator, which include other tensors."""

    median: float
    p20: float
    p80: float
    mean: float
    peak_bytes: int | None


def measure(run: Callable[[], object], device: str, seconds: float = 0.25, calls: int | None = None) -> Timing:
    """Time calls of `run` one by one, for about `seconds`: at least five, or two if one takes over a second.

    `calls` fixes their number instead.
    """
    cuda = device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    run()  # compiles
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    once = _seconds(lambda: (run(), wait()))
    peak = torch.cuda.max_memory_allocated() if cuda else None
    if calls is None:
        calls = max(5 if once < 1 else 2, min(500, round(seconds / max(once, 1e-6))))
    for _ in range(calls // 10):
        run()
    if cuda:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        for start, end in events:
            start.record()
            run()
            end.record()
        wait()
        times = sorted(start.elapsed_time(end) for start, end in events)
    else:
        times = sorted(_seconds(run) * 1e3 for _ in range(calls))
    return Timing(statistics.median(times), times[calls // 5], times[calls * 4 // 5], statistics.mean(times), peak)


def thread_rates(*further: int) -> dict[int, float]:
    """GFLOP/s of a matrix product on the CPU, by number of threads: 1, 2, 4, ..., all usable cores, and `further`.

    On a busy machine a product may wait long for a core that another process uses. So the thread counts take turns,
    and each rate is that of its median turn.
    """
    cores = max(1, int(usable_cores()))
    counts = sorted({*(1 << power for power in range(cores.bit_length())), cores, *further})
    x = torch.ones(512, 512)
    turns: dict[int, list[float]] = {count: [] for count in counts}
    with keeping_threads():
        for _ in range(5):
            for count, times in turns.items():
                torch.set_num_threads(count)
                times.append(measure(lambda: x @ x, "cpu", seconds=0.04).mean)
    return {count: 2 * 512**3 / statistics.median(times) / 1e6 for count, times in turns.items()}


def fastest_threads(rates: Mapping[int, float]) -> int:
    """The fewest threads whose rate, of `thread_rates`, is within a tenth of the highest.

    >>> fastest_threads({1: 40.0, 2: 78.0, 4: 80.0}), fastest_threads({1: 40.0, 2: 6.0})
    (2, 1)
    """
    return min(count for count, rate in rates.items() if rate >= 0.9 * max(rates.values()))


@contextmanager
def keeping_threads() -> Iterator[None]:
    """Restore PyTorch's number of threads at the end of the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def machine(device: str) -> dict[str, Any]:
    """The machine, for the head of a table of measurements."""
    found: dict[str, Any] = {}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    else:
        found["cpu"] = processor()
        found["threads"] = torch.get_num_threads()
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", DISTRIBUTION):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    found["date"] = time.strftime("%Y-%m-%d")
    return found


def size(count: int | float, digits: int = 1) -> str:
    """A number of bytes in the largest unit that fits.

    >>> size(0), size(1536), size(3 << 30), size(-(5 << 20)), size(6193152, digits=2)
    ('0 B', '1.5 KiB', '3.0 GiB', '-5.0 MiB', '5.91 MiB')
    """
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= scale:
            return f"{count / scale:,.{digits}f} {unit}"
    return f"{count:g} B"


def processor() -> str:
    """The processor's name, which Linux has only in a file."""
    return _listed("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """The processor's features by Linux's names; empty on other systems."""
    return frozenset(_listed("/proc/cpuinfo", "flags").split())


def _listed(path: str, field: str) -> str:
    """A field of one of Linux's listings; empty on systems without them."""
    listing = Path(path)
    for line in listing.read_text().splitlines() if listing.exists() else []:
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""


def _listed_bytes(path: str, field: str) -> int:
    stated = _listed(path, field)
    return int(stated.split()[0]) * 1024 if stated else 0  # listed in KiB


def usable_cores() -> float:
    """The number of cores that this process may use; CPU affinity or a container's quota may limit it."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        most, _, period = quota.read_text().partition(" ")
        if most.isdigit():
            cores = min(cores, int(most) / int(period))
    return cores


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory for this process: the total, or its container's limit, and what is free; 0 if unknown."""

    total: int
    available: int


def host_memory() -> HostMemory:
    total, available = (_listed_bytes("/proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (stated := limit.read_text().strip()).isdigit():  # a container's
        used = int((group / "memory.current").read_text())
        total, available = min(total, int(stated)), min(available, max(0, int(stated) - used))
    return HostMemory(total, available)


def resident() -> int:
    """Bytes of host memory that this process holds now; 0 if unknown."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        listed = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return int(listed.stdout) * 1024 if listed.returncode == 0 else 0


def peak_resident() -> int:
    """Bytes of host memory that this process has held at most; 0 if unknown."""
    # Preferred where it exists: getrusage starts from the size of the parent process.
    if peak := _listed_bytes("/proc/self/status", "VmHWM"):
        return peak
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
