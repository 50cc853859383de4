"""`./run evidence`: prepare the corpus, train and measure what is not yet recorded, and draw the page."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.measuring import keeping_threads, machine
from dilated_attention_pytorch.pages.plots import matplotlib_is_installed
from dilated_attention_pytorch.tools.command import whole_number
from dilated_attention_pytorch.train.ranks import take_fastest_threads
from examples.evidence import corpus, report
from examples.evidence.measures import measure
from examples.evidence.runs import FULL, TINY, Run, Scale, all_runs, find_run, seconds_at
from examples.evidence.training import TimeIsUp, drop_checkpoint, time_steps, train

RECORDS = "evidence.jsonl"
_EPOCHS = 4
_RATE = 280e12  # FLOPs per second of --plan: 40 % of what one H200 computes in bfloat16


def parser() -> argparse.ArgumentParser:
    evidence = argparse.ArgumentParser(
        prog="evidence",
        description="Train the same small language model on the same text with dense attention, dilated attention and "
        "a sliding window, and compare what they learn, what it costs, and what context is worth. Without a GPU a tiny "
        "version runs, which shows the machinery and no result. Stop the command at any time: started again, it "
        "continues. Results are appended to evidence.jsonl, and drawn as evidence.md.",
    )
    evidence.add_argument(
        "--data", nargs="+", metavar="PATH", help="folders of text (default: on a CPU, the standard library)"
    )
    evidence.add_argument(
        "--out", type=Path, default=Path("runs/evidence"), help="folder of the results (default: runs/evidence)"
    )
    evidence.add_argument("--only", nargs="+", metavar="RUN", help="runs to do, as --plan names them (default: all)")
    evidence.add_argument("--seeds", nargs="+", type=whole_number, metavar="N", help="seeds to run (default: 0 1)")
    evidence.add_argument("--steps", type=whole_number, help="steps of each run (default: 800; on a CPU 16)")
    evidence.add_argument("--minutes", type=float, help="save and stop after this time (default: no limit)")
    evidence.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    what = evidence.add_mutually_exclusive_group()
    what.add_argument(
        "--prepare", action="store_true", help="write the corpus into the folder of the results, and stop"
    )
    what.add_argument(
        "--plan",
        action="store_true",
        help="list the runs on a GPU and what they cost, and stop; with --device cpu, those of the tiny version",
    )
    what.add_argument(
        "--times",
        action="store_true",
        help="measure only the time of a step, anew, of runs that are recorded: on a GPU without other programs, the "
        "times can be compared",
    )
    what.add_argument(
        "--report",
        nargs="?",
        type=Path,
        const=Path("docs"),
        metavar="FOLDER",
        help="only draw the page from the results in this folder (default: docs)",
    )
    return evidence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 after an error, which is printed, or 128 + the number of a signal."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.report:
            print(report.write(arguments.report, read_records(arguments.report / RECORDS)))
        else:
            with keeping_threads():
                run_evidence(arguments)
    except KeyboardInterrupt as stop:
        print("evidence: stopped; the same command continues", file=sys.stderr)
        return getattr(stop, "status", 130)
    except (OSError, ValueError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 1
    return 0


def run_evidence(arguments: argparse.Namespace) -> None:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and PyTorch finds none: leave it out, or pass --device cpu")
    # The corpus is prepared where there is no GPU, for a machine that has one; so are plans.
    for_gpu = device == "cuda" or arguments.prepare or (arguments.plan and arguments.device is None)
    scale = FULL if for_gpu else TINY
    if arguments.steps is not None:
        if arguments.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {arguments.steps}")
        scale = replace(scale, steps=arguments.steps)
    if arguments.minutes is not None and arguments.minutes <= 0:
        raise ValueError(f"--minutes must be above 0, got {arguments.minutes}")
    if arguments.times and (arguments.seeds is not None or arguments.minutes is not None):
        raise ValueError("--times takes a few steps of a run for all of its seeds: leave out --seeds and --minutes")
    out: Path = arguments.out
    runs = [find_run(name, scale) for name in arguments.only or ()] or [run for run in all_runs(scale) if not run.extra]
    pieces = [(run, seed) for seed in arguments.seeds or scale.seeds for run in runs if seed in run.seeds]
    if not pieces:
        seeds = sorted({seed for run in runs for seed in run.seeds})
        raise ValueError(f"no chosen run has one of the seeds {arguments.seeds}: choose from {seeds}")
    records = read_records(out / RECORDS) if (out / RECORDS).is_file() else []
    done = {(record["run"], record["seed"]) for record in records}
    if arguments.plan:
        return _print_plan(pieces, done)
    folder = out / "corpus"
    if scale.name == FULL.name and arguments.data is None and not (folder / corpus.SUMMARY).is_file():
        raise ValueError(f"there is no corpus in {folder}: give its text with --data, or copy that folder here")
    _prepare(folder, arguments.data, scale)
    if arguments.prepare:
        return
    take_fastest_threads(torch.device(device))
    tokens = corpus.open_corpus(folder, scale.lengths[-1], scale.tokens_per_step)
    read, there = scale.steps * scale.tokens_per_step, len(tokens.corpus.training)
    if read > _EPOCHS * there:
        raise ValueError(
            f"the corpus is too short: a run reads {read:,} tokens, and {tokens.facts['source']} has {there:,} for "
            f"training, which models learn by heart if they read it over {_EPOCHS} times: give more text with --data"
        )
    head = {"scale": scale.name, "settings": _settings(scale), "corpus": _facts(tokens.facts)}
    for record in records:
        if any(record[key] != head[key] for key in head):
            raise ValueError(
                f"{out / RECORDS} has results of other settings or text: choose another --out, or move it away"
            )
    if arguments.times:
        return _measure_times(arguments.only, records, tokens, out, scale, device)
    if scale.name != FULL.name:
        print("evidence without a GPU a tiny version runs: it shows the machinery, not the result", flush=True)
    deadline = time.monotonic() + (float("inf") if arguments.minutes is None else 60 * arguments.minutes)
    try:
        for run, seed in pieces:
            if (run.name, seed) not in done:
                records.append({**head, **_piece(run, seed, tokens, out, device, deadline)})
                _write_records(out / RECORDS, records)
                done.add((run.name, seed))
            # Also by runs of another call: to train it again would take minutes.
            waiting = {*pieces, *((one, seed) for one in all_runs(scale) if seed in one.seeds and not one.extra)}
            needed = {one.starts_as for one, other in waiting if other == seed and (one.name, seed) not in done}
            for name in (run.name, run.starts_as):
                if name is not None and name not in needed:
                    drop_checkpoint(name, seed, out)
    except TimeIsUp:
        print(f"evidence time is up: {len(done)} results are in {out / RECORDS}; the same command continues")
        return
    if matplotlib_is_installed():
        print(report.write(out, records))
    else:
        print(
            f"evidence matplotlib is not installed: copy {out / RECORDS} where it is, and draw it with --report there"
        )


def _piece(run: Run, seed: int, tokens: corpus.Tokens, out: Path, device: str, deadline: float) -> dict[str, Any]:
    """Train and measure one model; returns its record."""
    model, progress = train(run, seed, tokens, out, device, deadline)
    if time.monotonic() > deadline:
        raise TimeIsUp  # to measure takes minutes, and the model is saved
    began = time.monotonic()
    found = measure(model, run, tokens, device)
    spec = run.spec()
    print(f"{run.name}, seed {seed}: measured in {time.monotonic() - began:.0f} s", flush=True)
    return {
        "run": run.name,
        "kind": run.kind,
        "seed": seed,
        "length": run.length,
        "branches": [list(spec.segment_lengths), list(spec.dilation_rates)],
        "head_layout": run.head_layout,
        "starts_as": run.starts_as,
        "parameters": run.parameters,
        "keys_per_row": run.keys_per_row,
        "steps": run.steps,
        "flops_per_step": run.flops_per_step,
        "step_seconds": progress.step_seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "machine": machine(device),
        "curve": progress.curve,
        **found,
    }


def _measure_times(
    names: Sequence[str] | None,
    records: list[dict[str, Any]],
    tokens: corpus.Tokens,
    out: Path,
    scale: Scale,
    device: str,
) -> None:
    """Replace the times of steps in the records of these runs, by default of all."""
    recorded = list(dict.fromkeys(record["run"] for record in records))
    missing = [name for name in names or () if name not in recorded]
    if missing or not recorded:
        raise ValueError(
            f"--times measures runs that {out / RECORDS} has, and it has {', '.join(recorded) or 'none'}: "
            f"{'leave out ' + ', '.join(missing) if recorded else 'do them first, without --times'}"
        )
    here, *there = dict.fromkeys(x.get("gpu") or x["cpu"] for x in (machine(device), *(r["machine"] for r in records)))
    if there:
        raise ValueError(f"the results are of {', '.join(there)}: measure times there, as this is {here}")
    for name in names or recorded:
        seconds = time_steps(find_run(name, scale), tokens, device)
        print(f"{name}: {seconds:.3f} s per step", flush=True)
        for record in records:
            if record["run"] == name:
                record["step_seconds"] = seconds
        _write_records(out / RECORDS, records)


def _write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_whole(path, methodcaller("write_text", lines))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, one per line."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: the command without --report writes it")
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            record["run"], record["seed"], record["settings"]
            records.append(record)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} of {path} is damaged: delete it, and its run is done again") from None
    return records


def _prepare(folder: Path, data: Sequence[str] | None, scale: Scale) -> None:
    summary = folder / corpus.SUMMARY
    if not summary.is_file():
        corpus.write_corpus(data or (), folder, scale.vocab_size, scale.lengths[-1])
        return
    facts = json.loads(summary.read_text())
    if data is not None and facts["data"] != [os.path.abspath(path) for path in data]:
        raise ValueError(f"{folder} has the corpus of {facts['source']}: choose another --out, or delete that folder")
    made = (facts["vocab_size"], facts["longest"])
    if made != (scale.vocab_size, scale.lengths[-1]):
        raise ValueError(
            f"{folder} has a corpus for {made[0]:,} tokens in the vocabulary and sequences of {made[1]:,}, and these "
            f"runs take {scale.vocab_size:,} and {scale.lengths[-1]:,}: choose another --out, or delete that folder"
        )


def _settings(scale: Scale) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(asdict(scale)))


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """What the corpus is, in a few numbers."""
    splits = {
        name: {key: facts[name][key] for key in ("tokens", "bytes", "sha256")}
        | {"directories": len(facts[name]["directories"])}
        for name in ("training", "held-out")
    }
    return {"source": facts["source"], **splits}


def _print_plan(pieces: Sequence[tuple[Run, int]], done: set[tuple[str, int]]) -> None:
    rows = [["run", "seed", "branches", "keys per row", "PFLOPs", f"s at {_RATE / 1e12:.0f} TFLOP/s", ""]]
    for run, seed in pieces:
        branches = " ".join(f"{w}/{r}" for w, r in zip(run.spec().segment_lengths, run.spec().dilation_rates))
        work = run.steps * run.flops_per_step
        rows.append(
            [
                run.name,
                str(seed),
                branches if run.kind != "window" else "tiles",
                f"{run.keys_per_row:,.0f}",
                f"{work / 1e15:.3g}",
                f"{seconds_at(run, _RATE):.0f}",
                "done" if (run.name, seed) in done else "",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
