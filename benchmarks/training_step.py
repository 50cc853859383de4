"""Measure one real training step, here or in a new process, which may run out of memory without harm to this one.

Started with `-m`, this module reads a case from standard input and prints the measurement as its last line.
"""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import wait_for
from benchmarks.peers import llama_like
from benchmarks.processes import environment
from benchmarks.suite import reason
from dilated_attention_pytorch.core.pool import get_global_memory_pool
from dilated_attention_pytorch.measuring import peak_resident
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.train.memory import MemoryOptions, loss, make_optimizer, make_scaler, prepare

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A training step of a model on one sequence of random tokens.

    `cap_bytes` limits the GPU memory of PyTorch's allocator. A step on `warm_tokens` that is not timed comes first: it
    compiles, and makes the state of the optimizer. `dense` replaces dilated attention by PyTorch's causal attention;
    `llama` trains Hugging Face's Llama of the same width, depth and heads. `profiled` adds steps under the profiler.
    """

    config: ModelConfig
    tokens: int
    options: MemoryOptions
    device: str = "cuda"
    cap_bytes: int | None = None
    warm_tokens: int = 65_536
    steps: int = 1
    dense: bool = False
    llama: bool = False
    profiled: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> StepCase:
        models = {"config": ModelConfig(**values["config"]), "options": MemoryOptions(**values["options"])}
        return cls(**(values | models))


class _Dense(DilatedAttention):
    """PyTorch's attention over the whole sequence."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **lengths: Any) -> Tensor:
        assert all(stated is None for stated in lengths.values())
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)


def measure_step(case: StepCase) -> dict[str, Any]:
    """Seconds of the fastest step, tokens per second, peak memory and loss; bytes are None without a GPU."""
    cuda = case.device == "cuda"
    if cuda and case.cap_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_bytes / total))
    torch.manual_seed(0)
    model, loss_of = _llama(case) if case.llama else _longnet(case)
    optimizer = make_optimizer(model.parameters(), case.options, lr=1e-4)
    scaler = make_scaler(case.options, case.device)

    def step(tokens: int) -> float:
        """Seconds of forward, backward and update."""
        batch = torch.randint(case.config.vocab_size, (1, tokens + 1), device=case.device)
        optimizer.zero_grad(set_to_none=True)
        wait_for(case.device)
        began = time.perf_counter()
        value = loss_of(batch)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        wait_for(case.device)
        seconds = time.perf_counter() - began
        losses.append(float(value.detach()))
        return seconds

    losses: list[float] = []
    step(min(case.tokens, case.warm_tokens))
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    held = None
    if cuda:
        _pin_host_memory(case)
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    seconds = min(step(case.tokens) for _ in range(case.steps))
    traced = _profile(lambda: step(case.tokens), case.profiled) if case.profiled and cuda else {}
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"the loss of {case.tokens:,} tokens is not finite: {losses}")
    return {
        "seconds": seconds,
        "tokens_per_second": case.tokens / seconds,
        "loss": losses[-1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "idle": None,
        "held_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "host_bytes": peak_resident(),
        "pinned_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak") if cuda else None,
        **traced,
    }


def _pin_host_memory(case: StepCase) -> None:
    """Give the pool the host memory that offloading takes, because pinning it takes long, and only once."""
    if not case.options.offload:
        return
    pool = get_global_memory_pool()
    pool.release_idle("cpu")
    shape = (case.tokens, case.config.d_model)
    dtype = torch.bfloat16 if case.options.parameters == "bf16" else torch.float32
    count = -(-case.config.num_layers // case.options.layers_per_checkpoint)
    for buffer in [pool.checkout(shape, dtype, "cpu", pinned=True) for _ in range(count)]:
        pool.give_back(buffer)


def _longnet(case: StepCase) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    with torch.device(case.device):
        model = LongNetLM(case.config)
    if case.dense:
        for part in model.modules():
            if isinstance(part, MultiheadDilatedAttention):
                part.attention = _Dense(part.segment_lengths, part.dilation_rates)
    prepare(model, case.options)
    return model, lambda batch: loss(model, batch[:, :-1], batch[:, 1:], case.options)


def _llama(case: StepCase) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A Llama as its users train it, with PyTorch's attention and its own loss."""
    from transformers import LlamaForCausalLM

    options = case.options
    with torch.device(case.device):
        model = LlamaForCausalLM(llama_like(case.config, case.tokens, use_cache=False))
    model.train()
    if options.checkpointing != "none":
        model.gradient_checkpointing_enable()
    if options.compile:
        model.compile()

    def loss_of(batch: Tensor) -> Tensor:
        with options.autocast(case.device):
            return model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss

    return model, loss_of


def _profile(step: Callable[[], float], steps: int) -> dict[str, Any]:
    """The share of some steps in which nothing runs on the GPU, and its busiest kernels in milliseconds per step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds = sum(step() for _ in range(steps))
    events = [event for event in found.events() if event.device_type.name == "CUDA"]
    busy, until = 0.0, 0.0
    kernels: dict[str, float] = {}
    for start, end, name in sorted((x.time_range.start, x.time_range.end, x.name) for x in events):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        kernels[name] = kernels.get(name, 0.0) + (end - start) / 1e3 / steps
    top = sorted(kernels.items(), key=lambda one: one[1], reverse=True)[:25]
    return {"idle": max(0.0, 1.0 - busy / 1e6 / seconds), "kernels": dict(top)}


def attempt_step(case: StepCase) -> dict[str, Any]:
    """The result of `measure_step`, or `failed` with the reason."""
    try:
        return measure_step(case)
    except torch.OutOfMemoryError:
        return {"failed": OUT_OF_MEMORY}
    except Exception as error:  # a package that is missing or broken must not cost the rest of the run
        return {"failed": reason(error)}


def step_in_a_process(case: StepCase, timeout: float = 240.0) -> dict[str, Any]:
    """`attempt_step` in a new process, whose allocator can let segments grow."""
    variables = environment()
    variables.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(case)), env=variables, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no end within {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = (done.stderr.strip() or "no message").splitlines()[-1]
    return {"failed": f"the process ended with {done.returncode}: {said}"}


if __name__ == "__main__":
    print(json.dumps(attempt_step(StepCase.of(json.load(sys.stdin)))), flush=True)
