"""Locks that survive `fork`: a child never finds one held, nor what it guards half changed."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet


class Guarded:
    """An object whose state is guarded by `_lock`, which is reentrant: a finalizer may run while it is held.

    Before a fork every such lock is acquired, so that no other thread is in the middle of a change; the child gets new
    locks. A thread that holds one lock may wait only for one of a higher `lock_order`.
    """

    def __init__(self, lock_order: int = 1) -> None:
        self._lock_order = lock_order
        self._lock = threading.RLock()
        _guarded.add(self)


_guarded: WeakSet[Guarded] = WeakSet()
_held: list[Any] = []


def _before_fork() -> None:
    for one in sorted(_guarded, key=lambda one: one._lock_order):
        lock = one._lock
        lock.acquire()
        _held.append(lock)


def _in_parent() -> None:
    while _held:
        _held.pop().release()


def _in_child() -> None:
    _held.clear()
    for one in list(_guarded):
        one._lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
