"""What calls may share, a cache and a pool, and the shortest sequences for which they help."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from dilated_attention_pytorch.core.entries import Value
from dilated_attention_pytorch.core.plans import PatternCache
from dilated_attention_pytorch.core.pool import Loans, WorkspacePool
from dilated_attention_pytorch.core.profile import Profile

# Factories enable them from these lengths on. As `bench cache` and `bench pool` measure, the cache helps packed batches
# of every length, and the pool helps low precision from 2,048 tokens on; but what a pool holds, nothing else can use.
CACHE_FROM_TOKENS = 1024
POOL_FROM_TOKENS = 8192


class Resources(NamedTuple):
    """The cache and the pool of a call, and the profile of its module; None is off.

    They change the cost of a call, never its result. The profile notes lookups, loans and messages.
    """

    cache: PatternCache | None = None
    pool: WorkspacePool | None = None
    profile: Profile | None = None

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value]) -> Value:
        """`make()`, from the cache if there is one; see `PatternCache.remember`."""
        return make() if self.cache is None else self.cache.remember(kind, key, make, self.profile)

    def workspaces(self) -> Loans:
        """`take(shape, dtype=, device=)`: uninitialised workspaces, which must not be used after the block."""
        return FROM_ALLOCATOR if self.pool is None else self.pool.lease(profile=self.profile)

    def message_buffers(self) -> Loans:
        """As `workspaces`, with `take.give_back`; if the block fails, messages under way keep their buffers."""
        return FROM_ALLOCATOR if self.pool is None else self.pool.lease(keep_after_error=False, profile=self.profile)


FROM_ALLOCATOR = Loans()
NO_RESOURCES = Resources()
