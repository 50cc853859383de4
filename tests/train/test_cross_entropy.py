"""Cross-entropy in chunks of rows: the loss and gradients of the plain one, without logits of all rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch.train.cross_entropy import linear_cross_entropy


class Watch(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_chunked_loss_is_cross_entropy(chunk, smoothing, reduction, cap) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, (3, 11)).masked_fill(torch.rand(3, 11) < 0.3, -7)
    how = {"ignore_index": -7, "label_smoothing": smoothing, "reduction": reduction}
    found = linear_cross_entropy(hidden, weight, targets, chunk=chunk, soft_cap=cap, **how)
    logits = F.linear(hidden, weight).flatten(0, 1)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits, targets.flatten(), **how)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for x, y in zip(
        torch.autograd.grad(3 * found, (hidden, weight)), torch.autograd.grad(3 * expected, (hidden, weight))
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_the_chunked_loss_adds_a_z_loss_and_caps_logits(soft_cap) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, (30,))
    found = linear_cross_entropy(hidden, weight, targets, chunk=7, z_loss=0.01, soft_cap=soft_cap)
    logits = F.linear(hidden, weight)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    expected = F.cross_entropy(logits, targets) + 0.01 * logits.logsumexp(-1).square().mean()
    for x, y in zip(
        (found, *torch.autograd.grad(found, (hidden, weight))),
        (expected, *torch.autograd.grad(expected, (hidden, weight))),
    ):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_a_loss_gives_its_gradient_twice() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.randint(9, (5,)))
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(2 * x, y) for x, y in zip(once, torch.autograd.grad(2 * loss, (hidden, weight))))


def test_a_second_derivative_of_the_chunked_loss_is_refused() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.randn(9, 8), torch.randint(9, (5,)))
    (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="loss_chunk\\) has first derivatives only"):
        (loss + slope.square().sum()).backward()


def test_no_tensor_of_the_chunked_loss_has_rows_times_vocabulary_elements() -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    with Watch() as watch:
        linear_cross_entropy(hidden, weight, torch.randint(100, (64,)), chunk=8).backward()
    assert watch.largest == 8 * 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_chunked_loss_under_autocast_is_as_close_as_the_plain_one(dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(200, 32), torch.randn(60, 32) / 6
    targets = torch.randint(60, (200,))

    def gradients(function, *inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        value = function(*inputs)
        # Scaled, as a GradScaler does: unscaled gradients of a mean fall below float16's range.
        return [value.detach().double(), *(g.double() / 1024 for g in torch.autograd.grad(1024 * value, inputs))]

    def plain(hidden, weight):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    exact = gradients(lambda h, w: F.cross_entropy(F.linear(h, w), targets), hidden.double(), weight.double())
    with torch.autocast("cpu", dtype):
        ours = gradients(lambda h, w: linear_cross_entropy(h, w, targets, chunk=16), hidden, weight)
        theirs = gradients(plain, hidden, weight)
    for x, y, z in zip(ours, theirs, exact):
        assert (x - z).norm() <= 1.2 * (y - z).norm() + 1e-6 * z.norm()


def test_a_loss_without_a_row_that_counts_is_not_a_number_as_in_pytorch() -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(9, 8)
    targets = torch.full((4,), -100)
    assert linear_cross_entropy(hidden, weight, targets).isnan()
    assert linear_cross_entropy(hidden, weight, targets, reduction="sum") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.randn(4, 7)}, r"weight \(vocab, E\), got \(4, 7\) and \(9, 8\)"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"of shape \(4,\), one per row of hidden"),
        ({"targets": torch.zeros(4)}, "whole numbers"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1, got 0"),
        ({"label_smoothing": 1.5}, "from 0 to 1, got 1.5"),
        ({"z_loss": -0.1}, "0 or more, got -0.1"),
        ({"soft_cap": 0.0}, "above 0, got 0.0"),
        ({"reduction": "none"}, "mean or sum, got 'none'"),
    ],
)
def test_the_chunked_loss_refuses_bad_input(change, message) -> None:
    inputs = {"hidden": torch.randn(4, 8), "weight": torch.randn(9, 8), "targets": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(inputs | change))


def test_a_target_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(torch.randn(2, 8), torch.randn(9, 8), torch.tensor([1, 9]))
