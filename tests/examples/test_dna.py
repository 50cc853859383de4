"""The DNA example: its parser, its k-mers, and that the encoder learns which stretch comes first."""

from __future__ import annotations

import pytest
import torch

from examples import dna


def test_fasta_is_read_as_written_and_mistakes_are_named(tmp_path) -> None:
    path = tmp_path / "some.fasta"
    path.write_text(f">a label=x\n{'ac' * 20}\n{'GT' * 20}\n\n>b\n{'N' * 70}\n")
    found = dna.read_fasta(path)
    assert found == {"a label=x": "AC" * 20 + "GT" * 20, "b": "N" * 70}
    shares = dna.count_kmers(found["a label=x"])
    assert shares.shape == (1, 16)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[0, 1] == pytest.approx(20 / 63)  # AC
    assert torch.equal(dna.count_kmers(found["b"]), torch.zeros(1, 16))
    for text, message in (
        ("ACGT", "must begin with '>'"),
        (">a\nACGT", "fewer bases"),
        (">a\n>a\n", "two sequences"),
        ("", "has no sequences"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            dna.read_fasta(path)
    for header in ("a", "a label="):
        path.write_text(f">{header}\n{'A' * 64}\n")
        with pytest.raises(ValueError, match=f"'{header}' has no label=NAME"):
            dna.main([str(path)])
    path.write_text(f">a label=x\n{'A' * 64}\n>b label=x\n{'C' * 64}\n")
    with pytest.raises(ValueError, match="has one label only, 'x'"):
        dna.main([str(path)])


def test_a_file_is_made_only_if_none_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dna, "make_fasta", lambda path, count: path.write_text(""))
    with pytest.raises(FileNotFoundError, match=r"no FASTA file typo.fasta"):
        dna.main(["typo.fasta"])
    assert not (tmp_path / "typo.fasta").exists()
    with pytest.raises(ValueError, match=r"genes.fasta has no sequences"):
        dna.main([])


def test_sequences_of_a_single_window_are_taken(tmp_path, capsys) -> None:
    path = tmp_path / "short.fasta"
    path.write_text("".join(f">{i} label={'xy'[i % 2]}\n{'ACGT'[i % 4] * 64}\n" for i in range(5)))
    dna.main([str(path), "--epochs", "1"])
    assert "looks most at the windows from bases 0\n" in capsys.readouterr().out


def test_the_encoder_learns_which_stretch_comes_first(tmp_path, capsys) -> None:
    path = tmp_path / "genes.fasta"
    dna.make_fasta(path, 250, shortest=2_000, longest=3_000)
    assert dna.main([str(path), "--epochs", "8"]) >= 0.95
    assert "looks most at the windows from bases" in capsys.readouterr().out
