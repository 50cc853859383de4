"""Bounded, thread-safe memory of what calls share and is costly to make: LRU, one lock, nothing long done under it.

There are two ways in. What users `put` is copied, kept on the CPU, and copied again for each `get`, on the device that
asks: nobody can write into an entry. What the library makes goes through `remember`: it stays on its device and is
shared as it is, because engines only read it. On a GPU a reader's stream is ordered behind the maker's.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.core.cache_entries import Device, Entry, size_of
from dilated_attention_pytorch.core.checks import COUNT, SIZE, check_whole, checked
from dilated_attention_pytorch.core.guarded import Guarded
from dilated_attention_pytorch.core.log import debugging, log
from dilated_attention_pytorch.core.profile import Profile

Value = TypeVar("Value")
Cache = TypeVar("Cache", bound="PatternCache")

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

_GLOBAL_BYTES = 256 << 20


class Remembers(Protocol):
    """What a call needs of a cache."""

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value]) -> Value: ...


class PatternCache(Guarded):
    """An LRU cache of patterns: tensors, or tuples, lists and dicts that hold tensors.

    A pinned pattern is never evicted; one place always stays free of pins, so that there is room to put another.

    Args:
        max_size: the most patterns it holds.
        enable_stats: count hits, misses and evictions.
        enable_profiling: add the seconds and bytes of lookups to the statistics, by kind.
        max_bytes: the most bytes it holds, keys and Python's own objects included; None for no limit.

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
        super().__init__()
        self.max_size, self.max_bytes = max_size, max_bytes
        self.enable_stats, self.enable_profiling = enable_stats, enable_profiling
        self._cache: OrderedDict[Hashable, Entry] = OrderedDict()
        self._bytes = 0
        self._pinned: set[Hashable] = set()
        self._hits = self._misses = self._evictions = 0
        self._profile = Profile()

    def __reduce__(self) -> Any:
        # A copy of a module shares the global cache. A cache of its own is made again with its settings, empty.
        if _global.get(type(self)) is self:
            return shared_cache, (type(self),)
        return _made_again, (type(self), self._settings())

    def _settings(self) -> dict[str, Any]:
        names = ("max_size", "enable_stats", "enable_profiling", "max_bytes")
        return {name: getattr(self, name) for name in names}

    @checked()
    def get(self, key: Hashable, default: Any = None, *, target_device: Device = None) -> Any:
        """A copy of the pattern, on `target_device` or where it was put from; `default` if it is not there."""
        refuse_device(default)
        began = time.perf_counter()
        entry = self._find(key)
        found = default if entry is None else entry.copy_for(target_device)
        if self.enable_profiling:
            self._note("get", entry, entry is not None, time.perf_counter() - began)
        return found

    @checked()
    def put(self, key: Hashable, pattern: Any) -> None:
        """Keep a copy of a pattern, in place of an earlier one of this key."""
        self._put(key, pattern)

    def _put(self, key: Hashable, pattern: Any) -> Entry:
        began = time.perf_counter()
        entry = Entry.copied(pattern)
        if not self._store(key, entry)[1]:
            raise ValueError(
                f"a pattern of {entry.size} bytes does not fit beside {len(self._pinned)} pinned patterns into a cache "
                f"of max_bytes={self.max_bytes}: make the cache larger, or unpin some"
            )
        if self.enable_profiling:
            self._profile.add("put", count=1, bytes=entry.bytes, seconds=time.perf_counter() - began)
        return entry

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value], profile: Profile | None = None) -> Value:
        """The value that `make` gives for this key, shared by all who ask: it must not be written to.

        `make` runs outside the lock, so two threads may make it at once; both get the one that was stored first. A kind
        that is cheaper to make than to look up is made every time. `profile` is that of the module that asks.
        """
        if kind not in KINDS:
            raise ValueError(
                f"no kind of entry {kind!r}: measure it with the others of pattern_cache.KINDS, and add it"
            )
        if not KINDS[kind]:
            return make()
        noting, telling = profile is not None or self.enable_profiling, debugging()
        began = time.perf_counter() if noting or telling else 0.0
        found = self._find_shared((kind, key))
        entry = self._share((kind, key), make()) if found is None else found
        value: Value = entry.shared()
        if noting or telling:
            seconds = time.perf_counter() - began
            if noting:
                self._note(kind, entry, found is not None, seconds, profile)
            if found is not None:
                log.debug("%s: found in the pattern cache, %.3f ms", kind, seconds * 1e3)
            else:
                log.debug("%s: made in %.3f ms and remembered, %d bytes", kind, seconds * 1e3, entry.size)
        return value

    @checked()
    def forget(self, kind: str) -> None:
        """Drop what was remembered of a kind, pinned or not."""
        with self._lock:
            found = [key for key in self._cache if isinstance(key, tuple) and key[:1] == (kind,)]
            dropped = [self._drop(key) for key in found]
            self._pinned.difference_update(found)
        del dropped  # outside the lock

    @checked()
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

    @checked()
    def pin_pattern(self, key: Hashable) -> bool:
        """As `pin`; False, instead of an error, if there is no such pattern."""
        with self._lock:
            if key not in self._cache:
                return False
            self.pin(key)
        return True

    @checked()
    def unpin(self, key: Hashable) -> None:
        with self._lock:
            self._pinned.discard(key)

    def clear(self) -> None:
        """Forget every pattern, pinned ones included, and the statistics."""
        with self._lock:
            dropped, self._cache = self._cache, OrderedDict()
            self._bytes = 0
            self._pinned.clear()
        self.reset_stats()
        dropped.clear()  # outside the lock: freeing memory takes its time

    def reset_stats(self) -> None:
        """Count anew; the patterns stay."""
        with self._lock:
            self._hits = self._misses = self._evictions = 0
        self._profile.clear()

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def get_stats(self) -> dict[str, Any]:
        """`hits, misses, hit_rate, evictions, size, max_size, bytes, max_bytes, pinned`.

        With profiling of the cache, or of a module that uses it, also `profile`: counts, seconds and bytes by kind.
        """
        with self._lock:
            stats = self._stats()
        profile = self._profile.totals()
        return stats | {"profile": profile} if profile or self.enable_profiling else stats

    def _stats(self) -> dict[str, Any]:
        asked = self._hits + self._misses
        return {
            "hits": self._hits,
            "misses": self._misses,
            "hit_rate": self._hits / asked if asked else 0.0,
            "evictions": self._evictions,
            "size": len(self._cache),
            "max_size": self.max_size,
            "bytes": self._bytes,
            "max_bytes": self.max_bytes,
            "pinned": len(self._pinned),
        }

    def _find(self, key: Hashable) -> Entry | None:
        with self._lock:
            entry = self._cache.get(key)
            if entry is None:
                self._misses += self.enable_stats
            else:
                self._hits += self.enable_stats
                self._cache.move_to_end(key)
            return entry

    def _store(self, key: Hashable, entry: Entry, keep_earlier: bool = False) -> tuple[Entry, bool]:
        """The entry to use, and whether the cache has it: it may be too large."""
        entry.size = size_of(key, entry.value)
        evicted: dict[Hashable, Entry] = {}  # freed when this returns, outside the lock
        with self._lock:
            earlier = self._cache.get(key)
            if earlier is not None and keep_earlier:
                return earlier, True
            if earlier is not None:
                self._drop(key)
            pinned = sum(self._cache[one].size for one in self._pinned if one in self._cache)
            fits = self.max_bytes is None or pinned + entry.size <= self.max_bytes
            if fits:
                evicted = self._make_room(entry.size)
                self._cache[key] = entry
                self._bytes += entry.size
        for one, old in evicted.items():
            log.debug("evicted from the pattern cache: %s, %d bytes", _shown(one), old.size)
        return entry, fits

    def _make_room(self, size: int) -> dict[Hashable, Entry]:
        """Evict until one more pattern of `size` bytes fits: before it comes, so that nobody ever sees more."""
        evicted = {}
        oldest = (key for key in list(self._cache) if key not in self._pinned) if self._is_full(size) else iter(())
        while self._is_full(size):
            key = next(oldest)
            evicted[key] = self._drop(key)
        self._evictions += len(evicted) if self.enable_stats else 0
        return evicted

    def _is_full(self, size: int) -> bool:
        over = self.max_bytes is not None and self._bytes + size > self.max_bytes
        return over or len(self._cache) >= self.max_size

    def _drop(self, key: Hashable) -> Entry:
        entry = self._cache.pop(key)
        self._bytes -= entry.size
        return entry

    def _find_shared(self, key: Hashable) -> Entry | None:
        return self._find(key)

    def _share(self, key: Hashable, made: Any) -> Entry:
        """Keep what was made, or give what somebody else has kept meanwhile."""
        return self._store(key, Entry(made), keep_earlier=True)[0]

    def _note(self, kind: str, entry: Entry | None, hit: bool, seconds: float, profile: Profile | None = None) -> None:
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


class ProfiledCache:
    """A cache as a module with `enable_profiling` sees it: its lookups are noted in the module's profile too."""

    def __init__(self, cache: PatternCache, profile: Profile) -> None:
        self._cache, self._profile = cache, profile

    def remember(self, kind: str, key: Hashable, make: Callable[[], Value]) -> Value:
        return self._cache.remember(kind, key, make, self._profile)


class DilatedPatternCache(PatternCache):
    """A `PatternCache` that makes the keys: of branches over a length, and of block-sparse layouts.

    >>> cache = DilatedPatternCache()
    >>> cache.put_dilated_indices((torch.arange(8), torch.arange(0, 8, 2)), 8, [4, 8], [1, 2])
    >>> cache.get_dilated_indices(8, [4, 8], [1, 2])[1], cache.get_sparse_pattern(8, "local_window", 0.1, 4)
    (tensor([0, 2, 4, 6]), None)
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
        """A ratio of more than three digits is written in full, so that no two share a key."""
        ratio = f"{sparsity_ratio:.3f}"
        ratio = ratio if float(ratio) == sparsity_ratio else repr(float(sparsity_ratio))
        block = "" if block_size is None else f"_b{block_size}"
        return f"sparse_s{seq_len}_t{pattern_type}_r{ratio}{block}"

    def get_dilated_indices(
        self, seq_len: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], device: Device = None
    ) -> Any:
        return self.get(self.dilated_key(seq_len, segment_lengths, dilation_rates), target_device=device)

    def put_dilated_indices(
        self, indices: Any, seq_len: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int]
    ) -> None:
        self.put(self.dilated_key(seq_len, segment_lengths, dilation_rates), indices)

    def get_sparse_pattern(
        self,
        seq_len: int,
        pattern_type: str,
        sparsity_ratio: float,
        block_size: int | None = None,
        device: Device = None,
    ) -> tuple[Tensor, Tensor] | None:
        """The kept blocks `(row_indices, col_indices)`."""
        found: tuple[Tensor, Tensor] | None = self.get(
            self.sparse_key(seq_len, pattern_type, sparsity_ratio, block_size), target_device=device
        )
        return found

    def put_sparse_pattern(
        self,
        row_indices: Tensor,
        col_indices: Tensor,
        seq_len: int,
        pattern_type: str,
        sparsity_ratio: float,
        block_size: int | None = None,
    ) -> None:
        self.put(self.sparse_key(seq_len, pattern_type, sparsity_ratio, block_size), (row_indices, col_indices))


_global: dict[type[PatternCache], PatternCache] = {}
_making = Guarded(lock_order=0)


def get_global_pattern_cache() -> DilatedPatternCache:
    """The cache that modules with `use_pattern_cache=True` share.

    The environment bounds it: `PATTERN_CACHE_MAX_SIZE` patterns (default 1000) and `PATTERN_CACHE_MAX_BYTES` bytes
    (default 256 MiB). `PATTERN_CACHE_ENABLE_PROFILING=1` adds the seconds and bytes of lookups to its statistics. All
    three are read when it is made and when it is reset. They hold for the cache of `RingDilatedAttentionV3` too.
    """
    return shared_cache(DilatedPatternCache)


def shared_cache(kind: type[Cache]) -> Cache:
    """The one cache of a kind that modules share."""
    with _making._lock:
        found = _global.get(kind)
        if found is None:
            found = kind()
            _reset(found)
            _global[kind] = found
    assert isinstance(found, kind)
    return found


def global_caches() -> list[PatternCache]:
    """The caches that modules share."""
    get_global_pattern_cache()
    return list(_global.values())


def reset_global_pattern_cache() -> None:
    """Forget what the shared caches hold and their statistics, and read the environment; modules go on using them."""
    for cache in global_caches():
        _reset(cache)


def _reset(cache: PatternCache) -> None:
    settings = {
        "max_size": _number_from("PATTERN_CACHE_MAX_SIZE", cache._size_of_global),
        "max_bytes": _number_from("PATTERN_CACHE_MAX_BYTES", _GLOBAL_BYTES),
        "enable_profiling": _flag_from("PATTERN_CACHE_ENABLE_PROFILING"),
    }
    with cache._lock:  # at once: nothing may be pinned before the size is known that leaves room for it
        cache.clear()
        for name, value in settings.items():
            setattr(cache, name, value)


def _number_from(variable: str, default: int) -> int:
    stated = os.environ.get(variable, str(default))
    try:
        return check_whole(variable, int(stated), least=1)
    except ValueError:
        raise ValueError(f"{variable} must be a whole number of at least 1, got {stated!r}") from None


def _flag_from(variable: str) -> bool:
    stated = os.environ.get(variable, "0")
    if stated not in ("0", "1", ""):
        raise ValueError(f"{variable} must be 0 or 1, got {stated!r}")
    return stated == "1"


def refuse_device(default: Any) -> None:
    """What `get` gives for a missing pattern is no device, which has a keyword of its own."""
    names_device = isinstance(default, str) and default.partition(":")[0] in ("cpu", "cuda")
    if isinstance(default, torch.device) or names_device:
        raise TypeError(
            "the second argument of get is what it returns for a missing pattern, not a device: "
            f"pass target_device={str(default)!r}"
        )


def _shown(key: Hashable) -> Hashable:
    """A key as a log line shows it: what was remembered by its kind, since its key may be long."""
    return key[0] if isinstance(key, tuple) and key else key


def _made_again(kind: type[PatternCache], settings: dict[str, Any]) -> PatternCache:
    return kind(**settings)
