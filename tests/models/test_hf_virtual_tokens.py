"""PEFT's prompt and prefix tuning train through dilated attention, padded on either side."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs peft")

import peft
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.models.hf import LongNetConfig, LongNetForCausalLM, use_dilated_attention

VIRTUAL = 5
DENSE = ([64], [1])  # one segment over everything


def tuned(kind: str, pattern: tuple[list[int], list[int]] | None, **config):
    """A tiny Llama with virtual tokens: its own attention without a `pattern`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=8, num_key_value_heads=2, pad_token_id=0, eos_token_id=None, **config
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double()
    if pattern is not None:
        use_dilated_attention(model, *pattern)
    kinds = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    model = peft.get_peft_model(model, kinds[kind](task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)).double()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_()
    return model


def batch(side: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (3, 20), generator=generator)
    padding = torch.tensor([[0], [7], [13]])
    place = torch.arange(20) if side == "left" else torch.arange(20).flip(0)
    mask = (place >= padding).long()
    # What predicts a row's first token is padding, whose rows are 0 here and something else in dense attention.
    foreseen = mask.bool() & ~((mask.cumsum(1) == 1) & (padding > 0))
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(~foreseen, -100)}


def trained(model, given: dict[str, torch.Tensor], steps: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of the virtual tokens, of a few steps."""
    found, optimizer = [], torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.prompt_encoder.parameters())]
        optimizer.step()
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_train_as_with_dense_attention(kind, side) -> None:
    expected, got = trained(tuned(kind, None), batch(side)), trained(tuned(kind, DENSE), batch(side))
    assert all(bool(x.abs().max() > 1e-4) for x in expected)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_left_padded_prompts_after_virtual_tokens_generate_as_with_dense_attention(kind) -> None:
    given = {name: x for name, x in batch("left").items() if name != "labels"}
    said = [tuned(kind, pattern).generate(**given, max_new_tokens=6, do_sample=False) for pattern in (None, DENSE)]
    assert said[0].shape[1] >= 26
    assert torch.equal(*said)


def test_prefix_tuning_draws_attention_dropout() -> None:
    model = tuned("prefix", DENSE, attention_dropout=0.5)
    given = batch("left")
    first, second = trained(model.train(), given, 1), trained(model, given, 1)
    assert not torch.equal(first[1], second[1])


def test_a_longnet_trains_a_prompt_with_left_padding() -> None:
    """The padded rows get the losses and gradients of each row alone; `generate` goes on from its bounded cache."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": 2, "segment_lengths": [4, 12], "dilation_rates": [1, 3]}
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    model = peft.get_peft_model(LongNetForCausalLM(LongNetConfig(**sizes)), config).double().eval()
    given, (weight,) = batch("left"), model.prompt_encoder.parameters()
    loss = model(**given).loss
    gradient = torch.autograd.grad(loss, weight)[0]
    alone, counts = [], (given["labels"] != -100).sum(1)
    for b, padded in enumerate((0, 7, 13)):
        alone.append(model(**{name: x[b : b + 1, padded:] for name, x in given.items()}).loss * counts[b])
    expected = sum(alone) / counts.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)  # losses are taken in float32
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight)[0], rtol=1e-5, atol=1e-7)
    del given["labels"]
    said = model.generate(**given, max_new_tokens=6, do_sample=False)
    for b, padded in enumerate((0, 7, 13)):
        one = {name: x[b : b + 1, padded:] for name, x in given.items()}
        assert torch.equal(said[b, padded:], model.generate(**one, max_new_tokens=6, do_sample=False)[0])
