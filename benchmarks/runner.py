"""Running suites: every contender on every case, a table as it goes, and JSON lines."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Setup
from benchmarks.harness import Case, machine, measure
from benchmarks.results import RATIOS, Row, cell, describe, ratio_cell, why_not_measured

_TITLE, _CELL, _RATIO = 76, 19, 15  # widths of the printed columns


def run_suites(
    cases: Mapping[str, Sequence[Case]], contenders: Mapping[str, Setup], device: str, out: Path | None = None
) -> list[Row]:
    """Measure the cases of each suite; prints a row a case and appends JSON lines to `out` as they come.

    A contender that fails is recorded with its reason, and the run goes on.
    """
    every: list[Row] = []
    found = machine(device)
    print(describe(found))
    append_line(out, {"machine": found})
    for suite, chosen in cases.items():
        rows: list[Row] = []
        reasons: dict[str, None] = {}
        print(f"\n{suite}: milliseconds (TFLOP/s)\n{'':<{_TITLE}}", end="")
        print(*(f"{name:>{_CELL}}" for name in contenders), *(f"{name:>{_RATIO}}" for name in RATIOS), flush=True)
        for case in chosen:
            row = Row(suite, case, describe(found), {})
            rows.append(row)
            print(f"{case.title:<{_TITLE}}", end="", flush=True)
            attempts: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
            for left in reversed(range(_TURNS[device])):
                for name, setup in contenders.items():
                    attempts[name].append(_attempt(setup, case))
                    if not left:
                        line = {"suite": suite, "contender": name, **asdict(case), **_middle(attempts[name])}
                        row.lines[name] = line
                        append_line(out, line)
                        print(f"{cell(line):>{_CELL}} ", end="", flush=True)
                    _clear(device, out)
            print(*(f"{ratio_cell(value(row, rows)):>{_RATIO}}" for _, value in RATIOS.values()), flush=True)
            reasons |= dict.fromkeys(why_not_measured(row))
        print(*(f"- {reason}" for reason in reasons), sep="\n")
        every += rows
    print()
    print(*(f"{name}: {meaning}" for name, (meaning, _) in RATIOS.items()), sep="\n")
    return every


# How often contenders are measured: what else a CPU does comes and goes for longer than one of them takes.
_TURNS = {"cuda": 1, "cpu": 3}


def _middle(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The attempt that took neither the least nor the most time; one that failed, or sat out, stands for all."""
    without = [turn for turn in turns if "milliseconds" not in turn]
    return without[0] if without else sorted(turns, key=itemgetter("milliseconds"))[len(turns) // 2]


def _attempt(setup: Setup, case: Case) -> dict[str, Any]:
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
        first = (str(error).strip() or "no message").splitlines()[0]
        return {"failed": f"{type(error).__name__}: {first}"}
    return {
        "milliseconds": round(timing.median, 4),
        "p20": round(timing.p20, 4),
        "p80": round(timing.p80, 4),
        "peak_bytes": None if timing.peak_bytes is None else timing.peak_bytes - held,
        "tflops": round(ready.flops / timing.median / 1e9, 4),
    }


def _clear(device: str, out: Path | None) -> None:
    """Free what a contender held, so that the next one's peak memory is its own."""
    gc.collect()
    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # an illegal access: every later call in this process would fail too
        raise OSError(f"the GPU cannot be used after this failure; what was measured is in {out}: {error}") from error
    torch.cuda.empty_cache()


def append_line(path: Path | None, line: dict[str, Any]) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
