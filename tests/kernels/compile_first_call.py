"""Run a training call as on a GPU of compute capability 8.0 or 9.0, with Triton's compiler but without a GPU.

An argument is a case, `CAPABILITY,DTYPE,HEAD_DIM`. Prints which kernels the call compiles before its first launch, each
with how often, how many it compiles later, and its launches. Compilations begin when all of them have been asked for,
so they would wait for good if they were not run side by side. On 9.0, where kernels cannot take tensors of a CPU, it
only asks for them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import torch
import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SIDE_BY_SIDE = {"8": 7, "9": 5}  # kernels of a causal training call of three branches
events: list[tuple[str, str]] = []


class Launcher:
    """Stands for what Triton launches a kernel by."""

    def __init__(self, source, metadata) -> None:
        self.name = source.name

    def __call__(self, *arguments) -> None:
        events.append(("launch", self.name))


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


def main(capability: str, dtype: str, head_dim: str) -> None:
    driver.set_active(Driver(int(capability) * 10))
    torch.version.cuda = "12.8"
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (int(capability), 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    os.cpu_count = lambda: 16
    together, compile_kernel = threading.Barrier(SIDE_BY_SIDE[capability]), triton.compiler.compile

    def compile_beside_others(source, **settings):
        events.append(("compile", source.name))
        together.wait(timeout=60)
        assert capability == "8", "this kernel is not launched"
        return compile_kernel(source, **settings)

    triton.compiler.compile = compile_beside_others
    from dilated_attention_pytorch.core.call import Call, Inputs, Saved
    from dilated_attention_pytorch.kernels.triton.engine import Triton

    call = Call.of([256, 512, 1024], [1, 2, 4], is_causal=True)

    def inputs(tokens: int, device: str) -> Inputs:
        shape = (1, tokens, 4, int(head_dim))
        q, k, v = (torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for _ in range(3))
        return Inputs(q.requires_grad_(), k, v)

    @torch.no_grad()  # as within an autograd function
    def train(inputs: Inputs) -> None:
        out, lse = Triton().partial(call, inputs)
        Triton().gradients(call, Saved(inputs, out, lse), torch.ones_like(out), None)

    if capability == "9":
        Triton().compile(call, inputs(2048, "meta"), backward=True)
    else:
        train(inputs(2048, "cpu"))
        train(inputs(1536, "cpu"))  # other numbers need no other kernels
    first = next((i for i, (what, _) in enumerate(events) if what == "launch"), len(events))
    print(*(f"{name}:{count}" for (_, name), count in sorted(Counter(events[:first]).items())))
    print("later", sum(what == "compile" for what, _ in events[first:]))
    print(*(name for what, name in events if what == "launch"))


if __name__ == "__main__":
    (case,) = sys.argv[1:]
    print(case)
    main(*case.split(","))
