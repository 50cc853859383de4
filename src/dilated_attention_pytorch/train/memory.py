"""How a training step saves memory: one frozen value, applied to a model, its loss and its optimizer.

Each option is independent of the others. All but `precision`, `parameters`, `float8`, `structured_sparsity` and
`optimizer` compute the same result, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import COUNT, SIZE, check_fields, import_optional
from dilated_attention_pytorch.core.pool import LEAST_THRESHOLD
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.functional import autocast_inputs
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.longnet import LongNet, LongNetLM, Pretrained
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.multihead import MultiheadDilatedAttention
from dilated_attention_pytorch.nn.replacement import replace_parts
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.train.cross_entropy import Reduction, linear_cross_entropy
from dilated_attention_pytorch.train.muon import MuonWithAdamW
from dilated_attention_pytorch.train.offload import Offload
from dilated_attention_pytorch.train.recompute import Recomputation, TiledFeedForward, tile_feed_forwards

Prepared = TypeVar("Prepared", bound=nn.Module)

Checkpointing = Literal["none", "full", "selective"]
Precision = Literal["fp32", "bf16", "fp16"]
ParameterPrecision = Literal["fp32", "bf16"]
OptimizerName = Literal["adamw", "muon", "adamw8bit-torchao", "adamw8bit-bitsandbytes"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"]

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


class MemoryFields(TypedDict, total=False):
    """The fields of `MemoryOptions`, as keywords of a function."""

    checkpointing: Checkpointing
    layers_per_checkpoint: int
    offload: bool
    offload_least_bytes: int
    mlp_tile: int
    loss_chunk: int
    optimizer: OptimizerName
    precision: Precision
    parameters: ParameterPrecision
    float8: bool
    structured_sparsity: bool
    compile: bool
    compile_mode: CompileMode
    compile_backend: str


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How a step saves memory. The defaults save nothing, and 0 rows mean all rows at the same time.

    `checkpointing="full"` keeps the input of a layer and computes the layer again in backward; `"selective"` also keeps
    the results of its attention, so that attention runs once. `layers_per_checkpoint=n` keeps the input of every n-th
    layer only; of each n layers, backward runs all but the last once more. Tensors below `offload_least_bytes` are not
    offloaded. Products of float32 parameters run under autocast; `precision="fp16"` needs `make_scaler`.

    With `parameters="bf16"`, torchao's optimizer rounds updates stochastically, so that small ones count on average;
    the others round to nearest, and lose an update below 1/512 of a weight. `float8` without `compile` scales every
    factor in separate kernels. `structured_sparsity` uses the larger two of four neighbouring weights of the
    feed-forward networks; every step chooses them again, and compiled layers do not compile these products.

    >>> MemoryOptions(checkpointing="selective", loss_chunk=4096).precision
    'fp32'
    """

    checkpointing: Checkpointing = setting(
        "none", "recompute layers in backward: full, or selective: all but their attention", may_change=True
    )
    layers_per_checkpoint: int = setting(
        1, "with full checkpointing: keep the input of every n-th layer only", range=COUNT, may_change=True
    )
    offload: bool = setting(False, "keep what checkpointing keeps in host memory", may_change=True)
    offload_least_bytes: int = setting(LEAST_THRESHOLD, range=COUNT, may_change=True)
    mlp_tile: int = setting(
        0,
        "rows of a feed-forward network per tile, recomputed in backward; 0: no tiles",
        range=SIZE,
        may_change=True,
    )
    loss_chunk: int = setting(0, "rows whose logits exist at the same time; 0: all", range=SIZE, may_change=True)
    optimizer: OptimizerName = setting(
        "adamw", "AdamW with a state of 32 or 8 bits, or Muon for the matrices of layers and AdamW for the rest"
    )
    precision: Precision = setting("fp32", "precision of products")
    parameters: ParameterPrecision = setting(
        "fp32", "bf16 (with --precision bf16): parameters, gradients and activations between layers"
    )
    float8: bool = setting(False, "products of linear layers in float8; compute capability 9.0 or newer")
    structured_sparsity: bool = setting(
        False, "2:4 sparse weights in feed-forward networks; compute capability 8.0 or newer"
    )
    compile: bool = setting(
        False, "torch.compile each layer (default: on a GPU, unless DeepSpeed shards)", may_change=True
    )
    compile_mode: CompileMode = setting("default", "with --compile: the mode of torch.compile", may_change=True)
    compile_backend: str = setting("inductor", "with --compile: the backend of torch.compile", may_change=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.offload and self.checkpointing == "none":
            raise ValueError(
                "offload moves what checkpointing keeps: choose checkpointing='full' or 'selective' with it"
            )
        if self.layers_per_checkpoint > 1 and self.checkpointing != "full":
            raise ValueError(
                f"layers_per_checkpoint={self.layers_per_checkpoint} keeps the inputs of fewer layers: choose "
                f"checkpointing='full' with it, not {self.checkpointing!r}"
            )
        if self.parameters == "bf16" and self.precision != "bf16":
            raise ValueError(
                f"products of bfloat16 parameters are bfloat16: choose precision='bf16', not {self.precision!r}"
            )
        if self.float8 and self.structured_sparsity:
            raise ValueError("a linear layer is either float8 or 2:4 sparse: choose one of float8, structured_sparsity")
        if self.structured_sparsity and self.precision == "fp32":
            raise ValueError("2:4 sparse products exist in 16 bits only: choose precision='bf16' or 'fp16' with it")
        if not self.compile and (self.compile_mode != "default" or self.compile_backend != "inductor"):
            raise ValueError("compile_mode and compile_backend say how to compile: pass compile=True with them")
        if self.compile_mode in _WITH_CUDA_GRAPHS and (self.checkpointing != "none" or self.mlp_tile):
            raise ValueError(
                f"compile_mode={self.compile_mode!r} captures CUDA graphs, whose memory a layer that runs again in "
                "backward would overwrite: choose 'default' or 'max-autotune-no-cudagraphs', or no checkpointing and "
                "no mlp_tile"
            )

    @property
    def recomputation(self) -> Recomputation | None:
        """How layers run under `checkpointing`; None without it."""
        if self.checkpointing == "none":
            return None
        offload = Offload(self.offload_least_bytes) if self.offload else None
        return Recomputation(keep_attention=self.checkpointing == "selective", offload=offload)

    def stated(self) -> str:
        """The options that differ from the defaults.

        >>> MemoryOptions(precision="bf16", checkpointing="full").stated()
        'checkpointing=full precision=bf16'
        """
        named = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        return " ".join(f"{name}={value}" for name, (value, default) in named.items() if value != default)

    def autocast(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """The context in which to compute a forward pass and its loss."""
        if self.precision == "fp32" or self.parameters == "bf16":  # all is bfloat16 then
            return nullcontext()
        return torch.autocast(torch.device(device).type, _LOW_PRECISION[self.precision])


def prepare(model: Prepared, options: MemoryOptions) -> Prepared:
    """Change a model with dilated attention, in place, so that it trains with these options; returns the model.

    Call it once, with the model on its device, before ranks share it (`fully_shard`, DDP, DeepSpeed). Names in the
    state dict stay, so checkpoints are those of the plain model. Checkpointing and compilation apply to the layers of a
    `LongNetLM` or `LongNet`, and in other models to modules that hold attention, such as `nn.TransformerEncoderLayer`.

    >>> model = LongNetLM(d_model=32, num_heads=4, num_layers=2, segment_lengths=(16, 64), dilation_rates=(1, 4))
    >>> options = MemoryOptions(checkpointing="selective", mlp_tile=64, loss_chunk=64)
    >>> tokens = torch.randint(256, (2, 100))
    >>> loss(prepare(model, options), tokens[:, :-1], tokens[:, 1:], options).backward()
    """
    from torch.distributed.fsdp import FSDPModule

    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, FSDPModule)
    if isinstance(model, wrappers) or not any(isinstance(part, DilatedAttention) for part in model.modules()):
        raise TypeError(
            f"prepare takes a model with dilated attention, before anything is wrapped around it, got "
            f"{type(model).__name__}: replace_attention puts it in the place of nn.MultiheadAttention"
        )
    device = next(model.parameters()).device
    if options.float8:
        _use_float8(model, device)
    if options.structured_sparsity:
        _use_structured_sparsity(model, device)
    if options.parameters == "bf16":
        model.bfloat16()
    if options.mlp_tile and not tile_feed_forwards(model, options.mlp_tile):
        raise ValueError("mlp_tile finds no feed-forward network that is not tiled yet: prepare a model only once")
    if options.compile:
        if options.compile_backend not in torch.compiler.list_backends(exclude_tags=()):
            raise ValueError(
                f"compile_backend must be one that torch.compile knows, got {options.compile_backend!r}: choose one of "
                f"{', '.join(torch.compiler.list_backends())}"
            )
        mode = None if options.compile_mode == "default" else options.compile_mode
        chosen = _inductor_options() if mode is None and options.compile_backend == "inductor" else {}
        for layer in _layers(model):
            layer.compile(backend=options.compile_backend, mode=mode, options=chosen or None)
            for part in layer.modules():
                if isinstance(part, TiledFeedForward):
                    part.compile_tiles(options.compile_backend, mode)
    run = options.recomputation
    return model if run is None else _checkpoint_layers(model, run, options.layers_per_checkpoint)


def _inductor_options() -> dict[str, bool]:
    """PyTorch 2.10 and newer sum the gradients of a norm's gain in the kernel of its input's gradient.

    On an H200 that kernel took five times as long as two kernels do.
    """
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def compile_now(model: LongNetLM, tokens: Tensor, options: MemoryOptions, **lengths: Any) -> str:
    """Compile the layers of a prepared model, for `tokens` `(B, N)`; returns why that failed, or an empty string.

    It computes the loss and the gradients of a model of one layer, or of two if layers are staggered: the other layers
    run the same code. Gradients are cleared.
    """
    layers = model.layers
    model.layers = layers[: len(model.config.specs)]
    try:
        loss(model, tokens, tokens, options, reduction="sum", **lengths).backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # a compiler may fail in any way
        error: BaseException = raised
        while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
            error = inner  # what a backend raised, without torch.compile's words around it
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    finally:
        model.layers = layers
        model.zero_grad(set_to_none=True)
    return ""


def uncompile(model: nn.Module) -> None:
    """Let the layers of a prepared model run as they are written."""
    for part in model.modules():
        part._compiled_call_impl = None
        if isinstance(part, TiledFeedForward):
            part.compiled_by = None


def _checkpoint_layers(model: Prepared, run: Recomputation, every: int) -> Prepared:
    if isinstance(model, Pretrained):
        model.gradient_checkpointing_enable(run=run, every=every)
        return model
    if every > 1:
        raise ValueError(
            f"layers_per_checkpoint={every} needs a model of this library, got {type(model).__name__}: leave it out"
        )
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

    if before := [part for part in model.modules() if isinstance(part, CheckpointWrapper)]:
        for part in before:
            part.checkpoint_fn = functools.partial(run)
        return model
    layers = {*_layers(model)}
    wrapped: Any = replace_parts(
        model, lambda part: checkpoint_wrapper(part, checkpoint_fn=run) if part in layers else part
    )
    return wrapped


def loss(
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    options: MemoryOptions,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    **lengths: Tensor | None,
) -> Tensor:
    """The cross-entropy of `targets` `(B, N)` under a `LongNetLM`, or under a wrapper of one (DDP, FSDP2, DeepSpeed).

    Forward runs under the options' autocast. `lengths` (`seqlens`, `cu_seqlens`, `key_padding_mask`) go to the model.
    """
    how: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    with options.autocast(tokens.device):
        if options.loss_chunk:
            finish = functools.partial(linear_cross_entropy, targets=targets, chunk=options.loss_chunk, **how)
            return model(tokens, **lengths, finish=finish)
        logits = model(tokens, **lengths).flatten(0, 1)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(exact), targets.flatten(), **how)


def make_optimizer(
    parameters: nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]], options: MemoryOptions, **settings: Any
) -> torch.optim.Optimizer:
    """The optimizer that the options choose; `settings` are AdamW's arguments: `lr`, `betas`, `weight_decay` and so on.

    Of a model, matrices decay, and biases and norms do not. `muon` takes a model, because it must know which matrices
    belong to layers; AdamW updates the others, such as the embedding. On a GPU PyTorch's AdamW is fused, unless ranks
    shard parameters in several ways. 8-bit optimizers keep the state of tensors of fewer than 4,096 elements in
    float32. Change the learning rate with `set_learning_rate`.

    >>> make_optimizer([nn.Parameter(torch.zeros(3))], MemoryOptions(), lr=1e-3).defaults["lr"]
    0.001
    """
    if isinstance(parameters, nn.Module):
        tensors = list(parameters.parameters())
        given: list[Any] = [
            {"params": [p for p in tensors if p.dim() >= 2]},
            {"params": [p for p in tensors if p.dim() < 2], "weight_decay": 0.0},
        ]
    else:
        given = list(parameters)
        tensors = [p for part in given for p in (part["params"] if isinstance(part, dict) else [part])]
    if options.optimizer == "adamw8bit-torchao":
        settings = {"bf16_stochastic_round": options.parameters == "bf16", **settings}
        return import_optional("torchao.optim", "torchao", options.optimizer).AdamW8bit(given, **settings)
    if options.optimizer == "adamw8bit-bitsandbytes":
        from torch.distributed.tensor import DTensor

        if any(isinstance(p, DTensor) for p in tensors):
            raise ValueError(
                "bitsandbytes cannot step parameters that ranks shard: choose 'adamw8bit-torchao' for them"
            )
        return import_optional("bitsandbytes.optim", "bitsandbytes", options.optimizer).AdamW8bit(given, **settings)
    if _can_be_fused(tensors):
        settings.setdefault("fused", True)
    if options.optimizer != "muon":
        return torch.optim.AdamW(given, **settings)
    if not isinstance(parameters, nn.Module):
        raise TypeError(
            "optimizer 'muon' updates the matrices of a model's layers, which a list of parameters does not identify: "
            "pass the model"
        )
    inner = parameters.module if isinstance(parameters, nn.parallel.DistributedDataParallel) else parameters
    matrices = {p: None for layer in _layers(inner) for p in layer.parameters() if p.dim() == 2}
    if not matrices:
        raise ValueError(f"optimizer 'muon' finds no matrix in a layer of {type(inner).__name__}: use 'adamw'")
    others = [{**group, "params": [p for p in group["params"] if p not in matrices]} for group in given]
    return MuonWithAdamW(list(matrices), others, **{"lr": 1e-3, "weight_decay": 1e-2, **settings})


def _can_be_fused(parameters: Sequence[Tensor]) -> bool:
    """Whether PyTorch updates all of these at once: on GPUs, and if sharded, all on one mesh."""
    on_gpus = all(p.is_cuda for p in parameters)
    return on_gpus and len({getattr(p, "device_mesh", None) for p in parameters}) == 1


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, whose compiled step would take a number for a constant
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def make_scaler(options: MemoryOptions, device: torch.device | str) -> torch.amp.GradScaler:
    """The loss scale that float16 needs; for other precisions, one that does nothing.

    >>> make_scaler(MemoryOptions(precision="bf16"), "cpu").is_enabled()
    False
    """
    return torch.amp.GradScaler(torch.device(device).type, enabled=options.precision == "fp16")


def _layers(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, LongNetLM | LongNetEncoder):
        return list(model.layers)
    if isinstance(model, LongNet):
        return [*model.encoder, *model.decoder]
    holder = {child: part for part in model.modules() for child in part.children()}
    found: dict[nn.Module, None] = {}
    for part in model.modules():
        if isinstance(part, DilatedAttention):
            attention = holder[part] if isinstance(holder.get(part), MultiheadDilatedAttention) else part
            layer = holder.get(attention, model)
            alone = layer is model or isinstance(layer, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            found[attention if alone else layer] = None
    return list(found)


def _use_float8(model: nn.Module, device: torch.device) -> None:
    _need_capability(device, (9, 0), "float8 products", "use precision='bf16' there")
    float8 = import_optional("torchao.float8", "torchao", "float8")
    # The products need a multiple of 16 rows, which a last tile or a sequence of any length need not have. Where rows
    # are a multiple, padding copies the factors for nothing unless the layer is compiled.
    config = float8.Float8LinearConfig(pad_inner_dim=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=_can_be_float8)
    if not any(isinstance(part, float8.float8_linear.Float8Linear) for part in model.modules()):
        raise ValueError("the model has no linear layer whose sizes are multiples of 16: leave float8 out")


def _use_structured_sparsity(model: nn.Module, device: torch.device) -> None:
    _need_capability(device, (8, 0), "2:4 sparse products", "leave structured_sparsity out there")
    if not torch.backends.cusparselt.is_available():
        raise ValueError("2:4 sparse products run in cuSPARSELt, which this PyTorch was built without")
    sparse: dict[nn.Module, nn.Module] = {}
    for network in [part for part in model.modules() if isinstance(part, FeedForward)]:
        for part in network.children():
            if isinstance(part, nn.Linear) and part.in_features % 128 == part.out_features % 128 == 0:
                sparse[part] = _SemiSparseLinear(part)
    if not sparse:
        raise ValueError(
            "structured_sparsity takes feed-forward networks whose sizes are multiples of 128, and the model has none"
        )
    replace_parts(model, lambda part: sparse.get(part, part))


class _SemiSparseLinear(nn.Linear):
    """A linear layer that uses two of four neighbouring weights; the gradient reaches all four."""

    def __init__(self, dense: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.weight, self.bias = dense.weight, dense.bias

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the pruning has no fake kernel for tracing
    def forward(self, x: Tensor) -> Tensor:
        # Autocast would convert the weight after pruning, in a form that cannot be converted.
        x, weight = autocast_inputs(x, self.weight)
        bias = None if self.bias is None else self.bias.to(weight.dtype)
        out = F.linear(x.to(weight.dtype).contiguous(), _Pruned.apply(weight), bias)
        if out.requires_grad:
            out.register_hook(Tensor.contiguous)  # cuSPARSELt reads rows or columns, and no other strides
        return out


class _Pruned(torch.autograd.Function):
    """A weight as cuSPARSELt takes it: in tiles of 4 x 4, the largest that leave at most two in a row and a column.

    PyTorch's packing, because torchao's is flat where newer products expect rows.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        pruned = torch.sparse.SparseSemiStructuredTensorCUSPARSELT.prune_dense_static_sort(weight.detach())
        pruned.fuse_transpose_cusparselt = True  # results lie by rows, as those of a dense layer
        return pruned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _can_be_float8(part: nn.Module, name: str) -> bool:
    """Sizes that the products take; not the head, whose weight may be the embedding's."""
    if not isinstance(part, nn.Linear) or name.split(".")[-1] == "head":
        return False
    return part.in_features % 16 == part.out_features % 16 == 0


def _need_capability(device: torch.device, least: tuple[int, int], what: str, instead: str) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < least:
        found = f"{device} of {capability[0]}.{capability[1]}" if device.type == "cuda" else str(device)
        raise ValueError(
            f"{what} need a GPU of compute capability {least[0]}.{least[1]} or newer, and the model is on {found}: "
            f"{instead}"
        )
