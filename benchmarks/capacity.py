"""The suite `capacity`: real steps of each model size at the length it must reach, and at the longest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.harness import machine
from benchmarks.results import describe
from benchmarks.runner import append_line
from benchmarks.training_step import OUT_OF_MEMORY, StepCase, step_in_a_process
from benchmarks.training_tables import CAPACITY, capacity_notes, capacity_row, markdown_row
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
_SPARE = 2 << 30  # of a GPU without a cap: two contexts


def run_capacity(
    device: str,
    sizes: Sequence[str] = (),
    *,
    cap_gib: float = 80.0,
    uncapped: bool = False,
    offload: bool = False,
    out: Path | None = None,
) -> None:
    """Print a Markdown table, a row a step, and append a JSON line a row to `out`.

    With `uncapped` the longest sequence in all of the GPU, alone. `offload` lets the longest one use host memory.
    """
    names = list(sizes or REQUIRED)
    for name in names:
        if name not in MODEL_SIZES:
            raise ValueError(f"--sizes are of {', '.join(MODEL_SIZES)}, got {name!r}")
    cap = torch.cuda.mem_get_info()[0] - _SPARE if uncapped and device == "cuda" else int(cap_gib * 2**30)
    room = host_memory().available * 4 // 5
    eight_bit = working_eight_bit(device)
    found = machine(device)
    append_line(out, {"machine": found})
    print(describe(found))
    steps = list(_steps(names, cap, room, eight_bit, required=not uncapped, offload=offload))
    seconds = sum(_seconds(config, fits[0]) for _, _, config, fits in steps)
    print(f"{len(steps)} steps, each in a process of its own: about {seconds:.0f} s on an H200")
    print(f"\n{markdown_row(CAPACITY)}\n|{'---|' * len(CAPACITY)}")
    lines = []
    for kind, name, config, fits in steps:
        for fit in fits:
            case = StepCase(config=config, tokens=fit.tokens, options=fit.options, device=device, cap_bytes=cap)
            if kind in ("dilated", "dense"):
                case = replace(case, dense=kind == "dense", steps=2)
            line = {
                "suite": "capacity",
                "kind": "uncapped" if uncapped else kind,
                "size": name,
                "tokens": fit.tokens,
                "cap_bytes": cap,
                "predicted_bytes": fit.footprint.peak,
                "options": asdict(fit.options),
                **step_in_a_process(case),
            }
            if kind != "dense":
                line["longest_segment"] = max(config.segment_lengths)
            lines.append(line)
            append_line(out, line)
            print(markdown_row(capacity_row(line)), flush=True)
            if line.get("failed") != OUT_OF_MEMORY:
                break
    print("", *capacity_notes(lines), sep="\n")


def _steps(
    names: Sequence[str], cap: int, room: int, eight_bit: OptimizerName, *, required: bool, offload: bool
) -> Iterator[tuple[str, str, ModelConfig, list[Fit]]]:
    """What to measure, `(kind, size, model, tries)`; the next try is for when one runs out of memory.

    Each length with branches that connect all of it first, then with those of the presets' own length.
    """
    for name in names if required else ():
        for config in _patterns(name, REQUIRED[name]) if name in REQUIRED else ():
            every = choices(eight_bit=eight_bit)
            fit = cheapest_fit(config, REQUIRED[name], cap, host_bytes=room, options=every)
            if fit is None:
                raise ValueError(f"no options let {name} take {REQUIRED[name]:,} tokens in {cap / 2**30:.1f} GiB")
            yield "required", name, config, [fit]
    name, tokens = DENSE
    if required and name in names:
        patterns = _patterns(name, tokens)
        fit = cheapest_fit(patterns[0], tokens, cap, options=[MemoryOptions(precision="bf16", loss_chunk=2048)])
        if fit is not None:
            for config in patterns:
                yield "dilated", name, config, [fit]
            yield "dense", name, patterns[0], [fit]
    for name in names:
        every = choices(offload=offload, eight_bit=eight_bit)
        found = list(longest_fits(text_model(name), cap, host_bytes=room, options=every))
        if not found:
            raise ValueError(f"no options let {name} take any sequence in {cap / 2**30:.1f} GiB: leave it out")
        for config in _patterns(name, found[-1].tokens):
            yield "longest", name, config, [_shorter(config, found[-1], share) for share in _TRIES]


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
