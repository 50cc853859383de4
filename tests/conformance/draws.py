"""Problems drawn at random: specs, head counts, lengths, and everything else a call can vary in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

HEADS = [(1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (4, 2), (6, 2), (6, 1), (8, 4)]
LENGTHS = ["whole", "right-padded", "left-padded", "packed"]


@dataclass(frozen=True)
class Draw:
    """One call: shapes and settings, and the seed of its tensors."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    head_layout: str
    is_causal: bool
    scale: float | None
    dropout_p: float
    lengths: str
    shards: int
    seed: int

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        q, k, v = (
            torch.randn(self.batch, self.tokens, heads, self.head_dim, dtype=torch.float64, generator=generator)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return tuple(x.to(device, dtype).requires_grad_() for x in (q, k, v))

    def settings(self, device: str = "cpu") -> dict[str, Any]:
        settings: dict[str, Any] = {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "head_layout": self.head_layout,
            "is_causal": self.is_causal,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
        }
        if self.shards > 1:  # as the second of several shards of heads
            settings |= {"head_offset": self.heads, "total_heads": self.shards * self.heads}
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = torch.randint(0, self.tokens + 1, (self.batch,), generator=generator)
        position = torch.arange(self.tokens)
        if self.lengths == "right-padded":
            settings["seqlens"] = count.to(device)
        elif self.lengths == "left-padded":
            start = torch.minimum(torch.randint(0, self.tokens + 1, (self.batch,), generator=generator), count)
            valid = (position >= start[:, None]) & (position < count[:, None])
            settings["key_padding_mask"] = (~valid).to(device)
        elif self.lengths == "packed":
            cuts = torch.randint(0, self.tokens + 1, (4,), generator=generator).sort().values
            settings["cu_seqlens"] = torch.cat([torch.tensor([0]), cuts]).int().to(device)
        return settings


@st.composite
def draws(
    draw: st.DrawFn,
    *,
    min_tokens: int = 1,
    max_tokens: int = 70,
    max_segment: int = 80,
    head_dims: tuple[int, ...] = (1, 4, 8, 16),
    heads: list[tuple[int, int]] = HEADS,
    min_segment: int = 1,
    dropout: bool = True,
) -> Draw:
    branches = draw(
        st.lists(st.tuples(st.integers(min_segment, max_segment), st.integers(1, 12)), min_size=1, max_size=4)
    )
    query_heads, kv_heads = draw(st.sampled_from(heads))
    lengths = draw(st.sampled_from(LENGTHS))
    return Draw(
        batch=1 if lengths == "packed" else draw(st.integers(1, 3)),
        tokens=draw(st.integers(min_tokens, max_tokens)),
        heads=query_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        segment_lengths=tuple(w for w, _ in branches),
        dilation_rates=tuple(r for _, r in branches),
        head_layout=draw(st.sampled_from(["interleaved", "blocked", "grouped"])),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])) if dropout else 0.0,
        lengths=lengths,
        shards=draw(st.sampled_from([1, 1, 3])),
        seed=draw(st.integers(0, 2**32)),
    )
