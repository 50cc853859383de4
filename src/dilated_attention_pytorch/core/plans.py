"""The one table of what calls remember: checked calls, plans, tables, layouts and schedules.

`remember(kind, key, make)` returns what `make()` returned for this key the first time. The table is bounded in entries
and bytes, evicts the least recently used entry, and is safe under threads and `fork`. `PatternCache` is its class and
its public face; `get_global_pattern_cache()` is the table of the whole process. A call with a cache of its own asks
that one, through `Resources.remember`.

- A kind is one of `KINDS`, which may bound it further. Statistics, profiles and `forget` are by kind.
- A key is hashable and compares by value. It holds no tensors: `spans_key` and `SameTensor` stand for them.
- A value is shared by everyone who asks: never write to it. It stays on the device where it was made. Tensors in
  tuples, lists and dicts are ordered between CUDA streams; an object that holds tensors of its own must have them ready
  for every stream.
- `make` runs outside the lock and outside inference mode, because training cannot save tensors of inference for
  backward. Two threads may run it at once; both get the value that was stored first.
- A tracer sees `make()` and no table. Code that traces with fake tensors or `torch.func` asks `is_plain` first.
- A CUDA graph reads what its capture found whenever it is replayed, so those tensors are never freed. Tensors that a
  capture makes have no values before a replay, so they are not remembered.

Patterns that users `put` are copied to the CPU, and every `get` returns a new copy on the device that asks: no caller
can write into an entry.
"""

from __future__ import annotations

import functools
import heapq
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.checks import COUNT, SIZE, checked, shown
from dilated_attention_pytorch.core.entries import CLOCK, Device, Entry, SameTensor, Value, size_of
from dilated_attention_pytorch.core.log import log
from dilated_attention_pytorch.core.profile import LOCK, Profile

Cache = TypeVar("Cache", bound="PatternCache")

KINDS: Mapping[str, int | None] = MappingProxyType(
    {
        "call": None,
        "plan": None,
        "lengths": None,
        "parts": None,
        "segment table": None,
        "block layout": None,
        "ring schedule": None,
        "decode table": None,
        "zero keys": 8,  # as long as the input
    }
)
"""What the library remembers, and the most entries of a kind; None for as many as the table holds.

Making one costs more than twice as much as a hit: `bench cache` measures both.
"""


class Remembers(Protocol):
    """What a call needs of a cache: a `PatternCache`, or `Resources` with or without one."""

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value]) -> Value: ...


def check_cache(cache: Any) -> None:
    if cache is not None and not hasattr(cache, "remember"):
        raise TypeError(f"cache must be a PatternCache, got {shown(cache)}")


class PatternCache:
    """A table that evicts its least recently used entry. It holds patterns that you put, and the library's plans.

    A pattern is a tensor, or tuples, lists and dicts of tensors. A pinned entry is never evicted. At most
    `max_size - 1` entries can be pinned, so that there is always room for another one.

    Args:
        max_size: the most entries that it holds.
        enable_stats: count hits, misses and evictions.
        enable_profiling: add the seconds and bytes of lookups to the statistics, by kind.
        max_bytes: the most bytes that it holds, including keys and Python's own objects; None for no limit.

    >>> cache = PatternCache(max_size=2)
    >>> cache.put("rows", torch.tensor([0, 2, 4]))
    >>> cache.get("rows").fill_(9), cache.get("rows")  # what a caller writes stays with the caller
    (tensor([9, 9, 9]), tensor([0, 2, 4]))
    >>> cache.get("columns") is None, cache.get("columns", "none")
    (True, 'none')
    >>> cache.get_stats()["hit_rate"]
    0.5
    """

    _size_of_global = 1000

    @checked(max_size=COUNT, max_bytes=COUNT)
    def __init__(
        self,
        max_size: int = 100,
        *,
        enable_stats: bool = True,
        enable_profiling: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        self.max_size, self.max_bytes = max_size, max_bytes
        self.enable_stats, self.enable_profiling = enable_stats, enable_profiling
        self._cache: dict[Hashable, Entry] = {}
        self._bytes = 0
        self._hits: Counter[str] = Counter()  # by kind
        self._misses: Counter[str] = Counter()
        self._evictions = 0
        self._profile = Profile()

    def __reduce__(self) -> Any:
        # A copy of a module shares the global cache. A cache of its own is made again with its settings, empty.
        if _global.get(type(self)) is self:
            return shared_cache, (type(self),)
        settings = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return functools.partial(type(self), **settings), ()

    @checked()
    def get(self, key: Hashable, default: Any = None, *, target_device: Device = None) -> Any:
        """A copy of the pattern, on `target_device` or where it was put from; `default` if it is missing."""
        refuse_device(default)
        return self._copies([key], target_device, default)[0]

    def _copies(self, keys: Sequence[Hashable], device: Device, default: Any = None) -> list[Any]:
        began = time.perf_counter()
        found = self._find_patterns(keys, device)
        copies = [default if entry is None else entry.copy_for(device) for entry in found]
        if self.enable_profiling:
            seconds = (time.perf_counter() - began) / max(len(keys), 1)
            for entry in found:
                self._note("get", entry, entry is not None, seconds)
        return copies

    def _find_patterns(self, keys: Sequence[Hashable], device: Device) -> list[Entry | None]:
        with LOCK:
            found = [self._find(key) for key in keys]
            missing = found.count(None)
            self._hits.update(pattern=len(keys) - missing)
            self._misses.update(pattern=missing)
        return found

    @checked()
    def put(self, key: Hashable, pattern: Any) -> None:
        """Store a copy of a pattern; it replaces an earlier one of the same key."""
        self._put(key, pattern)

    def _put(self, key: Hashable, pattern: Any) -> Entry:
        began = time.perf_counter()
        entry = Entry.copied(pattern)
        if not self._store(key, entry):
            raise ValueError(
                f"a pattern of {entry.size} bytes does not fit into a cache of max_bytes={self.max_bytes} beside "
                f"{len(self._pinned())} pinned patterns: make the cache larger, or pin fewer"
            )
        if self.enable_profiling:
            self._profile.add("put", count=1, bytes=entry.bytes, seconds=time.perf_counter() - began)
        return entry

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value], profile: Profile | None = None) -> Value:
        """The value that `make` returned for this key. All callers share it: never write to it.

        The docstring of this file states the rules. `profile` belongs to the module that asks.
        """
        if torch.compiler.is_compiling():
            return make()
        timed = profile is not None or self.enable_profiling or log.isEnabledFor(logging.DEBUG)
        began = time.perf_counter() if timed else 0.0
        entry = self._find_shared((kind, key))
        hit = entry is not None
        if entry is None:
            entry = self._make(kind, key, make)
        else:
            self._hits[kind] += 1
        value: Value = entry.shared() if entry.on_gpu else entry.value
        if timed:
            seconds = time.perf_counter() - began
            self._note(kind, self._cache.get((kind, key), entry), hit, seconds, profile)
            if hit:
                log.debug("%s: found in the pattern cache, %.3f ms", kind, seconds * 1e3)
            else:
                log.debug("%s: made in %.3f ms and remembered, %d bytes", kind, seconds * 1e3, entry.size)
        return value

    def _make(self, kind: str, key: Hashable, make: Callable[[], Any]) -> Entry:
        if kind not in KINDS:
            raise ValueError(f"no kind of entry {kind!r}: measure it as `bench cache` does, and add it to KINDS")
        with LOCK:
            self._misses[kind] += 1
        with torch.inference_mode(False):
            entry = Entry(make())
        if entry.on_gpu and torch.cuda.is_current_stream_capturing():
            return entry
        return self._share((kind, key), entry)

    @checked()
    def forget(self, kind: str) -> None:
        """Drop what was remembered of a kind, pinned or not."""
        with LOCK:
            for key in [key for key in self._cache if kind_of(key) == kind]:
                self._drop(key)

    @checked()
    def pin(self, key: Hashable) -> None:
        """Never evict this entry."""
        with LOCK:
            if key not in self._cache:
                raise KeyError(f"no pattern {key!r} to pin: put it first")
            pinned = self._pinned()
            if len(pinned) + (not self._cache[key].pinned) >= self.max_size:
                raise ValueError(
                    f"at most {self.max_size - 1} of {self.max_size} patterns can be pinned, and {len(pinned)} are: "
                    "make the cache larger"
                )
            self._cache[key].pinned = True

    @checked()
    def pin_pattern(self, key: Hashable) -> bool:
        """As `pin`, but returns False, instead of raising an error, if there is no such entry."""
        with LOCK:
            if key not in self._cache:
                return False
            self.pin(key)
        return True

    def clear(self) -> None:
        """Forget every entry, including pinned ones, and the statistics."""
        with LOCK:
            self._cache.clear()
            self._bytes = 0
            self.reset_stats()

    def reset_stats(self) -> None:
        """Restart the statistics; the entries stay."""
        with LOCK:
            self._hits.clear()
            self._misses.clear()
            self._evictions = 0
            self._profile.clear()

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def get_stats(self) -> dict[str, Any]:
        """`hits, misses, hit_rate, evictions, size, max_size, bytes, max_bytes, pinned`, and `kinds`.

        `kinds` has hits, misses and size of each kind of entry; `pattern` are those that users put. If the cache or a
        module that uses it is profiled, `profile` has counts, seconds and bytes by kind.

        >>> cache = PatternCache()
        >>> table = [cache.remember("parts", 64, lambda: [1, 2]) for _ in range(3)]
        >>> cache.get_stats()["kinds"]
        {'parts': {'hits': 2, 'misses': 1, 'size': 1}}
        """
        with LOCK:
            hits, misses, sizes = self._hits, self._misses, Counter(map(kind_of, self._cache))
            asked = hits.total() + misses.total()
            stats: dict[str, Any] = {
                "hits": hits.total(),
                "misses": misses.total(),
                "hit_rate": hits.total() / asked if asked else 0.0,
                "evictions": self._evictions,
                "size": len(self._cache),
                "max_size": self.max_size,
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
                "pinned": len(self._pinned()),
                "kinds": {
                    kind: {"hits": hits[kind], "misses": misses[kind], "size": sizes[kind]}
                    for kind in sorted({*hits, *misses, *sizes})
                },
            }
            profile = self._profile.totals()
        if not self.enable_stats:
            stats |= {"hits": 0, "misses": 0, "hit_rate": 0.0, "evictions": 0, "kinds": {}}
        return stats | {"profile": profile} if profile or self.enable_profiling else stats

    def _find(self, key: Hashable) -> Entry | None:
        entry = self._cache.get(key)
        if entry is not None:
            entry.used = next(CLOCK)
        return entry

    _find_shared = _find  # without the lock, which would take longer than the rest

    def _share(self, key: Hashable, entry: Entry) -> Entry:
        """Store an entry, or return the one that another thread has stored meanwhile."""
        with LOCK:
            earlier = self._cache.get(key)
            if earlier is None:
                self._store(key, entry)
        return earlier or entry

    def _store(self, key: Hashable, entry: Entry) -> bool:
        """Whether the entry is in the table now: what is pinned may leave no room for it."""
        entry.size = size_of(key, entry.value)
        with LOCK:
            earlier = self._cache.get(key)
            pinned = [one for one in self._pinned() if one is not earlier]
            if len(pinned) >= self.max_size:
                return False
            if self.max_bytes is not None and sum(one.size for one in pinned) + entry.size > self.max_bytes:
                return False
            if earlier is not None:
                entry.pinned = self._drop(key).pinned
            if self.max_bytes is not None:
                while self._bytes + entry.size > self.max_bytes:
                    self._evict(1)
            kind = kind_of(key)
            limit = KINDS.get(kind)
            if limit is not None and sum(kind_of(one) == kind for one in self._cache) >= limit:
                self._evict(1, kind)
            if len(self._cache) >= self.max_size:
                self._evict(max(1, self.max_size // 64))  # several, because finding the oldest looks at every entry
            self._cache[key] = entry
            self._bytes += entry.size
        return True

    def _pinned(self) -> list[Entry]:
        with LOCK:
            return [entry for entry in self._cache.values() if entry.pinned]

    def _evict(self, count: int, kind: str | None = None) -> None:
        """Drop the least recently used entries, of a kind or of all."""
        free = (key for key, one in self._cache.items() if not one.pinned and kind in (None, kind_of(key)))
        for key in heapq.nsmallest(count, free, key=lambda key: self._cache[key].used):
            self._evictions += 1
            log.debug("evicted from the pattern cache: %s, %d bytes", kind_of(key), self._drop(key).size)

    def _drop(self, key: Hashable) -> Entry:
        entry = self._cache.pop(key)
        self._bytes -= entry.size
        return entry

    def _note(self, kind: str, entry: Entry | None, hit: bool, seconds: float, profile: Profile | None = None) -> None:
        if profile is None and not self.enable_profiling:
            return
        amounts = {
            "hits": int(hit),
            "misses": int(not hit),
            "seconds_of_hits": seconds if hit else 0.0,
            "seconds_of_misses": 0.0 if hit else seconds,
            "bytes": 0 if entry is None else entry.size,
        }
        self._profile.add(kind, **amounts)
        if profile is not None:
            profile.add(f"lookups of {kind}", **amounts)


class DilatedPatternCache(PatternCache):
    """A `PatternCache` that makes keys for branches over a length, and for block-sparse patterns.

    >>> DilatedPatternCache.dilated_key(8, [4, 8], [1, 2])
    'dilated_s8_seg[4, 8]_dil[1, 2]'
    >>> DilatedPatternCache.sparse_key(8, "local_window", 0.1, 4)
    'sparse_s8_tlocal_window_r0.100_b4'
    """

    @staticmethod
    @checked(seq_len=SIZE, segment_lengths=COUNT, dilation_rates=COUNT)
    def dilated_key(seq_len: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> str:
        return f"dilated_s{seq_len}_seg{list(segment_lengths)}_dil{list(dilation_rates)}"

    @staticmethod
    @checked(seq_len=SIZE, block_size=COUNT)
    def sparse_key(seq_len: int, pattern_type: str, sparsity_ratio: float, block_size: int | None = None) -> str:
        """A ratio of more than three digits is written in full, so that no two ratios share a key."""
        ratio = f"{sparsity_ratio:.3f}"
        ratio = ratio if float(ratio) == sparsity_ratio else repr(float(sparsity_ratio))
        block = "" if block_size is None else f"_b{block_size}"
        return f"sparse_s{seq_len}_t{pattern_type}_r{ratio}{block}"


_global: dict[type[PatternCache], PatternCache] = {}


def get_global_pattern_cache() -> DilatedPatternCache:
    """The table of the whole process, which modules with `use_pattern_cache=True` share.

    The environment bounds it: `PATTERN_CACHE_MAX_SIZE` entries (default 1000) and `PATTERN_CACHE_MAX_BYTES` bytes
    (default 256 MiB). `PATTERN_CACHE_ENABLE_PROFILING=1` adds the seconds and bytes of lookups to its statistics. All
    three are read when it is made and when it is reset. They hold for the cache of `RingDilatedAttentionV3` too.
    """
    return shared_cache(DilatedPatternCache)


def remember(kind: str, key: Hashable, make: Callable[[], Value]) -> Value:
    """`PatternCache.remember` of the table of the whole process."""
    return shared_cache(DilatedPatternCache).remember(kind, key, make)


def recall(kind: str, key: Hashable) -> Any:
    """A fast lookup in the table of the whole process. If it returns None, call `remember`.

    Only `remember` makes values, and measures and logs lookups.
    """
    cache = _global.get(DilatedPatternCache)
    if cache is None or cache.enable_profiling or log.isEnabledFor(logging.DEBUG):
        return None
    entry = cache._find_shared((kind, key))
    if entry is None or entry.on_gpu:
        return None
    cache._hits[kind] += 1
    return entry.value


def remember_of(kind: str, x: Tensor, key: Hashable, make: Callable[[], Value]) -> Value:
    """As `remember`, for a value that is made from `x`, a tensor that many layers get, such as a mask.

    The value is remembered until the tensor changes. Tensors of inference mode do not count their changes, so for them
    the value is made every time.
    """
    if torch.compiler.is_compiling() or x.is_inference():
        return make()
    return remember(kind, (SameTensor(x), key), make)


def shared_cache(cls: type[Cache]) -> Cache:
    """The one cache of a class that modules share."""
    found = _global.get(cls)
    if found is None:
        with LOCK:
            if cls not in _global:
                made = cls()
                _reset(made)
                _global[cls] = made
            found = _global[cls]
    return found  # type: ignore[return-value]


def global_caches() -> list[PatternCache]:
    """The caches that modules share."""
    get_global_pattern_cache()
    return list(_global.values())


def reset_global_pattern_cache() -> None:
    """Clear the shared caches and their statistics, and read the environment; modules go on using them."""
    for cache in global_caches():
        _reset(cache)


def _reset(cache: PatternCache) -> None:
    settings = environment.pattern_cache_settings(cache._size_of_global)
    with LOCK:
        cache.clear()
        vars(cache).update(settings)


def refuse_device(default: Any) -> None:
    """Refuse a device that is passed as the default of `get`."""
    names_device = isinstance(default, str) and default.partition(":")[0] in ("cpu", "cuda")
    if isinstance(default, torch.device) or names_device:
        raise TypeError(
            "the second argument of get is what it returns for a missing pattern, not a device: "
            f"pass target_device={str(default)!r}"
        )


def kind_of(key: Hashable) -> str:
    """The kind of the entry that has this key in a table."""
    return key[0] if isinstance(key, tuple) and key and key[0] in KINDS else "pattern"
