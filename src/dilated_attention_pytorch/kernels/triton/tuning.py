"""Tile shapes, measured per kernel, dtype, head dim and causality; `dilated-attention bench tune` measures them anew.

The tables here are from an H200. A file written by `bench tune` on another GPU takes their place where
`DILATED_ATTENTION_TILES` names it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.core import environment


@dataclass(frozen=True)
class Tiles:
    """Rows a program owns, rows it walks at a time, and the compiler's two knobs."""

    own: int
    walk: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HopperTiles:
    """Query warpgroups of 64 rows, key tiles in flight, registers of their threads, and whether they take turns."""

    consumers: int
    stages: int
    registers: int
    ordered: bool = False


@dataclass(frozen=True)
class Kind:
    """What a shape was measured for; `head_dim` is the largest that takes it, `itemsize` 2 or 4 bytes."""

    kernel: str
    itemsize: int
    head_dim: int
    is_causal: bool


def tiles_for(kernel: str, block_d: int, itemsize: int, rows: int, is_causal: bool) -> Tiles:
    """The measured shape of a plain kernel, made no larger than a segment's `rows` need."""
    found = _shape(kernel, block_d, 2 if itemsize < 4 else 4, is_causal)
    assert isinstance(found, Tiles)
    needed = max(16, 1 << (rows - 1).bit_length())
    warps = found.num_warps if found.own <= needed else 4
    return Tiles(min(found.own, needed), min(found.walk, needed), warps, found.num_stages)


def hopper_tiles_for(block_d: int, is_causal: bool, small: bool) -> HopperTiles:
    """The measured shape of the Hopper forward, or, if it must be `small`, at most 128 query rows."""
    found = _shape("hopper forward", block_d, 2, is_causal)
    assert isinstance(found, HopperTiles)
    return HopperTiles(2, found.stages, 240, found.ordered) if small and found.consumers > 2 else found


def _shape(kernel: str, block_d: int, itemsize: int, is_causal: bool) -> Tiles | HopperTiles:
    head_dim = min(kind.head_dim for kind in MEASURED if kind.kernel == kernel and kind.head_dim >= block_d)
    kind = Kind(kernel, itemsize, head_dim, is_causal)
    return _tried.get(kind) or _tuned().get(kind) or MEASURED[kind]


# What a measurement puts in the place of the file's shape and the table's.
_tried: dict[Kind, Tiles | HopperTiles] = {}


@contextmanager
def trying(kind: Kind, shape: Tiles | HopperTiles) -> Iterator[None]:
    """Let a kernel run in this shape; plans that were made before keep theirs."""
    _tried[kind] = shape
    try:
        yield
    finally:
        del _tried[kind]


@functools.lru_cache(maxsize=1)
def _tuned() -> dict[Kind, Tiles | HopperTiles]:
    named = environment.tiles_file()
    return read_tiles(Path(named)) if named else {}


def write_tiles(path: Path, tiles: dict[Kind, Tiles | HopperTiles]) -> None:
    lines = [json.dumps({"kind": asdict(kind), "tiles": asdict(shape)}) for kind, shape in tiles.items()]
    path.write_text("".join(line + "\n" for line in lines))


def read_tiles(path: Path) -> dict[Kind, Tiles | HopperTiles]:
    """What `write_tiles` wrote."""
    found: dict[Kind, Tiles | HopperTiles] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry: dict[str, dict[str, Any]] = json.loads(line)
            kind = Kind(**entry["kind"])
            found[kind] = (HopperTiles if kind.kernel == "hopper forward" else Tiles)(**entry["tiles"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}, names no tiles ({error}): write the file anew with bench tune"
            ) from error
    return found


def _measured() -> dict[Kind, Tiles | HopperTiles]:
    # kernel -> bytes of an element -> largest padded head dim -> (own, walk, warps, stages), and another one if causal
    plain: dict[str, dict[int, dict[int, tuple[tuple[int, int, int, int], ...]]]] = {
        "forward": {
            2: {64: ((128, 64, 8, 3), (128, 64, 4, 3)), 128: ((128, 128, 8, 3),), 256: ((64, 64, 4, 2),)},
            4: {64: ((64, 32, 4, 2),), 128: ((64, 32, 4, 2),), 256: ((32, 32, 4, 1),)},
        },
        "dkdv": {
            2: {64: ((128, 32, 4, 3), (64, 64, 4, 2)), 128: ((128, 64, 8, 2),), 256: ((64, 32, 4, 1),)},
            4: {64: ((32, 32, 4, 1),), 128: ((32, 32, 4, 1),), 256: ((16, 16, 4, 1),)},
        },
        "dq": {
            2: {64: ((128, 64, 8, 3), (64, 64, 4, 2)), 128: ((128, 64, 8, 3),), 256: ((64, 32, 4, 1),)},
            4: {64: ((32, 32, 4, 1),), 128: ((32, 32, 4, 1),), 256: ((16, 16, 4, 1),)},
        },
    }
    table: dict[Kind, Tiles | HopperTiles] = {
        Kind(kernel, itemsize, head_dim, is_causal): Tiles(*shapes[is_causal and len(shapes) > 1])
        for kernel, by_itemsize in plain.items()
        for itemsize, by_head_dim in by_itemsize.items()
        for head_dim, shapes in by_head_dim.items()
        for is_causal in (False, True)
    }
    hopper = {
        (64, False): HopperTiles(3, 2, 160, ordered=True),
        (64, True): HopperTiles(2, 3, 232, ordered=True),
        (128, False): HopperTiles(2, 2, 240, ordered=True),
        (128, True): HopperTiles(2, 2, 240, ordered=True),
        (256, False): HopperTiles(2, 2, 240, ordered=True),
        (256, True): HopperTiles(2, 2, 240, ordered=True),
    }
    for (head_dim, is_causal), shape in hopper.items():
        table[Kind("hopper forward", 2, head_dim, is_causal)] = shape
    return table


MEASURED = _measured()
