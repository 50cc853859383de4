"""The suite `slides`: training steps of Prov-GigaPath's slide encoder, packed, against torchscale's, slide by slide.

Both have the same sizes, dropout, loss, optimizer and slides per step, and autocast to bfloat16. Ours runs as
`slides train` does, on all slides of a step at the same time. torchscale's encoder takes no packed sequences, so its
step takes one slide after the other and accumulates the gradients. Where it runs out of memory, it recomputes layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import free_memory, wait_for
from benchmarks.peers import load_torchscale_encoder
from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine, check_names, number
from dilated_attention_pytorch.models.config import EncoderConfig
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.nn.positions import SlidePositions
from dilated_attention_pytorch.slides.batches import Batch
from dilated_attention_pytorch.train.memory import MemoryOptions, make_optimizer, make_scaler, prepare
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.step import Update

OURS, TORCHSCALE = "ours, packed", "torchscale, slide by slide"
# Tiles of a slide: slides per step, and how many times torchscale's rate is the target.
SIZES = {10_000: (8, 6.0), 45_000: (2, 3.0), 200_000: (1, 3.0)}
GIGAPATH: dict[str, Any] = {
    "input_dim": 1536, "d_model": 768, "num_heads": 16, "num_layers": 12, "dim_feedforward": 3072, "dropout": 0.1,
    "segment_lengths": (1024, 5792, 32768, 185363, 1048576), "dilation_rates": (1, 2, 4, 8, 16),
    "head_layout": "blocked", "positions": "coordinates", "cls_rows": 1, "num_classes": 2,
}  # fmt: skip
_TINY = {**GIGAPATH, "input_dim": 24, "d_model": 32, "num_heads": 4, "num_layers": 2, "dim_feedforward": 64,
         "segment_lengths": (64, 512), "dilation_rates": (1, 4)}  # fmt: skip
_TINY_SIZES = {200: 3, 450: 2}
_STEPS = 5


@dataclass(frozen=True)
class Trial:
    name: str
    tiles: int
    slides: int


class _Torchscale(nn.Module):
    """A slide encoder around torchscale's own `LongNetEncoder`, as Prov-GigaPath builds it with `global_pool`."""

    def __init__(self, encoder_class: Any, config_class: Any, sizes: EncoderConfig, recompute: bool) -> None:
        super().__init__()
        self.input = nn.Linear(sizes.input_dim, sizes.d_model)
        self.table = SlidePositions(sizes.d_model, sizes.grids)
        self.tile_size = sizes.tile_size
        self.cls = nn.Parameter(torch.zeros(1, 1, sizes.d_model))
        settings = config_class(
            encoder_embed_dim=sizes.d_model, encoder_attention_heads=sizes.num_heads,
            encoder_ffn_embed_dim=sizes.dim_feedforward, encoder_layers=sizes.num_layers, dropout=sizes.dropout,
            segment_length=str(list(sizes.segment_lengths)), dilated_ratio=str(list(sizes.dilation_rates)),
            flash_attention=True, checkpoint_activations=recompute,
        )  # fmt: skip
        self.encoder = encoder_class(settings)
        self.norm = nn.LayerNorm(sizes.d_model)
        self.head = nn.Linear(sizes.d_model, sizes.num_classes)

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        column, row = (coordinates / self.tile_size).floor().long().unbind(-1)
        x = self.input(x) + self.table.at(column, row)  # float32 from here on, also under autocast
        x = self.encoder(src_tokens=None, token_embeddings=torch.cat((self.cls, x), dim=1))["encoder_out"]
        return self.head(self.norm(x[:, 1:].mean(1)))


def _setup(options: Options) -> list[Trial]:
    names = [OURS, *([TORCHSCALE] if options.torchscale else [])]
    if options.only:
        check_names("only", options.only, (OURS, TORCHSCALE))
        if TORCHSCALE in options.only and not options.torchscale:
            raise ValueError(f"{TORCHSCALE!r} needs --torchscale PATH: a checkout of microsoft/torchscale")
        names = list(options.only)
    sizes = {n: k for n, (k, _) in SIZES.items()} if options.device == "cuda" else _TINY_SIZES
    chosen = {n: sizes.get(n, max(1, 80_000 // n)) for n in options.tokens or sizes}
    return [Trial(name, n, k) for name in names for n, k in chosen.items()]


def _measure(trial: Trial, options: Options) -> Iterator[Record]:
    record: Record = {"model": trial.name, "tiles": trial.tiles, "slides": trial.slides}
    for recompute in (False, True):
        try:
            yield record | _steps(trial, options, recompute=recompute) | {"recomputed": recompute}
            return
        except torch.OutOfMemoryError:
            pass
    yield record | {"failed": "out of memory"}


def _steps(trial: Trial, options: Options, *, recompute: bool) -> Record:
    """Seconds of the median step, slides per second and peak memory."""
    device, cuda = torch.device(options.device), options.device == "cuda"
    free_memory(options.device)
    torch.manual_seed(0)
    config = EncoderConfig(**(GIGAPATH if cuda else _TINY))
    memory = MemoryOptions(precision="bf16", checkpointing="full" if recompute else "none", compile=cuda)
    packed = trial.name == OURS
    if packed:
        model: nn.Module = prepare(LongNetEncoder(config).to(device), memory)
    else:
        assert options.torchscale is not None
        model = _Torchscale(*load_torchscale_encoder(options.torchscale), config, recompute).to(device)
    optimizer = make_optimizer(model, memory, lr=1e-5, weight_decay=0.05)
    update = Update(model, optimizer, Ranks(device=device), 1.0, make_scaler(memory, device))

    def step(tiles: int, slides: int) -> float:
        batch = _batch(tiles, slides, config.input_dim, device)
        wait_for(options.device)
        began = time.perf_counter()
        outcome = update(_losses(model, batch, memory, packed))
        wait_for(options.device)
        if outcome.is_broken:
            raise FloatingPointError(f"the step of {trial.name} is broken: {outcome}")
        return time.perf_counter() - began

    # A study has slides of many lengths: layers are compiled for any length once two differ.
    for share in (0.5, 0.9, 1.0, 1.0):
        step(int(share * trial.tiles), trial.slides)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = sorted(step(trial.tiles, trial.slides) for _ in range(_STEPS))[_STEPS // 2]
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {"seconds": seconds, "slides_per_second": trial.slides / seconds, "peak_bytes": peak}


def _batch(tiles: int, slides: int, features: int, device: torch.device) -> Batch:
    side = int(tiles**0.5) + 1
    place = torch.arange(tiles, device=device)
    coordinates = torch.stack((place % side, place // side), -1).mul(256).repeat(slides, 1)
    return Batch(
        torch.arange(slides, device=device),
        torch.randn(1, tiles * slides, features, device=device),
        coordinates[None],
        torch.arange(slides + 1, device=device) * tiles,
        torch.arange(slides, device=device)[:, None] % 2,
    )


def _losses(model: nn.Module, batch: Batch, memory: MemoryOptions, packed: bool) -> Iterator[Tensor]:
    """The loss of all slides, or of one slide after the other."""
    slides = len(batch.targets)
    assert batch.coordinates is not None

    def loss(run: Callable[[], Tensor], targets: Tensor) -> Tensor:
        with memory.autocast(batch.features.device):
            return F.cross_entropy(run().float(), targets[:, 0], reduction="sum") / slides

    if packed:
        yield loss(lambda: model(**batch.inputs), batch.targets)
        return
    parts = (one.chunk(slides, dim=1) for one in (batch.features, batch.coordinates))
    for x, coordinates, target in zip(*parts, batch.targets.split(1)):
        yield loss(lambda x=x, c=coordinates: model(x, c), target)  # type: ignore[misc]


def _ratios(records: Sequence[Record]) -> dict[int, float]:
    """By tiles: how many times torchscale's slides per second are ours."""
    rates = {(x["model"], x["tiles"]): x["slides_per_second"] for x in records if "failed" not in x}
    both = [n for name, n in rates if name == OURS and (TORCHSCALE, n) in rates]
    return {n: rates[OURS, n] / rates[TORCHSCALE, n] for n in both}


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    for machine, mine in by_machine(records):
        words = [f"{machine}. Forward, loss, backward, clipping and AdamW; features are on the GPU already."]
        head = ["tiles per slide", "model", "slides per step", "ms per step", "slides/s", "peak GiB", "times", ""]
        table = Table("Training steps of Prov-GigaPath's slide encoder", words, head)
        ratios = _ratios(mine)
        for x in sorted(mine, key=lambda one: one["tiles"]):
            first = [f"{x['tiles']:,}", x["model"], str(x["slides"])]
            if "failed" in x:
                table.rows.append([*first, x["failed"], "", "", "", ""])
                continue
            times = number(ratios.get(x["tiles"]), 2) if x["model"] == OURS else ""
            shown = [f"{1e3 * x['seconds']:.1f}", f"{x['slides_per_second']:.2f}", number(x["peak_bytes"], 1, 1 << 30)]
            table.rows.append([*first, *shown, times, "layers recomputed" if x["recomputed"] else ""])
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    for tiles, ratio in _ratios(records).items():
        if tiles in SIZES:
            target = SIZES[tiles][1]
            text = f"{tiles:,} tiles: {target:g} times torchscale's slides per second, or better; {ratio:.2f}"
            yield Verdict(ratio >= target, text)


SUITE = Suite(
    name="slides",
    about="training steps of Prov-GigaPath's slide encoder, packed, against torchscale's; targets are for a GPU",
    flags=("device", "tokens", "only", "torchscale"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("model", "tiles"),
)
