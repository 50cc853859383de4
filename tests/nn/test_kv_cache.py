"""Decoding through a bounded cache gives the rows of a full forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedKVCache
from dilated_attention_pytorch.functional import dilated_attention

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


@pytest.fixture(params=["few", "many"], autouse=False)
def chunks_of_any_size_go_both_ways(request, monkeypatch) -> None:
    """Short chunks take the static path, or, as long ones do, the operator's."""
    monkeypatch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AT_ONCE", 64 if request.param == "few" else 0)


@pytest.mark.usefixtures("chunks_of_any_size_go_both_ways")
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


@settings(max_examples=100)
@given(streams())
@pytest.mark.parametrize("most", [0, 4, 64])
def test_any_spec_in_any_chunks_equals_one_forward(most, case) -> None:
    stream, chunks, rewindable = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilated_attention_pytorch.kernels.decode._MOST_AT_ONCE", most)
        check(stream, chunks, rewindable=rewindable)
