"""The dense problems that the eager engine cuts a call into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.pattern import on_grid
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.kernels.parts import Part, Parts

pytestmark = pytest.mark.filterwarnings("ignore:no branch of")


def parts_of(spec: DilatedSpec, tokens: int, heads: int) -> tuple[Part, ...]:
    return Parts(Call(spec=spec), None, torch.Size([1, tokens, heads, 1]), heads).parts


@given(
    st.integers(1, 2),
    st.integers(1, 60),
    st.integers(1, 9),
    st.sampled_from(["interleaved", "blocked", "grouped"]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_parts_view_every_row_on_a_grid_once(batch, tokens, heads, layout, branches) -> None:
    spec = DilatedSpec.of([w for w, _ in branches], [r for _, r in branches], layout)
    call = Call(spec=spec)
    partition = Parts(call, None, torch.Size([batch, tokens, heads, 1]), heads)
    places = torch.arange(batch * tokens * heads).view(batch, tokens, heads)
    view = partition.viewer(places)
    positions = torch.arange(tokens)
    table = call.offsets(heads, heads)
    met: set[int] = set()
    for index, branch in enumerate(spec.branches):
        found = [(view(i), part) for i, part in enumerate(partition.parts) if part.branch == index]
        for rows, part in found:
            assert not part.first or met.isdisjoint(rows.flatten().tolist())
            segments = rows // heads % tokens // branch.segment_length
            assert (segments == segments[:, :1]).all()
            assert (rows.diff(dim=1) == part.dilation_rate * heads).all()
        on = torch.stack([on_grid(branch, offset, positions) for offset in table[index]], dim=-1)
        viewed = [place for rows, _ in found for place in rows.flatten().tolist()]
        assert sorted(viewed) == places[:, on].flatten().sort().values.tolist()
        met.update(viewed)


def test_heads_of_all_offsets_are_one_problem_where_they_have_as_many_rows() -> None:
    (part,) = parts_of(DilatedSpec.of([64], [4]), tokens=64, heads=4)
    assert (part.heads, part.offset, part.offset_step) == (range(4), 0, 1)
    # Two heads of each offset: as few parts by offset, which need no step.
    assert [part.offset_step for part in parts_of(DilatedSpec.of([64], [2]), tokens=64, heads=4)] == [0, 0]
    # The last segment's grids differ by a row.
    steps = [(part.start, part.offset_step) for part in parts_of(DilatedSpec.of([64], [4]), tokens=66, heads=4)]
    assert steps == [(0, 1), (64, 0), (64, 0)]
