"""Which attention probabilities are dropped: a pure function of (seed, batch row, head, query, key).

Every backend draws the same mask from the same seed, whatever its tiles, so that recomputation in backward, under
activation checkpointing or on another rank agrees. A key that several branches show to a query is dropped in all of
them or in none: it has one weight in the row's one softmax, which kernels compute once (`core.folding`).

Wellons' `lowbias32` hashes the key to one 32-bit word, and all else to one word per query row; words are stored in
int64, because PyTorch has no unsigned arithmetic. A probability is dropped where `factor * key word + row word` is
small, with an odd factor made from the row's word: one multiply-add per probability, which kernels can afford. Two
rows, or two keys, then agree as often as independent draws do.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def draw_seed(device: torch.device) -> Tensor:
    """Two 32-bit words from the device's own generator, so that graph capture and checkpointing replay them."""
    return torch.randint(0, 1 << 32, (2,), dtype=torch.int64, device=device)


def keep_mask(seed: Tensor, dropout_p: float, *, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Bool, True where a probability survives; `rows, heads, queries, keys` are int64 and broadcast together.

    `rows` are batch rows, `heads` global query heads, `queries` and `keys` positions in the batch row.

    >>> i, j = torch.arange(1000)[:, None], torch.arange(1000)[None, :]
    >>> kept = keep_mask(torch.tensor([1, 2]), 0.25, rows=i * 0, heads=i * 0, queries=i, keys=j)
    >>> abs(kept.double().mean().item() - 0.75) < 0.01
    True
    """
    word = _mix(seed[0] + _GOLDEN)
    for part in (seed[1], rows, heads, queries):
        word = _mix(word ^ _mix(part + _GOLDEN))
    factor = _mix(word + _GOLDEN) | 1
    return ((factor * _mix(keys + _GOLDEN) + word) & _WORD) >= threshold_of(dropout_p)


def threshold_of(dropout_p: float) -> int:
    """Words below it are dropped."""
    return min(round(dropout_p * (_WORD + 1)), _WORD)


def _mix(word: Tensor) -> Tensor:
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)
