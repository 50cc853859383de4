"""What tests on a GPU share: the plans that they make."""

from __future__ import annotations

import pytest
import torch


class Plans(list):
    """The plans made during a test."""

    def assert_hopper_ran(self) -> None:
        """On a Hopper GPU: forward and backward of every branch took its kernels."""
        from dilated_attention_pytorch.kernels.triton.plan import why_no_hopper

        if why_no_hopper(torch.device("cuda", torch.cuda.current_device())) is None:
            assert len(self) >= 2
            assert all(branch.hopper is not None for plan in self for branch in plan.branches)


@pytest.fixture
def plans(monkeypatch):
    """With room for any Hopper kernel's scratch."""
    from dilated_attention_pytorch.core.plans import get_global_pattern_cache
    from dilated_attention_pytorch.kernels.triton import plan

    found = Plans()

    class Noted(plan.Plan):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(plan, "Plan", Noted)
    monkeypatch.setattr(plan, "most_scratch", lambda tensor_bytes: 1 << 40)
    get_global_pattern_cache().forget("plan")
    yield found
    get_global_pattern_cache().forget("plan")
