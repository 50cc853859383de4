"""The command that newcomers start with."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("run_script", str(ROOT / "run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_script", loader))
    loader.exec_module(module)
    return module


def test_help_lists_every_command(script) -> None:
    done = subprocess.run([sys.executable, ROOT / "run", "help"], capture_output=True, text=True, check=True)
    for command in script.EXTRAS:
        assert f"./run {command}" in done.stdout


def test_an_unknown_command_is_refused() -> None:
    done = subprocess.run([sys.executable, ROOT / "run", "fly"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no command 'fly'; ./run help lists them" in done.stderr


def test_a_python_that_has_everything_is_used_as_it_is(script) -> None:
    if not script.satisfied("test"):
        pytest.fail("the tests run in a Python that lacks the test extra")
    assert script.prepare("test") == sys.executable


def test_commands_share_one_installation(script, tmp_path, monkeypatch, capsys) -> None:
    """On a machine without a GPU, with PyTorch's CPU wheels where they can be reached."""
    installs, reachable = [], True
    for name in ("pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    python.parent.mkdir(parents=True)
    python.touch()

    def run(command, **_) -> subprocess.CompletedProcess:
        installs.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(script, "satisfied", lambda extras: False)
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(script, "is_reachable", lambda url: reachable)
    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script.sys, "platform", "linux")
    for command in ("train", "slides", "bench"):
        assert script.prepare(script.EXTRAS[command]) == str(python)
    ((*_, extras, _, _, option, index),) = installs
    assert (extras, option, index) == (".[all]", "--extra-index-url", script.CPU_WHEELS)
    reachable = False
    script.prepare("test")
    assert installs[-1][-3:] == [".[test]", "-c", "constraints-cpu.txt"]
    assert "may bring CUDA libraries of several GB" in capsys.readouterr().out
    script.prepare("train")
    assert len(installs) == 2


def test_a_requirement_that_is_not_met_is_noticed(script, tmp_path, monkeypatch) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"torch>=2.6"', '"torch>=99"'))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert not script.satisfied("train")


@pytest.mark.parametrize(
    ("failing", "status", "started"),
    [
        (None, 0, ["ruff", "ruff", "mypy", "pytest"]),
        ("ruff", 1, ["ruff"]),
        ("mypy", 1, ["ruff", "ruff", "mypy", "pytest"]),
        ("pytest", 1, ["ruff", "ruff", "mypy", "pytest"]),
    ],
)
def test_whatever_fails_fails_the_tests(script, failing, status, started, capfd) -> None:
    tools = []

    def start(tool: str, *arguments: str, **output) -> subprocess.Popen:
        tools.append(tool)
        code = f"print('{tool} speaks'); raise SystemExit({int(tool == failing)})"
        return subprocess.Popen([sys.executable, "-c", code], **output)

    assert script.check(start, ["-k", "x"]) == status
    assert tools == started
    said = capfd.readouterr().out
    assert [said.count(f"{tool} speaks") for tool in ("ruff", "mypy", "pytest")] == [
        started.count(tool) for tool in ("ruff", "mypy", "pytest")
    ]


def test_pytest_runs_on_several_cores_unless_files_are_named_or_there_is_a_gpu(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert script.workers(["tests/core", "-k", "merge"])[:2] == ["-n", "2"]
    assert script.workers(["tests/test_run.py::test_help_lists_every_command"]) == []
    assert script.workers(["README.md"]) == []
    assert script.workers(["--pdb"]) == []
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert script.workers([])[1] == "4"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert script.workers([]) == []
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: True)
    assert script.workers([]) == []


def test_ctrl_c_waits_for_the_command_to_save(script) -> None:
    class Saving:
        """A command that ends after the second look, the first one interrupted."""

        looks = 0

        def wait(self) -> int:
            self.looks += 1
            if self.looks == 1:
                raise KeyboardInterrupt
            return 130

    assert script.wait(Saving()) == 130


SAVES = "import signal, sys; signal.signal(15, lambda *_: sys.exit(143)); print('ready', flush=True); signal.pause()"
ENDS = "import signal; print('ready', flush=True); signal.pause()"
WAITS = """
import runpy, subprocess, sys
wait = runpy.run_path(sys.argv[1])["wait"]
sys.exit(wait(subprocess.Popen([sys.executable, "-c", sys.argv[2]])))
"""


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("command", [SAVES, ENDS])
def test_sigterm_reaches_the_command_and_its_status_comes_back(command) -> None:
    script = subprocess.Popen([sys.executable, "-c", WAITS, ROOT / "run", command], stdout=subprocess.PIPE)
    assert script.stdout.readline() == b"ready\n"
    time.sleep(0.2)  # until it waits
    script.terminate()
    assert script.wait(timeout=60) == 128 + signal.SIGTERM
    assert script.stdout.read() == b""  # the command has ended too
    script.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no broken pipes")
def test_output_that_nobody_reads_on_is_no_error_but_another_broken_pipe_is() -> None:
    command = [sys.executable, "-m", "dilated_attention_pytorch.cli", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
    program = """
from dilated_attention_pytorch import cli

def stop(*given):
    raise BrokenPipeError("the pipe of a worker")

cli._run_from_checkout = stop
raise SystemExit(cli.main(["recall"]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (1, "dilated-attention: the pipe of a worker\n")
