from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from benchmarks import shard
from benchmarks.command import main
from benchmarks.harness import compare
from benchmarks.results import read_rows
from dilated_attention_pytorch.core.pattern import training_bytes


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(shard, "compare", lambda off, on, device: compare(off, on, device, seconds=0.01, least=2))


def test_a_shard_is_measured_beside_its_plan(tmp_path, capsys) -> None:
    results = tmp_path / "results.jsonl"
    flags = ["--tokens", "256", "--heads", "1", "--head-dim", "16", "--out", str(results)]
    assert main(["shard", "--device", "cpu", *flags]) == 0
    printed = capsys.readouterr().out
    assert "| tokens a rank | heads | causal | ms |" in printed
    assert "| 256 | 1 of 16 | no |" in printed
    assert "ring class at least 0.98 as fast as the plain one; worst" in printed
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [line["is_causal"] for line in lines] == [False, True]
    for line in lines:
        assert line["milliseconds"] > 0
        assert line["ring_speed"] > 0
        assert line["plan_bytes"] >= training_bytes(256, 1, 16, itemsize=4)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="has no measurements"):  # a table of its own, as those of cache and pool
        read_rows(results)


def test_heads_of_other_suites_are_refused(capsys) -> None:
    assert main(["short", "--device", "cpu", "--heads", "2"]) == 1
    assert "--heads belongs to shard, not to short: leave it out" in capsys.readouterr().err


def test_a_world_that_is_there_already_is_refused() -> None:
    alone = shard.world_of_one("cpu")
    with shard.world_of_one("cpu"), pytest.raises(ValueError, match="a process group already: run it alone"):
        alone.__enter__()
