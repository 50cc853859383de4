"""Checkpoints of a run: folders that appear whole or not at all, newest last.

`checkpoints/step-00000300/` holds the weights for use (`config.json`, `model.safetensors`) and `state.pt` for resuming.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import load_weights, write_whole

_STATE = "state.pt"


def save_checkpoint(run: Path, step: int, model: LongNetLM, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write the checkpoint of `step`, then drop all but the newest `keep`."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    for stale in folder.parent.glob(".step-*.partial"):  # of a save that was killed
        shutil.rmtree(stale)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        model.save_pretrained(partial)
        state = {"step": step, "optimizer": optimizer.state_dict()}
        write_whole(partial / _STATE, lambda path: torch.save(state, path))
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return folder


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def load_checkpoint(folder: Path, model: LongNetLM, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer; returns the step that was finished."""
    path = folder / _STATE
    load_weights(model, folder)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is not a checkpoint: it has no {_STATE}") from None
    except Exception as error:
        raise ValueError(
            f"{path} is broken or truncated ({error}): delete {folder} and resume from the checkpoint before it"
        ) from error
