"""Measuring: one `Case` feeds time and memory; medians with their spread; and the machine they are from."""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.core.block_layout import keys_seen, layout_for
from dilated_attention_pytorch.core.block_pattern import PatternType, SparsePatternConfig
from dilated_attention_pytorch.core.pattern import forward_flops, training_bytes
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: what it computes, in which dtype and on which device."""

    tokens: int
    heads: int
    head_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False
    head_layout: HeadLayout = "interleaved"
    backward: bool = False
    dtype: str = "bfloat16"
    device: str = "cuda"
    pattern: PatternType | None = None
    sparsity_ratio: float = 1.0
    block_size: int = 128

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec.of(self.segment_lengths, self.dilation_rates, self.head_layout)

    @property
    def sparse_config(self) -> SparsePatternConfig | None:
        if self.pattern is None:
            return None
        return SparsePatternConfig(self.pattern, self.sparsity_ratio, self.block_size)

    @property
    def flops(self) -> int:
        """Of visible pairs only; forward and backward together take 3.5 times the forward's."""
        if self.sparse_config is None:
            forward = forward_flops(self.spec, self.tokens, self.heads, self.head_dim, is_causal=self.is_causal)
        else:
            pairs = _kept_pairs(self.spec, self.tokens, self.heads, self.sparse_config, self.is_causal)
            forward = 4 * pairs * self.head_dim
        return forward * 7 // 2 if self.backward else forward

    @property
    def title(self) -> str:
        """What distinguishes a case, in a few words."""
        words = [f"N={self.tokens:,}", f"D={self.head_dim}", f"H={self.heads}", f"{len(self.segment_lengths)} branches"]
        words += ["causal"] if self.is_causal else []
        words += [self.head_layout] if self.head_layout != "interleaved" else []
        words += [self.pattern, f"{self.sparsity_ratio:g}"] if self.pattern is not None else []
        words += ["forward+backward" if self.backward else "forward"]
        return " ".join(words)

    @property
    def floor_bytes(self) -> int:
        """What forward and backward must hold at once."""
        itemsize = getattr(torch, self.dtype).itemsize
        return training_bytes(self.tokens, self.heads, self.head_dim, itemsize=itemsize)

    def tensors(self, *shape: int) -> list[torch.Tensor]:
        """Fresh random q, k, v and an output gradient, `(1, N, H, D)` unless told otherwise."""
        shape = shape or (1, self.tokens, self.heads, self.head_dim)
        dtype = getattr(torch, self.dtype)
        tensors = [torch.randn(shape, dtype=dtype, device=self.device) for _ in range(4)]
        for x in tensors[:3]:
            x.requires_grad_(self.backward)
        return tensors


@functools.lru_cache
def _kept_pairs(spec: DilatedSpec, tokens: int, heads: int, config: SparsePatternConfig, is_causal: bool) -> int:
    offsets = spec.offsets(heads)
    layout = layout_for(spec, tokens, offsets, config, is_causal, torch.device("cpu"))
    return int(keys_seen(layout, spec, offsets, tokens, is_causal=is_causal).sum())


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, and the bytes that PyTorch's allocator held at most, whatever for (GPU only)."""

    median: float
    p20: float
    p80: float
    peak_bytes: int | None


def measure(run: Callable[[], object], device: str, seconds: float = 0.25) -> Timing:
    """Time `run` for about `seconds`: at least five calls, each by itself, or two where one takes over a second."""
    cuda = device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    run()  # compiles what there is to compile
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    wait()
    once = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if cuda else None
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
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        times.sort()
    return Timing(statistics.median(times), times[calls // 5], times[calls * 4 // 5], peak)


@dataclass(frozen=True)
class Comparison:
    """Median milliseconds of two calls that took turns, and the quotient of their fastest thirds."""

    off: float
    on: float
    ratio: float  # on / off


def compare(
    off: Callable[[], object], on: Callable[[], object], device: str, seconds: float | None = None, least: int = 9
) -> Comparison:
    """Time two calls by turns, so that what else the machine does falls on both alike; it only ever adds.

    On a CPU it is the processor time of all threads, which other processes do not add to.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.process_time

    def once(run: Callable[[], object]) -> float:
        wait()
        began = clock()
        run()
        wait()
        return (clock() - began) * 1e3

    for run in (off, on, off, on):
        once(run)
    seconds = seconds or (2.0 if device == "cpu" else 0.7)  # a GPU's times vary less
    pairs = max(least, min(2000, round(seconds * 1e3 / max(once(off) + once(on), 1e-3))))
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(pairs):  # each goes first as often as the other
        for used in (False, True) if i % 2 else (True, False):
            times[used].append(once(on if used else off))
    fastest = {used: statistics.mean(sorted(found)[: -(-pairs // 3)]) for used, found in times.items()}
    return Comparison(statistics.median(times[False]), statistics.median(times[True]), fastest[True] / fastest[False])


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    else:
        found["cpu"] = _processor()
        found["threads"] = torch.get_num_threads()
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "dilated-attention-pytorch"):
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


def _processor() -> str:
    """The processor's name; Linux tells it in a file only."""
    listing = Path("/proc/cpuinfo")
    for line in listing.read_text().splitlines() if listing.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
