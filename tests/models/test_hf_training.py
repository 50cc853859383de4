"""LongNet as a model of transformers; Trainer, PEFT and the recipe that converts a model lower its loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.models import captured
from dilated_attention_pytorch.models.fused import can_fuse
from dilated_attention_pytorch.models.hf import (
    LongNetConfig,
    LongNetForCausalLM,
    LongNetModel,
    dilated_cache,
    fine_tune_at_growing_lengths,
    growing_lengths,
    use_dilated_attention,
)
from dilated_attention_pytorch.models.hf import cache as cache_module

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
    return LongNetForCausalLM(LongNetConfig(**(SIZES | more))).double().eval()


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


LATER = {
    "norm": "rms",
    "activation": "swiglu",
    "num_kv_heads": 2,
    "qk_norm": True,
    "logit_soft_cap": 2.0,
    "stagger": True,
}


@pytest.mark.parametrize("options", [{}, LATER | {"tie_weights": False}], ids=str)
def test_longnet_converts_both_ways_and_computes_the_same(options) -> None:
    torch.manual_seed(0)
    original = LongNetLM(**(SIZES | options)).double().eval()
    model = LongNetForCausalLM.from_longnet(original)
    x = torch.randint(256, (2, 50))
    torch.testing.assert_close(model(x).logits, original(x))
    assert (model.lm_head.weight is model.model.longnet.embedding.weight) == original.config.tie_weights
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


@pytest.mark.parametrize("options", [{}, LATER], ids=str)
def test_longnet_saves_and_loads_through_the_auto_classes(tmp_path, options) -> None:
    model, x = longnet(eos_token_id=7, **options), torch.randint(256, (2, 50))
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
    model.save_pretrained(tmp_path / "elsewhere", False)  # not the main process
    assert not (tmp_path / "elsewhere/model.safetensors").exists()
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


@pytest.mark.parametrize("options", [{}, LATER], ids=str)
def test_longnet_generates_the_same_with_and_without_its_bounded_cache(options) -> None:
    model = longnet(pad_token_id=0, **options)
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


def test_longnet_replays_the_steps_of_generate_and_keeps_their_caches(monkeypatch) -> None:
    """As on a GPU, but for the graph itself: what was recorded is run again."""
    graphs = []
    captured.forget_kept()
    monkeypatch.setattr(captured, "_record", lambda run, like: graphs.append(SimpleNamespace(replay=run)) or graphs[-1])
    monkeypatch.setattr(captured._Contents, "can_be_recorded", lambda self, tokens: True)
    monkeypatch.setattr(cache_module, "reads_masks", lambda device: False)
    model, x = longnet(pad_token_id=0), torch.randint(1, 256, (2, 19))
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    for told in ({"attention_mask": mask}, {}):
        settings = {**told, "max_new_tokens": 12, "do_sample": False}
        expected = model.generate(x, use_cache=False, **settings)
        for more in ({}, {"prefill_chunk_size": 7}):
            assert torch.equal(model.generate(x, **settings, **more), expected)
    assert len(graphs) == 1
    beams = {"max_new_tokens": 9, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(x, **beams), model.generate(x, use_cache=False, **beams))
    assert len(graphs) == 2
    out = model.generate(x, max_new_tokens=9, return_dict_in_generate=True)
    held = out.past_key_values.layers[0].held
    model.generate(x, max_new_tokens=9)  # with another cache
    assert held.lengths.tolist() == [27, 27]
    model.lm_head = torch.nn.Linear(32, 256, bias=False).double()
    settings = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(x, **settings), model.generate(x, use_cache=False, **settings))
    captured.forget_kept()


@pytest.mark.gpu
def test_longnet_generates_on_a_gpu_by_the_steps_of_a_longnet_lm() -> None:
    captured.forget_kept()
    model = longnet(d_model=128, pad_token_id=0).cuda()
    x = torch.randint(1, 256, (2, 50), device="cuda")
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False}
    expected = model.generate(x, use_cache=False, **settings)
    for _ in range(2):
        assert torch.equal(model.generate(x, **settings), expected)
    (kept,) = captured._kept[model._as_longnet()].values()
    assert captured._steps[kept[0]][1]._graph is not None
    beams = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(x, **beams), model.generate(x, use_cache=False, **beams))
    model.bfloat16()
    assert can_fuse(model._as_longnet(), model._as_longnet().new_cache(2))
    first = model.generate(x, **settings)
    assert torch.equal(model.generate(x, **settings), first)


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


def test_a_longnets_config_takes_a_length_instead_of_a_pattern() -> None:
    config = LongNetConfig(d_model=64, num_heads=4, max_length=100_000)
    assert config.dilated_attention["segment_lengths"] == [1407, 2048, 131_072]
    with pytest.raises(TypeError, match="max_length=100000 takes the place of segment_lengths"):
        LongNetConfig(**SIZES, max_length=100_000)


def test_longnet_refuses_what_it_cannot_honour() -> None:
    model, x = longnet(), torch.randint(256, (2, 19))
    with pytest.raises(ValueError, match="cache is bounded, got DynamicCache"):
        model(x, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache is for a batch of 3, the input is for 2"):
        model(x, past_key_values=dilated_cache(model, 3))
    other = LongNetForCausalLM(LongNetConfig(**{**SIZES, "segment_lengths": [8, 16]}))
    with pytest.raises(ValueError, match="cache is for 2 layers of segments"):
        model(x, past_key_values=dilated_cache(other, 2))
    with pytest.raises(ValueError, match=r"cache is for 2 layers of .*, the model has 2 layers of .* and segments"):
        longnet(stagger=True)(x, past_key_values=dilated_cache(model, 2))
    packed = torch.cat([torch.arange(9), torch.arange(10)])[None]
    with pytest.raises(ValueError, match="one document in each row"):
        model(x[:1], position_ids=packed, use_cache=True)
    with pytest.raises(ValueError, match="one document in each row"):
        model(x[:1], cu_seq_lens_q=torch.tensor([0, 9, 19]), use_cache=True)
    for given in ({}, {"input_ids": x, "inputs_embeds": torch.randn(2, 19, 32)}):
        with pytest.raises(ValueError, match="takes either input_ids or inputs_embeds"):
            model(**given)
    with pytest.raises(ValueError, match=r"tokens must hold floating-point numbers, \(batch, tokens, 32\)"):
        model(inputs_embeds=torch.randn(2, 19, 31))
    right = (torch.arange(19) < torch.tensor([[19], [12]])).long()
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=r"row 1 of attention_mask ends in padding.*pad prompts on the left"):
            model.generate(x, attention_mask=right, max_new_tokens=2, use_cache=use_cache)
    with pytest.raises(ValueError, match="leave out output_attentions"):
        model(x, output_attentions=True)
    with pytest.raises(ValueError, match="leave out cache_implementation='static'"):
        model.generate(x, cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="num_heads must divide d_model"):
        LongNetForCausalLM(LongNetConfig(d_model=33, num_heads=4))
    with pytest.raises(ValueError, match=r"holds segment_lengths, dilation_rates and.*'segments'"):
        LongNetConfig(dilated_attention={"segments": [16]})


def test_longnet_takes_embeddings_and_returns_hidden_states() -> None:
    model, x = longnet(), torch.randint(256, (2, 30))
    mask = (torch.arange(30) >= torch.tensor([[0], [7]])).long()
    inner, seen = model.model.longnet, []
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in inner.layers]
    out = model(x, attention_mask=mask, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    first, *between, last = out.hidden_states
    torch.testing.assert_close(first, inner.embedding(x) * 32**0.5)
    assert len(between) == len(inner.layers) - 1
    assert all(torch.equal(*pair) for pair in zip(between, seen))
    assert torch.equal(last, inner.norm(seen[-1]))
    assert torch.equal(model.lm_head(last), out.logits)
    assert model(x).hidden_states is None
    assert len(model.model(x, output_hidden_states=True, return_dict=False)[-1]) == 3
    embeds = model.get_input_embeddings()(x)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, out.logits)
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    said = model.generate(inputs_embeds=embeds, **settings)
    assert torch.equal(said, model.generate(x, **settings)[:, 30:])


@pytest.mark.filterwarnings("ignore:attention_mask has padding between tokens")
def test_padding_between_tokens_is_left_out_by_a_longnet() -> None:
    model, x = longnet(), torch.randint(256, (2, 40))
    mask = torch.ones_like(x)
    mask[1, 5:16] = 0
    out = model(x, attention_mask=mask, output_hidden_states=True)
    cache = dilated_cache(model, 2)
    with torch.no_grad():
        cuts = ((0, 30), (30, 31), (31, 40))
        pieces = [model(x[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in cuts]
    for b, real in enumerate(mask.bool()):
        alone = model(x[b : b + 1, real], output_hidden_states=True)
        torch.testing.assert_close(out.logits[b, real], alone.logits[0])
        torch.testing.assert_close(torch.cat(pieces, 1)[b, real], alone.logits[0])
        for got, expected in zip(out.hidden_states, alone.hidden_states):
            torch.testing.assert_close(got[b, real], expected[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_longnets_layers_are_checkpointed_as_transformers_does(use_reentrant) -> None:
    model, x = longnet(dropout=0.0).train(), torch.randint(256, (2, 30))
    runs = []
    for layer in model.model.longnet.layers:
        layer.norm1.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        runs.clear()
        model(x, labels=x).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    assert len(runs) == 2
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    torch.testing.assert_close(gradients(), expected)
    assert len(runs) == 4  # each layer a second time in backward
    assert runs.count(False) == (2 if use_reentrant else 0)  # which tells the two kinds apart
    with pytest.warns(UserWarning, match="setting use_cache=False"):
        assert model(x, use_cache=True).past_key_values is None
    model.gradient_checkpointing_disable()
    gradients()
    assert len(runs) == 2


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
    with pytest.raises(ValueError, match="a stage needs 64 tokens of text, got 10: use a longer text"):
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


@torch.no_grad()
def test_a_crop_that_one_pattern_of_a_staggered_longnet_refuses_changes_no_layer() -> None:
    model, x = longnet(stagger=True), torch.randint(3, 60, (1, 40))
    cache = dilated_cache(model, 1)
    model(x[:, :23], past_key_values=cache)
    with pytest.raises(ValueError, match="rewinding row 0 by 5 tokens, from 23 to 18, needs rows"):
        cache.crop(-5)
    assert len({int(layer.held.lengths) for layer in cache.layers}) == 1
    torch.testing.assert_close(model(x[:, 23:], past_key_values=cache).logits, model(x).logits[:, 23:])
