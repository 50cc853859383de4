"""A decoding step as a CUDA graph, and the caches that later calls use again.

A step of a small model is hundreds of launches, each of which takes the host longer than the GPU; a graph is one.
A graph reads and writes the addresses that it was recorded with, so it belongs to one cache and lives as long as that
cache. A model keeps its cache (`lend_cache`) for the next call with the same batch and dtype.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.log import log
from dilated_attention_pytorch.core.modes import is_plain, tf32_is_on
from dilated_attention_pytorch.models.fused import can_fuse, fused_logits
from dilated_attention_pytorch.models.weights import stored_tensors

if TYPE_CHECKING:
    from dilated_attention_pytorch.models.longnet import LongNetLM
    from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

_WARM_UPS = 3  # steps before a graph is recorded: they compile and load what it launches
_MOST_KEPT = 2  # caches per model
_PLAIN = (bool, int, float, str, type(None))
_KEPT_SHARE = 8  # a cache is kept if this many of them would fit the free memory

_steps: weakref.WeakKeyDictionary[DilatedKVCache, dict[int, Step]] = weakref.WeakKeyDictionary()  # by width
_kept: weakref.WeakKeyDictionary[nn.Module, dict[Any, list[DilatedKVCache]]] = weakref.WeakKeyDictionary()
# Live graphs by device and stream. They never run at the same time, so they share scratch memory.
_graphs: defaultdict[tuple[int | None, int], weakref.WeakSet[torch.cuda.CUDAGraph]] = defaultdict(weakref.WeakSet)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within the block; afterwards every module is in its earlier mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Step:
    """Computes logits `(B, m, vocab)` of the next `m` tokens of every row of a cache; the next step overwrites them.

    The first steps run as they are, then one is recorded, and later ones replay it. A step refers to its cache weakly,
    so that it does not outlive the cache.
    """

    def __init__(self, model: LongNetLM, cache: Sequence[DilatedKVCache], m: int, contents: _Contents) -> None:
        self._state, self._settings = contents.state(), _settings(cache[0].keys.device)
        self._layers = [weakref.ref(layer) for layer in cache]
        self._weights = [(x, x.data_ptr()) for x in contents.tensors]
        self._tokens = torch.zeros(cache[0].batch, m, dtype=torch.int64, device=cache[0].keys.device)
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm_ups: float = _WARM_UPS
        self._compute = fused_logits if m == 1 and can_fuse(model, cache) else _plain_step

    def fits(self, cache: Sequence[DilatedKVCache], contents: _Contents) -> bool:
        """Whether nothing has changed that a recorded graph would not notice."""
        is_same = [ref() for ref in self._layers] == [*cache] and self._state == contents.state()
        return is_same and self._settings == _settings(self._tokens.device)

    def __call__(self, model: LongNetLM, tokens: Tensor, cache: Sequence[DilatedKVCache]) -> Tensor:
        moved = any(x.data_ptr() != address for x, address in self._weights)  # or converted
        if moved or self._settings != _settings(self._tokens.device):
            return _plain_step(model, tokens, cache)
        self._tokens.copy_(tokens)
        if self._graph is None and self._warm_ups:
            self._warm_ups -= 1
            return self._run_aside(model, cache)
        if self._graph is None:
            logits, layers = self._logits, [*cache]
            assert logits is not None
            self._graph = _record(lambda: logits.copy_(self._compute(model, self._tokens, layers)), self._tokens)
            if self._graph is None:
                self._warm_ups = math.inf
                return self._run_aside(model, cache)
        for layer in cache:
            layer.replayed = True
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _run_aside(self, model: LongNetLM, cache: Sequence[DilatedKVCache]) -> Tensor:
        """Run unrecorded, on the side stream that recordings use; the current stream waits for it."""
        if not self._tokens.is_cuda:
            logits = self._compute(model, self._tokens, cache)
        else:
            device = self._tokens.device
            current, side = torch.cuda.current_stream(device), _side_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side), _without_cached_casts(device):
                logits = self._compute(model, self._tokens, cache)
            current.wait_stream(side)
            logits.record_stream(current)
        self._logits = logits.clone() if self._logits is None else self._logits.copy_(logits)
        return self._logits


def _plain_step(model: LongNetLM, tokens: Tensor, cache: Sequence[DilatedKVCache]) -> Tensor:
    with evaluating(model):
        return model.logits(model.hidden(tokens, cache=cache))


def step_for(
    model: LongNetLM, cache: Sequence[DilatedKVCache], tokens: Tensor, m: int = 1
) -> Callable[[LongNetLM, Tensor, Sequence[DilatedKVCache]], Tensor]:
    """The step that continues a cache by `m` tokens at a time."""
    contents = _Contents(model)
    if not contents.can_be_recorded(tokens):
        return _plain_step
    steps = _steps.setdefault(cache[0], {})
    if m not in steps or not steps[m].fits(cache, contents):
        steps[m] = Step(model, cache, m, contents)
    return steps[m]


class _Contents:
    """The modules and tensors of a model, listed when asked for: the walk takes longer than a step on a GPU."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def modules(self) -> list[nn.Module]:
        return [*self._model.modules()]

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [*stored_tensors(self._model)]

    def can_be_recorded(self, tokens: Tensor) -> bool:
        """Whether everything is on one GPU, no module has hooks, and no other ranks may take part in a step."""
        if not tokens.is_cuda or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return False
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.modules)
        return not hooked and is_plain(tokens, *self.tensors) and all(x.device == tokens.device for x in self.tensors)

    def state(self) -> tuple[Any, ...]:
        """The modules and addresses that a graph is recorded from."""
        modules = [(id(part), part._compiled_call_impl is None, _plain_settings(part)) for part in self.modules]
        return tuple(modules), tuple(x.data_ptr() for x in self.tensors)


def _plain_settings(part: nn.Module) -> tuple[Any, ...]:
    """What decides how a module computes, such as a scale; `training` does not, because steps run in eval mode."""
    return tuple(x for name, x in vars(part).items() if type(x) in _PLAIN and name != "training")


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Settings of PyTorch that choose kernels, and the stream that orders replays."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return autocast, torch.is_inference_mode_enabled(), tf32_is_on(), _stream_of(device)


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which steps are tried and recorded, so that each reuses the memory of the one before."""
    return torch.cuda.Stream(device)


def _record(run: Callable[[], object], like: Tensor) -> torch.cuda.CUDAGraph | None:
    """The launches of `run` as a graph; None, with a warning, if they cannot be recorded."""
    device, graph = like.device, torch.cuda.CUDAGraph()
    others = _graphs[device.index, _stream_of(device)]
    pool = next((other.pool() for other in others), None)  # a pool must not be named once its last graph is gone
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),  # which a recording that fails does not restore
            torch.cuda.graph(graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local"),
            _without_cached_casts(device),
        ):
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        warnings.warn(
            f"a decoding step cannot be recorded as a CUDA graph, so each token launches every kernel: {error}",
            stacklevel=2,
        )
        return None
    others.add(graph)
    log.debug("a decoding step of %s tokens is recorded as a CUDA graph", tuple(like.shape))
    return graph


def _without_cached_casts(device: torch.device) -> Any:
    """Autocast without its cache of cast weights, which is freed when autocast ends: a graph must not read it."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


class _Lent(list["DilatedKVCache"]):
    """The caches of the layers during a call. Once nothing refers to this list, the model keeps them for the next."""


def lend_cache(
    model: LongNetLM, batch: int, padding: Tensor | None = None, rewindable: int = 0
) -> list[DilatedKVCache]:
    """An empty cache. On a GPU it is one that an earlier call used, if the model keeps one of this kind."""

    def new() -> list[DilatedKVCache]:
        return model.new_cache(batch, padding=padding, rewindable=rewindable)

    weight = model.embedding.weight
    if not _Contents(model).can_be_recorded(weight):
        return new()
    kept = _kept.setdefault(model, {})
    key = (batch, rewindable, model._cache_dtype(), weight.device, torch.is_inference_mode_enabled(), model.config)
    cache = kept.pop(key, None)
    if cache is None:
        try:
            cache = new()
        except torch.OutOfMemoryError:
            forget_kept()
            cache = new()
    else:
        for layer in cache:
            layer.reset(padding)
            layer.replayed = False  # until the next step, nothing replays the graph of this cache
    lent = _Lent(cache)
    weakref.finalize(lent, _keep, kept, key, cache).atexit = False
    return lent


def _keep(kept: dict[Any, list[DilatedKVCache]], key: Any, cache: list[DilatedKVCache]) -> None:
    """Keep a cache, complete or not, for a call that resets it; the caches that were kept longest make room."""
    if _has_room(cache):
        kept[key] = cache
        while len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]


def forget_kept() -> None:
    """Free the caches and graphs that models keep for later calls."""
    _kept.clear()
    _steps.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _has_room(cache: Sequence[DilatedKVCache]) -> bool:
    """Whether the GPU has enough free memory to keep a cache without taking it from others."""
    device = cache[0].keys.device
    if device.type != "cuda":
        return True
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return _KEPT_SHARE * sum(layer.nbytes for layer in cache) <= free
