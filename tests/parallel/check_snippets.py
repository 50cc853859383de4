"""On eight ranks: what the published guide shows about rings and distributed attention runs as written, small."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .check_names import part


def check_ring_attention(rank: int, size: int) -> None:
    from dilated_attention_pytorch.ring_dilated_attention import RingDilatedAttention
    from dilated_attention_pytorch.ring_multihead_dilated_attention import RingMultiheadDilatedAttention

    ring_attention = RingDilatedAttention(
        segment_lengths=[16, 32, 64],
        dilation_rates=[1, 2, 4],
        ring_size=8,
    )
    multihead_ring = RingMultiheadDilatedAttention(
        embed_dim=48,
        num_heads=12,
        segment_lengths=[16, 32, 64],
        dilation_rates=[1, 2, 4],
        ring_size=8,
    )
    q, k, v = (part(x, rank, size) for x in torch.randn(3, 1, 100, 12, 4))
    query, key, value = (part(x, rank, size) for x in torch.randn(3, 1, 100, 48))
    output = ring_attention(q, k, v)
    assert output.shape == q.shape
    output, _ = multihead_ring(query, key, value)
    assert output.shape == query.shape
    output.sum().backward()


def check_distributed_attention(rank: int, size: int) -> None:
    """With one group for both a mesh says which ranks share what."""
    from dilated_attention_pytorch.improved_distributed_dilated_attention import DistributedImprovedDilatedAttention

    distributed_attention = DistributedImprovedDilatedAttention(
        segment_lengths=[16, 32, 64],
        dilation_rates=[1, 2, 4],
        sequence_parallel=True,
        model_parallel=True,
        mesh=init_device_mesh("cpu", (4, 2), mesh_dim_names=("sequence", "tensor")),
    )
    x = part(torch.randn(1, 100, 6, 4), rank // 2, 4)
    assert distributed_attention(x, x, x, is_causal=True).shape == x.shape


def check_enterprise_attention(rank: int, size: int) -> None:
    """Where the disk is, the guide does not say; a run asks when it reads the options."""
    from dilated_attention_pytorch.ring_improved_distributed_dilated_attention import (
        RingAdvancedDistributedDilatedAttention,
    )

    enterprise_attention = RingAdvancedDistributedDilatedAttention(
        embed_dim=64,
        num_heads=32,
        segment_lengths=[16, 32, 64],
        dilation_rates=[1, 2, 4],
        model_parallel=True,
        sequence_parallel=True,
        data_parallel=True,
        use_deepspeed=True,
        zero_stage=3,
        cpu_offload=True,
        nvme_offload=True,
        enable_fault_tolerance=True,
        enable_monitoring=True,
        auto_resume=True,
        checkpoint_interval=100,
    )
    query, key, value = (part(x, rank, size) for x in torch.randn(3, 1, 100, 64))
    output = enterprise_attention(query, key, value)
    assert output.shape == query.shape
    output.sum().backward()


def check_snippets() -> None:
    torch.manual_seed(0)
    for check in (check_ring_attention, check_distributed_attention, check_enterprise_attention):
        check(dist.get_rank(), dist.get_world_size())
