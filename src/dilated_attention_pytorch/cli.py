"""The command `dilated-attention`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 for an error of the user's, 128 and its number for a signal."""
    arguments = _parser().parse_args(argv)
    try:
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

    train = commands.add_parser(
        "train",
        help="train a LongNet language model",
        description="Train a LongNetLM on text; by default on the bytes of the source of Python's standard library.",
        argument_default=argparse.SUPPRESS,
    )
    train.set_defaults(command=_train)
    train.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML, which flags go before")
    train.add_argument("--data", nargs="+", metavar="PATH", help="text files or folders")
    train.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json (default: bytes)")
    train.add_argument("--token-cache", metavar="FOLDER", help="where token files are kept (default: beside the run)")
    train.add_argument("--pack", action="store_true", help="nothing crosses from a file to the next")
    train.add_argument(
        "--order", choices=["random", "epochs"], help="of sequences (default: epochs with --pack, else random)"
    )
    train.add_argument("--out", type=Path, metavar="FOLDER", help="the run's folder (default: a new one below runs/)")
    train.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=None,
        metavar="FOLDER",
        help="continue a run (default: the newest below runs/); only how long and where it runs may change",
    )
    train.add_argument(
        "--auto-resume", action="store_true", help="continue the run in --out if there is one, else begin it"
    )
    for flag, kind, text in (
        ("--steps", int, "optimizer steps in all"),
        ("--batch-size", int, "sequences a step"),
        ("--sequence-length", int, "tokens (bytes, without --tokenizer) a sequence"),
        ("--learning-rate", float, "peak learning rate"),
        ("--warmup-steps", int, "steps of linear warm-up"),
        ("--validate-every", int, "steps between validations"),
        ("--checkpoint-every", int, "steps between checkpoints"),
        ("--sample-bytes", int, "tokens (bytes, without --tokenizer) to generate at the end"),
        ("--seed", int, "of weights, batches and the sample"),
        ("--device", str, "cpu, cuda, ... (default: a GPU if there is one)"),
        ("--d-model", int, "width of the model"),
        ("--num-heads", int, "attention heads"),
        ("--num-layers", int, "layers"),
        ("--dropout", float, "of embeddings and layers"),
        ("--accumulate", int, "micro-batches a step, one after the other"),
        (
            "--skip-broken-steps",
            int,
            "steps in a row that may have a loss or gradient that is not finite (5)",
        ),
        ("--mlp-tile", int, "rows of a feed-forward network at a time, computed again in backward"),
        ("--loss-chunk", int, "rows whose logits exist at a time"),
    ):
        train.add_argument(flag, type=kind, help=text)
    _add_memory(train)
    train.add_argument(
        "--preset",
        choices=["125m", "350m", "760m", "1.3b", "2.7b", "6b"],
        help="a model of this size, with the length, batch, learning rate and memory options for it",
    )
    train.add_argument(
        "--hardware",
        choices=["auto", "h100", "h200", "a100", "v100", "rocm", "cpu"],
        help="precision for it (default: PyTorch's; with --preset that of the device)",
    )
    train.add_argument(
        "--stages", type=Path, metavar="FILE", help="stages of length, pattern, batch and learning rate: .toml or .json"
    )
    train.add_argument("--segment-lengths", nargs="+", type=int, metavar="W", help="one a branch")
    train.add_argument("--dilation-rates", nargs="+", type=int, metavar="R", help="one a branch")
    train.add_argument(
        "--ranks", type=int, metavar="P", help="share each batch among P processes here; across machines use torchrun"
    )
    train.add_argument("--max-restarts", type=int, metavar="K", help="with --ranks: how often to restart after a death")
    train.add_argument(
        "--engine",
        choices=["fsdp", "ddp", "deepspeed"],
        help="ranks shard the parameters, copy them, or let DeepSpeed's ZeRO shard",
    )
    train.add_argument("--sequence-parallel", type=int, metavar="P", help="ranks that share the tokens of a sequence")
    train.add_argument("--tensor-parallel", type=int, metavar="P", help="ranks that share the heads of the model")
    train.add_argument("--zero-stage", type=int, metavar="Z", help="with deepspeed: 1, 2 or 3 (default: 3)")
    train.add_argument("--cpu-offload", action="store_true", help="with deepspeed: keep shards in main memory")
    train.add_argument("--nvme-offload", metavar="FOLDER", help="with deepspeed: keep shards on a disk")
    train.add_argument(
        "--options", type=Path, metavar="FILE", help="RunOptions as JSON: engine, checkpoints, monitors, restarts"
    )
    train.add_argument("--timeout-seconds", type=float, help="silence of a rank after which the others end (600)")
    train.add_argument(
        "--monitors",
        nargs="+",
        choices=["console", "jsonl", "tensorboard", "wandb", "prometheus"],
        help="where figures go, beside the progress bar",
    )
    train.add_argument("--prometheus-address", metavar="HOST:PORT", help="default: 127.0.0.1:9464, this machine alone")

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

    bench = commands.add_parser(
        "bench",
        help="measure against the strongest baselines",
        description="Measure a suite and print a table, or render results.",
    )
    bench.set_defaults(command=_bench)
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
        "--cases", nargs="+", default=[], metavar="WORD", help="cases with all these words, as in D=64 causal forward"
    )
    bench.add_argument("--tokens", nargs="+", type=int, default=[], metavar="N", help="cases of these lengths")
    for flag in ("--heads", "--head-dim"):
        bench.add_argument(flag, type=_whole, metavar="K", help="of shard")
    bench.add_argument("--sizes", nargs="+", default=[], metavar="SIZE", help="of capacity: 125m, 350m, ...")
    bench.add_argument("--cap", type=float, default=80.0, metavar="GIB", help="of capacity: the GPU's memory (80)")
    bench.add_argument("--uncapped", action="store_true", help="of capacity: the longest in all of the GPU, alone")
    bench.add_argument("--offload", action="store_true", help="of capacity: let the longest use host memory")
    bench.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    bench.add_argument("--page", type=Path, default=Path("docs/performance.md"), help="where the page is written")
    bench.add_argument("--html", type=Path, default=Path("docs/performance.html"), help="where the report is written")

    _add_report(commands)
    _add_recall(commands)
    _add_plan(commands)
    show = commands.add_parser(
        "show",
        help="draw who sees whom, with coverage and FLOPs",
        description="Draw the pattern of one head, and count over all heads what is seen and what it costs.",
    )
    show.set_defaults(command=_show)
    show.add_argument(
        "--segments", nargs="+", type=int, required=True, metavar="W", help="segment lengths, one a branch"
    )
    show.add_argument("--rates", nargs="+", type=int, required=True, metavar="R", help="dilation rates, one a branch")
    show.add_argument("--tokens", type=int, metavar="N", help="sequence length (default: the longest segment)")
    show.add_argument("--heads", type=int, default=4, help="heads in all (default: 4)")
    show.add_argument("--head", type=int, default=0, help="the head to draw (default: 0)")
    show.add_argument("--head-dim", type=int, default=64, help="for the FLOPs (default: 64)")
    show.add_argument("--layout", default="interleaved", help="interleaved, blocked or grouped")
    show.add_argument("--causal", action="store_true", help="rows see only what is before them")
    show.add_argument("--pattern", help="keep tiles of a block pattern only: local_window, dilated_sparse, ...")
    for flag, kind, text in (
        ("--ratio", float, "the fraction of tiles that is kept (default: 0.1)"),
        ("--block", int, "rows of a tile (default: 64)"),
        ("--window", int, "grid rows around a row that are kept first"),
        ("--global-tokens", int, "first grid rows of a segment that all rows keep first"),
        ("--seed", int, "of the pattern random (default: 0)"),
    ):
        show.add_argument(flag, type=kind, help=text)
    show.add_argument("--width", type=int, default=64, help="characters a line of the drawing (default: 64)")
    show.add_argument("--out", type=Path, metavar="FILE", help="also write a picture, .svg or .png")

    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, what is broken on it and what to switch on",
        description="Hardware, versions, backends, known pitfalls and missing extras; status 1 if something is broken.",
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _add_memory(train: argparse.ArgumentParser) -> None:
    for flag, choices, text in (
        ("--checkpointing", ["none", "full", "selective"], "compute layers again in backward, or all but attention"),
        ("--optimizer", ["adamw", "adamw8bit-torchao", "adamw8bit-bitsandbytes"], "with a state of 32 or 8 bits"),
        ("--precision", ["fp32", "bf16", "fp16"], "of products"),
        ("--parameters", ["fp32", "bf16"], "bf16, with --precision bf16: they, gradients and what layers hand on"),
        (
            "--compile-mode",
            ["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"],
            "with --compile: how torch.compile goes about it",
        ),
    ):
        train.add_argument(flag, choices=choices, help=text)
    for flag, text in (
        ("--offload", "keep what checkpointing keeps in host memory"),
        ("--float8", "products of linear layers in float8, from compute capability 9.0 on"),
        ("--structured-sparsity", "two of four neighbouring weights of feed-forward networks count, from 8.0 on"),
        ("--compile", "torch.compile each layer"),
    ):
        train.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    train.add_argument("--compile-backend", metavar="NAME", help="with --compile: default inductor")


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


def _add_recall(commands: Any) -> None:
    recall = commands.add_parser(
        "recall",
        help="teach a small LongNet, and a sliding window of no less cost, to recall what lies far back",
        description="Plant facts far back in long sequences and ask for them at the end: a small LongNet and the same "
        "model with a sliding window of no less cost take the same lessons, and are examined at the lengths asked for.",
    )
    recall.set_defaults(command=_recall)
    recall.add_argument(
        "--tokens", nargs="+", type=_whole, metavar="N", help="powers of two (default: 32768 131072; on a CPU 1024)"
    )
    recall.add_argument("--minutes", type=float, default=4.0, help="at most, for both models together (default: 4)")
    recall.add_argument("--seed", type=int, default=0, help="of weights and sequences (default: 0)")
    for flag, kind, text in (
        ("--d-model", int, "width of the models (128; on a CPU 64)"),
        ("--learning-rate", float, "of the models (3e-3; on a CPU 5e-3)"),
        ("--tokens-a-step", _whole, "that a batch has at most (524288; on a CPU 4096)"),
    ):
        recall.add_argument(flag, type=kind, help=text)
    recall.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    recall.add_argument("--out", type=Path, metavar="FOLDER", help="for recall.jsonl and recall.html with the curves")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a training step takes on one GPU, or attention on many, without running it",
        description="With --model: the longest sequence that a training step of a model takes on one GPU, and the "
        "memory options for it; with --tokens too, the cheapest options for that length. With --gpus: what attention "
        "over --tokens tokens costs on a number of GPUs: what travels, what each rank holds and computes, and the time "
        "that the given rates make of it.",
        argument_default=argparse.SUPPRESS,
    )
    plan.set_defaults(command=_plan)
    plan.add_argument("--tokens", type=_whole, metavar="N", help="of the whole sequence, as in 1e9")
    plan.add_argument("--model", metavar="SIZE", help="125m, 350m, 760m, 1.3b, 2.7b or 6b")
    plan.add_argument("--gpu", type=float, metavar="GIB", help="with --model: the GPU's memory (default: 80)")
    plan.add_argument(
        "--host", type=float, metavar="GIB", help="with --model: host memory to offload to (default: any)"
    )
    plan.add_argument("--vocabulary", type=_whole, metavar="V", help="with --model: its tokens (default: 50304)")
    plan.add_argument("--gpus", type=_whole, metavar="P", help="that share the sequence")
    plan.add_argument("--segments", nargs="+", type=_whole, metavar="W", help="one a branch (2048 4096 8192)")
    plan.add_argument("--rates", nargs="+", type=_whole, metavar="R", help="one a branch (1 2 4)")
    for flag, text in (
        ("--heads", "query heads (default: 12)"),
        ("--kv-heads", "key/value heads (default: as many)"),
        ("--head-dim", "of a head (default: 64)"),
        ("--batch", "sequences (default: 1)"),
        ("--layers", "attention layers (default: 1)"),
    ):
        plan.add_argument(flag, type=_whole, metavar="K", help=text)
    plan.add_argument("--layout", help="of heads: interleaved, blocked or grouped")
    plan.add_argument("--dtype", help="bfloat16 (default), float16, float32 or float64")
    plan.add_argument("--causal", action="store_true", help="rows see only what is before them")
    plan.add_argument("--scheme", help="auto, gather, ring or all_to_all")
    plan.add_argument("--token-layout", help="contiguous or zigzag shards")
    plan.add_argument("--memory-budget", type=_whole, metavar="BYTES", help="that auto lets gathered rows take (2 GiB)")
    plan.add_argument(
        "--tflops", type=float, help="of attention a GPU computes a second (default: 400, bf16 on an H200)"
    )
    plan.add_argument("--link-gbps", type=float, help="gigabits a second a GPU sends while it receives (default: 400)")
    plan.add_argument("--json", action="store_true", default=False, help="print JSON, with every rank")


def _whole(stated: str) -> int:
    """A whole number, also as 1e9."""
    try:
        number = Decimal(stated.replace(",", ""))
    except ArithmeticError:
        number = Decimal("nan")
    if not number.is_finite() or number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 65536 or 1e9, got {stated!r}")
    return int(number)


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
    from dilated_attention_pytorch.inspect.plan import as_json, text
    from dilated_attention_pytorch.parallel.plan import Job, make_plan

    segments, rates = given.pop("segments", [2048, 4096, 8192]), given.pop("rates", [1, 2, 4])
    spec = DilatedSpec.of(segments, rates, given.pop("layout", "interleaved"))
    plan = make_plan(Job(spec=spec, is_causal=given.pop("causal", False), **given))
    print(json.dumps(as_json(plan), indent=1) if as_data else "\n".join(text(plan)))


def _plan_step(given: dict[str, Any], as_data: bool) -> None:
    from dilated_attention_pytorch.inspect.fit import fit_json, fit_text
    from dilated_attention_pytorch.train.fitting import cheapest_fit, longest_fits
    from dilated_attention_pytorch.train.presets import text_model

    known = {"model", "tokens", "gpu", "host", "vocabulary", "segments", "rates", "batch"}
    if others := sorted(given.keys() - known):
        names = ", ".join("--" + name.replace("_", "-") for name in others)
        raise ValueError(f"{names} cannot change a model's size, nor how one GPU trains it: leave it out with --model")
    fields = {"vocabulary": "vocab_size", "segments": "segment_lengths", "rates": "dilation_rates"}
    changes = {name: given[flag] for flag, name in fields.items() if flag in given}
    config = text_model(given["model"], **changes)
    gpu, batch, tokens = int(given.get("gpu", 80) * 2**30), given.get("batch", 1), given.get("tokens")
    room = {"batch": batch, "host_bytes": int(given["host"] * 2**30) if "host" in given else None}
    if tokens is None:
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


def _train(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.train.command import run_command

    run_command({name: value for name, value in vars(arguments).items() if name != "command"})


def _report(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.train.report import write_run_report

    print(write_run_report(arguments.run, arguments.out))


def _recall(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.bench.recall import run_recall

    device = _bench_device(arguments.device)
    tokens = arguments.tokens or ([32_768, 131_072] if device == "cuda" else [1024])
    names = ("minutes", "seed", "out", "d_model", "learning_rate", "tokens_a_step")
    run_recall(device, tokens, **{name: getattr(arguments, name) for name in names})


def _generate(arguments: argparse.Namespace) -> None:
    import torch

    from dilated_attention_pytorch.models import LongNetLM
    from dilated_attention_pytorch.train.checkpoint import list_checkpoints
    from dilated_attention_pytorch.train.tokenizer import saved_tokenizer

    checkpoints = list_checkpoints(arguments.run)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = checkpoints[-1] if checkpoints else arguments.run
    model = LongNetLM.from_pretrained(folder, device=device)
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


def _bench(arguments: argparse.Namespace) -> None:
    from dilated_attention_pytorch.bench.contenders import choose_contenders
    from dilated_attention_pytorch.bench.encoders import choose_encoders, peak_memory
    from dilated_attention_pytorch.bench.memory import print_memory
    from dilated_attention_pytorch.bench.report import handwritten, write_page, write_report
    from dilated_attention_pytorch.bench.runner import run_suites
    from dilated_attention_pytorch.bench.shared import run_shared
    from dilated_attention_pytorch.bench.suites import ENCODER_SUITES, SUITES, choose_cases

    suite, out = arguments.suite, arguments.out
    if suite == "memory":
        print_memory(arguments.tokens or [131_072, 262_144])
        return
    if suite == "tune":
        from dilated_attention_pytorch.bench.tune import tune

        tune(out or Path("tiles.jsonl"))
        return
    if suite == "capacity":
        from dilated_attention_pytorch.bench.capacity import run_capacity

        how = {"cap_gib": arguments.cap, "uncapped": arguments.uncapped, "offload": arguments.offload}
        run_capacity(_bench_device(arguments.device), arguments.sizes, **how, out=out)
        return
    if arguments.sizes or arguments.uncapped or arguments.offload:
        raise ValueError(f"--sizes, --uncapped and --offload belong to capacity, not to {suite}: leave them out")
    if suite == "techniques":
        from dilated_attention_pytorch.bench.techniques import run_techniques

        for tokens in arguments.tokens or [None]:
            run_techniques(_bench_device(arguments.device), tokens, arguments.only, out)
        return
    if suite in ("cache", "pool"):
        run_shared(suite, _bench_device(arguments.device), arguments.tokens, out)
        return
    if suite == "shard":
        from dilated_attention_pytorch.bench.shard import run_shard

        shape = (arguments.heads, arguments.head_dim)
        for tokens in arguments.tokens or [None]:
            run_shard(_bench_device(arguments.device), tokens, *shape, out)
        return
    if arguments.heads is not None or arguments.head_dim is not None:
        raise ValueError(f"--heads and --head-dim belong to shard; choose cases of {suite} with --cases")
    if suite == "decode":
        from dilated_attention_pytorch.bench.decode import run_decode

        run_decode(_bench_device(arguments.device), arguments.tokens, out)
        return
    if out is None and suite in ("all", "page", "report"):
        raise ValueError(f"{suite} needs --out FILE, the results as JSON lines")
    if suite in ("all", "page"):
        handwritten(arguments.page)  # refuse before minutes of measuring
    if suite not in ("page", "report"):
        device = _bench_device(arguments.device)
        suites = list(SUITES) if suite == "all" else [suite]
        cases = choose_cases(suites, device, words=arguments.cases, tokens=arguments.tokens)
        choose = choose_encoders if suite in ENCODER_SUITES else choose_contenders
        rows = run_suites(cases, choose(arguments.only, arguments.torchscale), device, out)
        print(*peak_memory(rows), sep="\n", end="")
    for render, path, named in ((write_page, arguments.page, "page"), (write_report, arguments.html, "report")):
        if suite in ("all", named):
            render(out, path)
            print(path)


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
    from dilated_attention_pytorch.inspect.pictures import write_density
    from dilated_attention_pytorch.inspect.show import View, density, summary, text

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
    )
    print(*text(view, arguments.width), sep="\n")
    if arguments.out is not None:
        write_density(arguments.out, density(view, 128, 128).tolist(), view.title, summary(view))
        print(arguments.out)


def _doctor(arguments: argparse.Namespace) -> int:
    from dilated_attention_pytorch.inspect.doctor import doctor

    report = doctor()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return 1 if report.is_broken else 0


def _bench_device(stated: str | None) -> str:
    import torch

    if stated == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and PyTorch finds none: leave it out, or say --device cpu")
    return stated or ("cuda" if torch.cuda.is_available() else "cpu")


def entry() -> NoReturn:
    """The command as a process, whose status is right also where an error has left ranks waiting for each other."""
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
