"""The published names of attention across ranks: thin names over `AcrossRanks`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.checks import COUNT, PROBABILITY, checked
from dilated_attention_pytorch.core.optimized_pattern_cache import get_optimized_pattern_cache
from dilated_attention_pytorch.core.pattern import training_bytes
from dilated_attention_pytorch.core.plans import PatternCache
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention, refuse_settings
from dilated_attention_pytorch.nn.block_sparse import BlockSparseDilatedAttention, BlockSparseMultiheadDilatedAttention
from dilated_attention_pytorch.nn.factories import ATTENTION_TYPES
from dilated_attention_pytorch.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.parallel.group import ALONE, Place, check_mesh
from dilated_attention_pytorch.parallel.module import AcrossRanks
from dilated_attention_pytorch.parallel.options import OPTIONS, RunOptions
from dilated_attention_pytorch.parallel.plan import Job, make_plan
from dilated_attention_pytorch.parallel.schemes import Scheme
from dilated_attention_pytorch.parallel.sharding import Shards
from dilated_attention_pytorch.parallel.tensor_parallel import share_projections

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")


class RingDilatedAttention(AcrossRanks):
    """`DilatedAttention` on a sequence that is sharded over a process group; rows of shared segments go round a ring.

    Args:
        segment_lengths, dilation_rates: one entry per branch.
        ring_size: the number of ranks that you expect, 1 without a process group; another number is an error.
        dropout: probability of dropping an attention weight while training.
        use_checkpointing: keep only q, k and v, and compute out and lse again in the backward pass.
        block_size: refused; the kernels choose their tiles.
        group, mesh, axis: the ranks: a process group, or this axis of a mesh; by default the default group.
        scheme: how rows travel; `token_layout="zigzag"` needs `gather`.
        settings: the others of `AcrossRanks`, and those of `DilatedAttention`.

    >>> attention = RingDilatedAttention(segment_lengths=[16, 128], dilation_rates=[1, 4], ring_size=1)
    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 100, 4, 8])
    """

    @checked(ring_size=COUNT, dropout=PROBABILITY)
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        ring_size: int | None = None,
        dropout: float = 0.0,
        use_checkpointing: bool = False,
        block_size: int | None = None,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        axis: str = "sequence",
        scheme: Scheme = "ring",
        **settings: Any,
    ) -> None:
        if block_size is not None:
            raise ValueError(f"kernels choose their own tiles, got block_size={block_size}: leave block_size out")
        refuse_settings(self, settings, attention_dropout="pass dropout")
        place = Place(group, mesh, axis, ring_size)
        super().__init__(
            segment_lengths, dilation_rates, attention_dropout=dropout, sequence=place, scheme=scheme, **settings
        )
        self.use_checkpointing = use_checkpointing

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.use_checkpointing and torch.is_grad_enabled():
            return checkpoint(super().attend, *args, use_reentrant=False, **kwargs)
        return super().attend(*args, **kwargs)


class RingDilatedAttentionV2(RingDilatedAttention):
    """`RingDilatedAttention` with an estimate of its memory."""

    @checked(seq_len=COUNT, batch_size=COUNT, num_heads=COUNT, head_dim=COUNT, num_kv_heads=COUNT)
    def get_memory_estimate(
        self,
        seq_len: int,
        batch_size: int = 1,
        num_heads: int = 8,
        head_dim: int = 64,
        *,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        is_causal: bool = False,
    ) -> dict[str, float]:
        """Bytes of one forward and backward pass over `seq_len` tokens; each figure is that of the rank with the most.

        `tensors` are q, k, v, out, their gradients, and two numbers per row; `messages` are the buffers of messages
        under way in the forward pass, of all branches; `received` are the bytes that arrive in them.
        `memory_reduction_factor` is the memory of a single device for the whole sequence, divided by `total`.
        """
        plan = make_plan(
            Job(
                spec=self.spec,
                tokens=seq_len,
                gpus=self.ring_size,
                heads=num_heads,
                kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=str(dtype).removeprefix("torch."),
                batch=batch_size,
                is_causal=is_causal,
                scheme=self.scheme,
                memory_budget=self.memory_budget,
                token_layout=self.token_layout,
            )
        )
        tensors = max(rank.saved + rank.gradients for rank in plan.ranks)
        messages = max(rank.messages_forward for rank in plan.ranks)
        whole = training_bytes(
            batch_size * seq_len, num_heads, head_dim, kv_heads=num_kv_heads, itemsize=dtype.itemsize
        )
        return {
            "ring_size": self.ring_size,
            "tokens_per_rank": max(rank.tokens for rank in plan.ranks),
            "tensors": tensors,
            "messages": messages,
            "received": max(rank.forward.received for rank in plan.ranks),
            "total": tensors + messages,
            "memory_reduction_factor": whole / (tensors + messages),
        }


class RingDilatedAttentionV3(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` with a pattern cache in two tiers, which all modules of this class share.

    Args:
        cache_on_gpu: keep what calls share on their GPU while the hot tier of `OptimizedPatternCache` has room, and
            otherwise on the CPU; False uses the global cache. By default it follows `use_pattern_cache`.
        settings: those of `RingDilatedAttention`.

    A branch is a stride and needs no table, so nothing can be made before a length is known. `pregenerate` makes and
    pins the entries that calls of a known length share.
    """

    @checked()
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        cache_on_gpu: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, **settings)
        if cache_on_gpu and not self.use_pattern_cache:
            raise ValueError("cache_on_gpu says where the pattern cache lies: pass use_pattern_cache=True with it")
        self.cache_on_gpu = self.use_pattern_cache if cache_on_gpu is None else cache_on_gpu
        if self.cache_on_gpu:
            self._pattern_cache = get_optimized_pattern_cache()

    def pregenerate(
        self,
        seq_len: int,
        batch_size: int = 1,
        num_heads: int = 8,
        head_dim: int = 64,
        *,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        is_causal: bool = False,
    ) -> int:
        """Make and pin what calls of `seq_len` tokens share, before the first of them; the number of entries pinned.

        It makes one such call, on zeros and without gradients, which also compiles kernels. Across ranks, `seq_len` is
        the length of the whole sequence, and every rank must call this. Calls of other lengths never evict the entries;
        `cleanup_buffers` and `reset_global_pattern_cache` drop them.

        >>> attention = RingDilatedAttentionV3(segment_lengths=[16, 128], dilation_rates=[1, 4])
        >>> attention.pregenerate(100, num_heads=4, head_dim=8)
        1
        """
        if self._pattern_cache is None:
            raise ValueError("pregenerate fills the pattern cache: make the module with use_pattern_cache=True")
        ranks = ALONE if self.sequence is None else self.sequence.ranks()
        tokens = Shards.cut(seq_len, ranks.size, self.token_layout).tokens_of(ranks.rank)
        heads = (num_heads, num_heads if num_kv_heads is None else num_kv_heads)
        q, k = (torch.zeros(batch_size, tokens, H, head_dim, dtype=dtype, device=device) for H in heads)
        twin = copy.copy(self)
        twin._pattern_cache = pinning = _Pinning(self._pattern_cache)  # type: ignore[assignment]
        with torch.no_grad():
            twin(q, k, k, is_causal=is_causal)
        return len(pinning.pinned)


class _Pinning:
    """A cache that pins its entries as they are looked up."""

    def __init__(self, cache: PatternCache) -> None:
        self._cache = cache
        self.pinned: set[Hashable] = set()

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value], profile: Profile | None = None) -> Value:
        value = self._cache.remember(kind, key, make, profile)
        if self._cache.pin_pattern((kind, key)):
            self.pinned.add((kind, key))
        return value


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` around `RingDilatedAttention`: each rank projects its own tokens.

    Takes `ring_size`, `group`, `mesh` and the other settings of `RingDilatedAttention`.
    """

    _attention_class: Callable[..., DilatedAttention] = RingDilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **settings)


def _attention_at(
    *branches: Sequence[int], places: tuple[Place | None, Place | None], **settings: Any
) -> DilatedAttention:
    """Attention whose sequence and heads are shared by the ranks of `places`."""
    sequence, heads = places
    if sequence is not None:
        return RingDilatedAttention(*branches, group=sequence.group, mesh=sequence.mesh, heads=heads, **settings)
    if heads is not None:
        return AcrossRanks(*branches, sequence=None, heads=heads, **settings)
    return DilatedAttention(*branches, **settings)


class RingAdvancedDistributedDilatedAttention(RingMultiheadDilatedAttention):
    """`RingMultiheadDilatedAttention` that returns a Tensor, and carries the options of its training run.

    Args:
        sequence_parallel, model_parallel, data_parallel: ranks on the axes `sequence`, `tensor` and `data` of a mesh;
            see `RunOptions`. With `sequence_parallel` a rank has a shard of the tokens, with `model_parallel` it has
            the projections of its heads, and with `data_parallel` its own batch.
        mesh: the ranks, on named axes, which must match what is stated about them; by default `options.axes` makes a
            mesh of the ranks of the default group. All ranks make the module alike.
        settings: the other fields of `RunOptions` (`use_deepspeed`, `zero_stage`, `checkpoint_interval`, ...), kept as
            `options` for `train`; and the settings of `RingMultiheadDilatedAttention`.

    >>> attention = RingAdvancedDistributedDilatedAttention(32, 4, [16, 128], [1, 4], auto_resume=True)
    >>> x = torch.randn(2, 100, 32)
    >>> attention(x, x, x, is_causal=True).shape, attention.options.resume
    (torch.Size([2, 100, 32]), 'auto')
    """

    _attention_class = staticmethod(_attention_at)

    @checked()
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        model_parallel: bool | int | None = None,
        sequence_parallel: bool | int | None = None,
        data_parallel: bool | int | None = None,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        options = RunOptions(
            sequence_parallel=sequence_parallel,
            model_parallel=model_parallel,
            data_parallel=data_parallel,
            **{name: settings.pop(name) for name in OPTIONS if name in settings},
        )
        places = options.places(group, mesh if mesh is None else check_mesh(mesh))
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, places=places, **settings)
        self.options = options
        sequence, heads = places
        self.sequence_parallel, self.model_parallel = sequence is not None, heads is not None
        self.data_parallel = data_parallel
        share_projections(self, heads)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """`(B, N, E)`; takes what `MultiheadDilatedAttention` takes."""
        return super().forward(*args, **kwargs)[0]


class DistributedImprovedDilatedAttention(AcrossRanks, ImprovedDilatedAttention):
    """`ImprovedDilatedAttention` with tokens, heads or both spread over ranks; shared rows are gathered.

    Args:
        segment_lengths, dilation_rates: one entry per branch.
        sequence_parallel: the rank has a contiguous shard of the tokens: over `group`, or the mesh's axis `sequence`.
            The default is True without `model_parallel`, and False with it.
        model_parallel: the rank has its share of the heads, in order: over `group`, or the mesh's axis `tensor`. Ranks
            that share heads must draw the same dropout, as tensor parallelism does.
        group, mesh: a group can be cut one way only; a mesh of both axes serves both.
        settings: `scheme` and `memory_budget` of `AcrossRanks`, and those of `ImprovedDilatedAttention`.
    """

    @checked()
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        sequence_parallel: bool | None = None,
        model_parallel: bool = False,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        scheme: Scheme = "gather",
        **settings: Any,
    ) -> None:
        sequence_parallel = not model_parallel if sequence_parallel is None else sequence_parallel
        if not (sequence_parallel or model_parallel) and not (group is None and mesh is None):
            raise ValueError(
                "group and mesh say which ranks share tokens or heads, but sequence_parallel=False and "
                "model_parallel=False say that none do: change one of them"
            )
        sequence = Place(group, mesh, "sequence") if sequence_parallel else None
        heads = Place(group, mesh, "tensor") if model_parallel else None
        if sequence is not None and heads is not None and mesh is None and sequence.ranks().size > 1:
            raise ValueError(
                f"sequence_parallel and model_parallel cannot both cut one group of {sequence.ranks().size} ranks: "
                "pass mesh=init_device_mesh(..., mesh_dim_names=('sequence', 'tensor'))"
            )
        super().__init__(segment_lengths, dilation_rates, sequence=sequence, heads=heads, scheme=scheme, **settings)
        self.sequence_parallel, self.model_parallel = sequence_parallel, model_parallel


class DistributedImprovedMultiheadDilatedAttention(ImprovedMultiheadDilatedAttention):
    """`ImprovedMultiheadDilatedAttention` around `DistributedImprovedDilatedAttention`, whose settings it takes.

    With `model_parallel` the rank has the projections of its heads; ranks begin with the first one's weights.
    """

    _attention_class = DistributedImprovedDilatedAttention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **settings)
        assert isinstance(self.attention, AcrossRanks)
        share_projections(self, self.attention.heads)


class BlockSparseRingDilatedAttention(AcrossRanks, BlockSparseDilatedAttention):
    """`DilatedAttention` over the kept tiles of a pattern, on a sequence that may be sharded over a process group.

    Rows of shared segments are gathered; tiles are those of the whole segment. Where the content chooses the tiles, the
    queries travel too.

    Args:
        segment_lengths, dilation_rates: one entry per branch.
        sparse_config: the pattern; see `SparsePatternConfig`.
        dropout: probability of dropping an attention weight while training.
        ring_size: the number of ranks that you expect, 1 without a process group; another number is an error.
        group, mesh, axis: the ranks: a process group, or this axis of a mesh; by default the default group.
        settings: those of `DilatedAttention` (`softmax_scale`, `head_layout`, `use_pattern_cache`, ...).

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
        reason = "tiles travel by gather: leave it out"
        refuse_settings(self, settings, memory_budget=reason, scheme=reason)
        place = Place(group, mesh, axis, ring_size)
        settings |= {"sparse_config": sparse_config, "dropout": dropout}
        super().__init__(segment_lengths, dilation_rates, sequence=place, scheme="gather", **settings)


class BlockSparseRingMultiheadDilatedAttention(BlockSparseMultiheadDilatedAttention):
    """`MultiheadDilatedAttention` over `BlockSparseRingDilatedAttention`, whose keywords it takes as well.

    >>> config = SparsePatternConfig(pattern_type="global_local", sparsity_ratio=0.25, block_size=16)
    >>> attention = BlockSparseRingMultiheadDilatedAttention(32, 4, [64, 512], [1, 4], sparse_config=config)
    >>> x = torch.randn(2, 300, 32)
    >>> attention(x, x, x, is_causal=True)[0].shape
    torch.Size([2, 300, 32])
    """

    _attention_class = BlockSparseRingDilatedAttention


ATTENTION_TYPES |= {
    "ring": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "distributed": (DistributedImprovedDilatedAttention, DistributedImprovedMultiheadDilatedAttention),
    "block_sparse_ring": (BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention),
}
