"""Cache and pool change what a call takes, never what it gives."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    DilatedTransformerEncoderLayer,
    ImprovedDilatedAttention,
    LongNetLM,
    MultiheadDilatedAttention,
    PatternCache,
    SparsePatternConfig,
    WorkspacePool,
    create_dilated_attention,
    create_multihead_dilated_attention,
)
from dilated_attention_pytorch.core.resources import CACHE_FROM_TOKENS, POOL_FROM_TOKENS, Resources
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels import eager
from dilated_attention_pytorch.nn.factories import ATTENTION_TYPES

SPEC = {"segment_lengths": [8, 16, 48], "dilation_rates": [1, 2, 3]}
TILES = SparsePatternConfig("random", sparsity_ratio=0.5, block_size=4)
LENGTHS = {
    "whole": {},
    "packed": {"cu_seqlens": torch.tensor([0, 19, 19, 48])},
    "right-padded": {"seqlens": torch.tensor([21])},
    "masked": {"key_padding_mask": (torch.arange(53) < 7)[None]},
    "block-sparse": {"sparse_config": TILES},
    "block-sparse by content": {"sparse_config": SparsePatternConfig("content_adaptive", 0.5, 4)},
    "block-sparse, packed": {"sparse_config": TILES, "cu_seqlens": torch.tensor([0, 19, 19, 48])},
}


def shared() -> Resources:
    return Resources(PatternCache(), WorkspacePool(threshold_bytes=1))


def tensors(dtype=torch.float32, tokens=53, heads=(4, 2, 2), dim=16):
    return [torch.randn(1, tokens, h, dim, dtype=dtype, requires_grad=True) for h in heads]


def run(inputs, resources, **settings):
    torch.manual_seed(0)
    out, lse = dilated_attention(*inputs, **SPEC, is_causal=True, return_lse=True, resources=resources, **settings)
    loss = out.float().square().sum() + lse[lse != -torch.inf].sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, inputs))]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_eager_gives_the_same_bits_with_cache_and_pool(lengths, dropout_p, dtype) -> None:
    settings = {**LENGTHS[lengths], "dropout_p": dropout_p, "backend": "eager"}
    resources = shared()
    for _ in range(3):
        inputs = tensors(dtype)
        for one, other in zip(run(inputs, Resources(), **settings), run(inputs, resources, **settings)):
            assert torch.equal(one, other)
    assert resources.cache.get_stats()["hit_rate"] > 0.5
    stats = resources.pool.get_stats()
    assert stats["live_buffers"] == 0
    assert stats["reuse_rate"] > 0.5 or (dtype != torch.bfloat16 and not dropout_p)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
@pytest.mark.parametrize("lengths", ["whole", "packed", "right-padded", "block-sparse", "block-sparse, packed"])
def test_triton_gives_the_same_bits_with_cache_and_pool_in_the_interpreter(lengths) -> None:
    pytest.importorskip("triton", reason="the kernels need Triton")
    spec = {"segment_lengths": [16, 24, 32], "dilation_rates": [1, 1, 1]}  # three per row: summed in float32
    q, k, v = (x.detach().requires_grad_() for x in tensors(torch.float16, tokens=32, heads=(2, 1, 1)))
    stated = {
        "whole": {},
        "packed": {"cu_seqlens": torch.tensor([0, 13, 32])},
        "right-padded": {"seqlens": torch.tensor([21])},
        "block-sparse": {"sparse_config": SparsePatternConfig("random", sparsity_ratio=0.5, block_size=16)},
    }
    stated["block-sparse, packed"] = stated["block-sparse"] | stated["packed"]
    resources, results = shared(), []
    package.reset_global_pattern_cache()
    for used in (Resources(), resources, resources):
        out = dilated_attention(q, k, v, **spec, backend="triton", resources=used, **stated[lengths])
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for found in results[1:]:
        for one, other in zip(results[0], found):
            assert torch.equal(one, other)
    assert resources.pool.get_stats()["reuse_rate"] > 0.4
    plans = package.get_global_pattern_cache().get_stats()["kinds"]["plan"]
    assert plans == {"hits": 4, "misses": 2, "size": 2}  # forward and backward
    kinds = [key[0] for key in resources.cache._cache]
    if "cu_seqlens" in stated[lengths] or "seqlens" in stated[lengths]:
        assert kinds.count("segment table") == 2  # one per segment length; layers and directions share it
        assert kinds.count("lengths") == 1
    assert kinds.count("block layout") == ("sparse_config" in stated[lengths])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["whole", "packed", "block-sparse", "block-sparse, packed"])
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_a_gpu_gives_the_same_bits_with_cache_and_pool(lengths, backend) -> None:
    resources, results = shared(), []
    inputs = [torch.randn(1, 3001, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    stated = {
        "whole": {},
        "packed": {"cu_seqlens": torch.tensor([0, 500, 1777, 3001], device="cuda")},
        "block-sparse": {"sparse_config": SparsePatternConfig("random", sparsity_ratio=0.5, block_size=64)},
    }
    stated["block-sparse, packed"] = stated["block-sparse"] | stated["packed"]
    for used in (Resources(), resources, resources):
        out = dilated_attention(
            *inputs, [256, 512, 1024], [1, 1, 1], is_causal=True, backend=backend, resources=used, **stated[lengths]
        )
        results.append([out, *torch.autograd.grad(out.float().sum(), inputs)])
    for found in results[1:]:
        for one, other in zip(results[0], found):
            assert torch.equal(one, other)
    assert resources.pool.get_stats()["reuse_count"] > 0


@pytest.mark.gpu
def test_a_captured_graph_keeps_its_layouts() -> None:
    cache = PatternCache(max_size=1)
    resources = Resources(cache)
    q, k, v = torch.randn(3, 1, 2048, 4, 64, dtype=torch.bfloat16, device="cuda")
    config = SparsePatternConfig("random", sparsity_ratio=0.3, block_size=64)

    def attend(config):
        return dilated_attention(q, k, v, [512, 1024], [1, 2], sparse_config=config, resources=resources)

    expected = attend(config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(config)
    for seed in range(1, 20):  # evict it, and write where it lay
        attend(SparsePatternConfig("random", sparsity_ratio=0.3, block_size=64, seed=seed))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("settings", [{}, {"sparse_config": TILES}], ids=["dense", "block-sparse"])
def test_no_result_shares_memory_with_the_pool(settings) -> None:
    resources = Resources(pool=WorkspacePool(threshold_bytes=1, lightweight=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for dropout_p in (0.0, 0.3):
            inputs = tensors(dtype)
            first = run(inputs, resources, dropout_p=dropout_p, **settings)
            kept = [x.clone() for x in first]
            for _ in range(3):
                run(tensors(dtype), resources, dropout_p=dropout_p, **settings)
            with resources.pool.lease() as take:
                for n in (1, 4, 16, 53, 106, 3392, 6784):
                    take((n,), dtype=torch.float64, device="cpu").fill_(torch.nan)
                for one, other in zip(first, kept):
                    assert torch.equal(one, other)
            blocks = [b for shelf in resources.pool._shelves.values() for b in shelf.idle]
            places = {block.memory.untyped_storage().data_ptr() for block in blocks}
            assert places.isdisjoint(x.untyped_storage().data_ptr() for x in first)


@pytest.mark.parametrize("config", [None, TILES], ids=["dense", "block-sparse"])
def test_lengths_that_change_in_place_are_seen(config) -> None:
    resources = Resources(PatternCache())
    q, k, v = (x.detach() for x in tensors(torch.float64))
    spans = torch.tensor([[0, 19], [19, 53]])
    settings = {**SPEC, "spans": spans, "sparse_config": config}
    before = dilated_attention(q, k, v, **settings, resources=resources)
    spans.numpy()[:] = [[0, 30], [30, 53]]  # behind PyTorch's back
    after = dilated_attention(q, k, v, **settings, resources=resources)
    assert not torch.equal(before, after)
    assert torch.equal(after, dilated_attention(q, k, v, **settings, resources=Resources()))


def test_a_crash_in_the_middle_of_a_call_leaves_cache_and_pool_usable(monkeypatch) -> None:
    resources, inputs = shared(), tensors(torch.bfloat16)
    expected = run(inputs, Resources())

    def crash(*args):
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(eager, "merge_", crash)
        with pytest.raises(ZeroDivisionError):
            run(inputs, resources)
    assert resources.pool.get_stats()["live_buffers"] == 0
    for one, other in zip(run(inputs, resources), expected):
        assert torch.equal(one, other)


def test_memory_that_runs_out_within_a_call_is_released_and_the_call_repeated(monkeypatch) -> None:
    resources, inputs = shared(), tensors(torch.bfloat16)
    expected = run(inputs, resources)
    merge, runs = eager.merge_, []

    def hungry(*args):
        runs.append(resources.pool.get_stats()["total_allocated"])
        if len(runs) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        merge(*args)

    monkeypatch.setattr(eager, "merge_", hungry)
    for one, other in zip(run(inputs, resources), expected):
        assert torch.equal(one, other)
    assert resources.pool.get_stats()["cleanups"] == 1


def test_threads_with_different_lengths_get_their_own_results() -> None:
    resources, q = shared(), torch.randn(1, 53, 4, 16, dtype=torch.bfloat16)
    wrong = []

    def work(cut: int) -> None:
        lengths = torch.tensor([0, cut, 53])
        expected = dilated_attention(q, q, q, **SPEC, cu_seqlens=lengths)
        for _ in range(10):
            if not torch.equal(dilated_attention(q, q, q, **SPEC, cu_seqlens=lengths, resources=resources), expected):
                wrong.append(cut)

    threads = [threading.Thread(target=work, args=(cut,)) for cut in range(5, 45, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert resources.pool.get_stats()["live_buffers"] == 0


def test_a_compiled_call_remembers_its_description_only() -> None:
    cache, pool = package.get_global_pattern_cache(), package.get_global_memory_pool()
    module = DilatedAttention(**SPEC, use_pattern_cache=True, enable_memory_pool=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in tensors())
    lengths = torch.tensor([0, 19, 53])
    expected = module(q, k, v, cu_seqlens=lengths)
    cache.clear()
    before = pool.get_stats()
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens=lengths), expected)
    assert set(cache.get_stats()["kinds"]) == {"call"}
    assert pool.get_stats() == before


@pytest.mark.parametrize("use_pattern_cache", [True, False])
def test_a_compiled_block_sparse_call_shares_its_layout_where_asked(use_pattern_cache) -> None:
    package.reset_global_pattern_cache()
    module = BlockSparseRingDilatedAttention(**SPEC, sparse_config=TILES, use_pattern_cache=use_pattern_cache)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v = tensors()
    for _ in range(2):
        out = compiled(q, k, v)
        out.sum().backward()
    layouts = package.get_global_pattern_cache().get_stats()["kinds"].get("block layout")
    assert layouts == ({"hits": 3, "misses": 1, "size": 1} if use_pattern_cache else None)
    torch.testing.assert_close(out, module(q, k, v))


def test_the_function_shares_layouts_unless_told_otherwise() -> None:
    package.reset_global_pattern_cache()
    q, k, v = (x.detach() for x in tensors())
    compiled = torch.compile(dilated_attention, fullgraph=True, backend="aot_eager")
    outs = [dilated_attention(q, k, v, **SPEC, sparse_config=TILES) for _ in range(2)]
    outs.append(compiled(q, k, v, **SPEC, sparse_config=TILES))
    kinds = package.get_global_pattern_cache().get_stats()["kinds"]
    assert set(kinds) == {"block layout", "call", "parts"}
    outs.append(dilated_attention(q, k, v, **SPEC, sparse_config=TILES, resources=Resources()))
    after = package.get_global_pattern_cache().get_stats()["kinds"]
    assert after["call"]["hits"] == kinds["call"]["hits"] + 1  # calls are always checked once only
    assert {**after, "call": None} == {**kinds, "call": None}
    for out in outs:
        torch.testing.assert_close(out, outs[0])


def test_layers_of_a_model_share_one_layout() -> None:
    package.reset_global_pattern_cache()
    sizes = {"d_model": 16, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 0}
    model = LongNetLM(**sizes, **SPEC, use_pattern_cache=True).eval()
    tokens = torch.randint(256, (1, 53))
    with torch.no_grad():
        out = model(tokens, cu_seqlens=torch.tensor([0, 19, 53]))
    kinds = model._pattern_cache.get_stats()["kinds"]
    assert kinds == {
        "call": {"hits": 2, "misses": 1, "size": 1},
        "lengths": {"hits": 0, "misses": 1, "size": 1},
        "parts": {"hits": 2, "misses": 1, "size": 1},
    }
    for module in model.modules():
        if isinstance(module, DilatedAttention):
            module._pattern_cache = None
    with torch.no_grad():
        assert torch.equal(model(tokens, cu_seqlens=torch.tensor([0, 19, 53])), out)


def test_a_saved_model_is_loaded_with_either(tmp_path) -> None:
    pytest.importorskip("safetensors", reason="saving needs safetensors")
    model = LongNetLM(d_model=16, num_heads=4, num_layers=1, num_decoder_layers=0, **SPEC, use_pattern_cache=True)
    model.save_pretrained(tmp_path)
    assert not LongNetLM.from_pretrained(tmp_path).use_pattern_cache
    loaded = LongNetLM.from_pretrained(tmp_path, use_pattern_cache=True, enable_memory_pool=True)
    assert (loaded.use_pattern_cache, loaded.enable_memory_pool) == (True, True)


def test_modules_pass_the_keywords_on_and_show_them() -> None:
    keywords = {"use_pattern_cache": True, "enable_memory_pool": True}
    for module in (
        MultiheadDilatedAttention(16, 4, **SPEC, **keywords),
        DilatedTransformerEncoderLayer(16, 4, **SPEC, **keywords),
    ):
        assert (module.use_pattern_cache, module.enable_memory_pool) == (True, True)
        assert "use_pattern_cache=True, enable_memory_pool=True" in repr(module)


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        (CACHE_FROM_TOKENS - 1, (False, False)),
        (CACHE_FROM_TOKENS, (True, False)),
        (POOL_FROM_TOKENS - 1, (True, False)),
        (POOL_FROM_TOKENS, (True, True)),
    ],
)
def test_factories_choose_by_sequence_length(tokens, chosen) -> None:
    for made in (
        create_dilated_attention(**SPEC, sequence_length=tokens),
        create_multihead_dilated_attention(16, 4, **SPEC, sequence_length=tokens),
        create_dilated_attention([tokens], [1]),
    ):
        assert (made.use_pattern_cache, made.enable_memory_pool) == chosen


def test_factories_take_what_is_stated_as_stated() -> None:
    made = create_dilated_attention(
        **SPEC, sequence_length=POOL_FROM_TOKENS, use_pattern_cache=False, enable_memory_pool=False
    )
    assert (made.use_pattern_cache, made.enable_memory_pool) == (False, False)
    assert create_dilated_attention(**SPEC, lightweight_pool=True)._memory_pool.lightweight
    assert create_dilated_attention(**SPEC, softmax_scale=0.3).softmax_scale == 0.3
    assert isinstance(create_dilated_attention(**SPEC, attention_type="improved"), ImprovedDilatedAttention)
    for name, (attention, multihead) in ATTENTION_TYPES.items():
        tiles = {"sparse_config": TILES} if name.startswith("block_sparse") else {}
        for made in (
            create_multihead_dilated_attention(16, 4, **SPEC, attention_type=name, **tiles),
            create_multihead_dilated_attention(name, embed_dim=16, num_heads=4, **SPEC, **tiles),
            create_multihead_dilated_attention(name, 16, 4, *SPEC.values(), **tiles),
        ):
            assert type(made) is multihead
            assert made.segment_lengths == tuple(SPEC["segment_lengths"])
        for made in (
            create_dilated_attention(*SPEC.values(), attention_type=name, **tiles),
            create_dilated_attention(name, **SPEC, **tiles),
            create_dilated_attention(name, *SPEC.values(), dropout=0.25, **tiles),
        ):
            assert type(made) is attention
            assert made.segment_lengths == tuple(SPEC["segment_lengths"])
        assert made.attention_dropout == 0.25
    assert {*ATTENTION_TYPES} == {"standard", "improved", "block_sparse", "ring", "distributed", "block_sparse_ring"}
    assert type(create_multihead_dilated_attention("auto", 16, 4, **SPEC)) is MultiheadDilatedAttention
    with pytest.raises(TypeError, match="attention_type is stated twice, got 'ring' and 'auto'"):
        create_dilated_attention("ring", **SPEC, attention_type="auto")
    assert create_dilated_attention(**SPEC, attention_type="block_sparse", sparse_config=TILES).use_pattern_cache
    with pytest.raises(
        ValueError, match=r"attention_type must be one of auto, standard, improved, block_sparse, .*; got 'magic'"
    ):
        create_dilated_attention(**SPEC, attention_type="magic")
    with pytest.raises(ValueError, match="sequence_length must be a whole number of at least 1, got 0"):
        create_dilated_attention(**SPEC, sequence_length=0)


@pytest.mark.parametrize("name", ["standard", "improved"])
def test_a_factory_refuses_two_names_of_one_dropout(name) -> None:
    with pytest.raises(TypeError, match="attention_dropout"):
        create_dilated_attention(name, **SPEC, dropout=0.1, attention_dropout=0.2)


def profiled() -> DilatedAttention:
    module = DilatedAttention(**SPEC, use_pattern_cache=True, enable_memory_pool=True, enable_profiling=True)
    module._pattern_cache, module._memory_pool = PatternCache(), WorkspacePool(threshold_bytes=1)
    return module


def test_profiling_counts_calls_lookups_and_loans_of_a_module() -> None:
    module = profiled()
    for _ in range(3):
        inputs = tensors(torch.bfloat16)
        module(*inputs, cu_seqlens=torch.tensor([0, 19, 53])).sum().backward()
    profile = module.get_profile()
    assert profile["calls"]["count"] == 3
    assert (profile["lookups of parts"]["misses"], profile["lookups of parts"]["hits"]) == (1, 5)
    assert (profile["lookups of lengths"]["misses"], profile["lookups of lengths"]["hits"]) == (1, 2)
    assert profile["lookups of parts"]["bytes"] > 0 < profile["lookups of parts"]["seconds_of_hits"]
    stats = module._memory_pool.get_stats()
    assert profile["loans"]["new"] == stats["allocation_count"]
    assert profile["loans"]["reused"] == stats["reuse_count"] > 0
    assert stats["profile"]["loans"] == profile["loans"]
    assert module._pattern_cache.get_stats()["profile"]["parts"] == profile["lookups of parts"]
    module.reset_profile()
    assert module.get_profile() == {}


def test_modules_that_share_a_cache_have_profiles_of_their_own() -> None:
    one, other = profiled(), profiled()
    other._pattern_cache = one._pattern_cache
    inputs = [x.detach() for x in tensors()]
    for module in (one, other, other):
        module(*inputs)
    assert one.get_profile()["lookups of parts"]["misses"] == 1
    assert other.get_profile()["lookups of parts"]["hits"] == 2
    assert one._pattern_cache.get_stats()["profile"]["parts"]["hits"] == 2


def test_without_profiling_nothing_is_counted_and_the_cache_is_asked_itself() -> None:
    module = DilatedAttention(**SPEC, use_pattern_cache=True, enable_memory_pool=True)
    assert module.resources == Resources(module._pattern_cache, module._memory_pool)
    with pytest.raises(ValueError, match="nothing is counted without enable_profiling=True"):
        module.get_profile()


def test_a_model_sums_the_profiles_of_its_layers() -> None:
    model = LongNetLM(d_model=16, num_heads=4, num_layers=3, num_decoder_layers=0, **SPEC, enable_profiling=True)
    model(torch.randint(256, (1, 20)))
    assert model.get_profile()["calls"]["count"] == 3
    layer = MultiheadDilatedAttention(16, 4, **SPEC, enable_profiling=True)
    x = torch.randn(1, 20, 16)
    layer(x, x, x)
    assert layer.get_profile()["calls"]["count"] == 1


def test_a_compiled_call_is_not_counted_and_not_logged(caplog) -> None:
    module = profiled()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in tensors())
    expected = module(q, k, v)
    module.reset_profile()
    with caplog.at_level(logging.DEBUG, "dilated_attention_pytorch"):
        torch.testing.assert_close(compiled(q, k, v), expected)
    assert module.get_profile() == {}
