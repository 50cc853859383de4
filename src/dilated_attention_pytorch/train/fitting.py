"""Which memory options make a step fit into a GPU, and how long the sequence may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilated_attention_pytorch.core.pattern import forward_flops
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.footprint import Footprint, feed_forward_matrices, footprint, needed
from dilated_attention_pytorch.train.memory import Checkpointing, MemoryOptions, OptimizerName

MLP_TILE = 4096
LOSS_CHUNK = 2048
_GRAIN = 1024  # tokens: the resolution of the longest sequence
_MOST_TOKENS = 1 << 34


@dataclass(frozen=True)
class Fit:
    """A step that fits: its options, its memory, and its work relative to the same step without recomputation."""

    options: MemoryOptions
    tokens: int
    footprint: Footprint
    work: float

    @property
    def needed(self) -> int:
        return needed(self.footprint.peak)


def choices(*, offload: bool = True, eight_bit: OptimizerName = "adamw8bit-torchao") -> list[MemoryOptions]:
    """Every combination of the techniques that the memory model knows, in bfloat16 products."""
    kept: Sequence[Checkpointing] = ("none", "selective", "full")
    found = []
    for state, moved, checkpointing, tile, chunk in itertools.product(
        range(3), (False, True) if offload else (False,), kept, (0, MLP_TILE), (0, LOSS_CHUNK)
    ):
        if moved and checkpointing == "none":
            continue
        found.append(
            MemoryOptions(
                precision="bf16",
                checkpointing=checkpointing,
                offload=moved,
                mlp_tile=tile,
                loss_chunk=chunk,
                optimizer=eight_bit if state else "adamw",
                parameters="bf16" if state == 2 else "fp32",
            )
        )
    return found


def by_cost(config: ModelConfig, tokens: int, options: Sequence[MemoryOptions]) -> list[MemoryOptions]:
    """Options by cost: those that only recompute, then those that round, then those that copy to host memory."""

    def cost(one: MemoryOptions) -> tuple[bool, int, int, int]:
        rounds = (one.optimizer != "adamw") + (one.parameters == "bf16")
        techniques = (one.checkpointing != "none") + bool(one.mlp_tile) + bool(one.loss_chunk)
        return one.offload, rounds, step_flops(config, tokens, one), techniques

    return sorted(options, key=cost)


def cheapest_fit(
    config: ModelConfig,
    tokens: int,
    gpu_bytes: int,
    *,
    batch: int = 1,
    host_bytes: int | None = None,
    options: Sequence[MemoryOptions] | None = None,
) -> Fit | None:
    """The cheapest options with which a step on `tokens` tokens fits, or None."""
    for one in by_cost(config, tokens, choices() if options is None else options):
        found = footprint(config, tokens, one, batch=batch)
        if _fits(found, gpu_bytes, host_bytes):
            return _fit(config, tokens, one, found)
    return None


def longest_fits(
    config: ModelConfig,
    gpu_bytes: int,
    *,
    batch: int = 1,
    host_bytes: int | None = None,
    options: Sequence[MemoryOptions] | None = None,
) -> Iterator[Fit]:
    """The longest sequence of each of the options, by cost, that allows a longer one than all cheaper options."""
    best = 0
    for one in by_cost(config, 1 << 17, choices() if options is None else options):
        tokens = _longest(config, one, gpu_bytes, host_bytes, batch, best)
        if tokens > best:
            best = tokens
            yield _fit(config, tokens, one, footprint(config, tokens, one, batch=batch))


def step_flops(config: ModelConfig, tokens: int, options: MemoryOptions) -> int:
    """Floating-point operations of the products of a step on one sequence, with those that are computed again."""
    E, F = config.d_model, config.dim_feedforward
    heads = config.num_kv_heads or config.num_heads
    projections = tokens * 4 * E * (E + heads * config.head_dim)
    hidden = tokens * 2 * E * F  # of one linear layer of a feed-forward network
    layers = feed_forward_matrices(config)
    head = tokens * 2 * E * config.vocab_size
    attention = forward_flops(
        config.spec, tokens, config.num_heads, config.head_dim, kv_heads=config.num_kv_heads, is_causal=True
    )
    layer = 3 * (projections + layers * hidden) + attention * 7 // 2
    if options.checkpointing != "none":  # the result of the last linear layer is not computed again
        layer += projections + (layers - 1) * hidden + (attention if options.checkpointing == "full" else 0)
    if options.mlp_tile:
        layer += layers * hidden if options.checkpointing == "none" else hidden
    return config.num_layers * layer + 3 * head


def _fit(config: ModelConfig, tokens: int, options: MemoryOptions, found: Footprint) -> Fit:
    least = step_flops(config, tokens, MemoryOptions())
    return Fit(options, tokens, found, step_flops(config, tokens, options) / least)


def _fits(found: Footprint, gpu_bytes: int, host_bytes: int | None) -> bool:
    return needed(found.peak) <= gpu_bytes and (host_bytes is None or found.host <= host_bytes)


def _longest(
    config: ModelConfig, options: MemoryOptions, gpu_bytes: int, host_bytes: int | None, batch: int, least: int
) -> int:
    """The longest multiple of 1,024 tokens that fits, or 0 where nothing longer than `least` does."""

    def fits(grains: int) -> bool:
        return _fits(footprint(config, grains * _GRAIN, options, batch=batch), gpu_bytes, host_bytes)

    low = least // _GRAIN + 1
    if not fits(low):
        return 0
    high = 2 * low
    while fits(high) and high * _GRAIN < _MOST_TOKENS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _GRAIN
