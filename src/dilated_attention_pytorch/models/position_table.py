"""The fixed position table of slide encoders, computed from its two axes instead of stored in 3 GB."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SlidePositions(nn.Module):
    """Replaces the buffer `pos_embed` of Prov-GigaPath's slide encoder, `(1, 1 + grids ** 2, E)`; indexed like it.

    Row 0, of the CLS token, is zero; row `1 + x * grids + y` joins the sines and cosines of `y` and of `x`. Only those
    of a single axis, `(grids, E / 2)`, are stored.

    >>> table = SlidePositions(embed_dim=8, grids=1000)
    >>> table.shape, table[:, torch.tensor([[0, 1, 1001]]), :].shape
    (torch.Size([1, 1000001, 8]), torch.Size([1, 1, 3, 8]))
    """

    axis: Tensor

    def __init__(self, embed_dim: int, grids: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if embed_dim % 4:
            raise ValueError(
                f"a sine and a cosine of two axes take a multiple of 4 dimensions, got embed_dim={embed_dim}"
            )
        self.embed_dim, self.grids = embed_dim, grids
        frequencies = 10_000.0 ** (-torch.arange(embed_dim // 4, dtype=torch.float64) / (embed_dim // 4))
        angles = torch.arange(grids, dtype=torch.float64)[:, None] * frequencies
        axis = torch.cat((angles.sin(), angles.cos()), dim=1).float()
        self.register_buffer("axis", axis.to(device=device, dtype=dtype), persistent=False)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, 1 + self.grids**2, self.embed_dim))

    def rows(self, positions: Tensor) -> Tensor:
        """`(..., E)` of positions `(...)`."""
        tile = (positions - 1).clamp_min(0)
        found = torch.cat((self.axis[tile % self.grids], self.axis[tile // self.grids]), dim=-1)
        return found.masked_fill((positions == 0).unsqueeze(-1), 0.0)

    def __getitem__(self, index: Any) -> Tensor:
        whole = slice(None)
        if not (isinstance(index, tuple) and len(index) == 3 and index[0] == whole and index[2] == whole):
            raise IndexError("the position table is computed by rows: index it as pos_embed[:, rows, :]")
        rows = index[1]
        if isinstance(rows, slice):
            rows = torch.arange(self.shape[1], device=self.axis.device)[rows]
        return self.rows(rows)[None]

    def holds(self, table: Tensor) -> bool:
        """Whether a stored table is this one, up to rounding."""
        if table.shape != self.shape:
            return False
        if table.is_meta:
            return True
        tiles = table[0, 1:].unflatten(0, (self.grids, self.grids))
        axis = self.axis.to(device=table.device, dtype=table.dtype)
        same = not table[0, 0].any()
        half = self.embed_dim // 2
        for x in range(self.grids):  # a strip at a time: all at once would take as much memory again
            if not same:
                break
            strip = tiles[x]
            same = _close(strip[:, :half], axis) and _close(strip[:, half:], axis[x].expand_as(strip[:, half:]))
        return same

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, grids={self.grids}"


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=4 * torch.finfo(a.dtype).eps)


def compute_positions(model: nn.Module) -> int:
    """Replace every stored table of slide positions in `model`, and return how many; tables of other values stay.

    State dicts with and without the table still load; a table with other values than the computed ones is refused.
    """
    found = 0
    for module in list(model.modules()):
        grids, table = getattr(module, "slide_ngrids", None), getattr(module, "pos_embed", None)
        if not isinstance(grids, int) or not isinstance(table, Tensor) or table.requires_grad or table.dim() != 3:
            continue
        if table.shape[2] % 4:
            continue
        computed = SlidePositions(table.shape[2], grids, None if table.is_meta else table.device, table.dtype)
        if not computed.holds(table):
            continue
        del module.pos_embed
        module.pos_embed = computed
        module.register_load_state_dict_pre_hook(_take_stored_table)
        found += 1
    return found


def _take_stored_table(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    table = state_dict.pop(f"{prefix}pos_embed", None)
    computed = module.pos_embed
    if table is not None and isinstance(computed, SlidePositions) and not computed.holds(table):
        error_msgs.append(
            f"{prefix}pos_embed, {tuple(table.shape)}, is not the table of sines and cosines {tuple(computed.shape)} "
            "that this model computes: load the weights first, then patch_gigapath, which keeps other tables"
        )
