"""The suite `generate`: milliseconds per token of whole models, against a dense model of the same size.

The context is not read: caches are filled with random rows, and their lengths are set. The floor is the time of reading
the weights once, at the bandwidth of a copy in the same run; a second one adds the rows of a bounded cache that a step
sees. The contexts end where segments end, so a step sees as many rows as it ever does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.harness import free_memory, measure, wait_for
from benchmarks.peers import llama_like
from benchmarks.suite import (
    Options,
    Record,
    Suite,
    Table,
    Verdict,
    branches_in_words,
    by_machine,
    check_names,
    number,
    reason,
    which_branches,
)
from dilated_attention_pytorch.models.captured import evaluating, forget_kept
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import stored_tensors, weights_to_int8
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.train.presets import text_model

OURS, PLAIN, COMPILED, INT8 = "ours", "ours, plain", "ours, compiled", "ours, int8 weights"
LLAMA, BOUNDED = "Hugging Face Llama", "Hugging Face Llama, bounded cache"
MODELS = (OURS, PLAIN, COMPILED, INT8, LLAMA, BOUNDED)
CONTEXTS = (4096, 32_768, 262_144, 1_048_576)
BATCHES = (1, 8, 64)
SLOWEST = {"125m": 0.5, "1.3b": 1.3}  # milliseconds per token of one row on a GPU
MOST_ROWS = ("125m", 64, 40_000)  # and tokens per second of many
BOUNDED_SIZE, SLOWEST_BOUNDED = "8 layers", 2.0  # of width 2,048, whatever sizes are asked for; and milliseconds
FLAT = 1.05
_TINY = ModelConfig(
    vocab_size=64, d_model=32, num_heads=2, num_layers=2, segment_lengths=(64, 256), dilation_rates=(1, 2)
)
_TURNS = 3
_PARITY = 1000  # tokens


@dataclass(frozen=True)
class Trial:
    model: str
    size: str
    batch: int
    context: int
    tokens: int  # that are timed at once


def _setup(options: Options) -> list[Trial]:
    cuda = options.device == "cuda"
    sizes, batches = options.sizes or tuple(SLOWEST), options.batches or BATCHES
    models = options.only or MODELS
    check_names("sizes", sizes, SLOWEST)
    check_names("only", models, MODELS)
    if not cuda:
        sizes, batches = sizes[:1], batches[:1]
    contexts = options.tokens or (CONTEXTS if cuda else (128, 512))
    return [
        Trial(model, size, batch, context, tokens=20 if model == PLAIN or not cuda else 128)
        for model in models
        for size in ((BOUNDED_SIZE,) if model == BOUNDED else sizes)
        for batch in batches
        for context in contexts
    ]


def _measure(trial: Trial, options: Options) -> Iterator[Record]:
    cuda = options.device == "cuda"
    config = _TINY
    if cuda:
        config = text_model("1.3b" if trial.size == BOUNDED_SIZE else trial.size)
    if cuda and trial.size == BOUNDED_SIZE:
        config = replace(config, d_model=2048, num_heads=32, num_layers=8)
    record: Record = {"model": trial.model, "size": trial.size, "batch": trial.batch, "context": trial.context}
    if trial.model != LLAMA:
        # transformers' models have the same branches in every layer
        record["branches"] = branches_in_words(replace(config, stagger=False) if trial.model == BOUNDED else config)
    bandwidth = _bandwidth(options.device)
    torch.manual_seed(0)  # the same untrained weights in every run
    torch._dynamo.reset()  # else a second context would be compiled with dynamic shapes
    try:
        with torch.device(options.device):
            make = _llama if trial.model in (LLAMA, BOUNDED) else _longnet
            model, run, found = make(trial, config, torch.bfloat16 if cuda else None)
        record |= found | _timed(model, run, trial, options.device, bandwidth)
        del model, run
    except torch.OutOfMemoryError:
        record["failed"] = "out of memory"
    except Exception as error:  # a package that is missing or broken must not cost the rest of the run
        record["failed"] = reason(error)
    forget_kept()
    free_memory(options.device)
    yield record


Run = Callable[[int], object]
"""Generates this many tokens; the last one ends the context."""


def _timed(model: nn.Module, run: Run, trial: Trial, device: str, bandwidth: float) -> Record:
    cuda = device == "cuda"
    for tokens in (6, trial.tokens):
        run(tokens)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, compiled = [], counters["stats"]["unique_graphs"]
    for _ in range(_TURNS):
        wait_for(device)
        began = time.perf_counter()
        run(trial.tokens)
        wait_for(device)
        times.append((time.perf_counter() - began) / trial.tokens * 1e3)
    ms = statistics.median(times)
    weights = sum(x.nbytes for x in {x.data_ptr(): x for x in stored_tensors(model)}.values())
    return {
        "ms": ms,
        "recompiled": counters["stats"]["unique_graphs"] - compiled,
        "tokens_per_second": trial.batch / ms * 1e3,
        "kernels": _kernels(run) if cuda else None,
        "weight_bytes": weights,
        "bandwidth": bandwidth,
        "share": weights / bandwidth * 1e3 / ms,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def _longnet(trial: Trial, config: ModelConfig, dtype: torch.dtype | None) -> tuple[nn.Module, Run, Record]:
    model, found = LongNetLM(config, dtype=dtype).eval(), {}
    if trial.model == INT8:
        found = _parity(model)
    if trial.model in (COMPILED, INT8):
        for layer in model.layers:
            layer.compile(fullgraph=True)
    cache = model.new_cache(trial.batch)
    found |= {"kept_bytes": sum(_bytes_seen(held, trial) for held in cache)}
    for held in cache:
        held.keys.normal_()
        held.values.normal_()
    first = torch.zeros(trial.batch, 1, dtype=torch.int64, device=cache[0].keys.device)

    @torch.no_grad()
    def run(tokens: int) -> Tensor:
        for held in cache:
            held.go_on_from(trial.context - tokens)
        if trial.model != PLAIN:
            return model.generate(first, tokens, temperature=0, cache=cache)
        chosen = first
        with evaluating(model):
            for _ in range(tokens):
                chosen = model(chosen, cache=cache)[:, -1:].argmax(-1)
        return chosen

    return model, run, found


def _bytes_seen(cache: DilatedKVCache, trial: Trial) -> float:
    """Of keys and values, at the mean of the tokens that are timed."""
    rows = 0
    for position in range(trial.context - trial.tokens, trial.context):
        for branch in cache.rows.branches:
            row, offset = divmod(position % branch.segment_length, branch.dilation_rate)
            rows += (row + 1) * branch.offsets.count(offset)
    return trial.batch * rows / trial.tokens * 2 * cache.keys[0, 0].nbytes


def _parity(model: LongNetLM) -> Record:
    """Round the weights, and count how many greedy tokens stay the same until the first that does not."""
    device = model.embedding.weight.device
    prompt = torch.arange(64, device=device)[None] % model.config.vocab_size
    most = _PARITY if device.type == "cuda" else 50
    before = model.generate(prompt, most, temperature=0)
    weights_to_int8(model)
    differ = (model.generate(prompt, most, temperature=0) != before)[0, 64:]
    return {"parity": int(differ.int().argmax()) if bool(differ.any()) else most, "parity_of": most}


def _llama(trial: Trial, config: ModelConfig, dtype: torch.dtype | None) -> tuple[nn.Module, Run, Record]:
    """A Llama of the same width, depth and heads with a compiled step, and its own static cache or a bounded one."""
    from transformers import Cache, LlamaForCausalLM, StaticCache

    from dilated_attention_pytorch.models.hf import DilatedCache, dilated_cache, use_dilated_attention

    shape = llama_like(config, trial.context)
    if trial.model == BOUNDED:
        use_dilated_attention(shape, **config.spec.keywords)
    model = LlamaForCausalLM(shape).to(dtype).eval()
    device, kv_heads = model.lm_head.weight.device, config.num_kv_heads or config.num_heads
    first = torch.zeros(trial.batch, 1, dtype=torch.int64, device=device)
    if trial.model == BOUNDED:
        cache: Cache = dilated_cache(model, trial.batch)
    else:
        cache = StaticCache(shape, max_cache_len=trial.context)
        cache.early_initialization(trial.batch, kv_heads, config.head_dim, model.dtype, device)
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if device.type == "cuda" else model

    @torch.no_grad()
    def run(tokens: int) -> Tensor:
        begin = trial.context - tokens
        if isinstance(cache, DilatedCache):
            cache.begin_at(begin)
        else:
            for layer in cache.layers:
                layer.cumulative_length.fill_(begin)
        chosen = first
        for place in range(begin, trial.context):
            position = torch.full((trial.batch, 1), place, device=device)
            logits = step(input_ids=chosen, position_ids=position, past_key_values=cache, use_cache=True).logits
            chosen = logits[:, -1:].argmax(-1).clone()  # the next step overwrites what a graph returned
        return chosen

    return model, run, {}


def _kernels(run: Run) -> float:
    """Kernels and copies on the GPU per token."""
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for tokens in (4, 12):
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run(tokens)
            torch.cuda.synchronize()
        counts.append(sum(event.device_type.name == "CUDA" for event in found.events()))
    return (counts[1] - counts[0]) / 8  # without what comes once


_bandwidths: dict[str, float] = {}


def _bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes, measured once per run."""
    if device not in _bandwidths:
        x = torch.zeros(1 << (29 if device == "cuda" else 22), dtype=torch.float32, device=device)
        y = torch.zeros_like(x)
        _bandwidths[device] = 2 * x.nbytes / (measure(lambda: y.copy_(x), device).median * 1e-3)
    return _bandwidths[device]


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    head = ["model", "batch", "context", "ms/token", "tokens/s", "kernels", "share of the floor", "with the cache"]
    head += ["peak GiB"]
    for machine, mine in by_machine(records):
        bandwidth = max((x["bandwidth"] for x in mine if "bandwidth" in x), default=0.0) / 1e12
        words = f"{machine}. Greedy, at the end of the context. The floor reads the weights at {bandwidth:.3g} TB/s."
        rounded = [
            f"{x['size']}: after rounding to int8, the first {x['parity']:,} of {x['parity_of']:,} greedy tokens agree."
            for x in mine
            if "parity" in x
        ]
        words = f"{words} {which_branches([x for x in mine if x['model'] != LLAMA])}".rstrip()
        table = Table("Generating: a token of a whole model", [words, *dict.fromkeys(rounded)], head)
        for x in mine:
            first = [f"{x['size']}: {x['model']}", str(x["batch"]), f"{x['context']:,}"]
            if "failed" in x:
                table.rows.append([*first, x["failed"], "", "", "", "", ""])
                continue
            floor = x["share"] * (1 + x["kept_bytes"] / x["weight_bytes"]) if "kept_bytes" in x else None
            found: list[Any] = [f"{x['ms']:.3f}", f"{x['tokens_per_second']:,.0f}", number(x["kernels"], 0)]
            table.rows.append(
                [*first, *found, f"{x['share']:.2f}", number(floor, 2), number(x["peak_bytes"], 1, 1 << 30)]
            )
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    ours = [x for x in records if x["model"] == OURS and "failed" not in x]
    for size, most in SLOWEST.items():
        times = [x["ms"] for x in ours if (x["size"], x["batch"]) == (size, 1)]
        if times:
            yield Verdict(max(times) <= most, f"{size}, one row: at most {most} ms per token; {max(times):.3f}")
        if len(times) > 1:
            spread = max(times) / min(times)
            yield Verdict(spread <= FLAT, f"{size}, one row: flat within {FLAT} over contexts; {spread:.3f}")
    size, batch, least = MOST_ROWS
    rates = [x["tokens_per_second"] for x in ours if (x["size"], x["batch"]) == (size, batch)]
    if rates:
        text = f"{size}, {batch} rows: at least {least:,} tokens per second; {min(rates):,.0f}"
        yield Verdict(min(rates) >= least, text)
    for x in records:
        if x["model"] == BOUNDED and "failed" not in x:
            text = f"{BOUNDED} at {x['context']:,}: at most {SLOWEST_BOUNDED} ms, compiled once; {x['ms']:.3f}"
            yield Verdict(x["ms"] <= SLOWEST_BOUNDED and not x["recompiled"], f"{text}, {x['recompiled']} times more")


SUITE = Suite(
    name="generate",
    about="time per token of whole models, against Hugging Face's Llama with a static cache; targets are for a GPU",
    flags=("device", "sizes", "tokens", "batches", "only"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("size", "model", "batch", "context"),
)
