"""Decoding through a bounded cache gives the rows of a full forward."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    DilatedAttention,
    DilatedKVCache,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from dilated_attention_pytorch.core.cache_rows import CacheState
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.plans import get_global_pattern_cache, reset_global_pattern_cache
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.kernels import decode
from dilated_attention_pytorch.kernels.decode import attend_cached_op
from dilated_attention_pytorch.nn import BlockSparseDilatedAttention

from ..thorough import examples

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")

LAYOUTS = ["interleaved", "blocked", "grouped"]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A causal problem that comes in chunks."""

    segment_lengths: tuple[int, ...] = (4, 6, 10)
    dilation_rates: tuple[int, ...] = (1, 2, 3)
    tokens: int = 30
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    head_layout: str = "interleaved"
    padding: tuple[int, ...] = ()
    scale: float | None = None
    seed: int = 0

    @property
    def spec(self) -> dict:
        return {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "head_layout": self.head_layout,
        }

    def tensors(self, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(
            torch.randn(self.batch, self.tokens, heads, self.head_dim, dtype=torch.float64, generator=generator).to(
                dtype
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )

    def cache(self, dtype=torch.float64, **settings) -> DilatedKVCache:
        return DilatedKVCache(
            **self.spec,
            batch=self.batch,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            padding=torch.tensor(self.padding) if self.padding else None,
            dtype=dtype,
            **settings,
        )

    def expected(self, *tensors: torch.Tensor) -> torch.Tensor:
        mask = None
        if self.padding:
            mask = torch.arange(tensors[0].shape[1]) < torch.tensor(self.padding)[:, None]
        return dilated_attention(
            *tensors, **self.spec, is_causal=True, scale=self.scale, key_padding_mask=mask, backend="reference"
        )


def feed(cache: DilatedKVCache, tensors, chunks, **settings) -> torch.Tensor:
    """What the cache gives for tokens that come in chunks of these sizes, the last of them again and again."""
    outs, start, chunks = [], 0, list(chunks)
    while start < tensors[0].shape[1]:
        size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        outs.append(cache.attend(*(x[:, start : start + size] for x in tensors), **settings))
        start += size
    return torch.cat(outs, dim=1)


def check(stream: Stream, chunks, dtype=torch.float64, tolerance=1e-10, backend="auto", **settings) -> None:
    tensors = stream.tensors(dtype)
    found = feed(stream.cache(dtype, **settings), tensors, chunks, scale=stream.scale, backend=backend)
    torch.testing.assert_close(
        found.double(), stream.expected(*(x.double() for x in tensors)).double(), rtol=tolerance, atol=tolerance
    )


@pytest.fixture(params=["few", "merged", "again"], autouse=False)
def chunks_of_any_size_go_every_way(request, monkeypatch) -> None:
    """Short chunks take the static path, or, as long ones do, the operator's, with or without what the cache keeps."""
    monkeypatch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AT_ONCE", 64 if request.param == "few" else 0)
    monkeypatch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AGAIN", 100 if request.param == "again" else 0)


@pytest.mark.usefixtures("chunks_of_any_size_go_every_way")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", [(), (0, 5)], ids=["whole", "left-padded"])
@pytest.mark.parametrize("chunks", [[1], [7], [13, 1], [1, 29], [11, 4]], ids=str)
def test_chunks_equal_one_forward_over_three_of_the_largest_segments(layout, padding, chunks) -> None:
    check(Stream(head_layout=layout, padding=padding), chunks)


@st.composite
def streams(draw) -> tuple[Stream, list[int], int]:
    branches = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 7)), min_size=1, max_size=3))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (3, 3), (5, 5), (4, 2), (6, 1)]))
    batch = draw(st.integers(1, 3))
    stream = Stream(
        segment_lengths=tuple(w for w, _ in branches),
        dilation_rates=tuple(r for _, r in branches),
        tokens=3 * max(w for w, _ in branches) + draw(st.integers(1, 5)),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_layout=draw(st.sampled_from(LAYOUTS)),
        padding=draw(st.one_of(st.just(()), st.tuples(*[st.integers(0, 8)] * batch))),
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
        seed=draw(st.integers(0, 2**32)),
    )
    chunks = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    return stream, chunks, draw(st.sampled_from([0, 0, 1, 3, 11]))


@settings(max_examples=examples(10))
@given(streams())
@pytest.mark.parametrize(("most", "again"), [(0, 0.0), (0, 100.0), (4, 0.5), (64, 0.5)])
def test_any_spec_in_any_chunks_equals_one_forward(most, again, case) -> None:
    stream, chunks, rewindable = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AT_ONCE", most)
        patch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AGAIN", again)
        check(stream, chunks, rewindable=rewindable)


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves are tested")
KERNEL = Stream(tokens=24, head_dim=16, segment_lengths=(5, 8), dilation_rates=(1, 3))


@needs_interpreter
@pytest.mark.parametrize(
    ("stream", "chunks", "rewindable"),
    [
        (KERNEL, [9, 1, 5, 3, 1], 0),
        (dataclasses.replace(KERNEL, head_layout="grouped", padding=(0, 6)), [4, 1, 1, 7, 2], 4),
        (dataclasses.replace(KERNEL, head_layout="blocked", heads=3, kv_heads=3, batch=1, head_dim=24), [20, 1], 2),
        (dataclasses.replace(KERNEL, segment_lengths=(200,), dilation_rates=(2,), tokens=70, batch=1), [65, 1, 2], 0),
    ],
)
def test_the_kernel_equals_one_forward_in_the_interpreter(stream, chunks, rewindable) -> None:
    check(stream, chunks, torch.float32, 2e-5, backend="triton", rewindable=rewindable)


@needs_interpreter
def test_the_kernel_in_half_precision_is_close_in_the_interpreter() -> None:
    check(KERNEL, [9, 1, 5, 3, 1], torch.float16, 2e-2, backend="triton")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("chunks", "layout", "rewindable"), [([5, 9], LAYOUTS[0], 0), ([30, 4, 31], LAYOUTS[1], 5), ([70], LAYOUTS[2], 5)]
)
def test_kernels_move_the_rows_of_chunks_as_copies_do(chunks, layout, rewindable, device) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("on a GPU the kernels themselves are tested")
    stream = Stream((6, 13, 8), (1, 4, 3), heads=6, kv_heads=3, head_dim=24, head_layout=layout, tokens=sum(chunks))
    _, k, v = (x.to(device) for x in stream.tensors(torch.float16))
    copied, launched = (stream.cache(torch.float16, rewindable=rewindable, device=device) for _ in range(2))
    start = 0
    for m in chunks:
        states = [CacheState(x.keys, x.values, x.lengths, x.rows) for x in (copied, launched)]
        new = [x[:, start : start + m] for x in (k, v)]
        expected, found = (
            decode._after_cached(*new, state, start, start, engine)
            for state, engine in zip(states, ("eager", "triton"))
        )
        assert all(map(torch.equal, found, expected))
        for state, engine in zip(states, ("eager", "triton")):
            decode._store_chunk([start] * stream.batch, *new, state, engine)
            state.lengths.add_(m)
        assert torch.equal(launched.keys, copied.keys)
        assert torch.equal(launched.values, copied.values)
        start += m


@needs_interpreter
@pytest.mark.parametrize(("heads", "kv_heads", "offset"), [(8, 2, 0), (2, 2, 0), (2, 2, 4)])
def test_a_chunk_may_have_branches_without_heads(heads, kv_heads, offset) -> None:
    """Each head is on one branch, and there are more branches than key/value heads here."""
    sharded = {"head_offset": offset, "total_heads": 6} if heads == 2 else {}
    spec = {"segment_lengths": [16, 64, 100], "dilation_rates": [1, 2, 5], "head_layout": "grouped"}
    cache = DilatedKVCache(**spec, batch=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=16, **sharded)
    q, k, v = (torch.randn(1, 150, count, 16) for count in (heads, kv_heads, kv_heads))
    found = feed(cache, (q, k, v), [80, 70], backend="triton")
    expected = dilated_attention(q, k, v, **spec, is_causal=True, **sharded)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_interpreter
def test_chunks_of_a_prompt_share_a_plan() -> None:
    """Each call has a description of its own, though an equal one."""
    pytest.importorskip("triton")
    reset_global_pattern_cache()
    cache = DilatedKVCache([35], [7], batch=1, num_heads=1, head_dim=16)
    x = torch.randn(1, 70, 1, 16)
    for _ in range(3):
        cache.attend(x, x, x, backend="triton")
    assert get_global_pattern_cache().get_stats()["kinds"]["plan"] == {"hits": 2, "misses": 1, "size": 1}


@needs_interpreter
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_a_shard_whose_heads_are_on_no_branch_gives_zeros(backend, tokens) -> None:
    """Of segments of one token the second of two heads, at every other token, has none."""
    cache = DilatedKVCache([1], [2], batch=1, num_heads=1, head_dim=16, head_offset=1, total_heads=2)
    q, k, v = torch.randn(3, 1, tokens, 1, 16).unbind(0)
    for _ in range(2):
        assert not cache.attend(q, k, v, backend=backend).any()
    assert not cache.keys.any()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of NumPy, which interprets
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("chunks", [[1], [5, 1], [12]])
def test_a_query_of_nan_gives_a_row_of_nan(backend, chunks, device) -> None:
    stream = Stream((4, 6), (1, 2), tokens=12, batch=1, head_dim=16)
    q, k, v = (x.to(device) for x in stream.tensors(torch.float32))
    q[:, 8, 1, 3] = torch.nan
    found = feed(stream.cache(torch.float32, device=device), (q, k, v), chunks, backend=backend)
    broken = torch.zeros(found.shape, dtype=torch.bool, device=device)
    broken[:, 8, 1] = True
    assert torch.equal(found.isnan(), broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decoding_keeps_the_error_budget(dtype) -> None:
    stream = Stream(segment_lengths=(16, 32), dilation_rates=(1, 4), tokens=100, batch=4, head_dim=16)
    tensors = stream.tensors(dtype)
    expected = stream.expected(*(x.double() for x in tensors)).double()
    whole = dilated_attention(*tensors, **stream.spec, is_causal=True).double()
    budget = 2e-6 if dtype == torch.float32 else 1.5 * ((whole - expected).norm() / expected.norm()).item()
    for chunks in ([1], [33, 5], [70]):
        found = feed(stream.cache(dtype), tensors, chunks).double()
        assert (found - expected).norm() / expected.norm() <= budget


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "columns"])
def test_a_chunk_meets_the_cache_through_the_vendors_kernel(monkeypatch, layout, packed) -> None:
    """What it is given, and what becomes of its results; PyTorch's kernel for CPUs takes its place."""
    monkeypatch.setattr("dilated_attention_pytorch.kernels.vendor.fits", lambda q, scale: q.dtype == torch.bfloat16)
    monkeypatch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AGAIN", 0)
    calls = []

    def flash(q, k, v, dropout_p, is_causal, return_debug_mask, *, scale):
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        assert {x.stride(-1) for x in (q, k, v)} == {1}, "the kernel refuses others"
        assert q.shape[1] == k.shape[1] == v.shape[1]
        calls.append(q.shape)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float(), k.float(), v.float(), dropout_p, is_causal, scale=scale
        )
        return out.to(q.dtype), lse, None, None, 0, 0, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    stream = Stream((64, 96), (1, 4), tokens=300, heads=8, kv_heads=4, head_dim=16, head_layout=layout)
    tensors = stream.tensors(torch.bfloat16)
    if packed:  # numbers of a row apart in memory
        tensors = tuple(x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors)
    expected = stream.expected(*(x.double() for x in tensors)).double()
    found = feed(stream.cache(torch.bfloat16), tensors, [97, 70]).double()
    assert calls
    assert (found - expected).norm() / expected.norm() <= 6e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_holds_the_grid_rows_of_a_segment_and_never_grows(layout) -> None:
    stream = Stream(head_layout=layout)
    cache, tensors = stream.cache(), stream.tensors()
    before, places = cache.nbytes, (cache.keys.data_ptr(), cache.values.data_ptr())
    feed(cache, tensors, [7, 1])
    assert cache.nbytes == before == cache.keys.nbytes + cache.values.nbytes
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == places
    most = sum(-(-w // r) for w, r in zip(stream.segment_lengths, stream.dilation_rates))
    assert cache.keys.shape[1] <= most * stream.kv_heads + 1
    if layout == "grouped":  # a head is on one branch only: 4 and 3 rows, and the one that nobody reads
        assert cache.keys.shape[1] == 8


@settings(max_examples=examples(10))
@given(streams(), st.data())
def test_tokens_taken_back_within_the_room_leave_no_trace(case, data) -> None:
    """As in speculative decoding: some drafts are appended, all but a few are taken back, others come instead."""
    stream, _, _ = case
    tensors, room = stream.tensors(), data.draw(st.integers(1, 6))
    cache, outs, at = stream.cache(rewindable=room), [], 0
    draft = Stream.tensors(dataclasses.replace(stream, seed=stream.seed + 1, tokens=room))
    padding = max(stream.padding, default=0)
    while at < stream.tokens:
        if at >= padding:
            count = data.draw(st.integers(1, room))
            cache.attend(*(x[:, :count] for x in draft), scale=stream.scale)
            cache.rewind(count)
        step = data.draw(st.integers(room, room + 3))
        outs.append(cache.attend(*(x[:, at : at + step] for x in tensors), scale=stream.scale))
        at += step
    torch.testing.assert_close(torch.cat(outs, dim=1), stream.expected(*tensors), rtol=1e-10, atol=1e-10)


def test_rows_are_taken_back_by_different_numbers() -> None:
    stream = Stream((10,), (1,), tokens=9)
    tensors = stream.tensors()
    cache = stream.cache()
    feed(cache, tensors, [9])
    cache.rewind(torch.tensor([2, 5]))
    assert cache.lengths.tolist() == [7, 4]
    for b, length in enumerate((7, 4)):
        again = [torch.cat([x[b : b + 1, :length], x[b : b + 1, :1]], dim=1) for x in tensors]
        last = stream.expected(*again)[:, -1]
        found = stream_step(cache, tensors, b)
        torch.testing.assert_close(found, last, rtol=1e-10, atol=1e-10)


def stream_step(cache, tensors, row):
    """What the first token again would give after what `row` holds, and the cache as it was."""
    out = cache.attend(*(x[:, :1] for x in tensors))
    cache.rewind(1)
    return out[row]


def test_a_rewind_past_what_was_overwritten_names_the_branch_and_the_way_out() -> None:
    stream = Stream()
    cache = stream.cache()
    feed(cache, [x[:, :9] for x in stream.tensors()], [9])
    with pytest.raises(
        ValueError, match=r"rewinding row 0 by 3 tokens, from 9 to 6, needs rows of branch \(w=4, r=1\)"
    ):
        cache.rewind(3)
    with pytest.raises(ValueError, match="rewindable=3"):
        cache.rewind(3)
    with pytest.raises(ValueError, match="has 9 tokens to rewind, got 10"):
        cache.rewind(10)
    with pytest.raises(TypeError, match="a whole number"):
        cache.rewind(1.5)
    assert cache.lengths.tolist() == [9, 9]
    cache.rewind(1)  # to where a segment of 4 begins: nothing of it is needed
    assert cache.lengths.tolist() == [8, 8]


@pytest.mark.parametrize("rewindable", [0, 5])
def test_reordered_rows_continue_the_rows_they_came_from(rewindable) -> None:
    stream = Stream(batch=3, padding=(0, 2, 5))
    tensors = stream.tensors()
    cache = stream.cache(rewindable=rewindable)
    feed(cache, [x[:, :17] for x in tensors], [17])
    order = torch.tensor([2, 2, 0])
    cache.reorder(order)
    found = feed(cache, [x[order, 17:] for x in tensors], [1])
    expected = stream.expected(*tensors)[order, 17:]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_reset_cache_begins_anew() -> None:
    stream = Stream()
    cache, tensors = stream.cache(), stream.tensors()
    first = feed(cache, tensors, [7])
    cache.reset()
    torch.testing.assert_close(feed(cache, tensors, [1]), first, rtol=1e-10, atol=1e-10)


def test_what_a_model_counts_is_known_without_waiting() -> None:
    cache = Stream().cache()
    for tokens in (0, 7, 3):
        cache.go_on_from(tokens)
        assert cache.lengths.tolist() == [tokens] * 2
        assert cache.known_lengths == (tokens, tokens)
    cache.lengths.add_(1)
    assert cache.known_lengths is None
    cache.go_on_from(3)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), copy.copy])
def test_what_the_host_counted_is_not_believed_of_a_copy(copied) -> None:
    """A copied tensor counts its changes anew, and may come to the number that the first one had."""
    stream = Stream(segment_lengths=(40,), dilation_rates=(3,), tokens=150, batch=1)
    tensors, expected = stream.tensors(), stream.expected(*stream.tensors())
    for changes in range(4):
        cache = stream.cache()
        cache.attend(*(x[:, :75] for x in tensors))
        other = copied(cache)
        other.lengths.sub_(5)
        for _ in range(changes):
            other.lengths.add_(0)
        found = other.attend(*(x[:, 70:] for x in tensors))
        torch.testing.assert_close(found, expected[:, 70:], rtol=1e-10, atol=1e-10)


def test_what_the_host_counted_is_not_believed_of_other_lengths() -> None:
    stream = Stream(segment_lengths=(40,), dilation_rates=(3,), tokens=150, batch=1)
    tensors, expected = stream.tensors(), stream.expected(*stream.tensors())
    for changes in range(4):
        cache = stream.cache()
        cache.attend(*(x[:, :75] for x in tensors))
        cache.lengths = torch.tensor([70])
        for _ in range(changes):
            cache.lengths.add_(0)
        found = cache.attend(*(x[:, 70:] for x in tensors))
        torch.testing.assert_close(found, expected[:, 70:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("recorded", ["attend", "reset", "reorder"])
def test_what_the_host_counted_is_not_believed_after_a_recording(monkeypatch, recorded) -> None:
    stream = Stream(batch=1)
    cache, tensors = stream.cache(), stream.tensors()
    with monkeypatch.context() as patch:
        patch.setattr("dilated_attention_pytorch.nn.kv_cache.is_plain", lambda *tensors: False)
        {
            "attend": lambda: cache.attend(*(x[:, :3] for x in tensors)),
            "reset": cache.reset,
            "reorder": lambda: cache.reorder(torch.tensor([0])),
        }[recorded]()
    cache.reset()
    cache.attend(*(x[:, :3] for x in tensors))
    assert cache.known_lengths is None


def test_a_step_compiles_whole_and_once() -> None:
    from torch._dynamo.testing import CompileCounter

    stream = Stream()
    cache, tensors = stream.cache(), stream.tensors()
    counter = CompileCounter()
    step = torch.compile(cache.attend, backend=counter, fullgraph=True)
    outs = [step(*(x[:, i : i + 1] for x in tensors)) for i in range(stream.tokens)]
    torch.testing.assert_close(torch.cat(outs, dim=1), stream.expected(*tensors), rtol=1e-10, atol=1e-10)
    assert cache.lengths.tolist() == [stream.tokens] * 2
    assert counter.frame_count == 1


def test_what_does_not_fit_the_cache_is_refused_before_it_is_touched() -> None:
    stream = Stream()
    cache, (q, k, v) = stream.cache(), stream.tensors()
    with pytest.raises(ValueError, match=r"= \(2, 4, 2, 4\), the tensors are \(1, 4, 2, 4\)"):
        cache.attend(q[:1], k[:1], v[:1])
    with pytest.raises(ValueError, match=r"the tensors are \(2, 4, 4, 4\)"):
        cache.attend(q, q, q)
    with pytest.raises(ValueError, match=r"holds torch\.float64 on cpu, the tensors are torch\.float32"):
        cache.attend(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="on meta: make the cache"):
        cache.attend(q.to("meta"), k.to("meta"), v.to("meta"))
    with pytest.raises(ValueError, match=r"within torch\.no_grad"):
        cache.attend(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match=r"within torch\.no_grad"):
        cache.attend(q.detach(), k, v.clone().requires_grad_())
    assert not cache.values.requires_grad
    with pytest.raises(ValueError, match="computes whole sequences and takes no cache: use 'eager'"):
        cache.attend(q.detach(), k, v, backend="reference")
    with pytest.raises(ValueError, match=r"padding must be \(2,\), one number per row, got \(3,\)"):
        cache.reset(torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match=r"padding must hold whole numbers, got torch\.bool"):
        cache.reset(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"must count left-padded tokens, at least 0 per row, got \[1, -1\]"):
        cache.reset(torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"tokens must be \(2,\), one number per row, got \(3,\)"):
        cache.rewind(torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match=r"rows must be \(2,\), one number per row, got \(1,\)"):
        cache.reorder(torch.tensor([0]))
    with pytest.raises(ValueError, match="must divide num_heads"):
        DilatedKVCache([4], [1], batch=1, num_heads=4, num_kv_heads=3, head_dim=4)
    assert cache.lengths.tolist() == [0, 0]


def test_a_module_refuses_a_cache_that_is_not_its_own() -> None:
    stream = Stream(head_layout="blocked")
    cache, (q, k, v) = stream.cache(), stream.tensors()
    with pytest.raises(ValueError, match="make a cache for it"):
        DilatedAttention([4, 8], [1, 2]).attend_next(q, k, v, cache)
    for other in (RingDilatedAttention(**stream.spec), BlockSparseDilatedAttention(**stream.spec)):
        with pytest.raises(ValueError, match=f"which {type(other).__name__} does not compute: decode with"):
            other.attend_next(q, k, v, cache)
    with pytest.raises(ValueError, match="call eval"):
        DilatedAttention(**stream.spec, attention_dropout=0.1).attend_next(q, k, v, cache)
    attention = MultiheadDilatedAttention(16, 4, **stream.spec, num_kv_heads=2)
    x = torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match="pass is_causal=True with it"):
        attention(x, x, x, cache=cache)
    out = DilatedAttention(**stream.spec).attend_next(q, k, v, cache)
    torch.testing.assert_close(out, stream.expected(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["interleaved", "grouped"])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_the_operator_says_what_it_writes_and_returns(tokens, layout) -> None:
    stream = Stream(tokens=tokens, head_layout=layout)
    cache = stream.cache()
    call = Call(spec=cache.spec, is_causal=True, table=cache.rows.offsets)
    torch.library.opcheck(
        attend_cached_op,
        (
            *stream.tensors(),
            cache.keys,
            cache.values,
            cache.lengths,
            call.encode()[0],
            0.25,
            0,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunks", [[1], [150, 1], [97, 5, 1, 3], [64]], ids=str)
def test_the_kernels_keep_the_error_budget_on_a_gpu(dtype, layout, chunks) -> None:
    stream = Stream((64, 96), (1, 4), tokens=300, heads=8, kv_heads=4, head_dim=64, head_layout=layout, padding=(0, 37))
    tensors = [x.cuda() for x in stream.tensors(dtype)]
    expected = stream.expected(*(x.cpu().double() for x in tensors)).double()
    found = feed(stream.cache(dtype, device="cuda", rewindable=5), tensors, chunks, allow_tf32=False).double().cpu()
    mask = torch.arange(stream.tokens) < torch.tensor(stream.padding)[:, None]
    whole = dilated_attention(*tensors, **stream.spec, is_causal=True, key_padding_mask=mask.cuda(), allow_tf32=False)
    budget = 2e-6 if dtype == torch.float32 else 1.5 * ((whole.cpu().double() - expected).norm() / expected.norm())
    assert (found - expected).norm() / expected.norm() <= budget


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_a_step_is_captured_in_a_graph_and_replayed_across_segments(compiled) -> None:
    stream = Stream((64, 96), (1, 4), tokens=200, heads=8, kv_heads=4, head_dim=64)
    tensors = [x.cuda() for x in stream.tensors(torch.float32)]
    expected = stream.expected(*(x.cpu().double() for x in tensors)).double()
    cache = stream.cache(torch.float32, device="cuda")
    if compiled:
        step = torch.compile(lambda q, k, v: cache.attend(q, k, v, allow_tf32=False), fullgraph=True)
        outs = [step(*(x[:, i : i + 1].clone() for x in tensors)) for i in range(stream.tokens)]
    else:
        new = [x[:, :1].clone() for x in tensors]
        cache.attend(*new, allow_tf32=False)  # compiles, and copies tables
        cache.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cache.attend(*new, allow_tf32=False)
        outs = []
        for i in range(stream.tokens):
            for place, x in zip(new, tensors):
                place.copy_(x[:, i : i + 1])
            graph.replay()
            outs.append(out.clone())
        assert cache.lengths.tolist() == [200, 200]
    found = torch.cat(outs, dim=1).double().cpu()
    assert (found - expected).norm() / expected.norm() <= 2e-6
