from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    DilatedAttention,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    DistributedImprovedDilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    LongNet,
    LongNetLM,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    RotaryPositions,
    create_dilated_attention,
)
from dilated_attention_pytorch.functional import dilated_attention

from ..ranks import run_ranks

SPEC = {"segment_lengths": [4, 8, 16], "dilation_rates": [1, 2, 3]}
SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2, **SPEC}
N = 21


def causal_cases():
    def heads(module):
        return module, torch.randn(2, N, 4, 4), lambda m, x: m(x, x, x, is_causal=True)

    def rows(module):
        return module, torch.randn(2, N, 16), lambda m, x: m(x, x, x, is_causal=True)[0]

    source = torch.randn(2, 7, 16)
    return {
        "DilatedAttention": lambda: heads(DilatedAttention(**SPEC)),
        "grouped": lambda: heads(DilatedAttention(**SPEC, head_layout="grouped")),
        "blocked": lambda: heads(DilatedAttention(**SPEC, head_layout="blocked")),
        "ImprovedDilatedAttention": lambda: heads(ImprovedDilatedAttention(**SPEC)),
        "MultiheadDilatedAttention": lambda: rows(MultiheadDilatedAttention(16, 4, **SPEC)),
        "ImprovedMultiheadDilatedAttention": lambda: rows(ImprovedMultiheadDilatedAttention(16, 4, **SPEC)),
        "encoder layer": lambda: (
            DilatedTransformerEncoderLayer(16, 4, **SPEC),
            torch.randn(2, N, 16),
            lambda m, x: m(x, is_causal=True),
        ),
        "decoder layer": lambda: (
            DilatedTransformerDecoderLayer(16, 4, **SPEC),
            torch.randn(2, N, 16),
            lambda m, x: m(x, source),
        ),
        "LongNet": lambda: (LongNet(**SIZES), torch.randn(2, N, 16), lambda m, x: m(source, x)),
        "LongNetLM": lambda: (LongNetLM(**SIZES), torch.randint(256, (2, N)), lambda m, x: m(x)),
        "LongNetLM with xPos": lambda: (
            LongNetLM(**SIZES, positions="xpos"),
            torch.randint(256, (2, N)),
            lambda m, x: m(x),
        ),
    }


@pytest.fixture(autouse=True)
def double_precision():
    """Modules and inputs alike in float64, so that "unchanged" can be exact."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", causal_cases())
def test_changing_a_token_changes_nothing_before_it(case) -> None:
    module, x, call = causal_cases()[case]()
    module.eval()
    before = call(module, x)
    for t in range(N):
        changed = x.clone()
        changed[:, t] = (x[:, t] + 1) % 256
        after = call(module, changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert not torch.equal(after[:, t], before[:, t])


def test_multihead_is_projections_around_the_function() -> None:
    module = MultiheadDilatedAttention(16, 4, **SPEC, num_kv_heads=2).eval()
    x = torch.randn(2, N, 16)
    heads = [p(x).unflatten(-1, (-1, 4)) for p in (module.q_proj, module.k_proj, module.v_proj)]
    expected = module.out_proj(module.norm(dilated_attention(*heads, **SPEC).flatten(-2)))
    torch.testing.assert_close(module(x, x, x)[0], expected)
    assert module(x, x, x)[1] is None


def test_the_fused_projection_is_three_projections() -> None:
    fused = ImprovedMultiheadDilatedAttention(16, 4, **SPEC, num_kv_heads=2).eval()
    apart = MultiheadDilatedAttention(16, 4, **SPEC, num_kv_heads=2).eval()
    apart.load_state_dict(fused.state_dict())
    for kind in ("weight", "bias"):
        own = torch.cat([getattr(getattr(apart, f"{name}_proj"), kind) for name in "qkv"])
        assert torch.equal(own, getattr(fused.qkv_proj, kind))
    x, y = torch.randn(2, N, 16), torch.randn(2, N, 16)
    torch.testing.assert_close(fused(x, x, x)[0], apart(x, x, x)[0])
    torch.testing.assert_close(fused(x, y, y)[0], apart(x, y, y)[0])
    assert (fused.embed_dim, fused.num_heads, fused.segment_lengths, fused.dilation_rates) == (
        16,
        4,
        (4, 8, 16),
        (1, 2, 3),
    )


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_state_dicts_go_both_ways_between_fused_and_separate_projections(kv_heads, bias, assign) -> None:
    kinds = (MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention)
    settings = {**SPEC, "num_kv_heads": kv_heads, "bias": bias}
    x = torch.randn(2, N, 16)
    for kind, other in (kinds, kinds[::-1]):
        source, target = (nn.ModuleDict({"a": k(16, 4, **settings)}) for k in (kind, other))
        before = set(target.state_dict())
        target.load_state_dict(source.state_dict(), strict=True, assign=assign)
        assert set(target.state_dict()) == before
        torch.testing.assert_close(target["a"](x, x, x)[0], source["a"](x, x, x)[0])
        memory = [p.untyped_storage().data_ptr() for p in target.parameters()]
        assert len(set(memory)) == len(memory)
        assert source.state_dict().keys() != before  # loading leaves the source as it was
    missing = source.state_dict()
    missing.pop("a.k_proj.weight" if "a.k_proj.weight" in missing else "a.qkv_proj.weight")
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(missing)


@pytest.mark.parametrize("build", [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention])
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_loads_the_weights_of_pytorchs_attention_and_takes_its_layout(batch_first, build) -> None:
    dense = nn.MultiheadAttention(16, 4, batch_first=batch_first).double()
    nn.init.normal_(dense.in_proj_bias)
    ours = build(16, 4, [N], [1], layer_norm=False, batch_first=batch_first).double()
    ours.load_state_dict(dense.state_dict(), strict=True)
    x, y, z = torch.randn(3, *((2, N) if batch_first else (N, 2)), 16, dtype=torch.float64).unbind(0)
    mask = torch.arange(N) >= torch.tensor([[N], [9]])
    torch.testing.assert_close(ours(x, x, x)[0], dense(x, x, x)[0])
    torch.testing.assert_close(ours(x, y, z)[0], dense(x, y, z)[0])
    # a row of padding is 0 before the projection here, and defined by other rows there
    found, expected = (m(x, x, x, key_padding_mask=mask)[0] for m in (ours, dense))
    valid = ~mask if batch_first else ~mask.T
    torch.testing.assert_close(found[valid], expected[valid])
    one = (x[0], y[0], z[0]) if batch_first else (x[:, 0], y[:, 0], z[:, 0])
    torch.testing.assert_close(ours(*one)[0], dense(*one)[0])


def test_magneto_initialises_value_and_output_with_the_gain() -> None:
    for build in (MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention):
        module = build(256, 4, **SPEC, gamma_init=3.0)
        fused = build is ImprovedMultiheadDilatedAttention
        weights = (
            module.qkv_proj.weight.split(256)
            if fused
            else [p.weight for p in (module.q_proj, module.k_proj, module.v_proj)]
        )
        deviations = [w.std().item() * 16 for w in (*weights, module.out_proj.weight)]
        assert deviations == pytest.approx([1.0, 1.0, 3.0, 3.0], rel=0.05)


@pytest.mark.parametrize("training", [True, False])
def test_it_replaces_pytorchs_attention_in_its_own_encoder(training) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadDilatedAttention(16, 4, **SPEC)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    x, mask = torch.randn(2, N, 16), torch.arange(N) >= torch.tensor([[N], [9]])
    with torch.set_grad_enabled(training):
        out = encoder(x, src_key_padding_mask=mask)
        changed = x.clone()
        changed[1, 9:] += 1.0
        torch.testing.assert_close(encoder(changed, src_key_padding_mask=mask)[1, :9], out[1, :9])


def test_the_decoder_layer_fits_pytorchs_decoder() -> None:
    layer = DilatedTransformerDecoderLayer(16, 4, **SPEC)
    decoder = nn.TransformerDecoder(layer, 2).eval()
    x, memory = torch.randn(2, N, 16), torch.randn(2, 7, 16)
    mask = torch.arange(7) >= torch.tensor([[7], [4]])
    out = decoder(x, memory, memory_key_padding_mask=mask, tgt_is_causal=True)
    changed = memory.clone()
    changed[1, 4:] += 1.0
    torch.testing.assert_close(decoder(x, changed, memory_key_padding_mask=mask, tgt_is_causal=True), out)
    assert not torch.allclose(decoder(x, changed, tgt_is_causal=True), out)


def test_the_decoder_layer_takes_tokens_before_batch_rows_if_asked() -> None:
    layer = DilatedTransformerDecoderLayer(16, 4, **SPEC).eval()
    swapped = DilatedTransformerDecoderLayer(16, 4, **SPEC, batch_first=False).eval()
    swapped.load_state_dict(layer.state_dict())
    mask = torch.arange(N) >= torch.tensor([[N], [9]])
    for tokens in (N, 7):  # of the memory; a batch row must not attend to another one's
        x, memory = torch.randn(2, N, 16), torch.randn(2, tokens, 16)
        masks = {"tgt_key_padding_mask": mask, "memory_key_padding_mask": mask[:, :tokens]}
        out = swapped(x.transpose(0, 1), memory.transpose(0, 1), **masks)
        torch.testing.assert_close(out.transpose(0, 1), layer(x, memory, **masks))
        torch.testing.assert_close(swapped(x[0], memory[0]), layer(x[:1], memory[:1])[0])
    with pytest.raises(ValueError, match=r"one batch size, got \(\d+, 2, 16\) and \(7, 1, 16\)"):
        swapped(x.transpose(0, 1), memory[:1].transpose(0, 1))


def test_modules_pass_their_settings_on() -> None:
    q, k, v = torch.randn(3, 1, N, 4, 4)
    scaled = DilatedAttention(**SPEC, softmax_scale=0.9)
    torch.testing.assert_close(scaled(q, k, v), dilated_attention(q, k, v, **SPEC, scale=0.9))
    multihead = MultiheadDilatedAttention(16, 4, **SPEC, dropout=0.5, layer_norm_eps=0.1, softmax_scale=0.9)
    assert (multihead.attention.attention_dropout, multihead.attention.softmax_scale) == (0.5, 0.9)
    assert multihead.norm.eps == 0.1
    assert ImprovedDilatedAttention(**SPEC).allow_tf32 is True
    assert ImprovedMultiheadDilatedAttention(16, 4, **SPEC, use_tf32=False).attention.allow_tf32 is False
    with pytest.raises(ValueError, match="got 'magic'"):
        DilatedAttention(**SPEC, backend="magic")


def test_a_stated_device_or_dtype_is_where_inputs_must_be() -> None:
    q, k, v = torch.randn(3, 1, N, 4, 4, dtype=torch.float32)
    for kind in (DilatedAttention, RingDilatedAttention, DistributedImprovedDilatedAttention, create_dilated_attention):
        module = kind(**SPEC, device="cpu", dtype=torch.float64)
        assert "device=cpu, dtype=torch.float64" in repr(module)
        assert not module.state_dict()
        module(q.double(), k.double(), v.double())
        with pytest.raises(ValueError, match=r"made for dtype=torch.float64, got inputs of torch.float32"):
            module(q, k, v)
        module.float()  # as parameters follow
        module(q, k, v)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"got inputs of torch.bfloat16"):
            module(q, k, v)
        with pytest.raises(ValueError, match="made for device=cpu, got inputs of meta"):
            copy.deepcopy(module)(*(x.to("meta") for x in (q, k, v)))
    only = DilatedAttention(**SPEC, device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        only(q.to(dtype), k.to(dtype), v.to(dtype))


@pytest.mark.parametrize("build", [LongNetLM, LongNet, MultiheadDilatedAttention, RingMultiheadDilatedAttention])
def test_parameters_are_made_where_it_is_said(build) -> None:
    sizes = {"embed_dim": 16} if issubclass(build, MultiheadDilatedAttention) else {"d_model": 16, "num_layers": 1}
    module = build(**sizes, num_heads=4, **SPEC, device="meta", dtype=torch.bfloat16)
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.bfloat16)}


def test_lengths_are_stated_once() -> None:
    module = DilatedAttention(**SPEC)
    q, k, v = torch.randn(3, 2, N, 4, 4)
    with pytest.raises(ValueError, match="seqlens and spans both state the lengths"):
        module(q, k, v, spans=torch.tensor([[0, N], [0, N]]), seqlens=torch.tensor([3, 3]))


def test_unbatched_input_is_a_batch_of_one() -> None:
    module = MultiheadDilatedAttention(16, 4, **SPEC).eval()
    x, mask = torch.randn(N, 16), torch.arange(N) >= 15
    expected = module(x[None], x[None], x[None], key_padding_mask=mask[None])[0][0]
    torch.testing.assert_close(module(x, x, x, key_padding_mask=mask)[0], expected)


@pytest.mark.parametrize("build", [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention])
def test_padding_reaches_no_valid_row(build) -> None:
    module = build(16, 4, **SPEC).eval()
    x = torch.randn(2, N, 16)
    mask = torch.zeros(2, N, dtype=torch.bool)
    mask[0, :6] = True
    mask[1, 15:] = True
    changed = x.masked_fill(mask[..., None], 9.0)
    outs = [module(y, y, y, key_padding_mask=mask)[0] for y in (x, changed)]
    torch.testing.assert_close(outs[0][~mask], outs[1][~mask])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kdim", "are rows of one sequence"),
        ("add_bias_kv", "no position of a"),
        ("attention_dropout", "pass dropout"),
    ],
)
def test_arguments_that_only_dense_attention_has_are_refused_with_the_reason(name, why) -> None:
    with pytest.raises(TypeError, match=f"MultiheadDilatedAttention has no {name}: .*{why}"):
        MultiheadDilatedAttention(32, 4, [8], [1], **{name: 8})


@pytest.mark.parametrize(("name", "way_out"), [("attention_dropout", "pass dropout"), ("allow_tf32", "pass use_tf32")])
def test_other_names_of_a_setting_are_refused_with_the_name_to_use(name, way_out) -> None:
    with pytest.raises(TypeError, match=f"ImprovedDilatedAttention has no {name}: {way_out}"):
        ImprovedDilatedAttention([8], [1], **{name: 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"need_weights": True}, r"O\(N\^2\).*need_weights=False"),
        ({"attn_mask": torch.zeros(N, N)}, "is_causal=True alone for causality, key_padding_mask or seqlens"),
    ],
)
def test_what_would_take_quadratic_memory_is_refused(arguments, message) -> None:
    module = MultiheadDilatedAttention(16, 4, **SPEC)
    x = torch.randn(2, N, 16)
    with pytest.raises(ValueError, match=message):
        module(x, x, x, **arguments)


def test_shapes_that_do_not_fit_are_refused() -> None:
    module = MultiheadDilatedAttention(16, 4, **SPEC)
    x = torch.randn(2, N, 16)
    with pytest.raises(ValueError, match=r"cross-attention use nn\.MultiheadAttention"):
        module(x, x[:, :5], x[:, :5])
    with pytest.raises(ValueError, match=r"query must be \(batch, tokens, 16\)"):
        module(x[..., :8], x, x)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim, got num_heads=3 and embed_dim=16"):
        MultiheadDilatedAttention(16, 3, **SPEC)


def test_dropout_acts_while_training_only() -> None:
    module = DilatedAttention(**SPEC, attention_dropout=0.5)
    q, k, v = torch.randn(3, 1, N, 4, 4)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), dilated_attention(q, k, v, **SPEC))


def test_activation_dropout_is_the_dropout_within_the_feed_forward_network_alone() -> None:
    layer = DilatedTransformerEncoderLayer(16, 4, **SPEC, dropout=0.25)
    assert (layer.dropout.p, layer.feed_forward.dropout.p) == (0.25, 0.25), "as in PyTorch's layer"
    layer = DilatedTransformerEncoderLayer(16, 4, **SPEC, dropout=0.0, activation_dropout=0.5)
    x = torch.randn(1, N, 16)
    assert not torch.equal(layer(x), layer(x))
    layer = DilatedTransformerEncoderLayer(16, 4, **SPEC, dropout=0.25, activation_dropout=0.0)
    assert (layer.dropout.p, layer.feed_forward.dropout.p) == (0.25, 0.0)
    model = LongNetLM(d_model=16, num_heads=4, num_layers=1, **SPEC, dropout=0.25)
    assert (model.layers[0].dropout.p, model.layers[0].feed_forward.dropout.p) == (0.25, 0.0), "as in torchscale"
    with pytest.raises(ValueError, match="activation_dropout must be a finite number of at least 0 and below 1"):
        DilatedTransformerEncoderLayer(16, 4, **SPEC, activation_dropout=1.0)


def test_profiling_names_the_call() -> None:
    module = DilatedAttention(**SPEC, enable_profiling=True)
    q, k, v = torch.randn(3, 1, N, 4, 4)
    with torch.profiler.profile() as profile:
        module(q, k, v)
    assert any(event.key.startswith("DilatedAttention(") for event in profile.key_averages())


def test_one_module_serves_two_sets_of_parameters() -> None:
    module = MultiheadDilatedAttention(16, 4, **SPEC)
    x = torch.randn(2, N, 16)
    other = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    with torch.no_grad():
        other["out_proj.bias"] += 1.0
    one = module(x, x, x)[0]
    two = torch.func.functional_call(module, other, (x, x, x))[0]
    (one.sum() * 2 + two.sum() * 3).backward()
    torch.testing.assert_close(two, one + 1.0)
    torch.testing.assert_close(other["out_proj.weight"].grad, module.out_proj.weight.grad * 1.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_compile_whole(dynamic) -> None:
    torch._dynamo.reset()  # other tests compile the same code, up to PyTorch's limit
    layer = DilatedTransformerEncoderLayer(16, 4, **SPEC, dropout=0.0)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (12, 25):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(compiled(x, is_causal=True), layer(x, is_causal=True))


def test_rotary_positions_make_attention_depend_on_distance_alone() -> None:
    module = MultiheadDilatedAttention(16, 4, [64], [1]).eval()
    rotary = RotaryPositions(4)
    x = torch.randn(1, 12, 16)
    near = module(x, x, x, is_causal=True, rotation=rotary.of(torch.arange(12)[None]))[0]
    far = module(x, x, x, is_causal=True, rotation=rotary.of(torch.arange(12)[None] + 3_000_000))[0]
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(near, module(x, x, x, is_causal=True)[0])


def test_two_processes_train_without_an_unused_parameter() -> None:
    ended_well, printed = run_ranks(2, "tests.nn.ddp_worker")
    assert ended_well, printed
