"""LongNet's dilated attention for sequences of millions of tokens.

The function is `dilated_attention_pytorch.functional.dilated_attention`; modules and models are below.
"""

import sys

from dilated_attention_pytorch._published_paths import publish
from dilated_attention_pytorch._version import __version__
from dilated_attention_pytorch.core import (
    Branch,
    DilatedPatternCache,
    DilatedSpec,
    OptimizedPatternCache,
    PatternCache,
    SimpleGPUCache,
    WorkspacePool,
    document_spans,
    get_global_memory_pool,
    get_global_pattern_cache,
    merge,
    reset_global_memory_pool,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.functional import attention_rows, backends
from dilated_attention_pytorch.inspect import (
    benchmark_implementations,
    diagnose_oom_error,
    diagnose_performance_issues,
    memory_cleanup,
    monitor_memory_realtime,
    profile_memory_usage,
)
from dilated_attention_pytorch.models import (
    LongNet,
    LongNetLM,
    ModelConfig,
    cls_attention,
    load_torchscale_weights,
    on_slide,
    patch_gigapath,
)
from dilated_attention_pytorch.nn import (
    DilatedAttention,
    DilatedKVCache,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RotaryPositions,
    SparsePatternConfig,
    XPosPositions,
    create_dilated_attention,
    create_multihead_dilated_attention,
)
from dilated_attention_pytorch.parallel import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DistributedImprovedDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
    parallelize,
)

__all__ = [
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "Branch",
    "DilatedAttention",
    "DilatedKVCache",
    "DilatedPatternCache",
    "DilatedSpec",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "DistributedImprovedDilatedAttention",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "LongNet",
    "LongNetLM",
    "ModelConfig",
    "MultiheadDilatedAttention",
    "OptimizedPatternCache",
    "PatternCache",
    "RingAdvancedDistributedDilatedAttention",
    "RingDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RotaryPositions",
    "SimpleGPUCache",
    "SparsePatternConfig",
    "WorkspacePool",
    "XPosPositions",
    "__version__",
    "attention_rows",
    "backends",
    "benchmark_implementations",
    "cls_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "diagnose_oom_error",
    "diagnose_performance_issues",
    "document_spans",
    "get_global_memory_pool",
    "get_global_pattern_cache",
    "load_torchscale_weights",
    "memory_cleanup",
    "merge",
    "monitor_memory_realtime",
    "on_slide",
    "parallelize",
    "patch_gigapath",
    "profile_memory_usage",
    "reset_global_memory_pool",
    "reset_global_pattern_cache",
]

publish(sys.modules[__name__])
