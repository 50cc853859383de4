"""What a run's folder holds, and how it is read back, also from a run that was cut off.

config.json          the effective settings
corpus.json          what the text is: a resumed run refuses another
tokenizer.json       of a run that has one
metrics.jsonl        one record per step, written with every checkpoint
log.jsonl            figures as they happen, with the monitor jsonl
environment.jsonl    hardware, versions, corpus and the bits to beat, one line per start
loss.png             the curve
samples/             what the model wrote, by step
checkpoints/         see `checkpoint`
lock                 held by the process that trains in the folder; the file itself stays
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dilated_attention_pytorch.files import free_bytes, is_full, json_line, write_whole
from dilated_attention_pytorch.measuring import machine
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import COMPLETE as COMPLETE
from dilated_attention_pytorch.models.weights import CONFIG as CONFIG
from dilated_attention_pytorch.models.weights import CORPUS as CORPUS
from dilated_attention_pytorch.models.weights import list_checkpoints as list_checkpoints
from dilated_attention_pytorch.models.weights import load_newest

METRICS, LOG, STARTS, LOCK = "metrics.jsonl", "log.jsonl", "environment.jsonl", "lock"
SHARDS, DAMAGED = "state", "damaged-"  # the state in a checkpoint, and how the name of a damaged checkpoint begins
CheckpointState = Literal["whole", "unfinished", "damaged"]


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / CONFIG).is_file() and (folder / CORPUS).is_file()


@contextmanager
def claim(run: Path) -> Iterator[None]:
    """Lock the folder for this process, and create it if needed; raises if another process trains in it.

    The lock ends with the process. A folder that stays empty is removed. Without file locks, nobody is kept out.
    """
    run.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    path = run / LOCK
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(stream.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_held = False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
            is_held = True
        if not is_held:  # or its process has just taken it away
            stream.seek(0)
            raise FileExistsError(
                f"process {stream.read().strip()} is training in {run}: wait until it ends, or choose another --out"
            )
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        try:
            yield
        finally:
            if os.listdir(run) == [LOCK]:
                path.unlink()
                run.rmdir()


def record_start(run: Path, step: int, device: str, **known: Any) -> None:
    """Append one line about this start, after `step`: the machine, and what else is `known`."""
    line = {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "step": step, **known, "machine": machine(device)}
    with naming_a_full_disk(run, STARTS), (run / STARTS).open("a") as stream:
        stream.write(json_line(line))


def last_threads(run: Path, ranks: int | None) -> int | None:
    """PyTorch's number of threads at the last start of a run on a CPU with as many ranks; None if unknown."""
    start: dict[str, Any] = next(reversed(_lines(run / STARTS, [])), {})
    known = start.get("machine")
    threads = known.get("threads") if isinstance(known, dict) and start.get("ranks") == ranks else None
    return threads if isinstance(threads, int) and threads > 0 else None


def sample_path(run: Path, step: int) -> Path:
    """The file for the text that the model generates after `step`."""
    return run / "samples" / f"step-{step:08d}.txt"


def write_metrics(run: Path, records: list[dict[str, Any]]) -> None:
    with naming_a_full_disk(run, METRICS):
        write_whole(run / METRICS, "".join(map(json_line, records)))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run that is resumed; broken ones are an error. `null` becomes NaN."""
    damage: list[str] = []
    records = _lines(run / METRICS, damage)
    if damage or not all("step" in record for record in records):
        why = "; ".join(damage) or "a record has no step"
        raise ValueError(f"{run / METRICS} is broken ({why}): move it away to resume without the earlier curve")
    return [{name: math.nan if value is None else value for name, value in one.items()} for one in records]


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def best_checkpoint(run: Path, validated: Mapping[int, float]) -> Path | None:
    """The checkpoint with the fewest validation bits, given those bits by step; None if none was validated."""
    bits = {checkpoint_path(run, step): bits for step, bits in validated.items() if math.isfinite(bits)}
    return min((one for one in list_checkpoints(run) if one in bits), key=bits.__getitem__, default=None)


def load_model(run: Path, device: torch.device) -> tuple[Path, LongNetLM]:
    """The newest checkpoint of a run that is not damaged, or `run` itself if it holds weights; and its model."""
    return load_newest(run, lambda folder: LongNetLM.from_pretrained(folder, device=device))


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder as it lies there, whole or not."""

    path: Path
    step: int
    state: CheckpointState
    bytes: int
    files: tuple[str, ...]


def list_saved(run: Path) -> list[Saved]:
    """All folders that saves have left, by step, including those that were cut off or set aside as damaged."""
    found = []
    for folder in (run / "checkpoints").glob("*step-*"):
        number = re.search(r"step-(\d+)", folder.name)
        if number is None or not folder.is_dir():
            continue
        state: CheckpointState = "whole" if is_complete(folder) and folder.name[0] != "." else "unfinished"
        if folder.name.startswith(DAMAGED):
            state = "damaged"
        try:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            names = tuple(sorted(path.name for path in folder.iterdir()))
        except FileNotFoundError:  # the run is in progress, and has deleted or renamed it
            continue
        found.append(Saved(folder, int(number[1]), state, size, names))
    return sorted(found, key=lambda one: (one.step, one.path.name))


def step_folders(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def partial_checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob(".step-*.partial"))


def is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).is_file()


@contextmanager
def naming_a_full_disk(run: Path, what: str) -> Iterator[None]:
    """A context for writing `what` into a run's folder: the error of a full disk also names the last checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise not_saved(run, what, error) from error


def not_saved(run: Path, what: str, error: Exception) -> OSError:
    room = ""
    if is_full(run, error):
        room = f"the disk of {run} is full ({free_bytes(run):,} bytes free are not enough), so make room; "
    return OSError(f"{what} could not be saved ({one_line(error)}): {room}{last_checkpoint(run)}")


def last_checkpoint(run: Path) -> str:
    if found := list_checkpoints(run):
        step = int(found[-1].name.removeprefix("step-"))
        return f"--resume {run} continues from the run's last complete checkpoint, of step {step}"
    return "the run has no complete checkpoint yet"


def one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass
class RunFolder:
    """A run as far as its folder can be read; `damage` says what cannot."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int | None:
        """The number of steps of the run, if its config says so."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def done(self) -> int:
        """The last step that is known to be done."""
        saved = [one.step for one in self.saved if one.state == "whole"]
        return max([record["step"] for record in self.records] + saved, default=0)


def read_run(path: Path) -> RunFolder:
    """Everything that can be read of a run: finished, in progress, interrupted or damaged."""
    names = (CONFIG, METRICS, LOG, STARTS, "checkpoints")
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}: name that of a run, as below runs/")
    if not any((path / name).exists() for name in names):
        raise FileNotFoundError(f"{path} is not the folder of a run: it has none of {', '.join(names)}")
    run = RunFolder(path)
    if os.path.lexists(path / CONFIG):
        try:
            run.config = json.loads((path / CONFIG).read_text())
            if not isinstance(run.config, dict):
                raise ValueError(f"it holds {type(run.config).__name__}")
        except (OSError, ValueError, RecursionError) as error:
            run.config = {}
            run.damage.append(f"`{CONFIG}` cannot be read: {error}")
    else:
        run.damage.append(f"there is no `{CONFIG}`")
    # The log has the steps since the last checkpoint; of a step that was repeated, the last record counts.
    by_step: dict[int, dict[str, Any]] = {}
    for name in (LOG, METRICS):
        for record in _lines(path / name, run.damage):
            step = record.get("step")
            if isinstance(step, int) and 0 <= step < 1 << 53:
                by_step[step] = by_step.get(step, {}) | record
            else:
                run.damage.append(f"`{name}` has a line without a step, which is left out")
    run.records = [by_step[step] for step in sorted(by_step)]
    run.starts = _lines(path / STARTS, run.damage)
    run.saved = list_saved(path)
    missing = [name for name in (METRICS, STARTS) if run.saved and not os.path.lexists(path / name)]
    run.damage += [f"there is no `{name}`, which every run has that has saved" for name in missing]
    for one in run.saved:
        if one.state == "unfinished":
            run.damage.append(
                f"`checkpoints/{one.path.name}` is incomplete: its save or deletion is in progress, or was cut off"
            )
        elif one.state == "damaged":
            run.damage.append(f"`checkpoints/{one.path.name}` could not be read when the run was resumed")
    for sample in sorted((path / "samples").glob("step-*.txt")):
        try:
            run.samples.append((int(sample.stem.removeprefix("step-")), sample.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            run.damage.append(f"`samples/{sample.name}` cannot be read: {error}")
    return run


def _lines(path: Path, damage: list[str]) -> list[dict[str, Any]]:
    """The lines of a file that are JSON objects; the others are counted in `damage`."""
    if not os.path.lexists(path):
        return []
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        damage.append(f"`{path.name}` cannot be read: {error}")
        return []
    found, broken = [], []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            broken.append(number)
    if broken:
        many = f"{len(broken)} of {len(lines)} lines are broken and left out"
        damage.append(f"`{path.name}`: {many}, the first is line {broken[0]}")
    return found
