"""The command `train`: flags override the config file, which overrides the preset; it trains here or starts ranks.

Flags are the settings of `TrainConfig`, its model, memory options and ZeRO that have a help text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import torch

from dilated_attention_pytorch.core.checks import check_sequence, check_whole, import_optional
from dilated_attention_pytorch.core.environment import local_rank, torchrun_restarts, under_torchrun, world_size
from dilated_attention_pytorch.core.spec import branches_for
from dilated_attention_pytorch.measuring import host_memory
from dilated_attention_pytorch.parallel.options import RunOptions
from dilated_attention_pytorch.train.config import (
    DEFAULTS,
    PATTERN,
    PRESETS,
    SMALL_MODEL,
    TABLES,
    TrainConfig,
    check_beside_stages,
    may_change,
    override,
    read_settings,
    settings_of,
)
from dilated_attention_pytorch.train.fitting import Load, fit_options
from dilated_attention_pytorch.train.footprint import parameter_count
from dilated_attention_pytorch.train.loop import train
from dilated_attention_pytorch.train.presets import HARDWARE, MODEL_SIZES, OF_A_PRESET, expand_presets
from dilated_attention_pytorch.train.ranks import RESTARTABLE, Stopped, check_gpus, torchrun_arguments
from dilated_attention_pytorch.train.run_folder import last_checkpoint, list_checkpoints
from dilated_attention_pytorch.train.stages import Stage, read_stages, with_pattern
from dilated_attention_pytorch.train.tokenizer import read_tokenizer

RUNS = Path("runs")
_BYTES_PER_PARAMETER = 16  # in float32: the parameter, its gradient and two moments of AdamW

# Flags that are not settings: what the settings start from, and how the run starts.
_STARTING: dict[str, tuple[Any, str]] = {
    "config": (Path, "settings as TOML; flags override them"),
    "options": (Path, "RunOptions as JSON: engine, checkpoints, monitors, restarts"),
    "preset": (
        Literal[MODEL_SIZES],
        "a model of this size, with a length, batch and learning rate for it; on a GPU, memory options that fit",
    ),
    "hardware": (Literal[HARDWARE], "use its precision (default: fp32; with --preset, that of the device)"),
    "out": (Path, "the run's folder (default: a new one below runs/)"),
    "resume": (
        tuple[()] | tuple[Path],
        "continue the run in this folder (default: the newest below runs/); only how long and where it runs may change",
    ),
    "auto_resume": (bool, "continue the run in --out if there is one, else start it (default: off)"),
    "ranks": (int, "processes to start on this machine (default: train in this one); across machines use torchrun"),
    "max_restarts": (int, "with --ranks: how often to restart after a rank dies (default: 0)"),
}
# Headings of `--help` for settings in tables; those of the run itself state theirs.
_GROUPS = {"model": "model", "memory": "memory and speed", "zero": "deepspeed"}


# By flag: the table of the setting ("" for the run itself) and its field.
SETTINGS: dict[str, tuple[str, dataclasses.Field[Any]]] = {
    field.metadata["flag"] or field.name: (table, field)
    for table, kind in {"": TrainConfig, **TABLES}.items()
    for field in dataclasses.fields(kind)
    if field.metadata.get("help")
}


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of the flags that were given, by flag."""
    tyro = import_optional("tyro", "train", "the command train")
    given = tyro.cli(
        _flags_by_group(),
        args=list(arguments),
        prog="dilated-attention train",
        description="Train a LongNetLM on text; by default on the bytes of the source of Python's standard library. "
        "Flags override --config, which overrides --preset; the defaults below are those without both.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),  # comments are slow to find
    )
    return {name: value for group in given.values() for name, value in group.items()}


@functools.cache  # tyro remembers what it has read of a class
def _flags_by_group() -> Any:
    """All flags as tyro takes them: a class with a field per group, which is a class with a field per flag."""
    import tyro

    hints = {table: get_type_hints(kind) for table, kind in {"": TrainConfig, **TABLES}.items()}
    groups: dict[str, dict[str, Any]] = {
        "start": {
            name: Annotated[
                kind, tyro.conf.arg(help=text, help_behavior_hint="", metavar="[PATH]" if name == "resume" else None)
            ]
            for name, (kind, text) in _STARTING.items()
        }
    }
    defaults = {"": TrainConfig(), **DEFAULTS}
    for name, (table, field) in SETTINGS.items():
        kind = Path if name == "stages" else without_none(hints[table][field.name])
        words = field.metadata["help"]
        default = "" if "(default" in words else _shown(getattr(defaults[table], field.name))
        short = [f"--{field.metadata['short']}"] if field.metadata["short"] else None
        groups.setdefault(field.metadata["group"] or _GROUPS[table], {})[name] = Annotated[
            kind, tyro.conf.arg(help=words, help_behavior_hint=default and f"(default: {default})", aliases=short)
        ]
    by_group: Any = TypedDict(  # type: ignore[misc]
        "flags", {group: TypedDict(group, kinds, total=False) for group, kinds in groups.items()}
    )
    return by_group


def _shown(default: Any) -> str:
    """A default as a flag takes it; empty where there is nothing to type."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None:
        return ""
    return " ".join(map(str, default)) if isinstance(default, tuple) else shlex.quote(str(default))


def without_none(kind: Any) -> Any:
    rest = [part for part in get_args(kind) if part is not NoneType]
    return rest[0] if NoneType in get_args(kind) else kind


def run_command(arguments: Sequence[str]) -> int:
    """Carry out `train` with these arguments; returns the status of the process."""
    flags = parse_flags(arguments)
    given = {name: flags.pop(name) for name in _STARTING if name in flags}
    ranks, max_restarts, out = given.get("ranks"), given.get("max_restarts"), given.get("out")
    resuming = "resume" in given
    options = RunOptions.from_json(given["options"]) if "options" in given else None
    auto_resume = given.get("auto_resume", False)
    for name in ("options", "config"):
        if name in given and resuming:
            raise ValueError(f"--{name} starts a run: continue it with --auto-resume, or leave --{name} out")
    if options is not None:
        if "config" in given:
            raise ValueError("--options and --config both describe the run: put the options into the TOML file")
        auto_resume = auto_resume or options.auto_resume
        if ranks is not None and max_restarts is None:
            max_restarts = options.max_restarts
    if auto_resume and (resuming or out is None):
        raise ValueError("--auto-resume continues the run in --out FOLDER: name it, and leave --resume out")
    if max_restarts is not None and ranks is None:
        raise ValueError("--max-restarts needs --ranks: under torchrun, use torchrun's own --max-restarts")
    if ranks is not None and (ranks < 1 or (max_restarts or 0) < 0):
        raise ValueError(f"--ranks must be at least 1 and --max-restarts at least 0, got {ranks} and {max_restarts}")
    run = next(iter(given["resume"]), None) if resuming else out
    if under_torchrun():
        if ranks is not None:
            raise ValueError("torchrun has started this rank: leave --ranks out, or torchrun")
        if run is None:
            raise ValueError("ranks and restarts must agree on one folder: name it with --out or --resume FOLDER")
    elif run is None:
        run = _newest_run() if resuming else RUNS / time.strftime("%Y-%m-%d-%H%M%S")
    if resuming:
        if fixed := sorted(filter(_is_fixed, {*flags, *given} - {"resume", "ranks", "max_restarts"})):
            raise ValueError(f"{_names(fixed)} cannot change when a run is resumed: start a new one")
        before = TrainConfig.from_json(run / "config.json")
        fields = {field.name: getattr(before, field.name) for field in dataclasses.fields(before)}
        config = _with_flags(fields, flags)
    else:
        started = ranks or world_size()
        config, stated = _begin(flags, given, {} if options is None else settings_of(options, started))
        earlier = TrainConfig.from_json(run / "config.json") if auto_resume and list_checkpoints(run) else None
        if earlier is not None and config.is_same_run(earlier):
            config = _as_before(config, earlier, stated)
        else:
            config = _for_gpu(config, stated, started)
    resume: bool | Literal["auto"] = "auto" if auto_resume else resuming
    if ranks is not None:
        return launch_ranks(config, run, resume, ranks, max_restarts or 0)
    train(config, run, resume=resume)
    return 0


def _begin(
    flags: dict[str, Any], given: Mapping[str, Any], settings: dict[str, Any]
) -> tuple[TrainConfig, Collection[str]]:
    """The config of a new run: flags override the `settings` or the file, which override the preset.

    Also returns the names of the fields, of the run and of its memory options, that are stated.
    """
    file = given.get("config")
    if file is not None:
        settings = read_settings(file)
    try:
        settings |= {name: given[name] for name in PRESETS if name in given}
        if "stages" in flags:
            flags["stages"] = read_stages(flags["stages"])
        stated = _nested(flags)
        together = {**settings, **stated, "model": {**settings.get("model", {}), **stated.get("model", {})}}
        if "data" in together and (not together["data"] or not all(together["data"])):
            raise ValueError("data takes files or folders: leave it out for the standard library's source")
        for name in {"steps", "sequence_length"} & together.keys():
            check_whole(name, together[name], least=1)
        if check_sequence("stages", together.get("stages", ())):
            check_beside_stages(Stage.of(together["stages"][0]), {**together, **together["model"]})
        tokenizer = together.get("tokenizer")
        vocabulary = {} if tokenizer is None else {"vocab_size": read_tokenizer(tokenizer).vocab_size}
        before = override(
            _preset(together, vocabulary), {name: value for name, value in settings.items() if name not in PRESETS}
        )
        config = _with_flags(override(before, {"model": vocabulary}), flags)
        return config, {*together, *settings.get("memory", {}), *stated.get("memory", {})}
    except (TypeError, ValueError) as error:
        raise ValueError(str(error) if file is None else f"{error} (in {file}, or a flag)") from None


def _preset(together: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any]:
    """The fields that `preset` and `hardware` decide, and a model with branches for the stated tokens and heads."""
    concerning = ("device", "engine", "sequence_length", "stages", *PRESETS)
    concerned = {name: together[name] for name in concerning if name in together}
    model, tokens = together["model"], together.get("sequence_length", 0)
    stated = {name: model[name] for name in OF_A_PRESET if name in model}
    if model.keys() & {*PATTERN}:
        stated.setdefault("stagger", False)
    before = expand_presets({**concerned, **stated, **vocabulary})
    is_stated = "model" in before or together.get("stages") or model.keys() & {*PATTERN}
    reach = SMALL_MODEL.segment_lengths[-1]
    nested = model.get("positions") == "xpos"
    if not is_stated and (tokens > reach or model.get("num_kv_heads") or nested):
        heads, tokens = model.get("num_kv_heads") or model.get("num_heads", SMALL_MODEL.num_heads), max(tokens, reach)
        shortest = next(n for i in itertools.count() if (n := 64 << i) * (n * 11 // 16 - 1) >= tokens)  # two near ones
        pattern = branches_for(tokens, heads, shortest=64 if nested else shortest, is_causal=not nested)
        before |= override({}, {"model": dict(zip(PATTERN, pattern))})
    return before


def _as_before(config: TrainConfig, before: TrainConfig, stated: Collection[str]) -> TrainConfig:
    """The config with the memory options that the first part of the run chose, so that both parts round alike."""
    free = [field.name for field in dataclasses.fields(config.memory) if may_change(field) and field.name not in stated]
    memory = dataclasses.replace(config.memory, **{name: getattr(before.memory, name) for name in free})
    accumulate = config.accumulate if "accumulate" in stated else before.accumulate
    return dataclasses.replace(config, memory=memory, accumulate=accumulate)


def _for_gpu(config: TrainConfig, stated: Collection[str], ranks: int) -> TrainConfig:
    """The config with the choices for a GPU that are not stated: compiled layers, and memory options for a preset.

    It assumes that every rank holds all parameters.
    """
    kind, _, number = config.device.partition(":")
    if kind not in ("auto", "cuda") or not torch.cuda.is_available() or config.engine == "deepspeed":
        return config
    memory = config.memory if "compile" in stated else dataclasses.replace(config.memory, compile=True)
    shares, uneven = divmod(ranks, config.sequence_parallel * config.tensor_parallel)
    uneven = uneven or any(stage.batch_size % shares for stage in config.schedule)
    if "preset" not in stated or uneven:  # `train` refuses uneven shares
        return dataclasses.replace(config, memory=memory)
    gpu, host = torch.device("cuda", int(number or 0)), host_memory()
    total = torch.cuda.get_device_properties(gpu).total_memory
    # Ranks must choose alike, and the process that starts them takes no memory on a GPU.
    free = (torch.cuda.mem_get_info(gpu)[0], host.available) if ranks == 1 else (total, host.total // ranks)
    # By the whole memory: a run that is resumed beside other processes keeps its optimizer.
    if "optimizer" not in stated and _BYTES_PER_PARAMETER * parameter_count(config.model) <= total // 2:
        memory = dataclasses.replace(memory, optimizer="adamw")
    chosen = fit_options(
        memory,
        [
            Load(
                with_pattern(config.model, stage),
                -(-stage.sequence_length // config.sequence_parallel),
                stage.batch_size // shares,
            )
            for stage in config.schedule
        ],
        free[0],
        host_bytes=free[1] * 4 // 5,
        stated=stated,
        accumulate=config.accumulate if "accumulate" in stated else None,
    )
    if not local_rank():
        print(f"memory   {chosen.why}", flush=True)
    return dataclasses.replace(config, memory=chosen.options, accumulate=chosen.accumulate)


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as settings: fields of the run, and tables of fields."""
    stated: dict[str, Any] = {}
    for name, value in flags.items():
        table, field = SETTINGS[name]
        (stated.setdefault(table, {}) if table else stated)[field.name] = value
    return stated


def _with_flags(before: Mapping[str, Any], flags: Mapping[str, Any]) -> TrainConfig:
    stated = _nested(flags)
    if stated.get("engine", before.get("engine", "fsdp")) != "deepspeed":
        if "zero" in stated:
            names = _names(name for name in flags if SETTINGS[name][0] == "zero")
            raise ValueError(f"{names} needs --engine deepspeed: add it, or leave {names} out")
        if "engine" in stated:  # another engine drops what the file or the run states for DeepSpeed
            stated["zero"] = None
    return TrainConfig(**override(before, stated))


def _is_fixed(flag: str) -> bool:
    table, field = SETTINGS.get(flag, ("", None))
    return field is None or not (table == "zero" or may_change(field))


def _names(flags: Any) -> str:
    return ", ".join("--" + flag.replace("_", "-") for flag in flags)


def _newest_run() -> Path:
    newest = [found[-1] for run in RUNS.glob("*") if (found := list_checkpoints(run))]
    if not newest:
        raise FileNotFoundError(f"no run with a checkpoint below {RUNS}/: name its folder with --resume FOLDER")
    return max(newest, key=lambda checkpoint: checkpoint.stat().st_mtime).parents[1]


def launch_ranks(config: TrainConfig, run: Path, resume: bool | Literal["auto"], ranks: int, max_restarts: int) -> int:
    """Run torchrun, which starts `train_rank` on `ranks` processes of this machine and restarts them after a death.

    Returns 0, or 1 if a rank has failed and printed why.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    check_gpus(ranks, config.device)
    # Without restarts, torchrun's log only repeats what the ranks print and what is raised here.
    torchrun_log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = torchrun_log.level
    with tempfile.TemporaryDirectory(prefix="dilated-attention-") as folder:
        file = Path(folder) / "run.json"
        file.write_text(json.dumps({"config": dataclasses.asdict(config), "run": str(run), "resume": resume}))
        program = ["-m", "dilated_attention_pytorch.cli", "rank", str(file)]
        os.environ.update(RESTARTABLE)
        if ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would do so with a warning
        try:
            torchrun_log.setLevel(level if max_restarts else logging.CRITICAL)
            main(torchrun_arguments(ranks, max_restarts, program))
        except SignalException as stop:  # the ranks have ended and printed why
            raise Stopped(stop.sigval) from None
        except ChildFailedError as failed:
            codes = {failure.exitcode for failure in failed.failures.values()}
            for rank, failure in failed.failures.items():
                # When one rank has failed, torchrun ends the others by SIGTERM.
                if failure.exitcode < 0 and not (failure.exitcode == -signal.SIGTERM and max(codes) > 0):
                    raise ChildProcessError(
                        f"{failure.signal_name()} ended rank {rank}: {last_checkpoint(run)}; --max-restarts N would "
                        "restart the ranks"
                    ) from None
            return 1
        finally:
            torchrun_log.setLevel(level)
    return 0


def is_first_to_fail(file: Path) -> bool:
    """Whether this is the first rank of `launch_ranks` to fail; the others raise its error, or one due to it."""
    try:
        file.with_name(f"failed-{torchrun_restarts()}").touch(exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def train_rank(file: Path) -> None:
    """Train as one of the ranks that `launch_ranks` started, with the config in `file`."""
    given = json.loads(file.read_text())
    train(TrainConfig.from_dict(given["config"], file), Path(given["run"]), resume=given["resume"])
