"""The command `show`: what it draws is what the pattern's mask says, and so are its figures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.core import DilatedSpec, SparsePatternConfig, dense_mask
from dilated_attention_pytorch.core.block_layout import allowed_pairs
from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES
from dilated_attention_pytorch.tools.show import View, density, drawing, summary

from ..thorough import examples

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")


@settings(max_examples=examples(15))
@given(
    st.sampled_from([None, *PATTERN_TYPES]),
    st.lists(st.tuples(st.integers(8, 60), st.integers(1, 7)), min_size=1, max_size=3),
    st.integers(1, 100),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([(1, 1), (5, 8), (200, 3)]),
)
def test_every_cell_holds_the_share_of_its_pairs_that_is_seen(pattern, branches, n, head, is_causal, cells) -> None:
    spec = DilatedSpec.of([w for w, _ in branches], [r for _, r in branches])
    sparse = None if pattern is None else SparsePatternConfig(pattern, 0.4, 4)
    view = View(spec, n, heads=3, head=head, head_dim=4, is_causal=is_causal, sparse=sparse)
    mask = dense_mask(spec, spec.offsets(3), n, is_causal=is_causal)
    mask = (mask & allowed_pairs(view.layout(), spec, spec.offsets(3), 0, n))[:, head].sum(0).double()
    rows, columns = (min(count, n) for count in cells)
    i, j = torch.arange(n) * rows // n, torch.arange(n) * columns // n
    seen, pairs = torch.zeros(2, rows, columns, dtype=torch.float64).unbind(0)
    seen.index_put_((i[:, None], j), mask, True)
    pairs.index_put_((i[:, None], j), torch.ones(n, n, dtype=torch.float64), True)
    torch.testing.assert_close(density(view, *cells), seen / pairs)


def test_the_summary_counts_over_all_heads() -> None:
    spec = DilatedSpec.of([64], [2], "interleaved")
    covered, seen, kept, flops, keys, *reached = summary(
        View(spec, 128, heads=2, head_dim=8, sparse=SparsePatternConfig("local_window", 0.5, 16))
    )
    assert "50.00% of all rows" in covered
    # Each head has 32 rows of a segment, in two tiles of 16, of which a row keeps one.
    assert f"{2 * 2 * 2 * 16 * 16 / (2 * 128 * 128):.2%} of dense attention's" in seen
    assert "50.00% of what the branches show" in kept
    assert f"{4 * 8 * 2 * 2 * 2 * 16 * 16 / 1e9:,.4g} GFLOP" in flops
    assert flops.endswith("dense attention takes 16.00x, the branches without the block pattern 2.00x")
    assert "0 at least, 8.0 on average, 16 at most" in keys
    assert [line.split() for line in reached] == [  # half of a segment, which nothing leaves
        ["reach", *["after", "1", "layer", "25.00%", "of", "128", "tokens", "on", "average,", "25.00%", "at", "least"]],
        *(f"after {layers} layers 25.00% of 128 tokens on average, 25.00% at least".split() for layers in (2, 12)),
    ]


def test_without_a_block_pattern_the_summary_is_of_the_branches_alone() -> None:
    lines = summary(View(DilatedSpec.of([64], [1]), 128, heads=2))
    assert not any(line.startswith("kept") for line in lines)
    assert lines[2].endswith("; dense attention takes 2.00x")


@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_show_prints_a_drawing_and_writes_pictures(pattern, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="a PNG needs matplotlib")
    flags = ["--segments", "64", "128", "--rates", "1", "2", "--pattern", pattern, "--ratio", "0.25", "--block", "16"]
    flags += ["--tokens", "200", "--heads", "2", "--head", "1", "--causal", "--width", "20"]
    for name in ("picture.svg", "picture.png"):
        assert main(["show", *flags, "--out", str(tmp_path / name)]) == 0
        title, _, _, *lines = capsys.readouterr().out.splitlines()
        assert f"{pattern} keeps 0.25 in tiles of 16" in title
        assert len({len(line) for line in lines[:10]}) == 1
        assert lines[0][0] in "█▓▒░"  # a row sees itself
        assert lines[0][-1] == "·"  # and nothing of the future
        assert any(line.startswith("forward ") and "GFLOP" in line for line in lines)
        assert lines[-1] == str(tmp_path / name)
    ElementTree.fromstring((tmp_path / "picture.svg").read_text())
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_show_draws_branches_without_a_pattern(capsys) -> None:
    assert main(["show", "--segments", "8", "--rates", "1", "--tokens", "16", "--width", "4"]) == 0
    printed = capsys.readouterr().out
    assert main(["show", "--segment-lengths", "8", "--dilation-rates", "1", "--tokens", "16", "--width", "4"]) == 0
    assert capsys.readouterr().out == printed
    _, _, _, *lines = printed.splitlines()
    assert lines[:2] == ["██··", "··██"]


def test_what_is_seen_at_all_is_drawn() -> None:
    assert drawing(torch.tensor([[1e-9, 0.0]])) == "░·"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pattern", "diagonal"], "pattern_type must be one of local_window"),
        (["--ratio", "0.1"], "only a block pattern takes --ratio: name one with --pattern"),
        (["--pattern", "random", "--ratio", "0"], "above 0 and at most 1, got 0.0"),
        (["--pattern", "random", "--block", "100"], "a power of two, got 100"),
        (["--pattern", "random", "--block", "512"], "larger than the shortest segment, 256 tokens"),
        (["--head", "4"], "head must be one of the 4 heads"),
        (["--tokens", "0"], "tokens must be a whole number of at least 1, got 0"),
        (["--layout", "diagonal"], "head_layout must be one of"),
        (["--width", "0"], "--width must be at least 1, got 0"),
        (["--out", "picture.gif"], "written as .svg or .png, got 'picture.gif'"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused(flags, message, capsys) -> None:
    assert main(["show", "--segments", "256", "--rates", "1", *flags]) == 1
    assert message in capsys.readouterr().err
