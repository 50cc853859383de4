"""The attention weights of single rows, computed from the keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.spans import documents


class RowWeights(NamedTuple):
    """The keys that a row of a head sees, in order, and their weights, which sum to 1; empty if it sees none."""

    positions: Tensor  # (keys,) int64, in the batch row
    weights: Tensor  # (keys,)


def row_weights(
    query: Tensor, key: Tensor, rows: Sequence[int], call: Call, spans: Tensor | None
) -> dict[tuple[int, int, int], RowWeights]:
    """The weights of every `(batch row, row, query head)`; O(keys seen) memory for each."""
    B, N, H, D = query.shape
    kv_heads = key.shape[2]
    group, scale = H // kv_heads, call.softmax_scale(D)
    table = call.offsets(H, kv_heads)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    home = _documents_of(rows, spans, B, N)
    found = {}
    for b in range(B):
        for row in rows:
            for kv_head in range(kv_heads):
                offsets = [branch[kv_head] for branch in table]
                positions, times = _seen(call, offsets, row, home.get((b, row)), query.device)
                heads = slice(kv_head * group, (kv_head + 1) * group)
                # A key that k branches show counts k times: log k is added to its score.
                scores = query[b, row, heads].to(dtype) @ key[b, positions, kv_head].to(dtype).T * scale
                weights = (scores + times.to(dtype).log()).softmax(-1)  # (group, keys)
                for g in range(group):
                    found[b, row, kv_head * group + g] = RowWeights(positions, weights[g])
    return found


def _documents_of(
    rows: Sequence[int], spans: Tensor | None, batch: int, tokens: int
) -> dict[tuple[int, int], tuple[int, int]]:
    """`(start, end)` of the document of each `(batch row, row)`; padding has none."""
    return {
        (b, row): (start, start + length)
        for batch_rows, start, length in documents(spans, batch, tokens)
        for b in range(batch_rows.start, batch_rows.stop)
        for row in rows
        if start <= row < start + length
    }


def _seen(
    call: Call, offsets: list[int | None], row: int, document: tuple[int, int] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The positions that a row sees, and in how many branches."""
    empty = torch.arange(0, device=device)
    if document is None:
        return empty, empty
    start, end = document
    seen = [empty]
    for branch, offset in zip(call.spec.branches, offsets):
        segment, within = divmod(row - start, branch.segment_length)
        if offset is None or within % branch.dilation_rate != offset:
            continue
        first = start + segment * branch.segment_length
        last = row + 1 if call.is_causal else min(first + branch.segment_length, end)
        seen.append(torch.arange(first + offset, last, branch.dilation_rate, device=device))
    positions, times = torch.cat(seen).unique(return_counts=True)
    return positions, times
