"""Launching a kernel again without what Triton's front end does every time.

`kernel[grid](...)` binds and classifies every argument in Python to find the compiled kernel, which for a short
sequence takes longer than the GPU does. A `Launch` fixes everything but the tensors, so only the first launch needs
that: it compiles, and returns the compiled kernel; later ones hand their pointers to its launcher.

What is compiled depends on the arguments' types, on integers being 1 or multiples of 16, and on pointers being
multiples of 16. Types and integers are part of whatever a `Launch` is remembered by; a launch with a pointer that is no
such multiple takes the front end, as does every launch under a Triton whose compiled kernels are not known here.
"""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.core.log import log

_KNOWN_TRITON = ("3.6.", "3.7.")
_MOST_ADDRESSES = 1024  # whose arguments a launch remembers

_address = Tensor.data_ptr

# Makes the descriptors of a tensor: always as many, and equal but for the address.
View = Callable[[Tensor], Sequence[Any]]


class Launch:
    """A launch whose arguments are always the same but for its tensors, which come first.

    The first of the tensors may be passed as descriptors, by `views`. `numbers` follow the tensors, and the rest of the
    kernel's arguments, its constants, are in `settings` with the compiler's options. A `Launch` serves one device,
    which must be the current one, and tensors of one set of dtypes and, where they are viewed, shapes and strides.
    """

    estimated_bytes = 1 << 12  # for the table of plans

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[float, ...],
        settings: dict[str, Any],
        views: tuple[View, ...] = (),
    ) -> None:
        self._kernel = kernel
        self._programs = programs
        self._numbers = numbers
        self._settings = settings
        self._views = views
        self._compiled: _Compiled | None = None
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._launched = False
        self._may_compile = knows_triton()

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream; with tensors on the device `meta` only compile, for the current GPU."""
        pointers = tuple(map(_address, tensors))
        known = self._known.get(pointers)
        if known is not None and not _watched():
            launch, before, stream, after = known
            launch(*before, stream(), *after)
            return
        aligned = not functools.reduce(operator.or_, pointers) % 16
        if self._compiled is not None and aligned and not _watched():
            if len(self._known) >= _MOST_ADDRESSES:
                self._known.clear()
            self._known[pointers] = self._compiled.arguments(tensors, pointers)
            return self(*tensors)
        descriptors = [view(x) for view, x in zip(self._views, tensors)]
        first = [*(one for some in descriptors for one in some), *tensors[len(descriptors) :], *self._numbers]
        if tensors[0].is_meta:
            self._kernel.warmup(*first, grid=(self._programs,), **self._settings)
            return
        began = time.perf_counter()
        kernel = self._kernel[(self._programs,)](*first, **self._settings)
        if not self._launched:
            self._launched, seconds = True, time.perf_counter() - began
            log.debug("%s: compiled or loaded, and launched, in %.3f s", _name(self._kernel), seconds)
        if self._may_compile and aligned and kernel is not None:  # the interpreter returns nothing
            self._may_compile = False
            constants = (self._settings[name] for name in self._kernel.arg_names[len(first) :])
            views = list(zip(self._views, map(len, descriptors)))
            # Under a Triton with other internals, its front end goes on launching.
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                self._compiled = _Compiled(kernel, self._programs, views, (*self._numbers, *constants))


def knows_triton() -> bool:
    """Whether the internals of this Triton version are known here."""
    return triton.__version__.startswith(_KNOWN_TRITON) and torch.version.cuda is not None


def is_elsewhere(x: Tensor) -> bool:
    """Whether another GPU must become the current one, on which Triton launches."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def device_of(x: Tensor) -> torch.device:
    """The device of a tensor; one on the device `meta` stands for a tensor on the current GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if x.is_meta else x.device


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", type(kernel).__name__)


class _Compiled:
    """A compiled kernel, and what the function that launches it takes around the pointers.

    Triton's launcher, in Python, makes that function's arguments from its own. They are made once for every set of
    addresses, by letting it call something that notes them.
    """

    def __init__(self, kernel: Any, programs: int, views: list[tuple[View, int]], rest: tuple[Any, ...]) -> None:
        driver = triton.runtime.driver.active
        self._stream = functools.partial(driver.get_current_stream, driver.get_current_device())
        self._programs = programs
        # Function, metadata, and no hooks: a kernel that is watched takes the front end.
        self._head = (kernel.function, kernel.packed_metadata, None, None, None)
        self._rest = rest
        if kernel.run.global_scratch_size or kernel.run.profile_scratch_size:
            raise TypeError("such a kernel gets memory of its own at every launch")
        self._launcher, self._launch, self._views = kernel.run, kernel.run.launch, []
        if views:
            self._launch, metadata = _below_descriptors(kernel.run)
            for view, count in views:
                self._views.append((view, metadata[:count]))
                metadata = metadata[count:]

    def arguments(self, tensors: tuple[Tensor, ...], pointers: tuple[int, ...]) -> tuple[Any, ...]:
        """The launching function, what it takes before the stream, what returns the stream, and what comes after."""
        described = [_expanded(view(x), metadata) for (view, metadata), x in zip(self._views, tensors)]
        parts = [part for descriptors in described for part in descriptors]
        launcher, noted, stream = copy.copy(self._launcher), [], object()  # of this call: other threads launch, too
        launcher.launch = lambda *arguments: noted.append(arguments)
        launcher(self._programs, 1, 1, stream, *self._head, *parts, *pointers[len(described) :], *self._rest)
        (arguments,) = noted
        at = next(i for i, argument in enumerate(arguments) if argument is stream)
        return self._launch, arguments[:at], self._stream, arguments[at + 1 :]


def _expanded(descriptors: Sequence[Any], metadata: list[Any]) -> list[Any]:
    """What the launcher takes for descriptors: each one's map for the copy engine, its shape and its strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return [part for one, meta in zip(descriptors, metadata) for part in make_tensordesc_arg(one, meta)]


def _below_descriptors(launcher: Any) -> tuple[Any, list[Any]]:
    """The function that Triton's launcher calls with expanded descriptors, and what it expands them by."""
    launch = launcher.launch
    enclosed = dict(zip(launch.__code__.co_freevars, launch.__closure__))
    return enclosed["launcher"].cell_contents, enclosed["tensordesc_meta"].cell_contents


def _watched() -> bool:
    """Whether a profiler has asked to be called around launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
