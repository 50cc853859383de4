"""The command `bench`: its flags, and the suites that they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dilated_attention_pytorch.tools.command import size_in_gib, whole_number

_AGAINST_BASELINES = ("attention", "short", "scaling", "blocksparse", "all", "gigapath")
_BY_LENGTH = (*_AGAINST_BASELINES, "cache", "pool", "shard", "ranks", "decode", "techniques")
# The suites that honour a flag; others refuse it.
_HONOURED = {
    "out": (*_BY_LENGTH, "capacity", "tune", "page", "report"),
    "only": (*_AGAINST_BASELINES, "techniques"),
    "torchscale": _AGAINST_BASELINES,
    "cases": _AGAINST_BASELINES,
    "tokens": (*_BY_LENGTH, "memory"),
    "heads": ("shard",),
    "head_dim": ("shard",),
    "sizes": ("capacity",),
    "cap": ("capacity",),
    "uncapped": ("capacity",),
    "offload": ("capacity",),
    "device": (*_BY_LENGTH, "capacity"),
    "page": ("all", "page"),
    "html": ("all", "report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite; the exit status is 0, or 1 after an error, which is printed."""
    try:
        _bench(parser().parse_args(argv))
    except (OSError, ValueError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    bench = argparse.ArgumentParser(
        prog="bench",
        description="Measure a suite beside the strongest baselines and print tables, or render results.",
    )
    bench.add_argument(
        "suite",
        choices=[
            "attention",
            "short",
            "scaling",
            "blocksparse",
            "all",
            "memory",
            "cache",
            "pool",
            "shard",
            "ranks",
            "decode",
            "gigapath",
            "capacity",
            "techniques",
            "tune",
            "page",
            "report",
        ],
        help="attention, short, scaling, blocksparse: time and memory against baselines; all: these, then page and "
        "report; memory: the eager backend's peak memory on the CPU; cache, pool: what calls share, on against off; "
        "shard: one rank's tokens beside what plan says of them, and the ring class beside the plain one; "
        "ranks: bytes that two and four ranks receive under each scheme, counted beside their formulas, and times; "
        "decode: time a token over context length, and prompts in chunks; "
        "gigapath: Prov-GigaPath's slide encoder, ours and torchscale's; "
        "capacity: training steps of each model size at the length it must reach, and at the longest that fits; "
        "techniques: each memory technique alone; "
        "tune: the kernels' tiles on this GPU, for DILATED_ATTENTION_TILES; page, report: Markdown, or HTML with "
        "charts, from results",
    )
    bench.add_argument("--out", type=Path, metavar="FILE", help="JSON lines: suites append, page and report read them")
    bench.add_argument("--only", nargs="+", metavar="NAME", help="contenders to run, as the table names them")
    bench.add_argument("--torchscale", type=Path, metavar="PATH", help="a checkout of microsoft/torchscale to measure")
    bench.add_argument(
        "--cases", nargs="+", metavar="WORD", help="cases with all these words, as in D=64 causal forward"
    )
    bench.add_argument("--tokens", nargs="+", type=int, metavar="N", help="cases of these lengths")
    for flag in ("--heads", "--head-dim"):
        bench.add_argument(flag, type=whole_number, metavar="K", help="of shard")
    bench.add_argument("--sizes", nargs="+", metavar="SIZE", help="of capacity: 125m, 350m, ...")
    bench.add_argument("--cap", type=size_in_gib, metavar="GIB", help="of capacity: the GPU's memory (80)")
    for flag, text in (
        ("--uncapped", "of capacity: the longest in all of the GPU, alone"),
        ("--offload", "of capacity: let the longest use host memory"),
    ):
        bench.add_argument(flag, action="store_true", default=None, help=text)
    bench.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    for flag, text in (
        ("--page", "where the page is written (docs/performance.md)"),
        ("--html", "where the report is written (docs/performance.html)"),
    ):
        bench.add_argument(flag, type=Path, metavar="FILE", help=text)
    return bench


def _bench(arguments: argparse.Namespace) -> None:
    from benchmarks.contenders import choose_contenders
    from benchmarks.encoders import choose_encoders, peak_memory
    from benchmarks.memory import print_memory
    from benchmarks.report import handwritten, write_page, write_report
    from benchmarks.runner import run_suites
    from benchmarks.shared import run_shared
    from benchmarks.suites import ENCODER_SUITES, SUITES, choose_cases

    suite, out = arguments.suite, arguments.out
    for name, honoured in _HONOURED.items():
        if getattr(arguments, name) is not None and suite not in honoured:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} belongs to {', '.join(honoured)}, not to {suite}: leave it out")
    if suite == "memory":
        print_memory(arguments.tokens or [131_072, 262_144])
        return
    if suite == "tune":
        from dilated_attention_pytorch.kernels.triton.tune import tune

        tune(out or Path("tiles.jsonl"))
        return
    if suite == "capacity":
        from benchmarks.capacity import run_capacity

        how = {"uncapped": bool(arguments.uncapped), "offload": bool(arguments.offload)}
        cap = 80.0 if arguments.cap is None else arguments.cap
        run_capacity(_device(arguments.device), arguments.sizes or (), cap_gib=cap, **how, out=out)
        return
    if suite == "techniques":
        from benchmarks.techniques import run_techniques

        for tokens in arguments.tokens or [None]:
            run_techniques(_device(arguments.device), tokens, arguments.only, out)
        return
    if suite in ("cache", "pool"):
        run_shared(suite, _device(arguments.device), arguments.tokens or (), out)
        return
    if suite == "shard":
        from benchmarks.shard import run_shard

        shape = (arguments.heads, arguments.head_dim)
        for tokens in arguments.tokens or [None]:
            run_shard(_device(arguments.device), tokens, *shape, out)
        return
    if suite == "ranks":
        from benchmarks.ranks import run_ranks

        for tokens in arguments.tokens or [None]:
            run_ranks(_device(arguments.device), tokens, out)
        return
    if suite == "decode":
        from benchmarks.decode import run_decode

        run_decode(_device(arguments.device), arguments.tokens or (), out)
        return
    if out is None and suite in ("all", "page", "report"):
        raise ValueError(f"{suite} needs --out FILE, the results as JSON lines")
    page, html = arguments.page or Path("docs/performance.md"), arguments.html or Path("docs/performance.html")
    if suite in ("all", "page"):
        handwritten(page)  # refuse before minutes of measuring
    if suite not in ("page", "report"):
        device = _device(arguments.device)
        suites = list(SUITES) if suite == "all" else [suite]
        cases = choose_cases(suites, device, words=arguments.cases or (), tokens=arguments.tokens or ())
        choose = choose_encoders if suite in ENCODER_SUITES else choose_contenders
        rows = run_suites(cases, choose(arguments.only, arguments.torchscale), device, out)
        print(*peak_memory(rows), sep="\n", end="")
    for render, path, named in ((write_page, page, "page"), (write_report, html, "report")):
        if suite in ("all", named):
            render(out, path)
            print(path)


def _device(stated: str | None) -> str:
    import torch

    if stated == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and PyTorch finds none: leave it out, or say --device cpu")
    return stated or ("cuda" if torch.cuda.is_available() else "cpu")
