"""A plan in words and as plain values: what is computed, apart from what is modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from dilated_attention_pytorch.core.reach import reach_lines
from dilated_attention_pytorch.parallel.plan import BACKWARD_WORK, Job, Plan, RankPlan
from dilated_attention_pytorch.parallel.wire import Traffic


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: the job, each branch of the rank that receives most, each rank, and the totals."""
    job = {field.name: getattr(plan.job, field.name) for field in fields(Job) if field.name != "spec"}
    spec = {"segment_lengths": plan.job.spec.segment_lengths, "dilation_rates": plan.job.spec.dilation_rates}
    modelled = ("sums", "workspace", "seconds_forward", "seconds_backward")
    ranks = []
    for rank in plan.ranks:
        values = {
            name: value._asdict() if isinstance(value, Traffic) else value
            for name, value in ((field.name, getattr(rank, field.name)) for field in fields(RankPlan))
        }
        guessed = {name: values.pop(name) for name in modelled} | {"peak": rank.peak}
        ranks.append({"computed": values, "modelled": guessed})
    return {
        "job": job | spec | {"head_layout": plan.job.spec.head_layout},
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
        "ranks": ranks,
    }


def text(plan: Plan) -> list[str]:
    """The plan as lines to read."""
    job, full = plan.job, plan.fullest
    most = max(rank.tokens for rank in plan.ranks)
    heads = f"{job.heads} heads" + (f" ({job.key_heads} of keys)" if job.key_heads != job.heads else "")
    words = [f"batch {job.batch}", f"{heads} of {job.head_dim}", job.dtype]
    words += ["causal"] if job.is_causal else []
    words += [f"{job.token_layout} shards", f"{job.layers} attention layer{'s' * (job.layers > 1)}"]
    lines = [
        f"{job.tokens:,} tokens on {job.gpus:,} GPU{'s' * (job.gpus > 1)}, {most:,} a rank: {', '.join(words)}",
        "Attention alone: no parameters, projections or feed-forward layers.",
        "",
        "COMPUTED, by the functions that the ranks run on",
        "",
        "bytes of one layer, busiest rank            forward                 backward",
        f"{'segment':>14} {'rate':>8} {'scheme':>10} {'ranks':>6} "
        + " ".join(f"{name:>11}" for name in ("sent", "received") * 2),
    ]
    for one in plan.branches:
        bytes_ = (*_busiest(one.forward), *_busiest(one.backward))
        lines.append(
            f"{one.branch.segment_length:>14,} {one.branch.dilation_rate:>8,} {one.scheme or '-':>10} {one.ranks:>6} "
            + " ".join(f"{_bytes(size):>11}" for size in bytes_)
        )
    flops = [rank.flops * job.layers for rank in plan.ranks]
    lines += [
        "",
        "memory of the fullest rank",
        *_table(
            ("q, k, v, out, lse, of every layer", full.saved),
            ("gradients of one layer, and delta", full.gradients),
            ("message buffers of a forward", full.messages_forward),
            ("message buffers of a backward", full.messages_backward),
        ),
        "",
        "work",
        f"  {'forward, all ranks':<36}{sum(flops) / 1e12:>14,.4g} TFLOP; backward {BACKWARD_WORK:g} times as many",
        f"  {'forward, busiest rank':<36}{max(flops) / 1e12:>14,.4g} TFLOP",
        *(f"  {f'busiest over mean, {layout}':<36}{ratio:>14.3f}" for layout, ratio in plan.balance.items()),
        "",
        "reach of a row",
        *(f"  {line}" for line in _reach(job)),
        "",
        f"MODELLED, at {job.tflops:g} TFLOP/s a GPU and {job.link_gbps:g} Gbit/s each way",
        "",
        "memory of the fullest rank",
        *_table(
            ("float32 sums", full.sums),
            ("workspace for fetched rows", full.workspace),
            ("peak, with the computed", full.peak),
        ),
        "",
        "time, with messages beside what a rank computes alone",
        f"  {'forward, one layer':<36}{max(rank.seconds_forward for rank in plan.ranks) * 1e3:>14,.4g} ms",
        f"  {'backward, one layer':<36}{max(rank.seconds_backward for rank in plan.ranks) * 1e3:>14,.4g} ms",
        f"  {'step, all layers':<36}{plan.step_seconds * 1e3:>14,.4g} ms",
    ]
    return lines


def _reach(job: Job) -> list[str]:
    return reach_lines(job.spec, job.tokens, job.key_heads, job.layers, is_causal=job.is_causal)


def _busiest(traffic: Sequence[Traffic]) -> Traffic:
    return max(traffic, key=lambda one: (one.received, one.sent))


def _table(*rows: tuple[str, int]) -> list[str]:
    return [f"  {name:<36}{_bytes(size):>14}" for name, size in rows]


def _bytes(size: int) -> str:
    """
    >>> _bytes(6193152), _bytes(100)
    ('5.91 MiB', '100 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):,.2f} {unit}"
    return f"{size} B"
