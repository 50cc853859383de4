"""Kernels that compute pairs of several branches once give what the reference gives, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels.triton import tuning

short = pytest.importorskip("dilated_attention_pytorch.kernels.triton.short", reason="the kernels need Triton")

# Tokens, segments, rates, query heads, key/value heads, and settings.
CASES = {
    "three branches, causal, grouped queries": (
        560, [256, 512, 600], [1, 2, 4], (4, 2), {"is_causal": True}, [(0, 6), (128, 2), (128, 0)],
    ),
    "ragged": (400, [256, 400], [1, 2], (2, 2), {}, [(0, 2), (128, 0)]),
    "one segment of all": (130, [200, 300], [1, 2], (2, 2), {"scale": -0.3}, [(0, 2)]),
    "dropout, causal": (
        560, [256, 512, 600], [1, 2, 4], (4, 2), {"is_causal": True, "dropout_p": 0.3}, [(0, 6), (128, 2), (128, 0)],
    ),
    "dropout in packed documents": (
        420, [256, 1024], [1, 2], (2, 2), {"cu_seqlens": torch.tensor([0, 20, 400, 420]), "dropout_p": 0.3},
        [(0, 2), (128, 0)],
    ),
    "packed documents": (
        420, [256, 1024], [1, 2], (2, 2), {"cu_seqlens": torch.tensor([0, 20, 400, 420])}, [(0, 2), (128, 0)],
    ),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
@pytest.mark.filterwarnings("ignore::dilated_attention_pytorch.core.spec.ReachWarning")
@pytest.mark.parametrize("name", CASES)
def test_folded_branches_give_what_the_reference_gives(name, plans, monkeypatch) -> None:
    tokens, segments, rates, (heads, kv_heads), settings, folds = CASES[name]
    monkeypatch.setattr(short, "takes", lambda *call: False)
    torch.manual_seed(0)
    leaves = [torch.randn(1, tokens, count, 16, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
    grad_out, grad_lse = torch.randn(1, tokens, heads, 16), torch.randn(1, tokens, heads)
    results = []
    for backend in ("reference", "triton"):
        torch.manual_seed(1)  # of dropout
        out, lse = dilated_attention(*leaves, segments, rates, **settings, return_lse=True, backend=backend)
        loss = (out * grad_out).sum() + (lse * grad_lse).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    assert [branch.fold[:2] for branch in plans[0].branches] == folds
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
def test_block_layouts_leave_branches_as_they_are(plans, monkeypatch) -> None:
    monkeypatch.setattr(short, "takes", lambda *call: False)
    q = torch.randn(1, 300, 2, 16)
    sparse = SparsePatternConfig("local_window", 0.5, 64)
    dilated_attention(q, q, q, [256, 300], [1, 2], sparse_config=sparse, backend="triton")
    assert [len(plan.branches) for plan in plans] == [2]
    assert all(branch.fold.is_plain for plan in plans for branch in plan.branches)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
def test_a_short_call_whose_heads_have_no_rows_gives_zeros() -> None:
    q = torch.randn(1, 1, 1, 16)
    out, lse = dilated_attention(q, q, q, [8], [4], head_offset=1, total_heads=4, return_lse=True, backend="triton")
    assert not out.any()
    assert lse.item() == -torch.inf


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_tuned_tiles_stay_within_a_segment_of_the_finer_branch(kernel, plans, monkeypatch) -> None:
    monkeypatch.setattr(short, "takes", lambda *call: False)
    q = torch.randn(1, 300, 2, 16)
    large = tuning.Tiles(256, 256, 4, 1)
    with tuning.trying(tuning.Kind(kernel, 4, 64, False), large):
        dilated_attention(q, q, q, [256, 300], [1, 2], backend="triton")
        _, coarse = plans[0].branches
        tiles = coarse.tiles(kernel)
    assert max(tiles.own, tiles.walk) <= coarse.fold.skipped == 128
