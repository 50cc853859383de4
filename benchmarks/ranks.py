"""The suite `ranks`: bytes that ranks receive under each scheme, counted beside their formulas, and times.

Each number of ranks is a launch of torchrun: gloo on the CPU, NCCL where there are as many GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import machine
from benchmarks.results import describe
from benchmarks.runner import append_line
from benchmarks.training_tables import markdown_row
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.parallel import ranks_of, sharded_dilated_attention
from dilated_attention_pytorch.parallel.costs import branch_traffic
from dilated_attention_pytorch.parallel.sharding import Shards
from dilated_attention_pytorch.parallel.wire import wires_of

RANKS = (2, 4)
TOKENS = {"cuda": 1_048_576, "cpu": 4096}
SHAPE = {"cuda": (8, 64, "bfloat16"), "cpu": (4, 64, "float32")}  # heads, head_dim, dtype
SCHEMES = ("gather", "ring", "all_to_all")
DENSE = "dense ring"  # the ring over one undilated segment: ring attention, for comparison
COLUMNS = [
    "ranks", "tokens", "scheme", "forward, MiB", "formula, MiB", "backward, MiB", "formula, MiB", "ms",
]  # fmt: skip
_REPEATS = 3


def run_ranks(device: str, tokens: int | None = None, out: Path | None = None) -> None:
    """Print a Markdown table, one row per scheme, and append one JSON line per row to `out`."""
    counts = [count for count in RANKS if device == "cpu" or count <= torch.cuda.device_count()]
    if not counts:
        raise ValueError(f"ranks need {RANKS[0]} GPUs, and there are {torch.cuda.device_count()}: say --device cpu")
    found = machine(device)
    append_line(out, {"machine": found})
    print(describe(found))
    print(f"\n{markdown_row(COLUMNS)}\n|{'---|' * len(COLUMNS)}")
    for count in counts:
        for line in _launch(count, device, tokens or TOKENS[device]):
            append_line(out, line)
            print(markdown_row(ranks_row(line)), flush=True)


def ranks_row(line: dict[str, Any]) -> list[str]:
    """Bytes of the rank that receives most."""
    names = ("forward", "forward_formula", "backward", "backward_formula")
    sizes = [f"{max(line[name]) / 2**20:.3f}" for name in names]
    return [str(line["ranks"]), f"{line['tokens']:,}", line["scheme"], *sizes, f"{line['milliseconds']:.1f}"]


def _launch(count: int, device: str, tokens: int) -> list[dict[str, Any]]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "lines.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
        done = subprocess.run(
            [*command, "benchmarks.ranks", device, str(tokens), str(results)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise OSError(f"{count} ranks ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in results.read_text().splitlines()]


def _measure(device: str, tokens: int, scheme: str) -> dict[str, Any]:
    """One scheme on the ranks of the default group; the same line on every rank."""
    ranks = ranks_of()
    heads, head_dim, dtype = SHAPE[device]
    dense = scheme == DENSE
    # A branch inside the shards, of which nothing travels, and one over the whole sequence.
    segments, rates = ([tokens], [1]) if dense else ([tokens // 8, tokens], [1, 4])
    shards = Shards.cut(tokens, ranks.size)
    mine = (1, shards.tokens_of(ranks.rank), heads, head_dim)
    q, k, v = (torch.randn(mine, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in range(3))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step() -> float:
        """Milliseconds of forward and backward on the slowest rank."""
        dist.barrier()
        wait()
        began = time.perf_counter()
        chosen: Any = "ring" if dense else scheme
        out = sharded_dilated_attention(q, k, v, segments, rates, scheme=chosen, shard_lengths=shards.lengths)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        wait()
        taken = torch.tensor([(time.perf_counter() - began) * 1e3], device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    step()
    ranks.traffic.clear()
    step()
    line: dict[str, Any] = {
        "suite": "ranks", "ranks": ranks.size, "cores": os.cpu_count(), "scheme": scheme, "tokens": tokens,
        "heads": heads, "head_dim": head_dim, "dtype": dtype, "segment_lengths": segments, "dilation_rates": rates,
    }  # fmt: skip
    call = Call(spec=DilatedSpec.of(segments, rates))
    wires = list(wires_of(call, shards, [(range(1), 0, tokens)], heads, heads, head_dim, q.element_size()))
    for stage in ("forward", "backward"):
        counted = sum(traffic.received for (name, _), traffic in ranks.traffic.items() if name == stage)
        everyone: list[Any] = [None] * ranks.size
        dist.all_gather_object(everyone, counted)
        line[stage] = everyone
        line[f"{stage}_formula"] = [
            sum(
                branch_traffic("ring" if dense else scheme, wire, shared, rank, backward=stage == "backward").received
                for _, shared, wire in wires
            )
            for rank in range(ranks.size)
        ]
    return line | {"milliseconds": statistics.median(step() for _ in range(_REPEATS))}


def _main(device: str, tokens: str, results: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    for scheme in (*SCHEMES, DENSE):
        line = _measure(device, int(tokens), scheme)
        if dist.get_rank() == 0:
            append_line(Path(results), line)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
