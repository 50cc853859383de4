"""LongNet as a model of transformers; Trainer, PEFT and the recipe that converts a model lower its loss."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.models.hf import (
    LongNetConfig,
    LongNetForCausalLM,
    LongNetModel,
    dilated_cache,
    fine_tune_at_growing_lengths,
    growing_lengths,
    use_dilated_attention,
)

SIZES = {
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 2,
    "segment_lengths": [8, 24],
    "dilation_rates": [1, 3],
}
# Text that a tiny model learns within seconds.
TEXT = torch.tensor(list(b"to be or not to be, that is the question. " * 40))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def longnet(**more) -> LongNetForCausalLM:
    torch.manual_seed(0)
    return LongNetForCausalLM(LongNetConfig(**SIZES, **more)).double().eval()


def arguments(folder, steps: int = 15, **more):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **more,
    )


def train(model, folder, length: int = 42, **more) -> list[float]:
    """The losses of a run of `Trainer`."""
    settings = arguments(folder, **more)
    from transformers import Trainer

    data = [{"input_ids": block, "labels": block} for block in TEXT.split(length)]
    trainer = Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("tie_weights", [True, False])
def test_longnet_converts_both_ways_and_computes_the_same(tie_weights) -> None:
    torch.manual_seed(0)
    original = LongNetLM(**SIZES, tie_weights=tie_weights).double().eval()
    model = LongNetForCausalLM.from_longnet(original)
    x = torch.randint(256, (2, 50))
    torch.testing.assert_close(model(x).logits, original(x))
    assert (model.lm_head.weight is model.model.longnet.embedding.weight) == tie_weights
    back = model.to_longnet()
    assert back.config == original.config
    for name, tensor in original.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    mask = torch.ones_like(x)
    mask[1, :9] = 0
    expected = original(x, key_padding_mask=mask == 0)
    torch.testing.assert_close(model(x, attention_mask=mask).logits, expected)
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    expected = original(x[:1], cu_seqlens=torch.tensor([0, 20, 50]))
    torch.testing.assert_close(model(x[:1], position_ids=positions).logits, expected)
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    torch.testing.assert_close(model(x[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits, expected)


def test_longnet_saves_and_loads_through_the_auto_classes(tmp_path) -> None:
    model, x = longnet(eos_token_id=7), torch.randint(256, (2, 50))
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LongNetConfig)
    assert config.dilated_attention == {
        "segment_lengths": [8, 24],
        "dilation_rates": [1, 3],
        "head_layout": "interleaved",
    }
    assert config.eos_token_id == 7
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, LongNetForCausalLM)
    torch.testing.assert_close(loaded(x).logits, model(x).logits)
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(base, LongNetModel)
    torch.testing.assert_close(base(x).last_hidden_state, model.model(x).last_hidden_state)
    LongNetModel(LongNetConfig(**{**SIZES, "num_layers": 1})).save_pretrained(tmp_path / "smaller")
    with pytest.raises(ValueError, match=r"the weights do not fit LongNetModel: .*layers\.1"):
        LongNetModel.from_pretrained(tmp_path / "smaller", num_layers=2)
    with pytest.raises(ValueError, match=r"the weights do not fit LongNetForCausalLM: .*unexpected_keys.*layers\.1"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_layers=1)


def test_the_base_model_loads_from_a_folder_with_an_untied_head(tmp_path) -> None:
    model, x = longnet(tie_word_embeddings=False), torch.randint(256, (2, 50))
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(base(x).last_hidden_state, model.model(x).last_hidden_state)


def test_longnet_generates_the_same_with_and_without_its_bounded_cache() -> None:
    model = longnet(pad_token_id=0)
    x = torch.randint(1, 256, (2, 19))
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(x, use_cache=False, **settings)
    assert torch.equal(model.generate(x, **settings), expected)
    cache = dilated_cache(model, 2)
    assert torch.equal(model.generate(x, past_key_values=cache, **settings), expected)
    assert cache.get_seq_length() == 19 + 11
    mine = model.to_longnet().generate(x, 12, temperature=0, key_padding_mask=mask == 0)
    assert torch.equal(mine, expected)
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(x, **beams), model.generate(x, use_cache=False, **beams))
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        sampled = {**settings, "do_sample": True, "num_return_sequences": 2}
        drawn.append(model.generate(x, use_cache=use_cache, **sampled))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
def test_longnet_generates_the_same_in_chunks_and_from_drafts(schedule) -> None:
    """Far beyond the segments, so that a cache that cannot go back would have overwritten what is asked for."""
    model = longnet(eos_token_id=255)  # without one, early releases of transformers cannot look up prompts
    other = LongNetForCausalLM(model.config).double().eval()
    x = torch.randint(1, 256, (1, 9)).repeat(1, 4)
    settings = {"max_new_tokens": 70, "do_sample": False}
    expected = model.generate(x, **settings, use_cache=False)
    assert expected.shape[1] == 36 + 70
    assert torch.equal(model.generate(x, prefill_chunk_size=7, **settings), expected)
    # Early releases of transformers say more than asked for where a draft goes on.
    assert torch.equal(model.generate(x, prompt_lookup_num_tokens=11, **settings)[:, : 36 + 70], expected)
    for assistant in (model, other):
        assistant.generation_config.num_assistant_tokens = 30
        assistant.generation_config.num_assistant_tokens_schedule = schedule
        assert torch.equal(model.generate(x, assistant_model=assistant, **settings), expected)


def test_longnet_refuses_what_it_cannot_honour() -> None:
    model, x = longnet(), torch.randint(256, (2, 19))
    with pytest.raises(ValueError, match="cache is bounded, got DynamicCache"):
        model(x, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache is for a batch of 3, the input is for 2"):
        model(x, past_key_values=dilated_cache(model, 3))
    other = LongNetForCausalLM(LongNetConfig(**{**SIZES, "segment_lengths": [8, 16]}))
    with pytest.raises(ValueError, match="cache is for 2 layers of DilatedSpec"):
        model(x, past_key_values=dilated_cache(other, 2))
    packed = torch.cat([torch.arange(9), torch.arange(10)])[None]
    with pytest.raises(ValueError, match="one document in each row"):
        model(x[:1], position_ids=packed, use_cache=True)
    with pytest.raises(ValueError, match="one document in each row"):
        model(x[:1], cu_seq_lens_q=torch.tensor([0, 9, 19]), use_cache=True)
    with pytest.raises(ValueError, match="takes input_ids, not inputs_embeds"):
        model(inputs_embeds=torch.randn(1, 5, 32))
    with pytest.raises(ValueError, match="leave out output_attentions"):
        model(x, output_attentions=True)
    with pytest.raises(ValueError, match="leave out cache_implementation='static'"):
        model.generate(x, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="num_heads must divide d_model"):
        LongNetForCausalLM(LongNetConfig(d_model=33, num_heads=4))
    with pytest.raises(ValueError, match=r"holds segment_lengths, dilation_rates and.*'segments'"):
        LongNetConfig(dilated_attention={"segments": [16]})


@pytest.mark.parametrize("family", ["llama", "longnet"])
def test_a_trainer_run_lowers_the_loss(family, tmp_path) -> None:
    model = use_dilated_attention(llama(), [8, 24], [1, 3]) if family == "llama" else longnet().float()
    losses = train(model, tmp_path, gradient_checkpointing=True)
    assert losses[-1] < 0.7 * losses[0]


def test_a_peft_run_lowers_the_loss_and_trains_the_adapters_alone(tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    adapted = peft.get_peft_model(
        llama(), peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "lm_head", "up_proj"])
    )
    use_dilated_attention(adapted, [8, 24], [1, 3])
    before = {name: p.clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    losses = train(adapted, tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters() if name in before)


def test_a_dense_model_converts_at_growing_lengths(tmp_path) -> None:
    model = llama()
    dense = train(model, tmp_path)
    use_dilated_attention(model, [16, 84], [1, 4])
    stages = list(growing_lengths([42, 84], [16, 84], [1, 4]))
    assert [stage.spec.segment_lengths for stage in stages] == [(16, 42), (16, 84)]
    losses = fine_tune_at_growing_lengths(model, TEXT, stages, arguments(tmp_path, steps=10))
    assert losses[-1] < dense[-1]
    assert model.config.dilated_attention["segment_lengths"] == [16, 84]
    assert model.config.max_position_embeddings == 84
    cache = dilated_cache(model, 1)
    prompt = TEXT[None, :20]
    said = model.generate(prompt, max_new_tokens=6, do_sample=False, past_key_values=cache)
    assert torch.equal(said, model.generate(prompt, max_new_tokens=6, do_sample=False))


def test_stages_and_texts_that_do_not_fit_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="lengths must rise from at least 1, got"):
        list(growing_lengths([64, 32], [16, 64], [1, 4]))
    model = use_dilated_attention(llama(), [16], [1])
    stages = list(growing_lengths([64], [16, 64], [1, 4]))
    with pytest.raises(ValueError, match="a stage of 64 tokens needs a text as long, got 10 tokens"):
        fine_tune_at_growing_lengths(model, TEXT[:10], stages, arguments(tmp_path))


def test_a_longnet_refuses_keywords_that_it_would_ignore() -> None:
    model, x = longnet(), torch.randint(3, 60, (1, 20))
    for one in (model, model.model):
        with pytest.raises(TypeError, match="does not take head_mask, token_type_ids: leave it out"):
            one(x, head_mask=torch.ones(1), token_type_ids=torch.zeros_like(x), cache_position=torch.arange(20))
    assert torch.equal(model(x, head_mask=None).logits, model(x).logits)


def test_a_compiled_longnet_refuses_packed_documents_beside_a_cache() -> None:
    model, x = longnet(), torch.randint(3, 60, (1, 20))
    compiled = torch.compile(model, backend="eager")
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad(), pytest.raises(ValueError, match="position_ids begin again within a row"):
        compiled(x, position_ids=packed, use_cache=True)


@torch.no_grad()
def test_a_longnets_cache_that_missed_tokens_is_refused_until_it_is_reset() -> None:
    model, x = longnet(), torch.randint(3, 60, (1, 20))
    cache, right = dilated_cache(model, 1), (torch.arange(20) < 15).long()[None]
    with pytest.raises(ValueError, match="pad on the left"):
        model(x, attention_mask=right, past_key_values=cache)
    with pytest.raises(ValueError, match="the 20 tokens that this cache counts never reached it"):
        model(x, past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(x, past_key_values=cache).logits, model(x).logits)
