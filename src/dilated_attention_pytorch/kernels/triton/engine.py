"""The Triton engine: one forward launch per branch, one or two backward ones.

What a call needs besides its tensors, a `Plan`, is made when a call of its kind comes for the first time and is
remembered. That first call compiles and copies offsets to the device; later ones allocate their results and launch, so
that they can be captured into a CUDA graph.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import BranchLayout
from dilated_attention_pytorch.core.call import Call, Grads, Inputs, Partial, Saved
from dilated_attention_pytorch.core.plans import spans_key
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.kernels.triton.backward import delta_kernel, dkdv_kernel, dq_kernel
from dilated_attention_pytorch.kernels.triton.forward import forward_kernel
from dilated_attention_pytorch.kernels.triton.launching import Launch
from dilated_attention_pytorch.kernels.triton.plan import Plan, PlannedBranch, plan_for

_LOG2_E = 1.4426950408889634


class Triton:
    """The engine of this project's own kernels."""

    def partial(self, call: Call, inputs: Inputs, resources: Resources = NO_RESOURCES) -> Partial:
        query, key, value, spans, seed, layout = inputs
        if _is_elsewhere(query):
            with torch.cuda.device(query.device):
                return self.partial(call, inputs, resources)
        dtype = query.dtype
        query, scale, _ = _positive_scale(query, call)
        query, key, value = _rows_of_unit_stride(query), _rows_of_unit_stride(key), _rows_of_unit_stride(value)
        plan = plan_for(call, spans, seed, (query, key, value))
        with _lease(resources, plan.forward_loan, plan) as take:
            new = plan.new
            if take is not None and plan.sum_dtype != dtype and not call.partial:
                new = functools.partial(_borrowed_sums, take, not plan.every_row_written)
            out = new(plan.like_query)
            lse = torch.empty_like(plan.like_lse)
            if not plan.every_row_written:
                lse.fill_(-torch.inf)
            for branch in plan.branches:
                kept = None if layout is None else layout.branches[branch.index]
                lists = () if kept is None else kept.key_lists
                launch = branch.launches.get("forward")
                if branch.hopper is not None:
                    if launch is None:
                        launch = branch.hopper.forward_launch(query, key, branch, scale * _LOG2_E, kept)
                    launch(query, key, value, out, lse, branch.query_offsets, *lists)
                else:
                    if launch is None:
                        launch = _branch_launch(forward_kernel, "forward", branch, scale * _LOG2_E, kept)
                    table = _table(branch, spans, resources)
                    launch(query, key, value, out, lse, table, branch.offsets, _seed(seed, query), *lists)
                branch.launches["forward"] = launch
            wide = call.partial or out.dtype == dtype
            return Partial(out if wide else out.to(dtype), lse.transpose(1, 2))

    def gradients(
        self,
        call: Call,
        saved: Saved,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        resources: Resources = NO_RESOURCES,
    ) -> Grads:
        (query, key, value, spans, seed, layout), out, lse = saved
        if _is_elsewhere(query):
            with torch.cuda.device(query.device):
                return self.gradients(call, saved, grad_out, grad_lse, resources)
        dtype = query.dtype
        query, scale, sign = _positive_scale(query, call)
        query, key, value = _rows_of_unit_stride(query), _rows_of_unit_stride(key), _rows_of_unit_stride(value)
        grad_out = _rows_of_unit_stride(grad_out)
        lse = lse.transpose(1, 2).contiguous()  # (B, H, N), as forward wrote it: no copy
        out = out.contiguous()
        plan = plan_for(call, spans, seed, (query, key, value, grad_out), grad_lse)
        with _lease(resources, plan.backward_loan, plan) as take:
            new = plan.new
            if take is not None and plan.sum_dtype != dtype and not call.partial:
                new = functools.partial(_borrowed_sums, take, not plan.every_row_written)
            dq, dk, dv = new(plan.like_query), new(plan.like_key), new(plan.like_key)
            delta = _taken(take, lse)
            launch = plan.launches.get("delta")
            if launch is None:
                launch = plan.launches["delta"] = _delta_launch(plan, grad_lse)
            workspace = _taken(take, plan.like_workspace) if plan.workspace_size else delta
            launch(out, grad_out, delta if grad_lse is None else grad_lse, delta, workspace)
            for branch in plan.branches:
                kept = None if layout is None else layout.branches[branch.index]
                if branch.hopper is not None:
                    launch = branch.launches.get("backward")
                    if launch is None:
                        launch = branch.hopper.backward_launch(query, key, branch, scale, workspace, kept)
                        branch.launches["backward"] = launch
                    lists = () if kept is None else (*kept.query_lists, kept.query_turns, kept.key_first)
                    rows = (query, grad_out, key, value, workspace, lse, delta, dq, dk, dv, workspace)
                    launch(*rows, branch.offsets, *lists)
                    continue
                if "dkdv" not in branch.launches:
                    branch.launches["dkdv"] = _branch_launch(dkdv_kernel, "dkdv", branch, scale, kept)
                    branch.launches["dq"] = _branch_launch(dq_kernel, "dq", branch, scale, kept)
                rows = (query, key, value, grad_out, lse, delta)
                tables = (_table(branch, spans, resources), branch.offsets, _seed(seed, query))
                branch.launches["dkdv"](*rows, dk, dv, *tables, *(() if kept is None else kept.query_lists))
                branch.launches["dq"](*rows, dq, *tables, *(() if kept is None else kept.key_lists))
            if sign != 1:
                dq = dq * sign
            wide = call.partial or dq.dtype == dtype
            return Grads(dq, dk, dv) if wide else Grads(dq.to(dtype), dk.to(dtype), dv.to(dtype))


def _is_elsewhere(query: Tensor) -> bool:
    """Whether another GPU must become the current one, on which Triton launches."""
    return query.is_cuda and query.get_device() != torch.cuda.current_device()


def _seed(seed: Tensor | None, query: Tensor) -> Tensor:
    return query if seed is None else seed  # without dropout it is not read


def _lease(resources: Resources, largest: int, plan: Plan) -> AbstractContextManager[Take | None]:
    """Loans of a pass; none where the pool would leave even the largest to PyTorch, asking costs short calls time."""
    pool = resources.pool
    return _NO_LEASE if pool is None or largest < pool.threshold(plan.device) else resources.workspaces()


_NO_LEASE: AbstractContextManager[None] = nullcontext()


def _taken(take: Take | None, like: Tensor) -> Tensor:
    return torch.empty_like(like) if take is None else take(like.shape, dtype=like.dtype, device=like.device)


def _borrowed_sums(take: Take, cleared: bool, like: Tensor) -> Tensor:
    """What branches add into where the result has another dtype, and so does not share its memory."""
    sums = _taken(take, like)
    return sums.zero_() if cleared else sums


def _branch_launch(kernel: Any, name: str, branch: PlannedBranch, scale: float, kept: BranchLayout | None) -> Launch:
    """One of the plain kernels: a program owns rows of a query head and walks keys, or, in `dkdv`, the other way."""
    plan = branch.plan
    tiles = branch.tiles(name)
    owns_keys = name == "dkdv"
    group = 1 if owns_keys else plan.group
    count, heads = triton.cdiv(branch.rows, tiles.own), len(branch.heads) * group
    numbers = (
        *plan.strides, plan.N, plan.H, branch.w, branch.r, heads, branch.heads.start * group, count,
        branch.slots_per_row, plan.call.head_offset, plan.call.first_position, branch.index, scale, plan.keep_scale,
        plan.threshold, 0 if kept is None else kept.rows_per_batch_row,
    )  # fmt: skip
    # Without a layout the kernels take None in place of its lists; a launch is then spared their pointers.
    no_lists = (None, None, None) if kept is None else ()
    queries, keys = (tiles.walk, tiles.own) if owns_keys else (tiles.own, tiles.walk)
    settings = {"BLOCK_M": queries, "BLOCK_N": keys, **branch.settings(tiles)}
    return Launch(kernel, count * heads * branch.slots, (*no_lists, *numbers), settings)


def _delta_launch(plan: Plan, grad_lse: Tensor | None) -> Launch:
    strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    settings = {"D": plan.D, "BLOCK_D": plan.block_d, "BLOCK_M": 64, "HAS_DLSE": grad_lse is not None}
    zeros_at = plan.workspace_size - plan.workspace_turns
    numbers = (*plan.strides[-3:], *strides, plan.N, plan.H, zeros_at, plan.workspace_turns)
    return Launch(delta_kernel, triton.cdiv(plan.N, 64) * plan.H * plan.B, numbers, settings)


def _table(branch: PlannedBranch, spans: Tensor | None, resources: Resources) -> Tensor:
    """`(slots, 3)`: batch row, start and length of every segment when documents have lengths."""
    if spans is None:
        return branch.offsets  # not read
    lengths = None if resources.cache is None else spans_key(spans)
    if lengths is None:
        return _new_table(branch, spans)
    plan = branch.plan
    kind = (plan.device, plan.B, plan.N, branch.w, lengths)
    return resources.remember("segment table", kind, lambda: _new_table(branch, spans))


def _new_table(branch: PlannedBranch, spans: Tensor) -> Tensor:
    launch = branch.launches.get("table")
    if launch is None:
        plan = branch.plan
        numbers = (plan.N, plan.documents, branch.w, branch.slots_per_row, branch.slots)
        launch = Launch(
            _segment_table_kernel, triton.cdiv(branch.slots, 128), numbers, {"PACKED": plan.B == 1, "BLOCK": 128}
        )
        branch.launches["table"] = launch
    table = torch.empty((branch.slots, 3), dtype=torch.int32, device=spans.device)
    launch(spans.contiguous(), table)
    return table


@triton.jit(do_not_specialize=("N", "documents", "W", "slots_per_row", "slots"))
def _segment_table_kernel(
    Spans, Table, N, documents, W, slots_per_row, slots, PACKED: tl.constexpr, BLOCK: tl.constexpr
):
    """`(batch row, start, length)` of every slot; length 0 where there is no segment, and nothing outside the row.

    Packed documents: document d owns the slots from `start_d // W + d` on, which are at least as many as its segments.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PACKED:
        low = tl.zeros([BLOCK], tl.int32)
        high = low + documents  # the document is in [low, high)
        while tl.max(high - low) > 1:
            middle = (low + high) // 2
            owned_from = tl.load(Spans + middle * 2, mask=middle < documents, other=0).to(tl.int32) // W + middle
            low = tl.where((owned_from <= slot) & (middle < high), middle, low)
            high = tl.where(owned_from <= slot, high, tl.maximum(middle, low + 1))
        document, b = low, low * 0
        begin = tl.maximum(tl.load(Spans + document * 2).to(tl.int32), 0)
        end = tl.minimum(tl.load(Spans + document * 2 + 1).to(tl.int32), N)
        segment = slot - (begin // W + document)
    else:
        b = tl.minimum(slot // slots_per_row, documents - 1)
        segment = slot % slots_per_row
        begin = tl.maximum(tl.load(Spans + b * 2).to(tl.int32), 0)
        end = tl.minimum(tl.load(Spans + b * 2 + 1).to(tl.int32), N)
    start = begin + segment * W
    # Slots before the first document's have a negative segment, slots after a document's last one no tokens left.
    length = tl.where(segment < 0, 0, tl.maximum(0, tl.minimum(W, end - start)))
    here = slot < slots
    tl.store(Table + slot * 3, b, mask=here)
    tl.store(Table + slot * 3 + 1, tl.where(length > 0, start, 0), mask=here)
    tl.store(Table + slot * 3 + 2, length, mask=here)


def _rows_of_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _positive_scale(query: Tensor, call: Call) -> tuple[Tensor, float, int]:
    """Query, scale and sign such that the kernels' scale is positive: a sign goes into the query, exactly."""
    scale = call.softmax_scale(query.shape[3])
    if scale > 0:
        return query, scale, 1
    sign = -1 if scale < 0 else 0
    return query * sign, -scale or 1.0, sign
