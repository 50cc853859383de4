"""The command `train`: how a file of settings, options and flags become a run, here or on ranks that it starts."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.core.reach import branches_for
from dilated_attention_pytorch.parallel.options import RunOptions, Zero
from dilated_attention_pytorch.train.checkpoint import list_checkpoints
from dilated_attention_pytorch.train.config import (
    MAY_CHANGE,
    MEMORY_MAY_CHANGE,
    OF_A_STAGE,
    PRESETS,
    SMALL_MODEL,
    TrainConfig,
    build_tables,
    change_model,
    read_settings,
    settings_of,
)
from dilated_attention_pytorch.train.engine import launch_ranks, under_torchrun
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.presets import expand_presets
from dilated_attention_pytorch.train.stages import Stage, read_stages
from dilated_attention_pytorch.train.tokenizer import read_tokenizer
from dilated_attention_pytorch.train.trainer import train

RUNS = Path("runs")

# What a flag sets on the model, or on DeepSpeed, rather than on the run.
_MODEL_FLAGS = ("d_model", "num_heads", "num_layers", "dropout", "segment_lengths", "dilation_rates")
_ZERO_FLAGS = {"zero_stage": "stage", "cpu_offload": "cpu_offload", "nvme_offload": "nvme_path"}
_MEMORY_FLAGS = tuple(field.name for field in dataclasses.fields(MemoryOptions))
# What a launcher settles, so that its ranks are not told.
_SETTLED = ("ranks", "max_restarts", "out", "resume")


def run_command(stated: dict[str, Any]) -> None:
    """Carry out `train` with these flags, by name; what is not among them was not given."""
    flags = dict(stated)
    ranks, max_restarts = flags.pop("ranks", None), flags.pop("max_restarts", None)
    out, auto_resume = flags.pop("out", None), flags.pop("auto_resume", False)
    resuming = "resume" in flags
    run = flags.pop("resume", None) if resuming else out
    before, file = _begun_with(flags, resuming)
    if isinstance(before, RunOptions):
        auto_resume = auto_resume or before.auto_resume
        if ranks is not None and max_restarts is None:
            max_restarts = before.max_restarts
    if auto_resume and (resuming or out is None):
        raise ValueError("--auto-resume continues the run in --out FOLDER: name it, and leave --resume out")
    if max_restarts is not None and ranks is None:
        raise ValueError("--max-restarts goes with --ranks; torchrun has an option of that name itself")
    if under_torchrun():
        if ranks is not None:
            raise ValueError("torchrun has started this rank: leave --ranks out, or torchrun")
        if run is None:
            raise ValueError("ranks and restarts must agree on one folder: name it with --out or --resume FOLDER")
    elif run is None:
        run = _newest_run() if resuming else RUNS / time.strftime("%Y-%m-%d-%H%M%S")
    if resuming:
        fixed = sorted(flags.keys() - {*MAY_CHANGE, *MEMORY_MAY_CHANGE, *_ZERO_FLAGS})
        if fixed or out is not None:
            raise ValueError(
                f"{_names([*fixed, *(['out'] if out else [])])} cannot change when a run is resumed: start a new one"
            )
        config = _changed(TrainConfig.from_json(run / "config.json"), {}, flags)
    else:
        started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else ranks or 1
        settings = settings_of(before, started) if isinstance(before, RunOptions) else before
        try:
            config = _changed(TrainConfig(), _with_presets(settings, flags, file), flags)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error) if file is None else f"{error} (in {file}, or a flag)") from None
    if ranks is None:
        train(config, run, resume="auto" if auto_resume else resuming)
        return
    if ranks < 1 or (max_restarts or 0) < 0:
        raise ValueError(f"--ranks must be at least 1 and --max-restarts at least 0, got {ranks} and {max_restarts}")
    passed = _as_flags({name: value for name, value in stated.items() if name not in _SETTLED})
    launch_ranks(ranks, max_restarts or 0, ["train", *passed, "--resume" if resuming else "--out", str(run)])


def _begun_with(flags: dict[str, Any], resuming: bool) -> tuple[dict[str, Any] | RunOptions, Path | None]:
    """What the flags go before: the settings of a file, the options of a module, or nothing."""
    options, file = flags.pop("options", None), flags.pop("config", None)
    for flag, path in (("--options", options), ("--config", file)):
        if path is not None and resuming:
            raise ValueError(f"{flag} begins a run: resume it with --auto-resume, or leave {flag} out")
    if options is not None:
        if file is not None:
            raise ValueError("--options and --config both say how to run: put into the TOML file what the options say")
        return RunOptions.from_json(options), None
    return ({} if file is None else read_settings(file)), file


def _with_presets(settings: dict[str, Any], flags: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The settings of a file, after what --preset and --hardware, flags or keys, stand for; reads --stages."""
    for stated in (settings, flags):
        if stated.get("steps", 1) < 1:
            raise ValueError(f"steps must be at least 1, got {stated['steps']}")
    if "stages" in flags:
        flags["stages"] = read_stages(flags["stages"])
    together = {**settings, **flags}
    if together.get("stages"):
        _check_beside_stages(settings, flags, Stage.of(together["stages"][0]))
        settings = {"steps": 0, **settings}  # those of the stages
    concerning = ("device", "engine", "sequence_length", "stages", *PRESETS)
    concerned: dict[str, Any] = {name: together[name] for name in concerning if name in together}
    if together.get("tokenizer") is not None and any(name in together for name in PRESETS):
        concerned["vocab_size"] = read_tokenizer(together["tokenizer"]).vocab_size
    before = expand_presets(concerned)
    if "model" not in before and not together.get("stages"):
        before |= _reaching(settings.get("model", {}), flags, together.get("sequence_length", 0))
    for name in PRESETS:
        flags.pop(name, None)
    stated = {name: value for name, value in settings.items() if name not in PRESETS}
    return {**before, **build_tables(stated, before, file)}


def _reaching(table: Any, flags: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The default model with branches that connect longer sequences than its own, if nobody states them."""
    stated = {**(table if isinstance(table, dict) else {}), **flags}
    shortest, longest = SMALL_MODEL.segment_lengths[0], SMALL_MODEL.segment_lengths[-1]
    if tokens <= longest or stated.keys() & {"segment_lengths", "dilation_rates"}:
        return {}
    heads = stated.get("num_kv_heads") or stated.get("num_heads", SMALL_MODEL.num_heads)
    lengths, rates = branches_for(tokens, heads, shortest=shortest)
    return {"model": change_model(SMALL_MODEL, {"segment_lengths": lengths, "dilation_rates": rates})}


def _check_beside_stages(settings: dict[str, Any], flags: dict[str, Any], first: Stage) -> None:
    """Stages decide these: a flag is refused, and so is a file that says otherwise."""
    of_the_model = ("segment_lengths", "dilation_rates")
    if both := [name for name in (*OF_A_STAGE, *of_the_model) if name in flags]:
        raise ValueError(f"{'--' * ('stages' in flags)}stages say what {_names(both)} are: leave one of both out")
    model = settings.get("model", {})
    for names, stated in ((OF_A_STAGE, settings), (of_the_model, model if isinstance(model, dict) else {})):
        for name in names:
            value, decided = stated.get(name), getattr(first, name)
            if value is not None and (tuple(value) if isinstance(value, list) else value) != decided:
                raise ValueError(f"stages say what {name} is, {decided} at first, got {value} beside them")


def _changed(config: TrainConfig, settings: dict[str, Any], flags: dict[str, Any]) -> TrainConfig:
    """A config with other settings, and flags that go before them."""
    flags = dict(flags)
    model, memory, zero = (
        {name: flags.pop(name) for name in names if name in flags}
        for names in (_MODEL_FLAGS, _MEMORY_FLAGS, _ZERO_FLAGS)
    )
    changes = {**settings, **flags}
    if changes.get("tokenizer") is not None:
        model["vocab_size"] = read_tokenizer(changes["tokenizer"]).vocab_size
    if model:
        changes["model"] = change_model(changes.get("model", config.model), model)
    if memory:
        changes["memory"] = dataclasses.replace(changes.get("memory", config.memory), **memory)
    engine = changes.get("engine", config.engine)
    if zero and engine != "deepspeed":
        raise ValueError(f"{_names(zero)} goes with --engine deepspeed: add it, or leave {_names(zero)} out")
    if zero:
        named = {_ZERO_FLAGS[flag]: value for flag, value in zero.items()}
        changes["zero"] = dataclasses.replace(changes.get("zero", config.zero) or Zero(), **named)
    elif "engine" in flags and engine != "deepspeed":  # it takes back what the run had
        changes["zero"] = None
    return dataclasses.replace(config, **changes)


def _names(flags: Any) -> str:
    return ", ".join("--" + flag.replace("_", "-") for flag in flags)


def _as_flags(given: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in given.items():
        spelled = name.replace("_", "-")
        flags.append(f"--no-{spelled}" if value is False else f"--{spelled}")
        if not isinstance(value, bool):
            flags += map(str, value if isinstance(value, list) else [value])
    return flags


def _newest_run() -> Path:
    newest = [found[-1] for run in RUNS.glob("*") if (found := list_checkpoints(run))]
    if not newest:
        raise FileNotFoundError(f"no run with a checkpoint below {RUNS}/: name its folder with --resume FOLDER")
    return max(newest, key=lambda checkpoint: checkpoint.stat().st_mtime).parents[1]
