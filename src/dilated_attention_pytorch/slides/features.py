"""Bags of embeddings in files: `.h5` as TRIDENT and CLAM write them, `.pt` and `.npy`.

| file | holds |
|---|---|
| `ID.h5` | `features`, `(n, dim)` or `(1, n, dim)`, and perhaps `coords`, `(n, 2)` |
| `ID.pt` | a tensor of features, or a dictionary with `features` and perhaps `coords`; read without unpickling |
| `ID.npy` | features; coordinates are in `ID.coords.npy` if that is there |

Coordinates are columns and rows in pixels of the slide's largest level. Prov-GigaPath divides them by 256 and rounds
down to get the number of a tile. That holds only if a tile is 256 of these pixels wide: from a slide of twice the
resolution, neighbouring tiles come 512 pixels apart, every other number is left out, and the positions are not those
that the model was trained on. So coordinates are scaled here until a tile is 256 pixels wide.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import POSITIVE, checked, import_optional

SUFFIXES = (".h5", ".pt", ".npy")
TILE = 256.0  # pixels of a tile in the coordinates of a `Bag`


class BrokenFile(ValueError):
    """A file whose features cannot be used; the message names it."""


class Bag(NamedTuple):
    """The rows of one sequence."""

    features: Tensor  # (n, dim) float32
    coordinates: Tensor | None  # (n, 2) float32, in pixels of which a tile has 256
    tile_pixels: float = TILE  # width of a tile in the pixels of the file's coordinates


class Found(NamedTuple):
    """What a file says it holds, before its rows are read."""

    rows: int
    dim: int
    has_coordinates: bool
    measured: float = 0.0  # width of a tile, if coordinates were read, and it is neither stated nor in the file


def find_file(folder: Path, name: str) -> Path:
    """The file of a bag; an error if there is none, or more than one."""
    if Path(name).name != name:
        raise ValueError(f"a slide is named by its file, without folder and suffix, got {name!r}")
    found = [path for suffix in SUFFIXES if (path := folder / f"{name}{suffix}").is_file()]
    if len(found) > 1:
        raise BrokenFile(f"{name} has several files, {' and '.join(map(str, found))}: leave one of them in the folder")
    if not found:
        raise BrokenFile(f"{name} has no file in {folder}: there is none of {', '.join(name + s for s in SUFFIXES)}")
    return found[0]


def look_at(
    path: Path, tile_pixels: float | None = None, grids: int | None = None, *, needs_coordinates: bool = False
) -> Found:
    """Sizes of the bag in a file, without reading its rows.

    With `grids`, coordinates are read too, and must lie within that many tiles along each side; with
    `needs_coordinates`, the file must have them.
    """
    with _opened(path) as (features, coords, noted):
        found = _checked(path, features, coords)
        if coords is None and needs_coordinates:
            raise BrokenFile(
                f"{path} has no coords, which positions from coordinates need: add them, or train with --positions none"
            )
        if coords is None or grids is None:
            return found
        places, pixels, is_measured = _placed(path, coords, noted, tile_pixels)
        last = int(places.max() // pixels)
        if last >= grids:
            raise BrokenFile(
                f"{path}: coordinates must lie within {grids:,} tiles along each side, got tile {last:,} of tiles "
                f"{pixels:g} pixels wide: state the width with --tile-pixels, or train with --positions none"
            )
        return found._replace(measured=pixels if is_measured else 0.0)


@checked(tile_pixels=POSITIVE)
def read_bag(path: Path, tile_pixels: float | None = None, *, coordinates: bool = True) -> Bag:
    """The rows of the bag in a file, checked.

    `tile_pixels` is the width of a tile in the pixels of the file's coordinates. By default it is what TRIDENT or CLAM
    wrote beside them (`patch_size_level0`; or `patch_size` and `downsample`), or else the most frequent distance
    between neighbours in a column or a row of tiles. If fewer than half of the neighbours are at that distance, an
    error asks for the width. With `coordinates=False`, coordinates are not read.
    """
    with _opened(path) as (features, coords, noted):
        _checked(path, features, coords)
        rows = _tensor(features)
        if not bool(rows.isfinite().all()):
            count = int((~rows.isfinite()).any(1).sum())
            raise BrokenFile(
                f"{path}: {count} of {len(rows)} rows have features that are NaN or infinite: compute them again"
            )
        if coords is None or not coordinates:
            return Bag(rows, None)
        places, pixels, _ = _placed(path, coords, noted, tile_pixels)
        return Bag(rows, (places * (TILE / pixels)).float(), pixels)


def _placed(path: Path, coords: Any, noted: dict[str, Any], tile_pixels: float | None) -> tuple[Tensor, float, bool]:
    """The coordinates in the file's pixels, `(n, 2)`, the width of a tile, and whether that had to be measured."""
    places = _tensor(coords).double()
    if not bool(places.isfinite().all()) or bool((places < 0).any()):
        raise BrokenFile(f"{path}: coordinates must be finite numbers of at least 0")
    known = tile_pixels or _noted_tile(noted)
    return places, known or _measured_tile(path, places), not known


def _checked(path: Path, features: Any, coords: Any) -> Found:
    shape = tuple(features.shape[1:] if len(features.shape) == 3 and features.shape[0] == 1 else features.shape)
    if len(shape) != 2:
        raise BrokenFile(f"{path}: features must be (rows, dim), got {shape}")
    if not shape[0]:
        raise BrokenFile(f"{path} has no rows")
    of_coords = () if coords is None else tuple(coords.shape[1:] if len(coords.shape) == 3 else coords.shape)
    if coords is not None and of_coords != (shape[0], 2):
        raise BrokenFile(f"{path}: coords must be ({shape[0]}, 2), one pair per row of features, got {of_coords}")
    return Found(*shape, coords is not None)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """The features, the coords and the attributes of coords in a file; every error in the block is a `BrokenFile`."""
    try:
        if path.suffix == ".h5":
            h5py = import_optional("h5py", "slides", "reading .h5 files")
            with h5py.File(path, "r") as file:
                if "features" not in file:
                    raise BrokenFile(f"{path} has no dataset 'features': it holds {', '.join(file) or 'nothing'}")
                coords = file.get("coords")
                yield file["features"], coords, {} if coords is None else dict(coords.attrs)
        elif path.suffix == ".npy":
            features, coords = (
                numpy.load(one, mmap_mode="r", allow_pickle=False) if one.is_file() else None
                for one in (path, path.with_suffix(".coords.npy"))
            )
            yield features, coords, {}
        else:
            held = _load_tensors(path)
            held = {"features": held} if isinstance(held, Tensor) else held
            if not isinstance(held, dict) or not isinstance(held.get("features"), Tensor):
                raise BrokenFile(f"{path} holds neither a tensor nor a dictionary with features")
            yield held["features"], held.get("coords"), {}
    except (BrokenFile, ModuleNotFoundError):
        raise
    except Exception as error:  # every library reports a broken file in its own way
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BrokenFile(f"{path} cannot be read: {why}") from error


def _load_tensors(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mmap can only be used" not in str(error):  # such as a cut-off file
            raise
        raise BrokenFile(
            f"{path} cannot be read without unpickling: save tensors, with torch.save of PyTorch 1.6 or newer"
        ) from error


def _tensor(held: Any) -> Tensor:
    """An array of a file as a tensor of its own, in float32."""
    if isinstance(held, Tensor):
        rows = held.to(torch.float32, copy=True)
    else:
        rows = torch.from_numpy(numpy.array(held[()], dtype="float32"))
    return rows[0] if rows.dim() == 3 else rows


def _noted_tile(noted: dict[str, Any]) -> float:
    """The width of a tile in pixels of the largest level, as noted beside coordinates; 0 if it is not."""

    def number(name: str) -> float:
        value = noted.get(name, 0.0)
        try:
            first = float(value if not hasattr(value, "__len__") or isinstance(value, str) else value[0])
        except (TypeError, ValueError, IndexError):
            return 0.0
        return first if 0 < first < math.inf else 0.0

    return number("patch_size_level0") or number("patch_size") * number("downsample")


def _measured_tile(path: Path, places: Tensor) -> float:
    """The most frequent distance between neighbours in a column or a row; `TILE` for a single tile.

    CLAM lays tiles on one grid per tissue contour, and two contours rarely share a column or a row. So the distance
    between any two columns can be far smaller than a tile, but neighbours in one column nearly always are a tile apart.
    """
    if len(places) == 1:
        return TILE
    steps = torch.cat([_steps(places), _steps(places.flip(1))])
    if len(steps):
        widths, counts = steps.unique(return_counts=True)
        width = float(widths[counts.argmax()])
        share = float(((steps / width - 1).abs() < 0.01).double().mean())
        if share >= 0.5:
            return width
        why = f"of the neighbours in a column or a row, only {share:.0%} are {width:g} pixels apart"
    else:
        why = "no two tiles share a column or a row"
    raise BrokenFile(f"{path}: the width of a tile is not noted and cannot be measured ({why}): state --tile-pixels")


def _steps(places: Tensor) -> Tensor:
    """The distances between neighbours in each column."""
    order = places[:, 1].argsort()
    order = order[places[order, 0].argsort(stable=True)]
    columns, steps = places[order].diff(dim=0).unbind(1)
    return steps[(columns == 0) & (steps > 0)]
