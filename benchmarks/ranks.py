"""The suite `ranks`: bytes that ranks receive under each scheme, counted and by formula, and times.

Each number of ranks is a launch of torchrun: gloo on the CPU, NCCL where there are as many GPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import wait_for
from benchmarks.processes import run_on_ranks
from benchmarks.suite import Options, Record, Suite, Table, Verdict, append_line, by_machine
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.parallel import ranks_of, sharded_dilated_attention
from dilated_attention_pytorch.parallel.schemes import branch_traffic
from dilated_attention_pytorch.parallel.sharding import Shards
from dilated_attention_pytorch.parallel.wire import wires_of

RANKS = (2, 4)
TOKENS = {"cuda": 1_048_576, "cpu": 4096}
SHAPE = {"cuda": (8, 64, "bfloat16"), "cpu": (4, 64, "float32")}  # heads, head_dim, dtype
SCHEMES = ("gather", "ring", "all_to_all")
DENSE = "dense ring"  # the ring over one undilated segment: ring attention, for comparison
_REPEATS = 3


def _setup(options: Options) -> list[tuple[int, int]]:
    """Numbers of ranks and tokens."""
    device = options.device
    counts = [count for count in RANKS if device == "cpu" or count <= torch.cuda.device_count()]
    if not counts:
        raise ValueError(f"ranks need {RANKS[0]} GPUs, and there are {torch.cuda.device_count()}: pass --device cpu")
    return list(product(counts, options.tokens or [TOKENS[device]]))


def _launch(case: tuple[int, int], options: Options) -> Iterator[Record]:
    """The records of a launch of torchrun, one per scheme."""
    count, tokens = case
    threads = max(1, (os.cpu_count() or 1) // count)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "lines.jsonl"
        run_on_ranks(count, "benchmarks.ranks", options.device, str(tokens), str(results), threads=threads)
        yield from map(json.loads, results.read_text().splitlines())


def _measure(device: str, tokens: int, scheme: str) -> Record:
    """One scheme on the ranks of the default group; the same line on every rank."""
    ranks = ranks_of()
    heads, head_dim, dtype = SHAPE[device]
    dense = scheme == DENSE
    # A branch inside the shards, of which nothing travels, and one over the whole sequence.
    segments, rates = ([tokens], [1]) if dense else ([tokens // 8, tokens], [1, 4])
    shards = Shards.cut(tokens, ranks.size)
    mine = (1, shards.tokens_of(ranks.rank), heads, head_dim)
    q, k, v = (torch.randn(mine, dtype=getattr(torch, dtype), device=device, requires_grad=True) for _ in range(3))

    def step() -> float:
        """Milliseconds of forward and backward on the slowest rank."""
        dist.barrier()
        wait_for(device)
        began = time.perf_counter()
        chosen: Any = "ring" if dense else scheme
        out = sharded_dilated_attention(q, k, v, segments, rates, scheme=chosen, shard_lengths=shards.lengths)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        wait_for(device)
        taken = torch.tensor([(time.perf_counter() - began) * 1e3], device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    step()
    ranks.traffic.clear()
    step()
    line: Record = {
        "ranks": ranks.size, "cores": os.cpu_count(), "scheme": scheme, "tokens": tokens,
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


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        words = (
            f"{machine}. One attention layer, {mine[0]['heads']} heads of {mine[0]['head_dim']} in {mine[0]['dtype']}, "
            "one branch inside the shards and one with rate 4 over the whole sequence; `dense ring` is the ring over "
            "one undilated segment. Bytes are those that a rank receives in one pass, counted on the ranks and by the "
            "formulas of `parallel.schemes`. Times are of forward and backward on the slowest rank"
        )
        if machine.startswith("CPU"):
            words += f". All ranks share {mine[0]['cores']} CPU cores, so times say nothing about ranks on their own"
        head = ["ranks", "tokens", "scheme", "forward, MiB", "formula, MiB", "backward, MiB", "formula, MiB", "ms"]
        table = Table("Across ranks: bytes and times", [words + "."], head)
        for x in mine:  # bytes of the rank that receives most
            names = ("forward", "forward_formula", "backward", "backward_formula")
            sizes = [f"{max(x[name]) / 2**20:.3f}" for name in names]
            table.rows.append([str(x["ranks"]), f"{x['tokens']:,}", x["scheme"], *sizes, f"{x['milliseconds']:.1f}"])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    for stage in ("forward", "backward"):
        off = [x for x in records if x[stage] != x[f"{stage}_formula"]]
        schemes = ", ".join(dict.fromkeys(x["scheme"] for x in off)) or "none"
        yield Verdict(not off, f"{stage}: counted bytes are those of the formulas; schemes that differ: {schemes}")


SUITE = Suite(
    name="ranks",
    about="bytes that two and four ranks receive under each scheme, counted and by formula, and times",
    flags=("device", "tokens"),
    setup=_setup,
    measure=_launch,
    tables=_tables,
    verdict=_verdict,
    key=("ranks", "tokens", "scheme"),
)


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
