"""The runs of the experiment: which attention, at which length, from which weights, and what a step costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from dilated_attention_pytorch.core.spec import DilatedSpec, HeadLayout, branches_for
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.pages.plots import short
from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.footprint import parameter_count
from dilated_attention_pytorch.train.memory import MemoryOptions, OptimizerName
from dilated_attention_pytorch.train.stages import Stage
from dilated_attention_pytorch.train.tokenizer import TOKENIZER
from examples.evidence.patterns import LAST, WindowedDilatedAttention, some_branches
from examples.recall import narrowest_window, pairs_per_head, sliding_window, window_pairs

Kind = Literal["dense", "dilated", "window"]
Near = Literal["segments", "doubled", "paired", "windowed"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all runs of an experiment. `lengths` are the shortest, middle, long and longest training length."""

    name: str
    d_model: int
    num_heads: int
    num_layers: int
    vocab_size: int
    lengths: tuple[int, int, int, int]
    tokens_per_step: int
    places: int  # of the text, whose sequences are mixed
    steps: int
    warmup_steps: int
    optimizer: OptimizerName
    learning_rate: float
    seeds: tuple[int, ...]
    scored: int  # tokens at the end of a sequence whose bits are measured
    windows: int  # held-out stretches of the longest length, at most
    validation_windows: int  # those of them that validations during training use
    validate_every: int
    window_tile: int  # of the sliding window

    @property
    def passage(self) -> int:
        """The tokens that are planted and repeated to measure recall."""
        return self.scored // 16

    @property
    def test_lengths(self) -> list[int]:
        """From the scored tokens alone to the longest length, doubling."""
        return [self.scored << i for i in range((self.lengths[-1] // self.scored).bit_length())]


FULL = Scale(
    name="full",
    d_model=512,
    num_heads=8,
    num_layers=12,
    vocab_size=16_384,
    lengths=(2048, 8192, 32_768, 131_072),
    tokens_per_step=131_072,
    places=16,
    steps=800,
    warmup_steps=30,
    optimizer="muon",
    learning_rate=8e-3,
    seeds=(0, 1),
    scored=1024,
    windows=24,
    validation_windows=4,
    validate_every=50,
    window_tile=128,
)
# Everything runs within two minutes on two CPU cores, and nothing is learned well enough to compare.
TINY = Scale(
    name="tiny",
    d_model=48,
    num_heads=4,
    num_layers=2,
    vocab_size=512,
    lengths=(64, 256, 1024, 4096),
    tokens_per_step=4096,
    places=16,
    steps=16,
    warmup_steps=2,
    optimizer="adamw",
    learning_rate=5e-3,
    seeds=(0, 1),
    scored=32,
    windows=4,
    validation_windows=2,
    validate_every=4,
    window_tile=16,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model: its attention and the length of its sequences.

    `once` runs take the first seed only. `starts_as` names a run whose trained model this one continues with another
    attention or length, for a tenth of the steps. `reaches=False` leaves out the branch that spans the sequence.
    `extra` runs take place only if they are named.

    `near` is how a dilated model sees its nearest tokens: in the segments of `branches_for`; in a second branch of rate
    1 with shorter segments, too; in these two branches and the last of `branches_for(is_causal=True)`; or in a sliding
    window, in place of all branches but the last and at their cost. With `stagger`, segments are longer in every other
    layer. Paired branches and `stagger` are nearly what presets have.
    """

    name: str
    kind: Kind
    length: int
    scale: Scale
    head_layout: HeadLayout = "interleaved"
    starts_as: str | None = None
    reaches: bool = True
    near: Near = "segments"
    stagger: bool = False
    qk_norm: bool = False
    once: bool = False
    extra: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.scale.seeds[:1] if self.once else self.scale.seeds

    @property
    def steps(self) -> int:
        """The steps of the last stage."""
        return max(1, self.scale.steps // 10) if self.starts_as else self.scale.steps

    def spec(self, tokens: int | None = None) -> DilatedSpec:
        """The branches for a length, by default that of training. Dense attention is one segment of rate 1."""
        tokens = tokens or self.length
        if self.kind != "dilated":
            return DilatedSpec.of([tokens], [1])
        shortest = self.scale.lengths[0]
        paired = self.near == "paired"
        lengths, rates = branches_for(tokens, self.scale.num_heads, shortest=shortest, is_causal=paired)
        if self.near == "doubled":
            lengths, rates = (shortest * 11 // 16, *lengths), (1, *rates)
        elif paired:
            lengths, rates = (shortest * 11 // 16, shortest, lengths[-1]), (1, 1, rates[-1])
        return some_branches(DilatedSpec.of(lengths, rates, self.head_layout), slice(None if self.reaches else -1))

    def attention(
        self, tokens: int, layer: int = 0, *, fitted: bool = False, without_reach: bool = False
    ) -> DilatedAttention:
        """The attention with which a layer reads sequences of `tokens` tokens.

        Dilated attention keeps the branches of training, or with `fitted` takes those for `tokens`; `without_reach`
        removes the branch of the longest segments. A window stays as wide as in training.
        """
        windowed = self.near == "windowed"
        if self.kind == "window" or (windowed and without_reach):
            return sliding_window(tokens, self.scale.window_tile, self._tiles_before)
        spec = self.spec(tokens if fitted or self.kind == "dense" else None)
        if windowed:
            return WindowedDilatedAttention(spec, self.scale.window_tile, self._tiles_before)
        if without_reach:
            spec = some_branches(spec, slice(-1))
        spec = spec.of_layer(layer, self.stagger)
        return DilatedAttention(spec.segment_lengths, spec.dilation_rates, head_layout=spec.head_layout)

    @property
    def _tiles_before(self) -> int:
        """The tiles before its own that a row of a sliding window sees: as many keys as what the window replaces."""
        replaced = replace(self, kind="dilated").spec()
        if self.near == "windowed":
            replaced = some_branches(replaced, slice(-1))
        return narrowest_window(replaced, self.length, self.scale.num_heads, self.scale.window_tile)

    @property
    def keys_per_row(self) -> float:
        """The mean number of keys that a row of one head sees, over all layers."""
        return self._pairs() / self.length

    def _pairs(self) -> float:
        """(query, key) pairs of one head."""
        pairs = partial(pairs_per_head, tokens=self.length, heads=self.scale.num_heads)
        spec, windowed = self.spec(), self.near == "windowed"
        if self.kind == "window" or windowed:
            within = window_pairs(self.length, self.scale.window_tile, self._tiles_before)
            return within + (pairs(some_branches(spec, LAST)) if windowed else 0)
        every = [pairs(one) for one in self.model().specs]
        return sum(every) / len(every)

    def model(self) -> ModelConfig:
        """The model with the branches of the last stage."""
        scale, spec = self.scale, self.spec()
        return ModelConfig(
            vocab_size=scale.vocab_size,
            d_model=scale.d_model,
            num_heads=scale.num_heads,
            num_layers=scale.num_layers,
            num_decoder_layers=0,
            segment_lengths=spec.segment_lengths,
            dilation_rates=spec.dilation_rates,
            head_layout=spec.head_layout,
            stagger=self.stagger,
            qk_norm=self.qk_norm,
        )

    @property
    def parameters(self) -> int:
        return parameter_count(self.model())

    @property
    def flops_per_step(self) -> float:
        """6 per parameter and token; 4 per visible pair, feature and layer, 3.5 times for forward and backward."""
        attention = 3.5 * 4 * self.keys_per_row * self.scale.d_model * self.scale.num_layers
        return self.scale.tokens_per_step * (6.0 * self.parameters + attention)

    def config(self, seed: int, device: str) -> TrainConfig:
        """The training run: one stage, or the stage of the model it starts as and its own."""
        on_gpu: dict[str, Any] = {"precision": "bf16", "compile": True, "loss_chunk": 16_384}
        runs = [*([find_run(self.starts_as, self.scale)] if self.starts_as else []), self]
        return TrainConfig(
            tokenizer=TOKENIZER,
            model=self.model(),
            stages=tuple(run._stage() for run in runs),
            warmup_steps=self.scale.warmup_steps,
            seed=seed,
            device=device,
            memory=MemoryOptions(optimizer=self.scale.optimizer, **(on_gpu if device == "cuda" else {})),
        )

    def _stage(self) -> Stage:
        scale, spec = self.scale, self.spec()
        return Stage(
            sequence_length=self.length,
            segment_lengths=spec.segment_lengths,
            dilation_rates=spec.dilation_rates,
            batch_size=scale.tokens_per_step // self.length,
            learning_rate=scale.learning_rate / (3 if self.starts_as else 1),
            steps=self.steps,
        )


def all_runs(scale: Scale) -> list[Run]:
    """The runs in the order in which they take place.

    >>> [run.name for run in all_runs(FULL) if not run.extra][:4]
    ['dense-2K', 'converted-32K', 'dense-8K', 'dilated-8K']
    """
    least, middle, long, longest = scale.lengths
    at = partial(_run, scale)
    best: dict[str, Any] = {"near": "paired", "stagger": True}
    return [
        at("dense", least),
        at("dilated", long, "converted", starts_as=f"dense-{short(least)}", **best),  # while that model is still there
        at("dense", middle),
        at("dilated", middle),
        at("window", middle),
        at("dense", long),
        at("dilated", long),
        at("window", long),
        at("dilated", longest),
        *(at("dilated", n, "paired-staggered", **best) for n in (middle, long)),
        at("dilated", longest, "lengthened", starts_as=f"paired-staggered-{short(long)}", **best),
        at("dilated", long, "blocked", head_layout="blocked", once=True),
        at("dilated", long, "local", reaches=False, once=True, extra=True),
        *(at("dilated", n, "staggered", stagger=True, extra=True) for n in (middle, long)),
        *(at("dilated", n, "doubled", near="doubled", extra=True) for n in (middle, long)),
        *(at("dilated", n, "paired", near="paired", extra=True) for n in (middle, long)),
        *(at("dilated", n, "windowed", near="windowed", extra=True) for n in (middle, long)),
        at("dilated", long, "qk-norm", qk_norm=True, once=True, extra=True),
        at("dense", long, "dense-qk-norm", qk_norm=True, once=True, extra=True),
    ]


def find_run(name: str, scale: Scale) -> Run:
    found = {run.name: run for run in all_runs(scale)}
    if name not in found:
        raise ValueError(f"there is no run {name!r}: choose from {', '.join(found)}")
    return found[name]


def _run(scale: Scale, kind: Kind, length: int, name: str = "", **how: Any) -> Run:
    return Run(name=f"{name or kind}-{short(length)}", kind=kind, length=length, scale=scale, **how)


def seconds_at(run: Run, flops: float) -> float:
    """An estimate of the seconds that the steps of a run take at a rate of `flops` per second."""
    return math.ceil(run.steps * run.flops_per_step / flops)
