"""What `enable_profiling` counts: amounts by event, such as the seconds and bytes of loans."""

from __future__ import annotations

from typing import Any

from dilated_attention_pytorch.core.guarded import Guarded


class Profile(Guarded):
    """Totals by event and name; a copy starts empty.

    >>> profile = Profile()
    >>> for size in (100, 28):
    ...     profile.add("loans", reused=1, bytes=size)
    >>> profile.totals()
    {'loans': {'reused': 2, 'bytes': 128}}
    """

    def __init__(self) -> None:
        super().__init__(lock_order=2)  # a cache that is reset holds its own lock
        self._totals: dict[str, dict[str, float]] = {}

    def __reduce__(self) -> Any:
        return Profile, ()

    def add(self, event: str, **amounts: float) -> None:
        with self._lock:
            totals = self._totals.setdefault(event, dict.fromkeys(amounts, 0))
            for name, amount in amounts.items():
                totals[name] = totals.get(name, 0) + amount

    def totals(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {event: dict(amounts) for event, amounts in self._totals.items()}

    def clear(self) -> None:
        with self._lock:
            self._totals.clear()
