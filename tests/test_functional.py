"""Bad input gets one clear error that names the value and the way out."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import (
    DilatedKVCache,
    ImprovedMultiheadDilatedAttention,
    LongNet,
    MultiheadDilatedAttention,
    SparsePatternConfig,
)
from dilated_attention_pytorch.core.checks import MOST_ENTRIES, MOST_TOKENS
from dilated_attention_pytorch.functional import dilated_attention, warm_up


def tensors(**changes):
    shapes = {"query": (2, 8, 4, 4), "key": (2, 8, 4, 4), "value": (2, 8, 4, 4)} | changes
    return [x if isinstance(x, torch.Tensor) else torch.randn(x) for x in shapes.values()]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": (2, 8, 16)}, ValueError, "query must be .*got 3 dimensions.*MultiheadDilatedAttention"),
        (
            {"key": torch.randn(2, 8, 4, 4).double()},
            TypeError,
            "share a dtype, got torch.float32 and key torch.float64",
        ),
        ({"value": torch.randn(2, 8, 4, 4, device="meta")}, ValueError, "share a device, got cpu and value meta"),
        ({"query": torch.ones(2, 8, 4, 4).int()}, TypeError, "query must be float32.*got torch.int32"),
        ({"key": (2, 9, 4, 4)}, ValueError, "agree in batch, tokens and head_dim.*no cross-attention"),
        ({"key": (2, 8, 3, 4), "value": (2, 8, 3, 4)}, ValueError, "H=4 and Hkv=3"),
        ({"key": (2, 8, 2, 4)}, ValueError, "the same number of heads, got 2 and 4"),
        (dict.fromkeys(("query", "key", "value"), (2, 8, 4, 0)), ValueError, "heads and head_dim must be at least 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        dilated_attention(*tensors(**changes), [4, 8], [1, 2])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dilation_rates": [1]}, ValueError, "2 lengths .* and 1 rates"),
        ({"segment_lengths": [4, 0]}, ValueError, "segment_length must be a whole number of at least 1, got 0"),
        ({"dilation_rates": [1, -2]}, ValueError, "dilation_rate must be a whole number of at least 1, got -2"),
        ({"head_layout": "diagonal"}, ValueError, "got 'diagonal'"),
        ({"head_layout": ["blocked"]}, TypeError, "head_layout must be one of"),
        (
            {"backend": "magic"},
            ValueError,
            "backend must be one of auto, triton, vendor, eager, reference; got 'magic'",
        ),
        ({"dropout_p": 1.0}, ValueError, "below 1, got 1.0"),
        ({"head_offset": 4}, ValueError, "needs total_heads"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
        ({"attn_mask": torch.zeros(8, 8)}, ValueError, "pass is_causal=True alone for causality, key_padding_mask"),
        ({"spans": [[0, 8], [0, 8]]}, TypeError, "spans must be a tensor, got a list"),
        ({"spans": torch.zeros(2, 2)}, TypeError, "spans must hold whole numbers"),
        ({"spans": torch.tensor([[0, 8], [5, 2]])}, ValueError, r"span \[5, 2\) does not follow"),
        ({"spans": torch.tensor([[0, 8], [0, 9]])}, ValueError, r"span \[0, 9\) .* a row of 8 tokens"),
        ({"head_offset": 4, "total_heads": 6}, ValueError, "do not lie within the 6 heads"),
        ({"spans": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, r"got \(3, 2\) for batch 2"),
        (
            {"spans": torch.zeros(2, 2, dtype=torch.int64), "seqlens": torch.tensor([1, 1])},
            ValueError,
            "seqlens and spans both state the lengths",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 8), "seqlens": torch.ones(2), "cu_seqlens": torch.tensor([0, 8])},
            ValueError,
            "^seqlens and cu_seqlens both state the lengths",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        dilated_attention(*tensors(), **({"segment_lengths": [4, 8], "dilation_rates": [1, 2]} | settings))


NOTHING = {
    "plain": lambda B, N: {},
    "causal with dropout": lambda B, N: {"is_causal": True, "dropout_p": 0.1},
    "seqlens": lambda B, N: {"seqlens": torch.zeros(B, dtype=torch.int64)},
    "mask": lambda B, N: {"key_padding_mask": torch.zeros(B, N, dtype=torch.bool)},
    "spans": lambda B, N: {"spans": torch.zeros(B, 2, dtype=torch.int64)},
    "packed": lambda B, N: {"cu_seqlens": torch.tensor([0, 0, 0])} if B == 1 else {},
    "sparse": lambda B, N: {"sparse_config": SparsePatternConfig(block_size=4)},
    "sparse by content": lambda B, N: {"sparse_config": SparsePatternConfig("content_adaptive", block_size=4)},
}


@pytest.mark.parametrize("settings", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("shape", [(2, 0), (1, 0), (0, 6), (0, 0)], ids=str)
def test_no_tokens_or_no_batch_give_an_empty_result(shape, settings) -> None:
    inputs = [torch.randn(*shape, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    for backend in ("eager", "reference"):
        call = {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "backend": backend, **settings(*shape)}
        out, lse = dilated_attention(*inputs, **call, return_lse=True)
        assert (out.shape, lse.shape) == ((*shape, 4, 16), (*shape, 4))
        grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        assert [x.shape for x in grads] == [x.shape for x in inputs]
        with torch.no_grad():
            assert dilated_attention(*inputs, **call).shape == out.shape


@pytest.mark.parametrize("shape", [(2, 0), (0, 6)], ids=str)
def test_no_tokens_or_no_batch_pass_through_transforms_modules_and_caches(shape) -> None:
    spec = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    x, q = torch.randn(*shape, 32, requires_grad=True), torch.randn(*shape, 4, 8)

    def run(q):
        return dilated_attention(q, q, q, **spec)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.autograd.grad(compiled(q.requires_grad_()).sum(), q)[0].shape == q.shape
    assert torch.func.jvp(run, (q.detach(),), (q.detach(),))[1].shape == q.shape
    for module in (MultiheadDilatedAttention(32, 4, **spec), ImprovedMultiheadDilatedAttention(32, 4, **spec)):
        out, _ = module(x, x, x, need_weights=False)
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    encoder = LongNet(d_model=32, num_heads=4, num_layers=1, num_decoder_layers=0, **spec)
    assert encoder(x).shape == x.shape
    with torch.no_grad():
        cache = DilatedKVCache(**spec, batch=2, num_heads=4, head_dim=8)
        assert cache.attend(*(torch.randn(2, 0, 4, 8) for _ in range(3))).shape == (2, 0, 4, 8)
        assert not cache.lengths.any()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_torch_jit_trace_is_refused() -> None:
    x = torch.randn(1, 8, 4, 8)
    with pytest.raises(RuntimeError, match=r"use torch\.compile or torch\.export"):
        torch.jit.trace(lambda x: dilated_attention(x, x, x, [4, 8], [1, 2]), (x,))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused(layout) -> None:
    way_out = "pass cu_seqlens=" if layout is torch.jagged else "pass their lengths as seqlens"
    x = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(5, 4, 8)], layout=layout)
    with pytest.raises(TypeError, match=f"query must be a dense tensor, got a nested one.*{way_out}"):
        dilated_attention(x, x, x, [4, 8], [1, 2])


def test_packed_spans_may_not_overlap() -> None:
    x = torch.randn(1, 8, 4, 4)
    with pytest.raises(ValueError, match=r"span \[3, 8\) does not follow the one before it"):
        dilated_attention(x, x, x, [4], [1], spans=torch.tensor([[0, 5], [3, 8]]))


def test_autocast_casts_no_integers() -> None:
    x = torch.ones(2, 8, 4, 4, dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"got torch\.int32"):
        dilated_attention(x, x, x, [4], [1])


@pytest.mark.parametrize("head_layout", ["interleaved", "blocked", "grouped"])
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_the_longest_segment_and_the_highest_rate_are_exact(backend, head_layout) -> None:
    q, k, v = torch.randn(3, 1, 50, 4, 8).unbind(0)
    settings = {"is_causal": True, "head_layout": head_layout, "backend": backend}
    for rate, same_rate in ((2, 2), (MOST_TOKENS, 64)):
        longest = dilated_attention(q, k, v, [8, MOST_TOKENS], [1, rate], **settings)
        assert torch.equal(longest, dilated_attention(q, k, v, [8, 64], [1, same_rate], **settings))


def test_the_last_of_very_many_heads_are_found_at_once() -> None:
    q, k, v = torch.randn(3, 1, 50, 4, 8).unbind(0)
    shard = {"head_offset": MOST_ENTRIES - 4, "total_heads": MOST_ENTRIES, "head_layout": "grouped"}
    # All of them are in the last group, whose offset is 1 on a rate of 2.
    found = dilated_attention(q, k, v, [8, 64], [1, 2], **shard)
    assert torch.equal(found[:, ::2], torch.zeros(1, 25, 4, 8))
    assert found[:, 1::2].abs().min() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (1, 8, 4)}, r"shape must be \(batch, tokens, heads, head_dim\), got \(1, 8, 4\)"),
        ({"shape": (1, 0, 4, 16)}, "shape must be a whole number of at least 1, got 0"),
        ({"shape": (1, MOST_TOKENS, 4, 16)}, r"at most 2\^48 elements"),
        ({"kv_heads": 3}, "H=4 and Hkv=3"),
        ({"segment_lengths": [4]}, "1 lengths .* and 2 rates"),
        ({"dtype": torch.int8}, "dtype must be a floating-point dtype, got torch.int8"),
        ({"dropout_p": 1.0}, "below 1, got 1.0"),
        ({"backend": "triton", "shape": (1, 8, 4, 12)}, "'triton' cannot take this call: .*multiple of 8, got 12"),
        ({"device": "cuda:99"}, "device must be one that PyTorch finds, got 'cuda:99'"),
    ],
)
def test_warm_up_refuses_a_call_that_cannot_run(settings, message) -> None:
    state = torch.get_rng_state()
    good = {"shape": (1, 8, 4, 16), "segment_lengths": [4, 8], "dilation_rates": [1, 2], "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        warm_up(**{**good, **settings})
    assert warm_up(**good, dropout_p=0.5, lengths=True) == []
    assert torch.equal(torch.get_rng_state(), state)
