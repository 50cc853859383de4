"""Train as on a GPU of compute capability 8.0 or 9.0, with Triton's compiler but without a GPU.

An argument is a case, `CAPABILITY,KIND,KERNELS`; the kind is `call`, or what to warm up for: `whole`, `lengths`,
`dropout`, `tiles` or `heads`, where two share a key/value head. Prints the kernels that are compiled before the first
launch, each with how often, how many are compiled later, and the launches. Compilations wait until so many KERNELS are
being compiled at once. Only those of `call` are real. The kernels of 9.0 are not launched: they take no tensors of a
CPU.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lengths": {"lengths": True},
    "dropout": {"dropout_p": 0.1},
    "heads": {"kv_heads": 2},
}
events: list[tuple[str, str]] = []


class Launcher:
    """Stands for what Triton launches a kernel by."""

    def __init__(self, source, metadata) -> None:
        self.name = source.name

    def __call__(self, *arguments) -> None:
        events.append(("launch", self.name))


class Kernel:
    """Stands for a compiled kernel."""

    metadata = packed_metadata = function = None

    def __init__(self, source) -> None:
        self.src = source
        self.run = Launcher(source, None)

    def launch_metadata(self, *arguments) -> None: ...


class Driver:
    """Stands for Triton's driver of a GPU."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232_448},
        load_binary=lambda name, *rest: (name, name, 128, 0, 1024),
    )

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def main(capability: str, kind: str, kernels: str) -> None:
    driver.set_active(Driver(int(capability) * 10))
    torch.version.cuda = "12.8"
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.get_device_capability = lambda device=None: (int(capability), 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    os.cpu_count = lambda: 16
    together, compile_kernel = threading.Barrier(int(kernels)), triton.compiler.compile

    def compile_beside_others(source, **settings):
        events.append(("compile", source.name))
        together.wait(timeout=60)
        return compile_kernel(source, **settings) if kind == "call" else Kernel(source)

    triton.compiler.compile = compile_beside_others
    from dilated_attention_pytorch import SparsePatternConfig, warm_up
    from dilated_attention_pytorch.core.call import Call, Inputs, Saved
    from dilated_attention_pytorch.kernels.triton.engine import Triton

    # Of no multiples of a tile's rows, which would be computed in one launch.
    pattern = {"segment_lengths": [250, 500, 1000], "dilation_rates": [1, 2, 4], "is_causal": True}
    head_dim, dtype = (64, torch.bfloat16) if capability == "9" else (16, torch.float16)

    @torch.no_grad()  # as within an autograd function
    def train(tokens: int) -> None:
        q, k, v = (torch.zeros(1, tokens, 4, head_dim, dtype=dtype) for _ in range(3))
        inputs, call = Inputs(q.requires_grad_(), k, v), Call.of(**pattern)
        out, lse = Triton().partial(call, inputs)
        Triton().gradients(call, Saved(inputs, out, lse), torch.ones_like(out), None)

    if kind != "call":
        KINDS["tiles"] = {"sparse_config": SparsePatternConfig("content_adaptive", sparsity_ratio=0.5, block_size=128)}
        kinds = {"dtype": dtype, "device": "cuda", **KINDS[kind]}
        warmed = warm_up((1, 2048, 4, head_dim), **pattern, **kinds)
        assert sorted(name for name, _ in warmed) == sorted(name for _, name in events)
        assert warm_up((1, 4096, 4, head_dim), **pattern, **kinds) == []  # other numbers need no other kernels
    if capability == "8":
        train(2048)
        train(1536)
    first = next((i for i, (what, _) in enumerate(events) if what == "launch"), len(events))
    print(*(f"{name}:{count}" for (_, name), count in sorted(Counter(events[:first]).items())))
    print("later", sum(what == "compile" for what, _ in events[first:]))
    print(*(name for what, name in events if what == "launch"))


if __name__ == "__main__":
    (case,) = sys.argv[1:]
    print(case)
    main(*case.split(","))
