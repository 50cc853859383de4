"""Contenders that are whole encoders: the same layers and sizes, each around its own attention; or that alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import (
    NO_CHECKOUT,
    OURS,
    TORCHSCALE,
    Ready,
    Setup,
    named_contenders,
    ours,
    torchscale_alone,
)
from benchmarks.harness import Case
from benchmarks.peers import build_torchscale, load_torchscale
from dilated_attention_pytorch.models.padded_attention import PaddedAttention
from dilated_attention_pytorch.nn.transformer import DilatedTransformerEncoderLayer

EXACT, EXACT_FORWARD = "ours, exact", "ours, exact fwd"


def choose_encoders(only: Sequence[str] = (), torchscale: Path | None = None) -> dict[str, Setup]:
    """The contenders by name: ours by definition, and ours with torchscale's semantics, as in `patch_gigapath`.

    A case without layers is the attention alone, without projections.
    """
    encoder = _encoder(lambda layer, case: None)
    contenders: dict[str, Setup] = {
        OURS: lambda case: encoder(case) if case.encoder_layers else ours("auto")(case),
        EXACT: _encoder(functools.partial(_pad, detached_merge=True)),
        EXACT_FORWARD: _encoder(functools.partial(_pad, detached_merge=False)),
        TORCHSCALE: _torchscale_from(torchscale),
    }
    return named_contenders(contenders, only, torchscale)


def _encoder(change: Callable[[DilatedTransformerEncoderLayer, Case], None]) -> Setup:
    """An encoder whose layers are changed for the contender."""

    def setup(case: Case) -> Ready | str:
        if not case.encoder_layers:
            return "measured in an encoder"
        width = case.heads * case.head_dim
        layers = [
            DilatedTransformerEncoderLayer(
                width,
                case.heads,
                case.segment_lengths,
                case.dilation_rates,
                dim_feedforward=4 * width,
                dropout=0.0,
                head_layout=case.head_layout,
            )
            for _ in range(case.encoder_layers)
        ]
        for layer in layers:
            change(layer, case)
        model = nn.Sequential(*layers, nn.LayerNorm(width))
        dtype = getattr(torch, case.dtype)
        model = model.to(device=case.device, dtype=dtype)
        x, do = (torch.randn(1, case.tokens, width, dtype=dtype, device=case.device) for _ in range(2))
        inputs = [x.requires_grad_(case.backward), *model.parameters()]

        def forward() -> Tensor:
            with torch.no_grad():
                return model(x)

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(model(x), inputs, do)

        return Ready(step if case.backward else forward, case.flops)

    return setup


def _pad(layer: DilatedTransformerEncoderLayer, case: Case, *, detached_merge: bool) -> None:
    layer.self_attn.attention = PaddedAttention(
        case.segment_lengths, case.dilation_rates, detached_merge=detached_merge
    )


def _torchscale_from(checkout: Path | None) -> Setup:
    if checkout is None:
        return lambda case: NO_CHECKOUT
    attention_class = load_torchscale(checkout)
    encoder = _encoder(lambda layer, case: setattr(layer, "self_attn", _Torchscale(attention_class, case)))
    return lambda case: encoder(case) if case.encoder_layers else torchscale_alone(attention_class, case)


class _Torchscale(nn.Module):
    """torchscale's attention with its own projections and norm, called as our layers call theirs."""

    def __init__(self, attention_class: Any, case: Case) -> None:
        super().__init__()
        shape = case.heads, case.head_dim, case.segment_lengths, case.dilation_rates
        self.attention = build_torchscale(attention_class, *shape, subln=True)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, padding: None = None, *, is_causal: bool, **unused: None
    ) -> Any:
        assert padding is None, "torchscale's attention takes whole sequences"
        assert all(value is None for value in unused.values()), unused
        return self.attention(query, key, value, is_causal=is_causal)
