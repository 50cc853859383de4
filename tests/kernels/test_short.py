"""Short calls run in one launch forward and two backward, and give what the reference gives."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.functional import dilated_attention

short = pytest.importorskip("dilated_attention_pytorch.kernels.triton.short", reason="the kernels need Triton")
launching = pytest.importorskip("dilated_attention_pytorch.kernels.triton.launching")

# Tokens, segments, rates, query heads, key/value heads, and settings.
CASES = {
    "no length is a multiple of a tile": (150, [64, 128, 150], [1, 2, 4], (4, 4), {}),
    "causal, grouped queries": (150, [64, 128, 200], [1, 2, 4], (4, 2), {"is_causal": True}),
    "blocked, one key/value head": (
        100,
        [64, 64, 128],
        [1, 2, 4],
        (4, 1),
        {"is_causal": True, "head_layout": "blocked"},
    ),
    "rows that no branch covers, dropout": (70, [64, 64], [2, 4], (4, 4), {"is_causal": True, "dropout_p": 0.3}),
    "each head in one branch, dropout": (70, [64, 64], [1, 4], (4, 2), {"head_layout": "grouped", "dropout_p": 0.3}),
    "three remainders, scores turned around": (100, [48, 96], [1, 3], (3, 3), {"scale": -0.3}),
    "one token": (1, [48, 96], [1, 3], (3, 3), {"is_causal": True}),
    "a shard of the heads": (64, [64], [2], (2, 2), {"head_offset": 3, "total_heads": 6}),
}


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The names of the kernels that are launched."""
    found: list[str] = []
    call = launching.Launch.__call__

    def noted(self, *tensors) -> None:
        found.append(self._kernel.fn.__name__)
        call(self, *tensors)

    monkeypatch.setattr(launching.Launch, "__call__", noted)
    get_global_pattern_cache().forget("plan")
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
@pytest.mark.filterwarnings("ignore:no branch of")
@pytest.mark.parametrize("name", CASES)
def test_a_short_call_is_one_launch_and_gives_what_the_reference_gives(name, launches) -> None:
    tokens, segments, rates, (heads, kv_heads), settings = CASES[name]
    torch.manual_seed(0)
    leaves = [torch.randn(2, tokens, count, 16, requires_grad=True) for count in (heads, kv_heads, kv_heads)]
    grad_out, grad_lse = torch.randn(2, tokens, heads, 16), torch.randn(2, tokens, heads)
    results = []
    for backend in ("reference", "triton"):
        torch.manual_seed(1)  # the same dropout
        out, lse = dilated_attention(*leaves, segments, rates, **settings, return_lse=True, backend=backend)
        covered = lse != -torch.inf
        loss = (out * grad_out).sum() + (lse * grad_lse)[covered].sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    assert launches == ["forward_kernel", "dq_kernel", "dkdv_kernel"]
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
def test_backward_takes_tensors_that_were_saved_with_other_strides() -> None:
    """As hooks may save them: backward's plan is of the tensors that it gets."""
    leaves = [torch.randn(2, 40, 2, 16, requires_grad=True) for _ in range(3)]
    grads = []
    for convert in (torch.Tensor.contiguous, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        for _ in range(2):  # a second call finds what the first has planned
            with torch.autograd.graph.saved_tensors_hooks(convert, lambda x: x):
                out = dilated_attention(*leaves, [16, 64], [1, 2], backend="triton")
            grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for found in grads[1:]:
        for one, other in zip(grads[0], found):
            assert torch.equal(one, other)


def test_a_tile_lies_in_one_segment_of_each_branch() -> None:
    def rows(segments: list[int], rates: list[int], tokens: int = 1000, **settings) -> int:
        return short.own_rows(Call.of(segments, rates, **settings), tokens)

    assert rows([512, 2048], [1, 4]) == 64
    assert rows([128, 256, 512], [1, 2, 4]) == 32
    assert rows([999], [3]) == 0
    assert rows([1000], [3]) == 64  # the whole sequence
    assert rows([192], [12]) == 16
    assert rows([512], [1], sparse=SparsePatternConfig("random", sparsity_ratio=0.5, block_size=64)) == 0
    assert rows([512], [1], table=((0, 1),)) == 0


def test_only_short_calls_are_taken() -> None:
    call = Call.of([2048, 4096], [1, 2])
    assert short.takes(call, batch=1, tokens=1024, heads=12)
    assert not short.takes(call, batch=8, tokens=1024, heads=12)
    assert not short.takes(call, batch=1, tokens=8192, heads=12)
