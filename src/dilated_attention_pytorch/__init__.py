"""LongNet's dilated attention for sequences of millions of tokens.

The function is `dilated_attention_pytorch.functional.dilated_attention`; modules and models are below.
"""

import sys

from dilated_attention_pytorch._published_paths import publish
from dilated_attention_pytorch._version import __version__
from dilated_attention_pytorch.core import Branch, DilatedSpec, document_spans, merge
from dilated_attention_pytorch.functional import backends
from dilated_attention_pytorch.models import LongNet, LongNetLM, ModelConfig
from dilated_attention_pytorch.nn import (
    DilatedAttention,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RotaryPositions,
    XPosPositions,
)
from dilated_attention_pytorch.parallel import (
    DistributedImprovedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
)

__all__ = [
    "Branch",
    "DilatedAttention",
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
    "RingDilatedAttention",
    "RingDilatedAttentionV2",
    "RingDilatedAttentionV3",
    "RingMultiheadDilatedAttention",
    "RotaryPositions",
    "XPosPositions",
    "__version__",
    "backends",
    "document_spans",
    "merge",
]

publish(sys.modules[__name__])
