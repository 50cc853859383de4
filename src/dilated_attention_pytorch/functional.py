"""`dilated_attention`: check the arguments, describe the call, run the operator; and the weights of single rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.block_layout import layout_without_memory
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import Call, Inputs, Prepared, check_shapes
from dilated_attention_pytorch.core.checks import (
    COUNT,
    MOST_TOKENS,
    check_flag,
    check_instance,
    check_sequence,
    check_tensor,
    check_whole,
    checked,
)
from dilated_attention_pytorch.core.dropout import draw_seed
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.core.reach import warn_of_reach
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.core.row_weights import RowWeights, row_weights
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout
from dilated_attention_pytorch.kernels.engine import backends, compile_kernels, name_of_engine
from dilated_attention_pytorch.kernels.op import attend

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "RowWeights",
    "attention_rows",
    "backends",
    "dilated_attention",
    "warm_up",
]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Evaluated once: some versions of `torch.compile` cannot trace it.
_AUTOCAST_DEVICES = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "mtia") if torch.amp.is_autocast_available(kind)
)


class _CallSettings(TypedDict, total=False):
    """Fields of `Call` that users state."""

    is_causal: bool
    scale: float | None
    dropout_p: float
    head_offset: int
    total_heads: int | None
    allow_tf32: bool | None
    backend: str


class _Options(_CallSettings, total=False):
    """The keywords of `dilated_attention` except `return_lse`, which decides what it returns."""

    head_layout: HeadLayout
    seqlens: Tensor | None
    cu_seqlens: Tensor | None
    key_padding_mask: Tensor | None
    spans: Tensor | None
    sparse_config: SparsePatternConfig | None
    resources: Resources | None


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    head_layout: HeadLayout = "interleaved",
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    spans: Tensor | None = None,
    head_offset: int = 0,
    total_heads: int | None = None,
    allow_tf32: bool | None = None,
    sparse_config: SparsePatternConfig | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    resources: Resources | None = None,
    attn_mask: None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LongNet's dilated attention: one softmax over all (branch, key) pairs that a row sees.

    Args:
        query: `(B, N, H, D)`.
        key, value: `(B, N, Hkv, D)`, where `Hkv` divides `H` (grouped-query attention).
        segment_lengths, dilation_rates: one entry per branch; any positive numbers, for any N.
        is_causal: a row sees only keys at or before its own position.
        scale: factor of the scores; `D ** -0.5` by default.
        dropout_p: probability of dropping an attention weight, drawn from PyTorch's generator. A key that several
            branches show to a query is dropped in all of them or in none.
        head_layout: which rows of a segment each head reads: `interleaved` (the paper), `blocked` (torchscale) or
            `grouped` (each head belongs to one branch).
        seqlens: `(B,)`, the lengths of right-padded rows.
        cu_seqlens: `(documents + 1,)`, cumulative lengths of documents packed into a single row.
        key_padding_mask: `(B, N)`, True = ignore; each row's valid tokens form one span.
        spans: `(documents, 2)` from `document_spans`, for lengths that many calls share.
        head_offset, total_heads: under head sharding, the global index of the first query head and their global number.
        allow_tf32: TF32 for float32 on a GPU; None follows PyTorch's setting.
        sparse_config: keep only some tiles of every branch, by a pattern; None keeps all. With lengths, each document
            keeps the tiles that it would keep alone.
        return_lse: also return the log of the softmax denominators, `(B, N, H)`, in float32 (float64 for float64).
        backend: `auto`, or the engine to run: `triton`, `vendor`, `eager` or `reference`.
        resources: a cache of tables and a pool of workspaces that calls share. None means neither, except that with
            `sparse_config` the global cache is used: making a layout always costs more than finding it.
        attn_mask: refused; a dense mask takes O(N^2) memory.

    Returns:
        `(B, N, H, D)` in the dtype of `query`; padded rows and rows that no branch covers are 0.

    >>> q, k, v = torch.randn(3, 2, 100, 4, 8).unbind(0)
    >>> dilated_attention(q, k, v, segment_lengths=[16, 128], dilation_rates=[1, 4], is_causal=True).shape
    torch.Size([2, 100, 4, 8])
    """
    refuse_dense_mask(attn_mask)
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(
            "torch.jit.trace would fix the lengths and the dropout of one call: use torch.compile or torch.export"
        )
    check_flag("return_lse", return_lse)
    if resources is not None:
        check_instance("resources", resources, Resources)
    plain = is_plain(query, key, value)
    if not plain or torch._C._is_any_autocast_enabled():
        query, key, value = autocast_inputs(query, key, value)
    tensors = (query, key, value)
    settings: dict[str, Any] = {
        "head_layout": head_layout, "is_causal": is_causal, "scale": scale, "dropout_p": dropout_p,
        "head_offset": head_offset, "total_heads": total_heads, "allow_tf32": allow_tf32,
        "sparse_config": sparse_config, "backend": backend,
    }  # fmt: skip
    prepared, is_new = _prepared(tensors, segment_lengths, dilation_rates, settings) if plain else (None, False)
    call = checked_call(*tensors, segment_lengths, dilation_rates, **settings) if prepared is None else prepared.call
    if resources is None and plain:
        resources = NO_RESOURCES if sparse_config is None else Resources(get_global_pattern_cache())
    if seqlens is not None or cu_seqlens is not None or key_padding_mask is not None or spans is not None:
        spans = document_spans(
            *query.shape[:2],
            seqlens=seqlens,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            spans=spans,
            cache=resources if plain and resources is not None and resources.cache is not None else None,
        )
    if is_new:
        H, kv_heads = query.shape[2], key.shape[2]
        longest = _longest_document(spans, query.shape[1])
        warn_of_reach(call.spec, longest, (total_heads or H) * kv_heads // H, is_causal=is_causal)
    seed = draw_seed(query.device) if dropout_p > 0.0 else None
    inputs = Inputs(query, key, value, spans, seed, None, prepared)
    return attend(call, inputs, resources, plain=plain, return_lse=return_lse)


def attention_rows(
    query: Tensor,
    key: Tensor,
    rows: Sequence[int],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    head_layout: HeadLayout = "interleaved",
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    spans: Tensor | None = None,
    head_offset: int = 0,
    total_heads: int | None = None,
) -> dict[tuple[int, int, int], RowWeights]:
    """The exact attention weights of some query rows, as lists of the keys that they see.

    Arguments are those of `dilated_attention`; `rows` are positions in a batch row. The key of the result is
    `(batch row, row, query head)`. A key that several branches show has the sum of its weights. No `N x N` tensor is
    made: memory is that of the lists. Dropout is not applied.

    >>> q, k = torch.zeros(2, 1, 16, 2, 8).unbind(0)
    >>> found = attention_rows(q, k, [6], segment_lengths=[4, 8], dilation_rates=[1, 2], is_causal=True)
    >>> found[0, 6, 0]  # of head 0, which sees 4, 5, 6 in the first branch and 0, 2, 4, 6 in the second
    RowWeights(positions=tensor([0, 2, 4, 5, 6]), weights=tensor([0.1429, 0.1429, 0.2857, 0.1429, 0.2857]))
    """
    query, key = autocast_inputs(query, key)
    call = checked_call(
        query, key, key, segment_lengths, dilation_rates, head_layout, is_causal=is_causal, scale=scale,
        head_offset=head_offset, total_heads=total_heads,
    )  # fmt: skip
    B, N = query.shape[:2]
    wanted = check_sequence("rows", rows, lambda name, row: check_whole(name, row, least=0, most=N - 1))
    spans = document_spans(B, N, seqlens=seqlens, cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask, spans=spans)
    return row_weights(query, key, wanted, call, spans)


@checked(kv_heads=COUNT)
def warm_up(
    shape: Sequence[int],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backward: bool = True,
    lengths: bool = False,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    head_layout: HeadLayout = "interleaved",
    allow_tf32: bool | None = None,
    sparse_config: SparsePatternConfig | None = None,
    backend: str = "auto",
) -> list[tuple[str, float]]:
    """Compile the kernels of `dilated_attention` in parallel, ahead of its first call, without computing anything.

    They go into Triton's cache folder (`TRITON_CACHE_DIR`), where other processes find them: let one rank warm up
    before the others begin, or do it when you build an image. Kernels depend on the head dim, the dtype and the other
    arguments here, but hardly on the length and the batch size. Short calls have their own.

    Args:
        shape: `(B, N, H, D)` of the query.
        segment_lengths, dilation_rates, is_causal, dropout_p, head_layout, allow_tf32, sparse_config, backend: as in
            `dilated_attention`.
        kv_heads: heads of the key and the value; H by default.
        dtype: of the tensors; PyTorch's default dtype if None.
        device: where calls will run; by default the current GPU, or the CPU if there is none.
        backward: also compile the kernels of the backward pass.
        lengths: for calls with padded rows, or, if B is 1, packed documents.

    Returns:
        The name of each kernel, and the seconds that it took to compile it or to find it in the folder. Kernels that
        this process has compiled before are left out. Empty where nothing is compiled, as on a CPU.

    >>> warm_up((1, 131_072, 12, 64), [2048, 8192], [1, 4], dtype=torch.bfloat16, is_causal=True, device="cpu")
    []
    """
    if len(shape) != 4:
        raise ValueError(f"shape must be (batch, tokens, heads, head_dim), got {tuple(shape)}")
    B, N, H, D = (check_whole("shape", size, least=1, most=MOST_TOKENS) for size in shape)
    if B * N * H * D > MOST_TOKENS:
        raise ValueError(f"shape must have at most 2^48 elements, got {tuple(shape)}")
    query, key = (torch.empty((B, N, heads, D), dtype=dtype, device="meta") for heads in (H, kv_heads or H))
    call = checked_call(
        query, key, key, segment_lengths, dilation_rates, head_layout, is_causal=is_causal, dropout_p=dropout_p,
        allow_tf32=allow_tf32, sparse_config=sparse_config, backend=backend,
    )  # fmt: skip
    pairs = torch.empty((B, 2), dtype=torch.int64, device="meta")
    inputs = Inputs(
        query,
        key,
        key,
        spans=pairs if lengths else None,
        seed=pairs[0] if dropout_p > 0.0 else None,
        layout=None if call.sparse is None else layout_without_memory(call.spec, call.sparse),
    )
    return compile_kernels(call, inputs, device, backward=backward)


def refuse_dense_mask(attn_mask: Tensor | None) -> None:
    if attn_mask is not None:
        raise ValueError(
            "a dense attn_mask takes O(N^2) memory and is not supported: pass is_causal=True alone for causality, "
            "key_padding_mask or seqlens for padding, cu_seqlens for packed documents"
        )


def _prepared(
    tensors: tuple[Tensor, Tensor, Tensor],
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    settings: dict[str, Any],
) -> tuple[Prepared, bool]:
    """The call, and whether it may be new: equal calls, as in a model's layers and steps, are checked once."""

    def make() -> Prepared:
        call = checked_call(*tensors, segment_lengths, dilation_rates, **settings)
        return Prepared(call, name_of_engine(call, tensors[0], tensors[0].device))

    if type(segment_lengths) not in (list, tuple) or type(dilation_rates) not in (list, tuple):
        return make(), True
    q, k, v = tensors
    stated = settings.values()
    try:
        kind = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            tuple(segment_lengths), tuple(dilation_rates), *stated,
            # True and 1.0 equal 1, but must be refused.
            *map(type, segment_lengths), *map(type, dilation_rates), *map(type, stated),
        )  # fmt: skip
        known = plans.recall("call", kind)
        return (plans.remember("call", kind, make), True) if known is None else (known, False)
    except (TypeError, RuntimeError):  # an argument that cannot be looked up is wrong, and the checks say how
        return make(), True


def _longest_document(spans: Tensor | None, tokens: int) -> int:
    """Tokens of the longest document; 0 if only the device knows them."""
    if spans is None:
        return tokens
    return int((spans[:, 1] - spans[:, 0]).max()) if spans.device.type == "cpu" and len(spans) else 0


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: HeadLayout = "interleaved",
    *,
    sparse_config: SparsePatternConfig | None = None,
    **settings: Unpack[_CallSettings],
) -> Call:
    """Describe a call, or raise an error that says what is wrong with it."""
    spec = DilatedSpec.of(segment_lengths, dilation_rates, head_layout)
    _check_tensors(query, key, value)
    sparse = None if sparse_config is None else check_sparse_config(sparse_config, spec)
    return Call(spec=spec, sparse=sparse, **settings)


def check_sparse_config(sparse_config: SparsePatternConfig, spec: DilatedSpec) -> SparsePatternConfig:
    """The config, with tiles that fit the segments of the spec."""
    if not isinstance(sparse_config, SparsePatternConfig):
        raise TypeError(
            f"sparse_config must be a SparsePatternConfig, got {sparse_config!r}: "
            'write SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.1)'
        )
    check_instance("spec", spec, DilatedSpec)
    return sparse_config.fitted(spec.segment_lengths)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value in the dtype of autocast, where it is enabled for the device of the first."""
    if not tensors:
        raise TypeError("autocast_inputs takes at least one tensor, got none")
    for name, x in zip(("query", "key", "value"), tensors):
        check_tensor(name, x)
    device_type = tensors[0].device.type
    if device_type not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype in _DTYPES and x.dtype != torch.float64 else x for x in tensors)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if check_tensor(name, x).dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be float32, float64, bfloat16 or float16, got {x.dtype}: convert with .to(...)"
            )
        if x.dtype != query.dtype:
            raise TypeError(f"query, key and value must share a dtype, got {query.dtype} and {name} {x.dtype}")
    check_shapes(query, key, value)
