from __future__ import annotations

import json

from benchmarks import lengths
from benchmarks.command import main
from benchmarks.harness import compare


def test_the_lengths_suite_measures_padded_and_packed_batches(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(lengths, "compare", lambda *runs: compare(*runs, seconds=0.01, least=2))
    results = tmp_path / "results.jsonl"
    assert main(["lengths", "--device", "cpu", "--out", str(results)]) == 0
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert len(lines) == 8  # packed and padded, causal or not, with backward or without
    assert all(line["ratio"] > 0 and line["whole"] > 0 and line["milliseconds"] > 0 for line in lines)
    assert "2 x 100 packed" in capsys.readouterr().out


def record(ratio: float, **changes):
    batch = lengths.Batch(8, 16_384, 16_384, packed=True)
    return {**batch._asdict(), "ratio": ratio, **changes}


def test_only_long_documents_without_padding_must_be_as_fast_as_whole_rows() -> None:
    def met(*records) -> list[bool]:
        return [verdict.met for verdict in lengths.SUITE.verdict(records)]

    assert met(record(1.05)) == [True]
    assert met(record(1.0), record(1.06)) == [False]
    assert met(record(1.0), record(2.0, tokens=32), record(2.0, packed=False, room=1 << 20)) == [True]
    assert met(record(2.0, tokens=32)) == []
