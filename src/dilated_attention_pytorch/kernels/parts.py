"""A dilated attention as dense problems on strided views.

Dilation is a row stride: the rows that one head reads in a branch are `x.unflatten(0, (S, w))[:, offset::r]`. So every
branch splits into a few *parts*, each a batch of `S` equal dense attentions over `M` rows, and a part's tensors are
views: nothing is gathered, nothing scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.core.pattern import grid_rows
from dilated_attention_pytorch.core.spans import documents
from dilated_attention_pytorch.core.spec import Problem


@dataclass(frozen=True)
class Part:
    """`segments` equal segments, from token `start` of batch rows `rows`, as the KV heads `heads` read them."""

    branch: int
    rows: slice
    start: int
    segments: int  # S
    segment_length: int  # w, or the length of a shorter last segment
    dilation_rate: int  # r
    offset: int
    heads: slice  # KV heads with this offset: always an arithmetic progression
    first: bool  # no earlier branch has these heads: their rows still hold the empty partial

    def view(self, x: Tensor, group: int = 0, groups: int = 1) -> Tensor:
        """The part's rows of `(B, N, H, ...)` as `(S, M, heads, ...)`; of a KV head's `groups` query heads, `group`."""
        x = x[self.rows, self.start : self.start + self.segments * self.segment_length]
        x = x.unflatten(1, (self.segments, self.segment_length))[:, :, self.offset :: self.dilation_rate]
        if groups > 1:
            x = x.unflatten(3, (-1, groups))[:, :, :, :, group]
        x = x[:, :, :, self.heads]  # (rows, S, M, heads, ...)
        # view, not flatten: an accumulator that is silently copied would lose what is written into it.
        return x.view(x.shape[0] * x.shape[1], *x.shape[2:])

    def positions(self, device: torch.device) -> Tensor:
        """`(S, M)`: the position in its batch row of each of the part's rows."""
        starts = self.start + self.segment_length * torch.arange(self.segments, device=device)
        starts = starts.repeat(self.rows.stop - self.rows.start)
        return starts[:, None] + torch.arange(self.offset, self.segment_length, self.dilation_rate, device=device)

    def batch_rows(self, device: torch.device) -> Tensor:
        """`(S,)`: the batch row of each of the part's segments."""
        return torch.arange(self.rows.start, self.rows.stop, device=device).repeat_interleave(self.segments)

    def query_heads(self, kv_heads: int, group: int, groups: int, device: torch.device) -> Tensor:
        """`(heads,)`: the query heads that `view(x, group, groups)` selects."""
        return torch.arange(kv_heads, device=device)[self.heads] * groups + group


def parts(problem: Problem, spans: Tensor | None, shape: torch.Size, kv_heads: int) -> Iterator[Part]:
    """The dense problems of a `(B, N, H, D)` call, branch by branch."""
    B, N, H, _ = shape
    table = problem.offsets(H, kv_heads)
    spoken_for = documents(spans, B, N)
    for index, branch in enumerate(problem.spec.branches):
        w, r = branch.segment_length, branch.dilation_rate
        for offset, heads in heads_by_offset(table[index]):
            first = all(earlier[heads.start] is None for earlier in table[:index])
            for rows, start, segments, length in _equal_segments(spoken_for, B, N, w):
                if grid_rows(length, r, offset):
                    yield Part(index, rows, start, segments, length, r, offset, heads, first)


def heads_by_offset(offsets: tuple[int | None, ...]) -> list[tuple[int, slice]]:
    """The offsets of a branch, each with the KV heads that have it: a slice, so that they are a view."""
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


def _equal_segments(
    spoken_for: list[tuple[slice, int, int]], batch: int, tokens: int, w: int
) -> Iterator[tuple[slice, int, int, int]]:
    """`(batch rows, start, segments, length)` runs whose rows can be viewed as one batch of segments."""
    for rows, start, n in spoken_for:
        full, tail = divmod(n, w)
        if full:
            together = full == 1 or full * w == tokens or rows.stop - rows.start == 1
            for run in [rows] if together else [slice(b, b + 1) for b in range(batch)]:
                yield run, start, full, w
        if tail:
            yield rows, start + full * w, 1, tail
