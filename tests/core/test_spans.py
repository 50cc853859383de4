from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core.spans import document_positions, document_spans, segment_number


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_each_statement_of_lengths_gives_the_same_spans() -> None:
    expected = torch.tensor([[0, 3], [0, 5]])
    assert torch.equal(document_spans(2, 5, seqlens=torch.tensor([3, 5])), expected)
    assert torch.equal(document_spans(2, 5, key_padding_mask=mask("...xx", ".....")), expected)
    packed = document_spans(1, 8, cu_seqlens=torch.tensor([0, 3, 3, 8], dtype=torch.int32))
    assert torch.equal(packed, torch.tensor([[0, 3], [3, 3], [3, 8]]))
    assert document_spans(2, 5) is None


def test_a_row_may_be_padded_on_both_sides_or_wholly() -> None:
    spans = document_spans(2, 5, key_padding_mask=mask("x..xx", "xxxxx"))
    assert spans.tolist()[0] == [1, 3]
    assert spans[1, 0] == spans[1, 1]


def test_a_floating_mask_of_zero_and_minus_infinity_is_understood() -> None:
    floating = torch.zeros(1, 4).masked_fill(mask("..xx"), -torch.inf)
    assert document_spans(1, 4, key_padding_mask=floating).tolist() == [[0, 2]]
    with pytest.raises(ValueError, match="must hold 0"):
        document_spans(1, 4, key_padding_mask=torch.full((1, 4), 0.5))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key_padding_mask": mask(".....", "..x..")}, ValueError, "row 1 has a hole at 2.*pack with cu_seqlens"),
        ({"key_padding_mask": mask(".....")}, ValueError, r"\(2, 5\), got \(1, 5\)"),
        ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "must be bool"),
        ({"seqlens": torch.tensor([3, 6])}, ValueError, r"seqlens\[1\] = 6 is outside \[0, 5\]"),
        ({"seqlens": torch.tensor([3.0, 5.0])}, TypeError, "whole numbers"),
        ({"seqlens": torch.tensor([3])}, ValueError, r"must be \(batch,\) = \(2,\)"),
        ({"seqlens": [3, 5]}, TypeError, "must be a tensor, got a list"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "one row, got batch 2"),
        ({"seqlens": torch.tensor([3, 5]), "cu_seqlens": torch.tensor([0, 5])}, ValueError, "pass one of them"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(given, error, message) -> None:
    with pytest.raises(error, match=message):
        document_spans(2, 5, **given)


@pytest.mark.parametrize("bad", [[1, 5], [0, 4, 3], [0, 6], [0]])
def test_cumulative_lengths_must_rise_from_zero_within_the_row(bad) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must"):
        document_spans(1, 5, cu_seqlens=torch.tensor(bad))


def test_positions_count_from_each_documents_first_token() -> None:
    spans = document_spans(2, 5, key_padding_mask=mask("xx...", "....x"))
    positions = document_positions(spans, 2, 5)
    assert positions[0, 2:].tolist() == [0, 1, 2]
    assert positions[1, :4].tolist() == [0, 1, 2, 3]
    packed = document_positions(torch.tensor([[0, 2], [2, 2], [2, 4]]), 1, 6)
    assert packed[0, :4].tolist() == [0, 1, 0, 1]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.booleans(), st.integers(1, 40))
def test_segments_of_all_documents_have_numbers_of_their_own(lengths, packed: bool, w: int) -> None:
    tokens = sum(lengths) + 2 if packed else 33
    batch, start, numbers = (1 if packed else len(lengths)), 1, []
    for document, length in enumerate(lengths):
        b = 0 if packed else document
        numbers += [segment_number(b, start + at, document, w, tokens) for at in range(0, length, min(w, tokens))]
        start += length if packed else 0
    assert numbers == sorted(set(numbers))
    assert all(0 <= number < batch * tokens // min(w, tokens) + len(lengths) for number in numbers)


def test_no_documents_are_one_without_tokens() -> None:
    assert document_spans(1, 4, spans=torch.zeros(0, 2, dtype=torch.int64)).tolist() == [[0, 0]]
