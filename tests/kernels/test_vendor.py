"""The vendor's kernel gives parts of an attention that merge to the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.kernels import vendor
from dilated_attention_pytorch.parallel.blocks import block_backward, block_forward


def test_what_the_vendors_kernel_cannot_do_is_left_to_others() -> None:
    assert not vendor.fits(torch.empty(1, 8, 2, 64, dtype=torch.bfloat16), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_of_the_keys_merge_to_the_whole(dtype, head_dim) -> None:
    scale = head_dim**-0.5
    every = [torch.randn(2, rows, 3, head_dim, device="cuda", dtype=dtype) for rows in (200, 500, 500, 200)]
    # Rows apart in memory, as the grid rows of a branch are.
    q, k, v, do = (torch.repeat_interleave(x, 2, 1)[:, ::2] for x in every)
    assert vendor.fits(q, scale)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("sihd,sjhd->shij", exact[0], exact[1]) * scale
    expected = torch.einsum("shij,sjhd->sihd", scores.softmax(-1), exact[2])
    gradients = torch.autograd.grad(expected, exact, do.double())
    out, lse = block_forward(q, k[:, :180], v[:, :180], scale, False, None)
    merge_(out, lse, *block_forward(q, k[:, 180:], v[:, 180:], scale, False, None))
    limit = 1e-2 if dtype == torch.bfloat16 else 1.5e-3

    def near(found: torch.Tensor, exactly: torch.Tensor) -> bool:
        return ((found.double() - exactly).norm() / exactly.norm()).item() < limit

    assert out.dtype == torch.float32
    assert near(out, expected)
    assert near(lse.transpose(1, 2), scores.logsumexp(-1))
    delta = (do.float() * out).sum(-1)
    parts = [
        block_backward(do, q, k[:, keys], v[:, keys], out, delta, lse, scale, False, None)
        for keys in (slice(180), slice(180, None))
    ]
    assert near(parts[0][0] + parts[1][0], gradients[0])
    assert near(torch.cat([part[1] for part in parts], 1), gradients[1])
    assert near(torch.cat([part[2] for part in parts], 1), gradients[2])
