"""All kernels of a call are compiled before the first launch: once each, side by side."""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.runtime._async_compile", reason="needs a Triton that compiles side by side: 3.6 or newer")

from triton.runtime import _async_compile

from dilated_attention_pytorch.kernels.triton import compiling
from dilated_attention_pytorch.kernels.triton.compiling import compile_launches, without_memory


class Source:
    """Stands for the source of a kernel; notes threads in the front end at the same time."""

    inside = most_inside = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def make_ir(self, target: str) -> str:
        Source.inside += 1
        Source.most_inside = max(Source.most_inside, Source.inside)
        threading.Event().wait(0.01)
        Source.inside -= 1
        return f"{self.name} for {target}"


@pytest.fixture
def launchers(monkeypatch):
    """As on a machine with 16 cores; the kernels for which a launcher was made."""
    made = []
    driver = SimpleNamespace(launcher_cls=lambda source, metadata: made.append(source.name))
    fake = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)))
    monkeypatch.setattr(compiling, "triton", fake)
    monkeypatch.setattr(compiling, "compiles_side_by_side", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    Source.most_inside = 0
    return made


def asks(name: str, finished: dict, work=lambda: None):
    """Ask for a kernel as Triton does."""
    src = Source(name)

    def compile_kernel():
        ir = src.make_ir("90")
        work()
        return SimpleNamespace(src=src, metadata=ir)

    mode = _async_compile.active_mode.get()
    return mode.submit(f"key of {name}", compile_kernel, lambda kernel: finished.update({name: kernel.metadata}))


def test_kernels_are_compiled_side_by_side_and_once_each_with_one_front_end_at_a_time(launchers) -> None:
    finished, together = {}, threading.Barrier(3)

    def passes() -> None:
        for name in ("forward", "delta", "forward", "backward"):
            asks(name, finished, lambda: together.wait(timeout=60))
        assert finished == {}  # nothing waits for a compilation before all were asked for

    found = compile_launches(passes)
    assert sorted(name for name, _ in found) == ["backward", "delta", "forward"]
    assert all(seconds > 0 for _, seconds in found)
    assert finished == {name: f"{name} for 90" for name in ("forward", "delta", "backward")}
    assert sorted(launchers) == ["backward", "delta", "forward"]
    assert Source.most_inside == 1
    assert _async_compile.active_mode.get() is None


def test_an_error_is_raised_or_left_to_the_launch(launchers) -> None:
    finished, asked = {}, []

    def fail() -> None:
        raise RuntimeError("no such instruction")

    def passes() -> None:
        asked.extend([asks("good", finished), asks("bad", finished, fail)])

    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_launches(passes)
    asked.clear()
    found = compile_launches(passes, ignore_errors=True)
    assert [name for name, _ in found] == ["good"]
    assert [*finished] == ["good"]
    with pytest.raises(RuntimeError, match="no such instruction"):
        asked[1].result()


def test_an_error_of_a_pass_leaves_nothing_behind(launchers) -> None:
    def passes() -> None:
        asks("good", {})
        raise ValueError("a shape that cannot run")

    with pytest.raises(ValueError, match="cannot run"):
        compile_launches(passes)
    assert _async_compile.active_mode.get() is None
    assert compile_launches(lambda: asks("good", {})) != []


def test_whoever_compiles_side_by_side_already_is_not_disturbed(launchers) -> None:
    theirs = object()

    def within() -> None:
        _async_compile.active_mode.set(theirs)
        compile_launches(lambda: asks("good", {}))
        assert _async_compile.active_mode.get() is theirs

    contextvars.copy_context().run(within)


@pytest.mark.parametrize("long", [0.0, 60.0])
def test_the_log_tells_once_what_takes_long_to_compile(launchers, long, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compiling, "_LONG", long)
    go = threading.Event()

    class Tells(logging.Handler):
        def emit(self, record) -> None:
            go.set()

    handler = Tells(logging.INFO)
    logging.getLogger("dilated_attention_pytorch").addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "dilated_attention_pytorch"):
            names = ("forward_kernel", "dq_kernel")
            compile_launches(lambda: [asks(name, {}, lambda: long or go.wait(timeout=60)) for name in names])
    finally:
        logging.getLogger("dilated_attention_pytorch").removeHandler(handler)
    told = ["compiling for the first call of its kind, for more than 0 seconds: forward_kernel (1), dq_kernel (1)"]
    assert caplog.messages == ([] if long else told)


def test_under_an_unknown_triton_kernels_are_compiled_one_after_the_other() -> None:
    ran = []
    [(name, seconds)] = compile_launches(lambda: ran.append(_async_compile.active_mode.get()))
    assert ran == [None]
    assert "one after the other" in name
    assert seconds > 0


def test_a_child_that_is_forked_while_a_front_end_runs_can_compile(launchers) -> None:
    with compiling._front_end:
        child = os.fork()
        if child == 0:
            os._exit(0 if compile_launches(lambda: asks("good", {})) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_tensor_without_memory_is_laid_out_and_aligned_as_the_tensor() -> None:
    x = torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16)
    for one in (x, x[:, 1:], x.transpose(1, 2), x[..., :4], x.flatten()[3:], x[:1, :1].expand(4, 5, 3, 8)):
        found = without_memory(one)
        assert found.is_meta
        assert (found.shape, found.stride(), found.dtype) == (one.shape, one.stride(), one.dtype)
        assert found.data_ptr() % 16 == one.data_ptr() % 16
