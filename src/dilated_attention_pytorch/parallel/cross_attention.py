"""Dense cross-attention of a rank's tokens: all of an encoder's output, of which each rank computed its shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dilated_attention_pytorch.parallel.comm import Place, Ranks
from dilated_attention_pytorch.parallel.lengths import ModelLengths
from dilated_attention_pytorch.parallel.sharding import Shards


class WholeMemory:
    """A hook of `nn.MultiheadAttention(batch_first=True)` that gathers keys, values and their mask from all ranks.

    A dense `attn_mask` is of the rank's own rows and of all keys.
    """

    def __init__(self, sequence: Place, of_model: ModelLengths) -> None:
        self._sequence, self._of_model = sequence, of_model

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        ranks = self._sequence.ranks()
        query, key, value = args
        mask = kwargs["key_padding_mask"]
        call = {"batch": key.shape[0], "memory mask": mask is not None, "one memory": key is value}
        # All layers of a decoder have one memory, whose lengths the first of them asks for.
        known = self._of_model.memory
        lengths = known[1] if known is not None and known[0] is key else None
        lengths = ranks.agree(call, key.shape[1], None, lengths).lengths
        self._of_model.memory = key, lengths
        whole = _gathered(ranks, key, lengths)
        kwargs = {**kwargs, "key_padding_mask": None if mask is None else _gathered(ranks, mask, lengths)}
        return (query, whole, whole if value is key else _gathered(ranks, value, lengths)), kwargs


def _gathered(ranks: Ranks, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return _Gather.apply(x, ranks, lengths)


class _Gather(torch.autograd.Function):
    """`(B, all tokens, ...)` from each rank's tokens; the gradient of a rank's tokens is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, lengths: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.shards = ranks, Shards(lengths)
        even = x.new_zeros((x.shape[0], max(lengths), *x.shape[2:]))  # messages of one size
        even[:, : x.shape[1]] = x
        pieces = [torch.empty_like(even) for _ in lengths]
        with ranks.agreement.blocked():
            dist.all_gather(pieces, even, group=ranks.group)
        return torch.cat([piece[:, :length] for piece, length in zip(pieces, lengths)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        with ctx.ranks.agreement.blocked():
            dist.all_reduce(total, group=ctx.ranks.group)
        first, last = ctx.shards.bounds(ctx.ranks.rank)
        return total[:, first:last], None, None
