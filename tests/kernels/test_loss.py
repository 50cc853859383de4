"""The kernel of the loss computes what its twin does, the losses and the gradient in the place of the logits."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.kernels.loss import cross_entropy_, plain_cross_entropy_

triton_loss = pytest.importorskip("dilated_attention_pytorch.kernels.triton.loss", reason="the kernel needs Triton")
# Smoothing, weight of the z-loss, cap.
SETTINGS = [(0.0, 0.0, None), (0.1, 0.01, 5.0), (0.0, 0.001, None)]


def drawn(classes: int, dtype: torch.dtype, device: str):
    torch.manual_seed(classes)
    logits = (4 * torch.randn(37, classes)).to(device, dtype)
    return logits, torch.randint(classes, (37,), device=device), torch.rand(37, device=device) > 0.2


def check(classes: int, dtype: torch.dtype, settings, device: str, function) -> None:
    logits, targets, counted = drawn(classes, dtype, device)
    exact, found = logits.double(), logits.clone()
    expected = plain_cross_entropy_(exact, targets, counted, *settings, True)
    losses = function(found, targets, counted, *settings, True)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=step, atol=max(step / 8, 1e-6))
    assert not found[~counted].any()
    untouched = logits.clone()
    again = function(untouched, targets, counted, *settings, False)
    assert torch.equal(untouched, logits)
    assert torch.equal(again, losses)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel itself is tested")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("classes", "dtype"), [(13, torch.float32), (5000, torch.float16)], ids=str)
def test_the_kernel_equals_its_twin_in_the_interpreter(classes, dtype, settings) -> None:
    check(classes, dtype, settings, "cpu", triton_loss.cross_entropy_)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [13, 5000, 50_257])
def test_the_kernel_equals_its_twin(classes, dtype, settings) -> None:
    check(classes, dtype, settings, "cuda", triton_loss.cross_entropy_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_of_no_rows_has_no_loss(dtype) -> None:
    nothing = torch.empty(0, 7, dtype=dtype)
    assert cross_entropy_(nothing, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)).shape == (0,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel itself is tested")
def test_a_target_beyond_the_classes_makes_the_loss_and_its_gradient_nan() -> None:
    logits = torch.randn(2, 7)
    losses = triton_loss.cross_entropy_(logits, torch.tensor([7, 3]), torch.tensor([True, True]), 0.0, 0.0, None, True)
    assert losses.isnan().tolist() == [True, False]
    assert logits.isnan().all(1).tolist() == [True, False]
