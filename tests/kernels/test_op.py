"""The operator behaves as PyTorch's own do: checked by PyTorch's tools, compiled, checkpointed, autocast."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import BlockSparseRingDilatedAttention, SparsePatternConfig
from dilated_attention_pytorch.core.spans import checked_spans
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels.op import attend_backward, attend_op

SPEC = {"segment_lengths": [4, 8, 16], "dilation_rates": [1, 2, 3]}


def tensors(tokens: int = 18, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64):
    return [torch.randn(1, tokens, h, 4, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def op_arguments(*, spans=None, seed=None, is_causal=True, backend="eager"):
    dropout = 0.0 if seed is None else 0.3
    return (spans, seed, [4, 8], [1, 2], "interleaved", is_causal, None, dropout, 0, None, None, backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("spans", [None, torch.tensor([[0, 7], [7, 15]])])
@pytest.mark.parametrize("seed", [None, torch.tensor([3, 4])])
def test_opcheck_accepts_forward_and_backward(backend, spans, seed) -> None:
    q, k, v = tensors()
    rest = op_arguments(spans=spans, seed=seed, backend=backend)
    torch.library.opcheck(attend_op, (q, k, v, *rest))
    out, lse = (x.detach() for x in attend_op(q, k, v, *rest))
    detached = [x.detach() for x in (q, k, v)]
    for grad_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(attend_backward, (torch.randn_like(out), grad_lse, *detached, out, lse, *rest))


SPARSE = {pattern: SparsePatternConfig(pattern, 0.5, 2) for pattern in ("random", "content_adaptive")}


@pytest.mark.parametrize("pattern", SPARSE)
def test_opcheck_accepts_a_block_pattern(pattern) -> None:
    q, k, v = tensors()
    rest = (*op_arguments(), pattern, 0.5, 2, None, 2, 0, True)
    torch.library.opcheck(attend_op, (q, k, v, *rest))
    out, lse = (x.detach() for x in attend_op(q, k, v, *rest))
    detached = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(attend_backward, (torch.randn_like(out), None, *detached, out, lse, *rest))


@pytest.mark.parametrize("pattern", SPARSE)
def test_a_block_pattern_compiles_whole_with_any_length(pattern) -> None:
    module = BlockSparseRingDilatedAttention(**SPEC, sparse_config=SPARSE[pattern])
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (12, 18, 31):
        inputs = tensors(tokens)
        expected, found = module(*inputs, is_causal=True), compiled(*inputs, is_causal=True)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), inputs) for x in (expected, found)))


@pytest.mark.parametrize("pattern", SPARSE)
def test_gradcheck_accepts_a_block_pattern(pattern) -> None:
    """Its steps are too small to change the choice of tiles."""

    def run(q, k, v):
        return dilated_attention(q, k, v, [8], [1], is_causal=True, sparse_config=SPARSE[pattern], return_lse=True)

    assert torch.autograd.gradcheck(run, tensors(tokens=7, heads=2, kv_heads=1))


def test_opcheck_accepts_the_spans() -> None:
    torch.library.opcheck(checked_spans, (torch.tensor([0, 3, 7]), "cu_seqlens", 9))
    torch.library.opcheck(checked_spans, (torch.tensor([[False, True]]), "key_padding_mask", 2))


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck_accepts_out_and_lse(backend, is_causal, dropout_p) -> None:
    def run(q, k, v):
        torch.manual_seed(0)
        return dilated_attention(
            q, k, v, **SPEC, is_causal=is_causal, dropout_p=dropout_p, return_lse=True, backend=backend
        )

    assert torch.autograd.gradcheck(run, tensors(tokens=7, heads=2, kv_heads=1))


class Seen(TorchDispatchMode):
    """The operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_plain_call_equals_the_registered_operator_and_a_dispatch_mode_sees_that() -> None:
    inputs = tensors()
    plain = dilated_attention(*inputs, **SPEC, is_causal=True)
    with Seen() as seen:
        watched = dilated_attention(*inputs, **SPEC, is_causal=True)
        watched_grads = torch.autograd.grad(watched.sum(), inputs)
    assert "dilated_attention_pytorch::attend" in seen.names
    assert "dilated_attention_pytorch::attend_backward" in seen.names
    assert torch.equal(plain, watched)
    for one, other in zip(torch.autograd.grad(plain.sum(), inputs), watched_grads):
        assert torch.equal(one, other)


def test_fake_and_meta_tensors_give_shapes() -> None:
    for mode, device in ((FakeTensorMode(), "cpu"), (nullcontext(), "meta")):
        with mode:
            q, k, v = (torch.empty(1, 18, h, 4, device=device) for h in (4, 2, 2))
            out, lse = dilated_attention(q, k, v, **SPEC, return_lse=True)
            assert (out.shape, lse.shape) == ((1, 18, 4, 4), (1, 18, 4))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = tensors()
    (grad,) = torch.autograd.grad(dilated_attention(q, k, v, **SPEC).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


@pytest.mark.parametrize("lengths", ["none", "mask", "packed"])
def test_compiles_whole_with_any_length(lengths) -> None:
    def run(q, k, v):
        settings = {}
        if lengths == "mask":
            settings["key_padding_mask"] = torch.arange(q.shape[1])[None] < 3
        elif lengths == "packed":
            settings["cu_seqlens"] = torch.tensor([0, 5, 9])
        out = dilated_attention(q * 2, k, v, **SPEC, is_causal=True, **settings)
        return out * out

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (12, 18, 31):
            inputs = tensors(tokens)
            expected, found = run(*inputs), compiled(*inputs)
            torch.testing.assert_close(found, expected)
            grads = [torch.autograd.grad(x.sum(), inputs) for x in (expected, found)]
            torch.testing.assert_close(*grads)


def test_compiles_with_dropout() -> None:
    compiled = torch.compile(
        lambda q, k, v: dilated_attention(q, k, v, **SPEC, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    inputs = tensors()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(compiled(*inputs))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_checkpointing_draws_the_same_dropout_again() -> None:
    def run(q, k, v):
        return dilated_attention(q, k, v, **SPEC, dropout_p=0.5)

    inputs = tensors()
    grads = []
    for call in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(call(*inputs).sum(), inputs))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_autocast_computes_in_its_dtype_and_leaves_float64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dilated_attention(*tensors(dtype=torch.float32), **SPEC).dtype == torch.bfloat16
        assert dilated_attention(*tensors(dtype=torch.float64), **SPEC).dtype == torch.float64


def test_gradients_reach_only_what_asks_for_them() -> None:
    q, k, v = tensors()
    dilated_attention(q, k.detach(), v.detach(), **SPEC).sum().backward()
    assert q.grad is not None
    assert k.grad is None
