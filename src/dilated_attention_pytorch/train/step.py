"""One step of the optimizer: a batch in micro-batches, its loss scaled, its gradient clipped, applied unless broken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.data import NO_TARGET, Batch
from dilated_attention_pytorch.train.memory import loss as memory_loss
from dilated_attention_pytorch.train.memory import make_scaler, set_learning_rate
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.zero import ZeroModel

_MEMORY = 50  # steps over which the smoothed loss forgets
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

    A skipped step has `"skipped": 1`, and a loss only if that was finite. `loss_ema` is the mean of the losses so far,
    and after 50 of them their exponential moving average.

    >>> first = record_of(1, Outcome(4.0, 1.0), [])
    >>> record_of(2, Outcome(2.0, 1.0), [first])["loss_ema"]
    3.0
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
        average += (outcome.loss - average) / min(step, _MEMORY)
    if average is not None:
        record["loss_ema"] = average
    return record


def check_broken(outcome: Outcome, records: Sequence[dict[str, Any]], allowed: int, saved: int) -> str:
    """What to say about a skipped step, the last of `records`; raises if too many in a row were skipped.

    Overflows of float16 are too many only when the loss scale has come down to 1.
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
        f"{numbers}, after {row - 1} skipped steps before it: lower --learning-rate, or raise --skip-broken-steps; "
        + (f"step {saved} is the last checkpoint" if saved else "there is no checkpoint yet")
    )


class LossScale:
    """PyTorch's `GradScaler`, which sees the norm of the gradients instead of all of them.

    The norm is the same on all ranks, and not finite if one gradient of one rank is not, so all ranks scale alike.
    Without float16 the scale is 1.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler = scaler
        self._norm = nn.Parameter(torch.zeros((), device=device))
        self._shown = torch.optim.SGD([self._norm])

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    @property
    def value(self) -> float:
        return self._scaler.get_scale()

    def update(self, norm: float) -> bool:
        """Halve the scale after an overflow, raise it after many steps without one; returns whether there was one."""
        if not self._scaler.is_enabled():
            return False
        self._norm.grad = torch.full_like(self._norm, norm)
        self._scaler.unscale_(self._shown)
        self._scaler.update()
        return not math.isfinite(norm)


class Stepper:
    """Trains a model that ranks share, batch by batch; every rank calls every method, in the same order."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, ranks: Ranks) -> None:
        self.model, self._optimizer, self._config, self._ranks = model, optimizer, config, ranks
        self.scaler = make_scaler(config.memory, ranks.device)
        self._scale = LossScale(self.scaler, ranks.device)

    @property
    def packed_rows(self) -> int:
        """The number of rows of a packed batch, one per micro-batch and rank; 0 without packing."""
        return self._ranks.data_ranks * self._config.accumulate if self._config.pack else 0

    def step(self, batch: Batch, learning_rate: float) -> Outcome:
        """Move the weights along the gradient of a batch that all ranks drew alike."""
        set_learning_rate(self._optimizer, learning_rate)
        # The last micro-batch is told, for ranks exchange gradients with it.
        parts = list(self._parts(batch))
        losses: list[Tensor] = []
        if isinstance(self.model, ZeroModel):
            norm = self.model.update(self._remember(losses, self.loss(*part)) for part in parts)
            return Outcome(self._mean(losses), norm)
        self._optimizer.zero_grad(set_to_none=True)
        for part in parts:
            with self._ranks.accumulating(self.model, last=part is parts[-1]):
                loss = self._remember(losses, self.loss(*part))
                self._scale.scale(loss).backward()
        norm = self._ranks.clip_gradients(self.model, self._config.clip_norm, self._scale.value)
        value = self._mean(losses)
        is_overflow = self._scale.update(norm) and math.isfinite(value)
        outcome = Outcome(value, norm, is_overflow)
        if not outcome.is_broken:
            self._optimizer.step()
        return outcome

    def evaluate(self, batch: Batch) -> float:
        """The loss of a batch, without a gradient."""
        with torch.no_grad():
            return self._mean([self.loss(*part) for part in self._parts(batch)])

    def loss(self, tokens: Tensor, following: Tensor, share: float, lengths: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch: summed over micro-batches, its mean over ranks is the mean over all tokens.

        `share` is the average number of targets per rank: shards of a sequence may differ in length.
        """
        summed = memory_loss(
            self.model,
            tokens,
            following,
            self._config.memory,
            ignore_index=NO_TARGET,
            reduction="sum",
            **lengths,
        )
        return summed / share

    def _parts(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, float, dict[str, Tensor]]]:
        """This rank's micro-batches of a batch."""
        ranks, pieces = self._ranks, self._config.accumulate
        share = max(batch.targets, 1) / (ranks.data_ranks * ranks.axis("sequence"))
        micro = zip(ranks.part(batch.tokens).chunk(pieces), ranks.part(batch.following).chunk(pieces))
        for piece, (own, next_ones) in enumerate(micro):
            yield own, next_ones, share, batch.lengths(ranks.data_rank * pieces + piece, ranks.device)

    @staticmethod
    def _remember(losses: list[Tensor], loss: Tensor) -> Tensor:
        losses.append(loss.detach())
        return loss

    def _mean(self, losses: list[Tensor]) -> float:
        return self._ranks.gather(torch.stack(losses).sum().item()).mean().item()
