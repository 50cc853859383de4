from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from dilated_attention_pytorch.core import DilatedSpec, dense_mask
from dilated_attention_pytorch.pages.plots import save
from examples.evidence import report
from examples.evidence.__main__ import RECORDS, read_records
from examples.pictures import draw_documentation, pattern, read_losses, read_times

DOCS = Path(__file__).parents[2] / "docs" / "pictures"
EVIDENCE = [DOCS / f"evidence-{name}.svg" for name in report.PICTURES]


def content(path: Path) -> tuple[list[str], Counter[str]]:
    """The words of a picture, and its outlines by colour; their places depend on the release of matplotlib."""
    root = ElementTree.fromstring(path.read_text())
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    outlines: Counter[str] = Counter()
    for element in root.iter("{http://www.w3.org/2000/svg}path"):
        colour = re.search(r"fill: (#\w+)", element.get("style", ""))
        outlines[colour.group(1) if colour else ""] += element.get("d").count("M")
    return words, outlines


def test_the_pictures_of_the_documentation_are_the_ones_that_the_code_draws(tmp_path) -> None:
    drawn = draw_documentation(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in DOCS.iterdir() if path not in EVIDENCE}
    for path in drawn:
        assert content(path) == content(DOCS / path.name), f"{path.name} is stale: ./run docs"


def test_the_page_of_the_evidence_is_the_one_that_its_records_give(tmp_path) -> None:
    page = report.write(tmp_path, read_records(DOCS.parent / RECORDS))
    assert page.read_text() == (DOCS.parent / report.PAGE).read_text(), "evidence.md is stale: ./run evidence --report"
    for path in EVIDENCE:
        assert content(tmp_path / "pictures" / path.name) == content(path), f"{path.name} is stale"


def test_a_pattern_has_a_coloured_cell_for_every_visible_pair(tmp_path) -> None:
    spec = DilatedSpec.of([3, 6], [1, 2])
    save(tmp_path / "pattern.svg", pattern(spec, 6, head=1, heads=2, is_causal=True))
    words, colours = content(tmp_path / "pattern.svg")
    shown = dense_mask(spec, spec.offsets(2), 6, is_causal=True)[:, 1].sum((1, 2)).tolist()
    assert colours["#e8590c"] == shown[1]
    assert {"w = 3, r = 1", "w = 6, r = 2", "merged"} <= set(words)


def test_loss_curves_are_drawn_once_they_have_been_measured(tmp_path) -> None:
    results = tmp_path / "results.jsonl"
    measured = {"plain": [4.0, 3.0, 2.0], "fused and compiled": [4.0, 3.03, 2.0]}
    lines = [{"suite": "curves", "variant": name, "size": "125m", "losses": x} for name, x in measured.items()]
    lines.append({"suite": "curves", "variant": "plain", "size": "tiny", "losses": [9.0]})
    results.write_text("".join(json.dumps(line) + "\n" for line in [{"machine": {}}, *lines]))
    assert read_losses(results) == measured
    [picture] = [path for path in draw_documentation(tmp_path / "pictures", results) if path.name == "losses.svg"]
    assert {"plain", "fused and compiled", "step", "% above plain"} <= set(content(picture)[0])


def test_the_chart_shows_the_newest_times_by_reach(tmp_path) -> None:
    same = {"suite": "attention", "device": "cuda", "heads": 12, "head_dim": 64, "backward": True, "is_causal": False}
    same |= {"dtype": "bfloat16", "head_layout": "interleaved", "segment_lengths": [2048, 8192]}
    rows = [("ours", 8192, 9.0), ("ours", 8192, 1.0), ("ours", 32768, 3.0), ("dense, same tokens", 8192, 2.0)]
    lines = [same | {"contender": who, "tokens": tokens, "milliseconds": ms} for who, tokens, ms in rows]
    others = [{"is_causal": True}, {"pattern": "random"}, {"milliseconds": None}, {"segment_lengths": [2048, 16384]}]
    lines += [lines[2] | {"milliseconds": 7.0} | other for other in others]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in [{"machine": {}}, *lines]))
    dense, whole, short = read_times(results).values()
    assert (dense, whole, short) == ({8192: 2.0}, {8192: 1.0}, {32768: 3.0})
