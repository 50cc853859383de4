"""The suite `capacity`: training steps of each model size at the required length, and at the longest that fits.

The branches of every row connect all of its tokens. Rows are independent of each other: `--sizes` and `--cases` choose
some, so that several runs can append to one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks.charts import bars as draw_bars
from benchmarks.suite import (
    Options,
    Record,
    Suite,
    Table,
    Verdict,
    branches_in_words,
    by_machine,
    check_names,
    number,
    reason,
    which_branches,
)
from benchmarks.training_step import OUT_OF_MEMORY, StepCase, step_in_a_process
from dilated_attention_pytorch.core.spec import branches_for
from dilated_attention_pytorch.measuring import host_memory
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.fitting import Fit, cheapest_fit, choices, longest_fits, step_flops
from dilated_attention_pytorch.train.footprint import footprint
from dilated_attention_pytorch.train.memory import MemoryOptions, OptimizerName, make_optimizer
from dilated_attention_pytorch.train.presets import MODEL_SIZES, text_model

# Tokens to reach in 80 GiB, and in the whole GPU with layers' inputs in host memory.
REQUIRED = {
    "125m": 2_000_000, "350m": 500_000, "760m": 200_000, "770m": 200_000, "1.3b": 400_000, "2.7b": 200_000,
    "6b": 100_000,
}  # fmt: skip
OFFLOADED = {"6b": 800_000, "8b": 500_000}
DENSE = ("125m", 131_072)  # the same model with dense attention, at a length that it bears
SIZES = (*MODEL_SIZES, "8b")
_LLAMA = ModelConfig(  # the shape of Llama 3 8B
    vocab_size=128_256, d_model=4096, num_heads=32, num_kv_heads=8, num_layers=32, dim_feedforward=14_336,
    activation="swiglu", norm="rms", tie_weights=False,
)  # fmt: skip
_TRIES = (1.0, 0.94, 0.88)  # of the longest that the memory model finds
_TFLOPS = 400e12  # for the estimate of a row's time alone
_START = 20.0  # seconds of a process, its model and a short step
_PIN = 2 << 30  # bytes of host memory that are pinned per second
WITHIN = 0.05  # of the measured peak, for the memory model
_SPARE = 2 << 30  # of a GPU without a cap: two contexts


@dataclass(frozen=True)
class Attempts:
    """One row: a model and a length. The next fit is for when a step of the one before runs out of memory."""

    kind: str
    size: str
    config: ModelConfig
    cap: int
    fits: list[Fit]

    @property
    def seconds(self) -> float:
        """An estimate of how long the row takes on an H200."""
        fit = self.fits[0]
        flops = step_flops(self.config, fit.tokens, fit.options) * (3 if self.kind in _COMPARED else 1)
        return _START + flops / _TFLOPS + fit.footprint.host / _PIN


_COMPARED = ("dilated", "dense")


def _setup(options: Options) -> list[Attempts]:
    check_names("sizes", options.sizes, SIZES)
    titles = [f"{size} {kind}" for kind, size in _rows() if not options.sizes or size in options.sizes]
    chosen = [title.split() for title in titles if {*options.cases} <= {*title.split()}]
    if not chosen:
        raise ValueError(f"no case has all the words {list(options.cases)}: choose from {', '.join(titles)}")
    eight_bit = working_eight_bit(options.device)
    rows = [_row_to_measure(size, kind, eight_bit, options) for size, kind in chosen]
    for row in rows:
        print(f"{row.size} {row.kind}: {row.fits[0].tokens:,} tokens, about {row.seconds:.0f} s on an H200")
    print(f"{len(rows)} rows, each in a process of its own: about {sum(row.seconds for row in rows):.0f} s")
    return rows


def _rows() -> Iterator[tuple[str, str]]:
    """The kind and the size of every row."""
    yield from (("required", size) for size in REQUIRED)
    yield from ((kind, DENSE[0]) for kind in _COMPARED)
    yield from (("longest", size) for size in REQUIRED)
    yield from (("uncapped", size) for size in SIZES)
    yield from (("offloaded", size) for size in OFFLOADED)


def _row_to_measure(size: str, kind: str, eight_bit: OptimizerName, options: Options) -> Attempts:
    cap = int(options.cap * 2**30)
    if kind in ("uncapped", "offloaded") and options.device == "cuda":
        cap = torch.cuda.mem_get_info()[0] - _SPARE
    room = int(min(options.host * 2**30, host_memory().available * 0.95))
    every = choices(offload=kind == "offloaded", eight_bit=eight_bit)
    if kind in ("longest", "uncapped"):
        config, fit = longest_with_full_reach(size, cap, [one for one in every if one.mlp_tile and one.loss_chunk])
        return Attempts(kind, size, config, cap, [_shorter(config, fit, share) for share in _TRIES])
    lengths = {"required": REQUIRED, "offloaded": OFFLOADED}.get(kind, dict([DENSE]))
    tokens = lengths[size]
    if kind in _COMPARED:
        every = [MemoryOptions(precision="bf16", loss_chunk=2048)]
    elif kind == "offloaded":
        every = [one for one in every if one.offload]
    config = _model(size, tokens)
    found = cheapest_fit(config, tokens, cap, host_bytes=room, options=every)
    if found is None:
        raise ValueError(
            f"no options let {size} take {tokens:,} tokens in {cap / 2**30:.1f} GiB of the GPU and "
            f"{room / 2**30:.1f} GiB of the host"
        )
    return Attempts(kind, size, config, cap, [found])


def longest_with_full_reach(size: str, cap: int, options: Sequence[MemoryOptions]) -> tuple[ModelConfig, Fit]:
    """The longest sequence that fits with branches over all of it."""
    tokens = 1
    while True:
        config = _model(size, tokens)
        found = list(longest_fits(config, cap, options=options))
        if not found:
            raise ValueError(f"no options let {size} take any sequence in {cap / 2**30:.1f} GiB: leave it out")
        tokens = found[-1].tokens
        if tokens <= max(config.segment_lengths):
            return config, found[-1]


def _model(size: str, tokens: int) -> ModelConfig:
    """A model whose branches connect all of `tokens` tokens."""
    if size != "8b":
        return text_model(size, sequence_length=tokens)
    lengths, rates = branches_for(tokens, _LLAMA.num_kv_heads, is_causal=True)
    return replace(_LLAMA, segment_lengths=lengths, dilation_rates=rates, stagger=True)


def _measure(row: Attempts, options: Options) -> Iterator[Record]:
    for fit in row.fits:
        case = StepCase(
            config=row.config, tokens=fit.tokens, options=fit.options, device=options.device, cap_bytes=row.cap
        )
        if row.kind in _COMPARED:
            case = replace(case, dense=row.kind == "dense", steps=2)
        record = {
            "kind": row.kind,
            "size": row.size,
            "tokens": fit.tokens,
            "cap_bytes": row.cap,
            "predicted_bytes": fit.footprint.peak,
            "options": asdict(fit.options),
            "branches": branches_in_words(row.config),
            **step_in_a_process(case, timeout=120 + 2 * row.seconds),
        }
        if row.kind != "dense":
            record["longest_segment"] = max(row.config.segment_lengths)
        yield record
        if record.get("failed") != OUT_OF_MEMORY:
            return


def _shorter(config: ModelConfig, fit: Fit, share: float) -> Fit:
    tokens = max(1, int(fit.tokens * share) // 1024 * 1024)
    return replace(fit, tokens=tokens, footprint=footprint(config, tokens, fit.options))


def working_eight_bit(device: str) -> OptimizerName:
    """The 8-bit AdamW that steps here: bitsandbytes' at once, torchao's after it has compiled."""
    reasons = []
    names: tuple[OptimizerName, ...] = ("adamw8bit-bitsandbytes", "adamw8bit-torchao")
    for name in names:
        try:
            parameter = torch.nn.Parameter(torch.ones(64, 128, device=device, dtype=torch.bfloat16))
            parameter.grad = torch.ones_like(parameter)
            make_optimizer([parameter], MemoryOptions(optimizer=name), lr=1e-3).step()
            return name
        except Exception as error:  # whichever way a package fails, the other may work
            reasons.append(f"{name}: {reason(error)}")
    raise ModuleNotFoundError(f"capacity needs an 8-bit AdamW that runs on this machine. {'; '.join(reasons)}")


def _row(line: Record) -> list[str]:
    """One step; where it failed, the reason stands in place of its time."""
    what: str = {"dilated": "this attention", "dense": "dense attention"}.get(line["kind"]) or line["kind"]
    head = [line["size"], f"{what}, {line['cap_bytes'] / 2**30:.0f} GiB", f"{line['tokens']:,}"]
    predicted = "" if line["kind"] == "dense" else f"{line['predicted_bytes'] / 2**30:.1f}"
    if "failed" in line:
        return [*head, "", line["failed"], "", predicted, "", "", MemoryOptions(**line["options"]).stated()]
    peak = line["peak_bytes"]
    return [
        *head,
        f"{line['tokens_per_second']:,.0f}",
        f"{line['seconds']:.2f}",
        number(peak, 1, 1 << 30),
        predicted,
        "" if peak is None or not predicted else f"{line['predicted_bytes'] / peak:.3f}",
        number(line.get("pinned_bytes"), 1, 1 << 30),
        MemoryOptions(**line["options"]).stated(),
    ]


def notes(lines: Sequence[Record]) -> list[str]:
    """What the figures show, in sentences."""
    checked = [
        line["predicted_bytes"] / line["peak_bytes"]
        for line in lines
        if line["kind"] != "dense" and line.get("peak_bytes")
    ]
    notes = []
    if checked:
        worst = max(checked, key=lambda ratio: abs(ratio - 1))
        text = f"the memory model within {WITHIN:.0%} of the measured peak; farthest {worst:.3f}"
        notes.append(str(Verdict(abs(worst - 1) <= WITHIN, text)))
    rates = {line["kind"]: line["tokens_per_second"] for line in reversed(lines) if "tokens_per_second" in line}
    if {"dilated", "dense"} <= rates.keys():
        notes.append(
            f"tokens/s of this attention over those of dense attention: {rates['dilated'] / rates['dense']:.2f}"
        )
    return notes


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    # Rows of earlier releases, whose branches ended at 32,768 tokens, are left out.
    places = {row: place for place, row in enumerate(_rows())}
    whole = sorted(
        (line for line in records if line["kind"] == "dense" or line["longest_segment"] >= line["tokens"]),
        key=lambda line: places[line["kind"], line["size"]],
    )
    for machine, mine in by_machine(whole):
        dilated = [line for line in mine if line["kind"] != "dense"]
        words = (
            f"{machine}. One step each: forward, backward and update, on random tokens. The branches of every row "
            f"connect all of its tokens. {which_branches(dilated)} `model` is what the memory model said "
            "before the step, `host GiB` what offloading pins."
        )
        head = [
            "model", "what", "tokens", "tokens/s", "step, s", "peak GiB", "model, GiB", "model/peak", "host GiB",
            "options",
        ]  # fmt: skip
        table = Table("Training: capacity", [words], head, [_row(line) for line in mine], notes(mine))
        bars = [
            (f"{x['size']}, {x['tokens']:,} tokens", [x["peak_bytes"] / 2**30, x["predicted_bytes"] / 2**30])
            for x in mine
            if x.get("peak_bytes") and x["kind"] != "dense"
        ]
        if bars:
            chart = partial(draw_bars, bars, ["measured", "memory model"], "GiB")
            table.charts = [("Peak memory", chart)]
        yield table


SUITE = Suite(
    name="capacity",
    about="training steps of each model size at the length it must reach, and at the longest that fits",
    flags=("device", "sizes", "cases", "cap", "host"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    key=("size", "kind", "cap_bytes", "longest_segment"),
    earlier={"longest_segment": 32_768},
)
