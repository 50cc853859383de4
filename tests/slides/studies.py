"""Small studies on disk, for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

DIM = 6


def write_bag(path: Path, rows: int = 20, *, seed: int = 0, tile: float = 256.0, dim: int = DIM, **attributes) -> None:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, dim, generator=draw)
    places = torch.stack((torch.arange(rows) % 5, torch.arange(rows) // 5), -1) * tile
    if path.suffix == ".npy":
        numpy.save(path, features.numpy())
        numpy.save(path.with_suffix(".coords.npy"), places.numpy())
    elif path.suffix == ".pt":
        torch.save({"features": features.half(), "coords": places.long()}, path)
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file["features"] = features[None].numpy()
            file["coords"] = places.long().numpy()
            for name, value in attributes.items():
                file["coords"].attrs[name] = value


def write_table(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def small_study(folder: Path, slides: int = 12, suffix: str = ".npy", growth: int = 7) -> Path:
    """A table beside a folder `features`; two slides per patient, classes in turn."""
    (folder / "features").mkdir(parents=True)
    lines = ["slide_id,patient,label,time,event"]
    for i in range(slides):
        write_bag(folder / "features" / f"s{i}{suffix}", rows=10 + growth * i, seed=i)
        lines.append(f"s{i},p{i // 2},{'ab'[i // 2 % 2]},{i + 1},{i // 2 % 2}")
    return write_table(folder / "table.csv", lines)
