"""A training run on a study as one frozen value, saved with the run; a setting with a help text is also a flag."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from dilated_attention_pytorch.core.checks import COUNT, NOT_NEGATIVE, POSITIVE, check_fields
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.measuring import usable_cores
from dilated_attention_pytorch.models.config import EncoderConfig, EncoderPositions, Pooling
from dilated_attention_pytorch.models.weights import CONFIG as MODEL_CONFIG
from dilated_attention_pytorch.slides.features import TILE
from dilated_attention_pytorch.slides.table import Study, Task
from dilated_attention_pytorch.train.memory import Checkpointing, MemoryOptions, Precision
from dilated_attention_pytorch.train.ranks import find_device
from dilated_attention_pytorch.train.stages import decayed_rate

Job = Literal["train", "pretrain"]
_FROM_ZERO = {"least": 0, "most": 2**31}
_SIZES = {"d_model": 192, "num_layers": 4, "num_heads": 8}  # unless they are stated, or those of weights to start from


@dataclass(frozen=True, kw_only=True)
class SlidesConfig:
    """Everything that decides a run of `slides train` or `slides pretrain`."""

    table: str = setting("", "CSV table: slide, label (or time and event), split, patient", may_change=True)
    features: str = setting("", "folder with one .h5, .pt or .npy file per slide", may_change=True)
    job: Job = "train"
    task: Task = setting("classification", "what to predict")
    d_model: int | None = setting(None, "width of the model (default: 192, or that of --from)", range=COUNT)
    num_layers: int | None = setting(None, "layers (default: 4, or those of --from)", range=COUNT)
    num_heads: int | None = setting(None, "attention heads (default: 8, or those of --from)", range=COUNT)
    pooling: Pooling | None = setting(None, "how rows become one embedding (default: mean, or that of --from)")
    positions: EncoderPositions | None = setting(
        None,
        "positions of rows: from coordinates, rotary by order, or none "
        "(default: those of --from, or coordinates if all files have some)",
    )
    segment_lengths: tuple[int, ...] = setting(
        (), "segment lengths, one per branch (default: those of --from, or for the longest slide)", short="segments"
    )
    dilation_rates: tuple[int, ...] = setting((), "dilation rates, one per branch", short="rates")
    dropout: float = setting(0.1, "dropout of layers")
    start: str | None = setting(
        None, "weights to start from: a run, a folder of save_pretrained, or Prov-GigaPath's checkpoint", flag="from"
    )
    epochs: int = setting(20, "passes over the training split", range=COUNT)
    learning_rate: float = setting(5e-4, "peak learning rate", range=POSITIVE)
    warmup: float = setting(0.1, "share of the steps that warm up", range={"least": 0, "below": 1})
    weight_decay: float = setting(0.05, "weight decay of matrices", range=NOT_NEGATIVE)
    clip_norm: float = setting(
        1.0, "clip the norm of the gradient to this; inf: no clipping", range={"above": 0, "most": math.inf}
    )
    max_tiles: int = setting(32_768, "rows to pack into one micro-batch", range=COUNT)
    batch_size: int = setting(16, "most slides of a micro-batch", range=COUNT)
    accumulate: int | None = setting(None, "micro-batches per step (default: 1; survival: for 32 slides)", range=COUNT)
    class_weights: bool = setting(True, "weight classes so that all count alike (default: on)")
    patience: int = setting(0, "epochs without a lower validation loss that end training; 0: never", range=_FROM_ZERO)
    mask_share: float = setting(0.5, "share of the rows to hide and predict", range={"above": 0, "below": 1})
    mask_block: int = setting(16, "consecutive rows that are hidden together", range=COUNT)
    folds: int = setting(0, "folds by patient; 0: the table's splits, or one fold of five", range=_FROM_ZERO)
    tile_pixels: float | None = setting(
        None, "width of a tile in the coordinates' pixels (default: as noted, or measured)"
    )
    skip_broken: bool = setting(False, "leave out slides whose file cannot be used (default: off)")
    precision: Precision | None = setting(None, "precision of products (default: bf16 on a GPU, fp32 on a CPU)")
    checkpointing: Checkpointing = setting("none", "recompute layers in backward", may_change=True)
    compile: bool | None = setting(None, "torch.compile each layer (default: on a GPU)", may_change=True)
    seed: int = setting(0, "seed of weights, batches and folds", range=_FROM_ZERO)
    workers: int | None = setting(
        None, "processes that read files ahead (default: up to 4 for a GPU, else 0)", range=_FROM_ZERO, may_change=True
    )
    device: str = setting("auto", "cpu, cuda, ... (default: a GPU if there is one)", may_change=True)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("table", "features", "start"):  # absolute, so that the run can be resumed from anywhere
            if value := getattr(self, name):
                object.__setattr__(self, name, os.path.abspath(value))
        if not self.table or not self.features:
            raise ValueError("a study needs a table and a folder of features: pass --table and --features")
        if bool(self.segment_lengths) != bool(self.dilation_rates):
            raise ValueError("segment_lengths and dilation_rates go together: state both, or neither")
        if self.folds in (1, 2):
            raise ValueError(f"folds must be 0 or at least 3, to train, to validate and to test, got {self.folds}")
        if self.tile_pixels is not None and not self.tile_pixels > 0:
            raise ValueError(f"tile_pixels must be above 0, got {self.tile_pixels}")

    @functools.cached_property
    def memory(self) -> MemoryOptions:
        on_gpu = find_device(self.device).type == "cuda"
        return MemoryOptions(
            precision=self.precision or ("bf16" if on_gpu else "fp32"),
            checkpointing=self.checkpointing,
            compile=on_gpu if self.compile is None else self.compile,
        )

    @property
    def readers(self) -> int:
        """The number of processes that read files ahead."""
        if self.workers is not None:
            return self.workers
        return max(0, min(4, int(usable_cores()) - 1)) if find_device(self.device).type == "cuda" else 0

    def encoder(self, study: Study, outputs: int, start: Mapping[str, Any] = MappingProxyType({})) -> EncoderConfig:
        """The model for a study; `start` are the fields of the encoder whose weights it starts from (`fields_of`)."""
        names = (*_SIZES, "positions", "segment_lengths", "dilation_rates")
        stated = {name: value for name in names if (value := getattr(self, name))}
        if start:
            wrong = {name: value for name, value in stated.items() if value != start[name]}
            if wrong:
                found = ", ".join(f"{name} {_shown(start[name])}, not {_shown(wrong[name])}" for name in wrong)
                raise ValueError(
                    f"the model of --from has {found}: leave {flags_of(wrong)} out, or start without --from"
                )
            own = {"pooling": "mean", **start}
        else:
            own = {
                "pooling": "mean",
                "positions": "coordinates" if study.has_coordinates else "none",
                **_SIZES,
                **stated,
            }
            if not self.segment_lengths:
                own["max_length"] = study.longest
        own |= {"input_dim": study.dim, "num_classes": outputs, "dropout": self.dropout}
        if self.pooling:
            own["pooling"] = self.pooling
        return EncoderConfig(**own)

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        return decayed_rate(self.learning_rate, step, steps, math.ceil(self.warmup * steps))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> SlidesConfig:
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise FileNotFoundError(f"no run at {path.parent}: there is no {path.name}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the config of a run of slides: {error}") from None


def fields_of(start: Path | Mapping[str, Tensor] | None) -> dict[str, Any]:
    """The fields of the encoder whose weights are in a folder, or are these tensors of Prov-GigaPath's slide encoder.

    Heads and branches are those of all published slide encoders. Without a start, there are no fields.
    """
    if start is None:
        return {}
    if isinstance(start, Path):
        known = dataclasses.asdict(EncoderConfig.from_json(start / MODEL_CONFIG))
        # Without CLS rows, so that --pooling cls can have its own; and tiles as wide as `read_bag` makes them.
        return known | {"cls_rows": known["cls_rows"] or None, "tile_size": TILE}
    layers = {name.split(".")[2] for name in start if name.startswith("encoder.layers.")}
    return {
        "d_model": start["patch_embed.proj.weight"].shape[0],
        "num_layers": len(layers),
        "num_heads": 16,
        "dim_feedforward": start["encoder.layers.0.ffn.fc1.weight"].shape[0],
        "segment_lengths": (1024, 5792, 32768, 185363, 1048576),
        "dilation_rates": (1, 2, 4, 8, 16),
        "head_layout": "blocked",
        "positions": "coordinates",
        "cls_rows": 1,
    }


def flags_of(names: Iterable[str]) -> str:
    """The flags of some settings of `SlidesConfig`."""
    metadata = {field.name: field.metadata for field in dataclasses.fields(SlidesConfig)}
    return ", ".join("--" + (metadata[name].get("flag") or name).replace("_", "-") for name in names)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
