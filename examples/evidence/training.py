"""Train one model of the experiment, step by step, so that it can be stopped at any time and continued."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.files import sweep_partials, write_whole
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.train.data import Batch
from dilated_attention_pytorch.train.loop import interrupts
from dilated_attention_pytorch.train.memory import make_optimizer, prepare
from dilated_attention_pytorch.train.presets import float32_products
from dilated_attention_pytorch.train.ranks import Ranks, Stopped
from dilated_attention_pytorch.train.step import Stepper
from examples.evidence.corpus import Tokens
from examples.evidence.measures import throughout
from examples.evidence.runs import Run, find_run
from examples.recall import set_attention

_SAVE_EVERY = 150.0  # seconds
_TIMED = 16  # steps
_CHECKPOINT = "checkpoint.pt"


class TimeIsUp(Exception):
    """The time that the command was given has passed; what was done is saved."""


@dataclass
class Progress:
    """What is saved with the weights: `curve` has (step, validation bits per byte), `seconds` one entry per step."""

    step: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The median, which the compilation of the first steps and a busy moment do not change."""
        return statistics.median(self.seconds)


def train(run: Run, seed: int, tokens: Tokens, out: Path, device: str, deadline: float) -> tuple[LongNetLM, Progress]:
    """The trained model and its curve. Continues from a checkpoint in `out`, and saves one when it is stopped.

    That is when time is up, and after Ctrl-C or SIGTERM.
    """
    config, scale = run.config(seed, device), run.scale
    folder = out / f"{run.name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    sweep_partials(folder)
    goes_on = (folder / _CHECKPOINT).is_file()
    if run.starts_as and not goes_on:
        train(find_run(run.starts_as, scale), seed, tokens, out, device, deadline)  # at once if it is trained
    model, optimizer, stepper = _make(run, seed, device)
    progress = Progress()
    if goes_on:
        progress = _load(folder, model, optimizer, device)
    elif run.starts_as:
        progress.step = _load(out / f"{run.starts_as}-{seed}", model, optimizer, device).step
    saved = time.monotonic()
    batches = draw(run, seed, tokens, first=progress.step + 1)
    with float32_products(device == "cuda"), interrupts(patient=False) as came:
        for step in range(progress.step + 1, config.steps + 1):
            if time.monotonic() > deadline:
                _save(folder, model, optimizer, progress)
                raise TimeIsUp
            began = time.perf_counter()
            outcome = stepper.step(next(batches), step)()
            if outcome.is_broken:
                raise FloatingPointError(f"{run.name}, seed {seed}: the loss of step {step} is {outcome.loss}")
            progress.step = step
            progress.seconds.append(time.perf_counter() - began)
            if step % scale.validate_every == 0 or step == config.steps:
                bits = throughout(model, run, tokens, device, scale.validation_windows).bits
                progress.curve.append((step, bits))
                left = (config.steps - step) * progress.step_seconds
                print(
                    f"{run.name}, seed {seed}: step {step} of {config.steps}, {bits:.4f} bits per byte, "
                    f"{progress.step_seconds:.3f} s per step, {left:.0f} s left",
                    flush=True,
                )
            if came or time.monotonic() - saved > _SAVE_EVERY or step == config.steps:
                _save(folder, model, optimizer, progress)
                saved = time.monotonic()
            if came:
                raise Stopped(came[0])
    return model, progress


def time_steps(run: Run, tokens: Tokens, device: str) -> float:
    """The seconds of a step of a new model."""
    seed, progress = run.seeds[0], Progress()
    _, _, stepper = _make(run, seed, device)
    batches = draw(run, seed, tokens, first=1)
    with float32_products(device == "cuda"):
        for step in range(1, _TIMED + 1):
            began = time.perf_counter()
            stepper.step(next(batches), step)()
            progress.seconds.append(time.perf_counter() - began)
    return progress.step_seconds


def draw(run: Run, seed: int, tokens: Tokens, first: int) -> Iterator[Batch]:
    """The batches of a run from step `first` on.

    As many steps as there are `places` read the text of these places, at every length. Each step takes its sequences
    from as many of them as it can: sequences that follow each other are so alike that a model learns little from a step
    of them.
    """
    scale = run.scale
    per_step = scale.tokens_per_step // run.length
    read = -1
    for step in itertools.count(first - 1):
        part, turn = divmod(step, scale.places)
        if part != read:
            text = tokens.corpus.training_batch(scale.places, scale.tokens_per_step, seed, part + 1, order="epochs")
            read = part
        number = torch.arange(per_step) + turn * per_step
        here, shape = (number % scale.places, number // scale.places), (scale.places, -1, run.length)
        yield Batch(text.tokens.view(shape)[here], text.following.view(shape)[here])


def drop_checkpoint(name: str, seed: int, out: Path) -> None:
    """Delete the weights of a run."""
    (out / f"{name}-{seed}" / _CHECKPOINT).unlink(missing_ok=True)


def _make(run: Run, seed: int, device: str) -> tuple[LongNetLM, torch.optim.Optimizer, Stepper]:
    config = run.config(seed, device)
    torch.compiler.reset()  # otherwise shapes that differ from those of the run before become dynamic
    torch.manual_seed(seed)
    model = LongNetLM(run.model()).to(device)
    set_attention(model, lambda layer: run.attention(run.length, layer))
    prepare(model, config.memory)
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    optimizer = make_optimizer(model, config.memory, **settings)
    return model, optimizer, Stepper(model, optimizer, config, Ranks(device=torch.device(device)))


def _save(folder: Path, model: LongNetLM, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(progress)}
    write_whole(folder / _CHECKPOINT, lambda partial: torch.save(state, partial))


def _load(folder: Path, model: LongNetLM, optimizer: torch.optim.Optimizer, device: str) -> Progress:
    state = torch.load(folder / _CHECKPOINT, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
