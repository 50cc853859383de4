"""The command `dilated-attention`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dilated_attention_pytorch.tools.command import add_doctor, add_explore, add_plan, add_show


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 after an error that the user can fix, or 128 + the number of a signal."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if given == ["help"]:
            given = ["--help"]
        if given[:1] == ["train"]:
            from dilated_attention_pytorch.train.command import run_command

            return run_command(given[1:])
        if given[:1] == ["slides"]:
            from dilated_attention_pytorch.slides.command import run_slides

            return run_slides(given[1:])
        if given and given[0] in _IN_CHECKOUT and given[:2] != ["bench", "tune"]:
            return _run_from_checkout(*given)
        arguments = _parser().parse_args(given)
        status: int | None = arguments.command(arguments)
    except (OSError, ValueError, FloatingPointError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            return 128 + 13  # SIGPIPE
        if _tells_errors(given):
            print(f"dilated-attention: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        return getattr(stop, "status", 130)
    return status or 0


def _is_output_closed() -> bool:
    """Whether the reader of the output, such as `head`, has stopped reading; then the rest of the output is dropped.

    Otherwise another pipe has broken, such as that of a worker.
    """
    if not hasattr(select, "poll"):  # as on Windows
        return False
    output, poll = sys.stdout.fileno(), select.poll()
    poll.register(output, 0)
    if is_closed := any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_closed


def _tells_errors(given: Sequence[str]) -> bool:
    """Whether this process prints its errors: of the ranks of `train --ranks`, only the first that fails does."""
    if given[:1] != ["rank"]:
        return True
    from dilated_attention_pytorch.train.command import is_first_to_fail

    return is_first_to_fail(Path(given[-1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dilated-attention", description="Dilated attention for very long sequences.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {sys.modules[str(__package__)].__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    # Listed here; `train.command` parses its flags. `rank` is what `train --ranks` starts on each process.
    commands.add_parser("train", help="train a LongNet language model", add_help=False)
    rank = commands.add_parser("rank")
    rank.set_defaults(command=_rank)
    rank.add_argument("file", type=Path)

    generate = commands.add_parser(
        "generate",
        help="continue a prompt, a file or a conversation with a trained model",
        description="Continue a prompt with the model of a run; figures go to stderr.",
    )
    generate.set_defaults(command=_generate)
    generate.add_argument("run", type=Path, metavar="RUN", help=_RUN_OR_WEIGHTS)
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue; - reads stdin")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file to continue, which is not printed")
    generate.add_argument(
        "--interactive", action="store_true", help="read prompts line by line; each continues the conversation so far"
    )
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    for flag, kind, text in (
        ("--temperature", float, "divides the logits; 0 takes the likeliest token (default: 1.0)"),
        ("--top-k", int, "draw from the K likeliest tokens"),
        ("--top-p", float, "draw from the fewest tokens that together have this probability"),
        ("--seed", int, "seed of the draws"),
        ("--chunk", int, "the most tokens of the prompt to process at once (default: as many as take 8 GiB)"),
    ):
        generate.add_argument(flag, type=kind, help=text, default=argparse.SUPPRESS)
    generate.add_argument("--int8", action="store_true", help="round weights to 8 bits with torchao; changes tokens")
    generate.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")

    export = commands.add_parser(
        "export",
        help="write a trained model for another library",
        description="Write the model of a run as a folder that transformers loads, with the run's tokenizer.",
    )
    export.set_defaults(command=_export)
    export.add_argument("run", type=Path, metavar="RUN", help=_RUN_OR_WEIGHTS)
    export.add_argument("--hf", type=Path, metavar="FOLDER", required=True, help="a new or empty folder to write")

    bench = commands.add_parser("bench", help="tune the kernels for this GPU; in a checkout, run a benchmark suite")
    bench.set_defaults(command=_tune)
    bench.add_argument("suite", choices=["tune"], help="measure the kernels' tiles, for DILATED_ATTENTION_TILES")
    bench.add_argument("--out", type=Path, default=Path("tiles.jsonl"), metavar="FILE", help="default: tiles.jsonl")

    report = commands.add_parser(
        "report",
        help="write a training run as one HTML page",
        description="Write settings, curves, checkpoints, samples and machines of a run as one HTML page that needs no "
        "other file. Runs that are in progress, interrupted or damaged are shown as far as they can be read.",
    )
    report.set_defaults(command=_report)
    report.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    report.add_argument("--out", type=Path, metavar="FILE.html", help="default: report.html in the run's folder")

    commands.add_parser("recall", help="in a checkout: compare recall over long distances with a sliding window")
    commands.add_parser("evidence", help="in a checkout: compare dense, dilated and windowed attention on real text")
    # Listed here; `slides.command` parses its flags.
    commands.add_parser("slides", help="train an encoder on features of slides, and map where it looks", add_help=False)
    add_plan(commands)
    add_show(commands)
    add_explore(commands)
    add_doctor(commands)
    return parser


_RUN_OR_WEIGHTS = "the folder of a run, of one of its checkpoints, or of save_pretrained"

# Commands that are modules of a checkout of the repository, not of the installed package.
_IN_CHECKOUT = {"bench": "benchmarks.command", "recall": "examples.recall", "evidence": "examples.evidence.__main__"}


def _run_from_checkout(command: str, *arguments: str) -> int:
    module, root = _IN_CHECKOUT[command], Path(__file__).parents[2]
    if not (root / module.replace(".", "/")).with_suffix(".py").is_file():
        raise ValueError(
            f"{command} runs from a checkout of the repository, because benchmarks/ and examples/ are not "
            f"installed: ./run {command} --help there lists its options. `bench tune` works without a checkout"
        )
    sys.path.insert(0, str(root))
    run: int = importlib.import_module(module).main(arguments)
    return run


def _tune(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.kernels.triton.tune import tune

    tune(arguments.out)


def _rank(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.train.command import train_rank

    train_rank(arguments.file)


def _report(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.slides.loop import STUDY
    from dilated_attention_pytorch.train.report import write_run_report

    if any(arguments.run.glob(STUDY)) or any(arguments.run.glob(f"fold-*/{STUDY}")):
        raise ValueError(f"{arguments.run} is a run of slides: use `slides report {shlex.quote(str(arguments.run))}`")
    print(write_run_report(arguments.run, arguments.out))


def _export(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.train.export import export_to_hf

    print(f"{export_to_hf(arguments.run, arguments.hf)} is now in {arguments.hf}; to load it with transformers, first")
    print("import dilated_attention_pytorch.models.hf, which registers its classes")


def _generate(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.tools.generate import generate

    generate(arguments)


def entry() -> NoReturn:
    """The command as a process, which ends with its status even if an error has left ranks waiting for each other."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that a terminal cannot show must not end a run
            stream.reconfigure(errors="replace")
    try:
        status = main()
    except Exception:
        if _tells_errors(sys.argv[1:]):
            traceback.print_exc()
        status = 1
    if f"{__package__}.train" in sys.modules:  # else there are no ranks
        from dilated_attention_pytorch.train.ranks import exit_process

        exit_process(status)
    sys.exit(status)


if __name__ == "__main__":
    entry()
