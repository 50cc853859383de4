"""The suite `techniques`: peak memory and time of each memory technique alone, against what is claimed for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.capacity import working_eight_bit
from benchmarks.harness import free_memory
from benchmarks.suite import Options, Record, Suite, Table, check_names, number
from benchmarks.training_step import StepCase, attempt_step
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.footprint import footprint
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.presets import text_model

_TINY = ModelConfig(
    vocab_size=64, d_model=32, num_heads=2, num_layers=2, segment_lengths=(64, 128), dilation_rates=(1, 2)
)
SUBJECTS: dict[str, tuple[str, ModelConfig, int]] = {
    "cuda": ("350m", text_model("350m"), 32_768),
    "cpu": ("a tiny model", _TINY, 256),
}


_HEAD = [
    "technique", "against", "peak GiB", "peak", "beyond weights and state", "weights and state", "step, ms", "time",
    "model/peak", "claimed",
]  # fmt: skip


@dataclass(frozen=True)
class Technique:
    """The options that it changes, the technique whose options it is added to, and what is claimed for it."""

    name: str
    against: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    claimed: str = ""


_FULL = {"checkpointing": "full"}
BASE = "bf16 autocast"


def techniques(tokens: int, eight_bit: str) -> list[Technique]:
    """All techniques in the order of their rows: the one that a technique is compared with comes before it."""
    tile = {"mlp_tile": max(1, tokens // 16)}
    chunk = {"loss_chunk": max(1, tokens // 16)}
    state = {"optimizer": eight_bit}
    weights = {"parameters": "bf16"}
    saved = "50 to 80 % less GPU memory"
    return [
        Technique("float32"),
        Technique(BASE, "float32", {"precision": "bf16"}, "half the memory, twice the speed"),
        Technique("full checkpointing", BASE, _FULL, "10 to 50 times less activation memory, 30 % more time"),
        Technique("selective checkpointing", BASE, {"checkpointing": "selective"}, "as above"),
        Technique("full checkpointing, offloaded", "full checkpointing", {"offload": True}, saved),
        Technique("selective checkpointing, offloaded", "selective checkpointing", {"offload": True}, saved),
        Technique("tiled feed-forward network", BASE, tile, "none"),
        Technique("loss in chunks", BASE, chunk, "none"),
        Technique("8-bit AdamW", BASE, state, "a third of the optimizer's memory"),
        Technique("bf16 parameters", BASE, weights, "none"),
        Technique("float8 products", BASE, {"float8": True}, "no figure"),
        Technique("2:4 sparsity", BASE, {"structured_sparsity": True}, "less memory, no figure"),
        Technique("compiled layers", BASE, {"compile": True}, "10 to 30 % faster"),
        Technique("float8 products, compiled", "compiled layers", {"float8": True}, "no figure"),
        Technique(
            "all that round nothing", BASE, {**_FULL, **tile, **chunk}, "100 to 200 times less, with 8-bit AdamW"
        ),
        Technique("and 8-bit AdamW, bf16 parameters", "all that round nothing", {**state, **weights}, "as above"),
    ]


@dataclass(frozen=True)
class Trial:
    """A technique on a model, with the options that it makes."""

    technique: Technique
    size: str
    case: StepCase


def _setup(options: Options) -> list[Trial]:
    """The techniques, or those that `only` names and the ones they are compared with."""
    size, config, usual = SUBJECTS[options.device]
    try:
        eight_bit: str = working_eight_bit(options.device)
    except ModuleNotFoundError:
        eight_bit = "adamw8bit-torchao"  # its row says what is missing
    trials = []
    for tokens in options.tokens or [usual]:
        memory: dict[str, MemoryOptions] = {"": MemoryOptions()}
        for one in _chosen(techniques(tokens, eight_bit), options.only):
            memory[one.name] = replace(memory[one.against], **one.changes)
            step: dict[str, Any] = {"tokens": tokens, "warm_tokens": tokens, "steps": 2, "device": options.device}
            trials.append(Trial(one, size, StepCase(config=config, options=memory[one.name], **step)))
    return trials


def _measure(trial: Trial, options: Options) -> Iterator[Record]:
    one, case = trial.technique, trial.case
    yield {
        "technique": one.name,
        "against": one.against,
        "claimed": one.claimed,
        "size": trial.size,
        "tokens": case.tokens,
        "options": asdict(case.options),
        "predicted_bytes": _predicted(case),
        **attempt_step(case),
    }
    free_memory(case.device)


def _chosen(every: Sequence[Technique], only: Sequence[str]) -> list[Technique]:
    by_name = {one.name: one for one in every}
    wanted = set(only or by_name)
    check_names("only", wanted, by_name)
    for one in reversed(every):
        if one.name in wanted and one.against:
            wanted.add(one.against)
    return [one for one in every if one.name in wanted]


def _predicted(case: StepCase) -> int | None:
    known = not (case.options.float8 or case.options.structured_sparsity or case.options.compile)
    return footprint(case.config, case.tokens, case.options).peak if known else None


def _row(line: Record, lines: Sequence[Record]) -> list[str]:
    """One technique against the one that it is compared with."""
    if "failed" in line:
        return [line["technique"], line["against"], "", "", "", "", line["failed"], "", "", line["claimed"]]
    base = next((one for one in lines if one["technique"] == line["against"] and "failed" not in one), None)
    peak, held, predicted = line["peak_bytes"], line["held_bytes"], line["predicted_bytes"]
    beside = None if peak is None or base is None else base
    return [
        line["technique"],
        line["against"],
        number(peak, 2, 1 << 30),
        "" if beside is None else _change(peak, beside["peak_bytes"]),
        "" if beside is None else _change(peak - held, beside["peak_bytes"] - beside["held_bytes"]),
        "" if beside is None else _change(held, beside["held_bytes"]),
        f"{line['seconds'] * 1e3:.1f}",
        "" if base is None else _change(line["seconds"], base["seconds"]),
        "" if peak is None or predicted is None else f"{predicted / peak:.3f}",
        line["claimed"],
    ]


def _change(value: float, base: float) -> str:
    return f"x {value / base:.2f}" if base else ""


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for subject in dict.fromkeys((x["on_machine"], x["size"], x["tokens"]) for x in records):
        mine = [x for x in records if (x["on_machine"], x["size"], x["tokens"]) == subject]
        machine, size, tokens = subject
        words = (
            f"{machine}; {size}, {tokens:,} tokens per step. A figure with `x` is relative to the row that `against` "
            "names: the peak, its part beyond weights and optimizer state, weights and optimizer state, and time."
        )
        yield Table("Training: each memory technique", [words], _HEAD, [_row(line, mine) for line in mine])


SUITE = Suite(
    name="techniques",
    about="what each memory technique of training saves and costs",
    flags=("device", "tokens", "only"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    key=("size", "tokens", "technique"),
)
