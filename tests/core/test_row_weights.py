from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from dilated_attention_pytorch.functional import attention_rows, dilated_attention

from ..conformance.draws import Draw, draws
from ..thorough import examples


@pytest.mark.filterwarnings("ignore:no branch of")
@settings(max_examples=examples(10))
@given(draws(max_tokens=40, dropout=False))
def test_the_weights_of_rows_give_the_references_output(draw: Draw) -> None:
    query, key, value = (x.detach() for x in draw.tensors(torch.float64))
    stated = {name: x for name, x in draw.settings().items() if name != "dropout_p"}
    rows = sorted({0, draw.tokens // 3, draw.tokens - 1})
    out = dilated_attention(query, key, value, **stated, backend="reference")
    found = attention_rows(query, key, rows, **stated)
    assert set(found) == {(b, row, h) for b in range(draw.batch) for row in rows for h in range(draw.heads)}
    for (b, row, head), (positions, weights) in found.items():
        assert (positions.diff() > 0).all()
        seen = value[b, positions, head // (draw.heads // draw.kv_heads)]
        torch.testing.assert_close(weights @ seen, out[b, row, head], rtol=1e-10, atol=1e-10)
        assert not len(weights) or abs(weights.sum() - 1) < 1e-10


def test_a_million_keys_take_the_memory_of_what_a_row_sees() -> None:
    query, key = torch.randn(1, 1, 1, 2).expand(1, 1 << 20, 1, 2), torch.randn(1, 1, 1, 2).expand(1, 1 << 20, 1, 2)
    found = attention_rows(query, key, [1 << 19], segment_lengths=[1024, 1 << 20], dilation_rates=[1, 4096])
    positions, weights = found[0, 1 << 19, 0]
    assert len(positions) == len(weights) == 1024 + 256 - 1


def test_rows_outside_the_sequence_are_refused() -> None:
    x = torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match="of at most 7, got 8"):
        attention_rows(x, x, [8], [4], [1])
    with pytest.raises(ValueError, match="of at least 0 and at most 7, got -1"):
        attention_rows(x, x, [-1], [4], [1])
