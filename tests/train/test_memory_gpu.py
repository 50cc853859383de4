"""What the memory techniques do on a GPU: copies on streams, float8, 2:4 sparsity, and peaks that fall."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.core.pool import get_global_memory_pool
from dilated_attention_pytorch.train.memory import MemoryOptions, loss, prepare
from dilated_attention_pytorch.train.offload import Offload

pytestmark = pytest.mark.gpu


def model_of(layers: int = 6, dtype: torch.dtype = torch.float32, vocabulary: int = 256) -> LongNetLM:
    torch.manual_seed(0)
    sizes = {"d_model": 256, "num_heads": 4, "num_layers": layers, "vocab_size": vocabulary}
    return LongNetLM(**sizes, segment_lengths=(256, 1024), dilation_rates=(1, 4)).to("cuda", dtype)


def step(options: MemoryOptions, tokens: int, dtype: torch.dtype = torch.float32, **sizes: int):
    """Loss, gradients and the peak of the second of two steps, beyond what there is before it."""
    model = prepare(model_of(dtype=dtype, **sizes), options)
    batch = torch.randint(256, (1, tokens + 1), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = loss(model, batch[:, :-1], batch[:, 1:], options)
        value.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}, peak


@pytest.mark.parametrize("compiled", [False, True])
def test_all_techniques_together_change_neither_loss_nor_gradients(compiled) -> None:
    expected = step(MemoryOptions(), 2000, torch.float64)
    options = MemoryOptions(
        checkpointing="selective", offload=True, offload_least_bytes=1, mlp_tile=300, loss_chunk=300, compile=compiled
    )
    for _ in range(3):  # a race would not show every time
        found = step(options, 2000, torch.float64)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-9)
    assert get_global_memory_pool().get_stats()["live_buffers"] == 0


def test_the_peak_falls_with_each_technique() -> None:
    def peak(**changes: object) -> int:
        return step(MemoryOptions(precision="bf16", **changes), 65_536, layers=12)[2]

    none, full, selective = (peak(checkpointing=c) for c in ("none", "full", "selective"))
    assert full < selective < none
    assert peak(checkpointing="full", offload=True) < full
    assert peak(checkpointing="selective", offload=True) < selective
    assert peak(checkpointing="full", mlp_tile=4096) < full
    # The logits are gone before backward reaches the layers: it shows where they are more than the layers.
    whole, chunked = (step(MemoryOptions(loss_chunk=c), 8192, layers=1, vocabulary=32_768)[2] for c in (0, 1024))
    assert chunked < 0.5 * whole


def test_a_tensor_that_is_overwritten_after_its_copy_comes_back_as_it_was() -> None:
    offload = Offload(least_bytes=1)
    kept = []
    for i in range(8):
        group = offload.group()
        kept.append((group, group.pack(torch.full((1 << 22,), float(i), device="cuda"))))
        torch.empty(1 << 22, device="cuda").fill_(-1)  # takes freed memory, if any was freed too early
    for i, (group, parcel) in reversed(list(enumerate(kept))):
        found = group.unpack(parcel)
        torch.empty(1 << 22, device="cuda").fill_(-1)
        assert bool((found == i).all())


def test_float8_layers_train_close_to_bfloat16() -> None:
    pytest.importorskip("torchao", reason="needs the extra torchao")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    exact = step(MemoryOptions(precision="bf16"), 2000)
    for options in ({}, {"checkpointing": "selective", "mlp_tile": 300, "loss_chunk": 300}):
        found = step(MemoryOptions(precision="bf16", float8=True, **options), 2000)
        torch.testing.assert_close(found[0], exact[0], rtol=0.05, atol=0.0)
        assert all(bool(gradient.isfinite().all()) for gradient in found[1].values())


def test_2_4_sparse_layers_use_half_of_their_weights() -> None:
    if not torch.backends.cusparselt.is_available():
        pytest.skip("needs cuSPARSELt")
    for changes in ({}, {"mlp_tile": 300}, {"compile": True}, {"checkpointing": "full"}):
        options = MemoryOptions(precision="bf16", structured_sparsity=True, **changes)
        found = step(options, 2048)
        assert found[0].isfinite()
        assert all(bool(gradient.isfinite().all()) for gradient in found[1].values())
    sparse = prepare(model_of(1), options).layers[0].feed_forward.linear1
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        rows = sparse(torch.eye(256, device="cuda")) - sparse.bias  # (in, out): the weights that count
    assert isinstance(sparse, nn.Linear)
    assert 0.49 < (rows == 0).float().mean() < 0.53  # a tile of 4 x 4 may come to fewer than 8
