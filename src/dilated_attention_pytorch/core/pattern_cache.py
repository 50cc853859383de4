"""Bounded, thread-safe memory of what calls share and is costly to make: LRU, one lock, nothing long done under it.

Two ways in. What users `put` is copied, kept on the CPU, and copied again for whoever gets it, on the device that asks:
nobody can write into an entry. What the library itself makes goes through `remember`: it stays where it was made and is
shared as it is, because engines only read it; on a GPU a reader's stream is ordered behind the one that made it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.core.cache_entries import Device, Entry, copy_to

Value = TypeVar("Value")

KINDS: Mapping[str, bool] = MappingProxyType(
    {
        "lengths": True,
        "parts": True,
        "segment table": True,
        "block layout": True,
        "ring schedule": True,
        "padding mask": False,  # to compare one takes about as long as to read it, and its key is as large
        "offset table": False,  # a few divisions
    }
)
"""What the library makes, and whether looking it up costs less than half of making it: `bench cache` measures both."""


_ACCESSES_OF_A_COLD_PATTERN = 3  # one more makes it hot

HotKey = tuple[Hashable, torch.device]


class PatternCache:
    """An LRU cache of at most `max_size` patterns: tensors, or tuples, lists and dicts that hold tensors.

    A pinned pattern is never evicted; one place always stays free of pins, so that there is room to put another.

    >>> cache = PatternCache(max_size=2)
    >>> cache.put("rows", torch.tensor([0, 2, 4]))
    >>> cache.get("rows").fill_(9), cache.get("rows")  # what a caller writes stays with the caller
    (tensor([9, 9, 9]), tensor([0, 2, 4]))
    >>> cache.get("columns") is None
    True
    >>> cache.get_stats()["hit_rate"]
    0.6666666666666666
    """

    def __init__(self, max_size: int = 100, *, enable_profiling: bool = False) -> None:
        self.max_size = _at_least_one("max_size", max_size)
        self.enable_profiling = enable_profiling
        self._lock = threading.RLock()  # a finalizer that runs while it is held may come back to this cache
        self._cache: OrderedDict[Hashable, Entry] = OrderedDict()
        self._pinned: set[Hashable] = set()
        self._hits = self._misses = self._evictions = 0
        self._profile: dict[str, list[float]] = {}

    def __reduce__(self) -> Any:
        # A copy of a module shares the global cache, and has its own where the module had its own: empty, as a cache
        # may be.
        if self is _global:
            return get_global_pattern_cache, ()
        return _made_again, (type(self), self._settings())

    def _settings(self) -> dict[str, Any]:
        return {"max_size": self.max_size, "enable_profiling": self.enable_profiling}

    def get(self, key: Hashable, device: Device = None) -> Any:
        """A copy of the pattern, on `device` or where it was put from, or None."""
        entry = self._find(key)
        return None if entry is None else entry.copy_for(device)

    def put(self, key: Hashable, pattern: Any) -> None:
        """Keep a copy of a pattern, in place of an earlier one of this key."""
        self._store(key, Entry.copied(pattern))

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value that `make` gives for this key, shared by all who ask: it must not be written to.

        `make` runs outside the lock, so two threads may make it at once; both get the one that was stored first. A kind
        that is cheaper to make than to look up is made every time.
        """
        if kind not in KINDS:
            raise ValueError(
                f"no kind of entry {kind!r}: measure it with the others of pattern_cache.KINDS, and add it"
            )
        if not KINDS[kind]:
            return make()
        began = time.perf_counter() if self.enable_profiling else 0.0
        found = self._find_shared((kind, key))
        value: Value = (self._share((kind, key), make()) if found is None else found).shared()
        if self.enable_profiling:
            self._note(kind, found is not None, time.perf_counter() - began)
        return value

    def forget(self, kind: str) -> None:
        """Drop what was remembered of a kind."""
        with self._lock:
            found = [key for key in self._cache if isinstance(key, tuple) and key[:1] == (kind,)]
            dropped = [self._cache.pop(key) for key in found]
        del dropped  # outside the lock

    def pin(self, key: Hashable) -> None:
        """Never evict this pattern, until `unpin`."""
        with self._lock:
            if key not in self._cache:
                raise KeyError(f"no pattern {key!r} to pin: put it first")
            if len(self._pinned | {key}) >= self.max_size:
                raise ValueError(
                    f"{len(self._pinned)} of {self.max_size} patterns are pinned, and one place must stay free: "
                    "unpin one, or make the cache larger"
                )
            self._pinned.add(key)

    def unpin(self, key: Hashable) -> None:
        with self._lock:
            self._pinned.discard(key)

    def clear(self) -> None:
        """Forget every pattern, pinned ones included, and the statistics."""
        with self._lock:
            dropped, self._cache = self._cache, OrderedDict()
            self._pinned.clear()
            self._hits = self._misses = self._evictions = 0
            self._profile.clear()
        dropped.clear()  # outside the lock: freeing memory takes its time

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def get_stats(self) -> dict[str, Any]:
        """`hits, misses, hit_rate, evictions, size, max_size`, and with profiling the seconds of each kind."""
        with self._lock:
            return self._stats()

    def _stats(self) -> dict[str, Any]:
        asked = self._hits + self._misses
        stats: dict[str, Any] = {
            "hits": self._hits,
            "misses": self._misses,
            "hit_rate": self._hits / asked if asked else 0.0,
            "evictions": self._evictions,
            "size": len(self._cache),
            "max_size": self.max_size,
        }
        if self.enable_profiling:
            names = ("hits", "seconds_of_hits", "misses", "seconds_of_misses")
            stats["profile"] = {kind: dict(zip(names, values)) for kind, values in self._profile.items()}
        return stats

    def _find(self, key: Hashable) -> Entry | None:
        with self._lock:
            entry = self._cache.get(key)
            if entry is None:
                self._misses += 1
            else:
                self._hits += 1
                self._cache.move_to_end(key)
            return entry

    def _store(self, key: Hashable, entry: Entry, keep_earlier: bool = False) -> Entry:
        dropped = []  # freed when this returns, outside the lock
        with self._lock:
            earlier = self._cache.get(key)
            if earlier is not None and keep_earlier:
                return earlier
            if earlier is not None:
                dropped.append(self._cache.pop(key))
            while len(self._cache) >= self.max_size:  # before, so that nobody ever sees more
                oldest = next(one for one in self._cache if one not in self._pinned)
                dropped.append(self._cache.pop(oldest))
                self._evictions += 1
            self._cache[key] = entry
        return entry

    def _find_shared(self, key: Hashable) -> Entry | None:
        return self._find(key)

    def _share(self, key: Hashable, made: Any) -> Entry:
        """Keep what was made, or give what somebody else has kept meanwhile."""
        return self._store(key, Entry(made), keep_earlier=True)

    def _note(self, kind: str, hit: bool, seconds: float) -> None:
        with self._lock:
            totals = self._profile.setdefault(kind, [0, 0.0, 0, 0.0])
            totals[0 if hit else 2] += 1
            totals[1 if hit else 3] += seconds


class DilatedPatternCache(PatternCache):
    """A `PatternCache` that makes the keys: of branches over a length, and of block-sparse layouts.

    >>> cache = DilatedPatternCache()
    >>> cache.put_dilated(8, [4, 8], [1, 2], (torch.arange(8), torch.arange(0, 8, 2)))
    >>> cache.get_dilated(8, [4, 8], [1, 2])[1], cache.get_sparse(8, "local_window", 0.1, 4)
    (tensor([0, 2, 4, 6]), None)
    >>> DilatedPatternCache.sparse_key(8, "local_window", 0.1, 4)
    'sparse_s8_tlocal_window_r0.100_b4'
    """

    @staticmethod
    def dilated_key(seq_len: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> str:
        return f"dilated_s{seq_len}_seg{list(segment_lengths)}_dil{list(dilation_rates)}"

    @staticmethod
    def sparse_key(seq_len: int, pattern_type: str, sparsity_ratio: float, block_size: int) -> str:
        return f"sparse_s{seq_len}_t{pattern_type}_r{sparsity_ratio:.3f}_b{block_size}"

    def get_dilated(
        self, seq_len: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], device: Device = None
    ) -> Any:
        return self.get(self.dilated_key(seq_len, segment_lengths, dilation_rates), device)

    def put_dilated(
        self, seq_len: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], pattern: Any
    ) -> None:
        self.put(self.dilated_key(seq_len, segment_lengths, dilation_rates), pattern)

    def get_sparse(
        self, seq_len: int, pattern_type: str, sparsity_ratio: float, block_size: int, device: Device = None
    ) -> Any:
        return self.get(self.sparse_key(seq_len, pattern_type, sparsity_ratio, block_size), device)

    def put_sparse(self, seq_len: int, pattern_type: str, sparsity_ratio: float, block_size: int, pattern: Any) -> None:
        self.put(self.sparse_key(seq_len, pattern_type, sparsity_ratio, block_size), pattern)


class OptimizedPatternCache(PatternCache):
    """Patterns on the CPU, and those asked for more than three times on the asking GPU as well.

    Copies run on a stream of their own (`enable_async`), from pinned memory, and whoever gets a pattern is ordered
    behind its copy. With `enable_prefetch`, the pattern that followed this one last time is copied ahead. Where there
    is no GPU, the hot tier lies on the CPU, and everything else is the same. What the library remembers is hot from the
    start, where it was made; pushed out of there, it comes back from its copy on the CPU.

    Args:
        max_gpu_patterns, max_cpu_patterns: how many patterns each tier holds at most.
        gpu_memory_limit_mb: what the hot tier may take, in MiB.
        enable_async: copy on a stream of its own.
        enable_prefetch: copy the likely next pattern ahead.

    >>> cache = OptimizedPatternCache()
    >>> cache.put("rows", torch.arange(4))
    >>> for _ in range(5):
    ...     rows = cache.get("rows")
    >>> stats = cache.get_stats()
    >>> stats["cpu_hits"], stats["gpu_hits"]
    (4, 1)
    """

    def __init__(
        self,
        max_gpu_patterns: int = 50,
        max_cpu_patterns: int = 500,
        gpu_memory_limit_mb: float = 100.0,
        enable_async: bool = True,
        enable_prefetch: bool = True,
    ) -> None:
        super().__init__(_at_least_one("max_cpu_patterns", max_cpu_patterns))
        self.max_gpu_patterns = _at_least_one("max_gpu_patterns", max_gpu_patterns)
        if not gpu_memory_limit_mb > 0:
            raise ValueError(f"gpu_memory_limit_mb must be above 0, got {gpu_memory_limit_mb}")
        self.max_cpu_patterns = max_cpu_patterns
        self.gpu_memory_limit_mb = gpu_memory_limit_mb
        self.enable_async = enable_async
        self.enable_prefetch = enable_prefetch
        self._hot: OrderedDict[HotKey, Entry] = OrderedDict()
        self._hot_bytes = 0
        self._gpu_hits = self._prefetches = 0
        self._asked_last = threading.local()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _settings(self) -> dict[str, Any]:
        names = ("max_gpu_patterns", "max_cpu_patterns", "gpu_memory_limit_mb", "enable_async", "enable_prefetch")
        return {name: getattr(self, name) for name in names}

    def get(self, key: Hashable, device: Device = None) -> Any:
        """A copy of the pattern on `device` (by default where hot patterns live), or None."""
        return self.get_batch([key], device)[0]

    def get_batch(self, keys: Sequence[Hashable], device: Device = None) -> list[Any]:
        """Copies of several patterns, None for those that are not there: cold ones are copied together."""
        place = hot_device() if device is None else torch.device(device)
        found: list[Entry | None] = []
        rising: dict[int, Hashable] = {}  # those to be copied into the hot tier, by their place in `keys`
        with self._lock:
            for i, key in enumerate(keys):
                hot = self._hot.get((key, place))
                cold = self._cache.get(key)
                if cold is not None:
                    cold.accesses += 1
                    self._cache.move_to_end(key)
                if hot is not None:
                    self._hot.move_to_end((key, place))
                    self._gpu_hits += 1
                elif cold is not None and cold.accesses > _ACCESSES_OF_A_COLD_PATTERN:
                    rising[i] = key
                found.append(hot or cold)
                self._hits += hot is not None or cold is not None
                self._misses += hot is None and cold is None
            ahead = self._likely_next(keys, place)
        copying = {**{key: found[i] for i, key in rising.items()}, **ahead}
        hot_now = self._copy_to(place, copying)
        for i, key in rising.items():
            found[i] = hot_now[key]
        return [None if entry is None else entry.copy_for(place) for entry in found]

    def put(self, key: Hashable, pattern: Any, *, store_on_gpu: bool = False, pin: bool = False) -> None:
        """Keep a copy of a pattern on the CPU; `store_on_gpu` makes it hot at once, and `pin` keeps it for good."""
        entry = Entry.copied(pattern)
        self._store(key, entry)
        with self._lock:
            dropped = [self._cool(one) for one in list(self._hot) if one[0] == key]  # what it was before
        del dropped
        if store_on_gpu:
            place = _place_of(entry)
            self._copy_to(place if place.type != "cpu" else hot_device(), {key: entry})
        if pin:
            self.pin(key)

    def forget(self, kind: str) -> None:
        super().forget(kind)
        with self._lock:
            found = [hot for hot in self._hot if isinstance(hot[0], tuple) and hot[0][:1] == (kind,)]
            dropped = [self._cool(hot) for hot in found]
        del dropped

    def _find_shared(self, key: Hashable) -> Entry | None:
        with self._lock:
            cold = self._find(key)
            if cold is None:
                return None
            hot = self._hot.get((key, _place_of(cold)))
            if hot is not None:
                self._hot.move_to_end((key, _place_of(cold)))
                self._gpu_hits += 1
                return hot
        return self._copy_to(_place_of(cold), {key: cold})[key]

    def _share(self, key: Hashable, made: Any) -> Entry:
        cold = Entry.copied(made)
        kept = self._store(key, cold, keep_earlier=True)
        place = _place_of(kept)
        if kept is not cold:
            return self._hot.get((key, place)) or self._copy_to(place, {key: kept})[key]
        hot = Entry(made, place)
        self._warm((key, place), hot, cold)
        return hot

    def clear(self) -> None:
        with self._lock:
            super().clear()
            dropped, self._hot = self._hot, OrderedDict()
            self._hot_bytes = self._gpu_hits = self._prefetches = 0
        dropped.clear()

    def _stats(self) -> dict[str, Any]:
        return super()._stats() | {
            "gpu_hits": self._gpu_hits,
            "cpu_hits": self._hits - self._gpu_hits,
            "gpu_patterns": len(self._hot),
            "max_gpu_patterns": self.max_gpu_patterns,
            "gpu_memory_used_mb": self._hot_bytes / 2**20,
            "prefetches": self._prefetches,
        }

    def _likely_next(self, keys: Sequence[Hashable], place: torch.device) -> dict[Hashable, Entry]:
        """The pattern that this thread asked for after the last of `keys` when it was here before, unless it is hot."""
        if not keys:
            return {}
        before, self._asked_last.key = getattr(self._asked_last, "key", None), keys[-1]
        if before in self._cache and before != keys[0]:
            self._cache[before].next = keys[0]
        last = self._cache.get(keys[-1])
        if not self.enable_prefetch or last is None or last.next is None or (last.next, place) in self._hot:
            return {}
        entry = self._cache.get(last.next)
        if entry is None or not self._has_room(entry.bytes):
            return {}  # what is hot now is worth more than a guess
        self._prefetches += 1
        return {last.next: entry}

    def _copy_to(self, place: torch.device, entries: dict[Hashable, Any]) -> dict[Hashable, Entry]:
        """Hot entries of cold ones: one after another on the copies' stream, and ready for any other."""
        made: dict[Hashable, Entry] = {}
        if not entries:
            return made
        stream = self._stream_for(place)
        with torch.cuda.stream(stream) if stream else nullcontext():
            for key, entry in entries.items():
                made[key] = Entry(copy_to(entry.value, place), place)
        for key, entry in made.items():
            self._warm((key, place), entry, entries[key])
        return made

    def _stream_for(self, place: torch.device) -> torch.cuda.Stream | None:
        if place.type != "cuda" or not self.enable_async or torch.cuda.is_current_stream_capturing():
            return None
        stream = self._streams.get(place)
        if stream is None:
            stream = self._streams.setdefault(place, torch.cuda.Stream(place))
        return stream

    def _has_room(self, size: int) -> bool:
        limit = self.gpu_memory_limit_mb * 2**20
        return len(self._hot) < self.max_gpu_patterns and self._hot_bytes + size <= limit

    def _warm(self, hot: HotKey, entry: Entry, cold: Entry) -> None:
        """Take an entry into the hot tier, if its limits leave room beside what is pinned."""
        dropped = []  # freed when this returns, outside the lock
        with self._lock:
            if (
                hot in self._hot
                or self._cache.get(hot[0]) is not cold
                or entry.bytes > self.gpu_memory_limit_mb * 2**20
            ):
                return  # somebody was faster, the pattern was put anew meanwhile, or it never fits
            while not self._has_room(entry.bytes):
                oldest = next((one for one in self._hot if one[0] not in self._pinned), None)
                if oldest is None:
                    return
                dropped.append(self._cool(oldest))
                self._evictions += 1
            self._hot[hot] = entry
            self._hot_bytes += entry.bytes

    def _cool(self, hot: HotKey) -> Entry:
        entry = self._hot.pop(hot)
        self._hot_bytes -= entry.bytes
        return entry


def generate_pattern(key: str) -> tuple[Tensor, ...]:
    """The rows on each branch's grid, for heads of offset 0, of a pattern that `DilatedPatternCache.dilated_key` names.

    >>> generate_pattern("dilated_s8_seg[4, 8]_dil[1, 3]")
    (tensor([0, 1, 2, 3, 4, 5, 6, 7]), tensor([0, 3, 6]))
    """
    found = re.fullmatch(r"dilated_s(\d+)_seg\[([\d, ]+)\]_dil\[([\d, ]+)\]", key)
    if found is None:
        raise ValueError(f"{key!r} names no dilated pattern: pass the pattern itself, as in {{{key!r}: tensor}}")
    from dilated_attention_pytorch.core.pattern import on_grid
    from dilated_attention_pytorch.core.spec import Branch

    lengths, rates = ([int(number) for number in found[i].split(",")] for i in (2, 3))
    positions = torch.arange(int(found[1]))
    return tuple(positions[on_grid(Branch(w, r), 0, positions)] for w, r in zip(lengths, rates))


class SimpleGPUCache:
    """Every pattern on the GPU from the start, and nothing to manage: for few patterns that are always used.

    `patterns_to_cache` are keys of dilated patterns, which are generated, or a mapping of keys to patterns. They live
    on `device`: the current GPU, or the CPU where there is none.

    >>> cache = SimpleGPUCache(["dilated_s8_seg[4]_dil[2]"])
    >>> cache.get("dilated_s8_seg[4]_dil[2]")[0].tolist(), list(cache.gpu_patterns)
    ([0, 2, 4, 6], ['dilated_s8_seg[4]_dil[2]'])
    """

    def __init__(self, patterns_to_cache: Mapping[str, Any] | Iterable[str], device: Device = None) -> None:
        place = hot_device() if device is None else torch.device(device)
        if isinstance(patterns_to_cache, Mapping):
            made: Mapping[str, Any] = patterns_to_cache
        else:
            made = {key: generate_pattern(key) for key in patterns_to_cache}
        on_device = {key: copy_to(one, place) for key, one in made.items()}
        self._entries = {key: Entry(one, place) for key, one in on_device.items()}
        self.gpu_patterns: Mapping[str, Any] = MappingProxyType(on_device)

    def get(self, key: str) -> Any:
        """A copy of the pattern on the device, or None."""
        entry = self._entries.get(key)
        return None if entry is None else entry.copy_for(None)


def hot_device() -> torch.device:
    """Where patterns live that are always at hand: the current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _place_of(entry: Entry) -> torch.device:
    """Where an entry was put from or made; what has no tensors is nowhere, which is as good as the CPU."""
    return torch.device("cpu") if entry.home is None else entry.home


_global: DilatedPatternCache | None = None
_global_lock = threading.Lock()


def get_global_pattern_cache() -> DilatedPatternCache:
    """The cache that modules with `use_pattern_cache=True` share.

    Its size is `PATTERN_CACHE_MAX_SIZE` (default 1000), and `PATTERN_CACHE_ENABLE_PROFILING=1` adds the seconds that
    hits and misses of each kind took to its statistics; both are read when it is made and when it is reset.
    """
    global _global
    with _global_lock:
        if _global is None:
            _global = DilatedPatternCache(**_environment())
        return _global


def reset_global_pattern_cache() -> None:
    """Forget what the global cache holds and its statistics; modules go on using it."""
    cache, settings = get_global_pattern_cache(), _environment()
    with cache._lock:  # at once: nothing may be pinned before the size is known that leaves room for it
        cache.clear()
        cache.max_size, cache.enable_profiling = settings["max_size"], settings["enable_profiling"]


def _environment() -> dict[str, Any]:
    stated = os.environ.get("PATTERN_CACHE_MAX_SIZE", "1000")
    try:
        size = _at_least_one("PATTERN_CACHE_MAX_SIZE", int(stated))
    except ValueError:
        raise ValueError(f"PATTERN_CACHE_MAX_SIZE must be a whole number of at least 1, got {stated!r}") from None
    profiling = os.environ.get("PATTERN_CACHE_ENABLE_PROFILING", "0")
    if profiling not in ("0", "1", ""):
        raise ValueError(f"PATTERN_CACHE_ENABLE_PROFILING must be 0 or 1, got {profiling!r}")
    return {"max_size": size, "enable_profiling": profiling == "1"}


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}: leave caching off to have none")
    return value


def _made_again(kind: type[PatternCache], settings: dict[str, Any]) -> PatternCache:
    return kind(**settings)
