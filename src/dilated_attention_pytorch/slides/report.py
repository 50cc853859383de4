"""A run on a study as one HTML page: figures per fold, curves, errors, and maps of the slides it gets most wrong."""

from __future__ import annotations

import csv
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.pages import plots
from dilated_attention_pytorch.pages.page import figures, marked, table, write_html
from dilated_attention_pytorch.slides.config import SlidesConfig
from dilated_attention_pytorch.slides.features import BrokenFile, find_file, read_bag
from dilated_attention_pytorch.slides.loop import MODEL, PREDICTIONS, RESULTS, STUDY
from dilated_attention_pytorch.slides.maps import map_figure, tile_weights
from dilated_attention_pytorch.slides.objectives import Objective, curve_of_thresholds
from dilated_attention_pytorch.train import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dilated_attention_pytorch.pages.plots import Points

_BINS = 10  # of a calibration
_WIDTH = 4.2  # inches of a chart, which a phone shows at full size
_TITLES = {"auc": "AUC", "r2": "R²", "mae": "mean absolute error", "c_index": "C-index"}


class Prediction(NamedTuple):
    """What a fold predicted for one slide of its test split."""

    slide: str
    label: str
    predicted: list[float]
    run: Path


def fold_folders(run: Path) -> list[Path]:
    """The folders of the folds of a run that have results, or the run itself."""
    folds = sorted(run.glob("fold-*"), key=lambda folder: (len(folder.name), folder.name))  # fold-10 after fold-9
    found = [folder for folder in [run, *folds] if (folder / PREDICTIONS).is_file()]
    if not found:
        raise FileNotFoundError(f"{run} has no {PREDICTIONS}: it is not a finished run of `slides train`")
    return found


def compared(runs: Mapping[str, Path]) -> str:
    """The test figures of runs as lines of text, one run per line; of folds, the mean."""
    lines, names = [], list[str]()
    for name, run in runs.items():
        means = _mean_figures(fold_folders(run))
        names = names or list(means)
        lines.append(f"{name:<20}" + "".join(f"{means[figure]:>20.3f}" for figure in names))
    return "\n".join([f"{'test split':<20}" + "".join(f"{name.replace('_', ' '):>20}" for name in names), *lines])


def _test_figures(folder: Path) -> dict[str, float]:
    """The figures of a fold's test split; one that is not defined there is NaN."""
    found = json.loads((folder / RESULTS).read_text())["test"]
    return {name: math.nan if value is None else value for name, value in found.items()}


def _mean_figures(folders: Sequence[Path]) -> dict[str, float]:
    """The figures of the test split, each averaged over the folds where it is defined."""
    found = [_test_figures(folder) for folder in folders]
    return {name: _mean([one[name] for one in found]) for name in found[0]}


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.mean(known) if known else math.nan


def _deviation(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.stdev(known) if len(known) > 1 else math.nan


def write_report(run: Path, out: Path | None = None, worst: int = 4) -> Path:
    """Write the page of a run to `out`, by default `report.html` in its folder; returns the path."""
    folders = fold_folders(run)
    config = SlidesConfig.from_json(run / run_folder.CONFIG)
    objective = Objective.from_dict(json.loads((folders[0] / STUDY).read_text())["objective"])
    found = [one for folder in folders for one in _read_predictions(folder, objective)]
    others = [path.parent for path in run.glob(f"*/{run_folder.CONFIG}") if (path.parent / RESULTS).is_file()]
    beside = {one.name.replace("-", " "): one for one in others}
    body = ["<h2>Figures of the test split</h2>", _fold_table(folders, beside)]
    charts: dict[str, Figure] = {}
    confusion = ""
    if objective.task == "classification":
        charts, confusion = _classification(objective, found)
    elif objective.task == "regression":
        points = [(float(one.label), one.predicted[0]) for one in found]
        drawn = plots.curves({"predicted": points}, "label", "predicted", dots=["predicted"], width=_WIDTH)
        drawn.axes[0].lines[0].set_linestyle("none")  # the dots alone
        charts = {"Predictions over labels": drawn}
    body += ["<h2>Curves</h2>", figures((charts | _training(folders)).items())]
    if confusion:
        body += ["<h2>Confusion in the test split</h2>", confusion]
    if worst and objective.task != "survival":
        body += _worst(config, objective, found, worst)
    settings = [[f"`{name}`", str(value)] for name, value in json.loads(config.to_json()).items()]
    body += ["<h2>Settings</h2>", table(["setting", "value"], settings)]
    path = run / "report.html" if out is None else out
    write_html(path, f"Study {run.resolve().name}", f"Study {run.resolve().name}", body)
    return path


def _read_predictions(folder: Path, objective: Objective) -> list[Prediction]:
    with (folder / PREDICTIONS).open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["split"] == "test"]
    return [
        Prediction(row["slide"], row.get("label", ""), [float(row[name]) for name in objective.columns], folder)
        for row in rows
    ]


def _fold_table(folders: Sequence[Path], beside: Mapping[str, Path]) -> str:
    """One line per fold, then mean and standard deviation; then the other runs in the folder, such as a baseline."""
    best = [json.loads((folder / RESULTS).read_text())["best_step"] for folder in folders]
    read = [_test_figures(folder) for folder in folders]
    names = list(read[0])
    head = ["", *(_TITLES.get(name, name.replace("_", " ")) for name in names), "best step"]
    rows = [
        [folder.name, *(f"{one[name]:.3f}" for name in names), f"{step:,}"]
        for folder, one, step in zip(folders, read, best)
    ]
    if len(read) > 1:
        means = _mean_figures(folders)
        spreads = [_deviation([one[name] for one in read]) for name in names]
        rows.append(["**mean**", *(f"**{means[name]:.3f}**" for name in names), ""])
        rows.append(["standard deviation", *(f"{spread:.3f}" for spread in spreads), ""])
    for name, run in beside.items():
        means = _mean_figures(fold_folders(run))
        rows.append([name, *(f"{means[figure]:.3f}" for figure in names), ""])
    return table(head, rows)


def _classification(objective: Objective, found: Sequence[Prediction]) -> tuple[dict[str, Figure], str]:
    """The charts of the test split by their names, and the table of confusions."""
    classes = objective.classes
    truth = torch.tensor([classes.index(one.label) for one in found])
    scores = torch.tensor([one.predicted for one in found], dtype=torch.float64)
    shown = [1] if len(classes) == 2 else truth.unique().tolist()
    roc, precision, calibration = {}, {}, {}
    for c in shown:
        points = curve_of_thresholds(scores[:, c], truth == c)
        roc[classes[c]] = [(x, y) for x, y, _ in points]
        precision[classes[c]] = [(y, p) for _, y, p in points]
        calibration[classes[c]] = _calibration(scores[:, c], truth == c)
    diagonal = [(0.0, 0.0), (1.0, 1.0)]
    drawn = functools.partial(plots.curves, shares=True, width=_WIDTH)
    charts = {
        "ROC": drawn(roc | {"chance": diagonal}, "false positive rate", "true positive rate"),
        "Precision and recall": drawn(precision, "recall", "precision"),
        "Calibration": drawn(
            calibration | {"exact": diagonal}, "predicted probability", "share that is true", dots=list(calibration)
        ),
    }
    counts = torch.zeros(len(classes), len(classes), dtype=torch.int64)
    counts.index_put_((truth, scores.argmax(1)), torch.tensor(1), accumulate=True)
    rows = [[f"true {one}", *map(str, row)] for one, row in zip(classes, counts.tolist())]
    confusion = table(["", *(f"predicted {one}" for one in classes)], rows)
    return charts, confusion


def _calibration(scores: Tensor, positive: Tensor) -> list[tuple[float, float]]:
    """The mean score and the share of positives of slides in bins of equal width, where there are any."""
    numbers = (scores * _BINS).long().clamp_max(_BINS - 1)
    bins = [numbers == i for i in range(_BINS) if bool((numbers == i).any())]
    return [(float(scores[one].mean()), float(positive[one].double().mean())) for one in bins]


def _training(folders: Sequence[Path]) -> dict[str, Figure]:
    """The losses over steps; of folds, those in training and in validation apart."""
    losses: dict[str, dict[str, Points]] = {"training": {}, "validation": {}}
    for folder in folders:
        records = run_folder.read_metrics(folder)
        smooth = [(one["step"], one["loss_ema"]) for one in records if "loss_ema" in one]
        losses["training"][folder.name] = plots.thinned(smooth)
        known = [(one["step"], one["validation_loss"]) for one in records if "validation_loss" in one]
        losses["validation"][folder.name] = known
    if len(folders) == 1:
        alone = {kind: found[folders[0].name] for kind, found in losses.items()}
        return {"Loss over steps": plots.curves(alone, "step", "loss", width=_WIDTH)}
    return {f"Loss in {kind}": plots.curves(one, "step", "loss", width=_WIDTH) for kind, one in losses.items()}


def _worst(config: SlidesConfig, objective: Objective, found: Sequence[Prediction], count: int) -> list[str]:
    """The slides whose predictions are farthest from the truth, with the attention of their fold's model."""

    def error(one: Prediction) -> float:
        if objective.task == "classification":
            return 1.0 - one.predicted[objective.classes.index(one.label)]
        return abs(one.predicted[0] - float(one.label))

    maps: list[tuple[str, Figure]] = []
    missing: list[str] = []  # why there is no map
    rows = []
    for one in sorted(found, key=error, reverse=True)[:count]:
        said = " / ".join(f"{value:.3f}" for value in one.predicted)
        rows.append([one.slide, one.label, said, f"{error(one):.3f}"])
        try:
            bag = read_bag(find_file(Path(config.features), one.slide), config.tile_pixels)
        except BrokenFile as broken:
            missing.append(str(broken))
            continue
        if bag.coordinates is not None:
            weights = tile_weights(LongNetEncoder.from_pretrained(one.run / MODEL).eval(), bag)
            maps.append((f"{one.slide}: {one.label}, predicted {said}", map_figure(weights, bag)))
    predicted = " / ".join(objective.classes) or "predicted"
    words = "A tile is darker the more attention it gets, over all layers and heads."
    body = ["<h2>Worst slides</h2>", table(["slide", "truth", predicted, "error"], rows)]
    body += [f"<p>{marked(f'There is no map of this slide: {why}.')}</p>" for why in missing]
    return [*body, f"<p>{marked(words)}</p>", figures(maps)] if maps else body
