"""The published names of attention across ranks: thin names over the `attend` seam.

Under a process group (the default one, or `group=` / `mesh=`) a module takes its rank's contiguous shard of the
sequence and returns its rank's rows; on one rank it is its plain class. `cu_seqlens`, `seqlens` and `spans` speak of
the whole sequence, `key_padding_mask` of the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch.core.checks import check_flag
from dilated_attention_pytorch.core.pattern import training_bytes
from dilated_attention_pytorch.core.pattern_cache import OptimizedPatternCache
from dilated_attention_pytorch.core.spec import Problem
from dilated_attention_pytorch.functional import refuse_dense_mask
from dilated_attention_pytorch.nn.attention import DilatedAttention, ImprovedDilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.parallel.attention import sharded_dilated_attention
from dilated_attention_pytorch.parallel.comm import ALONE, Place, Ranks
from dilated_attention_pytorch.parallel.costs import (
    MEMORY_BUDGET,
    Scheme,
    branch_traffic,
    check_scheme,
    choose_scheme,
    message_bytes,
    wires_of,
)
from dilated_attention_pytorch.parallel.options import OPTIONS, RunOptions
from dilated_attention_pytorch.parallel.sharding import Shards, TokenLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class AcrossRanks(DilatedAttention):
    """Dilated attention of which `sequence` says which ranks share the tokens, and `heads` which share the heads.

    Args:
        sequence, heads: places; None for one that is not shared.
        scheme: `gather`, `ring`, `all_to_all`, or `auto` to choose for each branch by its costs.
        memory_budget: bytes that `auto` lets a branch's gathered rows take on a rank.
        token_layout: `contiguous` shards, or `zigzag`, which evens out causal work, by `gather` or `auto` only: the
            rank has an early and a late chunk, one after the other, as `zigzag_order` has them.
        use_pattern_cache: share schedules and tables between calls; False makes them anew in every call.
        settings: passed on to the plain class.
    """

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
        return made.train(plain.training)

    def sequence_ranks(self) -> Ranks | None:
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
        refuse_dense_mask(attn_mask)
        with torch.profiler.record_function(repr(self)) if self.enable_profiling else nullcontext():
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
        if heads is not None:
            H = query.shape[2]
            heads.agree({"heads": H, "key/value heads": key.shape[2]}, 0, None, (0,) * heads.size)
            share |= {"head_offset": heads.rank * H, "total_heads": heads.size * H}
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

    >>> attention = RingDilatedAttention(segment_lengths=[16, 64], dilation_rates=[1, 4], ring_size=1)
    >>> q, k, v = torch.randn(3, 1, 100, 4, 8).unbind(0)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 100, 4, 8])
    """

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
        self.use_checkpointing = check_flag("use_checkpointing", use_checkpointing)

    @property
    def ring_size(self) -> int:
        return 1 if self.sequence is None else self.sequence.ranks().size

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.use_checkpointing and torch.is_grad_enabled():
            return checkpoint(super().attend, *args, use_reentrant=False, **kwargs)
        return super().attend(*args, **kwargs)


class RingDilatedAttentionV2(RingDilatedAttention):
    """`RingDilatedAttention` that tells what it takes, and drops what it keeps between calls."""

    def cleanup_buffers(self) -> None:
        """Forget schedules of earlier calls; message buffers do not outlive a call."""
        if self._pattern_cache is not None:
            self._pattern_cache.forget("ring schedule")

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
    ) -> dict[str, int]:
        """Bytes of one forward and backward of `seq_len` tokens on the rank that has most of them, by part.

        `tensors` are q, k, v, out, their gradients, and two numbers a row; `messages` the buffers of what is on its way
        in the forward pass, of all branches; `received` what arrives in them. Of each, the busiest rank's.
        """
        size = self.ring_size
        shards = Shards.cut(seq_len, size, self.token_layout)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        itemsize = dtype.itemsize
        most = max(shards.tokens_of(rank) for rank in range(size))
        tokens = batch_size * most
        tensors = training_bytes(tokens, num_heads, head_dim, kv_heads=kv_heads, itemsize=itemsize)
        received, held = [0] * size, [0] * size
        problem = Problem(spec=self.spec, is_causal=is_causal)
        documents = [(range(batch_size), 0, seq_len)]
        shape = (num_heads, kv_heads, head_dim, itemsize)
        for _, segments, wire in wires_of(problem, shards, documents, *shape):
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
        }


class RingDilatedAttentionV3(RingDilatedAttentionV2):
    """`RingDilatedAttentionV2` with a pattern cache of its own that has two tiers.

    Args:
        cache_on_gpu: keep what calls share on their GPU as long as the hot tier of `OptimizedPatternCache` has room,
            and on the CPU beyond that; False shares the global cache. By default wherever the pattern cache is on.
        settings: those of `RingDilatedAttention`.
    """

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
            self._pattern_cache = OptimizedPatternCache()


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` around `RingDilatedAttention`: each rank projects its own tokens.

    Takes `ring_size`, `group`, `mesh` and the other settings of `RingDilatedAttention`.
    """

    def _make_attention(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], dropout: float, settings: dict[str, Any]
    ) -> DilatedAttention:
        return RingDilatedAttention(segment_lengths, dilation_rates, dropout=dropout, **settings)


class RingAdvancedDistributedDilatedAttention(RingMultiheadDilatedAttention):
    """`RingMultiheadDilatedAttention` that returns a Tensor, and carries how its run is to be carried out.

    Args:
        sequence_parallel, model_parallel, data_parallel: which axes of a mesh (`sequence`, `tensor`, `data`) may have
            several ranks. Without a mesh all ranks share the sequence, if they may.
        mesh: the ranks, on named axes; `parallelize(model, mesh)` spreads the heads over several on `tensor`.
        settings: the fields of `RunOptions` (`use_deepspeed`, `zero_stage`, `checkpoint_interval`, ...), kept as
            `options` for `train`; and the settings of `RingMultiheadDilatedAttention`.

    >>> attention = RingAdvancedDistributedDilatedAttention(32, 4, [16, 64], [1, 4], auto_resume=True)
    >>> x = torch.randn(2, 100, 32)
    >>> attention(x, x, x, is_causal=True).shape, attention.options.resume
    (torch.Size([2, 100, 32]), 'auto')
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        model_parallel: bool = False,
        sequence_parallel: bool = True,
        data_parallel: bool = True,
        mesh: DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        options = RunOptions(**{name: settings.pop(name) for name in OPTIONS if name in settings})
        if mesh is not None:
            settings["mesh"] = mesh
            _check_axes(mesh, {"sequence": sequence_parallel, "tensor": model_parallel, "data": data_parallel})
        super().__init__(
            embed_dim, num_heads, segment_lengths, dilation_rates, **settings, sequence_parallel=sequence_parallel
        )
        self.options = options
        self.model_parallel, self.data_parallel = model_parallel, data_parallel
        self.sequence_parallel = sequence_parallel

    def _make_attention(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], dropout: float, settings: dict[str, Any]
    ) -> DilatedAttention:
        if settings.pop("sequence_parallel"):
            return super()._make_attention(segment_lengths, dilation_rates, dropout, settings)
        settings.pop("mesh", None)
        return DilatedAttention(segment_lengths, dilation_rates, attention_dropout=dropout, **settings)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """`(B, N, E)`; takes what `MultiheadDilatedAttention` takes."""
        return super().forward(*args, **kwargs)[0]


class DistributedImprovedDilatedAttention(AcrossRanks, ImprovedDilatedAttention):
    """`ImprovedDilatedAttention` with tokens, heads or both spread over ranks; shared rows are gathered.

    Args:
        segment_lengths, dilation_rates: one entry a branch.
        sequence_parallel: the rank has a contiguous shard of the tokens: over `group`, or the mesh's axis `sequence`.
        model_parallel: the rank has its share of the heads, in order: over `group`, or the mesh's axis `tensor`. Ranks
            that share heads must draw dropout alike, as tensor parallelism does.
        group, mesh: a group can be cut one way only; a mesh of both axes serves both.
        settings: `scheme` and `memory_budget` of `AcrossRanks`, and those of `ImprovedDilatedAttention`.
    """

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
        sequence = Place(group, mesh, "sequence") if check_flag("sequence_parallel", sequence_parallel) else None
        heads = Place(group, mesh, "tensor") if check_flag("model_parallel", model_parallel) else None
        if sequence is not None and heads is not None and mesh is None and sequence.ranks().size > 1:
            raise ValueError(
                f"sequence_parallel and model_parallel cannot both cut one group of {sequence.ranks().size} ranks: "
                "pass mesh=init_device_mesh(..., mesh_dim_names=('sequence', 'tensor'))"
            )
        super().__init__(segment_lengths, dilation_rates, sequence=sequence, heads=heads, scheme=scheme, **settings)
        self.sequence_parallel, self.model_parallel = sequence_parallel, model_parallel


def _several(place: Place | None) -> Ranks | None:
    ranks = None if place is None else place.ranks()
    return None if ranks is None or ranks.size == 1 else ranks


def _check_axes(mesh: DeviceMesh, allowed: dict[str, bool]) -> None:
    sizes = {axis: mesh[axis].size() for axis in allowed if axis in (mesh.mesh_dim_names or ())}
    for axis, size in sizes.items():
        if size > 1 and not allowed[axis]:
            keyword = "model_parallel" if axis == "tensor" else f"{axis}_parallel"
            raise ValueError(f"{keyword}=False and a mesh with {size} ranks on its axis {axis!r}: change one of them")
    if sizes.get("tensor", 1) > 1:
        raise ValueError(
            f"one module cannot cut its own projections for {sizes['tensor']} ranks: make the model without mesh, and "
            "spread its heads with parallelize(model, mesh)"
        )
