"""What the published guides show about caches, pools and troubleshooting runs as written, at small sizes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    DilatedAttention,
    DistributedImprovedDilatedAttention,
    ImprovedDilatedAttention,
    LongNetLM,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    benchmark_implementations,
    diagnose_oom_error,
    diagnose_performance_issues,
    memory_cleanup,
    monitor_memory_realtime,
    profile_memory_usage,
)
from dilated_attention_pytorch.core import (
    OptimizedPatternCache,
    SimpleGPUCache,
    get_global_memory_pool,
    get_global_pattern_cache,
    reset_global_memory_pool,
    reset_global_pattern_cache,
)


def attend(model) -> torch.Tensor:
    q, k, v = torch.randn(3, 1, 32, 4, 8)
    return model(q, k, v, is_causal=True)


def test_global_cache_management(capsys) -> None:
    cache = get_global_pattern_cache()
    stats = cache.get_stats()
    print(f"Cache hits: {stats['hits']}, misses: {stats['misses']}")
    print(f"Hit rate: {stats['hit_rate']:.1%}")
    reset_global_pattern_cache()
    assert get_global_pattern_cache().get_stats()["hits"] == 0


def test_memory_pool_basic_and_advanced_usage() -> None:
    model = DilatedAttention(segment_lengths=[8, 16, 32], dilation_rates=[1, 2, 4], enable_memory_pool=True)
    assert attend(model).shape == (1, 32, 4, 8)
    model = ImprovedDilatedAttention(
        segment_lengths=[8, 16, 32], dilation_rates=[1, 2, 4], enable_memory_pool=True, enable_profiling=True
    )
    assert attend(model).shape == (1, 32, 4, 8)


def test_memory_pool_management() -> None:
    pool = get_global_memory_pool()
    stats = pool.get_stats()
    print(f"Total allocated: {stats['total_allocated'] / 1024 / 1024:.1f} MB")
    print(f"Peak allocated: {stats['peak_allocated'] / 1024 / 1024:.1f} MB")
    print(f"Allocation count: {stats['allocation_count']}")
    reset_global_memory_pool()
    assert get_global_memory_pool().get_stats()["total_allocated"] == 0


def test_adding_support_to_a_module_of_ones_own() -> None:
    class MyAttention(nn.Module):
        def __init__(self, use_pattern_cache=False, enable_memory_pool=False):
            super().__init__()
            self.use_pattern_cache = use_pattern_cache
            self._pattern_cache = get_global_pattern_cache() if use_pattern_cache else None
            self.enable_memory_pool = enable_memory_pool
            self._memory_pool = get_global_memory_pool() if enable_memory_pool else None

    mine = MyAttention(use_pattern_cache=True, enable_memory_pool=True)
    theirs = DilatedAttention([8], [1], use_pattern_cache=True, enable_memory_pool=True)
    assert mine._pattern_cache is theirs._pattern_cache
    assert mine._memory_pool is theirs._memory_pool


@pytest.fixture
def as_it_was():
    log = logging.getLogger("dilated_attention_pytorch")
    yield
    log.setLevel(logging.NOTSET)


def test_profiling_and_debugging(capsys, caplog, as_it_was) -> None:
    model = RingDilatedAttentionV3(
        segment_lengths=[8, 16],
        dilation_rates=[1, 2],
        use_pattern_cache=True,
        enable_memory_pool=True,
        enable_profiling=True,
    )
    for _ in range(3):
        attend(model)
    cache_stats = model._pattern_cache.get_stats()
    pool_stats = model._memory_pool.get_stats()
    print(f"Cache efficiency: {cache_stats['hit_rate']:.1%}")
    print(f"Memory reuse rate: {pool_stats.get('reuse_rate', 0):.1%}")
    assert cache_stats["hits"] >= 2
    assert cache_stats["profile"]["parts"]["seconds_of_hits"] > 0
    assert model.get_profile()["calls"]["count"] == 3
    logging.getLogger("dilated_attention_pytorch").setLevel(logging.DEBUG)
    attend(model)
    assert any(record.getMessage().startswith("parts: found in the pattern cache") for record in caplog.records)
    print(f"Pattern cache enabled: {model.use_pattern_cache}")
    print(f"Memory pool enabled: {model.enable_memory_pool}")
    print(f"Cache size: {len(model._pattern_cache._cache)}")
    assert "Cache size: 0" not in capsys.readouterr().out


def test_rings_are_found_at_their_documented_paths() -> None:
    from dilated_attention_pytorch.ring_dilated_attention_v2 import RingDilatedAttentionV2 as V2
    from dilated_attention_pytorch.ring_dilated_attention_v3 import RingDilatedAttentionV3 as V3

    from dilated_attention_pytorch.core.optimized_pattern_cache import OptimizedPatternCache as TwoTiers

    model = V3(
        segment_lengths=[8, 16, 32],
        dilation_rates=[1, 2, 4],
        use_pattern_cache=True,
        enable_memory_pool=True,
        cache_on_gpu=True,
    )
    assert attend(model).shape == (1, 32, 4, 8)
    assert isinstance(model._pattern_cache, TwoTiers)
    assert V2(segment_lengths=[8, 16, 32], dilation_rates=[1, 2, 4], use_pattern_cache=True).use_pattern_cache


def test_the_environment_configures_the_caches() -> None:
    """The guide's `export` lines, in a process of its own."""
    script = """
from dilated_attention_pytorch import RingDilatedAttentionV2, RingDilatedAttentionV3
for kind in (RingDilatedAttentionV2, RingDilatedAttentionV3):
    stats = kind([8], [1])._pattern_cache.get_stats()
    assert (stats["max_size"], stats["profile"]) == (2000, {}), stats
"""
    settings = {"PATTERN_CACHE_MAX_SIZE": "2000", "PATTERN_CACHE_ENABLE_PROFILING": "1"}
    subprocess.run([sys.executable, "-c", script], env=os.environ | settings, check=True)


def test_keys_are_those_of_the_report() -> None:
    seq_len, segment_lengths, dilation_rates = 16, [8, 16], [1, 2]
    pattern_type, sparsity_ratio, block_size = "local_window", 0.1, 4
    cache = get_global_pattern_cache()
    assert cache.dilated_key(seq_len, segment_lengths, dilation_rates) == (
        f"dilated_s{seq_len}_seg{segment_lengths}_dil{dilation_rates}"
    )
    assert cache.sparse_key(seq_len, pattern_type, sparsity_ratio, block_size) == (
        f"sparse_s{seq_len}_t{pattern_type}_r{sparsity_ratio:.3f}_b{block_size}"
    )


def test_the_two_tier_cache_and_pregenerated_patterns() -> None:
    cache = OptimizedPatternCache(
        max_gpu_patterns=50,
        max_cpu_patterns=500,
        gpu_memory_limit_mb=100.0,
        enable_async=True,
        enable_prefetch=True,
    )
    for seg_len, dil_rate in zip([8, 16], [1, 2]):
        for offset in range(min(dil_rate, 4)):
            cache_key = f"dilated_{seg_len}_{dil_rate}_{offset}"
            pattern = torch.arange(offset, seg_len, dil_rate)
            cache.put(cache_key, pattern, store_on_gpu=True)
    assert cache.get_stats()["gpu_patterns"] == 3


def test_rings_with_a_cache_and_a_pool() -> None:
    for model in (
        RingDilatedAttentionV2(segment_lengths=[8, 16, 32], dilation_rates=[1, 2, 4], use_pattern_cache=True),
        RingDilatedAttentionV2(
            segment_lengths=[8, 16], dilation_rates=[1, 2], enable_memory_pool=True, lightweight_pool=True
        ),
        RingDilatedAttentionV3(
            segment_lengths=[8, 16, 32],
            dilation_rates=[1, 2, 4],
            use_pattern_cache=True,
            enable_memory_pool=True,
            cache_on_gpu=True,
        ),
        RingDilatedAttentionV3(
            segment_lengths=[8, 16],
            dilation_rates=[1, 2],
            use_pattern_cache=True,
            enable_memory_pool=True,
            enable_profiling=True,
        ),
    ):
        assert attend(model).shape == (1, 32, 4, 8)
        assert model._pattern_cache.get_stats()["size"] > 0


def test_distributed_attention_on_one_rank() -> None:
    distributed_attention = DistributedImprovedDilatedAttention(
        segment_lengths=[8, 16, 32], dilation_rates=[1, 2, 4], sequence_parallel=True, model_parallel=True
    )
    assert attend(distributed_attention).shape == (1, 32, 4, 8)


def test_the_simplified_gpu_cache() -> None:
    patterns_to_cache = ["dilated_s16_seg[8, 16]_dil[1, 2]"]
    assert list(SimpleGPUCache(patterns_to_cache).gpu_patterns) == patterns_to_cache


def test_memory_profiling(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    model = LongNetLM(d_model=16, num_heads=4, num_layers=1, segment_lengths=[8, 16], dilation_rates=[1, 2])
    tokens = torch.randint(256, (2, 33))
    sample_batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    profile_memory_usage(model, sample_batch)
    assert "CPU Mem" in capsys.readouterr().out
    assert (tmp_path / "memory_trace.json").exists()


def test_real_time_memory_monitoring_and_cleanup(capsys) -> None:
    monitor_memory_realtime()
    assert "host: " in capsys.readouterr().out
    memory_cleanup()


def test_performance_benchmarking() -> None:
    segment_lengths, dilation_rates = [16, 32], [1, 2]
    implementations = {
        "original": DilatedAttention(segment_lengths, dilation_rates),
        "improved": ImprovedDilatedAttention(segment_lengths, dilation_rates),
    }
    test_configs = [
        {"seq_len": 32, "batch_size": 4, "embed_dim": 128},
        {"seq_len": 64, "batch_size": 2, "embed_dim": 128},
        {"seq_len": 128, "batch_size": 1, "embed_dim": 128},
    ]
    results = benchmark_implementations(implementations, test_configs)
    for name in implementations:
        assert list(results[name]) == ["32_4", "64_2", "128_1"]
        for result in results[name].values():
            assert {"avg_time", "throughput", "memory_gb"} <= result.keys()


def test_troubleshooting(capsys) -> None:
    diagnose_oom_error()
    assert "live tensors" in capsys.readouterr().out
    diagnose_performance_issues()
    assert "PyTorch's threads" in capsys.readouterr().out
