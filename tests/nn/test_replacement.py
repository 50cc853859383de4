"""Dilated attention in the place of PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import DilatedTransformerDecoderLayer, MultiheadDilatedAttention, replace_attention

N = 21
WHOLE = {"segment_lengths": [N], "dilation_rates": [1]}
PATTERN = {"segment_lengths": [4, 16], "dilation_rates": [1, 2]}


def encoder(batch_first: bool = True, **settings) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first, dtype=torch.float64, **settings)
    model = nn.TransformerEncoder(layer, 2)
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    return model


def attentions(model: nn.Module) -> list[MultiheadDilatedAttention]:
    return [part for part in model.modules() if isinstance(part, MultiheadDilatedAttention)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["auto", "improved", "ring"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_segment_over_everything_gives_the_outputs_of_the_dense_model(batch_first, kind, training) -> None:
    dense = encoder(batch_first).train(training)
    model = replace_attention(copy.deepcopy(dense), **WHOLE, attention_type=kind)
    assert len(attentions(model)) == 2
    x = torch.randn(2, N, 16, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    mask = torch.arange(N) >= torch.tensor([[N], [9]])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), dense(x))
            found, expected = (m(x, src_key_padding_mask=mask) for m in (model, dense))
            valid = ~mask if batch_first else ~mask.T
            torch.testing.assert_close(found[valid], expected[valid])
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
    expected = dense.layers[0].self_attn(x, x, x, attn_mask=causal, need_weights=False)[0]
    torch.testing.assert_close(model.layers[0].self_attn(x, x, x, is_causal=True)[0], expected)


def test_a_pattern_is_honoured_although_pytorch_has_a_fast_path_for_its_own() -> None:
    dense = encoder().eval()
    model = replace_attention(copy.deepcopy(dense), **PATTERN, head_layout="blocked")
    assert all(part.attention.spec.head_layout == "blocked" for part in attentions(model))
    x = torch.randn(2, N, 16, dtype=torch.float64)
    layer = model.layers[0]
    with torch.no_grad():
        assert not torch.allclose(model(x), dense(x))
        torch.testing.assert_close(
            layer(x), layer.norm2((y := layer.norm1(x + layer.self_attn(x, x, x)[0])) + layer._ff_block(y))
        )


def test_what_parameters_are_stays() -> None:
    dense = encoder()
    dense.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    dense.layers[1].self_attn.out_proj.bias.requires_grad_(False)
    dense.layers[1].self_attn.dropout = 0.25
    dense.layers[1].eval()
    state = torch.random.get_rng_state()
    model = replace_attention(copy.deepcopy(dense).bfloat16(), **PATTERN)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, second = attentions(model)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert [x.requires_grad for x in (first.k_proj.weight, first.k_proj.bias, first.out_proj.bias)] == [
        False,
        True,
        True,
    ]
    assert [x.requires_grad for x in (second.k_proj.weight, second.out_proj.bias)] == [True, False]
    assert (first.training, second.training) == (True, False)
    assert second.attention.attention_dropout == 0.25
    on_meta = replace_attention(encoder().to("meta"), **PATTERN)
    assert all(x.is_meta for x in on_meta.parameters())
    model(torch.randn(1, N, 16, dtype=torch.bfloat16)).sum().backward()
    assert first.k_proj.weight.grad is None
    assert second.k_proj.weight.grad.abs().sum() > 0


def test_a_module_in_two_places_stays_one_and_a_bare_one_is_returned() -> None:
    shared = nn.MultiheadAttention(16, 4, batch_first=True)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Identity()})
    replace_attention(model, **PATTERN)
    assert model["a"] is model["b"]
    assert isinstance(model["a"], MultiheadDilatedAttention)
    assert isinstance(replace_attention(shared, max_length=64), MultiheadDilatedAttention)


def test_cross_attention_stays_as_it_is() -> None:
    theirs = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    replace_attention(theirs, **PATTERN)
    assert isinstance(theirs.encoder.layers[0].self_attn, MultiheadDilatedAttention)
    assert isinstance(theirs.decoder.layers[0].self_attn, MultiheadDilatedAttention)
    assert isinstance(theirs.decoder.layers[0].multihead_attn, nn.MultiheadAttention)
    theirs(torch.randn(2, N, 16), torch.randn(2, 7, 16), tgt_is_causal=True)
    with pytest.raises(ValueError, match=r"has no nn.MultiheadAttention to replace"):
        replace_attention(DilatedTransformerDecoderLayer(16, 4, **PATTERN), **PATTERN)
    model = nn.ModuleDict({"self_attn": nn.MultiheadAttention(16, 4), "cross": nn.MultiheadAttention(16, 4, kdim=8)})
    replace_attention(model, **PATTERN, keep=["cr*"])
    assert [type(x) for x in model.values()] == [MultiheadDilatedAttention, nn.MultiheadAttention]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kdim": 8}, "b has kdim=8 and vdim=16 beside embed_dim=16: .*keep=\\['b'\\]"),
        ({"add_bias_kv": True}, "b has add_bias_kv=True, a learned key"),
        ({"add_zero_attn": True}, "b has add_zero_attn=True, a key of zeros"),
    ],
)
def test_what_dilated_attention_has_no_place_for_is_refused_before_anything_is_changed(settings, message) -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4), "b": nn.MultiheadAttention(16, 4, **settings)})
    with pytest.raises(ValueError, match=message):
        replace_attention(model, **PATTERN)
    assert all(type(part) is nn.MultiheadAttention for part in model.values())


def test_what_would_be_lost_is_refused() -> None:
    class Other(nn.MultiheadAttention):
        pass

    with pytest.raises(ValueError, match="the model is of class Other, whose forward may differ from"):
        replace_attention(Other(16, 4), **PATTERN)
    hooked = nn.MultiheadAttention(16, 4)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks, which would be lost"):
        replace_attention(hooked, **PATTERN)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 3"):
        replace_attention(3, **PATTERN)
