"""Peak memory of forward and backward on the CPU at several lengths, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from dilated_attention_pytorch.measuring import peak_resident

SEGMENTS, RATES, HEADS, HEAD_DIM = (2048, 4096, 8192), (1, 2, 4), 4, 64


def print_memory(lengths: Sequence[int]) -> None:
    """A table of peak memory by sequence length, with the floor that forward and backward must hold."""
    from dilated_attention_pytorch.core.pattern import training_bytes

    print(f"eager, CPU, float32, forward + backward, H={HEADS}, D={HEAD_DIM}, segments {SEGMENTS}, rates {RATES}")
    print(f"{'tokens':>10} {'peak MiB':>10} {'floor MiB':>10} {'bytes/token':>12} {'growth':>8} {'of tokens':>10}")
    before: tuple[int, int] | None = None
    for tokens in lengths:
        peak = _in_new_process(tokens)
        floor = training_bytes(tokens, HEADS, HEAD_DIM, itemsize=4)
        row = f"{tokens:>10,} {peak / 2**20:>10,.0f} {floor / 2**20:>10,.0f} {peak / tokens:>12,.0f}"
        if before is not None:
            row += f" {peak / before[1]:>7.2f}x {tokens / before[0]:>9.2f}x"
        print(row, flush=True)
        before = tokens, peak


def _in_new_process(tokens: int) -> int:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(peak_bytes, (tokens,))


def peak_bytes(tokens: int) -> int:
    """What this process's memory grows by, inputs included, while it attends over `tokens`."""
    import torch

    from dilated_attention_pytorch.functional import dilated_attention

    before = peak_resident()
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    out = dilated_attention(q, k, v, SEGMENTS, RATES, is_causal=True, backend="eager")
    out.backward(torch.ones_like(out))
    return peak_resident() - before
