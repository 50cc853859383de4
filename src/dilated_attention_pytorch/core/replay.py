"""Attention results that a checkpointed part of a model replays, because they cost the most to compute again.

`torch.utils.checkpoint` keeps a part's inputs and runs the part again in backward. Attention passes its computation to
`replayed`: within `Replay.recording()` the result is computed and stored, within `Replay.replaying()` the stored
results are returned in the same order. PyTorch's selective checkpointing does the same through a dispatch mode, which
slows every operator of the part, sees neither compiled layers nor messages between ranks, and keeps results on the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Results = tuple[Tensor, ...]
_thread = threading.local()  # backward runs in threads of its own


def replayed(compute: Callable[..., Results], *arguments: Any) -> Results:
    """`compute(*arguments)`, or its result from the first run of this part.

    >>> import torch
    >>> replay = Replay()
    >>> with replay.recording():
    ...     first = replayed(lambda: (torch.tensor(1.0),))
    >>> with replay.replaying():
    ...     replayed(lambda: (torch.tensor(2.0),))
    (tensor(1.),)
    """
    active = getattr(_thread, "active", None)
    return compute(*arguments) if active is None else active(lambda: compute(*arguments))


def is_active() -> bool:
    """Whether a part is recorded or replayed on this thread."""
    return getattr(_thread, "active", None) is not None


class Replay:
    """The stored results of one part; `pack` and `unpack` convert tensors for storage, as autograd's hooks do."""

    def __init__(
        self, pack: Callable[[Tensor], Any] = Tensor.detach, unpack: Callable[[Any], Tensor] = Tensor.detach
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._packed: list[tuple[Any, ...]] = []

    def recording(self) -> _Active:
        """For the first run of the part."""
        return _Active(lambda: self._record)

    def replaying(self) -> _Active:
        """For every later run, which starts again from the first result."""
        return _Active(lambda: self._play(iter(self._packed)))

    def _record(self, compute: Callable[[], Results]) -> Results:
        results = compute()
        self._packed.append(tuple(self._pack(x.detach()) for x in results))
        return results

    def _play(self, packed: Iterator[tuple[Any, ...]]) -> Callable[[Callable[[], Results]], Results]:
        # Detached: autograd's graph of a run must not stay on the stored tensor.
        return lambda _: tuple(self._unpack(x).detach() for x in next(packed))


class _Active:
    """A context that can be entered again, as a second backward of a retained graph does."""

    def __init__(self, begin: Callable[[], Callable[[Callable[[], Results]], Results]]) -> None:
        self._begin = begin
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(getattr(_thread, "active", None))
        _thread.active = self._begin()

    def __exit__(self, *_: object) -> None:
        _thread.active = self._before.pop()
