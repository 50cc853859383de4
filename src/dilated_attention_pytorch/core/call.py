"""One attention call: what it computes, as one frozen description, and the tensors that go in and come out."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.checks import (
    MOST_ENTRIES,
    PROBABILITY,
    check_choice,
    check_flag,
    check_instance,
    check_number,
    check_whole,
)
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout, OffsetTable

if TYPE_CHECKING:
    from dilated_attention_pytorch.core.block_layout import BlockLayout

ENGINES = ("triton", "vendor", "eager", "reference")
BACKENDS = ("auto", *ENGINES)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about an attention call that is not a tensor, checked when it is made.

    `head_offset` and `total_heads` count query heads; under head sharding they are global. `sparse` keeps only some
    tiles of every branch. `backend` names the engine, or is `auto`.

    The last three fields describe one rank's share of a call. `table` replaces the head layout's offsets, because a
    shard may begin inside a segment; it holds None for branches that are computed elsewhere. `first_position` is the
    global position of the shard's first token. A `partial` result stays in float32, because more will be merged into
    it.

    >>> call = Call.of([4, 8], [1, 2], is_causal=True)
    >>> Call.decode(*call.encode()) == call
    True
    """

    spec: DilatedSpec
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    head_offset: int = 0
    total_heads: int | None = None
    allow_tf32: bool | None = None
    sparse: SparsePatternConfig | None = None
    backend: str = "auto"
    table: OffsetTable | None = None
    first_position: int = 0
    partial: bool = False

    def __post_init__(self) -> None:
        check_instance("spec", self.spec, DilatedSpec)
        check_choice("backend", self.backend, BACKENDS)
        check_flag("is_causal", self.is_causal)
        check_number("dropout_p", self.dropout_p, **PROBABILITY)
        check_whole("head_offset", self.head_offset, least=0, most=MOST_ENTRIES)
        if self.total_heads is not None:
            check_whole("total_heads", self.total_heads, least=1, most=MOST_ENTRIES)
        elif self.head_offset:
            raise ValueError(
                f"head_offset={self.head_offset} needs total_heads, the number of query heads over all shards"
            )
        if self.scale is not None:
            check_number("scale", self.scale)
            if isinstance(self.scale, int):  # kernels take no whole number for it
                object.__setattr__(self, "scale", float(self.scale))
        if self.allow_tf32 is not None:
            check_flag("allow_tf32", self.allow_tf32)

    @classmethod
    def of(
        cls,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        head_layout: HeadLayout = "interleaved",
        **settings: Any,
    ) -> Call:
        """The call of two lists, which pair up to branches; `settings` are the other fields."""
        return cls(spec=DilatedSpec.of(segment_lengths, dilation_rates, head_layout), **settings)

    def __hash__(self) -> int:
        """Computed once: a call is looked up whenever it is made again."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(getattr(self, field.name) for field in fields(self)))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: strings hash differently in every process."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def softmax_scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def offsets(self, heads: int, kv_heads: int) -> OffsetTable:
        """The offset table of this call's key/value heads; the query heads of a group share their KV head's row."""
        if self.table is not None:
            return self.table
        group = heads // kv_heads
        total = heads if self.total_heads is None else self.total_heads
        for name, count in (("head_offset", self.head_offset), ("total_heads", total)):
            if count % group:
                raise ValueError(
                    f"{name}={count} splits a group of {group} query heads that share one key/value head: "
                    "shard whole groups"
                )
        return self.spec.offsets(kv_heads, first=self.head_offset // group, total=total // group)

    def query_head_offsets(self, heads: int, kv_heads: int) -> OffsetTable:
        """The offset table with one entry per query head."""
        group = heads // kv_heads
        return tuple(tuple(o for o in row for _ in range(group)) for row in self.offsets(heads, kv_heads))

    def encode(self) -> Encoded:
        """The call as a registered operator takes it: one string, and the numbers that `torch.compile` may leave open.

        Those are `scale`, `dropout_p` and the fraction of tiles that is kept.
        """
        spec, tiles = self.spec, self.sparse
        text = _text(
            (
                (spec.segment_lengths, spec.dilation_rates, spec.head_layout),
                None if tiles is None else tuple(getattr(tiles, name) for name in _TILE_FIELDS),
                tuple(getattr(self, name) for name in _ENCODED),
            )
        )
        return text, self.scale, self.dropout_p, 1.0 if tiles is None else tiles.sparsity_ratio

    @staticmethod
    def decode(text: str, scale: float | None, dropout_p: float, kept_fraction: float) -> Call:
        """The call that `encode` wrote, made once for equal strings and numbers."""

        def make() -> Call:
            branches, tiles, rest = literal_eval(text)
            sparse = None
            if tiles is not None:
                sparse = SparsePatternConfig(**dict(zip(_TILE_FIELDS, tiles)), sparsity_ratio=kept_fraction)
            return Call.of(*branches, scale=scale, dropout_p=dropout_p, sparse=sparse, **dict(zip(_ENCODED, rest)))

        return plans.remember("call", (text, scale, dropout_p, kept_fraction), make)


Encoded = tuple[str, "float | None", float, float]
_TILE_FIELDS = ("pattern_type", "block_size", "local_window_size", "global_tokens", "seed")
_ENCODED = (
    "is_causal", "head_offset", "total_heads", "allow_tf32", "backend", "table", "first_position", "partial",
)  # fmt: skip


def _text(value: Any) -> str:
    """A nested tuple as Python writes it. `index` fixes sizes that `torch.compile` leaves open."""
    if isinstance(value, tuple):
        return "(" + "".join([_text(one) + "," for one in value]) + ")"
    if value is None or isinstance(value, bool):
        return str(value)
    return f"'{value}'" if isinstance(value, str) else str(index(value))


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """A checked call of tensors of certain shapes, dtypes and device, and the name of its engine.

    In the keys of plans it represents all of these. It equals only itself.
    """

    call: Call
    engine: str


class Inputs(NamedTuple):
    """The tensors of a call. Lengths are `spans`, dropout is drawn from `seed`, `layout` lists the kept tiles.

    `prepared` describes the same call for tensors like these; None if it was not remembered.
    """

    query: Tensor  # (B, N, H, D)
    key: Tensor  # (B, N, Hkv, D)
    value: Tensor
    spans: Tensor | None = None
    seed: Tensor | None = None
    layout: BlockLayout | None = None
    prepared: Prepared | None = None


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse tensors that do not fit together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, tokens, heads, head_dim), got {x.dim()} dimensions {tuple(x.shape)}; "
                "for (batch, tokens, embed_dim) use MultiheadDilatedAttention"
            )
        if x.device != query.device:
            raise ValueError(f"query, key and value must share a device, got {query.device} and {name} {x.device}")
        if x.shape[0] != query.shape[0] or x.shape[1] != query.shape[1] or x.shape[3] != query.shape[3]:
            raise ValueError(
                f"query, key and value must agree in batch, tokens and head_dim, got query {tuple(query.shape)} and "
                f"{name} {tuple(x.shape)}; rows of one sequence attend to each other, so there is no cross-attention"
            )
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"key and value must have the same number of heads, got {key.shape[2]} and {value.shape[2]}")
    if query.shape[2] * query.shape[3] * key.shape[2] == 0:
        raise ValueError(
            f"heads and head_dim must be at least 1, got query {tuple(query.shape)} and key {tuple(key.shape)}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the key/value heads must divide the query heads, got H={query.shape[2]} and Hkv={key.shape[2]}: "
            "repeat or drop key/value heads"
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of `lse` for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Partial(NamedTuple):
    """Attention over some of the (branch, key) pairs of each row: `core.merge` combines partials."""

    out: Tensor  # (B, N, H, D)
    lse: Tensor  # (B, N, H)


class Saved(NamedTuple):
    """What the gradients need: the inputs and the merged result."""

    inputs: Inputs
    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """The gradients of query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor
