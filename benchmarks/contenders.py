"""The contenders: our backends, and the strongest baselines for the same case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Case
from benchmarks.peers import build_torchscale, load_torchscale, without_projections
from dilated_attention_pytorch.core.block_layout import layout_for
from dilated_attention_pytorch.core.block_pattern import tiles_of
from dilated_attention_pytorch.functional import dilated_attention

# Dense attention with more elements is measured in several calls: its kernels may count in 32 bits.
ELEMENTS_PER_CALL = 1 << 30

OURS, FLOOR, SAME_TOKENS, TORCHSCALE = "ours", "dense, same FLOPs", "dense, same tokens", "torchscale"
FLEX, EVERY_TILE = "FlexAttention", "ours, every tile"
NO_CHECKOUT = "give --torchscale PATH, a checkout of microsoft/torchscale, to measure it"


@dataclass(frozen=True)
class Ready:
    """A contender that is set up for a case: the call to time, its FLOPs, and PyTorch's settings for it."""

    call: Callable[[], object]
    flops: int
    settings: AbstractContextManager[None] = field(default_factory=nullcontext)


Setup = Callable[[Case], "Ready | str"]
"""Sets up a case, or says why this contender sits it out."""


def choose_contenders(only: Sequence[str] = (), torchscale: Path | None = None) -> dict[str, Setup]:
    """The contenders by name, or those in `only`; torchscale sits out unless a checkout of it is given."""
    contenders: dict[str, Setup] = {
        OURS: ours("auto"),
        FLOOR: dense_at_the_same_flops,
        SAME_TOKENS: dense_at_the_same_tokens,
        FLEX: flex_attention,
        TORCHSCALE: torchscale_from(torchscale),
        "ours, eager": ours("eager"),
        EVERY_TILE: every_tile,
    }
    return named_contenders(contenders, only, torchscale)


def named_contenders(contenders: dict[str, Setup], only: Sequence[str], torchscale: Path | None) -> dict[str, Setup]:
    """All contenders, or those named."""
    if not only:
        return contenders
    unknown = [name for name in only if name not in contenders]
    if unknown:
        raise ValueError(f"no contender {unknown[0]!r}: choose from {', '.join(map(repr, contenders))}")
    if TORCHSCALE in only and torchscale is None:
        raise ValueError("the contender 'torchscale' needs --torchscale PATH, a checkout of microsoft/torchscale")
    return {name: contenders[name] for name in only}


def ours(backend: str) -> Setup:
    def setup(case: Case) -> Ready | str:
        if backend == "eager" and case.device == "cpu":
            return f"what `{OURS}` runs on a CPU"
        if backend == "eager" and (case.tokens > 1 << 15 or case.pattern is not None):
            return "slow: left out past 32,768 tokens on a GPU, and with a block pattern"
        q, k, v, do = case.tensors()

        def attend() -> Tensor:
            return dilated_attention(
                q,
                k,
                v,
                case.segment_lengths,
                case.dilation_rates,
                is_causal=case.is_causal,
                head_layout=case.head_layout,
                sparse_config=case.sparse_config,
                backend=backend,
            )

        return Ready(_step(attend, (q, k, v), do, case.backward), case.flops)

    return setup


def every_tile(case: Case) -> Ready | str:
    """The same case through the same kernels with a layout that keeps every tile: shows what sparsity saves."""
    if case.pattern is None:
        return "measured where a block pattern keeps some tiles"
    return ours("auto")(replace(case, sparsity_ratio=1.0))


def dense_at_the_same_flops(case: Case) -> Ready | str:
    """PyTorch's dense attention on sequences as long as the rows of a branch, enough of them for the same FLOPs."""
    w, r = case.segment_lengths[0], case.dilation_rates[0]
    rows = min(-(-w // r), case.tokens)
    sequences = max(1, round(case.flops / _dense_flops(case, rows)))
    calls = -(-sequences * rows * case.heads * case.head_dim // ELEMENTS_PER_CALL)
    return _dense(case, round(sequences / calls), rows, calls)


def dense_at_the_same_tokens(case: Case) -> Ready | str:
    """One call of dense attention over all tokens: shows what dilation saves."""
    most = 1 << 15 if case.device == "cuda" else 1 << 13
    if case.tokens > most:
        return f"quadratic: left out past {most:,} tokens"
    return _dense(case, 1, case.tokens)


def flex_attention(case: Case) -> Ready | str:
    """FlexAttention with the union of the branches as its mask. A key counts once, which is less work than ours.

    With a block pattern on one undilated segment, it gets exactly the tiles that ours keeps.
    """
    if case.pattern is not None:
        if case.device != "cuda" or case.dilation_rates != (1,) or case.segment_lengths[0] < case.tokens:
            return "measured on a GPU; has a block mask for one undilated segment"
        return _masked_by(tile_mask(case), case)
    if case.device != "cuda" or case.tokens != 1 << 15 or case.head_dim != 64 or case.is_causal:
        return "compiles for long: measured on a GPU at 32,768 tokens, D=64, not causal"
    from torch.nn.attention.flex_attention import create_block_mask

    spec = case.spec
    offsets = torch.tensor([[-1 if o is None else o for o in row] for row in spec.offsets(case.heads)], device="cuda")

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = torch.zeros_like(i, dtype=torch.bool)
        for index, branch in enumerate(spec.branches):
            w, r, o = branch.segment_length, branch.dilation_rate, offsets[index][h]
            found = found | ((i // w == j // w) & (i % w % r == o) & (j % w % r == o))
        return found

    return _masked_by(create_block_mask(sees, None, case.heads, case.tokens, case.tokens, device="cuda"), case)


def _masked_by(mask: Any, case: Case) -> Ready:
    from torch.nn.attention.flex_attention import flex_attention as flex

    q, k, v, do = (x.transpose(1, 2) for x in case.tensors())
    compiled = torch.compile(flex)
    return Ready(_step(lambda: compiled(q, k, v, block_mask=mask), (q, k, v), do, case.backward), case.flops)


def tile_mask(case: Case) -> Any:
    """FlexAttention's block mask for a case with one undilated segment: full tiles, and tiles that causality cuts."""
    from torch.nn.attention.flex_attention import BlockMask

    config = case.sparse_config
    assert config is not None
    layout = layout_for(case.spec, case.tokens, case.spec.offsets(1), config, case.is_causal, torch.device(case.device))
    branch = layout.branches[0]
    assert branch is not None
    tiles = tiles_of(case.tokens, config.block_size)
    kept = branch.mask(0, 0, 0, tiles)
    ragged = torch.zeros_like(kept)
    if case.is_causal:
        ragged.fill_diagonal_(True)
    if case.tokens % config.block_size:
        ragged[:, -1] = True

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j < case.tokens) if case.is_causal else j < case.tokens

    cut, whole = kept & ragged, kept & ~ragged
    return BlockMask.from_kv_blocks(
        *_tile_lists(cut),
        *_tile_lists(whole),
        BLOCK_SIZE=config.block_size,
        mask_mod=sees,
        seq_lengths=(case.tokens, case.tokens),
    )


def _tile_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of tiles in each row of tiles, `(1, 1, T)`, and their indices in front, `(1, 1, T, T)`."""
    order = chosen.int().sort(dim=-1, stable=True, descending=True).indices
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def torchscale_from(checkout: Path | None) -> Setup:
    if checkout is None:
        return lambda case: NO_CHECKOUT
    attention_class = load_torchscale(checkout)

    def setup(case: Case) -> Ready | str:
        if case.pattern is not None:
            return "has no block patterns"
        if case.head_layout == "grouped":
            return "puts every head on every branch"
        if any(w % r for w, r in zip(case.segment_lengths, case.dilation_rates)):
            return "computes something else where a rate does not divide its segment length"
        if case.head_dim != 64 or case.tokens > 1 << 20:
            return "measured at D=64, up to 1,048,576 tokens"
        shape = case.heads, case.head_dim, case.segment_lengths, case.dilation_rates
        attention = without_projections(build_torchscale(attention_class, *shape))
        q, k, v, do = case.tensors(1, case.tokens, case.heads * case.head_dim)

        def attend() -> Tensor:
            return attention(q, k, v, is_causal=case.is_causal)[0]

        return Ready(_step(attend, (q, k, v), do, case.backward), case.flops)

    return setup


def _dense(case: Case, sequences: int, rows: int, calls: int = 1) -> Ready:
    tensors = case.tensors(sequences, rows, case.heads, case.head_dim)
    q, k, v, do = (x.transpose(1, 2) for x in tensors)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)

    once = _step(attend, (q, k, v), do, case.backward)

    def call() -> None:
        for _ in range(calls):
            once()

    return Ready(call, calls * sequences * _dense_flops(case, rows), _best_dense_kernel(case.device))


def _dense_flops(case: Case, rows: int) -> int:
    """FLOPs of one sequence of `rows` rows, counted as in `Case.flops`."""
    whole: dict[str, Any] = {"segment_lengths": (rows,), "dilation_rates": (1,), "head_layout": "interleaved"}
    return replace(case, tokens=rows, pattern=None, **whole).flops


def _step(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], do: Tensor, backward: bool) -> Callable[[], object]:
    if not backward:
        return attend
    return lambda: torch.autograd.grad(attend(), inputs, do)


def _best_dense_kernel(device: str) -> AbstractContextManager[None]:
    if device != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
