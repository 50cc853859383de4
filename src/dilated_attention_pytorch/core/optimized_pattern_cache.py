"""Two caches of patterns on a GPU: one in two tiers, and one that holds everything from the start."""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import COUNT, POSITIVE, checked
from dilated_attention_pytorch.core.entries import Device, Entry, copy_to
from dilated_attention_pytorch.core.pattern import on_grid
from dilated_attention_pytorch.core.plans import PatternCache, refuse_device, shared_cache
from dilated_attention_pytorch.core.profile import LOCK
from dilated_attention_pytorch.core.spec import Branch

_HITS_OF_A_COLD_PATTERN = 3  # one more makes it hot


class OptimizedPatternCache(PatternCache):
    """A cache in two tiers: all patterns on the CPU, and copies of the hot ones on the GPU that asks for them.

    A pattern becomes hot when it is asked for more than three times. Copies run from pinned memory on a stream of their
    own (`enable_async`), and a reader's stream waits for its copy. With `enable_prefetch`, the pattern that was asked
    for after this one last time is copied ahead. Without a GPU, the hot tier is on the CPU, and all else is the same.

    What the library remembers is hot from the start, on the device where it was made. If the limits push it out, it
    comes back from its copy on the CPU.

    Args:
        max_gpu_patterns, max_cpu_patterns: the most entries of each tier.
        gpu_memory_limit_mb: the most MiB of the hot tier.
        enable_async: copy on a stream of its own.
        enable_prefetch: copy the likely next pattern ahead.
        enable_stats, enable_profiling: as in `PatternCache`.
        max_bytes: the most bytes of the CPU's tier; None for no limit.

    >>> cache = OptimizedPatternCache()
    >>> cache.put("rows", torch.arange(4))
    >>> for _ in range(5):
    ...     rows = cache.get("rows")
    >>> stats = cache.get_stats()
    >>> stats["cpu_hits"], stats["gpu_hits"]
    (4, 1)
    """

    _size_of_global = 500

    @checked(max_gpu_patterns=COUNT, max_cpu_patterns=COUNT, gpu_memory_limit_mb=POSITIVE, max_bytes=COUNT)
    def __init__(
        self,
        max_gpu_patterns: int = 50,
        max_cpu_patterns: int = 500,
        gpu_memory_limit_mb: float = 100.0,
        enable_async: bool = True,
        enable_prefetch: bool = True,
        *,
        enable_stats: bool = True,
        enable_profiling: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(
            max_cpu_patterns,
            enable_stats=enable_stats,
            enable_profiling=enable_profiling,
            max_bytes=max_bytes,
        )
        self.max_gpu_patterns, self.gpu_memory_limit_mb = max_gpu_patterns, gpu_memory_limit_mb
        self.enable_async, self.enable_prefetch = enable_async, enable_prefetch
        # By key and device. It holds copies of entries of this cache, and their sizes are those of their tensors.
        self._hot = PatternCache(
            max_gpu_patterns, enable_stats=enable_stats, max_bytes=max(1, int(gpu_memory_limit_mb * 2**20))
        )
        self._prefetches = 0
        self._asked_last = threading.local()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def max_cpu_patterns(self) -> int:
        return self.max_size

    @checked()
    def get(self, key: Hashable, default: Any = None, *, target_device: Device = None) -> Any:
        """A copy of the pattern on `target_device`, by default where hot patterns live; `default` if it is missing."""
        return super().get(key, default, target_device=target_device or hot_device())

    @checked()
    def get_batch(self, keys: Sequence[Hashable], target_device: Device = None) -> list[Any]:
        """Copies of several patterns in the order of `keys`, None for a missing one; cold ones are copied together."""
        return self._copies(keys, target_device or hot_device())

    def _find_patterns(self, keys: Sequence[Hashable], device: Device) -> list[Entry | None]:
        assert device is not None
        place = torch.device(device)
        with LOCK:
            cold = dict(zip(keys, super()._find_patterns(keys, place)))
            found = cold | {key: hot for key in keys if cold[key] and (hot := self._hot._find((key, place)))}
            copying = {
                key: entry
                for key, entry in cold.items()
                if entry is not None and found[key] is entry and entry.hits > _HITS_OF_A_COLD_PATTERN
            }
            ahead = self._likely_next(keys, place)
        copied = self._copy_to(place, copying | ahead)
        return [copied.get(key) or found[key] for key in keys]

    @checked()
    def put(self, key: Hashable, pattern: Any, *, store_on_gpu: bool = False, pin: bool = False) -> None:
        """Keep a copy of a pattern on the CPU; `store_on_gpu` makes it hot at once, and `pin` keeps it for good."""
        entry = self._put(key, pattern)
        if store_on_gpu:
            self._copy_to(_hot_place(entry), {key: entry})
        if pin:
            self.pin(key)

    @checked()
    def pin_pattern(self, key: Hashable, device: Device = None) -> bool:
        """Make a pattern hot, on `device` or where hot patterns live, and keep it; False if there is no such one."""
        entry = self._cache.get(key)
        if entry is None:
            return False
        self._copy_to(torch.device(device or _hot_place(entry)), {key: entry})
        return super().pin_pattern(key)

    def pin(self, key: Hashable) -> None:
        with LOCK:
            super().pin(key)
            for hot in self._hot_keys(key):
                self._hot._cache[hot].pinned = True

    def _find_shared(self, key: Hashable) -> Entry | None:
        with LOCK:
            cold = self._find(key)
            hot = None if cold is None else self._hot._find((key, cold.home))
        return hot if cold is None or hot is not None else self._copy_to(cold.home, {key: cold})[key]

    def _share(self, key: Hashable, entry: Entry) -> Entry:
        cold = Entry.copied(entry.value)
        with LOCK:
            earlier = self._cache.get(key)
            if earlier is None:
                self._store(key, cold)
                self._warm(key, cold.home, entry, cold)
                return entry
        return self._hot._cache.get((key, cold.home)) or self._copy_to(cold.home, {key: earlier})[key]

    def _drop(self, key: Hashable) -> Entry:
        for hot in self._hot_keys(key):
            self._hot._drop(hot)
        return super()._drop(key)

    def _hot_keys(self, key: Hashable) -> list[Hashable]:
        return [hot for hot in self._hot._cache if hot[0] == key]  # type: ignore[index]

    def clear(self) -> None:
        with LOCK:
            super().clear()
            self._hot.clear()

    def reset_stats(self) -> None:
        with LOCK:
            super().reset_stats()
            self._hot.reset_stats()
            self._prefetches = 0

    def get_stats(self) -> dict[str, Any]:
        """As `PatternCache.get_stats`, and `gpu_hits, cpu_hits, gpu_patterns, gpu_memory_used_mb, prefetches`."""
        with LOCK:
            stats, hot = super().get_stats(), self._hot.get_stats()
            return stats | {
                "evictions": stats["evictions"] + hot["evictions"],
                "gpu_hits": hot["hits"],
                "cpu_hits": stats["hits"] - hot["hits"],
                "gpu_patterns": hot["size"],
                "max_gpu_patterns": self.max_gpu_patterns,
                "gpu_memory_used_mb": hot["bytes"] / 2**20,
                "prefetches": self._prefetches,
            }

    def _likely_next(self, keys: Sequence[Hashable], place: torch.device) -> dict[Hashable, Entry]:
        """The pattern that this thread asked for after the last of `keys` when it was here before, unless it is hot."""
        if not keys:
            return {}
        before, self._asked_last.key = getattr(self._asked_last, "key", None), keys[-1]
        if before in self._cache and before != keys[0]:
            self._cache[before].next = keys[0]
        last, hot = self._cache.get(keys[-1]), self._hot
        entry = None if last is None else self._cache.get(last.next)
        if not self.enable_prefetch or last is None or entry is None or (last.next, place) in hot:
            return {}
        if len(hot) >= hot.max_size or hot._bytes + entry.bytes > (hot.max_bytes or 0):
            return {}  # what is hot now is worth more than a guess
        self._prefetches += self.enable_stats
        return {last.next: entry}

    def _copy_to(self, place: torch.device, entries: Mapping[Hashable, Entry]) -> dict[Hashable, Entry]:
        """Hot copies of cold entries, made one after another on the copies' stream, and ready for any other stream."""
        if not entries:
            return {}
        aside = place.type == "cuda" and self.enable_async and not torch.cuda.is_current_stream_capturing()
        if aside and place not in self._streams:
            self._streams[place] = torch.cuda.Stream(place)
        with torch.cuda.stream(self._streams[place]) if aside else nullcontext():
            made = {key: Entry(copy_to(entry.value, place), place) for key, entry in entries.items()}
        with LOCK:
            for key, entry in made.items():
                self._warm(key, place, entry, entries[key])
        return made

    def _warm(self, key: Hashable, place: torch.device, entry: Entry, cold: Entry) -> None:
        """Take an entry into the hot tier, if its limits leave room beside what is pinned."""
        if (key, place) in self._hot or self._cache.get(key) is not cold:
            return  # another thread was faster, or the pattern was put anew meanwhile
        entry.pinned = cold.pinned
        self._hot._store((key, place), entry, entry.bytes)


@checked()
def generate_pattern(key: str) -> tuple[Tensor, ...]:
    """The rows on each branch's grid, for heads at offset 0; the key is one of `DilatedPatternCache.dilated_key`.

    >>> generate_pattern("dilated_s8_seg[4, 8]_dil[1, 3]")
    (tensor([0, 1, 2, 3, 4, 5, 6, 7]), tensor([0, 3, 6]))
    """
    found = re.fullmatch(r"dilated_s(\d+)_seg\[([\d, ]+)\]_dil\[([\d, ]+)\]", key)
    if found is None:
        raise ValueError(f"{key!r} names no dilated pattern: pass the pattern itself, as in {{{key!r}: tensor}}")
    lengths, rates = ([int(number) for number in found[i].split(",")] for i in (2, 3))
    positions = torch.arange(int(found[1]))
    return tuple(positions[on_grid(Branch(w, r), 0, positions)] for w, r in zip(lengths, rates))


class SimpleGPUCache:
    """Holds every pattern on the GPU from the start: for a few patterns that are always used.

    `patterns_to_cache` are keys of dilated patterns, which are generated, or a mapping from keys to patterns. They live
    on `device`, by default the current GPU, or the CPU if there is none.

    >>> cache = SimpleGPUCache(["dilated_s8_seg[4]_dil[2]"])
    >>> cache.get("dilated_s8_seg[4]_dil[2]")[0].tolist(), list(cache.gpu_patterns)
    ([0, 2, 4, 6], ['dilated_s8_seg[4]_dil[2]'])
    """

    @checked()
    def __init__(self, patterns_to_cache: Mapping[str, Any] | Iterable[str], device: Device = None) -> None:
        place = hot_device() if device is None else torch.device(device)
        if isinstance(patterns_to_cache, Mapping):
            made: Mapping[str, Any] = patterns_to_cache
        else:
            made = {key: generate_pattern(key) for key in patterns_to_cache}
        on_device = {key: copy_to(one, place) for key, one in made.items()}
        self._entries = {key: Entry(one, place) for key, one in on_device.items()}
        self.gpu_patterns: Mapping[str, Any] = MappingProxyType(on_device)

    @checked()
    def get(self, key: str, default: Any = None) -> Any:
        """A copy of the pattern on the device; `default` if it is missing."""
        refuse_device(default)
        entry = self._entries.get(key)
        return default if entry is None else entry.copy_for(None)


def hot_device() -> torch.device:
    """Where hot patterns live: on the current GPU, or on the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _hot_place(entry: Entry) -> torch.device:
    """Where a pattern is hot: on the GPU that it was put from, else on the current one."""
    return entry.home if entry.home.type != "cpu" else hot_device()


def get_optimized_pattern_cache() -> OptimizedPatternCache:
    """The two-tier cache that `RingDilatedAttentionV3` modules share; see `get_global_pattern_cache`."""
    return shared_cache(OptimizedPatternCache)
