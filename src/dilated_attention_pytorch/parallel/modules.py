"""The published names of attention across ranks: thin names over the `attend` seam.

Under a process group (the default one, or `group=` / `mesh=`) a module takes its rank's contiguous shard of the
sequence and returns its rank's rows; on one rank it is its plain class. `cu_seqlens`, `seqlens` and `spans` speak of
the whole sequence, `key_padding_mask` of the rank's own tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.core.checks import COUNT, PROBABILITY, SIZE, check_tensor, checked
from dilated_attention_pytorch.core.optimized_pattern_cache import get_optimized_pattern_cache
from dilated_attention_pytorch.core.pattern import training_bytes
from dilated_attention_pytorch.core.plans import PatternCache
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.core.spec import Call
from dilated_attention_pytorch.functional import refuse_dense_mask
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.nn.factories import ATTENTION_TYPES
from dilated_attention_pytorch.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.parallel.attention import sharded_dilated_attention
from dilated_attention_pytorch.parallel.costs import (
    MEMORY_BUDGET,
    Scheme,
    branch_traffic,
    check_scheme,
    choose_scheme,
    message_bytes,
)
from dilated_attention_pytorch.parallel.group import ALONE, Place, RankGroup, check_mesh, ranks_of
from dilated_attention_pytorch.parallel.options import AXIS_OF, OPTIONS, RunOptions
from dilated_attention_pytorch.parallel.sharding import Shards, TokenLayout
from dilated_attention_pytorch.parallel.tensor_parallel import share_projections
from dilated_attention_pytorch.parallel.wire import wires_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


Value = TypeVar("Value")


class AcrossRanks(DilatedAttention):
    """Dilated attention of which `sequence` says which ranks share the tokens, and `heads` which share the heads.

    Args:
        sequence, heads: places; None for one that is not shared.
        scheme: `gather`, `ring`, `all_to_all`, or `auto` to choose for each branch by its costs.
        memory_budget: bytes that `auto` lets a branch's gathered rows take on a rank.
        token_layout: `contiguous` shards, or `zigzag`, which evens out causal work, by `gather` or `auto` only: the
            rank has an early and a late chunk, one after the other, as `zigzag_order` has them.
        use_pattern_cache: share schedules and tables between calls; False makes them anew in every call.
        enable_memory_pool: on several ranks, borrow message buffers and sums too; see `DilatedAttention`.
        settings: passed on to the plain class.
    """

    @checked(memory_budget=SIZE)
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        sequence: Place | None,
        heads: Place | None = None,
        scheme: Scheme = "auto",
        memory_budget: int = MEMORY_BUDGET,
        token_layout: TokenLayout = "contiguous",
        use_pattern_cache: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, use_pattern_cache=use_pattern_cache, **settings)
        check_scheme(scheme, token_layout)
        self.sequence, self.heads = sequence, heads
        self.scheme, self.memory_budget, self.token_layout = scheme, memory_budget, token_layout
        for place in (sequence, heads):
            if place is not None:
                place.ranks()  # what is wrong with it is said when the module is made

    @classmethod
    def of(cls, plain: DilatedAttention, **places: Any) -> AcrossRanks:
        """What `plain` computes, across ranks; `places` are the settings above.

        Schedules are shared between calls whatever `plain` does about tables: to make one takes longer than a call.
        """
        made = cls(
            plain.segment_lengths,
            plain.dilation_rates,
            softmax_scale=plain.softmax_scale,
            attention_dropout=plain.attention_dropout,
            head_layout=plain.spec.head_layout,
            backend=plain.backend,
            allow_tf32=plain.allow_tf32,
            enable_profiling=plain.enable_profiling,
            enable_memory_pool=plain.enable_memory_pool,
            lightweight_pool=plain.lightweight_pool,
            **places,
        )
        made._stated, made._place = plain._stated, plain._place
        return made.train(plain.training)

    def cleanup_buffers(self) -> None:
        """Forget schedules of earlier calls, and free the message buffers that the memory pool holds idle."""
        if self._pattern_cache is not None:
            self._pattern_cache.forget("ring schedule")
        if self._memory_pool is not None:
            self._memory_pool.release_idle()

    def sequence_ranks(self) -> RankGroup | None:
        """The ranks that share the tokens, or None where one has them all; its `traffic` counts bytes."""
        return _several(self.sequence)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        spans: Tensor | None = None,
    ) -> Tensor:
        """The rank's rows `(B, L, H, D)` from its shard of query, key and value."""
        lengths = {
            "key_padding_mask": key_padding_mask, "seqlens": seqlens, "cu_seqlens": cu_seqlens, "spans": spans,
        }  # fmt: skip
        if _several(self.sequence) is None and _several(self.heads) is None:
            return super().forward(query, key, value, is_causal, attn_mask=attn_mask, **lengths)
        try:
            refuse_dense_mask(attn_mask)
            self._check_place(query)
        except Exception as error:
            self._raise_on_all(error)
        with self._profiling():
            return self.attend(query, key, value, is_causal=is_causal, **lengths)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        spans: Tensor | None,
        **lengths: Any,
    ) -> Tensor:
        sequence, heads = _several(self.sequence), _several(self.heads)
        if sequence is None and heads is None:
            return super().attend(query, key, value, is_causal=is_causal, spans=spans)
        share: dict[str, Any] = {"ranks": ALONE if sequence is None else sequence}
        try:
            check_tensor("query", query)
            check_tensor("key", key)
            if sequence is not None:
                share["shard_lengths"] = sequence.lengths_of_model(query.shape[1])
            if heads is not None:
                H = query.shape[2]
                heads.agree({"heads": H, "key/value heads": key.shape[2]}, 0, None, (0,) * heads.size)
                share |= {"head_offset": heads.rank * H, "total_heads": heads.size * H}
        except Exception as error:
            self._raise_on_all(error)
        out = sharded_dilated_attention(
            query,
            key,
            value,
            self.spec.segment_lengths,
            self.spec.dilation_rates,
            scheme=self.scheme,
            memory_budget=self.memory_budget,
            token_layout=self.token_layout,
            is_causal=is_causal,
            scale=self.softmax_scale,
            dropout_p=self.attention_dropout if self.training else 0.0,
            head_layout=self.spec.head_layout,
            spans=spans,
            allow_tf32=self.allow_tf32,
            sparse_config=self.sparse_config,
            backend=self.backend,
            resources=self.resources,
            **share,
            **lengths,
        )
        assert isinstance(out, Tensor)
        return out

    def _raise_on_all(self, error: Exception) -> NoReturn:
        """Raise it once the ranks that share the tokens, or else the heads, know of it."""
        ranks = _several(self.sequence) or _several(self.heads)
        assert ranks is not None
        ranks.agree({}, 0, error)
        raise error


class RingDilatedAttention(AcrossRanks):
    """`DilatedAttention` on a sequence that is sharded over a process group; rows of shared segments go round a ring.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        ring_size: a check: the number of ranks, 1 without a process group.
        dropout: of the attention weights, while training.
        use_checkpointing: keep nothing but q, k and v for the backward pass, which then computes forward again.
        block_size: refused; the kernels choose their tiles.
        group, mesh, axis: the ranks: a process group, or the axis of that name of a mesh; else the default group.
        scheme: `gather` with `token_layout="zigzag"`.
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
        place = Place(group, mesh, axis, ring_size)
        super().__init__(
            segment_lengths, dilation_rates, attention_dropout=dropout, sequence=place, scheme=scheme, **settings
        )
        self.use_checkpointing = use_checkpointing

    @property
    def ring_size(self) -> int:
        return 1 if self.sequence is None else self.sequence.ranks().size

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.use_checkpointing and torch.is_grad_enabled():
            return checkpoint(super().attend, *args, use_reentrant=False, **kwargs)
        return super().attend(*args, **kwargs)


class RingDilatedAttentionV2(RingDilatedAttention):
    """`RingDilatedAttention` that tells how much memory it takes."""

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
        """Bytes of one forward and backward of `seq_len` tokens on the rank that has most of them, by part.

        `tensors` are q, k, v, out, their gradients, and two numbers a row; `messages` the buffers of what is on its way
        in the forward pass, of all branches; `received` what arrives in them. Of each, the busiest rank's.
        `memory_reduction_factor` is what a single device would take for the whole sequence, divided by `total`.
        """
        size = self.ring_size
        shards = Shards.cut(seq_len, size, self.token_layout)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        itemsize = dtype.itemsize
        most = max(shards.tokens_of(rank) for rank in range(size))
        tokens = batch_size * most
        tensors = training_bytes(tokens, num_heads, head_dim, kv_heads=kv_heads, itemsize=itemsize)
        whole = training_bytes(batch_size * seq_len, num_heads, head_dim, kv_heads=kv_heads, itemsize=itemsize)
        received, held = [0] * size, [0] * size
        call = Call(spec=self.spec, is_causal=is_causal)
        documents = [(range(batch_size), 0, seq_len)]
        shape = (num_heads, kv_heads, head_dim, itemsize)
        for _, segments, wire in wires_of(call, shards, documents, *shape):
            chosen = choose_scheme(self.scheme, wire, segments, self.memory_budget)
            for rank in range(size):
                received[rank] += branch_traffic(chosen, wire, segments, rank).received
                held[rank] += message_bytes(chosen, wire, segments, rank)
        return {
            "ring_size": size,
            "tokens_per_rank": most,
            "tensors": tensors,
            "messages": max(held),
            "received": max(received),
            "total": tensors + max(held),
            "memory_reduction_factor": whole / (tensors + max(held)),
        }


class RingDilatedAttentionV3(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` with a pattern cache in two tiers, which all modules of this class share.

    Args:
        cache_on_gpu: keep what calls share on their GPU as long as the hot tier of `OptimizedPatternCache` has room,
            and on the CPU beyond that; False shares the global cache. By default wherever the pattern cache is on.
        settings: those of `RingDilatedAttention`.

    A branch is a stride and has no table of its own, so there is nothing to make before a length is known;
    `pregenerate` makes and pins what calls of a known length share.
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

        It makes one such call, of zeros and without gradients, so kernels are compiled too. On ranks, `seq_len` is the
        length of the whole sequence, and every rank must call this. It spares the first call a few milliseconds, and
        calls of other lengths never evict the entries; `cleanup_buffers` and `reset_global_pattern_cache` drop them.

        >>> attention = RingDilatedAttentionV3(segment_lengths=[16, 128], dilation_rates=[1, 4])
        >>> attention.pregenerate(100, num_heads=4, head_dim=8)
        1
        """
        if self._pattern_cache is None:
            raise ValueError("pregenerate fills the pattern cache: make the module with use_pattern_cache=True")
        ranks = self.sequence_ranks() or ALONE
        tokens = Shards.cut(seq_len, ranks.size, self.token_layout).tokens_of(ranks.rank)
        heads = (num_heads, num_heads if num_kv_heads is None else num_kv_heads)
        q, k = (torch.zeros(batch_size, tokens, H, head_dim, dtype=dtype, device=device) for H in heads)
        twin = copy.copy(self)
        twin._pattern_cache = pinning = _Pinning(self._pattern_cache)  # type: ignore[assignment]
        with torch.no_grad():
            twin(q, k, k, is_causal=is_causal)
        return len(pinning.pinned)


class _Pinning:
    """A cache whose entries are pinned as they are looked up."""

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


def _attention_at(*branches: Sequence[int], places: dict[str, Any], **settings: Any) -> DilatedAttention:
    """Attention whose sequence and heads are shared as `places` say."""
    if (sequence := places["sequence"]) is not None:
        ring = RingDilatedAttention(*branches, group=sequence.group, mesh=sequence.mesh, **settings)
        ring.heads = places["heads"]
        return ring
    if places["heads"] is not None:
        return AcrossRanks(*branches, sequence=None, heads=places["heads"], **settings)
    return DilatedAttention(*branches, **settings)


class RingAdvancedDistributedDilatedAttention(RingMultiheadDilatedAttention):
    """`RingMultiheadDilatedAttention` that returns a Tensor, and carries how its run is to be carried out.

    Args:
        sequence_parallel, model_parallel, data_parallel: ranks on the axes `sequence`, `tensor` and `data` of a mesh;
            see `RunOptions`. With `sequence_parallel` a rank has a shard of the tokens, with `model_parallel` it has
            the projections of its heads, and with `data_parallel` a batch of its own.
        mesh: the ranks, on named axes, which must be what is stated about them; by default the ranks of the default
            group, of which `options.axes` makes one. All ranks make the module alike.
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
        places = _places(options, group, mesh if mesh is None else check_mesh(mesh))
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, places=places, **settings)
        self.options = options
        self.model_parallel, self.sequence_parallel = (places[axis] is not None for axis in ("heads", "sequence"))
        self.data_parallel = data_parallel
        share_projections(self, places["heads"])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """`(B, N, E)`; takes what `MultiheadDilatedAttention` takes."""
        return super().forward(*args, **kwargs)[0]


class DistributedImprovedDilatedAttention(AcrossRanks, ImprovedDilatedAttention):
    """`ImprovedDilatedAttention` with tokens, heads or both spread over ranks; shared rows are gathered.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        sequence_parallel: the rank has a contiguous shard of the tokens: over `group`, or the mesh's axis `sequence`.
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
        sequence_parallel: bool = False,
        model_parallel: bool = False,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        scheme: Scheme = "gather",
        **settings: Any,
    ) -> None:
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


ATTENTION_TYPES |= {
    "ring": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "distributed": (DistributedImprovedDilatedAttention, DistributedImprovedMultiheadDilatedAttention),
}


def _several(place: Place | None) -> RankGroup | None:
    ranks = None if place is None else place.ranks()
    return None if ranks is None or ranks.size == 1 else ranks


def _places(options: RunOptions, group: ProcessGroup | None, mesh: DeviceMesh | None) -> dict[str, Place | None]:
    """The ranks that share the sequence, and those that share the heads, as `options` have them; None for one rank."""
    if group is not None and mesh is None:  # which states who shares the sequence
        model = options.model_parallel
        if model is True or (model or 1) > 1:
            raise ValueError(
                f"a group is of the ranks that share a sequence, got model_parallel={model} beside it: "
                "pass mesh=init_device_mesh(..., mesh_dim_names=('sequence', 'tensor'))"
            )
        return {"sequence": None if options.sequence_parallel is False else Place(group), "heads": None}
    if mesh is None:
        world = ranks_of()
        axes = options.axes(world.size)
        if axes["sequence"] == world.size:
            return {"sequence": None if options.sequence_parallel is False else Place(), "heads": None}
        if axes["data"] == world.size:
            return {"sequence": None, "heads": None}
        mesh = _mesh_of(world, axes)
    check_axes(mesh, options)
    names = mesh.mesh_dim_names or ("sequence",)
    sequence, heads = (Place(group, mesh, axis) if axis in names else None for axis in ("sequence", "tensor"))
    return {"sequence": None if options.sequence_parallel is False else sequence, "heads": heads}


# By the ranks that they are of, so that the layers of a model share the groups of one mesh.
_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], DeviceMesh]] = WeakKeyDictionary()


def _mesh_of(world: RankGroup, axes: dict[str, int]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    assert world.group is not None
    known, sizes = _meshes.setdefault(world.group, {}), tuple(axes.values())
    if sizes not in known:
        devices = [kind.type for kind in world.group._device_types if torch.get_device_module(kind).is_available()]
        known[sizes] = init_device_mesh(max(devices, key="cpu".__ne__), sizes, mesh_dim_names=tuple(axes))
    return known[sizes]


def check_axes(mesh: DeviceMesh, options: RunOptions) -> None:
    """Refuse a mesh whose axes are not what `options` state about them."""
    names = mesh.mesh_dim_names or ("sequence",)
    for keyword, stated in options.stated_axes.items():
        axis = AXIS_OF[keyword]
        size = (mesh[axis] if mesh.ndim > 1 else mesh).size() if axis in names else 1
        if stated is True and axis not in names:
            raise ValueError(f"{keyword}=True and a mesh without an axis {axis!r}: change one of them")
        if stated is not True and size != (stated or 1):
            raise ValueError(
                f"{keyword}={stated} and a mesh with {size} ranks on its axis {axis!r}: change one of them"
            )
