"""Weights on disk: safetensors beside a JSON config, written whole or not at all, loaded without unpickling."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

WEIGHTS = "model.safetensors"
_NEXT_TO_NOTHING = 1 << 16  # bytes; not every file system gives away its last block


def save_weights(model: nn.Module, config: str, folder: Path) -> None:
    save_tensors(_without_ties(model), config, folder)


def save_tensors(tensors: dict[str, Tensor], config: str, folder: Path) -> None:
    """Write the weights of a model that are no longer in one: each shared tensor under its first name only."""
    safetensors = _safetensors()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", lambda path: path.write_text(config))
    write_whole(folder / WEIGHTS, lambda path: safetensors.save_file(tensors, path))


def load_weights(model: nn.Module, folder: Path) -> None:
    found = load_tensors(folder, model)
    dtypes = {tensor.dtype for tensor in found.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())  # as it was saved
    model.load_state_dict(found, strict=False)


def load_tensors(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights in `folder`, checked to fit `model` by name and shape."""
    safetensors = _safetensors()
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: is this the folder of save_pretrained?")
    try:
        found = safetensors.load_file(path)
    except Exception as error:
        raise ValueError(f"{path} is broken or truncated ({error}): use another copy of the checkpoint") from error
    expected = _without_ties(model)
    problems = [f"missing {name}" for name in expected.keys() - found.keys()]
    problems += [f"unexpected {name}" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} is {tuple(found[name].shape)}, not {tuple(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if found[name].shape != expected[name].shape
    ]
    if problems:
        raise ValueError(f"{path} does not fit the model: {'; '.join(sorted(problems)[:8])}")
    return found


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place at once: no reader sees half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except Exception as error:
        # Now, for without the partial file there is room again; and not every writer says why it failed, or where.
        if is_full(path.parent, error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def is_full(folder: Path, error: BaseException | None) -> bool:
    """Whether writing into `folder` failed with `error` because its disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__ or error.__context__
    return free_bytes(folder) < _NEXT_TO_NOTHING


def free_bytes(folder: Path) -> int:
    """What is free on the disk of `folder`, which need not be there yet."""
    return shutil.disk_usage(next(known for known in (folder, *folder.parents) if known.exists())).free


def _without_ties(model: nn.Module) -> dict[str, Tensor]:
    tensors = model.state_dict()
    return {name: tensors[name].detach().contiguous() for name in untied_names(model)}


def untied_names(model: nn.Module) -> list[str]:
    """The names in the state dict, each shared parameter under its first name only, as safetensors stores it."""
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again = all_names - {name for name, _ in model.named_parameters()}
    return [name for name in model.state_dict() if name not in again]


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "weights are stored with safetensors: pip install 'dilated-attention-pytorch[train]'"
        ) from error
    return safetensors.torch
