"""Maps of every kind of model against a dense softmax, and the mean over rows against all rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    DilatedAttention,
    LongNet,
    LongNetEncoder,
    LongNetLM,
    attention_map,
    gradient_map,
    patch_gigapath,
)
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.spec import DilatedSpec

from .test_torchscale import SMALL, SlideEncoder, slide

PATTERN = {"segment_lengths": (4, 16, 64), "dilation_rates": (1, 2, 4)}
SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, **PATTERN}


def times_seen(spec: DilatedSpec, N: int, heads: int, is_causal: bool) -> torch.Tensor:
    """`(heads, N, N)`: in how many branches a row sees a key."""
    position, times = torch.arange(N), torch.zeros(heads, N, N)
    for branch, offsets in zip(spec.branches, spec.offsets(heads)):
        segment, within = position // branch.segment_length, position % branch.segment_length
        for head, offset in enumerate(offsets):
            on = within % branch.dilation_rate == offset
            times[head] += on[:, None] & on & (segment[:, None] == segment)
    return times.tril() if is_causal else times


def dense_maps(model: nn.Module, run, spec: DilatedSpec, heads: int, is_causal: bool = False) -> torch.Tensor:
    """`(layers, heads, N, N)` from the queries and keys of every attention call."""
    seen: list[torch.Tensor] = []

    def note(layer: nn.Module, args, named) -> None:
        q, k = args[0][0].double(), args[1][0].double()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
        times = times_seen(spec, len(q), heads, is_causal).repeat_interleave(q.shape[1] // heads, 0)
        seen.append((scores + times.log()).softmax(-1).nan_to_num(0.0).float())

    hooks = [
        part.register_forward_pre_hook(note, with_kwargs=True)
        for part in model.modules()
        if isinstance(part, DilatedAttention)
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def models():
    torch.manual_seed(0)
    x, tokens = torch.randn(1, 40, 16), torch.randint(256, (1, 40))
    grouped = LongNetLM(**SIZES, num_kv_heads=2, qk_norm=True)
    yield grouped, tokens, grouped.config.spec, 2, True
    bag = LongNetEncoder(**SIZES, input_dim=16, pooling="cls", positions="coordinates", num_classes=2)
    yield bag, (x, torch.randint(9999, (1, 40, 2))), bag.config.spec, 4, False
    alone = LongNet(**SIZES, num_decoder_layers=0)
    yield alone, {"src": x}, alone.config.spec, 4, False
    theirs = patch_gigapath(SlideEncoder())
    yield theirs, slide(), DilatedSpec.of(*SMALL, "blocked"), 8, False


@pytest.mark.parametrize("case", range(4), ids=["language model", "encoder", "LongNet", "GigaPath"])
def test_a_map_is_that_of_a_dense_softmax(case) -> None:
    model, inputs, spec, heads, causal = [*models()][case]
    model.eval()
    expected = dense_maps(
        model, lambda: model(**inputs) if isinstance(inputs, dict) else
        model(inputs) if torch.is_tensor(inputs) else model(*inputs), spec, heads, causal,
    )  # fmt: skip
    rows, hooks = [0, 17, 39], [len(part._forward_pre_hooks) for part in model.modules()]
    torch.testing.assert_close(attention_map(model, inputs, rows=rows), expected[:, :, rows].transpose(1, 2))
    torch.testing.assert_close(attention_map(model, inputs, rows="all")[:, 0], expected.mean(2))
    (last,) = attention_map(model, inputs, rows=[5], layers=[1])
    torch.testing.assert_close(last[0], expected[1, :, 5])
    assert hooks == [len(part._forward_pre_hooks) for part in model.modules()]


def test_a_switched_model_of_transformers_has_maps_too() -> None:
    transformers = pytest.importorskip("transformers")
    from dilated_attention_pytorch.models import hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, vocab_size=50)
    model = hf.use_dilated_attention(transformers.LlamaForCausalLM(config), **PATTERN).eval()
    tokens = torch.randint(50, (1, 40))
    call = Call(spec=DilatedSpec.of(*PATTERN.values()), is_causal=True)
    found = attention_map(model, {"input_ids": tokens, "use_cache": False}, rows=range(40))
    assert found.shape == (2, 40, 4, 40)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 40, 4))
    seen = times_seen(call.spec, 40, 2, True).repeat_interleave(2, 0).transpose(0, 1) > 0
    assert torch.equal(found[0] > 0, seen)
    torch.testing.assert_close(attention_map(model, tokens, rows="all")[:, 0], found.mean(1))
    assert gradient_map(model, tokens, of=lambda out: out.logits[0, -1, 0]).shape == (2, 2, 40)


def test_gradient_times_attention_is_that_of_every_weight() -> None:
    """Of one layer: the derivative of the number with respect to a weight, times the weight, summed over rows."""
    torch.manual_seed(0)
    model = LongNetEncoder(**(SIZES | {"num_layers": 1}), input_dim=16, num_classes=2).eval().double()
    x = torch.randn(1, 40, 16).double()
    weights = dense_maps(model, lambda: model(x), model.config.spec, 4)[0].double().requires_grad_()
    layer = model.layers[0]
    rows = layer.norm1(model.input(x))
    v = layer.self_attn.v_proj(rows)[0].unflatten(-1, (4, 4))
    attended = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)[None]
    y = model.input(x) + layer.self_attn.out_proj(layer.self_attn.norm(attended))
    y = y + layer.feed_forward(layer.norm2(y))
    number = model.head(model.pooled_norm(model.norm(y).mean(1)))[0, 1]
    (gradient,) = torch.autograd.grad(number, weights)
    expected = (weights * gradient).sum(1).detach().float()
    for part in model.parameters():
        part.requires_grad_(False)  # values still get their gradient
    torch.testing.assert_close(gradient_map(model, x, of=lambda out: out[0, 1])[0], expected, rtol=1e-4, atol=1e-6)


def test_the_cls_rows_together_see_and_are_seen_by_every_row_in_every_head() -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"input_dim": 16, "num_layers": 1, "pooling": "cls"}
    x = torch.randn(1, 36, 16)
    model = LongNetEncoder(**sizes).eval()
    of_cls = attention_map(model, x, rows=range(4))[0]  # (rows, heads, N)
    on_grid = torch.arange(40) % 4
    for head in range(4):
        assert (of_cls[:, head].sum(0) > 0)[on_grid == head].all()
        assert (attention_map(model, x, rows=[36 + head])[0, 0, head, :4] > 0).any()
    assert (of_cls.sum((0, 1)) > 0).all()
    half_blind = LongNetEncoder(**sizes, cls_rows=1).eval()
    of_row = attention_map(half_blind, x, rows=[0])[0, 0]
    assert [int(n) for n in (of_row[:, 16:] > 0).sum(-1)] == [6, 0, 0, 0]


def test_packed_sequences_are_averaged_each_over_its_own_rows() -> None:
    torch.manual_seed(0)
    model = LongNetEncoder(**SIZES, input_dim=16).eval()
    x = torch.randn(1, 30, 16)
    packed = attention_map(model, {"x": x, "cu_seqlens": torch.tensor([0, 10, 30])}, rows="all")
    alone = [attention_map(model, part, rows="all") for part in (x[:, :10], x[:, 10:])]
    torch.testing.assert_close(packed, torch.cat(alone, -1))


def test_what_has_no_map_is_refused() -> None:
    torch.manual_seed(0)
    model = LongNetLM(**SIZES).eval()
    tokens, x = torch.randint(256, (1, 40)), torch.randn(1, 40, 16)
    both = LongNet(**SIZES, num_decoder_layers=1).eval()
    exact = patch_gigapath(SlideEncoder(), exact_torchscale=True).eval()
    for call, message in {
        lambda: attention_map(nn.Linear(2, 2).eval(), x, rows=[0]): "has no dilated attention",
        lambda: attention_map(LongNetLM(**SIZES), tokens, rows=[0]): "call model.eval",
        lambda: attention_map(model, tokens.expand(2, -1), rows=[0]): "shows one sequence, got a batch of 2",
        lambda: attention_map(model, tokens, rows=[40]): "at most 39",
        lambda: attention_map(model, tokens, rows=[0], layers=[2]): r"makes 2 attention calls.*got layers \[2\]",
        lambda: attention_map(both, (x, x[:, :20]), rows=[0]): "differ in heads and tokens",
        lambda: attention_map(exact, slide(), rows=[1]): "rows=",
        lambda: gradient_map(model, tokens, of=lambda out: out): "one number",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert attention_map(both, (x, x[:, :20]), rows=[0], layers=[2]).shape == (1, 1, 4, 20)
