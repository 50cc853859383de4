"""Checkpoints of a run: folders that appear whole or not at all, newest last.

`checkpoints/step-00000300/` holds the weights (`config.json`, `model.safetensors`) and `state/`, which resuming needs:
each rank writes its own shards, and any number of ranks can read them, through `torch.distributed.checkpoint`. A single
process on a CPU saves before it continues; ranks, and a process on a GPU, copy the state and save it while training
continues. `checksums.txt` has the checksum of every file, which is checked before anything is loaded.

The state is the model, the optimizer (with its learning rate), the loss scale of float16 and the step. Batches,
learning rates and random numbers are functions of (seed, step, token rank), so resuming needs no more than the step, on
any number of ranks.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
from torch.utils._pytree import tree_map_only

from dilated_attention_pytorch import files
from dilated_attention_pytorch.core.log import log
from dilated_attention_pytorch.models.longnet import Pretrained
from dilated_attention_pytorch.models.weights import save_tensors, untied_names
from dilated_attention_pytorch.train import run_folder
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.run_folder import list_checkpoints
from dilated_attention_pytorch.train.zero import Values, ZeroModel

Result = TypeVar("Result")

_CHECKPOINT = "a checkpoint"
_ALONE = "alone"  # marks what a process without a group wrote


class Checkpointer:
    """Saves a run's state and restores it; every rank calls every method, in the same order.

    `plain` is the model, and `model` what the ranks train, which may be the same. `scaler` belongs to the state if it
    is enabled. `beside` are further files to save with each checkpoint, by name.
    """

    def __init__(
        self,
        run: Path,
        plain: Pretrained,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        ranks: Ranks,
        keep: int,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self._run, self._plain, self._model, self._optimizer, self._scaler = run, plain, model, optimizer, scaler
        self._ranks, self._keep, self._beside = ranks, keep, dict(beside or {})
        self._validated: dict[int, float] = {}
        self._saving: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        # Read now: the saving thread must not touch the model, because reading its state reshards it during training.
        self._names = untied_names(plain)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if _saves_beside(ranks) else None
        if ranks.mesh is not None:
            # Its own group: the saving thread's messages must not mix with the training's.
            self._group = dist.new_group(backend="gloo", timeout=ranks.timeout)

    def save(self, step: int, validated: Mapping[int, float] | None = None) -> None:
        """Save the state after `step`, then delete all but the newest checkpoints.

        With the validation bits by step, the best of the checkpoints that were `validated` is kept too.

        Weights that are not finite raise an error, because they would replace the last finite ones. On ranks and on a
        GPU this returns when the state is copied, and `settle` waits for the save to end; at most one is under way.
        """
        self.settle()
        self._validated = dict(validated or {})
        folder = run_folder.checkpoint_path(self._run, step)
        state = self._state(step, alone=self._group is None)
        finite = all(bool(_local(weight).isfinite().all()) for weight in state["model"].values())
        if not self._ranks.gather(finite).all():
            raise FloatingPointError(
                f"the weights are not finite after step {step} and cannot recover, so they are not saved: "
                f"lower --learning-rate; {run_folder.last_checkpoint(self._run)}"
            )
        unfinished = self._ranks.on_first(lambda: _open_unfinished(self._run, folder))
        config = self._plain.config.to_json()  # as it is now: the next stage may have another pattern
        writer = _SummingWriter(unfinished / run_folder.SHARDS)
        own: dict[str, Tensor] | None = None
        write: Callable[[], object]
        if self._group is not None:
            saved: Any = async_save(state, storage_writer=writer, process_group=self._group)
            write = saved.result
        else:
            if self._thread is not None:  # training changes the tensors meanwhile
                state = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), state)
            own = {name: state["model"][name].detach().contiguous() for name in self._names}
            write = partial(save, state, storage_writer=writer, no_dist=True)
        finish = partial(self._finish, write, unfinished, folder, config, own)
        if self._thread is None:
            finish()
        else:
            self._saving = self._thread.submit(finish)

    @property
    def failed(self) -> bool:
        """Whether the save under way is known to have failed here; other ranks may not know yet."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def settle(self) -> None:
        """Wait for the save under way; if it failed on any rank, every rank raises."""
        if self._saving is None:
            return
        error, self._saving = self._saving.exception(), None
        self._ranks.fail_together(error)

    def close(self) -> None:
        """Wait for the save under way, and end its thread."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()

    def restore(self) -> int:
        """Load the newest undamaged checkpoint, and return its step; prints the ones that it skips."""
        found, cut_off = self._ranks.on_first(
            lambda: (run_folder.step_folders(self._run), run_folder.partial_checkpoints(self._run))
        )
        passed: list[Path] = []
        for unfinished in cut_off:
            self._say(f"skipped {unfinished}: its save or its deletion was cut off")
        for folder in reversed(found):
            has_checksums, damage = self._on_all(self._check, folder)
            if not damage:
                if not has_checksums:
                    self._say(f"{folder} has no {files.CHECKSUMS}: damage in it may go unnoticed")
                step, damage = self._on_all(partial(self._load, has_checksums=has_checksums), folder)
            if not damage:
                self._ranks.on_first(lambda: _set_aside(passed))
                return step
            self._say(f"skipped {folder}: {damage}")
            passed.append(folder)
        raise FileNotFoundError(f"nothing to resume in {self._run}: it has no checkpoint that can be read")

    def _on_all(self, act: Callable[[Path], Result], folder: Path) -> tuple[Result, str]:
        """The result of `act`, and the damage that it found on any rank; any other error is raised on all ranks."""
        result: Any = None
        error: Exception | None = None
        try:
            result = act(folder)
        except Exception as caught:
            error = caught
        damage = str(error) if isinstance(error, files.DamagedFile) else ""
        # One rank may read its shards while another cannot.
        reports = self._ranks.gather_objects((damage, "" if error is None or damage else run_folder.one_line(error)))
        for _, failure in reports:
            if failure:
                raise OSError(
                    f"{folder} could not be loaded, and not because it is damaged ({failure}): nothing was renamed, so "
                    "resume again when that is fixed"
                ) from error
        return result, next((found for found, _ in reports if found), "")

    def _say(self, line: str) -> None:
        if self._ranks.first:
            print(line, flush=True)

    def _finish(
        self,
        write: Callable[[], object],
        unfinished: Path,
        folder: Path,
        config: str,
        weights: dict[str, Tensor] | None,
    ) -> None:
        """When all ranks have written, the first one adds the whole weights and publishes."""
        try:
            try:
                with _alone():
                    write()
            except CheckpointException as error:
                raise OSError(_first_failure(error)) from next((one for one, _ in error.failures.values()), error)
            if self._ranks.first:
                save_tensors(_read_weights(self._names, unfinished) if weights is None else weights, config, unfinished)
                self._publish(unfinished, folder)
        except Exception as error:  # every library reports a full disk in its own way
            raise run_folder.not_saved(self._run, _CHECKPOINT, error) from error
        finally:
            if self._ranks.first:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _publish(self, unfinished: Path, folder: Path) -> None:
        for name, content in self._beside.items():
            files.write_whole(unfinished / name, content)
        sums: dict[str, files.Checksum] = {}
        for noted in (unfinished / run_folder.SHARDS).glob(f"*.{files.CHECKSUMS}"):  # by each rank, of its own files
            sums |= {f"{run_folder.SHARDS}/{name}": one for name, one in files.read_checksums(noted).items()}
            noted.unlink()
        sums |= files.sum_files(unfinished, [name for name in _files(unfinished) if name not in sums])
        files.write_checksums(unfinished / files.CHECKSUMS, sums)
        files.sync_folder(unfinished / run_folder.SHARDS)
        if folder.exists():
            _delete(folder)
        unfinished.rename(folder)
        for changed in (folder.parent, self._run):
            files.sync_folder(changed)
        log.debug("saved checkpoint %s", folder)
        best = run_folder.best_checkpoint(self._run, self._validated)
        for old in list_checkpoints(self._run)[: -self._keep]:
            if old != best:
                _delete(old)

    def _check(self, folder: Path) -> bool:
        """Compare this rank's share of the files with their checksums; whether there are any."""
        if (folder / "state.pt").is_file():
            raise files.DamagedFile("it has state.pt, which earlier versions wrote and this one does not read")
        if not run_folder.is_complete(folder):
            raise files.DamagedFile(f"it has no {run_folder.COMPLETE}, so its save was cut off")
        ranks = 1 if self._ranks.mesh is None else self._ranks.mesh.size()
        if not (folder / files.CHECKSUMS).is_file():
            files.sum_files(folder, _files(folder)[self._ranks.rank :: ranks])  # raises errors of the disk
            return False
        sums = files.read_checksums(folder / files.CHECKSUMS)
        own = sorted(sums, key=lambda name: sums[name].bytes)[self._ranks.rank :: ranks]
        deque(files.checking(folder, {name: sums[name] for name in own}), maxlen=0)
        return True

    def _load(self, folder: Path, has_checksums: bool) -> int:
        """Restore what any number of ranks wrote; returns the step that was finished."""
        try:
            if isinstance(self._model, ZeroModel):
                return _load_zero(self._model, folder)
            return self._load_state(folder)
        except Exception as error:
            # An error of the disk or the memory is no damage; PyTorch has no class of its own for main memory.
            disk = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
            if has_checksums or disk or memory:
                raise
            raise files.DamagedFile(run_folder.one_line(error)) from error

    def _load_state(self, folder: Path) -> int:
        model, optimizer = self._model, self._optimizer
        alone = _ALONE in FileSystemReader(folder / run_folder.SHARDS).read_metadata().state_dict_metadata
        state = self._state(0, alone=alone)
        state.pop(_ALONE, None)
        kept = (value for own in optimizer.state.values() for value in own.values())
        if alone and self._group is not None and any(_in_8_bits(value) is not None for value in kept):
            raise ValueError(
                "a single process wrote the 8-bit state of its optimizer, which ranks cannot split: resume it alone"
            )
        _read(state, folder, self._group)
        for saved, group in zip(state["optimizer"]["param_groups"], optimizer.param_groups):
            if "fused" in group:  # it depends on where the update runs, which may have changed
                saved["fused"] = group["fused"]
        set_model_state_dict(model, state["model"])
        before = {parameter: dict(own) for parameter, own in optimizer.state.items()}
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        for parameter, restored in optimizer.state.items():
            for key, value in before[parameter].items():
                if (own := _in_8_bits(value)) is not None:
                    if not isinstance(restored[key], dict):  # else its tensors were read in place
                        own.copy_(_local(restored[key]))
                    restored[key] = value
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
        return int(state["step"])

    def _state(self, step: int, *, alone: bool) -> dict[str, Any]:
        """This rank's part of the state by name, as one process that is `alone` writes it, or as ranks do."""
        rest: dict[str, Any] = {"step": torch.tensor(step)}
        if alone:
            rest[_ALONE] = torch.tensor(1)
        if self._scaler.is_enabled():
            rest["scaler"] = self._scaler.state_dict()
        if isinstance(self._model, ZeroModel):
            return {**self._model.state(), **rest}
        weights = get_model_state_dict(self._model)
        moments: Any = get_optimizer_state_dict(self._model, self._optimizer)
        by_name = {
            name: {key: _in_plain_tensors(value, weights[name], alone=alone) for key, value in state.items()}
            for name, state in moments["state"].items()
        }
        return {"model": weights, "optimizer": {**moments, "state": by_name}, **rest}


def _saves_beside(ranks: Ranks) -> bool:
    """Whether training continues during a save."""
    return ranks.mesh is not None or ranks.device.type != "cpu"


class _SummingWriter(FileSystemWriter):
    """Writes a rank's shards, and beside them their checksums."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        folder = Path(self.path)
        files.write_checksums(folder / f"{plan.storage_data.prefix}.{files.CHECKSUMS}", files.sum_files(folder, names))
        return written


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _open_unfinished(run: Path, folder: Path) -> Path:
    """Delete what killed saves left, and make the folder in which `folder` is prepared."""
    for stale in run_folder.partial_checkpoints(run):
        shutil.rmtree(stale)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    with run_folder.naming_a_full_disk(run, _CHECKPOINT):
        unfinished.mkdir(parents=True)
    return unfinished


def _delete(folder: Path) -> None:
    """Rename a checkpoint, then delete it: a half-deleted one must not count as complete."""
    deleted = folder.with_name(f".{folder.name}.deleted.partial")
    folder.rename(deleted)
    shutil.rmtree(deleted)


def _set_aside(passed: list[Path]) -> None:
    """Rename damaged checkpoints after an older one is loaded, so that they do not count among the newest."""
    for folder in passed:
        aside = folder.with_name(f"{run_folder.DAMAGED}{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        files.sync_folder(folder.parent)


def _load_zero(model: ZeroModel, folder: Path) -> int:
    """Restore a model that DeepSpeed trains, one whole parameter at a time."""

    def read(name: str, shape: torch.Size) -> Values:
        values = Values(*(torch.empty(shape) for _ in Values._fields))
        moments = {"exp_avg": values.exp_avg, "exp_avg_sq": values.exp_avg_sq}
        _read({"model": {name: values.weight}, "optimizer": {"state": {name: moments}}}, folder)
        return values

    step, updates = torch.tensor(0), torch.tensor(0.0)
    _read({"step": step, "optimizer": {"state": {model.groups[0][0]: {"step": updates}}}}, folder)
    model.restore(int(updates), read)
    return int(step)


def _read_weights(names: Sequence[str], folder: Path) -> dict[str, Tensor]:
    """The whole weights of these names, from the shards of all ranks."""
    metadata = FileSystemReader(folder / run_folder.SHARDS).read_metadata().state_dict_metadata
    tensors = {}
    for name in names:
        found = metadata[f"model.{name}"]
        assert isinstance(found, TensorStorageMetadata)
        tensors[name] = torch.empty(found.size, dtype=found.properties.dtype)
    _read({"model": tensors}, folder)
    return tensors


def _read(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `state`; without a group, by this process alone."""
    try:
        with _alone():
            load(state, checkpoint_id=folder / run_folder.SHARDS, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        kinds = [type(failure) for failure, _ in error.failures.values()]
        if any(issubclass(kind, (OSError, MemoryError)) and kind is not FileNotFoundError for kind in kinds):
            raise OSError(f"{run_folder.SHARDS}/ cannot be read ({_first_failure(error)})") from error
        raise ValueError(f"{run_folder.SHARDS}/ is broken or truncated ({_first_failure(error)})") from error


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as no_dist asks
        yield


def _first_failure(error: CheckpointException) -> str:
    for rank, (failure, _) in error.failures.items():
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return str(error)


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
