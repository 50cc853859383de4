"""Models of transformers with dilated attention equal our reference, with padding, packing and every cache."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

import importlib
import itertools

import transformers
import transformers.masking_utils as masking
from torch._dynamo.utils import counters
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dilated_attention_pytorch.models.hf
from dilated_attention_pytorch.core import DilatedSpec
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.models.hf import dilated_cache, register, use_dilated_attention
from dilated_attention_pytorch.models.hf.attention import dilated_attention_forward
from dilated_attention_pytorch.models.hf.masks import dilated_mask, read_mask
from dilated_attention_pytorch.models.hf.pattern import read_pattern

register()
SEGMENTS, RATES = [8, 24], [1, 3]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "qwen": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, {"cls_token_id": 1, "sep_token_id": 2}),
}


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """Tests compile the same functions: after a few of them, they would run uncompiled."""
    torch.compiler.reset()
    counters.clear()


def build(family: str, dtype: torch.dtype = torch.float64, head_layout: str = "interleaved", **sizes):
    """A tiny random model with dilated attention."""
    torch.manual_seed(0)
    model_class, config_class, more = FAMILIES[family]
    config = config_class(**{**SIZES, **more, **sizes})
    use_dilated_attention(config, SEGMENTS, RATES, head_layout, replace_sliding_window=True)
    return model_class(config).to(dtype).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape)


@pytest.mark.parametrize(
    ("family", "head_layout"),
    [("llama", "interleaved"), ("llama", "grouped"), ("qwen", "blocked"), ("modernbert", "interleaved")],
)
def test_forward_and_gradients_equal_the_reference_on_the_models_own_q_k_v(family, head_layout) -> None:
    model, x = build(family, head_layout=head_layout), tokens(2, 50)
    calls = []

    def by_reference(module, query, key, value, attention_mask, scaling=None, **asked):
        calls.append(query.shape)
        out = dilated_attention(
            *(t.transpose(1, 2) for t in (query, key, value)),
            SEGMENTS,
            RATES,
            is_causal=module.is_causal,
            scale=scaling,
            head_layout=head_layout,
            backend="reference",
        )
        return out, None

    def run():
        model.zero_grad()
        logits = model(x).logits
        logits.square().sum().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    logits, gradients = run()
    ALL_ATTENTION_FUNCTIONS["dilated"] = by_reference
    try:
        expected, expected_gradients = run()
    finally:
        del ALL_ATTENTION_FUNCTIONS["dilated"]
    assert len(calls) == 2
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    assert len(gradients) > 10
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert (mine - theirs).norm() <= 1e-10 * theirs.norm() + 1e-12


def test_one_segment_over_everything_is_dense_attention_and_others_are_not() -> None:
    model, x = build("llama"), tokens(1, 50)
    dilated = model(x).logits
    whole = use_dilated_attention(model, [64], [1])(x).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(x).logits, whole)
    assert (dilated - whole).abs().max() > 1e-3


WINDOWED = {
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
    "Exaone4ForCausalLM": transformers.Exaone4Config,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "ModernBertDecoderForCausalLM": transformers.ModernBertDecoderConfig,
    "ModernBertForMaskedLM": ModernBertConfig,
}


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_whose_window_is_replaced_keep_their_positions(name, tmp_path) -> None:
    """One segment over everything equals the model itself within its windows, where nothing but positions differs."""
    torch.manual_seed(0)
    model_class, config_class = getattr(transformers, name), WINDOWED[name]
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "num_hidden_layers": 4}
    windows = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64, "local_attention": 128}
    more = {field: value for field, value in windows.items() if hasattr(config_class(), field)}
    model = model_class(config_class(**sizes, **more)).double().eval()
    config = use_dilated_attention(config_class(**sizes, **more), [64], [1], replace_sliding_window=True)
    config.save_pretrained(tmp_path)
    dilated = model_class(config_class.from_pretrained(tmp_path)).double().eval()
    dilated.load_state_dict(model.state_dict())
    x, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[1, :7] = 0
    expected = model(x, attention_mask=mask).logits
    assert "sliding_attention" in model.config.layer_types
    torch.testing.assert_close(dilated(x).logits, model(x).logits)
    torch.testing.assert_close(dilated(x, attention_mask=mask).logits[mask == 1], expected[mask == 1])
    if "Causal" in name:
        use_dilated_attention(dilated, SEGMENTS, RATES)
        assert (dilated(x).logits - model(x).logits).abs().max() > 1e-3
        long = tokens(2, 100)  # longer than the window that was
        said = generate(dilated, long, use_cache=False)
        for cache in ({}, {"cache_implementation": "static"}, {"past_key_values": dilated_cache(dilated, 2)}):
            assert torch.equal(generate(dilated, long, **cache), said), cache
        one = tokens(2, 1)  # a prompt of a single token
        assert torch.equal(generate(dilated, one, past_key_values=dilated_cache(dilated, 2)), generate(dilated, one))
        positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
        packed = dilated(x[:1], position_ids=positions).logits
        torch.testing.assert_close(packed[:, 12:], dilated(x[:1, 12:]).logits)


def test_a_length_chooses_branches_for_the_key_value_heads() -> None:
    model = use_dilated_attention(build("llama"), max_length=10_000)
    heads = model.config.num_key_value_heads
    assert heads < model.config.num_attention_heads
    assert read_pattern(model.config) == DilatedSpec.for_length(10_000, heads=heads, is_causal=True)
    config = use_dilated_attention(build("llama").config, max_length=10_000)  # makes no weights
    assert read_pattern(config) == read_pattern(model.config)
    config = transformers.LlamaConfig(**SIZES, attn_implementation="flash_attention_2", is_causal=False)
    assert read_pattern(use_dilated_attention(config, max_length=10_000)) == DilatedSpec.for_length(
        10_000, heads=config.num_key_value_heads
    )
    encoder = use_dilated_attention(build("modernbert"), max_length=10_000)
    assert read_pattern(encoder.config) == DilatedSpec.for_length(10_000, heads=encoder.config.num_attention_heads)
    with pytest.raises(ValueError, match="pass the model, or state segment_lengths and dilation_rates"):
        use_dilated_attention(transformers.PreTrainedConfig(num_attention_heads=2), max_length=10_000)
    with pytest.raises(TypeError, match="max_length=10 takes the place of segment_lengths and dilation_rates"):
        use_dilated_attention(model, [16], [1], max_length=10)
    with pytest.raises(TypeError, match="state segment_lengths and dilation_rates, or max_length"):
        use_dilated_attention(model)
    config = use_dilated_attention(transformers.PreTrainedConfig(), SEGMENTS, RATES)  # which states no heads
    assert read_pattern(config) == DilatedSpec.of(SEGMENTS, RATES)


def generate(model, x: torch.Tensor, **settings) -> torch.Tensor:
    return model.generate(x, max_new_tokens=12, do_sample=False, **settings)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_generate_is_identical_with_every_cache_and_with_none(family) -> None:
    model = build(family)
    x = tokens(3, 19)  # to 31: beyond a segment of each branch
    mask = torch.ones_like(x)
    mask[1, :5] = mask[2, :18] = 0  # left padding; the last row has a single token
    expected = generate(model, x, attention_mask=mask, use_cache=False)
    for settings in (
        {},
        {"cache_implementation": "static"},
        {"past_key_values": StaticCache(config=model.config, max_cache_len=40)},
        {"past_key_values": dilated_cache(model, 3)},
        {"past_key_values": dilated_cache(model, 3), "prefill_chunk_size": 9},
        {"prefill_chunk_size": 9},
    ):
        assert torch.equal(generate(model, x, attention_mask=mask, **settings), expected), settings


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cache_gives_the_rows_of_one_forward_on_a_gpu(dtype) -> None:
    model = build("llama", dtype, hidden_size=512).cuda()  # heads of 64, which the kernels take
    x = tokens(2, 300).cuda()
    mask = torch.ones_like(x)
    mask[1, :11] = 0
    with torch.no_grad():
        expected = model(x, attention_mask=mask, use_cache=False).logits
        for cache in (
            DynamicCache(config=model.config),
            StaticCache(config=model.config, max_cache_len=320),
            dilated_cache(model, 2),
        ):
            at = 0
            for m in (130, 1, 20, 1, 1, 100, 47):
                at += m
                told = {"attention_mask": mask[:, :at], "past_key_values": cache}
                got = model(x[:, at - m : at], **told).logits
                real = mask[:, at - m : at].bool()
                error = (got - expected[:, at - m : at])[real].norm() / expected[:, at - m : at][real].norm()
                assert error < (1e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "bounded"])
def test_generate_compiles_its_steps_on_a_gpu_and_says_the_same(kind) -> None:
    """transformers compiles the steps of both caches, as CUDA graphs."""
    model, x = build("llama", torch.float32, hidden_size=512).cuda(), tokens(2, 100).cuda()
    expected = generate(model, x, use_cache=False)
    for settings in ({}, {"prefill_chunk_size": 70}):
        cache = {"cache_implementation": "static"}
        for _ in range(2):
            cache = {"past_key_values": dilated_cache(model, 2)} if kind == "bounded" else cache
            assert torch.equal(generate(model, x, **cache, **settings), expected)
    assert counters["stats"]["unique_graphs"] <= 4  # a step, a whole chunk, the next, and the last
    assert counters["inductor"]["possibly_missed_reinplacing_bytes"] == 0  # the cache is not copied


def on_every_device(backend: str) -> transformers.CompileConfig:
    """Lets `generate` compile as it does on a GPU."""
    config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_generate_compiles_the_step_of_a_bounded_cache_once(family) -> None:
    model, x = build(family), tokens(2, 19)
    mask = torch.ones_like(x)
    mask[1, :5] = 0
    compile_config = on_every_device("aot_eager")
    for told, beams in (({"attention_mask": mask}, 1), ({}, 1), ({}, 2)):
        for new in (5, 30):
            settings = {**told, "num_beams": beams, "do_sample": False, "max_new_tokens": new}
            expected = model.generate(x, use_cache=False, **settings)
            cache = dilated_cache(model, 2 * beams)
            got = model.generate(x, past_key_values=cache, compile_config=compile_config, **settings)
            assert torch.equal(got, expected)
            assert counters["stats"]["unique_graphs"] == 1  # beams are not compiled
    assert cache.get_seq_length() == 19 + 29


@torch.no_grad()
def test_a_loop_of_ones_own_compiles_nothing_after_its_third_token() -> None:
    model, x = build("llama"), tokens(2, 60)
    mask = torch.ones(2, 61, dtype=torch.long)
    mask[1, :7] = 0
    for masked in (False, True):
        told = [{"attention_mask": mask[:, :n]} if masked else {} for n in range(61)]
        compiled, cache = torch.compile(model, backend="eager", fullgraph=True), dilated_cache(model, 2)
        expected = model(x, **told[60]).logits
        model(x[:, :20], past_key_values=cache, **told[20])
        for i in range(20, 60):
            with torch._dynamo.config.patch(error_on_recompile=i > 22):
                got = compiled(x[:, i : i + 1], past_key_values=cache, **told[i + 1]).logits
            torch.testing.assert_close(got, expected[:, i : i + 1])


@pytest.mark.parametrize("kind", ["dynamic", "static", "bounded"])
def test_chunks_and_tokens_against_a_cache_give_the_rows_of_one_forward(kind) -> None:
    model, x = build("llama"), tokens(2, 150)
    mask = torch.ones_like(x)
    mask[1, :11] = 0
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=160),
        "bounded": lambda: dilated_cache(model, 2),
    }[kind]()
    got, at = [], 0
    with torch.no_grad():
        expected = model(x, attention_mask=mask).logits
        for m in (5, 1, 20, 1, 70, 53):
            piece = x[:, at : at + m]
            at += m
            got.append(model(piece, attention_mask=mask[:, :at], past_key_values=cache).logits)
    assert at == x.shape[1]
    real = mask.bool()
    torch.testing.assert_close(torch.cat(got, dim=1)[real], expected[real], rtol=1e-10, atol=1e-10)


def test_a_bounded_cache_does_not_grow_and_serves_beams_and_assistants() -> None:
    model, x = build("llama"), tokens(1, 20)
    cache = dilated_cache(model, 1)
    with torch.no_grad():
        model(x, past_key_values=cache)
        size = cache.nbytes
        model(tokens(1, 100), past_key_values=cache)
    assert cache.nbytes == size > 0
    assert cache.get_seq_length() == 120
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, x, past_key_values=cache), generate(model, x))
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(x, **beams)
    assert torch.equal(model.generate(x, **beams, past_key_values=dilated_cache(model, 3)), expected)
    rewindable = dilated_cache(model, 1, rewindable=16)
    lookup = {"prompt_lookup_num_tokens": 4, "eos_token_id": 999}  # which some versions want to have, and nobody says
    assert torch.equal(generate(model, x, past_key_values=rewindable, **lookup), generate(model, x))


def test_a_bounded_cache_keeps_keys_in_autocasts_dtype() -> None:
    """Qwen's norms of queries and keys give float32 there, its values are in bfloat16."""
    model, x = build("qwen", torch.float32), tokens(1, 20)
    cache = dilated_cache(model, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generate(model, x, past_key_values=cache), generate(model, x))
    assert cache.layers[0].held.keys.dtype == torch.bfloat16


@torch.no_grad()
def test_a_bounded_cache_that_missed_tokens_is_refused_until_it_is_reset() -> None:
    model, x = build("llama", num_hidden_layers=1), tokens(2, 30)
    expected = model(x).logits
    right = torch.ones_like(x)
    right[0, 20:] = 0
    for call in (model, torch.compile(model, backend="eager")):
        cache = dilated_cache(model, 2)
        with refused("pad on the left"):
            model(x, attention_mask=right, past_key_values=cache)
        with refused(r"the 30 tokens that this cache counts never reached it: .*reset\(\)"):
            call(x, past_key_values=cache)
        cache.reset()
        got = [call(piece, past_key_values=cache).logits for piece in x.split(15, dim=1)]
        torch.testing.assert_close(torch.cat(got, dim=1), expected)
    cache = dilated_cache(model, 2)
    model.set_attn_implementation("sdpa")
    with refused('attention is not dilated, .*use attn_implementation="dilated"'):
        generate(model, x, past_key_values=cache)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_equals_its_rows_alone(family, side) -> None:
    model = build(family)
    lengths, N = [40, 23, 1], 40
    x, mask = torch.zeros(3, N, dtype=torch.long), torch.zeros(3, N, dtype=torch.long)
    place = [slice(N - n, N) if side == "left" else slice(0, n) for n in lengths]
    for b, (n, where) in enumerate(zip(lengths, place)):
        x[b, where], mask[b, where] = tokens(n), 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)  # their sines are in float32: elsewhere they would differ
    together = model(x, attention_mask=mask, position_ids=positions).logits
    for b, where in enumerate(place):
        alone = model(x[b : b + 1, where]).logits
        torch.testing.assert_close(together[b, where], alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:attention_mask has padding between tokens")
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "none"), ("llama", "dynamic"), ("llama", "static"), ("llama", "bounded"), ("modernbert", "none")],
)
@torch.no_grad()
def test_rows_with_padding_between_tokens_equal_the_tokens_alone(family, kind) -> None:
    model, x = build(family), tokens(2, 60)
    mask = torch.ones_like(x)
    mask[1, 5:16] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = {
        "none": lambda: None,
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=70),
        "bounded": lambda: dilated_cache(model, 2),
    }[kind]()
    cuts = (0, 60) if cache is None else (0, 30, 31, 60)
    got = []
    for first, last in itertools.pairwise(cuts):
        held = {} if cache is None else {"past_key_values": cache}
        mine = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        got.append(model(x[:, first:last], **mine, **held).logits)
    for b, real in enumerate(mask.bool()):
        alone = model(x[b : b + 1, real]).logits[0]
        torch.testing.assert_close(torch.cat(got, 1)[b, real], alone, rtol=1e-9, atol=1e-9)


def test_right_padded_prompts_are_advised_to_pad_on_the_left() -> None:
    model, x = build("llama"), tokens(2, 20)
    right = torch.ones_like(x)
    right[1, 14:] = 0
    for settings in ({}, {"cache_implementation": "static"}, {"past_key_values": dilated_cache(model, 2)}):
        with refused("pad (prompts )?on the left"):
            generate(model, x, attention_mask=right, **settings)
    with pytest.warns(UserWarning, match="pad prompts on the left"):
        generate(model, x, attention_mask=right, use_cache=False)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_documents_equal_each_alone(rows, use_cache) -> None:
    model = build("llama")
    lengths = [17, 30, 1, 12]
    x = tokens(rows, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    together = model(x, position_ids=positions, use_cache=use_cache).logits
    alone = [model(piece).logits for piece in x.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_packed_documents_that_fill_a_static_cache_equal_each_alone() -> None:
    model = build("llama")
    lengths = [17, 30, 12]
    x, positions = tokens(2, sum(lengths)), torch.cat([torch.arange(n) for n in lengths])[None]
    cache = StaticCache(model.config, max_cache_len=100)
    together = model(x, position_ids=positions, past_key_values=cache).logits
    alone = [model(piece).logits for piece in x.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_an_attention_mask_and_stated_lengths_come_before_positions_compiled_or_not() -> None:
    model, x = build("llama", num_hidden_layers=1), tokens(2, 30)
    told = {
        "attention_mask": torch.ones_like(x),
        "position_ids": torch.cat([torch.arange(12), torch.arange(18)]).expand(2, -1),
    }
    dense = build("llama", num_hidden_layers=1)
    dense.set_attn_implementation("sdpa")
    use_dilated_attention(model, [64], [1])
    expected = dense(x, **told).logits
    caches = {
        "none": lambda: {"use_cache": False},
        "dynamic": lambda: {"use_cache": True},
        "static": lambda: {"past_key_values": StaticCache(config=model.config, max_cache_len=40)},
        "bounded": lambda: {"past_key_values": dilated_cache(model, 2)},
    }
    for call, kinds in ((model, caches), (torch.compile(model, backend="eager"), ("none", "bounded"))):
        for name in kinds:
            assert (call(x, **told, **caches[name]()).logits - expected).abs().max() < 1e-9, name
        ends = {"cu_seq_lens_q": torch.tensor([0, 12, 30]), "use_cache": False}
        got = call(x[:1], position_ids=torch.arange(30)[None], **ends).logits
        torch.testing.assert_close(got[:, :12], dense(x[:1, :12]).logits)
        torch.testing.assert_close(got[:, 12:], dense(x[:1, 12:], position_ids=torch.arange(12, 30)[None]).logits)
        with refused("attention_mask and cu_seq_lens_q both state the documents"):
            call(x[:1], attention_mask=told["attention_mask"][:1], **ends)


def test_positions_that_change_in_place_are_read_anew_in_inference_mode() -> None:
    model, x = build("llama"), tokens(1, 30)
    packed = torch.cat([torch.arange(10), torch.arange(20)])[None]
    with torch.inference_mode():
        positions = torch.arange(30)[None]
        model(x, position_ids=positions, use_cache=True)
        positions.copy_(packed)
        found = model(x, position_ids=positions, use_cache=True).logits
        torch.testing.assert_close(found, model(x, position_ids=packed).logits)


def test_packed_documents_of_a_bidirectional_model_are_stated_by_their_lengths() -> None:
    model, lengths = build("modernbert"), [17, 30, 12]
    x = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    together = model(x, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
    alone = [model(piece).logits for piece in x.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_keep_the_pattern(family, tmp_path) -> None:
    model, x = build(family, torch.float32, "blocked"), tokens(1, 50)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "dilated"
    assert loaded.config.dilated_attention == {
        "segment_lengths": SEGMENTS,
        "dilation_rates": RATES,
        "head_layout": "blocked",
    }
    torch.testing.assert_close(loaded(x).logits, model(x).logits)


def test_of_a_model_for_images_and_text_the_text_is_dilated_and_comes_back_so(tmp_path) -> None:
    torch.manual_seed(0)
    seeing = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        text_config=LlamaConfig(**SIZES, num_key_value_heads=2), vision_config=seeing, image_token_id=3
    )
    model = transformers.LlavaForConditionalGeneration(use_dilated_attention(config, SEGMENTS, RATES)).eval()
    x, picture = torch.randint(4, 64, (1, 30)), torch.randn(1, 3, 16, 16)
    x[0, 2:6] = 3
    expected = model(x, pixel_values=picture).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for config in (model.config, loaded.config):
        assert config.text_config._attn_implementation == "dilated"
        assert config.vision_config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(x, pixel_values=picture).logits, expected)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model, x = build("llama").train(), tokens(2, 50)
    mask = torch.ones_like(x)
    mask[0, :7] = 0

    def gradients():
        model.zero_grad()
        model(x, attention_mask=mask, labels=x).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable()
    for mine, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_attention_dropout_is_drawn_in_training_only() -> None:
    model, x = build("llama"), tokens(1, 30)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    expected = model(x).logits
    torch.testing.assert_close(model(x).logits, expected)
    model.train()
    assert (model(x).logits - expected).abs().max() > 1e-3


def test_a_compiled_model_computes_the_same() -> None:
    model, x = build("llama", num_hidden_layers=1), tokens(2, 30)
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    positions = torch.cat([torch.arange(12), torch.arange(18)]).expand(2, -1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    packed = {"position_ids": positions}
    for inputs in ({"attention_mask": mask, "use_cache": False}, {**packed, "use_cache": False}, packed):
        model.zero_grad()
        expected = model(x, **inputs).logits
        expected.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        got = compiled(x, **inputs).logits
        got.square().sum().backward()
        torch.testing.assert_close(got, expected)
        for p, theirs in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, theirs)


def test_a_compiled_step_against_a_static_cache_computes_the_same() -> None:
    model, x = build("llama", num_hidden_layers=1), tokens(2, 33)
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    cache = StaticCache(config=model.config, max_cache_len=64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(x, attention_mask=mask).logits
        model(x[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
        for i in range(30, 33):
            told = dilated_mask(2, 1, 64, i, attention_mask=mask[:, : i + 1].bool())
            got = compiled(x[:, i : i + 1], attention_mask=told, past_key_values=cache).logits
            torch.testing.assert_close(got, expected[:, i : i + 1])


def test_a_compiled_model_refuses_packed_documents_beside_a_cache() -> None:
    model, x = build("llama", num_hidden_layers=1), tokens(1, 30)
    compiled = torch.compile(model, backend="eager")
    packed = torch.cat([torch.arange(12), torch.arange(18)])[None]
    with torch.no_grad():
        for make in (lambda: StaticCache(config=model.config, max_cache_len=64), lambda: dilated_cache(model, 1)):
            got = compiled(x, position_ids=torch.arange(30)[None], past_key_values=make()).logits
            torch.testing.assert_close(got, model(x).logits)
            with refused("position_ids begin again within a row"):
                compiled(x, position_ids=packed, past_key_values=make())


def refused(match: str, error: type[Exception] = ValueError):
    return pytest.raises(error, match=match)


def test_what_cannot_be_honoured_is_refused() -> None:
    model, x = build("llama"), tokens(2, 30)
    with refused("cannot honour output_attentions=True: .*attention_rows"):
        model(x, output_attentions=True)
    with refused("masks of its own mask function, got torch.bool"):
        model(x, attention_mask=torch.ones(2, 1, 30, 30, dtype=torch.bool))
    for rows, n in ((2, 2), (1, 2), (3, 3), (1, 3)):  # as few tokens as our masks have numbers
        with refused("masks of its own mask function, got torch.int64"):
            model(x[:, :n], attention_mask=torch.ones(2, 1, rows, n, dtype=torch.long).tril())
    with refused("row 0 has a hole at 3"):  # which a compiled model would have to see before it is traced
        mask = torch.ones_like(x)
        mask[0, 3] = 0
        torch.compile(model, backend="eager")(x, attention_mask=mask)
    with refused("MistralConfig has sliding_window=4096"):
        use_dilated_attention(MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2)), SEGMENTS, RATES)
    config = MistralConfig(**SIZES, num_key_value_heads=2)
    config.dilated_attention = {"segment_lengths": SEGMENTS, "dilation_rates": RATES}
    mistral = MistralForCausalLM._from_config(config, attn_implementation="dilated")
    with refused("cannot honour sliding_window=4096: .*replace_sliding_window"):
        mistral(x)
    config.sliding_window = 8
    with refused("cannot honour sliding_window=8|neither causal nor bidirectional"):
        mistral(x)
    q = torch.randn(1, 8, 30, 8, dtype=torch.float64)
    attention = model.model.layers[0].self_attn
    for name, value in {"softcap": 30.0, "s_aux": torch.zeros(8), "position_bias": q, "cache": object()}.items():
        with refused(f"cannot honour {name}"):
            dilated_attention_forward(attention, q, q, q, None, **{name: value})
    with refused("30 queries and 20 keys came without a mask"):
        dilated_attention_forward(attention, q, q[:, :, :20], q[:, :, :20], None)


@pytest.mark.parametrize("name", ["Bart", "Bert", "GPT2"])
def test_cross_attention_is_refused_even_between_sequences_of_one_length(name) -> None:
    sizes = {**SIZES, "hidden_size": 16, "num_attention_heads": 2, "decoder_start_token_id": 1}
    x, config_class = tokens(2, 30), getattr(transformers, f"{name}Config")
    if name == "Bart":
        sizes |= {f"{part}_{of}": 2 for part in ("encoder", "decoder") for of in ("layers", "attention_heads")}
        config = config_class(**sizes, d_model=16)
        model = transformers.BartForConditionalGeneration(use_dilated_attention(config, SEGMENTS, RATES))
        other = {"decoder_input_ids": x}
        assert model.get_encoder()(x).last_hidden_state.shape == (2, 30, 16)
    else:
        config = config_class(**sizes, is_decoder=True, add_cross_attention=True)
        model_class = getattr(transformers, {"Bert": "BertLMHeadModel", "GPT2": "GPT2LMHeadModel"}[name])
        model = model_class(use_dilated_attention(config, SEGMENTS, RATES))
        other = {"encoder_hidden_states": torch.randn(2, 30, 16)}
        assert model(x).logits.shape == (2, 30, 64)
    with refused("cannot honour cross-attention, as in (BartAttention|BertCrossAttention|GPT2Attention)"):
        model(x, **other)


def test_masks_that_are_not_of_whole_documents_are_refused_where_they_are_used() -> None:
    def ahead(batch_row, head, query, key):
        return (key <= query) | ((query == 4) & (key == 5))

    packed = torch.tensor([[0] * 10 + [1] * 20])
    functions = masking.causal_mask_function, masking.packed_sequence_mask_function(packed)
    told = read_mask(dilated_mask(1, 30, 30, mask_function=masking.and_masks(*functions)))
    assert told.documents.tolist() == [[0, 10], [10, 30]]
    for function in (
        ahead,
        masking.sliding_window_causal_mask_function(8),
        masking.sliding_window_bidirectional_mask_function(8),
        masking.and_masks(masking.sliding_window_causal_mask_function(8), functions[1]),
    ):
        with refused("neither causal nor bidirectional over whole documents"):
            read_mask(dilated_mask(1, 30, 30, mask_function=function))
    with refused("neither causal nor bidirectional over whole documents"):
        read_mask(dilated_mask(1, 30, 30, use_vmap=True))
    with refused("attention_mask has 20 tokens, the 5 in the cache and the 20 new ones are 25"):
        dilated_mask(1, 20, 25, 5, attention_mask=torch.ones(1, 20, dtype=torch.bool))


def test_a_model_without_a_pattern_or_without_the_interface_is_refused() -> None:
    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="dilated")
    with refused("finds no config.dilated_attention in LlamaConfig"):
        model(tokens(1, 10))
    model.config.dilated_attention = {"segments": [8]}
    with refused("holds segment_lengths, dilation_rates and, if not interleaved, head_layout"):
        model(tokens(1, 10))
    with refused("must pair up"):
        use_dilated_attention(model, [8, 24], [1])
    xlnet = transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=16)
    )
    with refused("XLNetLMHeadModel computes attention by itself"):
        use_dilated_attention(xlnet, SEGMENTS, RATES)
    with refused("takes a model or a config of transformers, got Linear", TypeError):
        use_dilated_attention(torch.nn.Linear(2, 2), SEGMENTS, RATES)


def test_a_config_of_models_without_the_interface_is_refused_before_they_lose_their_mask() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    with refused("BloomModel computes attention by itself"):
        use_dilated_attention(transformers.BloomConfig(**sizes), SEGMENTS, RATES)
    config = transformers.BloomConfig(**sizes, dilated_attention={"segment_lengths": [8], "dilation_rates": [1]})
    bloom = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dilated")
    for model in (bloom, torch.compile(bloom, backend="eager")):
        with refused("BloomModel computes attention by itself"):
            model(tokens(1, 10))

    class Unknown(transformers.BloomConfig):
        """A config that transformers knows no model of."""

    bloom = transformers.BloomForCausalLM._from_config(
        use_dilated_attention(Unknown(**sizes), SEGMENTS, RATES), attn_implementation="dilated"
    )
    for n in (1, 2, 3, 10):
        with pytest.raises(RuntimeError, match="size"):  # our masks do not fit an attention that is not ours
            bloom(tokens(1, n))
    for n in (2, 3, 10):
        with pytest.raises(RuntimeError, match="size"):
            bloom(tokens(2, n), attention_mask=torch.tensor([[1] * n, [0] + [1] * (n - 1)]))


def test_transformers_that_is_too_old_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.3.1")
    with refused("needs transformers >= 5.4, this is 5.3.1: pip install", ImportError):
        importlib.reload(dilated_attention_pytorch.models.hf)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this PyTorch has no tag for such operators")
@pytest.mark.parametrize("name", ["checked_spans", "documents_of", "of_one_document", "attend_cached_chunk"])
def test_an_operator_that_reads_values_stays_out_of_recorded_graphs(name) -> None:
    operator = getattr(torch.ops.dilated_attention_pytorch, name).default
    assert {torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag} <= {*operator.tags}


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "DiffLlamaForCausalLM"])
def test_a_model_that_attends_twice_to_the_same_keys_needs_another_cache(name) -> None:
    sizes = {**SIZES, "num_key_value_heads": 2}
    if name.startswith("Gemma"):
        sizes |= {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "head_dim": 8}
        sizes |= {"activation_sparsity_pattern": [0.0] * 2, "intermediate_size": [48] * 2}
        sizes |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
        config = transformers.Gemma3nTextConfig(**sizes)
    else:
        config = transformers.DiffLlamaConfig(**sizes)
    model = getattr(transformers, name)(use_dilated_attention(config, SEGMENTS, RATES)).double().eval()
    x = tokens(1, 20)
    with refused("attends twice to the same new keys, as where layers share them"):
        generate(model, x, past_key_values=dilated_cache(model, 1))
    assert torch.equal(generate(model, x), generate(model, x, use_cache=False))


def test_a_bounded_cache_refuses_what_it_is_not_for() -> None:
    model, x = build("llama"), tokens(2, 30)
    with refused("cache is for a batch of 3, the input is for 2"), torch.no_grad():
        model(x, past_key_values=dilated_cache(model, 3))
    with refused("has 2 layers, the model asks for layer 2"), torch.no_grad():
        cache = dilated_cache(model, 2)
        cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 2)
    other = use_dilated_attention(build("llama"), [8, 16], [1, 2])
    with refused("the cache is for segments .*, this attention has segments"), torch.no_grad():
        model(x, past_key_values=dilated_cache(other, 2))
    with refused("a bounded cache keeps no gradients: .*DynamicCache"):
        model(x, past_key_values=dilated_cache(model, 2))
    packed = torch.cat([torch.arange(10), torch.arange(20)])[None]
    with refused("one document in each row"), torch.no_grad():
        model(x, position_ids=packed, past_key_values=dilated_cache(model, 2))
    with refused("one document in each row"), torch.no_grad():
        ends = torch.tensor([0, 10, 30], dtype=torch.int32)
        model(x[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends, past_key_values=dilated_cache(model, 1))
    right = torch.ones_like(x)
    right[0, 20:] = 0
    with refused("pad on the left"), torch.no_grad():
        model(x, attention_mask=right, past_key_values=dilated_cache(model, 2))
    with torch.no_grad():
        cache = dilated_cache(model, 2)
        model(x, past_key_values=cache)
        moved = torch.ones(2, 31, dtype=torch.long)
        moved[1, :4] = 0
        with refused("row 1 of attention_mask begins elsewhere"):
            model(x[:, :1], attention_mask=moved, past_key_values=cache)
    with refused("overwritten"), torch.no_grad():
        cache = dilated_cache(model, 2)
        model(x, past_key_values=cache)
        cache.crop(-20)
    with refused("keeps its batch of 2"):
        cache.batch_repeat_interleave(2)
    model.set_attn_implementation("sdpa")
    with refused("this model's is 'sdpa'"):
        dilated_cache(model, 2)
