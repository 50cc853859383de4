"""The suite `first`: the first training call of a process, whose kernels must be compiled.

Each case is measured in a new process with an empty cache folder of Triton's, and then in another one with the folder
that the first has filled.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.harness import wait_for
from benchmarks.processes import run_module
from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine
from dilated_attention_pytorch.functional import dilated_attention

SEGMENTS, RATES = (2048, 4096, 8192), (1, 2, 4)
SIZES = {"cpu": (1024, 2), "cuda": (32_768, 12)}  # tokens and heads
SECONDS = {"bfloat16": 8.0, "float32": 15.0}  # what to reach on a GPU
HEAD_DIMS = (64, 128)


def _measure(case: tuple[str, int], options: Options) -> Iterator[Record]:
    dtype, head_dim = case
    tokens, heads = SIZES[options.device]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("benchmarks.first", options.device, dtype, str(head_dim))
        empty, filled = (json.loads(run_module(*arguments, TRITON_CACHE_DIR=folder)) for _ in range(2))
        kernels = sum(1 for _ in Path(folder).rglob("*.cubin"))
    yield {
        "device": options.device, "dtype": dtype, "head_dim": head_dim, "tokens": tokens, "heads": heads,
        "cores": os.cpu_count(), "kernels": kernels, "seconds": empty["first"], "filled_seconds": filled["first"],
        "milliseconds": empty["later"] * 1e3,
    }  # fmt: skip


def _main(device: str, dtype: str, head_dim: str) -> None:
    """Seconds of the first call and of one like it, without imports and the start of the GPU."""
    tokens, heads = SIZES[device]
    shape = (1, tokens, heads, int(head_dim))
    q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in range(3))
    # What a training step needs of PyTorch anyhow: its own kernels, and autograd's threads.
    torch.ones(8, dtype=q.dtype, device=device, requires_grad=True).square().mean().backward()

    def train() -> float:
        wait_for(device)
        began = time.perf_counter()
        # Not by torch.autograd.grad, which imports PyTorch's symbolic shapes to compare those of a stated gradient.
        dilated_attention(q, k, v, SEGMENTS, RATES, is_causal=True).square().mean().backward()
        wait_for(device)
        return time.perf_counter() - began

    print(json.dumps({"first": train(), "later": train()}))


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        words = f"{machine}, {mine[0]['cores']} cores. Forward and backward of one call, N={mine[0]['tokens']:,}, "
        words += f"H={mine[0]['heads']}, segments {SEGMENTS}, rates {RATES}, causal, in a new process. `empty` and "
        words += "`filled` is Triton's cache folder before the call; imports and the start of the GPU do not count."
        head = ["dtype", "D", "kernels", "empty, s", "filled, s", "a later call, ms"]
        table = Table("The first training call", [words], head)
        for x in mine:
            times = [f"{x['seconds']:.2f}", f"{x['filled_seconds']:.2f}", f"{x['milliseconds']:.2f}"]
            table.rows.append([x["dtype"], str(x["head_dim"]), str(x["kernels"]), *times])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    for dtype, most in SECONDS.items():
        mine = [x for x in records if x["dtype"] == dtype and x["device"] == "cuda"]
        if mine:
            worst = max(mine, key=lambda x: x["seconds"])
            text = f"the first training call in {dtype} takes at most {most:g} s in an empty folder; at most "
            yield Verdict(worst["seconds"] <= most, text + f"{worst['seconds']:.1f} s (D={worst['head_dim']})")


SUITE = Suite(
    name="first",
    about="the first training call of a process, with an empty cache folder and a filled one; targets are for a GPU",
    flags=("device",),
    setup=lambda options: list(itertools.product(SECONDS, HEAD_DIMS)),
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("dtype", "head_dim"),
)


if __name__ == "__main__":
    _main(*sys.argv[1:])
