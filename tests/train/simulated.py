"""A training step on tensors without memory: what a GPU would hold is counted, of models of any size."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch import LongNetLM, functional
from dilated_attention_pytorch.core.pool import WorkspacePool, reset_global_memory_pool
from dilated_attention_pytorch.core.replay import replayed
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train import cross_entropy
from dilated_attention_pytorch.train.memory import MemoryOptions, loss, prepare


class Count(TorchDispatchMode):
    """Bytes of all storages that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.shares = 1
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes() * self.shares
        if key not in self.sizes:
            self.sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made meanwhile lies in other memory."""
        self.shares = 0
        try:
            yield
        finally:
            self.shares = 1

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class _Attend(torch.autograd.Function):
    """What the operator saves and returns, without its kernels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = query.shape[:3]
        out, lse = replayed(lambda: (torch.empty_like(query), query.new_empty(rows, dtype=torch.float32)))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        _ = torch.empty_like(lse)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_layer_norm = F.layer_norm


def _layer_norm_of_cuda(x: Tensor, shape: Any, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """CUDA's autocast lets it run in float32; the CPU's does not."""
    if not torch.is_autocast_enabled("cpu"):
        return _layer_norm(x, shape, weight, bias, eps)
    with torch.autocast("cpu", enabled=False):
        return _layer_norm(x.float(), shape, weight.float(), None if bias is None else bias.float(), eps)


def _rms_norm_of_cuda(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    """Fused, as a layer norm is; the CPU's is several operators."""
    return _layer_norm_of_cuda(x, shape, weight, None, eps)


def _cross_entropy_of_cuda(logits: Tensor, *given: Any, **settings: Any) -> Tensor:
    """A kernel, which makes nothing else."""
    return logits.new_empty(len(logits), dtype=torch.float32)


@contextmanager
def as_on_a_gpu(count: Count, patch: Any) -> Iterator[None]:
    checkout = WorkspacePool.checkout

    def on_the_host(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        with count.elsewhere():
            buffer = checkout(self, *args, **kwargs)
        return buffer

    with patch.context() as changes, torch.device("cpu"):
        changes.setattr(functional, "attend", lambda call, inputs, *rest, **settings: _Attend.apply(*inputs[:3]))
        changes.setattr(F, "layer_norm", _layer_norm_of_cuda)
        changes.setattr(F, "rms_norm", _rms_norm_of_cuda)
        changes.setattr(cross_entropy, "cross_entropy_", _cross_entropy_of_cuda)
        changes.setattr(WorkspacePool, "checkout", on_the_host)
        reset_global_memory_pool()  # whose buffers are real ones
        yield
    reset_global_memory_pool()


def simulate(config: ModelConfig, tokens: int, options: MemoryOptions, patch: Any) -> int:
    """The peak of a step's forward and backward, weights included, beside no state of an optimizer."""
    count = Count()
    with FakeTensorMode(), count, as_on_a_gpu(count, patch):
        before = torch.get_default_dtype()
        # Fake parameters cannot be converted, so those of bfloat16 are made as such.
        torch.set_default_dtype(torch.bfloat16 if options.parameters == "bf16" else torch.float32)
        try:
            model = LongNetLM(config)
        finally:
            torch.set_default_dtype(before)
        patch.setattr(model, "bfloat16", lambda: model)
        prepare(model, options)
        batch = torch.zeros(1, tokens + 1, dtype=torch.int64)
        loss(model, batch[:, :-1], batch[:, 1:], options).backward()
    return count.peak
