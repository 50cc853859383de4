"""The GPU kernels keep the error budget, repeat their bits, and stay within their tensors.

Every combination of dtype, head dim, mask and kind of branch is compiled once, in seconds, so cases share combinations;
the random draws, which compile many, are marked slow.
"""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from hypothesis import Phase, given, settings

from dilated_attention_pytorch.core.entries import lasting
from dilated_attention_pytorch.core.plans import get_global_pattern_cache, reset_global_pattern_cache
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels.triton import tuning
from dilated_attention_pytorch.kernels.triton.tune import candidates

from .checks import BASE, check_broken, check_budget, run
from .draws import Draw, draws

pytest.importorskip("triton", reason="the kernels need Triton")
if torch.cuda.is_available():
    from dilated_attention_pytorch.kernels.triton import plan as planning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:no branch of"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# No length is a multiple of a tile or of a rate, and every segment has more than a tile of rows.
LONG = dataclasses.replace(
    BASE, tokens=3001, heads=6, kv_heads=2, segment_lengths=(512, 1000, 1777), dilation_rates=(1, 3, 4), is_causal=True
)


def variant(**changes) -> Draw:
    return dataclasses.replace(LONG, **changes)


@pytest.fixture(params=["best", "plain"])
def kernels(request, plans, monkeypatch) -> str:
    monkeypatch.setattr(planning, "KERNELS", request.param)
    return request.param


HOPPER_CASES = {
    "D=64": (BF16, variant(head_dim=64)),
    "D=64, not causal": (BF16, variant(head_dim=64, is_causal=False)),
    "D=48": (BF16, variant(head_dim=48)),
    "D=128": (BF16, variant(head_dim=128)),
    "D=128, not causal": (BF16, variant(head_dim=128, is_causal=False)),
    "float16": (FP16, variant(head_dim=64)),
    "a segment longer than the sequence": (
        BF16,
        variant(head_dim=64, segment_lengths=(512, 5000), dilation_rates=(1, 2)),
    ),
    "blocked": (BF16, variant(head_dim=64, head_layout="blocked", heads=5, kv_heads=5)),
    "each head in one branch": (BF16, variant(head_dim=64, head_layout="grouped", heads=7, kv_heads=7)),
    "a shard of the heads": (BF16, variant(head_dim=64, shards=3)),
    "scores turned around": (BF16, variant(head_dim=64, scale=-0.2)),
    "packed": (BF16, variant(head_dim=64, batch=1, lengths="packed")),
    "packed, not causal": (BF16, variant(head_dim=64, batch=1, lengths="packed", is_causal=False)),
    "packed, D=128": (BF16, variant(head_dim=128, batch=1, lengths="packed")),
    "right-padded": (FP16, variant(head_dim=64, batch=3, lengths="right-padded")),
    "left-padded, not causal": (BF16, variant(head_dim=128, batch=3, lengths="left-padded", is_causal=False)),
    "two branches of rate 1": (
        BF16,
        variant(head_dim=64, heads=8, kv_heads=8, segment_lengths=(703, 1024, 4096), dilation_rates=(1, 1, 8)),
    ),
    "two branches of rate 1, rounded most often": (
        FP16,
        variant(head_dim=128, heads=4, kv_heads=2, segment_lengths=(703, 1024, 4096), dilation_rates=(1, 1, 2)),
    ),
    "rows on many branches": (
        FP16,
        variant(head_dim=64, segment_lengths=(256, 512, 1024, 2048), dilation_rates=(1, 1, 1, 1)),
    ),
}


@pytest.mark.parametrize("name", HOPPER_CASES)
def test_kernels_for_long_segments_keep_the_error_budget(name, plans) -> None:
    dtype, draw = HOPPER_CASES[name]
    check_budget(draw, "triton", dtype, "cuda")
    plans.assert_hopper_ran()


# Every branch is folded into the one before it, and the third lies in one segment.
NESTED = {"segment_lengths": (512, 1024, 4000), "dilation_rates": (1, 2, 4)}
FEW = {
    "tokens": 24, "segment_lengths": (64, 256), "dilation_rates": (1, 2), "batch": 3, "lengths": "left-padded",
}  # fmt: skip
FOLDED_CASES = {
    "D=64": (BF16, variant(**NESTED, head_dim=64)),
    "D=64, not causal": (BF16, variant(**NESTED, head_dim=64, is_causal=False)),
    "D=48": (BF16, variant(**NESTED, head_dim=48, heads=5, kv_heads=5)),
    "D=128": (FP16, variant(**NESTED, head_dim=128)),
    "D=128, not causal": (BF16, variant(**NESTED, head_dim=128, is_causal=False, heads=4, kv_heads=4)),
    "all in one segment": (BF16, variant(tokens=900, head_dim=64, segment_lengths=(1024, 2048), dilation_rates=(1, 2))),
    "a period of 8": (
        BF16,
        variant(head_dim=64, heads=8, kv_heads=8, segment_lengths=(1024, 3001), dilation_rates=(1, 8)),
    ),
    "float32": (FP32, variant(**NESTED, head_dim=64)),
    "few tokens": (BF16, variant(**FEW, head_dim=64)),
    "float32, few tokens": (FP32, variant(**FEW, head_dim=16)),
    "packed": (BF16, variant(**NESTED, head_dim=64, batch=1, lengths="packed")),
    "packed, not causal": (BF16, variant(**NESTED, head_dim=128, batch=1, lengths="packed", is_causal=False)),
    "right-padded, not causal": (
        FP16,
        variant(**NESTED, head_dim=64, batch=3, lengths="right-padded", is_causal=False),
    ),
    "left-padded": (BF16, variant(**NESTED, head_dim=128, batch=3, lengths="left-padded")),
}


@pytest.mark.parametrize("name", FOLDED_CASES)
def test_folded_branches_keep_the_error_budget(name, kernels, plans) -> None:
    dtype, draw = FOLDED_CASES[name]
    check_budget(draw, "triton", dtype, "cuda")
    if kernels == "plain" and name == "all in one segment":
        assert all(plan.short is not None for plan in plans)
        return
    assert all(plan.branches and not any(branch.fold.is_plain for branch in plan.branches) for plan in plans)
    if kernels == "best" and dtype != FP32 and draw.tokens >= 128:
        plans.assert_hopper_ran()


@pytest.mark.parametrize(
    "draw",
    [
        variant(head_dim=160, batch=1, lengths="packed"),
        variant(head_dim=192, is_causal=False),
        variant(head_dim=256),
        variant(head_dim=256, batch=3, lengths="left-padded", is_causal=False),
    ],
    ids=lambda draw: f"{draw.head_dim}-{draw.lengths}",
)
def test_wide_heads_take_the_forward_kernel_for_long_segments(draw, plans) -> None:
    check_budget(draw, "triton", BF16, "cuda")
    if planning.why_no_hopper(torch.device("cuda", torch.cuda.current_device())) is None:
        assert all(branch.hopper is not None for branch in plans[0].branches)


SHORT_PATTERN = {"tokens": 1000, "segment_lengths": (256, 512, 1000), "dilation_rates": (1, 2, 4)}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (FP16, 128), (BF16, 48), (FP32, 64)], ids=str)
def test_short_calls_keep_the_error_budget(dtype, head_dim, is_causal, plans) -> None:
    check_budget(variant(**SHORT_PATTERN, head_dim=head_dim, is_causal=is_causal), "triton", dtype, "cuda")
    assert plans
    assert all(plan.short is not None for plan in plans)


def test_short_calls_drop_what_the_reference_drops(plans) -> None:
    check_exactly(variant(**SHORT_PATTERN, head_dim=64, dropout_p=0.3))
    assert all(plan.short is not None for plan in plans)


def of_documents(spans, *tensors):
    query, key, value, grad_out = tensors
    out, lse = dilated_attention(
        query, key, value, LONG.segment_lengths, LONG.dilation_rates, is_causal=True, spans=spans, return_lse=True,
        backend="triton",
    )  # fmt: skip
    return (out, lse, *torch.autograd.grad(out, (query, key, value), grad_out))


def cuts(count: int, seed: int) -> torch.Tensor:
    """Spans of so many documents in the first 2,900 of LONG's tokens, some of them empty."""
    ends = torch.randint(0, 2900, (count - 1,), generator=torch.Generator().manual_seed(seed)).sort().values
    edges = torch.cat([torch.tensor([0]), ends, torch.tensor([2900])])
    return torch.stack([edges[:-1], edges[1:]], 1).cuda()


@pytest.mark.parametrize("count", [3, 300])
def test_a_document_gets_what_it_gets_alone(count, plans) -> None:
    spans, tensors = cuts(count, 0), [x[:1].detach().requires_grad_() for x in inputs(0)]
    found = of_documents(spans, *tensors)
    plans.assert_hopper_ran()
    for start, end in spans.tolist():
        if end > start:
            alone = attend_and_differentiate(*(x[:, start:end].detach().requires_grad_() for x in tensors))
            for one, other in zip((found[0], *found[2:]), alone):
                torch.testing.assert_close(one[:, start:end], other, rtol=2e-2, atol=2e-2)
    for x in (found[0], *found[2:]):
        assert not x[:, 2900:].any()
    assert (found[1][:, 2900:] == -torch.inf).all()


def test_nothing_behind_a_document_matters(kernels) -> None:
    spans = torch.tensor([[0, 1500], [77, 3001]]).cuda()
    clean = inputs(0)
    outside = torch.ones(LONG.batch, LONG.tokens, dtype=torch.bool, device="cuda")
    for b, (start, end) in enumerate(spans.tolist()):
        outside[b, start:end] = False
    broken = [x.detach().masked_fill(outside[:, :, None, None], torch.nan).requires_grad_() for x in clean]
    for one, other in zip(of_documents(spans, *clean), of_documents(spans, *broken)):
        assert torch.equal(one, other)


def test_a_captured_graph_follows_new_lengths(kernels) -> None:
    tensors = [x[:1].detach().requires_grad_() for x in inputs(0)]
    spans = cuts(9, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and makes what is remembered
        of_documents(spans, *tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = of_documents(spans, *tensors)
    spans.copy_(cuts(9, 1))
    graph.replay()
    for one, other in zip(results, of_documents(cuts(9, 1), *tensors)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["whole", "documents", "short"])
def test_a_captured_graph_keeps_what_it_reads_when_plans_are_forgotten(kind, kernels) -> None:
    tokens = SHORT_PATTERN["tokens"] if kind == "short" else LONG.tokens
    tensors, spans = [x[:1, :tokens].detach().requires_grad_() for x in inputs(0)], cuts(9, 0)

    def results() -> tuple[torch.Tensor, ...]:
        if kind == "documents":
            return of_documents(spans, *tensors)
        pattern = SHORT_PATTERN if kind == "short" else dataclasses.asdict(LONG)
        branches = {name: pattern[name] for name in ("segment_lengths", "dilation_rates")}
        out = dilated_attention(*tensors[:3], **branches, is_causal=True, backend="triton")
        return out, *torch.autograd.grad(out, tensors[:3], tensors[3])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        expected = [x.clone() for x in results()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    reset_global_pattern_cache()
    gc.collect()

    def make() -> torch.Tensor:
        return torch.full((100,), 1 << 20, dtype=torch.int32, device="cuda")

    junk = [lasting(tensors[0].device, make) for _ in range(64)]  # in place of what was freed
    graph.replay()
    for one, other in zip(captured, expected):
        assert torch.equal(one, other)
    del junk


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_few_programs_do_the_work_of_many(is_causal, plans, monkeypatch) -> None:
    if planning.why_no_hopper(torch.device("cuda", torch.cuda.current_device())) is None:
        from dilated_attention_pytorch.kernels.triton.hopper import launch

        monkeypatch.setattr(launch, "_multiprocessors", lambda device: 7)
    check_budget(variant(head_dim=64, tokens=7001, batch=1, is_causal=is_causal), "triton", BF16, "cuda")
    plans.assert_hopper_ran()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", candidates("hopper forward"), ids=str)
def test_every_shape_that_tuning_tries_gives_the_same_bits(shape, is_causal, plans) -> None:
    draw = variant(head_dim=64, is_causal=is_causal)
    expected = run(draw, "triton", BF16, through_lse=False, device="cuda")
    get_global_pattern_cache().forget("plan")
    with tuning.trying(tuning.Kind("hopper forward", 2, 64, is_causal), shape):
        found = run(draw, "triton", BF16, through_lse=False, device="cuda")
    plans.assert_hopper_ran()
    for name in ("out", "lse"):
        assert torch.equal(found[name], expected[name]), name


SHORT = variant(heads=4, tokens=700, segment_lengths=(256, 600), dilation_rates=(1, 2))
PLAIN_CASES = {
    "bfloat16": (BF16, variant(head_dim=64)),
    "two branches of rate 1": (BF16, variant(head_dim=64, segment_lengths=(703, 1024, 4096), dilation_rates=(1, 1, 2))),
    "float32": (FP32, dataclasses.replace(SHORT, head_dim=64)),
    "D=16": (BF16, dataclasses.replace(SHORT, head_dim=16)),
    "D=80": (FP16, dataclasses.replace(SHORT, head_dim=80, segment_lengths=(256,), dilation_rates=(1,))),
    "D=256": (BF16, dataclasses.replace(SHORT, head_dim=256, segment_lengths=(256,), dilation_rates=(1,))),
    "packed": (BF16, variant(head_dim=64, batch=1, lengths="packed")),
    "right-padded": (
        FP16,
        variant(
            batch=4,
            tokens=307,
            heads=4,
            head_dim=64,
            segment_lengths=(264, 124, 426, 1),
            dilation_rates=(1, 2, 12, 6),
            head_layout="blocked",
            scale=-0.2,
            lengths="right-padded",
            seed=391205,
        ),
    ),
}


@pytest.mark.parametrize("name", PLAIN_CASES)
def test_plain_kernels_keep_the_error_budget(name, plans, monkeypatch) -> None:
    monkeypatch.setattr(planning, "KERNELS", "plain")
    dtype, draw = PLAIN_CASES[name]
    check_budget(draw, "triton", dtype, "cuda")


# No shrinking: it would go through new combinations. In parts, so that processes can share the compiling, which takes
# up to a minute a draw in float32. The first of a part's three is always the simplest one.
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)
in_parts = pytest.mark.parametrize("part", range(6))
LARGE = {"min_tokens": 32, "max_tokens": 700, "max_segment": 900}


@pytest.mark.slow
@in_parts
@settings(max_examples=3, phases=WITHOUT_SHRINKING)
@given(draws(**LARGE, heads=[(3, 3), (4, 2)], head_dims=(48, 64, 128), dropout=False))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_random_draws_keep_the_error_budget(dtype, part: int, draw: Draw) -> None:
    draw = draw if draw.lengths == "packed" else dataclasses.replace(draw, batch=4)
    check_budget(draw, "triton", dtype, "cuda")


@pytest.mark.slow
@in_parts
@settings(max_examples=3, phases=WITHOUT_SHRINKING)
@given(draws(**LARGE, heads=[(3, 3), (4, 2)], head_dims=(16, 64)))
def test_random_draws_equal_the_reference_with_dropout_and_through_the_lse(part: int, draw: Draw) -> None:
    check_exactly(draw)


@pytest.mark.parametrize("pattern", [{}, NESTED], ids=["apart", "nested"])
@pytest.mark.parametrize("lengths", ["whole", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_for_long_segments_drop_what_the_reference_drops(lengths, head_dim, pattern, plans) -> None:
    batch = 1 if lengths == "packed" else LONG.batch
    draw = variant(**pattern, head_dim=head_dim, dropout_p=0.3, lengths=lengths, batch=batch, shards=3)
    expected = run(draw, "reference", BF16, through_lse=False, device="cuda")
    found = run(draw, "triton", BF16, through_lse=False, device="cuda")
    plans.assert_hopper_ran()
    assert all(branch.fold.is_plain == (pattern == {}) for plan in plans for branch in plan.branches)
    for name, x in expected.items():
        there = x.isfinite()
        error = (found[name].double() - x.double())[there].norm() / x.double()[there].norm()
        assert error < 0.01, f"{name}: {error}"


def test_dropout_and_the_gradient_of_the_lse_equal_the_reference() -> None:
    check_exactly(dataclasses.replace(SHORT, head_dim=64, dropout_p=0.3))


def check_exactly(draw: Draw) -> None:
    expected = run(draw, "reference", FP32, through_lse=True, device="cuda")
    found = run(draw, "triton", FP32, through_lse=True, device="cuda")
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_the_same_call_gives_the_same_bits(kernels) -> None:
    one, other = (run(variant(head_dim=64), "triton", BF16, through_lse=True, device="cuda") for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def attend_and_differentiate(query, key, value, grad_out):
    out = dilated_attention(
        query, key, value, LONG.segment_lengths, LONG.dilation_rates, is_causal=True, backend="triton"
    )
    return (out, *torch.autograd.grad(out, (query, key, value), grad_out))


def inputs(seed: int):
    """query, key, value and the gradient of out, contiguous, of LONG in bfloat16 with D = 64."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (LONG.heads, LONG.kv_heads, LONG.kv_heads, LONG.heads)
    shapes = [(LONG.batch, LONG.tokens, h, 64) for h in heads]
    made = [torch.randn(shape, dtype=BF16, device="cuda", generator=generator) for shape in shapes]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def test_nothing_outside_the_tensors_is_read(kernels) -> None:
    exact = inputs(0)
    framed = []
    for x in exact:
        B, N, H, D = x.shape
        frame = torch.full((B + 2, N + 300, H + 2, D + 8), torch.nan, dtype=BF16, device="cuda")
        view = frame[1:-1, 100 : 100 + N, 1:-1, :D]
        view.copy_(x.detach())
        framed.append(view.detach().requires_grad_(x.requires_grad))
    for one, other in zip(attend_and_differentiate(*framed), attend_and_differentiate(*exact)):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_a_compiled_call_equals_an_eager_one(plans) -> None:
    torch._dynamo.reset()
    tensors = inputs(0)

    def attend(q, k, v):
        return dilated_attention(q, k, v, LONG.segment_lengths, LONG.dilation_rates, is_causal=True, backend="triton")

    out = torch.compile(attend, fullgraph=True)(*tensors[:3])
    found = (out, *torch.autograd.grad(out, tensors[:3], tensors[3]))
    for one, other in zip(found, attend_and_differentiate(*tensors)):
        assert torch.equal(one, other)


def test_a_captured_graph_computes_new_values(kernels) -> None:
    tensors = inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and makes what is remembered
        attend_and_differentiate(*tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend_and_differentiate(*tensors)
    with torch.no_grad():
        for x, new in zip(tensors, inputs(1)):
            x.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(results, attend_and_differentiate(*inputs(1))):
        assert torch.equal(one, other)


def test_tensors_may_have_more_elements_than_fit_in_32_bits(kernels) -> None:
    segments, rates = (2048, 8192), (1, 4)
    N, H, D = (1 << 22) + 8192, 12, 64
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a GPU with 40 GiB of memory")
    q, k, v = (torch.randn(1, N, H, D, dtype=BF16, device="cuda") for _ in range(3))
    assert q.numel() > 1 << 31
    out = dilated_attention(q, k, v, segments, rates, is_causal=True, backend="triton")
    last = [x[:, -8192:].contiguous() for x in (q, k, v)]
    alone = dilated_attention(*last, segments, rates, is_causal=True, backend="triton")
    torch.testing.assert_close(out[:, -8192:], alone, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("spec", [([4, 8], [1, 2]), ([128, 256], [1, 2])], ids=str)
def test_kernels_give_nan_where_the_reference_does(kernels, spec, is_causal: bool) -> None:
    for broken in ("q", "k", "v"):
        for number in (torch.nan, torch.inf, -torch.inf):
            check_broken(broken, number, "triton", BF16, spec, is_causal, tokens=600, head_dim=64, device="cuda")
