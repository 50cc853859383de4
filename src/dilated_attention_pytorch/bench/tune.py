"""Finding the best tiles on this GPU: every candidate of a kernel in its turn, timed in a whole call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from dilated_attention_pytorch.bench.contenders import ours
from dilated_attention_pytorch.bench.harness import Case, measure
from dilated_attention_pytorch.bench.suites import SIZES, USUAL
from dilated_attention_pytorch.kernels.triton import tuning
from dilated_attention_pytorch.kernels.triton.tuning import HopperTiles, Kind, Tiles, write_tiles

Shape = Tiles | HopperTiles


def candidates(kernel: str) -> list[Shape]:
    """Shapes worth trying; those that a GPU has no room for fail to compile, and drop out."""
    if kernel == "hopper forward":
        return [
            HopperTiles(consumers, stages, registers, ordered)
            for (consumers, registers), stages, ordered in itertools.product(
                ((2, 240), (3, 160)), (2, 3), (False, True)
            )
        ]
    sizes = (32, 64, 128)
    return [Tiles(*shape) for shape in itertools.product(sizes[1:], sizes, (4, 8), (2, 3, 4))]


def tune(out: Path) -> None:
    """Time all candidates, print the best beside the table's, and write them to `out`."""
    if not torch.cuda.is_available():
        raise ValueError("tune measures kernels on a GPU, and PyTorch finds none: run it where one is")
    hopper = torch.cuda.get_device_capability()[0] == 9
    kernels = ["forward", "dkdv", "dq", *(["hopper forward"] if hopper else [])]
    best: dict[Kind, Shape] = {}
    for (head_dim, heads), causal, kernel in itertools.product(SIZES, (False, True), kernels):
        case = Case(
            tokens=65_536, heads=heads, head_dim=head_dim, is_causal=causal, backward=kernel in ("dkdv", "dq"), **USUAL
        )
        kind = Kind(kernel, 2, head_dim, causal)
        best[kind] = fastest(kind, lambda shape, kind=kind, case=case: milliseconds(kind, shape, case))  # type: ignore[misc]
        print(f"{kind}: {best[kind]}, in the table {tuning.MEASURED[kind]}", flush=True)
        write_tiles(out, best)


def fastest(kind: Kind, time: Callable[[Shape], float]) -> Shape:
    """The candidate, or the table's own shape, that takes the least time."""
    shapes = list(dict.fromkeys([tuning.MEASURED[kind], *candidates(kind.kernel)]))
    times: dict[Shape, float] = {}
    for shape in tqdm(shapes, desc=f"{kind.kernel} D={kind.head_dim}{' causal' if kind.is_causal else ''}"):
        try:
            times[shape] = time(shape)
        except Exception as error:  # a shape that does not fit raises whatever the compiler raises
            tqdm.write(f"{shape}: {type(error).__name__}")
    if not times:
        raise RuntimeError(f"no candidate for {kind} ran: the kernels do not work on this GPU")
    return min(times, key=lambda shape: times[shape])


def milliseconds(kind: Kind, shape: Shape, case: Case) -> float:
    """A call's time with this shape for one kernel and the usual ones for the others."""
    from dilated_attention_pytorch.kernels.triton import plan

    kernels = plan.KERNELS
    try:
        plan.KERNELS = "best" if kind.kernel == "hopper forward" else "plain"
        plan.forget()
        ready = ours("triton")(case)
        assert not isinstance(ready, str)
        with ready.settings, tuning.trying(kind, shape):
            return measure(ready.call, "cuda", seconds=0.1).median
    finally:
        plan.KERNELS = kernels
        plan.forget()
