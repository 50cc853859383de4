"""Make synthetic slides: `python -m examples.slides FOLDER` writes `FOLDER/table.csv` and `FOLDER/features/*.h5`.

Every slide is background with two rare regions in it, far apart and away from the edges: a tumour and an infiltrate.
Its label says which of them lies above the other. All slides have the same kinds of tiles in the same numbers, so
nothing that pools tiles one by one can tell the label, however it weights them: it must relate two distant regions.
`regions.json` says where they are.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import import_optional

COLUMNS = 16
REGION = 6  # tiles
TILE_PIXELS = 512  # as at 40x: twice the 256 pixels that Prov-GigaPath's positions mean
# Flags of `slides train` with which two CPU cores learn these slides in two minutes.
SETTINGS = (
    "--baseline --positions rotary --pooling attention --d-model 32 --num-layers 2 --num-heads 4 "
    "--segments 64 512 --rates 1 4 --epochs 10 --learning-rate 3e-3 --dropout 0"
)
LABELS = ("infiltrate above", "tumour above")


@dataclass(frozen=True)
class Slide:
    """Features `(n, dim)`, coordinates `(n, 2)`, the label, and the first and last tile of each region."""

    features: Tensor
    coordinates: Tensor
    label: str
    regions: tuple[tuple[int, int], tuple[int, int]]


def make_slide(seed: int, *, dim: int = 16, shortest: int = 150, longest: int = 300) -> Slide:
    """A slide of `shortest` to `longest` tiles, in rows of `COLUMNS`; the regions are `REGION` tiles each."""
    chooser, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    n, is_above = chooser.randint(shortest, longest), chooser.random() < 0.5
    features = torch.randn(n, dim, generator=draw) * 0.3
    upper = chooser.randint(n // 12, n // 3 - REGION)
    lower = chooser.randint(2 * n // 3, n - n // 12 - REGION)
    for first, kind in ((upper, is_above), (lower, not is_above)):
        features[first : first + REGION, int(kind)] += 6.0
    place = torch.arange(n)
    coordinates = torch.stack((place % COLUMNS, place // COLUMNS), dim=-1) * TILE_PIXELS
    regions = ((upper, upper + REGION - 1), (lower, lower + REGION - 1))
    return Slide(features, coordinates, LABELS[is_above], regions)


def write_slides(folder: Path, slides: int, seed: int = 0, *, shortest: int = 150, longest: int = 300) -> Path:
    """Write a study of `slides` slides, two per patient, with 70 % to train on; returns the table's path."""
    h5py = import_optional("h5py", "slides", "the synthetic slides")
    if (folder / "table.csv").exists():
        raise FileExistsError(f"{folder} already holds a study: choose another folder")
    (folder / "features").mkdir(parents=True, exist_ok=True)
    regions, rows = {}, []
    for i in range(slides):
        name, slide = f"slide-{i:04d}", make_slide(seed * 1_000_003 + i, shortest=shortest, longest=longest)
        with h5py.File(folder / "features" / f"{name}.h5", "w") as file:
            file["features"], file["coords"] = slide.features.numpy(), slide.coordinates.numpy()
            file["coords"].attrs["patch_size_level0"] = TILE_PIXELS
        share = (i // 2 * 2) / slides
        split = "train" if share < 0.7 else "validation" if share < 0.8 else "test"
        rows.append([name, f"patient-{i // 2:04d}", slide.label, split])
        regions[name] = slide.regions
    (folder / "regions.json").write_text(json.dumps(regions))
    with (folder / "table.csv").open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([["slide", "patient", "label", "split"], *rows])
    return folder / "table.csv"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.slides", description="Make synthetic slides.")
    parser.add_argument("folder", type=Path, help="a new folder for the table and the features")
    parser.add_argument("--slides", type=int, default=600, metavar="N", help="default: 600")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    table = write_slides(given.folder, given.slides, given.seed)
    print(f"{given.slides} slides are now in {given.folder}; train on them with")
    places = f"--table {table} --features {given.folder / 'features'} --out {given.folder / 'run'}"
    print(f"./run slides train {places} {SETTINGS}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
