"""Compile for compute capability 9.0 what launches of Hopper kernels would run.

An argument is a case, `forward|backward,HEAD_DIM,MASK`. The mask is `whole`, `causal`, `kept`: causal with a block
layout, `documents`: causal with lengths, `dropped`: causal with dropout, or `folded`, `causal-folded` and
`dropped-folded`: with branches folded into each other.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import torch


class Compiled(Exception):
    """Carries the compiled kernel out of the launch."""


class CompilesInstead:
    """A kernel that compiles where it would be launched."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps, launch_cooperative_grid=False, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        place = {name: (i,) for i, name in enumerate(self.arg_names)}
        absent = {name: None for name, x in zip(self.arg_names, arguments) if x is None}
        types = {name: type_of(x) for name, x in zip(self.arg_names, arguments) if x is not None}
        constants |= absent
        aligned = {place[name]: [["tt.divisibility", 16]] for name, kind in types.items() if kind.startswith("*")}
        signature = types | dict.fromkeys(constants, "constexpr")
        source = GluonASTSource(self.kernel, signature, {place[name]: x for name, x in constants.items()}, aligned)
        options = {"num_warps": num_warps, "launch_cooperative_grid": launch_cooperative_grid}
        raise Compiled(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def type_of(argument) -> str:
    """As Triton's front end writes types."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
    if isinstance(argument, torch.Tensor):
        return "*" + names[argument.dtype]
    if isinstance(argument, (int, float)):
        return "i32" if isinstance(argument, int) else "fp32"
    return f"tensordesc<{names[argument.base.dtype]}{list(argument.block_shape)},{argument.layout!r}>"


def unused_barriers(code: str) -> set[str]:
    """The barriers that no warps get: data would share their memory, see `barriers`."""
    (used,) = re.findall(r"ttg\.warp_specialize\((.*?)\)", code)
    return {*re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\dx1xi64", code)} - {*used.split(", ")}


def main(direction: str, head_dim: str, mask: str) -> None:
    from dilated_attention_pytorch.core.block_layout import BranchLayout
    from dilated_attention_pytorch.core.folding import Fold
    from dilated_attention_pytorch.kernels.triton.hopper import launch

    launch._multiprocessors = lambda device: 132
    for name in ("forward_kernel", "backward_kernel"):
        if not isinstance(getattr(launch, name), CompilesInstead):
            setattr(launch, name, CompilesInstead(getattr(launch, name)))
    shape = (1, 512, 2, int(head_dim))
    query, key, value, out, dq, dk, dv = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(7))
    lse = torch.empty(1, 2, 512)
    seed = torch.zeros(2, dtype=torch.int64)
    branch = SimpleNamespace(
        r=2,
        w=512,
        rows=256,
        heads=range(2),
        slots=1,
        slots_per_row=1,
        offsets=torch.zeros(2, dtype=torch.int32),
        query_offsets=torch.zeros(2, dtype=torch.int32),
        is_causal=mask not in ("whole", "folded"),
        fold=Fold(128, 6, (0, 1)) if "folded" in mask else Fold(),
        continues=True,
        plan=SimpleNamespace(
            documents=3 if mask == "documents" else None,
            drops="dropped" in mask,
            threshold=1 << 29,
            keep_scale=1.1,
            call=SimpleNamespace(head_offset=0, first_position=0),
        ),
    )
    kept = None
    if mask == "kept":
        one = torch.zeros(1, dtype=torch.int32)
        kept = BranchLayout(one, 0, one, one, one, one, one)
    try:
        if direction == "forward":
            lists = () if kept is None else kept.key_lists
            run, _ = launch.forward_launch(query, key, branch, 0.1, kept)
            run(query, key, value, out, lse, branch.offsets, branch.query_offsets, seed, *lists)
        else:
            assert launch.share_out(query, key, branch, 1 << 20)
            workspace = torch.empty(launch.workspace_size(branch.workspace_rows, query.shape[3])[0])
            rows = (query, out, key, value, workspace, lse, lse, dq, dk, dv, workspace)
            lists = () if kept is None else (*kept.query_lists, kept.query_turns, kept.key_first)
            run = launch.backward_launch(query, key, branch, branch.teams[-1], 0.1, workspace, kept)
            run(*rows, branch.offsets, branch.offsets, seed, *lists)
    except Compiled as found:
        (kernel,) = found.args
    assert len(kernel.asm["cubin"]) > 0
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert not unused_barriers(kernel.asm["ttgir"])
    print("compiled", "cooperative" if kernel.metadata.launch_cooperative_grid else "independent")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(case, flush=True)
        main(*case.split(","))
