"""Where the grid rows of a bounded cache lie: pure arithmetic on positions, shared by the cache and its kernels.

In branch `(w, r)` a later query sees grid rows of its own segment only. So a branch holds a ring of `capacity` rows for
each of its key/value heads. Rows are numbered over the whole document, `rows` per segment: the token at position `p` is
row `p // w * rows + (p % w) // r`, and lies at that number modulo `capacity`. Without room for rewinding, `capacity` is
`rows`: row `t` of every segment has the same slot, and the next segment overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.entries import Value, lasting
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.core.pattern import grid_rows
from dilated_attention_pytorch.core.spec import DilatedSpec, OffsetTable


@dataclass(frozen=True)
class BranchRows:
    """The rings of one branch, one per head in `heads`, stored one after another from row `first` of the cache."""

    index: int  # of the branch in its spec
    segment_length: int  # w
    dilation_rate: int  # r
    heads: slice  # the key/value heads on the branch: in every head layout a contiguous range
    offsets: tuple[int, ...]  # of those heads
    rows: int  # per whole segment, for the head that has the most
    capacity: int
    first: int
    ring: int  # the number of its first ring among the rings of all branches

    def every(self, heads: slice) -> slice:
        """Some of the branch's heads, as numbers among all heads."""
        return slice(self.heads.start + heads.start, self.heads.start + heads.stop, heads.step)

    def number(self, position: int) -> int:
        """The number of the last grid row at or before a position; of the segment's first row if there is none."""
        segment, within = divmod(position, self.segment_length)
        return segment * self.rows + min(within // self.dilation_rate, self.rows - 1)

    def stored(self, stored: Tensor) -> Tensor:
        """A view `(B, heads, capacity, D)` of the branch's rings in the cache's keys or values."""
        count = len(self.offsets)
        return stored[:, self.first : self.first + count * self.capacity].unflatten(1, (count, self.capacity))

    def overwritten(self, length: int, longest: int) -> bool:
        """Whether a document of `longest` tokens that is cut back to `length` has lost rows that it still needs."""
        segment, within = divmod(length, self.segment_length)
        if within <= min(self.offsets) or longest <= length:
            return False
        return self.number(longest - 1) - self.capacity >= segment * self.rows


@dataclass(frozen=True)
class CacheRows:
    """The rows of a whole cache: those of every branch that has heads, and one that is written and never read.

    The last `rewindable` tokens can be taken back at any time, for about `rewindable / r` rows per head and branch.

    >>> spec = DilatedSpec.of([4, 8], [1, 2])
    >>> CacheRows(spec, spec.offsets(2)).total  # 4 rows per head on both branches
    17
    """

    spec: DilatedSpec
    offsets: OffsetTable
    rewindable: int = 0
    branches: tuple[BranchRows, ...] = field(init=False, repr=False, compare=False)
    # Branches with the same heads. In every head layout, branches share all heads or none.
    branches_by_heads: tuple[tuple[BranchRows, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_heads: dict[tuple[int, int], list[BranchRows]] = {}
        for branch in (branches := self._branches()):
            by_heads.setdefault((branch.heads.start, branch.heads.stop), []).append(branch)
        object.__setattr__(self, "branches", branches)
        object.__setattr__(self, "branches_by_heads", tuple(map(tuple, by_heads.values())))

    def _branches(self) -> tuple[BranchRows, ...]:
        found, first, ring = [], 0, 0
        for index, (branch, offsets) in enumerate(zip(self.spec.branches, self.offsets)):
            w, r = branch.segment_length, branch.dilation_rate
            present = [h for h, offset in enumerate(offsets) if offset is not None]
            mine = tuple(offset for offset in offsets if offset is not None)
            rows = max((grid_rows(w, r, offset) for offset in mine), default=0)
            if rows == 0:
                continue
            # Going back into a segment from up to `rewindable` tokens later needs all of its rows.
            segments, rest = divmod(w - 1 + max(self.rewindable - 1, 0), w)
            capacity = segments * rows + min(rest // r, rows - 1) + 1
            heads = slice(present[0], present[-1] + 1)
            assert len(present) == heads.stop - heads.start, offsets
            found.append(BranchRows(index, w, r, heads, mine, rows, capacity, first, ring))
            first, ring = first + len(mine) * capacity, ring + len(mine)
        return tuple(found)

    @property
    def unread(self) -> int:
        """The row for tokens that no later query sees, so that shapes do not depend on positions."""
        return sum(len(branch.offsets) * branch.capacity for branch in self.branches)

    @property
    def total(self) -> int:
        return self.unread + 1


class Rings(NamedTuple):
    """Every ring of a cache as tensors `(rings,)`: branch by branch, and head by head."""

    head: Tensor
    offset: Tensor
    segment_length: Tensor
    dilation_rate: Tensor
    rows: Tensor
    capacity: Tensor
    first: Tensor

    def number(self, position: Tensor) -> Tensor:
        """`(..., rings)`: the number of the last grid row at or before each position `(..., 1)`, as in `BranchRows`."""
        w = self.segment_length
        # After the last row of a segment there may be room for one more, which no head here has.
        return position // w * self.rows + torch.minimum(position % w // self.dilation_rate, self.rows - 1)

    def on_grid(self, position: Tensor) -> Tensor:
        """`(..., rings)`: whether each position `(..., 1)` is a row of each ring; positions below 0 are not."""
        return (position % self.segment_length % self.dilation_rate == self.offset) & (position >= 0)


def rings_on(rows: CacheRows, like: Tensor) -> Rings:
    """The rings as tensors on the device of `like`, made once."""
    return decode_table(_rings, rows, like)


def decode_table(make: Callable[[CacheRows, torch.device], Value], rows: CacheRows, like: Tensor) -> Value:
    """`make(rows, device)` for the device of `like`, made once."""
    device = like.device
    if not is_plain(like):
        return make(rows, device)
    return plans.remember("decode table", (make, rows, device), lambda: lasting(device, lambda: make(rows, device)))


def _rings(rows: CacheRows, device: torch.device) -> Rings:
    table = [
        (branch.heads.start + h, offset, branch.segment_length, branch.dilation_rate, branch.rows, branch.capacity,
         branch.first + h * branch.capacity)
        for branch in rows.branches
        for h, offset in enumerate(branch.offsets)
    ]  # fmt: skip
    return Rings(*torch.tensor(table, dtype=torch.int64, device=device).reshape(-1, len(Rings._fields)).unbind(1))


class CacheState(NamedTuple):
    """A cache as the kernels take it: keys and values `(B, rows.total, D)`, and the tokens of each batch row so far.

    A length is also the position of the next token; below 0, that token is left padding. `known` has the same lengths
    if the host knows them, which saves waiting for the device.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor  # (B,)
    rows: CacheRows
    known: tuple[int, ...] | None = None

    def of_row(self, b: int) -> CacheState:
        """The state of batch row `b`."""
        row = slice(b, b + 1)
        known = None if self.known is None else self.known[row]
        return CacheState(self.keys[row], self.values[row], self.lengths[row], self.rows, known)
