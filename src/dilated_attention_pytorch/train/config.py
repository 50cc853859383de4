"""A training run as one frozen value; it is saved with the run, so that resuming needs nothing else.

A setting that has a help text is also a flag of `train` (see `command`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.core.checks import COUNT, NOT_NEGATIVE, POSITIVE, check_fields, check_sequence
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.files import read_toml
from dilated_attention_pytorch.models.config import ModelConfig, feed_forward_width
from dilated_attention_pytorch.parallel.options import RunOptions, Zero
from dilated_attention_pytorch.train.data import Order
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.monitor import Kind, parse_address
from dilated_attention_pytorch.train.ranks import Engine
from dilated_attention_pytorch.train.stages import Stage, stage_at, with_pattern

OF_A_STAGE = ("sequence_length", "batch_size", "learning_rate")  # fields of a run that its stages decide
PATTERN = ("segment_lengths", "dilation_rates")  # fields of the model that they decide
PRESETS = ("preset", "hardware")  # keys of a config file that stand for several fields

SAMPLE_PROMPT = "def "
_FROM_ZERO, _ANY_POSITIVE = {"least": 0, "most": 2**63 - 1}, {"above": 0, "most": math.inf}
# Headings of `--help`.
_DATA, _STEPS, _OUTPUT, _DEVICES = "data", "steps and optimizer", "checkpoints and output", "devices and ranks"

# Small enough to learn something visible on two CPU cores in two minutes; its branches connect 512 tokens.
SMALL_MODEL = ModelConfig(
    d_model=128,
    num_heads=4,
    num_layers=4,
    num_decoder_layers=0,
    segment_lengths=(43, 64, 512),
    dilation_rates=(1, 1, 4),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run.

    `data` defaults to the source of the running interpreter's standard library. `pack` keeps attention, positions and
    the loss within documents, which are files. `batch_size` counts the sequences of all ranks together; a step takes
    them in `accumulate` micro-batches, and its loss and update are those of the whole batch. `model`, `memory` and
    `zero` (with the engine `deepspeed`) are nested settings.

    `stages` follow each other. Each states its length, pattern, batch, peak learning rate and steps, and warms up; the
    run's own values of these are those of the first stage. `steps=0` means the steps of all stages, or 250 without
    stages.
    """

    data: tuple[str, ...] = setting((), "text files or folders (default: the standard library's source)", group=_DATA)
    tokenizer: str | None = setting(None, "a tokenizer.json (default: bytes)", group=_DATA)
    token_cache: str | None = setting(
        None, "folder for token files (default: beside the run)", group=_DATA, may_change=True
    )
    pack: bool = setting(False, "keep attention and loss within each file", group=_DATA)
    order: Order | None = setting(
        None, "random windows, or epochs with each sequence once (default: random; with --pack, epochs)", group=_DATA
    )
    model: ModelConfig = SMALL_MODEL
    sequence_length: int = setting(512, "tokens per sequence (bytes without --tokenizer)", range=COUNT, group=_DATA)
    batch_size: int = setting(8, "sequences per step, of all ranks together", range=COUNT, group=_DATA)
    steps: int = setting(
        0,
        "optimizer steps in total (default: those of the stages, or 250)",
        range=_FROM_ZERO,
        group=_STEPS,
        may_change=True,
    )
    stages: tuple[Stage, ...] = setting(
        (), "TOML or JSON file: stages of length, pattern, batch and learning rate", group=_STEPS
    )
    learning_rate: float = setting(2e-3, "peak learning rate", range=POSITIVE, group=_STEPS)
    warmup_steps: int = setting(30, "steps of linear warm-up", range=_FROM_ZERO, group=_STEPS)
    weight_decay: float = setting(0.1, "weight decay of matrices", range=NOT_NEGATIVE, group=_STEPS)
    clip_norm: float = setting(
        1.0, "clip the norm of the gradient to this; inf: no clipping", range=_ANY_POSITIVE, group=_STEPS
    )
    validate_every: int = setting(50, "steps between validations", range=COUNT, group=_OUTPUT)
    validation_batches: int = setting(8, range=COUNT)
    checkpoint_every: int = setting(100, "steps between checkpoints", range=COUNT, group=_OUTPUT)
    keep_checkpoints: int = setting(
        2, "newest checkpoints to keep; older ones are deleted", range=COUNT, group=_OUTPUT, may_change=True
    )
    keep_best: bool = setting(
        False, "validate every checkpoint, and keep the best one too", group=_OUTPUT, may_change=True
    )
    sample_bytes: int = setting(
        200, "tokens (bytes without --tokenizer) to generate at the end", range=_FROM_ZERO, group=_OUTPUT
    )
    sample_prompt: str = setting(
        SAMPLE_PROMPT, "text that the sample at the end continues", group=_OUTPUT, may_change=True
    )
    seed: int = setting(0, "seed of weights, batches and the sample", range=_FROM_ZERO, group=_STEPS)
    device: str = setting("auto", "cpu, cuda, ... (default: a GPU if there is one)", group=_DEVICES, may_change=True)
    threads: int | None = setting(
        None,
        "PyTorch's threads per process (default: OMP_NUM_THREADS, else on a CPU the fastest number in a short timing)",
        range={"least": 1, "most": 4096},
        group=_DEVICES,
        may_change=True,
    )
    tf32: bool = setting(False, may_change=True)  # float32 products on GPUs may round to TF32
    engine: Engine = setting(
        "fsdp", "ranks shard the parameters, copy them, or let DeepSpeed shard them", group=_DEVICES, may_change=True
    )
    zero: Zero | None = setting(None, may_change=True)
    sequence_parallel: int = setting(
        1, "ranks that share the tokens of a sequence", range=COUNT, group=_DEVICES, may_change=True
    )
    tensor_parallel: int = setting(
        1, "ranks that share the heads and features of the model", range=COUNT, group=_DEVICES, may_change=True
    )
    timeout_seconds: float = setting(
        600.0, "a rank that is silent for this long ends the run", range=POSITIVE, group=_DEVICES, may_change=True
    )
    monitors: tuple[Kind, ...] = setting(
        (), "where figures go, besides the progress bar (default: nowhere)", group=_OUTPUT, may_change=True
    )
    prometheus_address: str = setting(
        "127.0.0.1:9464", "HOST:PORT of --monitors prometheus", group=_OUTPUT, may_change=True
    )
    accumulate: int = setting(1, "micro-batches per step", range=COUNT, group=_STEPS, may_change=True)
    skip_broken_steps: int = setting(
        5,
        "steps in a row that may be skipped because the loss or gradient is not finite",
        range=_FROM_ZERO,
        group=_STEPS,
        may_change=True,
    )
    memory: MemoryOptions = MemoryOptions()

    def __post_init__(self) -> None:
        stages = tuple(Stage.of(stage) for stage in check_sequence("stages", self.stages))
        object.__setattr__(self, "stages", stages)
        check_fields(self)
        # Absolute, so that the run can be resumed from anywhere.
        object.__setattr__(self, "data", tuple(os.path.abspath(path) for path in self.data))
        for name in ("tokenizer", "token_cache"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))
        object.__setattr__(self, "steps", self.steps or sum(stage.steps for stage in stages) or 250)
        if stages:  # the run begins with the settings of the first one
            stated = {name: getattr(self, name) for name in OF_A_STAGE}
            defaults = {name: type(self).__dataclass_fields__[name].default for name in OF_A_STAGE}
            check_beside_stages(stages[0], {name: one for name, one in stated.items() if one != defaults[name]})
            for name in OF_A_STAGE:
                object.__setattr__(self, name, getattr(stages[0], name))
            object.__setattr__(self, "model", with_pattern(self.model, stages[0]))
        if self.engine == "deepspeed":
            object.__setattr__(self, "zero", self.zero or Zero())
        for why, is_so in self._refused().items():
            if is_so:
                raise ValueError(why)
        parse_address(self.prometheus_address)
        for number, stage in enumerate(self.stages, start=1):
            own = {name: getattr(stage, name) for name in OF_A_STAGE}
            try:  # each must be valid as a run of its own
                dataclasses.replace(self, stages=(), model=with_pattern(self.model, stage), **own)
            except ValueError as error:
                raise ValueError(f"stage {number}: {error}") from None

    def _refused(self) -> dict[str, bool]:
        """Whether the run combines what cannot be combined, by reason. A model refuses what its device cannot do."""
        memory, engine, tensor = self.memory, self.engine, self.tensor_parallel
        deepspeed, tiles_in_stage_3 = engine == "deepspeed", memory.mlp_tile and self.zero and self.zero.stage == 3
        whole = [name for name in ("float8", "structured_sparsity") if getattr(memory, name)]
        return {
            f"engine {engine} needs every parameter whole on all ranks, and tensor_parallel={tensor} splits them: use "
            "engine fsdp, or tensor_parallel 1": engine != "fsdp" and tensor > 1,
            f"{', '.join(whole)} replaces whole linear layers, and tensor_parallel={tensor} splits them: use "
            f"tensor_parallel 1, or leave {', '.join(whole)} out": bool(whole) and tensor > 1,
            f"ZeRO's stage and offload need the engine deepspeed, and this one is {engine}": (
                self.zero is not None and not deepspeed
            ),
            f"the engine deepspeed shards the state of PyTorch's AdamW, and optimizer={memory.optimizer!r} keeps "
            "another: use engine fsdp or ddp, or optimizer 'adamw'": (deepspeed and memory.optimizer != "adamw"),
            "precision='fp16' needs a loss scale before gradients are averaged and clipped, which the engine deepspeed "
            "does by itself: use 'bf16', or engine fsdp or ddp": deepspeed and memory.precision == "fp16",
            f"the engine deepspeed shards float32 parameters, and parameters={memory.parameters!r} are not: use engine "
            "fsdp or ddp, or parameters 'fp32'": deepspeed and memory.parameters != "fp32",
            "mlp_tile takes gradients of weights that ZeRO stage 3 has freed by then: use stage 1 or 2, engine fsdp, "
            "or checkpointing without mlp_tile": bool(tiles_in_stage_3),
            f"accumulate cuts a batch into micro-batches of one size: {self.accumulate} must divide the batch_size, "
            f"which is {self.batch_size}": self.batch_size % self.accumulate > 0,
            "sample_prompt must have at least one character, got '': leave it out for the default": (
                not self.sample_prompt
            ),
            f"without a tokenizer, each byte is a token: vocab_size must be 256, got {self.model.vocab_size}": (
                self.tokenizer is None and self.model.vocab_size != 256
            ),
        }

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """The stage of a step, and the step's number within it."""
        number, within = stage_at(self.schedule, step)
        return self.schedule[number], within

    @functools.cached_property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages; without any, the run is one stage."""
        own: dict[str, Any] = {name: getattr(self, name) for name in (*OF_A_STAGE, "steps")}
        pattern = {name: getattr(self.model, name) for name in PATTERN}
        return self.stages or (Stage(**own, **pattern),)

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step of the run."""
        stage, step_of_stage = self.stage_at(step)
        return stage.learning_rate_at(step_of_stage, self.warmup_steps)

    @property
    def settled_order(self) -> Order:
        """The order of sequences, with the default in place of None."""
        return self.order or ("epochs" if self.pack else "random")

    def is_same_run(self, other: TrainConfig) -> bool:
        """Whether both describe one run, perhaps carried out in another way."""
        return identity(self) == identity(other)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> TrainConfig:
        try:
            return cls.from_dict(json.loads(path.read_text()), path)
        except FileNotFoundError:
            raise FileNotFoundError(f"no training run at {path.parent}: there is no {path.name}") from None
        except ValueError as error:
            raise ValueError(f"{path} is not the config of a training run: {error}") from None

    @classmethod
    def from_dict(cls, values: Any, source: Path) -> TrainConfig:
        """The config that `dataclasses.asdict` made `values` of; `source` is named in errors."""
        try:
            return cls(**{**override({}, values), "model": ModelConfig.from_dict(values["model"], source)})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from None


def identity(config: Any) -> dict[str, Any]:
    """The settings that identify a run: those that may not change when it is resumed."""
    kept = {one.name: getattr(config, one.name) for one in dataclasses.fields(config) if not may_change(one)}
    return {name: identity(value) if dataclasses.is_dataclass(value) else value for name, value in kept.items()}


def may_change(field: dataclasses.Field[Any]) -> bool:
    """Whether a resumed run may have another value of a setting."""
    return field.metadata.get("may_change", False)


TABLES: dict[str, Any] = {"model": ModelConfig, "memory": MemoryOptions, "zero": Zero}
DEFAULTS: dict[str, Any] = {"model": SMALL_MODEL, "memory": MemoryOptions(), "zero": Zero()}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a TOML file states: fields of `TrainConfig`, tables of fields, and `PRESETS`."""
    stated = read_toml(path, "config file")
    _check_keys({key: value for key, value in stated.items() if key not in PRESETS}, TrainConfig, path)
    for name in TABLES.keys() & stated.keys():
        if not isinstance(stated[name], dict):
            raise ValueError(f"{name} in {path} is a table: write [{name}] and its keys below")
        _check_keys(stated[name], TABLES[name], path, f"[{name}] ")
    return stated


def _check_keys(stated: Mapping[str, Any], kind: Any, path: Path, table: str = "") -> None:
    known = [one.name for one in dataclasses.fields(kind)]
    for key in stated:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(f"{path} has an unknown key {table}{key}: did you mean {near[0]}?")


def override(before: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `TrainConfig` with stated settings over them; a table changes only the fields that it states."""
    result = {**before, **stated}
    for name in TABLES.keys() & stated.keys():
        if not isinstance(stated[name], Mapping):
            continue
        own, changes = before.get(name) or DEFAULTS[name], dict(stated[name])
        if name == "model" and own.dim_feedforward == feed_forward_width(own.d_model, own.activation):
            changes = {"dim_feedforward": 0, **changes}  # it follows unless it is stated
        try:
            result[name] = dataclasses.replace(own, **changes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"[{name}]: {error}") from None
    return result


def check_beside_stages(first: Stage, stated: Mapping[str, Any]) -> None:
    """Refuse settings of a run or of its model that contradict its first stage."""
    for name in (*OF_A_STAGE, *PATTERN):
        value, decided = stated.get(name), getattr(first, name)
        if value is not None and (tuple(value) if isinstance(value, list) else value) != decided:
            raise ValueError(f"the stages decide {name}, which is {decided} in the first, got {value}: leave it out")


def settings_of(options: RunOptions, ranks: int = 1) -> dict[str, Any]:
    """The fields of a `TrainConfig` that the options of `RingAdvancedDistributedDilatedAttention` decide.

    `ranks` is the number of ranks that train. `options.resume` is for `train`, `options.max_restarts` for the launcher.
    """
    axes = options.axes(ranks) if options.stated_axes else {}
    return {
        **{f"{axis}_parallel": axes[axis] for axis in ("sequence", "tensor") if axis in axes},
        "engine": "deepspeed" if options.use_deepspeed else "fsdp",
        "zero": options.zero,
        "checkpoint_every": options.checkpoint_interval,
        "monitors": ("jsonl",) if options.enable_monitoring else (),
    }
