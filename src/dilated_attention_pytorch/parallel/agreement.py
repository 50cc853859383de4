"""Agreement between ranks: all ranks of a group make the same calls, or all of them raise at once.

Each rank records the calls that it makes. Ranks compare a call that is new to them through the group's store before
they go on. A call that was agreed before costs no message: the rank only records it, and a thread compares the records
of neighbouring ranks twice a second, also while the rank waits for rows. If records differ, or a rank fails within a
call, the group is closed: the reason goes to the store, waiting ranks stop waiting, and every later call raises.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # some builds of PyTorch have none
    from torch.distributed import ProcessGroup

Description = dict[str, str]
"""A call in words, by name of setting."""

MOST_KNOWN = 1024  # calls that are remembered as agreed
_LOOK_EVERY = 0.5  # seconds
_COMPARABLE = 4096  # the most calls that two ranks may be apart
_SHOWN = 256  # the most calls back that a difference is explained
_MOST_SHOWN = 400  # characters of a setting
_AGREEING = 0  # the entry of a call that is being agreed, whatever it is


class State(NamedTuple):
    """What a rank shows of its record: the number of entries, their digest, the last ones, and what it waits for."""

    entries: int
    digest: int
    last: list[int]
    waiting: Description | None


class Agreement:
    """One rank's record of the calls on a group, and what it knows of the other ranks' records."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)  # so that a destroyed group is freed
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._known: dict[int, Description] = {}
        self._count = self._digest = self._exchanges = self._blocked = 0
        self._entries: deque[tuple[int, int]] = deque(maxlen=_COMPARABLE)  # (digest of all entries so far, entry)
        self._waiting: Description | None = None
        self._closed: tuple[str, str] | None = None
        self._shown: State | None = None
        self._aborted = False
        self._lock = threading.RLock()
        device = torch.device("cpu") if torch.device("cpu") in group._device_types else group._device_types[0]
        # A new group may be made on an old store. NCCL wants every rank to take part in the first message anyway.
        nonce = torch.tensor([int.from_bytes(os.urandom(7), "big")], device=device)
        dist.broadcast(nonce, group=group, group_src=0)
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._store: Any = dist.distributed_c10d.PrefixStore(f"dilated_attention/{nonce.item():x}", store)
        self._timeout = store.timeout.total_seconds()
        _watch(self)

    def write(self, entry: int, waiting: Description | None = None) -> None:
        """Record a call, by its digest."""
        self.check()
        with self._lock:
            self._waiting = waiting
            self._count += 1
            self._digest = _digest(f"{self._digest} {entry}")
            self._entries.append((self._digest, entry))

    def agree(
        self, described: Description, numbers: Sequence[int], error: Exception | None
    ) -> tuple[tuple[int, ...], ...]:
        """Every rank's numbers, once all ranks are known to make this call; otherwise an error on every rank.

        `error` is what this rank found wrong with its own call. It is raised here, after the others know of it.
        """
        try:
            self.write(_AGREEING, described if error is None else {"error": _told(error)})
            said = self.exchange([-1 if error is not None else digest_of(described), *numbers])
            if any(digest == -1 for digest, *_ in said):
                errors = self.exchange("" if error is None else _told(error))
                raise ValueError(_cannot({rank: text for rank, text in enumerate(errors) if text}))
            if len({digest for digest, *_ in said}) > 1:
                raise ValueError(_difference(dict(enumerate(self.exchange(described)))))
        except (RuntimeError, ValueError):
            if error is not None:
                raise error from None
            raise
        return tuple(tuple(theirs) for _, *theirs in said)

    def know(self, described: Description) -> None:
        """Remember a call that all ranks have agreed on, so that it is not compared again."""
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()  # on every rank at the same call
        self._known[digest_of(described)] = described

    def knows(self, entry: int) -> bool:
        return entry in self._known

    def exchange(self, mine: object) -> list[Any]:
        """Every rank's value. It goes through the store, so that no device is waited for and any rank may give up."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        with self.told(alike=(Exception,)):
            self._store.set(f"{number}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                keys = [f"{number}/{rank}" for rank in range(self.size)]
                self._await(keys)
                table = "[" + ",".join(value.decode() for value in self._read(keys)) + "]"
                self._store.set(f"{number}/all", table)
                if number:
                    self._store.delete_key(f"{number - 1}/all")  # every rank is past it
            else:
                self._await([f"{number}/all"])
                table = self._store.get(f"{number}/all").decode()
            self._store.delete_key(f"{number}/{self.rank}")
        return list(json.loads(table))

    def _await(self, keys: list[str]) -> None:
        start, pause, looked = time.monotonic(), 5e-5, time.monotonic()
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            now = time.monotonic()
            if now - looked > _LOOK_EVERY:
                self.look()
                self.check()
                looked = now
            if now - start > self._timeout:
                raise RuntimeError(
                    f"waited {self._timeout:.0f} s, but not all {self.size} ranks of the group make this call: "
                    f"{self._waiting}"
                )

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Wait for other ranks' messages within this; if the group is closed, the wait ends with the reason."""
        self._blocked += 1
        try:
            self.check()
            yield
        except RuntimeError as broken:
            self.look()
            if self._closed is not None:
                raise self._reason() from broken
            raise
        finally:
            self._blocked -= 1

    @contextlib.contextmanager
    def told(self, alike: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Close the group on errors, because other ranks wait for this one; not on those `alike` on every rank."""
        try:
            yield
        except alike:
            raise
        except BaseException as error:
            self.close("RuntimeError", _cannot({self.rank: _told(error)}))
            raise

    def close(self, kind: str, text: str) -> None:
        """Make every rank of the group raise this; the first reason stands."""
        with contextlib.suppress(RuntimeError):  # the rank that ran the store has failed and is gone
            stored = self._store.compare_set("closed", "", json.dumps([kind, text]))
            self._closed = tuple(json.loads(stored))

    def check(self) -> None:
        if self._closed is not None:
            raise self._reason()

    def _reason(self) -> Exception:
        assert self._closed is not None
        kind, text = self._closed
        text += "; the ranks are out of step: start them again, or make a new group on all of them"
        return ValueError(text) if kind == "ValueError" else RuntimeError(text)

    def look(self) -> bool:
        """Show this rank's record and compare it with its neighbours'; whether to look again.

        If the group is closed, end the wait that this rank may be in.
        """
        with self._lock:
            last = [entry for _, entry in list(self._entries)[-_SHOWN:]]
            state = State(self._count, self._digest, last, self._waiting)
        if state != self._shown:
            self._store.set(f"state/{self.rank}", json.dumps(state))
            self._shown = state
        if self._closed is None and self._store.check(["closed"]):
            self._closed = tuple(json.loads(self._store.get("closed")))
        for rank in {(self.rank - 1) % self.size, (self.rank + 1) % self.size} - {self.rank}:
            if self._closed is None:
                self._compare(rank)
        if self._closed is None:
            return True
        blocked = self._blocked > 0  # no wait begins after the group is closed
        self._break()
        return blocked

    def _compare(self, rank: int) -> None:
        key = f"state/{rank}"
        if not self._store.check([key]):
            return
        theirs = State(*json.loads(self._store.get(key)))
        with self._lock:
            behind = self._count - theirs.entries
            comparable = theirs.entries > 0 and 0 <= behind < len(self._entries)
            if not comparable or self._entries[-1 - behind][0] == theirs.digest:
                return  # of two ranks, the one that is ahead compares
            reason = self._explained(rank, theirs)
        self.close("ValueError", reason)

    def _explained(self, rank: int, theirs: State) -> str:
        mine = dict(zip(range(self._count, 0, -1), (entry for _, entry in reversed(self._entries))))
        for number, entry in enumerate(theirs.last, theirs.entries - len(theirs.last) + 1):
            if mine.get(number, entry) != entry:
                calls = {
                    self.rank: self._call(mine[number], self._waiting if number == self._count else None),
                    rank: self._call(entry, theirs.waiting if number == theirs.entries else None),
                }
                errors = {rank: call["error"] for rank, call in calls.items() if "error" in call}
                return _cannot(errors) if errors else _difference(calls)
        return f"all ranks of a group must make the same calls: ranks {self.rank} and {rank} have not"

    def _call(self, entry: int, waiting: Description | None) -> Description:
        return waiting or self._known.get(entry) or {"call": "one that was new to it"}

    def _break(self) -> None:
        """End the waits on the group."""
        group = self._group()
        if group is None:
            return
        types = {device.type for device in group._device_types}
        if types - {"cpu"} and not self._aborted:
            self._aborted = True
            group.abort()
        if "cpu" in types and self._blocked:
            # Gloo has no abort, but closes all connections of a group on which a receive times out. Connections to
            # some ranks may be closed already.
            for peer in {*range(self.size)} - {self.rank}:
                with contextlib.suppress(RuntimeError):
                    work = dist.irecv(torch.empty(1), group=group, tag=2**31 - 1, group_src=peer)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))

    def is_alive(self) -> bool:
        """Whether the process group still exists."""
        group = self._group()
        return group is not None and group in dist.distributed_c10d._world.pg_map


def digest_of(described: Description) -> int:
    return _digest(json.dumps(described, sort_keys=True))


def in_words(value: object) -> str:
    """A value of a call, cut where it is long; different values still give different words."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ... ({_digest(text):x} of all)"


def _digest(text: str) -> int:
    """Above 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") + 1


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cannot(errors: dict[int, str]) -> str:
    found = "; ".join(f"rank {rank} has {text}" for rank, text in errors.items())
    return f"another rank cannot make this call, so none can: {found}"


def _difference(calls: dict[int, Description]) -> str:
    shown = []
    for name in sorted({name for call in calls.values() for name in call}):
        if len({call.get(name) for call in calls.values()}) > 1:
            each = (f"{name}={call[name]}" if name in call else f"no {name}" for call in calls.values())
            shown.append(", ".join(f"rank {rank} has {one}" for rank, one in zip(calls, each)))
    return f"all ranks of a group must make the same call: {'; '.join(shown)}"


_watched: list[Agreement] = []
_stop = threading.Event()
_thread: threading.Thread | None = None


def _watch(agreement: Agreement) -> None:
    """Look at a group's records from a thread, for as long as the group exists."""
    global _thread
    _watched.append(agreement)
    if _thread is None or not _thread.is_alive():  # threads do not survive a fork
        _thread = threading.Thread(target=_look_at_all, name="dilated-attention-ranks", daemon=True)
        _thread.start()


def _look_at_all() -> None:
    while not _stop.wait(_LOOK_EVERY):
        for agreement in list(_watched):
            try:
                needed = agreement.is_alive() and agreement.look()
            except Exception:  # the store is gone
                needed = False
            if not needed:
                _watched.remove(agreement)


@atexit.register
def _end() -> None:
    """A thread that returns from C++ to an interpreter that has ended aborts the process."""
    _stop.set()
    if _thread is not None:
        _thread.join()
