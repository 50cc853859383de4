"""What tests on a GPU share: the plans that they make."""

from __future__ import annotations

import pytest
import torch


class Plans(dict):
    """The plans made during a test, by kind of call."""

    def assert_hopper_ran(self) -> None:
        """On a Hopper GPU: forward and backward of every branch took its kernels."""
        from dilated_attention_pytorch.kernels.triton.plan import why_no_hopper

        if why_no_hopper(torch.device("cuda", torch.cuda.current_device())) is None:
            assert len(self) >= 2
            assert all(branch.hopper is not None for plan in self.values() for branch in plan.branches)


@pytest.fixture
def plans(monkeypatch):
    """With room for any Hopper kernel's scratch."""
    from dilated_attention_pytorch.kernels.triton import plan

    found = Plans()
    monkeypatch.setattr(plan, "_plans", found)
    monkeypatch.setattr(plan, "most_scratch", lambda tensor_bytes: 1 << 40)
    return found
