"""Multihead dilated attention on `(B, N, E)` tensors, in the interface of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import check_divides, check_flag, check_tensor, checked
from dilated_attention_pytorch.core.spec import stated_branches
from dilated_attention_pytorch.nn.attention import (
    AttentionSettings,
    DilatedAttention,
    ImprovedDilatedAttention,
    SharesResources,
    refuse_settings,
)
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.nn.positions import Rotation, rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack

Norm = Literal["layer", "rms"]
NORMS: dict[str, type[nn.LayerNorm | nn.RMSNorm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}

# Keywords of nn.MultiheadAttention and DilatedAttention, with the reason why they are not here.
_NOT_HERE = dict.fromkeys(("kdim", "vdim"), "queries, keys and values are rows of one sequence, of embed_dim features")
_NOT_HERE |= dict.fromkeys(("add_bias_kv", "add_zero_attn"), "such a key belongs to no position of a sequence")
_NOT_HERE["attention_dropout"] = "pass dropout, which is that of the attention weights"

_FUSED, _APART = "qkv_proj", ("q_proj", "k_proj", "v_proj")


class MultiheadDilatedAttention(SharesResources, nn.Module):
    """Drop-in for `nn.MultiheadAttention(batch_first=True)` with dilated attention.

    Follows MAGNETO: an extra norm before the output projection, and value and output projections initialised with gain
    `gamma_init`.

    `load_state_dict` accepts separate projections, as here; fused ones, as in `ImprovedMultiheadDilatedAttention`; and,
    with `layer_norm=False`, those of `nn.MultiheadAttention`.

    Args:
        embed_dim, num_heads: as in `nn.MultiheadAttention`.
        segment_lengths, dilation_rates: one entry per branch.
        max_length: the longest sequence, instead of segments and rates: `branches_for` chooses branches that connect
            all its tokens with this number of key/value heads.
        dropout: of the attention weights, while training.
        bias: whether projections have a bias.
        layer_norm: whether a norm precedes the output projection.
        norm: the kind of that norm, `layer` or `rms`.
        layer_norm_eps: the epsilon of all norms here.
        gamma_init: gain of the initial value and output projections.
        num_kv_heads: the number of key/value heads, which may be smaller (grouped-query attention).
        qk_norm: whether an RMS norm over `head_dim` scales each query and key, before any rotation.
        batch_first: inputs and outputs are `(B, N, E)`, or with False `(N, B, E)`.
        settings: those of `DilatedAttention`: `softmax_scale`, `head_layout`, `backend`, `use_pattern_cache`, ...

    >>> attention = MultiheadDilatedAttention(32, 4, segment_lengths=[16, 128], dilation_rates=[1, 4])
    >>> x = torch.randn(2, 100, 32)
    >>> out, weights = attention(x, x, x, is_causal=True)
    >>> out.shape, weights
    (torch.Size([2, 100, 32]), None)
    """

    _attention_class: Callable[..., DilatedAttention] = DilatedAttention  # takes the pattern and `settings`
    _fuses = False  # whether one projection makes queries, keys and values

    # What nn.TransformerEncoder(Layer) reads to see that its own fused path does not apply.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    qkv_proj: nn.Linear
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    @checked()
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        max_length: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        norm: Norm = "layer",
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Unpack[AttentionSettings],
    ) -> None:
        super().__init__()
        refuse_settings(self, settings, **_NOT_HERE)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides("num_heads", num_heads, "embed_dim", embed_dim)
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.batch_first = check_flag("batch_first", batch_first)
        self.gamma_init = gamma_init
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        projections = {_FUSED: sum(self._qkv_dims)} if self._fuses else dict(zip(_APART, self._qkv_dims))
        for name, features in projections.items():
            setattr(self, name, nn.Linear(embed_dim, features, bias=bias, **factory))
        head_layout = settings.get("head_layout", "interleaved")
        branches = stated_branches(
            segment_lengths, dilation_rates, max_length, heads=num_kv_heads, head_layout=head_layout
        )
        self.attention = self._attention_class(*branches, **settings)
        self.attention.attention_dropout = dropout
        self.norm = NORMS[norm](embed_dim, eps=layer_norm_eps, **factory) if layer_norm else None
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=layer_norm_eps, **factory) if qk_norm else None for _ in range(2)
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.reset_parameters()

    @property
    def _qkv_dims(self) -> tuple[int, int, int]:
        kv_dim = self.num_kv_heads * self.head_dim
        return self.embed_dim, kv_dim, kv_dim

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of the projections of queries, keys and values; views of a fused projection."""
        if not self._fuses:
            return [(one.weight, one.bias) for one in (self.q_proj, self.k_proj, self.v_proj)]
        weights, bias = self.qkv_proj.weight.split(self._qkv_dims), self.qkv_proj.bias
        return list(zip(weights, (None,) * 3 if bias is None else bias.split(self._qkv_dims)))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Split or join the projections of a state dict first; PyTorch reports what does not fit."""
        for kind in ("weight", "bias"):
            fused, apart = f"{prefix}{_FUSED}.{kind}", [f"{prefix}{name}.{kind}" for name in _APART]
            for name in (f"{prefix}in_proj_{kind}", *([] if self._fuses else [fused])):
                if name in state and state[name].shape[0] == sum(self._qkv_dims):
                    # Copies: parameters that `assign=True` makes from them must not share memory.
                    state |= zip(apart, (part.clone() for part in state.pop(name).split(self._qkv_dims)))
            if self._fuses and all(name in state for name in apart):
                state[fused] = torch.cat([state.pop(name) for name in apart])
        super()._load_from_state_dict(state, prefix, *args)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return self.attention.segment_lengths

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        return self.attention.dilation_rates

    def reset_parameters(self) -> None:
        """MAGNETO's initialisation."""
        # Each part of a fused weight is initialised with its own fan-in and fan-out.
        weights = [*(weight for weight, _ in self._projections()), self.out_proj.weight]
        for weight, gain in zip(weights, (1.0, 1.0, self.gamma_init, self.gamma_init)):
            nn.init.xavier_normal_(weight, gain=gain)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.bias"):
                nn.init.zeros_(parameter)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        if not self._fuses:
            return self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if query is key and key is value:
            return self.qkv_proj(query).split(self._qkv_dims, dim=-1)
        return [F.linear(x, *projection) for x, projection in zip((query, key, value), self._projections())]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spans: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: DilatedKVCache | None = None,
    ) -> tuple[Tensor, None]:
        """`(out, None)` with `out` `(B, N, E)`, or `(N, E)` for an unbatched input.

        With `batch_first=False` inputs and output are `(N, B, E)`; masks and lengths stay as they are.

        `rotation` turns queries and keys by their positions (`RotaryPositions`, `XPosPositions`). With a `cache` the
        inputs are the next tokens of its rows. Weights would take O(N^2) memory, so `need_weights=True` is refused;
        `average_attn_weights` has no effect without them.
        """
        check_flag("is_causal", is_causal)
        if check_flag("need_weights", need_weights):
            raise ValueError(
                "attention weights take O(N^2) memory and are not returned: pass need_weights=False; "
                "functional.attention_rows gives those of some rows"
            )
        self._check(query, key, value)
        if query.dim() == 2 and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        # Inputs that are one tensor stay identical, for a fused projection.
        rows_q = self._batched(query)
        rows_k = rows_q if key is query else self._batched(key)
        rows_v = rows_k if value is key else self._batched(value)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self._project(rows_q, rows_k, rows_v))  # (B, N, H, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)  # autocast norms in float32
        if rotation is not None:
            q, k = rotate(q, k, rotation)
        lengths = {
            "key_padding_mask": key_padding_mask, "seqlens": seqlens, "cu_seqlens": cu_seqlens, "spans": spans,
        }  # fmt: skip
        if cache is None:
            out = self.attention(q, k, v, is_causal=is_causal, attn_mask=attn_mask, **lengths)
        elif not is_causal or any(x is not None for x in (attn_mask, *lengths.values())):
            raise ValueError(
                "a cache holds the past of causal rows and knows their padding: pass is_causal=True with it, and "
                "no mask or lengths"
            )
        else:
            out = self.attention.attend_next(q, k, v, cache)
        out = out.flatten(-2)  # (B, N, E)
        if self.norm is not None:
            out = self.norm(out)
        out = self.out_proj(out)
        if query.dim() == 2:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _batched(self, x: Tensor) -> Tensor:  # to (B, N, E)
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        rows = "batch, tokens" if self.batch_first else "tokens, batch"
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not check_tensor(name, x).is_floating_point():
                raise TypeError(f"{name} must hold floating-point numbers, got {x.dtype}: convert with .to(...)")
            if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim:
                raise ValueError(
                    f"{name} must be ({rows}, {self.embed_dim}), got {tuple(x.shape)}; "
                    "for (batch, tokens, heads, head_dim) use DilatedAttention"
                )
            if x.shape != query.shape:
                raise ValueError(
                    f"query, key and value must be of one shape, got {tuple(query.shape)} and {name} {tuple(x.shape)}: "
                    "dilated attention relates the rows of one sequence; for cross-attention use nn.MultiheadAttention"
                )

    def extra_repr(self) -> str:
        shown = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        return shown if self.num_kv_heads == self.num_heads else f"{shown}, num_kv_heads={self.num_kv_heads}"


class ImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` with one fused QKV projection, and TF32 for float32 on GPUs unless `use_tf32=False`.

    `use_tf32` applies to the attention products; the projections follow `torch.set_float32_matmul_precision`.
    """

    _attention_class = ImprovedDilatedAttention
    _fuses = True

    @checked()
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        use_tf32: bool = True,
        **settings: Any,
    ) -> None:
        settings["use_tf32"] = use_tf32
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **settings)
        self.use_tf32 = use_tf32

    def unfuse(self) -> None:
        """Split the fused projection into three, in place, so that each can be cut by heads.

        State dicts fit both forms.
        """
        fused, projections = self.qkv_proj, self._projections()
        del self.qkv_proj
        self._fuses = False
        for name, (weight, bias) in zip(_APART, projections):
            apart = nn.Linear(self.embed_dim, weight.shape[0], bias=bias is not None, device="meta")
            apart.weight = nn.Parameter(weight.detach().clone(), requires_grad=fused.weight.requires_grad)
            if bias is not None:
                apart.bias = nn.Parameter(bias.detach().clone(), requires_grad=fused.bias.requires_grad)
            setattr(self, name, apart.train(fused.training))
