"""Every backend gives the reference's out, lse, dq, dk and dv."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from dilated_attention_pytorch.core.pattern import dense_mask
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels import blocks

from ..thorough import examples
from .checks import BASE, check_broken, check_budget, corners, covering, reference_on, run
from .draws import Draw, draws

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.filterwarnings("ignore:no branch of")]


@settings(max_examples=examples(20))
@corners
@given(draws())
@pytest.mark.parametrize("through_lse", [False, True])
def test_eager_equals_the_reference_in_float64(through_lse: bool, draw: Draw) -> None:
    expected = run(draw, "reference", torch.float64, through_lse=through_lse)
    found = run(draw, "eager", torch.float64, through_lse=through_lse)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


# Without dropout, under which a rounded `out` cancels against an unrounded weight. It is exact in float64 above.
@settings(max_examples=examples(8))
@corners
@given(draws(head_dims=(8, 16), dropout=False))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eager_keeps_the_error_budget(dtype: torch.dtype, draw: Draw) -> None:
    check_budget(draw if draw.lengths == "packed" else dataclasses.replace(draw, batch=8), "eager", dtype)


def check_in_interpreter(draw: Draw, dtype: torch.dtype, tolerance: float) -> None:
    draw = dataclasses.replace(draw, batch=1)  # the interpreter takes seconds per call
    inputs = tuple(x.detach().double().requires_grad_() for x in draw.tensors(dtype))
    expected = reference_on(draw, inputs)
    found = run(draw, "triton", dtype, through_lse=False)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
small_draws = draws(
    min_tokens=16, max_tokens=40, min_segment=8, max_segment=40, head_dims=(16, 24), heads=[(2, 2), (3, 3), (4, 2)]
)


@needs_interpreter
@settings(max_examples=examples(3))
@covering
@given(small_draws)
def test_triton_equals_the_reference_in_the_interpreter(draw: Draw) -> None:
    check_in_interpreter(draw, torch.float32, 2e-5)


@needs_interpreter
@settings(max_examples=examples(2))
@given(small_draws)
def test_triton_in_half_precision_is_close_in_the_interpreter(draw: Draw) -> None:
    check_in_interpreter(draw, torch.float16, 2e-2)


@needs_interpreter
def test_rounding_does_not_add_up_over_branches_in_the_interpreter() -> None:
    """A branch that is there many times shows every key as often, which changes neither out nor a gradient."""
    dtype = torch.float16  # the interpreter, which is NumPy, has no bfloat16
    errors = []
    for copies in (1, 8):
        branches = {"segment_lengths": (32,) * copies, "dilation_rates": (1,) * copies}
        draw = dataclasses.replace(BASE, batch=1, tokens=64, heads=1, kv_heads=1, head_dim=16, **branches)
        expected = reference_on(draw, tuple(x.detach().double().requires_grad_() for x in draw.tensors(dtype)))
        found = run(draw, "triton", dtype, through_lse=False)
        errors.append({name: (found[name] - x).norm() / x.norm() for name, x in expected.items()})
    for name in ("out", "dq", "dk", "dv"):
        assert errors[1][name] <= 1.3 * errors[0][name], name


@settings(max_examples=examples(15))
@corners
@given(draws())
def test_small_chunks_change_nothing(draw: Draw) -> None:
    """The chunked path, which dropout and an lse gradient take, cuts rows and segments apart."""
    expected = run(draw, "reference", torch.float64, through_lse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_ROWS_AT_ONCE", 5)
        patch.setattr(blocks, "_SCORES_AT_ONCE", 400)
        found = run(draw, "eager", torch.float64, through_lse=True)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_token_gets_its_own_value_and_no_score_gradient(dtype) -> None:
    draw = dataclasses.replace(BASE, tokens=1, is_causal=True)
    found = run(draw, "eager", dtype, through_lse=False)
    _, _, v = draw.tensors(dtype)
    assert torch.equal(found["out"], v.detach().double())
    assert found["dq"].abs().max() < 1e-6
    assert found["dk"].abs().max() < 1e-6


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_autocast_around_a_call_costs_no_precision(dropout_p) -> None:
    q, k, v = BASE.tensors(torch.bfloat16)
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, lse = dilated_attention(q, k, v, [8, 16], [1, 2], dropout_p=dropout_p, return_lse=True)
            results.append((out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))))
    for one, other in zip(*results):
        assert torch.equal(one, other)


def test_float32_lse_is_as_exact_for_low_precision_inputs() -> None:
    q, k, v = BASE.tensors(torch.bfloat16)
    _, lse = dilated_attention(q, k, v, [8, 16], [1, 2], return_lse=True)
    exact = dilated_attention(*(x.double() for x in (q, k, v)), [8, 16], [1, 2], return_lse=True, backend="reference")[
        1
    ]
    assert lse.dtype == torch.float32
    assert (lse - exact).norm() / exact.norm() < 2e-6


def test_a_single_branch_of_rate_one_is_dense_attention() -> None:
    q, k, v = BASE.tensors(torch.float64)
    out = dilated_attention(q, k, v, [1000], [1], is_causal=True)
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, dense)


def test_shards_of_heads_together_give_the_whole() -> None:
    for layout in ("interleaved", "blocked", "grouped"):
        q, k, v = BASE.tensors(torch.float64)
        whole = dilated_attention(q, k, v, [8, 16, 48], [1, 2, 6], head_layout=layout)
        shards = [
            dilated_attention(
                *(x[:, :, h : h + 2] for x in (q, k, v)),
                [8, 16, 48],
                [1, 2, 6],
                head_layout=layout,
                head_offset=h,
                total_heads=4,
            )
            for h in (0, 2)
        ]
        torch.testing.assert_close(torch.cat(shards, 2), whole)


def test_left_padding_does_not_shift_the_pattern() -> None:
    q, k, v = BASE.tensors(torch.float64)
    alone = dilated_attention(q, k, v, [8, 16], [1, 3], is_causal=True)
    padded = [F.pad(x, (0, 0, 0, 0, 5, 0)) for x in (q, k, v)]
    mask = torch.zeros(2, 53, dtype=torch.bool)
    mask[:, :5] = True
    out = dilated_attention(*padded, [8, 16], [1, 3], is_causal=True, key_padding_mask=mask)
    torch.testing.assert_close(out[:, 5:], alone)
    assert not out[:, :5].any()


def test_packed_documents_are_computed_apart() -> None:
    q, k, v = (x[:1] for x in BASE.tensors(torch.float64))
    packed = dilated_attention(q, k, v, [8, 16], [1, 3], cu_seqlens=torch.tensor([0, 19, 19, 48]))
    apart = [dilated_attention(*(x[:, s] for x in (q, k, v)), [8, 16], [1, 3]) for s in (slice(0, 19), slice(19, 48))]
    torch.testing.assert_close(packed, torch.cat(apart, 1))


@pytest.mark.parametrize("fused", [False, True])
def test_inputs_may_have_any_strides(fused: bool) -> None:
    if fused:
        q, k, v = torch.randn(2, 40, 4, 3, 8).unbind(3)
    else:
        q, k, v = (torch.randn(2, 4, 8, 40).permute(0, 3, 1, 2) for _ in range(3))
        k = k[:1].expand(2, -1, -1, -1)
    expected = dilated_attention(q, k, v, [8, 16], [1, 2], backend="reference")
    torch.testing.assert_close(dilated_attention(q, k, v, [8, 16], [1, 2], backend="eager"), expected)


def test_dropout_repeats_with_the_seed_and_keeps_the_mean() -> None:
    q, k, v = BASE.tensors(torch.float32)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(dilated_attention(q, k, v, [48], [1], dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    many = torch.stack([dilated_attention(q, k, v, [48], [1], dropout_p=0.5) for _ in range(400)]).mean(0)
    assert (many - dilated_attention(q, k, v, [48], [1])).abs().mean() < 0.05


def test_no_warning_is_raised_by_a_covered_spec() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dilated_attention(*BASE.tensors(torch.float32), [8, 16], [1, 2]).isfinite().all()


BROKEN = [(name, number) for name in ("q", "k", "v") for number in (torch.nan, torch.inf, -torch.inf)]
SHORT_SPECS = [([4], [1]), ([1], [1]), ([4, 8], [1, 2]), ([3, 25], [1, 3]), ([40], [1])]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_eager_gives_nan_where_the_reference_does(dtype: torch.dtype, is_causal: bool) -> None:
    for broken, number in BROKEN:
        for spec in SHORT_SPECS:
            check_broken(broken, number, "eager", dtype, spec, is_causal)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy, which interprets
@pytest.mark.parametrize(("broken", "number"), [("q", torch.nan), ("k", torch.inf), ("v", -torch.inf)])
def test_triton_gives_nan_where_the_reference_does_in_the_interpreter(broken: str, number: float) -> None:
    check_broken(broken, number, "triton", torch.float32, ([4, 8], [1, 2]), is_causal=True, tokens=12)


@pytest.mark.parametrize("broken", ["q", "k", "v"])
def test_the_reference_gives_nan_only_where_rows_see_one(broken: str) -> None:
    spec, x = DilatedSpec.of([4, 8], [1, 2]), torch.randn(3, 1, 16, 2, 4, dtype=torch.float64)
    x["qkv".index(broken), 0, 5, 0, 3] = torch.nan
    leaves = [y.clone().requires_grad_() for y in x]
    out = dilated_attention(*leaves, [4, 8], [1, 2], is_causal=True, backend="reference")
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    sees = dense_mask(spec, spec.offsets(2), 16, is_causal=True).any(0)  # (heads, rows, keys)
    token = torch.zeros(2, 16, dtype=torch.bool)
    token[0, 5] = True
    rows = token if broken == "q" else sees[:, :, 5] & token.any(1, keepdim=True)
    keys = (sees & rows[:, :, None]).any(1)  # of the broken rows
    for found, expected in zip((out, *grads), (rows, rows, keys, keys)):
        assert torch.equal(found.isnan().any(-1)[0].T, expected)
