"""What threads share: the lock of the shared tables and pools, and the counters of `enable_profiling`."""

from __future__ import annotations

import os
import threading
from typing import Any

# One lock for all shared state, held for short steps only, so that no order of locks can be wrong. It is reentrant,
# because a finalizer may run while it is held. A fork waits for it: a child never finds state half changed.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class Profile:
    """Totals by event and name; a copy starts empty.

    >>> profile = Profile()
    >>> for size in (100, 28):
    ...     profile.add("loans", reused=1, bytes=size)
    >>> profile.totals()
    {'loans': {'reused': 2, 'bytes': 128}}
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, float]] = {}

    def __reduce__(self) -> Any:
        return Profile, ()

    def add(self, event: str, **amounts: float) -> None:
        with LOCK:
            totals = self._totals.setdefault(event, dict.fromkeys(amounts, 0))
            for name, amount in amounts.items():
                totals[name] = totals.get(name, 0) + amount

    def totals(self) -> dict[str, dict[str, float]]:
        with LOCK:
            return {event: dict(amounts) for event, amounts in self._totals.items()}

    def clear(self) -> None:
        with LOCK:
            self._totals.clear()
