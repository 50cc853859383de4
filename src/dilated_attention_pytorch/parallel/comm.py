"""Ranks that share a sequence: who they are, messages between them, what these weigh, and that all mean the same call.

Rows travel as point-to-point messages, since only ranks that share a segment exchange any, and no two segments need be
shared by the same ranks: no group is made for a segment. Every rank posts its messages in one order (branch, then
step), so that they meet whatever the backend matches them by.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.core.checks import check_instance, check_whole, shown
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.parallel.costs import Traffic

if TYPE_CHECKING:  # some builds of PyTorch have none
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MOST_KINDS_AGREED = 512


class Mail(NamedTuple):
    """One message: a contiguous buffer to or from a rank of the group."""

    rank: int
    buffer: Tensor
    tag: int


@dataclass
class Posted:
    """Messages under way; their buffers live as long as this."""

    works: list[Any]
    buffers: list[Tensor]
    profile: Profile | None = None

    def wait(self) -> None:
        """Afterwards the current stream may read what came and write to what was sent."""
        began = time.perf_counter()
        for work in self.works:
            work.wait()
        if self.profile is not None and self.works:
            self.profile.add("messages", seconds_waiting=time.perf_counter() - began)
        self.works, self.buffers = [], []


class Ranks:
    """The ranks of a process group as one of them sees them, or a single rank where there is no group.

    `traffic` counts the bytes of ("forward" or "backward", branch) since it was last cleared.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is not None:
            _check_group(group)
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group: pass a group that it belongs to")
        self.traffic: dict[tuple[str, int], Traffic] = {}
        self._agreed: set[str] = set()
        self._host: ProcessGroup | None = None

    def post(
        self, sends: Iterable[Mail], receives: Iterable[Mail], entry: tuple[str, int], profile: Profile | None = None
    ) -> Posted:
        """Start sending and receiving; empty messages are left out on both sides."""
        sends = [mail for mail in sends if mail.buffer.numel()]
        receives = [mail for mail in receives if mail.buffer.numel()]
        weight = Traffic(_bytes(sends), _bytes(receives))
        self.traffic[entry] = self.traffic.get(entry, Traffic(0, 0)) + weight
        ops = [
            dist.P2POp(op, mail.buffer, self._global(mail.rank), self.group, mail.tag)
            for op, mails in ((dist.isend, sends), (dist.irecv, receives))
            for mail in mails
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        if profile is not None and ops:
            profile.add("messages", count=len(ops), bytes_sent=weight.sent, bytes_received=weight.received)
        if ops and debugging():
            log.debug(
                "rank %d, %s of branch %d: sends %d bytes to ranks %s, receives %d from ranks %s",
                self.rank, *entry, weight.sent, [mail.rank for mail in sends], weight.received,
                [mail.rank for mail in receives],
            )  # fmt: skip
        return Posted(works, [mail.buffer for mail in (*sends, *receives)], profile)

    def share_from_first(self, x: Tensor) -> Tensor:
        """The first rank's value of `x`, in place."""
        if self.group is not None and self.size > 1:
            dist.broadcast(x, self._global(0), group=self.group)
        return x

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, of which all must have as many; between hosts, so that no device is waited for."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self._host_group())
        return [x.tolist() for x in theirs]

    def agree(
        self, call: dict[str, object], length: int, error: Exception | None, lengths: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """The shards' lengths, once every rank is known to make the same call; else an error on every rank at once.

        `error` is what this rank has found wrong with its own call: it must not leave the others waiting. When the
        caller states all `lengths`, a kind of call is checked the first time it comes, else every time.
        """
        call = {**call, "shard lengths": lengths}
        text = repr(sorted((name, str(value)) for name, value in call.items()))
        if lengths is not None and error is None and text in self._agreed:
            return lengths
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        table = self.gather_numbers([digest, length, error is not None])
        if any(failed for _, _, failed in table):
            messages = self._gather_text("" if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            found = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(messages) if text)
            raise ValueError(f"another rank cannot make this call, so none can: {found}")
        if len({digest for digest, _, _ in table}) > 1:
            raise ValueError(self._difference(call))
        if lengths is not None:
            if len(self._agreed) >= _MOST_KINDS_AGREED:
                self._agreed.clear()  # on every rank at the same call, since all have agreed to the same ones
            self._agreed.add(text)
            return lengths
        return tuple(length for _, length, _ in table)

    def _difference(self, call: dict[str, object]) -> str:
        names = sorted(call)
        theirs = [text.split("\x00") for text in self._gather_text("\x00".join(f"{n}={call[n]}" for n in names))]
        different = [values for values in zip(*theirs) if len(set(values)) > 1]
        shown = "; ".join(", ".join(f"rank {r} has {v}" for r, v in enumerate(values)) for values in different)
        return f"all ranks of a group must make the same call: {shown}"

    def _gather_text(self, text: str) -> list[str]:
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text, group=self._host_group())
        return texts

    def _host_group(self) -> ProcessGroup | None:
        if self._host is None and self.group is not None:
            if torch.device("cpu") in self.group._device_types:
                self._host = self.group
            else:
                ranks = dist.get_process_group_ranks(self.group)
                self._host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
                # NCCL wants the first call on a group to be one that all its ranks take part in.
                dist.all_reduce(torch.zeros(1, device=self.group._device_types[0]), group=self.group)
        return self._host

    def _global(self, rank: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)


# One for each group, so that what was agreed and counted does not depend on how the group was named.
_known: WeakKeyDictionary[ProcessGroup, Ranks] = WeakKeyDictionary()
ALONE = Ranks(None)


def ranks_of(
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    axis: str = "sequence",
    *,
    size: int | None = None,
) -> Ranks:
    """The ranks of a group, of a mesh's axis, or of the default group; a single rank where there is none.

    A mesh of one dimension without names is its own axis. `size` is how many ranks the caller expects.
    """
    check_instance("axis", axis, str)
    found = _ranks_of(_group_of(group, mesh, axis))
    if size is not None and check_whole("ring_size", size, least=1) != found.size:
        raise ValueError(
            f"ring_size must be the size of the process group, got ring_size={size} and {found.size} "
            f"rank{'s' * (found.size != 1)}: start as many processes with torchrun, or leave ring_size out"
        )
    return found


def _group_of(group: ProcessGroup | None, mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    if group is not None and mesh is not None:
        raise ValueError("group and mesh both state the ranks: pass one of them")
    if mesh is not None:
        names = check_mesh(mesh).mesh_dim_names
        if names is None and mesh.ndim == 1:
            return mesh.get_group()
        if names is None or axis not in names:
            raise ValueError(
                f"the mesh must have an axis named {axis!r}, got {names or f'{mesh.ndim} axes without names'}: "
                f"make it with init_device_mesh(..., mesh_dim_names=(..., {axis!r}))"
            )
        return mesh.get_group(axis)
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def check_mesh(mesh: Any) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return check_instance("mesh", mesh, DeviceMesh)


def _check_group(group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a process group that this process belongs to, got {shown(group)}: make it with "
            "torch.distributed.new_group"
        )


def _ranks_of(group: ProcessGroup | None) -> Ranks:
    if group is None:
        return ALONE
    _check_group(group)
    found = _known.get(group)
    if found is None:
        found = _known[group] = Ranks(group)
    return found


@dataclass(frozen=True)
class Place:
    """Where a module finds its ranks; see `ranks_of`. Looked up at each use, so that copies share the group."""

    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    axis: str = "sequence"
    size: int | None = None

    def ranks(self) -> Ranks:
        return ranks_of(self.group, self.mesh, self.axis, size=self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return self  # frozen, and a process group cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None or self.mesh is not None:
            raise TypeError(
                "a process group lives in its own processes and cannot be pickled: save the module's state_dict, or "
                "make the module without group and mesh, for the default group"
            )
        return Place, (None, None, self.axis, self.size)


def _bytes(mails: list[Mail]) -> int:
    return sum(mail.buffer.numel() * mail.buffer.element_size() for mail in mails)
