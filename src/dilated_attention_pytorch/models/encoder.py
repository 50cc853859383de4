"""`LongNetEncoder` maps sequences of embeddings, such as tiles of a slide, to one embedding or prediction each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import check_tensor
from dilated_attention_pytorch.core.modes import is_plain
from dilated_attention_pytorch.core.spans import document_spans, documents
from dilated_attention_pytorch.core.spec import warn_once
from dilated_attention_pytorch.models.config import EncoderConfig
from dilated_attention_pytorch.models.longnet import Pretrained, gain_alone
from dilated_attention_pytorch.nn.multihead import NORMS
from dilated_attention_pytorch.nn.positions import RotaryPositions, SlidePositions
from dilated_attention_pytorch.nn.transformer import DilatedTransformerEncoderLayer, check_features

_Places = list[tuple[slice, int, int, int]]  # of sequences, as `core.spans.documents` returns them

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dilated_attention_pytorch.models.config import EncoderFields


class AttentionPool(nn.Module):
    """A learned query per head that sees all rows: `(..., n, E)` to `(..., E)`; at first, the mean.

    A query and a projection of keys together are one linear map from a row to one score per head. Each head weights
    its own part of the features.

    >>> AttentionPool(8, 2)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, **factory: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.score = nn.Linear(embed_dim, num_heads, **factory)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def weights(self, rows: Tensor) -> Tensor:
        """`(..., n, heads)`: the weight of each row, which add up to 1 over the rows."""
        scores = self.score(rows)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-2)

    def forward(self, rows: Tensor) -> Tensor:
        values = rows.unflatten(-1, (self.num_heads, -1))  # (..., n, H, D)
        return torch.einsum("...nh,...nhd->...hd", self.weights(rows).to(values.dtype), values).flatten(-2)


def _cut_at_starts(x: Tensor, places: _Places, change: Callable[..., Sequence[Tensor]]) -> Tensor:
    """Cut each row of a batch, `(B, N, E)`, where sequences start, and join what `change` makes of the parts."""
    joined = []
    for b, row in enumerate(x):
        bounds = [0, *(start for rows, start, _, _ in places if rows.start == b), len(row)]
        joined.append(torch.cat([*change(*row.split([end - start for start, end in itertools.pairwise(bounds)]))]))
    return joined[0][None] if len(joined) == 1 else torch.stack(joined)


class LongNetEncoder(Pretrained):
    """Maps sequences of embeddings, `(B, N, input_dim)`, to one prediction, `(B, num_classes)`, or embedding each.

    It is for any long sequence of embeddings: tiles of a slide, frames of a video, windows of a genome. Bidirectional
    layers with dilated attention relate the rows, and `pooling` makes one embedding of them. Pass an `EncoderConfig` or
    its fields; the other keywords are those of `LongNet`.

    `pooling` is one of

    - `mean` (default): the mean of all rows;
    - `attention`: a weighted mean, whose weights a learned query per head computes over all rows (`AttentionPool`);
    - `cls`: the mean of learned CLS rows that precede the sequence.

    A single CLS row, as in Prov-GigaPath, is half blind. It is at position 0, which in a branch of rate r is on the
    grid of only one head in r. In the other heads it sees, and is seen by, only the nearest rows. So the CLS here is a
    block of as many rows as the largest rate: each grid of each branch contains one of them, and the CLS as a whole
    sees and is seen in every head of every branch whose segment reaches the beginning of the sequence. The attention
    itself stays as it is. `cls_rows=1` gives Prov-GigaPath's single row, with a `ReachWarning`; with
    `pooling="mean", cls_rows=1` the row is there but not pooled, as with GigaPath's `global_pool`.

    Lengths decide how many rows are pooled, so with them `torch.compile` needs `fullgraph=False`, its default.

    >>> encoder = LongNetEncoder(
    ...     input_dim=24, d_model=32, num_heads=4, num_layers=2, num_classes=3, max_length=10_000,
    ...     positions="coordinates",
    ... )
    >>> tiles, coordinates = torch.randn(2, 100, 24), torch.randint(20_000, (2, 100, 2))
    >>> encoder(tiles, coordinates, seqlens=torch.tensor([100, 60])).shape
    torch.Size([2, 3])
    >>> packed = encoder.embed(tiles[:1], coordinates[:1], cu_seqlens=torch.tensor([0, 30, 50, 100]))
    >>> packed.shape
    torch.Size([3, 32])
    """

    config: EncoderConfig
    _config_class = EncoderConfig
    _layer_class = DilatedTransformerEncoderLayer

    if TYPE_CHECKING:  # what `Pretrained` does, with the fields of this config

        def __init__(
            self,
            config: EncoderConfig | None = None,
            *,
            use_pattern_cache: bool = False,
            enable_memory_pool: bool = False,
            lightweight_pool: bool = False,
            enable_profiling: bool = False,
            device: torch.device | str | None = None,
            dtype: torch.dtype | None = None,
            **fields: Unpack[EncoderFields],
        ) -> None: ...

    def _build(self) -> None:
        c = self.config
        norm = NORMS[c.norm]
        self.input = nn.Linear(c.input_dim, c.d_model, **self._factory)
        self.positions = RotaryPositions(c.head_dim) if c.positions == "rotary" else None
        self.table = SlidePositions(c.d_model, c.grids, **self._factory) if c.positions == "coordinates" else None
        self.cls = nn.Parameter(torch.empty(c.cls_rows, c.d_model, **self._factory)) if c.cls_rows else None
        self.dropout = nn.Dropout(c.dropout)
        self.layers = self._make_layers(self._layer_class, c.num_layers, gain_alone(c.num_layers))
        self.norm = norm(c.d_model, eps=c.layer_norm_eps, **self._factory)
        self.pool = AttentionPool(c.d_model, c.num_heads, **self._factory) if c.pooling == "attention" else None
        self.pooled_norm = norm(c.d_model, eps=c.layer_norm_eps, **self._factory)
        self.head = nn.Linear(c.d_model, c.num_classes, **self._factory) if c.num_classes else None
        if self.cls is not None:
            nn.init.normal_(self.cls, std=0.02)
            if c.pooling == "cls":
                self._warn_of_blindness(len(self.cls))

    def _warn_of_blindness(self, rows: int) -> None:
        """Warn if the CLS rows are not on every head's grid of the branch that reaches farthest."""
        spec, heads = self.config.spec, self.config.num_kv_heads or self.config.num_heads
        number = max(range(len(spec.branches)), key=lambda i: spec.branches[i].segment_length)
        offsets, branch = spec.offsets(heads)[number], spec.branches[number]
        seeing = sum(offset is not None and offset < rows for offset in offsets)
        if seeing < heads:
            warn_once(
                spec,
                f"{rows} CLS rows",
                f"a CLS of {rows} row{'s' * (rows > 1)} is on the grid of {seeing} of {heads} heads of segments of "
                f"{branch.segment_length:,} with rate {branch.dilation_rate}, and neither sees nor is seen that far in "
                f"the others: leave cls_rows out, or use pooling='mean' or 'attention'",
            )

    def forward(
        self,
        x: Tensor,
        coordinates: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        seqlens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The predictions of all sequences, `(sequences, num_classes)`; without classes their embeddings.

        Args:
            x: `(B, N, input_dim)`, or packed sequences, `(1, N, input_dim)`.
            coordinates: with `positions="coordinates"`, `(B, N, 2)`: column and row of each tile, in pixels.
            key_padding_mask, seqlens, cu_seqlens: padded or packed lengths, as in `dilated_attention`.
        """
        lengths = {"key_padding_mask": key_padding_mask, "seqlens": seqlens, "cu_seqlens": cu_seqlens}
        embedding = self.embed(x, coordinates, **lengths)
        return embedding if self.head is None else self.head(embedding)

    def embed(self, x: Tensor, coordinates: Tensor | None = None, **lengths: Tensor | None) -> Tensor:
        """The embeddings of all sequences, `(sequences, d_model)`; arguments are those of `forward`."""
        rows, places = self._encode(x, coordinates, lengths)
        if places is None:
            pooled = self._pool(rows)  # (B, E)
        else:
            if len(rows) == 1:  # packed: backward joins a split once, but would pad each slice to all rows
                sizes = [places[0][1], *(length for _, _, length, _ in places)]
                parts: Sequence[Tensor] = rows[0].split([*sizes, rows.shape[1] - sum(sizes)])[1:-1]
            else:
                parts = [rows[b.start, start : start + length] for b, start, length, _ in places]
            pooled = torch.stack([self._pool(part) for part in parts])
        return self.pooled_norm(pooled)

    def hidden(self, x: Tensor, coordinates: Tensor | None = None, **lengths: Tensor | None) -> Tensor:
        """The final state of every row, `(B, N, d_model)`, without CLS rows; arguments are those of `forward`."""
        rows, places = self._encode(x, coordinates, lengths)
        if self.cls is None:
            return rows
        count = len(self.cls)
        if places is None:
            return rows[:, count:]
        return _cut_at_starts(rows, places, lambda before, *parts: (before, *(part[count:] for part in parts)))

    def _encode(
        self, x: Tensor, coordinates: Tensor | None, lengths: dict[str, Tensor | None]
    ) -> tuple[Tensor, _Places | None]:
        """The final state of every row, CLS rows included, and where sequences lie; None if they are whole rows."""
        features = self.config.input_dim
        if isinstance(x, Tensor) and x.dim() == 3 and x.shape[-1] != features:
            raise ValueError(
                f"x must be (batch, tokens, {features}) if input_dim={features}, got {tuple(x.shape)}: "
                f"make the encoder with input_dim={x.shape[-1]}"
            )
        check_features("x", x, features, dims=(3,))
        hidden = self.input(x)
        if self.table is None:
            if coordinates is not None:
                raise ValueError(
                    f"an encoder with positions={self.config.positions!r} takes no coordinates: leave them out, or "
                    "build it with positions='coordinates'"
                )
        else:
            hidden = hidden + self.table.at(*self._grid(x, coordinates)).to(hidden.dtype)
        stated: dict[str, Any] = {**lengths, "cache": self._pattern_cache if is_plain(x) else None}
        spans = document_spans(x.shape[0], x.shape[1], **stated)
        # Read now: after the layers are launched, reading would wait for all of them.
        places = documents(spans, *x.shape[:2])
        if not x.shape[1] or (spans is not None and len(places) < len(spans)):
            raise ValueError("every sequence must have at least one row, got an empty one: leave it out of the batch")
        if self.cls is not None:
            hidden, spans, places = self._with_cls(hidden, spans, places)
        hidden = self.spans.own(hidden)
        hidden, placed = self.dropout(hidden), self._placed(hidden, spans=spans)
        for layer in self._groups(self.layers):
            hidden = self._run(layer, hidden, **placed)
        return self.spans.whole(self.norm(hidden)), None if spans is None else places

    def _grid(self, x: Tensor, coordinates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Column and row of each tile, `(B, N)`, in tiles."""
        if coordinates is None:
            raise ValueError("an encoder with positions='coordinates' needs them: pass coordinates, (B, N, 2)")
        if check_tensor("coordinates", coordinates).shape != (*x.shape[:2], 2) or coordinates.is_complex():
            raise ValueError(
                f"coordinates must be (batch, rows, 2) = {(*x.shape[:2], 2)}, got {coordinates.dtype} "
                f"{tuple(coordinates.shape)}"
            )
        grid = torch.floor(coordinates.double() / self.config.tile_size)
        # Reading the values would wait for a GPU, where PyTorch's own assertion reports them.
        if is_plain(grid) and grid.device.type == "cpu" and grid.numel():
            least, most = (float(bound) for bound in grid.aminmax())
            if not (least >= 0 and most < self.config.grids):
                raise ValueError(
                    f"coordinates must lie within {self.config.grids} tiles of {self.config.tile_size:g} pixels, got "
                    f"tiles from {least:g} to {most:g}: give pixels and the tile's size in the same pixels, or raise "
                    "grids"
                )
        column, row = grid.long().unbind(-1)
        return column, row

    def _with_cls(self, x: Tensor, spans: Tensor | None, places: _Places) -> tuple[Tensor, Tensor | None, _Places]:
        """The rows with the CLS rows before each sequence, and the spans and places of sequences that include them."""
        assert self.cls is not None
        cls, B = self.cls.to(x.dtype), len(x)
        count = len(cls)
        if spans is None:
            return torch.cat((cls.expand(B, -1, -1), x), dim=1), None, places
        rows = _cut_at_starts(
            x, places, lambda before, *parts: (before, *itertools.chain(*((cls, part) for part in parts)))
        )
        number = torch.zeros_like(spans[:, :1]) if B > 1 else torch.arange(len(spans), device=spans.device)[:, None]
        spans = spans + count * torch.cat((number, number + 1), dim=1)
        return rows, spans, [(b, start + (B == 1) * count * i, length + count, i) for b, start, length, i in places]

    def _pool(self, rows: Tensor) -> Tensor:
        """One embedding, `(..., E)`, of each sequence, `(..., n, E)`, whose CLS rows come first."""
        count = self.config.cls_rows or 0
        if self.config.pooling == "cls":
            return rows[..., :count, :].mean(-2)
        return rows[..., count:, :].mean(-2) if self.pool is None else self.pool(rows[..., count:, :])
