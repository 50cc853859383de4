"""What the rows of a sequence look at, in every layer and head of a model, without an N x N tensor.

The maps are computed from the queries, keys and values of a model's own forward pass. Hooks catch them where they enter
a `DilatedAttention`, and in models of transformers where they enter the attention function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import SIZE, check_instance, check_sequence, checked
from dilated_attention_pytorch.core.spans import document_spans, documents
from dilated_attention_pytorch.functional import attention_rows, dilated_attention
from dilated_attention_pytorch.models.padded_attention import PaddedAttention
from dilated_attention_pytorch.nn.attention import DilatedAttention

Rows = Sequence[int] | Literal["all"]


class Seen(NamedTuple):
    """The tensors of one attention call, and the keywords of `attention_rows` that describe it."""

    query: Tensor
    key: Tensor
    value: Tensor
    settings: dict[str, Any]


@checked(layers=SIZE)
def attention_map(model: nn.Module, inputs: Any, *, rows: Rows, layers: Sequence[int] | None = None) -> Tensor:
    """The attention weights of some rows: `(layers, rows, heads, N)`, in float32 on the CPU.

    It runs the model on one sequence, or one row of packed ones. A key that a row does not see in a head has weight 0;
    the weights of a row in a head add up to 1, or to 0 if the row sees nothing. Memory is that of the result.

    Args:
        model: any model with dilated attention, in `eval()`: a `LongNet`, `LongNetEncoder` or `LongNetLM`, a model of
            transformers after `use_dilated_attention`, one after `patch_gigapath`, or your own.
        inputs: what the model takes: a tensor, a sequence of arguments, or a mapping of keywords.
        rows: positions of queries; or "all" for the mean over all rows of a sequence: how much attention each key gets.
            The result then has one row.
        layers: which attention calls of the model, counted from 0 in the order of its forward pass; all by default.

    A `LongNetEncoder` puts its `k` CLS rows first, so row `i` of the input is at position `k + i`.

    >>> from dilated_attention_pytorch import LongNetLM
    >>> model = LongNetLM(d_model=32, num_heads=4, num_layers=2, segment_lengths=(16, 128), dilation_rates=(1, 4))
    >>> tokens = torch.randint(256, (1, 100))
    >>> attention_map(model.eval(), tokens, rows=[99, 50]).shape
    torch.Size([2, 2, 4, 100])
    >>> attention_map(model, {"tokens": tokens}, rows="all", layers=[1]).shape
    torch.Size([1, 1, 4, 100])
    """
    return weights_of(model, lambda: _run(model, inputs), rows, layers)


def weights_of(model: nn.Module, run: Callable[[], object], rows: Rows, layers: Sequence[int] | None = None) -> Tensor:
    """The result of `attention_map` for the attention calls that `run()` makes."""
    _check_model(model)
    found: list[Tensor | None] = []

    def record(seen: Seen) -> Seen:
        found.append(_weights(seen, rows) if layers is None or len(found) in layers else None)
        return seen

    with torch.no_grad(), _observed(model, record, rows_of_padded=rows):
        run()
    return _stacked(found, layers)


@checked(layers=SIZE)
def gradient_map(
    model: nn.Module, inputs: Any, *, of: Callable[[Any], Tensor], layers: Sequence[int] | None = None
) -> Tensor:
    """How much each key adds to a number, by gradient times attention: `(layers, heads, N)`, float32 on the CPU.

    `of` computes the number from the model's output, such as `lambda logits: logits[0, 1]`. The map of a layer is the
    sum over rows of each attention weight times the gradient of the number with respect to it. That equals the product
    of the value and its gradient, so nothing of size N x N is made. Heads are those of keys and values; the other
    arguments are those of `attention_map`. Gradients of parameters stay as they are.

    >>> from dilated_attention_pytorch import LongNetEncoder
    >>> encoder = LongNetEncoder(input_dim=8, d_model=32, num_heads=4, num_layers=2, num_classes=2, max_length=100)
    >>> gradient_map(encoder.eval(), torch.randn(1, 100, 8), of=lambda logits: logits[0, 1]).shape
    torch.Size([2, 4, 100])
    """
    _check_model(model)
    values: list[Tensor] = []

    def record(seen: Seen) -> Seen:
        values.append(seen.value if seen.value.requires_grad else seen.value.detach().requires_grad_())
        return seen._replace(value=values[-1])

    with torch.enable_grad(), _observed(model, record):
        number = check_instance("what `of` returns", of(_run(model, inputs)), Tensor)
    if number.numel() != 1 or not number.requires_grad:
        raise ValueError(f"`of` must return one number that depends on the model's output, got {tuple(number.shape)}")
    gradients = torch.autograd.grad(number.sum(), values, allow_unused=True)
    maps = [
        torch.zeros(v.shape[2], v.shape[1]) if g is None else (v.detach() * g).float().sum(-1)[0].T.cpu()
        for v, g in zip(values, gradients)
    ]
    return _stacked(maps, layers)


def _check_model(model: nn.Module) -> None:
    if not any(isinstance(part, DilatedAttention) for part in model.modules()) and not _is_switched(model):
        raise ValueError(
            f"{type(model).__name__} has no dilated attention: call patch_gigapath(model) or "
            "models.hf.use_dilated_attention(model, ...) first, or use a model of this library"
        )
    if model.training:
        raise ValueError("dropout would make the weights those of one draw: call model.eval() first")


def _is_switched(model: nn.Module) -> bool:
    """Whether this is a model of transformers with `attn_implementation="dilated"`."""
    hf = sys.modules.get("dilated_attention_pytorch.models.hf.attention")
    return hf is not None and any(
        getattr(getattr(part, "config", None), "_attn_implementation", None) == hf.NAME for part in model.modules()
    )


def _run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(*check_sequence("inputs", inputs))


@contextmanager
def _observed(model: nn.Module, record: Callable[[Seen], Seen], rows_of_padded: Rows = (0,)) -> Iterator[None]:
    """Show `record` every attention call of the model, in order; it may return other tensors for the call to use."""

    def noted(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        if q.shape[0] != 1:
            raise ValueError(f"a map shows one sequence, got a batch of {q.shape[0]}: pass one sequence at a time")
        return record(Seen(q, k, v, settings))[:3]

    def note(layer: DilatedAttention, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        q, k, v, *rest = args
        if layer.sparse_config is not None:
            raise ValueError("a map shows whole branches, not some of their tiles: use a model without sparse_config")
        if isinstance(layer, PaddedAttention) and [*rows_of_padded] != [0]:
            raise ValueError(
                "torchscale's exact semantics give weight to padding, except in row 0: ask for rows=[0], or patch the "
                "model with exact_torchscale=False"
            )
        own = (DilatedAttention.attend, PaddedAttention.attend)
        if type(layer).attend not in own and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("ranks share the rows of this sequence: make the map in a single process")
        names = ("key_padding_mask", "seqlens", "cu_seqlens", "spans")
        lengths: dict[str, Any] = {name: named.get(name) for name in names}
        spans = document_spans(*q.shape[:2], **lengths)
        causal = bool(rest[0] if rest else named.get("is_causal", False))
        settings = {**layer.spec.keywords, "is_causal": causal, "scale": layer.softmax_scale, "spans": spans}
        return (*noted(q, k, v, settings), *rest), named

    hooks = [
        part.register_forward_pre_hook(note, with_kwargs=True)
        for part in model.modules()
        if isinstance(part, DilatedAttention)
    ]
    switched: Any = sys.modules["dilated_attention_pytorch.models.hf.attention"] if _is_switched(model) else None
    try:
        if switched is not None:
            switched.observe = noted
        yield
    finally:
        if switched is not None:
            switched.observe = None
        for hook in hooks:
            hook.remove()


def _weights(seen: Seen, rows: Rows) -> Tensor:
    """`(rows, heads, N)`."""
    if isinstance(rows, str):
        return _mean_over_rows(seen)[None]
    N, heads = seen.query.shape[1:3]
    weights = torch.zeros(len(rows), heads, N)
    found = attention_rows(seen.query, seen.key, rows, **seen.settings)
    for number, row in enumerate(rows):
        for head in range(heads):
            positions, of_row = found[0, row, head]
            weights[number, head, positions.cpu()] = of_row.float().cpu()
    return weights


def _mean_over_rows(seen: Seen) -> Tensor:
    """`(heads, N)`: the weights of each key, averaged over the rows of its sequence.

    The gradient of values is the sum over rows of weights times the gradient of the row's output. So with the gradient
    `1 / rows`, in a channel of its own for every query head that shares a value head, the values' gradient is the mean.
    """
    q, k = seen.query.float(), seen.key.float()
    (_, N, H, D), kv_heads = q.shape, k.shape[2]
    group = H // kv_heads
    if group > D:
        raise ValueError(f"the mean over all rows takes at most {D} query heads per key/value head, got {group}")
    grad = q.new_zeros(1, N, kv_heads, group, D)
    for _, start, length, _ in documents(seen.settings["spans"], 1, N):
        grad[:, start : start + length] = torch.eye(group, D, device=q.device) / length
    with torch.enable_grad():
        values = k.new_zeros(k.shape).requires_grad_()
        out = dilated_attention(q, k, values, **seen.settings)
        (found,) = torch.autograd.grad(out, values, grad.flatten(2, 3))
    return found[0, :, :, :group].flatten(1).T.cpu()  # (H, N)


def _stacked(found: Sequence[Tensor | None], wanted: Sequence[int] | None) -> Tensor:
    if missing := [one for one in wanted or () if one >= len(found)]:
        raise ValueError(f"the model makes {len(found)} attention calls, numbered from 0, got layers {missing}")
    chosen = [one for one in (found if wanted is None else [found[i] for i in wanted]) if one is not None]
    if not chosen:
        raise ValueError("no attention call was seen: pass inputs without a cache, and at least one layer")
    if len({one.shape for one in chosen}) > 1:
        shapes = sorted({(one.shape[-2], one.shape[-1]) for one in chosen})
        raise ValueError(
            f"the chosen layers differ in heads and tokens, {shapes}: choose those of the encoder or of the decoder "
            "with layers="
        )
    return torch.stack(chosen)
