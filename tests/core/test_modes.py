"""PyTorch has an old and a new setting for TF32, and refuses to be asked the old way after the new one was made."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.modes import tf32_is_on
from dilated_attention_pytorch.tools import doctor
from dilated_attention_pytorch.train.presets import float32_products


@pytest.fixture
def settings():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield matmul
    if hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = "none"
    matmul.allow_tf32 = before


def test_the_old_setting_is_read(settings) -> None:
    for on in (True, False):
        settings.allow_tf32 = on
        assert tf32_is_on() is on


def test_the_new_setting_is_read_and_stays_through_a_run(settings, monkeypatch) -> None:
    if not hasattr(settings, "fp32_precision"):
        pytest.skip("needs PyTorch 2.9")
    settings.fp32_precision = "ieee"
    assert not tf32_is_on()
    settings.fp32_precision = "tf32"
    assert tf32_is_on()
    for wanted in (False, True):
        with float32_products(wanted):
            assert tf32_is_on()
    assert settings.fp32_precision == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    assert not any("TF32" in one.measured for one in doctor._one_gpu(0))
