"""`bench tune`: time every candidate for the kernels' tiles on this GPU, each in a whole call, and write the best."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from dilated_attention_pytorch.core import plans
from dilated_attention_pytorch.core.call import Call, Inputs
from dilated_attention_pytorch.core.resources import NO_RESOURCES
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.kernels.triton import tuning
from dilated_attention_pytorch.kernels.triton.compiling import compile_launches
from dilated_attention_pytorch.kernels.triton.engine import Triton
from dilated_attention_pytorch.kernels.triton.tuning import HopperTiles, Kind, Tiles, write_tiles
from dilated_attention_pytorch.measuring import measure

Shape = Tiles | HopperTiles
# No branch is folded into another one: such branches run in other shapes than those that are tried.
_TOKENS, _SPEC = 65_536, DilatedSpec.of((2048, 4096, 8192), (1, 3, 6))
_HEADS = {64: 12, 128: 16}  # by head dim


def candidates(kernel: str) -> list[Shape]:
    """Shapes worth trying. Those that do not fit on a GPU fail to compile and drop out."""
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
    """Time all candidates, print the best one beside the built-in one, and write the best ones to `out`."""
    if not torch.cuda.is_available():
        raise ValueError("tune measures kernels on a GPU, and PyTorch finds none: run it on a machine with a GPU")
    hopper = torch.cuda.get_device_capability()[0] == 9
    kernels = ["forward", "dkdv", "dq", *(["hopper forward"] if hopper else [])]
    best: dict[Kind, Shape] = {}
    for head_dim, is_causal, kernel in itertools.product(_HEADS, (False, True), kernels):
        kind = Kind(kernel, 2, head_dim, is_causal)
        shapes = list(dict.fromkeys([tuning.MEASURED[kind], *candidates(kernel)]))
        print(f"{kind}: compiling {len(shapes)} shapes", flush=True)
        compile_shapes(kind, shapes)
        run = attention(kind)
        best[kind] = fastest(kind, shapes, lambda shape, kind=kind, run=run: milliseconds(kind, shape, run))  # type: ignore[misc]
        print(f"{kind}: {best[kind]}, built in {tuning.MEASURED[kind]}", flush=True)
        write_tiles(out, best)


def compile_shapes(kind: Kind, shapes: Sequence[Shape]) -> None:
    """Compile the kernel in all shapes, side by side."""
    call, q = _call(kind), torch.empty(_shape(kind), dtype=torch.bfloat16, device="meta")
    engine = Triton()

    def passes() -> None:
        for shape in shapes:
            with contextlib.suppress(Exception), _running_as(kind, shape):  # measuring it says why
                engine.passes(call, Inputs(q, q, q), backward=_is_of_backward(kind))

    compile_launches(passes, ignore_errors=True)


def fastest(kind: Kind, shapes: Sequence[Shape], time: Callable[[Shape], float]) -> Shape:
    """The shape that takes the least time."""
    times: dict[Shape, float] = {}
    for shape in shapes:
        try:
            times[shape] = time(shape)
        except Exception as error:  # a shape that does not fit raises whatever the compiler raises
            print(f"{shape}: {type(error).__name__}", flush=True)
    if not times:
        raise RuntimeError(f"no candidate for {kind} ran: the kernels do not work on this GPU")
    return min(times, key=lambda shape: times[shape])


def attention(kind: Kind) -> Callable[[], object]:
    """A call that runs the kernel: forward, and backward where the kernel is of the backward."""
    from dilated_attention_pytorch.kernels.op import attend

    call = _call(kind)
    q, k, v, do = (torch.randn(_shape(kind), dtype=torch.bfloat16, device="cuda") for _ in range(4))

    def forward() -> torch.Tensor:
        out = attend(call, Inputs(q, k, v), NO_RESOURCES)
        assert isinstance(out, torch.Tensor)
        return out

    if not _is_of_backward(kind):
        return forward
    inputs = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(forward(), inputs, do)


def milliseconds(kind: Kind, shape: Shape, run: Callable[[], object]) -> float:
    """The time of a call with this shape for one kernel and the usual ones for the others."""
    with _running_as(kind, shape):
        return measure(run, "cuda", seconds=0.1).median


def _call(kind: Kind) -> Call:
    return Call(spec=_SPEC, is_causal=kind.is_causal, backend="triton")


def _shape(kind: Kind) -> tuple[int, int, int, int]:
    return 1, _TOKENS, _HEADS[kind.head_dim], kind.head_dim


def _is_of_backward(kind: Kind) -> bool:
    return kind.kernel in ("dkdv", "dq")


@contextlib.contextmanager
def _running_as(kind: Kind, shape: Shape) -> Iterator[None]:
    """Plan calls with this shape for one kernel; plans from before and from here are forgotten."""
    from dilated_attention_pytorch.kernels.triton import plan

    kernels = plan.KERNELS
    try:
        plan.KERNELS = "best" if kind.kernel == "hopper forward" else "plain"
        plans.get_global_pattern_cache().forget("plan")
        with tuning.trying(kind, shape):
            yield
    finally:
        plan.KERNELS = kernels
        plans.get_global_pattern_cache().forget("plan")
