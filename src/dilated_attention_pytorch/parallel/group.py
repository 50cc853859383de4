"""A rank group: the ranks that share a sequence or its heads, the messages between them, and what they agree on.

Rows travel as point-to-point messages: only ranks that share a segment exchange any, and different segments are shared
by different ranks, so no process group is made for a segment. Every rank posts its messages in the same order (branch,
then step), so that they match whether the backend matches them by tag or by order.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.core.checks import check_instance, check_whole, shown
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.parallel.agreement import MOST_KNOWN, Agreement, Description, digest_of, in_words
from dilated_attention_pytorch.parallel.wire import Traffic

if TYPE_CHECKING:  # some builds of PyTorch have none
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_TAGS = 2**31 - 1  # the tags that gloo allows, except the last one, which `Agreement` uses


class Mail(NamedTuple):
    """One message: a contiguous buffer to or from a rank of the group."""

    rank: int
    buffer: Tensor
    tag: int


@dataclass
class Posted:
    """Messages under way; it keeps their buffers alive."""

    works: list[Any]
    buffers: list[Tensor]
    ranks: RankGroup
    profile: Profile | None = None

    def wait(self) -> None:
        """After this the current stream may read what was received and overwrite what was sent."""
        if self.works:
            began = time.perf_counter()
            with self.ranks.agreement.blocked():
                for work in self.works:
                    work.wait()
            if self.profile is not None:
                self.profile.add("messages", seconds_waiting=time.perf_counter() - began)
        self.works, self.buffers = [], []


Numbers = tuple[tuple[int, ...], ...]
"""One entry per rank: the tokens of its shard, then other numbers of the rank that all ranks need."""


@dataclass(frozen=True)
class Agreed:
    """A call that all ranks make, in words, and the numbers of every rank."""

    described: Description
    numbers: Numbers

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(numbers[0] for numbers in self.numbers)

    @property
    def own(self) -> list[tuple[int, ...]]:
        return [numbers[1:] for numbers in self.numbers]

    def of_pass(self, name: str) -> Description:
        """The call with its shard lengths, forward or backward: what a rank's record holds."""
        return {**self.described, "pass": name, "shard lengths": str(self.lengths or "not stated")}

    @cached_property
    def forward(self) -> int:
        """The entry of its forward pass in a rank's record."""
        return digest_of(self.of_pass("forward"))


class RankGroup:
    """The ranks of a process group as one of them sees them, or a single rank where there is no group.

    `traffic` counts the bytes of ("forward" or "backward", branch) since it was last cleared. `lengths` are the shard
    lengths that the model whose forward pass is running has agreed on, for all of its layers.
    """

    estimated_bytes = 0  # for caches: a plan refers to its rank group, but does not own it

    def __init__(self, group: ProcessGroup | None) -> None:
        if group is not None:
            _check_group(group)
        self._group = None if group is None else weakref.ref(group)  # `destroy_process_group` frees it
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group: pass a group that it belongs to")
        self.traffic: dict[tuple[str, int], Traffic] = {}
        self.lengths: tuple[int, ...] | None = None
        self._first_tag = 0
        self._stated: set[tuple[tuple[tuple[str, str], ...], Numbers]] = set()  # calls that may be recomputed
        self._awaited = 0  # backward passes of these calls that have not begun
        self._counts_all = True  # whether all calls that may be recomputed count in `_awaited`

    def lengths_of_model(self, tokens: int) -> tuple[int, ...] | None:
        """The shard lengths of the running model, if this rank's is `tokens`; otherwise None."""
        return self.lengths if self.lengths is not None and self.lengths[self.rank] == tokens else None

    @property
    def group(self) -> ProcessGroup | None:
        group = None if self._group is None else self._group()
        if self._group is not None and group is None:
            raise RuntimeError("the process group was destroyed: make the module or the rank group with a new one")
        return group

    def post(
        self, sends: Iterable[Mail], receives: Iterable[Mail], entry: tuple[str, int], profile: Profile | None = None
    ) -> Posted:
        """Start sending and receiving; both sides leave out empty messages."""
        sends = [mail for mail in sends if mail.buffer.numel()]
        receives = [mail for mail in receives if mail.buffer.numel()]
        moved = Traffic(*(sum(mail.buffer.nbytes for mail in mails) for mails in (sends, receives)))
        self.traffic[entry] = self.traffic.get(entry, Traffic(0, 0)) + moved
        group = self.group
        ops = [
            dist.P2POp(op, mail.buffer, group=group, tag=(self._first_tag + mail.tag) % _TAGS, group_peer=mail.rank)
            for op, mails in ((dist.isend, sends), (dist.irecv, receives))
            for mail in mails
        ]
        works: list[Any] = []
        if ops:
            with self.agreement.blocked():
                works = dist.batch_isend_irecv(ops)
        if profile is not None and ops:
            profile.add("messages", count=len(ops), bytes_sent=moved.sent, bytes_received=moved.received)
        if ops and debugging():
            log.debug(
                "rank %d, %s of branch %d: sends %d bytes to ranks %s, receives %d from ranks %s",
                self.rank, *entry, moved.sent, [mail.rank for mail in sends], moved.received,
                [mail.rank for mail in receives],
            )  # fmt: skip
        return Posted(works, [mail.buffer for mail in (*sends, *receives)], self, profile)

    def share_from_first(self, x: Tensor) -> Tensor:
        """The first rank's value of `x`, in place."""
        with self.agreement.blocked():
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    @cached_property
    def agreement(self) -> Agreement:
        group = self.group
        assert group is not None
        return Agreement(group)

    def agree(
        self,
        described: dict[str, object],
        length: int,
        error: Exception | None = None,
        lengths: tuple[int, ...] | None = None,
        own: Sequence[int] = (),
    ) -> Agreed:
        """The call, once every rank is known to make the same one; otherwise an error on every rank.

        Args:
            described: what must be the same on every rank, by name.
            length: the tokens of this rank's shard.
            error: what this rank found wrong with its own call; it is raised here, after the other ranks know of it.
            lengths: the tokens of every rank, where the caller knows them. Otherwise ranks ask each other, except in a
                backward pass, which recomputes a call whose lengths they know. A call that is new with these lengths
                is always compared.
            own: other numbers of this rank that all ranks need, equally many on each.
        """
        try:
            call = {name: in_words(value) for name, value in described.items()}
        except Exception as wrong:
            call, error = {}, error or wrong
        numbers = (length, *own)
        if self.size == 1:
            if error is not None:
                raise error
            return Agreed(call, (numbers,))
        # Some ways to recompute a call run it without gradients the first time.
        key = tuple(both for both in call.items() if both[0] != "requires_grad")
        known = self._known_numbers(key, numbers, lengths) if error is None else None
        agreed = Agreed(call, known or ())
        if known is None or not self.agreement.knows(agreed.forward):
            agreed = Agreed(call, self.agreement.agree(agreed.of_pass("forward"), numbers, error))
            for name in ("forward", "backward"):
                self.agreement.know(agreed.of_pass(name))
        self._remember(key, agreed, call.get("requires_grad"))
        self.begin(agreed, "forward")
        return agreed

    def _remember(self, key: tuple[tuple[str, str], ...], agreed: Agreed, requires_grad: str | None) -> None:
        """Keep every rank's numbers for recomputation, until no backward pass can ask for them."""
        if _is_new_call() and requires_grad is not None:
            if (self._awaited == 0 and self._counts_all) or len(self._stated) >= MOST_KNOWN:
                self._stated.clear()
            self._awaited += requires_grad == "True"
            self._counts_all &= requires_grad == "True"  # a call without gradients may be recomputed with them
        self._stated.add((key, agreed.numbers))

    def _known_numbers(
        self, key: tuple[tuple[str, str], ...], mine: tuple[int, ...], lengths: tuple[int, ...] | None
    ) -> Numbers | None:
        """Every rank's numbers, if this rank knows them without asking. All ranks find them, or none does."""
        if lengths is not None:
            return tuple((length,) for length in lengths)
        if _is_new_call():
            return None
        # Recomputation repeats a call. Which one, a rank can tell by its own numbers if they differ on every rank.
        tables = [table for call, table in self._stated if call == key]
        if any(len({table[rank] for table in tables}) < len(tables) for rank in range(self.size)):
            return None
        return next((table for table in tables if table[self.rank] == mine), None)

    def begin(self, agreed: Agreed, name: str) -> None:
        """Record that a pass of a call begins; its messages are never matched with those of another call."""
        if name == "backward":
            self._awaited = max(0, self._awaited - 1)
            # Calls without gradients are not remembered for ever: to recompute one later, ranks ask each other again.
            self._counts_all = True
        entry = agreed.forward if name == "forward" else digest_of(agreed.of_pass(name))
        self._first_tag = entry % _TAGS
        self.agreement.write(entry)


# One for each process group, so that what was agreed and counted does not depend on how the group was found.
_known: WeakKeyDictionary[ProcessGroup, RankGroup] = WeakKeyDictionary()
ALONE = RankGroup(None)


def ranks_of(
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    axis: str = "sequence",
    *,
    size: int | None = None,
) -> RankGroup:
    """The rank group of a process group, of a mesh's axis, or of the default group; a single rank if there is none.

    A mesh of one dimension without names is its own axis. `size` is the number of ranks that the caller expects.
    """
    check_instance("axis", axis, str)
    process_group = _group_of(group, mesh, axis)
    if process_group is None:
        found = ALONE
    else:
        _check_group(process_group)
        known = _known.get(process_group)
        found = known or _known.setdefault(process_group, RankGroup(process_group))
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


@dataclass(frozen=True)
class Place:
    """Where a module finds its ranks, by `ranks_of`: looked up at each use, so that copies share the group."""

    group: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    axis: str = "sequence"
    size: int | None = None

    def ranks(self) -> RankGroup:
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


def _is_new_call() -> bool:
    """Whether no backward pass is running, which would recompute an earlier call."""
    return torch._C._current_graph_task_id() < 0
