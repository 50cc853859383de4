from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from benchmarks import shard
from benchmarks.command import main
from benchmarks.harness import compare
from benchmarks.ratios import rows_of
from benchmarks.suite import read_records
from dilated_attention_pytorch.core.pattern import training_bytes


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(shard, "compare", lambda off, on, device: compare(off, on, device, seconds=0.01, least=2))


def test_a_shard_is_measured_beside_its_plan(tmp_path, capsys) -> None:
    results = tmp_path / "results.jsonl"
    flags = ["--tokens", "256", "--heads", "1", "--head-dim", "16", "--out", str(results)]
    assert main(["shard", "--device", "cpu", *flags]) == 0
    printed = capsys.readouterr().out
    assert "| tokens | heads | causal | ms |" in printed
    assert "| 256 | 1 of 16 | no |" in printed
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [line["is_causal"] for line in lines] == [False, True]
    for line in lines:
        assert line["milliseconds"] > 0
        assert line["ring_speed"] > 0
        assert line["plan_bytes"] >= training_bytes(256, 1, 16, itemsize=4)
    [verdict] = shard.SUITE.verdict(lines)
    assert f"worst {min(line['ring_speed'] for line in lines):.3f}" in verdict.text
    assert str(verdict) in printed
    assert not dist.is_initialized()
    assert rows_of(read_records(results)) == []  # it has no contenders


@pytest.mark.parametrize(("speeds", "met"), [((1.2, 0.98), True), ((1.2, 0.979), False)])
def test_the_slowest_shard_decides(speeds, met) -> None:
    [verdict] = shard.SUITE.verdict([{"ring_speed": speed} for speed in speeds])
    assert verdict.met == met


def test_a_world_that_is_there_already_is_refused() -> None:
    alone = shard.world_of_one("cpu")
    with shard.world_of_one("cpu"), pytest.raises(ValueError, match="a process group already: run it alone"):
        alone.__enter__()
