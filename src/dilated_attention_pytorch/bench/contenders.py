"""What is measured: our backends, and the strongest baselines for the same problem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.bench.harness import Case
from dilated_attention_pytorch.functional import dilated_attention

Call = Callable[[], object]
Setup = Callable[[Case], "tuple[Call, int] | str"]
"""The call and its FLOPs, or the reason why this contender sits the case out."""


def ours(backend: str) -> Setup:
    def setup(case: Case) -> tuple[Call, int] | str:
        if backend == "eager" and case.device == "cuda" and case.tokens > 1 << 17:
            return "minutes a call"
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
                backend=backend,
            )

        return _step(attend, (q, k, v), do, case.backward), case.flops

    return setup


def dense_at_the_same_flops(case: Case) -> tuple[Call, int] | str:
    """PyTorch's dense attention over sequences as long as a branch's rows: the vendor's rate, as a floor."""
    w, r = case.segment_lengths[0], case.dilation_rates[0]
    rows = min(-(-w // r), case.tokens)
    batch = max(1, case.tokens // rows)
    q, k, v, do = (x.transpose(1, 2) for x in case.tensors(batch, rows, case.heads, case.head_dim))
    pairs = rows * (rows + 1) // 2 if case.is_causal else rows * rows
    flops = 4 * batch * case.heads * case.head_dim * pairs

    def attend() -> Tensor:
        with _best_dense_kernel(case.device):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)

    return _step(attend, (q, k, v), do, case.backward), flops * 7 // 2 if case.backward else flops


def dense_at_the_same_length(case: Case) -> tuple[Call, int] | str:
    """One call of dense attention over all tokens: what dilation saves."""
    if case.tokens > (1 << 15 if case.device == "cuda" else 1 << 13):
        return "quadratic"
    q, k, v, do = (x.transpose(1, 2) for x in case.tensors())

    def attend() -> Tensor:
        with _best_dense_kernel(case.device):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)

    return _step(attend, (q, k, v), do, case.backward), case.flops


def flex_attention(case: Case) -> tuple[Call, int] | str:
    """FlexAttention with the union of the branches as its mask, which counts a key once: less work than ours."""
    if case.device != "cuda" or case.tokens > 1 << 15:
        return "needs a GPU and at most 32,768 tokens"
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    spec = case.spec
    offsets = torch.tensor([[-1 if o is None else o for o in row] for row in spec.offsets(case.heads)], device="cuda")

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = torch.zeros_like(i, dtype=torch.bool)
        for index, branch in enumerate(spec.branches):
            w, r, o = branch.segment_length, branch.dilation_rate, offsets[index][h]
            found = found | ((i // w == j // w) & (i % w % r == o) & (j % w % r == o))
        return found & (j <= i) if case.is_causal else found

    mask = create_block_mask(sees, None, case.heads, case.tokens, case.tokens, device="cuda")
    q, k, v, do = (x.transpose(1, 2) for x in case.tensors())
    compiled = torch.compile(flex)
    return _step(lambda: compiled(q, k, v, block_mask=mask), (q, k, v), do, case.backward), case.flops


CONTENDERS: dict[str, Setup] = {
    "ours": ours("auto"),
    "dense, same FLOPs": dense_at_the_same_flops,
    "dense, same tokens": dense_at_the_same_length,
    "FlexAttention": flex_attention,
    "ours, eager": ours("eager"),
}


def _step(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], do: Tensor, backward: bool) -> Call:
    if not backward:
        return attend
    return lambda: torch.autograd.grad(attend(), inputs, do)


def _best_dense_kernel(device: str) -> AbstractContextManager[None]:
    if device != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
