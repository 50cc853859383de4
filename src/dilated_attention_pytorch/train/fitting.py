"""Which memory options make a step fit into a GPU, and how long the sequence may be."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dilated_attention_pytorch.core.pattern import forward_flops
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.footprint import (
    Footprint,
    feed_forward_matrices,
    footprint,
    needed,
    parameter_count,
)
from dilated_attention_pytorch.train.memory import Checkpointing, MemoryFields, MemoryOptions, OptimizerName

MLP_TILE = 4096
LOSS_CHUNK = 2048
_SURE = 0.95  # of the free memory: as exact as the memory model is
_LEAST_ROWS = 16_384  # of a micro-batch, which keep a GPU busy
_LARGE_TILE = 16_384  # rows that keep a GPU busy: for steps that need not be as long as possible
_EVERY = (1, 2, 3)  # layers per checkpoint
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
    for state, moved, checkpointing, every, tile, chunk in itertools.product(
        range(3), (False, True) if offload else (False,), kept, _EVERY, (0, MLP_TILE), (0, LOSS_CHUNK)
    ):
        if (moved and checkpointing == "none") or (every > 1 and checkpointing != "full"):
            continue
        found.append(
            MemoryOptions(
                precision="bf16",
                checkpointing=checkpointing,
                layers_per_checkpoint=every,
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
        techniques = (
            (one.checkpointing != "none") + (one.layers_per_checkpoint > 1) + bool(one.mlp_tile) + bool(one.loss_chunk)
        )
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
    """The longest sequence that fits with each of the options, in order of cost, if it is longer than all before."""
    best = 0
    for one in by_cost(config, 1 << 17, choices() if options is None else options):
        tokens = _longest(config, one, gpu_bytes, host_bytes, batch, best)
        if tokens > best:
            best = tokens
            yield _fit(config, tokens, one, footprint(config, tokens, one, batch=batch))


class Load(NamedTuple):
    """The batch of a step: `batch` sequences of `tokens` tokens."""

    config: ModelConfig
    tokens: int
    batch: int = 1


class Chosen(NamedTuple):
    """How a step fits: its options, its number of micro-batches, and a sentence that says why."""

    options: MemoryOptions
    accumulate: int
    why: str


def fit_options(
    base: MemoryOptions,
    loads: Sequence[Load],
    gpu_bytes: int,
    *,
    host_bytes: int | None = None,
    stated: Collection[str] = (),
    accumulate: int | None = None,
) -> Chosen:
    """`base` with the least recomputation with which every load fits, in as few micro-batches as that takes.

    If nothing fits, host memory holds what is kept. `stated` are fields of `base` that stay as they are, and
    `accumulate` is the number of micro-batches if that is stated.

    >>> load = Load(ModelConfig(vocab_size=50_304), 65_536, batch=2)
    >>> base = MemoryOptions(precision="bf16", loss_chunk=16_384)
    >>> fit_options(base, [load], 90 << 30).why
    'checkpointing=none: a step needs about 77.2 of 90.0 GiB free'
    >>> fit_options(base, [load], 60 << 30).why.split("; ")[0]
    'checkpointing=none in 2 micro-batches: a step needs about 41.1 of 60.0 GiB free'
    >>> fit_options(base, [load], 20 << 30).options.checkpointing
    'selective'
    """
    unknown = [name for name in ("float8", "structured_sparsity") if getattr(base, name)]
    unknown += ["dropout"] * any(load.config.dropout for load in loads)
    if unknown:
        why = f"{_techniques(base)}, unchecked: the memory model does not cover {' and '.join(unknown)}"
        return Chosen(base, accumulate or 1, why)
    heaviest = max(loads, key=lambda load: load.tokens * load.batch)
    most = min(load.tokens * load.batch for load in loads) // _LEAST_ROWS
    counts = [n for n in range(2, most + 1) if all(load.batch % n == 0 for load in loads)]
    tried: list[tuple[bool, int, Chosen]] = []
    for options in by_cost(heaviest.config, heaviest.tokens, _recomputing(base, stated)):
        for count in (1, *counts) if accumulate is None else (accumulate,):
            peak, host = _demand(options, loads, count)
            name = _techniques(options) + (f" in {count} micro-batches" if count > 1 else "")
            overflows = host_bytes is not None and host > host_bytes
            if peak <= _SURE * gpu_bytes and not overflows:
                why = f"{name}: a step needs about {_gib(peak)} of {_gib(gpu_bytes)} GiB free"
                for _, more, cheaper in tried[-1:]:
                    why += f"; {cheaper.why} would need {_gib(more)}"
                return Chosen(options, count, why)
            tried.append((overflows, peak, Chosen(options, count, name)))
    _, peak, best = min(tried, key=lambda one: one[:2])
    why = f"a step needs about {_gib(peak)} GiB, and {_gib(gpu_bytes)} are free: it may run out of memory"
    return best._replace(why=f"{best.why}: {why}")


def _demand(options: MemoryOptions, loads: Sequence[Load], count: int) -> tuple[int, int]:
    """The memory of a GPU, and of the host, for the largest of some steps in `count` micro-batches each."""
    peak = host = 0
    for config, tokens, batch in loads:
        found = footprint(config, tokens, options, batch=max(batch // count, 1))
        # Every micro-batch but the first begins with the gradients of those before.
        gradients = parameter_count(config) * (2 if options.parameters == "bf16" else 4) * (count > 1)
        peak, host = max(peak, needed(found.peak + gradients)), max(host, found.host)
    return peak, host


def _recomputing(base: MemoryOptions, stated: Collection[str]) -> list[MemoryOptions]:
    """`base` with every combination of techniques that recompute, with and without offloading."""
    kept: Sequence[Checkpointing] = ("none", "selective", "full")
    found: dict[MemoryOptions, None] = {}
    for checkpointing, tile, offload in itertools.product(kept, (0, _LARGE_TILE), (False, True)):
        changes: MemoryFields = {"checkpointing": checkpointing, "mlp_tile": tile, "offload": offload}
        for name in changes.keys() & {*stated}:
            changes[name] = getattr(base, name)  # type: ignore[literal-required]
        tiles_alone = changes["checkpointing"] == "none" and changes["mlp_tile"] and "mlp_tile" not in stated
        if not tiles_alone and not (changes["checkpointing"] == "none" and changes["offload"]):
            found[replace(base, **changes)] = None
    return list(found)


def _techniques(options: MemoryOptions) -> str:
    names = ("checkpointing", "mlp_tile", "offload")
    return " ".join(f"{name}={value}" for name in names if (value := getattr(options, name)))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def step_flops(config: ModelConfig, tokens: int, options: MemoryOptions) -> int:
    """Floating-point operations of the products of a step on one sequence, with those that are computed again."""
    E, F = config.d_model, config.dim_feedforward
    heads = config.num_kv_heads or config.num_heads
    projections = tokens * 4 * E * (E + heads * config.head_dim)
    hidden = tokens * 2 * E * F  # of one linear layer of a feed-forward network
    layers = feed_forward_matrices(config)
    head = tokens * 2 * E * config.vocab_size
    every = [
        forward_flops(spec, tokens, config.num_heads, config.head_dim, kv_heads=config.num_kv_heads, is_causal=True)
        for spec in config.specs
    ]
    attention = sum(every) // len(every)  # of a layer, on average
    layer = 3 * (projections + layers * hidden) + attention * 7 // 2
    if options.checkpointing != "none":  # the result of the last linear layer is not computed again
        layer += projections + (layers - 1) * hidden + (attention if options.checkpointing == "full" else 0)
    if options.mlp_tile:
        layer += layers * hidden if options.checkpointing == "none" else hidden
    between = config.num_layers - -(-config.num_layers // options.layers_per_checkpoint)  # layers that run once more
    again = projections + layers * hidden + attention
    return config.num_layers * layer + between * again + 3 * head


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
