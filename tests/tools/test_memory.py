"""Memory of the live process: what is read, what is given back, and sampling that ends cleanly."""

from __future__ import annotations

import gc
import json
import mmap
import threading
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    DilatedAttention,
    get_global_memory_pool,
    get_global_pattern_cache,
    memory_cleanup,
    monitor_memory_realtime,
)
from dilated_attention_pytorch.tools.memory import GpuMemory, MemoryMonitor, live_tensors, read_memory


def with_shape(*shape: int):
    return [x for x in live_tensors() if x.shape == shape]


def fresh_memory() -> mmap.mmap:
    """64 MiB from the system. A tensor may lie in memory that this process held before, which no reading shows."""
    held = mmap.mmap(-1, 64 << 20)
    held.write(bytes(64 << 20))
    return held


def test_a_reading_follows_what_the_process_holds() -> None:
    before = read_memory().host
    held = fresh_memory()
    after = read_memory()
    assert after.host - before > 0.9 * len(held)
    assert after.most_host >= after.host
    assert after.host_available > 0


def test_memory_of_others_is_what_is_neither_free_nor_ours() -> None:
    assert GpuMemory(0, 1, 4, 2, 10, 20).of_others == 6
    assert GpuMemory(0, 1, 15, 2, 10, 20).of_others == 0  # figures of two moments


def test_live_tensors_are_listed_once_with_their_role() -> None:
    layer = nn.Linear(127, 131, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    out = layer(torch.ones(113, 127))
    out.sum().backward()
    optimizer.step()
    roles = sorted(x.role for x in with_shape(131, 127))
    assert roles == ["gradient", "optimizer state", "optimizer state", "parameter"]
    assert [x.role for x in with_shape(113, 131)] == ["activation"]
    plain = torch.ones(109, 107)
    views = plain[1:], plain.T
    (found,) = with_shape(109, 107)
    assert (found.role, found.bytes, found.dtype, found.device) == ("tensor", plain.nbytes, "float32", "cpu")
    assert not with_shape(*views[0].shape)
    assert not with_shape(*views[1].shape)
    sizes = [x.bytes for x in live_tensors()]
    assert sizes == sorted(sizes, reverse=True)


def test_the_parts_of_an_8_bit_state_are_an_optimizers() -> None:
    optim = pytest.importorskip("torchao.optim", reason="needs the extra torchao")
    layer = nn.Linear(256, 384, bias=False)
    optimizer = optim.AdamW8bit(layer.parameters())
    layer(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    codes = [x for x in with_shape(384, 256) if x.dtype == "uint8"]
    assert [x.role for x in codes] == ["optimizer state"] * 2


def test_a_tensor_that_is_gone_is_not_listed() -> None:
    x = torch.ones(101, 103)
    assert len(with_shape(101, 103)) == 1
    del x
    assert not with_shape(101, 103)


def test_cleanup_frees_garbage_idle_workspaces_and_patterns_and_nothing_else() -> None:
    memory_cleanup()

    class Ring:
        pass

    gc.disable()
    try:
        ring = Ring()
        ring.me, ring.memory = ring, torch.ones(16 << 20)
        del ring
        pool = get_global_memory_pool()
        idle, live = (pool.checkout((8 << 20,), torch.float32, "cpu") for _ in range(2))
        idle.fill_(1)
        live.fill_(2)
        pool.give_back(idle)
        del idle
        attention = DilatedAttention([8], [1], use_pattern_cache=True)
        x = torch.randn(2, 16, 2, 4)
        lengths = torch.tensor([16, 7])
        expected = attention(x, x, x, seqlens=lengths)
        assert len(get_global_pattern_cache()) > 0
        freed = memory_cleanup()
    finally:
        gc.enable()
    assert freed > 0.8 * ((16 << 20) + (8 << 20)) * 4
    assert pool.get_stats()["total_allocated"] == pool.get_stats()["live_bytes"] >= 32 << 20
    assert (live == 2).all()
    pool.give_back(live)
    assert len(get_global_pattern_cache()) == 0
    torch.testing.assert_close(attention(x, x, x, seqlens=lengths), expected)


def test_monitoring_prints_a_line_and_samples_until_the_block_ends(tmp_path, capsys) -> None:
    lines, picture = tmp_path / "new" / "memory.jsonl", tmp_path / "memory.svg"
    threads = threading.active_count()
    with monitor_memory_realtime(0.005, out=lines, picture=picture) as monitor:
        assert capsys.readouterr().out.startswith("host: ")
        while len(monitor.readings) < 3:
            pass
        held = fresh_memory()
    assert threading.active_count() == threads
    assert capsys.readouterr().out == ""
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["host"] for one in written] == [one.host for one in monitor.readings]
    seconds = [one["seconds"] for one in written]
    assert seconds == sorted(seconds)
    assert monitor.readings[-1].host - monitor.readings[0].host > 0.9 * len(held)
    assert monitor.peak.host == max(one.host for one in monitor.readings)
    assert "host, at most" in "".join(ElementTree.fromstring(picture.read_text()).itertext())


def test_a_monitor_can_be_used_again_and_stops_when_the_block_fails() -> None:
    monitor = monitor_memory_realtime(0.01, quiet=True)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"), monitor:
            raise KeyError("mine")
        assert len(monitor.readings) >= 2
        assert not any(thread.name == "memory monitor" for thread in threading.enumerate())


def test_an_error_of_the_sampling_is_raised_at_the_end(tmp_path) -> None:
    monitor = MemoryMonitor(0.001, out=tmp_path / "memory.jsonl").start()
    monitor._out = tmp_path  # which cannot be written, like a full disk
    while monitor._failure is None:
        pass
    with pytest.raises(IsADirectoryError, match="directory"):
        monitor.stop()
    assert not any(thread.name == "memory monitor" for thread in threading.enumerate())


def test_what_a_monitor_cannot_do_is_refused(tmp_path) -> None:
    for interval in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="interval must be a finite number above 0, got"):
            monitor_memory_realtime(interval, quiet=True)
    with pytest.raises(ValueError, match=r"written as \.svg or \.png"):
        monitor_memory_realtime(picture=tmp_path / "memory.gif", quiet=True)
    monitor = MemoryMonitor()
    with pytest.raises(RuntimeError, match="not running"):
        monitor.stop()
    with pytest.raises(RuntimeError, match="no sample yet"):
        _ = monitor.peak
    with monitor, pytest.raises(RuntimeError, match="is already running: stop it first"):
        monitor.start()


def test_curves_of_gpus_are_named_by_device(monkeypatch) -> None:
    gpus = (GpuMemory(0, 1, 4, 2, 10, 20), GpuMemory(3, 5, 6, 7, 8, 9))
    monkeypatch.setattr("dilated_attention_pytorch.tools.memory._gpus", lambda: [0, 3])
    monkeypatch.setattr("dilated_attention_pytorch.tools.memory._read_gpu", lambda i: gpus[i > 0])
    monitor = MemoryMonitor(10.0)
    with monitor:
        pass
    curves = monitor.series()
    assert [y for _, y in curves["GPU 3 allocated"]] == [5, 5]
    assert [y for _, y in curves["GPU 0 reserved"]] == [4, 4]
    assert str(monitor.peak).startswith("GPU 0: allocated 1 B, reserved 4 B")
