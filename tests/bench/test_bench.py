from __future__ import annotations

import json

import pytest
import torch

from dilated_attention_pytorch.bench import runner
from dilated_attention_pytorch.bench.contenders import CONTENDERS
from dilated_attention_pytorch.bench.harness import Case, measure
from dilated_attention_pytorch.bench.suites import SUITES
from dilated_attention_pytorch.cli import main

SMALL = Case(
    tokens=64, heads=2, head_dim=16, segment_lengths=(16, 32), dilation_rates=(1, 2), dtype="float32", device="cpu"
)


@pytest.mark.parametrize("backward", [False, True])
def test_a_suite_prints_a_row_a_case_and_writes_lines_and_a_page(tmp_path, capsys, monkeypatch, backward) -> None:
    case = Case(**{**vars(SMALL), "backward": backward})
    monkeypatch.setitem(SUITES, "short", lambda device: iter([case]))
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    assert main(["bench", "short", "--device", "cpu", "--out", str(results)]) == 0
    assert runner.title(case) in capsys.readouterr().out
    head, *lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert head["machine"]["torch"] == torch.__version__
    assert [line["contender"] for line in lines] == [
        "ours",
        "dense, same FLOPs",
        "dense, same tokens",
        "ours, eager",
    ]
    assert all(line["milliseconds"] > 0 for line in lines)
    assert main(["bench", "page", "--out", str(results), "--page", str(page)]) == 0
    assert f"| {runner.title(case)} |" in page.read_text()


def test_flops_of_the_dense_floor_are_counted_like_ours() -> None:
    one_branch = Case(**{**vars(SMALL), "segment_lengths": (16,), "dilation_rates": (1,), "is_causal": True})
    _, flops = CONTENDERS["dense, same FLOPs"](one_branch)
    assert flops == one_branch.flops


def test_a_timing_has_its_spread() -> None:
    timing = measure(lambda: torch.ones(100).sum(), "cpu", seconds=0.01)
    assert 0 < timing.p20 <= timing.median <= timing.p80


def test_every_suite_has_cases_on_every_device() -> None:
    for suite in SUITES.values():
        for device in ("cpu", "cuda"):
            cases = list(suite(device))
            assert cases
            assert {case.device for case in cases} == {device}
