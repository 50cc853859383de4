"""Rows of contenders that were measured on one case, the ratios between them, and the targets they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.cases import USUAL
from benchmarks.contenders import (
    DENSE_CAPTURED,
    DROPOUT,
    EVERY_TILE,
    FA4,
    FLASH,
    FLEX,
    FLEX_FLASH,
    FLOOR,
    OURS,
    OURS_CAPTURED,
    PLAIN,
    SAME_TOKENS,
    TORCHSCALE,
)
from benchmarks.harness import Case
from benchmarks.suite import Record


@dataclass
class Row:
    """One case of a suite, with every contender's record from one run on one machine."""

    suite: str
    case: Case
    machine: str
    lines: dict[str, Record]

    def measured(self, contender: str, what: str) -> float | None:
        """`what` of a contender that ran; None of one that sat out or failed."""
        return self.lines.get(contender, {}).get(what)

    def why_not_measured(self) -> list[str]:
        """One line for each contender that failed or sat out."""
        lines = self.lines.items()
        failed = [f"{name} failed at {self.case.title}: {line['failed']}" for name, line in lines if "failed" in line]
        return failed + [f"{name}: {line['skipped']}" for name, line in lines if "skipped" in line]


def rows_of(records: Iterable[Record]) -> list[Row]:
    """The rows of contenders' records. A case that several runs measured is from the last of them, whole."""
    rows: dict[tuple[str, Case], tuple[int, Row]] = {}
    for record in records:
        if "contender" in record:
            key = record["suite"], _case(record)
            run, row = rows.get(key, (None, None))
            if row is None or run != record["run"]:
                row = Row(*key, record["machine"], {})
                rows[key] = record["run"], row
            row.lines[record["contender"]] = record
    return [row for _, row in rows.values()]


def _case(line: Record) -> Case:
    # A line of an earlier release lacks what it did not know, and means its default.
    values: dict[str, Any] = {field.name: line[field.name] for field in fields(Case) if field.name in line}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Case(**(values | lists))


Ratio = Callable[[Row, Sequence[Row]], "float | None"]


def rate(row: Row, rows: Sequence[Row]) -> float | None:
    dense = [row.measured(name, "tflops") or 0.0 for name in (FLOOR, FA4)]
    return _quotient(row.measured(OURS, "tflops"), max(dense))


def plain_rate(row: Row, rows: Sequence[Row]) -> float | None:
    return _quotient(row.measured(PLAIN, "tflops"), row.measured(FLASH, "tflops"))


def memory(row: Row, rows: Sequence[Row]) -> float | None:
    peak = row.measured(OURS, "peak_bytes")
    has_floor = row.case.backward and not row.case.encoder_layers
    return _quotient(peak, row.case.floor_bytes) if has_floor else None


def per_token(row: Row, rows: Sequence[Row]) -> float | None:
    """Time per token, relative to the shortest case of the suite that differs only in length."""
    if row.suite != "scaling":
        return None
    case = but_for_length(row.case)
    alike = [other for other in rows if other.suite == row.suite and but_for_length(other.case) == case]
    shortest = min(alike, key=lambda other: other.case.tokens)
    now, then = (_quotient(one.measured(OURS, "milliseconds"), one.case.tokens) for one in (row, shortest))
    return _quotient(now, then)


def but_for_length(case: Case) -> Case:
    """The case without what depends on its length: tokens, and branches that reach over all of them."""
    if max(case.segment_lengths) >= case.tokens:
        case = replace(case, segment_lengths=(1,), dilation_rates=(1,))
    return replace(case, tokens=1)


def off_linear(row: Row, rows: Sequence[Row]) -> float | None:
    relative = per_token(row, rows)
    return None if relative is None else abs(relative - 1.0)


def time_over(contender: str, other: str) -> Ratio:
    return lambda row, rows: _quotient(row.measured(contender, "milliseconds"), row.measured(other, "milliseconds"))


def faster_than(*contenders: str) -> Ratio:
    """The time of the fastest of them over ours."""

    def ratio(row: Row, rows: Sequence[Row]) -> float | None:
        times = [time for name in contenders if (time := row.measured(name, "milliseconds")) is not None]
        return _quotient(min(times), row.measured(OURS, "milliseconds")) if times else None

    return ratio


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


RATIOS: dict[str, tuple[str, Ratio]] = {
    "of dense": (f"our TFLOP/s over those of `{FLOOR}`, or of `{FA4}` if it is faster", rate),
    "torchscale/ours": (f"milliseconds of `{TORCHSCALE}` over ours", faster_than(TORCHSCALE)),
    "dense/ours": (f"milliseconds of `{SAME_TOKENS}` over ours", faster_than(SAME_TOKENS)),
    "every tile/ours": (f"milliseconds of `{EVERY_TILE}` over ours", faster_than(EVERY_TILE)),
    "Flex/ours": (f"milliseconds of `{FLEX}`, in its fastest backend, over ours", faster_than(FLEX, FLEX_FLASH)),
    "of flash": (f"TFLOP/s of `{PLAIN}` over those of `{FLASH}`", plain_rate),
    "dropout": (f"milliseconds of `{DROPOUT}` over ours without", faster_than(DROPOUT)),
    "captured dense/ours": ("`dense/ours` of CUDA graphs", time_over(DENSE_CAPTURED, OURS_CAPTURED)),
    "memory": (
        "our peak memory over the floor: what forward and backward must hold, inputs and gradients included",
        memory,
    ),
    "per token": ("our time per token over that at the suite's shortest length", per_token),
}
"""The derived columns of every table: heading, meaning, ratio."""


@dataclass(frozen=True)
class Target:
    """A limit on a ratio, for the cases that it applies to; up to `most_near` of them need to meet only `near`."""

    text: str
    ratio: Ratio
    limit: float
    cases: Callable[[Row], bool] = lambda row: True
    at_least: bool = True
    device: str = "cuda"
    near: float | None = None
    most_near: int = 0

    def applies_to(self, row: Row) -> bool:
        return row.case.device == self.device and self.cases(row)

    def met_by(self, value: float) -> bool:
        return self._is_within(value, self.limit)

    def is_met(self, values: Sequence[float]) -> bool:
        missed = [value for value in values if not self.met_by(value)]
        if self.near is None:
            return not missed
        return len(missed) <= self.most_near and all(self._is_within(value, self.near) for value in missed)

    def _is_within(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit


TARGETS = (
    Target(
        "a GPU, 131,072 tokens or more: 0.95 of dense attention's rate at the same FLOPs, or better",
        rate,
        0.95,
        lambda row: row.suite == "attention" and row.case.tokens >= 131_072,
    ),
    Target(
        "a GPU, 32,768 tokens, forward and backward: 8 times faster than torchscale, or better",
        faster_than(TORCHSCALE),
        8.0,
        lambda row: row.suite != "blocksparse" and row.case.tokens == 32_768 and row.case.backward,
    ),
    Target(
        "a GPU, GigaPath's attention alone, with backward, 10,000 tiles: 4 times faster than torchscale's, or better",
        faster_than(TORCHSCALE),
        4.0,
        lambda row: _is_gigapath_alone(row) and row.case.tokens < 45_000,
    ),
    Target(
        "the same, 45,000 and 200,000 tiles: 3 times faster, or better",
        faster_than(TORCHSCALE),
        3.0,
        lambda row: _is_gigapath_alone(row) and row.case.tokens >= 45_000,
    ),
    Target(
        "a GPU, 131,072 tokens or more, a longest segment of all of them: dense attention's rate at the same FLOPs, "
        "or 0.97 of it in up to 3 cases",
        rate,
        1.0,
        lambda row: (
            row.suite == "attention" and row.case.tokens >= 131_072 and max(row.case.segment_lengths) >= row.case.tokens
        ),
        near=0.97,
        most_near=3,
    ),
    Target(
        "a GPU, the kernels that run on any: 1.15 of the rate of PyTorch's flash kernel, or better",
        plain_rate,
        1.15,
    ),
    Target(
        "a GPU, dropout 0.1, forward and backward: at most 1.4 times the time without",
        faster_than(DROPOUT),
        1.4,
        lambda row: row.case.backward,
        at_least=False,
    ),
    Target(
        "a GPU, 512 to 4,096 tokens: at most 1.2 times one dense call on the same tokens",
        time_over(OURS, SAME_TOKENS),
        1.2,
        lambda row: row.suite == "short" and row.case.tokens <= 4096,
        at_least=False,
    ),
    Target(
        "the same in CUDA graphs",
        time_over(OURS_CAPTURED, DENSE_CAPTURED),
        1.2,
        lambda row: row.suite == "short" and row.case.tokens <= 4096,
        at_least=False,
    ),
    Target(
        "a GPU, peak memory of forward and backward: at most 1.10 of what they must hold",
        memory,
        1.10,
        lambda row: row.suite != "short",
        at_least=False,
    ),
    Target(
        "a GPU, 1M to 16M tokens: time per token within 3 %",
        off_linear,
        0.03,
        lambda row: row.suite == "scaling" and row.case.tokens > 1 << 20,
        at_least=False,
    ),
    Target(
        "a GPU, 32,768 tokens, a tenth of the tiles: 7 times faster than all through the same kernels, or better",
        faster_than(EVERY_TILE),
        7.0,
        lambda row: row.suite == "blocksparse" and row.case.tokens == 32_768,
    ),
    Target(
        "a GPU, 32,768 tokens, a tenth of the tiles: 1.3 times faster than FlexAttention with the same, or better",
        faster_than(FLEX, FLEX_FLASH),
        1.3,
        lambda row: row.suite == "blocksparse" and row.case.tokens == 32_768,
    ),
    Target(
        "a CPU: 0.9 of dense attention's rate at the same FLOPs, or better",
        rate,
        0.9,
        lambda row: row.suite == "attention",
        device="cpu",
    ),
)


def _is_gigapath_alone(row: Row) -> bool:
    return row.suite == "gigapath" and not row.case.encoder_layers and row.case.backward


@dataclass(frozen=True)
class Judged:
    """The worst value for a target, its case, and how many cases met its limit; whether the target is met."""

    worst: float
    case: Case
    met: int
    cases: int
    is_met: bool


def judge(target: Target, rows: Sequence[Row]) -> Judged | None:
    """None if no case that the target applies to was measured."""
    values = [
        (value, row.case) for row in rows if target.applies_to(row) and (value := target.ratio(row, rows)) is not None
    ]
    if not values:
        return None
    worst, case = (min if target.at_least else max)(values, key=lambda pair: pair[0])
    found = [value for value, _ in values]
    return Judged(worst, case, sum(map(target.met_by, found)), len(found), target.is_met(found))


@dataclass(frozen=True)
class Published:
    """A figure from elsewhere, not measured by this benchmark."""

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
