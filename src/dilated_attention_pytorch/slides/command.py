"""The command `slides`: its flags, and what they run."""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import shlex
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy
import torch

from dilated_attention_pytorch.core.checks import check_whole, import_optional
from dilated_attention_pytorch.core.spec import ReachWarning
from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.models.config import EncoderConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.weights import CONFIG as MODEL_CONFIG
from dilated_attention_pytorch.slides.batches import Bags, make_batches, read_batches
from dilated_attention_pytorch.slides.config import SlidesConfig
from dilated_attention_pytorch.slides.features import TILE, find_file, look_at, read_bag
from dilated_attention_pytorch.slides.loop import MODEL, model_folder, run_config, run_study
from dilated_attention_pytorch.slides.maps import Kind, tile_weights, write_map
from dilated_attention_pytorch.slides.report import compared, fold_folders, write_report
from dilated_attention_pytorch.slides.table import read_study, tell_measured
from dilated_attention_pytorch.train import run_folder
from dilated_attention_pytorch.train.command import without_none
from dilated_attention_pytorch.train.ranks import Stopped, find_device

_ONLY_TRAIN = {"task", "class_weights", "folds", "pooling"}
_ONLY_PRETRAIN = {"mask_share", "mask_block"}
BASELINE = "without-attention"


def run_slides(arguments: Sequence[str]) -> int:
    parsed = parser().parse_args(arguments)
    parsed.command(parsed)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dilated-attention slides",
        description="From files of features to a trained encoder, embeddings, heat maps and a report.",
    )
    jobs = parser.add_subparsers(required=True, metavar="JOB")
    train = jobs.add_parser("train", help="classification, regression or survival", argument_default=argparse.SUPPRESS)
    pretrain = jobs.add_parser("pretrain", help="predict hidden tiles", argument_default=argparse.SUPPRESS)
    for job in (train, pretrain):
        _add_settings(job, leave_out=_ONLY_PRETRAIN if job is train else _ONLY_TRAIN)
        job.add_argument("--out", type=Path, metavar="RUN", help="the run's folder (default: a new one below runs/)")
        job.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in a folder")
    train.add_argument(
        "--baseline",
        action="store_true",
        help="also train without attention: each row sees only itself, then mean pooling",
    )
    train.set_defaults(command=lambda arguments: _train("train", arguments))
    pretrain.set_defaults(command=lambda arguments: _train("pretrain", arguments))

    embed = jobs.add_parser("embed", help="write one embedding per slide")
    embed.set_defaults(command=_embed)
    _add_model(embed)
    embed.add_argument("--table", type=Path, help="CSV table of slides (default: all files in the folder)")
    embed.add_argument("--out", type=Path, required=True, metavar="FILE", help="an .npy or .h5 file to write")
    embed.add_argument("--max-tiles", type=int, default=32_768, metavar="N", help="rows per batch (default: 32768)")
    embed.add_argument("--skip-broken", action="store_true", help="leave out slides whose file cannot be used")

    maps = jobs.add_parser("map", help="draw where the model looks, as PNG and GeoJSON")
    maps.set_defaults(command=_map)
    _add_model(maps)
    maps.add_argument("--slide", nargs="+", required=True, metavar="ID", help="the slides' names")
    maps.add_argument("--kind", choices=get_args(Kind), default="attention", help="default: attention")
    maps.add_argument("--class-number", type=int, metavar="C", help="with --kind gradient: output (default: largest)")
    maps.add_argument("--out", type=Path, default=Path("maps"), metavar="FOLDER", help="default: maps")

    report = jobs.add_parser("report", help="write a run as one HTML page")
    report.set_defaults(command=_report)
    report.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    report.add_argument("--worst", type=int, default=4, metavar="N", help="worst predictions to map (default: 4)")
    report.add_argument("--out", type=Path, metavar="FILE.html", help="default: report.html in the run's folder")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run or of save_pretrained")
    parser.add_argument("--features", type=Path, required=True, metavar="FOLDER", help="one file per slide")
    parser.add_argument(
        "--tile-pixels", type=float, metavar="N", help="width of a tile (default: that of the run, or of the file)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU if there is one)")


def _add_settings(parser: argparse.ArgumentParser, leave_out: set[str]) -> None:
    """A flag for each setting that has a help text."""
    hints = get_type_hints(SlidesConfig)
    for field in dataclasses.fields(SlidesConfig):
        words = field.metadata.get("help")
        if not words or field.name in leave_out:
            continue
        kind = without_none(hints[field.name])
        default = "" if "(default" in words or field.default in ("", (), None) else f" (default: {field.default})"
        names = filter(None, (field.metadata["flag"] or field.name, field.metadata["short"]))
        flags = ["--" + name.replace("_", "-") for name in names]
        how: dict[str, Any] = {"dest": field.name, "help": (words + default).replace("%", "%%")}
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
            how["help"] = words
        elif get_origin(kind) is tuple:
            how |= {"type": int, "nargs": "+", "metavar": "N"}
        elif get_origin(kind) is not None:  # a Literal
            how["choices"] = get_args(kind)
        else:
            text = "NAME" if field.name == "device" else "PATH"
            how |= {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, text)}
        parser.add_argument(*flags, **how)


def _train(job: str, arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name in SlidesConfig.__dataclass_fields__}
    resume, baseline = getattr(arguments, "resume", None), getattr(arguments, "baseline", False)
    if resume is None:
        config = SlidesConfig(**{**given, "job": job})
        run = getattr(arguments, "out", None) or Path("runs") / time.strftime("slides-%Y%m%d-%H%M%S")
    else:
        if hasattr(arguments, "out"):
            raise ValueError(f"--resume {resume} continues the run in its folder: leave --out {arguments.out} out")
        known = SlidesConfig.from_json(resume / run_folder.CONFIG)
        if known.job != job:
            raise ValueError(f"{resume} is a run of `slides {known.job}`, not of `slides {job}`: resume it with that")
        config, run = dataclasses.replace(known, **given), resume
        baseline = baseline or (resume / BASELINE).is_dir()
    runs = {"encoder": run}
    try:
        run_study(config, run, resume=resume is not None)
    except Stopped:
        if baseline:
            (run / BASELINE).mkdir(exist_ok=True)  # so that --resume trains it too
        raise
    if baseline:
        # With segments of one row a row sees itself alone; the rest of the model is the same.
        alone: dict[str, Any] = {"segment_lengths": (1,), "dilation_rates": (1,), "pooling": "mean"}
        if config.start is not None:
            trained = EncoderConfig.from_json(fold_folders(run)[0] / MODEL / MODEL_CONFIG)
            alone |= {name: getattr(trained, name) for name in ("d_model", "num_layers", "num_heads", "positions")}
        runs["without attention"] = run / BASELINE
        beside = dataclasses.replace(config, **alone, start=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReachWarning)
            again = (run / BASELINE / run_folder.CONFIG).exists()
            run_study(beside, run / BASELINE, resume=again, say=lambda line: None)  # the files were told of above
    if job == "train":
        print(compared(runs))
    print(f"next     dilated-attention slides {'report' if job == 'train' else 'train --from'} {shlex.quote(str(run))}")


def _load(run: Path, device: str) -> LongNetEncoder:
    model = LongNetEncoder.from_pretrained(model_folder(run)).to(find_device(device)).eval()
    model.config = dataclasses.replace(model.config, tile_size=TILE)  # as wide as `read_bag` makes tiles
    return model


def _check_size(model: LongNetEncoder, path: Path, dim: int) -> None:
    if dim != model.config.input_dim:
        raise ValueError(
            f"{path} has features of size {dim}, the model takes {model.config.input_dim}: use features of the patch "
            "encoder on which the model was trained"
        )


def _tile_pixels(arguments: argparse.Namespace) -> float | None:
    """The stated width of a tile, or that of the run; None means that of each file."""
    stated: float | None = arguments.tile_pixels
    if stated is None:
        known = run_config(arguments.run)
        return None if known is None else known.tile_pixels
    if not 0 < stated < math.inf:
        raise ValueError(f"--tile-pixels must be above 0, got {stated}")
    return stated


def _embed(arguments: argparse.Namespace) -> None:
    if arguments.out.suffix not in (".npy", ".h5"):
        raise ValueError(f"embeddings are written as .npy or .h5, got {str(arguments.out)!r}")
    names_file = [arguments.out.with_suffix(".txt")] if arguments.out.suffix == ".npy" else []
    for path in (arguments.out, *names_file):
        if path.exists():
            raise FileExistsError(f"{path} exists: choose another --out")
    check_whole("--max-tiles", arguments.max_tiles, least=1)
    model = _load(arguments.run, arguments.device)
    device = model.input.weight.device
    grids = model.config.grids if model.config.positions == "coordinates" else None
    if grids is None and arguments.tile_pixels is not None:
        raise ValueError("--tile-pixels has no effect on a model without positions from coordinates: leave it out")
    tile_pixels = _tile_pixels(arguments)
    study = read_study(
        arguments.table,
        arguments.features,
        skip_broken=arguments.skip_broken,
        tile_pixels=tile_pixels,
        grids=grids,
        needs_coordinates=grids is not None,
        ignore_splits=True,
    )
    cases = study.cases
    _check_size(model, cases[0].path, study.dim)
    bags = Bags(cases, coordinates=grids is not None, tile_pixels=tile_pixels)
    batches = make_batches([case.found.rows for case in cases], arguments.max_tiles, 64)
    rows = torch.empty(len(cases), model.config.d_model)
    with torch.no_grad():
        for batch in read_batches(bags, batches):
            rows[batch.numbers] = model.embed(**batch.to(device).inputs).float().cpu()
    names = [case.name for case in cases]
    write_embeddings(arguments.out, names, rows)
    print(f"{len(names)} embeddings of {rows.shape[1]} numbers are now in {arguments.out}")


def write_embeddings(path: Path, names: list[str], rows: torch.Tensor) -> None:
    """An `.h5` file with `features` and `slides`, or an `.npy` file beside a list of names, `PATH.txt`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".h5":
        h5py = import_optional("h5py", "slides", "writing .h5 files")

        def write(partial: Path) -> None:
            with h5py.File(partial, "w") as file:
                file["features"], file["slides"] = rows.numpy(), names

        write_whole(path, write)
    else:
        content = io.BytesIO()
        numpy.save(content, rows.numpy())
        write_whole(path, content.getvalue())
        write_whole(path.with_suffix(".txt"), "".join(f"{one}\n" for one in names))


def _map(arguments: argparse.Namespace) -> None:
    model, tile_pixels = _load(arguments.run, arguments.device), _tile_pixels(arguments)
    grids = model.config.grids if model.config.positions == "coordinates" else None
    for name in arguments.slide:
        path = find_file(arguments.features, name)
        found = look_at(path, tile_pixels, grids, needs_coordinates=grids is not None)
        _check_size(model, path, found.dim)
        tell_measured([found], print)
        bag = read_bag(path, tile_pixels)
        weights = tile_weights(model, bag, arguments.kind, arguments.class_number)
        for path in write_map(arguments.out, name, weights, bag, arguments.kind):
            print(path)


def _report(arguments: argparse.Namespace) -> None:
    if arguments.worst < 0:
        raise ValueError(f"--worst must be at least 0, got {arguments.worst}")
    print(write_report(arguments.run, arguments.out, arguments.worst))
