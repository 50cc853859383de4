"""What backward recomputes: layers, layers without their attention, or tiles of feed-forward networks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dilated_attention_pytorch.core.checks import check_whole
from dilated_attention_pytorch.core.modes import first_derivatives_only, refuse_tangents
from dilated_attention_pytorch.core.replay import Replay
from dilated_attention_pytorch.nn.replacement import replace_parts
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.train.cross_entropy import slices
from dilated_attention_pytorch.train.offload import Offload

Compute = Callable[[Tensor], Tensor]
_keep_operator = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.dilated_attention_pytorch.attend.default]
)


class Recomputation:
    """Runs a layer so that autograd keeps its input, and backward recomputes the rest.

    With `keep_attention`, autograd also keeps the results of its attention, `out` and `lse`, and attention runs once.
    With `offload`, host memory holds what is kept. For `model.gradient_checkpointing_enable(run=...)`.
    """

    def __init__(self, *, keep_attention: bool = False, offload: Offload | None = None) -> None:
        self.keep_attention = keep_attention
        self.offload = offload

    def __call__(self, layer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        hooks: AbstractContextManager[Any] = nullcontext()
        replay = Replay()
        if self.offload is not None:
            group = self.offload.group()
            # Around the checkpoint: within it, its own hooks see what the layer saves, and these only its inputs.
            hooks = saved_tensors_hooks(*group.hooks)
            replay = Replay(*group.hooks)
        if self.keep_attention:
            traced = torch.compiler.is_compiling()  # the whole model is compiled: only operators are visible
            kwargs["context_fn"] = _keep_operator if traced else lambda: (replay.recording(), replay.replaying())
        with hooks:
            return checkpoint(layer, *args, use_reentrant=False, **kwargs)


class TiledFeedForward(FeedForward):
    """A feed-forward network that computes `rows` rows at a time, and recomputes them in backward.

    It takes over the modules of `plain`, under the same names. Beside input and output it needs O(rows) memory. The
    gradients of parameters are summed over tiles in float32.

    >>> plain = FeedForward(8, 32)
    >>> x = torch.randn(2, 10, 8)
    >>> torch.testing.assert_close(TiledFeedForward(plain, rows=3)(x), plain(x))
    """

    def __init__(self, plain: FeedForward, rows: int) -> None:
        nn.Module.__init__(self)
        for name, part in plain.named_children():
            self.add_module(name, part)
        self.activation = plain.activation
        self.rows = check_whole("rows", rows, least=1)
        self.compiled_by: tuple[str, str | None] | None = None

    def compile_tiles(self, backend: str, mode: str | None) -> None:
        """Compile what a tile computes, not the loop over tiles."""
        self.compiled_by = backend, mode

    def forward(self, x: Tensor) -> Tensor:
        return _run_in_tiles(self, x)

    def extra_repr(self) -> str:
        return f"rows={self.rows}"


@functools.lru_cache(maxsize=8)
def _compiled_tile(backend: str, mode: str | None) -> Callable[[FeedForward, Tensor], Tensor]:
    return torch.compile(FeedForward.forward, backend=backend, mode=mode)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_in_tiles(module: TiledFeedForward, x: Tensor) -> Tensor:
    forward = FeedForward.forward if module.compiled_by is None else _compiled_tile(*module.compiled_by)
    compute = functools.partial(forward, module)
    refuse_tangents("a feed-forward part in tiles", x, *module.parameters())
    flat = x.flatten(0, -2)
    if flat.requires_grad:
        flat = _Keep.apply(flat)
    parameters = [p for p in module.parameters() if p.requires_grad]
    out = _Tiles.apply(compute, module.rows, _draws(module), flat, *parameters)
    return out.unflatten(0, x.shape[:-1])


class _Keep(torch.autograd.Function):
    """The identity, which saves its input before anything is computed from it.

    A checkpointed layer that runs again stops at the last tensor that it has to save. An autograd function saves after
    its forward; this one ends before the tiles begin, so that they do not run for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, rows: int, draws: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.compute, ctx.rows, ctx.parameters = compute, rows, parameters
        if x.requires_grad:
            ctx.keeper = x.grad_fn
        else:
            ctx.save_for_backward(x)
        device_type = x.device.type
        ctx.autocast = {
            "device_type": device_type,
            "dtype": torch.get_autocast_dtype(device_type),
            "enabled": torch.is_autocast_enabled(device_type),
            "cache_enabled": False,  # a cached cast would belong to the graph of the first tile
        }
        on_gpu = torch.cuda.get_rng_state(x.device) if draws and x.is_cuda else None
        ctx.random = (torch.get_rng_state(), on_gpu) if draws else None
        out = None
        with torch.autocast(**ctx.autocast):
            for tile in slices(len(x), rows):
                part = compute(x.detach()[tile])
                if out is None:
                    out = part.new_empty(len(x), *part.shape[1:])
                out[tile] = part
        assert out is not None
        return out

    @staticmethod
    @first_derivatives_only("a tiled feed-forward network (mlp_tile)")
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.keeper.saved_tensors if ctx.needs_input_grad[3] else ctx.saved_tensors
        x = x.detach()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[3] else None
        totals: list[Tensor | None] = [None] * len(ctx.parameters)
        with _replaying(ctx.random, x.device):
            for tile in slices(len(x), ctx.rows):
                part = x[tile].requires_grad_(grad_x is not None)
                with torch.enable_grad(), torch.autocast(**ctx.autocast):
                    out = ctx.compute(part)
                wanted = ctx.parameters if grad_x is None else (part, *ctx.parameters)
                found = list(torch.autograd.grad(out, wanted, grad[tile], allow_unused=True))
                if grad_x is not None:
                    grad_x[tile] = found.pop(0)
                for i, gradient in enumerate(found):
                    if gradient is None:
                        continue
                    exact = torch.promote_types(gradient.dtype, torch.float32)
                    total = totals[i]
                    totals[i] = gradient.to(exact) if total is None else total.add_(gradient)
        gradients = (None if t is None else t.to(p.dtype) for t, p in zip(totals, ctx.parameters))
        return None, None, None, grad_x, *gradients


def _draws(module: nn.Module) -> bool:
    """Whether a dropout module draws random numbers."""
    return any(part.training and getattr(part, "p", 0.0) > 0.0 for part in module.modules())


@contextmanager
def _replaying(state: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a remembered state within the block, and restore the current state after it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=state is not None):
        if state is not None:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], device)
        yield


def tile_feed_forwards(model: nn.Module, rows: int) -> int:
    """Replace every `FeedForward` of a model by a `TiledFeedForward`; returns their number."""
    found = sum(type(part) is FeedForward for part in model.modules())
    replace_parts(model, lambda part: TiledFeedForward(part, rows) if type(part) is FeedForward else part)
    return found
