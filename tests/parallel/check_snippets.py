"""On eight ranks: what the published guide shows about rings and distributed attention runs as written, small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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
    """With one group for both a mesh says which ranks share what, as the guide does not."""
    from dilated_attention_pytorch.improved_distributed_dilated_attention import DistributedImprovedDilatedAttention

    shown = {
        "segment_lengths": [16, 32, 64],
        "dilation_rates": [1, 2, 4],
        "sequence_parallel": True,
        "model_parallel": True,
    }
    with pytest.raises(ValueError, match="cannot both cut one group of 8 ranks: pass mesh="):
        DistributedImprovedDilatedAttention(**shown)
    distributed_attention = DistributedImprovedDilatedAttention(
        **shown,
        mesh=init_device_mesh("cpu", (4, 2), mesh_dim_names=("sequence", "tensor")),
    )
    x = part(torch.randn(1, 100, 6, 4), rank // 2, 4)
    assert distributed_attention(x, x, x, is_causal=True).shape == x.shape


def check_enterprise_attention(rank: int, size: int) -> None:
    """Where the disk is, the guide does not say; a run asks when it reads the options.

    Nor how eight ranks are shared in three ways, so numbers stand for True here.
    """
    from dilated_attention_pytorch.ring_improved_distributed_dilated_attention import (
        RingAdvancedDistributedDilatedAttention,
    )

    enterprise_attention = RingAdvancedDistributedDilatedAttention(
        embed_dim=64,
        num_heads=32,
        segment_lengths=[16, 32, 64],
        dilation_rates=[1, 2, 4],
        model_parallel=2,
        sequence_parallel=2,
        data_parallel=2,
        use_deepspeed=True,
        zero_stage=3,
        cpu_offload=True,
        nvme_offload=True,
        enable_fault_tolerance=True,
        enable_monitoring=True,
        auto_resume=True,
        checkpoint_interval=100,
    )
    query, key, value = (part(x, rank // 2 % 2, 2) for x in torch.randn(3, 1, 100, 64))
    output = enterprise_attention(query, key, value)
    assert output.shape == query.shape
    output.sum().backward()


def check_the_page_on_ranks(rank: int, size: int) -> None:
    """What docs/parallel.md shows runs as written, but for sizes, and for ranks that have begun already."""
    page = (Path(__file__).parents[2] / "docs/parallel.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if ">>>" not in block]
    ring, whole, replicas, zigzag = blocks
    smaller = "LongNetLM(d_model=32, num_heads=4, num_layers=1, num_decoder_layers=0)"
    ring = shown_as(ring, 'dist.init_process_group("gloo")', "")
    ring = shown_as(ring, "ring_size=4", f"ring_size={size}")
    ring = shown_as(ring, "torch.randn(1, 2048, 512)", "torch.randn(1, 64, 512)")
    whole = shown_as(whole, "LongNetLM()", smaller)
    names: dict = {}
    exec(ring, names)
    assert names["out"].shape == (1, 64, 512)
    tokens, following = torch.randint(256, (2, 1, 32)).unbind(0)
    names = {"tokens": tokens, "following": following, "tokens_per_rank": 32}
    exec(whole, names)
    assert names["logits"].shape[:2] == (1, 32)
    names["loss"].backward()
    exec(f"model = {smaller}\n{replicas}", names)
    names["model"](tokens).sum().backward()
    q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    names = {"q": q, "k": k, "v": v, "tokens": 100, "ranks": size, "rank": rank}
    exec("import torch\n" + zigzag, names)
    assert names["out"].shape == (1, len(names["mine"]), 4, 8)


def shown_as(block: str, shown: str, here: str) -> str:
    assert shown in block
    return block.replace(shown, here)


def check_snippets() -> None:
    torch.manual_seed(0)
    for check in (
        check_ring_attention,
        check_distributed_attention,
        check_enterprise_attention,
        check_the_page_on_ranks,
    ):
        check(dist.get_rank(), dist.get_world_size())
