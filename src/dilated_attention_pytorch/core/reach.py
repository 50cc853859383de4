"""How far a pattern reaches: how many tokens a row depends on after some layers, in numbers, words and warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
from dilated_attention_pytorch.core.pattern import common_period
from dilated_attention_pytorch.core.spec import DilatedSpec, warn_once

COUNTED_TOKENS = 1 << 22  # the most tokens that `reach_shares` goes through
ROWS_TIMES_TOKENS = 1 << 21  # the most that `reach_shares` counts, if there is more than one row


def reach_shares(
    spec: DilatedSpec, tokens: int, heads: int, *, layers: Sequence[int] = (1, 2), is_causal: bool = False
) -> Tensor:
    """`(len(layers), rows)`: the share of the tokens that a row's result depends on after each number of layers.

    The rows are all rows, or in long sequences evenly spread ones, including the last. Causal rows count the tokens up
    to their own. `heads` is the number of key/value heads, whose results each layer mixes. The shares are counted, not
    estimated, for up to `COUNTED_TOKENS` tokens that the pattern can relate.

    >>> reach_shares(DilatedSpec.of([4, 8], [1, 2]), 16, heads=2, layers=[1, 2, 12]).mean(1)
    tensor([0.3750, 0.5000, 0.5000], dtype=torch.float64)
    >>> reach_shares(DilatedSpec.of([4, 16], [1, 4]), 16, heads=4, layers=[1, 2, 12]).mean(1)
    tensor([0.4375, 1.0000, 1.0000], dtype=torch.float64)
    """
    check_instance("spec", spec, DilatedSpec)
    check_flag("is_causal", is_causal)
    return _count(spec, tokens, heads, layers, is_causal, _spread)


def mean_and_least_reach(
    spec: DilatedSpec, tokens: int, heads: int, *, layers: Sequence[int], is_causal: bool
) -> tuple[Tensor, Tensor, int]:
    """Per number of layers: the mean of `reach_shares`, the least, and of how many rows the mean is.

    The least is also of rows with which segments begin: of causal rows, these see the fewest tokens.
    """
    shares = reach_shares(spec, tokens, heads, layers=layers, is_causal=is_causal)
    mean, least, count = shares.mean(1), shares.amin(1), shares.shape[1]
    if count < tokens:
        first = _count(spec, tokens, heads, layers, is_causal, lambda tokens, most: _begins(spec, tokens, most))
        least = least.minimum(first.amin(1))
    return mean, least, count


def _spread(count: int, most: int) -> Tensor:
    """At most `most` of the numbers below `count`, evenly spread: the last one first."""
    return torch.linspace(count - 1, 0, min(count, most), dtype=torch.float64).round().long()


def _begins(spec: DilatedSpec, tokens: int, most: int) -> Tensor:
    firsts = torch.cat([torch.arange(0, tokens, w) for w in spec.segment_lengths]).unique()
    return firsts[_spread(len(firsts), most)]


def _count(
    spec: DilatedSpec,
    tokens: int,
    heads: int,
    layers: Sequence[int],
    is_causal: bool,
    choose: Callable[[int, int], Tensor],
) -> Tensor:
    """`reach_shares` of the rows that `choose(tokens, most)` returns, which are at most `most`."""
    whole = tokens = check_whole("tokens", tokens, least=1, most=MOST_TOKENS)
    offsets = spec.offsets(check_whole("heads", heads, least=1))
    wanted = check_sequence("layers", layers, lambda name, count: check_whole(name, count, least=1, most=MOST_ENTRIES))
    if not wanted:
        raise ValueError("layers must have at least one entry, got none")
    period = common_period(spec)  # nothing crosses its multiples, and all of them are alike
    if tokens > COUNTED_TOKENS:
        if period > COUNTED_TOKENS:
            raise ValueError(
                f"reach is counted up to {COUNTED_TOKENS:,} tokens that a pattern relates, got {min(tokens, period):,}"
            )
        tokens = period * (COUNTED_TOKENS // period)  # the last ones
    rows = choose(tokens, max(1, ROWS_TIMES_TOKENS // tokens))
    count = len(rows)
    seen = torch.zeros(count, tokens, dtype=torch.bool)
    seen[torch.arange(count), rows] = True
    found, sums = {}, seen.sum(1)
    for depth in range(1, max(wanted) + 1):
        before = seen
        seen = before.clone()
        for branch, row in zip(spec.branches, offsets):
            w = min(branch.segment_length, tokens)
            period = min(branch.dilation_rate, w)  # a rate above w keeps one row per segment, as w does
            on_grid = torch.zeros(period, dtype=torch.bool)
            on_grid[[o for o in row if o is not None and o < w]] = True
            seen |= _through(before, w, on_grid, is_causal)
        settled, sums = sums, seen.sum(1)
        found[depth] = sums
        if torch.equal(settled, sums):
            break
    possible = rows + 1 + whole - tokens if is_causal else torch.full_like(rows, whole)
    return torch.stack([found[min(depth, max(found))] for depth in wanted]) / possible.double()


def _through(seen: Tensor, w: int, on_grid: Tensor, is_causal: bool) -> Tensor:
    """`(rows, n)`: the tokens that the tokens in `seen` read in a branch of segments `w`.

    `on_grid`, `(r,)`, says which remainders are on the grid of some head.
    """
    count, n = seen.shape
    segments, r = -(-n // w), len(on_grid)
    cut = F.pad(seen, (0, segments * w - n)).view(count, segments, w)
    cut = F.pad(cut, (0, -w % r)).view(count, segments, -1, r)
    # A causal row reads what is before it: a grid up to the last token of it that is seen.
    read = cut.flip(2).byte().cummax(2).values.flip(2).bool() if is_causal else cut.any(2, keepdim=True)
    return (read & on_grid).expand_as(cut).reshape(count, segments, -1)[:, :, :w].reshape(count, -1)[:, :n]


def reach_lines(spec: DilatedSpec, tokens: int, heads: int, layers: int, *, is_causal: bool) -> list[str]:
    """The reach after 1, 2 and `layers` layers, in words."""
    if tokens > COUNTED_TOKENS and (most := min(tokens, common_period(spec))) > COUNTED_TOKENS:
        return [f"at any depth {most:,} of {tokens:,} tokens at most; counted up to {COUNTED_TOKENS:,}"]
    depths = sorted({1, 2, layers})
    means, leasts, count = mean_and_least_reach(spec, tokens, heads, layers=depths, is_causal=is_causal)
    over = f" over {count:,} rows" if count < tokens else ""
    whose = "the tokens up to its own" if is_causal else f"{tokens:,} tokens"
    return [
        f"after {depth} layer{'s' * (depth > 1)} {_percent(mean)} of {whose} on average{over}, "
        f"{_percent(least)} at least"
        for depth, mean, least in zip(depths, means, leasts)
    ]


def _percent(share: Tensor) -> str:
    """Rounded down, so that 100 % means all."""
    return f"{math.floor(share.item() * 1e4 + 1e-9) / 1e4:.2%}"


def warn_of_reach(spec: DilatedSpec, tokens: int, heads: int, *, is_causal: bool) -> None:
    """Warn, once per pattern, if it relates fewer than the `tokens` of a document, or if `heads` key/value heads do not
    read all grids of a branch."""
    longest = max(spec.segment_lengths)
    shown = f"segments {list(spec.segment_lengths)} with rates {list(spec.dilation_rates)}"

    def better(length: int) -> str:
        return f"branches_for({length}, heads={heads}{', is_causal=True' if is_causal else ''})"

    if tokens > longest:
        nested = all(longest % w == 0 for w in spec.segment_lengths)
        limit = (
            "nothing crosses a border of the longest segments, in any number of such layers"
            if nested
            else "no row sees farther"
        )
        # Of modules, max_length chooses branches for attention that is not causal.
        instead = better(tokens) if is_causal else f"{better(tokens)} or max_length={tokens}"
        warn_once(
            spec,
            "tokens",
            f"{shown} relate at most {longest:,} of {tokens:,} tokens: {limit}. {instead} connects all of them",
        )
    for branch, row in reversed([*zip(spec.branches, spec.offsets(heads))]):
        read = len({*row} - {None})
        if read < branch.dilation_rate:
            return warn_once(
                spec,
                "heads",
                f"{shown}: {heads} key/value heads in the layout {spec.head_layout!r} read {read} of the "
                f"{branch.dilation_rate} grids of segments of {branch.segment_length:,}, and tokens on the others do "
                f"not see that far. {better(max(tokens, longest))} makes rates whose grids are all read",
            )
