"""What calls may share, a cache and a pool, and when that pays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dilated_attention_pytorch.core.memory_pool import Take, WorkspacePool
from dilated_attention_pytorch.core.pattern_cache import PatternCache

Result = TypeVar("Result")

# From how many tokens on a call gains by them, as `bench cache` and `bench pool` measure: packed batches by the cache
# at every length measured, low precision by the pool from 2,048 tokens on, but what it holds is not there for others.
CACHE_FROM_TOKENS = 1024
POOL_FROM_TOKENS = 8192


class Resources(NamedTuple):
    """The cache and the pool of a call; None is off. They change what it takes, never what it gives."""

    cache: PatternCache | None = None
    pool: WorkspacePool | None = None

    def workspaces(self) -> AbstractContextManager[Take]:
        """`take(shape, dtype=, device=)`: workspaces that must not be used after the block, uninitialised."""
        return _from_allocator if self.pool is None else self.pool.lease()

    def retrying(self, run: Callable[[], Result]) -> Result:
        """`run()`, which has no side effects; where memory runs out, once more after freeing what the pool can."""
        return run() if self.pool is None else self.pool.retrying(run)


FROM_ALLOCATOR: Take = torch.empty  # type: ignore[assignment]
_from_allocator: AbstractContextManager[Take] = nullcontext(FROM_ALLOCATOR)

NO_RESOURCES = Resources()


def is_plain(*tensors: Tensor) -> bool:
    """Whether nothing but autograd watches a call of these tensors; what is traced must not find things remembered."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
        and tensors[0].device.type != "meta"
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )
