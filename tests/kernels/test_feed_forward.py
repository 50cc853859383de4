"""The second half of a feed-forward network by its kernels: what PyTorch's modules compute, and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention_pytorch.kernels import feed_forward
from dilated_attention_pytorch.nn.transformer import FeedForward

pytest.importorskip("triton", reason="the kernels need Triton")
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")


def modules(features: int, dtype: torch.dtype, device: str) -> tuple[nn.LayerNorm, nn.Linear]:
    norm, linear = nn.LayerNorm(features), nn.Linear(features, 24)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm.to(device), linear.to(device, dtype)


def check(rows: int, features: int, dtype: torch.dtype, device: str) -> None:
    """Values and all gradients against float64, within what one rounding of each value allows."""
    torch.manual_seed(features)
    norm, linear = modules(features, dtype, device)
    hidden = (2 * torch.randn(2, rows, features, device=device)).to(dtype).requires_grad_()
    grad = torch.randn(2, rows, 24, device=device).to(dtype)
    found = feed_forward.gelu_norm_linear(hidden, norm, linear)
    tensors = hidden, norm.weight, norm.bias, linear.weight, linear.bias
    gradients = torch.autograd.grad(found, tensors, grad)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    h, gain, shift, weight, bias = exact
    expected = F.linear(F.layer_norm(F.gelu(h), (features,), gain, shift, norm.eps), weight, bias)
    step = 4 * torch.finfo(dtype).eps
    for one, other in zip((found, *gradients), (expected, *torch.autograd.grad(expected, exact, grad.double()))):
        assert one.dtype in (dtype, torch.float32)
        size = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=max(step, 4e-6) * size)


@INTERPRETED
@pytest.mark.parametrize(
    ("rows", "features", "dtype"),
    [(3, 13, torch.float32), (4, 3072, torch.float32), (2, 1100, torch.float16), (1, 4096, torch.float32)],
    ids=str,
)
def test_the_kernels_give_the_values_and_gradients_of_the_modules_in_the_interpreter(rows, features, dtype) -> None:
    check(rows, features, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "features"), [(1000, 13), (700, 1100), (2049, 3072), (511, 4096), (300, 8192)])
def test_the_kernels_give_the_values_and_gradients_of_the_modules(rows, features, dtype) -> None:
    check(rows, features, dtype, "cuda")


@INTERPRETED
def test_no_rows_give_no_rows_and_zero_gradients() -> None:
    norm, linear = modules(16, torch.float32, "cpu")
    hidden = torch.empty(2, 0, 16, requires_grad=True)
    found = feed_forward.gelu_norm_linear(hidden, norm, linear)
    assert found.shape == (2, 0, 24)
    found.sum().backward()
    assert not norm.weight.grad.any()
    assert not linear.weight.grad.any()


@INTERPRETED
def test_the_operators_keep_the_rules_of_pytorchs_operators() -> None:
    norm, linear = modules(16, torch.float32, "cpu")
    inputs = torch.randn(5, 16, requires_grad=True), norm.weight, norm.bias, 1e-5, linear.weight, linear.bias
    torch.library.opcheck(feed_forward.gelu_norm_linear_op, inputs)


@INTERPRETED
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_network_computes_the_same_with_the_operator(monkeypatch, autocast) -> None:
    torch.manual_seed(0)
    network, x = FeedForward(16, 48), torch.randn(2, 7, 16, requires_grad=True)
    calls = []

    def always(hidden, norm, linear) -> bool:
        calls.append(hidden.dtype)
        return True

    def run(function):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            out = function(x)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, *network.parameters()))

    expected = run(network)
    assert not calls
    monkeypatch.setattr("dilated_attention_pytorch.nn.transformer.fuses", always)
    found = run(torch.compile(network, backend="aot_eager"))
    assert calls == [torch.float16 if autocast else torch.float32]
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.0, atol=(0.02 if autocast else 1e-5) * other.abs().max().item())


def test_modules_that_compute_otherwise_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)

    class Rows(torch.Tensor):
        """A tensor on the CPU that says that it is on a GPU."""

        is_cuda = True

    hidden = torch.randn(3, 16).as_subclass(Rows)
    norm, linear = modules(16, torch.float32, "cpu")
    assert feed_forward.fuses(hidden, norm, linear)
    assert not feed_forward.fuses(hidden, nn.RMSNorm(16), linear), "another norm"
    assert not feed_forward.fuses(hidden, norm, linear.double()), "another dtype"
    linear.float().register_forward_hook(lambda *_: None)
    assert not feed_forward.fuses(hidden, norm, linear), "a hook"
    assert not feed_forward.fuses(hidden, norm, nn.Linear(16, 8).requires_grad_(False)), "frozen"


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_training_on_a_gpu_takes_the_kernels_and_gives_the_same_bits_twice(autocast) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    network = FeedForward(256, 1024).to("cuda", dtype)
    compiled = torch.compile(network)
    x = torch.randn(2, 1000, 256, device="cuda", dtype=dtype, requires_grad=True)

    def run(function):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = function(x)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, *network.parameters()))

    expected, first = run(network), run(compiled)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        second = run(compiled)
    assert sum("backward_kernel" in event.name for event in profile.events()) == 1
    for one, other, plain in zip(first, second, expected):
        assert torch.equal(one, other)
        assert one.dtype == plain.dtype
        torch.testing.assert_close(one, plain, rtol=0.0, atol=0.03 * plain.abs().max().item())
