"""The state of one process or of several ranks, on disk: a thin layer on `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from dilated_attention_pytorch.files import CHECKSUMS, sum_files, write_checksums
from dilated_attention_pytorch.train.zero import Values, ZeroModel

_ALONE = "alone"  # marks what a process without a group wrote


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer, rest: dict[str, Any], step: int) -> dict[str, Any]:
    """This rank's part of the state. `rest` has further parts, the same on all ranks."""
    alone = not dist.is_initialized()
    marked = {_ALONE: torch.tensor(1)} if alone else {}
    return {**_state(model, optimizer, alone=alone), **rest, **marked, "step": torch.tensor(step)}


def local_weights(state: dict[str, Any]) -> list[Tensor]:
    """What this rank holds of the weights in a state."""
    return [_local(weight) for weight in state["model"].values()]


def start_saving(state: dict[str, Any], shards: Path, group: dist.ProcessGroup) -> Future[Any]:
    """Copy this rank's part of the state, and write it to `shards` in the background; only saves use `group`."""
    written = async_save(state, storage_writer=_SummingWriter(shards), process_group=group)
    assert isinstance(written, Future)
    return written


def save_now(state: dict[str, Any], shards: Path) -> None:
    """Write the state of a single process to `shards`."""
    with _alone(), _write_errors():
        save(state, storage_writer=_SummingWriter(shards), no_dist=True)


class _SummingWriter(FileSystemWriter):
    """Writes a rank's shards, and beside them their checksums."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        folder = Path(self.path)
        write_checksums(folder / f"{plan.storage_data.prefix}.{CHECKSUMS}", sum_files(folder, names))
        return written


def wait_written(written: Future[Any]) -> None:
    """Wait until every rank has written; an error of one rank is an error of all."""
    with _write_errors():
        written.result()


@contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        raise OSError(_first_failure(error)) from next((failure for failure, _ in error.failures.values()), error)


def load_shards(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rest: dict[str, Any],
    shards: Path,
    group: dist.ProcessGroup | None,
) -> int:
    """Restore what any number of ranks wrote, into `rest` too; returns the step that was finished."""
    if isinstance(model, ZeroModel):
        finished, updates = torch.tensor(0), torch.tensor(0.0)
        _read({"step": finished, "optimizer": {"state": {model.groups[0][0]: {"step": updates}}}}, shards, None)
        model.restore(int(updates), lambda name, shape: _read_parameter(name, shape, shards))
        return int(finished)
    alone = _ALONE in FileSystemReader(shards).read_metadata().state_dict_metadata
    state = {**_state(model, optimizer, alone=alone), **rest, "step": torch.tensor(0)}
    kept = (value for own in optimizer.state.values() for value in own.values())
    if alone and group is not None and any(_in_8_bits(value) is not None for value in kept):
        raise ValueError("one process wrote the 8-bit state of its optimizer, which ranks cannot cut: resume it alone")
    _read(state, shards, group)
    set_model_state_dict(model, state["model"])
    _set_optimizer(model, optimizer, state["optimizer"])
    return int(state["step"])


def read_model(names: Sequence[str], shards: Path) -> dict[str, Tensor]:
    """The whole weights of these names, from the shards of all ranks."""
    metadata = FileSystemReader(shards).read_metadata().state_dict_metadata
    tensors = {}
    for name in names:
        found = metadata[f"model.{name}"]
        assert isinstance(found, TensorStorageMetadata)
        tensors[name] = torch.empty(found.size, dtype=found.properties.dtype)
    _read({"model": tensors}, shards, None)
    return tensors


def _read_parameter(name: str, shape: torch.Size, shards: Path) -> Values:
    values = Values(*(torch.empty(shape) for _ in Values._fields))
    moments = {"exp_avg": values.exp_avg, "exp_avg_sq": values.exp_avg_sq}
    _read({"model": {name: values.weight}, "optimizer": {"state": {name: moments}}}, shards, None)
    return values


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, *, alone: bool) -> dict[str, Any]:
    """Model and optimizer by name, as one process that is `alone` writes them, or as ranks do."""
    if isinstance(model, ZeroModel):
        return model.state()
    weights = get_model_state_dict(model)
    moments: Any = get_optimizer_state_dict(model, optimizer)
    by_name = {
        name: {key: _in_plain_tensors(value, weights[name], alone=alone) for key, value in state.items()}
        for name, state in moments["state"].items()
    }
    return {"model": weights, "optimizer": {**moments, "state": by_name}}


def _set_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    set_optimizer_state_dict(model, optimizer, saved)
    for parameter, state in optimizer.state.items():
        for key, value in before[parameter].items():
            if (own := _in_8_bits(value)) is not None:
                if not isinstance(state[key], dict):  # else its tensors were read in place
                    own.copy_(_local(state[key]))
                state[key] = value


def _local(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _in_8_bits(value: Any) -> Any:
    """The tensor of this rank that torchao keeps in 8 bits, or None if it is a plain one."""
    local = _local(value)
    return local if hasattr(local, "__tensor_flatten__") else None


def _in_plain_tensors(value: Any, parameter: Any, *, alone: bool) -> Any:
    """Part of the optimizer's state for saving: 8-bit numbers as their codes and scales, or on ranks as float32.

    Their blocks belong to the shard of a rank, and another number of ranks has other shards.
    """
    from torch.distributed.tensor import DTensor

    own = _in_8_bits(value)
    if own is None:
        return value
    if alone:
        return {name: getattr(own, name) for name in own.__tensor_flatten__()[0]}
    own = own.dequantize()
    if not isinstance(parameter, DTensor):
        return own
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _read(state: dict[str, Any], shards: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state`; without a group, by this process alone."""
    try:
        with _alone():
            load(state, checkpoint_id=shards, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        kinds = [type(failure) for failure, _ in error.failures.values()]
        if any(issubclass(kind, (OSError, MemoryError)) and kind is not FileNotFoundError for kind in kinds):
            raise OSError(f"{shards.name}/ cannot be read ({_first_failure(error)})") from error
        raise ValueError(f"{shards.name}/ is broken or truncated ({_first_failure(error)})") from error


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as no_dist asks
        yield


def _first_failure(error: CheckpointException) -> str:
    for rank, (failure, _) in error.failures.items():
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return str(error)
