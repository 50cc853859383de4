"""The command `bench`: one subcommand per suite, and `all`, `tune`, `page` and `report`."""

from __future__ import annotations

import argparse
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import choose_cases
from benchmarks.report import handwritten, write_page, write_report
from benchmarks.suite import Options, run
from benchmarks.suites import SUITES
from dilated_attention_pytorch.tools.command import size_in_gib, whole_number


def _count(stated: str) -> int:
    number = whole_number(stated)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {stated}")
    return number


_ALL = ("attention", "short", "scaling", "blocksparse")
# The flags of suites, each without its dashes.
_FLAGS: dict[str, dict[str, Any]] = {
    "device": {"choices": ["cpu", "cuda"], "help": "default: a GPU if there is one"},
    "tokens": {"nargs": "+", "type": _count, "metavar": "N", "help": "measure these lengths"},
    "only": {"nargs": "+", "metavar": "NAME", "help": "measure these contenders or techniques, named as in the table"},
    "cases": {"nargs": "+", "metavar": "WORD", "help": "measure cases with all these words: D=64 causal forward"},
    "kernels": {"choices": ["best", "plain"], "help": "plain: those of any GPU, against PyTorch's flash kernel"},
    "with": {"dest": "wheels", "type": Path, "metavar": "PATH", "help": "a folder of unpacked wheels: flash-attn-4"},
    "torchscale": {"type": Path, "metavar": "PATH", "help": "a checkout of microsoft/torchscale to measure"},
    "heads": {"type": _count, "metavar": "H", "help": "number of heads"},
    "head_dim": {"type": _count, "metavar": "D", "help": "dimension of a head"},
    "sizes": {"nargs": "+", "metavar": "SIZE", "help": "model sizes: 125m, 350m, ..."},
    "batches": {"nargs": "+", "type": _count, "metavar": "B", "help": "batch sizes"},
    "cap": {"type": size_in_gib, "metavar": "GIB", "help": "GPU memory that may be used (default: 80)"},
    "data": {"nargs": "+", "metavar": "PATH", "help": "text files and folders (default: Python's standard library)"},
    "ranks": {"action": "store_true", "help": "check steps on two ranks against the same steps in one process"},
    "host": {"type": size_in_gib, "metavar": "GIB", "help": "host memory that may be used (default: 110)"},
}
_BESIDE = "(default: next to the results, with their name)"
_PAGE = {"type": Path, "default": None, "metavar": "FILE", "help": f"the Markdown page to write {_BESIDE}"}
_HTML = {"type": Path, "default": None, "metavar": "FILE", "help": f"the HTML report to write {_BESIDE}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite; the exit status is 0, or 1 after an error, which is printed."""
    arguments = vars(parser().parse_args(argv))
    try:
        _run(arguments.pop("suite"), **arguments)
    except (OSError, ValueError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    bench = argparse.ArgumentParser(
        prog="bench", description="Measure a suite against the strongest baselines, or render results."
    )
    commands = bench.add_subparsers(dest="suite", required=True, metavar="SUITE")

    def add(name: str, about: str, flags: Sequence[str] = (), **more: dict[str, Any]) -> None:
        command = commands.add_parser(name, help=about, description=about, argument_default=argparse.SUPPRESS)
        for flag, settings in {**{flag: _FLAGS[flag] for flag in flags}, **more}.items():
            command.add_argument("--" + flag.replace("_", "-"), **settings)

    out = {"type": Path, "metavar": "FILE", "help": "append the results to this file, as JSON lines"}
    results = {"type": Path, "required": True, "metavar": "FILE", "help": "the results, as JSON lines"}
    for suite in SUITES.values():
        add(suite.name, suite.about, suite.flags, out=out)
    add(
        "all", f"the suites {', '.join(_ALL)}, then page and report",
        SUITES["attention"].flags, out=results, page=_PAGE, html=_HTML,
    )  # fmt: skip
    add("page", "write results as a Markdown page", out=results, page=_PAGE)
    add("report", "write results as an HTML report with charts", out=results, html=_HTML)
    tiles = {"type": Path, "default": Path("tiles.jsonl"), "metavar": "FILE", "help": "default: tiles.jsonl"}
    add("tune", "measure the kernels' tiles on this GPU, for DILATED_ATTENTION_TILES", out=tiles)
    return bench


def _run(
    name: str, *, device: str | None = None, page: Path | None = None, html: Path | None = None, **stated: Any
) -> None:
    if name == "tune":
        from dilated_attention_pytorch.kernels.triton.tune import tune

        tune(stated["out"])
        return
    if name in ("all", "page"):
        page = page or stated["out"].with_suffix(".md")
        handwritten(page)  # refuse before minutes of measuring
    if name in ("all", "report"):
        html = html or stated["out"].with_suffix(".html")
    if name in SUITES or name == "all":
        on_any_device = name == "all" or "device" in SUITES[name].flags
        if wheels := stated.get("wheels"):
            if not wheels.is_dir():
                raise ValueError(f"--with {wheels} is not a folder: unpack wheels into one, and name it")
            site.addsitedir(str(wheels))  # where a wheel may have added folders of its own
        options = Options(device=_device(device) if on_any_device else "cpu", **stated)
        names = [name] if name in SUITES else list(choose_cases(_ALL, options))
        run([SUITES[one] for one in names], options)
    for path, write in ((page, write_page), (html, write_report)):
        if path is not None:
            write(stated["out"], path)
            print(path)


def _device(stated: str | None) -> str:
    import torch

    if stated == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and PyTorch finds none: leave it out, or pass --device cpu")
    return stated or ("cuda" if torch.cuda.is_available() else "cpu")
