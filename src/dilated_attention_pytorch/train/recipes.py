"""Training recipes for your own loop: models prepared by size, accumulated gradients, stages.

Common to all of them:

- A batch is a mapping with `input_ids` `(B, N)` and optionally `labels` `(B, N)`: what each position should predict,
  -100 where nothing counts. The default label is the token that follows. `seqlens`, `cu_seqlens` or
  `key_padding_mask` are passed to the model; a batch that has one of them must have labels.
- `model(input_ids)` returns scores `(B, N, vocabulary)`, and the loss is their cross-entropy; or
  `compute_loss(output, labels)` returns the mean loss of a batch.
- The model's `MemoryOptions` decide precision and memory: those that `optimize_*` and `enable_*` gave it, or `options`.

`dilated-attention train` is the loop that also resumes, shares the work among ranks and reports.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, check_divides, checked
from dilated_attention_pytorch.core.environment import under_torchrun
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.replacement import replace_attention
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.parallel.options import Zero
from dilated_attention_pytorch.train import memory
from dilated_attention_pytorch.train.batching import IGNORED, check_item, collate, tokens_and_labels
from dilated_attention_pytorch.train.memory import MemoryFields, MemoryOptions
from dilated_attention_pytorch.train.presets import Kind, hardware_preset, memory_preset
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.stages import Stage, has_pattern, update_attention_config
from dilated_attention_pytorch.train.step import Update
from dilated_attention_pytorch.train.zero import import_deepspeed, start_deepspeed

if TYPE_CHECKING:
    from typing_extensions import Unpack

Batch = Mapping[str, Any]
ComputeLoss = Callable[[Any, Tensor], Tensor]
_LENGTHS = ("seqlens", "cu_seqlens", "key_padding_mask")
_REMEMBERED = "memory_options"
_SEED = {"least": -(2**63), "most": 2**63 - 1}


@checked()
def optimize_small_model(
    model: nn.Module,
    *,
    hardware: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    **changes: Unpack[MemoryFields],
) -> nn.Module:
    """Prepare a model of up to about 350M parameters, in place, for training on its device; returns the model.

    Activations fill the memory, so backward recomputes them. Products have the hardware's precision. On a
    GPU, layers are compiled. `changes` are fields of `MemoryOptions` that override these choices.

    The model is any model with dilated attention. With `segment_lengths` and `dilation_rates`, `replace_attention`
    first puts it in place of `nn.MultiheadAttention`. The functions for the other sizes do the same.

    >>> sizes = {"d_model": 32, "num_heads": 4, "num_layers": 2, "segment_lengths": (16, 64), "dilation_rates": (1, 4)}
    >>> optimize_small_model(LongNetLM(**sizes), hardware="cpu").gradient_checkpointing
    True
    """
    if hardware_preset(hardware, _device_of(model)).is_gpu and "compile" not in changes:
        changes = {"compile": True, "compile_mode": "max-autotune-no-cudagraphs", **changes}
    model, options = _choose("small", model, hardware, segment_lengths, dilation_rates, changes)
    return _prepare(model, options, hardware)


@checked()
def optimize_medium_model(
    model: nn.Module,
    use_cpu_offload: bool = False,
    *,
    hardware: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    **changes: Unpack[MemoryFields],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model of about 350M to 1.3B parameters, and make its AdamW; on a GPU, the 8-bit one.

    With `use_cpu_offload`, host memory keeps what backward needs. `changes` are fields of `MemoryOptions`.
    """
    changes = {"offload": use_cpu_offload, **changes}
    model, options = _choose("medium", model, hardware, segment_lengths, dilation_rates, changes)
    optimizer = _make_optimizer(model, options)  # a missing package raises before the model is changed
    return _prepare(model, options, hardware), optimizer


@checked(batch_size=COUNT, clip_norm=NOT_NEGATIVE)
def optimize_large_model(
    model: nn.Module,
    use_deepspeed: bool = True,
    *,
    hardware: str = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    batch_size: int = 1,
    clip_norm: float = 1.0,
    **changes: Unpack[MemoryFields],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Prepare a model of 1.3B parameters or more, whose parameters and optimizer fill the memory; returns both.

    With DeepSpeed, under torchrun, ZeRO stage 2 shards gradients and optimizer, and updates in host memory. The
    returned model is DeepSpeed's engine, which makes its own steps (`engine.backward(loss)`, `engine.step()`) on
    batches of `batch_size` per rank, with gradients clipped to `clip_norm`. Without DeepSpeed the optimizer is AdamW,
    on a GPU the 8-bit one, and the caller makes the steps.
    """
    if not use_deepspeed:
        model, options = _choose("large", model, hardware, segment_lengths, dilation_rates, changes)
        optimizer = _make_optimizer(model, options)
        return _prepare(model, options, hardware), optimizer
    if changes.setdefault("optimizer", "adamw") != "adamw":
        raise ValueError(
            f"DeepSpeed shards the state of PyTorch's AdamW, got optimizer={changes['optimizer']!r}: leave it out, or "
            "pass use_deepspeed=False"
        )
    device = _device_of(model)
    deepspeed = import_deepspeed(device)
    if not dist.is_initialized():
        if not under_torchrun():
            raise ValueError("DeepSpeed needs torchrun: start the program with it, or pass use_deepspeed=False")
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    config = Zero(stage=2, cpu_offload=True).config(batch_size=batch_size, clip_norm=clip_norm)
    model, options = _choose("large", model, hardware, segment_lengths, dilation_rates, changes)
    if options.precision == "fp16":  # DeepSpeed scales losses by itself
        config["fp16"] = {"enabled": True}
        options = dataclasses.replace(options, precision="fp32")
    model = _prepare(model, options, hardware)
    return start_deepspeed(model, _make_optimizer(model, fused=True), config, options, device)


@checked()
def enable_fp8_training(model: nn.Module) -> nn.Module:
    """Compute the products of a model's linear layers in float8, and others in bfloat16; in place, returns the model.

    Parameters stay in float32, and each product scales its factors. Needs torchao and a GPU of compute capability 9.0
    (H100) or newer.
    """
    return _enable(model, "float8")


@checked()
def enable_structured_sparsity(model: nn.Module, sparsity_ratio: float = 0.5) -> nn.Module:
    """Use two of four neighbouring weights of the feed-forward networks, in place; returns the model.

    Every step chooses the two largest, which halves the work of the products. Needs cuSPARSELt and a GPU of compute
    capability 8.0 or newer. The hardware supports no `sparsity_ratio` other than 0.5.
    """
    if sparsity_ratio != 0.5:
        raise ValueError(
            f"structured sparsity drops two of four neighbouring weights: sparsity_ratio must be 0.5, got "
            f"{sparsity_ratio!r}"
        )
    return _enable(model, "structured_sparsity")


def options_of(model: nn.Module) -> MemoryOptions | None:
    """The options that `optimize_*` and `enable_*` gave a model, also within DDP or DeepSpeed's engine, or None."""
    inner: Any = model
    while not hasattr(inner, _REMEMBERED) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    return getattr(inner, _REMEMBERED, None)


@checked(target_batch_size=COUNT, actual_batch_size=COUNT, clip_norm=POSITIVE)
def gradient_accumulation_training(
    model: nn.Module,
    dataloader: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    target_batch_size: int = 64,
    actual_batch_size: int = 8,
    *,
    compute_loss: ComputeLoss | None = None,
    clip_norm: float | None = None,
    options: MemoryOptions | None = None,
) -> list[float]:
    """Train with large batches that a loader delivers as small ones; returns the loss of every step.

    The gradient of a step is that of the mean over all labels of `target_batch_size` sequences, whichever small batches
    they are in. The last step has the sequences that are left. A `scaler` that is enabled means float16, unless the
    model or `options` say otherwise.
    """
    check_divides("actual_batch_size", actual_batch_size, "target_batch_size", target_batch_size)
    step = _Step(model, optimizer, scaler, options, compute_loss, clip_norm)
    losses: list[float] = []
    for seen, batches in _regrouped(dataloader, target_batch_size, actual_batch_size):
        losses.append(step(batches))
        print(f"Step {seen}, Loss: {losses[-1]:.4f}")
    return losses


def _regrouped(dataloader: Iterable[Batch], target: int, most: int) -> Iterator[tuple[int, list[Batch]]]:
    """The batches of each step, which have `target` sequences, and the number of batches taken from the loader."""
    group: list[Batch] = []
    room, seen = target, 0
    for seen, batch in enumerate(dataloader, start=1):
        rows = len(check_item(batch, ("labels", *_LENGTHS))["input_ids"])
        if rows > most:
            raise ValueError(f"a batch has {rows} sequences, more than actual_batch_size={most}")
        if rows > room:  # never true of packed documents, which are one row
            first, batch = (
                {name: x if x is None else x[part] for name, x in batch.items()}
                for part in (slice(room), slice(room, None))
            )
            yield seen, [*group, first]
            group, rows, room = [], rows - room, target
        group.append(batch)
        room -= rows
        if room == 0:
            yield seen, group
            group, room = [], target
    if group:
        yield seen, group


def hierarchical_training_schedule() -> list[dict[str, Any]]:
    """Three stages of growing length, for `train_hierarchically`."""
    names = ("max_seq_len", "segment_lengths", "dilation_rates", "epochs", "batch_size", "learning_rate")
    stages = (
        (4096, [1024, 2048], [1, 2], 10, 8, 1e-4),
        (8192, [2048, 4096], [1, 2], 15, 4, 5e-5),
        (16384, [2048, 4096, 8192], [1, 2, 4], 20, 2, 2e-5),
    )
    return [dict(zip(names, stage)) for stage in stages]


@checked(warmup_steps=SIZE, clip_norm=POSITIVE, seed=_SEED)
def train_stage(
    model: nn.Module,
    dataset: Sequence[Batch],
    stage_config: Mapping[str, Any] | Stage,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    compute_loss: ComputeLoss | None = None,
    options: MemoryOptions | None = None,
    warmup_steps: int = 0,
    clip_norm: float | None = 1.0,
    seed: int = 0,
) -> list[float]:
    """Train one stage; returns the loss of every step.

    Args:
        model: has the stage's pattern already, by `update_attention_config`.
        dataset: items, each one sequence: `input_ids` `(N,)` and optionally `labels` `(N,)`. Sequences longer than the
            stage's are cut into several; every epoch has all of them, in its own order.
        stage_config: a `Stage`, or a mapping with `max_seq_len`, `segment_lengths`, `dilation_rates`, `epochs` (or
            `steps`), `batch_size` and `learning_rate`, from which a cosine leads down to a tenth.
        optimizer: by default, the AdamW that the model's options choose.
        seed: decides the order.
    """
    length = Stage.of(stage_config, sequences=1).sequence_length
    sequences = [piece for item in dataset for piece in _pieces(item, length)]
    if not sequences:
        raise ValueError("the dataset has no sequence to learn from: every one of them has a single token")
    stage = Stage.of(stage_config, len(sequences))
    if not has_pattern(model, stage):
        raise ValueError(
            f"the model does not have the stage's pattern, {list(stage.segment_lengths)} / "
            f"{list(stage.dilation_rates)}: call update_attention_config(model, stage_config) first"
        )
    if optimizer is None:
        optimizer = _make_optimizer(model, options)
    step = _Step(model, optimizer, None, options, compute_loss, clip_norm)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    order: list[int] = []
    while len(losses) < stage.steps:
        order = order or torch.randperm(len(sequences), generator=generator).tolist()
        chosen, order = order[: stage.batch_size], order[stage.batch_size :]
        memory.set_learning_rate(optimizer, stage.learning_rate_at(len(losses) + 1, warmup_steps))
        losses.append(step([collate([sequences[i] for i in chosen])]))
    return losses


@checked(warmup_steps=SIZE, clip_norm=POSITIVE, seed=_SEED)
def train_hierarchically(
    model: nn.Module,
    datasets: Sequence[Sequence[Batch]],
    schedule: Sequence[Mapping[str, Any] | Stage],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    compute_loss: ComputeLoss | None = None,
    options: MemoryOptions | None = None,
    warmup_steps: int = 0,
    clip_norm: float | None = 1.0,
    seed: int = 0,
) -> list[list[float]]:
    """Train the stages of a schedule one after the other, each on its own dataset; returns the losses of each stage.

    Weights and the optimizer's state carry over from stage to stage. The other arguments are those of `train_stage`.
    """
    if len(datasets) != len(schedule):
        raise ValueError(f"every stage has a dataset of its own, got {len(datasets)} for {len(schedule)} stages")
    for stage in schedule:
        Stage.of(stage, sequences=1)  # errors in later stages are raised before training
    if optimizer is None:
        optimizer = _make_optimizer(model, options)
    settings: dict[str, Any] = {"warmup_steps": warmup_steps, "clip_norm": clip_norm, "seed": seed}
    settings |= {"optimizer": optimizer, "compute_loss": compute_loss, "options": options}
    losses = []
    for number, (dataset, stage) in enumerate(zip(datasets, schedule), start=1):
        print(f"Training Stage {number}: {Stage.of(stage, sequences=1).sequence_length} tokens")
        update_attention_config(model, stage)
        losses.append(train_stage(model, dataset, stage, **settings))
    return losses


def _choose(
    kind: Kind,
    model: nn.Module,
    hardware: str,
    segment_lengths: Sequence[int] | None,
    dilation_rates: Sequence[int] | None,
    changes: MemoryFields,
) -> tuple[nn.Module, MemoryOptions]:
    """The model, with dilated attention if a pattern is stated, and the options for a model of its kind."""
    if segment_lengths is not None or dilation_rates is not None:
        model = replace_attention(model, segment_lengths, dilation_rates)
    options = memory_preset(kind, hardware_preset(hardware, _device_of(model)))
    if not isinstance(model, LongNetLM):  # the loss of other models begins with their scores
        if changes.get("loss_chunk"):
            raise ValueError(f"loss_chunk takes the head of a LongNetLM, got {type(model).__name__}: leave it out")
        options = dataclasses.replace(options, loss_chunk=0)
    if not any(isinstance(part, FeedForward) for part in model.modules()):
        options = dataclasses.replace(options, mlp_tile=0)
    return model, dataclasses.replace(options, **changes)


def _prepare(model: nn.Module, options: MemoryOptions, hardware: str) -> nn.Module:
    before = options_of(model) or MemoryOptions()
    # Layers that were replaced before stay replaced; options that do not go together raise before anything changes.
    stay: dict[str, Any] = {name: True for name in ("float8", "structured_sparsity") if getattr(before, name)}
    together = dataclasses.replace(options, **stay)
    model = memory.prepare(model, options)
    if hardware_preset(hardware, _device_of(model)).tf32:
        for part in model.modules():
            if isinstance(part, DilatedAttention):
                part.allow_tf32 = True
    setattr(model, _REMEMBERED, together)
    return model


def _enable(model: nn.Module, option: str) -> nn.Module:
    before = options_of(model) or MemoryOptions()
    change: Any = {option: True, "precision": "bf16" if before.precision == "fp32" else before.precision}
    together = dataclasses.replace(before, **change)  # raises before anything changes
    model = memory.prepare(model, MemoryOptions(**change))
    setattr(model, _REMEMBERED, together)
    return model


def _make_optimizer(model: nn.Module, options: MemoryOptions | None = None, **settings: Any) -> torch.optim.Optimizer:
    options = options or options_of(model) or MemoryOptions()
    given = model if options.optimizer == "muon" else model.parameters()
    return memory.make_optimizer(given, options, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **settings)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


class _Step:
    """One step of an optimizer along the gradient of the mean over all labels of some batches."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        options: MemoryOptions | None,
        compute_loss: ComputeLoss | None,
        clip_norm: float | None,
    ) -> None:
        if hasattr(model, "backward") and hasattr(model, "step"):
            raise TypeError(
                f"{type(model).__name__} makes its own steps: call its backward(loss) and step() in a loop, with "
                "train.memory.loss"
            )
        is_scaled = scaler is not None and scaler.is_enabled()
        self._options = options or options_of(model) or MemoryOptions(precision="fp16" if is_scaled else "fp32")
        self._model, self._device, self._compute_loss = model, _device_of(model), compute_loss
        self._update = Update(
            model,
            optimizer,
            Ranks(device=self._device),
            math.inf if clip_norm is None else clip_norm,
            memory.make_scaler(self._options, self._device) if scaler is None else scaler,
        )
        model.train()

    def __call__(self, batches: Sequence[Batch]) -> float:
        outcome = self._update(self._losses([_unpack(batch, self._device) for batch in batches]))
        if outcome.is_broken and not outcome.is_overflow:  # the weights have not moved
            self._model.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"the loss is {outcome.loss} and the gradient's norm {outcome.gradient_norm}: lower the learning rate, "
                "or look at the batch"
            )
        return outcome.loss

    def _losses(self, parts: Sequence[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> Iterator[Tensor]:
        counted = [int((labels != IGNORED).sum()) for _, labels, _ in parts]
        if not sum(counted):
            raise ValueError("a step needs at least one label that counts, and all of its labels are -100")
        for (tokens, labels, lengths), count in zip(parts, counted):
            if count:
                yield self._loss(tokens, labels, lengths) * (count / sum(counted))

    def _loss(self, tokens: Tensor, labels: Tensor, lengths: dict[str, Any]) -> Tensor:
        if self._compute_loss is None:
            return memory.loss(self._model, tokens, labels, self._options, ignore_index=IGNORED, **lengths)
        with self._options.autocast(self._device):
            return self._compute_loss(self._model(tokens, **lengths), labels)


def _unpack(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tokens, labels = tokens_and_labels(batch, 2, _LENGTHS)
    lengths = {name: batch[name].to(device) for name in _LENGTHS if batch.get(name) is not None}
    if batch.get("labels") is None and lengths:
        raise ValueError(f"{', '.join(lengths)} end sequences within a row: pass labels too, as collate does")
    return tokens.to(device), labels.to(device), lengths


def _pieces(item: Batch, length: int) -> list[dict[str, Tensor]]:
    """A sequence cut to a length, without the parts that have no label."""
    tokens, labels = tokens_and_labels(item)
    cut = zip(tokens.split(length), labels.split(length))
    return [{"input_ids": ids, "labels": targets} for ids, targets in cut if (targets != IGNORED).any()]
