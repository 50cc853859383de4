"""What the Triton engine plans before it launches."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.spec import DilatedSpec

planning = pytest.importorskip("dilated_attention_pytorch.kernels.triton.plan", reason="the kernels need Triton")


def order_of(spec: DilatedSpec, spans: torch.Tensor | None = None, tokens: int = 300) -> list[int]:
    """The branches of a call in the order in which they run."""
    query = torch.empty(1, tokens, 4, 16)
    plan = planning.Plan(Call(spec=spec), spans, False, False, (query, query, query))
    return [branch.index for branch in plan.branches]


def test_a_branch_that_writes_every_row_goes_first() -> None:
    assert order_of(DilatedSpec.of([32, 64, 128], [2, 1, 4])) == [1, 0, 2]


@pytest.mark.filterwarnings("ignore:no branch of")
def test_branches_of_few_keys_go_first_where_results_are_cleared_anyway() -> None:
    spec = DilatedSpec.of([264, 124, 426, 1], [1, 2, 12, 6])  # 264, 62, 25 of 300 tokens, and 1
    assert order_of(spec, torch.tensor([[0, 290]])) == [3, 2, 1, 0]
    assert order_of(DilatedSpec.of([264, 124], [2, 4])) == [1, 0]  # rows that nobody covers are cleared too
