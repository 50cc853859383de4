"""The cases of the suites that measure contenders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.harness import Case
from benchmarks.suite import Options
from dilated_attention_pytorch.core.spec import branches_for

USUAL: dict[str, Any] = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
PAPER: dict[str, Any] = {"segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 6, 12)}
GIGAPATH: dict[str, Any] = {
    "segment_lengths": (1024, 5792, 32768, 185363, 1048576),
    "dilation_rates": (1, 2, 4, 8, 16),
}
CPU: dict[str, Any] = {**USUAL, "dtype": "float32", "device": "cpu"}
SIZES = ((64, 12), (128, 16))


def attention(device: str) -> Iterator[Case]:
    """Lengths, head dims and causality, each with branches that connect the whole sequence and with short ones.

    Then Llama's grouped queries, the branches of the paper, and the other head layouts.
    """
    if device == "cpu":
        yield from _each_way(causal=(False, True), tokens=8192, heads=4, head_dim=64, **CPU)
        return
    for (dim, heads), tokens in itertools.product(SIZES, (32_768, 131_072, 1_048_576)):
        for branches in (_reaching(tokens, heads), USUAL):
            yield from _each_way(causal=(False, True), tokens=tokens, heads=heads, head_dim=dim, **branches)
    for kv_heads in (8, 4):
        grouped: dict[str, Any] = {"tokens": 131_072, "heads": 32, "kv_heads": kv_heads, "head_dim": 128}
        yield from _each_way(causal=(True,), **grouped, **_reaching(131_072, kv_heads))
    for tokens in (131_072, 1_048_576):
        yield from _each_way(causal=(False, True), tokens=tokens, heads=12, head_dim=64, **PAPER)
    for layout in ("blocked", "grouped"):
        yield from _each_way(tokens=1_048_576, heads=12, head_dim=64, head_layout=layout, **USUAL)


def short(device: str) -> Iterator[Case]:
    """One short sequence, where launches and Python dominate."""
    shape = {"heads": 4, **CPU} if device == "cpu" else {"heads": 12, **USUAL}
    for tokens in (512, 1024, 2048, 4096, 8192):
        yield from _each_way(tokens=tokens, head_dim=64, **shape)


def scaling(device: str) -> Iterator[Case]:
    """Growing lengths, with branches that connect the whole sequence, whose rates grow with it, and with short ones.

    With four heads, 16M tokens need 65 GiB for forward and backward.
    """
    lengths = (13, 14, 15) if device == "cpu" else (20, 21, 22, 23, 24)
    shape = {"heads": 1, **CPU} if device == "cpu" else {"heads": 4, **USUAL}
    for power in lengths:
        tokens = 1 << power
        reaching = {**shape, **_reaching(tokens)}
        for branches in (reaching, shape) if reaching != shape else (shape,):
            yield from _each_way(tokens=tokens, head_dim=64, **branches)


def blocksparse(device: str) -> Iterator[Case]:
    """A tenth of the tiles of one segment over the whole sequence, and of several branches.

    For one undilated segment, FlexAttention can get the same block mask.
    """
    if device == "cpu":
        whole = {**CPU, "segment_lengths": (4096,), "dilation_rates": (1,)}
        yield from _each_way(causal=(False, True), tokens=4096, heads=4, head_dim=64, block_size=64, **_SPARSE, **whole)
        return
    whole = {"segment_lengths": (32_768,), "dilation_rates": (1,)}
    for dim, heads in SIZES:
        yield from _each_way(causal=(False, True), tokens=32_768, heads=heads, head_dim=dim, **_SPARSE, **whole)
    long: dict[str, Any] = {"segment_lengths": (16_384, 32_768, 65_536), "dilation_rates": (1, 2, 4)}
    yield from _each_way(tokens=131_072, heads=12, head_dim=64, **_SPARSE, **long)


def gigapath(device: str) -> Iterator[Case]:
    """Prov-GigaPath's slide encoder: a CLS token and the tiles of a slide, 12 layers, 16 heads of 48.

    Then the attention of one layer alone.
    """
    size = {"heads": 16, "head_dim": 48, "head_layout": "blocked", **GIGAPATH}
    if device == "cpu":
        yield from _each_way(tokens=2001, encoder_layers=2, dtype="float32", device="cpu", **size)
        yield Case(tokens=2001, dtype="float32", device="cpu", backward=True, **size)
        return
    for layers, tiles in itertools.product((12, 0), (10_000, 45_000, 200_000)):
        ways = _each_way(tokens=tiles + 1, encoder_layers=layers, **size)
        yield from (case for case in ways if layers or case.backward)


_SPARSE: dict[str, Any] = {"pattern": "dilated_sparse", "sparsity_ratio": 0.1}

CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    "attention": attention,
    "short": short,
    "scaling": scaling,
    "blocksparse": blocksparse,
    "gigapath": gigapath,
}


def choose_cases(suites: Sequence[str], options: Options) -> dict[str, list[Case]]:
    """The cases of each suite: all, or those of the given lengths whose titles have all the given words.

    >>> options = Options(device="cuda", cases=["forward"], tokens=[512])
    >>> {suite: [case.title for case in cases] for suite, cases in choose_cases(["short", "scaling"], options).items()}
    {'short': ['N=512 D=64 H=12 3 branches to 8,192 forward']}
    """
    every = {suite: list(CASES[suite](options.device)) for suite in suites}

    def wanted(case: Case) -> bool:
        return _has(case, options.cases) and (not options.tokens or case.tokens in options.tokens)

    chosen = {suite: list(filter(wanted, cases)) for suite, cases in every.items()}
    if not any(chosen.values()):
        titles = "\n  ".join(case.title for cases in every.values() for case in cases)
        stated = [f"all the words {list(options.cases)}"] * bool(options.cases)
        stated += [f"one of the lengths {list(options.tokens)}"] * bool(options.tokens)
        raise ValueError(f"no case has {' and '.join(stated)}: choose from\n  {titles}")
    return {suite: cases for suite, cases in chosen.items() if cases}


def _reaching(tokens: int, heads: int | None = None) -> dict[str, Any]:
    lengths, rates = branches_for(tokens, heads)
    return {"segment_lengths": lengths, "dilation_rates": rates}


def _has(case: Case, words: Sequence[str]) -> bool:
    """Whether the title has all of these words, without regard to commas: `forward` is not `forward+backward`."""
    return {word.replace(",", "") for word in words} <= set(case.title.replace(",", "").split())


def _each_way(causal: Sequence[bool] = (False,), **shape: Any) -> Iterator[Case]:
    for is_causal, backward in itertools.product(causal, (False, True)):
        yield Case(is_causal=is_causal, backward=backward, **shape)
