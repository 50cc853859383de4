"""Compiling all kernels of a call side by side, before the first of them is launched.

With tensors on the device `meta`, a `Launch` compiles its kernel and launches nothing. So the passes of a call over
such tensors ask for exactly the kernels that the call will launch. Triton hands each to a thread. Only its front end,
which reads Python's syntax tree, holds Python's lock: its passes, LLVM, ptxas and the C compiler release it.
"""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from inspect import getclosurevars
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.log import log
from dilated_attention_pytorch.kernels.triton.launching import knows_triton

_LONG = 2.0  # seconds, after which the log tells what is being compiled

# Python 3.11 may fail where two threads make syntax trees at once, and two would not be faster than one.
_front_end = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_front_end._at_fork_reinit)


def without_memory(x: Tensor) -> Tensor:
    """A tensor on the device `meta` for which the same kernels are compiled."""
    start = x.data_ptr() % 16 // x.element_size()
    size = start + 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride()))
    return torch.empty(size, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), start)


def compiles_side_by_side() -> bool:
    """Whether this Triton lets other threads compile, in a way that is known here."""
    return knows_triton() and not environment.triton_interprets()


@functools.cache
def hash_triton() -> threading.Thread:
    """Begin to hash Triton's 400 MB: its first compilation does so, and Python imports the kernels meanwhile."""

    def run() -> None:
        # Without it, as under a Triton that has it elsewhere, the first compilation takes longer.
        with contextlib.suppress(ImportError, OSError):
            from triton.runtime.cache import triton_key

            triton_key()  # remembered by Triton; it releases Python's lock

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def compile_launches(passes: Callable[[], Any], *, ignore_errors: bool = False) -> list[tuple[str, float]]:
    """Compile what `passes` launches with tensors on the device `meta`: the names and seconds of the kernels.

    It leaves out what this process has compiled before, and loads what it finds in Triton's cache folder. An error that
    is ignored is raised by the launch.
    """
    if not compiles_side_by_side():
        began = time.perf_counter()
        passes()
        return [("all kernels, one after the other", time.perf_counter() - began)]
    # In a copy of the context, in which Triton looks for an object that compiles.
    return copy_context().run(_SideBySide().compile, passes, ignore_errors)


class _SideBySide:
    """What Triton asks to compile a kernel while `passes` run."""

    def __init__(self) -> None:
        self._jobs: dict[str, Any] = {}  # by Triton's keys: equal kernels are compiled once
        self._names: list[str] = []
        self._compiled: list[tuple[str, float]] = []

    def compile(self, passes: Callable[[], Any], ignore_errors: bool) -> list[tuple[str, float]]:
        from triton.runtime._async_compile import active_mode

        hash_triton().join()
        active_mode.set(self)
        with ThreadPoolExecutor() as self._threads:
            with _front_end:
                passes()
            if wait([job.future for job in self._jobs.values()], timeout=_LONG).not_done:
                names = ", ".join(f"{name} ({count})" for name, count in Counter(self._names).items())
                log.info("compiling for the first call of its kind, for more than %g seconds: %s", _LONG, names)
        for job in self._jobs.values():
            job.result(ignore_errors)
        return self._compiled

    def submit(self, key: str, compile_kernel: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
        """Called by Triton, which takes the result for a kernel that will be compiled."""
        from triton.runtime._async_compile import FutureKernel

        if key not in self._jobs:
            source = getclosurevars(compile_kernel).nonlocals["src"]
            self._names.append(source.name)
            self._jobs[key] = FutureKernel(finish, self._threads.submit(self._compile, source, compile_kernel))
        return self._jobs[key]

    def _compile(self, source: Any, compile_kernel: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        make_ir = source.make_ir

        def make_ir_alone(*arguments: Any) -> Any:
            with _front_end:
                return make_ir(*arguments)

        source.make_ir = make_ir_alone
        try:
            kernel = compile_kernel()
        finally:
            del source.make_ir
        # Triton 3.6 compiles a launcher in C; the first launch finds it in the cache folder.
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        seconds = time.perf_counter() - began
        log.debug("%s: compiled or loaded in %.3f s", source.name, seconds)
        self._compiled.append((source.name, seconds))
        return kernel
