"""Dilated attention that keeps some tiles of every branch only, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.functional import check_sparse_config
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention


class BlockSparseRingDilatedAttention(DilatedAttention):
    """`DilatedAttention` over the kept tiles of a pattern, with one softmax over all of them.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        sparse_config: the pattern; see `SparsePatternConfig`.
        dropout: probability of dropping an attention weight while training.
        ring_size: must be the number of ranks, which is 1: it does not attend across devices yet.
        group: the process group whose ranks share a sequence; the default group if there is one.
        use_pattern_cache: share layouts between calls through the global cache; False builds them anew in every call.
        settings: passed on to `DilatedAttention` (`softmax_scale`, `head_layout`, `backend`, ...).

    >>> import torch
    >>> config = SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseRingDilatedAttention([64, 256], [1, 4], sparse_config=config)
    >>> q, k, v = torch.randn(3, 1, 300, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 300, 4, 8])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        sparse_config: SparsePatternConfig | None = None,
        dropout: float = 0.0,
        ring_size: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        use_pattern_cache: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            attention_dropout=dropout,
            use_pattern_cache=use_pattern_cache,
            **settings,
        )
        sparse_config = SparsePatternConfig() if sparse_config is None else sparse_config
        check_sparse_config(sparse_config, self.spec)
        self.sparse_config = sparse_config
        self.group = group
        ranks = _ranks(group)
        if ring_size is not None and ring_size != ranks:
            raise ValueError(f"ring_size must be the number of ranks, which is {ranks} here, got {ring_size}")
        self.ring_size = ring_size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, spans: Tensor | None) -> Tensor:
        if _ranks(self.group) > 1:
            raise NotImplementedError(
                f"sequence parallelism of block-sparse attention is not built yet, and there are {_ranks(self.group)} "
                "ranks: where each rank has whole sequences, as in data parallelism, pass a group of one rank"
            )
        return super().attend(query, key, value, is_causal=is_causal, spans=spans)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparse_config={self.sparse_config}"


class BlockSparseRingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` over `BlockSparseRingDilatedAttention`, whose keywords it takes as well.

    >>> import torch
    >>> config = SparsePatternConfig(pattern_type="global_local", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseRingMultiheadDilatedAttention(32, 4, [64, 256], [1, 4], sparse_config=config)
    >>> x = torch.randn(2, 300, 32)
    >>> attention(x, x, x, is_causal=True)[0].shape
    torch.Size([2, 300, 32])
    """

    def _make_attention(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], dropout: float, settings: dict[str, Any]
    ) -> DilatedAttention:
        return BlockSparseRingDilatedAttention(segment_lengths, dilation_rates, dropout=dropout, **settings)


def _ranks(group: dist.ProcessGroup | None) -> int:
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)
