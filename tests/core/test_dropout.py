"""Masks look like independent draws: along rows and keys, and between any two of them."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.dropout import keep_mask

TOKENS = 1500


def deviations(dropout_p: float, first: int, **changes) -> torch.Tensor:
    """`(queries, keys)`: 1 for dropped, less its mean, in units of its standard deviation."""
    i, j = torch.arange(first, first + TOKENS)[:, None], torch.arange(first, first + TOKENS)[None, :]
    settings = {"rows": i * 0, "heads": i * 0} | changes
    kept = keep_mask(torch.tensor([first, 77]), dropout_p, queries=i, keys=j, **settings)
    return ((~kept).double() - dropout_p) / (dropout_p * (1 - dropout_p)) ** 0.5


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
@pytest.mark.parametrize("first", [0, 1_000_000])
def test_rows_and_keys_drop_like_independent_draws(dropout_p: float, first: int) -> None:
    x = deviations(dropout_p, first)
    assert abs(x.mean()) * TOKENS < 4
    for way in (x, x.T):
        alone = way.sum(1) / TOKENS**0.5
        assert 0.9 < alone.std() < 1.1
        assert alone.abs().max() < 5.5
        together = (way @ way.T / TOKENS**0.5)[~torch.eye(TOKENS, dtype=torch.bool)]
        assert 0.99 < together.std() < 1.01
        assert together.abs().max() < 7


@pytest.mark.parametrize("changes", [{"heads": torch.ones(1, 1).long()}, {"rows": torch.ones(1, 1).long()}])
def test_masks_of_other_heads_and_batch_rows_have_nothing_in_common(changes) -> None:
    assert abs((deviations(0.3, 0) * deviations(0.3, 0, **changes)).mean()) * TOKENS < 4


def test_all_but_certain_dropout_still_keeps_something() -> None:
    i = torch.arange(3000)[:, None]
    assert keep_mask(torch.tensor([1, 2]), 1 - 1e-12, rows=i * 0, heads=i * 0, queries=i, keys=i.T).sum() <= 1
