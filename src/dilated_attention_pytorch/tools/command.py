"""The commands `show`, `explore`, `plan` and `doctor`: their flags, and what they run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import webbrowser
from decimal import Decimal
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.pages.explorer import write_explorer
from dilated_attention_pytorch.pages.plots import write_density
from dilated_attention_pytorch.parallel.plan import Job, make_plan
from dilated_attention_pytorch.tools import show
from dilated_attention_pytorch.tools.doctor import doctor
from dilated_attention_pytorch.tools.show import View


def add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="draw who sees whom, with coverage and FLOPs",
        description="Draw the pattern of one head, and count over all heads what is seen and what it costs.",
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(command=_show)
    _add_branches(parser, required=True)
    parser.add_argument("--tokens", type=whole_number, metavar="N", help="length (default: the longest segment)")
    _add_fields(parser, View)
    parser.add_argument("--width", type=whole_number, default=64, metavar="N", help="characters per line (default: 64)")
    parser.add_argument("--pattern", help="keep only the tiles of a block pattern: local_window, dilated_sparse, ...")
    _add_fields(parser, SparsePatternConfig)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a picture, .svg or .png")


def add_explore(commands: Any) -> None:
    parser = commands.add_parser(
        "explore",
        help="open a page to change a pattern and see its reach and cost",
        description="Open a page in the browser to change a pattern and see who sees whom, its reach over layers "
        "and its cost. The page is one file that needs no server.",
    )
    parser.set_defaults(command=_explore)
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the page there instead of opening it")


def add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="memory of a training step on one GPU, or cost of attention on many, without running it",
        description="With --model: the longest sequence for which a training step fits into one GPU, and the "
        "memory options for it; with --tokens too, the cheapest options for that length. With --gpus: the cost of "
        "attention over --tokens tokens on several GPUs: bytes sent, memory, work, and the time at the given rates.",
        argument_default=argparse.SUPPRESS,
    )
    plan.set_defaults(command=_plan)
    for flag, kind, metavar, text in (
        ("--tokens", whole_number, "N", "tokens of the whole sequence, such as 1e9"),
        ("--model", str, "SIZE", "125m, 350m, 760m, 770m, 1.3b, 2.7b or 6b"),
        ("--gpu", size_in_gib, "GIB", "memory of one GPU (default: 80)"),
        ("--host", size_in_gib, "GIB", "with --model: host memory to offload to (default: any)"),
        ("--vocabulary", whole_number, "V", "with --model: size of the vocabulary (default: 50304)"),
        ("--gpus", whole_number, "P", "GPUs that share the sequence"),
    ):
        plan.add_argument(flag, type=kind, metavar=metavar, help=text)
    _add_branches(plan)
    _add_fields(plan, Job)
    plan.add_argument("--json", action="store_true", default=False, help="print JSON, with every rank")


def _add_branches(parser: argparse.ArgumentParser, required: bool = False) -> None:
    of_all_tokens = "" if required else " (default: for all tokens)"
    options: dict[str, Any] = {"nargs": "+", "type": whole_number, "required": required, "metavar": "N"}
    for name, long, words in (
        ("segments", "--segment-lengths", "segment lengths"),
        ("rates", "--dilation-rates", "dilation rates"),
    ):
        parser.add_argument(f"--{name}", long, dest=name, help=f"{words}, one per branch{of_all_tokens}", **options)
    parser.add_argument("--layout", help="layout of heads: interleaved (default), blocked or grouped")


def _add_fields(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add a flag for each field of a dataclass that has a help text; the value is kept under the field's name."""
    for field in dataclasses.fields(kind):
        if not (words := field.metadata.get("help")):
            continue
        flag = _flag_of(field)
        if field.default is False:
            parser.add_argument(flag, dest=field.name, action="store_true", help=words)
        else:
            default = "" if field.default is None else f" (default: {field.default})"
            parse, metavar = {"float": (float, "X"), "str": (str, "NAME")}.get(str(field.type), (whole_number, "N"))
            parser.add_argument(flag, dest=field.name, type=parse, metavar=metavar, help=words + default)


def _flag_of(field: dataclasses.Field[Any]) -> str:
    return "--" + (field.metadata["flag"] or field.name).replace("_", "-")


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="report what this machine has, what is broken on it and what to enable",
        description="Hardware, versions, backends, known pitfalls and missing extras; status 1 if something is broken.",
    )
    parser.set_defaults(command=_doctor)
    parser.add_argument("--json", action="store_true", help="as JSON")


def _show(arguments: argparse.Namespace) -> None:
    given = vars(arguments)
    spec = DilatedSpec.of(given["segments"], given["rates"], given.get("layout", "interleaved"))
    tiles, seen = (
        {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}
        for kind in (SparsePatternConfig, View)
    )
    if tiles and "pattern" not in given:
        flags = [_flag_of(field) for field in dataclasses.fields(SparsePatternConfig) if field.name in tiles]
        raise ValueError(f"only a block pattern takes {', '.join(flags)}: name one with --pattern")
    if arguments.width < 1:
        raise ValueError(f"--width must be at least 1, got {arguments.width}")
    sparse = SparsePatternConfig(arguments.pattern, **{"block_size": 64, **tiles}) if "pattern" in given else None
    view = View(**{"tokens": max(spec.segment_lengths), **seen, "spec": spec, "sparse": sparse})
    print(*show.text(view, arguments.width), sep="\n")
    if "out" in given:
        write_density(arguments.out, show.density(view, 128, 128).tolist(), view.title, show.summary(view))
        print(arguments.out)


def _explore(arguments: argparse.Namespace) -> None:
    path = arguments.out or Path(tempfile.mkdtemp(prefix="dilated-attention-")) / "explorer.html"
    write_explorer(path)
    print(path)
    if arguments.out is None and not webbrowser.open(path.as_uri()):
        print("no browser is found here: open this file in one, on any machine", file=sys.stderr)


def _doctor(arguments: argparse.Namespace) -> int:
    report = doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return 1 if report.is_broken else 0


def _plan(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    as_data = given.pop("json")
    if "model" in given:
        _plan_step(given, as_data)
        return
    if "gpus" not in given or "tokens" not in given:
        raise ValueError("plan needs --model SIZE for a training step, or --tokens N and --gpus P for attention")
    if mine := sorted(given.keys() & {"host", "vocabulary"}):
        raise ValueError(f"only --model takes --{', --'.join(mine)}: add --model, or leave them out")
    from dilated_attention_pytorch.tools.plan import as_json, text

    gpu, layout = int(given.pop("gpu", 80) * 2**30), given.pop("layout", "interleaved")
    if given.keys() & {"segments", "rates"}:
        spec = DilatedSpec.of(given.pop("segments", []), given.pop("rates", []), layout)
    else:
        heads = given.get("kv_heads", given.get("heads", Job.heads))
        is_causal = given.get("is_causal", Job.is_causal)
        spec = DilatedSpec.for_length(given["tokens"], heads, head_layout=layout, is_causal=is_causal)
    plan = make_plan(Job(spec=spec, **given))
    print(json.dumps(as_json(plan, gpu), indent=1) if as_data else "\n".join(text(plan, gpu)))


def _plan_step(given: dict[str, Any], as_data: bool) -> None:
    from dilated_attention_pytorch.tools.plan import fit_json, fit_text
    from dilated_attention_pytorch.train.fitting import cheapest_fit, longest_fits
    from dilated_attention_pytorch.train.presets import text_model

    known = {"model", "tokens", "gpu", "host", "vocabulary", "segments", "rates", "batch"}
    if others := sorted(given.keys() - known):
        names = ", ".join("--" + name.removeprefix("is_").replace("_", "-") for name in others)
        raise ValueError(f"--model plans one GPU and a model of fixed size, so {names} cannot be set: leave it out")
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
