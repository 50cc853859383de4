"""What a whole model needs beside attention when each rank holds a shard of its tokens: lengths, positions, memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.nn.positions import DocumentSpans, RotaryPositions, Rotation
from dilated_attention_pytorch.parallel.group import Place, RankGroup
from dilated_attention_pytorch.parallel.sharding import Shards


def spans_of_own_mask(batch: int, tokens: int, lengths: dict[str, Tensor]) -> list[int]:
    """Start and end of the valid tokens in each batch row of a shard, one row after another."""
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join(lengths)} both state the lengths: pass one of them")
    if tokens == 0:
        return [0, 0] * batch
    found = document_spans(batch, tokens, cache=None, **lengths)
    assert found is not None
    return [int(edge) for edge in found.flatten().tolist()]


def joined_spans(shards: Shards, theirs: Sequence[Sequence[int]]) -> Tensor:
    """The spans of whole rows, from the spans that every rank's own mask leaves in its shard."""
    joined = []
    for b in range(len(theirs[0]) // 2):
        valid = []
        for chunk, edge in enumerate(shards.edges[:-1]):
            held = shards.held_at(chunk)
            start, end = theirs[shards.rank_of(chunk)][2 * b : 2 * b + 2]
            start, end = max(start, held.start), min(end, held.stop)
            if start < end:
                valid.append((edge + start - held.start, edge + end - held.start))
        for (_, end), (start, _) in pairwise(valid):
            if start != end:
                raise ValueError(
                    f"key_padding_mask row {b} has a hole at {end} of the whole sequence: valid tokens must form one "
                    "span; pack with cu_seqlens instead"
                )
        joined.append((valid[0][0], valid[-1][1]) if valid else (0, 0))
    return torch.tensor(joined)


class SpansAcrossRanks(DocumentSpans):
    """The spans of the whole sequence: `key_padding_mask` is of the rank's own tokens, other lengths of all tokens.

    A model asks for its spans before anything else, so this agrees on the shard lengths for all of its layers. Equal
    lengths on one rank can go with different lengths on others, so each forward pass asks the other ranks once.
    """

    def __init__(self, sequence: Place) -> None:
        super().__init__()
        self.sequence = sequence

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
        ranks.lengths = agreed.lengths
        shards = Shards(agreed.lengths)
        if not given:
            return None
        if own:
            return joined_spans(shards, agreed.own).to(given["key_padding_mask"].device)
        return document_spans(batch, shards.tokens, cache=None, **given)


class PositionsAcrossRanks(nn.Module):
    """The rotation of a rank's own tokens, by their positions in the whole sequence."""

    def __init__(self, positions: RotaryPositions, sequence: Place) -> None:
        super().__init__()
        self.of_whole, self.sequence = positions, sequence

    def forward(
        self, batch: int, tokens: int, spans: Tensor | None = None, device: torch.device | str | None = None
    ) -> Rotation:
        ranks = self.sequence.ranks()
        call: dict[str, object] = {"batch": batch, "spans": None if spans is None else spans.tolist()}
        shards = Shards(ranks.agree(call, tokens, lengths=ranks.lengths_of_model(tokens)).lengths)
        return self.of_whole(batch, tokens, spans, device, first=shards.bounds(ranks.rank)[0])


class WholeMemory:
    """A hook of `nn.MultiheadAttention(batch_first=True)` that gathers keys, values and their mask from all ranks.

    A dense `attn_mask` has the rank's own rows and all keys. All layers of a decoder share one hook, because they have
    one memory, whose shard lengths only the first layer asks for.
    """

    def __init__(self, sequence: Place) -> None:
        self._sequence = sequence
        self._known: tuple[Tensor, tuple[int, ...]] | None = None

    def forget(self) -> None:
        self._known = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        ranks = self._sequence.ranks()
        query, key, value = args
        mask = kwargs["key_padding_mask"]
        call = {"batch": key.shape[0], "memory mask": mask is not None, "one memory": key is value}
        lengths = self._known[1] if self._known is not None and self._known[0] is key else None
        lengths = ranks.agree(call, key.shape[1], lengths=lengths).lengths
        self._known = key, lengths
        whole = _Gather.apply(key, ranks, lengths)
        kwargs = {**kwargs, "key_padding_mask": None if mask is None else _Gather.apply(mask, ranks, lengths)}
        return (query, whole, whole if value is key else _Gather.apply(value, ranks, lengths)), kwargs


class _Gather(torch.autograd.Function):
    """`(B, all tokens, ...)` from each rank's tokens; the gradient of a rank's tokens is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup, lengths: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.shards = ranks, Shards(lengths)
        even = x.new_zeros((x.shape[0], max(lengths), *x.shape[2:]))  # messages of one size
        even[:, : x.shape[1]] = x
        shards = [torch.empty_like(even) for _ in lengths]
        with ranks.agreement.blocked():
            dist.all_gather(shards, even, group=ranks.group)
        return torch.cat([shard[:, :length] for shard, length in zip(shards, lengths)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        with ctx.ranks.agreement.blocked():
            dist.all_reduce(total, group=ctx.ranks.group)
        first, last = ctx.shards.bounds(ctx.ranks.rank)
        return total[:, first:last], None, None
