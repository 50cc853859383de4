"""Tile shapes, measured per kernel, head dim and dtype."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Rows a program owns, rows it walks at a time, and the compiler's two knobs."""

    own: int
    walk: int
    num_warps: int
    num_stages: int


def tiles_for(kernel: str, block_d: int, itemsize: int, rows: int, is_causal: bool) -> Tiles:
    """The measured shape, made no larger than a segment's `rows` need."""
    measured = _MEASURED[kernel][2 if itemsize < 4 else 4]
    shapes = measured[min(size for size in measured if size >= block_d)]
    own, walk, warps, stages = shapes[is_causal and len(shapes) > 1]
    needed = max(16, 1 << (rows - 1).bit_length())
    return Tiles(min(own, needed), min(walk, needed), warps if own <= needed else 4, stages)


Shape = tuple[int, int, int, int]

# kernel -> bytes of an element -> largest padded head dim -> (own, walk, warps, stages), and another one if causal
_MEASURED: dict[str, dict[int, dict[int, tuple[Shape, ...]]]] = {
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
