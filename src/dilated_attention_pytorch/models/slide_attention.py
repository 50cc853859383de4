"""The attention weights of a slide encoder's CLS token over all tiles, without an N x N tensor.

`models.torchscale` has `patch_gigapath`, which prepares the encoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import COUNT, checked
from dilated_attention_pytorch.functional import attention_rows
from dilated_attention_pytorch.models.torchscale import TorchscaleAttention


@checked()
def cls_attention(model: nn.Module, *inputs: Any, **named: Any) -> Tensor:
    """The weights that row 0 gives to every token, per layer and head: `(layers, heads, N)`, on the CPU.

    Runs `model(*inputs, **named)` on one slide; `patch_gigapath` must have patched the model. Token 0 is the CLS token
    and token `i + 1` is tile `i`. A token that row 0 does not see has weight 0, and the weights of a head add up to 1.
    They are the same with and without `exact_torchscale`, as row 0 sees no padding.
    """
    layers = [module for module in model.modules() if isinstance(module, TorchscaleAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention of patch_gigapath: call patch_gigapath(model) first")
    if model.training:
        raise ValueError("dropout would make the weights those of one draw: call model.eval() first")
    found: list[Tensor] = []

    def record(layer: TorchscaleAttention, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        query, key = (named[name] if name in named else inputs[i] for i, name in enumerate(("query", "key")))
        if query.shape[0] != 1:
            raise ValueError(f"a map is of one slide, got a batch of {query.shape[0]}: call it for each of them")
        q, k, _ = layer.project(query, key, key)
        rows = attention_rows(
            q,
            k,
            [0],
            **layer.attention.spec.keywords,
            is_causal=bool(named.get("is_causal", False)),
            scale=layer.attention.softmax_scale,
            spans=layer.spans(named.get("key_padding_mask"), *query.shape[:2]),
        )
        weights = torch.zeros(layer.num_heads, query.shape[1])
        for (_, _, head), seen in rows.items():
            weights[head, seen.positions.cpu()] = seen.weights.float().cpu()
        found.append(weights)

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            model(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


@checked(tile_size=COUNT)
def on_slide(weights: Tensor, coordinates: Tensor, tile_size: int = 256) -> Tensor:
    """Weights of tiles, `(..., tiles)`, as maps of the slide, `(..., rows, columns)`; 0 where there is no tile.

    `coordinates`, `(tiles, 2)`, are each tile's column and row in pixels, `tile_size` pixels per tile, as in
    Prov-GigaPath. The map begins at the first row and column that have a tile; tiles at one position add up.

    >>> on_slide(torch.tensor([0.25, 0.75]), torch.tensor([[256, 0], [512, 256]]))
    tensor([[0.2500, 0.0000],
            [0.0000, 0.7500]])
    """
    coordinates = coordinates.reshape(-1, 2) if coordinates.dim() == 3 and coordinates.shape[0] == 1 else coordinates
    if not weights.dim() or coordinates.is_complex() or coordinates.is_meta or weights.is_meta:
        raise ValueError(f"weights must be (..., tiles) and coordinates real numbers, got {tuple(weights.shape)}")
    if coordinates.dim() != 2 or coordinates.shape[1] != 2 or coordinates.shape[0] != weights.shape[-1]:
        raise ValueError(
            f"there must be a pair of coordinates for each tile, got {tuple(coordinates.shape)} for "
            f"{weights.shape[-1]} weights; token 0 is the CLS token, so leave it out: weights[..., 1:]"
        )
    grid = torch.floor(coordinates.double() / tile_size).long().to(weights.device)
    column, row = (grid - grid.amin(0)).unbind(1)
    rows, columns = int(row.max()) + 1, int(column.max()) + 1
    flat = weights.new_zeros(*weights.shape[:-1], rows * columns)
    return flat.index_add_(-1, row * columns + column, weights).unflatten(-1, (rows, columns))
