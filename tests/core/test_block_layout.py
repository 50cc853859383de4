"""Layouts: every pattern keeps its budget, its own tile and nothing of the future, and compresses without loss."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.core import block_layout, document_tiles
from dilated_attention_pytorch.core.block_layout import allowed_pairs, grids_of, keys_seen, layout_for, layout_of
from dilated_attention_pytorch.core.block_pattern import PATTERN_TYPES, SparsePatternConfig, preference, tiles_of
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.entries import Entry
from dilated_attention_pytorch.core.pattern import dense_mask
from dilated_attention_pytorch.core.plans import PatternCache, reset_global_pattern_cache
from dilated_attention_pytorch.core.spec import DilatedSpec

from ..thorough import examples

CPU = torch.device("cpu")
STATIC = [pattern for pattern in PATTERN_TYPES if pattern != "content_adaptive"]
pytestmark = pytest.mark.filterwarnings("ignore:no branch of")


def mask_of(config: SparsePatternConfig, tiles: int, is_causal: bool = False) -> torch.Tensor:
    """The kept tiles of one whole segment."""
    spec = DilatedSpec.of([tiles * config.block_size], [1])
    n = tiles * config.block_size
    q, k = torch.randn(2, 1, n, 1, 4).unbind(0)
    layout = layout_of(Call(spec=spec, is_causal=is_causal, sparse=config), q, k)
    return layout.branches[0].mask(0, 0, 0, tiles)


configs = st.builds(
    SparsePatternConfig,
    st.sampled_from(PATTERN_TYPES),
    st.floats(0.01, 1.0),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, None, 3]),
    st.sampled_from([None, 0, 5]),
    st.integers(0, 2**40),
)


@settings(max_examples=examples(30))
@given(configs, st.integers(1, 40), st.booleans())
def test_every_row_keeps_its_own_tile_its_budget_and_nothing_of_the_future(config, tiles, is_causal) -> None:
    mask = mask_of(config, tiles, is_causal)
    assert mask.diagonal().all()
    if is_causal:
        assert not mask.triu(1).any()
    visible = torch.arange(1, tiles + 1) if is_causal else torch.full((tiles,), tiles)
    over = mask.sum(-1) - config.sparsity_ratio * visible
    assert (over <= 1).all()
    if config.local_window_size is None or config.pattern_type not in ("local_window", "global_local"):
        assert (over >= -1).all()


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_the_whole_meets_the_ratio(pattern, ratio) -> None:
    for is_causal in (False, True):
        mask = mask_of(SparsePatternConfig(pattern, ratio, 1), 200, is_causal)
        visible = 200 * 201 / 2 if is_causal else 200 * 200
        assert mask.sum().item() / visible == pytest.approx(ratio, rel=0.05 if ratio > 0.05 else 0.1)


def rows(config: SparsePatternConfig, row: int, tiles: int = 32, is_causal: bool = False) -> list[int]:
    return mask_of(config, tiles, is_causal)[row].nonzero().flatten().tolist()


def test_a_local_window_is_the_nearest_tiles() -> None:
    assert rows(SparsePatternConfig("local_window", 5 / 32, 1), 10) == [8, 9, 10, 11, 12]
    assert rows(SparsePatternConfig("local_window", 5 / 32, 1), 0) == [0, 1, 2, 3, 4]
    assert rows(SparsePatternConfig("local_window", 0.25, 1), 31, is_causal=True) == list(range(24, 32))


def test_a_stated_window_is_the_limit_of_the_window_patterns_and_first_in_the_others() -> None:
    window = {"local_window_size": 8}
    assert rows(SparsePatternConfig("local_window", 1.0, 4, **window), 10) == [9, 10, 11]
    assert rows(SparsePatternConfig("global_local", 1.0, 4, **window), 10) == [0, 9, 10, 11]
    for pattern in ("dilated_sparse", "strided", "random", "hierarchical", "content_adaptive"):
        assert {9, 10, 11} <= set(rows(SparsePatternConfig(pattern, 4 / 32, 4, **window), 10))


def test_dilated_distances_double() -> None:
    assert rows(SparsePatternConfig("dilated_sparse", 6 / 32, 1), 31, is_causal=True) == [15, 23, 27, 29, 30, 31]


def test_global_tiles_are_seen_by_all_rows() -> None:
    for pattern in PATTERN_TYPES:
        mask = mask_of(SparsePatternConfig(pattern, 0.2, 4, global_tokens=6), 32)
        assert mask[:, :2].all()
    assert mask_of(SparsePatternConfig("global_local", 0.1, 4), 32)[:, 0].all()
    assert not mask_of(SparsePatternConfig("global_local", 0.1, 4, global_tokens=0), 32)[:, 0].all()


def test_a_stride_follows_from_the_ratio() -> None:
    assert rows(SparsePatternConfig("strided", 0.25, 1), 9) == [1, 5, 9, 13, 17, 21, 25, 29]


def test_random_tiles_follow_from_the_seed_and_differ_between_rows_and_branches() -> None:
    one = mask_of(SparsePatternConfig("random", 0.2, 1, seed=1), 64)
    assert torch.equal(one, mask_of(SparsePatternConfig("random", 0.2, 1, seed=1), 64))
    assert not torch.equal(one, mask_of(SparsePatternConfig("random", 0.2, 1, seed=2), 64))
    assert len({tuple(row) for row in one.tolist()}) == 64
    spec = DilatedSpec.of([64, 64], [1, 1])
    layout = layout_for(spec, 64, spec.offsets(1), SparsePatternConfig("random", 0.2, 1), False, CPU)
    first, second = (branch.mask(0, 0, 0, 64) for branch in layout.branches)
    assert not torch.equal(first, second)


def test_a_hierarchy_shows_round_tiles_from_afar() -> None:
    kept = rows(SparsePatternConfig("hierarchical", 8 / 32, 1), 21)
    assert {0, 16, 20, 21, 22, 24} <= set(kept)
    assert not {1, 3, 5, 7, 9} & set(kept)


def test_content_chooses_the_tiles_with_the_highest_mean_products() -> None:
    block, tiles = 4, 8
    spec = DilatedSpec.of([block * tiles], [1])
    k = torch.eye(tiles).repeat_interleave(block, 0)[None, :, None]  # the keys of tile t are its unit vector
    wanted = torch.randperm(tiles)
    q = torch.zeros(tiles, tiles)
    q[torch.arange(tiles), wanted] = 1.0
    q = q.repeat_interleave(block, 0)[None, :, None].expand(-1, -1, 2, -1)
    config = SparsePatternConfig("content_adaptive", 2 / tiles, block)
    for scale, expected in ((1.0, True), (-1.0, False)):
        call = Call(spec=spec, sparse=config, scale=scale)
        mask = layout_of(call, q, k).branches[0].mask(0, 0, 1, tiles)
        elsewhere = wanted != torch.arange(tiles)
        assert (mask[torch.arange(tiles), wanted] == expected)[elsewhere].all()


def test_ties_of_content_go_to_the_first_tiles() -> None:
    spec = DilatedSpec.of([32], [1])
    call = Call(spec=spec, sparse=SparsePatternConfig("content_adaptive", 3 / 8, 4))
    q = torch.zeros(1, 32, 1, 4)
    assert layout_of(call, q, q).branches[0].mask(0, 0, 0, 8)[5].nonzero().flatten().tolist() == [0, 1, 5]


draws = {
    "config": configs,
    "branches": st.lists(st.tuples(st.integers(4, 60), st.integers(1, 7)), min_size=1, max_size=3),
    "n": st.integers(1, 90),
    "heads": st.sampled_from([(2, 2), (3, 1), (4, 2)]),
    "head_layout": st.sampled_from(["interleaved", "blocked", "grouped"]),
    "is_causal": st.booleans(),
}


@settings(max_examples=examples(25))
@given(**draws)
def test_columns_are_the_rows_transposed_and_both_ascend(config, branches, n, heads, head_layout, is_causal) -> None:
    spec = DilatedSpec.of([w for w, _ in branches], [r for _, r in branches], head_layout)
    call = Call(spec=spec, is_causal=is_causal, sparse=config)
    q, k = torch.randn(2, n, heads[0], 4), torch.randn(2, n, heads[1], 4)
    layout = layout_of(call, q, k)
    for b in (0, 1):
        for index, head, segment, at in grids_of(spec, call.query_head_offsets(*heads), n):
            branch = layout.branches[index]
            start = int(branch.grids[segment, head]) + b * branch.rows_per_batch_row
            tiles = tiles_of(len(at), config.block_size)
            lists = []
            for first, kept in ((branch.key_first, branch.keys), (branch.query_first, branch.queries)):
                mask = torch.zeros(tiles, tiles, dtype=torch.bool)
                for tile in range(tiles):
                    found = kept[first[start + tile] : first[start + tile + 1]].tolist()
                    assert found == sorted(set(found))
                    mask[tile, found] = True
                lists.append(mask)
            assert torch.equal(lists[0], lists[1].T)
            assert torch.equal(lists[0], branch.mask(b, segment, head, tiles))


@settings(max_examples=examples(15))
@given(**draws)
def test_keys_seen_are_counted_as_the_written_mask_counts_them(
    config, branches, n, heads, head_layout, is_causal
) -> None:
    spec = DilatedSpec.of([w for w, _ in branches], [r for _, r in branches], head_layout)
    call = Call(spec=spec, is_causal=is_causal, sparse=config)
    offsets = call.query_head_offsets(*heads)
    layout = layout_of(call, torch.randn(1, n, heads[0], 4), torch.randn(1, n, heads[1], 4))
    mask = allowed_pairs(layout, spec, offsets, 0, n) & dense_mask(spec, offsets, n, is_causal=is_causal)
    assert torch.equal(keys_seen(layout, spec, offsets, n, is_causal=is_causal), mask.sum((0, 3)).T)


def test_rows_worked_out_apart_are_the_same(monkeypatch) -> None:
    spec = DilatedSpec.of([64, 96], [1, 2])
    q, k = torch.randn(2, 150, 4, 8), torch.randn(2, 150, 2, 8)
    for pattern in PATTERN_TYPES:
        call = Call(spec=spec, sparse=SparsePatternConfig(pattern, 0.3, 4), is_causal=True)
        together = layout_of(call, q, k)
        with monkeypatch.context() as patch:
            patch.setattr(block_layout, "TILES_AT_ONCE", 20)
            apart = layout_of(call, q, k)
        for one, other in zip(together.branches, apart.branches):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.queries, other.queries)


def test_a_layout_is_remembered_where_there_is_a_cache() -> None:
    q = torch.randn(1, 64, 2, 4)
    call = Call(spec=DilatedSpec.of([64], [1]), sparse=SparsePatternConfig("random", 0.3, 4))
    cache = PatternCache()
    assert layout_of(call, q, q, cache) is layout_of(call, q, q, cache)
    assert cache.get_stats()["hits"] == 1
    assert layout_of(call, q, q) is not layout_of(call, q, q)


def test_layouts_of_different_calls_are_different_entries() -> None:
    config = SparsePatternConfig("random", 0.3, 4)
    spec = DilatedSpec.of([64], [4])
    cache = PatternCache()
    q, k = torch.randn(1, 64, 4, 4), torch.randn(1, 64, 2, 4)
    calls = [
        (Call(spec=spec, sparse=config), q, q),
        (Call(spec=spec, sparse=config), q, k),
        (Call(spec=spec, sparse=config), q[:, :50], q[:, :50]),
        (Call(spec=spec, sparse=config, is_causal=True), q, q),
        (Call(spec=spec, sparse=config, head_offset=4, total_heads=8), q, q),
        (Call(spec=spec, sparse=SparsePatternConfig("random", 0.3, 4, seed=1)), q, q),
        (Call(spec=DilatedSpec.of([64], [4], "blocked"), sparse=config), q, q),
    ]
    for call in calls:
        layout_of(*call, cache)
    assert len(cache) == len(calls)


def test_a_layout_of_lengths_is_remembered_by_their_content() -> None:
    q = torch.randn(1, 64, 2, 4)
    call = Call(spec=DilatedSpec.of([64], [1]), sparse=SparsePatternConfig("strided", 0.3, 4))
    cache = PatternCache()
    spans = torch.tensor([[0, 30], [30, 64]])
    layout = layout_of(call, q, q, cache, spans)
    assert layout_of(call, q, q, cache, spans.clone()) is layout
    assert layout_of(call, q.expand(2, -1, -1, -1), q.expand(2, -1, -1, -1), cache, spans) is not layout
    spans[0, 0] = 3
    assert layout_of(call, q, q, cache, spans) is not layout
    assert layout_of(call, q, q, cache) is not layout


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_lengths_are_read_on_their_device_only(pattern, is_causal) -> None:
    """Tensors on the device meta have no values that a host could read, nor do they mix with those of a CPU."""
    call = Call.of([64, 96], [1, 3], is_causal=is_causal, sparse=SparsePatternConfig(pattern, 0.3, 4))
    q, k = torch.empty(1, 150, 4, 8, device="meta"), torch.empty(1, 150, 2, 8, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *device, **settings: nullcontext())
        layout = layout_of(call, q, k, None, torch.empty(5, 2, dtype=torch.int64, device="meta"))
    assert {x.device.type for branch in layout.branches for x in branch if isinstance(x, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("pattern", PATTERN_TYPES)
def test_the_default_device_does_not_matter(pattern) -> None:
    call = Call.of([64, 96], [1, 3], sparse=SparsePatternConfig(pattern, 0.3, 4))
    q, k, spans = torch.randn(2, 150, 4, 8), torch.randn(2, 150, 2, 8), torch.tensor([[0, 101], [30, 150]])
    for lengths in (None, spans):
        expected = layout_of(call, q, k, None, lengths)
        reset_global_pattern_cache()  # which remembers what `random` has drawn
        with torch.device("meta"):
            found = layout_of(call, q, k, None, lengths)
        for ours, theirs in zip(found.branches, expected.branches):
            assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(ours, theirs))
            assert ours.keys.device == CPU


def test_documents_worked_out_apart_are_the_same(monkeypatch) -> None:
    q, k = torch.randn(2, 150, 4, 8), torch.randn(2, 150, 2, 8)
    spans = torch.tensor([[0, 101], [30, 150]])
    for pattern in PATTERN_TYPES:
        call = Call.of([64, 96], [1, 2], sparse=SparsePatternConfig(pattern, 0.3, 4), is_causal=True)
        together = layout_of(call, q, k, None, spans)
        with monkeypatch.context() as patch:
            patch.setattr(document_tiles, "TILES_AT_ONCE", 20)
            patch.setattr(document_tiles, "_ELEMENTS_AT_ONCE", 20)
            apart = layout_of(call, q, k, None, spans)
        for one, other in zip(together.branches, apart.branches):
            kept = int(one.key_first[-1])
            assert torch.equal(one.keys[:kept], other.keys[:kept])
            assert torch.equal(one.queries[:kept], other.queries[:kept])


def test_lengths_elsewhere_are_refused() -> None:
    q = torch.randn(1, 64, 2, 4)
    call = Call.of([64], [1], sparse=SparsePatternConfig(block_size=4))
    with pytest.raises(ValueError, match="query and spans must share a device, got cpu and meta"):
        layout_of(call, q, q, None, torch.empty(1, 2, dtype=torch.int64, device="meta"))


def test_content_is_never_remembered() -> None:
    call = Call(spec=DilatedSpec.of([64], [1]), sparse=SparsePatternConfig("content_adaptive", 0.3, 4))
    cache = PatternCache()
    layout_of(call, *torch.randn(2, 1, 64, 2, 4), cache)
    layout_of(call, *torch.randn(2, 1, 64, 2, 4), cache, torch.tensor([[3, 60]]))
    assert len(cache) == 0


def test_a_query_tile_knows_the_turn_of_each_of_its_keys() -> None:
    call = Call(spec=DilatedSpec.of([300], [1]), sparse=SparsePatternConfig("random", 0.3, 8))
    (kept,) = layout_of(call, *torch.randn(2, 1, 300, 1, 4)).branches
    for column in range(len(kept.query_first) - 1):
        for entry in range(kept.query_first[column], kept.query_first[column + 1]):
            place = kept.key_first[kept.queries[entry] + 1] - 1 - kept.query_turns[entry]
            assert kept.keys[place] == column


def test_an_entry_knows_the_tensors_of_a_layout() -> None:
    layout = layout_of(
        Call(spec=DilatedSpec.of([64], [1]), sparse=SparsePatternConfig("strided", 0.3, 4)),
        *torch.randn(2, 1, 64, 2, 4),
    )
    tensors = [x for x in layout.branches[0] if isinstance(x, torch.Tensor)]
    assert len(tensors) == 6
    assert Entry(layout).bytes == sum(x.nbytes for x in tensors)


@pytest.mark.parametrize("is_causal", [True, False])
def test_autocast_does_not_change_what_content_chooses(is_causal) -> None:
    config = SparsePatternConfig("content_adaptive", 0.3, 4)
    call = Call(spec=DilatedSpec.of([256], [1]), sparse=config, is_causal=is_causal)
    q, k = torch.randn(2, 1, 256, 2, 16)
    outside = layout_of(call, q, k)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layout_of(call, q, k)
    assert torch.equal(outside.branches[0].keys, inside.branches[0].keys)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sparsity_ratio": 0.0}, ValueError, "above 0 and at most 1, got 0.0"),
        ({"sparsity_ratio": 1.5}, ValueError, "above 0 and at most 1, got 1.5"),
        ({"sparsity_ratio": float("nan")}, ValueError, "a finite number, got nan"),
        ({"sparsity_ratio": "0.1"}, TypeError, "must be a finite number"),
        ({"block_size": 48}, ValueError, "a power of two, got 48: take 32 or 64"),
        ({"block_size": 0}, ValueError, "block_size must be a whole number of at least 1, got 0"),
        ({"block_size": 16.0}, TypeError, "block_size must be a whole number of at least 1, got 16.0"),
        ({"pattern_type": "diagonal"}, ValueError, "one of local_window, dilated_sparse.*got 'diagonal'"),
        ({"local_window_size": 0}, ValueError, "local_window_size must be a whole number of at least 1, got 0"),
        ({"global_tokens": -1}, ValueError, "global_tokens must be a whole number of at least 0, got -1"),
        ({"seed": -1}, ValueError, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        SparsePatternConfig(**settings)


@pytest.mark.parametrize("pattern", STATIC)
def test_a_larger_grid_orders_the_tiles_of_a_smaller_one_alike(pattern) -> None:
    config = SparsePatternConfig(pattern, 0.3, 4)
    large = preference(config, 40, torch.arange(40), 1)
    for tiles in (1, 7, 16, 33):
        small = preference(config, tiles, torch.arange(tiles), 1)
        assert torch.equal(small.argsort(dim=-1, stable=True), large[:tiles, :tiles].argsort(dim=-1, stable=True))
