"""The pattern of dilated attention as pure mathematics: which rows are on a grid, who sees whom, and what it costs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import COUNT, SIZE, check_divides, check_whole_numbers, checked
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, OffsetTable


def grid_rows(segment: int, rate: int, offset: int) -> int:
    """How many of a segment's rows lie on the grid: the size of `range(offset, segment, rate)`.

    >>> grid_rows(10, 4, 1)  # rows 1, 5, 9
    3
    """
    return len(range(offset, segment, rate))


def segments(n: int, w: int) -> list[tuple[int, int]]:
    """`(start, length)` of each segment of a document of `n` tokens; the last one may be shorter.

    >>> segments(10, 4)
    [(0, 4), (4, 4), (8, 2)]
    """
    return [(start, min(w, n - start)) for start in range(0, n, w)]


def heads_by_offset(offsets: tuple[int | None, ...]) -> list[tuple[int, slice]]:
    """The heads at each offset of a branch: in every head layout an arithmetic progression.

    >>> heads_by_offset((0, 1, 0, 1))
    [(0, slice(0, 3, 2)), (1, slice(1, 4, 2))]
    """
    heads: dict[int, list[int]] = {}
    for head, offset in enumerate(offsets):
        if offset is not None:
            heads.setdefault(offset, []).append(head)
    slices = []
    for offset, found in heads.items():
        step = found[1] - found[0] if len(found) > 1 else 1
        assert found == list(range(found[0], found[-1] + 1, step)), (offset, found)
        slices.append((offset, slice(found[0], found[-1] + 1, step)))
    return slices


def on_grid(branch: Branch, offset: int | None, positions: Tensor) -> Tensor:
    """Whether each position (counted from the document's first token) is on the branch's grid."""
    if offset is None:
        return torch.zeros_like(positions, dtype=torch.bool)
    return (positions % branch.segment_length) % branch.dilation_rate == offset


@checked(offset=SIZE)
def visible(branch: Branch, offset: int | None, i: Tensor, j: Tensor, *, is_causal: bool = False) -> Tensor:
    """Whether query position `i` sees key position `j` in this branch; broadcasts over `i` and `j`."""
    check_whole_numbers("i", i)
    check_whole_numbers("j", j)
    if i.device != j.device:
        raise ValueError(f"i and j must share a device, got {i.device} and {j.device}")
    try:
        torch.broadcast_shapes(i.shape, j.shape)
    except RuntimeError:
        raise ValueError(f"i and j must broadcast together, got {tuple(i.shape)} and {tuple(j.shape)}") from None
    sees = on_grid(branch, offset, i) & on_grid(branch, offset, j)
    sees = sees & (i // branch.segment_length == j // branch.segment_length)
    return sees & (j <= i) if is_causal else sees


@checked(n=SIZE)
def dense_mask(
    spec: DilatedSpec, offsets: OffsetTable, n: int, *, is_causal: bool = False, device: torch.device | None = None
) -> Tensor:
    """`(branches, heads, n, n)` bool: what row `i` of a document sees in each branch. O(n^2): for tests and pictures.

    >>> spec = DilatedSpec.of([2, 4], [1, 2])
    >>> dense_mask(spec, spec.offsets(1), 4).sum(0)[0]  # how many branches show key j to row i
    tensor([[2, 1, 1, 0],
            [1, 1, 0, 0],
            [1, 0, 2, 1],
            [0, 0, 1, 1]])
    """
    check_table(spec, offsets)
    i = torch.arange(n, device=device)[:, None]
    j = torch.arange(n, device=device)[None, :]
    return torch.stack(
        [
            torch.stack([visible(branch, offset, i, j, is_causal=is_causal) for offset in row])
            for branch, row in zip(spec.branches, offsets)
        ]
    )


@checked(n=SIZE)
def covered_rows(spec: DilatedSpec, offsets: OffsetTable, n: int) -> Tensor:
    """`(n, heads)` bool: whether any branch covers row `p` of head `h`."""
    check_table(spec, offsets)
    positions = torch.arange(n, device="cpu")
    per_branch = [
        torch.stack([on_grid(branch, offset, positions) for offset in row], dim=-1)
        for branch, row in zip(spec.branches, offsets)
    ]
    return torch.stack(per_branch).any(0)


def check_table(spec: DilatedSpec, offsets: OffsetTable) -> None:
    """Refuse an offset table that does not fit the spec."""
    entries = [row for row in offsets if isinstance(row, tuple) and all(o is None or type(o) is int for o in row)]
    if len(offsets) != len(spec.branches) or len(entries) < len(offsets) or len({*map(len, entries)}) != 1:
        raise ValueError(
            f"offsets must have {len(spec.branches)} rows, one per branch, with one entry per head: make them with "
            "spec.offsets(heads)"
        )


@checked(heads=COUNT, n=COUNT)
def uncovered_share(spec: DilatedSpec, heads: int | None = None, n: int | None = None) -> float:
    """The share of (row, head) pairs that no branch covers; by default over one cycle of heads and the longest segment.

    >>> uncovered_share(DilatedSpec.of([8, 16], [1, 2]))
    0.0
    """
    heads = max(*spec.dilation_rates, len(spec.branches)) if heads is None else heads
    n = max(spec.segment_lengths) if n is None else n
    # A sample of heads and rows bounds the cost of what is only a message; the share hardly varies between them.
    heads, n = min(heads, 64), min(n, 1 << 16)
    return 1.0 - covered_rows(spec, spec.offsets(heads), n).double().mean().item()


@checked(n=SIZE, offset=SIZE, start=SIZE, stop=SIZE)
def visible_pairs(
    branch: Branch, offset: int | None, n: int, *, is_causal: bool = False, start: int = 0, stop: int | None = None
) -> int:
    """How many (query, key) pairs of a document of `n` tokens the branch computes for one head.

    Counts all queries, or those at positions `[start, stop)`.

    >>> visible_pairs(Branch(4, 2), 0, 8), visible_pairs(Branch(4, 2), 0, 8, is_causal=True)
    (8, 6)
    >>> visible_pairs(Branch(4, 2), 0, 8, is_causal=True, start=5)  # the row at 6 sees 4 and 6
    2
    """
    if offset is None:
        return 0
    w, r = branch.segment_length, branch.dilation_rate

    def within(segment: int, queries: int) -> int:
        """Pairs of the first `queries` positions of a segment."""
        rows = grid_rows(queries, r, offset)
        return rows * (rows + 1) // 2 if is_causal else rows * grid_rows(segment, r, offset)

    def before(position: int) -> int:
        full, rest = divmod(position, w)
        return full * within(w, w) + within(min(w, n - full * w), rest)

    return before(n if stop is None else stop) - before(start)


@checked(n=SIZE, heads=COUNT, head_dim=COUNT, kv_heads=COUNT)
def forward_flops(
    spec: DilatedSpec, n: int, heads: int, head_dim: int, *, kv_heads: int | None = None, is_causal: bool = False
) -> int:
    """Floating-point operations of one forward over `n` tokens: 4 per visible pair and head dimension.

    The backward pass takes 2.5 times as many.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_divides("kv_heads", kv_heads, "heads", heads)
    pairs = sum(
        visible_pairs(branch, offset, n, is_causal=is_causal)
        for branch, row in zip(spec.branches, spec.offsets(kv_heads))
        for offset in row
    )
    return 4 * pairs * head_dim * (heads // kv_heads)


@checked(tokens=SIZE, heads=COUNT, head_dim=COUNT, kv_heads=COUNT, itemsize=COUNT)
def training_bytes(tokens: int, heads: int, head_dim: int, *, kv_heads: int | None = None, itemsize: int = 2) -> int:
    """Bytes that forward and backward must hold at once: q, k, v, out, their gradients, and lse and delta in float32.

    It is linear in the number of tokens and does not depend on the branches.

    >>> training_bytes(1024, 12, 64) / 1024  # bytes per token
    12384.0
    """
    kv_heads = heads if kv_heads is None else kv_heads
    tensors = (4 * heads + 4 * kv_heads) * head_dim * itemsize
    rows = 2 * heads * 4
    return tokens * (tensors + rows)


def common_period(*specs: DilatedSpec) -> int:
    """The shortest length that every branch's segments divide: two rows that see each other never straddle it."""
    return math.lcm(*(w for spec in specs for w in spec.segment_lengths))


def rounds_little(spec: DilatedSpec, table: OffsetTable) -> bool:
    """Whether branches may add to a result in the inputs' dtype; otherwise they add in float32, which is rounded once.

    Every branch that a row is on rounds the row. Up to two and a half branches per row, on average over the rows of the
    head that has the most, stay within the dtype's error budget.
    """
    most = max(
        sum(1 / branch.dilation_rate for branch, offset in zip(spec.branches, offsets) if offset is not None)
        for offsets in zip(*table)
    )
    return most <= 2.5


def most_scratch(tensor_bytes: int) -> int:
    """The bytes that a backward pass on Hopper may allocate for sums of dq, given the bytes of its tensors.

    >>> most_scratch(1_000_000_000)
    80000000
    """
    return max(64 << 20, int(0.08 * tensor_bytes))
