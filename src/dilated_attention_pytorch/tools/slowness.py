"""What slows a run, fragments its memory or makes its numbers unstable: read and timed in the live process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import checked
from dilated_attention_pytorch.core.memory_pool import get_global_memory_pool
from dilated_attention_pytorch.core.pattern_cache import global_caches
from dilated_attention_pytorch.core.tf32 import tf32_is_on
from dilated_attention_pytorch.functional import backends
from dilated_attention_pytorch.measuring import measure, usable_cores
from dilated_attention_pytorch.tools.memory import (
    MemoryReading,
    cache_facts,
    less_fragmentation,
    live_objects,
    live_tensors,
    local_part,
    memory_facts,
    own_memory,
    read_memory,
)
from dilated_attention_pytorch.tools.report import Finding, Report, size

SLOW, FRAGMENTED, UNSTABLE = "Slow Training", "Memory Fragmentation", "Numerical Instability"


@checked()
def diagnose_performance_issues(step: Callable[[], object] | None = None, *, quiet: bool = False) -> Report:
    """Say what slows this process, fragments its memory or makes its numbers unstable, as far as it shows.

    Threads, settings, caches, live modules, gradients and loaders are looked at, and short matrix products are timed.

    Args:
        step: one step of the run. It is called twice: the second time under torch.profiler, which tells how long it
            takes, how much of that the GPU works, and which operators take it.
        quiet: return the report without printing it.
    """
    reading = read_memory()
    facts: dict[str, dict[str, Any]] = {
        "machine": {
            "usable cores": f"{usable_cores():g}",
            "PyTorch's threads": torch.get_num_threads(),
            "load of the last minute": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "not told",
        },
        "backends": dict(backends()),
        "shared by calls": cache_facts() | _pool_facts(),
    }
    facts |= memory_facts(reading)
    findings = [*_slow_processor(), *_slow_precision(facts), *slow_settings(), *_slow_objects(reading)]
    if step is not None:
        findings += _slow_step(step, facts)
    findings += [*_fragmentation(reading), *_instability(facts)]
    return Report("what slows this process", facts, findings).told(quiet)


def _pool_facts() -> dict[str, Any]:
    stats = [get_global_memory_pool(lightweight).get_stats() for lightweight in (False, True)]
    asked = sum(one["allocation_count"] + one["reuse_count"] for one in stats)
    reused = sum(one["reuse_count"] for one in stats)
    return {"reuse rate of the memory pools": f"{reused / asked:.0%}" if asked else "not in use"}


def _slow_processor() -> Iterator[Finding]:
    cores, threads = max(1, int(usable_cores())), torch.get_num_threads()
    if threads != cores:
        x = torch.randn(512, 512)
        rates = {}
        try:
            for count in (threads, cores):
                torch.set_num_threads(count)
                rates[count] = 2 * 512**3 / measure(lambda: x @ x, "cpu", seconds=0.05).median / 1e6
        finally:
            torch.set_num_threads(threads)
        if rates[cores] > 1.1 * rates[threads]:
            yield Finding(
                "pitfall",
                SLOW,
                f"PyTorch uses {threads} threads where {cores} cores may be used: a product runs at "
                f"{rates[threads]:.0f} GFLOP/s, with {cores} threads at {rates[cores]:.0f}",
                f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}",
            )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 1.5 * (os.cpu_count() or 1):
        yield Finding(
            "pitfall",
            SLOW,
            f"{load:.1f} threads wanted to run in the last minute on {os.cpu_count()} cores",
            "end what else runs, or give each process fewer threads",
        )


def _slow_precision(facts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """On a GPU, what float32 costs against what else it computes in, timed."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    floats = [
        x for x in live_tensors() if x.role == "parameter" and x.dtype == "float32" and x.device.startswith("cuda")
    ]
    x = torch.randn(2048, 2048, device="cuda")
    allowed = tf32_is_on()
    times = {}
    try:
        for name, allow, operand in (("float32", False, x), ("TF32", True, x), ("bfloat16", allowed, x.bfloat16())):
            torch.backends.cuda.matmul.allow_tf32 = allow
            times[name] = measure(lambda a=operand: a @ a, "cuda", seconds=0.02).median  # type: ignore[misc]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    facts["a product of 2048 x 2048 matrices, ms"] = {name: f"{value:.3f}" for name, value in times.items()}
    now = times["TF32" if allowed else "float32"]
    if floats and not allowed and times["TF32"] < 0.9 * now:
        yield Finding(
            "option",
            SLOW,
            f"{len(floats)} parameters are float32 and TF32 is off: products take {now / times['TF32']:.1f} times as "
            "long",
            "torch.backends.cuda.matmul.allow_tf32 = True, if 10 bits of mantissa suffice",
        )
    if floats and times["bfloat16"] < 0.9 * now:
        yield Finding(
            "option",
            SLOW,
            f"{len(floats)} parameters are float32: products take {now / times['bfloat16']:.1f} times as long as "
            "in bfloat16",
            'torch.autocast("cuda", dtype=torch.bfloat16), unless the step does so already',
        )


def slow_settings() -> Iterator[Finding]:
    """Settings for debugging that are on, in PyTorch and in the environment."""
    debugging = {
        "torch.autograd.set_detect_anomaly(False)": ("anomaly detection is on", torch.is_anomaly_enabled()),
        "torch.use_deterministic_algorithms(False), unless it is wanted": (
            "deterministic algorithms are asked for, and uninitialised memory is filled",
            torch.are_deterministic_algorithms_enabled(),
        ),
        "unset CUDA_LAUNCH_BLOCKING": (
            "CUDA_LAUNCH_BLOCKING=1 makes the host wait for every kernel",
            os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
        ),
        "unset TRITON_INTERPRET": (
            "TRITON_INTERPRET=1 runs kernels in Python, where bfloat16 comes out wrong",
            os.environ.get("TRITON_INTERPRET") == "1",
        ),
        "unset DILATED_ATTENTION_KERNELS": (
            "DILATED_ATTENTION_KERNELS=plain leaves out the kernels for Hopper",
            os.environ.get("DILATED_ATTENTION_KERNELS") == "plain",
        ),
    }
    for way_out, (measured, is_on) in debugging.items():
        if is_on:
            yield Finding("pitfall", SLOW, measured, way_out)


def _slow_objects(reading: MemoryReading) -> Iterator[Finding]:
    """What live modules, loaders and caches show."""
    if torch.cuda.is_available() and (reason := backends("cuda")["triton"]) != "available":
        yield Finding("pitfall", SLOW, f"the fused kernels are not used: {reason}", "see backends()")
    loaders = list(live_objects(torch.utils.data.DataLoader))
    if alone := [one for one in loaders if one.num_workers == 0]:
        yield Finding(
            "option",
            SLOW,
            f"{len(alone)} of {len(loaders)} data loaders work in the training process (num_workers=0)",
            "num_workers=1 or more, if the GPU waits for data",
        )
    used = [gpu.most_allocated / gpu.total for gpu in reading.gpus]
    for module in live_objects(nn.Module):
        if used and max(used) < 0.4 and getattr(module, "gradient_checkpointing", None) is True:
            yield Finding(
                "option",
                SLOW,
                f"{type(module).__name__} recomputes its layers while at most {max(used):.0%} of a GPU's memory was "
                "in use",
                "model.gradient_checkpointing_enable(False): a step saves a forward pass",
            )
            break
    for stats in (cache.get_stats() for cache in global_caches()):
        if stats["evictions"] and stats["hit_rate"] < 0.5:
            by_number = stats["size"] >= stats["max_size"]
            variable, limit = ("MAX_SIZE", stats["max_size"]) if by_number else ("MAX_BYTES", stats["max_bytes"])
            yield Finding(
                "option",
                SLOW,
                f"the pattern cache is too small: {stats['hit_rate']:.0%} of lookups hit, {stats['evictions']:,} "
                f"evictions at a size of {limit:,}{'' if by_number else ' bytes'}",
                f"PATTERN_CACHE_{variable}={4 * limit}",
            )


def _slow_step(step: Callable[[], object], facts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - began) * 1e6
    averages = list(profiler.key_averages())
    # On a GPU the kernels' own rows: an operator's row counts the time of its kernels once more.
    kernels = [one for one in averages if one.device_type.name != "CPU" and not one.is_user_annotation]
    cuda = bool(kernels)
    rows = kernels or averages
    times = {one.key: float(one.self_device_time_total if cuda else one.self_cpu_time_total) for one in rows}
    busy = sum(times.values())
    top = sorted(times.items(), key=lambda item: -item[1])[:6]
    facts["step"] = {
        "milliseconds": f"{wall / 1e3:.2f}",
        "computing": f"{busy / wall:.0%} of it",
        "most time": [f"{value / max(busy, 1e-9):>6.1%}  {name[:90]}" for name, value in top if value],
    }
    if cuda and busy < 0.7 * wall:
        yield Finding(
            "pitfall",
            SLOW,
            f"the GPU works {busy / wall:.0%} of a step's {wall / 1e3:.1f} ms and waits for the host otherwise",
            "longer sequences or larger batches a step, torch.compile, or a CUDA graph",
        )
    copies = sum(value for name, value in times.items() if "copy" in name.lower() or "memcpy" in name.lower())
    if busy and copies > 0.15 * busy:
        yield Finding(
            "option",
            SLOW,
            f"copies and conversions take {copies / busy:.0%} of what is computed",
            "keep tensors on one device and in one dtype; contiguous inputs",
        )
    waits = sum(one.count for one in averages if one.key == "aten::_local_scalar_dense")
    if cuda and waits > 2:
        yield Finding(
            "option", SLOW, f"a step reads {waits} numbers back from the GPU and waits each time", "fewer .item() calls"
        )


def _fragmentation(reading: MemoryReading) -> Iterator[Finding]:
    for gpu in reading.gpus:
        retries = torch.cuda.memory_stats(gpu.device).get("num_alloc_retries", 0)
        idle = gpu.reserved - gpu.allocated
        if retries:
            yield Finding(
                "pitfall",
                FRAGMENTED,
                f"on GPU {gpu.device} the allocator had to flush its cache {retries} times, and the host waited",
                less_fragmentation(),
            )
        if gpu.reserved > 0.7 * gpu.total and idle > 0.2 * gpu.reserved:
            yield Finding(
                "option",
                FRAGMENTED,
                f"on GPU {gpu.device} {size(idle)} of {size(gpu.reserved)} reserved are not in use",
                less_fragmentation(),
                idle,
            )


def _instability(facts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    parameters = [
        p
        for p in live_objects(Tensor)  # of which a sharded parameter is one, by its type
        if isinstance(p, nn.Parameter) and p.is_floating_point() and own_memory(p) is not None
    ]
    values = [local_part(p) for p in parameters]
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        norm = torch.stack([g.double().norm().cpu() for g in gradients]).norm().item()
        facts["numbers"] = {"norm of all live gradients": f"{norm:.4g}"}
    for name, tensors in (("parameters", values), ("gradients", gradients)):
        if wrong := sum(not _is_finite(x) for x in tensors):
            yield Finding(
                "broken",
                UNSTABLE,
                f"{wrong} of {len(tensors)} live {name} hold values that are not finite",
                "go back to the last checkpoint"
                if name == "parameters"
                else "skip this update; lower the learning rate",
            )
    half = [p for p in parameters if p.dtype == torch.float16]
    for scaler in live_objects(torch.amp.GradScaler):
        if scaler.is_enabled() and scaler.get_scale() < 1:
            yield Finding(
                "pitfall",
                UNSTABLE,
                f"the gradient scaler is down to {scaler.get_scale():g}: gradients overflow in float16 step after step",
                "bfloat16, which needs no scaler, or a lower learning rate",
            )
    if half and any(p.requires_grad for p in half):
        yield Finding(
            "pitfall",
            UNSTABLE,
            f"{len(half)} live parameters that are trained are float16, which overflows at 65,504",
            "float32 parameters under autocast, in bfloat16 where the GPU has it",
        )


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
