"""The vendor's kernel gives parts of an attention that merge to the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.merge import merge_
from dilated_attention_pytorch.core.resources import FROM_ALLOCATOR
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels import blocks, vendor


def test_what_the_vendors_kernel_cannot_do_is_left_to_others() -> None:
    assert not vendor.fits(torch.empty(1, 8, 2, 64, dtype=torch.bfloat16), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_of_the_keys_merge_to_the_whole(dtype, head_dim) -> None:
    scale = head_dim**-0.5
    block = blocks.Block(scale)
    every = [torch.randn(2, rows, 3, head_dim, device="cuda", dtype=dtype) for rows in (200, 500, 500, 200)]
    # Rows apart in memory, as the grid rows of a branch are.
    q, k, v, do = (torch.repeat_interleave(x, 2, 1)[:, ::2] for x in every)
    assert vendor.fits(q, scale)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("sihd,sjhd->shij", exact[0], exact[1]) * scale
    expected = torch.einsum("shij,sjhd->sihd", scores.softmax(-1), exact[2])
    gradients = torch.autograd.grad(expected, exact, do.double())
    out, lse = blocks.partial(q, k[:, :180], v[:, :180], block, FROM_ALLOCATOR)
    merge_(out, lse, *blocks.partial(q, k[:, 180:], v[:, 180:], block, FROM_ALLOCATOR))
    limit = 1e-2 if dtype == torch.bfloat16 else 1.5e-3

    def near(found: torch.Tensor, exactly: torch.Tensor) -> bool:
        return ((found.double() - exactly).norm() / exactly.norm()).item() < limit

    assert out.dtype == torch.float32
    assert near(out, expected)
    assert near(lse.transpose(1, 2), scores.logsumexp(-1))
    delta = (do.float() * out).sum(-1)
    parts = [
        blocks.gradients(do, q, k[:, keys], v[:, keys], out, delta, lse, block, FROM_ALLOCATOR)
        for keys in (slice(180), slice(180, None))
    ]
    assert near(parts[0][0] + parts[1][0], gradients[0])
    assert near(torch.cat([part[1] for part in parts], 1), gradients[1])
    assert near(torch.cat([part[2] for part in parts], 1), gradients[2])


SETTINGS = {
    "interleaved": {"segment_lengths": (16, 33, 100), "dilation_rates": (1, 2, 5)},
    "each head in one branch": {"segment_lengths": (16, 33), "dilation_rates": (1, 3), "head_layout": "grouped"},
    "packed": {"segment_lengths": (16, 64), "dilation_rates": (1, 4), "cu_seqlens": torch.tensor([0, 30, 31, 100])},
}


def on_the_cpu(monkeypatch) -> None:
    """The vendor's place is taken by PyTorch's flash kernel for CPUs, in the inputs' precision too."""

    def forward(*arguments):
        out, lse = blocks.cpu_flash_forward(*arguments)
        return out.float(), lse

    def backward(do, q, k, v, out, lse, scale, is_causal):
        assert do.dtype == q.dtype == out.dtype
        grads = blocks.cpu_flash_backward(*(x.float() for x in (do, q, k, v, out)), lse, scale, is_causal)
        return tuple(grads)

    monkeypatch.setattr(vendor, "why_not", lambda *kind: None)
    monkeypatch.setattr(vendor, "fits", lambda q, scale: True)
    monkeypatch.setattr(vendor, "forward", forward)
    monkeypatch.setattr(vendor, "backward", backward)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_whole_call_by_the_vendors_kernel_merges_to_the_reference(settings, is_causal, monkeypatch) -> None:
    on_the_cpu(monkeypatch)
    q, k, v = (torch.randn(1, 100, heads, 16).requires_grad_() for heads in (4, 2, 2))
    found, expected = (
        dilated_attention(q, k, v, **settings, is_causal=is_causal, backend=backend)
        for backend in ("vendor", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), weight) for x in (found, expected))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_the_vendors_kernel_computes_otherwise_is_refused(monkeypatch) -> None:
    branches = ([16], [1])
    q = torch.randn(1, 32, 2, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"'vendor' cannot take this call: .* the tensors are on cpu; .*eager"):
        dilated_attention(q, q, q, *branches, backend="vendor")
    on_the_cpu(monkeypatch)
    for settings, what in (({"dropout_p": 0.1}, "dropout_p=0.1"), ({"scale": -0.2}, "scale=-0.2")):
        with pytest.raises(ValueError, match=f"'vendor' cannot take {what}"):
            dilated_attention(q, q, q, *branches, **settings, backend="vendor")
    _, lse = dilated_attention(q, q, q, *branches, backend="vendor", return_lse=True)
    with pytest.raises(ValueError, match="'vendor' cannot take a gradient through the lse"):
        lse.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_a_whole_call_by_the_vendors_kernel_is_near_our_own(head_dim, is_causal) -> None:
    shape = (2, 3001, 6, head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(4))
    branches = {"segment_lengths": (512, 1000, 1777), "dilation_rates": (1, 3, 4), "is_causal": is_causal}
    found, expected = (dilated_attention(q, k, v, **branches, backend=name) for name in ("vendor", "triton"))
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad(x, (q, k, v), do.detach()) for x in (found, expected)))
    for one, other in pairs:
        assert ((one - other).float().norm() / other.float().norm()).item() < 1e-2
