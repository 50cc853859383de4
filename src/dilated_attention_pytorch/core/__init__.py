"""What dilated attention computes: specs, patterns, the reference and the merge of partials; and what calls share.

This room imports PyTorch only.
"""

from dilated_attention_pytorch.core.block_layout import keys_seen, layout_for
from dilated_attention_pytorch.core.block_pattern import PatternType, SparsePatternConfig
from dilated_attention_pytorch.core.merge import merge
from dilated_attention_pytorch.core.optimized_pattern_cache import (
    OptimizedPatternCache,
    SimpleGPUCache,
    get_optimized_pattern_cache,
)
from dilated_attention_pytorch.core.pattern import (
    covered_rows,
    dense_mask,
    forward_flops,
    training_bytes,
    uncovered_share,
    visible,
    visible_pairs,
)
from dilated_attention_pytorch.core.plans import (
    DilatedPatternCache,
    PatternCache,
    get_global_pattern_cache,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.core.pool import WorkspacePool, get_global_memory_pool, reset_global_memory_pool
from dilated_attention_pytorch.core.reach import reach_shares
from dilated_attention_pytorch.core.reference import reference_forward
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, HeadLayout, ReachWarning, branches_for

__all__ = [
    "Branch",
    "DilatedPatternCache",
    "DilatedSpec",
    "HeadLayout",
    "OptimizedPatternCache",
    "PatternCache",
    "PatternType",
    "ReachWarning",
    "SimpleGPUCache",
    "SparsePatternConfig",
    "WorkspacePool",
    "branches_for",
    "covered_rows",
    "dense_mask",
    "document_spans",
    "forward_flops",
    "get_global_memory_pool",
    "get_global_pattern_cache",
    "get_optimized_pattern_cache",
    "keys_seen",
    "layout_for",
    "merge",
    "reach_shares",
    "reference_forward",
    "reset_global_memory_pool",
    "reset_global_pattern_cache",
    "training_bytes",
    "uncovered_share",
    "visible",
    "visible_pairs",
]
