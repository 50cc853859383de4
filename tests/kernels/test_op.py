"""The operator behaves as PyTorch's own do: checked by PyTorch's tools, compiled, checkpointed, autocast."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from dilated_attention_pytorch.nn.full_cache import attend_full_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import BlockSparseRingDilatedAttention, LongNet, SparsePatternConfig
from dilated_attention_pytorch.core.block_layout import layout_of
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.reference import reference_forward
from dilated_attention_pytorch.core.spans import checked_spans, document_spans
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels.op import attend_backward, attend_op
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.train.recompute import TiledFeedForward

SPEC = {"segment_lengths": [4, 8, 16], "dilation_rates": [1, 2, 3]}


def tensors(tokens: int = 18, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64):
    return [torch.randn(1, tokens, h, 4, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


def op_arguments(*, spans=None, seed=None, is_causal=True, backend="eager", sparse=None):
    dropout = 0.0 if seed is None else 0.3
    call = Call.of([4, 8], [1, 2], is_causal=is_causal, backend=backend, sparse=sparse, dropout_p=dropout)
    return spans, seed, *call.encode(), True


SPANS, SEED = torch.tensor([[0, 7], [7, 15]]), torch.tensor([3, 4])


@pytest.mark.parametrize(
    ("backend", "spans", "seed"),
    [("eager", None, None), ("eager", SPANS, SEED), ("reference", SPANS, None), ("reference", None, SEED)],
)
def test_opcheck_accepts_forward_and_backward(backend, spans, seed) -> None:
    q, k, v = tensors()
    rest = op_arguments(spans=spans, seed=seed, backend=backend)
    torch.library.opcheck(attend_op, (q, k, v, *rest))
    out, lse = (x.detach() for x in attend_op(q, k, v, *rest))
    detached = [x.detach() for x in (q, k, v)]
    for grad_lse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            attend_backward, (torch.randn_like(out), grad_lse, *detached, *rest[:2], out, lse, *rest[2:])
        )


SPARSE = {pattern: SparsePatternConfig(pattern, 0.5, 2) for pattern in ("random", "content_adaptive")}


@pytest.mark.parametrize("pattern", SPARSE)
def test_opcheck_accepts_a_block_pattern(pattern) -> None:
    q, k, v = tensors()
    rest = op_arguments(sparse=SPARSE[pattern])
    torch.library.opcheck(attend_op, (q, k, v, *rest))
    out, lse = (x.detach() for x in attend_op(q, k, v, *rest))
    detached = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(attend_backward, (torch.randn_like(out), None, *detached, *rest[:2], out, lse, *rest[2:]))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pattern", SPARSE)
def test_a_block_pattern_compiles_whole_with_any_length(pattern, padded) -> None:
    module = BlockSparseRingDilatedAttention(**SPEC, sparse_config=SPARSE[pattern])
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (12, 18, 31):
        inputs = tensors(tokens)
        settings = {"is_causal": True}
        if padded:
            settings["key_padding_mask"] = torch.arange(tokens).expand(len(inputs[0]), -1) < tokens // 4
        expected, found = module(*inputs, **settings), compiled(*inputs, **settings)
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


@pytest.mark.parametrize(
    ("backend", "is_causal", "dropout_p"),
    [("eager", False, 0.3), ("eager", True, 0.0), ("reference", False, 0.0), ("reference", True, 0.3)],
)
def test_gradcheck_accepts_out_and_lse(backend, is_causal, dropout_p) -> None:
    def run(q, k, v):
        torch.manual_seed(0)
        return dilated_attention(
            q, k, v, **SPEC, is_causal=is_causal, dropout_p=dropout_p, return_lse=True, backend=backend
        )

    assert torch.autograd.gradcheck(run, tensors(tokens=7, heads=2, kv_heads=1))


@pytest.mark.parametrize("settings", [{}, {"dropout_p": 0.3}, {"sparse_config": SPARSE["random"]}], ids=str)
def test_gradcheck_accepts_forward_mode_and_batched_gradients(settings) -> None:
    def run(q, k, v):
        torch.manual_seed(0)
        return dilated_attention(q, k, v, [4, 8], [1, 2], is_causal=True, return_lse=True, **settings)

    inputs = tensors(tokens=5, heads=2, kv_heads=1)
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True)


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


def loss(query):
    return dilated_attention(query, query, query, **SPEC).sum()


def tangent_of_gradient(query):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query.requires_grad_(), torch.ones_like(query))
        return torch.autograd.grad(loss(dual), dual)


@pytest.mark.parametrize(
    "second",
    [
        lambda q: torch.autograd.grad(loss(q.requires_grad_()), q, create_graph=True)[0].sum().backward(),
        torch.func.jacrev(torch.func.grad(loss)),
        torch.func.jacfwd(torch.func.grad(loss)),
        torch.func.jacfwd(torch.func.jacfwd(loss)),
        torch.func.jacrev(torch.func.jacfwd(loss)),
        torch.func.hessian(loss),
        tangent_of_gradient,
    ],
)
def test_a_second_derivative_is_refused(second) -> None:
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        second(tensors(tokens=3, heads=1)[0].detach())


TANGENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "packed": {"cu_seqlens": torch.tensor([0, 5, 16])},
    "padded": {"seqlens": torch.tensor([13]), "is_causal": True},
    "nothing": {"seqlens": torch.tensor([0])},
    "with empty rows": {"segment_lengths": [8], "dilation_rates": [3]},
    "by content": {"sparse_config": SPARSE["content_adaptive"], "is_causal": True},
    "by content, packed": {"sparse_config": SPARSE["content_adaptive"], "cu_seqlens": torch.tensor([0, 5, 16])},
    "in bfloat16": {"dtype": torch.bfloat16},
    "from a reference": {"backend": "reference"},
    "from a kernel": {"backend": "triton", "dtype": torch.float32},
}


@pytest.mark.filterwarnings("ignore:no branch of")
@pytest.mark.parametrize("case", TANGENTS)
def test_tangents_equal_those_of_the_reference(case) -> None:
    settings = SPEC | {"dtype": torch.float64} | TANGENTS[case]
    dtype = settings.pop("dtype")
    device = "cuda" if torch.cuda.is_available() and case == "from a kernel" else "cpu"
    primals = tuple(torch.randn(1, 18, heads, 16, dtype=dtype, device=device) for heads in (4, 2, 2))
    tangents = tuple(torch.randn_like(x) for x in primals)

    def run(q, k, v):
        return dilated_attention(q, k, v, **settings, return_lse=True)

    spans = document_spans(1, 18, **{name: settings[name] for name in ("seqlens", "cu_seqlens") if name in settings})
    spec = DilatedSpec.of(settings["segment_lengths"], settings["dilation_rates"])
    call = Call(spec=spec, is_causal=settings.get("is_causal", False), sparse=settings.get("sparse_config"))
    layout = None if call.sparse is None else layout_of(call, *primals[:2], None, spans)
    exact = [x.double() for x in primals], [x.double() for x in tangents]
    expected = torch.func.jvp(lambda *x: reference_forward(*x, call, spans, None, layout), *map(tuple, exact))[1]
    with forward_ad.dual_level():
        both = run(*(forward_ad.make_dual(x, t) for x, t in zip(primals, tangents)))
        duals = [forward_ad.unpack_dual(x).tangent for x in both]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    for found in (duals, torch.func.jvp(run, primals, tangents)[1]):
        for one, other in zip(found, expected):
            assert one.isfinite().all()
            assert (one - other).norm() <= tolerance * other.norm()


def test_a_missing_tangent_is_zero() -> None:
    q, k, v = (x.detach() for x in tensors())
    _, of_value = torch.func.jvp(lambda v: dilated_attention(q, k, v, **SPEC), (v,), (v,))
    torch.testing.assert_close(of_value, dilated_attention(q, k, v, **SPEC))  # linear in the values


def test_transforms_of_torch_func_equal_autograd() -> None:
    inputs = tuple(x.detach() for x in tensors(tokens=7, heads=2, kv_heads=1))
    several = tuple(torch.stack([x, 2 * x]) for x in inputs)
    cotangent = torch.randn_like(inputs[0])

    def run(q, k, v):
        return dilated_attention(q, k, v, **SPEC, is_causal=True)

    whole = torch.autograd.functional.jacobian(run, inputs)
    one_by_one = torch.stack([run(*x) for x in zip(*several)])
    every = (0, 1, 2)
    torch.testing.assert_close(torch.func.jacfwd(run, every)(*inputs), whole)
    torch.testing.assert_close(torch.func.jacrev(run, every)(*inputs), whole)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, inputs, vectorize=True), whole)
    torch.testing.assert_close(torch.vmap(run)(*several), one_by_one)
    only_queries = torch.vmap(run, (1, None, None))(several[0].transpose(0, 1), *inputs[1:])
    torch.testing.assert_close(only_queries[0], run(*inputs))
    _, of_outputs = torch.func.vjp(run, *inputs)
    expected = torch.func.grad(lambda *x: (run(*x) * cotangent).sum(), every)(*inputs)
    torch.testing.assert_close(of_outputs(cotangent), expected)
    of_several = torch.func.jvp(torch.vmap(run), several, several)[1]
    torch.testing.assert_close(of_several[0], torch.func.jvp(run, inputs, inputs)[1])


def test_forward_mode_passes_through_an_encoder() -> None:
    """A tangent and a gradient are each other's transposes."""
    model = LongNet(d_model=16, num_heads=4, num_layers=2, num_decoder_layers=0, **SPEC).double().eval()
    x, tangent, cotangent = torch.randn(3, 2, 19, 16, dtype=torch.float64).unbind(0)
    out, found = torch.func.jvp(model, (x,), (tangent,))
    (gradient,) = torch.func.vjp(model, x)[1](cotangent)
    torch.testing.assert_close((found * cotangent).sum(), (tangent * gradient).sum())
    torch.testing.assert_close(out, model(x))


def test_forward_mode_passes_through_a_full_cache() -> None:
    spec, begin, start = DilatedSpec.of(**SPEC), torch.tensor(10), torch.tensor([0])
    inputs = tuple(x.detach() for x in tensors())

    def run(q, k, v):
        return attend_full_cache(q[:, 10:], k, v, begin, start, spec)

    _, whole = torch.func.jvp(lambda *x: dilated_attention(*x, **SPEC, is_causal=True), inputs, inputs)
    torch.testing.assert_close(torch.func.jvp(run, inputs, inputs)[1], whole[:, 10:])


def run_with_tangents(function):
    with forward_ad.dual_level():
        return function(*(forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in tensors()))


def through_a_cache(query, key, value):
    cache = DilatedKVCache(**SPEC, batch=1, num_heads=4, num_kv_heads=2, head_dim=4, dtype=query.dtype)
    return cache.attend(query, key, value)


TILES = TiledFeedForward(FeedForward(4, 8), rows=3).double()


def through_tiles(query, key, value):
    return TILES(query)


def under_a_dispatch_mode(query, key, value):
    with Seen():
        return dilated_attention(query, key, value, **SPEC)


@pytest.mark.parametrize("function", [through_a_cache, through_tiles, under_a_dispatch_mode], ids=lambda f: f.__name__)
def test_forward_mode_is_refused_where_a_tangent_would_be_lost(function) -> None:
    plain = tuple(x.detach() for x in tensors())
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        run_with_tangents(function)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.func.jvp(function, plain, plain)
    function(*plain)


def test_forward_mode_is_refused_where_it_would_be_compiled_or_traced() -> None:
    plain = tuple(x.detach() for x in tensors())

    def run(q, k, v):
        return dilated_attention(q, k, v, **SPEC)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compiled(*plain)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no forward-mode derivatives"):
        run_with_tangents(compiled)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no forward-mode derivatives"):
        torch.compile(lambda: torch.func.jvp(run, plain, plain), fullgraph=True, backend="aot_eager")()
    with pytest.raises(NotImplementedError, match="computed eagerly"):
        make_fx(lambda t: torch.func.jvp(run, plain, (t, *plain[1:])))(plain[0])
    with pytest.raises(NotImplementedError, match="vectorize=True"):
        torch.autograd.functional.jacobian(run, plain, strategy="forward-mode", vectorize=True)


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
