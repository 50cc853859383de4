"""Diagnoses answer with what is measured in this process: what is not there is not said."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    LongNetLM,
    diagnose_oom_error,
    diagnose_performance_issues,
    get_global_memory_pool,
    memory_cleanup,
)
from dilated_attention_pytorch.tools import diagnose, memory
from dilated_attention_pytorch.tools.memory import GpuMemory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_of_other_tests():
    """What is alive before a test is not walked, and so not counted."""
    memory_cleanup()
    gc.freeze()


@pytest.fixture
def quick(monkeypatch) -> None:
    """No product is timed: half a second each."""
    monkeypatch.setattr(diagnose, "thread_rates", lambda threads: {threads: 1.0})


def said(report, word: str):
    return [one for one in report.findings if word in one.measured]


def small_model() -> LongNetLM:
    return LongNetLM(d_model=64, num_heads=4, num_layers=2, segment_lengths=(16, 64), dilation_rates=(1, 4))


def run_out_of_memory() -> RuntimeError:
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


def on_a_gpu(monkeypatch, gpu: GpuMemory, **stats: int) -> None:
    """Show the diagnoses a GPU in this state."""
    monkeypatch.setattr(memory, "_gpus", lambda: [gpu.device])
    monkeypatch.setattr(memory, "_read_gpu", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: stats)


def test_an_oom_diagnosis_counts_what_the_process_holds(capsys) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    out = model(torch.randint(256, (4, 64)))
    out.square().mean().backward()
    optimizer.step()
    report = diagnose_oom_error()
    assert capsys.readouterr().out.strip() == str(report).strip()
    facts = report.facts["live tensors on the host"]
    weights = sum(p.nbytes for p in model.parameters())
    assert facts["parameter bytes"] == weights
    assert facts["gradient bytes"] == weights
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert facts["optimizer state bytes"] == 2 * weights + steps
    (state,) = said(report, "the optimizer's state takes")
    assert 0.5 * facts["optimizer state bytes"] < state.saves_bytes < facts["optimizer state bytes"]
    (gradients,) = said(report, "gradients take")
    assert gradients.saves_bytes == facts["gradient bytes"]
    (batch,) = said(report, "for a batch of 4")
    assert "batches of 2" in batch.way_out
    assert said(report, "LongNetLM checkpoints none")
    savings = [one.saves_bytes or 0 for one in report.findings]
    assert savings == sorted(savings, reverse=True)


def test_what_is_switched_on_already_is_not_proposed() -> None:
    model = small_model()
    model.gradient_checkpointing_enable()
    out = model(torch.randint(256, (1, 64)))
    report = diagnose_oom_error(quiet=True)
    assert out.grad_fn is not None
    for absent in ("checkpoints none", "for a batch of", "gradients take", "optimizer's state"):
        assert not said(report, absent)


def test_the_error_that_is_handled_is_read() -> None:
    error = run_out_of_memory()
    try:
        raise error
    except RuntimeError:
        report = diagnose_oom_error(quiet=True)
    assert report.facts["error"]["asked for bytes"] == 1 << 60
    assert report.findings[0].level == "broken"
    assert report.is_broken
    assert said(report, "still being handled")
    later = diagnose_oom_error(error, quiet=True)
    assert later.facts["error"] == report.facts["error"]
    assert not said(later, "still being handled")
    assert "error" not in diagnose_oom_error(quiet=True).facts


def test_idle_workspaces_are_found_and_memory_cleanup_frees_them() -> None:
    pool = get_global_memory_pool()
    pool.give_back(pool.checkout((64 << 20,), torch.uint8, "cpu"))
    (idle,) = said(diagnose_oom_error(quiet=True), "that is not in use")
    assert idle.saves_bytes >= 64 << 20
    memory_cleanup()
    assert not said(diagnose_oom_error(quiet=True), "that is not in use")


def test_a_dense_mask_is_named() -> None:
    mask = torch.zeros(1, 2048, 2048)
    (found,) = said(diagnose_oom_error(quiet=True), "[1, 2048, 2048]")
    assert found.saves_bytes == mask.nbytes


def test_fragmentation_of_a_gpu_is_told_from_plain_lack(monkeypatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of ...")
    on_a_gpu(monkeypatch, GpuMemory(1, 60 * GIB, 76 * GIB, 70 * GIB, 1 * GIB, 80 * GIB), num_alloc_retries=3)
    pieces = [{"state": "inactive", "size": GIB}, {"state": "active_allocated", "size": 9 * GIB}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": 1, "blocks": pieces}])
    report = diagnose_oom_error(error, quiet=True)
    (cause,) = said(report, "memory is fragmented")
    assert cause is report.findings[0]
    assert (
        "2.0 GiB was requested; the allocator holds 16.0 GiB free, but the largest piece has 1.0 GiB" in cause.measured
    )
    assert "expandable_segments:True" in cause.way_out
    facts = report.facts["GPU 1 memory"]
    assert facts["other processes and contexts, bytes"] == 3 * GIB
    assert facts["times the allocator had to flush its cache"] == 3
    assert report.facts["live tensors on GPU 1"]["held by autograd's graph and libraries, bytes"] == 60 * GIB
    on_a_gpu(monkeypatch, GpuMemory(1, 60 * GIB, 61 * GIB, 61 * GIB, 1 * GIB, 80 * GIB))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    report = diagnose_oom_error(error, quiet=True)
    assert not said(report, "memory is fragmented")
    assert said(report, "hold 18.0 GiB of 80.0 GiB")
    assert "is on already" in said(report, "keeps 1.0 GiB of 61.0 GiB")[0].way_out


def test_another_error_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an out-of-memory error, got KeyError"):
        diagnose_oom_error(KeyError("x"))
    with pytest.raises(ValueError, match="of at least 1, got 0"):
        diagnose_oom_error(largest=0)


def test_performance_is_told_from_a_step_that_is_profiled(capsys) -> None:
    layer, calls = nn.Linear(64, 64), []

    def step() -> None:
        calls.append(1)
        layer(torch.randn(256, 64)).sum().backward()

    report = diagnose_performance_issues(step)
    assert len(calls) == 2
    assert capsys.readouterr().out.strip() == str(report).strip()
    assert float(report.facts["step"]["milliseconds"]) > 0
    assert any("aten::" in line for line in report.facts["step"]["most time"])
    assert float(report.facts["numbers"]["norm of all live gradients"]) > 0
    assert not said(report, "not finite")
    json.dumps(report.to_dict())


def test_settings_for_debugging_are_found(quick, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not said(diagnose_performance_issues(quiet=True), "anomaly")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with torch.autograd.set_detect_anomaly(True):
        report = diagnose_performance_issues(quiet=True)
    assert said(report, "anomaly detection is on")
    assert said(report, "CUDA_LAUNCH_BLOCKING=1")
    assert not said(report, "TRITON_INTERPRET")


def test_tensors_without_memory_are_passed_over(quick) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = nn.Linear(97, 89)  # as torch.compile leaves them alive
    ghost = nn.Linear(97, 89, device="meta")
    assert not said(diagnose_performance_issues(quiet=True), "not finite")
    assert not any(
        "89 x 97" in line for line in diagnose_oom_error(largest=10**6, quiet=True).facts["largest"]["live tensors"]
    )
    assert fake.weight.shape == ghost.weight.shape


def test_values_that_are_not_finite_are_found(quick) -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    layer.bias.grad = torch.tensor([torch.inf, 0, 0, 0])
    report = diagnose_performance_issues(quiet=True)
    assert report.is_broken
    assert [one.topic for one in said(report, "not finite")] == ["Numerical Instability"] * 2
    half = nn.Linear(4, 4).half()
    assert said(diagnose_performance_issues(quiet=True), "are float16")
    assert half.weight.dtype == torch.float16


def test_threads_that_do_not_fit_the_cores_are_timed_and_restored(monkeypatch) -> None:
    from dilated_attention_pytorch import measuring

    threads = torch.get_num_threads()
    monkeypatch.setattr(measuring, "usable_cores", lambda: threads + 3.5)
    fastest = threads + 3

    def timing(run, device, seconds):
        ms = 1.0 if torch.get_num_threads() == fastest else 2.0
        return measuring.Timing(ms, ms, ms, ms, None)

    monkeypatch.setattr(measuring, "measure", timing)
    (found,) = said(diagnose_performance_issues(quiet=True), "PyTorch uses")
    assert f"torch.set_num_threads({fastest})" in found.way_out
    assert torch.get_num_threads() == threads
    with measuring.keeping_threads():  # fewer may be faster too
        torch.set_num_threads(fastest)
        fastest = 1
        (found,) = said(diagnose_performance_issues(quiet=True), "PyTorch uses")
    assert "torch.set_num_threads(1)" in found.way_out


def test_loaders_without_workers_are_counted(quick) -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    assert said(diagnose_performance_issues(quiet=True), "(num_workers=0)")
    del loader


def test_flushes_of_the_allocator_are_told(quick, monkeypatch) -> None:
    on_a_gpu(monkeypatch, GpuMemory(0, 50 * GIB, 76 * GIB, 70 * GIB, 1 * GIB, 80 * GIB), num_alloc_retries=7)
    report = diagnose_performance_issues(quiet=True)
    assert [one.topic for one in said(report, "flush its cache 7 times")] == ["Memory Fragmentation"]
    assert said(report, "26.0 GiB of 76.0 GiB reserved are not in use")
