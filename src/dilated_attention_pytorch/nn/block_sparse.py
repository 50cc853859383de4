"""Modules of dilated attention that compute only the kept tiles of every branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.checks import checked
from dilated_attention_pytorch.functional import check_sparse_config
from dilated_attention_pytorch.nn.attention import DilatedAttention, refuse_settings
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention


class BlockSparseDilatedAttention(DilatedAttention):
    """`DilatedAttention` over the kept tiles of a pattern, with one softmax over all of them.

    Args:
        segment_lengths, dilation_rates: one entry per branch.
        sparse_config: the pattern; see `SparsePatternConfig`.
        dropout: probability of dropping an attention weight while training.
        use_pattern_cache: share layouts between calls through the global cache; False builds them in every call.
        settings: passed on to `DilatedAttention` (`softmax_scale`, `head_layout`, `backend`, ...).

    >>> import torch
    >>> config = SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseDilatedAttention([64, 512], [1, 4], sparse_config=config)
    >>> q, k, v = torch.randn(3, 1, 300, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 300, 4, 8])
    """

    @checked()
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        sparse_config: SparsePatternConfig | None = None,
        dropout: float = 0.0,
        use_pattern_cache: bool = True,
        **settings: Any,
    ) -> None:
        refuse_settings(self, settings, attention_dropout="pass dropout")
        super().__init__(
            segment_lengths, dilation_rates, attention_dropout=dropout, use_pattern_cache=use_pattern_cache, **settings
        )
        sparse_config = SparsePatternConfig() if sparse_config is None else sparse_config
        self.sparse_config = check_sparse_config(sparse_config, self.spec)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparse_config={self.sparse_config}"


class BlockSparseMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` around `BlockSparseDilatedAttention`; takes the keywords of both.

    >>> import torch
    >>> config = SparsePatternConfig(pattern_type="global_local", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseMultiheadDilatedAttention(32, 4, [64, 512], [1, 4], sparse_config=config)
    >>> x = torch.randn(2, 300, 32)
    >>> attention(x, x, x, is_causal=True)[0].shape
    torch.Size([2, 300, 32])
    """

    _attention_class = BlockSparseDilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        sparse_config: SparsePatternConfig | None = None,
        **settings: Any,
    ) -> None:
        settings["sparse_config"] = sparse_config
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **settings)
