"""The suite `capacity`: training steps of each model size at the required length, and at the longest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks.charts import bars as draw_bars
from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine, number
from benchmarks.training_step import OUT_OF_MEMORY, StepCase, step_in_a_process
from dilated_attention_pytorch.measuring import host_memory
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.fitting import Fit, cheapest_fit, choices, longest_fits, step_flops
from dilated_attention_pytorch.train.footprint import footprint
from dilated_attention_pytorch.train.memory import MemoryOptions, OptimizerName, make_optimizer
from dilated_attention_pytorch.train.presets import MODEL_SIZES, text_model

REQUIRED = {"125m": 2_000_000, "350m": 500_000, "770m": 200_000, "1.3b": 400_000, "2.7b": 200_000, "6b": 100_000}
DENSE = ("125m", 131_072)  # the same model with dense attention, at a length that it bears
_TRIES = (1.0, 0.94, 0.88)  # of the longest that the memory model finds
_TFLOPS = 350e12  # for the estimate of the suite's time alone
_START = 15.0  # seconds of a process, its model and a short step
WITHIN = 0.10  # of the measured peak, for the memory model
_SPARE = 2 << 30  # of a GPU without a cap: two contexts


@dataclass(frozen=True)
class Attempts:
    """One length of one model: the next fit is for when a step of the one before runs out of memory."""

    kind: str
    size: str
    config: ModelConfig
    cap: int
    fits: list[Fit]


def _setup(options: Options) -> list[Attempts]:
    """All steps; with `uncapped`, only those at the longest sequence in all of the GPU."""
    names = list(options.sizes or REQUIRED)
    for name in names:
        if name not in MODEL_SIZES:
            raise ValueError(f"--sizes are of {', '.join(MODEL_SIZES)}, got {name!r}")
    cap = int(options.cap * 2**30)
    if options.uncapped and options.device == "cuda":
        cap = torch.cuda.mem_get_info()[0] - _SPARE
    steps = list(_steps(names, cap, host_memory().available * 4 // 5, working_eight_bit(options.device), options))
    seconds = sum(_seconds(step.config, step.fits[0]) for step in steps)
    print(f"{len(steps)} steps, each in a process of its own: about {seconds:.0f} s on an H200")
    return steps


def _measure(step: Attempts, options: Options) -> Iterator[Record]:
    for fit in step.fits:
        case = StepCase(
            config=step.config, tokens=fit.tokens, options=fit.options, device=options.device, cap_bytes=step.cap
        )
        if step.kind in ("dilated", "dense"):
            case = replace(case, dense=step.kind == "dense", steps=2)
        record = {
            "kind": "uncapped" if options.uncapped else step.kind,
            "size": step.size,
            "tokens": fit.tokens,
            "cap_bytes": step.cap,
            "predicted_bytes": fit.footprint.peak,
            "options": asdict(fit.options),
            **step_in_a_process(case),
        }
        if step.kind != "dense":
            record["longest_segment"] = max(step.config.segment_lengths)
        yield record
        if record.get("failed") != OUT_OF_MEMORY:
            return


def _steps(names: Sequence[str], cap: int, room: int, eight_bit: OptimizerName, options: Options) -> Iterator[Attempts]:
    """Each length with branches that connect all of it first, then with those of the presets' own length."""
    required = not options.uncapped
    for name in names if required else ():
        for config in _patterns(name, REQUIRED[name]) if name in REQUIRED else ():
            every = choices(eight_bit=eight_bit)
            fit = cheapest_fit(config, REQUIRED[name], cap, host_bytes=room, options=every)
            if fit is None:
                raise ValueError(f"no options let {name} take {REQUIRED[name]:,} tokens in {cap / 2**30:.1f} GiB")
            yield Attempts("required", name, config, cap, [fit])
    name, tokens = DENSE
    if required and name in names:
        patterns = _patterns(name, tokens)
        fit = cheapest_fit(patterns[0], tokens, cap, options=[MemoryOptions(precision="bf16", loss_chunk=2048)])
        if fit is not None:
            for config in patterns:
                yield Attempts("dilated", name, config, cap, [fit])
            yield Attempts("dense", name, patterns[0], cap, [fit])
    for name in names:
        every = choices(offload=options.offload, eight_bit=eight_bit)
        found = list(longest_fits(text_model(name), cap, host_bytes=room, options=every))
        if not found:
            raise ValueError(f"no options let {name} take any sequence in {cap / 2**30:.1f} GiB: leave it out")
        for config in _patterns(name, found[-1].tokens):
            yield Attempts("longest", name, config, cap, [_shorter(config, found[-1], share) for share in _TRIES])


def _patterns(name: str, tokens: int) -> list[ModelConfig]:
    return list(dict.fromkeys([text_model(name, sequence_length=tokens), text_model(name)]))


def _shorter(config: ModelConfig, fit: Fit, share: float) -> Fit:
    tokens = max(1, int(fit.tokens * share) // 1024 * 1024)
    return replace(fit, tokens=tokens, footprint=footprint(config, tokens, fit.options))


def _seconds(config: ModelConfig, fit: Fit) -> float:
    return _START + step_flops(config, fit.tokens, fit.options) / _TFLOPS


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
            reasons.append(f"{name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
    raise ModuleNotFoundError(f"capacity needs an 8-bit AdamW that runs on this machine. {'; '.join(reasons)}")


def _row(line: Record) -> list[str]:
    """One step; where it failed, the reason stands in place of its time."""
    what: str = {"dilated": "this attention", "dense": "dense attention"}.get(line["kind"]) or line["kind"]
    if "longest_segment" in line and line["kind"] != "dense":
        what += f", segments to {line['longest_segment']:,}"
    head = [line["size"], f"{what}, {line['cap_bytes'] / 2**30:.0f} GiB", f"{line['tokens']:,}"]
    predicted = "" if line["kind"] == "dense" else f"{line['predicted_bytes'] / 2**30:.1f}"
    if "failed" in line:
        return [*head, "", line["failed"], "", predicted, "", MemoryOptions(**line["options"]).stated()]
    peak = line["peak_bytes"]
    return [
        *head,
        f"{line['tokens_per_second']:,.0f}",
        f"{line['seconds']:.2f}",
        number(peak, 1, 1 << 30),
        predicted,
        "" if peak is None or not predicted else f"{line['predicted_bytes'] / peak:.3f}",
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
    for machine, mine in by_machine(records):
        words = (
            f"{machine}. One step each: forward, backward and update, on random tokens. `model` is the memory model."
        )
        head = ["model", "what", "tokens", "tokens/s", "step, s", "peak GiB", "model, GiB", "model/peak", "options"]
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
    flags=("device", "sizes", "cap", "uncapped", "offload"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    key=("size", "kind", "tokens", "longest_segment"),
    earlier={"longest_segment": 32_768},
)
