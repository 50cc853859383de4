from __future__ import annotations

import json

import pytest

from benchmarks import first
from benchmarks.command import main
from benchmarks.suite import Options


def test_the_first_call_is_measured_in_new_processes_with_an_empty_folder_and_a_filled_one(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(first, "HEAD_DIMS", (16,))
    monkeypatch.setattr(first, "SECONDS", {"float32": 15.0})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of the user"))
    results = tmp_path / "results.jsonl"
    assert main(["first", "--device", "cpu", "--out", str(results)]) == 0
    _, line = map(json.loads, results.read_text().splitlines())
    assert (line["dtype"], line["head_dim"], line["kernels"]) == ("float32", 16, 0)
    assert line["seconds"] > 0
    assert line["filled_seconds"] > 0
    assert line["milliseconds"] > 0
    printed = capsys.readouterr().out
    assert "| float32 | 16 | 0 |" in printed
    assert "met" not in printed.lower()  # the targets are of a GPU


def test_a_process_that_fails_is_told_with_its_error(monkeypatch) -> None:
    with pytest.raises(OSError, match=r"benchmarks.first cpu float31 64 ended with 1:(.|\n)*float31"):
        list(first.SUITE.measure(("float31", 64), Options(device="cpu")))


def test_each_dtype_has_a_target_on_a_gpu() -> None:
    def record(dtype: str, seconds: float, device: str = "cuda") -> dict[str, object]:
        return {"dtype": dtype, "seconds": seconds, "head_dim": 64, "device": device}

    def met(*records) -> list[bool]:
        return [verdict.met for verdict in first.SUITE.verdict(records)]

    assert met(record("bfloat16", 8.0), record("float32", 15.0)) == [True, True]
    assert met(record("bfloat16", 8.1), record("bfloat16", 1.0), record("float32", 15.1)) == [False, False]
    assert met(record("bfloat16", 80.0, "cpu")) == []
