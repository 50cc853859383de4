"""What dilated attention is: specs, pattern mathematics, the reference and the algebra of partials. PyTorch only."""

from dilated_attention_pytorch.core.block_layout import BlockLayout, BranchLayout, keys_seen, layout_for, layout_of
from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES, PatternType, SparsePatternConfig
from dilated_attention_pytorch.core.merge import merge
from dilated_attention_pytorch.core.pattern import (
    covered_rows,
    dense_mask,
    forward_flops,
    training_bytes,
    uncovered_share,
    visible,
    visible_pairs,
)
from dilated_attention_pytorch.core.reference import reference_forward
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, HeadLayout

__all__ = [
    "PATTERN_TYPES",
    "BlockLayout",
    "Branch",
    "BranchLayout",
    "DilatedSpec",
    "HeadLayout",
    "PatternType",
    "SparsePatternConfig",
    "covered_rows",
    "dense_mask",
    "document_spans",
    "forward_flops",
    "keys_seen",
    "layout_for",
    "layout_of",
    "merge",
    "reference_forward",
    "training_bytes",
    "uncovered_share",
    "visible",
    "visible_pairs",
]
