from __future__ import annotations

import json

import pytest
import torch

from benchmarks import ranks
from benchmarks.command import main
from benchmarks.suite import Options, read_records


def test_bytes_that_ranks_receive_stand_beside_their_formulas(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ranks, "RANKS", (2,))
    results = tmp_path / "results.jsonl"
    assert main(["ranks", "--device", "cpu", "--tokens", "64", "--out", str(results)]) == 0
    assert "| 2 | 64 | all_to_all |" in capsys.readouterr().out
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [line["scheme"] for line in lines] == ["gather", "ring", "all_to_all", "dense ring"]
    row = 4 * 64 * 4  # bytes of one row of K: four heads of 64 in float32
    for line in lines:
        assert line["forward"] == line["forward_formula"]
        assert line["backward"] == line["backward_formula"]
        assert line["milliseconds"] > 0
    assert lines[0]["forward"] == [2 * 8 * row] * 2  # a quarter of the other rank's 32 rows of K and V
    assert lines[3]["forward"] == [2 * 32 * row] * 2
    records = read_records(results)
    (table,) = ranks.SUITE.tables(records)
    assert [cells[2] for cells in table.rows] == [line["scheme"] for line in lines]
    assert f"All ranks share {lines[0]['cores']} CPU cores" in table.words[0]
    assert [verdict.met for verdict in ranks.SUITE.verdict(records)] == [True, True]
    records[2]["backward"] = [0, 1]
    forward, backward = ranks.SUITE.verdict(records)
    assert forward.met
    assert not backward.met
    assert "schemes that differ: all_to_all" in backward.text


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs for several ranks")
def test_ranks_on_a_gpu_need_several() -> None:
    with pytest.raises(ValueError, match="ranks need 2 GPUs"):
        ranks.SUITE.setup(Options(device="cuda"))
