"""Results: JSON lines read back as rows, the ratios between contenders, and the targets they are held against."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import EVERY_TILE, FLEX, FLOOR, OURS, SAME_TOKENS, TORCHSCALE
from benchmarks.harness import Case
from benchmarks.suites import USUAL


@dataclass
class Row:
    """One case of a suite, with every contender's line from one run on one machine."""

    suite: str
    case: Case
    machine: str
    lines: dict[str, dict[str, Any]]

    def measured(self, contender: str, what: str) -> float | None:
        """`what` of a contender that ran; None of one that sat out or failed."""
        return self.lines.get(contender, {}).get(what)


def read_rows(results: Path) -> list[Row]:
    """The rows of a file of JSON lines. A case that several runs measured is from the last of them, whole."""
    rows: dict[tuple[str, Case], Row] = {}
    run: dict[tuple[str, Case], Row] = {}
    machine = ""
    for line in _every_line(results):
        if "machine" in line:
            run, machine = {}, describe(line["machine"])
            continue
        if "contender" not in line:  # of the suites that are tables of their own
            continue
        key = line["suite"], _case(line)
        if key not in run:
            rows[key] = run[key] = Row(*key, machine, {})
        run[key].lines[line["contender"]] = line
    if not rows:
        raise ValueError(f"{results} has no measurements: a run was stopped before its first case, or all were skipped")
    return list(rows.values())


def read_shared(results: Path) -> list[dict[str, Any]]:
    """The lines of the suites `cache` and `pool`, by suite and title, with the machine's name as `on_machine`.

    What a machine measured several times is from the last of them.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in _lines_of(results, ("cache", "pool")):
        title = line.get("kind") or line["case"]
        found[line["suite"], title, line["on_machine"]] = line | {"title": title}
    titles = list(dict.fromkeys(key[:2] for key in found))
    return sorted(found.values(), key=lambda line: titles.index((line["suite"], line["title"])))


# What tells the lines apart of suites that are tables of their own.
_APART = {
    "capacity": ("size", "kind", "tokens", "longest_segment"),
    "techniques": ("size", "tokens", "technique"),
    "decode": ("context", "chunk"),
    "shard": ("tokens", "heads", "head_dim", "is_causal"),
    "ranks": ("ranks", "tokens", "scheme"),
}
# A line of an earlier release lacks what it did not know, and means this.
_EARLIER = {"capacity": {"longest_segment": 32_768}}


def read_suite(results: Path, suite: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of such a suite by machine; what was measured several times is from the last of them."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in _lines_of(results, (suite,)):
        line = _EARLIER.get(suite, {}) | line
        found[(line["on_machine"], *(line.get(name) for name in _APART[suite]))] = line
    machines = dict.fromkeys(line["on_machine"] for line in found.values())
    return {name: [line for line in found.values() if line["on_machine"] == name] for name in machines}


def _lines_of(results: Path, suites: Sequence[str]) -> Iterator[dict[str, Any]]:
    machine = ""
    for line in _every_line(results):
        if "machine" in line:
            machine = line["machine"].get("gpu") or f"CPU, {line['machine'].get('threads')} threads"
        elif line["suite"] in suites and "contender" not in line:
            yield line | {"on_machine": machine}


def _every_line(results: Path) -> Iterator[dict[str, Any]]:
    if not results.is_file():
        raise FileNotFoundError(f"no results at {results}: measure first, as in `bench all --out {results}`")
    yield from map(json.loads, results.read_text().splitlines())


def _case(line: dict[str, Any]) -> Case:
    # A line of an earlier release lacks what it did not know, and means its default.
    values: dict[str, Any] = {field.name: line[field.name] for field in fields(Case) if field.name in line}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Case(**(values | lists))


def describe(machine: dict[str, Any]) -> str:
    """A machine in one line.

    >>> describe({"gpu": "NVIDIA H200", "torch": "2.11"})
    'gpu NVIDIA H200, torch 2.11'
    """
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def cell(line: dict[str, Any] | None) -> str:
    """What a table says of a contender: milliseconds (TFLOP/s), a failure, or nothing.

    >>> cell({"milliseconds": 1.5, "tflops": 412.3}), cell({"failed": "OutOfMemoryError"}), cell({"skipped": "slow"})
    ('1.500 (412)', 'failed', '-')
    """
    if line is None or "skipped" in line:
        return "-"
    return "failed" if "failed" in line else f"{line['milliseconds']:.3f} ({line['tflops']:.3g})"


def ratio_cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def why_not_measured(row: Row) -> list[str]:
    """A line for each contender that failed or sat out."""
    failed = [
        f"{name} failed at {row.case.title}: {line['failed']}" for name, line in row.lines.items() if "failed" in line
    ]
    return failed + [f"{name}: {line['skipped']}" for name, line in row.lines.items() if "skipped" in line]


Ratio = Callable[[Row, Sequence[Row]], "float | None"]


def rate(row: Row, rows: Sequence[Row]) -> float | None:
    return _quotient(row.measured(OURS, "tflops"), row.measured(FLOOR, "tflops"))


def memory(row: Row, rows: Sequence[Row]) -> float | None:
    peak = row.measured(OURS, "peak_bytes")
    has_floor = row.case.backward and not row.case.encoder_layers
    return _quotient(peak, row.case.floor_bytes) if has_floor else None


def faster_than(contender: str) -> Ratio:
    return lambda row, rows: _quotient(row.measured(contender, "milliseconds"), row.measured(OURS, "milliseconds"))


def per_token(row: Row, rows: Sequence[Row]) -> float | None:
    """Against the suite's shortest case that is like this one but for its length."""
    if row.suite != "scaling":
        return None
    problem = but_for_length(row.case)
    alike = [other for other in rows if other.suite == row.suite and but_for_length(other.case) == problem]
    shortest = min(alike, key=lambda other: other.case.tokens)
    now, then = (_quotient(one.measured(OURS, "milliseconds"), one.case.tokens) for one in (row, shortest))
    return _quotient(now, then)


def but_for_length(case: Case) -> Case:
    """What cases of several lengths share: all but the length, and but branches that reach over all of it."""
    if max(case.segment_lengths) >= case.tokens:
        case = replace(case, segment_lengths=(1,), dilation_rates=(1,))
    return replace(case, tokens=1)


def off_linear(row: Row, rows: Sequence[Row]) -> float | None:
    relative = per_token(row, rows)
    return None if relative is None else abs(relative - 1.0)


def slower_than_dense(row: Row, rows: Sequence[Row]) -> float | None:
    return _quotient(row.measured(OURS, "milliseconds"), row.measured(SAME_TOKENS, "milliseconds"))


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


RATIOS: dict[str, tuple[str, Ratio]] = {
    "of dense": (f"our TFLOP/s over those of `{FLOOR}`", rate),
    "torchscale/ours": (f"milliseconds of `{TORCHSCALE}` over ours", faster_than(TORCHSCALE)),
    "dense/ours": (f"milliseconds of `{SAME_TOKENS}` over ours", faster_than(SAME_TOKENS)),
    "every tile/ours": (f"milliseconds of `{EVERY_TILE}` over ours", faster_than(EVERY_TILE)),
    "Flex/ours": (f"milliseconds of `{FLEX}` over ours", faster_than(FLEX)),
    "memory": (
        "our peak memory over the floor: what forward and backward must hold, inputs and gradients included",
        memory,
    ),
    "per token": ("our time per token over that at the suite's shortest length", per_token),
}
"""The derived columns of every table: heading, meaning, ratio."""


@dataclass(frozen=True)
class Target:
    """A limit on a ratio, for the cases it speaks of."""

    text: str
    ratio: Ratio
    limit: float
    speaks_of: Callable[[Row], bool]
    at_least: bool = True

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target(
        "a GPU, 131,072 tokens or more: 0.95 of dense attention's rate at the same FLOPs, or better",
        rate,
        0.95,
        lambda row: _on_gpu(row) and row.suite == "attention" and row.case.tokens >= 131_072,
    ),
    Target(
        "a GPU, 32,768 tokens, forward and backward: 8 times faster than torchscale, or better",
        faster_than(TORCHSCALE),
        8.0,
        lambda row: _on_gpu(row) and row.suite != "blocksparse" and row.case.tokens == 32_768 and row.case.backward,
    ),
    Target(
        "a GPU, 2,048 tokens: at most 1.5 times one dense call on the same tokens",
        slower_than_dense,
        1.5,
        lambda row: _on_gpu(row) and row.case.tokens == 2048,
        at_least=False,
    ),
    Target(
        "a GPU, peak memory of forward and backward: at most 1.10 of what they must hold",
        memory,
        1.10,
        lambda row: _on_gpu(row) and row.suite != "short",
        at_least=False,
    ),
    Target(
        "a GPU, 1M to 16M tokens: time per token within 3 %",
        off_linear,
        0.03,
        lambda row: _on_gpu(row) and row.suite == "scaling" and row.case.tokens > 1 << 20,
        at_least=False,
    ),
    Target(
        "a GPU, 32,768 tokens, a tenth of the tiles: 7 times faster than all through the same kernels, or better",
        faster_than(EVERY_TILE),
        7.0,
        lambda row: _on_gpu(row) and row.suite == "blocksparse" and row.case.tokens == 32_768,
    ),
    Target(
        "a GPU, 32,768 tokens, a tenth of the tiles: 1.3 times faster than FlexAttention with the same, or better",
        faster_than(FLEX),
        1.3,
        lambda row: _on_gpu(row) and row.suite == "blocksparse" and row.case.tokens == 32_768,
    ),
    Target(
        "a CPU: 0.9 of dense attention's rate at the same FLOPs, or better",
        rate,
        0.9,
        lambda row: row.case.device == "cpu" and row.suite == "attention",
    ),
)


def _on_gpu(row: Row) -> bool:
    return row.case.device == "cuda"


@dataclass(frozen=True)
class Verdict:
    """How a target fared: the worst value, its case, and how many of the cases met it."""

    worst: float
    case: Case
    met: int
    cases: int


def judge(target: Target, rows: Sequence[Row]) -> Verdict | None:
    """None where nothing that the target speaks of was measured."""
    values = [
        (value, row.case) for row in rows if target.speaks_of(row) and (value := target.ratio(row, rows)) is not None
    ]
    if not values:
        return None
    worst, case = (min if target.at_least else max)(values, key=lambda pair: pair[0])
    return Verdict(worst, case, sum(target.met_by(value) for value, _ in values), len(values))


@dataclass(frozen=True)
class Published:
    """A figure that this benchmark did not measure."""

    who: str
    where: str
    case: Case
    milliseconds: float


_GROUPED: dict[str, Any] = {"tokens": 1_048_576, "heads": 12, "head_dim": 64, "head_layout": "grouped", **USUAL}
_H200 = "one NVIDIA H200, PyTorch 2.11"
PUBLISHED = (
    Published("fkodom/dilated-attention-pytorch", _H200, Case(**_GROUPED), 12.4),
    Published("fkodom/dilated-attention-pytorch", _H200, Case(**_GROUPED, backward=True), 76.6),
)


def beside_published(rows: Iterable[Row]) -> list[tuple[Published, float]]:
    """The published figures whose case was measured, with our milliseconds."""
    ours = {row.case: row.measured(OURS, "milliseconds") for row in rows}
    return [(one, time) for one in PUBLISHED if (time := ours.get(one.case)) is not None]
