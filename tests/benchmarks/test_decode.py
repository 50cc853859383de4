from __future__ import annotations

import json

import pytest
import torch

from benchmarks import decode
from benchmarks.command import main
from benchmarks.harness import compare, measure


def test_the_decode_suite_measures_steps_and_prompts(tmp_path, capsys, monkeypatch) -> None:
    small = {"segment_lengths": (8, 16), "dilation_rates": (1, 2), "num_heads": 2, "dtype": torch.float32}
    monkeypatch.setitem(decode.SHAPES, "cpu", small)
    monkeypatch.setitem(decode.PROMPTS, "cpu", 200)
    monkeypatch.setitem(decode.CHUNKS, "cpu", (96, 70))
    monkeypatch.setattr(decode, "compare", lambda *runs: compare(*runs, seconds=0.01, least=2))
    monkeypatch.setattr(decode, "measure", lambda *run, seconds: measure(*run, seconds=0.001))
    results = tmp_path / "results.jsonl"
    assert main(["decode", "--device", "cpu", "--tokens", "50", "20", "--out", str(results)]) == 0
    machine, *lines = map(json.loads, results.read_text().splitlines())
    assert "machine" in machine
    steps, prompts = [line for line in lines if "ours" in line], [line for line in lines if "chunk" in line]
    assert [line["context"] for line in steps] == [20, 50]
    assert steps[0]["cache_bytes"] == steps[1]["cache_bytes"]
    assert [line["chunk"] for line in prompts] == [96, 70]
    assert all(line["ours"] > 0 and line["dense"] > 0 for line in steps)
    assert all(line["ratio"] > 0 and line["whole"] > 0 and line["chunked"] > 0 for line in prompts)
    printed = capsys.readouterr().out
    for verdict in decode.SUITE.verdict(lines):
        assert str(verdict) in printed
    spread = max(line["ours"] for line in steps) / min(line["ours"] for line in steps)
    assert f"slowest over fastest {spread:.3f}" in printed


def step(context, ours, dense):
    return {"context": context, "ours": ours, "dense": dense, "cache_bytes": 1 << 20}


def prompt(ratio):
    return {"context": 1024, "chunk": 64, "whole": 1.0, "chunked": ratio, "ratio": ratio}


@pytest.mark.parametrize(
    ("records", "met"),
    [
        ([step(1024, 10.0, 30.0), step(4096, 10.4, 210.0), prompt(1.09)], [True, True, True]),
        ([step(1024, 10.0, 30.0), step(4096, 10.6, 213.0), prompt(1.0)], [False, True, True]),
        ([step(1024, 10.0, 300.0), step(4096, 10.0, 199.0), prompt(1.0)], [True, False, True]),
        ([step(1024, 10.0, 30.0), step(4096, 10.0, 200.0), prompt(1.11)], [True, True, False]),
    ],
)
def test_each_target_is_met_or_missed_by_what_was_measured(records, met) -> None:
    assert [verdict.met for verdict in decode.SUITE.verdict(records)] == met
