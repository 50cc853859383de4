"""The suites that compare contenders on the same case: `attention`, `short`, `scaling`, `blocksparse`, `gigapath`.

`contenders` and `encoders` define what is compared, `cases` lists the cases, `ratios` has the targets.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import cases, contenders, encoders
from benchmarks.charts import bars as draw_bars
from benchmarks.contenders import FLOOR, OURS, Setup
from benchmarks.harness import Case, measure
from benchmarks.ratios import RATIOS, TARGETS, Row, beside_published, but_for_length, judge, memory, rows_of
from benchmarks.suite import Options, Record, Suite, Table, Verdict, number, reason
from dilated_attention_pytorch.pages import plots

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

# How often contenders are measured: what else a CPU does comes and goes for longer than one of them takes.
TURNS = {"cuda": 1, "cpu": 3}


def _suite(name: str, about: str, choose: Callable[[Options], dict[str, Setup]], *flags: str) -> Suite:
    def setup(options: Options) -> list[tuple[Case, dict[str, Setup]]]:
        chosen = choose(options)
        return [(case, chosen) for case in cases.choose_cases([name], options)[name]]

    return Suite(
        name=name,
        about=about,
        flags=("device", "tokens", "cases", "only", "torchscale", *flags),
        setup=setup,
        measure=functools.partial(_measure, name),
        tables=lambda records: tables(rows_of(records)),
        verdict=lambda records: verdicts(rows_of(records)),
    )


def _measure(suite: str, job: tuple[Case, Mapping[str, Setup]], options: Options) -> Iterator[Record]:
    """One record per contender; one that fails is recorded with its reason, and the run goes on."""
    case, chosen = job
    if options.kernels != "best":
        suite = f"{suite}, {options.kernels} kernels"  # beside the records of the same cases with the best ones
    attempts: dict[str, list[Record]] = {name: [] for name in chosen}
    turns = TURNS[case.device]
    for turn in range(turns):
        for name, setup in chosen.items():
            attempts[name].append(attempt(setup, case))
            _clear(case.device, options)
            if turn == turns - 1:
                yield {"suite": suite, "contender": name, **asdict(case), **middle(attempts[name])}


def middle(turns: Sequence[Record]) -> Record:
    """The attempt that took neither the least nor the most time; one that failed, or sat out, stands for all."""
    without = [turn for turn in turns if "milliseconds" not in turn]
    return without[0] if without else sorted(turns, key=itemgetter("milliseconds"))[len(turns) // 2]


def attempt(setup: Setup, case: Case) -> Record:
    """What a contender gave: its timing, why it sat the case out, or what it failed with."""
    # cuBLAS keeps its workspace once it has been used: what others left behind is not this contender's.
    held = torch.cuda.memory_allocated() if case.device == "cuda" else 0
    try:
        ready = setup(case)
        if isinstance(ready, str):
            return {"skipped": ready}
        with ready.settings:
            timing = measure(ready.call, case.device)
    except Exception as error:  # whatever another's code raises must not cost the rest of the run
        return {"failed": reason(error)}
    return {
        "milliseconds": round(timing.median, 4),
        "p20": round(timing.p20, 4),
        "p80": round(timing.p80, 4),
        "peak_bytes": None if timing.peak_bytes is None else timing.peak_bytes - held,
        "tflops": round(ready.flops / timing.median / 1e9, 4),
    }


def _clear(device: str, options: Options) -> None:
    """Free what a contender held, so that the next one's peak memory is its own."""
    gc.collect()
    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # an illegal access: every later call in this process would fail too
        raise OSError(f"the GPU fails from here on; {options.out} has what was measured before: {error}") from error
    torch.cuda.empty_cache()


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """For each suite on each device: times with ratios, then peak memory."""
    for suite, device in dict.fromkeys((row.suite, row.case.device) for row in rows):
        chosen = [row for row in rows if (row.suite, row.case.device) == (suite, device)]
        yield _times(suite, chosen)
        yield _peak_memory(suite, chosen)


def _times(suite: str, rows: Sequence[Row]) -> Table:
    names = _names(rows)
    ratios = {name: [value(row, rows) for row in rows] for name, (_, value) in RATIOS.items()}
    ratios = {name: values for name, values in ratios.items() if any(value is not None for value in values)}
    reasons = dict.fromkeys(reason for row in rows for reason in row.why_not_measured())
    table = Table(
        suite + _on(rows[0].case.device),
        [*(f"{machine}." for machine in dict.fromkeys(row.machine for row in rows)), _branches(rows)],
        ["case", *names, *ratios],
        notes=[*(_meaning(name) for name in ratios), *reasons],
    )
    for i, row in enumerate(rows):
        cells = [cell(row.lines.get(name)) for name in names]
        table.rows.append([row.case.title, *cells, *(number(values[i], 2) for values in ratios.values())])
    bars = [
        (row.case.title, [ours, floor])
        for row in rows
        if (ours := row.measured(OURS, "tflops")) is not None and (floor := row.measured(FLOOR, "tflops")) is not None
    ]
    if bars:
        table.charts = [("TFLOP/s at the same FLOPs", lambda: draw_bars(bars, [OURS, FLOOR], "TFLOP/s"))]
    return table


def cell(record: Record | None) -> str:
    """What a table says of a contender: milliseconds (TFLOP/s), a failure, or nothing.

    >>> cell({"milliseconds": 1.5, "tflops": 412.3}), cell({"failed": "OutOfMemoryError"}), cell({"skipped": "slow"})
    ('1.500 (412)', 'failed', '-')
    """
    if record is None or "skipped" in record:
        return "-"
    return "failed" if "failed" in record else f"{record['milliseconds']:.3f} ({record['tflops']:.3g})"


def _peak_memory(suite: str, rows: Sequence[Row]) -> Table:
    """In GiB: of attention's forward and backward, since of the forward alone no floor is known, and of encoders."""
    rows = [row for row in rows if row.case.encoder_layers or memory(row, rows) is not None]
    names = [name for name in _names(rows) if name != FLOOR]  # which has other tokens
    table = Table(f"{suite}: peak memory, GiB", head=["case", "floor", *names, "memory"])
    table.words = ["The peak of PyTorch's allocator, inputs included. " + _meaning("memory") + "."]
    if all(row.case.encoder_layers for row in rows):
        table.words = ["The peak of PyTorch's allocator, inputs and weights included."]
    bars: list[tuple[str, list[float]]] = []
    for row in rows:
        over = memory(row, rows)
        floor = None if over is None else row.case.floor_bytes
        sizes = [floor, *(row.measured(name, "peak_bytes") for name in names)]
        table.rows.append([row.case.title, *(number(size, 2, 1 << 30) or "-" for size in sizes), number(over, 2)])
        bars += [] if over is None else [(row.case.title, [over])]
    if bars:
        chart = functools.partial(draw_bars, bars, [OURS], "times the floor", limits=[1.0, 1.1])
        table.charts = [("Over the floor; lines at 1 and 1.1", chart)]
    return table


def targets(rows: Sequence[Row]) -> Table:
    """The targets of the cases in the results."""
    table = Table("Targets", head=["target", "worst measured", "at", "cases that meet it", "verdict"])
    for target in TARGETS:
        judged = judge(target, rows)
        if judged is None:
            if any(target.applies_to(row) for row in rows):
                table.rows.append([target.text, "", "", "", "not measured"])
            continue
        met = "met" if judged.is_met else "not met"
        of = f"{judged.met} of {judged.cases}"
        table.rows.append([target.text, f"{judged.worst:.3g}", judged.case.title, of, met])
    return table


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    for target in TARGETS:
        if judged := judge(target, rows):
            worst = f"worst {judged.worst:.3g} ({judged.case.title})"
            yield Verdict(judged.is_met, f"{target.text}; {worst}")


def published(rows: Sequence[Row]) -> Table:
    words = ["Figures for other code on other runs, for orientation. They were **not measured in this run**."]
    head = ["case", "who", "where", "published ms", "ours here, ms", "published / ours"]
    table = Table("Published figures, not measured here", words, head)
    for one, ours in beside_published(rows):
        times = [f"{one.milliseconds:g}", f"{ours:.3f}", f"{one.milliseconds / ours:.2f}"]
        table.rows.append([one.case.title, one.who, one.where, *times])
    return table


def time_charts(rows: Sequence[Row]) -> Table:
    """A chart for each case that was measured at several lengths, in any suite."""
    alike: dict[Case, list[Row]] = {}
    for row in rows:
        alike.setdefault(but_for_length(row.case), []).append(row)
    names, charts = _names(rows), Table("Time over tokens")
    for case, found in alike.items():
        lines = {
            name: [(row.case.tokens, time) for row in found if (time := row.measured(name, "milliseconds")) is not None]
            for name in names
        }
        lines = {name: points for name, points in lines.items() if len({tokens for tokens, _ in points}) > 1}
        if lines:
            _, _, but_for_tokens = case.title.partition(" ")
            but_for_tokens = but_for_tokens.replace("1 branches to 1 ", "branches over all tokens ")
            charts.charts.append((but_for_tokens + _on(case.device), functools.partial(_over_tokens, lines)))
    return charts


def _over_tokens(lines: plots.Curves) -> Figure:
    return plots.curves(lines, "tokens", "milliseconds", dots=list(lines), log=True, width=4.5)


def _on(device: str) -> str:
    return "" if device == "cuda" else f", on a {device.upper()}"


def _meaning(ratio: str) -> str:
    return f"{ratio}: {RATIOS[ratio][0]}"


def _names(rows: Sequence[Row]) -> list[str]:
    """The contenders that ran, or tried to."""
    return list(dict.fromkeys(name for row in rows for name, line in row.lines.items() if "skipped" not in line))


def _branches(rows: Sequence[Row]) -> str:
    pairs = dict.fromkeys((row.case.segment_lengths, row.case.dilation_rates, row.case.dtype) for row in rows)
    return "; ".join(f"{len(w)} branches: segments {list(w)}, rates {list(r)}, {dtype}" for w, r, dtype in pairs) + "."


def _attention(options: Options) -> dict[str, Any]:
    return contenders.choose_contenders(options.only, options.torchscale, options.kernels)


def _encoders(options: Options) -> dict[str, Any]:
    return encoders.choose_encoders(options.only, options.torchscale)


SUITES = (
    *(
        _suite(name, about, _attention, "kernels", "with")
        for name, about in (
            ("attention", "time and memory over lengths, head dims, causality and head layouts"),
            ("short", "time of one sequence of 512 to 8,192 tokens"),
            ("scaling", "time per token from 1M to 16M tokens"),
            ("blocksparse", "a tenth of the tiles against all of them, and against FlexAttention"),
        )
    ),
    _suite("gigapath", "Prov-GigaPath's slide encoder and its attention alone, ours and torchscale's", _encoders),
)
