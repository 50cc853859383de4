from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.core.pattern import dense_mask, visible
from dilated_attention_pytorch.core.spec import HEAD_LAYOUTS, Branch, DilatedSpec
from dilated_attention_pytorch.parallel.schemes import (
    branch_traffic,
    choose_scheme,
    message_bytes,
)
from dilated_attention_pytorch.parallel.sharding import (
    Shards,
    even_lengths,
    local_calls,
    shared_segments,
    zigzag_lengths,
    zigzag_order,
    zigzag_places,
)
from dilated_attention_pytorch.parallel.wire import Wire

from ..thorough import examples

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Shards, list[tuple[range, int, int]], int]:
    """Shards of a sequence, its documents, and the batch."""
    ranks = draw(st.integers(1, 5))
    tokens = draw(st.integers(1, 40))
    if draw(st.booleans()):
        lengths = even_lengths(tokens, ranks)
    else:
        edges = sorted(draw(st.lists(st.integers(0, tokens), min_size=ranks - 1, max_size=ranks - 1)))
        lengths = tuple(b - a for a, b in zip([0, *edges], [*edges, tokens]))
    kind = draw(st.sampled_from(["whole", "rows", "packed"]))
    if kind == "whole":
        batch = draw(st.integers(1, 2))
        return Shards(lengths), [(range(batch), 0, tokens)], batch
    count = draw(st.integers(1, 3))
    points = draw(st.lists(st.integers(0, tokens), min_size=2 * count, max_size=2 * count))
    if kind == "rows":
        spans = [tuple(sorted(points[2 * b : 2 * b + 2])) for b in range(count)]
        batch = max(count, 2)
    else:
        points = sorted(points)
        spans, batch = [(points[i], points[i + 1]) for i in range(0, 2 * count, 2)], 1
    documents = [(range(b, b + 1) if kind == "rows" else range(1), s, e) for b, (s, e) in enumerate(spans) if s < e]
    return Shards(lengths), documents, batch


specs = st.builds(
    lambda pairs, layout: DilatedSpec(tuple(Branch(w, r) for w, r in pairs), layout),
    st.lists(st.tuples(st.integers(1, 45), st.integers(1, 6)), min_size=1, max_size=3),
    st.sampled_from(HEAD_LAYOUTS),
)


def expected_pairs(spec: DilatedSpec, shards: Shards, documents, batch: int) -> torch.Tensor:
    """`(batch, branches, heads, N, N)`: what a single device computes."""
    table = spec.offsets(3)
    pairs = torch.zeros(batch, len(table), 3, shards.tokens, shards.tokens, dtype=torch.int)
    for rows, start, end in documents:
        for b in rows:
            pairs[b, :, :, start:end, start:end] = dense_mask(spec, table, end - start).int()
    return pairs


@settings(max_examples=examples(20))
@given(cuts(), specs, st.data())
def test_own_calls_and_shared_rows_make_every_pair_exactly_once(cut, spec, data) -> None:
    shards, documents, batch = cut
    table = spec.offsets(3)
    swapped = frozenset(data.draw(st.sets(st.sampled_from(range(len(table))))))
    pairs = torch.zeros(batch, len(table), 3, shards.tokens, shards.tokens, dtype=torch.int)
    for rank in range(len(shards.lengths)):
        for call in local_calls(spec, table, shards, documents, batch, rank, swapped):
            first = shards.bounds(rank)[0] + call.at.start
            assert range(*shards.bounds(rank))[call.at.start : call.at.stop] == range(first, first + len(call.at))
            spans = ((0, len(call.at)),) * batch if call.spans is None else call.spans
            owners = range(batch) if batch > 1 or call.spans is None else [0] * len(spans)
            assert batch == 1 or len(spans) == batch
            for b, (start, end) in zip(owners, spans):
                i = torch.arange(end - start)
                for g, (branch, row) in enumerate(zip(spec.branches, call.table)):
                    for h, offset in enumerate(row):
                        here = slice(first + start, first + end)
                        pairs[b, g, h, here, here] += visible(branch, offset, i[:, None], i[None]).int()
    for g, (branch, row) in enumerate(zip(spec.branches, table)):
        for segment in shared_segments(branch, shards, documents):
            for b in segment.rows:
                for h, offset in enumerate(row):
                    if offset is None:
                        continue
                    grids = {j: segment.grid(j, branch.dilation_rate, offset) for j in segment.ranks}
                    for i in segment.ranks:
                        for j in segment.sources(i, False) + ([i] if g in swapped else []):
                            for p in grids[i]:
                                pairs[b, g, h, p, list(grids[j])] += 1
    assert torch.equal(pairs, expected_pairs(spec, shards, documents, batch))


@given(cuts(), specs)
def test_causal_ranks_see_the_rows_of_earlier_ranks_whole(cut, spec) -> None:
    shards, documents, _ = cut
    for branch in spec.branches:
        for segment in shared_segments(branch, shards, documents):
            assert len(segment.ranks) > 1
            for rank in segment.ranks:
                first, last = segment.held(rank)
                assert first < last
                assert all(segment.held(j)[1] <= first for j in segment.sources(rank, True))
                assert all(rank in segment.sources(j, True) for j in segment.viewers(rank, True))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_a_branch_whose_segments_lie_inside_shards_is_not_shared(ranks, segments, w) -> None:
    shards = Shards((segments * w,) * ranks)
    assert shared_segments(Branch(w, 2), shards, [(range(1), 0, shards.tokens)]) == ()


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("rate", [1, 4])
def test_bytes_are_those_of_the_closed_formulas(ranks, rate) -> None:
    length, heads, head_dim, itemsize = 32, 12, 16, 2
    shards = Shards((length,) * ranks)
    segments = shared_segments(Branch(shards.tokens, rate), shards, [(range(1), 0, shards.tokens)])
    offsets = tuple(h % rate for h in range(heads))
    wire = Wire(Branch(shards.tokens, rate), offsets, 1, head_dim, itemsize, 4, False, shards)
    u = length // rate * heads * head_dim * itemsize
    lse = length // rate * heads * 4 * (ranks - 1) // ranks
    for rank in range(ranks):
        assert branch_traffic("gather", wire, segments, rank) == (2 * (ranks - 1) * u,) * 2
        assert branch_traffic("ring", wire, segments, rank) == (2 * (ranks - 1) * u,) * 2
        assert branch_traffic("all_to_all", wire, segments, rank).received == 4 * u * (ranks - 1) // ranks + lse
        # Gradients are summed in float32: twice the bytes of bfloat16.
        assert branch_traffic("gather", wire, segments, rank, backward=True).received == 6 * (ranks - 1) * u
        assert branch_traffic("ring", wire, segments, rank, backward=True).received == 6 * (ranks - 1) * u
        assert message_bytes("gather", wire, segments, rank) == 2 * ranks * u
        assert message_bytes("ring", wire, segments, rank) == 4 * u


@given(cuts(), specs, st.booleans(), st.booleans(), st.sampled_from(["gather", "ring"]))
def test_what_is_sent_is_received(cut, spec, is_causal, backward, scheme) -> None:
    shards, documents, _ = cut
    for branch, offsets in zip(spec.branches, spec.offsets(3)):
        segments = shared_segments(branch, shards, documents)
        wire = Wire(branch, offsets, 2, 8, 2, 4, is_causal, shards)
        ranks = range(len(shards.lengths))
        traffic = [branch_traffic(scheme, wire, segments, rank, backward=backward) for rank in ranks]
        assert sum(t.sent for t in traffic) == sum(t.received for t in traffic)
        received = [branch_traffic("gather", wire, segments, rank).received for rank in ranks]
        assert backward or received == [t.received for t in traffic]


def wire_of(ranks: int, heads: int) -> tuple[Wire, tuple]:
    shards = Shards((64,) * ranks)
    branch = Branch(64 * ranks, 2)
    wire = Wire(branch, tuple(h % 2 for h in range(heads)), 1, 64, 2, 4, False, shards)
    return wire, shared_segments(branch, shards, [(range(1), 0, shards.tokens)])


def test_the_rule_weighs_bytes_then_memory() -> None:
    assert choose_scheme("auto", *wire_of(2, 4)) == "gather"  # as many rows travel, and the lse
    assert choose_scheme("auto", *wire_of(4, 4)) == "all_to_all"
    assert choose_scheme("auto", *wire_of(4, 6)) == "gather"  # four ranks do not divide six heads
    assert choose_scheme("auto", *wire_of(4, 6), budget=1000) == "ring"
    assert choose_scheme("ring", *wire_of(4, 4)) == "ring"
    with pytest.raises(ValueError, match="lies on 4 ranks, which do not divide the 6 key/value heads; gather or ring"):
        choose_scheme("all_to_all", *wire_of(4, 6))
    with pytest.raises(ValueError, match="scheme must be one of auto, gather, ring, all_to_all; got 'gahter'"):
        choose_scheme("gahter", *wire_of(4, 4))


@given(st.integers(0, 200), st.integers(1, 9))
def test_the_default_cut_covers_the_sequence_with_equal_shards(tokens, ranks) -> None:
    lengths = even_lengths(tokens, ranks)
    assert sum(lengths) == tokens
    assert list(lengths) == sorted(lengths, reverse=True)
    assert all(length == lengths[0] for length in lengths[: tokens // max(lengths[0], 1)])


@given(st.integers(0, 200), st.integers(1, 9))
def test_zigzag_maps_are_inverse_permutations(tokens, ranks) -> None:
    order, places = zigzag_order(tokens, ranks), zigzag_places(tokens, ranks)
    assert sorted(order) == list(range(tokens))
    assert [order[place] for place in places] == list(range(tokens))
    assert sum(zigzag_lengths(tokens, ranks)) == tokens


@given(st.integers(1, 20), st.integers(1, 9))
def test_zigzag_shards_have_equal_causal_work(chunk, ranks) -> None:
    tokens = 2 * ranks * chunk
    order = iter(zigzag_order(tokens, ranks))
    work = [sum(next(order) + 1 for _ in range(length)) for length in zigzag_lengths(tokens, ranks)]
    assert len(set(work)) == 1


def test_shards_of_negative_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] must be a whole number of at least 0, got -1"):
        Shards((3, -1))
