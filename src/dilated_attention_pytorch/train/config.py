"""A training run as one frozen value; saved with the run, so that resuming needs nothing else."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.core.checks import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    check_fields,
    check_sequence,
    install_extra,
)
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.parallel.options import RunOptions, Zero
from dilated_attention_pytorch.train.data import Order
from dilated_attention_pytorch.train.engine import Engine
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.monitor import KINDS, parse_address
from dilated_attention_pytorch.train.stages import Stage, stage_at, with_pattern

# How long, where and how a run is carried out; the rest makes it the run it is.
MAY_CHANGE = (
    "steps",
    "device",
    "tf32",
    "engine",
    "zero",
    "sequence_parallel",
    "tensor_parallel",
    "timeout_seconds",
    "monitors",
    "prometheus_address",
    "accumulate",
    "skip_broken_steps",
    "token_cache",
)
# Of the memory options, those that leave the mathematics as it is.
MEMORY_MAY_CHANGE = (
    "checkpointing",
    "offload",
    "offload_least_bytes",
    "mlp_tile",
    "loss_chunk",
    "compile",
    "compile_mode",
    "compile_backend",
)

# What a TOML file has for a field whose default is of a type.
_TOML_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    tuple: ((list,), "a list"),
}

OF_A_STAGE = ("sequence_length", "batch_size", "learning_rate")  # fields of a run that its stages decide

# Small enough to learn something visible on two CPU cores in two minutes; its branches connect 512 tokens.
SMALL_MODEL = ModelConfig(
    d_model=128,
    num_heads=4,
    num_layers=4,
    num_decoder_layers=0,
    segment_lengths=(64, 128, 512),
    dilation_rates=(1, 2, 4),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`data` are text files or folders; none means the source of the running interpreter's standard library.

    `tokenizer` is a `tokenizer.json`, and None reads bytes. Token files are kept in the folder `token_cache`, by
    default beside the run. `pack` keeps attention, positions and the loss within documents, which are files. Sequences
    come in an `order`: `random` windows, or `epochs` in which each comes once; by default epochs if packed.

    `batch_size` counts the sequences of all ranks together. `engine` says how ranks share the model: `fsdp` shards its
    parameters, `ddp` copies them, `deepspeed` shards what `zero` says. So many ranks as `sequence_parallel` says share
    the tokens of a sequence, and `tensor_parallel` the heads and features of the model; by default all share the batch
    alone. A rank that is silent for `timeout_seconds`, in a step or a checkpoint, ends the run.

    `memory` says how a step saves memory. A step takes its batch in `accumulate` micro-batches, one after the other,
    and its loss and update are those of the whole batch. Up to `skip_broken_steps` steps in a row whose loss or
    gradient is not finite are skipped; the next one ends the run.

    `stages` follow each other, and each says what its length, pattern, batch, peak learning rate and steps are: the
    run's own are those of the first, and `steps` all of theirs, unless the run is to end elsewhere. Each warms up.
    `tf32` lets float32 products on GPUs round to TF32.
    """

    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    token_cache: str | None = None
    pack: bool = False
    order: Order | None = None
    model: ModelConfig = field(default=SMALL_MODEL)
    sequence_length: int = 512
    batch_size: int = 8
    steps: int = 0  # 0: those of the stages, else 250
    stages: tuple[Stage, ...] = ()
    learning_rate: float = 2e-3
    warmup_steps: int = 30
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    validate_every: int = 50
    validation_batches: int = 8
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    sample_bytes: int = 200
    seed: int = 0
    device: str = "auto"
    tf32: bool = False
    engine: Engine = "fsdp"
    zero: Zero | None = None
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    timeout_seconds: float = 600.0
    monitors: tuple[str, ...] = ()
    prometheus_address: str = "127.0.0.1:9464"
    accumulate: int = 1
    skip_broken_steps: int = 5
    memory: MemoryOptions = field(default=MemoryOptions())

    def __post_init__(self) -> None:
        stages = tuple(Stage.of(stage) for stage in check_sequence("stages", self.stages))
        object.__setattr__(self, "stages", stages)
        from_zero = {"least": 0, "most": 2**63 - 1}
        check_fields(
            self,
            sequence_length=COUNT,
            batch_size=COUNT,
            steps=from_zero,
            learning_rate=POSITIVE,
            warmup_steps=from_zero,
            weight_decay=NOT_NEGATIVE,
            clip_norm={"above": 0, "most": math.inf},  # infinite: nothing is clipped
            validate_every=COUNT,
            validation_batches=COUNT,
            checkpoint_every=COUNT,
            keep_checkpoints=COUNT,
            sample_bytes=from_zero,
            seed=from_zero,
            sequence_parallel=COUNT,
            tensor_parallel=COUNT,
            timeout_seconds=POSITIVE,
            accumulate=COUNT,
            skip_broken_steps=from_zero,
        )
        # Absolute, so that the run can be resumed from anywhere.
        object.__setattr__(self, "data", tuple(os.path.abspath(path) for path in self.data))
        for name in ("tokenizer", "token_cache"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))
        self._begin_with_first_stage()
        if self.engine == "deepspeed" and self.zero is None:
            object.__setattr__(self, "zero", Zero())
        if self.engine != "deepspeed" and self.zero is not None:
            raise ValueError(f"ZeRO's stage and offload are of the engine deepspeed, and this one is {self.engine}")
        if self.engine != "fsdp" and self.tensor_parallel > 1:
            raise ValueError(
                f"engine {self.engine} wants every parameter alike on all ranks, and tensor_parallel="
                f"{self.tensor_parallel} cuts them: use engine fsdp, or tensor_parallel 1"
            )
        self._check_memory()
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate cuts a batch into micro-batches of one size: {self.accumulate} must divide the "
                f"batch_size, which is {self.batch_size}"
            )
        if unknown := set(self.monitors) - set(KINDS):
            raise ValueError(f"monitors must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
        parse_address(self.prometheus_address)
        if self.tokenizer is None and self.model.vocab_size != 256:
            raise ValueError(
                f"without a tokenizer text is read byte by byte: vocab_size must be 256, got {self.model.vocab_size}"
            )
        for number, stage in enumerate(self.stages, start=1):
            own = {name: getattr(stage, name) for name in OF_A_STAGE}
            try:  # each is to pass as a run of its own
                dataclasses.replace(self, stages=(), model=with_pattern(self.model, stage), **own)
            except ValueError as error:
                raise ValueError(f"stage {number}: {error}") from None

    def _begin_with_first_stage(self) -> None:
        """Let the run's own settings be those of its first stage; stated ones that differ are refused."""
        stages = self.stages
        object.__setattr__(self, "steps", self.steps or sum(stage.steps for stage in stages) or 250)
        if not stages:
            return
        for name in OF_A_STAGE:
            stated, first = getattr(self, name), getattr(stages[0], name)
            if stated not in (first, type(self).__dataclass_fields__[name].default):
                raise ValueError(f"stages say what {name} is, {first} at first, got {stated} beside them: leave it out")
            object.__setattr__(self, name, first)
        object.__setattr__(self, "model", with_pattern(self.model, stages[0]))

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """The stage of a step, and the step's number within it; without stages, the run is one."""
        if self.stages:
            number, within = stage_at(self.stages, step)
            return self.stages[number], within
        return self._as_stage, step

    @functools.cached_property
    def _as_stage(self) -> Stage:
        own: dict[str, Any] = {name: getattr(self, name) for name in (*OF_A_STAGE, "steps")}
        return Stage(segment_lengths=self.model.segment_lengths, dilation_rates=self.model.dilation_rates, **own)

    @property
    def settled_order(self) -> Order:
        """The order that is taken where none is stated."""
        return self.order or ("epochs" if self.pack else "random")

    def _check_memory(self) -> None:
        """Refuse what an engine cannot do; what a device cannot is refused when the model is on it."""
        memory = self.memory
        if self.engine == "deepspeed":
            if memory.optimizer != "adamw":
                raise ValueError(
                    f"the engine deepspeed shards the state of PyTorch's AdamW, and optimizer={memory.optimizer!r} "
                    "keeps another: use engine fsdp with 'adamw8bit-torchao', or optimizer 'adamw'"
                )
            if memory.precision == "fp16":
                raise ValueError(
                    "precision='fp16' needs a loss scale before gradients are averaged and clipped, which the engine "
                    "deepspeed does by itself: use 'bf16', or engine fsdp or ddp"
                )
            if memory.parameters != "fp32":
                raise ValueError(
                    f"the engine deepspeed shards float32 parameters, and parameters={memory.parameters!r} are not: "
                    "use engine fsdp or ddp, or parameters 'fp32'"
                )
            if memory.mlp_tile and self.zero is not None and self.zero.stage == 3:
                raise ValueError(
                    "mlp_tile takes gradients of weights that ZeRO stage 3 has taken away by then: use stage 1 or 2, "
                    "engine fsdp, or checkpointing without mlp_tile"
                )
        if self.tensor_parallel > 1:
            for name in ("float8", "structured_sparsity"):
                if getattr(memory, name):
                    raise ValueError(
                        f"{name} replaces linear layers whole, and tensor_parallel={self.tensor_parallel} cuts them: "
                        f"use tensor_parallel 1, or leave {name} out"
                    )

    def is_same_run(self, other: TrainConfig) -> bool:
        """Whether both describe one run, perhaps carried out in another way."""
        return self._what_makes_it() == other._what_makes_it()

    def _what_makes_it(self) -> dict[str, Any]:
        """The settings that may not change."""
        settings = dataclasses.asdict(self)
        memory = settings.pop("memory")
        for name in MAY_CHANGE:
            del settings[name]
        for name in MEMORY_MAY_CHANGE:
            del memory[name]
        return {**settings, "memory": memory}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> TrainConfig:
        try:
            values = json.loads(path.read_text())
            if values.get("zero"):
                values["zero"] = Zero(**values["zero"])
            if "memory" in values:  # runs of before have none
                values["memory"] = MemoryOptions(**values["memory"])
            return cls(model=ModelConfig.from_dict(values.pop("model"), path), **values)
        except FileNotFoundError:
            raise FileNotFoundError(f"no training run at {path.parent}: there is no {path.name}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the config of a training run: {error}") from None


_TABLES: dict[str, Any] = {"model": ModelConfig, "memory": MemoryOptions, "zero": Zero}
PRESETS = ("preset", "hardware")  # keys of a file that stand for several fields


def read_settings(path: Path) -> dict[str, Any]:
    """The fields of a `TrainConfig` that a TOML file states, and `PRESETS`; `build_tables` makes its tables objects."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"a config file is read with tomli before Python 3.11: {install_extra('train')}"
            ) from error
    try:
        stated = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"no config file {path}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    fields = {key: value for key, value in stated.items() if key not in PRESETS}
    _check_keys(fields, TrainConfig, path, "")
    for name in stated.keys() & {*PRESETS}:
        if not isinstance(stated[name], str):
            raise ValueError(f"{name} in {path} must be a string, got {stated[name]!r}")
    for name, kind in _TABLES.items():
        if name in stated:
            if not isinstance(stated[name], dict):
                raise ValueError(f"{name} in {path} is a table: write [{name}] and its keys below")
            _check_keys(stated[name], kind, path, f"[{name}] ")
    return stated


def build_tables(stated: Mapping[str, Any], over: Mapping[str, Any], source: object = "the settings") -> dict[str, Any]:
    """The settings with objects for their tables; what a table leaves out is as in `over`, or else the default."""
    built = dict(stated)
    for name in _TABLES.keys() & built.keys():
        if not isinstance(built[name], Mapping):
            continue
        try:
            if name == "model":
                built[name] = change_model(over.get(name, SMALL_MODEL), built[name])
            else:
                built[name] = dataclasses.replace(over.get(name) or _TABLES[name](), **built[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}, [{name}]: {error}") from None
    return built


def change_model(model: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """A model of other sizes; the width of its feed-forward networks follows its own unless it is stated."""
    if "d_model" in changes:
        changes = {"dim_feedforward": 0, **changes}
    return dataclasses.replace(model, **changes)


def _check_keys(stated: Mapping[str, Any], kind: Any, path: Path, table: str) -> None:
    """Every key is a field, and every value of the type of the field's default."""
    known = {given.name: given for given in dataclasses.fields(kind)}
    for key, value in stated.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(f"{path} has an unknown key {table}{key}: did you mean {near[0]}?")
        types, said = _TOML_TYPES.get(type(known[key].default), ((type(value),), ""))
        if type(value) not in types:
            raise ValueError(f"{table}{key} in {path} must be {said}, got {value!r}")


def settings_of(options: RunOptions, ranks: int = 1) -> dict[str, Any]:
    """The fields of a `TrainConfig` that the options of `RingAdvancedDistributedDilatedAttention` decide.

    `ranks` is how many train. What else the options decide is for `train` (`options.resume`) and for the launcher
    (`options.max_restarts`).
    """
    axes = options.axes(ranks) if options.stated_axes else {}
    return {
        **{f"{axis}_parallel": axes[axis] for axis in ("sequence", "tensor") if axis in axes},
        "engine": "deepspeed" if options.use_deepspeed else "fsdp",
        "zero": options.zero,
        "checkpoint_every": options.checkpoint_interval,
        "monitors": ("jsonl",) if options.enable_monitoring else (),
    }
