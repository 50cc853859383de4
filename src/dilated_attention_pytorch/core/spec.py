"""The pattern of a dilated attention: its branches, how heads are laid over them, and branches for a length."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal, get_args

import torch

from dilated_attention_pytorch.core.checks import (
    MOST_ENTRIES,
    MOST_TOKENS,
    check_choice,
    check_flag,
    check_instance,
    check_sequence,
    check_whole,
)

HeadLayout = Literal["interleaved", "blocked", "grouped"]
HEAD_LAYOUTS: tuple[str, ...] = get_args(HeadLayout)

# offset[branch][head]; None where the head is absent from the branch
OffsetTable = tuple[tuple["int | None", ...], ...]
# segment lengths and dilation rates, one entry per branch
Branches = tuple[tuple[int, ...], tuple[int, ...]]

_FAR = 8  # causal models learned better with more near tokens in place of the branches with rates between 1 and this


class ReachWarning(UserWarning):
    """A pattern relates fewer tokens than its input has. Each pattern warns once per reason:

    - the sequence is longer than the longest segment,
    - a rate exceeds the number of key/value heads, so that some tokens are on no head's grid of that branch,
    - no branch has rate 1, so that some rows see nothing.

    Where this is intended, `warnings.filterwarnings("ignore", category=ReachWarning)` silences it.
    """


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
    constructing it warns once. In the `grouped` layout a head covers only the rows of its own branch, by design.

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

    def __str__(self) -> str:
        layout = "" if self.head_layout == "interleaved" else f" in the layout {self.head_layout!r}"
        return f"segments {list(self.segment_lengths)} with rates {list(self.dilation_rates)}{layout}"

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

    def staggered(self) -> DilatedSpec:
        """The same rates with segments 23/16 as long: nearly the square root of 2, so that borders rarely meet.

        >>> DilatedSpec.of([2048, 4096], [1, 2]).staggered().segment_lengths
        (2944, 5888)
        """
        shortest = min(self.segment_lengths)
        longer = shortest * 23 // 16  # segments that are multiples of it stay multiples
        lengths = [w * longer // shortest for w in self.segment_lengths]
        return DilatedSpec.of(lengths, self.dilation_rates, self.head_layout)

    def of_layer(self, layer: int, stagger: bool) -> DilatedSpec:
        """This pattern, or in every other layer of a model with `stagger` the staggered one.

        A causal row sees few tokens before it if a segment has just begun; there it sees more of them.
        """
        return self.staggered() if stagger and layer % 2 else self

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


def branches_for(tokens: int, heads: int | None = None, *, shortest: int = 2048, is_causal: bool = False) -> Branches:
    """Segment lengths and dilation rates that connect all of `tokens` tokens.

    The first branch has segments of `shortest` tokens and rate 1. Segments and rates grow together from there; the
    last segment covers the sequence. With 12 heads and 32,768 tokens they are those of the LongNet paper.

    Args:
        tokens: the longest sequence.
        heads: the number of key/value heads. Rates are then divisors of it, so that every token is on some head's grid
            of every branch, and two layers connect every two tokens. The last branch then computes at least
            `tokens / heads^2` keys per row and head, which grows with the sequence. Without `heads` rates grow up to
            `shortest`, and the branches together compute about `2 * shortest` keys per row and head. Tokens between
            the grids then reach far through their neighbours only, which takes a third layer.
        shortest: the length of the first segments, a power of two.
        is_causal: the branches for causal attention. A causal row sees few tokens before it if its segment has just
            begun, and the first one sees its predecessor in a branch of rate 1 only. So there is a second branch of
            rate 1, whose segments are 11/16 as long and end elsewhere. From about `shortest^2 * 11 / 16` tokens on, 2.9
            million by default, there is a third one, which is short. In turn, there is no branch with a rate between 1
            and 8 except the last. With `heads`, the rate of the last is the largest of at most 8, or the one without
            causality if that is larger. Every row depends on every earlier token, one layer later than without
            causality.

    Returns:
        `(segment_lengths, dilation_rates)`, which a module takes as they are: `DilatedAttention(*branches_for(n))`.

    >>> branches_for(32_768, heads=12)
    ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    >>> branches_for(1_000_000, heads=12)
    ((2048, 4096, 8192, 16384, 1048576), (1, 2, 4, 6, 12))
    >>> branches_for(32_768, heads=12, is_causal=True)
    ((1407, 2048, 32768), (1, 1, 12))
    """
    tokens = check_whole("tokens", tokens, least=1, most=MOST_TOKENS)
    shortest = check_whole("shortest", shortest, least=1, most=MOST_TOKENS)
    heads = None if heads is None else check_whole("heads", heads, least=1, most=MOST_ENTRIES)
    if shortest & (shortest - 1):
        raise ValueError(f"shortest must be a power of two, got {shortest}")
    powers = [1 << i for i in range(shortest.bit_length())]  # 1 to shortest
    rates = powers if heads is None else [r for r in range(1, min(heads, shortest) + 1) if heads % r == 0]
    # Of the rates that share a length, the largest.
    branches = {shortest * next(power for power in powers if power >= rate): rate for rate in rates}
    reaching = [w for w in branches if w < tokens]
    if len(reaching) < len(branches):
        reaching.append(list(branches)[len(reaching)])
    last = reaching[-1]
    while last < tokens:
        last *= 2
    lengths, kept = [*reaching[:-1], last], [branches[w] for w in reaching]
    if check_flag("is_causal", is_causal):
        far = [(w, r) for w, r in zip(lengths[:-1], kept) if r >= _FAR]
        if len(lengths) > 1:
            most = kept[-1] if heads is None else max(kept[-1], _FAR)
            far.append((last, max(rate for rate in branches.values() if rate <= most)))
        grids = far[-1][1] if far and heads is not None else 1  # a near segment has tokens of all of them
        near = _near_lengths(lengths[0], tokens, shortest, grids)
        lengths, kept = [*near, *(w for w, _ in far)], [*(1 for _ in near), *(r for _, r in far)]
    return tuple(lengths), tuple(kept)


def _near_lengths(first: int, tokens: int, shortest: int, least: int) -> list[int]:
    """Lengths of causal branches of rate 1: `first`, and odd ones until all of them share no border within `tokens`."""
    near, shared = [first], first
    odd_lengths = chain([max(shortest * 11 // 16 - 1, least) | 1], count(max(shortest // 16, least) | 1, 2))
    while shared < tokens:
        odd = next(odd_lengths)
        if odd > 1 and math.gcd(odd, shared) == 1:
            near.append(odd)
            shared *= odd
    return sorted(near)


def stated_branches(
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    max_length: int | None,
    *,
    heads: int | None = None,
    head_layout: str = "interleaved",
    is_causal: bool = False,
) -> tuple[Sequence[int], Sequence[int]]:
    """The branches of a module, as stated or, by `max_length`, as `branches_for` chooses them."""
    if max_length is not None:
        if segment_lengths is not None or dilation_rates is not None:
            raise TypeError(
                f"max_length={max_length} takes the place of segment_lengths and dilation_rates, got "
                f"{segment_lengths!r} and {dilation_rates!r} beside it: state one or the other"
            )
        check_whole("max_length", max_length, least=1, most=MOST_TOKENS)
        refuse_grouped(head_layout)
        return branches_for(max_length, heads, is_causal=is_causal)
    if segment_lengths is None or dilation_rates is None:
        raise TypeError(
            f"state segment_lengths and dilation_rates, or max_length to connect that many tokens; got "
            f"segment_lengths={segment_lengths!r}, dilation_rates={dilation_rates!r} and max_length=None"
        )
    return segment_lengths, dilation_rates


def refuse_grouped(head_layout: str) -> None:
    if head_layout == "grouped":
        raise ValueError(
            "in the layout 'grouped' all heads of a branch read one grid, and no branches connect every token: use "
            "'interleaved' or 'blocked', or state segment_lengths and dilation_rates"
        )


def warn_once(spec: DilatedSpec, reason: str, message: str | Callable[[], str]) -> None:
    """Give a `ReachWarning` at the user's own line, the first time for a pattern and a reason."""
    if torch.compiler.is_compiling() or (spec, reason) in _warned:
        return
    _warned.add((spec, reason))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message if isinstance(message, str) else message(), ReachWarning, stacklevel=level)


def never_warn(spec: DilatedSpec) -> None:
    """Give no `ReachWarning` for a spec: it is part of a larger pattern, which relates what this part does not."""
    if not torch.compiler.is_compiling():
        _warned.update((spec, reason) for reason in ("rows", "tokens", "heads"))


_NOT_THE_USER = (__name__.split(".")[0], "torch")
_warned: set[tuple[DilatedSpec, str]] = set()
