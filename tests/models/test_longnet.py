from __future__ import annotations

import dataclasses

import pytest
import torch

from dilated_attention_pytorch import LongNet, LongNetLM, ModelConfig
from dilated_attention_pytorch.models.config import ModelFields
from dilated_attention_pytorch.nn.positions import rotate

SIZES = {
    "d_model": 16,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "segment_lengths": (4, 8),
    "dilation_rates": (1, 2),
}


# What later models do instead of MAGNETO, each alone and all together.
LATER = {
    "norm": "rms", "activation": "swiglu", "num_kv_heads": 2, "qk_norm": True, "tie_weights": False,
    "logit_soft_cap": 2.0,
}  # fmt: skip
OPTIONS = [{}, *({name: value} for name, value in LATER.items()), LATER]


def plain_logits(model: LongNetLM, tokens: torch.Tensor, segments: tuple[int, ...] = (16,)) -> torch.Tensor:
    """The model in plain PyTorch, for one branch of rate 1, whose segment lengths layers take in turn."""
    c, state = model.config, model.state_dict()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if f"{name}.bias" not in state:
            return x / (x.square().mean(-1, keepdim=True) + c.layer_norm_eps).sqrt() * state[f"{name}.weight"]
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + c.layer_norm_eps).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    x = state["embedding.weight"][tokens] * c.d_model**0.5
    for i in range(c.num_layers):
        layer = f"layers.{i}"
        rows, attention = norm(x, f"{layer}.norm1"), f"{layer}.self_attn"
        q, k, v = (linear(rows, f"{attention}.{one}_proj").unflatten(-1, (-1, c.head_dim)) for one in "qkv")
        if c.qk_norm:
            q, k = norm(q, f"{attention}.q_norm"), norm(k, f"{attention}.k_norm")
        q, k = rotate(q, k, model.positions(1, tokens.shape[1]))
        k, v = (one.repeat_interleave(q.shape[2] // k.shape[2], 2) for one in (k, v))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / c.head_dim**0.5
        row, w = torch.arange(tokens.shape[1]), segments[i % len(segments)]
        scores = scores.masked_fill((row > row[:, None]) | (row // w != row[:, None] // w), -torch.inf)
        out = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(-2)
        x = x + linear(norm(out, f"{attention}.norm"), f"{attention}.out_proj")
        rows, network = norm(x, f"{layer}.norm2"), f"{layer}.feed_forward"
        hidden = linear(rows, f"{network}.linear1")
        gate = linear(rows, f"{network}.gate") if c.activation == "swiglu" else None
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5)) if gate is None else gate * gate.sigmoid() * hidden
        x = x + linear(norm(hidden, f"{network}.norm"), f"{network}.linear2")
    logits = norm(x, "norm") @ state["embedding.weight" if c.tie_weights else "head.weight"].T
    return logits if c.logit_soft_cap is None else (logits / c.logit_soft_cap).tanh() * c.logit_soft_cap


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_model_computes_what_its_options_say(options) -> None:
    torch.manual_seed(0)
    model = LongNetLM(**(SIZES | {"segment_lengths": (16,), "dilation_rates": (1,)} | options)).double()
    for x in model.parameters():  # norms and biases that are not ones and zeros
        torch.nn.init.normal_(x, mean=x.detach().mean().item(), std=0.3)
    tokens = torch.randint(256, (2, 13))
    torch.testing.assert_close(model(tokens), plain_logits(model, tokens), rtol=1e-6, atol=1e-6)  # angles are float32


def test_a_staggered_model_has_longer_segments_in_every_other_layer() -> None:
    model = LongNetLM(**(SIZES | {"segment_lengths": (4,), "dilation_rates": (1,), "num_layers": 3}), stagger=True)
    tokens = torch.randint(256, (2, 13))
    torch.testing.assert_close(model.double()(tokens), plain_logits(model, tokens, (4, 5)), rtol=1e-6, atol=1e-6)
    assert [held.spec for held in model.new_cache(1)] == [layer.self_attn.attention.spec for layer in model.layers]


def test_a_gated_network_has_about_the_parameters_of_a_plain_one() -> None:
    assert [ModelConfig(d_model=d, num_heads=8, activation="swiglu").dim_feedforward for d in (768, 4096)] == [
        2048,
        11008,
    ]
    assert ModelConfig(d_model=768, activation="swiglu", dim_feedforward=96).dim_feedforward == 96


def test_the_keywords_of_a_model_are_the_fields_of_its_config() -> None:
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert ModelFields.__annotations__.keys() == fields | {"max_length"}


def test_the_defaults_are_the_papers() -> None:
    config = ModelConfig()
    assert (config.d_model, config.num_heads, config.num_layers) == (768, 12, 12)
    assert config.segment_lengths == (2048, 4096, 8192, 16384, 32768)
    assert config.dilation_rates == (1, 2, 4, 6, 12)


def test_weights_are_tied_unless_told_otherwise() -> None:
    tied, apart = LongNetLM(**SIZES), LongNetLM(**SIZES, tie_weights=False)
    assert tied.head.weight is tied.embedding.weight
    assert apart.head.weight is not apart.embedding.weight


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "activation": "swiglu", "qk_norm": True}], ids=str)
@pytest.mark.parametrize("build", [LongNetLM, LongNet])
def test_checkpointing_changes_memory_not_gradients(build, options) -> None:
    torch.manual_seed(0)
    model = build(**SIZES, **options, dropout=0.3, attention_dropout=0.3)
    x = torch.randn(2, 10, 16)
    tokens = torch.randint(256, (2, 10))
    grads = []
    saved = []
    for enable in (False, True):
        model.gradient_checkpointing_enable(enable)
        torch.manual_seed(1)
        model.zero_grad()
        saved.append(0)

        def count(tensor):
            saved[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = (model(tokens) if build is LongNetLM else model(x, x)).square().sum()
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads)
    assert saved[1] < saved[0] / 2


@pytest.mark.parametrize("options", [{}, LATER], ids=str)
def test_saved_models_load_equal(tmp_path, options) -> None:
    model = LongNetLM(**SIZES, **options)
    model.save_pretrained(tmp_path / "model")
    loaded = LongNetLM.from_pretrained(tmp_path / "model")
    tokens = torch.randint(256, (2, 10))
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.config == model.config
    assert (loaded.head.weight is loaded.embedding.weight) == model.config.tie_weights
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_broken_weights_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no model config"):
        LongNetLM.from_pretrained(tmp_path)
    LongNetLM(**SIZES).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="broken or truncated"):
        LongNetLM.from_pretrained(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "config.json").write_text(ModelConfig(**(SIZES | {"d_model": 32})).to_json())
    with pytest.raises(ValueError, match=r"does not fit the model: embedding\.weight is"):
        LongNetLM.from_pretrained(tmp_path)
    for content in ("[]", '{"d_model": "16"}', "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="is not a model config"):
            LongNetLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"width": 3}')
    with pytest.raises(ValueError, match=r"keys that ModelConfig does not know, \['width'\]"):
        LongNetLM.from_pretrained(tmp_path)


def test_a_failed_save_keeps_the_file_before_it(tmp_path, monkeypatch) -> None:
    import safetensors.torch

    model = LongNetLM(**SIZES)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full_disk(tensors, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        LongNetLM(**SIZES).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_padding_does_not_change_the_tokens_beside_it() -> None:
    model = LongNetLM(**SIZES, positions="xpos").eval()
    tokens = torch.randint(256, (1, 9))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), tokens], 1)
    both = torch.cat([padded, torch.randint(256, (1, 12))])
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, :3] = True
    torch.testing.assert_close(model(both, key_padding_mask=mask)[:1, 3:], model(tokens))
    packed = torch.cat([tokens, both[1:]], 1)
    together = model(packed, cu_seqlens=torch.tensor([0, 9, 21]))
    torch.testing.assert_close(together[:, 9:], model(both[1:]))


def test_an_encoder_alone_takes_no_target() -> None:
    x = torch.randn(1, 9, 16)
    encoder = LongNet(**(SIZES | {"num_decoder_layers": 0}))
    assert encoder(x).shape == x.shape
    for more in ({"tgt": x}, {"is_causal": True}, {"tgt_key_padding_mask": torch.zeros(1, 9, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="encoder alone"):
            encoder(x, **more)
    with pytest.raises(ValueError, match=r"tgt must .*\(batch, tokens, 16\), got .*\(1, 9, 8\)"):
        LongNet(**SIZES)(x, x[..., :8])
    with pytest.raises(ValueError, match="one batch size, got 1 and 2"):
        LongNet(**SIZES)(x, x.expand(2, -1, -1))
    with pytest.raises(ValueError, match="needs tgt"):
        LongNet(**SIZES)(x)
    with pytest.raises(ValueError, match=r"logit_soft_cap=5\.0 caps logits, and a LongNet returns hidden states"):
        LongNet(**SIZES, logit_soft_cap=5.0)
    with pytest.raises(ValueError, match="use positions='rotary'"):
        LongNet(**SIZES, positions="xpos")


def test_generation_extends_the_prompt_and_repeats_with_the_seed() -> None:
    model = LongNetLM(**SIZES)
    prompt = torch.randint(256, (2, 5))
    outs = [model.generate(prompt, 6, top_k=5, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*outs)
    assert torch.equal(outs[0][:, :5], prompt)
    greedy = model.generate(prompt, 1, temperature=0)
    assert torch.equal(greedy[:, -1], model.eval()(prompt)[:, -1].argmax(-1))
    with pytest.raises(ValueError, match="at least 0"):
        model.generate(prompt, -1)


def test_generation_leaves_every_module_in_its_mode() -> None:
    model = LongNetLM(**SIZES).train()
    model.layers[0].eval()
    model.generate(torch.zeros(1, 3, dtype=torch.int64), 1)
    assert (model.training, model.layers[0].training, model.layers[1].training) == (True, False, True)


def test_a_model_loads_in_the_dtype_it_was_saved_in(tmp_path) -> None:
    LongNetLM(**SIZES).bfloat16().save_pretrained(tmp_path)
    assert LongNetLM.from_pretrained(tmp_path).embedding.weight.dtype == torch.bfloat16


def test_a_config_or_its_fields_but_not_both() -> None:
    with pytest.raises(TypeError, match=r"not both: got a config and \['d_model'\]"):
        LongNetLM(ModelConfig(**SIZES), d_model=8)
    with pytest.raises(ValueError, match="num_heads must divide d_model"):
        ModelConfig(d_model=10, num_heads=3)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads, got num_kv_heads=5 and num_heads=12"):
        ModelConfig(num_kv_heads=5)
    for wrong in ({"norm": "batch"}, {"activation": "tanh"}, {"logit_soft_cap": 0.0}, {"logit_soft_cap": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            ModelConfig(**wrong)
    with pytest.raises(ValueError, match="positions must be one of rotary, xpos, none"):
        ModelConfig(positions="learned")
    with pytest.raises(ValueError, match="whole numbers"):
        LongNetLM(**SIZES)(torch.randn(2, 9))


def test_an_encoder_takes_lengths_as_the_language_model_does() -> None:
    torch.manual_seed(0)
    model = LongNet(**SIZES | {"num_decoder_layers": 0})
    rows, lengths = torch.randn(2, 12, 16), torch.tensor([9, 12])
    padded, mask = model(rows, seqlens=lengths), torch.arange(12) >= lengths[:, None]
    torch.testing.assert_close(padded[~mask], model(rows, src_key_padding_mask=mask)[~mask])
    packed = model(rows[~mask][None], cu_seqlens=torch.tensor([0, 9, 21]))
    torch.testing.assert_close(packed[0], padded[~mask])

    pair = LongNet(**SIZES)
    torch.testing.assert_close(pair(rows, rows, seqlens=lengths), pair(rows, rows, src_key_padding_mask=mask))
    with pytest.raises(ValueError, match="cu_seqlens are for an encoder alone"):
        pair(rows, rows, cu_seqlens=torch.tensor([0, 12]))
