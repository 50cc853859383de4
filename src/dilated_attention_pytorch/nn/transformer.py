"""Pre-norm transformer layers around multihead dilated attention and a feed-forward network, both after MAGNETO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import check_flag, check_tensor, checked
from dilated_attention_pytorch.kernels.feed_forward import fuses, gelu_norm_linear
from dilated_attention_pytorch.nn.attention import AttentionSettings, SharesResources
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.nn.multihead import NORMS, MultiheadDilatedAttention, Norm
from dilated_attention_pytorch.nn.positions import Rotation

if TYPE_CHECKING:
    from typing_extensions import Unpack

Activation = Literal["relu", "gelu", "silu", "swiglu"]

# SwiGLU applies `silu` to a second product.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "swiglu": F.silu,
}  # fmt: skip


def check_features(name: str, x: Tensor, features: int, dims: tuple[int, ...] = (2, 3)) -> None:
    """Refuse inputs that do not fit a layer of this many features."""
    if check_tensor(name, x).dim() not in dims or x.shape[-1] != features or not x.is_floating_point():
        raise ValueError(
            f"{name} must hold floating-point numbers, (batch, tokens, {features}), got {x.dtype} {tuple(x.shape)}"
        )


def _check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if mask is None:
        return
    if check_tensor(name, mask).dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must hold booleans or floating-point numbers, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


class FeedForward(nn.Module):
    """Two linear layers with MAGNETO's norm before the second one: `linear2(norm(activation(linear1(x))))`.

    With `activation="swiglu"` a third one gates: `linear2(norm(silu(gate(x)) * linear1(x)))`.

    >>> FeedForward(8, 32, activation="swiglu", norm="rms")(torch.randn(2, 10, 8)).shape
    torch.Size([2, 10, 8])
    """

    @checked()
    def __init__(
        self,
        d_model: int,
        dim_feedforward: int,
        *,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        self.norm = NORMS[norm](dim_feedforward, eps=layer_norm_eps, **factory)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        if activation == "swiglu":
            self.gate = nn.Linear(d_model, dim_feedforward, **factory)
        self.dropout = nn.Dropout(dropout)
        for linear in (part for part in self.children() if isinstance(part, nn.Linear)):
            nn.init.xavier_normal_(linear.weight, gain=gamma_init)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., d_model)` to `(..., d_model)`."""
        check_features("x", x, self.linear1.in_features)
        hidden = self.linear1(x)
        drops = self.training and self.dropout.p > 0.0
        if self.activation == "gelu" and not drops and fuses(hidden, self.norm, self.linear2):
            return gelu_norm_linear(hidden, self.norm, self.linear2)
        activate = _ACTIVATIONS[self.activation]
        hidden = activate(self.gate(x)) * hidden if self.activation == "swiglu" else activate(hidden)
        return self.linear2(self.norm(self.dropout(hidden)))


class LayerSettings(AttentionSettings, total=False):
    """Keywords of `MultiheadDilatedAttention` that a transformer layer takes too, and passes on."""

    max_length: int | None
    bias: bool
    layer_norm: bool
    num_kv_heads: int | None
    qk_norm: bool
    batch_first: bool


class DilatedTransformerEncoderLayer(SharesResources, nn.Module):
    """`nn.TransformerEncoderLayer(norm_first=True, batch_first=True)` with dilated self-attention.

    With `is_causal=True` it is a decoder-only layer. `norm` is the kind of all its norms, `layer` or `rms`, and
    `activation` that of `FeedForward`. `settings` are those of `MultiheadDilatedAttention`.

    `dropout` is applied to what attention and feed-forward network add, and, as in PyTorch's layer, within the
    feed-forward network; `activation_dropout` overrides the latter. `attention_dropout` drops attention weights.

    >>> layer = DilatedTransformerEncoderLayer(32, 4, segment_lengths=[16, 128], dilation_rates=[1, 4])
    >>> layer(torch.randn(2, 100, 32)).shape
    torch.Size([2, 100, 32])
    """

    @checked()
    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Unpack[LayerSettings],
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        magneto: dict[str, Any] = {"norm": norm, "layer_norm_eps": layer_norm_eps, "gamma_init": gamma_init, **factory}
        self.norm1 = NORMS[norm](d_model, eps=layer_norm_eps, **factory)
        self.self_attn = MultiheadDilatedAttention(
            d_model, nhead, segment_lengths, dilation_rates, dropout=attention_dropout, **magneto, **settings
        )
        self.norm2 = NORMS[norm](d_model, eps=layer_norm_eps, **factory)
        self.feed_forward = FeedForward(
            d_model,
            dim_feedforward,
            dropout=dropout if activation_dropout is None else activation_dropout,
            activation=activation,
            **magneto,
        )
        self.dropout = nn.Dropout(dropout)
        self._make_cross_attention(factory)

    def _make_cross_attention(self, factory: dict[str, Any]) -> None:
        """Nothing to make: a decoder layer overrides this."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        spans: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: DilatedKVCache | None = None,
    ) -> Tensor:
        """`(B, N, E)`. A dense `src_mask` is refused: use `is_causal`. With a `cache`, `src` holds its next tokens."""
        check_features("src", src, self.norm1.normalized_shape[0])
        x = self._add_self_attention(
            src, src_key_padding_mask, src_mask, is_causal, spans=spans, rotation=rotation, cache=cache
        )
        return x + self.dropout(self.feed_forward(self.norm2(x)))

    def _add_self_attention(
        self, x: Tensor, key_padding_mask: Tensor | None, mask: Tensor | None, is_causal: bool, **settings: Any
    ) -> Tensor:
        rows = self.norm1(x)
        attended, _ = self.self_attn(
            rows, rows, rows, key_padding_mask, attn_mask=mask, is_causal=is_causal, **settings
        )
        return x + self.dropout(attended)


class DilatedTransformerDecoderLayer(DilatedTransformerEncoderLayer):
    """`nn.TransformerDecoderLayer(norm_first=True, batch_first=True)` with dilated self-attention, causal by default.

    Cross-attention relates two sequences that share no segments, so it is PyTorch's own dense `nn.MultiheadAttention`.

    >>> layer = DilatedTransformerDecoderLayer(32, 4, segment_lengths=[16, 128], dilation_rates=[1, 4])
    >>> layer(torch.randn(2, 100, 32), torch.randn(2, 70, 32)).shape
    torch.Size([2, 100, 32])
    """

    def _make_cross_attention(self, factory: dict[str, Any]) -> None:
        own = self.self_attn
        dropout = own.attention.attention_dropout
        self.cross_attn = nn.MultiheadAttention(own.embed_dim, own.num_heads, dropout, batch_first=True, **factory)
        self.norm3 = type(self.norm1)(own.embed_dim, eps=self.norm1.eps, **factory)  # type: ignore[arg-type]

    def forward(  # type: ignore[override]
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = True,
        memory_is_causal: bool = False,
        *,
        spans: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """`(B, N, E)` from the target `(B, N, E)` and the encoder's output `(B, any N, E)`.

        A dense `tgt_mask` is refused; `memory_mask` applies to the cross-attention.
        """

        def swapped(x: Tensor) -> Tensor:  # between the layout of the inputs and that of the cross-attention
            return x if self.self_attn.batch_first or x.dim() == 2 else x.transpose(0, 1)

        check_features("tgt", tgt, self.norm1.normalized_shape[0])
        check_features("memory", memory, self.norm1.normalized_shape[0])
        *batch, tokens, _ = swapped(tgt).shape
        memory = swapped(memory)
        if list(memory.shape[:-2]) != batch:
            raise ValueError(
                f"tgt and memory must have one batch size, got {tuple(tgt.shape)} and {tuple(swapped(memory).shape)}"
            )
        if check_flag("memory_is_causal", memory_is_causal) and memory_mask is None:
            raise ValueError("memory_is_causal=True describes memory_mask: pass memory_mask with it")
        pairs = (tokens, memory.shape[-2])
        per_head = (math.prod(batch) * self.self_attn.num_heads, *pairs)
        _check_mask("memory_mask", memory_mask, pairs, per_head)
        _check_mask("memory_key_padding_mask", memory_key_padding_mask, tuple(memory.shape[:-1]))
        x = self._add_self_attention(tgt, tgt_key_padding_mask, tgt_mask, tgt_is_causal, spans=spans, rotation=rotation)
        crossed, _ = self.cross_attn(
            swapped(self.norm3(x)),
            memory,
            memory,
            key_padding_mask=memory_key_padding_mask,
            attn_mask=memory_mask,
            is_causal=memory_is_causal,
            need_weights=False,
        )
        x = x + self.dropout(swapped(crossed))
        return x + self.dropout(self.feed_forward(self.norm2(x)))
