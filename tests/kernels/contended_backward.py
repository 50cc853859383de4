"""Two backward passes beside a kernel that holds multiprocessors: HELD dense|kept TRIES. Prints how many tries ended.

On each try a kernel holds HELD multiprocessors, a backward pass starts on a stream of normal priority on those that are
left, and a second one waits on a stream of high priority. Then the held multiprocessors come free. NCCL's kernels hold
multiprocessors in the same way. Both passes must end, with the gradients that they give alone.
"""

from __future__ import annotations

import sys
import time

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.functional import dilated_attention

TOKENS = 131_072


@gluon.jit
def hold_kernel(Started, Released):
    """Hold a multiprocessor until released: with this much shared memory no backward program fits beside it."""
    held = gl.allocate_shared_memory(gl.int32, [256, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    held.index(0).store(gl.zeros([128], gl.int32, layout))
    gl.atomic_add(Started, 1)
    while gl.atomic_add(Released, 0, sem="acquire", scope="gpu") == 0:
        pass
    gl.atomic_add(Started, gl.sum(held.index(0).load(layout), 0))  # else the compiler would drop the memory


class Contender:
    """One backward pass on a stream of its own."""

    def __init__(self, priority: int, heads: int, sparse_config: SparsePatternConfig | None) -> None:
        self.stream = torch.cuda.Stream(priority=priority)
        with torch.cuda.stream(self.stream):  # where autograd runs the backward of this forward
            shape = (1, TOKENS, heads, 64)
            self.inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)]
            self.out = dilated_attention(*self.inputs, [TOKENS], [1], is_causal=True, sparse_config=sparse_config)
            self.grad_out = torch.randn_like(self.out)
            self.alone = self.backward()
        torch.cuda.synchronize()

    def backward(self) -> tuple[torch.Tensor, ...]:
        with torch.cuda.stream(self.stream):
            return torch.autograd.grad(self.out, self.inputs, self.grad_out, retain_graph=True)


def contend(
    held: int, holder: torch.cuda.Stream, side: torch.cuda.Stream, normal: Contender, urgent: Contender
) -> None:
    seen, one = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.ones(1, dtype=torch.int32).pin_memory()
    started, released = torch.zeros(2, 1, dtype=torch.int32, device="cuda").unbind(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(holder):
        hold_kernel[(held,)](started, released, num_warps=4)
    while seen.item() < held:
        with torch.cuda.stream(side):
            seen.copy_(started, non_blocking=True)
        side.synchronize()
    found = normal.backward(), urgent.backward()
    time.sleep(0.05)  # until the first pass has taken what is free
    with torch.cuda.stream(side):
        released.copy_(one, non_blocking=True)  # by the copy engine, which needs no multiprocessor
    torch.cuda.synchronize()
    for contender, grads in zip((normal, urgent), found):
        assert all(torch.equal(x, alone) for x, alone in zip(grads, contender.alone))


def main(held: str, kind: str, tries: str) -> None:
    sparse_config = None
    if kind == "kept":
        sparse_config = SparsePatternConfig("dilated_sparse", sparsity_ratio=0.1, block_size=128)
    pairs = [(Contender(0, heads, sparse_config), Contender(-1, heads, sparse_config)) for heads in (1, 2)]
    # Made once: PyTorch hands out 32 streams in turn, and a try whose `side` is that of a backward pass never ends.
    holder, side = torch.cuda.Stream(), torch.cuda.Stream()
    for attempt in range(int(tries)):
        contend(int(held), holder, side, *pairs[attempt % 2])
        print(attempt + 1, "ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
