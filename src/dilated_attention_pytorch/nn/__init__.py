"""Modules: attention on `(B, N, H, D)`, multihead on `(B, N, E)`, positions, transformer layers."""

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.nn.block_sparse import BlockSparseDilatedAttention, BlockSparseMultiheadDilatedAttention
from dilated_attention_pytorch.nn.factories import create_dilated_attention, create_multihead_dilated_attention
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.nn.positions import RotaryPositions, Rotation, XPosPositions, rotate
from dilated_attention_pytorch.nn.replacement import replace_attention
from dilated_attention_pytorch.nn.transformer import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    FeedForward,
)

__all__ = [
    "BlockSparseDilatedAttention",
    "BlockSparseMultiheadDilatedAttention",
    "DilatedAttention",
    "DilatedKVCache",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "FeedForward",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention",
    "RotaryPositions",
    "Rotation",
    "SparsePatternConfig",
    "XPosPositions",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "replace_attention",
    "rotate",
]
