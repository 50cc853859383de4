"""The synthetic slides: nothing but relations tells the label, the encoder learns them, and its map shows where."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.slides.features import read_bag
from dilated_attention_pytorch.slides.maps import tile_weights
from examples.slides import few_labels
from examples.slides.__main__ import LABELS, REGION, SETTINGS, make_slide, write_slides
from examples.slides.__main__ import main as make_slides

PAGE = Path(__file__).parents[2] / "docs/slides.md"


def test_slides_of_both_labels_have_the_same_tiles() -> None:
    slides = [make_slide(seed) for seed in range(40)]
    assert {slide.label for slide in slides} == {*LABELS}
    for slide in slides:
        kinds = (slide.features[:, :2] > 3).long()
        assert kinds.sum(0).tolist() == [REGION, REGION]
        (first, _), (second, _) = slide.regions
        assert LABELS[int(kinds[first, 1])] == slide.label
        assert second - first >= len(kinds) // 3
        assert 0 < first < second + REGION < len(kinds)  # away from the edges


def test_the_command_that_is_printed_is_that_of_the_page(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_slides(["demo", "--slides", "4"]) == 0
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    (shown,) = re.findall(r"\./run slides train .*demo/run.*", PAGE.read_text().replace("\\\n", ""))
    assert sorted(printed) == sorted(shlex.split(shown))
    with pytest.raises(FileExistsError, match="already holds a study"):
        make_slides(["demo"])


def test_the_encoder_learns_in_miniature_and_its_map_shows_both_regions(tmp_path, capsys) -> None:
    table, run = write_slides(tmp_path / "demo", 240, shortest=64, longest=96), tmp_path / "run"
    flags = ["--table", str(table), "--features", str(tmp_path / "demo/features"), "--out", str(run), *SETTINGS.split()]
    small = "--segment-lengths 16 128 --epochs 8 --learning-rate 5e-3 --batch-size 8 --device cpu"
    assert main(["slides", "train", *flags, *small.split()]) == 0
    said = capsys.readouterr().out
    (encoder,), (baseline,) = (
        [float(line.split()[-3]) for line in said.splitlines() if re.match(rf"{name} +\d", line)]
        for name in ("encoder", "without attention")
    )
    assert encoder >= 0.95
    assert baseline <= 0.7  # about chance, over 48 slides
    model = LongNetEncoder.from_pretrained(run / "model").eval()
    regions = json.loads((tmp_path / "demo/regions.json").read_text())
    shares, above = [], []
    for name in [f"slide-{i:04d}" for i in range(220, 240)]:
        weights = tile_weights(model, read_bag(tmp_path / f"demo/features/{name}.h5"))
        shares.append([float(weights[a : b + 1].sum()) * len(weights) / REGION for a, b in regions[name]])
        shown = (weights - weights.mean()).clamp_min(0.0)
        above.append(float(sum(shown[a : b + 1].sum() for a, b in regions[name]) / shown.sum()))
    assert torch.tensor(shares).mean(0).min() > 1.3  # times what an average tile gets, in each region
    assert torch.tensor(above).mean() > 0.5  # of what the picture shows, on a seventh of the tiles
    assert main(["slides", "report", str(run), "--worst", "1"]) == 0
    page = (run / "report.html").read_text()
    assert "without attention" in page
    assert page.count("<svg") == 3 + 1 + 1


def test_pretraining_is_compared_in_miniature(tmp_path) -> None:
    found = few_labels.compare(tmp_path / "few", [3], slides=20, labels=12, test=8, pretraining=1, training=1)
    assert [len(values) for values in found.values()] == [1, 1]
    summary, run = ((tmp_path / "few" / name).read_text() for name in ("report.html", "seed-3/report.html"))
    assert f"{found[few_labels.WITH][0]:.3f}" in summary
    assert "without pretraining" in run
    tables = [(tmp_path / f"few/{name}.csv").read_text() for name in ("unlabelled", "labels-3")]
    assert "label" not in tables[0]
    assert [tables[1].count(f",{split}\n") for split in ("train", "validation", "test")] == [12, 6, 8]
    tested = {line.split(",")[0] for line in tables[1].splitlines() if line.endswith(",test")}
    assert not any(name in tables[0] for name in tested)
