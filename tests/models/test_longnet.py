from __future__ import annotations

import dataclasses

import pytest
import torch

from dilated_attention_pytorch import LongNet, LongNetLM, ModelConfig
from dilated_attention_pytorch.models.config import ModelFields

SIZES = {
    "d_model": 16,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "segment_lengths": (4, 8),
    "dilation_rates": (1, 2),
}


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


@pytest.mark.parametrize("build", [LongNetLM, LongNet])
def test_checkpointing_changes_memory_not_gradients(build) -> None:
    torch.manual_seed(0)
    model = build(**SIZES, dropout=0.3, attention_dropout=0.3)
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


@pytest.mark.parametrize("tie_weights", [True, False])
def test_saved_models_load_equal(tmp_path, tie_weights) -> None:
    model = LongNetLM(**SIZES, tie_weights=tie_weights)
    model.save_pretrained(tmp_path / "model")
    loaded = LongNetLM.from_pretrained(tmp_path / "model")
    tokens = torch.randint(256, (2, 10))
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.config == model.config
    assert (loaded.head.weight is loaded.embedding.weight) == tie_weights
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
    with pytest.raises(ValueError, match=r"unknown keys \['width'\]"):
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
    with pytest.raises(ValueError, match="positions must be one of rotary, xpos, none"):
        ModelConfig(positions="learned")
    with pytest.raises(ValueError, match="whole numbers"):
        LongNetLM(**SIZES)(torch.randn(2, 9))
