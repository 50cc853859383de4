"""What a study asks for: the loss of a batch, predictions, and figures that compare them with the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.slides.table import Case, Study, Task


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The task, and what of the training split decides its loss.

    Classes count by `weights`, whose mean over the training split is 1. Regression learns labels from which `mean` is
    subtracted and which are divided by `scale`.
    """

    task: Task
    classes: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, study: Study, *, class_weights: bool = True) -> Objective:
        assert study.task is not None
        cases = study.of("train")
        if study.task == "classification":
            counts = [sum(case.label == one for case in cases) for one in study.classes]
            assert all(counts), "check_splits refuses a study that lacks a class in training"
            even = tuple(len(cases) / (len(counts) * count) for count in counts)
            return cls(task=study.task, classes=study.classes, weights=even if class_weights else (1.0,) * len(counts))
        if study.task == "survival":
            return cls(task=study.task)
        labels = torch.tensor([case.target[0] for case in cases], dtype=torch.float64)
        spread = float(labels.std(correction=0)) or 1.0
        return cls(task=study.task, mean=float(labels.mean()), scale=spread)

    @property
    def outputs(self) -> int:
        """Numbers that the model returns per sequence."""
        return len(self.classes) if self.task == "classification" else 1

    @property
    def columns(self) -> list[str]:
        """The names of these numbers in the table of predictions."""
        return [f"p_{one}" for one in self.classes] or ["risk" if self.task == "survival" else "predicted"]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of a batch's sequences; `targets` are those of `Case`."""
        outputs = outputs.float()
        if self.task == "classification":
            weight = torch.tensor(self.weights, device=outputs.device)
            return F.cross_entropy(outputs, targets[:, 0].long(), weight=weight, reduction="sum")
        if self.task == "regression":
            return F.mse_loss(outputs[:, 0], (targets[:, 0] - self.mean) / self.scale, reduction="sum")
        return cox_loss(outputs[:, 0], targets[:, 0], targets[:, 1])

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probabilities of the classes, labels, or the logarithm of the risk: `(sequences, outputs)`."""
        if self.task == "classification":
            return outputs.double().softmax(-1)
        return outputs.double() * self.scale + self.mean

    def figures(self, predictions: Tensor, cases: Sequence[Case]) -> dict[str, float]:
        """Figures of a split; the first is the main one. A figure that is not defined there is NaN."""
        targets = torch.tensor([case.target for case in cases], dtype=torch.float64)
        if self.task == "survival":
            return {"c_index": concordance(predictions[:, 0], targets[:, 0], targets[:, 1])}
        if self.task == "regression":
            error = predictions[:, 0] - targets[:, 0]
            spread = float((targets[:, 0] - targets[:, 0].mean()).square().sum())
            r2 = 1 - float(error.square().sum()) / spread if spread else math.nan
            return {"r2": r2, "mae": float(error.abs().mean())}
        truth = targets[:, 0].long()
        # Of two classes the second is the positive one; of more, the mean of each that is there against the others.
        positive = range(1, 2) if len(self.classes) == 2 else range(len(self.classes))
        areas = [area for c in positive if not math.isnan(area := auc(predictions[:, c], truth == c))]
        recalls = [float((predictions.argmax(1) == truth)[truth == c].double().mean()) for c in truth.unique().tolist()]
        return {
            "auc": sum(areas) / len(areas) if areas else math.nan,
            "balanced_accuracy": sum(recalls) / len(recalls),
            "accuracy": float((predictions.argmax(1) == truth).double().mean()),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Objective:
        listed = {name: tuple(values[name]) for name in ("classes", "weights")}
        return cls(**{**values, **listed})


def cox_loss(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Cox's negative log partial likelihood, summed over events; Breslow's for ties.

    `risk`, `time` and `event` are `(n,)`. Each event is compared with everybody who was observed for at least as long.

    >>> cox_loss(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    tensor(1.0986)
    """
    at_risk = time[None, :] >= time[:, None]  # (n, n)
    among = risk.expand(len(risk), -1).masked_fill(~at_risk, -torch.inf).logsumexp(1)
    return ((among - risk) * event).sum()


def auc(scores: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve; ties count half. NaN if all are of one kind.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    0.75
    """
    yes, no = scores[positive], scores[~positive]
    if not len(yes) or not len(no):
        return math.nan
    ranks = torch.searchsorted(no.sort().values, yes) + torch.searchsorted(no.sort().values, yes, right=True)
    return float(ranks.double().sum()) / (2 * len(yes) * len(no))


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Harrell's C: of the pairs whose order is known, the share in which the earlier event has the larger risk.

    >>> concordance(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 0.0]))
    0.6666666666666666
    """
    known = (time[:, None] < time[None, :]) & (event[:, None] == 1)
    if not bool(known.any()):
        return math.nan
    difference = risk[:, None] - risk[None, :]
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    return float(right[known].sum() / known.sum())


def curve_of_thresholds(scores: Tensor, positive: Tensor) -> list[tuple[float, float, float]]:
    """`(false positive rate, true positive rate, precision)` at every threshold, from the highest down."""
    order = scores.argsort(descending=True)
    hits, count = positive[order].double().cumsum(0), torch.arange(1, len(order) + 1, dtype=torch.float64)
    last = torch.cat((scores[order].diff() != 0, torch.tensor([True])))  # the last of equal scores
    rates = zip(
        ((count - hits) / max(1, int((~positive).sum())))[last].tolist(),
        (hits / max(1, int(positive.sum())))[last].tolist(),
        (hits / count)[last].tolist(),
    )
    return [(0.0, 0.0, 1.0), *rates]
