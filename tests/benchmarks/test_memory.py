from __future__ import annotations

from benchmarks.memory import print_memory


def test_the_table_has_a_row_for_every_length(capsys) -> None:
    print_memory([2048, 4096])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[2:]] == ["2,048", "4,096"]
    assert rows[3].endswith("2.00x")
