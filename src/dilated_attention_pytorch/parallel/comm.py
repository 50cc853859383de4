"""Ranks that share a sequence: who they are, messages between them, and what these weigh.

Rows travel as point-to-point messages, since only ranks that share a segment exchange any, and no two segments need be
shared by the same ranks: no group is made for a segment. Every rank posts its messages in one order (branch, then
step), so that they meet whatever the backend matches them by.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.core.checks import check_instance, check_whole, shown
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.parallel.agreement import Agreement, Description, digest_of, in_words
from dilated_attention_pytorch.parallel.costs import Traffic

if TYPE_CHECKING:  # some builds of PyTorch have none
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_TAGS = 2**31 - 1  # what gloo allows, less the last one, which `Agreement` uses


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
    ranks: Ranks
    profile: Profile | None = None

    def wait(self) -> None:
        """Afterwards the current stream may read what came and write to what was sent."""
        if self.works:
            began = time.perf_counter()
            with self.ranks.agreement.blocked():
                for work in self.works:
                    work.wait()
            if self.profile is not None:
                self.profile.add("messages", seconds_waiting=time.perf_counter() - began)
        self.works, self.buffers = [], []


class Agreed(NamedTuple):
    """A call that all ranks make: the shards' lengths, what each rank has said of its own, and the call in words."""

    lengths: tuple[int, ...]
    own: list[Sequence[int]]
    described: Description

    def stated(self, stage: str) -> Description:
        return {**self.described, "pass": stage, "shard lengths": str(self.lengths or "not stated")}

    def digest(self, stage: str) -> int:
        return digest_of(self.stated(stage))


class Ranks:
    """The ranks of a process group as one of them sees them, or a single rank where there is no group.

    `traffic` counts the bytes of ("forward" or "backward", branch) since it was last cleared.
    """

    estimated_bytes = 0  # of the schedules in a cache that refer to it, which it outlives

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is not None:
            _check_group(group)
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group: pass a group that it belongs to")
        self.traffic: dict[tuple[str, int], Traffic] = {}
        self._first_tag = 0

    def post(
        self, sends: Iterable[Mail], receives: Iterable[Mail], entry: tuple[str, int], profile: Profile | None = None
    ) -> Posted:
        """Start sending and receiving; empty messages are left out on both sides."""
        sends = [mail for mail in sends if mail.buffer.numel()]
        receives = [mail for mail in receives if mail.buffer.numel()]
        weight = Traffic(_bytes(sends), _bytes(receives))
        self.traffic[entry] = self.traffic.get(entry, Traffic(0, 0)) + weight
        ops = [
            dist.P2POp(op, mail.buffer, self._global(mail.rank), self.group, (self._first_tag + mail.tag) % _TAGS)
            for op, mails in ((dist.isend, sends), (dist.irecv, receives))
            for mail in mails
        ]
        works: list[Any] = []
        if ops:
            with self.agreement.blocked():
                works = dist.batch_isend_irecv(ops)
        if profile is not None and ops:
            profile.add("messages", count=len(ops), bytes_sent=weight.sent, bytes_received=weight.received)
        if ops and debugging():
            log.debug(
                "rank %d, %s of branch %d: sends %d bytes to ranks %s, receives %d from ranks %s",
                self.rank, *entry, weight.sent, [mail.rank for mail in sends], weight.received,
                [mail.rank for mail in receives],
            )  # fmt: skip
        return Posted(works, [mail.buffer for mail in (*sends, *receives)], self, profile)

    def share_from_first(self, x: Tensor) -> Tensor:
        """The first rank's value of `x`, in place."""
        if self.group is not None and self.size > 1:
            with self.agreement.blocked():
                dist.broadcast(x, self._global(0), group=self.group)
        return x

    @cached_property
    def agreement(self) -> Agreement:
        assert self.group is not None
        return Agreement(self.group)

    def agree(
        self,
        described: dict[str, object],
        length: int,
        error: Exception | None,
        lengths: tuple[int, ...] | None = None,
        own: Sequence[int] = (),
    ) -> Agreed:
        """The shards' lengths, once every rank is known to make the same call; else an error on every rank.

        `error` is what this rank has found wrong with its own call: it must not leave the others waiting. When the
        caller states all `lengths`, a call is compared with the others' before it only the first time, else every time.
        `own` are numbers of this rank that the others ask for, as many on each, of a call that is always compared.
        """
        try:
            made = Agreed(lengths or (), [], {name: in_words(value) for name, value in described.items()})
        except Exception as wrong:
            made, error = Agreed((), [], {}), error or wrong
        if self.size == 1:
            if error is not None:
                raise error
            return made._replace(lengths=(length,), own=[own])
        if lengths is None or own or error is not None or not self.agreement.knows(made.digest("forward")):
            found = self.agreement.agree(made.stated("forward"), [length, *own], error)
            made = made._replace(lengths=tuple(theirs[0] for theirs in found), own=[theirs[1:] for theirs in found])
            for stage in ("forward", "backward"):
                self.agreement.know(made.stated(stage))
        self.begin(made, "forward")
        return made

    def begin(self, agreed: Agreed, stage: str) -> None:
        """Write down that a pass of a call begins, whose messages meet none of another call's."""
        entry = agreed.digest(stage)
        self._first_tag = entry % _TAGS
        self.agreement.write(entry)

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
