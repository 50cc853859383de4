from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import backends
from dilated_attention_pytorch.kernels import engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu_only(monkeypatch):
    """As if Triton were there for GPUs, without its interpreter."""
    monkeypatch.setattr(
        engine, "_triton_missing", lambda device: None if device.type == "cuda" else "Triton runs on GPUs, not here"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_is_triton_on_a_gpu_and_eager_where_triton_cannot(gpu_only, dtype) -> None:
    assert engine.choose_engine("auto", GPU, dtype, 64) == "triton"
    assert engine.choose_engine("auto", GPU, dtype, 20) == "eager"
    assert engine.choose_engine("auto", GPU, torch.float64, 64) == "eager"


def test_auto_is_eager_on_a_gpu_that_triton_does_not_know(monkeypatch) -> None:
    monkeypatch.setattr(engine, "_triton_missing", lambda device: "its kernels need compute capability 8.0")
    assert engine.choose_engine("auto", GPU, torch.bfloat16, 64) == "eager"


def test_auto_is_eager_on_a_cpu_even_where_the_interpreter_could(monkeypatch) -> None:
    monkeypatch.setattr(engine, "_triton_missing", lambda device: None)
    assert engine.choose_engine("auto", CPU, torch.float32, 64) == "eager"


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        (CPU, torch.float32, 64, "Triton runs on GPUs"),
        (GPU, torch.float64, 64, "the tensors are float64"),
        (GPU, torch.float32, 20, "a multiple of 8, got 20"),
        (GPU, torch.float32, 264, "from 16 to 256 .* got 264"),
    ],
)
def test_a_named_backend_runs_or_says_why_not_and_who_can(gpu_only, device, dtype, head_dim, reason) -> None:
    for able in (torch.float32, torch.bfloat16, torch.float16):
        assert engine.choose_engine("triton", GPU, able, 64) == "triton"
    with pytest.raises(ValueError, match=f"'triton' cannot take this call: .*{reason}.*; eager or reference can"):
        engine.choose_engine("triton", device, dtype, head_dim)


def test_backends_says_what_is_available_and_why_not(gpu_only) -> None:
    assert backends("cpu") == {
        "triton": "Triton runs on GPUs, not here",
        "vendor": "PyTorch's flash kernel for CUDA runs on GPUs, the tensors are on cpu",
        "eager": "available",
        "reference": "available",
    }


def test_tiles_too_small_for_kernels_are_eager_s(gpu_only) -> None:
    assert engine.choose_engine("auto", GPU, torch.bfloat16, 64, block_size=16) == "triton"
    assert engine.choose_engine("auto", GPU, torch.bfloat16, 64, block_size=8) == "eager"
    with pytest.raises(ValueError, match="tiles of 16 rows or more, got block_size=8; eager or reference can"):
        engine.choose_engine("triton", GPU, torch.bfloat16, 64, block_size=8)
