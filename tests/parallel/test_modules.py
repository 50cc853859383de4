"""The names without a process group; check_names.py has them on several ranks."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    DistributedImprovedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
    WorkspacePool,
    get_global_pattern_cache,
    reset_global_pattern_cache,
)


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


@pytest.mark.parametrize(
    "kind", [RingDilatedAttention, DistributedImprovedDilatedAttention, BlockSparseRingDilatedAttention]
)
def test_the_other_name_of_dropout_is_refused_with_the_name_to_use(kind) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no attention_dropout: pass dropout"):
        kind([8], [1], attention_dropout=0.1)


def test_rings_share_schedules_and_tables_unless_told_otherwise() -> None:
    shared = get_global_pattern_cache()
    for kind in (RingDilatedAttention, RingDilatedAttentionV2, DistributedImprovedDilatedAttention):
        assert kind([8], [1])._pattern_cache is shared
        assert kind([8], [1], use_pattern_cache=False)._pattern_cache is None
    assert RingMultiheadDilatedAttention(16, 4, [8], [1])._pattern_cache is shared


def test_modules_of_v3_share_a_cache_in_two_tiers() -> None:
    reset_global_pattern_cache()
    module = RingDilatedAttentionV3([8, 16], [1, 2], cache_on_gpu=True)
    x, lengths = torch.randn(1, 64, 4, 8), torch.tensor([0, 30, 64])
    for _ in range(3):
        module(x, x, x, cu_seqlens=lengths)
    stats = module._pattern_cache.get_stats()
    assert stats["gpu_patterns"] == stats["misses"] > 0
    assert stats["gpu_hits"] == stats["hits"] == 2 * stats["misses"]
    assert stats["gpu_memory_used_mb"] > 0
    assert RingDilatedAttentionV3([8], [1])._pattern_cache is module._pattern_cache
    assert RingDilatedAttentionV3([8], [1], cache_on_gpu=False)._pattern_cache is get_global_pattern_cache()
    assert RingDilatedAttentionV3([8], [1], use_pattern_cache=False).cache_on_gpu is False
    with pytest.raises(ValueError, match="pass use_pattern_cache=True with it"):
        RingDilatedAttentionV3([8], [1], use_pattern_cache=False, cache_on_gpu=True)


def test_v3_makes_and_pins_what_calls_of_a_known_length_share() -> None:
    reset_global_pattern_cache()
    module = RingDilatedAttentionV3([8, 16], [1, 2], enable_profiling=True)
    assert module.pregenerate(64, num_heads=4, head_dim=8) == 1
    cache = module._pattern_cache
    assert (cache.get_stats()["pinned"], cache.get_stats()["gpu_patterns"]) == (1, 1)
    cache.reset_stats()
    x = torch.randn(1, 64, 4, 8)
    module(x, x, x)
    stats = cache.get_stats()
    assert (stats["misses"], stats["gpu_hits"]) == (0, 1)
    for i in range(600):  # of other calls, which evict each other
        cache.put(i, x[0, 0])
    module(x, x, x)
    assert cache.get_stats()["misses"] == 0
    reset_global_pattern_cache()
    with pytest.raises(ValueError, match="make the module with use_pattern_cache=True"):
        RingDilatedAttentionV3([8], [1], use_pattern_cache=False).pregenerate(64)


def test_cleaning_up_frees_what_the_pool_holds_idle() -> None:
    module = RingDilatedAttentionV2([8, 16], [1, 2], enable_memory_pool=True)
    pool = module._memory_pool = WorkspacePool(threshold_bytes=1)
    x = torch.randn(1, 64, 4, 8, dtype=torch.bfloat16)
    module(x, x, x)
    assert pool.get_stats()["total_allocated"] > 0
    module.cleanup_buffers()
    assert pool.get_stats()["total_allocated"] == 0


def test_a_layout_that_a_scheme_cannot_take_is_refused_when_a_module_is_made() -> None:
    with pytest.raises(ValueError, match="pass scheme='gather', or leave token_layout out"):
        RingDilatedAttention([8], [1], token_layout="zigzag")
    x = torch.randn(1, 20, 4, 8)
    zigzag = RingDilatedAttention([8], [1], token_layout="zigzag", scheme="gather")
    assert torch.equal(zigzag(x, x, x), DilatedAttention([8], [1])(x, x, x))  # of one rank it is token order


def test_on_one_rank_nothing_is_sent() -> None:
    estimate = RingDilatedAttentionV3([8, 16], [1, 2]).get_memory_estimate(1024, num_heads=12, head_dim=64)
    assert (estimate["messages"], estimate["received"], estimate["ring_size"]) == (0, 0, 1)
    assert estimate["tensors"] == estimate["total"] == 1024 * (8 * 12 * 64 * 4 + 2 * 12 * 4)


def test_a_single_device_reduces_no_memory() -> None:
    assert RingDilatedAttentionV2([8, 16], [1, 2]).get_memory_estimate(1024)["memory_reduction_factor"] == 1.0
