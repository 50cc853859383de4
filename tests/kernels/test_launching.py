"""A Launch gives the compiled kernel's launcher what the front end would, and uses the front end where it must."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from dilated_attention_pytorch.functional import dilated_attention  # noqa: E402
from dilated_attention_pytorch.kernels.triton import launching  # noqa: E402
from dilated_attention_pytorch.kernels.triton.launching import Launch  # noqa: E402


class Launcher:
    """Stands for Triton's: makes the arguments of a function, `launch`, and calls it."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launched = []
        self.launch = lambda *arguments: self.launched.append(arguments)

    def __call__(self, x, y, z, stream, function, *arguments) -> None:
        self.launch(x, y, z, stream, function, "cooperative", *arguments)


class Kernel:
    """Stands for a JIT function and for what it compiles to; notes how it was launched."""

    arg_names = ("X", "Y", "n", "D", "BLOCK")

    def __init__(self) -> None:
        self.front_end = []
        self.run = Launcher()
        self.function, self.packed_metadata = "function", "metadata"

    def __getitem__(self, grid):
        def launch(*arguments, **settings):
            self.front_end.append((grid, arguments, settings))
            return self

        return launch

    @property
    def direct(self) -> list[tuple]:
        return self.run.launched


@pytest.fixture
def hooks(monkeypatch):
    """As on a GPU with a Triton that is known, on stream 7 of device 0."""
    chains = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    known = SimpleNamespace(
        __version__="3.6.0",
        knobs=SimpleNamespace(runtime=chains),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)),
    )
    monkeypatch.setattr(launching, "triton", known)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return known


def launch_of(kernel: Kernel) -> Launch:
    return Launch(kernel, 3, (5,), {"BLOCK": 64, "D": 16, "num_warps": 4})


def test_later_launches_pass_pointers_numbers_and_constants_in_the_kernels_order(hooks) -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        launch(x, y)
    assert kernel.front_end == [((3,), (x, y, 5), {"BLOCK": 64, "D": 16, "num_warps": 4})]
    pointers = (x.data_ptr(), y.data_ptr())
    head = (3, 1, 1, 7, "function", "cooperative", "metadata", None, None, None)
    assert kernel.direct == [(*head, *pointers, 5, 16, 64)] * 2


def test_pointers_that_were_not_compiled_for_take_the_front_end(hooks) -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    x = torch.zeros(64)
    launch(x[1:], x)  # must not be remembered as what aligned pointers need
    launch(x, x)
    launch(x[1:], x)
    assert len(kernel.front_end) == 3
    launch(x, x)
    assert len(kernel.direct) == 1


def test_threads_that_launch_at_once_pass_their_own_arguments(hooks) -> None:
    both = Barrier(2)

    class Meeting(Launcher):
        """Makes arguments while the other thread does."""

        def __call__(self, *arguments) -> None:
            both.wait(timeout=30)
            super().__call__(*arguments)
            both.wait(timeout=30)

    kernel = Kernel()
    kernel.run = Meeting()
    launch = launch_of(kernel)
    x = torch.zeros(64)
    launch(x, x)  # by the front end
    tensors = [torch.zeros(64) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda one: launch(one, x), tensors))
    assert sorted(arguments[7 + 3] for arguments in kernel.direct) == sorted(one.data_ptr() for one in tensors)


def test_profilers_hooks_take_the_front_end(hooks) -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    x = torch.zeros(64)
    launch(x, x)
    hooks.knobs.runtime.launch_enter_hook.calls.append(print)
    launch(x, x)
    assert (len(kernel.front_end), len(kernel.direct)) == (2, 0)


@pytest.mark.parametrize("unknown", ["version", "inside", "memory", "vendor"])
def test_an_unknown_triton_takes_the_front_end(hooks, unknown, monkeypatch) -> None:
    kernel = Kernel()
    if unknown == "version":
        hooks.__version__ = "4.0.0"
    elif unknown == "inside":
        del kernel.packed_metadata
    elif unknown == "memory":
        kernel.run.global_scratch_size = 128
    else:
        monkeypatch.setattr(torch.version, "cuda", None)
    launch = launch_of(kernel)
    x = torch.zeros(64)
    for _ in range(3):
        launch(x, x)
    assert (len(kernel.front_end), len(kernel.direct)) == (3, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU launches are not interpreted")
def test_a_call_with_gradients_takes_few_frames_to_its_launches(monkeypatch) -> None:
    """One more frame, within a launch, reaches the compiled kernel."""
    walks = []
    launch = Launch.__call__

    def noted(self, *tensors):
        names = [frame.name for frame in traceback.extract_stack()][:-1]
        start = max(i for i, name in enumerate(names) if name in ("dilated_attention", "backward"))
        walks.append([*names[start:], "launch"])
        return launch(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", noted)
    q, k, v = torch.randn(3, 1, 16, 2, 16, requires_grad=True).unbind(0)
    dilated_attention(q, k, v, [16], [1], backend="triton").sum().backward()
    assert {walk[0] for walk in walks} == {"dilated_attention", "backward"}
    assert max(map(len, walks)) <= 7, walks
