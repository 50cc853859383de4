"""Why memory ran out: what holds it in the live process, and what each way out would free."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dilated_attention_pytorch.core.checks import COUNT, checked
from dilated_attention_pytorch.core.memory_pool import is_out_of_memory
from dilated_attention_pytorch.tools.memory import (
    ALLOCATOR_SETTINGS,
    ROLES,
    GpuMemory,
    LiveTensor,
    MemoryReading,
    cache_facts,
    idle_in_pools,
    less_fragmentation,
    live_objects,
    live_tensors,
    memory_facts,
    read_memory,
)
from dilated_attention_pytorch.tools.report import Finding, Report, size

OOM = "Out Of Memory"

_WORTH_SAYING = 0.01  # of what is in use
_EIGHT_BIT_SHARE = 2.03 / 8  # bytes of AdamW's state a parameter, in 8 bits and in float32


@checked(largest=COUNT)
def diagnose_oom_error(error: BaseException | None = None, *, largest: int = 10, quiet: bool = False) -> Report:
    """Say what holds memory now, and which options there are, by the bytes that each would free.

    Args:
        error: what was caught; by default the error that is being handled, if there is one. Without any, the report is
            of the process as it stands.
        largest: how many of the largest live tensors are listed.
        quiet: return the report without printing it.
    """
    if error is None:
        handled = sys.exc_info()[1] or getattr(sys, "last_value", None)
        error = handled if handled is not None and is_out_of_memory(handled) else None
    elif not is_out_of_memory(error):
        raise ValueError(f"{type(error).__name__} is no out-of-memory error: {error}")
    reading, tensors = read_memory(), live_tensors()
    gpu = _the_gpu(reading, error)
    if error is None and gpu is not None and gpu.allocated < sum(x.bytes for x in tensors if x.device == "cpu"):
        gpu = None  # the run is on the host
    there = [x for x in tensors if x.device == (f"cuda:{gpu.device}" if gpu is not None else "cpu")]
    wanted = None if error is None else _wanted_bytes(error)
    roles = {role: sum(x.bytes for x in there if x.role == role) for role in ROLES}
    hidden = 0 if gpu is None else max(0, gpu.allocated - sum(roles.values()))
    facts: dict[str, dict[str, Any]] = {}
    if error is not None:
        said = str(error) or type(error).__name__  # Python's own error says nothing
        facts["error"] = {"asked for bytes": wanted, "message": said.splitlines()[0]}
    facts |= memory_facts(reading)
    where = "the host" if gpu is None else f"GPU {gpu.device}"
    facts[f"live tensors on {where}"] = {f"{role} bytes": count for role, count in roles.items() if count}
    if gpu is not None:
        facts[f"live tensors on {where}"]["held by autograd's graph and libraries, bytes"] = hidden
    facts["shared by calls"] = {"idle in the memory pools, bytes": idle_in_pools(), **cache_facts()}
    facts["settings"] = {name: os.environ.get(name, "not set") for name in ALLOCATOR_SETTINGS}
    facts["largest"] = {"live tensors": [str(x) for x in tensors[:largest]]}
    findings = [*_oom_causes(reading, gpu, wanted), *_oom_options(there, roles, hidden)]
    in_use = (gpu.allocated if gpu is not None else sum(roles.values())) or 1
    # What frees a negligible part is left out; what is broken comes first, what cannot be told beforehand last.
    findings = [one for one in findings if one.saves_bytes is None or one.saves_bytes >= _WORTH_SAYING * in_use]
    findings.sort(key=lambda one: (one.level != "broken", -(one.saves_bytes or 0)))
    return Report(f"memory on {where}", facts, findings).told(quiet)


def _the_gpu(reading: MemoryReading, error: BaseException | None) -> GpuMemory | None:
    """The GPU that the error is about; without an error, the one with the most in use."""
    if not reading.gpus or (error is not None and not isinstance(error, torch.OutOfMemoryError)):
        return None
    named = re.search(r"GPU (\d+)", str(error))
    found = [gpu for gpu in reading.gpus if named is not None and gpu.device == int(named[1])]
    return found[0] if found else max(reading.gpus, key=lambda gpu: gpu.allocated)


def _wanted_bytes(error: BaseException) -> int | None:
    """What an allocator was asked for.

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
    """What stands in the way beside the run's own tensors."""
    if sys.exc_info()[1] is not None:
        yield Finding(
            "pitfall",
            OOM,
            "the error is still being handled: its traceback keeps the tensors of the failed call alive",
            "leave the except block before memory_cleanup() or another try",
        )
    if idle := idle_in_pools():
        yield Finding(
            "option", OOM, f"the memory pools hold {size(idle)} that nobody has borrowed", "memory_cleanup()", idle
        )
    if gpu is None:
        if wanted is not None and wanted > reading.host_available:
            yield Finding(
                "broken",
                OOM,
                f"{size(wanted)} were asked for where {size(reading.host_available)} are available",
                f"make the call {wanted / max(1, reading.host_available):.1f} times smaller, or share it among ranks",
            )
        return
    idle = gpu.reserved - gpu.allocated
    if wanted is not None and wanted <= idle:
        yield Finding(
            "broken",
            OOM,
            f"{size(wanted)} were asked for; the allocator holds {size(idle)} free, but the largest piece has "
            f"{size(_largest_piece(gpu.device))}: memory is fragmented",
            less_fragmentation(),
            idle,
        )
    elif idle:
        yield Finding(
            "option",
            OOM,
            f"the allocator keeps {size(idle)} of {size(gpu.reserved)} for later",
            f"memory_cleanup() returns what is not in pieces; {less_fragmentation()}",
            idle,
        )
    if gpu.of_others > 0.05 * gpu.total:
        yield Finding(
            "option",
            OOM,
            f"other processes, and what CUDA's context takes, hold {size(gpu.of_others)} of {size(gpu.total)}",
            "nvidia-smi lists who: end what is not needed",
        )


def _largest_piece(device: int) -> int:
    blocks = [
        block for segment in torch.cuda.memory_snapshot() if segment["device"] == device for block in segment["blocks"]
    ]
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)


def _oom_options(there: list[LiveTensor], roles: dict[str, int], hidden: int) -> Iterator[Finding]:
    """What would make the run's own tensors smaller, as far as they show it."""
    activations = roles["activation"] + hidden
    wide = sum(x.bytes for x in there if x.role == "optimizer state" and x.dtype == "float32" and x.bytes >= 1 << 14)
    if wide:
        yield Finding(
            "option",
            OOM,
            f"the optimizer's state takes {size(wide)} in float32",
            "an 8-bit AdamW (bitsandbytes or torchao); on several ranks FSDP2 shards it",
            int(wide * (1 - _EIGHT_BIT_SHARE)),
        )
    if roles["gradient"]:
        yield Finding(
            "option",
            OOM,
            f"gradients take {size(roles['gradient'])} now",
            "optimizer.zero_grad(set_to_none=True) before the next forward pass, if they were used",
            roles["gradient"],
        )
    if activations:
        for module in live_objects(nn.Module):
            if getattr(module, "gradient_checkpointing", None) is False and module.training:
                yield Finding(
                    "option",
                    OOM,
                    f"activations take {size(activations)}, and {type(module).__name__} checkpoints none",
                    "model.gradient_checkpointing_enable(): only the layers' inputs stay",
                )
                break
    large = [x for x in there if x.role in ("activation", "tensor") and x.bytes >= _WORTH_SAYING * sum(roles.values())]
    batches = {x.shape[0] for x in large if len(x.shape) >= 3 and x.role == "activation"}
    if batches and max(batches) > 1:
        yield Finding(
            "option",
            OOM,
            f"activations take {size(activations)} for a batch of {max(batches)}",
            f"batches of {max(batches) // 2} and twice the gradient accumulation",
            activations // 2,
        )
    for x in large:
        if len(x.shape) >= 2 and x.shape[-1] == x.shape[-2] >= 1024:
            yield Finding(
                "option",
                OOM,
                f"a tensor of {list(x.shape)} takes {size(x.bytes)} and grows with the square of the length",
                "lengths or cu_seqlens instead of a dense mask, dilated instead of dense attention",
                x.bytes,
            )
    full = sum(x.bytes for x in large if x.dtype == "float32" and x.role == "activation")
    if full:
        device = there[0].device.partition(":")[0]
        yield Finding(
            "option",
            OOM,
            f"activations in float32 take {size(full)}",
            f'torch.autocast("{device}", dtype=torch.bfloat16) halves those of matrix products',
            full // 2,
        )
    if torch.cuda.device_count() > 1 and not torch.distributed.is_initialized():
        yield Finding(
            "option",
            OOM,
            f"one of {torch.cuda.device_count()} GPUs is in use",
            "torchrun with FSDP2 for the weights, RingDilatedAttention for the sequence",
        )
