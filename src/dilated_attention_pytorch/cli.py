"""The command `dilated-attention`."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import sys
import time
import traceback
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from dilated_attention_pytorch.tools.command import add_doctor, add_show


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 after an error that the user can mend, or 128 + the number of a signal."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if given[:1] == ["train"]:
            from dilated_attention_pytorch.train.command import run_command

            run_command(given[1:])
            return 0
        if given and given[0] in _IN_CHECKOUT and given[:2] != ["bench", "tune"]:
            return _run_from_checkout(*given)
        arguments = _parser().parse_args(given)
        status: int | None = arguments.command(arguments)
    except (OSError, ValueError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"dilated-attention: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        return getattr(stop, "status", 130)
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dilated-attention", description="Dilated attention for very long sequences.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    # Listed here; `train.command` parses its flags. `rank` is what `train --ranks` starts on each process.
    commands.add_parser("train", help="train a LongNet language model", add_help=False)
    rank = commands.add_parser("rank")
    rank.set_defaults(command=_rank)
    rank.add_argument("file", type=Path)

    generate = commands.add_parser(
        "generate",
        help="continue a prompt with a trained model",
        description="Continue a prompt with the model of a run; figures go to stderr.",
    )
    generate.set_defaults(command=_generate)
    generate.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or one of save_pretrained")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue; - reads stdin")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="tokens to generate (200)")
    for flag, kind, text in (
        ("--temperature", float, "divides the logits; 0 takes the likeliest token (1.0)"),
        ("--top-k", int, "draw from the K likeliest tokens"),
        ("--top-p", float, "draw from the fewest tokens that together have this probability"),
        ("--seed", int, "of the draws"),
        ("--chunk", int, "tokens of the prompt to take at once (all)"),
    ):
        generate.add_argument(flag, type=kind, help=text, default=argparse.SUPPRESS)
    generate.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")

    bench = commands.add_parser("bench", help="tune the kernels for this GPU; in a checkout, run a benchmark suite")
    bench.set_defaults(command=_tune)
    bench.add_argument("suite", choices=["tune"], help="measure the kernels' tiles, for DILATED_ATTENTION_TILES")
    bench.add_argument("--out", type=Path, default=Path("tiles.jsonl"), metavar="FILE", help="default: tiles.jsonl")
    _add_report(commands)
    commands.add_parser("recall", help="in a checkout: recall over long distances, LongNet beside a sliding window")
    _add_plan(commands)
    add_show(commands)
    add_doctor(commands)
    return parser


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="a training run as one HTML page",
        description="Settings, curves, checkpoints, samples and machines of a run as one HTML page that needs nothing "
        "else; also of a run that is going on, was interrupted or is damaged, as far as it can be read.",
    )
    report.set_defaults(command=_report)
    report.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    report.add_argument("--out", type=Path, metavar="FILE.html", help="default: report.html in the run's folder")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="memory of a training step on one GPU, or cost of attention on many, without running it",
        description="With --model: the longest sequence that fits a training step of a model on one GPU, and the "
        "memory options for it; with --tokens too, the cheapest options for that length. With --gpus: the cost of "
        "attention over --tokens tokens on several GPUs: bytes sent, memory, work, and the time at the given rates.",
        argument_default=argparse.SUPPRESS,
    )
    plan.set_defaults(command=_plan)
    for flag, kind, metavar, text in (
        ("--tokens", whole_number, "N", "tokens of the whole sequence, such as 1e9"),
        ("--model", str, "SIZE", "125m, 350m, 760m, 770m, 1.3b, 2.7b or 6b"),
        ("--gpu", size_in_gib, "GIB", "with --model: memory of the GPU (default: 80)"),
        ("--host", size_in_gib, "GIB", "with --model: host memory to offload to (default: any)"),
        ("--vocabulary", whole_number, "V", "with --model: size of the vocabulary (default: 50304)"),
        ("--gpus", whole_number, "P", "GPUs that share the sequence"),
        ("--heads", whole_number, "H", "query heads (default: 12)"),
        ("--kv-heads", whole_number, "H", "key/value heads (default: the query heads)"),
        ("--head-dim", whole_number, "D", "features per head (default: 64)"),
        ("--batch", whole_number, "B", "sequences (default: 1)"),
        ("--layers", whole_number, "L", "attention layers (default: 1)"),
        ("--layout", str, None, "layout of heads: interleaved, blocked or grouped"),
        ("--dtype", str, None, "bfloat16 (default), float16, float32 or float64"),
        ("--scheme", str, None, "auto, gather, ring or all_to_all"),
        ("--token-layout", str, None, "contiguous or zigzag shards"),
        ("--memory-budget", whole_number, "BYTES", "memory that auto may use for gathered rows (default: 2 GiB)"),
        ("--tflops", float, None, "TFLOP/s of attention per GPU (default: 400, bf16 on an H200)"),
        ("--link-gbps", float, None, "gigabits per second that a GPU sends while it receives (default: 400)"),
    ):
        plan.add_argument(flag, type=kind, metavar=metavar, help=text)
    for flag, text in (("--segments", "segment lengths"), ("--rates", "dilation rates")):
        plan.add_argument(flag, nargs="+", type=whole_number, help=f"{text}, one per branch (default: for all tokens)")
    plan.add_argument("--causal", action="store_true", help="rows see only earlier rows")
    plan.add_argument("--json", action="store_true", default=False, help="print JSON, with every rank")


def whole_number(stated: str) -> int:
    """Parse a flag that takes a whole number, also as 1e9."""
    try:
        number = Decimal(stated.replace(",", ""))
    except ArithmeticError:
        number = Decimal("nan")
    if not number.is_finite() or abs(number) >= 1 << 63 or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 65536 or 1e9, got {stated!r}")
    return int(number)


def size_in_gib(stated: str) -> float:
    """Parse a flag that takes a memory size in GiB."""
    try:
        size = float(stated)
    except ValueError:
        size = math.nan
    if not 0 <= size < 1 << 30:
        raise argparse.ArgumentTypeError(f"must be a size in GiB, such as 80, got {stated!r}")
    return size


# Commands that are modules of a checkout of the repository, not of the installed package.
_IN_CHECKOUT = {"bench": "benchmarks.command", "recall": "examples.recall"}


def _run_from_checkout(command: str, *arguments: str) -> int:
    module, root = _IN_CHECKOUT[command], Path(__file__).parents[2]
    if not (root / module.replace(".", "/")).with_suffix(".py").is_file():
        raise ValueError(
            f"{command} is run from a checkout of the repository, whose folders benchmarks/ and examples/ are not "
            f"installed: ./run {command} --help there lists its options. `bench tune` works without a checkout"
        )
    sys.path.insert(0, str(root))
    run: int = importlib.import_module(module).main(arguments)
    return run


def _tune(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.kernels.triton.tune import tune

    tune(arguments.out)


def _plan(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    as_data = given.pop("json")
    if "model" in given:
        _plan_step(given, as_data)
        return
    if "gpus" not in given or "tokens" not in given:
        raise ValueError("plan needs --model SIZE for a training step, or --tokens N and --gpus P for attention")
    if mine := sorted(given.keys() & {"gpu", "host", "vocabulary"}):
        raise ValueError(f"--{', --'.join(mine)} go with --model: name one, or leave them out")
    from dilated_attention_pytorch.core.spec import DilatedSpec
    from dilated_attention_pytorch.parallel.plan import Job, make_plan
    from dilated_attention_pytorch.tools.plan import as_json, text

    layout = given.pop("layout", "interleaved")
    if given.keys() & {"segments", "rates"}:
        spec = DilatedSpec.of(given.pop("segments", []), given.pop("rates", []), layout)
    else:
        heads = given.get("kv_heads", given.get("heads", Job.heads))
        spec = DilatedSpec.for_length(given["tokens"], heads, head_layout=layout)
    plan = make_plan(Job(spec=spec, is_causal=given.pop("causal", False), **given))
    print(json.dumps(as_json(plan), indent=1) if as_data else "\n".join(text(plan)))


def _plan_step(given: dict[str, Any], as_data: bool) -> None:
    from dilated_attention_pytorch.tools.plan import fit_json, fit_text
    from dilated_attention_pytorch.train.fitting import cheapest_fit, longest_fits
    from dilated_attention_pytorch.train.presets import text_model

    known = {"model", "tokens", "gpu", "host", "vocabulary", "segments", "rates", "batch"}
    if others := sorted(given.keys() - known):
        names = ", ".join("--" + name.replace("_", "-") for name in others)
        raise ValueError(f"{names} cannot change a model's size, nor how one GPU trains it: leave it out with --model")
    fields = {"vocabulary": "vocab_size", "segments": "segment_lengths", "rates": "dilation_rates"}
    changes = {name: given[flag] for flag, name in fields.items() if flag in given}
    gpu, batch, tokens = int(given.get("gpu", 80) * 2**30), given.get("batch", 1), given.get("tokens")
    room = {"batch": batch, "host_bytes": int(given["host"] * 2**30) if "host" in given else None}
    config = text_model(given["model"], **changes, **({} if tokens is None else {"sequence_length": tokens}))
    if tokens is None:
        fits = list(longest_fits(config, gpu, **room))
        if fits:  # branches that connect what was found
            config = text_model(given["model"], **changes, sequence_length=fits[-1].tokens)
            fits = list(longest_fits(config, gpu, **room))
    else:
        fits = [fit for fit in [cheapest_fit(config, tokens, gpu, **room)] if fit is not None]
    if not fits:
        length = "any sequence" if tokens is None else f"{tokens:,} tokens"
        raise ValueError(
            f"no combination of options trains {given['model']} on {length} in {gpu / 2**30:g} GiB: take a larger GPU, "
            "a smaller model, or several GPUs (train --engine fsdp --sequence-parallel P)"
        )
    if as_data:
        print(json.dumps(fit_json(given["model"], config, fits), indent=1))
    else:
        print(*fit_text(given["model"], config, gpu, batch, fits, asked=tokens is not None), sep="\n")


def _rank(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.train.command import train_rank

    train_rank(arguments.file)


def _report(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.train.report import write_run_report

    print(write_run_report(arguments.run, arguments.out))


def _generate(arguments: argparse.Namespace) -> None:
    import torch

    from dilated_attention_pytorch.train.checkpoint import list_checkpoints, load_newest
    from dilated_attention_pytorch.train.engine import find_device
    from dilated_attention_pytorch.train.run_folder import holds_run
    from dilated_attention_pytorch.train.tokenizer import saved_tokenizer

    checkpoints = list_checkpoints(arguments.run)
    if not checkpoints and holds_run(arguments.run):
        raise FileNotFoundError(f"the run in {arguments.run} has no complete checkpoint yet: wait until it has")
    device = find_device(arguments.device or "auto")
    folder, model = load_newest(checkpoints or [arguments.run], device)
    tokenizer = saved_tokenizer(folder, model.config.vocab_size)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise ValueError("a prompt needs at least one character")
    tokens = torch.tensor([tokenizer.encode(prompt)], device=device)
    if not tokens.numel():
        raise ValueError("the model's tokenizer makes no token of this prompt: give another one")
    settings = {"temperature", "top_k", "top_p", "seed", "chunk"}
    given = {name: value for name, value in vars(arguments).items() if name in settings}
    text = tokenizer.stream()
    print(prompt, end="", flush=True)
    began = time.perf_counter()
    first: float | None = None
    count = 0
    for chosen in model.stream(tokens, arguments.max_new_tokens, **given):
        print(text.step(int(chosen)), end="", flush=True)
        first = time.perf_counter() if first is None else first
        count += 1
    ended = time.perf_counter()
    print(text.end())
    if first is not None:
        rate = "" if count < 2 else f", then {(count - 1) / (ended - first):.1f} tokens/s"
        figures = f"{tokens.shape[1]} tokens of prompt and the first new one in {first - began:.3f} s{rate}"
        print(f"{count} tokens: {figures}", file=sys.stderr)


def entry() -> NoReturn:
    """The command as a process, whose status is right also where an error has left ranks waiting for each other."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show must not end a run
            stream.reconfigure(errors="replace")
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    if f"{__package__}.train" in sys.modules:  # else there are no ranks
        from dilated_attention_pytorch.train.engine import exit_process

        exit_process(status)
    sys.exit(status)


if __name__ == "__main__":
    entry()
