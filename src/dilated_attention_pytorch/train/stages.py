"""Stages of a training run: lengths, patterns, batches and learning rates that follow each other.

The stage of a step, and its learning rate, are functions of the step's number alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dilated_attention_pytorch.core.checks import COUNT, MOST_TOKENS, POSITIVE, check_fields, check_whole, checked
from dilated_attention_pytorch.core.pattern import common_period
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.files import read_toml
from dilated_attention_pytorch.functional import check_sparse_config
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.positions import XPosPositions


def decayed_rate(peak: float, step: int, steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth, which later steps keep; the first step is 1."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Part of a training run: `steps` steps of `batch_size` sequences under one pattern, and a peak learning rate.

    >>> short = {"sequence_length": 64, "segment_lengths": (16, 64), "dilation_rates": (1, 4)}
    >>> stage = Stage(**short, batch_size=8, learning_rate=1e-3, steps=100)
    >>> stage.learning_rate_at(5, warmup_steps=10), stage.learning_rate_at(10, warmup_steps=10)
    (0.0005, 0.001)
    """

    sequence_length: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch_size: int
    learning_rate: float
    steps: int

    def __post_init__(self) -> None:
        check_fields(self, sequence_length=COUNT, batch_size=COUNT, steps=COUNT, learning_rate=POSITIVE)
        spec = DilatedSpec.of(self.segment_lengths, self.dilation_rates)
        object.__setattr__(self, "segment_lengths", spec.segment_lengths)
        object.__setattr__(self, "dilation_rates", spec.dilation_rates)

    def learning_rate_at(self, step: int, warmup_steps: int = 0) -> float:
        """The learning rate of a step; see `decayed_rate`."""
        return decayed_rate(self.learning_rate, step, self.steps, warmup_steps)

    @classmethod
    def of(cls, stated: Stage | Mapping[str, Any], sequences: int | None = None) -> Stage:
        """A stage from a mapping of its fields; `max_seq_len` is the length, `epochs` of `sequences` give the steps."""
        if isinstance(stated, Stage):
            return stated
        if not isinstance(stated, Mapping):
            raise TypeError(f"a stage is a Stage or a mapping of its settings, got {type(stated).__name__}")
        values = dict(stated)
        for known, meant in (("max_seq_len", "sequence_length"), ("epochs", "steps")):
            if known in values and meant in values:
                raise ValueError(f"{known} and {meant} both say how long a stage is: give one of them")
        if "max_seq_len" in values:
            values["sequence_length"] = values.pop("max_seq_len")
        epochs = values.pop("epochs", None)
        if epochs is not None:
            if sequences is None:
                raise ValueError(f"epochs={epochs!r} need a dataset, which is not known here: give steps instead")
            batches = math.ceil(
                check_whole("sequences", sequences, least=0, most=MOST_TOKENS)
                / check_whole("batch_size", values.get("batch_size", 0), least=1)
            )
            values["steps"] = check_whole("epochs", epochs, least=1) * batches
        fields = [field.name for field in dataclasses.fields(cls)]
        missing, unknown = [name for name in fields if name not in values], sorted(values.keys() - set(fields))
        if missing or unknown:
            wrong = [f"{what} {', '.join(names)}" for what, names in (("no", missing), ("unknown", unknown)) if names]
            raise ValueError(f"a stage has the settings {', '.join(fields)}; this one has {' and '.join(wrong)}")
        return cls(**values)


def stage_at(stages: Sequence[Stage], step: int) -> tuple[int, int]:
    """The index of a step's stage, and the step's number within it. Steps count from 1; the last stage has no end.

    >>> short = {"sequence_length": 64, "segment_lengths": (64,), "dilation_rates": (1,), "batch_size": 8}
    >>> stages = [Stage(**short, learning_rate=1e-3, steps=10), Stage(**short, learning_rate=1e-4, steps=5)]
    >>> [stage_at(stages, step) for step in (1, 10, 11, 15, 16)]
    [(0, 1), (0, 10), (1, 1), (1, 5), (1, 6)]
    """
    last = len(stages) - 1
    for number, stage in enumerate(stages):
        if step <= stage.steps or number == last:
            return number, step
        step -= stage.steps
    raise ValueError("a schedule has at least one stage, got none")


def read_stages(path: Path) -> tuple[Stage, ...]:
    """The stages of a file: `[[stages]]` tables of TOML; of JSON a list, or an object with one under `stages`."""
    try:
        if path.suffix == ".toml":
            found: Any = read_toml(path, "file of stages")
        elif path.suffix == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
        else:
            raise ValueError("its name ends neither in .toml nor in .json")
        if isinstance(found, dict):
            if unknown := sorted(found.keys() - {"stages"}):
                raise ValueError(f"it has {', '.join(unknown)} besides stages")
            found = found.get("stages")
        if not isinstance(found, list) or not found:
            raise ValueError("it has no list of stages")
        return tuple(Stage.of(stated) for stated in found)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}: --stages takes the stages of a run as TOML or JSON") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the stages of a run: {error}") from None


def with_pattern(model: ModelConfig, stage: Stage) -> ModelConfig:
    """The config of a model with the pattern of a stage; an error if the model cannot take it."""
    changed = dataclasses.replace(model, segment_lengths=stage.segment_lengths, dilation_rates=stage.dilation_rates)
    if changed.positions == "xpos":
        XPosPositions(changed.head_dim, common_period(*changed.specs), scale_base=changed.scale_base)
    return changed


@checked()
def update_attention_config(
    model: nn.Module,
    segment_lengths: Sequence[int] | Mapping[str, Any] | Stage,
    dilation_rates: Sequence[int] | None = None,
) -> None:
    """Give every dilated attention of a model another pattern, in place; weights stay as they are.

    What depends on the pattern follows: the period of xPos, and the config that is saved with the weights. Remembered
    plans have the pattern in their key, so none is out of date. A `DilatedKVCache` of the old pattern is refused.

    Args:
        model: a module with dilated attention, also one that `parallelize`, DDP or DeepSpeed spread over ranks; then
            all ranks make this call.
        segment_lengths, dilation_rates: one entry per branch; or instead of both, a `Stage` or a mapping with them.

    >>> from dilated_attention_pytorch import LongNetLM
    >>> model = LongNetLM(d_model=32, num_heads=4, num_layers=2, segment_lengths=(16, 64), dilation_rates=(1, 4))
    >>> update_attention_config(model, [32, 128], [1, 4])
    >>> model.config.segment_lengths, model.layers[0].self_attn.segment_lengths
    ((32, 128), (32, 128))
    """
    lengths, rates = _pattern(segment_lengths, dilation_rates)
    if not _attentions(model):
        raise ValueError(f"{type(model).__name__} has no dilated attention whose pattern could be changed")
    # Everything that may be wrong, before anything is changed.
    specs = _specs(model, lengths, rates)
    for part, spec in specs.items():
        if part.sparse_config is not None:
            check_sparse_config(part.sparse_config, spec)
    positions = [part for part in model.modules() if isinstance(part, XPosPositions)]
    period = common_period(*specs.values())
    for xpos in positions:
        XPosPositions(xpos.head_dim, period, base=xpos.base, scale_base=xpos.scale_base, gamma=xpos.gamma)
    owners = _owners(model)
    configs = [dataclasses.replace(owner.config, segment_lengths=lengths, dilation_rates=rates) for owner in owners]
    for part, spec in specs.items():
        part.spec = spec
    for xpos in positions:
        xpos.period = period
    for owner, config in zip(owners, configs):
        owner.config = config
    for around in _transformers_configs(model, owners):
        pattern = {"segment_lengths": list(lengths), "dilation_rates": list(rates)}
        around.dilated_attention = around.dilated_attention | pattern


def has_pattern(model: nn.Module, stage: Stage) -> bool:
    """Whether every dilated attention has the pattern of a stage, or in layers that stagger the staggered one."""
    specs = _specs(model, stage.segment_lengths, stage.dilation_rates)
    return all(part.spec == spec for part, spec in specs.items())


def _specs(model: nn.Module, lengths: Sequence[int], rates: Sequence[int]) -> dict[DilatedAttention, DilatedSpec]:
    """The spec of each dilated attention of a model that takes these segments and rates."""
    staggering = [owner for owner in _owners(model) if owner.config.stagger]
    stacks = (layers for owner in staggering for layers in owner.children() if isinstance(layers, nn.ModuleList))
    numbers = {part: number for layers in stacks for number, layer in enumerate(layers) for part in _attentions(layer)}
    return {
        part: DilatedSpec.of(lengths, rates, part.spec.head_layout).of_layer(numbers.get(part, 0), stagger=True)
        for part in _attentions(model)
    }


def _attentions(model: nn.Module) -> list[DilatedAttention]:
    return [part for part in model.modules() if isinstance(part, DilatedAttention)]


def _owners(model: nn.Module) -> list[Any]:
    """The parts of a model that have a config with a pattern."""
    return [part for part in model.modules() if isinstance(getattr(part, "config", None), ModelConfig)]


def _transformers_configs(model: nn.Module, owners: Sequence[nn.Module]) -> list[Any]:
    """The configs of the models of transformers that hold the owners."""
    holding = (part for part in model.modules() if any(one in owners for one in part.modules()))
    configs = {id(config): config for part in holding if (config := getattr(part, "config", None)) is not None}
    return [config for config in configs.values() if isinstance(getattr(config, "dilated_attention", None), dict)]


def _pattern(stated: Any, dilation_rates: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(stated, Stage):
        stated = vars(stated)
    if isinstance(stated, Mapping):
        if dilation_rates is not None:
            raise TypeError("a stage already has dilation_rates: leave the third argument out")
        if missing := [name for name in ("segment_lengths", "dilation_rates") if name not in stated]:
            raise ValueError(f"the settings of a stage lack {' and '.join(missing)}: got {', '.join(stated)}")
        stated, dilation_rates = stated["segment_lengths"], stated["dilation_rates"]
    if dilation_rates is None:
        raise TypeError("segment_lengths need dilation_rates beside them: pass both, or a stage")
    spec = DilatedSpec.of(stated, dilation_rates)
    return spec.segment_lengths, spec.dilation_rates
