"""The one operator behind every attention here: forward over branches, backward against the merged out and lse.

It is opaque to autograd, `torch.compile`, export and checkpointing, and saves q, k, v, out and lse once, however many
branches there are. Engines differ in speed only; `backend` names the one that runs.

`attend` is what to call. Tracers, tensor subclasses and dispatch modes see a registered operator; a plain eager call
goes straight to the same code, because the registered operator's way through the dispatcher and Python's autograd takes
several times as long as a short sequence takes on a GPU. Transforms of `torch.func` see an autograd function with the
rules that they ask for. Derivatives are first derivatives: reverse mode by the engine of the call, forward mode by
PyTorch's operators on every device.
"""

# No postponed annotations: torch.library reads the types to make the operators' schemas.
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch.core.block_layout import BlockLayout, layout_of
from dilated_attention_pytorch.core.block_pattern import PatternType, SparsePatternConfig
from dilated_attention_pytorch.core.kept import kept
from dilated_attention_pytorch.core.plans import Remembers, get_global_pattern_cache
from dilated_attention_pytorch.core.reference import reference_backward, reference_forward
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources, is_plain
from dilated_attention_pytorch.core.spec import Call, DilatedSpec, HeadLayout
from dilated_attention_pytorch.core.tangents import refuse_tangents
from dilated_attention_pytorch.kernels import eager, vendor
from dilated_attention_pytorch.kernels.eager import by_head
from dilated_attention_pytorch.kernels.ladder import choose_backend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    call: Call,
    backend: str,
    plain: bool,
    return_lse: bool,
    resources: Resources | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`out`, or `(out, lse)`, of a call that `functional` has validated; `plain` says what `is_plain` does.

    The registered operator is a pure function of its arguments: where it is traced, calls share block layouts only, and
    `resources` may be None, which is for what always pays.
    """
    if not plain or resources is None:
        reuse_layouts = resources is None or resources.cache is not None
        if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
            both = _untraced(_AttendTransformed)(query, key, value, spans, seed, call, backend, reuse_layouts)
        else:
            refuse_tangents("a compiled or traced dilated attention", query, key, value)
            both = attend_op(query, key, value, spans, seed, *_settings(call, backend, reuse_layouts))
    elif forward_ad._current_level >= 0:
        return _untraced(_Attend)(query, key, value, spans, seed, return_lse, call, backend, resources)
    elif torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Attend.apply(query, key, value, spans, seed, return_lse, call, backend, resources)
    else:
        layout = _layout(call, query, key, resources.cache)
        both = _forward(query, key, value, spans, seed, call, backend, resources, layout)
    return both if return_lse else both[0]


class _Attend(torch.autograd.Function):
    """The operator's autograd for plain calls."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any, return_lse: bool, call: Call,
        backend: str, resources: Resources,
    ) -> Any:  # fmt: skip
        layout = _layout(call, query, key, resources.cache)
        out, lse = kept(lambda: _forward(query, key, value, spans, seed, call, backend, resources, layout))
        ctx.rest = call, backend, resources, layout  # backward must see the tiles that forward saw
        ctx.save_for_backward(query, key, value, out, lse, spans, seed)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(query, key, value, spans, seed)
        ctx.set_materialize_grads(False)
        ctx.return_lse = return_lse
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0 or _is_vectorized():
            # Something follows the gradient itself: create_graph, forward mode, or vmap.
            call, backend, resources, _ = ctx.rest
            rest = call, backend, resources.cache is not None
            grads = _gradients(ctx, _Gradients.apply, rest, grad_out, grad_lse)
        else:
            grads = _gradients(ctx, _backward, ctx.rest, grad_out, grad_lse)
        return (*grads, None, None, None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *rest: Any) -> Any:
        call, _, resources, _ = ctx.rest
        tangents = _tangents(ctx, dq, dk, dv, call, resources.cache is not None)
        return tangents if ctx.return_lse else tangents[0]


class _OneByOne(torch.autograd.Function):
    """A function without derivatives of its own; `torch.vmap` calls it once per element."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        results = [
            cls.apply(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(column) for column in zip(*results)), (0,) * len(results[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "dilated attention has first derivatives only: do not differentiate its gradient or its tangent again "
            "(create_graph=True, torch.func.hessian), or take differences of gradients"
        )

    jvp = backward


class _AttendTransformed(_OneByOne):
    """The operator's derivatives for `torch.func`."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any, call: Call, backend: str,
        reuse_layouts: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return attend_op(query, key, value, spans, seed, *_settings(call, backend, reuse_layouts))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, spans, seed, *ctx.rest = inputs
        ctx.save_for_backward(query, key, value, *output, spans, seed)
        ctx.save_for_forward(query, key, value, spans, seed)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        return (*_gradients(ctx, _Gradients.apply, ctx.rest, grad_out, grad_lse), *(None,) * 5)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        call, _, reuse_layouts = ctx.rest
        return _tangents(ctx, dq, dk, dv, call, reuse_layouts)


@functools.cache  # made when first used: it imports the compiler
def _untraced(function: type[torch.autograd.Function]) -> Any:
    """`function.apply`, eager also where a function around it is compiled: forward mode cannot be traced."""
    return torch.compiler.disable(function.apply)


class _Gradients(_OneByOne):
    """`(dq, dk, dv)` where something other than a plain backward asks for them."""

    @staticmethod
    def forward(
        grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
        spans: Any, seed: Any, call: Call, backend: str, reuse_layouts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        saved = query, key, value, out, lse, spans, seed
        return attend_backward(grad_out, grad_lse, *saved, *_settings(call, backend, reuse_layouts))


class _Tangents(_OneByOne):
    """The tangents of `(out, lse)`, by PyTorch's forward mode on the eager engine's operators."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, spans: Any, seed: Any,
        call: Call, reuse_layouts: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not is_plain(query, key, value, dq, dk, dv) or _is_vectorized():
            raise NotImplementedError(
                "forward-mode derivatives of dilated attention are computed eagerly, on plain tensors or by torch.func "
                "(jvp, jacfwd, vmap); a tracer and torch.autograd.functional's vectorize=True cannot see them"
            )
        if not query.numel():
            return unwritten(query)
        layout = _layout(call, query, key, _layouts(reuse_layouts))
        with forward_ad._set_fwd_grad_enabled(True), no_autocast(query.device.type):
            # Converted first: where `copy_` converts a tensor, it does not convert its tangent.
            exact = [x.detach().to(lse_dtype(x.dtype)) for x in (query, key, value, dq, dk, dv)]
            q, k, v = (forward_ad.make_dual(x, tangent) for x, tangent in zip(exact[:3], exact[3:]))
            both = eager.forward(q, k, v, call, spans, seed, layout, followed=True)
            pairs = [forward_ad.unpack_dual(x) for x in both]
        # Without a tangent no row sees a key.
        out, lse = (torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs)
        return out.to(query.dtype), lse


def _is_vectorized() -> bool:
    """Whether `torch.func` or the older vmap behind `is_grads_batched=True` runs this."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_VMAP) or torch._C._are_functorch_transforms_active()


_VMAP = torch._C._dispatch_key_parse("VmapMode")


def _tangents(
    ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, call: Call, reuse_layouts: bool
) -> tuple[Tensor, Tensor]:
    query, key, value, spans, seed = ctx.saved_tensors
    given = [torch.zeros_like(x) if t is None else t for x, t in ((query, dq), (key, dk), (value, dv))]
    return _Tangents.apply(query, key, value, *given, spans, seed, call, reuse_layouts)


@torch.library.custom_op("dilated_attention_pytorch::attend", mutates_args=())
def attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: str,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
    backend: str,
    pattern_type: str | None = None,
    sparsity_ratio: float = 1.0,
    block_size: int = 1,
    local_window_size: int | None = None,
    global_tokens: int | None = None,
    pattern_seed: int = 0,
    reuse_layouts: bool = True,
) -> tuple[Tensor, Tensor]:
    call = _problem(
        segment_lengths, dilation_rates, head_layout, is_causal, scale, dropout_p, head_offset, total_heads, allow_tf32,
        pattern_type, sparsity_ratio, block_size, local_window_size, global_tokens, pattern_seed,
    )  # fmt: skip
    refuse_tangents("a compiled or traced dilated attention", query, key, value)
    layout = _layout(call, query, key, _layouts(reuse_layouts))
    out, lse = kept(lambda: _forward(query, key, value, spans, seed, call, backend, NO_RESOURCES, layout))
    return out, lse


@torch.library.custom_op("dilated_attention_pytorch::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    head_layout: str,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
    backend: str,
    pattern_type: str | None = None,
    sparsity_ratio: float = 1.0,
    block_size: int = 1,
    local_window_size: int | None = None,
    global_tokens: int | None = None,
    pattern_seed: int = 0,
    reuse_layouts: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`."""
    call = _problem(
        segment_lengths, dilation_rates, head_layout, is_causal, scale, dropout_p, head_offset, total_heads, allow_tf32,
        pattern_type, sparsity_ratio, block_size, local_window_size, global_tokens, pattern_seed,
    )  # fmt: skip
    refuse_tangents("the gradient of dilated attention", grad_out, query, key, value)
    layout = _layout(call, query, key, _layouts(reuse_layouts))
    return _backward(grad_out, grad_lse, query, key, value, out, lse, spans, seed, call, backend, NO_RESOURCES, layout)


def _layout(call: Call, query: Tensor, key: Tensor, cache: Remembers | None) -> BlockLayout | None:
    return None if call.sparse is None or not query.numel() else layout_of(call, query, key, cache)


def _layouts(reuse: bool) -> Remembers | None:
    return get_global_pattern_cache() if reuse else None


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return unwritten(query)


def unwritten(query: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` as memory only: all of the result where there are no rows."""
    B, N, H, _ = query.shape
    lse = query.new_empty((B, H, N), dtype=lse_dtype(query.dtype)).transpose(1, 2)  # as by_head
    return query.new_empty(query.shape), lse


@attend_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, spans, seed, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, spans, seed)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, run: Any, rest: Sequence[Any], grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, spans, seed = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return None, None, None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    return run(grad_out, grad_lse, query, key, value, out, lse, spans, seed, *rest)


def _operator_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _gradients(ctx, attend_backward, ctx.settings, grad_out, grad_lse)
    return (*grads, None, None, *(None for _ in ctx.settings))


attend_op.register_autograd(_operator_backward, setup_context=_save)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    call: Call,
    backend: str,
    resources: Resources = NO_RESOURCES,
    layout: BlockLayout | None = None,
) -> tuple[Tensor, Tensor]:
    block_size = None if layout is None else layout.block_size
    backend = choose_backend(backend, query.device, query.dtype, query.shape[3], block_size)
    if not query.numel():
        return unwritten(query)
    with no_autocast(query.device.type):
        if backend == "reference":
            out, lse = reference_forward(query, key, value, call, spans, seed, layout)
            return out.to(query.dtype), by_head(lse.to(lse_dtype(query.dtype)))
        if backend == "triton":
            from dilated_attention_pytorch.kernels.triton import engine

            inputs = (query, key, value, call, spans, seed, layout, resources.cache, resources.pool)
            return resources.retrying(lambda: engine.forward(*inputs))
        if backend == "vendor":
            vendor.refuse(call, query.shape[3], seed)
        rest = (call, spans, seed, layout, resources, backend == "vendor")
        return resources.retrying(lambda: eager.forward(query, key, value, *rest))


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    call: Call,
    backend: str,
    resources: Resources = NO_RESOURCES,
    layout: BlockLayout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    block_size = None if layout is None else layout.block_size
    backend = choose_backend(backend, query.device, query.dtype, query.shape[3], block_size)
    if not query.numel():
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    with no_autocast(query.device.type):
        if backend == "reference":
            grads = reference_backward(grad_out, grad_lse, query, key, value, call, spans, seed, layout)
            return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)
        if backend == "triton":
            from dilated_attention_pytorch.kernels.triton import engine

            inputs = (
                grad_out, grad_lse, query, key, value, out, lse, call, spans, seed, layout, resources.cache,
                resources.pool,
            )  # fmt: skip
            return resources.retrying(lambda: engine.backward(*inputs))
        if backend == "vendor":
            vendor.refuse(call, query.shape[3], seed, grad_lse)
        rest = (call, spans, seed, layout, resources, backend == "vendor")
        return resources.retrying(lambda: eager.backward(grad_out, grad_lse, query, key, value, out, lse, *rest))


# For calls that another autograd function joins from several: without autograd of their own.
forward, backward = _forward, _backward


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast has done its work in `functional`; inside, it would turn float32 sums into low-precision ones."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _settings(call: Call, backend: str, reuse_layouts: bool) -> tuple[Any, ...]:
    """A problem as the operators take it: in numbers and words."""
    spec, sparse = call.spec, call.sparse
    assert call.table is None, "a rank's share of a call is not an operator's"
    settings = (
        spec.segment_lengths, spec.dilation_rates, spec.head_layout, call.is_causal, call.scale,
        call.dropout_p, call.head_offset, call.total_heads, call.allow_tf32, backend,
    )  # fmt: skip
    if sparse is None:
        return settings
    return (
        *settings, sparse.pattern_type, sparse.sparsity_ratio, sparse.block_size, sparse.local_window_size,
        sparse.global_tokens, sparse.seed, reuse_layouts,
    )  # fmt: skip


def _problem(segment_lengths: Sequence[int], dilation_rates: Sequence[int], *settings: Any) -> Call:
    return _remembered_problem(tuple(segment_lengths), tuple(dilation_rates), *settings)


@functools.lru_cache(maxsize=1024)
def _remembered_problem(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_layout: HeadLayout,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    head_offset: int,
    total_heads: int | None,
    allow_tf32: bool | None,
    pattern_type: PatternType | None,
    sparsity_ratio: float,
    block_size: int,
    local_window_size: int | None,
    global_tokens: int | None,
    pattern_seed: int,
) -> Call:
    sparse = None
    if pattern_type is not None:
        sparse = SparsePatternConfig(
            pattern_type, sparsity_ratio, block_size, local_window_size, global_tokens, pattern_seed
        )
    return Call(
        spec=DilatedSpec.of(segment_lengths, dilation_rates, head_layout),
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        head_offset=head_offset,
        total_heads=total_heads,
        allow_tf32=allow_tf32,
        sparse=sparse,
    )
