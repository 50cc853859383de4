"""The suite `techniques`: each memory technique alone, its peak and its time beside what has been claimed for it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.capacity import working_eight_bit
from benchmarks.harness import machine
from benchmarks.results import describe
from benchmarks.runner import append_line
from benchmarks.training_step import StepCase, attempt_step
from benchmarks.training_tables import TECHNIQUES, markdown_row, technique_row
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


@dataclass(frozen=True)
class Technique:
    """What is switched on, the technique whose options it is added to, and the seed documents' claim for it."""

    name: str
    against: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    claimed: str = ""


_FULL = {"checkpointing": "full"}
BASE = "bf16 autocast"


def techniques(tokens: int, eight_bit: str) -> list[Technique]:
    """In the order of their rows: what a technique is held against comes before it."""
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


def run_techniques(
    device: str, tokens: int | None = None, only: Sequence[str] | None = None, out: Path | None = None
) -> None:
    """Print a Markdown table, a row a technique, and append a JSON line a row to `out`.

    `only` names techniques; what they are held against is measured too. All run in this process, one after the other.
    """
    size, config, usual = SUBJECTS[device]
    tokens = tokens or usual
    try:
        eight_bit: str = working_eight_bit(device)
    except ModuleNotFoundError:
        eight_bit = "adamw8bit-torchao"  # its row says what is missing
    chosen = _chosen(techniques(tokens, eight_bit), only)
    found = machine(device)
    append_line(out, {"machine": found})
    print(f"{describe(found)}\n\n{size}, {tokens:,} tokens\n")
    print(f"{markdown_row(TECHNIQUES)}\n|{'---|' * len(TECHNIQUES)}")
    options: dict[str, MemoryOptions] = {"": MemoryOptions()}
    lines: list[dict[str, Any]] = []
    for one in chosen:
        options[one.name] = replace(options[one.against], **one.changes)
        case = StepCase(
            config=config, tokens=tokens, options=options[one.name], device=device, warm_tokens=tokens, steps=2
        )
        line = {
            "suite": "techniques",
            "technique": one.name,
            "against": one.against,
            "claimed": one.claimed,
            "size": size,
            "tokens": tokens,
            "options": asdict(case.options),
            "predicted_bytes": _predicted(case),
            **attempt_step(case),
        }
        lines.append(line)
        append_line(out, line)
        print(markdown_row(technique_row(line, lines)), flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _chosen(every: Sequence[Technique], only: Sequence[str] | None) -> list[Technique]:
    by_name = {one.name: one for one in every}
    wanted = set(by_name if only is None else only)
    if unknown := wanted - by_name.keys():
        raise ValueError(f"--only names techniques of {', '.join(by_name)}; got {', '.join(sorted(unknown))}")
    for one in reversed(every):
        if one.name in wanted and one.against:
            wanted.add(one.against)
    return [one for one in every if one.name in wanted]


def _predicted(case: StepCase) -> int | None:
    known = not (case.options.float8 or case.options.structured_sparsity or case.options.compile)
    return footprint(case.config, case.tokens, case.options).peak if known else None
