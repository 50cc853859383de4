"""Rotary positions, xPos positions (whose scores also decay with distance), and positions of tiles on a slide."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import (
    MOST_TOKENS,
    POSITIVE,
    check_device,
    check_instance,
    check_tensor,
    check_whole,
    checked,
)
from dilated_attention_pytorch.core.spans import check_spans, document_positions, document_spans


class Rotation(NamedTuple):
    """The rotation of queries and keys: `cos` and `sin` of the angles, `(1 or B, N, D/2)`, and xPos's `scale`.

    >>> RotaryPositions(8)(1, 100).cos.shape
    torch.Size([1, 100, 4])
    """

    cos: Tensor
    sin: Tensor
    scale: Tensor | None = None


class DocumentSpans(nn.Module):
    """`document_spans` as a module, so that a model whose sequences are spread over ranks can replace it."""

    def forward(self, batch: int, tokens: int, **lengths: Any) -> Tensor | None:
        return document_spans(batch, tokens, **lengths)

    def own(self, rows: Tensor) -> Tensor:
        """The rows that this rank computes, of whole sequences `(B, N, ...)`."""
        return rows

    def whole(self, rows: Tensor) -> Tensor:
        """The whole sequences; `rows` are those of this rank."""
        return rows


class RotaryPositions(nn.Module):
    """Rotary position embedding: pairs of query and key dimensions turn by `position * base ** (-2i/D)`.

    Angles are computed in float64: in float32 a position of a million is off by hundredths of a turn.

    >>> rotation = RotaryPositions(8)(batch=1, tokens=5)
    >>> rotation.cos.shape
    torch.Size([1, 5, 4])
    """

    @checked()
    def __init__(self, head_dim: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of dimensions: head_dim must be even, got {head_dim}")
        self.head_dim = head_dim
        self.base = base

    def forward(
        self,
        batch: int,
        tokens: int,
        spans: Tensor | None = None,
        device: torch.device | str | None = None,
        *,
        first: int = 0,
    ) -> Rotation:
        """The rotation of `tokens` positions, counted from each document's first token where `spans` are given.

        The tokens are part of a longer row, from its position `first` on.
        """
        if not torch.compiler.is_compiling():  # there a limit would become a constraint on the shapes
            for name, count in (("batch", batch), ("tokens", tokens), ("first", first)):
                check_whole(name, count, least=0, most=MOST_TOKENS)
            if device is not None:
                check_device("device", device)
        if spans is None:
            positions = torch.arange(first, first + tokens, device=device)[None]
        else:
            check_spans(spans, batch)
            positions = document_positions(spans, batch, tokens, first)
        return self.of(positions)

    def of(self, positions: Tensor) -> Rotation:
        """The rotation of positions `(1 or B, N)`."""
        device = check_tensor("positions", positions).device
        angles = positions.double().unsqueeze(-1) * self.frequencies(device)
        return Rotation(angles.cos().float(), angles.sin().float())

    def frequencies(self, device: torch.device) -> Tensor:
        """`(D/2,)`, in float64: the angles of position 1."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        return self.base ** (-pairs / self.head_dim)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}"


class XPosPositions(RotaryPositions):
    """xPos: rotary positions whose scores also decay, by `zeta ** (distance / scale_base)`; for causal attention.

    Queries are multiplied by `zeta ** (p / scale_base)` and keys divided by it, which overflows on a long sequence.
    Only rows of one segment see each other, so `p` is taken modulo `period`, a common multiple of the segment lengths.

    >>> XPosPositions(8, period=128)(batch=1, tokens=5).cos.shape
    torch.Size([1, 5, 4])
    """

    @checked(period={"least": 1, "most": 2**62}, gamma=POSITIVE)
    def __init__(
        self, head_dim: int, period: int, *, base: float = 10_000.0, scale_base: float = 512.0, gamma: float = 0.4
    ) -> None:
        super().__init__(head_dim, base=base)
        self.period = period
        self.scale_base = scale_base
        self.gamma = gamma
        largest = period / 2 / scale_base * -math.log(gamma / (1 + gamma))  # power of e in a scaled query or key
        if largest > 80:
            raise ValueError(
                f"xPos over {period} tokens with scale_base={scale_base} scales queries by e^{largest:.0f}, "
                f"beyond float32: use scale_base >= {scale_base * largest / 80:.0f}, a shorter period (the least "
                "common multiple of all segment lengths, with stagger=True of both patterns), or rotary positions"
            )

    def of(self, positions: Tensor) -> Rotation:
        cos, sin, _ = super().of(positions)
        power = (positions % self.period - self.period / 2).double() / self.scale_base
        return Rotation(cos, sin, (self.zeta(positions.device) ** power.unsqueeze(-1)).float())

    def zeta(self, device: torch.device) -> Tensor:
        """`(D/2,)`, in float64: by how much scores decay per `scale_base` tokens."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        return (pairs / self.head_dim + self.gamma) / (1 + self.gamma)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, period={self.period}, scale_base={self.scale_base}"


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
            raise ValueError(f"embed_dim must be a multiple of 4, for a sine and a cosine of two axes, got {embed_dim}")
        self.embed_dim, self.grids = embed_dim, grids
        self.register_buffer("axis", torch.empty(grids, embed_dim // 2, device=device, dtype=dtype), persistent=False)
        self.compute()

    def compute(self) -> None:
        """Fill the table; call this again if its memory was allocated anew."""
        pairs = self.embed_dim // 4
        on_cpu: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # not every GPU has float64
        frequencies = 10_000.0 ** (-torch.arange(pairs, **on_cpu) / pairs)
        angles = torch.arange(self.grids, **on_cpu)[:, None] * frequencies
        self.axis.copy_(torch.cat((angles.sin(), angles.cos()), dim=1).float())

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, 1 + self.grids**2, self.embed_dim))

    def rows(self, positions: Tensor) -> Tensor:
        """`(..., E)` of positions `(...)`; negative ones count from the end."""
        positions = torch.where(positions < 0, positions + self.shape[1], positions)
        tile = (positions - 1).clamp_min(0)
        found = self.at(tile // self.grids, tile % self.grids)
        return found.masked_fill((positions == 0).unsqueeze(-1), 0.0)

    def at(self, x: Tensor, y: Tensor) -> Tensor:
        """`(..., E)` of the tiles in columns `x` and rows `y`, `(...)`."""
        return torch.cat((self.axis[y], self.axis[x]), dim=-1)

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
        # A strip at a time: all at once would take as much memory again.
        strips = (strip.chunk(2, dim=1) for strip in tiles)
        return not table[0, 0].any() and all(
            _close(of_y, axis) and _close(of_x, axis[x].expand_as(of_x)) for x, (of_y, of_x) in enumerate(strips)
        )

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, grids={self.grids}"


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=4 * torch.finfo(a.dtype).eps)


def rotate(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Query and key, `(B, N, heads, D)`, turned by their positions; computed in float32, returned in their dtype.

    >>> query, key = torch.randn(2, 1, 100, 4, 8).unbind(0)
    >>> turned, _ = rotate(query, key, RotaryPositions(8)(1, 100))
    >>> torch.equal(turned[:, 0], query[:, 0])  # position 0 is not turned
    True
    """
    check_instance("rotation", rotation, Rotation)
    for name, x in (("query", query), ("key", key)):
        pairs = tuple(rotation.cos.shape[1:])
        if check_tensor(name, x).dim() != 4 or x.shape[-1] % 2 or (x.shape[1], x.shape[-1] // 2) != pairs:
            raise ValueError(
                f"{name} must be (batch, tokens, heads, head_dim) with the tokens and twice the pairs of the rotation, "
                f"got {tuple(x.shape)} and angles {tuple(rotation.cos.shape)}"
            )
        if x.device != rotation.cos.device:
            raise ValueError(
                f"{name} must be on the device of the rotation, got {x.device} and {rotation.cos.device}: pass device= "
                "where the rotation is made"
            )
    if rotation.scale is None:
        return _turn(query, rotation, None), _turn(key, rotation, None)
    if query.dtype == torch.float16:
        raise ValueError("xPos scales queries and keys beyond float16: use bfloat16, float32 or rotary positions")
    return _turn(query, rotation, rotation.scale), _turn(key, rotation, 1.0 / rotation.scale)


def _turn(x: Tensor, rotation: Rotation, scale: Tensor | None) -> Tensor:
    cos, sin = rotation.cos.unsqueeze(-2), rotation.sin.unsqueeze(-2)  # (1 or B, N, 1, D/2)
    if scale is not None:
        cos, sin = cos * scale.unsqueeze(-2), sin * scale.unsqueeze(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
