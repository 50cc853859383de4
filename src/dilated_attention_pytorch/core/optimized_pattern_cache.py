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
from dilated_attention_pytorch.core.entries import CLOCK, Device, Entry, copy_to
from dilated_attention_pytorch.core.log import log
from dilated_attention_pytorch.core.pattern import on_grid
from dilated_attention_pytorch.core.plans import PatternCache, refuse_device, shared_cache
from dilated_attention_pytorch.core.profile import LOCK
from dilated_attention_pytorch.core.spec import Branch

_HITS_OF_A_COLD_PATTERN = 3  # one more makes it hot


class OptimizedPatternCache(PatternCache):
    """A cache in two tiers: all patterns on the CPU, and copies of the hot ones on the GPU that asks for them.

    A pattern becomes hot when it is asked for more than three times. It is copied from pinned memory on a separate
    stream (`enable_async`), and a reader's stream waits for its copy. With `enable_prefetch`, the pattern that followed
    this one last time is copied ahead. Without a GPU, the hot tier is on the CPU, and all else is the same.

    What the library remembers is hot from the start, on the device where it was made. If the limits push it out, it
    comes back from its copy on the CPU.

    Args:
        max_gpu_patterns, max_cpu_patterns: the most entries of each tier.
        gpu_memory_limit_mb: the most MiB of the hot tier.
        enable_async: copy on a separate stream.
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
            max_cpu_patterns, enable_stats=enable_stats, enable_profiling=enable_profiling, max_bytes=max_bytes
        )
        self.max_gpu_patterns, self.gpu_memory_limit_mb = max_gpu_patterns, gpu_memory_limit_mb
        self.enable_async, self.enable_prefetch = enable_async, enable_prefetch
        self._gpu_hits = self._prefetches = 0
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

    @checked()
    def put(self, key: Hashable, pattern: Any, *, store_on_gpu: bool = False, pin: bool = False) -> None:
        """Store a copy of a pattern on the CPU; `store_on_gpu` also makes it hot, and `pin` prevents its eviction."""
        with LOCK:  # so that nothing else drops the entry before it is pinned
            entry = self._put(key, pattern)
            if pin:
                self.pin(key)
        if store_on_gpu:
            self._heat([entry], _hot_place(entry))

    @checked()
    def pin_pattern(self, key: Hashable, device: Device = None) -> bool:
        """Make a pattern hot, on `device` or where hot patterns live, and keep it; False if there is none."""
        entry = self._cache.get(key)
        if entry is None:
            return False
        self._heat([entry], torch.device(device or _hot_place(entry)))
        return super().pin_pattern(key)

    def reset_stats(self) -> None:
        with LOCK:
            super().reset_stats()
            self._gpu_hits = self._prefetches = 0

    def get_stats(self) -> dict[str, Any]:
        """As `PatternCache.get_stats`, and `gpu_hits, cpu_hits, gpu_patterns, gpu_memory_used_mb, prefetches`."""
        with LOCK:
            stats, hot, gpu_hits = super().get_stats(), self._hot(), self._gpu_hits * self.enable_stats
            return stats | {
                "gpu_hits": gpu_hits,
                "cpu_hits": stats["hits"] - gpu_hits,
                "gpu_patterns": len(hot),
                "max_gpu_patterns": self.max_gpu_patterns,
                "gpu_memory_used_mb": sum(copy.bytes for _, copy in hot) / 2**20,
                "prefetches": self._prefetches,
            }

    def _find_patterns(self, keys: Sequence[Hashable], device: Device) -> list[Entry | None]:
        assert device is not None
        place = torch.device(device)
        with LOCK:
            cold = super()._find_patterns(keys, place)
            for entry in filter(None, cold):
                entry.hits += 1
            found = [None if entry is None else self._find_hot(entry, place) or entry for entry in cold]
            # A pattern that is not hot yet was found as itself.
            promoted = [x for x in dict.fromkeys(cold) if x and x in found and x.hits > _HITS_OF_A_COLD_PATTERN]
            ahead = self._likely_next(keys, place)
        made = dict(zip(promoted, self._heat([*promoted, *ahead], place)))
        return [None if entry is None else made.get(entry, entry) for entry in found]

    def _find_shared(self, key: Hashable) -> Entry | None:
        with LOCK:
            cold = self._find(key)
            if cold is None:
                return None
            hot = self._find_hot(cold, cold.home)
        return hot or self._heat([cold], cold.home)[0]

    def _find_hot(self, cold: Entry, place: torch.device) -> Entry | None:
        copy = cold.copies.get(place)
        if copy is not None:
            copy.used = next(CLOCK)
            self._gpu_hits += 1
        return copy

    def _share(self, key: Hashable, entry: Entry) -> Entry:
        cold = Entry.copied(entry.value)
        with LOCK:
            earlier = self._cache.get(key)
            if earlier is None:
                if self._store(key, cold):
                    self._keep_hot(cold, entry)
                return entry
        return earlier.copies.get(earlier.home) or self._heat([earlier], earlier.home)[0]

    def _likely_next(self, keys: Sequence[Hashable], place: torch.device) -> list[Entry]:
        """The pattern that this thread asked for after the last of `keys` when it was here before, unless it is hot."""
        if not keys:
            return []
        before, self._asked_last.key = getattr(self._asked_last, "key", None), keys[-1]
        if before in self._cache and before != keys[0]:
            self._cache[before].next = keys[0]
        last = self._cache.get(keys[-1])
        likely = None if last is None else self._cache.get(last.next)
        if not self.enable_prefetch or likely is None or place in likely.copies:
            return []
        if not self._has_room(self._hot(), likely):
            return []  # what is hot now is worth more than a guess
        self._prefetches += self.enable_stats
        return [likely]

    def _heat(self, entries: Sequence[Entry], place: torch.device) -> list[Entry]:
        """Hot copies of cold entries, made one after another on the copies' stream, and ready for any other stream."""
        captured = place.type == "cuda" and torch.cuda.is_current_stream_capturing()
        aside = place.type == "cuda" and self.enable_async and not captured
        if aside and place not in self._streams:
            self._streams[place] = torch.cuda.Stream(place)
        with torch.cuda.stream(self._streams[place]) if aside else nullcontext():
            copies = [Entry(copy_to(entry.value, place), place) for entry in entries]
        with LOCK:
            for entry, copy in zip(entries, copies):
                if not captured:  # else it has no values before a replay
                    self._keep_hot(entry, copy)
        return copies

    def _keep_hot(self, cold: Entry, copy: Entry) -> None:
        """Take a copy into the hot tier, if its limits leave room beside what is pinned."""
        pinned = [one for one in self._hot() if one[0].pinned]
        if copy.home in cold.copies or not self._has_room(pinned, copy):
            return
        while not self._has_room(self._hot(), copy):
            free = (one for one in self._hot() if not one[0].pinned)
            entry, oldest = min(free, key=lambda one: one[1].used)
            del entry.copies[oldest.home]
            self._evictions += 1
            log.debug("evicted from the hot tier of the pattern cache: %d bytes", oldest.bytes)
        cold.copies[copy.home] = copy

    def _has_room(self, hot: list[tuple[Entry, Entry]], entry: Entry) -> bool:
        limit = self.gpu_memory_limit_mb * 2**20
        return len(hot) < self.max_gpu_patterns and sum(copy.bytes for _, copy in hot) + entry.bytes <= limit

    def _hot(self) -> list[tuple[Entry, Entry]]:
        """Every entry that is hot, with each of its hot copies."""
        return [(entry, copy) for entry in self._cache.values() for copy in entry.copies.values()]


@checked()
def generate_pattern(key: str) -> tuple[Tensor, ...]:
    """The rows on each branch's grid, for heads at offset 0; the key is one of `DilatedPatternCache.dilated_key`.

    >>> generate_pattern("dilated_s8_seg[4, 8]_dil[1, 3]")
    (tensor([0, 1, 2, 3, 4, 5, 6, 7]), tensor([0, 3, 6]))
    """
    found = re.fullmatch(r"dilated_s(\d+)_seg\[([\d, ]+)\]_dil\[([\d, ]+)\]", key)
    if found is None:
        raise ValueError(f"{key!r} is not the key of a dilated pattern: pass the pattern, as in {{{key!r}: tensor}}")
    lengths, rates = ([int(number) for number in found[i].split(",")] for i in (2, 3))
    positions = torch.arange(int(found[1]), device="cpu")
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
    """The two-tier cache that `RingDilatedAttentionV3` modules share; see `get_global_pattern_cache`.

    >>> get_optimized_pattern_cache() is get_optimized_pattern_cache()
    True
    """
    return shared_cache(OptimizedPatternCache)
