from __future__ import annotations

import copy
import pickle
import random
import threading

import pytest
import torch

from dilated_attention_pytorch.core import WorkspacePool, get_global_memory_pool, reset_global_memory_pool
from dilated_attention_pytorch.core import pool as pooling
from dilated_attention_pytorch.core.optimized_pattern_cache import OptimizedPatternCache
from dilated_attention_pytorch.core.profile import Profile
from dilated_attention_pytorch.core.resources import Resources

F32, MIB = torch.float32, 1 << 20


@pytest.fixture(params=[False, True], ids=["full", "lightweight"])
def pool(request):
    return WorkspacePool(threshold_bytes=1024, lightweight=request.param)


def test_cuda_without_a_number_is_the_current_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(pooling, "_memory_of", lambda device: 0)
    pool = WorkspacePool()
    first, current = (pool._shelf(torch.device("cuda", number), False) for number in range(2))
    for shelf in (first, current):
        shelf.idle.append(pooling._Block(torch.empty(512, dtype=torch.uint8), shelf, used_at=0, nbytes=512))
    assert pool.release_idle("cuda") == 512
    assert first.idle
    assert not current.idle


def test_a_buffer_given_back_is_lent_again(pool) -> None:
    first = pool.checkout((512,), F32, "cpu")
    place = first.data_ptr()
    pool.give_back(first)
    again = pool.checkout((256, 2), F32, "cpu")
    assert again.data_ptr() == place
    assert again.shape == (256, 2)
    stats = pool.get_stats()
    assert (stats["allocation_count"], stats["reuse_count"], stats["reuse_rate"]) == (1, 1, 0.5)
    assert stats["total_allocated"] == stats["peak_allocated"] == stats["live_bytes"] == 2048


def test_two_live_buffers_share_no_memory(pool) -> None:
    one, other = (pool.checkout((512,), F32, "cpu") for _ in range(2))
    one.fill_(1.0)
    other.fill_(2.0)
    assert (one == 1.0).all()


def test_a_foreign_buffer_is_refused(pool) -> None:
    theirs = WorkspacePool().checkout((512,), F32, "cpu")
    mine = pool.checkout((512,), F32, "cpu")
    for foreign in (torch.zeros(3), theirs, mine[:5], mine.clone()):
        with pytest.raises(ValueError, match=r"not borrowed from this pool.*not a view or a copy"):
            pool.give_back(foreign)
    assert pool.get_stats()["live_buffers"] == 1


def test_a_buffer_given_back_twice_is_refused_and_lent_once(pool) -> None:
    buffer = pool.checkout((512,), F32, "cpu")
    pool.give_back(buffer)
    with pytest.raises(ValueError, match="given back already"):
        pool.give_back(buffer)
    one, other = (pool.checkout((512,), F32, "cpu") for _ in range(2))
    assert one.data_ptr() != other.data_ptr()


def test_a_handle_given_back_can_no_longer_write() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    stale = pool.checkout((512,), F32, "cpu")
    pool.give_back(stale)
    fresh = pool.checkout((512,), F32, "cpu").zero_()
    stale.fill_(9.0)
    assert stale.numel() == 0
    assert not fresh.any()


def test_a_handle_given_back_keeps_no_memory() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    handle = pool.checkout((1 << 18,), F32, "cpu")
    pool.give_back(handle)
    assert handle.untyped_storage().nbytes() == 0
    assert handle._base is None  # which a view keeps, and with it the memory


@pytest.mark.parametrize("limit", [1, MIB - 1])
def test_a_limit_below_one_buffer_is_refused(limit) -> None:
    with pytest.raises(ValueError, match=f"at least the smallest buffer, 1048576 bytes, got {limit}: raise it"):
        WorkspacePool(limit_bytes=limit)
    for name in ("limit_bytes", "threshold_bytes"):
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {wrong}"):
                WorkspacePool(**{name: wrong})


def test_the_limit_is_kept_by_dropping_what_is_idle() -> None:
    pool = WorkspacePool(limit_bytes=4 * MIB, threshold_bytes=MIB)
    for size in (1, 2, 3, 4, 1, 3):
        pool.give_back(pool.checkout((size * MIB,), torch.uint8, "cpu"))
        assert pool.get_stats()["total_allocated"] <= 4 * MIB
    held = pool.checkout((3 * MIB,), torch.uint8, "cpu")
    with pytest.raises(RuntimeError, match="leaves no room for 2097152 beside the buffers that are borrowed"):
        pool.checkout((2 * MIB,), torch.uint8, "cpu")
    with pytest.raises(ValueError, match="beyond the pool's limit of 4194304"):
        pool.checkout((5 * MIB,), torch.uint8, "cpu")
    with pool.lease() as take:  # a call is served all the same
        assert take((2 * MIB,), dtype=torch.uint8, device="cpu").shape == (2 * MIB,)
        assert pool.get_stats()["live_buffers"] == 1
    pool.give_back(held)
    assert pool.get_stats()["live_bytes"] == 0


def test_a_lease_ends_with_its_block_also_when_that_fails(pool) -> None:
    def crash() -> None:
        with pool.lease() as take:
            take((512,), dtype=F32, device="cpu")
            take((2048,), dtype=F32, device="cpu")
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            crash()
    stats = pool.get_stats()
    assert (stats["live_buffers"], stats["live_bytes"], stats["allocation_count"]) == (0, 0, 2)


def test_what_is_small_is_left_to_the_allocator(pool) -> None:
    with pool.lease() as take:
        assert take((255,), dtype=F32, device="cpu").shape == (255,)
        assert take((), dtype=F32, device="cpu").shape == ()
    assert pool.get_stats()["allocation_count"] == 0


def test_the_threshold_follows_the_devices_memory(monkeypatch) -> None:
    sizes = {}
    for gigabytes in (0, 8, 80):
        monkeypatch.setattr(pooling, "_memory_of", lambda device, gigabytes=gigabytes: gigabytes << 30)
        pool = WorkspacePool()
        sizes[gigabytes] = (pool.threshold("cpu"), pool.threshold("cpu", pinned=True))
    assert sizes == {0: (MIB, MIB), 8: (MIB, 4 * MIB), 80: (5 * MIB, 40 * MIB)}


def test_buckets_waste_little_and_grow() -> None:
    before = 0
    for size in range(1, 1 << 22, 9973):
        bucket = pooling._bucket(size)
        assert size <= bucket <= max(size + 512, size * 17 / 16)
        assert bucket >= before
        before = bucket


def test_what_nobody_takes_is_freed_after_a_while() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    pool.give_back(pool.checkout((8192,), F32, "cpu"))
    for _ in range(70):
        pool.give_back(pool.checkout((512,), F32, "cpu"))
    assert pool.get_stats()["total_allocated"] == 2048


def test_a_larger_buffer_that_lies_idle_is_lent_before_a_new_one_is_made() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    large = pool.checkout((4096,), F32, "cpu")
    place = large.data_ptr()
    pool.give_back(large)
    small, other = pool.checkout((512,), F32, "cpu"), pool.checkout((512,), F32, "cpu")
    assert small.data_ptr() == place != other.data_ptr()
    stats = pool.get_stats()
    assert (stats["live_bytes"], stats["total_allocated"]) == (16384 + 2048, 16384 + 2048)
    pool.give_back(small)
    pool.give_back(other)
    assert pool.checkout((4096,), F32, "cpu").data_ptr() == place
    assert pool.get_stats()["allocation_count"] == 2


def test_memory_that_runs_out_is_released_and_asked_for_once_more(pool) -> None:
    pool.give_back(pool.checkout((4096,), F32, "cpu"))
    runs = []

    def hungry():
        runs.append(pool.get_stats()["total_allocated"])
        if len(runs) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    assert pool.retrying(hungry) == "done"
    assert runs == [16384, 0]
    assert pool.get_stats()["cleanups"] == 1


def test_memory_that_stays_out_and_other_errors_reach_the_user(pool) -> None:
    runs = []

    def hungry(error):
        runs.append(error)
        raise error

    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("something else")):
        pool.give_back(pool.checkout((4096,), F32, "cpu"))
        with pytest.raises(type(error), match=str(error)):
            pool.retrying(lambda error=error: hungry(error))
    assert len(runs) == 3
    pool.release_idle()
    with pytest.raises(torch.OutOfMemoryError):  # nothing idle that could help
        pool.retrying(lambda: hungry(torch.OutOfMemoryError("CUDA out of memory")))
    assert len(runs) == 4


def test_an_allocation_that_fails_leaves_the_counts_as_they_were(pool, monkeypatch) -> None:
    def fail(self, size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pooling._Shelf, "allocate", fail)
    with pytest.raises(torch.OutOfMemoryError):
        pool.checkout((4096,), F32, "cpu")
    monkeypatch.undo()
    stats = pool.get_stats()
    assert (stats["live_buffers"], stats["live_bytes"], stats["total_allocated"], stats["allocation_count"]) == (0,) * 4
    pool.give_back(pool.checkout((4096,), F32, "cpu"))


def test_what_inference_borrowed_training_may_write_to(pool) -> None:
    with torch.inference_mode(), pool.lease() as take:
        take((512,), dtype=F32, device="cpu").zero_()
    with pool.lease() as take:
        take((512,), dtype=F32, device="cpu").add_(torch.ones(512))
    assert pool.get_stats()["reuse_count"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pinned_memory_without_a_gpu_is_refused(pool) -> None:
    with pytest.raises(ValueError, match="pinned is for host memory that a CUDA GPU copies"):
        pool.checkout((512,), F32, "cpu", pinned=True)


def test_copies_of_a_pool_share_nothing_but_the_global_ones_are_shared() -> None:
    own = WorkspacePool(limit_bytes=9 * MIB, lightweight=True)
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert twin is not own
        assert (twin.limit_bytes, twin.lightweight) == (9 * MIB, True)
    for lightweight in (False, True):
        shared = get_global_memory_pool(lightweight)
        assert shared.lightweight is lightweight
        assert pickle.loads(pickle.dumps(shared)) is copy.deepcopy(shared) is shared


def test_resetting_the_global_pools_leaves_borrowed_buffers_to_their_owners() -> None:
    pool = get_global_memory_pool()
    held = pool.checkout((MIB,), torch.uint8, "cpu").fill_(7)
    reset_global_memory_pool()
    assert get_global_memory_pool() is pool
    assert (held == 7).all()
    assert pool.get_stats()["live_buffers"] == 1
    pool.give_back(held)
    reset_global_memory_pool()
    assert pool.get_stats()["total_allocated"] == 0


def test_sixteen_threads_mix_operations_on_cache_and_pool() -> None:
    """20,000 operations: every live buffer carries its owner's mark until it is returned."""
    pool = WorkspacePool(limit_bytes=1 << 18, threshold_bytes=512)
    cache = OptimizedPatternCache(max_gpu_patterns=8, max_cpu_patterns=32, gpu_memory_limit_mb=0.01)
    wrong: list[object] = []
    done = [0] * 16

    def work(owner: int) -> None:
        draw = random.Random(owner)
        mine: list[torch.Tensor] = []
        try:
            for _ in range(1250):
                done[owner] += 1
                action = draw.random()
                if action < 0.3:
                    try:
                        mine.append(pool.checkout((draw.randrange(1, 4096),), torch.int32, "cpu").fill_(owner))
                    except RuntimeError as error:
                        assert "leaves no room" in str(error)  # noqa: PT017
                elif action < 0.55 and mine:
                    buffer = mine.pop(draw.randrange(len(mine)))
                    if not (buffer == owner).all():
                        wrong.append(("mark", owner))
                    pool.give_back(buffer)
                elif action < 0.6:
                    pool.release_idle()
                elif action < 0.75:
                    key = draw.randrange(64)
                    cache.put(key, torch.full((16,), key), store_on_gpu=action < 0.65)
                elif action < 0.95:
                    key = draw.randrange(64)
                    for got in cache.get_batch([key, key]):
                        if got is not None and not (got == key).all():
                            wrong.append(("pattern", key))
                        elif got is not None:
                            got.fill_(-1)
                else:
                    key = draw.randrange(64)
                    if cache.remember("parts", key, lambda key=key: ("parts", key)) != ("parts", key):
                        wrong.append(("parts", key))
                stats = pool.get_stats()
                if not stats["live_bytes"] <= stats["total_allocated"] <= 1 << 18:
                    wrong.append(stats)
                if len(cache) > 32 or cache.get_stats()["gpu_patterns"] > 8:
                    wrong.append("bound")
        except Exception as error:  # a thread's own would be lost
            wrong.append(error)
        for buffer in mine:
            if not (buffer == owner).all():
                wrong.append(("mark at the end", owner))
            pool.give_back(buffer)

    threads = [threading.Thread(target=work, args=(owner,), daemon=True) for owner in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert wrong == []
    assert sum(done) == 20_000
    stats = pool.get_stats()
    assert (stats["live_buffers"], stats["live_bytes"]) == (0, 0)
    idle = sum(block.nbytes for shelf in pool._shelves.values() for block in shelf.idle)
    assert idle == stats["total_allocated"]
    assert cache.get_stats()["gpu_memory_used_mb"] <= 0.01


@pytest.mark.gpu
def test_a_buffer_that_changes_streams_is_ordered() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one), pool.lease() as take:
        buffer = take((1 << 20,), dtype=torch.int64, device="cuda").zero_()
        torch.cuda._sleep(100_000_000)
        total = buffer.sum()
    with torch.cuda.stream(other), pool.lease() as take:
        take((1 << 20,), dtype=torch.int64, device="cuda").fill_(1)
    torch.cuda.synchronize()
    assert total == 0
    assert pool.get_stats()["allocation_count"] == 1
    assert pool.release_idle("cuda") == 8 << 20


@pytest.mark.gpu
def test_a_captured_graph_has_memory_of_its_own() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pool.lease() as take:
        take((1 << 20,), dtype=F32, device="cuda").zero_()
    assert pool.get_stats()["allocation_count"] == 0


@pytest.mark.gpu
def test_pinned_buffers_wait_for_copies_from_them() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    for value in range(5):
        with pool.lease() as take:
            buffer = take((1 << 22,), dtype=F32, device="cpu", pin_memory=True).fill_(value)
            assert buffer.is_pinned()
            got = buffer.to("cuda", non_blocking=True)
        assert (got == value).all()
    assert pool.get_stats()["allocation_count"] == 1


@pytest.mark.gpu
def test_a_pinned_buffer_is_left_to_copies_that_still_use_it() -> None:
    pool = WorkspacePool(threshold_bytes=1024)
    with pool.lease() as take:
        buffer = take((1 << 22,), dtype=F32, device="cpu", pin_memory=True).fill_(1)
        torch.cuda._sleep(1_000_000_000)
        got = buffer.to("cuda", non_blocking=True)
    with pool.lease() as take:
        take((1 << 22,), dtype=F32, device="cpu", pin_memory=True).fill_(2)
    assert (got == 1).all()
    assert pool.get_stats()["allocation_count"] == 2


@pytest.mark.gpu
def test_running_out_of_gpu_memory_frees_the_pool_and_tries_again() -> None:
    free, _ = torch.cuda.mem_get_info()
    pool = WorkspacePool()
    pool.give_back(pool.checkout((int(free * 0.6),), torch.uint8, "cuda"))
    large = pool.retrying(lambda: torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda"))
    assert large.numel() == int(free * 0.6)
    assert pool.get_stats()["total_allocated"] == 0


def test_a_loan_may_end_before_its_block_does(pool) -> None:
    with pool.lease() as take:
        first = take((512,), dtype=F32, device="cpu")
        place = first.data_ptr()
        small = take((1,), dtype=F32, device="cpu")  # from PyTorch
        take.give_back(first, small)
        assert pool.get_stats()["live_buffers"] == 0
        assert take((512,), dtype=F32, device="cpu").data_ptr() == place
    assert pool.get_stats()["live_buffers"] == 0


def test_a_failed_block_may_leave_its_buffers_to_those_who_still_use_them(pool) -> None:
    kept = []

    def crash() -> None:
        with Resources(pool=pool).message_buffers() as take:  # of which a message may still be under way
            kept.append(take((512,), dtype=F32, device="cpu").fill_(7.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    stats = pool.get_stats()
    assert (stats["live_buffers"], stats["live_bytes"], stats["total_allocated"]) == (0, 0, 0)
    with Resources(pool=pool).message_buffers() as take:
        take((512,), dtype=F32, device="cpu").fill_(1.0)
    assert (kept[0] == 7.0).all()
    assert pool.get_stats()["total_allocated"] == 2048


def test_a_profile_tells_of_loans_and_of_what_was_left_to_the_allocator(pool) -> None:
    profile = Profile()
    for _ in range(3):
        with pool.lease(profile=profile) as take:
            take((512,), dtype=F32, device="cpu")
            take((4,), dtype=F32, device="cpu")
    loans = profile.totals()["loans"]
    assert (loans["new"], loans["reused"], loans["bytes"]) == (1, 2, 3 * 2048)
    assert loans["seconds"] >= loans["seconds_waiting"] > 0
    assert profile.totals()["workspaces left to PyTorch"] == {"count": 3, "bytes": 48}
    assert pool.get_stats()["profile"]["loans"] == loans
    pool.reset()
    assert "profile" not in pool.get_stats()
