"""Dilated attention across ranks: shards, schemes and their bytes, plans, and the modules that use them."""

from dilated_attention_pytorch.parallel.attention import sharded_dilated_attention
from dilated_attention_pytorch.parallel.group import RankGroup, ranks_of
from dilated_attention_pytorch.parallel.mesh import parallelize, token_mesh
from dilated_attention_pytorch.parallel.names import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DistributedImprovedDilatedAttention,
    DistributedImprovedMultiheadDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
)
from dilated_attention_pytorch.parallel.options import RunOptions, Zero
from dilated_attention_pytorch.parallel.plan import Job, Plan, make_plan
from dilated_attention_pytorch.parallel.schemes import Scheme, branch_traffic, choose_scheme
from dilated_attention_pytorch.parallel.sharding import (
    Shards,
    TokenLayout,
    even_lengths,
    shared_segments,
    zigzag_lengths,
    zigzag_order,
    zigzag_places,
)
from dilated_attention_pytorch.parallel.wire import Traffic, Wire

__all__ = [
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DistributedImprovedDilatedAttention",
    "DistributedImprovedMultiheadDilatedAttention",
    "Job",
    "Plan",
    "RankGroup",
    "RingAdvancedDistributedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RunOptions",
    "Scheme",
    "Shards",
    "TokenLayout",
    "Traffic",
    "Wire",
    "Zero",
    "branch_traffic",
    "choose_scheme",
    "even_lengths",
    "make_plan",
    "parallelize",
    "ranks_of",
    "sharded_dilated_attention",
    "shared_segments",
    "token_mesh",
    "zigzag_lengths",
    "zigzag_order",
    "zigzag_places",
]
