"""The one operator behind every attention here: forward over branches, backward against the merged out and lse.

It is opaque to autograd, `torch.compile`, export and checkpointing, and saves q, k, v, out and lse once, for any number
of branches.

`functional` calls `attend`, which has three ways to the same code:

- a plain eager call runs the autograd function `_Attend`, or without gradients `partial`. Going through the dispatcher
  instead would take several times as long as a short sequence takes on a GPU;
- tracers, tensor subclasses and dispatch modes see the registered operator `attend_op`;
- transforms of `torch.func` see `_AttendTransformed`, an autograd function with the rules that they need.

There are first derivatives only: reverse mode in the engine of the call, forward mode in PyTorch's operators on every
device.
"""

# No postponed annotations: torch.library reads the types to make the operators' schemas.
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilated_attention_pytorch.core import replay
from dilated_attention_pytorch.core.block_layout import layout_of
from dilated_attention_pytorch.core.call import Call, Grads, Inputs, Partial, Prepared, Saved, wide_dtype
from dilated_attention_pytorch.core.modes import is_plain, no_second_derivatives, refuse_tangents
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.kernels.eager import Eager
from dilated_attention_pytorch.kernels.engine import engine_for

Result = TypeVar("Result")


def attend(
    call: Call, inputs: Inputs, resources: Resources | None, *, plain: bool = True, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`out`, or `(out, lse)`, of a call that `functional` has checked; `plain` is what `is_plain` returned.

    The registered operator is a pure function of its arguments, so traced calls share block layouts only; with
    `resources=None` they always do.
    """
    tensors = query, key, value, _, _ = inputs[:5]
    if not plain or resources is None:
        reuse_layouts = resources is None or resources.cache is not None
        if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
            both = _untraced(_AttendTransformed)(*tensors, call, reuse_layouts)
        else:
            refuse_tangents("a compiled or traced dilated attention", *tensors[:3])
            both = attend_op(*tensors, *call.encode(), reuse_layouts)
    elif forward_ad._current_level >= 0:
        return _untraced(_Attend)(*tensors, call, inputs.prepared, resources, return_lse)
    elif torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Attend.apply(*tensors, call, inputs.prepared, resources, return_lse)
    else:
        both = partial(call, with_layout(call, inputs, resources), resources)
    return both if return_lse else both[0]


class _Attend(torch.autograd.Function):
    """The autograd function of plain calls."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any, call: Call,
        prepared: Prepared | None, resources: Resources, return_lse: bool,
    ) -> Any:  # fmt: skip
        inputs = with_layout(call, Inputs(query, key, value, spans, seed, None, prepared), resources)
        if replay.is_active():
            out, lse = replay.replayed(partial, call, inputs, resources)
        else:
            out, lse = partial(call, inputs, resources)
        ctx.call, ctx.prepared, ctx.resources, ctx.return_lse = call, prepared, resources, return_lse
        ctx.layout = inputs.layout  # backward must see the tiles that forward saw
        ctx.save_for_backward(query, key, value, spans, seed, out, lse)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(query, key, value, spans, seed)
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0 or _is_vectorized():
            # Something follows the gradient itself: create_graph, forward mode, or vmap.
            rest = ctx.call, ctx.resources.cache is not None
            grads = _saved_gradients(ctx, _Gradients.apply, grad_out, grad_lse, *rest)
        else:
            grads = _saved_gradients(ctx, _plain_gradients, grad_out, grad_lse, ctx)
        return *grads, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *rest: Any) -> Any:
        tangents = _tangents(ctx, dq, dk, dv, ctx.call, ctx.resources.cache is not None)
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
        raise no_second_derivatives("dilated attention")

    jvp = backward


class _AttendTransformed(_OneByOne):
    """The operator's derivatives for `torch.func`."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any, call: Call, reuse_layouts: bool
    ) -> tuple[Tensor, Tensor]:
        return attend_op(query, key, value, spans, seed, *call.encode(), reuse_layouts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.call, ctx.reuse_layouts = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        grads = _saved_gradients(ctx, _Gradients.apply, grad_out, grad_lse, ctx.call, ctx.reuse_layouts)
        return *grads, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        return _tangents(ctx, dq, dk, dv, ctx.call, ctx.reuse_layouts)


@functools.cache  # made when first used: it imports the compiler
def _untraced(function: type[torch.autograd.Function]) -> Any:
    """`function.apply`, eager even within compiled code: forward mode cannot be traced."""
    return torch.compiler.disable(function.apply)


class _Gradients(_OneByOne):
    """`(dq, dk, dv)` where something other than a plain backward asks for them."""

    @staticmethod
    def forward(
        grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any, out: Tensor,
        lse: Tensor, call: Call, reuse_layouts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        saved = query, key, value, spans, seed, out, lse
        return attend_backward(grad_out, grad_lse, *saved, *call.encode(), reuse_layouts)


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
        inputs = with_layout(call, Inputs(query, key, value, spans, seed), _layouts(reuse_layouts))
        with forward_ad._set_fwd_grad_enabled(True), no_autocast(query.device.type):
            # Converted first: where `copy_` converts a tensor, it does not convert its tangent.
            exact = [x.detach().to(wide_dtype(x.dtype)) for x in (query, key, value, dq, dk, dv)]
            q, k, v = (forward_ad.make_dual(x, tangent) for x, tangent in zip(exact[:3], exact[3:]))
            both = Eager().partial(call, inputs._replace(query=q, key=k, value=v), followed=True)
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
    call: str,
    scale: float | None,
    dropout_p: float,
    kept_fraction: float,
    reuse_layouts: bool,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of an encoded call."""
    refuse_tangents("a compiled or traced dilated attention", query, key, value)
    decoded = Call.decode(call, scale, dropout_p, kept_fraction)
    inputs = with_layout(decoded, Inputs(query, key, value, spans, seed), _layouts(reuse_layouts))
    out, lse = replay.replayed(partial, decoded, inputs, NO_RESOURCES)
    return out, lse


@torch.library.custom_op("dilated_attention_pytorch::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    call: str,
    scale: float | None,
    dropout_p: float,
    kept_fraction: float,
    reuse_layouts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`."""
    refuse_tangents("the gradient of dilated attention", grad_out, query, key, value)
    decoded = Call.decode(call, scale, dropout_p, kept_fraction)
    inputs = with_layout(decoded, Inputs(query, key, value, spans, seed), _layouts(reuse_layouts))
    dq, dk, dv = gradients(decoded, Saved(inputs, out, lse), grad_out, grad_lse, NO_RESOURCES)
    return dq, dk, dv


def with_layout(call: Call, inputs: Inputs, resources: Resources) -> Inputs:
    """The inputs with the tiles that the call keeps."""
    if call.sparse is None or not inputs.query.numel():
        return inputs
    return inputs._replace(layout=layout_of(call, inputs.query, inputs.key, resources, inputs.spans))


def _layouts(reuse: bool) -> Resources:
    return Resources(get_global_pattern_cache()) if reuse else NO_RESOURCES


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = unwritten(query)
    return out, lse


def unwritten(query: Tensor) -> Partial:
    """`(out, lse)` as uninitialised memory, which is the whole result if there are no rows."""
    B, N, H, _ = query.shape
    lse = query.new_empty((B, H, N), dtype=wide_dtype(query.dtype)).transpose(1, 2)  # as by_head
    return Partial(query.new_empty(query.shape), lse)


@attend_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.encoded = inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _saved_gradients(
    ctx: Any, run: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return None, None, None
    tensors = ctx.saved_tensors
    grad_out = torch.zeros_like(tensors[-2]) if grad_out is None else grad_out
    return run(grad_out, grad_lse, *tensors, *rest)


def _plain_gradients(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, spans: Any, seed: Any,
    out: Tensor, lse: Tensor, ctx: Any,
) -> Grads:  # fmt: skip
    saved = Saved(Inputs(query, key, value, spans, seed, ctx.layout, ctx.prepared), out, lse)
    return gradients(ctx.call, saved, grad_out, grad_lse, ctx.resources)


def _operator_backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _saved_gradients(ctx, attend_backward, grad_out, grad_lse, *ctx.encoded)
    return *grads, None, None, *(None for _ in ctx.encoded)


attend_op.register_autograd(_operator_backward, setup_context=_save)


def partial(call: Call, inputs: Inputs, resources: Resources = NO_RESOURCES) -> Partial:
    """`(out, lse)` of a call by its engine, without autograd: for calls whose results another function merges."""
    query = inputs.query
    engine = engine_for(call, inputs)
    if not query.numel():
        return unwritten(query)
    if resources.pool is None and not torch._C._is_any_autocast_enabled():
        return engine.partial(call, inputs, resources)
    return _guarded(lambda: engine.partial(call, inputs, resources), query, resources)


def gradients(
    call: Call, saved: Saved, grad_out: Tensor, grad_lse: Tensor | None, resources: Resources = NO_RESOURCES
) -> Grads:
    """The gradients of a call by its engine, against the merged out and lse."""
    out = saved.out
    engine = engine_for(call, saved.inputs)
    if not out.numel():
        return Grads(*(torch.empty_like(x) for x in saved.inputs[:3]))
    if resources.pool is None and not torch._C._is_any_autocast_enabled():
        return engine.gradients(call, saved, grad_out, grad_lse, resources)
    return _guarded(lambda: engine.gradients(call, saved, grad_out, grad_lse, resources), out, resources)


def _guarded(run: Callable[[], Result], like: Tensor, resources: Resources) -> Result:
    """`run()` without autocast; if memory runs out, once more after freeing the pool's idle buffers."""
    with no_autocast(like.device.type):
        return run() if resources.pool is None else resources.pool.retrying(run)


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast has done its work in `functional`; inside, it would turn float32 sums into low-precision ones."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NO_CONTEXT


_NO_CONTEXT = nullcontext()
