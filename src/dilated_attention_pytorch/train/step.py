"""One step of the optimizer: a batch in micro-batches, its loss scaled, its gradient clipped, applied unless broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.data import Batch
from dilated_attention_pytorch.train.memory import loss as memory_loss
from dilated_attention_pytorch.train.memory import make_scaler, set_learning_rate
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.zero import ZeroModel

_DECAY = 1 - 2 / 51  # of the smoothed loss per step: its losses are as old, on average, as those of a mean over 50
_FORGOTTEN = 1000  # steps after which the weight of a loss is lost in rounding
_HALVINGS = 16  # of the loss scale, from its first value down to 1


class Outcome(NamedTuple):
    """The result of a step, the same on all ranks. The weights have moved only if both numbers are finite."""

    loss: float
    gradient_norm: float
    is_overflow: bool = False  # of the scaled gradient in float16: the scale is halved, and nothing is wrong

    @property
    def is_broken(self) -> bool:
        return not math.isfinite(self.loss + self.gradient_norm)


def record_of(
    step: int, outcome: Outcome, before: Sequence[dict[str, Any]], tokens_per_byte: float = 1.0
) -> dict[str, Any]:
    """The record of a step, given those of the steps before it: finite numbers by name.

    A skipped step has `"skipped": 1`, and a loss only if that was finite. `loss_ema` is the exponential moving average
    of the losses of `before` and this one: a weighted mean whose weights add up to 1 from the first loss on.

    >>> first = record_of(1, Outcome(4.0, 1.0), [])
    >>> round(record_of(2, Outcome(2.0, 1.0), [first])["loss_ema"], 2)
    2.98
    """
    record: dict[str, Any] = {"step": step}
    if math.isfinite(outcome.loss):
        record |= {"loss": outcome.loss, "bits": outcome.loss / math.log(2.0) * tokens_per_byte}
    if math.isfinite(outcome.gradient_norm):
        record["gradient_norm"] = outcome.gradient_norm
    average = before[-1].get("loss_ema") if before else None
    if outcome.is_broken:
        record["skipped"] = 1
    elif average is None:
        average = outcome.loss
    else:
        averaged = 1 + sum("loss" in one and "skipped" not in one for one in before[-_FORGOTTEN:])
        average += (outcome.loss - average) * (1 - _DECAY) / (1 - _DECAY**averaged)  # Adam's bias correction
    if average is not None:
        record["loss_ema"] = average
    return record


def check_broken(outcome: Outcome, records: Sequence[dict[str, Any]], allowed: int, saved: int, advice: str) -> str:
    """The message about a skipped step, the last of `records`; raises with `advice` if too many in a row were skipped.

    Overflows of float16 are too many only when the loss scale has come down to 1. `saved` is the step of the last
    checkpoint, or 0.
    """
    row = 0
    while row < len(records) and "skipped" in records[-1 - row]:
        row += 1
    step = records[-1]["step"]
    numbers = f"the loss is {outcome.loss} and the gradient's norm {outcome.gradient_norm} at step {step}"
    if row <= (max(allowed, _HALVINGS) if outcome.is_overflow else allowed):
        why = "too large for float16, so the loss scale is halved" if outcome.is_overflow else f"{row} in a row"
        return f"skipped: {numbers} ({why})"
    raise FloatingPointError(
        f"{numbers}, after {row - 1} skipped steps before it: {advice}; "
        + (f"step {saved} is the last checkpoint" if saved else "there is no checkpoint yet")
    )


class Update:
    """One update of a model that ranks share; every rank calls it, in the same order.

    PyTorch's `GradScaler` sees the norm of the gradients instead of the gradients. The norm is the same on all ranks,
    and not finite if one gradient of one rank is not, so all ranks scale alike. Without float16 the scale is 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        clip_norm: float,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._clip_norm, self._scaler = clip_norm, scaler
        self._norm = nn.Parameter(torch.zeros((), device=ranks.device))
        self._shown = torch.optim.SGD([self._norm])

    def __call__(self, losses: Iterable[Tensor]) -> Outcome:
        """Move the weights along the clipped gradient of the sum of losses, averaged over ranks, unless it is broken.

        There is one loss per micro-batch, computed after the backward pass of the one before.
        """
        return self.begin(losses)()

    def begin(self, losses: Iterable[Tensor]) -> Callable[[], Outcome]:
        """Start the backward passes; the returned function waits for them, moves the weights and returns the outcome.

        Between the two a GPU computes, and the caller can prepare the next step.
        """
        values: list[Tensor] = []

        def noted() -> Iterator[Tensor]:
            for loss in losses:
                values.append(loss.detach())
                yield loss

        if isinstance(self._model, ZeroModel):
            of_zero = self._model.update(noted())
            return lambda: Outcome(self._ranks.mean(torch.stack(values).sum())[0], of_zero)
        self._optimizer.zero_grad(set_to_none=True)
        for loss in noted():
            self._scaler.scale(loss).backward()
        norm = self._ranks.clip_gradients(self._model, self._clip_norm, self._scaler.get_scale())
        return lambda: self._apply(*self._ranks.mean(torch.stack(values).sum(), norm))

    def _apply(self, value: float, norm: float) -> Outcome:
        outcome = Outcome(value, norm, self._scaler.is_enabled() and math.isfinite(value) and not math.isfinite(norm))
        if self._scaler.is_enabled():  # halved after an overflow, raised after many steps without one
            self._norm.grad = torch.full_like(self._norm, norm)
            self._scaler.unscale_(self._shown)
            self._scaler.update()
        if not outcome.is_broken:
            self._optimizer.step()
        return outcome


class Stepper:
    """Trains a model that ranks share, batch by batch; every rank calls every method, in the same order."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, ranks: Ranks) -> None:
        self.model, self._optimizer, self._config, self._ranks = model, optimizer, config, ranks
        self.scaler = make_scaler(config.memory, ranks.device)
        self._update = Update(model, optimizer, ranks, config.clip_norm, self.scaler)

    @property
    def packed_rows(self) -> int:
        """The number of rows of a packed batch, one per micro-batch and rank; 0 without packing."""
        return self._ranks.axis("data") * self._config.accumulate if self._config.pack else 0

    def step(self, batch: Batch, step: int) -> Callable[[], Outcome]:
        """Start a step of the run with a batch that all ranks drew alike; the returned function ends it."""
        # Dropout depends on (seed, step, token rank) alone, so that a resumed run equals one that never stopped.
        torch.manual_seed(self._config.seed * 1_000_003 + step + (self._ranks.token_rank << 40))
        set_learning_rate(self._optimizer, self._config.learning_rate_at(step))
        return self._update.begin(self._losses(batch))

    def validate(self, batches: Sequence[Batch]) -> float:
        """The mean loss of batches, without dropout and gradients."""
        self.model.eval()
        with torch.no_grad():
            losses = self._ranks.mean(*(torch.stack(list(self._losses(batch))).sum() for batch in batches))
        self.model.train()
        return sum(losses) / len(losses)

    def loss(self, tokens: Tensor, following: Tensor, share: float, lengths: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch: summed over micro-batches, its mean over ranks is the mean over all tokens.

        `share` is the average number of targets per rank: shards of a sequence may differ in length.
        """
        options = self._config.memory
        return memory_loss(self.model, tokens, following, options, reduction="sum", **lengths) / share

    def _losses(self, batch: Batch) -> Iterator[Tensor]:
        """The losses of this rank's micro-batches, each to be used before the next one is computed."""
        ranks, count = self._ranks, self._config.accumulate
        share = max(batch.targets, 1) / (ranks.axis("data") * ranks.axis("sequence"))
        parts = zip(ranks.part(batch.tokens).chunk(count), ranks.part(batch.following).chunk(count))
        for number, (tokens, following) in enumerate(parts):
            lengths = batch.lengths(ranks.place("data") * count + number, ranks.device)
            with ranks.accumulating(self.model, last=number == count - 1):
                yield self.loss(tokens, following, share, lengths)
