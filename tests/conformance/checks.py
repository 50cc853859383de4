"""What conformance means: running a draw on a backend, and the error budget against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from hypothesis import example
from torch import Tensor

from dilated_attention_pytorch.functional import dilated_attention

from .draws import Draw

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

# The same corners, several per call, in as few and as small calls as can be: the interpreter takes seconds per call.
COVERING: list[dict] = [
    {"tokens": 21, "is_causal": True, "heads": 2, "kv_heads": 1, "dropout_p": 0.4, "segment_lengths": (8, 16),
     "dilation_rates": (1, 2)},
    {"tokens": 26, "lengths": "right-padded", "heads": 3, "kv_heads": 3, "segment_lengths": (7, 13),
     "dilation_rates": (1, 4), "head_layout": "blocked", "shards": 3},
    {"tokens": 18, "is_causal": True, "lengths": "left-padded", "heads": 2, "kv_heads": 2, "scale": -0.5,
     "segment_lengths": (4, 8), "dilation_rates": (3, 6), "seed": 3},
    {"tokens": 24, "lengths": "packed", "heads": 3, "kv_heads": 3, "head_layout": "grouped", "seed": 1},
    {"tokens": 1, "is_causal": True, "heads": 2, "kv_heads": 2},
    {"tokens": 5, "scale": 0.0, "heads": 2, "kv_heads": 2},
]  # fmt: skip


def corners(test):
    return _with_examples(test, list(CORNERS.values()))


def covering(test):
    return _with_examples(test, [{"batch": 1, "head_dim": 16, **change} for change in COVERING])


def _with_examples(test, changes: list[dict]):
    for change in changes:
        test = example(dataclasses.replace(BASE, **change))(test)
    return test


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
    dq, dk, dv = torch.autograd.grad(loss, tensors)
    found = {"out": out, "lse": lse.masked_fill(~covered, 0.0), "dq": dq, "dk": dk, "dv": dv}
    found["covered"] = covered
    return {name: x.detach().double().cpu() for name, x in found.items()}


NAMES = ("out", "lse", "dq", "dk", "dv")
ENOUGH_ROWS = 256
MOST_DRAWS = 40


def check_budget(draw: Draw, backend: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """The error budget against the float64 reference on the same low-precision inputs.

    The budget is for norms over many roundings. A call with fewer than 256 covered rows is drawn again with other
    numbers until there are as many, and the norms are over all draws. What is left of chance is in the allowance.
    """
    found: list[dict[str, Tensor]] = []
    expected: list[dict[str, Tensor]] = []
    keys, rows = [], 0
    for number in range(MOST_DRAWS):
        one = dataclasses.replace(draw, seed=draw.seed + 1000 * number)
        # The reference's dropout is drawn on the same device, from the same generator.
        inputs = tuple(x.detach().double().requires_grad_() for x in one.tensors(dtype, device))
        expected.append(reference_on(one, inputs, device))
        found.append(run(one, backend, dtype, through_lse=False, device=device))
        covered = expected[-1]["covered"].bool()
        assert torch.equal(found[-1]["covered"].bool(), covered)
        if covered.any():
            keys.append(keys_per_row(one, device))
        else:
            assert not any(found[-1][name].any() for name in NAMES)
        rows += int(covered.sum())
        if rows >= ENOUGH_ROWS:
            break
    if not rows:
        return  # nothing attends, which is checked above
    exact, errors = {}, {}
    for name in NAMES:
        exact[name] = torch.cat([x[name].flatten() for x in expected])
        errors[name] = (torch.cat([x[name].flatten() for x in found]) - exact[name]).norm().item()
    allowance = 1.0 if len(found) == 1 else 1.0 + 3.0 * rows**-0.5
    check_errors(draw, dtype, errors, exact, sum(keys) / len(keys), allowance, device)


def check_errors(
    draw: Draw, dtype: torch.dtype, errors: dict[str, float], expected: dict[str, Tensor], keys: float,
    allowance: float = 1.0, device: str = "cpu",
) -> None:  # fmt: skip
    """Whether norms of what is wrong with out, lse, dq, dk and dv are within the budget, for `keys` per row."""
    flash = (
        flash_errors(dtype, draw.head_dim, max(2, round(keys)), abs(draw.scale or draw.head_dim**-0.5), device)
        if dtype != torch.float32
        else {}
    )
    scale = max(expected[name].norm().item() for name in ("dq", "dk", "dv"))
    for name, wrong in errors.items():
        exact = expected[name].norm().item()
        # A gradient that cancels is measured against a fifth of its largest sibling; one that is exactly nothing, and
        # has no relative error, against all of it.
        floor = (scale if exact < 1e-9 * scale else 0.2 * scale) if name.startswith("d") else 0.0
        norm = max(exact, floor)
        error = wrong / norm if norm else wrong
        limit = allowance * (max(1.5 * flash[name], 2e-6) if flash else 2e-6)  # the lse is float32 in any case
        assert error <= limit, f"{name}: {error:.2e} is over {limit:.2e}"


def keys_per_row(draw: Draw, device: str = "cpu") -> float:
    """How many keys a covered row sees on average: the size of the dense problem that is as hard."""
    q, k, v = draw.tensors(torch.float64, device)
    settings = draw.settings(device) | {"dropout_p": 0.0}
    # Scores of nothing weigh every key alike, so that the lse is the logarithm of their number.
    _, lse = dilated_attention(torch.zeros_like(q), k, v, **settings, return_lse=True, backend="reference")
    return lse[lse != -torch.inf].exp().mean().item()


def reference_on(draw: Draw, tensors: tuple[Tensor, Tensor, Tensor], device: str = "cpu") -> dict[str, Tensor]:
    fixed = dataclasses.replace(draw)
    object.__setattr__(fixed, "tensors", lambda dtype, device: tensors)
    return run(fixed, "reference", torch.float64, through_lse=False, device=device)


@functools.cache
def flash_errors(dtype: torch.dtype, head_dim: int, keys: int, scale: float, device: str) -> dict[str, float]:
    """The relative errors of PyTorch's own flash attention on dense problems of this dtype."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(1, 2048 // keys), 2, keys, head_dim)
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


def check_broken(
    broken: str, number: float, backend: str, dtype: torch.dtype, spec, is_causal: bool, *, tokens: int = 40,
    head_dim: int = 16, device: str = "cpu",
) -> None:  # fmt: skip
    """What is not finite in the reference is not finite here, and nothing else is wrong.

    One number of token 5 in head 0 is `number`. Within its segments a kernel may break more than the rows that see it,
    because 0 times nan is nan.
    """
    inputs = {name: torch.randn(1, tokens, 2, head_dim, dtype=dtype, device=device) for name in ("q", "k", "v")}
    inputs[broken][0, 5, 0, 3] = number
    results = {}
    for name in ("reference", backend):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        out, lse = dilated_attention(*leaves, *spec, is_causal=is_causal, return_lse=True, backend=name)
        results[name] = (out, lse, *torch.autograd.grad(out.float().sin().sum(), leaves))
    tolerance = 1e-4 if dtype != torch.bfloat16 else 5e-2
    reached = max(5 // w * w + w for w in spec[0])  # the first token that shares no segment with token 5
    for name, found, expected in zip(("out", "lse", "dq", "dk", "dv"), results[backend], results["reference"]):
        assert not (found.isfinite() & ~expected.isfinite()).any(), name
        assert found[:, reached:].isfinite().all(), name
        assert found[:, :, 1].isfinite().all(), name
        both = found.isfinite() & expected.isfinite()
        torch.testing.assert_close(found[both], expected[both], rtol=tolerance, atol=tolerance)
