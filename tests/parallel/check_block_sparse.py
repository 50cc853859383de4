"""Kept tiles are those of the whole sequence: rows and gradients on any number of ranks are a single device's."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch import BlockSparseRingDilatedAttention, SparsePatternConfig
from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.parallel import Shards, sharded_dilated_attention

LENGTHS = ("cu_seqlens", "seqlens", "key_padding_mask")
BRANCHES = {"segment_lengths": [8, 24, 200], "dilation_rates": [1, 2, 3]}


def check_pattern(chance: random.Random, pattern: str, is_causal: bool, lengths: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, groups = chance.randint(20, 90), chance.choice([1, 2])
    layout = chance.choice(["contiguous", "zigzag"])
    shards = Shards.cut(tokens, size, layout)
    if layout == "contiguous" and chance.random() < 0.4:
        edges = sorted(chance.randint(0, tokens) for _ in range(size - 1))
        shards = Shards(tuple(b - a for a, b in zip([0, *edges], [*edges, tokens])))
    config = SparsePatternConfig(pattern, sparsity_ratio=chance.choice([0.2, 0.5]), block_size=chance.choice([2, 4]))
    settings = {
        **BRANCHES,
        "is_causal": is_causal,
        "sparse_config": config,
        "head_layout": chance.choice(["interleaved", "grouped"]),
        "dropout_p": chance.choice([0.0, 0.3]),
    }
    generator = torch.Generator().manual_seed(chance.randrange(2**32))
    held = [token for chunk in shards.chunks_of(rank) for token in range(*shards.bounds(chunk))]
    batch = 2
    edges = sorted(chance.randint(0, tokens) for _ in range(4))
    if lengths == "cu_seqlens":
        batch, stated = 1, torch.tensor([0, *edges])
    elif lengths == "seqlens":
        stated = torch.tensor(edges[2:])
    elif lengths == "key_padding_mask":
        stated = torch.ones(2, tokens, dtype=torch.bool)
        stated[0, edges[0] : edges[2]] = stated[1, edges[1] :] = False
    shared = {} if lengths == "whole" else {lengths: stated}
    own = {lengths: stated[:, held]} if lengths == "key_padding_mask" else shared
    q, do = torch.randn(2, batch, tokens, 3 * groups, 4, dtype=torch.float64, generator=generator).unbind(0)
    k, v = torch.randn(2, batch, tokens, 3, 4, dtype=torch.float64, generator=generator).unbind(0)
    whole = [x.requires_grad_() for x in (q, k, v)]
    mine = [x.detach()[:, held].clone().requires_grad_() for x in whole]
    torch.manual_seed(7)
    expected, lse = dilated_attention(*whole, **settings, **shared, return_lse=True)
    torch.manual_seed(7)
    found, own_lse = sharded_dilated_attention(*mine, **settings, **own, token_layout=layout, return_lse=True)
    case = f"{config}, {settings}, {shared}, {shards}"
    wanted = torch.autograd.grad((expected * do).sum() + sum_of(lse), whole)
    grads = torch.autograd.grad((found * do[:, held]).sum() + sum_of(own_lse), mine)
    for ours, theirs in zip((found, own_lse, *grads), (expected, lse, *wanted)):
        torch.testing.assert_close(ours, theirs[:, held], rtol=1e-9, atol=1e-9, msg=case)


def sum_of(lse: torch.Tensor) -> torch.Tensor:
    """Of the rows that see a key."""
    return lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()


def check_schedule_is_shared(call) -> None:
    """A second call finds what the first one made."""
    cache = get_global_pattern_cache()
    cache.clear()
    call()
    made = cache.get_stats()
    call()
    found = cache.get_stats()
    assert found["hits"] > made["hits"]
    assert (found["misses"], found["size"]) == (made["misses"], made["size"])
    assert any(key[0] == "ring schedule" for key in cache._cache)


def check_block_sparse(seed: int) -> None:
    chance = random.Random(seed)
    for pattern in PATTERN_TYPES:
        for is_causal, lengths in itertools.product((False, True), (False, True)):
            check_pattern(chance, pattern, is_causal, chance.choice(LENGTHS) if lengths else "whole")
    config = SparsePatternConfig("random", sparsity_ratio=0.5, block_size=4)
    attention = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config, ring_size=dist.get_world_size())
    x = torch.randn(1, 12, 4, 8)
    assert attention(x, x, x, is_causal=True).shape == x.shape
    check_schedule_is_shared(lambda: attention(x, x, x, is_causal=True))
    with pytest.raises(ValueError, match="kept tiles travel by gather"):
        sharded_dilated_attention(x, x, x, **BRANCHES, sparse_config=config, scheme="ring")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config, group=alone)
    torch.testing.assert_close(plain(x, x, x), dilated_attention(x, x, x, **BRANCHES, sparse_config=config))
