"""A decoding step of a whole `LongNetLM`, one token per row, in five launches per layer.

It computes the same numbers as `LongNetLM.forward` with a cache, rounded in the same places. It takes plain models
only; others decode with their own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.cache_rows import CacheState
from dilated_attention_pytorch.core.entries import lasting
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.kernels.decode import Turns, attend_token, embed_rows, linear_rows
from dilated_attention_pytorch.kernels.engine import choose_engine
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.nn.positions import RotaryPositions, XPosPositions
from dilated_attention_pytorch.nn.transformer import DilatedTransformerEncoderLayer, FeedForward

if TYPE_CHECKING:
    from dilated_attention_pytorch.models.longnet import LongNetLM
    from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

# Modules whose forward is computed here; anything else, such as a quantised layer or an adapter, is not.
KNOWN: set[type[nn.Module]] = {
    DilatedTransformerEncoderLayer, MultiheadDilatedAttention, DilatedAttention, FeedForward, RotaryPositions,
    XPosPositions, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Embedding, nn.ModuleList,
}  # fmt: skip
_MOST_GROUPED = 64  # query heads per key/value head


def can_fuse(model: LongNetLM, cache: Sequence[DilatedKVCache]) -> bool:
    """Whether `fused_logits` computes a step of this model."""
    from dilated_attention_pytorch.models.longnet import LongNetLM

    keys, config = cache[0].keys, model.config
    parts = [part for part in model.modules() if part is not model and part is not model.spans]
    tensors = [*model.parameters(), keys]
    return (
        is_plain(*tensors)
        and all(getattr(type(model), name) is getattr(LongNetLM, name) for name in ("hidden", "logits", "capped"))
        and not torch.is_autocast_enabled(keys.device.type)
        and all(type(part) in KNOWN and part._compiled_call_impl is None for part in parts)
        and not any("forward" in vars(part) for part in parts)  # as accelerate replaces it
        and all(x.dtype == keys.dtype and x.device == keys.device and x.is_contiguous() for x in tensors)
        and not [*model.buffers()]
        and keys.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and not (config.positions == "xpos" and keys.dtype == torch.float16)
        and config.num_heads <= _MOST_GROUPED * cache[0].num_kv_heads
        and all(_takes(attention, keys) for attention in model._all_attention())
    )


def _takes(attention: DilatedAttention, keys: Tensor) -> bool:
    if attention.sparse_config is not None or attention._place is not None:
        return False
    return choose_engine(attention.backend, keys.device, keys.dtype, keys.shape[2]) == "triton"


def fused_logits(model: LongNetLM, tokens: Tensor, cache: Sequence[DilatedKVCache]) -> Tensor:
    """`(B, 1, vocab)` logits after the tokens `(B, 1)`, which the cache then holds."""
    config, heads = model.config, cache[0].num_kv_heads
    lengths = cache[0].lengths
    turns = None if model.positions is None else _turns(model.positions, lengths.device)
    x, rotations = embed_rows(tokens[:, 0], model.embedding.weight, config.d_model**0.5, lengths, turns)  # (B, E)
    per_layer = -(-len(lengths) * heads // 4) * 4  # so that those of every layer begin at a multiple of 16 bytes
    counters = torch.zeros(len(cache), per_layer, dtype=torch.int32, device=x.device)
    for layer, held, counter in zip(_layers(model), cache, counters):
        attention, forward = layer.self_attn, layer.feed_forward
        weights, biases = zip(*attention._projections())
        qkv = linear_rows(x, weights, biases, norm=_norm(layer.norm1))
        state = CacheState(held.keys, held.values, held.lengths, held.rows)
        scale = attention.attention.softmax_scale
        rows = attend_token(
            qkv,
            state,
            attention.head_dim**-0.5 if scale is None else scale,
            counter,
            rotations=rotations,
            qk_norm=_qk_norm(attention),
            allow_tf32=attention.attention.allow_tf32,
        )
        x = _linear(rows, attention.out_proj, attention.norm, residual=x)
        first = [forward.linear1, *([forward.gate] if forward.activation == "swiglu" else [])]
        hidden = linear_rows(
            x,
            [one.weight for one in first],
            [one.bias for one in first],
            norm=_norm(layer.norm2),
            activation=forward.activation,
        )
        x = _linear(hidden, forward.linear2, forward.norm, residual=x)
    torch._foreach_add_([held.lengths for held in cache], 1)
    return model.capped(_linear(x, model.head, model.norm))[:, None]


def _layers(model: LongNetLM) -> Iterator[DilatedTransformerEncoderLayer]:
    for layer in model.layers:
        assert isinstance(layer, DilatedTransformerEncoderLayer)
        yield layer


def _linear(x: Tensor, linear: nn.Linear, norm: nn.Module | None, residual: Tensor | None = None) -> Tensor:
    return linear_rows(x, [linear.weight], [linear.bias], norm=_norm(norm), residual=residual)


def _norm(norm: nn.Module | None) -> tuple[str, Tensor, Tensor | None, float] | None:
    if norm is None:
        return None
    if isinstance(norm, nn.LayerNorm):
        return "layer", norm.weight, norm.bias, norm.eps
    assert isinstance(norm, nn.RMSNorm)
    assert norm.eps is not None
    return "rms", norm.weight, None, norm.eps


def _qk_norm(attention: MultiheadDilatedAttention) -> tuple[Tensor, Tensor, float] | None:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None:
        return None
    assert q_norm.eps is not None
    return q_norm.weight, k_norm.weight, q_norm.eps


def _turns(positions: RotaryPositions, device: torch.device) -> Turns:
    """What `positions.of` computes from, made once."""

    def make() -> Turns:
        frequencies = positions.frequencies(device)
        if not isinstance(positions, XPosPositions):
            return Turns(frequencies)
        return Turns(frequencies, positions.zeta(device).log2(), positions.period, positions.scale_base)

    key = (_turns, type(positions), positions.extra_repr(), getattr(positions, "gamma", None), device)
    return plans.remember("decode table", key, lambda: lasting(device, make))
