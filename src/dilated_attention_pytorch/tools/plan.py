"""The reports of the command `plan`, in words and as plain values.

`parallel.plan` computes the plan of attention on many GPUs, `train.fitting` what fits into one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from dilated_attention_pytorch.core.reach import reach_lines
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.measuring import size
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.parallel.plan import BACKWARD_WORK, Job, Plan, make_plan
from dilated_attention_pytorch.parallel.wire import Traffic
from dilated_attention_pytorch.train.fitting import Fit
from dilated_attention_pytorch.train.footprint import KINDS, parameter_count

GIB = 1 << 30
_WORDS = {
    "weights": "weights",
    "gradients": "gradients at that point",
    "optimizer": "optimizer state",
    "kept": "activations saved for backward",
    "temporary": "temporaries of what runs then",
}


def as_json(plan: Plan, gpu_bytes: int) -> dict[str, Any]:
    """The plan as plain values: the job, each branch (bytes of the rank that receives most), each rank, the totals."""
    job = {name: value for name, value in vars(plan.job).items() if name != "spec"} | plan.job.spec.keywords
    modelled = ("sums", "workspace", "seconds_forward", "seconds_backward")
    ranks = []
    for rank in plan.ranks:
        values = {name: value._asdict() if isinstance(value, Traffic) else value for name, value in vars(rank).items()}
        guessed = {name: values.pop(name) for name in modelled} | {"peak": rank.peak}
        ranks.append({"computed": values, "modelled": guessed})
    return {
        "job": job,
        "computed": {
            "branches": [
                asdict(one.branch)
                | {"scheme": one.scheme, "ranks": one.ranks}
                | {name: _busiest(getattr(one, name))._asdict() for name in ("forward", "backward")}
                for one in plan.branches
            ],
            "flops_forward": plan.job.layers * sum(rank.flops for rank in plan.ranks),
            "balance": plan.balance,
            "reach": _reach(plan.job),
        },
        "modelled": {"peak_bytes": plan.fullest.peak, "step_seconds": plan.step_seconds},
        "verdict": verdict(plan, gpu_bytes),
        "ranks": ranks,
    }


def text(plan: Plan, gpu_bytes: int) -> list[str]:
    """The plan as lines to read."""
    job, full = plan.job, plan.fullest
    most = max(rank.tokens for rank in plan.ranks)
    heads = f"{job.heads} heads" + (f" ({job.key_heads} of keys)" if job.key_heads != job.heads else "")
    words = [f"batch {job.batch}", f"{heads} of {job.head_dim}", job.dtype]
    words += ["causal"] if job.is_causal else []
    words += [f"{job.token_layout} shards", f"{job.layers} attention layer{'s' * (job.layers > 1)}"]
    lines = [
        f"{job.tokens:,} tokens on {job.gpus:,} GPU{'s' * (job.gpus > 1)}, {most:,} per rank: {', '.join(words)}",
        "Attention alone: no parameters, projections or feed-forward layers.",
        f"Verdict: {verdict(plan, gpu_bytes)}.",
        "",
        "COMPUTED, by the functions that the ranks use",
        "",
        "bytes of one layer, busiest rank            forward                 backward",
        f"{'segment':>14} {'rate':>8} {'scheme':>10} {'ranks':>6} "
        + " ".join(f"{name:>11}" for name in ("sent", "received") * 2),
    ]
    for one in plan.branches:
        bytes_ = (*_busiest(one.forward), *_busiest(one.backward))
        lines.append(
            f"{one.branch.segment_length:>14,} {one.branch.dilation_rate:>8,} {one.scheme or '-':>10} {one.ranks:>6} "
            + " ".join(f"{size(count, 2):>11}" for count in bytes_)
        )
    flops = [rank.flops * job.layers for rank in plan.ranks]
    lines += [
        "",
        "memory of the fullest rank",
        *_table(
            ("q, k, v, out, lse of all layers", full.saved),
            ("gradients and delta of one layer", full.gradients),
            ("message buffers, forward", full.messages_forward),
            ("message buffers, backward", full.messages_backward),
        ),
        "",
        "work",
        f"  {'forward, all ranks':<36}{sum(flops) / 1e12:>14,.4g} TFLOP; backward {BACKWARD_WORK:g} times that",
        f"  {'forward, busiest rank':<36}{max(flops) / 1e12:>14,.4g} TFLOP",
        *(f"  {f'busiest over mean, {layout}':<36}{ratio:>14.3f}" for layout, ratio in plan.balance.items()),
        "",
        "reach of a row",
        *(f"  {line}" for line in _reach(job)),
        "",
        f"MODELLED, at {job.tflops:g} TFLOP/s per GPU and {job.link_gbps:g} Gbit/s each way",
        "",
        "memory of the fullest rank",
        *_table(
            ("float32 sums", full.sums),
            ("workspace for fetched rows", full.workspace),
            ("peak, computed parts included", full.peak),
        ),
        "",
        "time, messages overlapping with the work on a rank's own rows",
        f"  {'forward, one layer':<36}{max(rank.seconds_forward for rank in plan.ranks) * 1e3:>14,.4g} ms",
        f"  {'backward, one layer':<36}{max(rank.seconds_backward for rank in plan.ranks) * 1e3:>14,.4g} ms",
        f"  {'step, all layers':<36}{plan.step_seconds * 1e3:>14,.4g} ms",
    ]
    return lines


def verdict(plan: Plan, gpu_bytes: int) -> str:
    """Whether the fullest rank fits into a GPU; if not, what shards that end with segments would save."""
    job, peak = plan.job, plan.fullest.peak
    room = f"{gpu_bytes / GIB:g} GiB"
    if peak <= gpu_bytes:
        return f"fits in {room}, with {size(gpu_bytes - peak, 0)} to spare"
    words = f"does not fit in {room}; {size(peak, 0)} are needed"
    spec = job.spec
    unit = math.lcm(*(w for w in spec.segment_lengths if w * job.gpus <= job.tokens))
    tokens = -(-job.tokens // (job.gpus * unit)) * unit * job.gpus
    if job.tokens < tokens < 1.1 * job.tokens:
        lengths = [max(w, tokens) if w >= job.tokens else w for w in spec.segment_lengths]
        spec = DilatedSpec.of(lengths, spec.dilation_rates, spec.head_layout)
        aligned = make_plan(replace(job, spec=spec, tokens=tokens)).fullest.peak
        if saved := max(0, peak - aligned) // GIB:
            words += f"; shards of a multiple of {unit:,} tokens would save {saved:,} GiB"
            peak = aligned
    if peak <= gpu_bytes:
        return words
    return f"{words}; about {math.ceil(job.gpus * peak / gpu_bytes):,} GPUs would do"


def fit_json(model: str, config: ModelConfig, fits: Sequence[Fit]) -> dict[str, Any]:
    """What fits into one GPU as plain values."""
    return {
        "model": model,
        "parameters": parameter_count(config),
        "segment_lengths": config.segment_lengths,
        "dilation_rates": config.dilation_rates,
        "reach": _reach_of_model(config, fits[-1].tokens),
        "fits": [
            {
                "tokens": fit.tokens,
                "needed_bytes": fit.needed,
                "peak_bytes": fit.footprint.peak,
                "peak_at": fit.footprint.at,
                "parts": fit.footprint.parts,
                "host_bytes": fit.footprint.host,
                "work": fit.work,
                "options": asdict(fit.options),
            }
            for fit in fits
        ],
    }


def fit_text(
    model: str, config: ModelConfig, gpu_bytes: int, batch: int, fits: Sequence[Fit], asked: bool
) -> list[str]:
    """What fits into one GPU as lines; the last of `fits` is the answer. `asked`: the tokens were given."""
    answer = fits[-1]
    found = answer.footprint
    sizes = f"{model}: {parameter_count(config):,} parameters, {config.num_layers} layers of {config.d_model}, "
    sizes += f"{config.num_heads} heads of {config.head_dim}, vocabulary {config.vocab_size:,}, batch {batch}"
    gpu, tokens, options = f"One GPU of {gpu_bytes / GIB:g} GiB", f"{answer.tokens:,} tokens", answer.options.stated()
    if asked:
        lines = [sizes, f"{gpu}, the cheapest options for {tokens}", f"  {options}"]
    else:
        lines = [
            sizes,
            f"{gpu}, the longest sequence: {tokens}, with {options}",
            "",
            "work is relative to a step without recomputation; each row fits longer sequences than the rows above",
            f"{'tokens':>12} {'work':>6} {'host GiB':>9}  options",
            *(
                f"{fit.tokens:>12,} {fit.work:>6.2f} {fit.footprint.host / GIB:>9.1f}  {fit.options.stated()}"
                for fit in fits
            ),
        ]
    lines += [
        "",
        f"memory at the peak, {found.at}",
        *(f"  {_WORDS[kind]:<36}{found.parts[kind] / GIB:>10.2f} GiB" for kind in KINDS),
        f"  {'peak':<36}{found.peak / GIB:>10.2f} GiB",
        f"  {'with a margin for allocator and CUDA':<36}{answer.needed / GIB:>10.2f} GiB",
    ]
    if found.host:
        lines.append(f"  {'pinned host memory':<36}{found.host / GIB:>10.2f} GiB")
    lines += ["", f"reach of a row, {config.pattern_in_words}"]
    return [*lines, *(f"  {line}" for line in _reach_of_model(config, answer.tokens))]


def _reach(job: Job) -> list[str]:
    return reach_lines(job.spec, job.tokens, job.key_heads, job.layers, is_causal=job.is_causal)


def _reach_of_model(config: ModelConfig, tokens: int) -> list[str]:
    return reach_lines(config.spec, tokens, config.num_kv_heads or config.num_heads, config.num_layers, is_causal=True)


def _busiest(traffic: Sequence[Traffic]) -> Traffic:
    return max(traffic, key=lambda one: (one.received, one.sent))


def _table(*rows: tuple[str, int]) -> list[str]:
    return [f"  {name:<36}{size(count, 2):>14}" for name, count in rows]
