from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.charts import bars
from dilated_attention_pytorch.functional import attention_rows
from dilated_attention_pytorch.pages import plots
from dilated_attention_pytorch.pages.plots import row_shares, slide_figure, write_rows, write_slide


def test_weights_of_rows_are_drawn_darkest_where_they_are_largest(tmp_path) -> None:
    query, key = torch.zeros(2, 1, 16, 1, 4).unbind(0)
    found = attention_rows(query, key, [7], segment_lengths=[4, 8], dilation_rates=[1, 2], is_causal=True)
    found |= attention_rows(query, key, [6], segment_lengths=[4, 8], dilation_rates=[1, 2], is_causal=True)
    assert row_shares(found[0, 6, 0], 16) == [0.5, 0, 0.5, 0, 1, 0.5, 1, *[0] * 9]
    assert row_shares(found[0, 7, 0], 16, cells=4) == [0, 1, 0, 0]
    write_rows(str(tmp_path / "rows.svg"), found, 16, title="weights & <rows>")
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
        words = "".join(ElementTree.fromstring(path.read_text()).itertext())
        assert "3 tiles" in words
        assert "row of tiles" in words
    picture, bar = slide_figure(weights, coordinates, 256, unit="weight").axes
    shown = picture.images[0].get_array()
    assert shown.filled(-1.0).tolist() == [[0.5, 0.0, -1.0], [-1.0, -1.0, 0.25]]  # empty where there is no tile
    assert bar.get_ylabel() == "weight"
    with pytest.raises(ValueError, match="one weight per tile"):
        write_slide(path, weights[None], coordinates)


def test_a_chart_in_a_page_says_the_figures_of_what_is_pointed_at_in_the_pages_colours() -> None:
    curves = {"ours": [(512, 1.0), (1024, 2.5)], "a <b>": [(512, 3.0), (1024, 4.0)]}
    svg = plots.inline_svg(plots.curves(curves, "tokens", "ms", {"limit": 5.0}, dots=["ours"]), "a chart")
    titles = [element.text for element in ElementTree.fromstring(svg).iter("title")]
    assert titles == [
        "ours: 1 ms at 512 tokens", "ours: 2.5 ms at 1,024 tokens", "a <b>: 3 ms at 512 tokens",
        "a <b>: 4 ms at 1,024 tokens", "limit: 5 ms",
    ]  # fmt: skip
    assert "var(--s0)" in svg
    assert "var(--ink)" in svg
    assert "#212529" not in svg
    assert "fill-opacity: 0" in svg  # the points of a curve without dots
    drawn = plots.inline_svg(bars([("a", [1.0, 2.0]), ("b", [3.0, 4.0])], ["x", "y"], "GiB", [2.5]), "bars")
    titles = [element.text for element in ElementTree.fromstring(drawn).iter("title")]
    assert titles == ["a, x: 1 GiB", "b, x: 3 GiB", "a, y: 2 GiB", "b, y: 4 GiB"]


def test_figures_that_differ_by_rounding_alone_are_drawn() -> None:
    same = sum([0.1] * 3) / 3
    assert same != 0.1
    for points in ([(1, 0.1), (2, same)], [(1, 1e-14), (2, 3e-14)], [(5, 0.0)]):
        assert "<svg" in plots.inline_svg(plots.curves({"rate": points}, "step", "rate"), "rate")


def test_a_curve_of_one_point_is_seen() -> None:
    for points, opacity in (([(3, 1.0)], 1), ([(3, 1.0), (4, 2.0)], 0)):
        [line] = plots.curves({"validation": points}, "step", "loss").axes[0].get_lines()
        assert line.get_markerfacecolor()[1] == opacity


def test_many_names_above_a_chart_do_not_make_it_smaller() -> None:
    heights = []
    for count in (2, 12):
        figure = plots.curves({f"a long name of class {i}": [(1, 1.0), (2, i)] for i in range(count)}, "step", "loss")
        figure.draw_without_rendering()
        heights.append(figure.axes[0].get_window_extent().height / figure.dpi)
    assert heights[1] > 0.9 * heights[0]


def test_bars_are_named_without_exponents() -> None:
    words = [text.get_text() for text in bars([("a", [1204.6, 98.76])], ["x", "y"], "TFLOP/s").axes[0].texts]
    assert words == ["1,205", "98.8", "a"]


def test_a_missing_matplotlib_is_named_with_its_installation(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"a chart needs matplotlib: pip install 'longnet-dilated-attention\[viz\]'"
    ):
        plots.curves({"a": [(1, 1.0)]}, "step", "loss")
    with pytest.raises(ModuleNotFoundError, match="a chart needs matplotlib"):
        plots.check_picture(tmp_path / "picture.svg")
