"""The suite `decode`: time per token over context length, and a prompt in chunks against one forward."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import compare, machine, measure
from benchmarks.results import describe
from benchmarks.runner import append_line
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"segment_lengths": (256, 512, 1024), "dilation_rates": (1, 2, 4), "num_heads": 4, "dtype": torch.float32},
    "cuda": {
        "segment_lengths": (2048, 4096, 8192),
        "dilation_rates": (1, 2, 4),
        "num_heads": 12,
        "dtype": torch.bfloat16,
    },
}
HEAD_DIM = 64
CONTEXTS = {"cpu": (4096, 16_384, 65_536), "cuda": (32_768, 131_072, 524_288, 1_048_576)}
PROMPTS = {"cpu": 8192, "cuda": 1_048_576}
CHUNKS = {"cpu": (4096, 1500), "cuda": (131_072, 65_536, 50_000)}
_CALLS_A_GRAPH = 50
_TURNS = 5
FLAT, FASTER, CHUNKED = 1.05, 20.0, 1.10  # what to reach on a GPU


def run_decode(device: str, contexts: Sequence[int] = (), out: Path | None = None) -> None:
    """Print the tables, and append a JSON line for each of their rows to `out`."""
    found = machine(device)
    print(describe(found))
    append_line(out, {"machine": found})
    contexts = sorted(contexts or CONTEXTS[device])
    rows: list[dict[str, Any]] = []
    print(
        f"\n{'microseconds a token, at the end of a segment':<48}{'ours':>10}{'dense SDPA':>12}{'ratio':>8}"
        f"{'cache MiB':>11}"
    )
    for row in _steps(device, contexts):
        rows.append(row)
        print(
            f"context {row['context']:<40,}{row['ours']:>10.1f}{row['dense']:>12.1f}{row['dense'] / row['ours']:>8.2f}"
            f"{row['cache_bytes'] / 2**20:>11.2f}",
            flush=True,
        )
    print(f"\n{'milliseconds for a prompt':<48}{'whole':>10}{'in chunks':>12}{'ratio':>8}")
    for row in _prompts(device, PROMPTS[device]):
        rows.append(row)
        title = f"{row['context']:,} tokens, {row['chunk']:,} at once"
        print(f"{title:<48}{row['whole']:>10.2f}{row['chunked']:>12.2f}{row['ratio']:>8.3f}", flush=True)
    for row in rows:
        append_line(out, {"suite": "decode", **row})
    print(*_verdicts(rows), sep="\n")
    if device == "cpu":
        print("these are the targets of a GPU at 1,048,576 tokens: here an operator's overhead is most of a step")


def _cache(device: str) -> DilatedKVCache:
    return DilatedKVCache(**SHAPES[device], batch=1, head_dim=HEAD_DIM, device=device)


def _tensors(device: str, tokens: int) -> list[Tensor]:
    shape = SHAPES[device]
    return [torch.randn(1, tokens, shape["num_heads"], HEAD_DIM, dtype=shape["dtype"], device=device) for _ in range(3)]


@torch.no_grad()
def _steps(device: str, contexts: Sequence[int]) -> Iterator[dict[str, Any]]:
    calls: list[tuple[int, Callable[[], float], float]] = []
    for context in contexts:
        cache, (q, k, v) = _cache(device), _tensors(device, context)
        largest = max(SHAPES[device]["segment_lengths"])
        # The last token of a segment of every branch sees most.
        full = max(largest, context // largest * largest) - 1
        for start in range(0, full, largest):
            cache.attend(*(x[:, start : min(start + largest, full)] for x in (q, k, v)))
        new = [x[:, -1:].contiguous() for x in (q, k, v)]

        def step(cache: DilatedKVCache = cache, new: list[Tensor] = new) -> None:
            cache.attend(*new)
            cache.lengths.sub_(1)  # the same token again and again

        dense = min(_timer(call, device)() for call in _dense_steps(new[0], k, v, device))
        calls.append((cache.nbytes, _timer(step, device), dense))
    # By turns: a processor's clock changes more within the suite than these times differ.
    turns = [[ours() for _, ours, _ in calls] for _ in range(_TURNS)]
    for context, (nbytes, _, dense), found in zip(contexts, calls, zip(*turns)):
        yield {"context": context, "ours": statistics.median(found), "dense": dense, "cache_bytes": nbytes}


def _dense_steps(query: Tensor, key: Tensor, value: Tensor, device: str) -> Iterator[Callable[[], object]]:
    """One query over a dense cache, by every kernel that PyTorch has for it; the best of them counts."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for kernel in kernels if device == "cuda" else [SDPBackend.FLASH_ATTENTION]:

        def call(kernel: SDPBackend = kernel) -> object:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v)

        try:
            call()
        except RuntimeError:  # not for these tensors
            continue
        yield call


def _timer(run: Callable[[], object], device: str) -> Callable[[], float]:
    """Microseconds of one call; on a GPU of one among many in a captured graph: the host takes no part in the time."""
    if device != "cuda":
        return lambda: measure(run, device, seconds=0.1).median * 1e3
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_A_GRAPH):
            run()

    def replays(kept: object = run) -> float:  # a graph does not keep the tensors that it reads
        return measure(graph.replay, device, seconds=0.1).median * 1e3 / _CALLS_A_GRAPH

    return replays


@torch.no_grad()
def _prompts(device: str, context: int) -> Iterator[dict[str, Any]]:
    shape = SHAPES[device]
    branches = {name: shape[name] for name in ("segment_lengths", "dilation_rates")}
    q, k, v = _tensors(device, context)
    cache = _cache(device)

    def whole() -> object:
        return dilated_attention(q, k, v, **branches, is_causal=True)

    for chunk in CHUNKS[device]:

        def chunked(chunk: int = chunk) -> None:
            cache.reset()
            for start in range(0, context, chunk):
                cache.attend(*(x[:, start : start + chunk] for x in (q, k, v)))

        found = compare(whole, chunked, device)
        yield {"context": context, "chunk": chunk, "whole": found.off, "chunked": found.on, "ratio": found.ratio}


def _verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield ""
    steps = [row for row in rows if "ours" in row]
    spread = max(row["ours"] for row in steps) / min(row["ours"] for row in steps)
    yield f"{_met(spread <= FLAT)}: time a token flat within {FLAT}; slowest over fastest {spread:.3f}"
    faster = steps[-1]["dense"] / steps[-1]["ours"]
    yield (f"{_met(faster >= FASTER)}: {FASTER:.0f}x dense attention; {faster:.1f}x at {steps[-1]['context']:,} tokens")
    for row in rows:
        if "chunk" in row:
            said = f"a prompt in chunks of {row['chunk']:,} at most {CHUNKED} of one forward; {row['ratio']:.3f}"
            yield f"{_met(row['ratio'] <= CHUNKED)}: {said}"


def _met(reached: bool) -> str:
    return "met" if reached else "NOT MET"
