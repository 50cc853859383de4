"""The Triton engine: one forward launch per branch, one or two backward ones; short calls take fewer, see `short`.

What a call needs besides its tensors, a `Plan`, is made when a call of its kind comes for the first time and is
remembered. That first call compiles all kernels at once, those of backward too if an input requires gradients, and
copies offsets to the device. Later calls allocate their results and launch, so that they can be captured into a CUDA
graph.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dilated_attention_pytorch.core.block_layout import BlockLayout, BranchLayout
from dilated_attention_pytorch.core.call import Call, Grads, Inputs, Partial, Saved
from dilated_attention_pytorch.core.pool import Take
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.kernels.triton.backward import delta_kernel, dkdv_kernel, dq_kernel
from dilated_attention_pytorch.kernels.triton.compiling import (
    compile_launches,
    compiles_side_by_side,
    hash_triton,
    without_memory,
)
from dilated_attention_pytorch.kernels.triton.documents import Works, clear_outside
from dilated_attention_pytorch.kernels.triton.forward import forward_kernel
from dilated_attention_pytorch.kernels.triton.launching import Launch, is_elsewhere
from dilated_attention_pytorch.kernels.triton.plan import Plan, PlannedBranch, Step, plan_for

_LOG2_E = 1.4426950408889634
_STRETCH = 16  # lines of a list that a head takes before the next one does


class Triton:
    """The engine of this project's own kernels."""

    def __init__(self) -> None:
        if compiles_side_by_side():
            hash_triton()

    def partial(self, call: Call, inputs: Inputs, resources: Resources = NO_RESOURCES) -> Partial:
        query, key, value, spans, seed, layout, _ = inputs
        if is_elsewhere(query):
            with torch.cuda.device(query.device):
                return self.partial(call, inputs, resources)
        plan = plan_for(call, inputs)
        if not plan.as_is:
            query, key, value = plan.taken(query, key, value)
        if plan.steps is None:
            if compiles_side_by_side() and not query.is_meta:
                # Where ranks share a call, other tensors than these give the gradients.
                trains = not call.partial and any(x.requires_grad for x in inputs[:3])
                self.compile(call, inputs, backward=trains, ignore_errors=True)
            plan.set_steps(_forward_steps(plan, query, key, plan.scale * _LOG2_E, layout))
        if seed is None:
            seed = query  # without dropout it is not read
        if plan.short is not None:
            out, lse = plan.empty_like(plan.like_query), plan.empty_like(plan.short.like_lse)
            plan.short.forward(query, key, value, out, lse, plan.short.table, seed)
            return Partial(out, lse)
        dtype = query.dtype
        with _lease(resources, plan.forward_loan, plan) as take:
            out = _sums(plan, take)(plan.like_query)
            lse = plan.empty_like(plan.like_lse)
            if not plan.every_row_written:
                lse.fill_(-torch.inf)
            elif spans is not None:
                clear_outside(plan, spans, out, lse=lse)
            lines = plan.lines(spans, resources)
            for (branch, launch, _, _, offsets), line in zip(plan.steps, lines):
                lists = () if layout is None else layout.branches[branch.index].key_lists
                launch(query, key, value, out, lse, line, offsets, seed, *lists)
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
        (query, key, value, spans, seed, layout, _), out, lse = saved
        if is_elsewhere(query):
            with torch.cuda.device(query.device):
                return self.gradients(call, saved, grad_out, grad_lse, resources)
        plan = plan_for(call, saved.inputs, grad_out, grad_lse)
        if not plan.as_is:
            query, key, value, grad_out = plan.taken(query, key, value, grad_out)
        out = out.contiguous()
        if plan.steps is None:
            if compiles_side_by_side() and not query.is_meta:
                given = tree_map_only(Tensor, without_memory, (saved, grad_out, grad_lse))
                compile_launches(lambda: self.gradients(call, *given), ignore_errors=True)
            plan.set_steps(_backward_steps(plan, query, key, plan.scale, layout))
        if seed is None:
            seed = query  # without dropout it is not read
        if plan.short is not None:
            short, new = plan.short, plan.empty_like
            if lse.stride() != short.lse_strides:
                lse = lse.transpose(1, 2).contiguous()
            dq, dk, dv, delta = new(plan.like_query), new(plan.like_key), new(plan.like_key), new(plan.like_lse)
            dlse = delta if grad_lse is None else grad_lse
            short.dq(query, key, value, out, grad_out, dlse, lse, delta, dq, short.table, seed)
            short.dkdv(query, key, value, grad_out, lse, delta, dk, dv, short.table, seed)
            return Grads(dq if plan.sign == 1 else dq * plan.sign, dk, dv)
        dtype = query.dtype
        lse = lse.transpose(1, 2).contiguous()  # (B, H, N), as forward wrote it: no copy
        with _lease(resources, plan.backward_loan, plan) as take:
            new = _sums(plan, take)
            dq, dk, dv = new(plan.like_query), new(plan.like_key), new(plan.like_key)
            delta = _taken(plan, take, plan.like_lse)
            launch = plan.launches.get("delta")
            if launch is None:
                launch = plan.launches["delta"] = _delta_launch(plan, grad_lse)
            workspace = _taken(plan, take, plan.like_workspace) if plan.workspace_size else delta
            lengths = delta if spans is None else spans.contiguous()  # without lengths it is not read
            launch(out, grad_out, delta if grad_lse is None else grad_lse, delta, workspace, lengths)
            if spans is not None and plan.every_row_written:
                clear_outside(plan, spans, dq, dk, dv)
            lines = plan.lines(spans, resources)
            rows = (query, key, value, grad_out, lse, delta)
            for (branch, launch, _, kernel, offsets), line in zip(plan.steps, lines):
                kept = None if layout is None else layout.branches[branch.index]
                if kernel == "hopper":
                    lists = () if kept is None else (*kept.query_lists, kept.query_turns, kept.key_first)
                    into = (query, grad_out, key, value, workspace, lse, delta, dq, dk, dv, workspace)
                    launch(*into, line, offsets, seed, *lists)
                elif kernel == "dkdv":
                    lists = () if kept is None else kept.query_lists
                    launch(*rows, dk, dv, line, offsets, seed, *lists)
                else:
                    lists = () if kept is None else kept.key_lists
                    launch(*rows, dq, line, offsets, seed, *lists)
            if plan.sign != 1:
                dq = dq * plan.sign
            wide = call.partial or dq.dtype == dtype
            return Grads(dq, dk, dv) if wide else Grads(dq.to(dtype), dk.to(dtype), dv.to(dtype))

    def compile(
        self, call: Call, inputs: Inputs, *, backward: bool, ignore_errors: bool = False
    ) -> list[tuple[str, float]]:
        """Compile what a call launches on the current GPU, and return the names and seconds of the kernels.

        The inputs may be on the device `meta`: their values do not matter. An error that is ignored is raised by the
        launch.
        """
        given = tree_map_only(Tensor, without_memory, inputs)
        return compile_launches(lambda: self.passes(call, given, backward=backward), ignore_errors=ignore_errors)

    def passes(self, call: Call, inputs: Inputs, *, backward: bool) -> None:
        """Launch what a call launches, with tensors on the device `meta`: within `compile_launches` it is compiled."""
        out, lse = self.partial(call, inputs)
        if backward:
            self.gradients(call, Saved(inputs, out, lse), without_memory(out), None)


def _lease(resources: Resources, largest: int, plan: Plan) -> AbstractContextManager[Take | None]:
    """The loans of a pass; None if the pool would leave even the largest to PyTorch: asking takes time."""
    pool = resources.pool
    return _NO_LEASE if pool is None or largest < pool.threshold(plan.device) else resources.workspaces()


_NO_LEASE: AbstractContextManager[None] = nullcontext()


def _taken(plan: Plan, take: Take | None, like: Tensor) -> Tensor:
    return plan.empty_like(like) if take is None else take(like.shape, dtype=like.dtype, device=like.device)


def _sums(plan: Plan, take: Take | None) -> Callable[[Tensor], Tensor]:
    """What makes the tensors that branches add into: the results, or workspaces if the results have another dtype."""
    if take is None or not plan.forward_loan:
        return plan.new

    def borrowed(like: Tensor) -> Tensor:
        sums = take(like.shape, dtype=like.dtype, device=like.device)
        return sums if plan.every_row_written else sums.zero_()

    return borrowed


def _forward_steps(plan: Plan, query: Tensor, key: Tensor, scale: float, layout: BlockLayout | None) -> Iterator[Step]:
    """Launches. Segments of documents that are too short for the Hopper kernels go to the plain ones."""
    for branch in plan.branches:
        kept = None if layout is None else layout.branches[branch.index]
        if branch.hopper is not None:
            launch, works = branch.hopper.forward_launch(query, key, branch, scale, kept)
            yield Step(branch, launch, works, "hopper", branch.query_offsets)
        if branch.has_plain_rows:
            yield _plain_step(forward_kernel, "forward", branch, scale, kept)


def _backward_steps(plan: Plan, query: Tensor, key: Tensor, scale: float, layout: BlockLayout | None) -> Iterator[Step]:
    for branch in plan.branches:
        kept = None if layout is None else layout.branches[branch.index]
        for teams in branch.teams:
            launch = branch.hopper.backward_launch(query, key, branch, teams, scale, plan.like_workspace, kept)
            yield Step(branch, launch, teams.works, "hopper", branch.offsets)
        if branch.has_plain_rows:
            yield _plain_step(dkdv_kernel, "dkdv", branch, scale, kept)
            yield _plain_step(dq_kernel, "dq", branch, scale, kept)


def _plain_step(kernel: Any, name: str, branch: PlannedBranch, scale: float, kept: BranchLayout | None) -> Step:
    """One of the plain kernels: a program owns rows of a query head and walks keys, or, in `dkdv`, the other way."""
    plan = branch.plan
    most = None if branch.hopper is None else branch.hopper.SHORT_ROWS
    tiles = branch.tiles(name, most)
    owns_keys = name == "dkdv"
    group = 1 if owns_keys else plan.group
    works = Works(tiles.own) if most is None else Works(tiles.own, most=most)
    count, slots, heads = triton.cdiv(branch.rows, tiles.own), branch.slots, len(branch.heads) * group
    if plan.documents is not None:
        count = min(_STRETCH, works.capacity(branch))
        slots = triton.cdiv(works.capacity(branch), count)
    numbers = (
        *plan.strides, plan.N, plan.H, branch.w, branch.r, heads, branch.heads.start * group, count,
        branch.slots_per_row, plan.call.head_offset, plan.call.first_position, scale, plan.keep_scale,
        plan.threshold, 0 if kept is None else kept.rows_per_batch_row, branch.fold.skipped, branch.fold.periods,
    )  # fmt: skip
    # Without a layout the kernels take None in place of its lists; a launch is then spared their pointers.
    no_lists = (None, None, None) if kept is None else ()
    queries, keys = (tiles.walk, tiles.own) if owns_keys else (tiles.own, tiles.walk)
    settings = {"BLOCK_M": queries, "BLOCK_N": keys, **branch.settings(tiles)}
    launch = Launch(kernel, count * heads * slots, (*no_lists, *numbers), settings)
    return Step(branch, launch, works, name, branch.offsets)


def _delta_launch(plan: Plan, grad_lse: Tensor | None) -> Launch:
    strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    settings = {
        "D": plan.D,
        "BLOCK_D": plan.block_d,
        "BLOCK_M": 64,
        "HAS_DLSE": grad_lse is not None,
        "LISTED": plan.documents is not None,
        "PACKED": plan.B == 1,
    }
    zeros_at = plan.workspace_size - plan.workspace_turns
    numbers = (*plan.strides[-3:], *strides, plan.N, plan.H, plan.documents or 0, zeros_at, plan.workspace_turns)
    return Launch(delta_kernel, triton.cdiv(plan.N, 64) * plan.H * plan.B, numbers, settings)
