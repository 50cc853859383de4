from __future__ import annotations

import json

import pytest

from benchmarks import generate
from benchmarks.command import main


def test_the_generate_suite_measures_models_and_the_floor(tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    results = tmp_path / "results.jsonl"
    only = ["--only", generate.OURS, generate.PLAIN, generate.LLAMA, generate.BOUNDED]
    assert main(["generate", "--device", "cpu", "--tokens", "80", *only, "--out", str(results)]) == 0
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [line["model"] for line in lines] == only[1:]
    assert not [line["failed"] for line in lines if "failed" in line]
    for line in lines:
        assert line["ms"] > 0
        assert line["share"] == pytest.approx(line["weight_bytes"] / line["bandwidth"] * 1e3 / line["ms"])
    printed = capsys.readouterr().out
    for verdict in generate.SUITE.verdict(lines):
        assert str(verdict) in printed
    assert "Branches: segments [64, 256] with rates [1, 2]." in printed
    assert main(["generate", "--device", "cpu", "--tokens", "80", "--only", generate.LLAMA]) == 0
    assert "Branches" not in capsys.readouterr().out  # of a dense model
    assert main(["generate", "--device", "cpu", "--sizes", "1m"]) == 1
    assert "--sizes takes names of '125m', '1.3b'; got '1m'" in capsys.readouterr().err


def row(ms, size="125m", batch=1, context=4096, model=generate.OURS):
    found = {"model": model, "size": size, "batch": batch, "context": context, "ms": ms}
    return found | {"tokens_per_second": batch / ms * 1e3}


@pytest.mark.parametrize(
    ("records", "met"),
    [
        ([row(0.48), row(0.5, context=1 << 20), row(1.5, batch=64)], [True, True, True]),
        ([row(0.4), row(0.45, context=1 << 20), row(9.0, model=generate.LLAMA)], [True, False]),
        ([row(1.31, size="1.3b"), row(1.61, batch=64)], [False, False]),
        ([{**row(1.9, model=generate.BOUNDED), "recompiled": 0}], [True]),
        ([{**row(1.9, model=generate.BOUNDED), "recompiled": 1}], [False]),
        ([row(1.2, size="1.3b"), {**row(9.0), "failed": "out of memory"}], [True]),
    ],
)
def test_each_target_is_met_or_missed_by_what_was_measured(records, met) -> None:
    assert [verdict.met for verdict in generate.SUITE.verdict(records)] == met
