"""The command `doctor`: what it finds on a machine in a given state, and the status it ends with."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.tools import diagnose
from dilated_attention_pytorch.tools import doctor as room
from dilated_attention_pytorch.tools.doctor import bfloat16_product_fails, doctor, missing_extras


@pytest.fixture(autouse=True)
def a_plain_machine(monkeypatch):
    """A processor without AMX and no driver, whatever this one has: tests then add what they are about.

    Its threads are not timed, as `test_diagnose` times them.
    """
    monkeypatch.setattr(diagnose, "thread_rates", lambda threads: {threads: 1.0})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(room, "processor_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(room, "_has_nvidia_driver", lambda: False)


def levels(word: str) -> list[str]:
    return [one.level for one in doctor().findings if word in one.measured]


@pytest.fixture
def faulty(monkeypatch) -> None:
    """A driver, and a PyTorch that finds no GPU."""
    monkeypatch.setattr(room, "_has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_text_names_hardware_versions_and_backends(capsys) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    for word in (torch.__version__, "usable cores", "eager", "available", "reference", "host memory"):
        assert word in shown


def test_json_has_the_same_in_numbers(capsys) -> None:
    main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["machine"]["host memory bytes"] > 1 << 28
    assert told["facts"]["backends"]["eager"] == "available"
    assert {"level", "topic", "measured", "way_out", "saves_bytes"} == set(told["findings"][0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU of this machine may have faults of its own")
def test_a_machine_without_faults_ends_with_status_0(capsys) -> None:
    assert main(["doctor"]) == 0
    assert "broken" not in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["broken"] is False


def test_a_fault_comes_first_and_ends_with_status_1(faulty, capsys) -> None:
    assert main(["doctor"]) == 1
    assert "broken: " in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["broken"] is True
    assert told["findings"][0]["level"] == "broken"
    assert "finds no GPU" in told["findings"][0]["measured"]


@pytest.mark.parametrize(
    ("status", "message"), [(-4, "ends its process with SIGILL"), (1, "fails: RuntimeError: no"), (0, None)]
)
def test_a_bfloat16_product_is_tried_in_a_process_of_its_own(monkeypatch, status, message) -> None:
    asked = []

    def run(command, **settings):
        asked.append(command)
        return SimpleNamespace(returncode=status, stderr="Traceback ...\nRuntimeError: no\n")

    monkeypatch.setattr(room.subprocess, "run", run)
    assert bfloat16_product_fails() == message
    assert asked[0][0] == sys.executable
    assert "bfloat16" in asked[0][-1]


def test_the_product_that_is_tried_runs_where_amx_is_left_out(monkeypatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    assert bfloat16_product_fails() is None


def test_amx_that_traps_is_broken_and_amx_that_works_or_is_left_out_is_not(monkeypatch) -> None:
    monkeypatch.setattr(room, "processor_flags", lambda: frozenset({"amx_tile", "amx_bf16"}))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(room, "bfloat16_product_fails", lambda: "ends its process with SIGILL")
    report = doctor()
    assert report.is_broken
    (found,) = [one for one in report.findings if "AMX" in one.measured]
    assert "SIGILL" in found.measured
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in found.way_out
    assert levels("multiplies bfloat16 matrices itself") == []
    monkeypatch.setattr(room, "bfloat16_product_fails", lambda: None)
    assert levels("AMX") == []
    assert levels("multiplies bfloat16 matrices itself") == ([] if torch.cuda.is_available() else ["option"])
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    monkeypatch.setattr(room, "bfloat16_product_fails", lambda: pytest.fail("nothing to try: AMX is not used"))
    assert levels("leaves it out") == ["option"]


def test_a_missing_extra_is_named_with_the_line_that_gets_it(monkeypatch) -> None:
    def version(name: str) -> str:
        if name == "matplotlib":
            raise room.PackageNotFoundError(name)
        return "0.9" if name == "tyro" else "99"

    monkeypatch.setattr(room, "version", version)
    missing = missing_extras()
    assert missing == {"train": ["tyro>=1.0"], "viz": ["matplotlib>=3.7"]}
    report = doctor()
    (found,) = [one for one in report.findings if "the extra viz" in one.measured]
    assert found.way_out.startswith("pip install 'longnet-dilated-attention[viz]', or '.[viz]' in a checkout, here /")
    monkeypatch.setattr(room, "_checkout", lambda: None)
    monkeypatch.setattr(
        room, "requires", lambda name: ["torch>=2.6", "matplotlib>=3.7; extra == 'viz'", 'ruff; extra == "test"']
    )
    assert missing_extras() == {"viz": ["matplotlib>=3.7"]}
    (found,) = [one for one in doctor().findings if "the extra viz" in one.measured]
    assert found.way_out == "pip install 'longnet-dilated-attention[viz]', or '.[viz]' in a checkout"


def test_without_packaging_its_extra_is_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    (found,) = [one for one in doctor().findings if "the extra" in one.measured]
    assert "the extra tools lacks packaging" in found.measured


def test_what_is_required_of_another_python_or_system_is_not_missing(monkeypatch) -> None:
    def version(name: str) -> str:
        raise room.PackageNotFoundError(name)

    monkeypatch.setattr(room, "version", version)
    assert ("tomli>=2" in missing_extras()["train"]) == (sys.version_info < (3, 11))
    monkeypatch.setattr(room, "_checkout", lambda: None)
    stated = [
        "here>=1; python_version >= '3.10' and extra == 'train'",
        "older>=1; python_version < '3.10' and extra == 'train'",
        "elsewhere>=1; platform_system == 'Plan 9' and extra == 'train'",
        "notthere>=1; platform_system != 'Plan 9' and extra == 'train'",
        "viz>=1 ; extra == 'viz'",
    ]
    monkeypatch.setattr(room, "requires", lambda name: stated)
    assert missing_extras() == {"train": ["here>=1", "notthere>=1"], "viz": ["viz>=1"]}


def test_a_driver_without_a_gpu_for_pytorch_is_broken_unless_it_is_hidden(faulty, monkeypatch) -> None:
    assert levels("finds no GPU") == ["broken"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert levels("finds no GPU") == ["pitfall"]


def test_a_backend_that_fails_or_computes_something_else_is_broken(monkeypatch) -> None:
    from dilated_attention_pytorch.functional import dilated_attention

    def wrong(*args, backend, **settings):
        out = dilated_attention(*args, backend=backend, **settings)
        return out * 1.01 if backend == "eager" else out

    monkeypatch.setattr(room, "dilated_attention", wrong)
    assert levels("backend eager is ") == ["broken"]

    def failing(*args, **settings):
        raise RuntimeError("no\nno such instruction")

    monkeypatch.setattr(room, "dilated_attention", failing)
    assert levels("RuntimeError: no such instruction")[0] == "broken"


def test_variables_that_cannot_be_used_are_broken(monkeypatch) -> None:
    monkeypatch.setenv("DILATED_ATTENTION_TILES", "no such file")
    assert levels("which is not a file") == ["broken"]
    done = subprocess.run(
        [sys.executable, "-m", "dilated_attention_pytorch.cli", "doctor"],
        env={"PYTHONPATH": str(room.Path(room.__file__).parents[2]), "PATTERN_CACHE_MAX_SIZE": "many"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "PATTERN_CACHE_MAX_SIZE must be a whole number" in done.stdout


@pytest.mark.parametrize(
    ("name", "capability", "expected", "options"),
    [
        ("NVIDIA H200", (9, 0), ["TF32", "bfloat16"], {"float8"}),
        ("NVIDIA A100", (8, 0), ["TF32", "bfloat16", "measured on an H200"], set()),
        ("NVIDIA L4", (8, 9), ["TF32", "bfloat16", "measured on an H200"], set()),
        ("Tesla V100", (7, 0), ["no bfloat16 products and no TF32"], {"GradScaler"}),
        ("NVIDIA B300", (10, 3), ["brings machine code for", "TF32", "bfloat16", "measured on an H200"], {"float8"}),
    ],
)
def test_what_to_switch_on_follows_the_gpu(monkeypatch, name, capability, expected, options) -> None:
    monkeypatch.delenv("DILATED_ATTENTION_TILES", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: name)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80", "sm_90a", "compute_90"])
    monkeypatch.setattr(torch.version, "hip", None)
    found = list(room._one_gpu(0))
    assert len(found) == len(expected)
    for one, word in zip(found, expected):
        assert word in one.measured
    assert {word for word in ("GradScaler", "float8") if any(word in one.way_out for one in found)} == options
