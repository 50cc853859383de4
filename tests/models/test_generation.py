"""Generation: the same tokens with and without a cache, for whole and padded prompts, streamed or not."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models import generation
from dilated_attention_pytorch.models.generation import Sampling

LATER = {"norm": "rms", "activation": "swiglu", "qk_norm": True, "tie_weights": False, "logit_soft_cap": 2.0}
SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, "segment_lengths": (4, 8), "dilation_rates": (1, 2)}


def model_of(**sizes) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(**(SIZES | sizes)).double().eval()


@pytest.mark.parametrize("later", [{}, LATER], ids=["magneto", "later"])
@pytest.mark.parametrize("positions", ["rotary", "xpos", "none"])
@pytest.mark.parametrize("layout", ["interleaved", "blocked", "grouped"])
def test_a_model_gives_the_same_logits_from_its_cache(positions, layout, later) -> None:
    model = model_of(positions=positions, head_layout=layout, num_kv_heads=2, **later)
    tokens = torch.randint(256, (2, 30))
    padding = torch.tensor([0, 5])
    cache = model.new_cache(2, padding=padding)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split([11, 1, 1, 7, 10], dim=1)]
    mask = torch.arange(30) < padding[:, None]
    expected = model(tokens, key_padding_mask=mask)
    torch.testing.assert_close(torch.cat(pieces, dim=1)[~mask], expected[~mask], rtol=1e-9, atol=1e-9)
    assert cache[0].lengths.tolist() == [30, 25]


SAMPLING = [{"temperature": 0}, {"temperature": 0.7, "top_k": 20, "seed": 1}, {"top_p": 0.8, "seed": 2}]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_is_the_same_with_and_without_a_cache(sampling, padded) -> None:
    model = model_of(**(LATER if padded else {}))
    prompt = torch.randint(256, (2, 7))
    mask = (torch.arange(7) < torch.tensor([0, 3])[:, None]) if padded else None
    kept = model.generate(prompt, 20, key_padding_mask=mask, **sampling)
    assert kept.shape == (2, 27)
    for other in ({"use_cache": False}, {"chunk": 3}, {}):
        assert torch.equal(model.generate(prompt, 20, key_padding_mask=mask, **sampling, **other), kept)
    if padded and sampling == {"temperature": 0}:
        alone = model.generate(prompt[1:, 3:], 20, **sampling)
        assert torch.equal(alone[0], kept[1, 3:])


def test_tokens_are_streamed_as_they_come() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    seen = []
    out = model.generate(prompt, 5, seed=3, on_tokens=seen.append)
    assert torch.equal(torch.stack(seen, dim=1), out[:, 7:])
    streamed = model.stream(prompt, 5, seed=3)
    assert torch.equal(next(streamed), out[:, 7])
    assert model.train().training  # what was not asked for yet has left no mode behind
    assert torch.equal(torch.stack(list(streamed), dim=1), out[:, 8:])
    assert model.training


def test_a_row_that_ended_stays_ended_and_all_of_them_end_the_run() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    free = model.generate(prompt, 12, temperature=0)
    eos = int(free[0, 9])
    out = model.generate(prompt, 12, temperature=0, eos=eos)
    first = (free[0, 7:] == eos).int().argmax() + 7
    assert torch.equal(out[0, : first + 1], free[0, : first + 1])
    assert (out[0, first:] == eos).all()
    alone = model.generate(prompt[:1], 12, temperature=0, eos=eos)
    assert alone.shape[1] == first + 1


def test_nothing_is_generated_where_nothing_is_asked_for() -> None:
    prompt = torch.randint(256, (1, 7))
    assert torch.equal(model_of().generate(prompt, 0), prompt)


def test_draws_keep_to_the_likeliest_tokens() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(500, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(Sampling(top_k=2).choose(logits, generator).tolist()) == {0, 1}
    assert set(Sampling(top_p=0.81).choose(logits, generator).tolist()) == {0, 1, 2}
    assert set(Sampling(top_p=0.01).choose(logits, generator).tolist()) == {0}
    assert set(Sampling(top_k=3, top_p=0.6).choose(logits, generator).tolist()) == {0, 1}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_whose_logits_are_not_finite_is_said_to_be_broken(value, sampling) -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    model.norm.bias.data[0] = value
    with pytest.raises(FloatingPointError, match="not finite, at new token 1 of row 0: its weights are broken"):
        model.generate(prompt, 3, **sampling)


def test_broken_logits_are_looked_at_without_waiting_for_every_token(monkeypatch) -> None:
    """As on a GPU, where a look waits for it: draws go on for a while, and the first broken token is named."""
    looks = []
    real = generation._check_finite
    monkeypatch.setattr(generation, "_check_finite", lambda *given: looks.append(given[1]) or real(*given))

    def steps(broken: int):
        for number in range(200):
            yield torch.full((2, 5), torch.nan if number >= broken else 1.0)

    class Elsewhere:
        type = "cuda"

    monkeypatch.setattr(torch.Tensor, "device", Elsewhere)
    model, sampling = torch.nn.Linear(1, 1), Sampling()
    assert len(list(generation.generated_tokens(model, steps(200), sampling, None, 100, None))) == 100
    assert looks == [0, 64, 99]
    with pytest.raises(FloatingPointError, match="at new token 71 of row 0"):
        list(generation.generated_tokens(model, steps(70), sampling, None, 100, None))


def test_what_cannot_be_generated_is_refused() -> None:
    model, prompt = model_of(), torch.randint(256, (2, 7))
    with pytest.raises(ValueError, match="top_p must be a finite number above 0 and at most 1"):
        model.generate(prompt, 1, top_p=0.0)
    with pytest.raises(ValueError, match="top_k must be a whole number of at least 1"):
        model.generate(prompt, 1, top_k=0)
    with pytest.raises(ValueError, match="pass one of them"):
        model.generate(prompt, 1, seed=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(prompt[:, :0], 1)
    with pytest.raises(ValueError, match="row 1 of the prompt is padded on the right"):
        model.generate(prompt, 1, key_padding_mask=torch.arange(7) >= torch.tensor([7, 4])[:, None])
    with pytest.raises(ValueError, match="leave it out with use_cache=False"):
        model.generate(prompt, 1, chunk=2, use_cache=False)
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, got 0"):
        model.generate(prompt, 1, chunk=0)
    with pytest.raises(ValueError, match="2 layers, the cache 1"):
        model(prompt, cache=model.new_cache(2)[:1])
    with pytest.raises(ValueError, match="for a batch of 3"):
        model(prompt, cache=model.new_cache(3))
    with torch.no_grad(), pytest.raises(ValueError, match="no mask or lengths"):
        model(prompt, cache=model.new_cache(2), key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))


def test_layers_of_a_cache_that_are_out_of_step_are_refused() -> None:
    model = model_of()
    prompt = torch.randint(256, (1, 20))
    cache = model.new_cache(1, rewindable=4)
    with torch.no_grad():
        model(prompt, cache=cache)
        cache[0].rewind(2)
        with pytest.raises(ValueError, match=r"different numbers of tokens, \[\(18,\), \(20,\)\]"):
            model(prompt[:, 18:], cache=cache)
        cache[1].rewind(2)
        torch.testing.assert_close(model(prompt[:, 18:], cache=cache), model(prompt)[:, 18:])


@pytest.mark.parametrize(
    ("device", "message"), [("foo", "no device 'foo' here"), ("cuda:99", "no device 'cuda:99' here")]
)
def test_a_device_that_is_not_there_is_told(tmp_path, capsys, device, message) -> None:
    model_of().float().save_pretrained(tmp_path / "run")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--device", device]) == 1
    assert message in capsys.readouterr().err


def test_a_run_without_a_checkpoint_has_nothing_to_generate_with(tmp_path, capsys) -> None:
    for name in ("config.json", "corpus.json"):
        (tmp_path / name).write_text("{}")
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "has no complete checkpoint yet" in capsys.readouterr().err


def test_the_command_continues_a_prompt(tmp_path, capsys) -> None:
    model_of().float().save_pretrained(tmp_path / "run")
    texts = []
    for _ in range(2):
        flags = ["--prompt", "def ", "--max-new-tokens", "9", "--seed", "5", "--top-k", "3", "--device", "cpu"]
        assert main(["generate", str(tmp_path / "run"), *flags]) == 0
        text, figures = capsys.readouterr()
        texts.append(text)
        assert "9 tokens: 4 tokens of prompt" in figures
        assert "tokens/s" in figures
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert main(["generate", str(tmp_path / "nothing"), "--prompt", "a"]) == 1
    assert "no model config" in capsys.readouterr().err
    model_of(vocab_size=300).float().save_pretrained(tmp_path / "words")
    assert main(["generate", str(tmp_path / "words"), "--prompt", "a", "--device", "cpu"]) == 1
    assert "has 300 tokens" in capsys.readouterr().err


def test_generation_under_autocast_keeps_keys_in_its_dtype() -> None:
    model, prompt = model_of().float(), torch.randint(256, (1, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.new_cache(1)[0].keys.dtype == torch.bfloat16
        assert model.generate(prompt, 3, temperature=0).shape == (1, 10)
