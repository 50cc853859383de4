"""Compile the plain kernels for compute capability 9.0.

An argument is a case, `HEAD_DIM,MASK,PATTERN,BLOCK_SIZE`, and `,packed` for documents with lengths. The pattern is one
of blocks, `dense`, or `short`: dense, and computed in one launch.
"""

from __future__ import annotations

import sys

import torch

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64"}


class CompilesInstead:
    """A kernel that compiles where it would be launched."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps=4, num_stages=3, launch_pdl=False, **constants) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        place = {name: (i,) for i, name in enumerate(self.arg_names)}
        constants |= {name: None for name, x in zip(self.arg_names, arguments) if x is None}
        types = {name: type_of(x) for name, x in zip(self.arg_names, arguments)}
        special = {one.name for one in self.kernel.params if not one.do_not_specialize}
        aligned = {
            place[name]: [["tt.divisibility", 16]]
            for name, x in zip(self.arg_names, arguments)
            if isinstance(x, torch.Tensor) or (name in special and isinstance(x, int) and x % 16 == 0)
        }
        signature = types | dict.fromkeys(constants, "constexpr")
        source = ASTSource(self.kernel, signature, {place[name]: x for name, x in constants.items()}, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert len(compiled.asm["cubin"]) > 0
        print(self.kernel.__name__, "mma" if "mma" in compiled.asm["ptx"] else "plain", flush=True)


def compile_instead(module, name: str) -> None:
    if not isinstance(getattr(module, name), CompilesInstead):
        setattr(module, name, CompilesInstead(getattr(module, name)))


def run_cases(main) -> None:
    for case in sys.argv[1:]:
        print(case, flush=True)
        main(*case.split(","))


def type_of(argument) -> str:
    """As Triton's front end writes types."""
    if isinstance(argument, torch.Tensor):
        return "*" + TYPES[argument.dtype]
    return "i32" if isinstance(argument, int) else "fp32"


def main(head_dim: str, mask: str, pattern: str, block_size: str, lengths: str = "whole") -> None:
    from dilated_attention_pytorch.core.block_layout import layout_of
    from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
    from dilated_attention_pytorch.core.call import Call, Inputs, Saved
    from dilated_attention_pytorch.core.spec import DilatedSpec
    from dilated_attention_pytorch.kernels.triton import documents, engine, short

    for name in ("_work_lists_kernel", "_clear_kernel"):
        compile_instead(documents, name)
    for name in ("forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"):
        compile_instead(engine, name)
    for name in ("forward_kernel", "dkdv_kernel", "dq_kernel"):
        compile_instead(short, name)
    config = None
    if pattern not in ("dense", "short"):
        config = SparsePatternConfig(pattern, sparsity_ratio=0.25, block_size=int(block_size))
    segment = 1024 if pattern != "dense" else 1000  # of no multiple of a tile's rows
    call = Call(spec=DilatedSpec.of([segment], [1]), is_causal=mask == "causal", sparse=config)
    q, k, v, do = (torch.zeros(1, 1024, heads, int(head_dim), dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    spans = None if lengths == "whole" else torch.tensor([[0, 300], [300, 1000]])
    layout = None if config is None else layout_of(call, q, k, None, spans)
    inputs = Inputs(q, k, v, spans, layout=layout)
    out, lse = engine.Triton().partial(call, inputs)
    engine.Triton().gradients(call, Saved(inputs, out, lse), do, None)


if __name__ == "__main__":
    run_cases(main)
