"""Across ranks: the pool lends message buffers and sums, the profile counts messages, the log tells them."""

from __future__ import annotations

import copy
import logging

import torch
import torch.distributed as dist

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    SparsePatternConfig,
    WorkspacePool,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.parallel import ranks_of

from .check_names import SPEC, N, part, whole

TILES = SparsePatternConfig("random", sparsity_ratio=0.6, block_size=4)


def modules(dropout: float) -> dict[str, RingDilatedAttention]:
    keywords = {**SPEC, "dropout": dropout, "enable_memory_pool": True, "enable_profiling": True}
    made = {scheme: RingDilatedAttentionV2(**keywords, scheme=scheme) for scheme in ("ring", "gather")}
    if 4 % dist.get_world_size() == 0:  # heads
        made["all_to_all"] = RingDilatedAttention(**keywords, scheme="all_to_all")
    made["sparse"] = BlockSparseRingDilatedAttention(
        **{**keywords, "segment_lengths": [32, 64], "dilation_rates": [1, 2]}, sparse_config=TILES
    )
    return made


def results(module: RingDilatedAttention, shard: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    inputs = [x.clone().requires_grad_() for x in shard]
    out = module(*inputs, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def check_the_pool_lends_buffers(rank: int, size: int) -> None:
    """The same bits with and without it, nothing stays borrowed, and no result shares memory with it."""
    for dtype in (torch.float64, torch.bfloat16):
        for dropout in (0.0, 0.3):
            shard = [part(x, rank, size).to(dtype) for x in whole()]
            for scheme, module in modules(dropout).items():
                pool = module._memory_pool = WorkspacePool(threshold_bytes=1, lightweight=True)
                plain = copy.deepcopy(module)
                plain._memory_pool = None
                expected, found = results(plain, shard), results(module, shard)
                again = results(module, shard)
                for one, two, want in zip(found, again, expected):
                    assert torch.equal(one, want), scheme
                    assert torch.equal(two, want), scheme
                stats = pool.get_stats()
                assert (stats["live_buffers"], stats["live_bytes"]) == (0, 0), scheme
                assert stats["reuse_count"] >= stats["allocation_count"] > 0, scheme
                idle = [b for shelf in pool._shelves.values() for b in shelf.idle]
                places = {block.memory.untyped_storage().data_ptr() for block in idle}
                assert places.isdisjoint(x.untyped_storage().data_ptr() for x in found), scheme


def check_a_ring_keeps_few_buffers(rank: int, size: int) -> None:
    """A block in use, one on its way and one that was sent on, however many hops there are."""
    module = RingDilatedAttentionV2([N * 2], [1], enable_memory_pool=True)
    pool = module._memory_pool = WorkspacePool(threshold_bytes=1, lightweight=True)
    shard = [part(x, rank, size) for x in whole()]
    with torch.no_grad():
        module(*shard)
    assert pool.get_stats()["allocation_count"] <= 3


def check_profile_and_log(rank: int, size: int) -> None:
    shard = [part(x, rank, size) for x in whole()]
    module = RingDilatedAttentionV2(**SPEC, enable_profiling=True, enable_memory_pool=True)
    module._memory_pool = WorkspacePool(threshold_bytes=1)
    ranks = ranks_of()
    ranks.traffic.clear()
    records: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dilated_attention_pytorch")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        results(module, shard)
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
    sent, received = (sum(getattr(one, name) for one in ranks.traffic.values()) for name in ("sent", "received"))
    profile = module.get_profile()
    assert profile["messages"]["bytes_sent"] == sent > 0
    assert profile["messages"]["bytes_received"] == received > 0
    assert profile["messages"]["seconds_waiting"] > 0
    assert profile["loans"]["bytes"] > 0
    assert profile["lookups of ring schedule"]["hits"] + profile["lookups of ring schedule"]["misses"] == 1
    assert profile["calls"]["count"] == 1
    assert sum(int(line.split("sends ")[1].split()[0]) for line in records if "sends" in line) == sent
    assert any(line.startswith("lent ") for line in records)
    assert any("engine eager" in line or "ring schedule" in line for line in records)


def check_pregeneration(rank: int, size: int) -> None:
    reset_global_pattern_cache()
    module = RingDilatedAttentionV3(**SPEC)
    pinned = module.pregenerate(N, batch_size=2, num_heads=4, head_dim=8, dtype=torch.float64)
    cache = module._pattern_cache
    assert cache.get_stats()["pinned"] == pinned >= 1
    assert [key[0] for key in cache._cache].count("ring schedule") == 1
    cache.reset_stats()
    module(*(part(x, rank, size) for x in whole()))
    assert cache.get_stats()["misses"] == 0
    module.cleanup_buffers()
    assert "ring schedule" not in [key[0] for key in cache._cache]


def check_resources() -> None:
    checks = (check_the_pool_lends_buffers, check_a_ring_keeps_few_buffers, check_profile_and_log, check_pregeneration)
    for check in checks:
        check(dist.get_rank(), dist.get_world_size())
