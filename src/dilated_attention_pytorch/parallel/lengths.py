"""Lengths and positions of a sequence of which a rank holds a shard: what whole models need beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.nn.positions import DocumentSpans, RotaryPositions, Rotation
from dilated_attention_pytorch.parallel.comm import Place, Ranks
from dilated_attention_pytorch.parallel.sharding import Shards


def spans_of_own_mask(batch: int, tokens: int, lengths: dict[str, Tensor]) -> list[int]:
    """Start and end of the valid tokens of each batch row of a shard, one after another."""
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join(lengths)} both state the lengths: pass one of them")
    if tokens == 0:
        return [0, 0] * batch
    found = document_spans(batch, tokens, cache=None, **lengths)
    assert found is not None
    return [int(edge) for edge in found.flatten().tolist()]


def joined_spans(shards: Shards, theirs: list[Sequence[int]]) -> Tensor:
    """The spans of whole rows, from those that every rank's own mask leaves of its shard, start after end."""
    joined = []
    for b in range(len(theirs[0]) // 2):
        pieces = []
        for piece, edge in enumerate(shards.edges[:-1]):
            held = shards.held_at(piece)
            start, end = theirs[shards.rank_of(piece)][2 * b : 2 * b + 2]
            start, end = max(start, held.start), min(end, held.stop)
            if start < end:
                pieces.append((edge + start - held.start, edge + end - held.start))
        for (_, end), (start, _) in pairwise(pieces):
            if start != end:
                raise ValueError(
                    f"key_padding_mask row {b} has a hole at {end} of the whole sequence: valid tokens must form one "
                    "span; pack with cu_seqlens instead"
                )
        joined.append((pieces[0][0], pieces[-1][1]) if pieces else (0, 0))
    return torch.tensor(joined)


class ModelLengths:
    """The shards' lengths of the tokens that a model works on: agreed where it begins, for all its layers.

    Equal lengths here may stand for others elsewhere, so that each forward pass asks again, once.
    """

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] | None = None
        self.memory: tuple[Tensor, tuple[int, ...]] | None = None  # an encoder's output, and its shards' lengths

    def forget(self, *_: object) -> None:
        """A hook of what follows the forward pass."""
        self.lengths = self.memory = None

    def of(self, ranks: Ranks, tokens: int) -> tuple[int, ...] | None:
        """Those of a sequence of which this rank has these many tokens, if they are known."""
        return self.lengths if self.lengths is not None and self.lengths[ranks.rank] == tokens else None


class SpansAcrossRanks(DocumentSpans):
    """The spans of the whole sequence: `key_padding_mask` is of the rank's own tokens, other lengths of all.

    Its model asks for them before anything else, and so it agrees on the shards' lengths as well.
    """

    def __init__(self, sequence: Place, of_model: ModelLengths) -> None:
        super().__init__()
        self.sequence, self.of_model = sequence, of_model

    def forward(self, batch: int, tokens: int, *, cache: object = None, **lengths: Any) -> Tensor | None:
        given = {name: x for name, x in lengths.items() if x is not None}
        ranks = self.sequence.ranks()
        own: list[int] = []
        call: dict[str, object] = {"lengths": sorted(given), "batch": batch}
        error = None
        try:
            if "key_padding_mask" in given:
                own = spans_of_own_mask(batch, tokens, given)
            else:
                call |= {name: x.tolist() for name, x in given.items()}
        except Exception as wrong:
            error = wrong
        agreed = ranks.agree(call, tokens, error, own=own)
        shards = Shards(agreed.lengths)
        self.of_model.lengths = agreed.lengths
        if not given:
            return None
        if own:
            return joined_spans(shards, agreed.own).to(given["key_padding_mask"].device)
        return document_spans(batch, shards.tokens, cache=None, **given)


class PositionsAcrossRanks(nn.Module):
    """The rotation of a rank's own tokens, by their positions in the whole sequence."""

    def __init__(self, positions: RotaryPositions, sequence: Place, of_model: ModelLengths) -> None:
        super().__init__()
        self.of_whole, self.sequence, self.of_model = positions, sequence, of_model

    def forward(
        self, batch: int, tokens: int, spans: Tensor | None = None, device: torch.device | str | None = None
    ) -> Rotation:
        ranks = self.sequence.ranks()
        call: dict[str, object] = {"batch": batch, "spans": None if spans is None else spans.tolist()}
        shards = Shards(ranks.agree(call, tokens, None, self.of_model.of(ranks, tokens)).lengths)
        return self.of_whole(batch, tokens, spans, device, first=shards.bounds(ranks.rank)[0])
