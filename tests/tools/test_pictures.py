from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from dilated_attention_pytorch.core import DilatedSpec, dense_mask
from dilated_attention_pytorch.functional import attention_rows
from dilated_attention_pytorch.tools.pictures import (
    draw_documentation,
    pattern_svg,
    row_shares,
    write_rows,
    write_slide,
)

DOCS = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_pictures_of_the_documentation_are_the_ones_that_the_code_draws(tmp_path) -> None:
    drawn = draw_documentation(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in DOCS.iterdir()}
    for path in drawn:
        assert path.read_text() == (DOCS / path.name).read_text(), f"{path.name} is stale: ./run docs"


def test_a_pattern_has_a_coloured_cell_for_every_visible_pair() -> None:
    spec = DilatedSpec.of([3, 6], [1, 2])
    root = ElementTree.fromstring(pattern_svg(spec, 6, head=1, heads=2, is_causal=True))
    colours = [rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    shown = dense_mask(spec, spec.offsets(2), 6, is_causal=True)[:, 1].sum((1, 2)).tolist()
    assert [colours.count(colour) for colour in ("#e8590c",)] == shown[1:]


def test_weights_of_rows_are_drawn_darkest_where_they_are_largest(tmp_path) -> None:
    query, key = torch.zeros(2, 1, 16, 1, 4).unbind(0)
    found = attention_rows(query, key, [7], segment_lengths=[4, 8], dilation_rates=[1, 2], is_causal=True)
    found |= attention_rows(query, key, [6], segment_lengths=[4, 8], dilation_rates=[1, 2], is_causal=True)
    assert row_shares(found[0, 6, 0], 16) == [0.5, 0, 0.5, 0, 1, 0.5, 1, *[0] * 9]
    assert row_shares(found[0, 7, 0], 16, cells=4) == [0, 1, 0, 0]
    write_rows(tmp_path / "rows.svg", found, 16, title="weights & <rows>")
    text = (tmp_path / "rows.svg").read_text()
    ElementTree.fromstring(text)
    assert "batch row 0, row 6, head 0" in text
    assert "weights &amp; &lt;rows&gt;" in text
    with pytest.raises(ValueError, match="name rows in attention_rows"):
        write_rows(tmp_path / "rows.svg", {}, 16)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_weights_of_tiles_are_drawn_where_the_tiles_lie(kind, tmp_path) -> None:
    weights, coordinates = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([[0, 0], [512, 256], [256, 0]])
    path = tmp_path / f"slide.{kind}"
    write_slide(path, weights, coordinates)
    assert path.stat().st_size > 0
    if kind == "svg":
        drawn = path.read_text()
        assert "3 tiles, 2 rows by 3 columns" in drawn
        root = ElementTree.fromstring(drawn)
        rects = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("x")]
        places = {(rect.get("x"), rect.get("y")) for rect in rects if rect.get("fill") != "none"}
        assert len(places) == 2  # a tile without weight is not drawn
    with pytest.raises(ValueError, match="one weight a tile"):
        write_slide(path, weights[None], coordinates)
