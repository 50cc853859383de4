"""Rows against a cache of all tokens are those of a full forward."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.nn.full_cache import attend_full_cache


@pytest.mark.parametrize("head_layout", ["interleaved", "blocked", "grouped"])
@pytest.mark.parametrize(("segments", "rates"), [([4, 16, 40], [1, 2, 3]), ([1024], [1])])
def test_new_tokens_get_the_rows_of_a_full_forward(segments, rates, head_layout) -> None:
    N, start = 130, torch.tensor([0, 7, 33])
    q = torch.randn(3, N, 8, 4, dtype=torch.float64)
    k, v = torch.randn(2, 3, N, 2, 4, dtype=torch.float64).unbind(0)
    padding = torch.arange(N) < start[:, None]
    settings = {"is_causal": True, "head_layout": head_layout, "scale": 0.3}
    expected = dilated_attention(q, k, v, segments, rates, key_padding_mask=padding, **settings)
    spec = DilatedSpec.of(segments, rates, head_layout)
    for begin, m in ((0, 1), (39, 1), (40, 1), (129, 1), (20, 30), (40, 90)):
        for n in (begin + m, N):  # a cache that grows, and one with room that it has not used
            keys, values = k[:, :n].clone(), v[:, :n].clone()
            keys[:, begin + m :] = values[:, begin + m :] = torch.nan
            out = attend_full_cache(q[:, begin : begin + m], keys, values, torch.tensor(begin), start, spec, scale=0.3)
            real = ~padding[:, begin : begin + m]
            torch.testing.assert_close(out[real], expected[:, begin : begin + m][real], rtol=1e-10, atol=1e-10)


def test_gradients_and_missing_tokens_are_refused() -> None:
    x, spec = torch.randn(1, 4, 2, 4), DilatedSpec.of([4], [1])
    begin, start = torch.tensor(3), torch.tensor([0])
    with pytest.raises(ValueError, match="a cache keeps no gradients"):
        attend_full_cache(x[:, 3:].requires_grad_(), x, x, begin, start, spec)
    with pytest.raises(ValueError, match="it has 2 tokens, of which 4 are new"):
        attend_full_cache(x, x[:, :2], x[:, :2], begin, start, spec)
