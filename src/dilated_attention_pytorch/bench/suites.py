"""The suites: which cases, against whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from dilated_attention_pytorch.bench.harness import Case

USUAL: dict[str, Any] = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
PAPER: dict[str, Any] = {"segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 6, 12)}
CPU: dict[str, Any] = {**USUAL, "dtype": "float32", "device": "cpu"}
SIZES = ((64, 12), (128, 16))


def attention(device: str) -> Iterator[Case]:
    """Forward, and forward + backward, over lengths, head dims and causality; then the paper's own branches."""
    if device == "cpu":
        for causal, backward in itertools.product((False, True), repeat=2):
            yield Case(tokens=16_384, heads=4, head_dim=64, is_causal=causal, backward=backward, **CPU)
        return
    for (dim, heads), tokens in itertools.product(SIZES, (32_768, 131_072, 1_048_576)):
        for causal, backward in itertools.product((False, True), repeat=2):
            yield Case(tokens=tokens, heads=heads, head_dim=dim, is_causal=causal, backward=backward, **USUAL)
    for causal, backward in itertools.product((False, True), repeat=2):
        yield Case(tokens=131_072, heads=12, head_dim=64, is_causal=causal, backward=backward, **PAPER)


def short(device: str) -> Iterator[Case]:
    """One short sequence, where launches and Python count."""
    shape = CPU if device == "cpu" else USUAL
    for tokens, backward in itertools.product((512, 2048, 8192), (False, True)):
        yield Case(tokens=tokens, heads=12, head_dim=64, backward=backward, **shape)


def scaling(device: str) -> Iterator[Case]:
    """Time over sequence length."""
    lengths = (4096, 8192, 16_384) if device == "cpu" else (1 << 20, 1 << 22, 1 << 24)
    shape = CPU if device == "cpu" else USUAL
    for tokens, backward in itertools.product(lengths, (False, True)):
        yield Case(tokens=tokens, heads=4, head_dim=64, backward=backward, **shape)


SUITES: dict[str, Callable[[str], Iterator[Case]]] = {"attention": attention, "short": short, "scaling": scaling}
