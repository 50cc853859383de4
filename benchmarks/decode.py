"""The suite `decode`: time per token over context length, and a prompt in chunks against one forward."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import compare, measure
from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine
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
_CALLS_PER_GRAPH = 50
_TURNS = 5
FLAT, FASTER, CHUNKED = 1.05, 20.0, 1.10  # what to reach on a GPU


def _cache(device: str) -> DilatedKVCache:
    return DilatedKVCache(**SHAPES[device], batch=1, head_dim=HEAD_DIM, device=device)


def _tensors(device: str, tokens: int) -> list[Tensor]:
    shape = SHAPES[device]
    return [torch.randn(1, tokens, shape["num_heads"], HEAD_DIM, dtype=shape["dtype"], device=device) for _ in range(3)]


@torch.no_grad()
def _steps(options: Options) -> Iterator[Record]:
    """A token at the end of contexts of several lengths."""
    device = options.device
    contexts = sorted(options.tokens or CONTEXTS[device])
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
    """Microseconds per call; on a GPU, of calls in a captured graph, so that the host plays no part."""
    if device != "cuda":
        return lambda: measure(run, device, seconds=0.1).median * 1e3
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            run()

    def replays(kept: object = run) -> float:  # a graph does not keep the tensors that it reads
        return measure(graph.replay, device, seconds=0.1).median * 1e3 / _CALLS_PER_GRAPH

    return replays


@torch.no_grad()
def _prompts(options: Options) -> Iterator[Record]:
    """A prompt in chunks of several sizes."""
    device = options.device
    shape, context = SHAPES[device], PROMPTS[device]
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


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        steps = Table(
            "Decoding: a token against the bounded cache",
            [f"{machine}. One attention layer. Dense is a query over a cache of all tokens, by PyTorch's best kernel."],
            ["context", "microseconds", "dense, microseconds", "dense/ours", "cache, MiB"],
        )
        prompts = Table(
            "Decoding: a prompt in chunks",
            [f"{machine}. Measured by turns with one forward of the whole prompt."],
            ["tokens", "at once", "whole, ms", "in chunks, ms", "chunks/whole"],
        )
        for x in mine:
            context = f"{x['context']:,}"
            if "chunk" in x:
                times = [f"{x['whole']:.2f}", f"{x['chunked']:.2f}", f"{x['ratio']:.3f}"]
                prompts.rows.append([context, f"{x['chunk']:,}", *times])
            else:
                times = [f"{x['ours']:.1f}", f"{x['dense']:.1f}", f"{x['dense'] / x['ours']:.1f}"]
                steps.rows.append([context, *times, f"{x['cache_bytes'] / 2**20:.2f}"])
        yield steps
        yield prompts


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    """The targets are for a GPU at 1,048,576 tokens. On a CPU, the overhead of operators is most of a step."""
    steps = [record for record in records if "ours" in record]
    spread = max(record["ours"] for record in steps) / min(record["ours"] for record in steps)
    yield Verdict(spread <= FLAT, f"time per token flat within {FLAT}; slowest over fastest {spread:.3f}")
    faster = steps[-1]["dense"] / steps[-1]["ours"]
    at = f"{faster:.1f}x at {steps[-1]['context']:,} tokens"
    yield Verdict(faster >= FASTER, f"{FASTER:.0f}x as fast as dense attention; {at}")
    for x in records:
        if "chunk" in x:
            text = f"a prompt in chunks of {x['chunk']:,} takes at most {CHUNKED} of one forward; {x['ratio']:.3f}"
            yield Verdict(x["ratio"] <= CHUNKED, text)


SUITE = Suite(
    name="decode",
    about="time per token over context length, and prompts in chunks; targets are for a GPU",
    flags=("device", "tokens"),
    setup=lambda options: (_steps, _prompts),
    measure=lambda part, options: part(options),
    tables=_tables,
    verdict=_verdict,
    key=("context", "chunk"),
)
