"""The names without a process group; check_names.py has them on several ranks."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import DilatedAttention, DistributedImprovedDilatedAttention, RingDilatedAttentionV3


def test_without_a_process_group_a_ring_is_its_plain_class() -> None:
    q, k, v = torch.randn(3, 1, 50, 4, 8, dtype=torch.float64).unbind(0)
    plain = DilatedAttention([8, 16], [1, 2])
    for module in (
        RingDilatedAttentionV3([8, 16], [1, 2], ring_size=1),
        DistributedImprovedDilatedAttention([8, 16], [1, 2], sequence_parallel=True, model_parallel=True),
    ):
        assert torch.equal(module(q, k, v, is_causal=True), plain(q, k, v, is_causal=True))
        assert torch.equal(module(q, k, v, seqlens=torch.tensor([30])), plain(q, k, v, seqlens=torch.tensor([30])))


def test_a_ring_of_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="got ring_size=8 and 1 rank: start as many processes with torchrun"):
        RingDilatedAttentionV3([8], [1], ring_size=8)
    with pytest.raises(ValueError, match="leave cache_on_gpu False"):
        RingDilatedAttentionV3([8], [1], cache_on_gpu=True)


def test_on_one_rank_nothing_is_sent() -> None:
    estimate = RingDilatedAttentionV3([8, 16], [1, 2]).get_memory_estimate(1024, num_heads=12, head_dim=64)
    assert (estimate["messages"], estimate["received"], estimate["ring_size"]) == (0, 0, 1)
    assert estimate["tensors"] == estimate["total"] == 1024 * (8 * 12 * 64 * 4 + 2 * 12 * 4)
