"""Measuring: one `Case` feeds time and memory; medians with their spread; and the machine they are from."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.core.pattern import forward_flops
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

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec.of(self.segment_lengths, self.dilation_rates, self.head_layout)

    @property
    def flops(self) -> int:
        """Of visible pairs only; forward and backward together take 3.5 times the forward's."""
        forward = forward_flops(self.spec, self.tokens, self.heads, self.head_dim, is_causal=self.is_causal)
        return forward * 7 // 2 if self.backward else forward

    def tensors(self, *shape: int) -> list[torch.Tensor]:
        """Fresh random q, k, v and an output gradient, `(1, N, H, D)` unless told otherwise."""
        shape = shape or (1, self.tokens, self.heads, self.head_dim)
        dtype = getattr(torch, self.dtype)
        tensors = [torch.randn(shape, dtype=dtype, device=self.device) for _ in range(4)]
        for x in tensors[:3]:
            x.requires_grad_(self.backward)
        return tensors


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, and the bytes that PyTorch's allocator held at most, inputs included (GPU only)."""

    median: float
    p20: float
    p80: float
    peak_bytes: int | None


def measure(run: Callable[[], object], device: str, seconds: float = 0.4) -> Timing:
    """Time `run` for about `seconds`, after warming up; at least five calls, each by itself."""
    cuda = device == "cuda"
    for _ in range(3):
        run()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    once = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if cuda else None
    calls = max(5, min(200, round(seconds / max(once, 1e-6))))
    if cuda:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        for start, end in events:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        times = sorted(start.elapsed_time(end) for start, end in events)
    else:
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        times.sort()
    return Timing(statistics.median(times), times[calls // 5], times[calls * 4 // 5], peak)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "dilated-attention-pytorch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = torch.backends.cudnn.version()
    else:
        found["cpu"] = platform.processor() or platform.machine()
        found["threads"] = torch.get_num_threads()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    return found


def record(suite: str, case: Case, contender: str, timing: Timing, flops: int) -> dict[str, Any]:
    """One line of the results."""
    return {
        "suite": suite,
        "contender": contender,
        **asdict(case),
        "milliseconds": round(timing.median, 4),
        "p20": round(timing.p20, 4),
        "p80": round(timing.p80, 4),
        "peak_bytes": timing.peak_bytes,
        "tflops": round(flops / timing.median / 1e9, 4),
    }
