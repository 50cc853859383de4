"""`AcrossRanks`: the module that attends across ranks. The published names are thin names over it.

Under a process group (the default group, or `group=` / `mesh=`) a module takes its rank's contiguous shard of the
sequence and returns its rank's rows; on one rank it is its plain class. `cu_seqlens`, `seqlens` and `spans` describe
the whole sequence, `key_padding_mask` the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import SIZE, check_tensor, checked
from dilated_attention_pytorch.core.modes import untraced
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.parallel.attention import sharded_dilated_attention
from dilated_attention_pytorch.parallel.group import ALONE, Place
from dilated_attention_pytorch.parallel.schemes import MEMORY_BUDGET, Scheme, check_scheme
from dilated_attention_pytorch.parallel.sharding import TokenLayout

_COPIED = (
    "softmax_scale", "attention_dropout", "backend", "allow_tf32", "enable_profiling", "enable_memory_pool",
    "lightweight_pool",
)  # fmt: skip


class AcrossRanks(DilatedAttention):
    """Dilated attention whose tokens the ranks of `sequence` share, and whose heads the ranks of `heads` share.

    Args:
        sequence, heads: where to find the ranks; None if nothing is shared.
        scheme: `gather`, `ring`, `all_to_all`, or `auto` to choose for each branch by bytes and memory.
        memory_budget: bytes that `auto` lets a branch's gathered rows take on a rank.
        token_layout: `contiguous` shards, or `zigzag`, which evens out causal work, by `gather` or `auto` only: a rank
            holds an early and a late chunk, one after the other, in the order of `zigzag_order`.
        use_pattern_cache: share plans and tables between calls; False makes them again in every call.
        enable_memory_pool: on several ranks, borrow message buffers and sums too; see `DilatedAttention`.
        settings: passed on to the plain class.
    """

    @checked(memory_budget=SIZE)
    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        sequence: Place | None,
        heads: Place | None = None,
        scheme: Scheme = "auto",
        memory_budget: int = MEMORY_BUDGET,
        token_layout: TokenLayout = "contiguous",
        use_pattern_cache: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, use_pattern_cache=use_pattern_cache, **settings)
        check_scheme(scheme, token_layout)
        self.sequence, self.heads = sequence, heads
        self.scheme, self.memory_budget, self.token_layout = scheme, memory_budget, token_layout
        for place in (sequence, heads):
            if place is not None:
                place.ranks()  # errors come when the module is made

    @classmethod
    def of(cls, plain: DilatedAttention, **places: Any) -> AcrossRanks:
        """What `plain` computes, across ranks; `places` are the settings above.

        Plans are shared between calls whether or not `plain` uses a cache: to make one takes longer than a call.
        """
        settings: dict[str, Any] = {name: getattr(plain, name) for name in _COPIED} | places
        made = cls(plain.segment_lengths, plain.dilation_rates, head_layout=plain.spec.head_layout, **settings)
        made._stated, made._place = plain._stated, plain._place
        return made.train(plain.training)

    @property
    def ring_size(self) -> int:
        """The number of ranks that share the tokens."""
        return 1 if self.sequence is None else self.sequence.ranks().size

    def cleanup_buffers(self) -> None:
        """Forget plans and layouts of earlier calls, and free the buffers that the memory pool holds idle."""
        if self._pattern_cache is not None:
            self._pattern_cache.forget("ring schedule")
            self._pattern_cache.forget("parts")
            if self.sparse_config is not None:
                self._pattern_cache.forget("block layout")
        if self._memory_pool is not None:
            self._memory_pool.release_idle()

    def _check_call(self, query: Tensor, is_causal: bool, attn_mask: Tensor | None) -> None:
        if torch.compiler.is_compiling() and self._is_shared:
            return _check_call(self, query, is_causal, attn_mask)
        with self._told_to_all() if self._is_shared else nullcontext():
            super()._check_call(query, is_causal, attn_mask)

    def _lengths(self, query: Tensor, **stated: Tensor | None) -> dict[str, Any]:
        return stated if self._is_shared else super()._lengths(query, **stated)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **lengths: Any) -> Tensor:
        """The rank's rows `(B, L, H, D)` from its shard of query, key and value."""
        if torch.compiler.is_compiling() and self._is_shared:
            return _attend(self, query, key, value, is_causal=is_causal, **lengths)
        if not self._is_shared:
            return super().attend(query, key, value, is_causal=is_causal, **lengths)
        sequence = ALONE if self.sequence is None else self.sequence.ranks()
        share: dict[str, Any] = {name: getattr(self, name) for name in ("scheme", "memory_budget", "token_layout")}
        with self._told_to_all():
            check_tensor("query", query)
            check_tensor("key", key)
            share["shard_lengths"] = sequence.lengths_of_model(query.shape[1])
            if self.heads is not None and (heads := self.heads.ranks()).size > 1:
                H = query.shape[2]
                heads.agree({"heads": H, "key/value heads": key.shape[2]}, 0, lengths=(0,) * heads.size)
                share |= {"head_offset": heads.rank * H, "total_heads": heads.size * H}
        out = sharded_dilated_attention(
            query, key, value, **self._settings(is_causal), **share, **lengths, ranks=sequence
        )
        assert isinstance(out, Tensor)
        return out

    @property
    def _is_shared(self) -> bool:
        return any(place is not None and place.ranks().size > 1 for place in (self.sequence, self.heads))

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """Report an error to the ranks that share the tokens, or else the heads, before it is raised."""
        try:
            yield
        except Exception as error:
            for place in (self.sequence, self.heads):
                if place is not None and place.ranks().size > 1:
                    place.ranks().agree({}, 0, error)  # raises it
            raise


# Compiled graphs break where messages are exchanged.
_check_call, _attend = untraced(AcrossRanks._check_call), untraced(AcrossRanks.attend)
