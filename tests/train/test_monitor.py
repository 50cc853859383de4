"""Figures reach every place they are sent to; what is missing is named with the way to install it."""

from __future__ import annotations

import json
import math
import resource
import socket
import sys
import types
import urllib.request

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train import TrainConfig
from dilated_attention_pytorch.train.checkpoint import list_checkpoints
from dilated_attention_pytorch.train.monitor import (
    JsonLinesMonitor,
    Monitors,
    PrometheusMonitor,
    TensorBoardMonitor,
    parse_address,
    peak_memory,
)
from dilated_attention_pytorch.train.run_folder import read_metrics, write_metrics

from .test_train import FLAGS

FIGURES = {"loss": 2.5, "tokens_per_second": 1e6, "branch_bytes": {"w64 r1": 0, "w512 r8": 4096}}


def open_all(kinds, run) -> Monitors:
    monitors = Monitors()
    monitors.open(kinds, run, 0, "127.0.0.1:0")
    return monitors


def test_the_console_and_json_lines_take_the_same_figures(tmp_path, capsys) -> None:
    for step in (1, 2):  # the second one as if resumed
        with open_all(["console", "jsonl"], tmp_path) as monitors:
            monitors.log(FIGURES, step)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "step 1  loss 2.5  tokens_per_second 1e+06  branch_bytes/w64 r1 0  branch_bytes/w512 r8 4096"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, **FIGURES} for step in (1, 2)]


def test_a_line_that_a_killed_run_left_half_written_spoils_no_other(tmp_path) -> None:
    for left in ("", '{"step": 1}\n', '{"step": 1}\n{"st'):
        (tmp_path / "log.jsonl").write_text(left)
        monitor = JsonLinesMonitor(tmp_path / "log.jsonl")
        monitor.log({}, step=2)
        monitor.close()
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        assert lines == [*left.splitlines(), '{"step": 2}']


def test_tensorboard_reads_what_was_logged_and_steps_that_were_lost_are_taken_back(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, loss in ((0, 3.0), (1, 2.0)):
        monitor = TensorBoardMonitor(tmp_path, start=start)
        for step in range(start + 1, 4):
            monitor.log({"loss": loss, "branch_bytes": {"w64 r1": 7}}, step)
        monitor.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 2.0)]
    assert events.Scalars("branch_bytes/w64 r1")[-1].value == 7


def test_prometheus_serves_gauges_on_this_machine_alone() -> None:
    monitor = PrometheusMonitor(port=0)
    try:
        assert monitor.address.startswith("127.0.0.1:")
        monitor.log(FIGURES, 1)
        monitor.log({**FIGURES, "loss": 1.5}, 2)
        with urllib.request.urlopen(f"http://{monitor.address}/metrics") as answer:
            served = answer.read().decode().splitlines()
        with pytest.raises(OSError, match="choose another address"):
            PrometheusMonitor(*parse_address(monitor.address))
    finally:
        monitor.close()
    assert "dilated_attention_loss 1.5" in served
    assert "dilated_attention_step 2.0" in served
    assert 'dilated_attention_branch_bytes{name="w512 r8"} 4096.0' in served


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch) -> None:
    logged, runs = [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    def init(**settings):
        runs.append(settings)
        return Run()

    wandb = types.ModuleType("wandb")
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (1, 2):
        with open_all(["wandb"], tmp_path) as monitors:
            monitors.log({"loss": 1.0, "branch_bytes": {"w64 r1": 0}}, step)
    assert runs[0]["id"] == runs[1]["id"]
    assert runs[0]["resume"] == "allow"
    assert logged[:2] == [(1, {"loss": 1.0, "branch_bytes/w64 r1": 0}), "finished"]


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("tensorboard", "tensorboard", "tensorboard"), ("wandb",) * 3, ("prometheus", "prometheus_client", "prometheus")],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, kind, package, extra) -> None:
    class Missing:
        def find_spec(self, name, *_):
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in list(sys.modules):
        if name.split(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=rf"or '\.\[{extra}\]' in a checkout"):
        open_all([kind], tmp_path)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert parse_address("[::1]:9464") == ("::1", 9464)
    assert TrainConfig(prometheus_address="[::1]:9464").prometheus_address == "[::1]:9464"
    if not socket.has_ipv6:
        return
    pytest.importorskip("prometheus_client")
    try:
        monitor = PrometheusMonitor(*parse_address("[::1]:0"))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    try:
        monitor.log({"loss": 2.0}, 1)
        assert parse_address(monitor.address)[0] == "::1"
        with urllib.request.urlopen(f"http://{monitor.address}/metrics") as answer:
            assert b"dilated_attention_loss 2.0" in answer.read()
    finally:
        monitor.close()


@pytest.mark.parametrize(
    "address",
    [
        "9464", ":9464", "localhost", "localhost:x", "localhost:99999", "::1:9464", "[]:9464", "[::1]", "[::1:9464",
        "localhost:\u0661", "[localhost]:9464",
    ],
)  # fmt: skip
def test_an_address_without_a_host_or_a_port_is_refused(address) -> None:
    with pytest.raises(ValueError, match="an address is HOST:PORT"):
        TrainConfig(prometheus_address=address)


def test_unknown_monitors_engines_and_timeouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"monitors\[0\] must be one of console, jsonl"):
        TrainConfig(monitors=("statsd",))
    with pytest.raises(ValueError, match="engine must be one of fsdp, ddp"):
        TrainConfig(engine="horovod")
    with pytest.raises(ValueError, match="timeout_seconds must be a finite number above 0"):
        TrainConfig(timeout_seconds=0)


def test_memory_is_counted() -> None:
    assert peak_memory(torch.device("cpu")) > 1_000_000


def test_a_monitor_that_cannot_write_is_named_once_and_the_run_goes_on(tmp_path, capsys, monkeypatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    monkeypatch.setattr(SummaryWriter, "close", full)
    flags = ["--steps", "4", "--monitors", "tensorboard", "jsonl", *FLAGS]
    assert main(["train", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), *flags]) == 0
    told = capsys.readouterr().err
    assert told.count("TensorBoardMonitor lost figures (OSError: [Errno 28] No space left on device); the run") == 1
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 4
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-00000004"


def test_lines_stay_whole_after_one_that_the_disk_cut(tmp_path) -> None:
    monitor = JsonLinesMonitor(tmp_path / "log.jsonl")
    monitor.log({"loss": 1.0}, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log.jsonl").stat().st_size + 5, limits[1]))
    try:
        for step in (2, 3):
            with pytest.raises(OSError, match=r"part of a line|File too large"):
                monitor.log({"loss": 1.0}, step=step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monitor.log({"loss": 1.0}, step=4)
    monitor.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1, "loss": 1.0}', '{"ste', '{"step": 4, "loss": 1.0}']


def test_numbers_that_are_not_finite_are_null_in_files_and_nan_when_they_are_read(tmp_path) -> None:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    monitor = JsonLinesMonitor(tmp_path / "log.jsonl")
    monitor.log({"validation_bits": math.nan, "branch_bytes": {"w64 r1": math.inf}}, step=1)
    monitor.close()
    write_metrics(tmp_path, [{"step": 1, "validation_bits": math.nan, "loss": -math.inf}])
    for name in ("log.jsonl", "metrics.jsonl"):
        assert json.loads((tmp_path / name).read_text(), parse_constant=refuse)["validation_bits"] is None
    (record,) = read_metrics(tmp_path)
    assert record["step"] == 1
    assert math.isnan(record["validation_bits"])
