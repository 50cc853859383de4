"""The block-sparse modules: their published names and keywords, causality, and what they refuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    SparsePatternConfig,
)
from dilated_attention_pytorch.core import (
    block_layout,
    document_spans,
    get_global_pattern_cache,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES
from dilated_attention_pytorch.functional import dilated_attention

BRANCHES = {"segment_lengths": [16, 48], "dilation_rates": [1, 3]}
N = 53


def config(pattern: str = "local_window", ratio: float = 0.4, **more) -> SparsePatternConfig:
    return SparsePatternConfig(pattern_type=pattern, sparsity_ratio=ratio, block_size=4, **more)


def test_the_names_come_from_the_root_and_from_their_published_path() -> None:
    from dilated_attention_pytorch import block_sparse_ring_dilated_attention as published

    for name in (
        "BlockSparseRingDilatedAttention",
        "BlockSparseRingMultiheadDilatedAttention",
        "SparsePatternConfig",
    ):
        assert getattr(published, name) is getattr(dilated_attention_pytorch, name)
        assert name in dilated_attention_pytorch.__all__


@pytest.mark.parametrize("pattern_type", ["local_window", "dilated_sparse", "global_local"])
def test_documented_keywords_construct_and_run(pattern_type) -> None:
    sparse_config = SparsePatternConfig(
        pattern_type=pattern_type, sparsity_ratio=0.25, block_size=16, local_window_size=32, global_tokens=16
    )
    attention = BlockSparseRingDilatedAttention(
        segment_lengths=[64, 128],
        dilation_rates=[1, 2],
        sparse_config=sparse_config,
        ring_size=1,
        enable_memory_pool=False,
        use_pattern_cache=True,
    )
    q, k, v = torch.randn(3, 2, 200, 4, 16).unbind(0)
    out = attention(q, k, v, is_causal=True)
    assert out.shape == (2, 200, 4, 16)
    assert out.isfinite().all()


def test_a_budget_that_nothing_asks_for_is_refused() -> None:
    with pytest.raises(TypeError, match="tiles travel by gather: leave it out"):
        BlockSparseRingDilatedAttention([256], [1], memory_budget=1)
    with pytest.raises(TypeError, match="BlockSparseRingDilatedAttention has no scheme: tiles travel by gather"):
        BlockSparseRingDilatedAttention([256], [1], scheme="ring")


def test_by_default_a_tenth_of_tiles_of_128_is_kept() -> None:
    attention = BlockSparseRingDilatedAttention(segment_lengths=[256], dilation_rates=[1])
    assert attention.sparse_config == SparsePatternConfig("dilated_sparse", 0.1, 128)
    assert (attention.use_pattern_cache, attention.enable_memory_pool, attention._memory_pool) == (True, False, None)


@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_the_module_is_the_function(pattern) -> None:
    attention = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config(pattern), softmax_scale=0.3)
    q, k, v = torch.randn(3, 2, N, 4, 8, dtype=torch.float64).unbind(0)
    expected = dilated_attention(
        q, k, v, **BRANCHES, sparse_config=config(pattern), scale=0.3, is_causal=True, backend="reference"
    )
    torch.testing.assert_close(attention(q, k, v, is_causal=True), expected)


def test_the_multihead_form_is_projections_around_it() -> None:
    module = BlockSparseRingMultiheadDilatedAttention(
        16, 4, **BRANCHES, sparse_config=config(), num_kv_heads=2, dtype=torch.float64
    )
    x = torch.randn(2, N, 16, dtype=torch.float64)
    heads = [p(x).unflatten(-1, (-1, 4)) for p in (module.q_proj, module.k_proj, module.v_proj)]
    attended = dilated_attention(*heads, **BRANCHES, sparse_config=config())
    out, weights = module(x, x, x)
    torch.testing.assert_close(out, module.out_proj(module.norm(attended.flatten(-2))))
    assert weights is None
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_changing_a_token_changes_nothing_before_it(pattern) -> None:
    attention = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config(pattern))
    x = torch.randn(1, N, 4, 4, dtype=torch.float64)
    before = attention(x, x, x, is_causal=True)
    for t in range(N):
        changed = x.clone()
        changed[:, t] += 1
        after = attention(changed, changed, changed, is_causal=True)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert not torch.equal(after[:, t], before[:, t])


@pytest.mark.parametrize("pattern", ["random", "content_adaptive"])
def test_a_module_copies_pickles_and_shows_itself(pattern) -> None:
    x, rows = torch.randn(1, N, 4, 4), torch.randn(1, N, 16)
    for module, call in (
        (BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config(pattern)), lambda m: m(x, x, x)),
        (
            BlockSparseRingMultiheadDilatedAttention(16, 4, **BRANCHES, sparse_config=config(pattern)),
            lambda m: m(rows, rows, rows)[0],
        ),
    ):
        expected = call(module)
        assert f"pattern_type='{pattern}'" in repr(module)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(call(twin), expected)


def test_without_the_cache_the_result_is_the_same(monkeypatch) -> None:
    x = torch.randn(1, N, 4, 4)
    built = []
    build = block_layout.layout_for
    monkeypatch.setattr(block_layout, "layout_for", lambda *call: (built.append(call), build(*call))[1])
    reset_global_pattern_cache()
    outs = []
    for cache, times in ((True, 1), (False, 2)):
        module = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config("random"), use_pattern_cache=cache)
        outs += [module(x, x, x) for _ in range(2)]
        assert len(built) == times, "twice the same call"
        built.clear()
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_dropout_acts_while_training_only() -> None:
    attention = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config(), dropout=0.5)
    x = torch.randn(1, N, 4, 4)
    assert not torch.equal(attention(x, x, x), attention(x, x, x))
    attention.eval()
    assert torch.equal(attention(x, x, x), attention(x, x, x))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"sparse_config": SparsePatternConfig(block_size=64)},
            ValueError,
            "block_size=64 is larger than .* 16 tokens",
        ),
        ({"sparse_config": {"sparsity_ratio": 0.1}}, TypeError, "must be a SparsePatternConfig, got a dict"),
        ({"sparse_config": config(), "ring_size": 2}, ValueError, "got ring_size=2 and 1 rank: start as many"),
        ({"sparse_config": config(), "lightweight_pool": True}, ValueError, "pass enable_memory_pool=True with it"),
        (
            {"sparse_config": config(), "dropout": 1.0},
            ValueError,
            "finite number of at least 0 and below 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        BlockSparseRingDilatedAttention(**BRANCHES, **settings)
    with pytest.raises(error, match=message):
        BlockSparseRingMultiheadDilatedAttention(16, 4, **BRANCHES, **settings)


def test_the_function_refuses_what_the_module_refuses() -> None:
    x = torch.randn(1, N, 4, 4)
    with pytest.raises(TypeError, match="must be a SparsePatternConfig"):
        dilated_attention(x, x, x, **BRANCHES, sparse_config={"sparsity_ratio": 0.1})
    with pytest.raises(ValueError, match="larger than the shortest segment, 16 tokens: take a power of two up to 16"):
        dilated_attention(x, x, x, **BRANCHES, sparse_config=SparsePatternConfig(block_size=32))


LENGTHS = {
    "seqlens": torch.tensor([40, N]),
    "cu_seqlens": torch.tensor([0, 20, 20, 49]),
    "key_padding_mask": torch.arange(N) < torch.tensor([[9], [0]]),
    "spans": torch.tensor([[5, 30], [0, N]]),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("pattern", ["random", "content_adaptive"])
def test_modules_take_lengths(pattern, lengths) -> None:
    x = torch.randn(1 if lengths == "cu_seqlens" else 2, N, 4, 4)
    stated = {lengths: LENGTHS[lengths]}
    expected = dilated_attention(x, x, x, **BRANCHES, sparse_config=config(pattern), **stated, is_causal=True)
    attention = BlockSparseRingDilatedAttention(**BRANCHES, sparse_config=config(pattern))
    assert torch.equal(attention(x, x, x, **stated, is_causal=True), expected)
    several = BlockSparseRingMultiheadDilatedAttention(16, 4, **BRANCHES, sparse_config=config(pattern))
    out, _ = several(x.flatten(2), x.flatten(2), x.flatten(2), **stated, is_causal=True)
    for document, (start, end) in enumerate(document_spans(len(x), N, **stated).tolist()):
        b = document if len(x) > 1 else 0
        alone, _ = several(*[x[b : b + 1, start:end].flatten(2)] * 3, is_causal=True)
        torch.testing.assert_close(out[b : b + 1, start:end], alone)


@pytest.mark.parametrize(("shortest", "tiles"), [(300, 128), (128, 128), (100, 64), (8, 8), (1, 1)])
def test_tiles_fit_the_shortest_segment_unless_their_size_is_stated(shortest, tiles) -> None:
    q, k, v = torch.randn(3, 1, 256, 2, 4, dtype=torch.float64).unbind(0)
    spec = ([shortest, 512], [1, 2])
    stated = SparsePatternConfig(sparsity_ratio=0.25, block_size=tiles)
    expected = dilated_attention(q, k, v, *spec, sparse_config=stated)
    for config in (SparsePatternConfig(sparsity_ratio=0.25), stated):
        module = BlockSparseRingDilatedAttention(*spec, sparse_config=config)
        assert module.sparse_config == stated
        assert torch.equal(module(q, k, v), expected)
    assert torch.equal(
        dilated_attention(q, k, v, *spec, sparse_config=SparsePatternConfig(sparsity_ratio=0.25)), expected
    )
    assert BlockSparseRingDilatedAttention(*spec).sparse_config.block_size == tiles
    if shortest < 128:  # also after a call that adapted tiles
        with pytest.raises(ValueError, match="block_size=128 is larger than the shortest segment"):
            dilated_attention(q, k, v, *spec, sparse_config=SparsePatternConfig(sparsity_ratio=0.25, block_size=128))


def test_cleaning_up_forgets_layouts() -> None:
    cache = get_global_pattern_cache()
    module = BlockSparseRingDilatedAttention([16, 64], [1, 2])
    q, k, v = torch.randn(3, 1, 100, 2, 4).unbind(0)
    expected = module(q, k, v)
    assert [key for key in cache._cache if key[0] == "block layout"]
    module.cleanup_buffers()
    assert not [key for key in cache._cache if key[0] == "block layout"]
    assert torch.equal(module(q, k, v), expected)
