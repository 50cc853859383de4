"""The suite `step`: training steps of three model sizes, against what a user would train instead.

The ceiling is the rate of one large matrix product in the same run. FLOPs are `6 x parameters x tokens` and 3.5 times
those of attention's forward pass over the pairs that it sees; what is computed again is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import step_ranks
from benchmarks.harness import measure
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
    which_branches,
)
from benchmarks.training_step import OUT_OF_MEMORY, StepCase, step_in_a_process
from dilated_attention_pytorch.core.pattern import forward_flops
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.fitting import Load, fit_options
from dilated_attention_pytorch.train.footprint import footprint
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.presets import hardware_preset, memory_preset, text_model

# Tokens of a step, and the share of the ceiling to reach.
SIZES = {"125m": (131_072, 0.50), "350m": (65_536, 0.58), "1.3b": (32_768, 0.70)}
_TINY = ModelConfig(
    vocab_size=64, d_model=32, num_heads=2, num_layers=2, segment_lengths=(64, 256), dilation_rates=(1, 2)
)
OURS, PLAIN, DENSE, LLAMA = "ours", "ours, plain", "dense attention", "Hugging Face Llama"


@dataclass(frozen=True)
class Trial:
    name: str
    size: str
    case: StepCase


def _setup(options: Options) -> list[Trial | None]:
    """The steps to measure; None stands for those on ranks."""
    if options.ranks:
        if options.sizes or options.only:
            raise ValueError(
                "--ranks measures one model in every way that ranks share it: leave --sizes and --only out"
            )
        return [None]
    names = list(options.sizes or SIZES)
    check_names("sizes", names, SIZES)
    cuda = options.device == "cuda"
    room = torch.cuda.mem_get_info()[0] if cuda else 1 << 40
    trials: list[Trial | None] = []
    for name in names if cuda else names[:1]:
        tokens = SIZES[name][0] if cuda else 256
        config = text_model(name, sequence_length=tokens) if cuda else _TINY
        base = memory_preset(name, hardware_preset(device=options.device))
        base = replace(base, optimizer="adamw", loss_chunk=base.loss_chunk if cuda else 64, compile=cuda)
        fitted = fit_options(base, [Load(config, tokens)], room).options  # as `train --preset` chooses them
        case = StepCase(
            config=config, tokens=tokens, options=fitted, device=options.device,
            warm_tokens=tokens, steps=3, profiled=1,
        )  # fmt: skip
        again = replace(case.options, loss_chunk=0, mlp_tile=0)  # Llama has no such options
        every = {
            OURS: case,
            PLAIN: replace(case, options=replace(fitted, compile=False)),
            DENSE: replace(case, dense=True),
            LLAMA: replace(case, llama=True, options=again),
        }
        wanted = options.only or every
        check_names("only", wanted, every)
        trials += [Trial(one, name, every[one]) for one in wanted]
    return trials


def _measure(trial: Trial | None, options: Options) -> Iterator[Record]:
    if trial is None:
        yield from step_ranks.measure(options.device)
        return
    case = trial.case
    found = step_in_a_process(case, timeout=420.0)
    if case.llama and found.get("failed") == OUT_OF_MEMORY:
        case = replace(case, options=replace(case.options, checkpointing="full"))
        found = step_in_a_process(case, timeout=420.0)
    found.pop("kernels", None)
    record: Record = {
        "model": trial.name, "size": trial.size, "tokens": case.tokens, "options": asdict(case.options),
        "ceiling": _ceiling(options.device), **found,
        "branches": branches_in_words(case.config),
    }  # fmt: skip
    if trial.name in (OURS, PLAIN):
        record["predicted_bytes"] = footprint(case.config, case.tokens, case.options).peak
    if "failed" not in record:
        record["flops"] = _flops(case, record["parameters"])
        record["share"] = record["flops"] / record["seconds"] / record["ceiling"]
    yield record


_ceilings: dict[str, float] = {}


def _ceiling(device: str) -> float:
    """FLOP/s of a matrix product, measured once per run."""
    if device not in _ceilings:
        size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        _ceilings[device] = 2 * size**3 / (measure(lambda: a @ b, device).median * 1e-3)
    return _ceilings[device]


def _flops(case: StepCase, parameters: int) -> int:
    config = case.config
    whole = DilatedSpec.of([case.tokens], [1])
    specs = [whole if case.dense or case.llama else config.spec_of(layer) for layer in range(config.num_layers)]
    sizes = case.tokens, config.num_heads, config.head_dim
    attention = {spec: forward_flops(spec, *sizes, kv_heads=config.num_kv_heads, is_causal=True) for spec in {*specs}}
    return 6 * parameters * case.tokens + sum(attention[spec] for spec in specs) * 7 // 2


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    head = ["model", "tokens", "tokens/s", "share of the ceiling", "idle", "peak GiB", "memory model, GiB", "options"]
    for machine, shared in by_machine([x for x in records if "ranks" in x]):
        yield step_ranks.table(machine, shared)
    for machine, mine in by_machine([x for x in records if "ranks" not in x]):
        ceiling = max(x["ceiling"] for x in mine) / 1e12
        words = f"{machine}. One sequence per step, forward, backward and update. Ceiling: {ceiling:.3g} TFLOP/s."
        words = f"{words} {which_branches([x for x in mine if x['model'] in (OURS, PLAIN)])}".rstrip()
        table = Table("A training step", [words], head)
        for x in mine:
            options = MemoryOptions(**x["options"]).stated()
            first = [f"{x['size']}: {x['model']}", f"{x['tokens']:,}"]
            if "failed" in x:
                table.rows.append([*first, x["failed"], "", "", "", "", options])
                continue
            found: list[Any] = [f"{x['tokens_per_second']:,.0f}", f"{x['share']:.2f}", number(x["idle"], 3)]
            found += [number(x.get(key), 1, 1 << 30) for key in ("peak_bytes", "predicted_bytes")]
            table.rows.append([*first, *found, options])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    yield from step_ranks.verdict([x for x in records if "ranks" in x])
    found = {(x["size"], x["model"]): x for x in records if "failed" not in x and "ranks" not in x}
    for size, (tokens, target) in SIZES.items():
        ours, llama = found.get((size, OURS)), found.get((size, LLAMA))
        if ours is None or ours["tokens"] != tokens:
            continue
        text = f"{size}, {tokens:,} tokens: {target:.2f} of the ceiling, or better; {ours['share']:.2f}"
        yield Verdict(ours["share"] >= target, text)
        if llama is not None:
            ratio = ours["tokens_per_second"] / llama["tokens_per_second"]
            yield Verdict(ratio > 1.0, f"{size}: more tokens per second than Hugging Face's Llama; {ratio:.2f} times")


SUITE = Suite(
    name="step",
    about="training steps against the same model with dense attention and Hugging Face's Llama; targets are for a GPU",
    flags=("device", "sizes", "only", "ranks"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("size", "tokens", "model", "ranks"),
)
