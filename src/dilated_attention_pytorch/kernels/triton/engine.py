"""Launching the Triton kernels: one forward launch a branch, two backward ones."""

# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention_pytorch.core.pattern import grid_rows
from dilated_attention_pytorch.core.spec import Problem
from dilated_attention_pytorch.kernels.triton.backward import delta_kernel, dkdv_kernel, dq_kernel
from dilated_attention_pytorch.kernels.triton.forward import forward_kernel
from dilated_attention_pytorch.kernels.triton.tuning import Tiles, tiles_for

_LOG2_E = 1.4426950408889634


def forward(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, spans: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    query, key, value = (_rows_of_unit_stride(x) for x in (query, key, value))
    B, N, H, D = query.shape
    query, scale, _ = _positive_scale(query, problem)
    calls = _Calls(problem, spans, seed, query, key)
    new = torch.empty if calls.every_row_written else torch.zeros
    out = new((B, N, H, D), dtype=query.dtype, device=query.device)
    lse = torch.empty((B, H, N), dtype=torch.float32, device=query.device)
    if not calls.every_row_written:
        lse.fill_(-torch.inf)
    qk_scale = scale * _LOG2_E
    for branch in calls.branches():
        tiles = tiles_for("forward", calls.block_d, query.element_size(), branch.rows, problem.is_causal)
        count = triton.cdiv(branch.rows, tiles.own)
        first, heads = branch.heads.start * calls.group, len(branch.heads) * calls.group
        forward_kernel[(count * heads * branch.slots,)](
            query, key, value, out, lse, branch.table, branch.offsets, calls.seed,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            N, H, branch.w, branch.r, heads, first, count, branch.slots_a_row, problem.head_offset, branch.index,
            qk_scale, calls.keep_scale, calls.threshold,
            BLOCK_M=tiles.own, BLOCK_N=tiles.walk, **branch.settings(tiles),
        )  # fmt: skip
    return out, lse.transpose(1, 2)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    spans: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, key, value = (_rows_of_unit_stride(x) for x in (grad_out, query, key, value))
    lse = lse.transpose(1, 2).contiguous()  # (B, H, N), as forward wrote it: no copy
    out = out.contiguous()
    B, N, H, D = query.shape
    query, scale, sign = _positive_scale(query, problem)
    calls = _Calls(problem, spans, seed, query, key)
    new = torch.empty if calls.every_row_written else torch.zeros
    dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(N, 64) * H * B,)](
        out, grad_out, delta if grad_lse is None else grad_lse, delta,
        *grad_out.stride()[:3], *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
        N, H, D=D, BLOCK_D=calls.block_d, BLOCK_M=64, HAS_DLSE=grad_lse is not None,
    )  # fmt: skip
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3])
    for branch in calls.branches():
        inputs = (query, key, value, grad_out, lse, delta)
        rest = (branch.slots_a_row, problem.head_offset, branch.index, scale, calls.keep_scale, calls.threshold)
        tiles = tiles_for("dkdv", calls.block_d, query.element_size(), branch.rows, problem.is_causal)
        count = triton.cdiv(branch.rows, tiles.own)
        first, heads = branch.heads.start, len(branch.heads)
        dkdv_kernel[(count * heads * branch.slots,)](
            *inputs, dk, dv, branch.table, branch.offsets, calls.seed, *strides,
            N, H, branch.w, branch.r, heads, first, count, *rest,
            BLOCK_M=tiles.walk, BLOCK_N=tiles.own, **branch.settings(tiles),
        )  # fmt: skip
        tiles = tiles_for("dq", calls.block_d, query.element_size(), branch.rows, problem.is_causal)
        count = triton.cdiv(branch.rows, tiles.own)
        first, heads = first * calls.group, heads * calls.group
        dq_kernel[(count * heads * branch.slots,)](
            *inputs, dq, branch.table, branch.offsets, calls.seed, *strides,
            N, H, branch.w, branch.r, heads, first, count, *rest,
            BLOCK_M=tiles.own, BLOCK_N=tiles.walk, **branch.settings(tiles),
        )  # fmt: skip
    return dq if sign == 1 else dq * sign, dk, dv


class _Branch:
    """One branch's launch: its slots, heads, rows and table."""

    def __init__(self, calls: _Calls, index: int, row: tuple[int | None, ...], continues: bool) -> None:
        branch = calls.problem.spec.branches[index]
        self.calls = calls
        self.index = index
        self.r = branch.dilation_rate
        self.w = min(branch.segment_length, calls.N)
        self.continues = continues
        present = [h for h, offset in enumerate(row) if offset is not None]
        self.heads = range(present[0], present[-1] + 1)
        self.rows = max(grid_rows(self.w, self.r, offset) for offset in row if offset is not None)
        self.slots_a_row = triton.cdiv(calls.N, self.w)
        self.slots = calls.B * self.slots_a_row
        self.offsets = _offsets_on(calls.device, tuple(-1 if o is None else o for o in row))
        self.table = self.offsets  # not read
        if calls.spans is not None:
            self.slots += len(calls.spans) if calls.B == 1 else 0
            self.table = _segment_table(calls.spans, calls.B, calls.N, self.w, self.slots_a_row, self.slots)

    def settings(self, tiles: Tiles) -> dict:
        calls = self.calls
        return {
            "D": calls.D,
            "GROUP": calls.group,
            "BLOCK_D": calls.block_d,
            "CAUSAL": calls.problem.is_causal,
            "CONTINUES": self.continues,
            "HAS_TABLE": calls.spans is not None,
            "DROPOUT": calls.drops,
            "PRECISION": calls.precision,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


class _Calls:
    """What all launches of a call share."""

    def __init__(self, problem: Problem, spans: Tensor | None, seed: Tensor | None, query: Tensor, key: Tensor) -> None:
        self.problem = problem
        self.spans = spans
        self.B, self.N, H, self.D = query.shape
        self.device = query.device
        self.group = H // key.shape[2]
        self.block_d = max(16, triton.next_power_of_2(self.D))
        self.drops = seed is not None
        self.seed = query if seed is None else seed  # not read without dropout
        self.keep_scale = 1.0 / (1.0 - problem.dropout_p)
        self.threshold = round(problem.dropout_p * (1 << 32))
        self.precision = "tf32" if query.dtype == torch.float32 and _tf32(problem.allow_tf32) else "ieee"
        table = problem.offsets(H, key.shape[2])
        # The branch that covers every row goes first, so that nothing needs to be cleared before it.
        order = sorted(range(len(table)), key=lambda i: problem.spec.branches[i].dilation_rate != 1)
        self._rows = [(i, table[i]) for i in order if any(o is not None for o in table[i])]
        first, row = self._rows[0]
        covers = problem.spec.branches[first].dilation_rate == 1 and None not in row
        self.every_row_written = covers and spans is None

    def branches(self) -> list[_Branch]:
        seen: set[int] = set()
        found = []
        for index, row in self._rows:
            heads = {h for h, offset in enumerate(row) if offset is not None}
            found.append(_Branch(self, index, row, continues=bool(heads & seen)))
            seen |= heads
        return found


@triton.jit(do_not_specialize=("N", "documents", "W", "slots_a_row", "slots"))
def _segment_table_kernel(Spans, Table, N, documents, W, slots_a_row, slots, PACKED: tl.constexpr, BLOCK: tl.constexpr):
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
        b = tl.minimum(slot // slots_a_row, documents - 1)
        segment = slot % slots_a_row
        begin = tl.maximum(tl.load(Spans + b * 2).to(tl.int32), 0)
        end = tl.minimum(tl.load(Spans + b * 2 + 1).to(tl.int32), N)
    start = begin + segment * W
    # Slots before the first document's have a negative segment, slots after a document's last one no tokens left.
    length = tl.where(segment < 0, 0, tl.maximum(0, tl.minimum(W, end - start)))
    here = slot < slots
    tl.store(Table + slot * 3, b, mask=here)
    tl.store(Table + slot * 3 + 1, tl.where(length > 0, start, 0), mask=here)
    tl.store(Table + slot * 3 + 2, length, mask=here)


def _segment_table(spans: Tensor, batch: int, tokens: int, w: int, slots_a_row: int, slots: int) -> Tensor:
    table = torch.empty((slots, 3), dtype=torch.int32, device=spans.device)
    _segment_table_kernel[(triton.cdiv(slots, 128),)](
        spans.contiguous(), table, tokens, len(spans), w, slots_a_row, slots, PACKED=batch == 1, BLOCK=128
    )
    return table


@functools.lru_cache(maxsize=1024)
def _offsets_on(device: torch.device, offsets: tuple[int, ...]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _rows_of_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _positive_scale(query: Tensor, problem: Problem) -> tuple[Tensor, float, int]:
    """Query, scale and sign such that the kernels' scale is positive: a sign goes into the query, exactly."""
    scale = problem.softmax_scale(query.shape[3])
    if scale > 0:
        return query, scale, 1
    sign = -1 if scale < 0 else 0
    return query * sign, -scale or 1.0, sign


def _tf32(allow: bool | None) -> bool:
    return torch.backends.cuda.matmul.allow_tf32 if allow is None else allow
