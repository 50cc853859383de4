"""Dense cross-attention of a rank's tokens: all of an encoder's output, of which each rank computed its shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.parallel.comm import Place, Ranks


class WholeMemory:
    """A hook of `nn.MultiheadAttention(batch_first=True)` that gathers keys, values and their mask from all ranks.

    A dense `attn_mask` is of the rank's own rows and of all keys.
    """

    def __init__(self, sequence: Place) -> None:
        self._sequence = sequence

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        ranks = self._sequence.ranks()
        query, key, value = args
        mask = kwargs["key_padding_mask"]
        call = {"batch": key.shape[0], "memory mask": mask is not None, "one memory": key is value}
        lengths = ranks.agree(call, key.shape[1], None)
        whole = _gathered(ranks, key, lengths)
        kwargs = {**kwargs, "key_padding_mask": None if mask is None else _gathered(ranks, mask, lengths)}
        return (query, whole, whole if value is key else _gathered(ranks, value, lengths)), kwargs


def _gathered(ranks: Ranks, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """`(B, all tokens, ...)`; its gradient goes back to the rank whose tokens they are, summed over ranks."""
    from torch.distributed.nn.functional import all_gather

    missing = max(lengths) - x.shape[1]
    even = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)).contiguous()
    pieces = all_gather(even, group=ranks.group)
    return torch.cat([piece[:, :length] for piece, length in zip(pieces, lengths)], 1)
