"""Pairs that several branches show, computed once: which branch computes them, and how often each counts.

Row `i` sees key `j` in several branches where their grids and segments are nested: the pair counts once for each. The
finest of these branches computes its score once and multiplies its weight by that number. A coarser branch computes
only the pairs that lie in different segments of the finer one: with segments of 2,048, 4,096 and 8,192 tokens and rates
1, 2 and 4, this is a fifth less work for the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dilated_attention_pytorch.core.spec import Branch, OffsetTable

# No kernel has larger tiles, in rows. Kernels leave out whole tiles, and a row's weight follows from its number in one.
TILE = 128
_LONGEST_PERIOD = 8  # divides the rows of every tile; kernels know periods of 2, 4 and 8


class Fold(NamedTuple):
    """What a branch computes of its own pairs, and of those of the coarser branches that are folded into it.

    Rows are grid rows, counted within a segment. Row `t` of a head is also on the grid of the folded branch of period
    `p` where `t - phase` is a multiple of `p`.
    """

    skipped: int = 0  # rows per segment of the finer branch, which computes the pairs within each; 0 if there is none
    periods: int = 0  # the sum of the periods, different powers of two, of the branches folded into this one
    phases: tuple[int, ...] = ()  # one per head
    is_empty: bool = False  # whether the finer branch computes every pair

    @property
    def is_plain(self) -> bool:
        """Whether the branch computes its own pairs, each once."""
        return not (self.skipped or self.periods or self.is_empty)


def fold_branches(branches: Sequence[Branch], table: OffsetTable, tokens: int) -> list[Fold]:
    """How each branch of documents of at most `tokens` tokens is computed; `table` has the offsets of their heads.

    >>> spec = [Branch(256, 1), Branch(512, 2), Branch(1024, 8)]
    >>> fold_branches(spec, ((0, 0), (0, 1), (0, 1)), 1024)[:2]
    [Fold(skipped=0, periods=2, phases=(0, 1), is_empty=False), Fold(skipped=128, periods=0, phases=(), is_empty=False)]
    """
    lengths = [min(branch.segment_length, tokens) for branch in branches]
    rates = [branch.dilation_rate for branch in branches]

    def is_nested(coarse: int, fine: int) -> bool:
        """Whether every pair of `coarse` within a segment of `fine` is a pair of `fine`."""
        if None in table[coarse] or None in table[fine] or rates[coarse] % rates[fine]:
            return False
        if any((a - b) % rates[fine] for a, b in zip(table[coarse], table[fine])):  # type: ignore[operator]
            return False
        if lengths[fine] == tokens:  # one segment
            return lengths[coarse] == tokens
        is_aligned = lengths[fine] % (rates[coarse] * TILE) == 0
        return is_aligned and (lengths[coarse] == tokens or lengths[coarse] % lengths[fine] == 0)

    def extends(index: int, chain: list[int]) -> bool:
        period = rates[index] // rates[chain[0]]
        is_power = rates[index] > rates[chain[-1]] and period & (period - 1) == 0
        return is_power and period <= _LONGEST_PERIOD and is_nested(index, chain[-1])

    # Each branch of a chain is folded into the one before it.
    chains: list[list[int]] = []
    for index in sorted(range(len(branches)), key=lambda index: (rates[index], lengths[index])):
        able = [chain for chain in chains if extends(index, chain)]
        if able:
            max(able, key=lambda chain: lengths[chain[-1]]).append(index)
        else:
            chains.append([index])
    folds = [Fold() for _ in branches]
    for chain in chains:
        for at, index in enumerate(chain):
            finer, coarser = chain[:at], chain[at + 1 :]
            is_empty = bool(finer) and lengths[finer[-1]] == lengths[index]
            skipped = lengths[finer[-1]] // rates[index] if finer and not is_empty else 0
            phases = []
            if coarser:
                pairs = zip(table[coarser[-1]], table[index])
                phases = [(a - b) // rates[index] for a, b in pairs]  # type: ignore[operator]
            periods = sum(rates[one] // rates[index] for one in coarser)
            folds[index] = Fold(skipped, periods, tuple(phases), is_empty)
    return folds
