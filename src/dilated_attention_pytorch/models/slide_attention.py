"""The attention weights of a slide encoder's CLS token over all tiles, without an N x N tensor.

`models.torchscale` has `patch_gigapath`, which prepares the encoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import COUNT, checked
from dilated_attention_pytorch.models.attention_map import weights_of
from dilated_attention_pytorch.models.torchscale import TorchscaleAttention


@checked()
def cls_attention(model: nn.Module, *inputs: Any, **named: Any) -> Tensor:
    """The weights that row 0 gives to every token, per layer and head: `(layers, heads, N)`, on the CPU.

    Runs `model(*inputs, **named)` on one slide; `patch_gigapath` must have patched the model. Token 0 is the CLS token
    and token `i + 1` is tile `i`. A token that row 0 does not see has weight 0, and the weights of a head add up to 1.
    They are the same with and without `exact_torchscale`, as row 0 sees no padding. `attention_map` is for other rows
    and models.
    """
    if not any(isinstance(part, TorchscaleAttention) for part in model.modules()):
        raise ValueError(f"{type(model).__name__} has no attention of patch_gigapath: call patch_gigapath(model) first")
    return weights_of(model, lambda: model(*inputs, **named), [0])[:, 0]


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
    if not len(coordinates):
        raise ValueError("a map needs at least one tile, got none")
    grid = torch.floor(coordinates.double() / tile_size).long().to(weights.device)
    column, row = (grid - grid.amin(0)).unbind(1)
    rows, columns = int(row.max()) + 1, int(column.max()) + 1
    flat = weights.new_zeros(*weights.shape[:-1], rows * columns)
    return flat.index_add_(-1, row * columns + column, weights).unflatten(-1, (rows, columns))
