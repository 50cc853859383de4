"""Every backend gives the reference's out, lse, dq, dk and dv."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, example, given, settings
from torch import Tensor

from dilated_attention_pytorch.core import DilatedSpec, dense_mask
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels import dense

from .draws import Draw, draws

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.filterwarnings("ignore:no branch of")]

BASE = Draw(
    batch=2,
    tokens=48,
    heads=4,
    kv_heads=4,
    head_dim=8,
    segment_lengths=(8, 16, 48),
    dilation_rates=(1, 2, 6),
    head_layout="interleaved",
    is_causal=False,
    scale=None,
    dropout_p=0.0,
    lengths="whole",
    shards=1,
    seed=0,
)
CORNERS: dict[str, dict] = {
    "ragged": {"tokens": 53, "is_causal": True},
    "shorter than a segment": {"tokens": 5},
    "segments that rates do not divide": {"segment_lengths": (7, 13, 31), "dilation_rates": (1, 4, 5)},
    "rates beyond half a segment": {"segment_lengths": (4, 8, 8), "dilation_rates": (1, 6, 12)},
    "rates that do not divide the heads": {"heads": 5, "kv_heads": 5, "dilation_rates": (1, 3, 4)},
    "rows that nobody covers": {"dilation_rates": (2, 4, 6), "tokens": 50},
    "one token": {"tokens": 1, "is_causal": True},
    "grouped queries": {"heads": 6, "kv_heads": 2, "is_causal": True},
    "padded": {"lengths": "right-padded"},
    "left-padded": {"lengths": "left-padded", "is_causal": True},
    "packed": {"batch": 1, "lengths": "packed"},
    "a shard of the heads": {"shards": 3, "head_layout": "blocked"},
    "each head in one branch": {"head_layout": "grouped", "heads": 7, "kv_heads": 7},
    "dropout": {"dropout_p": 0.4, "is_causal": True, "tokens": 53},
    "scores turned around": {"scale": -0.5, "is_causal": True},
    "no scores": {"scale": 0.0, "is_causal": True},
}


def corners(test, **common):
    for change in CORNERS.values():
        test = example(dataclasses.replace(BASE, **change, **common))(test)
    return test


# The interpreter takes seconds a call.
triton_corners = functools.partial(corners, head_dim=16)


def run(draw: Draw, backend: str, dtype: torch.dtype, *, through_lse: bool, device: str = "cpu") -> dict[str, Tensor]:
    """out, lse and gradients of a random linear function of out, and of lse if asked, as float64."""
    tensors = draw.tensors(dtype, device)
    torch.manual_seed(draw.seed % 2**32)  # the same dropout on every backend
    out, lse = dilated_attention(*tensors, **draw.settings(device), return_lse=True, backend=backend)
    assert out.dtype == dtype
    generator = torch.Generator().manual_seed(draw.seed + 2)

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x)

    loss = (out * noise(out)).sum()
    covered = lse != -torch.inf
    assert torch.equal(out[~covered], torch.zeros_like(out[~covered]))
    if through_lse:
        loss = loss + (lse * noise(lse))[covered].sum()
    dq, dk, dv = torch.autograd.grad(loss, tensors) if covered.any() else map(torch.zeros_like, tensors)
    found = {"out": out, "lse": lse.masked_fill(~covered, 0.0), "dq": dq, "dk": dk, "dv": dv}
    found["covered"] = covered
    return {name: x.detach().double().cpu() for name, x in found.items()}


@settings(max_examples=150)
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


def check_budget(draw: Draw, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """The error budget against the float64 reference on the same low-precision inputs."""
    # The reference's dropout is drawn on the same device, from the same generator.
    inputs = tuple(x.detach().double().requires_grad_() for x in draw.tensors(dtype, device))
    expected = _reference_on(draw, inputs, device)
    found = run(draw, backend, dtype, through_lse=False, device=device)
    assert torch.equal(found["covered"], expected["covered"])
    assume(expected["covered"].sum() >= 256)
    flash = (
        flash_errors(dtype, draw.head_dim, keys_a_row(draw), abs(draw.scale or draw.head_dim**-0.5), device)
        if dtype != torch.float32
        else {}
    )
    scale = max(expected[name].norm().item() for name in ("dq", "dk", "dv"))
    for name in ("out", "lse", "dq", "dk", "dv"):
        exact = expected[name].norm().item()
        # A gradient that cancels is measured against a fifth of its largest sibling; one that is exactly nothing, and
        # has no relative error, against all of it.
        floor = (scale if exact < 1e-9 * scale else 0.2 * scale) if name.startswith("d") else 0.0
        norm = max(exact, floor)
        error = (found[name] - expected[name]).norm().item() / norm if norm else found[name].norm().item()
        limit = max(1.5 * flash[name], 2e-6) if flash else 2e-6  # the lse is float32 in any case
        assert error <= limit, f"{name}: {error:.2e} is over {limit:.2e}"


# A budget for norms says something about many roundings, not about one: no tiny problems here, and no dropout, under
# which a rounded `out` cancels against an unrounded weight. Both are exact in float64 above.
@settings(max_examples=60)
@corners
@given(draws(min_tokens=32, head_dims=(8, 16), dropout=False))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_eager_keeps_the_error_budget(dtype: torch.dtype, draw: Draw) -> None:
    check_budget(draw if draw.lengths == "packed" else dataclasses.replace(draw, batch=8), "eager", dtype)


def check_in_interpreter(draw: Draw, dtype: torch.dtype, tolerance: float) -> None:
    draw = dataclasses.replace(draw, batch=1)  # the interpreter takes seconds a call
    inputs = tuple(x.detach().double().requires_grad_() for x in draw.tensors(dtype))
    expected = _reference_on(draw, inputs)
    found = run(draw, "triton", dtype, through_lse=False)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
small_draws = draws(min_tokens=16, min_segment=8, head_dims=(16, 24), heads=[(2, 2), (3, 3), (4, 2)])


@needs_interpreter
@settings(max_examples=6)
@triton_corners
@given(small_draws)
def test_triton_equals_the_reference_in_the_interpreter(draw: Draw) -> None:
    check_in_interpreter(draw, torch.float32, 2e-5)


@needs_interpreter
@settings(max_examples=5)
@given(small_draws)
def test_triton_in_half_precision_is_close_in_the_interpreter(draw: Draw) -> None:
    check_in_interpreter(draw, torch.float16, 2e-2)


# Every combination of head dim, group and mask is compiled once, so few of each, and no shrinking through new ones.
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)
LARGE = {"min_tokens": 32, "max_tokens": 700, "max_segment": 900, "heads": [(3, 3), (4, 2)]}


@pytest.mark.gpu
@settings(max_examples=20, phases=WITHOUT_SHRINKING)
@triton_corners
@given(draws(**LARGE, head_dims=(48, 64, 128), dropout=False))
def test_triton_keeps_the_error_budget(draw: Draw) -> None:
    draw = draw if draw.lengths == "packed" else dataclasses.replace(draw, batch=4)
    check_budget(draw, "triton", torch.float32, "cuda")


@pytest.mark.gpu
@settings(max_examples=20, phases=WITHOUT_SHRINKING)
@given(draws(**LARGE, head_dims=(16, 64)))
def test_triton_equals_the_reference_with_dropout_and_through_the_lse(draw: Draw) -> None:
    expected = run(draw, "reference", torch.float32, through_lse=True, device="cuda")
    found = run(draw, "triton", torch.float32, through_lse=True, device="cuda")
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_triton_gives_the_same_bits_twice() -> None:
    draw = dataclasses.replace(BASE, tokens=3000, head_dim=64, segment_lengths=(512, 1024, 4096), is_causal=True)
    one, other = (run(draw, "triton", torch.float32, through_lse=True, device="cuda") for _ in range(2))
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def keys_a_row(draw: Draw) -> int:
    """How many keys a row sees on average: the size of the dense problem that is as hard."""
    spec = DilatedSpec.of(draw.segment_lengths, draw.dilation_rates, draw.head_layout)
    mask = dense_mask(spec, spec.offsets(draw.kv_heads), draw.tokens, is_causal=draw.is_causal).sum(0)
    return max(2, round(mask.sum().item() / max(1, mask.any(-1).sum().item())))


def _reference_on(draw: Draw, tensors: tuple[Tensor, Tensor, Tensor], device: str = "cpu") -> dict[str, Tensor]:
    fixed = dataclasses.replace(draw)
    object.__setattr__(fixed, "tensors", lambda dtype, device: tensors)
    return run(fixed, "reference", torch.float64, through_lse=False, device=device)


@functools.cache
def flash_errors(dtype: torch.dtype, head_dim: int, keys: int, scale: float, device: str) -> dict[str, float]:
    """The relative errors of PyTorch's own flash attention on dense problems of this dtype."""
    generator = torch.Generator().manual_seed(0)
    shape = (2048 // keys, 2, keys, head_dim)
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) * scale
    expected = {"out": scores.softmax(-1) @ exact[2], "lse": scores.logsumexp(-1)}
    expected |= zip(("dq", "dk", "dv"), torch.autograd.grad((expected["out"] * do).sum(), exact))
    low = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*low, scale=scale)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.cpu(), k.cpu(), v.cpu(), scale=scale)
    lse = lse.to(device)
    found = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad((out * do).sum(), low)))
    return {name: ((found[name].double() - x).norm() / x.norm()).item() for name, x in expected.items()}


@settings(max_examples=60)
@corners
@given(draws())
def test_small_chunks_change_nothing(draw: Draw) -> None:
    """The chunked path, which dropout and an lse gradient take, cuts rows and segments apart."""
    expected = run(draw, "reference", torch.float64, through_lse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_ROWS_AT_ONCE", 5)
        patch.setattr(dense, "_SCORES_AT_ONCE", 400)
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
