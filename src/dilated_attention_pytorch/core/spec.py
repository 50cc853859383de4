"""The pattern of a dilated attention as frozen values: its branches, and how heads are laid over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dilated_attention_pytorch.core.checks import (
    MOST_ENTRIES,
    MOST_TOKENS,
    check_choice,
    check_instance,
    check_sequence,
    check_whole,
)
from dilated_attention_pytorch.core.reach import branches_for, refuse_grouped, warn_once

HeadLayout = Literal["interleaved", "blocked", "grouped"]
HEAD_LAYOUTS: tuple[str, ...] = get_args(HeadLayout)

# offset[branch][head]; None where the head is absent from the branch
OffsetTable = tuple[tuple["int | None", ...], ...]


@dataclass(frozen=True)
class Branch:
    """A segment length `w` and a dilation rate `r`: within each segment of `w` tokens every `r`-th one is read.

    >>> Branch(2048, 4)
    Branch(segment_length=2048, dilation_rate=4)
    """

    segment_length: int
    dilation_rate: int

    def __post_init__(self) -> None:
        for name in ("segment_length", "dilation_rate"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), least=1, most=MOST_TOKENS))


@dataclass(frozen=True)
class DilatedSpec:
    """The branches of a dilated attention and how heads are laid over them; hashable, so it serves as a cache key.

    A spec without a branch of dilation rate 1 leaves (row, head) pairs that no branch covers: their output is 0, and
    constructing it warns once. In the `grouped` layout a head has the rows of its own branch only, by design.

    >>> spec = DilatedSpec.of([4, 8], [1, 2])
    >>> spec.offsets(4)
    ((0, 0, 0, 0), (0, 1, 0, 1))
    >>> DilatedSpec.of([4, 8], [1, 2], "grouped").offsets(4)
    ((0, 0, None, None), (None, None, 1, 1))
    """

    branches: tuple[Branch, ...]
    head_layout: HeadLayout = "interleaved"

    def __post_init__(self) -> None:
        for i, branch in enumerate(check_sequence("branches", self.branches)):
            check_instance(f"branches[{i}]", branch, Branch)
        check_choice("head_layout", self.head_layout, HEAD_LAYOUTS)
        object.__setattr__(self, "branches", tuple(self.branches))
        if not self.branches:
            raise ValueError("a dilated attention needs a branch: segment_lengths and dilation_rates are empty")
        if all(branch.dilation_rate > 1 for branch in self.branches):
            warn_once(self, "rows", self._uncovered)

    @classmethod
    def of(
        cls, segment_lengths: Sequence[int], dilation_rates: Sequence[int], head_layout: HeadLayout = "interleaved"
    ) -> DilatedSpec:
        """The spec of two lists of equal length, paired in order."""
        for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
            check_sequence(name, values)
        if len(segment_lengths) != len(dilation_rates):
            raise ValueError(
                f"segment_lengths and dilation_rates must pair up, got {len(segment_lengths)} lengths "
                f"{list(segment_lengths)} and {len(dilation_rates)} rates {list(dilation_rates)}"
            )
        return cls(tuple(Branch(w, r) for w, r in zip(segment_lengths, dilation_rates)), head_layout)

    @classmethod
    def for_length(
        cls,
        tokens: int,
        heads: int | None = None,
        *,
        shortest: int = 2048,
        is_causal: bool = False,
        head_layout: HeadLayout = "interleaved",
    ) -> DilatedSpec:
        """The spec of `branches_for`, which connects all of `tokens` tokens.

        >>> DilatedSpec.for_length(10_000, heads=8).dilation_rates
        (1, 2, 4, 8)
        """
        refuse_grouped(head_layout)
        return cls.of(*branches_for(tokens, heads, shortest=shortest, is_causal=is_causal), head_layout)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return tuple(branch.segment_length for branch in self.branches)

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        return tuple(branch.dilation_rate for branch in self.branches)

    @property
    def keywords(self) -> dict[str, Any]:
        """This pattern as the keywords of `dilated_attention`, of modules and of caches."""
        return {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "head_layout": self.head_layout,
        }

    def offsets(self, heads: int, *, first: int = 0, total: int | None = None) -> OffsetTable:
        """The offset of each of `heads` key/value heads on each branch, None where a head is absent.

        Under head sharding `first` is the global index of the first head and `total` the global number of heads.
        """
        check_whole("heads", heads, least=0, most=MOST_ENTRIES)
        total = heads if total is None else check_whole("total", total, least=0, most=MOST_TOKENS)
        check_whole("first", first)
        if not 0 <= first <= total - heads:
            raise ValueError(
                f"heads [{first}, {first + heads}) do not lie within the {total} heads in all: "
                "pass the global head_offset and total_heads"
            )
        mine = range(first, first + heads)
        if self.head_layout == "interleaved":
            return tuple(tuple(h % branch.dilation_rate for h in mine) for branch in self.branches)
        if self.head_layout == "blocked":
            return tuple(tuple(h // math.ceil(total / branch.dilation_rate) for h in mine) for branch in self.branches)
        small, larger = divmod(total, len(self.branches))
        # The first `larger` groups have one head more than the others.
        first_of_group = [g * small + min(g, larger) for g in range(len(self.branches) + 1)]
        return tuple(
            tuple(g % branch.dilation_rate if h in range(*first_of_group[g : g + 2]) else None for h in mine)
            for g, branch in enumerate(self.branches)
        )

    def _uncovered(self) -> str:
        from dilated_attention_pytorch.core.pattern import uncovered_share

        return (
            f"no branch of {self} has dilation rate 1: {uncovered_share(self):.0%} of the (row, head) pairs are on "
            "no branch's grid and give 0; add a branch with rate 1 to cover every row"
        )
