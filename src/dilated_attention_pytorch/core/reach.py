"""How far a pattern reaches: patterns that connect every token, how many tokens a row depends on, and the warning."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.checks import (
    MOST_ENTRIES,
    MOST_TOKENS,
    check_flag,
    check_instance,
    check_sequence,
    check_whole,
)

if TYPE_CHECKING:
    from dilated_attention_pytorch.core.spec import DilatedSpec

Branches = tuple[tuple[int, ...], tuple[int, ...]]
"""Segment lengths and dilation rates, one entry per branch."""

COUNTED_TOKENS = 1 << 22  # `reach_shares` goes through all tokens of a sequence, up to this many
_COUNTED = 1 << 21  # rows times tokens, if there is more than one row

_warned: set[tuple[DilatedSpec, str]] = set()


class ReachWarning(UserWarning):
    """A pattern relates fewer tokens than its input has. It is given once per pattern and reason:

    - the sequence is longer than the longest segment,
    - a rate exceeds the number of key/value heads, so that some tokens are on no head's grid of that branch,
    - no branch has rate 1, so that some rows see nothing.

    Where this is intended, `warnings.filterwarnings("ignore", category=ReachWarning)` silences it.
    """


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
        is_causal: add short branches of rate 1 whose borders lie elsewhere. Under causality the first token of a
            segment sees its predecessor in a branch of rate 1 only; without them, the last tokens before a border of
            the shortest segments never reach the first ones after it, at any depth. With them every row depends on
            every earlier token, one layer later than without causality.

    Returns:
        `(segment_lengths, dilation_rates)`, which a module takes as they are: `DilatedAttention(*branches_for(n))`.

    >>> branches_for(32_768, heads=12)
    ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    >>> branches_for(1_000_000, heads=12)
    ((2048, 4096, 8192, 16384, 1048576), (1, 2, 4, 6, 12))
    >>> branches_for(20_000, is_causal=True)
    ((129, 2048, 4096, 8192, 16384, 32768), (1, 1, 2, 4, 8, 16))
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
        shared, between = lengths[0], []
        odd = (shortest // 16 if heads is None else max(shortest // 16, kept[-1])) | 1
        while shared < tokens:  # where borders of all branches of rate 1 meet first
            if odd > 1 and math.gcd(odd, shared) == 1:
                between.append(odd)
                shared *= odd
            odd += 2
        lengths, kept = [*between, *lengths], [1] * len(between) + kept
    return tuple(lengths), tuple(kept)


def stated_branches(
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    max_length: int | None,
    *,
    heads: int | None = None,
    head_layout: str = "interleaved",
) -> tuple[Sequence[int], Sequence[int]]:
    """The branches that a module is given: as such, or by the longest sequence."""
    if max_length is not None:
        if segment_lengths is not None or dilation_rates is not None:
            raise TypeError(
                f"max_length={max_length} takes the place of segment_lengths and dilation_rates, got "
                f"{segment_lengths!r} and {dilation_rates!r} beside it: state one or the other"
            )
        check_whole("max_length", max_length, least=1, most=MOST_TOKENS)
        refuse_grouped(head_layout)
        return branches_for(max_length, heads)
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


def reach_shares(
    spec: DilatedSpec, tokens: int, heads: int, *, layers: Sequence[int] = (1, 2), is_causal: bool = False
) -> Tensor:
    """`(len(layers), rows)`: the share of the tokens that a row's result depends on after each number of layers.

    Of all rows, or for long sequences of evenly spread ones, the last one among them. Causal rows count the tokens up
    to their own. `heads` are key/value heads, whose results each layer mixes. Counted, not estimated; up to
    `COUNTED_TOKENS` tokens that the pattern can relate.

    >>> from dilated_attention_pytorch.core.spec import DilatedSpec
    >>> reach_shares(DilatedSpec.of([4, 8], [1, 2]), 16, heads=2, layers=[1, 2, 12]).mean(1)
    tensor([0.3750, 0.5000, 0.5000], dtype=torch.float64)
    >>> reach_shares(DilatedSpec.of([4, 16], [1, 4]), 16, heads=4, layers=[1, 2, 12]).mean(1)
    tensor([0.4375, 1.0000, 1.0000], dtype=torch.float64)
    """
    from dilated_attention_pytorch.core.spec import DilatedSpec  # which imports this file

    check_instance("spec", spec, DilatedSpec)
    check_flag("is_causal", is_causal)
    whole = check_whole("tokens", tokens, least=1, most=MOST_TOKENS)
    offsets = spec.offsets(check_whole("heads", heads, least=1))
    wanted = check_sequence("layers", layers, lambda name, count: check_whole(name, count, least=1, most=MOST_ENTRIES))
    if not wanted:
        raise ValueError("layers must have at least one entry, got none")
    period = math.lcm(*spec.segment_lengths)  # nothing crosses its multiples, and all of them are alike
    if tokens > COUNTED_TOKENS:
        if period > COUNTED_TOKENS:
            raise ValueError(
                f"reach is counted up to {COUNTED_TOKENS:,} tokens that a pattern relates, got {min(tokens, period):,}"
            )
        tokens = period * (COUNTED_TOKENS // period)
    count = min(tokens, max(1, _COUNTED // tokens))
    rows = torch.linspace(tokens - 1, 0, count, dtype=torch.float64).round().long()
    seen = torch.zeros(count, tokens, dtype=torch.bool)
    seen[torch.arange(count), rows] = True
    found, sums = {}, seen.sum(1)
    for depth in range(1, max(wanted) + 1):
        before = seen
        seen = before.clone()
        for branch, row in zip(spec.branches, offsets):
            rate = branch.dilation_rate
            on_grid = torch.zeros(rate, dtype=torch.bool)
            on_grid[[o for o in row if o is not None]] = True
            seen |= _through(before, min(branch.segment_length, tokens), on_grid, is_causal)
        settled, sums = sums, seen.sum(1)
        found[depth] = sums
        if torch.equal(settled, sums):
            break
    possible = rows + 1 if is_causal else torch.full_like(rows, whole)
    return torch.stack([found[min(depth, max(found))] for depth in wanted]) / possible.double()


def _through(seen: Tensor, w: int, on_grid: Tensor, is_causal: bool) -> Tensor:
    """`(rows, n)`: what those of `seen` read in the branch of segments `w` whose grids are `on_grid`, `(r,)`."""
    count, n = seen.shape
    segments, r = -(-n // w), len(on_grid)
    cut = F.pad(seen, (0, segments * w - n)).view(count, segments, w)
    cut = F.pad(cut, (0, -w % r)).view(count, segments, -1, r)
    # A causal row reads what is before it: a grid up to the last token of it that is seen.
    read = cut.flip(2).byte().cummax(2).values.flip(2).bool() if is_causal else cut.any(2, keepdim=True)
    return (read & on_grid).expand_as(cut).reshape(count, segments, -1)[:, :, :w].reshape(count, -1)[:, :n]


def reach_lines(spec: DilatedSpec, tokens: int, heads: int, layers: int, *, is_causal: bool) -> list[str]:
    """The reach after 1, 2 and `layers` layers, in words."""
    if tokens > COUNTED_TOKENS and (most := min(tokens, math.lcm(*spec.segment_lengths))) > COUNTED_TOKENS:
        return [f"at any depth {most:,} of {tokens:,} tokens at most; counted up to {COUNTED_TOKENS:,}"]
    depths = sorted({1, 2, layers})
    shares = reach_shares(spec, tokens, heads, layers=depths, is_causal=is_causal)
    whose = "the tokens up to its own" if is_causal else f"{tokens:,} tokens"
    return [
        f"after {depth} layer{'s' * (depth > 1)} {_percent(share.mean())} of {whose} on average, "
        f"{_percent(share.min())} at least"
        for depth, share in zip(depths, shares)
    ]


def _percent(share: Tensor) -> str:
    """Rounded down: all is all."""
    return f"{math.floor(share.item() * 1e4 + 1e-9) / 1e4:.2%}"


def warn_of_reach(spec: DilatedSpec, tokens: int, heads: int) -> None:
    """Warn, once per pattern, if it relates fewer than the `tokens` of a document, or if `heads` key/value heads do not
    read all grids of a branch."""
    longest = max(spec.segment_lengths)
    shown = f"segments {list(spec.segment_lengths)} with rates {list(spec.dilation_rates)}"
    if tokens > longest:
        nested = all(longest % w == 0 for w in spec.segment_lengths)
        limit = "nothing crosses a border of the longest segments, at any depth" if nested else "no row sees farther"
        warn_once(
            spec,
            "tokens",
            lambda: (
                f"{shown} relate at most {longest:,} of {tokens:,} tokens: {limit}. "
                f"branches_for({tokens}, heads={heads}) or max_length={tokens} connects all of them"
            ),
        )
    grids = [(branch, len({*row} - {None})) for branch, row in zip(spec.branches, spec.offsets(heads))]
    unread = [(branch, read) for branch, read in grids if read < branch.dilation_rate]
    if unread:
        branch, read = unread[-1]
        warn_once(
            spec,
            "heads",
            lambda: (
                f"{shown}: {heads} key/value heads in the layout {spec.head_layout!r} read {read} of the "
                f"{branch.dilation_rate} grids of segments of {branch.segment_length:,}, and tokens on the others do "
                f"not see that far. branches_for({max(tokens, longest)}, heads={heads}) makes rates whose grids are "
                "all read"
            ),
        )


def warn_once(spec: DilatedSpec, reason: str, message: Callable[[], str]) -> None:
    """Give a `ReachWarning` at the user's own line, the first time for a pattern and a reason."""
    if torch.compiler.is_compiling() or (spec, reason) in _warned:
        return
    _warned.add((spec, reason))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message(), ReachWarning, stacklevel=level)


_NOT_THE_USER = (__name__.split(".")[0], "torch")
