"""Why memory ran out, and what slows a run or makes it numerically unstable, measured in the live process."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.checks import COUNT, checked
from dilated_attention_pytorch.core.modes import tf32_is_on
from dilated_attention_pytorch.core.plans import global_caches
from dilated_attention_pytorch.core.pool import is_out_of_memory
from dilated_attention_pytorch.functional import backends
from dilated_attention_pytorch.measuring import fastest_threads, measure, size, thread_rates, usable_cores
from dilated_attention_pytorch.tools.memory import (
    ROLES,
    GpuMemory,
    LiveTensor,
    MemoryReading,
    global_pools,
    live_objects,
    live_tensors,
    local_part,
    memory_facts,
    own_memory,
    read_memory,
)
from dilated_attention_pytorch.tools.report import Finding, Report, broken, option, pitfall, under

SLOW, FRAGMENTED, UNSTABLE = "Slow Training", "Memory Fragmentation", "Numerical Instability"

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_IDLE = "idle in the memory pools, bytes"
_WORTH_SAYING = 0.01  # of the memory in use
_EIGHT_BIT_SHARE = 2.03 / 8  # bytes of AdamW's state per parameter, in 8 bits and in float32


@checked(largest=COUNT)
def diagnose_oom_error(error: BaseException | None = None, *, largest: int = 10, quiet: bool = False) -> Report:
    """Report what holds memory now, and the options to free it, largest first.

    Args:
        error: the error that was caught; by default the one being handled, if any. Without an error the report
            describes the process as it is.
        largest: how many of the largest live tensors to list.
        quiet: return the report without printing it.
    """
    if error is None:
        handled = sys.exc_info()[1] or getattr(sys, "last_value", None)
        error = handled if handled is not None and is_out_of_memory(handled) else None
    elif not is_out_of_memory(error):
        raise ValueError(f"error must be an out-of-memory error, got {type(error).__name__}: {error}")
    reading, tensors = read_memory(), live_tensors()
    gpu = _gpu_of(reading, error)
    if error is None and gpu is not None and gpu.allocated < sum(x.bytes for x in tensors if x.device == "cpu"):
        gpu = None  # the run is on the host
    where, device = ("the host", "cpu") if gpu is None else (f"GPU {gpu.device}", f"cuda:{gpu.device}")
    there = [x for x in tensors if x.device == device]
    wanted = None if error is None else _wanted_bytes(error)
    roles = {role: sum(x.bytes for x in there if x.role == role) for role in ROLES}
    hidden = 0 if gpu is None else max(0, gpu.allocated - sum(roles.values()))
    facts: dict[str, dict[str, Any]] = {}
    if error is not None:
        said = str(error) or type(error).__name__  # Python's own error has no message
        facts["error"] = {"asked for bytes": wanted, "message": said.splitlines()[0]}
    facts |= memory_facts(reading)
    facts[f"live tensors on {where}"] = {f"{role} bytes": count for role, count in roles.items() if count}
    if gpu is not None:
        facts[f"live tensors on {where}"]["held by autograd's graph and libraries, bytes"] = hidden
    facts["shared by calls"] = _shared_facts()
    facts["settings"] = {name: environment.value(name) or "not set" for name in _ALLOCATOR_SETTINGS}
    facts["largest"] = {"live tensors": [str(x) for x in tensors[:largest]]}
    in_use = (gpu.allocated if gpu is not None else sum(roles.values())) or 1
    findings = [
        finding
        for finding in under("Out Of Memory", _oom_causes(reading, gpu, wanted), _oom_options(there, roles, hidden))
        if finding.saves_bytes is None or finding.saves_bytes >= _WORTH_SAYING * in_use
    ]
    # What is broken comes first, what frees an unknown amount last.
    findings.sort(key=lambda one: (one.level != "broken", -(one.saves_bytes or 0)))
    return Report(f"memory on {where}", facts, findings).printed(quiet)


def _gpu_of(reading: MemoryReading, error: BaseException | None) -> GpuMemory | None:
    """The GPU that the error is about; without an error, the one with the most memory in use."""
    if not reading.gpus or (error is not None and not isinstance(error, torch.OutOfMemoryError)):
        return None
    named = re.search(r"GPU (\d+)", str(error))
    found = [gpu for gpu in reading.gpus if named is not None and gpu.device == int(named[1])]
    return found[0] if found else max(reading.gpus, key=lambda gpu: gpu.allocated)


def _wanted_bytes(error: BaseException) -> int | None:
    """The bytes that an allocator was asked for, from its message.

    >>> _wanted_bytes(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 ..."))
    1610612736
    >>> _wanted_bytes(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."))
    4096
    >>> _wanted_bytes(MemoryError("Unable to allocate 2.00 KiB for an array"))
    2048
    """
    found = re.search(r"(?:tried|unable) to allocate ([\d.]+) (bytes|[KMGT]iB)", str(error), re.IGNORECASE)
    if found is None:
        return None
    scale = {"b": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[found[2][0]]
    return int(float(found[1].rstrip(".")) * scale)


def _oom_causes(reading: MemoryReading, gpu: GpuMemory | None, wanted: int | None) -> Iterator[Finding]:
    """What takes memory besides the run's own tensors."""
    if sys.exc_info()[1] is not None:
        yield pitfall(
            "the error is still being handled: its traceback keeps the tensors of the failed call alive",
            "leave the except block before memory_cleanup() or another try",
        )
    if idle := _shared_facts()[_IDLE]:
        yield option(f"the memory pools hold {size(idle)} that is not in use", "memory_cleanup()", idle)
    if gpu is None:
        if wanted is not None and wanted > reading.host_available:
            yield broken(
                f"{size(wanted)} was requested, and {size(reading.host_available)} is available",
                f"make the call {wanted / max(1, reading.host_available):.1f} times smaller, or share it among ranks",
            )
        return
    idle = gpu.reserved - gpu.allocated
    if wanted is not None and wanted <= idle:
        segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == gpu.device]
        free = [block["size"] for one in segments for block in one["blocks"] if block["state"] == "inactive"]
        yield broken(
            f"{size(wanted)} was requested; the allocator holds {size(idle)} free, but the largest piece has "
            f"{size(max(free, default=0))}: memory is fragmented",
            _less_fragmentation(),
            idle,
        )
    elif idle:
        yield option(
            f"the allocator keeps {size(idle)} of {size(gpu.reserved)} in reserve",
            f"memory_cleanup() returns what is not fragmented; {_less_fragmentation()}",
            idle,
        )
    if gpu.of_others > 0.05 * gpu.total:
        yield option(
            f"other processes, and what CUDA's context takes, hold {size(gpu.of_others)} of {size(gpu.total)}",
            "nvidia-smi lists the processes: end what is not needed",
        )


def _oom_options(there: list[LiveTensor], roles: dict[str, int], hidden: int) -> Iterator[Finding]:
    """What would make the run's own tensors smaller."""
    activations = roles["activation"] + hidden
    wide = sum(x.bytes for x in there if x.role == "optimizer state" and x.dtype == "float32" and x.bytes >= 1 << 14)
    if wide:
        yield option(
            f"the optimizer's state takes {size(wide)} in float32",
            "an 8-bit AdamW (bitsandbytes or torchao); on several ranks FSDP2 shards it",
            int(wide * (1 - _EIGHT_BIT_SHARE)),
        )
    if roles["gradient"]:
        yield option(
            f"gradients take {size(roles['gradient'])} now",
            "optimizer.zero_grad(set_to_none=True) before the next forward pass, if they were used",
            roles["gradient"],
        )
    module = next((one for one in live_objects(nn.Module) if _checkpoints(one) is False and one.training), None)
    if activations and module is not None:
        yield option(
            f"activations take {size(activations)}, and {type(module).__name__} checkpoints none",
            "model.gradient_checkpointing_enable(): only the layers' inputs stay",
        )
    large = [x for x in there if x.role in ("activation", "tensor") and x.bytes >= _WORTH_SAYING * sum(roles.values())]
    batch = max((x.shape[0] for x in large if len(x.shape) >= 3 and x.role == "activation"), default=1)
    if batch > 1:
        yield option(
            f"activations take {size(activations)} for a batch of {batch}",
            f"batches of {batch // 2} and twice the gradient accumulation",
            activations // 2,
        )
    for x in large:
        if len(x.shape) >= 2 and x.shape[-1] == x.shape[-2] >= 1024:
            yield option(
                f"a tensor of {list(x.shape)} takes {size(x.bytes)} and grows with the square of the length",
                "lengths or cu_seqlens instead of a dense mask, dilated instead of dense attention",
                x.bytes,
            )
    if full := sum(x.bytes for x in large if x.dtype == "float32" and x.role == "activation"):
        yield option(
            f"activations in float32 take {size(full)}",
            f'torch.autocast("{there[0].device.partition(":")[0]}", dtype=torch.bfloat16) halves those of matrix '
            "products",
            full // 2,
        )
    if torch.cuda.device_count() > 1 and not torch.distributed.is_initialized():
        yield option(
            f"one of {torch.cuda.device_count()} GPUs is in use",
            "torchrun with FSDP2 for the weights, RingDilatedAttention for the sequence",
        )


@checked()
def diagnose_performance_issues(step: Callable[[], object] | None = None, *, quiet: bool = False) -> Report:
    """Report what slows this process, fragments its memory or makes it numerically unstable.

    It looks at threads, settings, caches, live modules, gradients and loaders, and times short matrix products.

    Args:
        step: one step of the run. It is called twice, the second time under torch.profiler, which measures its time,
            the share of it that the GPU works, and the operators that take it.
        quiet: return the report without printing it.
    """
    reading = read_memory()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    facts: dict[str, dict[str, Any]] = {
        "machine": {
            "usable cores": f"{usable_cores():g}",
            "PyTorch's threads": torch.get_num_threads(),
            "load of the last minute": load,
        },
        "backends": dict(backends()),
        "shared by calls": _shared_facts(),
    }
    facts |= memory_facts(reading)
    findings = [
        *under(SLOW, slow_processor(), _slow_precision(facts), debug_settings(), _slow_objects(reading)),
        *under(SLOW, [] if step is None else _slow_step(step, facts)),
        *under(FRAGMENTED, _fragmentation(reading)),
        *under(UNSTABLE, _instability(facts)),
    ]
    return Report("what slows this process", facts, findings).printed(quiet)


def slow_processor() -> Iterator[Finding]:
    """Whether PyTorch has the wrong number of threads, by timing, and whether other processes take the cores."""
    threads = torch.get_num_threads()
    rates = thread_rates(threads)
    fastest = fastest_threads(rates)
    if rates[fastest] > 1.1 * rates[threads]:
        yield pitfall(
            f"PyTorch uses {threads} threads, and {usable_cores():g} cores may be used: a product runs at "
            f"{rates[threads]:.0f} GFLOP/s, with {fastest} threads at {rates[fastest]:.0f}",
            f"torch.set_num_threads({fastest}), or OMP_NUM_THREADS={fastest}",
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 1.5 * (os.cpu_count() or 1):
        yield pitfall(
            f"{load:.1f} threads wanted to run in the last minute on {os.cpu_count()} cores",
            "end other processes, or give each one fewer threads",
        )


def _slow_precision(facts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """On a GPU: how much slower float32 products are than TF32 and bfloat16 ones, by timing."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    x, allowed, times = torch.randn(2048, 2048, device="cuda"), tf32_is_on(), {}
    try:
        for name, allow, operand in (("float32", False, x), ("TF32", True, x), ("bfloat16", allowed, x.bfloat16())):
            torch.backends.cuda.matmul.allow_tf32 = allow
            times[name] = measure(lambda a=operand: a @ a, "cuda", seconds=0.02).median  # type: ignore[misc]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    facts["a product of 2048 x 2048 matrices, ms"] = {name: f"{value:.3f}" for name, value in times.items()}
    wide = [x for x in live_tensors() if x.role == "parameter" and x.dtype == "float32" and x.device.startswith("cuda")]
    now = times["TF32" if allowed else "float32"]
    if wide and not allowed and times["TF32"] < 0.9 * now:
        yield option(
            f"TF32 is off for {len(wide)} float32 parameters: products take {now / times['TF32']:.1f} times as long",
            "torch.backends.cuda.matmul.allow_tf32 = True, if 10 bits of mantissa suffice",
        )
    if wide and times["bfloat16"] < 0.9 * now:
        yield option(
            f"{len(wide)} parameters are float32: products take {now / times['bfloat16']:.1f} times as long as in "
            "bfloat16",
            'torch.autocast("cuda", dtype=torch.bfloat16), unless the step does so already',
        )


def debug_settings() -> Iterator[Finding]:
    """Settings for debugging that slow a run and are on, in PyTorch and in the environment."""
    if torch.is_anomaly_enabled():
        yield pitfall("anomaly detection is on", "torch.autograd.set_detect_anomaly(False)")
    if torch.are_deterministic_algorithms_enabled():
        yield pitfall(
            "deterministic algorithms are on, which also fill uninitialised memory",
            "torch.use_deterministic_algorithms(False), unless you need them",
        )
    for setting, effect in (
        ("CUDA_LAUNCH_BLOCKING=1", "makes the host wait for every kernel"),
        ("TRITON_INTERPRET=1", "runs kernels in Python, where bfloat16 comes out wrong"),
        ("DILATED_ATTENTION_KERNELS=plain", "leaves out the kernels for Hopper"),
    ):
        name, _, value = setting.partition("=")
        if environment.value(name) == value:
            yield pitfall(f"{setting} {effect}", f"unset {name}")


def unused_kernels() -> Iterator[Finding]:
    """Which kernels a GPU cannot use here, and why."""
    if (reason := backends("cuda")["triton"]) != "available":
        yield pitfall(f"the fused kernels are not used: {reason}", "see backends()")
    elif torch.cuda.get_device_capability()[0] == 9:
        from dilated_attention_pytorch.kernels.triton.plan import why_no_hopper

        if (missing := why_no_hopper(torch.device("cuda", torch.cuda.current_device()))) is not None:
            yield pitfall(f"the kernels for Hopper are not used: {missing}", "see the reason")


def _slow_objects(reading: MemoryReading) -> Iterator[Finding]:
    """What live modules, loaders and caches show."""
    if torch.cuda.is_available():
        yield from unused_kernels()
    loaders = list(live_objects(torch.utils.data.DataLoader))
    if alone := [one for one in loaders if one.num_workers == 0]:
        yield option(
            f"{len(alone)} of {len(loaders)} data loaders work in the training process (num_workers=0)",
            "num_workers=1 or more, if the GPU waits for data",
        )
    used = max((gpu.most_allocated / gpu.total for gpu in reading.gpus), default=1.0)
    module = next((one for one in live_objects(nn.Module) if _checkpoints(one) is True), None)
    if used < 0.4 and module is not None:
        yield option(
            f"{type(module).__name__} recomputes its layers while at most {used:.0%} of a GPU's memory was in use",
            "model.gradient_checkpointing_enable(False): a step saves a forward pass",
        )
    for stats in (cache.get_stats() for cache in global_caches()):
        if stats["evictions"] and stats["hit_rate"] < 0.5:
            by_number = stats["size"] >= stats["max_size"]
            variable, limit = ("MAX_SIZE", stats["max_size"]) if by_number else ("MAX_BYTES", stats["max_bytes"])
            yield option(
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
    # On a GPU only the kernels' own rows: the row of an operator counts the time of its kernels again.
    kernels = [one for one in averages if one.device_type.name != "CPU" and not one.is_user_annotation]
    times = {one.key: float(one.self_device_time_total) for one in kernels} or {
        one.key: float(one.self_cpu_time_total) for one in averages
    }
    busy = sum(times.values())
    top = sorted(times.items(), key=lambda item: -item[1])[:6]
    facts["step"] = {
        "milliseconds": f"{wall / 1e3:.2f}",
        "computing": f"{busy / wall:.0%} of it",
        "most time": [f"{value / max(busy, 1e-9):>6.1%}  {name[:90]}" for name, value in top if value],
    }
    if kernels and busy < 0.7 * wall:
        yield pitfall(
            f"the GPU works {busy / wall:.0%} of a step's {wall / 1e3:.1f} ms and waits for the host otherwise",
            "longer sequences or larger batches per step, torch.compile, or a CUDA graph",
        )
    copies = sum(value for name, value in times.items() if "copy" in name.lower() or "memcpy" in name.lower())
    if busy and copies > 0.15 * busy:
        yield option(
            f"copies and conversions take {copies / busy:.0%} of what is computed",
            "keep tensors on one device and in one dtype; contiguous inputs",
        )
    waits = sum(one.count for one in averages if one.key == "aten::_local_scalar_dense")
    if kernels and waits > 2:
        yield option(f"a step reads {waits} numbers back from the GPU and waits each time", "fewer .item() calls")


def _fragmentation(reading: MemoryReading) -> Iterator[Finding]:
    for gpu in reading.gpus:
        retries = torch.cuda.memory_stats(gpu.device).get("num_alloc_retries", 0)
        idle = gpu.reserved - gpu.allocated
        if retries:
            yield pitfall(
                f"on GPU {gpu.device} the allocator had to flush its cache {retries} times, and the host waited",
                _less_fragmentation(),
            )
        if gpu.reserved > 0.7 * gpu.total and idle > 0.2 * gpu.reserved:
            yield option(
                f"on GPU {gpu.device} {size(idle)} of {size(gpu.reserved)} reserved are not in use",
                _less_fragmentation(),
                idle,
            )


def _instability(facts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    parameters = [
        p
        for p in live_objects(Tensor)  # the type of a sharded parameter is not nn.Parameter
        if isinstance(p, nn.Parameter) and p.is_floating_point() and own_memory(p) is not None
    ]
    values = [local_part(p) for p in parameters]
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        norm = torch.stack([g.double().norm().cpu() for g in gradients]).norm().item()
        facts["numbers"] = {"norm of all live gradients": f"{norm:.4g}"}
    for name, tensors, way_out in (
        ("parameters", values, "return to the last checkpoint"),
        ("gradients", gradients, "skip this update; lower the learning rate"),
    ):
        if wrong := sum(not torch.isfinite(x).all() for x in tensors):
            yield broken(f"{wrong} of {len(tensors)} live {name} hold values that are not finite", way_out)
    for scaler in live_objects(torch.amp.GradScaler):
        if scaler.is_enabled() and scaler.get_scale() < 1:
            yield pitfall(
                f"the gradient scaler is down to {scaler.get_scale():g}: gradients overflow in float16 step after step",
                "bfloat16, which needs no scaler, or a lower learning rate",
            )
    half = [p for p in parameters if p.dtype == torch.float16]
    if any(p.requires_grad for p in half):
        yield pitfall(
            f"{len(half)} live parameters are float16, which overflows at 65,504",
            "float32 parameters under autocast, in bfloat16 where the GPU has it",
        )


def _checkpoints(module: nn.Module) -> bool | None:
    """Whether a model recomputes its layers in backward; None for a module that has no such switch."""
    return getattr(module, "gradient_checkpointing", None)


def _less_fragmentation() -> str:
    if any("expandable_segments:True" in (environment.value(name) or "") for name in _ALLOCATOR_SETTINGS):
        return "expandable_segments is on already: keep shapes the same from step to step"
    return "start the process with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _shared_facts() -> dict[str, Any]:
    """What the global pools and caches hold, and how often it was reused."""
    pools, caches = ([one.get_stats() for one in shared] for shared in (global_pools(), global_caches()))
    reused, made = (sum(one[name] for one in pools) for name in ("reuse_count", "allocation_count"))
    hits, misses = (sum(one[name] for one in caches) for name in ("hits", "misses"))
    return {
        _IDLE: sum(one["total_allocated"] - one["live_bytes"] for one in pools),
        "reuse rate of the memory pools": f"{reused / (reused + made):.0%}" if reused + made else "not in use",
        "patterns in the cache": sum(one["size"] for one in caches),
        "hit rate of the cache": f"{hits / max(hits + misses, 1):.0%}",
    }
