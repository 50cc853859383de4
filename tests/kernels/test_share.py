"""One rank's share of a call: offsets of its own, global positions for dropout, sums in float32. Engines must agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch.core.call import Call, Inputs, Saved
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.kernels import op

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def share(dropout_p: float, *, first_position: int = 70, partial: bool = True) -> Call:
    """A shard from position 70 on: its second branch begins within a segment, its third is computed elsewhere."""
    return Call(
        spec=DilatedSpec.of([16, 96, 48], [1, 3, 2]),
        is_causal=True,
        dropout_p=dropout_p,
        table=((0, 0), (2, 1), (None, None)),
        first_position=first_position,
        partial=partial,
    )


def run(backend: str, call: Call, dtype: torch.dtype, device: str, *, backward: bool = True):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 34, 2, 16, generator=generator).to(device, dtype) for _ in range(4))
    spans = torch.tensor([[0, 14], [14, 34]], device=device)
    seed = torch.tensor([3, 4], device=device) if call.dropout_p else None
    call = replace(call, backend=backend)
    inputs = Inputs(q, k, v, spans, seed)
    out, lse = op.partial(call, inputs)
    if not backward:
        return (out,)
    return (out, lse, *op.gradients(call, Saved(inputs, out, lse), do, None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_engines_agree_on_a_share(dropout_p, device) -> None:
    pytest.importorskip("triton")
    expected = run("eager", share(dropout_p), torch.float32, device)
    found = run("triton", share(dropout_p), torch.float32, device)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    if dropout_p:
        elsewhere = run("triton", share(dropout_p, first_position=0), torch.float32, device, backward=False)
        assert not torch.allclose(elsewhere[0], found[0])


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_partial_result_is_not_rounded(backend, device) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    results = run(backend, share(0.0), torch.float16, device)
    assert {x.dtype for x in results} == {torch.float32}
    whole = run(backend, share(0.0, partial=False), torch.float16, device)
    assert [x.dtype for x in whole] == [torch.float16, torch.float32, *[torch.float16] * 3]
