from __future__ import annotations

import math

import pytest
import torch

from dilated_attention_pytorch.core.call import Call, Inputs
from dilated_attention_pytorch.core.dropout import keep_mask
from dilated_attention_pytorch.core.reference import reference_backward, reference_forward
from dilated_attention_pytorch.core.spec import DilatedSpec

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")


@pytest.mark.parametrize("seed", [None, torch.tensor([5, 6])])
@pytest.mark.parametrize("rates", [[1, 2], [2, 3]])
def test_the_written_gradient_is_the_one_of_autograd(seed, rates) -> None:
    call = Call(spec=DilatedSpec.of([4, 9], rates), is_causal=True, dropout_p=0.0 if seed is None else 0.4)
    q, k, v = (torch.randn(2, 11, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    spans = torch.tensor([[2, 11], [0, 0]])
    out, lse = reference_forward(q, k, v, call, spans, seed)
    do, dl = torch.randn_like(out), torch.randn_like(lse)
    loss = (out * do).sum() + (lse * dl)[lse != -torch.inf].sum()
    expected = torch.autograd.grad(loss, (q, k, v))
    found = reference_backward(call, Inputs(q.detach(), k.detach(), v.detach(), spans, seed), do, dl)
    torch.testing.assert_close(tuple(found), expected, rtol=1e-12, atol=1e-12)


def test_a_key_that_two_branches_show_counts_twice() -> None:
    q, k, v = (torch.zeros(1, 4, 1, 1, dtype=torch.float64) for _ in range(3))
    v[0, :, 0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out, lse = reference_forward(q, k, v, Call(spec=DilatedSpec.of([2, 4], [1, 2])))
    # With all scores 0, row 0 sees keys 0, 1 in the first branch and 0, 2 in the second.
    assert out[0, 0, 0, 0].item() == pytest.approx((1 + 2 + 1 + 3) / 4)
    assert lse[0, 0, 0].item() == pytest.approx(math.log(4))
    assert out[0, 1, 0, 0].item() == pytest.approx((1 + 2) / 2)


def test_dropout_drops_a_key_in_all_branches_that_show_it_or_in_none() -> None:
    q, k = torch.zeros(2, 1, 8, 1, 8, dtype=torch.float64).unbind(0)
    call = Call(spec=DilatedSpec.of([8, 8, 8], [1, 1, 1]), dropout_p=0.5)
    seed = torch.tensor([3, 4])
    # With scores of 0 and values of one feature per key, `out` is the weights: each 1/8, dropped or doubled.
    weights, _ = reference_forward(q, k, torch.eye(8, dtype=torch.float64)[None, :, None], call, seed=seed)
    assert weights.unique().tolist() == pytest.approx([0.0, 0.25])


def test_dropped_weights_depend_on_every_coordinate() -> None:
    index = torch.arange(32)
    common = {"seed": torch.tensor([1, 2]), "dropout_p": 0.5}
    grids = {
        name: torch.meshgrid(index, index, indexing="ij")[0 if name == "queries" else 1] for name in ("queries", "keys")
    }
    zero = torch.tensor(0)
    base = keep_mask(**common, rows=zero, heads=zero, **grids)
    others = [
        keep_mask(**common, rows=zero + 1, heads=zero, **grids),
        keep_mask(**common, rows=zero, heads=zero + 1, **grids),
        keep_mask(**(common | {"seed": torch.tensor([1, 3])}), rows=zero, heads=zero, **grids),
        base.T,
    ]
    for other in others:
        agreement = (base == other).double().mean().item()
        assert 0.4 < agreement < 0.6
