from __future__ import annotations

import json

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
    assert "time a token flat within 1.05" in capsys.readouterr().out
