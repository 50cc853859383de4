"""The attention weights of single rows, computed from the keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call, wide_dtype
from dilated_attention_pytorch.core.spans import documents


class RowWeights(NamedTuple):
    """The keys that a row of a head sees, in order, and their weights, which sum to 1; empty if it sees none."""

    positions: Tensor  # (keys,) int64, in the batch row
    weights: Tensor  # (keys,)


def row_weights(
    query: Tensor, key: Tensor, rows: Sequence[int], call: Call, spans: Tensor | None
) -> dict[tuple[int, int, int], RowWeights]:
    """The weights of every `(batch row, row, query head)`, each in O(keys seen) memory."""
    B, N, H, D = query.shape
    kv_heads, device = key.shape[2], query.device
    group, table = H // kv_heads, call.offsets(H, kv_heads)
    dtype = wide_dtype(query.dtype)
    nothing = RowWeights(torch.arange(0, device=device), query.new_empty(0, dtype=dtype))  # what padding sees
    found = dict.fromkeys(product(range(B), rows, range(H)), nothing)
    for batch_rows, start, length, _ in documents(spans, B, N):
        inside = [row for row in rows if start <= row < start + length]
        for b, row, kv_head in product(range(batch_rows.start, batch_rows.stop), inside, range(kv_heads)):
            offsets = [branch[kv_head] for branch in table]
            positions, times = _seen(call, offsets, row, start, start + length, device)
            heads = range(kv_head * group, (kv_head + 1) * group)
            # A key that k branches show counts k times: log k is added to its score.
            scores = query[b, row, heads.start : heads.stop].to(dtype) @ key[b, positions, kv_head].to(dtype).T
            weights = (scores * call.softmax_scale(D) + times.to(dtype).log()).softmax(-1)  # (group, keys)
            found |= {(b, row, head): RowWeights(positions, weights[g]) for g, head in enumerate(heads)}
    return found


def _seen(
    call: Call, offsets: list[int | None], row: int, start: int, end: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The positions that a row of the document `[start, end)` sees, and in how many branches."""
    seen = [torch.arange(0, device=device)]
    for branch, offset in zip(call.spec.branches, offsets):
        segment, within = divmod(row - start, branch.segment_length)
        if offset is None or within % branch.dilation_rate != offset:
            continue
        first = start + segment * branch.segment_length
        last = row + 1 if call.is_causal else min(first + branch.segment_length, end)
        seen.append(torch.arange(first + offset, last, branch.dilation_rate, device=device))
    positions, times = torch.cat(seen).unique(return_counts=True)
    return positions, times
