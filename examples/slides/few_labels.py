"""`python -m examples.slides.few_labels FOLDER`: what pretraining without labels is worth where few slides have one.

It makes small synthetic slides, pretrains an encoder on the features of `SLIDES` of them by predicting hidden tiles,
and then trains with `LABELS` labels, from these weights and from scratch. This is repeated with other labelled slides
and other first weights (`--seeds`), after one pretraining and on the same test slides, which no other step has seen.
`FOLDER/report.html` compares both; `FOLDER/seed-0/report.html` and so on are the pages of the runs.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.pages.page import table, write_html
from dilated_attention_pytorch.slides.config import SlidesConfig
from dilated_attention_pytorch.slides.loop import run_study
from dilated_attention_pytorch.slides.report import write_report

from .__main__ import write_slides

SLIDES, LABELS, TEST = 500, 32, 100  # half as many labels again choose the epoch
WITH, WITHOUT = "with pretraining", "without"
SMALL: dict[str, Any] = {
    "d_model": 32, "num_layers": 2, "num_heads": 4, "segment_lengths": (16, 128), "dilation_rates": (1, 4),
    "positions": "rotary", "batch_size": 8,
}  # fmt: skip


def compare(
    folder: Path, seeds: Sequence[int], *, seed_of_slides: int = 0, slides: int = SLIDES, labels: int = LABELS,
    test: int = TEST, pretraining: int = 40, training: int = 25,
) -> dict[str, list[float]]:  # fmt: skip
    """The AUC on the test slides for each seed, with and without pretraining."""
    study = write_slides(folder, slides + test, seed_of_slides, shortest=64, longest=96)
    with study.open(newline="") as stream:
        cases = list(csv.DictReader(stream))
    common = {**SMALL, "features": str(folder / "features")}
    unlabelled = [{"slide": one["slide"]} for one in cases[:slides]]
    splits = ["train"] * (slides * 19 // 20) + ["validation"] * (slides - slides * 19 // 20)
    before = write_table(folder / "unlabelled.csv", unlabelled, splits)
    first = SlidesConfig(
        job="pretrain", table=str(before), epochs=pretraining, learning_rate=3e-3, dropout=0.0, **common
    )
    run_study(first, folder / "pretrained")
    found: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for seed in seeds:
        patients = list(range(slides // 2))  # who have two slides each
        random.Random(seed).shuffle(patients)
        chosen = [cases[2 * i + j] for i in patients[: labels * 3 // 4] for j in (0, 1)] + cases[slides:]
        splits = ["train"] * labels + ["validation"] * (len(chosen) - labels - test) + ["test"] * test
        few = write_table(folder / f"labels-{seed}.csv", chosen, splits)
        run = folder / f"seed-{seed}"
        for name, start, out in ((WITH, str(folder / "pretrained"), run), (WITHOUT, None, run / "without-pretraining")):
            given = {"pooling": "attention", "start": start, "seed": seed, "dropout": 0.2, **common}
            (results,) = run_study(SlidesConfig(table=str(few), epochs=training, learning_rate=5e-3, **given), out)
            found[name].append(results["test"]["auc"])
        write_report(run)
    write_summary(folder / "report.html", seeds, found)
    return found


def write_summary(path: Path, seeds: Sequence[int], found: dict[str, list[float]]) -> None:
    lines = [[f"seed {seed}", *(f"{values[i]:.3f}" for values in found.values())] for i, seed in enumerate(seeds)]
    lines.append(["**mean**", *(f"**{statistics.mean(values):.3f}**" for values in found.values())])
    if len(seeds) > 1:
        lines.append(["standard deviation", *(f"{statistics.stdev(values):.3f}" for values in found.values())])
    title = "Few labels, with and without pretraining"
    write_html(path, title, title, ["<h2>AUC of the test split</h2>", table(["", *found], lines)])


def write_table(path: Path, cases: Sequence[dict[str, str]], splits: Sequence[str]) -> Path:
    rows = [{**case, "split": split} for case, split in zip(cases, splits, strict=True)]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.slides.few_labels", description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--slides-seed", type=int, default=0, metavar="N", help="seed of the slides (default: 0)")
    given = parser.parse_args(arguments)
    found = compare(given.folder, range(given.seeds), seed_of_slides=given.slides_seed)
    print(f"AUC on {TEST} test slides, {LABELS} labels, {given.seeds} seeds")
    for name, values in found.items():
        spread = f", standard deviation {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        print(f"{name:<20} mean {statistics.mean(values):.3f}{spread} ({' '.join(f'{one:.3f}' for one in values)})")
    print(given.folder / "report.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
