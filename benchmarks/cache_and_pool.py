"""The suites `cache` and `pool`: calls with the pattern cache, or the workspace pool, on and off, by turns."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Comparison, compare, measure
from benchmarks.suite import Options, Record, Suite, Table, Verdict, number
from dilated_attention_pytorch.core.block_layout import layout_of
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.call import Call, Inputs
from dilated_attention_pytorch.core.plans import KINDS, PatternCache, reset_global_pattern_cache
from dilated_attention_pytorch.core.pool import WorkspacePool, reset_global_memory_pool
from dilated_attention_pytorch.core.resources import NO_RESOURCES, Resources
from dilated_attention_pytorch.core.spans import checked_spans, document_spans
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.kernels.parts import parts_for
from dilated_attention_pytorch.measuring import peak_resident
from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.nn import (
    DilatedAttention,
    DilatedTransformerEncoderLayer,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
)
from dilated_attention_pytorch.parallel import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DistributedImprovedDilatedAttention,
    RankGroup,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    Shards,
)
from dilated_attention_pytorch.parallel.attention import ShardCall, shard_plan_for
from dilated_attention_pytorch.parallel.schemes import MEMORY_BUDGET

SPEC: dict[str, Any] = {"segment_lengths": (256, 512, 1024), "dilation_rates": (1, 2, 4)}
SPARSE = SparsePatternConfig("dilated_sparse", sparsity_ratio=0.25, block_size=32)
HEADS, HEAD_DIM, LAYERS = 4, 64, 2
CACHE_LENGTHS = (1024, 4096, 32_768)
POOL_LENGTHS = {"cpu": (8192,), "cuda": (8192, 131_072)}
TOKENS_PER_DOCUMENT = 128
SLOWER, LARGER = 1.02, 1.05  # what on may cost over off: noise
WORTH = 0.5  # of a rebuild: a hit that costs more is not worth the memory of its entry


def _step(case: str, found: Comparison, peak_off: int | None = None, peak_on: int | None = None) -> Record:
    """One call with something on and off: milliseconds, and peak bytes where they were measured."""
    ratio = peak_on / peak_off if peak_on is not None and peak_off else None
    return {"case": case, **asdict(found), "peak_off": peak_off, "peak_on": peak_on, "memory_ratio": ratio}


def _kinds(options: Options) -> Iterator[Record]:
    """Everything that a call needs, remembered or not: the time to make it, and to find it."""
    device = options.device
    tokens = 4096
    lengths, mask = _packed(tokens).to(device), (torch.arange(tokens) >= tokens - 7)[None].to(device)
    spans = document_spans(1, tokens, cu_seqlens=lengths)
    assert spans is not None
    call, sparse = (Call(spec=DilatedSpec.of(**SPEC), sparse=pattern) for pattern in (None, SPARSE))
    like = torch.empty(1, tokens, HEADS, HEAD_DIM, device=device)
    cache, off = Resources(PatternCache()), NO_RESOURCES

    def parts(of: Tensor | None, resources: Resources) -> None:
        parts_for(call, of, like.shape, HEADS, resources).viewer(like)

    def found(key: Callable[[], Any]) -> Callable[[], object]:
        """Look up something that the policy does not keep."""
        return lambda: cache.remember("parts", key(), lambda: 0)

    cases: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
        (
            "lengths",
            f"lengths, {len(lengths) - 1} documents",
            lambda: document_spans(1, tokens, cu_seqlens=lengths),
            lambda: document_spans(1, tokens, cu_seqlens=lengths, cache=cache),
        ),
        ("parts", "parts, whole", lambda: parts(None, off), lambda: parts(None, cache)),
        ("parts", f"parts, {len(lengths) - 1} documents", lambda: parts(spans, off), lambda: parts(spans, cache)),
        (
            "block layout",
            f"block layout, {SPARSE.pattern_type}",
            lambda: layout_of(sparse, like, like),
            lambda: layout_of(sparse, like, like, cache),
        ),
        *_segment_table(device, call, spans, like, cache),
        *_ring_schedule(device, call, like, cache),
        (
            "padding mask",
            f"padding mask, {tokens} tokens",
            lambda: checked_spans(mask, "key_padding_mask", tokens),
            found(lambda: tuple(mask.flatten().tolist())),
        ),
        (
            "offset table",
            "offset table",
            lambda: call.spec.offsets(HEADS),
            found(lambda: (call.spec, HEADS, call.head_offset, call.total_heads)),
        ),
    ]
    for kind, title, rebuild, hit in cases:
        yield {
            "kind": title,
            "cached": kind in KINDS,
            "rebuild": measure(rebuild, device).median * 1e3,
            "hit": measure(hit, device).median * 1e3,
            "rebuild_8": _in_threads(rebuild),
            "hit_8": _in_threads(hit),
        }


def _segment_table(device: str, call: Call, spans: Tensor, like: Tensor, cache: Resources) -> list[Any]:
    if device != "cuda":
        return []  # a kernel of the Triton engine's
    from dilated_attention_pytorch.kernels.triton.documents import WorkLists, Works
    from dilated_attention_pytorch.kernels.triton.plan import plan_for

    plan = plan_for(call, Inputs(like, like, like, spans))
    lists = WorkLists(plan, [(branch, Works(128)) for branch in plan.branches])
    rebuild, hit = (partial(lists.of, spans, found) for found in (NO_RESOURCES, cache))
    return [("segment table", "lists of tiles", rebuild, hit)]


def _ring_schedule(device: str, call: Call, like: Tensor, cache: Resources) -> list[Any]:
    """The schedule of one of eight ranks whose shards every branch cuts."""
    ranks = RankGroup(None)
    ranks.rank, ranks.size = 3, 8
    shards = Shards((like.shape[1] // 8 - 1,) * 8)
    mine = torch.Size((1, shards.lengths[3], HEADS, HEAD_DIM))
    documents = ((range(1), 0, shards.tokens),)
    kind = ShardCall(call, shards, documents, mine, HEADS, 4, torch.device(device), "auto", MEMORY_BUDGET)
    rebuild, hit = (partial(shard_plan_for, ranks, kind, found) for found in (NO_RESOURCES, cache))
    return [("ring schedule", "ring schedule, 8 ranks", rebuild, hit)]


def _in_threads(run: Callable[[], object], seconds: float = 0.25) -> float:
    """Microseconds per call while eight threads call at once."""
    threads = 8
    began = time.perf_counter()
    run()
    calls = max(3, min(2000, round(seconds / threads / max(time.perf_counter() - began, 1e-7))))
    start = threading.Barrier(threads + 1)

    def work() -> None:
        start.wait()
        for _ in range(calls):
            run()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - began) / (threads * calls) * 1e6


def _cache_steps(options: Options) -> Iterator[Record]:
    device, lengths = options.device, options.tokens or CACHE_LENGTHS
    for tokens in lengths:
        for kind in ("whole", "packed", "block-sparse"):
            name = "BlockSparseRingDilatedAttention" if kind == "block-sparse" else "DilatedAttention"
            stated = {"cu_seqlens": _packed(tokens).to(device)} if kind == "packed" else {}
            q, k, v = _inputs(device, tokens, "float32" if device == "cpu" else "bfloat16")
            off, on = (
                partial(MODULES[name](**SPEC, use_pattern_cache=used), q, k, v, is_causal=True, **stated)
                for used in (False, True)
            )
            title = f"N={tokens:,} {kind} {name} forward"
            reset_global_pattern_cache()
            yield _step(title, compare(off, on, device))
    tokens = lengths[0]
    for name in ("MultiheadDilatedAttention", "LongNetLM"):
        steps = _training_steps(
            name, device, tokens, "float32", [{"use_pattern_cache": used} for used in (False, True)]
        )
        off, on = (partial(step, _packed(tokens).to(device)) for step in steps)
        yield _step(f"N={tokens:,} packed {name} forward+backward", compare(off, on, device))


ATTENTION = (
    "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttentionV2", "BlockSparseRingDilatedAttention",
)  # fmt: skip
RANKS, ROUNDS = 2, 9


def _by_name(*classes: Any, **settings: Any) -> dict[str, Callable[..., Any]]:
    return {one.__name__: partial(one, **settings) for one in classes}


RINGS = {
    **_by_name(RingDilatedAttention, RingDilatedAttentionV2, RingDilatedAttentionV3),
    **_by_name(DistributedImprovedDilatedAttention, sequence_parallel=True),
}
MODULES = {
    **_by_name(DilatedAttention, ImprovedDilatedAttention, RingDilatedAttentionV2),
    **_by_name(BlockSparseRingDilatedAttention, sparse_config=SPARSE),
    **_by_name(MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention),
    **_by_name(BlockSparseRingMultiheadDilatedAttention, sparse_config=SPARSE),
    **_by_name(DilatedTransformerEncoderLayer, LongNetLM),
}


def _training_steps(
    name: str, device: str, tokens: int, dtype: str, settings: Sequence[dict[str, bool]]
) -> list[Callable[..., object]]:
    """Forward and backward of a module with each of these settings; each takes the lengths of packed documents, if any.

    They share inputs and weights: where tensors lie in memory matters more than most settings.
    """
    if name in ATTENTION:
        inputs = [x.requires_grad_() for x in _inputs(device, tokens, dtype)]
        return [_attention_step(MODULES[name](**SPEC, **setting), inputs) for setting in settings]
    E = HEADS * HEAD_DIM
    if name == "LongNetLM":
        sizes: dict[str, Any] = {"d_model": E, "num_heads": HEADS, "num_layers": LAYERS, "num_decoder_layers": 0}
        x = torch.randint(256, (1, tokens), device=device)
    else:
        sizes = {"embed_dim": E, "num_heads": HEADS}
        if name == "DilatedTransformerEncoderLayer":
            sizes = {"d_model": E, "nhead": HEADS, "dim_feedforward": 4 * E}
        x = torch.randn(1, tokens, E, device=device, dtype=getattr(torch, dtype))
    modules = [MODULES[name](**sizes, **SPEC, **setting).to(device, getattr(torch, dtype)) for setting in settings]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict(), assign=True)
    return [_module_step(name, module, x) for module in modules]


def _attention_step(attention: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[..., object]:
    def step(lengths: Tensor | None = None) -> object:
        out = attention(*inputs, is_causal=True, cu_seqlens=lengths)
        return torch.autograd.grad(out, inputs, out.detach())

    return step


def _module_step(name: str, module: Any, x: Tensor) -> Callable[..., object]:
    parameters = list(module.parameters())

    def step(lengths: Tensor | None = None) -> object:
        packed = {} if lengths is None else {"cu_seqlens": lengths}
        if name == "LongNetLM":
            out = module.hidden(x, **packed)
        elif name == "DilatedTransformerEncoderLayer":
            out = module(x, is_causal=True)
        else:
            out = module(x, x, x, is_causal=True, **packed)[0]
        return torch.autograd.grad(out, parameters, out.detach(), allow_unused=True)

    return step


def _pool_steps(tokens: int, options: Options) -> Iterator[Record]:
    device = options.device
    for name, dtype in product(MODULES, ("bfloat16", "float32")):
        if dtype == "bfloat16" and device == "cpu" and name not in ATTENTION:
            continue  # many CPUs emulate bfloat16 products, and the projections would take all the time
        arguments = (name, device, tokens, dtype)
        off, on = _training_steps(*arguments, [{"enable_memory_pool": used} for used in (False, True)])
        reset_global_memory_pool()
        found = compare(off, on, device)
        peaks = [_peak_bytes(*arguments, used) for used in (False, True)]
        yield _step(f"N={tokens:,} {name} {dtype} forward+backward", found, *peaks)
    found = compare(_staging(device, tokens, False), _staging(device, tokens, True), device)
    yield _step(f"N={tokens:,} keys and values through host buffers, 4 times", found)
    if device == "cpu":  # one GPU has no place for a second rank
        yield from _steps_on_ranks(tokens)


def _steps_on_ranks(tokens: int) -> list[Record]:
    """Classes across ranks, in processes of this machine that exchange rows through gloo."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(RANKS) as workers:
        meeting = (Path(folder) / "ranks").as_uri()
        ranks = [workers.apply_async(steps_of_rank, (tokens, rank, meeting)) for rank in range(RANKS)]
        first, *_ = [rank.get() for rank in ranks]
        return first


def steps_of_rank(tokens: int, rank: int, meeting: str) -> list[Record]:
    """The time of one rank with the pool off and on; all ranks share the longest segment."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    pattern = {"segment_lengths": (*SPEC["segment_lengths"][:2], tokens), "dilation_rates": SPEC["dilation_rates"]}
    steps = []
    for name, kind in RINGS.items():
        for dtype in ("bfloat16", "float32"):
            inputs = [x.requires_grad_() for x in _inputs("cpu", tokens // RANKS, dtype)]
            off, on = (_attention_step(kind(**pattern, enable_memory_pool=used), inputs) for used in (False, True))
            # The same number of rounds on every rank: a rank waits for the others in each.
            found = compare(off, on, "cpu", seconds=1e-9, least=ROUNDS)
            steps.append(_step(f"N={tokens:,} {name} {dtype} forward+backward, {RANKS} gloo ranks", found))
    dist.destroy_process_group()
    return steps


def _staging(device: str, tokens: int, pooled: bool) -> Callable[[], object]:
    """Copy tensors into host buffers and back, as offloading and communication do."""
    resources = Resources(pool=WorkspacePool() if pooled else None)
    x = torch.randn(tokens, HEADS * HEAD_DIM, device=device)

    def run() -> None:
        for _ in range(4):
            with resources.workspaces() as take:
                buffers = [take(x.shape, dtype=x.dtype, device="cpu", pin_memory=device == "cuda") for _ in range(2)]
                for buffer in buffers:
                    buffer.copy_(x, non_blocking=True)
                    x.copy_(buffer, non_blocking=True)

    return run


def _peak_bytes(name: str, device: str, tokens: int, dtype: str, pooled: bool) -> int:
    if device == "cpu":
        return peak_in_new_process(name, device, tokens, dtype, pooled)
    reset_global_memory_pool()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return step_peak_bytes(name, device, tokens, dtype, pooled) - before


def peak_in_new_process(name: str, device: str, tokens: int, dtype: str, pooled: bool) -> int:
    """The least of three processes: other memory that a process happens to touch only adds."""
    # Freed large tensors go back to the system at once, instead of staying with the C library.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    context = multiprocessing.get_context("spawn")
    peaks = []
    for _ in range(3):
        with context.Pool(1) as workers:
            peaks.append(workers.apply(step_peak_bytes, (name, device, tokens, dtype, pooled)))
    return min(peaks)


def step_peak_bytes(name: str, device: str, tokens: int, dtype: str, pooled: bool) -> int:
    """The most that memory grows by over two training steps, inputs included."""
    before = peak_resident()
    (step,) = _training_steps(name, device, tokens, dtype, [{"enable_memory_pool": pooled}])
    for _ in range(2):
        step()
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_resident() - before


def _inputs(device: str, tokens: int, dtype: str) -> list[Tensor]:
    shape = (1, tokens, HEADS, HEAD_DIM)
    return [torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(3)]


def _packed(tokens: int) -> Tensor:
    """Cumulative lengths of documents of about 128 tokens, no two alike."""
    documents = tokens // TOKENS_PER_DOCUMENT
    ends = torch.arange(1, documents + 1) * TOKENS_PER_DOCUMENT
    ends[:-1] += (torch.arange(documents - 1) * 37) % 101 - 50
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends])


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    """Finding something against making it, and calls with something on against off, of all machines."""
    by_title: dict[str, list[Record]] = {}
    for record in records:
        by_title.setdefault(record.get("kind") or record["case"], []).append(record)
    suite = records[0]["suite"] if records else ""
    kinds = Table(
        "Pattern cache: a hit against a rebuild",
        ["Microseconds; under `8 threads`, those of a process in which eight threads ask at once."],
        ["what", "machine", "rebuild", "hit", "8 threads: rebuild", "8 threads: hit", "cached"],
    )
    steps = Table(
        "Pattern cache: on against off",
        ["Both are measured by turns in one process; off/off shows the noise of such a quotient."],
        ["case", "machine", "off, ms", "on, ms", "on/off", "off/off"],
    )
    if suite == "pool":
        steps.heading = "Workspace pool: on against off"
        steps.words[0] += " On a CPU, time is summed over all processors, and memory is measured in new processes."
        steps.head += ["off, peak MiB", "on, peak MiB", "on/off"]
    for title, x in ((title, record) for title, found in by_title.items() for record in found):
        first = [title, x["on_machine"]]
        if "kind" in x:
            times = [f"{x[name]:.1f}" for name in ("rebuild", "hit", "rebuild_8", "hit_8")]
            kinds.rows.append([*first, *times, "yes" if x["cached"] else "no"])
            continue
        cells = [*first, *(f"{x[name]:.3f}" for name in ("off", "on", "ratio", "noise"))]
        if suite == "pool":
            peaks = [number(x[name], 1, 1 << 20) for name in ("peak_off", "peak_on")]
            cells += [*peaks, number(x.get("memory_ratio"), 3)]
        steps.rows.append(cells)
    yield kinds
    yield steps


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    for x in (record for record in records if "kind" in record):
        if x["cached"]:
            cheaper = x["hit"] < x["rebuild"] and x["hit_8"] < x["rebuild_8"]
            yield Verdict(cheaper, f"{x['kind']} is cached: a hit costs less than a rebuild")
        else:
            dear = x["hit"] >= WORTH * x["rebuild"]
            yield Verdict(dear, f"{x['kind']} is not cached: a hit costs at least {WORTH} of a rebuild")
    for name, limit, what in (("ratio", SLOWER, "time"), ("memory_ratio", LARGER, "peak memory")):
        values = [(x[name], x["case"]) for x in records if x.get(name) is not None]
        if values:
            worst, case = max(values)
            yield Verdict(worst <= limit, f"{what} with it on at most {limit} of off; worst {worst:.3f} ({case})")


CACHE = Suite(
    name="cache",
    about="the pattern cache: a hit against a rebuild, and calls with the cache on and off",
    flags=("device", "tokens"),
    setup=lambda options: (_kinds, _cache_steps),
    measure=lambda part, options: part(options),
    tables=_tables,
    verdict=_verdict,
    key=("kind", "case"),
)
POOL = Suite(
    name="pool",
    about="the workspace pool: time and peak memory of every module with the pool on and off",
    flags=("device", "tokens"),
    setup=lambda options: options.tokens or POOL_LENGTHS[options.device],
    measure=_pool_steps,
    tables=_tables,
    verdict=_verdict,
    key=("kind", "case"),
)
