"""What a call needs besides its tensors' values: branches, tables, and which kernels run."""

# mypy: ignore-errors

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dilated_attention_pytorch.core import environment, plans
from dilated_attention_pytorch.core.call import Call, Inputs
from dilated_attention_pytorch.core.dropout import threshold_of
from dilated_attention_pytorch.core.entries import lasting, lasting_table
from dilated_attention_pytorch.core.folding import TILE, Fold, fold_branches
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.modes import tf32_is_on
from dilated_attention_pytorch.core.pattern import grid_rows, most_scratch, rounds_little
from dilated_attention_pytorch.core.resources import Resources
from dilated_attention_pytorch.core.spec import OffsetTable
from dilated_attention_pytorch.kernels.triton import short
from dilated_attention_pytorch.kernels.triton.documents import WorkLists, Works
from dilated_attention_pytorch.kernels.triton.launching import Launch, device_of
from dilated_attention_pytorch.kernels.triton.tuning import Tiles, tiles_for

# For comparing them: "plain" keeps every branch on the kernels that run on any GPU.
KERNELS = environment.kernels()


def plan_for(call: Call, inputs: Inputs, grad_out: Tensor | None = None, grad_lse: Tensor | None = None) -> Plan:
    """The plan of a call, or of its backward, made once for equal calls of equal tensors."""
    q, k, v, spans, seed, _, prepared = inputs
    tf32 = q.dtype == torch.float32 and allows_tf32(call.allow_tf32)
    key = (
        # The shape of value is that of key.
        (call, q.device, q.dtype, q.shape, k.shape) if prepared is None else prepared,
        KERNELS,
        tf32,
        None if spans is None else (spans.shape[0], spans.dtype),
        seed is None,
        q.stride(), k.stride(), v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
        None if grad_out is None else (grad_out.dtype, grad_out.stride(), grad_out.data_ptr() % 16),
        None if grad_lse is None else (grad_lse.dtype, grad_lse.stride()),
    )  # fmt: skip
    if not q.is_meta and (known := plans.recall("plan", key)) is not None:
        return known
    tensors = (q, k, v) if grad_out is None else (q, k, v, grad_out)
    make = functools.partial(Plan, call, spans, seed is not None, tf32, tensors, grad_lse)
    # In the table of the whole process: a call may have a small cache of its own, whose layouts a plan must not evict.
    return make() if q.is_meta else plans.remember("plan", key, make)  # on `meta` a call compiles only


class Plan:
    """What all launches of a call share."""

    estimated_bytes = 1 << 14  # of launches and small tables, for the table of plans

    def __init__(
        self, call: Call, spans: Tensor | None, drops: bool, tf32: bool, tensors: tuple[Tensor, ...],
        grad_lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.call = call
        scale = call.softmax_scale(tensors[0].shape[3])
        self.scale, self.sign = abs(scale) or 1.0, (scale > 0) - (scale < 0)
        self.as_is = self.sign == 1 and all(x.stride(-1) == 1 for x in tensors)
        tensors = self.taken(*tensors)
        query, key = tensors[:2]
        self.B, self.N, self.H, self.D = query.shape
        self.device = query.device
        self.documents = None if spans is None else spans.shape[0]
        self.group = self.H // key.shape[2]
        self.block_d = max(16, triton.next_power_of_2(self.D))
        self.itemsize = query.element_size()
        self.drops = drops
        self.keep_scale = 1.0 / (1.0 - call.dropout_p)
        self.threshold = threshold_of(call.dropout_p)
        self.precision = precision_of(tf32)
        self.strides = tuple(stride for x in tensors for stride in x.stride()[:3])
        self.launches: dict[str, Launch] = {}
        self.steps: list[Step] | None = None  # made by the first call
        table = call.offsets(self.H, key.shape[2])
        order, covers = _order(call, table, self.N, in_documents=spans is not None)
        folds = [Fold()] * len(table)
        # Wider heads leave no registers for the weights of rows.
        if covers and call.sparse is None and call.table is None and self.D <= 128:
            folds = fold_branches(call.spec.branches, table, self.N)
            order = [index for index in order if not folds[index].is_empty]
        # A single folded branch is one launch, too, of Hopper's kernels.
        is_one = len(order) == 1 and not folds[order[0]].is_plain and self.N >= TILE and _may_take_hopper(query)
        in_one = spans is None and not is_one and short.takes(call, self.B, self.N, self.H)
        if in_one:
            order, covers = [], True
        rounds = not call.partial and (len(order) <= 1 or rounds_little(call.spec, table))
        self.sum_dtype = query.dtype if rounds else torch.float32
        self.every_row_written = covers  # of documents, if there are any
        self.empty_like = _empty_like_meta if query.is_meta else torch.empty_like
        self.new = self.empty_like if self.every_row_written else torch.zeros_like
        self.branches: list[PlannedBranch] = []
        seen: set[int] = set()
        for index in order:
            row = table[index]
            heads = {h for h, offset in enumerate(row) if offset is not None}
            self.branches.append(PlannedBranch(self, index, row, bool(heads & seen), tensors, folds[index]))
            seen |= heads
        taken = [branch for branch in self.branches if branch.hopper is not None]
        # What results are made like: faster than by shape, dtype and device, which takes longer than a launch.
        one = lasting(self.device, lambda: torch.empty(1, dtype=self.sum_dtype, device=self.device))
        self.like_query, self.like_key = one.expand(query.shape), one.expand(key.shape)
        one = lasting(self.device, lambda: torch.empty(1, dtype=torch.float32, device=self.device))
        self.like_lse = one.expand(self.B, self.H, self.N)
        self.workspace_size = self.workspace_turns = 0
        if taken:
            most = max(branch.workspace_rows for branch in taken)
            self.workspace_size, self.workspace_turns = taken[0].hopper.workspace_size(most, self.D)
        self.like_workspace = one.expand(self.workspace_size)
        # The largest workspace of a pass, in bytes: a pool is asked only if it would serve one.
        sums = 0 if self.sum_dtype == query.dtype or call.partial else query.numel() * self.sum_dtype.itemsize
        self.forward_loan = sums
        if debugging() and not query.is_meta:
            stage = "forward" if len(tensors) == 3 else "backward"
            kernels = ["plain" if branch.hopper is None else "hopper" for branch in self.branches] or "short"
            log.debug("planned: %s of %s, kernels by branch %s", stage, tuple(query.shape), kernels)
        self.backward_loan = max(sums, 4 * self.like_lse.numel(), 4 * self.workspace_size)
        self.short = short.Short(self, table, grad_lse) if in_one else None

    def taken(self, query: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """The tensors as kernels take them: rows of unit stride, and the sign of the scale in the query, exactly."""
        query = query if self.sign == 1 else query * self.sign
        return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (query, *rest))

    def set_steps(self, steps: Iterable[Step]) -> None:
        steps = list(steps)
        self._no_lines = [step.branch.offsets for step in steps]  # not read
        if self.documents is not None:
            self._lists = WorkLists(self, [(step.branch, step.works) for step in steps])
        self.steps = steps  # last: another thread may use them at once

    def lines(self, spans: Tensor | None, resources: Resources) -> list[Tensor]:
        """The list of each step's works where documents have lengths."""
        return self._no_lines if spans is None else self._lists.of(spans, resources)


def _empty_like_meta(like: Tensor) -> Tensor:
    """On the device `meta`, for which `torch.empty_like` imports a package of half a second."""
    return like.new_empty(like.shape)


def _order(call: Call, table: OffsetTable, tokens: int, *, in_documents: bool) -> tuple[list[int], bool]:
    """The branches that heads have rows on, in the order in which they run, and whether the first writes every row.

    A branch that does goes first, so that nothing needs to be cleared before it. Where results are cleared, branches of
    few keys go first: each rounds what it adds to, and what those leave is small. In documents, which may be much
    shorter than segments, that is worth clearing for where others have a fourth of the keys or less.
    """
    branches = call.spec.branches
    # A share of a call may be on no branch at all: a shard's heads, or a piece of a chunk.
    ends = [min(branch.segment_length, tokens) for branch in branches]
    order = [i for i, row in enumerate(table) if any(offset is not None and offset < ends[i] for offset in row)]
    covering = [i for i in order if branches[i].dilation_rate == 1 and None not in table[i]]
    keys = [grid_rows(min(branch.segment_length, tokens), branch.dilation_rate, 0) for branch in branches]
    if covering and not (in_documents and 4 * min(keys[i] for i in order) <= keys[covering[0]]):
        return sorted(order, key=lambda i: i != covering[0]), True
    return sorted(order, key=keys.__getitem__), False


class Step(NamedTuple):
    """A launch of a branch, what it works on where documents have lengths, and the table of its heads' offsets."""

    branch: PlannedBranch
    launch: Launch
    works: Works
    kernel: str
    offsets: Tensor


class PlannedBranch:
    """One branch's launches: its slots, heads, rows and table, and the launchers of the Hopper kernels if they run."""

    def __init__(
        self, plan: Plan, index: int, row: tuple[int | None, ...], continues: bool, tensors: tuple[Tensor, ...],
        fold: Fold,
    ) -> None:  # fmt: skip
        branch = plan.call.spec.branches[index]
        self.plan = plan
        self.index = index
        self.r = branch.dilation_rate
        self.w = min(branch.segment_length, plan.N)
        self.is_causal = plan.call.is_causal
        self.continues = continues
        self.fold = fold
        present = [h for h, offset in enumerate(row) if offset is not None]
        self.heads = range(present[0], present[-1] + 1)
        self.rows = max(grid_rows(self.w, self.r, offset) for offset in row if offset is not None)
        self.slots_per_row = triton.cdiv(plan.N, self.w)
        self.slots = plan.B * self.slots_per_row
        offsets = tuple(-1 if offset is None else offset for offset in row)
        if not fold.is_plain:
            offsets += fold.phases or (0,) * len(row)  # read after the offsets by the kernels of folded branches
        self.offsets = lasting_table(plan.device, offsets)  # of key/value heads
        self.query_offsets = lasting_table(plan.device, tuple(offset for offset in offsets for _ in range(plan.group)))
        self.workspace_rows = 0
        self.teams: list[Any] = []  # of Hopper's backward
        self.hopper = _hopper_for(self, *tensors)

    @property
    def has_plain_rows(self) -> bool:
        """Whether the plain kernels compute all of this branch, or those segments of documents that Hopper's do not.

        Where rows are skipped, such short segments have nothing left to compute.
        """
        return self.hopper is None or (self.plan.documents is not None and not self.fold.skipped)

    def tiles(self, kernel: str, most: int | None = None) -> Tiles:
        """The shape that a plain kernel runs in for segments of `most` rows.

        It lies within a tile of a block layout, and within a segment of the finer branch.
        """
        plan = self.plan
        sparse = plan.call.sparse
        rows = self.rows if sparse is None else min(self.rows, sparse.block_size)
        if self.fold.skipped:
            rows = min(rows, TILE)
        if most is not None:
            # Of documents. Larger tiles than their mean length would be empty for the most part where there are many.
            rows = min(rows, most, triton.cdiv(plan.B * plan.N, max(plan.documents, 1) * self.r))
        return tiles_for(kernel, plan.block_d, plan.itemsize, rows, self.is_causal)

    def settings(self, tiles: Tiles) -> dict:
        """The constants and compiler options that the plain kernels share."""
        plan = self.plan
        sparse = plan.call.sparse
        return {
            "PIECES": 0 if sparse is None else sparse.block_size // tiles.walk,
            "D": plan.D,
            "GROUP": plan.group,
            "BLOCK_D": plan.block_d,
            "CAUSAL": self.is_causal,
            "CONTINUES": self.continues,
            "FOLDED": not self.fold.is_plain,
            "LISTED": plan.documents is not None,
            "DROPOUT": plan.drops,
            "PRECISION": plan.precision,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def _may_take_hopper(query: Tensor) -> bool:
    """Whether the Hopper kernels run on this device and take elements of this size; `_hopper_for` checks the rest."""
    return KERNELS != "plain" and query.element_size() == 2 and why_no_hopper(device_of(query)) is None


def _hopper_for(
    branch: PlannedBranch, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None = None
) -> ModuleType | None:
    """The launchers of the Hopper kernels where they take this branch, else None: then the plain ones do.

    They take block layouts with tiles of their own size only, and without lengths. Their backward sums dq in a scratch
    buffer for each key/value head that works at once, and is left out where that would be a burden on memory.
    """
    plan = branch.plan
    if not _may_take_hopper(query):
        return None
    if plan.call.sparse is not None and plan.documents is not None:
        return None
    from dilated_attention_pytorch.kernels.triton.hopper import launch

    if plan.D > 64 and grad_out is None and plan.sum_dtype != query.dtype:
        return None  # forward has no shared memory left to pass float32 sums through
    tensors = (query, key, value) if grad_out is None else (query, key, value, grad_out)
    block_size = None if plan.call.sparse is None else plan.call.sparse.block_size
    if not launch.takes_tensors(*tensors):
        return None
    if not launch.takes_branch(plan.N, branch.r, branch.rows, block_size, plan.D):
        return None
    if grad_out is not None:
        # q, out, do and dq are of one size, k, v, dk and dv of another.
        tensor_bytes = 4 * (query.numel() + key.numel()) * query.element_size()
        if not launch.share_out(query, key, branch, most_scratch(tensor_bytes)):
            return None
    return launch


@functools.lru_cache
def why_no_hopper(device: torch.device) -> str | None:
    """Why the Hopper kernels cannot be loaded for a device, or None."""
    if environment.triton_interprets():
        return "Triton's interpreter does not know their instructions"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"they run on NVIDIA GPUs, the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"they need compute capability 9, this GPU has {torch.cuda.get_device_capability(device)}"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6) or find_spec(_GLUON) is None:
        return f"they need Gluon as of Triton 3.6, this is Triton {triton.__version__}: pip install -U triton"
    return None


_GLUON = "triton.experimental.gluon.nvidia.hopper"


def precision_of(tf32: bool) -> str:
    """How kernels multiply float32. Tensor cores know TF32 only; three products of parts are as exact as float32 needs.

    Rounded to TF32, a number `x` leaves a rest, which is rounded too: `x = a + b` within 2**-22. The product of `a + b`
    and `c + d` is `ac + ad + bc`, and what it leaves out is as small.
    """
    if tf32:
        return "tf32"
    return environment.float32_products() if torch.version.cuda is not None else "ieee"


def allows_tf32(allow: bool | None) -> bool:
    """Whether float32 products may use TF32: as the call says, or PyTorch's setting."""
    return tf32_is_on() if allow is None else allow
