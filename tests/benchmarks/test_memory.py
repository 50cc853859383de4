from __future__ import annotations

import pytest

from benchmarks import memory
from benchmarks.command import main
from benchmarks.suite import read_records


def record(tokens, peak):
    return {"suite": "memory", "on_machine": "a CPU", "tokens": tokens, "peak_bytes": peak, "floor_bytes": 1 << 20}


def test_memory_is_measured_at_every_length_in_a_process_of_its_own(tmp_path, capsys) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["memory", "--tokens", "4096", "2048", "--out", str(results)]) == 0
    first, second = read_records(results)
    assert (first["tokens"], second["tokens"]) == (2048, 4096)
    for one in (first, second):  # inputs, outputs and gradients at least, and not much beside PyTorch's own memory
        assert one["floor_bytes"] > 8 * one["tokens"] * memory.HEADS * memory.HEAD_DIM * 4
        assert one["floor_bytes"] / 2 < one["peak_bytes"] < one["floor_bytes"] + (256 << 20)
    grown = memory.growth_of_tokens(first, second)
    assert grown == pytest.approx(second["peak_bytes"] / first["peak_bytes"] / 2)
    assert f"{second['peak_bytes'] / first['peak_bytes']:.2f} | {grown:.2f} |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peaks", "of_tokens", "met"), [((100, 200, 404), "1.01", True), ((100, 200, 800), "2.00", False)]
)
def test_memory_that_grows_faster_than_tokens_misses_the_target(peaks, of_tokens, met) -> None:
    records = [record(tokens, peak << 20) for tokens, peak in zip((1024, 2048, 4096), peaks)]
    [table] = memory.SUITE.tables(records)
    assert [row[-1] for row in table.rows] == ["", "1.00", of_tokens]
    [verdict] = memory.SUITE.verdict(records)
    assert verdict.met == met
    assert f"at most {float(of_tokens):.3f}" in str(verdict)
