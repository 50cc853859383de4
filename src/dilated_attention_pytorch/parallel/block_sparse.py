"""Block-sparse dilated attention across ranks: the published names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.checks import COUNT, PROBABILITY, checked
from dilated_attention_pytorch.nn.block_sparse import BlockSparseDilatedAttention, BlockSparseMultiheadDilatedAttention
from dilated_attention_pytorch.nn.factories import ATTENTION_TYPES
from dilated_attention_pytorch.parallel.group import Place
from dilated_attention_pytorch.parallel.modules import AcrossRanks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["BlockSparseRingDilatedAttention", "BlockSparseRingMultiheadDilatedAttention", "SparsePatternConfig"]


class BlockSparseRingDilatedAttention(AcrossRanks, BlockSparseDilatedAttention):
    """`DilatedAttention` over the kept tiles of a pattern, on a sequence that may be sharded over a process group.

    Rows of shared segments are gathered; tiles are those of the whole segment. Tiles that depend on content take the
    queries along.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        sparse_config: the pattern; see `SparsePatternConfig`.
        dropout: probability of dropping an attention weight while training.
        ring_size: a check: the number of ranks, 1 without a process group.
        group, mesh, axis: the ranks: a process group, or the axis of that name of a mesh; else the default group.
        settings: those of `DilatedAttention` (`softmax_scale`, `head_layout`, `use_pattern_cache`, ...).

    >>> import torch
    >>> config = SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseRingDilatedAttention([64, 512], [1, 4], sparse_config=config)
    >>> q, k, v = torch.randn(3, 1, 300, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 300, 4, 8])
    """

    @checked(dropout=PROBABILITY, ring_size=COUNT)
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        sparse_config: SparsePatternConfig | None = None,
        dropout: float = 0.0,
        ring_size: int | None = None,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        axis: str = "sequence",
        **settings: Any,
    ) -> None:
        if "memory_budget" in settings:
            raise TypeError("memory_budget is for a scheme that is chosen, and tiles travel by gather: leave it out")
        place = Place(group, mesh, axis, ring_size)
        super().__init__(
            segment_lengths,
            dilation_rates,
            sparse_config=sparse_config,
            dropout=dropout,
            sequence=place,
            scheme="gather",
            **settings,
        )

    def cleanup_buffers(self) -> None:
        """Forget layouts and schedules of earlier calls, and free the buffers that the memory pool holds idle."""
        if self._pattern_cache is not None:
            self._pattern_cache.forget("block layout")
        super().cleanup_buffers()

    @property
    def ring_size(self) -> int:
        return 1 if self.sequence is None else self.sequence.ranks().size


class BlockSparseRingMultiheadDilatedAttention(BlockSparseMultiheadDilatedAttention):
    """`MultiheadDilatedAttention` over `BlockSparseRingDilatedAttention`, whose keywords it takes as well.

    >>> import torch
    >>> config = SparsePatternConfig(pattern_type="global_local", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseRingMultiheadDilatedAttention(32, 4, [64, 512], [1, 4], sparse_config=config)
    >>> x = torch.randn(2, 300, 32)
    >>> attention(x, x, x, is_causal=True)[0].shape
    torch.Size([2, 300, 32])
    """

    _attention_class = BlockSparseRingDilatedAttention


ATTENTION_TYPES["block_sparse_ring"] = (BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention)
