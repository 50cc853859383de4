"""Rows against a cache of all tokens are those of a full forward."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import DilatedSpec
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.nn.kv_cache import attend_full_cache


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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_a_full_forward(compiled) -> None:
    """Of all keys and values, earlier ones too, with padding before, between and after tokens."""
    torch.manual_seed(0)
    N, begin, spec = 60, 17, DilatedSpec.of([4, 16, 40], [1, 2, 3])
    attend = torch.compile(attend_full_cache, backend="eager", fullgraph=True) if compiled else attend_full_cache
    real = torch.ones(3, N, dtype=torch.bool)
    real[1, :6] = real[2, begin : begin + 9] = real[2, -5:] = False
    for order in (None, real.int().argsort(dim=1, stable=True)):
        rows = slice(0, 2 if order is None else 3)
        tensors = [torch.randn(3, N + 8, heads, 4, dtype=torch.float64)[rows] for heads in (4, 2, 2)]
        for x in tensors:
            x[:, N:] = torch.nan  # room that a static cache has not used
        q, k, v = (x.requires_grad_() for x in tensors)
        start = (~real[rows]).sum(1)
        out = attend(q[:, begin:N], k, v, torch.tensor(begin), start, spec, order=order)
        weight = torch.randn_like(out) * real[rows, begin:, None, None]
        got = torch.autograd.grad((out * weight).sum(), (q, k, v))
        alone = []
        for b, kept in enumerate(real[rows]):
            row = dilated_attention(
                *(x[b : b + 1, :N][:, kept] for x in (q, k, v)), [4, 16, 40], [1, 2, 3], is_causal=True
            )
            alone.append((row * weight.new_zeros(N, 4, 4).index_put((torch.arange(begin, N),), weight[b])[kept]).sum())
        expected = torch.autograd.grad(sum(alone), (q, k, v))
        for mine, theirs in zip(got, expected):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_missing_tokens_are_refused() -> None:
    x, spec = torch.randn(1, 4, 2, 4), DilatedSpec.of([4], [1])
    begin, start = torch.tensor(3), torch.tensor([0])
    with pytest.raises(ValueError, match="must include the 4 new tokens, got 2 tokens"):
        attend_full_cache(x, x[:, :2], x[:, :2], begin, start, spec)
