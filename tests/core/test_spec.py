from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core import spec as spec_module
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.spec import Branch, DilatedSpec, ReachWarning

LAYOUTS = ["interleaved", "blocked", "grouped"]


@pytest.mark.parametrize("bad", [0, -4])
def test_a_branch_refuses_what_is_not_positive(bad) -> None:
    with pytest.raises(ValueError, match=f"segment_length must be a whole number of at least 1, got {bad}"):
        Branch(bad, 1)
    with pytest.raises(ValueError, match=f"dilation_rate must be a whole number of at least 1, got {bad}"):
        Branch(8, bad)


@pytest.mark.parametrize("bad", [1.5, "8", None])
def test_a_branch_refuses_what_is_not_a_whole_number(bad) -> None:
    with pytest.raises(TypeError, match="segment_length must be a whole number"):
        Branch(bad, 1)


def test_lists_must_pair_up() -> None:
    with pytest.raises(ValueError, match=r"got 2 lengths \[4, 8\] and 1 rates \[1\]"):
        DilatedSpec.of([4, 8], [1])
    with pytest.raises(ValueError, match="needs a branch"):
        DilatedSpec.of([], [])
    with pytest.raises(TypeError, match="segment_lengths must be a sequence"):
        DilatedSpec.of(2048, [1])


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match="interleaved, blocked, grouped; got 'diagonal'"):
        DilatedSpec.of([4], [1], "diagonal")


def test_specs_are_values() -> None:
    a, b = DilatedSpec.of([4, 8], (1, 2)), DilatedSpec.of((4, 8), [1, 2])
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_a_spec_that_leaves_rows_uncovered_warns_once_with_their_share(monkeypatch) -> None:
    monkeypatch.setattr(spec_module, "_warned", set())
    with pytest.warns(ReachWarning, match="50% of the"):
        DilatedSpec.of([8, 16], [2, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DilatedSpec.of([8, 16], [2, 4])
        DilatedSpec.of([8, 16], [1, 4])


def test_a_spec_with_uncovered_rows_is_made_on_any_default_device(monkeypatch) -> None:
    monkeypatch.setattr(spec_module, "_warned", set())
    with torch.device("meta"), pytest.warns(ReachWarning, match="50% of the"):
        DilatedSpec.of([8, 16], [2, 4])


def test_layouts_are_those_of_their_sources() -> None:
    rates = [1, 2, 4]
    assert DilatedSpec.of([4, 8, 16], rates).offsets(6)[2] == (0, 1, 2, 3, 0, 1)
    # torchscale: head h of 6 at rate 4 belongs to block h // ceil(6 / 4)
    assert DilatedSpec.of([4, 8, 16], rates, "blocked").offsets(6)[2] == (0, 0, 1, 1, 2, 2)
    # fkodom: 7 heads over 3 branches are 3 + 2 + 2, branch g at offset g mod r
    grouped = DilatedSpec.of([4, 8, 16], rates, "grouped").offsets(7)
    assert grouped == (
        (0, 0, 0, None, None, None, None),
        (None, None, None, 1, 1, None, None),
        (None, None, None, None, None, 2, 2),
    )


@given(st.sampled_from(LAYOUTS), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 16), st.data())
@pytest.mark.filterwarnings("ignore:no branch of")
def test_a_shard_has_its_columns_of_the_whole_table(layout, rates, total, data) -> None:
    spec = DilatedSpec.of([64] * len(rates), rates, layout)
    first = data.draw(st.integers(0, total - 1))
    heads = data.draw(st.integers(1, total - first))
    whole = spec.offsets(total)
    assert spec.offsets(heads, first=first, total=total) == tuple(row[first : first + heads] for row in whole)
    assert all(o is None or 0 <= o < r for r, row in zip(rates, whole) for o in row)


def test_query_heads_of_a_group_share_their_key_head() -> None:
    call = Call(spec=DilatedSpec.of([8], [2]), head_offset=4, total_heads=8)
    assert call.offsets(heads=4, kv_heads=2) == ((0, 1),)
    with pytest.raises(ValueError, match="head_offset=3 splits a group of 2"):
        Call(spec=call.spec, head_offset=3, total_heads=8).offsets(heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="do not lie within the 6 heads"):
        call.spec.offsets(4, first=4, total=6)
