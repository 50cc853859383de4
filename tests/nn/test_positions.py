from __future__ import annotations

import math

import pytest
import torch

from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.nn.positions import RotaryPositions, XPosPositions, rotate


def test_angles_are_exact_at_a_million() -> None:
    rotation = RotaryPositions(8).of(torch.tensor([[1_000_003]]))
    assert rotation.cos[0, 0, 0].item() == pytest.approx(math.cos(1_000_003), abs=1e-6)


@pytest.mark.parametrize(("i", "j"), [(40, 30), (540, 530), (1024 + 40, 1024 + 30), (300, 0), (7, 7)])
def test_scores_are_the_published_functions_of_the_distance(i, j) -> None:
    q, k = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8)

    def score(positions) -> float:
        turned_q, _ = rotate(q, k, positions.of(torch.tensor([[i]])))
        _, turned_k = rotate(q, k, positions.of(torch.tensor([[j]])))
        return (turned_q * turned_k).sum().item()

    turns = [2 * math.cos((i - j) * 10_000 ** (-pair / 4)) for pair in range(4)]
    decays = [((2 * pair / 8 + 0.4) / 1.4) ** ((i - j) / 64) for pair in range(4)]
    assert score(RotaryPositions(8)) == pytest.approx(sum(turns), abs=1e-4)
    # The positions of xPos start again after a period of 1024, which rows that see each other never straddle.
    expected = sum(turn * decay for turn, decay in zip(turns, decays))
    assert score(XPosPositions(8, period=1024, scale_base=64)) == pytest.approx(expected, abs=1e-4)


def test_xpos_refuses_what_would_overflow() -> None:
    with pytest.raises(ValueError, match=r"e\^160, beyond float32: use scale_base >= 1026"):
        XPosPositions(64, period=131_072)
    rotation = XPosPositions(8, period=64)(1, 4)
    half = torch.ones(1, 4, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="beyond float16"):
        rotate(half, half, rotation)


def test_positions_start_at_each_document() -> None:
    positions = XPosPositions(8, period=16)
    spans = document_spans(1, 9, cu_seqlens=torch.tensor([0, 4, 9]))
    packed, alone = positions(1, 9, spans), positions(1, 5)
    for x, y in zip(packed, alone):
        assert torch.equal(x[:, 4:], y)


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="must be even, got 7"):
        RotaryPositions(7)
