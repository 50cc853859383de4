"""The commands `show` and `doctor`: their flags, and what they run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_show(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        help="draw who sees whom, with coverage and FLOPs",
        description="Draw the pattern of one head, and count over all heads what is seen and what it costs.",
    )
    show.set_defaults(command=_show)
    show.add_argument(
        "--segments", nargs="+", type=int, required=True, metavar="W", help="segment lengths, one per branch"
    )
    show.add_argument("--rates", nargs="+", type=int, required=True, metavar="R", help="dilation rates, one per branch")
    show.add_argument("--tokens", type=int, metavar="N", help="sequence length (default: the longest segment)")
    show.add_argument("--heads", type=int, default=4, help="heads in all (default: 4)")
    show.add_argument("--head", type=int, default=0, help="the head to draw (default: 0)")
    show.add_argument("--head-dim", type=int, default=64, help="dims of a head, for the FLOPs (default: 64)")
    show.add_argument("--layers", type=int, default=12, help="layers, for the reach (default: 12)")
    show.add_argument("--layout", default="interleaved", help="interleaved, blocked or grouped")
    show.add_argument("--causal", action="store_true", help="rows see only earlier rows")
    show.add_argument("--pattern", help="keep tiles of a block pattern only: local_window, dilated_sparse, ...")
    for flag, kind, text in (
        ("--ratio", float, "the fraction of tiles to keep (default: 0.1)"),
        ("--block", int, "rows of a tile (default: 64)"),
        ("--window", int, "grid rows around a row that are kept first"),
        ("--global-tokens", int, "first grid rows of a segment that all rows keep first"),
        ("--seed", int, "seed of the pattern random (default: 0)"),
    ):
        show.add_argument(flag, type=kind, help=text)
    show.add_argument("--width", type=int, default=64, help="characters per line of the drawing (default: 64)")
    show.add_argument("--out", type=Path, metavar="FILE", help="also write a picture, .svg or .png")


def add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, what is broken on it and what to switch on",
        description="Hardware, versions, backends, known pitfalls and missing extras; status 1 if something is broken.",
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="as JSON")


# What a flag of `show` is called in a pattern's configuration.
_PATTERN_FLAGS = {
    "ratio": "sparsity_ratio",
    "block": "block_size",
    "window": "local_window_size",
    "global_tokens": "global_tokens",
    "seed": "seed",
}


def _show(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
    from dilated_attention_pytorch.core.spec import DilatedSpec
    from dilated_attention_pytorch.pages.plots import write_density
    from dilated_attention_pytorch.tools.show import View, density, summary, text

    given = {name: value for flag, name in _PATTERN_FLAGS.items() if (value := getattr(arguments, flag)) is not None}
    if given and arguments.pattern is None:
        raise ValueError(f"{', '.join(given)} belong to a block pattern: name it with --pattern")
    if arguments.width < 1:
        raise ValueError(f"--width must be at least 1, got {arguments.width}")
    sparse = None
    if arguments.pattern is not None:
        sparse = SparsePatternConfig(arguments.pattern, **{"block_size": 64, **given})
    view = View(
        DilatedSpec.of(arguments.segments, arguments.rates, arguments.layout),
        max(arguments.segments) if arguments.tokens is None else arguments.tokens,
        arguments.heads,
        arguments.head,
        arguments.head_dim,
        arguments.causal,
        sparse,
        arguments.layers,
    )
    print(*text(view, arguments.width), sep="\n")
    if arguments.out is not None:
        write_density(arguments.out, density(view, 128, 128).tolist(), view.title, summary(view))
        print(arguments.out)


def _doctor(arguments: argparse.Namespace) -> int:
    from dilated_attention_pytorch.tools.doctor import doctor

    report = doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return 1 if report.is_broken else 0
