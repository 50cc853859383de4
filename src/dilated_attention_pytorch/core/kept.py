"""Results that a checkpointed part keeps: what costs most to compute again is handed out again instead.

`torch.utils.checkpoint` keeps a part's inputs and runs it once more in backward. Attention asks `kept` for its result:
within `KeptResults.keeping()` it is computed and remembered, within `KeptResults.giving()` the remembered one is
returned, in the same order. PyTorch's own selective checkpointing does this for operators that a dispatch mode sees: it
slows every operator of the part, sees into no compiled layer and no exchange between ranks, and keeps on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Results = tuple[Tensor, ...]
_thread = threading.local()  # backward runs in threads of its own


def kept(compute: Callable[[], Results]) -> Results:
    """`compute()`, or what it gave when this part ran first.

    >>> import torch
    >>> results = KeptResults()
    >>> with results.keeping():
    ...     first = kept(lambda: (torch.tensor(1.0),))
    >>> with results.giving():
    ...     kept(lambda: (torch.tensor(2.0),))
    (tensor(1.),)
    """
    active = getattr(_thread, "active", None)
    return compute() if active is None else active(compute)


class KeptResults:
    """The kept results of one part; `pack` and `unpack` say how a tensor lies meanwhile, as autograd's hooks do."""

    def __init__(
        self, pack: Callable[[Tensor], Any] = Tensor.detach, unpack: Callable[[Any], Tensor] = Tensor.detach
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._packed: list[tuple[Any, ...]] = []

    def keeping(self) -> _Active:
        """While the part runs first."""
        return _Active(lambda: self._keep)

    def giving(self) -> _Active:
        """While it runs again; each time from its first result on."""
        return _Active(lambda: self._give(iter(self._packed)))

    def _keep(self, compute: Callable[[], Results]) -> Results:
        results = compute()
        self._packed.append(tuple(self._pack(x.detach()) for x in results))
        return results

    def _give(self, packed: Iterator[tuple[Any, ...]]) -> Callable[[Callable[[], Results]], Results]:
        # Detached: what autograd hangs on a result must not stay on the kept one.
        return lambda _: tuple(self._unpack(x).detach() for x in next(packed))


class _Active:
    """A context that can be entered again, which a second backward of a retained graph does."""

    def __init__(self, begin: Callable[[], Callable[[Callable[[], Results]], Results]]) -> None:
        self._begin = begin
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(getattr(_thread, "active", None))
        _thread.active = self._begin()

    def __exit__(self, *_: object) -> None:
        _thread.active = self._before.pop()
