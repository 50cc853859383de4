"""The lists of what kernels work on where documents have lengths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch.core.pattern import segments
from dilated_attention_pytorch.core.resources import NO_RESOURCES
from dilated_attention_pytorch.core.spans import segment_number

documents = pytest.importorskip("dilated_attention_pytorch.kernels.triton.documents", reason="the kernels need Triton")


def expected(spans: list[list[int]], packed: bool, tokens: int, w: int, r: int, works) -> list[tuple[int, ...]]:
    """Every line that a list must have, from the definition of segments."""
    found = []
    for document, (begin, end) in enumerate(spans):
        for start, length in segments(end - begin, w) if end > begin else []:
            rows = -(-length // r)
            lines = -(-rows // works.tile)
            lines = -(-lines // 2) if works.pairs else lines
            if works.least < rows <= works.most:
                b = 0 if packed else document
                number = segment_number(b, begin + start, document, w, tokens)
                found += [(b, begin + start, *divmod(length, r), place, number) for place in reversed(range(lines))]
    return found


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5), st.booleans(), st.integers(1, 800), st.integers(1, 12),
    st.sampled_from([(1 << 30, False, 0, 128), (1 << 30, False, 128, 1 << 30), (128, True), (192, False), (16, True)]),
)  # fmt: skip
def test_a_list_has_a_line_for_every_tile_of_every_document(lengths, packed: bool, w: int, r: int, kind) -> None:
    works = documents.Works(*kind)
    if packed:
        ends = torch.tensor(lengths).cumsum(0)
        spans, tokens, batch = torch.stack([ends - torch.tensor(lengths), ends], 1), int(ends[-1]) + 3, 1
    else:
        lengths = [*lengths, 5]
        spans, tokens, batch = torch.tensor([[i, i + length] for i, length in enumerate(lengths)]), 720, len(lengths)
    plan = SimpleNamespace(device=spans.device, B=batch, N=tokens, documents=len(spans))
    branch = SimpleNamespace(plan=plan, w=min(w, tokens), r=r)
    other = documents.Works(32)
    lists = documents.WorkLists(plan, [(branch, other), (branch, works), (branch, works)]).of(spans, NO_RESOURCES)
    for found, kind in zip(lists, (other, works, works)):
        (count, *_), *lines = found.tolist()
        assert [tuple(line[:6]) for line in lines[:count]] == expected(spans.tolist(), packed, tokens, w, r, kind)


def test_lines_of_very_many_documents_follow_each_other(monkeypatch) -> None:
    monkeypatch.setattr(documents, "_FEW_DOCUMENTS", 10)
    lengths = torch.arange(300) % 7
    ends = lengths.cumsum(0)
    plan = SimpleNamespace(device=ends.device, B=1, N=int(ends[-1]), documents=len(ends))
    branch, works = SimpleNamespace(plan=plan, w=4, r=1), documents.Works(2)
    spans = torch.stack([ends - lengths, ends], 1)
    (found,) = documents.WorkLists(plan, [(branch, works)]).of(spans, NO_RESOURCES)
    (count, *_), *lines = found.tolist()
    assert [tuple(line[:6]) for line in lines[:count]] == expected(spans.tolist(), True, plan.N, 4, 1, works)
