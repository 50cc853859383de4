from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core.pattern import (
    common_period,
    covered_rows,
    dense_mask,
    forward_flops,
    grid_rows,
    rounds_little,
    segments,
    training_bytes,
    uncovered_share,
    visible_pairs,
)
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")

branches = st.builds(Branch, st.integers(1, 40), st.integers(1, 12))
specs = st.builds(
    DilatedSpec,
    st.lists(branches, min_size=1, max_size=4).map(tuple),
    st.sampled_from(["interleaved", "blocked", "grouped"]),
)


def sees(branch: Branch, offset: int | None, i: int, j: int, is_causal: bool) -> bool:
    """SPEC's sentence, word for word."""
    w, r = branch.segment_length, branch.dilation_rate
    on_grid = offset is not None and (i % w) % r == offset and (j % w) % r == offset
    return on_grid and i // w == j // w and (j <= i or not is_causal)


@given(specs, st.integers(1, 30), st.integers(1, 6), st.booleans())
def test_the_mask_the_covered_rows_and_the_costs_agree_with_the_definition(spec, n, heads, is_causal) -> None:
    offsets = spec.offsets(heads)
    literal = torch.tensor(
        [
            [[[sees(branch, row[h], i, j, is_causal) for j in range(n)] for i in range(n)] for h in range(heads)]
            for branch, row in zip(spec.branches, offsets)
        ]
    )
    assert torch.equal(dense_mask(spec, offsets, n, is_causal=is_causal), literal)
    assert torch.equal(covered_rows(spec, offsets, n), literal.any(0).any(-1).T)
    pairs = [
        visible_pairs(branch, row[h], n, is_causal=is_causal)
        for branch, row in zip(spec.branches, offsets)
        for h in range(heads)
    ]
    assert sum(pairs) == literal.sum().item()
    assert forward_flops(spec, n, heads, 8, is_causal=is_causal) == 4 * 8 * literal.sum().item()


@given(st.integers(0, 50), st.integers(1, 60))
def test_segments_tile_the_document(n, w) -> None:
    assert [p for start, length in segments(n, w) for p in range(start, start + length)] == list(range(n))


@given(st.integers(0, 50), st.integers(1, 12), st.integers(0, 12))
def test_grid_rows_counts_a_range(segment, rate, offset) -> None:
    assert grid_rows(segment, rate, offset) == len(
        [p for p in range(segment) if p >= offset and (p - offset) % rate == 0]
    )


@given(specs, st.integers(1, 200))
def test_rows_that_see_each_other_never_straddle_the_common_period(spec, n) -> None:
    period = common_period(spec)
    i = torch.arange(n)
    for branch in spec.branches:
        same_segment = i[:, None] // branch.segment_length == i // branch.segment_length
        assert ((i[:, None] // period == i // period) | ~same_segment).all()


def test_flops_of_the_published_setting_are_the_formula() -> None:
    n, heads, dim = 32_768, 12, 64
    spec = DilatedSpec.of([2048, 4096, 8192], [1, 2, 4])
    formula = sum(4 * (n // r) * (w // r) * dim * heads for w, r in ((2048, 1), (4096, 2), (8192, 4)))
    assert forward_flops(spec, n, heads, dim) == formula
    assert forward_flops(spec, n, heads, dim, kv_heads=4) == formula


def test_bytes_are_linear_in_tokens() -> None:
    assert training_bytes(2000, 8, 64) == 2 * training_bytes(1000, 8, 64)
    assert training_bytes(1, 8, 64, kv_heads=2) == (4 * 8 + 4 * 2) * 64 * 2 + 2 * 8 * 4


def test_uncovered_share_is_exact_where_it_is_known() -> None:
    assert uncovered_share(DilatedSpec.of([6], [2])) == 0.5
    assert uncovered_share(DilatedSpec.of([6, 6], [2, 3])) == pytest.approx(1 - (3 + 2 - 1) / 6)


@pytest.mark.parametrize(("rates", "expected"), [((1, 1, 2), True), ((1, 2, 4), True), ((1, 1, 1), False)])
def test_results_are_summed_in_their_own_dtype_up_to_two_and_a_half_branches_per_row(rates, expected) -> None:
    spec = DilatedSpec.of([64] * len(rates), rates)
    assert rounds_little(spec, spec.offsets(4)) is expected
