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
    for text, message in (("ACGT", "must begin with '>'"), (">a\nACGT", "fewer bases"), (">a\n>a\n", "two sequences")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            dna.read_fasta(path)
    path.write_text(f">a\n{'A' * 64}\n")
    with pytest.raises(ValueError, match="'a' has no label=NAME"):
        dna.main([str(path)])


def test_the_encoder_learns_which_stretch_comes_first(tmp_path, capsys) -> None:
    path = tmp_path / "genes.fasta"
    dna.make_fasta(path, 250, shortest=2_000, longest=3_000)
    assert dna.main([str(path), "--epochs", "8"]) >= 0.95
    assert "looks most at the windows from bases" in capsys.readouterr().out
