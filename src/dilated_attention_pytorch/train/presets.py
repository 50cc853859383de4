"""Settings by the size of a model and by the hardware."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from dilated_attention_pytorch.core.modes import tf32_is_on
from dilated_attention_pytorch.models.config import ModelConfig, ModelFields
from dilated_attention_pytorch.train.config import OF_A_STAGE, PATTERN
from dilated_attention_pytorch.train.footprint import parameter_count
from dilated_attention_pytorch.train.memory import MemoryOptions, OptimizerName, Precision

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What fills the memory: activations; activations and optimizer; parameters and optimizer.
Kind = Literal["small", "medium", "large"]


class _Size(NamedTuple):
    parameters: float
    d_model: int
    num_heads: int
    learning_rate: float
    batch_size: int
    kind: Kind


# Widths and learning rates are GPT-3's, with heads of 64 or 128. Depth follows from the vocabulary.
_SIZES = {
    "125m": _Size(125e6, 768, 12, 6e-4, 8, "small"),
    "350m": _Size(350e6, 1024, 16, 3e-4, 8, "small"),
    "760m": _Size(760e6, 1536, 24, 2.5e-4, 8, "medium"),
    "770m": _Size(770e6, 1280, 20, 2.5e-4, 8, "medium"),  # the width of GPT-2 large
    "1.3b": _Size(1.3e9, 2048, 16, 2e-4, 8, "medium"),
    "2.7b": _Size(2.7e9, 2560, 20, 1.6e-4, 4, "large"),
    "6b": _Size(6e9, 4096, 32, 1.2e-4, 2, "large"),
}
MODEL_SIZES = tuple(_SIZES)
_LENGTH = 32_768  # the reach of the LongNet paper's branches
# Fields of a model that decide how many layers have the parameters of a size, or which branches connect its tokens.
OF_A_PRESET = (
    "vocab_size", "num_kv_heads", "activation", "norm", "qk_norm", "tie_weights", "positions", "stagger",
)  # fmt: skip

_ROWS_AT_A_TIME = 16_384


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a kind of processor computes well. `device` is PyTorch's name for it: `cuda`, also for ROCm."""

    name: str
    device: str
    precision: Precision
    tf32: bool

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


# Kernels are chosen where they run: Hopper's own on H100 and H200, plain Triton on A100 and ROCm, else eager.
_HARDWARE = {
    "h200": Hardware(name="h200", device="cuda", precision="bf16", tf32=True),
    "h100": Hardware(name="h100", device="cuda", precision="bf16", tf32=True),
    "a100": Hardware(name="a100", device="cuda", precision="bf16", tf32=True),
    "v100": Hardware(name="v100", device="cuda", precision="fp16", tf32=False),
    "rocm": Hardware(name="rocm", device="cuda", precision="bf16", tf32=False),
    "cpu": Hardware(name="cpu", device="cpu", precision="fp32", tf32=False),
}
HARDWARE = ("auto", *_HARDWARE)


def model_preset(size: str, *, sequence_length: int = _LENGTH, **fields: Unpack[ModelFields]) -> ModelConfig:
    """The config of a `LongNetLM` of `size` parameters whose branches connect `sequence_length` tokens.

    Layers stagger the branches, unless these are stated or positions are xPos; branches like these learned best of
    those in `docs/evidence.md`. `fields` are those of `ModelConfig` that override the preset. Depth follows from the
    other sizes.

    >>> config = model_preset("125m", vocab_size=50_257)
    >>> config.d_model, config.num_heads, config.num_layers
    (768, 12, 12)
    >>> config.segment_lengths, config.dilation_rates, config.stagger
    ((1407, 2048, 32768), (1, 1, 12), True)
    >>> round(parameter_count(config) / 1e6)
    124
    """
    wanted = _size(size)
    settings: Any = {"d_model": wanted.d_model, "num_heads": wanted.num_heads, "num_decoder_layers": 0, **fields}
    settings.setdefault("vocab_size", 256)
    if not fields.keys() & {*PATTERN}:
        settings.setdefault("max_length", sequence_length)
        settings.setdefault("stagger", settings.get("positions") != "xpos")
    if "num_layers" in fields:
        return ModelConfig(**settings)
    one, two = (parameter_count(ModelConfig(**settings, num_layers=layers)) for layers in (1, 2))
    layers = round((wanted.parameters - one) / (two - one)) + 1
    if layers < 2:
        raise ValueError(
            f"a vocabulary of {settings['vocab_size']:,} tokens takes {2 * one - two:,} parameters, which leaves "
            f"too few for two layers of a {size} model: choose a larger size, or a smaller vocabulary"
        )
    return ModelConfig(**settings, num_layers=layers)


def text_model(size: str, *, sequence_length: int = _LENGTH, **fields: Unpack[ModelFields]) -> ModelConfig:
    """`model_preset` with GPT-2's vocabulary, rounded up to a multiple of 128: what plans and benchmarks train.

    >>> text_model("1.3b").d_model
    2048
    """
    fields.setdefault("vocab_size", 50_304)
    return model_preset(size, sequence_length=sequence_length, **fields)


def hardware_preset(name: str = "auto", device: torch.device | str = "auto") -> Hardware:
    """The preset of this name; `auto` means that of the device, and the device `auto` a GPU if there is one.

    >>> hardware_preset("v100").precision, hardware_preset(device="cpu").name
    ('fp16', 'cpu')
    """
    if name not in HARDWARE:
        raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, got {name!r}")
    if name != "auto":
        return _HARDWARE[name]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return _HARDWARE["cpu"]
    if device.type != "cuda":
        raise ValueError(f"there is no preset for {device.type}: name similar hardware, one of {', '.join(_HARDWARE)}")
    if torch.version.hip is not None:
        return _HARDWARE["rocm"]
    capability = torch.cuda.get_device_capability(device)
    if capability >= (9, 0):
        return _HARDWARE["h200" if "H200" in torch.cuda.get_device_name(device) else "h100"]
    if capability >= (7, 0):
        return _HARDWARE["a100" if capability >= (8, 0) else "v100"]
    raise ValueError(
        f"there is no preset for a GPU of compute capability {capability[0]}.{capability[1]}, which has no tensor "
        "cores: leave the hardware out, or name similar hardware"
    )


def memory_preset(size: str, hardware: Hardware) -> MemoryOptions:
    """The memory options for a model of a size, or of a kind (`small`, `medium`, `large`), on some hardware.

    Backward recomputes the layers, for large models including their attention. On GPUs, medium and large models have an
    8-bit optimizer, and large ones keep activations in host memory.

    >>> memory_preset("125m", hardware_preset("h200")).precision
    'bf16'
    """
    kind = size if size in ("small", "medium", "large") else _size(size).kind
    large = kind == "large"
    return MemoryOptions(
        checkpointing="full" if large else "selective",
        offload=large and hardware.is_gpu,
        mlp_tile=_ROWS_AT_A_TIME,
        loss_chunk=_ROWS_AT_A_TIME,
        optimizer=_eight_bit_optimizer() if kind != "small" and hardware.is_gpu else "adamw",
        precision=hardware.precision,
    )


def run_preset(
    size: str | None, hardware: Hardware, *, sequence_length: int = _LENGTH, **fields: Unpack[ModelFields]
) -> dict[str, Any]:
    """The fields of a `TrainConfig` that the size of the model and the hardware decide; None for the default model.

    `fields` are those of the model that are stated.

    >>> sorted(run_preset("350m", hardware_preset("cpu")))
    ['batch_size', 'device', 'learning_rate', 'memory', 'model', 'sequence_length', 'tf32']
    """
    where: dict[str, Any] = {"device": hardware.device, "tf32": hardware.tf32}
    if size is None:
        return {**where, "memory": MemoryOptions(precision=hardware.precision)}
    wanted = _size(size)
    return {
        **where,
        "model": model_preset(size, sequence_length=sequence_length, **fields),
        "memory": memory_preset(size, hardware),
        "sequence_length": sequence_length,
        "batch_size": wanted.batch_size,
        "learning_rate": wanted.learning_rate,
    }


def expand_presets(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `TrainConfig`, with `preset` and `hardware` replaced by the fields that they decide.

    Stated fields override those. A preset without hardware is for the device of the run. Fields of the model that its
    number of layers or its branches depend on (`OF_A_PRESET`) may be stated too, such as the `vocab_size` of the run's
    tokenizer. The patterns of stages are not staggered unless `stagger` is stated.

    >>> expand_presets({"hardware": "v100", "steps": 10})["memory"].precision
    'fp16'
    """
    given = dict(stated)
    size, named = given.pop("preset", None), given.pop("hardware", None)
    known = {name: given.pop(name) for name in OF_A_PRESET if name in given}
    if "sequence_length" in given:
        known["sequence_length"] = given["sequence_length"]
    if given.get("stages"):
        known.setdefault("stagger", False)
    if size is None and named is None:
        return given
    settings = run_preset(size, hardware_preset(named or "auto", given.get("device", "auto")), **known)
    if given.get("stages"):  # stages decide these
        for name in OF_A_STAGE:
            settings.pop(name, None)
    if given.get("engine") == "deepspeed":  # it shards the state of AdamW, and in stage 3 weights that tiles need
        settings["memory"] = dataclasses.replace(settings["memory"], optimizer="adamw", mlp_tile=0)
    return settings | given


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Let float32 products on GPUs round to TF32 within the block; False leaves PyTorch's setting."""
    if not tf32 or tf32_is_on():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _size(name: str) -> _Size:
    found = _SIZES.get(str(name).lower())
    if found is None:
        raise ValueError(f"a model's size is one of {', '.join(MODEL_SIZES)}, got {name!r}")
    return found


def _eight_bit_optimizer() -> OptimizerName:
    """torchao's, which also steps sharded parameters; bitsandbytes' if only that is installed."""
    only_bitsandbytes = find_spec("torchao") is None and find_spec("bitsandbytes") is not None
    return "adamw8bit-bitsandbytes" if only_bitsandbytes else "adamw8bit-torchao"
