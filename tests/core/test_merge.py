from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core.merge import merge, merge_


def partial(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def empty(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, dim, dtype=torch.float64), torch.full((rows,), -torch.inf, dtype=torch.float64)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(-300, 300), st.integers(0, 1000))
def test_merging_parts_of_a_softmax_gives_the_whole(left, right, shift, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, left + right, dtype=torch.float64, generator=generator)
    scores[:, :left] += shift
    values = torch.randn(left + right, 3, dtype=torch.float64, generator=generator)
    merged = merge(*partial(scores[:, :left], values[:left]), *partial(scores[:, left:], values[left:]))
    for found, expected in zip(merged, partial(scores, values)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_merge_with_an_empty_partial_is_identity() -> None:
    out, lse = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for merged in (merge(out, lse, *empty(4, 3)), merge(*empty(4, 3), out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


def test_two_empty_partials_are_empty() -> None:
    out, lse = merge(*empty(2, 3), *empty(2, 3))
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -torch.inf).all()


def test_merge_is_associative_and_commutative() -> None:
    a, b, c = ((torch.randn(4, 3).double(), torch.randn(4).double() * 30) for _ in range(3))
    for one, other in ((merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))), (merge(*a, *b), merge(*b, *a))):
        for x, y in zip(one, other):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_merging_in_place_writes_through_strided_views() -> None:
    out, lse = torch.randn(8, 3).double(), torch.randn(8).double()
    other = torch.randn(4, 3).double(), torch.randn(4).double()
    expected = merge(out[1::2], lse[1::2], *other)
    untouched = out[::2].clone()
    merge_(out[1::2], lse[1::2], *other)
    torch.testing.assert_close((out[1::2], lse[1::2]), expected)
    assert torch.equal(out[::2], untouched)


def test_merge_is_differentiable_also_where_partials_are_empty() -> None:
    tensors = [torch.randn(3, 2).double(), torch.tensor([0.3, -torch.inf, -torch.inf]).double()]
    tensors += [torch.randn(3, 2).double(), torch.tensor([0.5, 0.1, -torch.inf]).double()]
    for x in tensors:
        x.requires_grad_()
    out, lse = merge(*tensors)
    (out.sum() + lse[:2].sum()).backward()
    assert all(x.grad.isfinite().all() for x in tensors)
    weight = torch.sigmoid(torch.tensor(0.2, dtype=torch.float64))
    torch.testing.assert_close(tensors[2].grad[0], weight.expand(2))


def test_low_precision_partials_merge_by_their_float32_lse() -> None:
    a, b = ((torch.randn(4, 3).bfloat16(), torch.randn(4)) for _ in range(2))
    out, lse = merge(*a, *b)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact = merge(a[0].float(), a[1], b[0].float(), b[1])[0]
    torch.testing.assert_close(out, exact.bfloat16())
