from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    DilatedAttention,
    DilatedSpec,
    LongNetLM,
    ModelConfig,
    ReachWarning,
    branches_for,
)
from dilated_attention_pytorch.core import spec as spec_module
from dilated_attention_pytorch.core.pattern import dense_mask
from dilated_attention_pytorch.core.plans import get_global_pattern_cache
from dilated_attention_pytorch.core.reach import COUNTED_TOKENS, reach_lines, reach_shares
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache
from dilated_attention_pytorch.train.config import TrainConfig

# Remainders of one token, of few and of many after borders of the segments.
TOKENS = [*range(1, 70, 4), 97, 128, 129, 130, 200, 257, 300]


@pytest.fixture
def nothing_warned(monkeypatch) -> None:
    monkeypatch.setattr(spec_module, "_warned", set())
    get_global_pattern_cache().forget("call")  # what is remembered is not checked again


def layers_until_connected(spec: DilatedSpec, tokens: int, heads: int, *, is_causal: bool) -> int | None:
    """By the graph of who sees whom, of all heads; None if some token never hears of another."""
    sees = dense_mask(spec, spec.offsets(heads), tokens, is_causal=is_causal).flatten(0, 1).any(0).float()
    goal = torch.ones(tokens, tokens).tril() if is_causal else torch.ones(tokens, tokens)
    hears = sees + torch.eye(tokens)  # the residual
    for layers in range(1, 8):
        if torch.equal(hears > 0, goal > 0):
            return layers
        hears = (hears @ (sees + torch.eye(tokens)) > 0).float()
    return None


@pytest.mark.parametrize("shortest", [8, 16, 32])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
def test_two_layers_connect_every_two_tokens(shortest, heads, layout) -> None:
    for tokens in TOKENS:
        spec = DilatedSpec.for_length(tokens, heads, shortest=shortest, head_layout=layout)
        assert (layers_until_connected(spec, tokens, heads, is_causal=False) or 99) <= 2, (tokens, spec)
        causal = DilatedSpec.for_length(tokens, heads, shortest=shortest, head_layout=layout, is_causal=True)
        assert (layers_until_connected(causal, tokens, heads, is_causal=True) or 99) <= 3, (tokens, causal)


@pytest.mark.parametrize("shortest", [8, 16])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_rates_beyond_the_heads_take_one_layer_more(shortest, heads) -> None:
    for tokens in TOKENS:
        spec = DilatedSpec.for_length(tokens, shortest=shortest)
        assert (layers_until_connected(spec, tokens, heads, is_causal=False) or 99) <= 3, (tokens, spec)
        causal = DilatedSpec.for_length(tokens, shortest=shortest, is_causal=True)
        assert (layers_until_connected(causal, tokens, heads, is_causal=True) or 99) <= 4, (tokens, causal)


def test_one_branch_of_rate_1_leaves_a_causal_gap_at_its_borders() -> None:
    spec = DilatedSpec.for_length(64, heads=4, shortest=16)
    assert layers_until_connected(spec, 64, 4, is_causal=True) is None
    shares = reach_shares(spec, 64, heads=4, layers=[50], is_causal=True)[0].flip(0)
    missed = ((1 - shares) * torch.arange(1, 65)).round().long()
    assert missed[16].item() == 1  # token 15: 16 sees 14 in the branch of rate 2
    assert missed.sum().item() < 30


@pytest.mark.parametrize("tokens", [1, 2048, 2049, 32_768, 1_000_000, 10**8])
@pytest.mark.parametrize("heads", [None, 1, 4, 12, 16, 20])
def test_the_last_segment_covers_the_sequence_and_rates_stay_within_the_heads(tokens, heads) -> None:
    lengths, rates = branches_for(tokens, heads)
    assert lengths[-1] >= tokens
    assert rates[0] == 1
    assert list(lengths) == sorted(set(lengths))
    assert list(rates) == sorted(set(rates))
    assert len(lengths) == 1 or lengths[-2] < tokens
    if heads is None:
        assert tokens > 4_000_000 or sum(w / r**2 for w, r in zip(lengths, rates)) <= 2 * lengths[0]
    else:
        assert all(heads % rate == 0 for rate in rates)


def test_with_12_heads_the_branches_are_those_of_the_paper() -> None:
    paper = ModelConfig()
    assert branches_for(32_768, heads=12) == (paper.segment_lengths, paper.dilation_rates)


@pytest.mark.parametrize("tokens", [1, 2048, 2049, 8192, 32_768, 1_000_000, 10**8])
@pytest.mark.parametrize("heads", [None, 1, 2, 4, 12, 32])
def test_causal_branches_are_near_ones_whose_borders_do_not_meet_and_far_ones(tokens, heads) -> None:
    lengths, rates = branches_for(tokens, heads, is_causal=True)
    assert lengths[-1] >= tokens
    assert list(lengths) == sorted(set(lengths))
    near = [w for w, r in zip(lengths, rates) if r == 1]
    assert math.lcm(*near) >= tokens
    far = rates[len(near) :]
    assert list(far) == sorted(set(far))
    assert all(rate >= 8 for rate in far[:-1])
    others = branches_for(tokens, heads)
    larger = [] if heads is None else [r for r in range(1, 9) if heads % r == 0]
    assert len(others[0]) == 1 or far[-1] == max(others[1][-1], *larger, 1)
    assert sum(w / r**2 for w, r in zip(lengths, rates)) <= 1.7 * sum(w / r**2 for w, r in zip(*others))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": 0}, ValueError, "tokens must be a whole number of at least 1"),
        ({"tokens": 2**63}, ValueError, "tokens must be a whole number of at most"),
        ({"tokens": "many"}, TypeError, "tokens must be a whole number"),
        ({"tokens": 8, "heads": 0}, ValueError, "heads must be a whole number of at least 1"),
        ({"tokens": 8, "shortest": 48}, ValueError, "shortest must be a power of two, got 48"),
        ({"tokens": 8, "is_causal": "no"}, TypeError, "is_causal must be True or False"),
    ],
)
def test_wrong_arguments_of_branches_for(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        branches_for(**arguments)


def test_no_branches_connect_everything_in_the_grouped_layout() -> None:
    with pytest.raises(ValueError, match="'grouped' all heads of a branch read one grid"):
        DilatedSpec.for_length(64, head_layout="grouped")
    with pytest.raises(ValueError, match="'grouped' all heads of a branch read one grid"):
        package.MultiheadDilatedAttention(32, 4, max_length=64, head_layout="grouped")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["interleaved", "blocked", "grouped"])
@pytest.mark.parametrize(
    "branches", [([8, 16], [1, 2]), ([6, 10, 25], [1, 3, 4]), ([5], [2]), ([64], [5]), ([8, 2], [1, 2**48])]
)
def test_reach_is_what_the_graph_says(branches, layout, is_causal) -> None:
    spec, n, heads = DilatedSpec.of(*branches, layout), 61, 3
    sees = dense_mask(spec, spec.offsets(heads), n, is_causal=is_causal).flatten(0, 1).any(0).float() + torch.eye(n)
    possible = torch.arange(1, n + 1) if is_causal else torch.full((n,), n)
    hears, expected = sees, []
    for _ in range(4):
        expected.append((hears > 0).sum(1) / possible.double())
        hears = (hears @ sees > 0).float()
    shares = reach_shares(spec, n, heads, layers=[1, 2, 4], is_causal=is_causal)
    torch.testing.assert_close(shares.flip(1), torch.stack([expected[0], expected[1], expected[3]]))


def test_causal_reach_of_long_sequences_counts_all_tokens_up_to_a_row() -> None:
    shares = reach_shares(DilatedSpec.of([256], [1]), 2 * COUNTED_TOKENS, heads=1, is_causal=True)
    assert shares[0].tolist() == [256 / (2 * COUNTED_TOKENS)]  # of the last row


def test_the_least_reach_is_of_the_rows_with_which_segments_begin() -> None:
    nested, tokens = DilatedSpec.of([2048, 4096, 8192], [1, 2, 4]), 8192
    assert reach_shares(nested, tokens, heads=4, layers=[12], is_causal=True).min().item() == 1.0  # of other rows
    assert reach_lines(nested, tokens, 4, 12, is_causal=True)[-1] == (  # row 4,096 misses 3 tokens
        "after 12 layers 100.00% of the tokens up to its own on average over 256 rows, 99.92% at least"
    )
    causal = DilatedSpec.for_length(tokens, 4, is_causal=True)
    assert "100.00% at least" in reach_lines(causal, tokens, 4, 12, is_causal=True)[-1]


def test_reach_of_long_sequences_is_of_some_rows_and_within_one_longest_segment() -> None:
    short = DilatedSpec.of([64, 256], [1, 4])
    shares = reach_shares(short, 10**9, heads=4, layers=[1, 2, 12])
    assert shares[2].unique().tolist() == pytest.approx([256 / 10**9])
    assert reach_shares(DilatedSpec.for_length(100_000, 8), 100_000, heads=8)[1].min().item() == 1.0
    assert reach_lines(DilatedSpec.for_length(10**9, 8), 10**9, 8, 12, is_causal=False) == [
        f"at any depth 1,000,000,000 of 1,000,000,000 tokens at most; counted up to {COUNTED_TOKENS:,}"
    ]
    with pytest.raises(ValueError, match="reach is counted up to"):
        reach_shares(DilatedSpec.for_length(10**9, 8), 10**9, 8)


# max_length in place of segments and rates

ATTENTION = [
    "DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention", "RingDilatedAttentionV2",
    "RingDilatedAttentionV3", "BlockSparseDilatedAttention", "BlockSparseRingDilatedAttention",
    "DistributedImprovedDilatedAttention",
]  # fmt: skip
MULTIHEAD = [
    "MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingMultiheadDilatedAttention",
    "RingAdvancedDistributedDilatedAttention", "BlockSparseMultiheadDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention", "DistributedImprovedMultiheadDilatedAttention",
]  # fmt: skip
LAYERS = ["DilatedTransformerEncoderLayer", "DilatedTransformerDecoderLayer"]


@pytest.mark.parametrize("name", [*ATTENTION, *MULTIHEAD, *LAYERS])
def test_modules_take_a_length_or_a_pattern(name) -> None:
    make = getattr(package, name)
    sizes = () if name in ATTENTION else (32, 4)
    heads = None if name in ATTENTION else 4
    module = make(*sizes, max_length=10_000)
    found = module.self_attn if name in LAYERS else module
    assert (found.segment_lengths, found.dilation_rates) == branches_for(10_000, heads)
    with pytest.raises(TypeError, match="state one or the other"):
        make(*sizes, [16, 64], [1, 4], max_length=10_000)
    with pytest.raises(TypeError, match="state segment_lengths and dilation_rates, or max_length"):
        make(*sizes)
    with pytest.raises(TypeError, match="state segment_lengths and dilation_rates, or max_length"):
        make(*sizes, [16, 64])


def test_every_published_module_with_a_pattern_takes_a_length() -> None:
    takes = {
        name
        for name in package.__all__
        if inspect.isclass(getattr(package, name))
        and issubclass(getattr(package, name), torch.nn.Module)
        and "dilation_rates" in inspect.signature(getattr(package, name)).parameters
    }
    assert takes == {*ATTENTION, *MULTIHEAD, *LAYERS}


def test_a_model_takes_a_length() -> None:
    sizes = {"d_model": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
    model = LongNetLM(**sizes, max_length=10_000)
    causal = branches_for(10_000, heads=2, is_causal=True)
    assert (model.config.segment_lengths, model.config.dilation_rates) == causal
    assert model.layers[0].self_attn.segment_lengths == model.config.segment_lengths
    with pytest.raises(TypeError, match="state one or the other"):
        ModelConfig(**sizes, segment_lengths=(16, 64), dilation_rates=(1, 2), max_length=10_000)


# The warning


def rows(tokens: int, heads: int = 4, kv_heads: int | None = None) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, h, 8) for h in (heads, kv_heads or heads, kv_heads or heads)]


@pytest.mark.usefixtures("nothing_warned")
def test_a_sequence_longer_than_the_longest_segment_warns_once_per_pattern() -> None:
    attention = DilatedAttention([16, 64], [1, 4])
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for tokens in (64, 65, 100, 100):
            attention(*rows(tokens))
        DilatedAttention([16, 64], [1, 4])(*rows(130))
    assert [(w.category, Path(w.filename).name) for w in given] == [(ReachWarning, "test_reach.py")]
    assert "relate at most 64 of 65 tokens: nothing crosses a border" in str(given[0].message)
    assert "branches_for(65, heads=4) or max_length=65" in str(given[0].message)
    with pytest.warns(ReachWarning, match=r"\[16, 60\] with rates \[1, 4\] relate at most 60 of 100 tokens: no row"):
        dilated_attention(*rows(100), [16, 60], [1, 4])


@pytest.mark.usefixtures("nothing_warned")
def test_a_rate_beyond_the_key_heads_warns() -> None:
    with pytest.warns(ReachWarning, match="2 key/value heads in the layout 'interleaved' read 2 of the 4 grids"):
        dilated_attention(*rows(64, heads=4, kv_heads=2), [16, 64], [1, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dilated_attention(*rows(64, heads=2), [16, 32, 64], [1, 2, 2])
        dilated_attention(*rows(64, heads=2), [16, 64], [1, 8], head_offset=2, total_heads=8)  # of a shard
        dilated_attention(*rows(40, heads=4), *branches_for(40, heads=4, shortest=16))
    # ceil(6 / 4) heads share an offset, so that three offsets of four are read
    with pytest.warns(ReachWarning, match="6 key/value heads in the layout 'blocked' read 3 of the 4 grids"):
        dilated_attention(*rows(64, heads=6), [16, 64], [1, 4], head_layout="blocked")


@pytest.mark.usefixtures("nothing_warned")
def test_documents_within_the_longest_segment_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dilated_attention(*rows(100), [16, 64], [1, 4], cu_seqlens=torch.tensor([0, 60, 100]))
        dilated_attention(*rows(90), [16, 64], [1, 4], seqlens=torch.tensor([64]))
    with pytest.warns(ReachWarning, match="at most 64 of 70 tokens"):
        dilated_attention(*rows(101), [16, 64], [1, 4], cu_seqlens=torch.tensor([0, 70, 100]))


@pytest.mark.usefixtures("nothing_warned")
def test_a_prompt_longer_than_the_longest_segment_warns_and_a_token_does_not() -> None:
    cache = DilatedKVCache([16, 64], [1, 4], batch=1, num_heads=4, head_dim=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.attend(*rows(64))
        cache.attend(*rows(1))
    with pytest.warns(ReachWarning, match=r"branches_for\(70, heads=4, is_causal=True\) connects all of them"):
        cache.attend(*rows(5))


@pytest.mark.usefixtures("nothing_warned")
def test_the_warning_is_silenced_by_name_and_does_not_break_a_compiled_graph() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(DilatedAttention([16, 64], [1, 8]), fullgraph=True, backend="eager")
        assert compiled(*rows(100)).shape == (1, 100, 4, 8)
        warnings.filterwarnings("ignore", category=ReachWarning)
        dilated_attention(*rows(100), [16, 64], [2, 8])


@pytest.mark.usefixtures("nothing_warned")
def test_the_defaults_of_training_connect_their_sequences() -> None:
    config = TrainConfig()
    model = LongNetLM(config.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReachWarning)
        model(torch.zeros(1, config.sequence_length, dtype=torch.long))
    assert (
        reach_shares(config.model.spec, config.sequence_length, config.model.num_heads).min(1).values[1].item() == 1.0
    )
