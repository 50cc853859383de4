"""Losses and figures against their definitions, written out."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch.slides.objectives import Objective, auc, concordance, cox_loss, curve_of_thresholds
from dilated_attention_pytorch.slides.table import read_study, split_by_patient

from .studies import small_study


def test_cox_loss_compares_each_event_with_those_still_at_risk() -> None:
    torch.manual_seed(0)
    risk, time = torch.randn(9, dtype=torch.float64), torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6, 5]).double()
    event = torch.tensor([1.0, 1, 0, 1, 0, 1, 1, 0, 1]).double()
    expected = 0.0
    for i in range(9):
        if event[i]:
            at_risk = [math.exp(risk[j]) for j in range(9) if time[j] >= time[i]]
            expected += math.log(sum(at_risk)) - float(risk[i])
    assert float(cox_loss(risk, time, event)) == pytest.approx(expected)
    pairs = [(i, j) for i in range(9) for j in range(9) if event[i] and time[i] < time[j]]
    right = sum(bool(risk[i] > risk[j]) for i, j in pairs)
    assert concordance(risk, time, event) == pytest.approx(right / len(pairs))
    assert math.isnan(concordance(risk, time, torch.zeros(9)))


def test_the_area_under_the_curve_is_that_of_all_pairs() -> None:
    torch.manual_seed(0)
    scores, positive = torch.randint(6, (40,)).double(), torch.rand(40) < 0.4
    pairs = [(float(a > b) + 0.5 * float(a == b)) for a in scores[positive] for b in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(sum(pairs) / len(pairs))
    points = curve_of_thresholds(scores, positive)
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
    assert area == pytest.approx(auc(scores, positive))
    assert points[-1][:2] == (1.0, 1.0)
    assert math.isnan(auc(scores, torch.ones(40, dtype=torch.bool)))


def test_class_weights_let_rare_classes_count_alike(tmp_path) -> None:
    table = small_study(tmp_path)
    table.write_text(table.read_text().replace(",b,", ",a,", 3))
    study = split_by_patient(read_study(table, tmp_path / "features", "classification"), folds=3)
    cases = study.of("train")
    objective = Objective.of(study)
    total = dict.fromkeys(study.classes, 0.0)
    for case in cases:
        total[case.label] += objective.weights[int(case.target[0])]
    assert total["a"] == pytest.approx(total["b"])
    assert sum(total.values()) == pytest.approx(len(cases))
    targets = torch.tensor([case.target for case in cases])
    flat = objective.loss(torch.zeros(len(cases), 2), targets)
    assert float(flat) == pytest.approx(len(cases) * math.log(2), rel=1e-5)
    assert Objective.from_dict(vars(objective) | {"classes": ["a", "b"]}) == objective


def test_a_class_that_is_absent_from_a_split_is_left_out_of_its_area() -> None:
    objective = Objective(task="classification", classes=("a", "b", "c"))
    cases = [SimpleNamespace(target=(float(i % 2),)) for i in range(6)]
    found = objective.figures(torch.eye(3)[[0, 1, 0, 1, 0, 2]].double(), cases)
    assert found["auc"] == pytest.approx((1.0 + 5 / 6) / 2)
    assert math.isnan(objective.figures(torch.eye(3)[[0, 0]].double(), cases[:1] * 2)["auc"])


def test_regression_learns_scaled_labels_and_predicts_labels(tmp_path) -> None:
    table = small_study(tmp_path)
    lines = table.read_text().replace(",a,", ",10,").replace(",b,", ",30,").splitlines()
    table.write_text("\n".join(lines))
    study = split_by_patient(read_study(table, tmp_path / "features", "regression"), folds=3)
    objective = Objective.of(study)
    labels = torch.tensor([case.target for case in study.of("test")])
    exact = (labels - objective.mean) / objective.scale
    assert float(objective.loss(exact, labels)) == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(objective.predictions(exact), labels.double())
    assert objective.figures(labels.double(), study.of("test"))["r2"] == 1.0
