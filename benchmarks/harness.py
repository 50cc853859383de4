"""A `Case` describes what is measured; `compare` times two calls by turns."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dilated_attention_pytorch.core.block_layout import keys_seen, layout_for
from dilated_attention_pytorch.core.block_pattern import PatternType, SparsePatternConfig
from dilated_attention_pytorch.core.pattern import forward_flops, training_bytes
from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout
from dilated_attention_pytorch.measuring import Timing, machine, measure

__all__ = ["Case", "Comparison", "Timing", "compare", "free_memory", "machine", "measure", "wait_for"]


def wait_for(device: str) -> None:
    """Wait until a GPU has computed everything; on a CPU everything is computed already."""
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Free what the case before has left, so that the peak memory of the next one is its own."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call, or an encoder around it: shapes, pattern, dtype and device."""

    tokens: int
    heads: int
    head_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False
    head_layout: HeadLayout = "interleaved"
    backward: bool = False
    dtype: str = "bfloat16"
    device: str = "cuda"
    pattern: PatternType | None = None
    sparsity_ratio: float = 1.0
    block_size: int = 128
    kv_heads: int | None = None  # None: as many as query heads
    encoder_layers: int = 0  # above 0: an encoder of this many layers, whose feed-forward is four times as wide

    @property
    def spec(self) -> DilatedSpec:
        return DilatedSpec.of(self.segment_lengths, self.dilation_rates, self.head_layout)

    @property
    def sparse_config(self) -> SparsePatternConfig | None:
        if self.pattern is None:
            return None
        return SparsePatternConfig(self.pattern, self.sparsity_ratio, self.block_size)

    @property
    def flops(self) -> int:
        """FLOPs of visible pairs only; forward and backward together take 3.5 times those of the forward."""
        if self.sparse_config is None:
            alike = self.heads if self.kv_heads is None else self.kv_heads  # query heads of a group see the same rows
            forward = forward_flops(self.spec, self.tokens, alike, self.head_dim, is_causal=self.is_causal)
            forward *= self.heads // alike
        else:
            pairs = _kept_pairs(self.spec, self.tokens, self.heads, self.sparse_config, self.is_causal)
            forward = 4 * pairs * self.head_dim
        attention = forward * 7 // 2 if self.backward else forward
        if not self.encoder_layers:
            return attention
        width = self.heads * self.head_dim
        linear = 2 * self.tokens * 12 * width**2
        return self.encoder_layers * (attention + (3 if self.backward else 1) * linear)

    @property
    def title(self) -> str:
        """What distinguishes the case, in a few words."""
        branches = f"{len(self.segment_lengths)} branches to {max(self.segment_lengths):,}"
        heads = f"H={self.heads}" if self.kv_heads is None else f"H={self.heads}/{self.kv_heads}"
        words = [f"N={self.tokens:,}", f"D={self.head_dim}", heads, branches]
        words += [f"{self.encoder_layers} layers"] if self.encoder_layers else []
        words += ["causal"] if self.is_causal else []
        words += [self.head_layout] if self.head_layout != "interleaved" else []
        words += [self.pattern, f"{self.sparsity_ratio:g}"] if self.pattern is not None else []
        words += ["forward+backward" if self.backward else "forward"]
        return " ".join(words)

    @property
    def floor_bytes(self) -> int:
        """The bytes that forward and backward must hold at once."""
        itemsize = getattr(torch, self.dtype).itemsize
        return training_bytes(self.tokens, self.heads, self.head_dim, kv_heads=self.kv_heads, itemsize=itemsize)

    def tensors(self, sequences: int = 1, tokens: int | None = None) -> list[torch.Tensor]:
        """Random q, k, v and an output gradient, `(1, N, H, D)` by default; k and v have `kv_heads`."""
        dtype, tokens = getattr(torch, self.dtype), self.tokens if tokens is None else tokens
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        tensors = [
            torch.randn((sequences, tokens, heads, self.head_dim), dtype=dtype, device=self.device)
            for heads in (self.heads, kv_heads, kv_heads, self.heads)
        ]
        for x in tensors[:3]:
            x.requires_grad_(self.backward)
        return tensors


@functools.lru_cache
def _kept_pairs(spec: DilatedSpec, tokens: int, heads: int, config: SparsePatternConfig, is_causal: bool) -> int:
    offsets = spec.offsets(heads)
    layout = layout_for(spec, tokens, offsets, config, is_causal, torch.device("cpu"))
    return int(keys_seen(layout, spec, offsets, tokens, is_causal=is_causal).sum())


@dataclass(frozen=True)
class Comparison:
    """Median milliseconds of two calls timed by turns, and quotients of their fastest thirds.

    `noise` is the first call over itself, measured in the same way as `ratio`: the error to expect of a ratio.
    """

    off: float
    on: float
    ratio: float  # on / off
    noise: float  # off / off


def compare(
    off: Callable[[], object], on: Callable[[], object], device: str, seconds: float | None = None, least: int = 9
) -> Comparison:
    """Time two calls by turns, so that other work on the machine slows both alike.

    On a CPU, count the processor time of all threads, to which other processes do not add. On a GPU, a turn is several
    calls in a row, as in training: the host prepares the next one while the device computes.
    """
    cuda = device == "cuda"
    clock = time.perf_counter if cuda else time.process_time

    def once(run: Callable[[], object]) -> float:
        wait_for(device)
        began = clock()
        for _ in range(in_a_row):
            run()
        wait_for(device)
        return (clock() - began) * 1e3 / in_a_row

    in_a_row = 1

    for run in (off, on, off, on):
        once(run)
    seconds = seconds or (0.7 if cuda else 3.0)  # times vary less on a GPU
    if cuda:
        in_a_row = max(1, min(20, round(5.0 / once(off))))
    calls = (off, on, off)
    rounds = max(least, min(2000, round(seconds * 1e3 / in_a_row / max(2 * once(off) + once(on), 1e-3))))
    times: list[list[float]] = [[], [], []]
    for i in range(rounds):  # each call is first, second and last equally often
        for j in (i % 3, (i + 1) % 3, (i + 2) % 3):
            times[j].append(once(calls[j]))
    either = times[0] + times[2]
    first, second, both, other = (
        statistics.mean(sorted(found)[: -(-len(found) // 3)]) for found in (times[0], times[2], either, times[1])
    )
    return Comparison(statistics.median(either), statistics.median(times[1]), other / both, second / first)
