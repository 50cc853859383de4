"""Checkpoints of a run: folders that appear whole or not at all, newest last.

`checkpoints/step-00000300/` holds the weights for use (`config.json`, `model.safetensors`) and `state/`, which resuming
needs: each rank writes its own shards, and any number of ranks reads them. One process saves before it goes on; ranks
save while training goes on. `checksums.txt` has the checksum of every file, which is checked before anything is loaded.

The state is model, optimizer (with its learning rate), the loss scale of float16 and step. Batches, learning rates and
random numbers are functions of (seed, step, token rank), so that the step is their position, whatever the number of
ranks. `shards` writes and reads the state; importing it takes a second, so that is left to the first save.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.log import log
from dilated_attention_pytorch.files import (
    CHECKSUMS,
    Checksum,
    DamagedFile,
    checking,
    free_bytes,
    is_full,
    read_checksums,
    sum_files,
    sync_folder,
    write_checksums,
    write_whole,
)
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import save_tensors, untied_names
from dilated_attention_pytorch.train.ranks import Ranks

Result = TypeVar("Result")

_SHARDS = "state"
_DAMAGED = "damaged-"
_CHECKPOINT = "a checkpoint"
_COMPLETE = f"{_SHARDS}/.metadata"  # PyTorch writes it when every rank's shards are there


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints that were saved to the end, oldest first."""
    return [folder for folder in _step_folders(run) if _is_complete(folder)]


def load_newest(folders: Sequence[Path], device: torch.device) -> tuple[Path, LongNetLM]:
    """The last of these folders that is not damaged, and its model; prints which ones it passes over."""
    *older, folder = folders
    try:
        return folder, LongNetLM.from_pretrained(folder, device=device)
    except DamagedFile as damage:
        if not older:
            raise
        print(f"passed over {damage}", file=sys.stderr)
        return load_newest(older, device)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder as it lies there, whole or not."""

    path: Path
    step: int
    state: Literal["whole", "unfinished", "damaged"]
    bytes: int
    files: tuple[str, ...]


def list_saved(run: Path) -> list[Saved]:
    """All folders that saves have left, by step, including those that were cut off or set aside as damaged."""
    found = []
    for folder in (run / "checkpoints").glob("*step-*"):
        number = re.search(r"step-(\d+)", folder.name)
        if number is None or not folder.is_dir():
            continue
        state: Literal["whole", "unfinished", "damaged"] = "whole" if _is_complete(folder) else "unfinished"
        if folder.name.startswith(_DAMAGED):
            state = "damaged"
        elif folder.name.startswith("."):
            state = "unfinished"
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            names = tuple(sorted(path.name for path in folder.iterdir()))
        except FileNotFoundError:  # the run is going on, and has dropped or renamed it
            continue
        found.append(Saved(folder, int(number[1]), state, size, names))
    return sorted(found, key=lambda one: (one.step, one.path.name))


class Checkpointer:
    """Saves a run's state and restores it; every rank calls every method, in the same order.

    `plain` is the model, and `model` what the ranks train, which may be the same. `scaler` belongs to the state if it
    is enabled. `beside` has further files for a checkpoint, by name.
    """

    def __init__(
        self,
        run: Path,
        plain: LongNetLM,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        ranks: Ranks,
        keep: int,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self._run, self._plain, self._model, self._optimizer, self._scaler = run, plain, model, optimizer, scaler
        self._ranks, self._keep, self._beside = ranks, keep, dict(beside or {})
        self._saving: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        # Now, for the saving thread must not touch the model: to look at its state reshards it under the training.
        self._names = untied_names(plain)
        if ranks.mesh is not None:
            # Its own group: the saving thread's messages must not mix with the training's.
            self._group = dist.new_group(backend="gloo", timeout=ranks.timeout)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int) -> None:
        """Save the state after `step`, then delete all but the newest checkpoints.

        Weights that are not finite are an error: they would push out the last ones that are. On ranks this returns when
        the state is copied, and `settle` tells how the save ended; at most one save is under way.
        """
        from dilated_attention_pytorch.train.shards import (
            gather_state,
            local_weights,
            read_model,
            save_now,
            start_saving,
            wait_written,
        )

        self.settle()
        folder = self._run / "checkpoints" / f"step-{step:08d}"
        state = gather_state(self._model, self._optimizer, self._rest(), step)
        finite = all(bool(weight.isfinite().all()) for weight in local_weights(state))
        if not self._ranks.gather(finite).all():
            raise FloatingPointError(
                f"the weights are not finite after step {step}, which no further step can mend, so they are not saved: "
                f"lower --learning-rate; {_kept(self._run)}"
            )
        partial = self._ranks.on_first(lambda: _open_partial(self._run, folder))
        config = self._plain.config.to_json()  # as it is now: the next stage may have another pattern
        shards = partial / _SHARDS
        if self._group is None:

            def write() -> dict[str, Tensor]:
                save_now(state, shards)
                return {name: state["model"][name].detach().contiguous() for name in self._names}

            self._finish(write, partial, folder, config)
        else:
            written = start_saving(state, shards, self._group)

            def wait() -> dict[str, Tensor]:
                wait_written(written)
                return read_model(self._names, shards) if self._ranks.first else {}

            self._saving = self._thread.submit(self._finish, wait, partial, folder, config)

    @property
    def failed(self) -> bool:
        """Whether the save under way is known to have failed here; other ranks may not know yet."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def settle(self) -> None:
        """Wait for the save under way; if it failed on any rank, every rank raises."""
        if self._saving is None:
            return
        error = self._saving.exception()
        self._saving = None
        failures = [reason for reason in self._ranks.gather_objects(error and _line(error)) if reason]
        if failures:
            raise OSError(failures[0])

    def close(self) -> None:
        """Wait for the save under way, and end its thread."""
        self.settle()
        if self._group is not None:
            self._thread.shutdown()

    def restore(self) -> int:
        """Load the newest checkpoint that is whole; prints which ones it passes over, and returns its step."""
        found, cut_off = self._ranks.on_first(lambda: (_step_folders(self._run), _partials(self._run)))
        passed: list[Path] = []
        for partial in cut_off:
            self._say(f"passed over {partial}: its save was cut off")
        for folder in reversed(found):
            has_checksums, damage = self._on_all(self._check, folder)
            if not damage:
                if not has_checksums:
                    self._say(f"{folder} has no {CHECKSUMS}: damage in it may go unnoticed")
                step, damage = self._on_all(self._load if has_checksums else self._load_unchecked, folder)
            if not damage:
                self._ranks.on_first(lambda: _set_aside(passed))
                return step
            self._say(f"passed over {folder}: {damage}")
            passed.append(folder)
        raise FileNotFoundError(f"nothing to resume in {self._run}: it has no checkpoint that can be read")

    def _on_all(self, act: Callable[[Path], Result], folder: Path) -> tuple[Result, str]:
        """What `act` returns, and the damage that it found on any rank; another error of one rank is raised on all."""
        result: Any = None
        error: Exception | None = None
        try:
            result = act(folder)
        except Exception as caught:
            error = caught
        damage = str(error) if isinstance(error, DamagedFile) else ""
        # A rank may read its shards well where another cannot.
        told = self._ranks.gather_objects((damage, "" if error is None or damage else _line(error)))
        for _, failure in told:
            if failure:
                raise OSError(
                    f"{folder} could not be loaded, and not because it is damaged ({failure}): nothing was renamed, so "
                    "resume again when that is mended"
                ) from error
        return result, next((found for found, _ in told if found), "")

    def _say(self, line: str) -> None:
        if self._ranks.first:
            print(line, flush=True)

    def _finish(self, write: Callable[[], dict[str, Tensor]], partial: Path, folder: Path, config: str) -> None:
        """When all ranks have written, the first one adds the whole weights and publishes."""
        try:
            weights = write()
            if self._ranks.first:
                save_tensors(weights, config, partial)
                self._publish(partial, folder)
        except Exception as error:  # a full disk is a different one to each library that writes
            raise _not_saved(self._run, _CHECKPOINT, error) from error
        finally:
            if self._ranks.first:
                shutil.rmtree(partial, ignore_errors=True)

    def _publish(self, partial: Path, folder: Path) -> None:
        for name, content in self._beside.items():
            write_whole(partial / name, methodcaller("write_bytes", content))
        sums: dict[str, Checksum] = {}
        for noted in (partial / _SHARDS).glob(f"*.{CHECKSUMS}"):  # by each rank, of its own files
            sums |= {f"{_SHARDS}/{name}": one for name, one in read_checksums(noted).items()}
            noted.unlink()
        sums |= sum_files(partial, [name for name in _files(partial) if name not in sums])
        write_checksums(partial / CHECKSUMS, sums)
        sync_folder(partial / _SHARDS)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        for changed in (folder.parent, self._run):
            sync_folder(changed)
        log.debug("saved checkpoint %s", folder)
        for old in list_checkpoints(self._run)[: -self._keep]:
            shutil.rmtree(old)

    def _check(self, folder: Path) -> bool:
        """Compare this rank's share of the files with their checksums; whether there are any."""
        if (folder / "state.pt").is_file():
            raise DamagedFile("it has state.pt, which earlier versions wrote and this one does not read")
        if not _is_complete(folder):
            raise DamagedFile(f"it has no {_COMPLETE}, so its save was cut off")
        ranks = 1 if self._ranks.mesh is None else self._ranks.mesh.size()
        if not (folder / CHECKSUMS).is_file():
            sum_files(folder, _files(folder)[self._ranks.rank :: ranks])  # an error of the disk shows here as one
            return False
        sums = read_checksums(folder / CHECKSUMS)
        own = sorted(sums, key=lambda name: sums[name].bytes)[self._ranks.rank :: ranks]
        deque(checking(folder, {name: sums[name] for name in own}), maxlen=0)
        return True

    def _load_unchecked(self, folder: Path) -> int:
        try:
            return self._load(folder)
        except Exception as error:
            # An error of the disk or the memory is no damage; PyTorch has no class of its own for main memory.
            disk = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
            if disk or memory:
                raise
            raise DamagedFile(_line(error)) from error

    def _load(self, folder: Path) -> int:
        from dilated_attention_pytorch.train.shards import load_shards

        rest = self._rest()
        step = load_shards(self._model, self._optimizer, rest, folder / _SHARDS, self._group)
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(rest["scaler"])
        return step

    def _rest(self) -> dict[str, Any]:
        return {"scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else {}


def _step_folders(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def _partials(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob(".step-*.partial"))


def _is_complete(folder: Path) -> bool:
    return (folder / _COMPLETE).is_file()


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _open_partial(run: Path, folder: Path) -> Path:
    """Sweep what killed saves left, and make the folder in which `folder` is prepared."""
    for stale in _partials(run):
        shutil.rmtree(stale)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    with naming_a_full_disk(run, _CHECKPOINT):
        partial.mkdir(parents=True)
    return partial


def _set_aside(passed: list[Path]) -> None:
    """Rename damaged checkpoints after an older one is loaded, so that they do not count among the newest."""
    for folder in passed:
        aside = folder.with_name(f"{_DAMAGED}{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        sync_folder(folder.parent)


@contextmanager
def naming_a_full_disk(run: Path, what: str) -> Iterator[None]:
    """Around writing `what` into a run's folder: the error of a full disk also names the last checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _not_saved(run, what, error) from error


def _not_saved(run: Path, what: str, error: Exception) -> OSError:
    room = ""
    if is_full(run, error):
        room = f"the disk of {run} is full ({free_bytes(run):,} bytes free are not enough), so make room; "
    return OSError(f"{what} could not be saved ({_line(error)}): {room}{_kept(run)}")


def _kept(run: Path) -> str:
    if found := list_checkpoints(run):
        step = int(found[-1].name.removeprefix("step-"))
        return f"the run's last complete checkpoint is of step {step}, from which --resume {run} goes on"
    return "the run has no complete checkpoint yet"


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
