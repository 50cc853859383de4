"""Launching the Hopper kernels: when they fit, their tiles, descriptors and grids."""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dilated_attention_pytorch.core.block_layout import BranchLayout
from dilated_attention_pytorch.kernels.triton.documents import Works
from dilated_attention_pytorch.kernels.triton.hopper.backward import backward_kernel
from dilated_attention_pytorch.kernels.triton.hopper.forward import forward_kernel
from dilated_attention_pytorch.kernels.triton.launching import Launch, View, device_of
from dilated_attention_pytorch.kernels.triton.tuning import hopper_tiles_for

_KEY_ROWS = 128  # of a key tile, in both kernels, but for the forward pass of head dims past 128
_QUERY_ROWS = 64  # of a query tile in backward
NOBODY = (0, 0)  # teams of a branch that other kernels compute sooner
_STRETCH = 16  # tiles of a list of works that a head takes before the next one does: rows of all heads lie together
SHORT_ROWS = 64  # segments of documents of at most this many rows are left to the plain kernels
_ALONE_ROWS = (1024, 512, 256)  # segments of at most this many rows get no team in backward, if there is memory
_WHOLE = 1 << 30
_MOST_ROWS = 1 << 22  # of a segment: backward counts its key tiles in 16 bits
_SUMS_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)


class Teams(NamedTuple):
    """Who computes the backward pass of a branch's segments, or, where documents have lengths, of those in `works`."""

    count: int
    size: int
    rows: int  # of the longest segment, rounded up to whole tiles
    works: Works


def padded(head_dim: int) -> int:
    return next(size for size in (64, 128, 256) if head_dim <= size)


def _key_rows(block_d: int) -> int:
    """Rows of a key tile in the forward pass: as many as fit into shared memory."""
    return _KEY_ROWS if block_d <= 128 else _KEY_ROWS // 2


def takes_tensors(*tensors: Tensor) -> bool:
    """Whether these kernels take such tensors, on a GPU that has them.

    The tensor copy engine needs rows that begin at multiples of 16 bytes, each at its own. The backward pass, which has
    four tensors, holds dk and dv in registers, which suffice for a head dim of 128.
    """
    largest = 256 if len(tensors) == 3 else 128
    if tensors[0].dtype not in (torch.bfloat16, torch.float16) or tensors[0].shape[-1] > largest:
        return False
    return all(
        x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride and stride % 8 == 0 for stride in x.stride()[:3])
        for x in tensors
    )


def takes_branch(tokens: int, rate: int, rows: int, block_size: int | None, head_dim: int) -> bool:
    """Segments of less than a key tile are computed as fast without these kernels, and `copy_rows` needs a tile.

    A block layout, if there is one, must have tiles of that size, for queries and for keys.
    """
    fits = _KEY_ROWS <= rows <= _MOST_ROWS and tokens // rate >= _KEY_ROWS
    return fits and (block_size is None or block_size == _KEY_ROWS == _key_rows(padded(head_dim)))


def forward_launch(
    query: Tensor, key: Tensor, branch, qk_scale: float, kept: BranchLayout | None
) -> tuple[Launch, Works]:
    """The launch for one branch of a plan, and the works that it lists.

    It takes q, k, v, out, lse, the list of works of documents, the query heads' offsets, the seed, and a layout's lists
    of kept keys.
    """
    N, H, D = query.shape[1:]
    group = H // key.shape[2]
    block_d = padded(D)
    heads, first = len(branch.heads) * group, branch.heads.start * group
    units = heads * branch.slots
    multiprocessors = _multiprocessors(device_of(query))
    # Smaller tiles take as many steps, but shorter ones, where every tile has a multiprocessor of its own.
    alone = -(-branch.rows // 128) * units <= multiprocessors
    # Larger ones would span several of a layout's tiles or of a finer branch's segments; under causality, rows of one
    # tile of a folded branch would see different key tiles. Dropout takes registers.
    is_cut = kept is not None or branch.fold.skipped > 0 or (branch.is_causal and not branch.fold.is_plain)
    tiles = hopper_tiles_for(block_d, branch.is_causal, alone or is_cut or branch.plan.drops)
    count = -(-branch.rows // (64 * tiles.consumers))
    works = (-(-count // 2) if branch.is_causal else count) * units  # pairs of tiles if causal
    programs = min(works, multiprocessors)
    has_documents = branch.plan.documents is not None
    slots_per_row = branch.slots_per_row
    if has_documents:
        count, slots_per_row = min(count, _STRETCH), _WHOLE
    numbers = (
        *_no_lists(kept, 3), N, H, branch.w, branch.r, heads, first, count, slots_per_row, query.shape[0], programs,
        group, branch.fold.skipped, branch.fold.periods, _rows_per_batch_row(kept), *_dropout(branch), qk_scale,
    )  # fmt: skip
    settings = {
        "D": D,
        "BLOCK_D": block_d,
        "BLOCK_N": _key_rows(block_d),
        "STAGES": tiles.stages,
        "CONSUMERS": tiles.consumers,
        "REGISTERS": tiles.registers,
        "ORDERED": tiles.ordered,
        "CAUSAL": branch.is_causal,
        "CONTINUES": branch.continues,
        "DOCUMENTS": has_documents,
        "SPARSE": kept is not None,
        "DROPOUT": branch.plan.drops,
        "FOLDED": not branch.fold.is_plain,
        "num_warps": 4,
    }
    keys = _view(branch.r, _key_rows(block_d))
    views = (_view(branch.r, 64), keys, keys)
    listed = Works(64 * tiles.consumers, branch.is_causal, least=SHORT_ROWS)
    return Launch(forward_kernel, programs, numbers, settings, views), listed


def backward_launch(
    query: Tensor, key: Tensor, branch, teams: Teams, scale: float, workspace: Tensor, kept: BranchLayout | None
) -> Launch:
    """The launch for one branch's segments.

    It takes q, do, k, v, the sums of dq, lse, delta, dq, dk, dv, the workspace, the list of segments of documents, the
    key/value heads' offsets, the seed, and the lists of a layout.
    """
    N, H, D = query.shape[1:]
    block_d = padded(D)
    units = len(branch.heads) * branch.slots
    numbers = (
        *_no_lists(kept, 5), N, H, branch.w, branch.r, len(branch.heads), branch.heads.start, teams.rows,
        branch.slots_per_row, units, teams.count, teams.size, _lag(block_d, branch.is_causal), H // key.shape[2],
        branch.fold.skipped, branch.fold.periods, _turns_at(workspace, block_d), _rows_per_batch_row(kept),
        int(branch.continues), *_dropout(branch), scale,
    )  # fmt: skip
    settings = {
        "D": D,
        "BLOCK_D": block_d,
        "BLOCK_M": _QUERY_ROWS,
        "KV_STAGES": 2 if block_d == 64 else 1,  # what fits into shared memory
        "CAUSAL": branch.is_causal,
        "DOCUMENTS": branch.plan.documents is not None,
        "SPARSE": kept is not None,
        "DROPOUT": branch.plan.drops,
        "FOLDED": not branch.fold.is_plain,
        "num_warps": 4,
        # Members of a team wait for each other. Where another kernel holds multiprocessors, some members would start
        # and wait for others that cannot: so all programs start together, or none does.
        "launch_cooperative_grid": True,
    }
    queries, keys = _view(branch.r, _QUERY_ROWS), _view(branch.r, _KEY_ROWS)
    sums = functools.partial(_sums_descriptor, block_d=block_d)
    return Launch(backward_kernel, teams.count * teams.size, numbers, settings, (queries, queries, keys, keys, sums))


def _dropout(branch) -> tuple[float, ...]:
    """What the kernels know of dropout besides its seed."""
    call = branch.plan.call
    return call.head_offset, call.first_position, branch.plan.threshold, branch.plan.keep_scale


def _no_lists(kept: BranchLayout | None, count: int) -> tuple[None, ...]:
    """What a kernel takes in place of a layout's lists where there is none."""
    return (None,) * count if kept is None else ()


def _rows_per_batch_row(kept: BranchLayout | None) -> int:
    return 0 if kept is None else kept.rows_per_batch_row


def workspace_size(rows: int, head_dim: int) -> tuple[int, int]:
    """`(size, turns)` of what the branches of a backward pass use one after the other, in float32.

    First come `rows` of sums of dq, then, for each of their tiles, whose turn it is to add: zeros to begin with.
    """
    turns = rows // _QUERY_ROWS
    return rows * padded(head_dim) + turns, turns


def _turns_at(workspace: Tensor, block_d: int) -> int:
    return workspace.numel() // (_QUERY_ROWS * block_d + 1) * _QUERY_ROWS * block_d


def share_out(query: Tensor, key: Tensor, branch, most_bytes: int) -> bool:
    """Set the teams of a branch's backward, with at most `most_bytes` of sums of dq; False if too few would work."""
    rows = -(-branch.rows // _KEY_ROWS) * _KEY_ROWS
    group = query.shape[2] // key.shape[2]
    multiprocessors = _multiprocessors(device_of(query))

    def most_teams(rows: int) -> int:
        return most_bytes // (4 * workspace_size(group * rows, query.shape[3])[0])

    branch.teams, least = [], 0
    if branch.plan.documents is not None:
        # The host does not know how long documents are. In short ones, members of a team would have nothing to do.
        least = SHORT_ROWS
        alone = next((rows for rows in _ALONE_ROWS if most_teams(rows) >= multiprocessors), 0)
        if alone:
            branch.teams.append(Teams(multiprocessors, 1, alone, Works(_WHOLE, least=least, most=alone)))
            least = alone
    if least < rows:
        units = len(branch.heads) * branch.slots
        count, size = _teams(units, rows // _KEY_ROWS, branch.is_causal, multiprocessors, most_teams(rows))
        if (count, size) == NOBODY:
            return False
        branch.teams.append(Teams(count, size, rows, Works(_WHOLE, least=least)))
    branch.workspace_rows = max(teams.count * group * teams.rows for teams in branch.teams)
    return True


def _sums_descriptor(workspace: Tensor, block_d: int) -> tuple[TensorDescriptor]:
    sums = workspace[: _turns_at(workspace, block_d)].view(-1, block_d)
    return (TensorDescriptor.from_tensor(sums, [_QUERY_ROWS, block_d], _SUMS_LAYOUT),)


def _view(rate: int, rows: int) -> View:
    return functools.partial(_descriptors, rate=rate, rows=rows)


def _descriptors(x: Tensor, rate: int, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """`x` as `(B, r, H, N // r, D)`, from its first token and up to its last one; see `common`."""
    B, N, H, D = x.shape
    b, n, h, _ = x.stride()
    shape, strides, block = [B, rate, H, N // rate, D], [b, n, h, n * rate, 1], [1, 1, 1, rows, padded(D)]
    return tuple(TensorDescriptor(view, shape, strides, block, _LAYOUT) for view in (x, x[:, N % rate :]))


def _lag(block_d: int, is_causal: bool) -> int:
    """How many query tiles the members of a team in backward are apart, measured.

    Far enough that a turn has come when a member arrives, and no farther: what members read and add to at about the
    same time comes from L2 only once.
    """
    return 4 if block_d == 64 and is_causal else 2


@functools.lru_cache(maxsize=256)
def _teams(units: int, key_tiles: int, is_causal: bool, multiprocessors: int, most: int) -> tuple[int, int]:
    """How many teams of how many programs finish soonest, with at most `most` teams; NOBODY if that takes too long.

    A larger team needs less scratch, which then stays in L2. But it takes turns longer, and under causality, where
    members of a round walk fewer and fewer query tiles, they come to wait for each other.
    """

    def rounds(size: int, most: int = units) -> float:
        waits = 0.2 / size + (0.24 if is_causal else 0.16) * size / max(16, key_tiles)
        return -(-units // min(most, multiprocessors // size)) * -(-key_tiles // size) * (1 + waits)

    sizes = range(1, min(key_tiles, multiprocessors) + 1)
    if most == 0:
        return NOBODY
    size = min(sizes, key=lambda size: rounds(size, most))
    # The plain kernels take half as long again as these where all multiprocessors work.
    if rounds(size, most) > 1.5 * min(map(rounds, sizes)):
        return NOBODY
    return min(units, multiprocessors // size, most), size


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
