"""Folded branches show every pair as often as the branches do, and each pair is computed once."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core import folding
from dilated_attention_pytorch.core.pattern import dense_mask
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec

lengths = st.sampled_from([4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
rates = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


def weights_of(branch: Branch, offset: int, phase: int, fold: folding.Fold, tokens: int, causal: bool) -> torch.Tensor:
    """How often the kernels of a branch count each pair of a head, `(tokens, tokens)`."""
    found = torch.zeros(tokens, tokens, dtype=torch.int64)
    w, r = min(branch.segment_length, tokens), branch.dilation_rate
    for start in range(0, tokens, w):
        positions = torch.tensor(range(start + offset, min(start + w, tokens), r), dtype=torch.int64)
        rows = torch.arange(len(positions))
        level = torch.ones_like(rows)
        for period in (2, 4, 8):
            if fold.periods & period:
                level = level + ((rows - phase) % period == 0)
        pairs = torch.minimum(level[:, None], level)
        if fold.skipped:
            pairs = pairs * (rows[:, None] // fold.skipped != rows // fold.skipped)
        found[positions[:, None], positions] = pairs
    return found.tril() if causal else found


@given(
    st.lists(st.tuples(lengths, rates), min_size=1, max_size=5), st.integers(1, 140), st.integers(1, 5),
    st.sampled_from(["interleaved", "blocked", "grouped"]), st.booleans(),
)  # fmt: skip
def test_pairs_count_as_often_as_branches_show_them(pattern, tokens, heads, layout, causal) -> None:
    spec = DilatedSpec(tuple(Branch(w, r) for w, r in pattern), layout)
    table = spec.offsets(heads)
    with mock.patch.object(folding, "TILE", 8):  # the least that the longest period divides
        folds = folding.fold_branches(spec.branches, table, tokens)
    expected = dense_mask(spec, table, tokens, is_causal=causal).sum(0)
    for head in range(heads):
        found = sum(
            weights_of(branch, row[head], fold.phases[head] if fold.phases else 0, fold, tokens, causal)
            for branch, row, fold in zip(spec.branches, table, folds)
            if row[head] is not None and not fold.is_empty
        )
        assert torch.equal(torch.as_tensor(found).expand(tokens, tokens), expected[head])


def test_the_published_pattern_is_one_chain() -> None:
    spec = DilatedSpec.of([2048, 4096, 8192], [1, 2, 4])
    folds = folding.fold_branches(spec.branches, spec.offsets(12), 131_072)
    assert [fold.skipped for fold in folds] == [0, 1024, 1024]
    assert [fold.periods for fold in folds] == [2 + 4, 2, 0]
    short = folding.fold_branches(spec.branches, spec.offsets(12), 2000)
    assert [fold.is_empty for fold in short] == [False, True, True]


def test_heads_of_one_branch_are_not_folded() -> None:
    spec = DilatedSpec.of([2048, 4096], [1, 2], "grouped")
    folds = folding.fold_branches(spec.branches, spec.offsets(4), 131_072)
    assert all(fold.is_plain for fold in folds)
