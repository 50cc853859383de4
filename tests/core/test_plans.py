from __future__ import annotations

import copy
import os
import pickle
import signal
import threading

import pytest
import torch

from dilated_attention_pytorch import memory_cleanup
from dilated_attention_pytorch.core import (
    DilatedPatternCache,
    OptimizedPatternCache,
    PatternCache,
    SimpleGPUCache,
    SparsePatternConfig,
    WorkspacePool,
    document_spans,
    get_global_memory_pool,
    get_global_pattern_cache,
    plans,
    reset_global_pattern_cache,
)
from dilated_attention_pytorch.core.entries import SameTensor, size_of, spans_key
from dilated_attention_pytorch.core.optimized_pattern_cache import get_optimized_pattern_cache, hot_device
from dilated_attention_pytorch.functional import dilated_attention


def rows(n: int = 4) -> torch.Tensor:
    return torch.arange(n)


def hot_keys(cache: OptimizedPatternCache) -> set[object]:
    return {key for key, entry in cache._cache.items() if entry.copies}


@pytest.fixture(params=[PatternCache, OptimizedPatternCache])
def cache(request):
    """A cache with four places."""
    return request.param(max_cpu_patterns=4) if request.param is OptimizedPatternCache else request.param(4)


def test_what_a_caller_writes_reaches_no_entry(cache) -> None:
    mine = {"rows": rows(), "pair": (rows(2), [rows(3)])}
    cache.put("a", mine)
    mine["rows"].fill_(9)
    mine["pair"][1].append(rows())
    for _ in range(6):  # beyond promotion
        got = cache.get("a")
        assert torch.equal(got["rows"], rows())
        assert len(got["pair"][1]) == 1
        got["rows"].fill_(7)
        got["pair"][1].clear()


def test_what_is_remembered_is_shared_until_its_kind_is_forgotten(cache) -> None:
    made = [cache.remember("lengths", 5, lambda: (rows(), "name")) for _ in range(3)]
    assert all(one[0] is made[0][0] for one in made)
    cache.remember("parts", 5, lambda: "other")
    cache.forget("lengths")
    assert cache.remember("lengths", 5, lambda: (rows(7), "name"))[0].shape == (7,)
    assert cache.remember("parts", 5, lambda: "again") == "other"


def test_the_hot_tier_holds_what_is_remembered_within_its_limits() -> None:
    cache = OptimizedPatternCache(max_gpu_patterns=2)
    made = {key: cache.remember("lengths", key, lambda: [rows()]) for key in "abc"}
    stats = cache.get_stats()
    assert (stats["gpu_patterns"], stats["size"], stats["gpu_hits"]) == (2, 3, 0)
    assert stats["gpu_memory_used_mb"] == 2 * rows().nbytes / 2**20
    assert cache.remember("lengths", "c", list)[0] is made["c"][0]
    assert cache.get_stats()["gpu_hits"] == 1
    back = cache.remember("lengths", "a", list)  # from the CPU, not made again
    assert torch.equal(back[0], rows())
    assert cache.get_stats()["cpu_hits"] == 1
    assert cache.remember("lengths", "a", list)[0] is back[0]
    cache.forget("lengths")
    assert cache.get_stats()["gpu_patterns"] == cache.get_stats()["gpu_memory_used_mb"] == 0


def test_the_least_recently_used_goes_first(cache) -> None:
    for key in "abcd":
        cache.put(key, rows())
    cache.get("a")
    cache.put("e", rows())
    assert [key for key in "abcde" if key in cache] == ["a", "c", "d", "e"]
    assert cache.get_stats()["evictions"] == 1


@pytest.mark.parametrize(
    ("pattern", "error"),
    [(torch.eye(2).to_sparse(), r"must be dense.*to_dense\(\)"), (torch.empty(2, device="meta"), "must have values")],
    ids=["sparse", "meta"],
)
def test_a_pattern_that_cannot_be_copied_is_refused(cache, pattern, error) -> None:
    with pytest.raises(ValueError, match=error):
        cache.put("key", pattern)
    assert cache.get("key") is None


def test_putting_a_key_again_replaces_it_and_evicts_nobody(cache) -> None:
    for key in "abcd":
        cache.put(key, rows())
    cache.put("d", rows(7))
    assert len(cache) == len(cache._cache) == 4
    assert torch.equal(cache.get("d"), rows(7))
    assert cache.get_stats()["evictions"] == 0


def test_a_pinned_pattern_is_never_evicted(cache) -> None:
    cache.put("kept", rows())
    cache.pin("kept")
    for i in range(20):
        cache.put(i, rows())
    assert "kept" in cache
    assert len(cache) == 4
    cache.put("kept", rows(7))  # a pattern put anew stays pinned
    for i in range(20):
        cache.put(i, rows())
    assert torch.equal(cache.get("kept"), rows(7))


def test_pins_leave_one_place_free(cache) -> None:
    for key in "abcd":
        cache.put(key, rows())
    for key in "abc":
        cache.pin(key)
    with pytest.raises(ValueError, match="at most 3 of 4 patterns can be pinned, and 3 are"):
        cache.pin("d")
    with pytest.raises(KeyError, match="put it first"):
        cache.pin("unknown")


def test_statistics_count_what_happened(cache) -> None:
    assert cache.get_stats()["hit_rate"] == 0.0
    cache.put("a", rows())
    found = [cache.get(key) is not None for key in ("a", "b", "a", "a")]
    assert found == [True, False, True, True]
    stats = cache.get_stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"], stats["size"], stats["max_size"]) == (3, 1, 0.75, 1, 4)
    cache.clear()
    assert (cache.get_stats()["hits"], len(cache)) == (0, 0)


@pytest.mark.parametrize("size", [0, -3, 2.5, True])
def test_a_size_that_holds_nothing_is_refused(size) -> None:
    with pytest.raises((TypeError, ValueError), match="max_size must be a whole number of at least 1, got"):
        PatternCache(size)
    with pytest.raises((TypeError, ValueError), match="max_gpu_patterns must be"):
        OptimizedPatternCache(max_gpu_patterns=size)
    with pytest.raises((TypeError, ValueError), match="max_cpu_patterns must be"):
        OptimizedPatternCache(max_cpu_patterns=size)


def test_a_memory_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="gpu_memory_limit_mb must be a finite number above 0, got 0"):
        OptimizedPatternCache(gpu_memory_limit_mb=0)


def test_an_error_while_making_leaves_the_cache_as_it_was(cache) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.remember("parts", "key", lambda: 1 / 0)
    assert len(cache) == 0
    assert cache.remember("parts", "key", lambda: "made") == "made"
    assert cache.remember("parts", "key", lambda: 1 / 0) == "made"


def test_two_who_make_the_same_get_the_same(cache) -> None:
    first = cache.remember("parts", "key", lambda: cache.remember("parts", "key", object))
    assert first is cache.remember("parts", "key", lambda: None)


def test_only_kinds_whose_hits_pay_are_remembered() -> None:
    cache = PatternCache()
    with pytest.raises(ValueError, match="no kind of entry 'moods'"):
        cache.remember("moods", "key", object)
    mask = torch.tensor([[False, False, True]])
    assert document_spans(1, 3, key_padding_mask=mask, cache=cache).tolist() == [[0, 2]]
    assert len(cache) == 0


def test_a_kind_may_have_a_bound_of_its_own() -> None:
    cache, bound = PatternCache(), plans.KINDS["zero keys"]
    cache.remember("parts", 0, object)
    for key in range(bound + 2):
        cache.remember("zero keys", key, object)
    assert cache.get_stats()["kinds"]["zero keys"]["size"] == bound
    assert [key for key in range(bound + 2) if ("zero keys", key) not in cache] == [0, 1]
    assert ("parts", 0) in cache


def test_statistics_tell_the_kinds_apart(cache) -> None:
    cache.put(("parts of mine", 1), rows())
    cache.get(("parts of mine", 1))
    for key in (1, 2, 1):
        cache.remember("parts", key, object)
    stats = cache.get_stats()
    assert stats["kinds"] == {
        "parts": {"hits": 1, "misses": 2, "size": 2},
        "pattern": {"hits": 1, "misses": 0, "size": 1},
    }
    assert (stats["hits"], stats["misses"], stats["size"]) == (2, 2, 3)


def test_the_table_of_the_process_is_the_global_cache() -> None:
    reset_global_pattern_cache()
    assert plans.recall("plan", "mine") is None
    assert plans.remember("plan", "mine", lambda: "made") == "made"
    assert get_global_pattern_cache().remember("plan", "mine", lambda: "again") == "made"
    assert get_global_pattern_cache().get_stats()["kinds"] == {"plan": {"hits": 1, "misses": 1, "size": 1}}
    assert plans.recall("plan", "mine") == "made"
    assert get_global_pattern_cache().get_stats()["kinds"] == {"plan": {"hits": 2, "misses": 1, "size": 1}}
    reset_global_pattern_cache()
    assert plans.remember("plan", "mine", lambda: "anew") == "anew"
    reset_global_pattern_cache()


def test_a_tracer_sees_what_is_made_and_no_table() -> None:
    cache = PatternCache()

    @torch.compile(fullgraph=True, backend="eager")
    def shifted(x):
        return x + cache.remember("plan", "shift", lambda: 3)

    assert torch.equal(shifted(rows()), rows() + 3)
    assert len(cache) == 0


def test_a_copy_of_a_cache_has_its_settings_and_the_global_one_stays_itself() -> None:
    own = OptimizedPatternCache(max_gpu_patterns=3, gpu_memory_limit_mb=7.0, enable_async=False)
    own.put("a", rows())
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert (twin.max_gpu_patterns, twin.gpu_memory_limit_mb, twin.enable_async, len(twin)) == (3, 7.0, False, 0)
    shared = get_global_pattern_cache()
    assert copy.deepcopy(shared) is shared
    assert pickle.loads(pickle.dumps(shared)) is shared


def test_keys_are_the_documented_ones() -> None:
    assert DilatedPatternCache.dilated_key(64, (16, 32), (1, 2)) == "dilated_s64_seg[16, 32]_dil[1, 2]"
    assert DilatedPatternCache.sparse_key(64, "dilated_sparse", 0.25, 16) == "sparse_s64_tdilated_sparse_r0.250_b16"


def test_two_ratios_never_share_a_key() -> None:
    ratios = [0.1, 0.125, 0.1004, 0.10049, 1 / 3, 0.333, 1]
    keys = [DilatedPatternCache.sparse_key(64, "random", ratio, 16) for ratio in ratios]
    assert len(set(keys)) == len(keys)
    assert [keys[0], keys[1], keys[5]] == [f"sparse_s64_trandom_r{text}_b16" for text in ("0.100", "0.125", "0.333")]
    assert DilatedPatternCache.sparse_key(64, "random", 0.1) == "sparse_s64_trandom_r0.100"


def test_the_environment_sets_the_global_cache_when_it_is_reset(monkeypatch) -> None:
    monkeypatch.setenv("PATTERN_CACHE_MAX_SIZE", "2")
    monkeypatch.setenv("PATTERN_CACHE_ENABLE_PROFILING", "1")
    try:
        cache = get_global_pattern_cache()
        reset_global_pattern_cache()
        assert get_global_pattern_cache() is cache
        for key in range(3):
            cache.remember("parts", key, object)
        cache.remember("parts", 2, object)
        stats = cache.get_stats()
        assert (stats["size"], stats["max_size"], stats["evictions"]) == (2, 2, 1)
        assert (stats["profile"]["parts"]["hits"], stats["profile"]["parts"]["misses"]) == (1, 3)
        monkeypatch.setenv("PATTERN_CACHE_MAX_SIZE", "0")
        with pytest.raises(ValueError, match="PATTERN_CACHE_MAX_SIZE must be a whole number of at least 1, got '0'"):
            reset_global_pattern_cache()
    finally:
        monkeypatch.undo()
        reset_global_pattern_cache()
    assert get_global_pattern_cache().max_size == 1000


def test_more_than_three_accesses_make_a_pattern_hot() -> None:
    cache = OptimizedPatternCache()
    cache.put("a", rows())
    hot = []
    for _ in range(6):
        cache.get("a")
        hot.append(cache.get_stats()["gpu_patterns"])
    assert hot == [0, 0, 0, 1, 1, 1]
    stats = cache.get_stats()
    assert (stats["gpu_hits"], stats["cpu_hits"], stats["hits"]) == (2, 4, 6)
    assert stats["gpu_memory_used_mb"] * 2**20 == rows().numel() * 8


def test_the_hot_tier_keeps_its_limits_and_its_pins() -> None:
    megabyte = torch.zeros(2**18)
    cache = OptimizedPatternCache(max_gpu_patterns=3, gpu_memory_limit_mb=2.5, enable_prefetch=False)
    cache.put("pinned", megabyte, store_on_gpu=True, pin=True)
    for key in "abcdef":
        cache.put(key, megabyte, store_on_gpu=True)
        stats = cache.get_stats()
        assert stats["gpu_patterns"] <= 2
        assert stats["gpu_memory_used_mb"] <= 2.5
    assert hot_keys(cache) == {"pinned", "f"}
    cache.put("too large", torch.zeros(2**20), store_on_gpu=True)
    assert hot_keys(cache) == {"pinned", "f"}
    assert cache.get("too large").shape == (2**20,)


def test_a_pattern_put_anew_is_not_served_from_the_hot_tier_as_it_was() -> None:
    cache = OptimizedPatternCache()
    cache.put("a", rows(), store_on_gpu=True)
    cache.put("a", rows(9))
    assert torch.equal(cache.get("a"), rows(9))
    assert cache.get_stats()["gpu_memory_used_mb"] == 0


def test_a_batch_is_fetched_in_the_order_asked_for() -> None:
    cache = OptimizedPatternCache(enable_prefetch=False)
    for n in (2, 3, 4):
        cache.put(n, rows(n))
    for _ in range(5):
        got = cache.get_batch([4, "unknown", 2])
        assert [None if x is None else len(x) for x in got] == [4, None, 2]
    stats = cache.get_stats()
    assert (stats["hits"], stats["misses"], stats["gpu_hits"]) == (10, 5, 2)
    assert cache.get_batch([]) == []


def test_the_pattern_that_followed_last_time_is_fetched_ahead() -> None:
    cache = OptimizedPatternCache()
    for key in "abc":
        cache.put(key, rows())
    for key in "ab":
        cache.get(key)
    assert cache.get_stats()["gpu_patterns"] == 0
    cache.get("a")  # after which b came
    assert hot_keys(cache) == {"b"}
    assert cache.get_stats()["prefetches"] == 1
    without = OptimizedPatternCache(enable_prefetch=False)
    for key in "ababa":
        without.put(key, rows()) if key not in without else without.get(key)
    assert without.get_stats()["prefetches"] == 0


def test_the_simple_cache_has_everything_from_the_start() -> None:
    key = "dilated_s8_seg[4, 8]_dil[1, 3]"
    cache = SimpleGPUCache([key])
    assert [one.tolist() for one in cache.gpu_patterns[key]] == [list(range(8)), [0, 3, 6]]
    cache.get(key)[0].fill_(9)
    assert cache.get(key)[0].tolist() == list(range(8))
    assert cache.get("unknown") is None
    given = SimpleGPUCache({"mine": rows()})
    assert torch.equal(given.gpu_patterns["mine"], rows())
    with pytest.raises(ValueError, match="is not the key of a dilated pattern: pass the pattern, as in"):
        SimpleGPUCache(["sparse_s8_tlocal_r0.100_b4"])


def test_lengths_are_found_by_content_and_an_in_place_change_is_seen() -> None:
    cache = PatternCache()
    lengths = torch.tensor([0, 3, 7])
    first = document_spans(1, 9, cu_seqlens=lengths, cache=cache)
    assert document_spans(1, 9, cu_seqlens=torch.tensor([0, 3, 7]), cache=cache) is first
    lengths.numpy()[1] = 5  # which PyTorch does not count
    assert document_spans(1, 9, cu_seqlens=lengths, cache=cache).tolist() == [[0, 5], [5, 7]]
    with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
        document_spans(1, 6, cu_seqlens=lengths, cache=cache)
    assert document_spans(2, 9, seqlens=torch.tensor([3, 7]), cache=cache).tolist() == [[0, 3], [0, 7]]


def test_what_inference_remembers_serves_training() -> None:
    cache = PatternCache()
    with torch.inference_mode():
        document_spans(1, 9, cu_seqlens=torch.tensor([0, 3, 7]), cache=cache)
    assert not document_spans(1, 9, cu_seqlens=torch.tensor([0, 3, 7]), cache=cache).is_inference()


def test_a_tensor_as_key_equals_itself_until_it_changes_or_dies() -> None:
    x, other = rows(), rows()
    key = SameTensor(x)
    assert key == SameTensor(x)
    assert hash(key) == hash(SameTensor(x))
    assert key != SameTensor(other)
    x[0] = 5
    assert key != SameTensor(x)
    dead = SameTensor(rows())
    assert dead != SameTensor(rows())


def test_no_spans_are_a_key_and_spans_on_a_cpu_are_found_by_content() -> None:
    assert spans_key(None) == ()
    assert spans_key(torch.tensor([[0, 3], [3, 7]])) == spans_key(torch.tensor([[0, 3], [3, 7]])) == (0, 3, 3, 7)


def test_threads_never_see_more_than_the_bound_or_another_pattern() -> None:
    caches = [PatternCache(16), OptimizedPatternCache(4, 16, gpu_memory_limit_mb=0.001)]
    wrong: list[object] = []

    def work(cache, seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for key in torch.randint(40, (300,), generator=generator).tolist():
                got = cache.get(key)
                if got is None:
                    cache.put(key, torch.full((8,), key))
                elif not (got == key).all():
                    wrong.append((key, got))
                if len(cache) > 16:
                    wrong.append(len(cache))
        except Exception as error:  # a thread's own would be lost
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(cache, seed)) for cache in caches for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for cache in caches:
        stats = cache.get_stats()
        assert stats["hits"] + stats["misses"] == 8 * 300
        assert stats["size"] <= 16
    assert caches[1].get_stats()["gpu_memory_used_mb"] <= 0.001


@pytest.mark.gpu
def test_a_copy_on_a_side_stream_is_ordered_with_its_reader() -> None:
    cache = OptimizedPatternCache(gpu_memory_limit_mb=4096.0)
    large = torch.arange(1 << 26)
    cache.put("large", large)
    for _ in range(6):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = cache.get("large", target_device="cuda")
            assert got.is_cuda
            same = (got == torch.arange(1 << 26, device="cuda")).all()
        stream.synchronize()
        assert same
    assert cache.get_stats()["gpu_hits"] == 2


@pytest.mark.gpu
def test_what_one_stream_makes_another_may_read() -> None:
    cache = PatternCache()
    maker, reader = torch.cuda.Stream(), torch.cuda.Stream()

    def make():
        torch.cuda._sleep(100_000_000)
        return torch.full((1 << 20,), 3, device="cuda")

    with torch.cuda.stream(maker):
        cache.remember("segment table", "key", make)
    with torch.cuda.stream(reader):
        total = cache.remember("segment table", "key", make).sum()
        cache.clear()  # frees the maker's memory while the reader may still read
    with torch.cuda.stream(maker):
        torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    reader.synchronize()
    assert total == 3 << 20


@pytest.mark.gpu
def test_spans_on_a_gpu_are_found_by_the_tensor_and_never_during_capture() -> None:
    spans = torch.tensor([[0, 3], [3, 7]], device="cuda")
    key = spans_key(spans)
    assert key == spans_key(spans)
    assert key != spans_key(spans.clone())
    spans.add_(1)
    assert key != spans_key(spans)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert spans_key(spans) is None


def test_a_stored_pattern_lies_on_the_cpu(cache) -> None:
    cache.put("a", rows())
    assert cache._cache["a"].value.device.type == "cpu"
    assert hot_device().type in ("cpu", "cuda")


def test_a_default_is_given_for_a_missing_pattern_and_never_read_as_a_device(cache) -> None:
    missing = object()
    assert cache.get("a", missing) is missing
    assert cache.get("a", 0) == 0
    cache.put("a", rows())
    assert torch.equal(cache.get("a", 0), rows())
    assert torch.equal(cache.get("a", target_device="cpu"), rows())
    for device in (torch.device("cpu"), "cuda:0", "cpu"):
        with pytest.raises(TypeError, match=r"not a device: pass target_device="):
            cache.get("a", device)


def test_statistics_can_be_off_and_be_reset(cache) -> None:
    cache.put("a", rows())
    cache.get("a")
    cache.reset_stats()
    assert (cache.get_stats()["hits"], len(cache)) == (0, 1)
    for quiet in (PatternCache(1, enable_stats=False), OptimizedPatternCache(max_cpu_patterns=1, enable_stats=False)):
        for key in "abab":
            quiet.get(key)
            quiet.put(key, rows())
            quiet.get(key)
            quiet.remember("parts", key, object)
        stats = quiet.get_stats()
        assert (stats["hits"], stats["misses"], stats["evictions"], stats["size"]) == (0, 0, 0, 1)
    with pytest.raises(TypeError, match="enable_stats must be True or False, got 'yes'"):
        PatternCache(enable_stats="yes")


def test_bytes_are_bounded_and_the_least_recently_used_goes_first() -> None:
    for cache in (PatternCache(max_bytes=100_000), OptimizedPatternCache(max_bytes=100_000)):
        for key in "abc":
            cache.put(key, torch.zeros(10_000))
        assert [key for key in "abc" if key in cache] == ["b", "c"]
        stats = cache.get_stats()
        assert 80_000 < stats["bytes"] <= stats["max_bytes"] == 100_000
        assert stats["evictions"] >= 1
        cache.put("c", rows())
        assert cache.get_stats()["bytes"] < 50_000
        cache.clear()
        assert cache.get_stats()["bytes"] == 0


def test_python_objects_and_keys_count_towards_the_bytes() -> None:
    cache = PatternCache(max_bytes=100_000)
    for key in range(10):
        cache.remember("parts", (key, tuple(range(1000))), lambda: [str(i) for i in range(500)])
    stats = cache.get_stats()
    assert 50_000 < stats["bytes"] <= 100_000
    assert 1 <= stats["size"] < 4
    assert size_of([1000] * 10) < size_of(list(range(1000, 1010)))  # one object is counted once


def test_what_is_larger_than_the_cache_is_refused_or_made_every_time() -> None:
    cache = PatternCache(max_bytes=10_000)
    cache.put("small", rows())
    with pytest.raises(ValueError, match=r"does not fit into a cache of max_bytes=10000 beside 0 pinned patterns"):
        cache.put("large", torch.zeros(10_000))
    made = [cache.remember("lengths", "large", lambda: torch.zeros(10_000)) for _ in range(2)]
    assert made[0] is not made[1]
    assert list(cache._cache) == ["small"]
    cache.pin("small")
    cache.put("other", torch.zeros(2000))
    with pytest.raises(ValueError, match="1 pinned patterns"):
        cache.put("third", torch.zeros(2480))
    with pytest.raises(ValueError, match="does not fit"):
        cache.put("small", torch.zeros(10_000))
    assert torch.equal(cache.get("small"), rows())  # what is refused leaves the earlier pattern


def test_the_global_cache_is_bounded_in_bytes(monkeypatch) -> None:
    assert get_global_pattern_cache().max_bytes == 256 << 20
    monkeypatch.setenv("PATTERN_CACHE_MAX_BYTES", "30000")
    try:
        reset_global_pattern_cache()
        config = SparsePatternConfig("random", sparsity_ratio=0.5, block_size=4)
        q = torch.randn(1, 400, 2, 8)
        for tokens in range(200, 400, 40):
            dilated_attention(*[q[:, :tokens]] * 3, [64, 128], [1, 2], sparse_config=config)
        stats = get_global_pattern_cache().get_stats()
        assert stats["evictions"] > 0
        assert 0 < stats["bytes"] <= 30_000
    finally:
        monkeypatch.undo()
        reset_global_pattern_cache()


def test_the_environment_and_a_reset_reach_the_two_tier_cache(monkeypatch) -> None:
    cache = get_optimized_pattern_cache()
    assert pickle.loads(pickle.dumps(cache)) is copy.deepcopy(cache) is cache
    monkeypatch.setenv("PATTERN_CACHE_MAX_SIZE", "2")
    monkeypatch.setenv("PATTERN_CACHE_ENABLE_PROFILING", "1")
    try:
        reset_global_pattern_cache()
        for key in range(3):
            cache.remember("parts", key, object)
        stats = cache.get_stats()
        assert (stats["size"], stats["max_size"], cache.max_cpu_patterns) == (2, 2, 2)
        assert stats["profile"]["parts"]["misses"] == 3
    finally:
        monkeypatch.undo()
        reset_global_pattern_cache()
    assert (len(cache), cache.max_cpu_patterns, cache.enable_profiling) == (0, 500, False)


def test_memory_cleanup_empties_both_shared_caches() -> None:
    for cache in (get_global_pattern_cache(), get_optimized_pattern_cache()):
        cache.put("a", rows())
    memory_cleanup()
    assert len(get_global_pattern_cache()) == len(get_optimized_pattern_cache()) == 0


def test_a_pattern_is_pinned_where_it_is_asked_for(cache) -> None:
    assert cache.pin_pattern("a") is False
    cache.put("a", rows())
    assert cache.pin_pattern("a") is True
    for i in range(9):
        cache.put(i, rows())
    assert "a" in cache
    assert cache.get_stats()["pinned"] == 1
    if isinstance(cache, OptimizedPatternCache):
        assert cache.pin_pattern("a", "cpu") is True
        assert torch.device("cpu") in cache._cache["a"].copies


def test_forgetting_a_kind_forgets_its_pins(cache) -> None:
    cache.remember("parts", 1, object)
    cache.pin(("parts", 1))
    cache.forget("parts")
    assert cache.get_stats()["pinned"] == 0


def test_profiling_tells_seconds_and_bytes_of_lookups(cache) -> None:
    assert "profile" not in cache.get_stats()
    cache.enable_profiling = True
    cache.put("a", rows())
    for key in "aab":
        cache.get(key)
    for _ in range(3):
        cache.remember("lengths", 1, lambda: rows(100))
    profile = cache.get_stats()["profile"]
    assert (profile["put"]["count"], profile["put"]["bytes"]) == (1, rows().nbytes)
    assert (profile["get"]["hits"], profile["get"]["misses"]) == (2, 1)
    lengths = profile["lengths"]
    assert (lengths["hits"], lengths["misses"]) == (2, 1)
    assert lengths["seconds_of_hits"] > 0 < lengths["seconds_of_misses"]
    assert lengths["bytes"] > 3 * rows(100).nbytes
    cache.reset_stats()
    assert cache.get_stats()["profile"] == {}


def test_the_documented_path_of_the_two_tier_cache() -> None:
    from dilated_attention_pytorch.core import optimized_pattern_cache

    assert optimized_pattern_cache.OptimizedPatternCache is OptimizedPatternCache


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system with fork")
def test_a_forked_child_finds_no_lock_held_and_nothing_half_changed() -> None:
    caches = [get_global_pattern_cache(), get_optimized_pattern_cache(), PatternCache(4)]
    pools = [get_global_memory_pool(), WorkspacePool(threshold_bytes=1)]
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for cache in caches:
                cache.put("a", rows())
                cache.remember("parts", 1, object)
            for pool in pools:
                pool.give_back(pool.checkout((4096,), torch.uint8, "cpu"))

    threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a lock that was held would be waited for until this ends the child
                try:
                    for cache in caches:
                        cache.put("b", rows())
                        assert cache.get_stats()["bytes"] == sum(entry.size for entry in cache._cache.values())
                    for pool in pools:
                        pool.give_back(pool.checkout((4096,), torch.uint8, "cpu"))
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        reset_global_pattern_cache()
