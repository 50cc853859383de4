"""Documents in a batch: every way of stating lengths becomes one tensor of spans, checked once.

`spans` is int64 `(documents, 2)`, each row `[start, end)` within a batch row. Several batch rows hold one document
each; a single batch row may hold any number of documents, one after another (packed).
"""

from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import MOST_TOKENS, check_tensor, check_whole, check_whole_numbers
from dilated_attention_pytorch.core.modes import READS_VALUES
from dilated_attention_pytorch.core.plans import Remembers, check_cache


def document_spans(
    batch: int,
    tokens: int,
    *,
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    spans: Tensor | None = None,
    cache: Remembers | None = None,
) -> Tensor | None:
    """The spans that one of `seqlens`, `cu_seqlens`, `key_padding_mask` or `spans` states, or None if none is given.

    Compute them once and pass `spans=` to many layers: the values are checked here, which waits for the device. With a
    `cache`, equal lengths give the same tensor again; never write to it.

    >>> document_spans(2, 5, key_padding_mask=torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]]).bool())
    tensor([[2, 5],
            [0, 4]])
    """
    if not torch.compiler.is_compiling():  # there a limit would become a constraint on the shapes
        check_whole("batch", batch, least=0, most=MOST_TOKENS)
        check_whole("tokens", tokens, least=0, most=MOST_TOKENS)
        check_cache(cache)
    stated = {"seqlens": seqlens, "cu_seqlens": cu_seqlens, "key_padding_mask": key_padding_mask, "spans": spans}
    given = {kind: value for kind, value in stated.items() if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join([*given][:2])} both state the lengths: pass one of them")
    kind, value = next(iter(given.items()))
    check = check_tensor if kind == "key_padding_mask" else check_whole_numbers
    check(kind, value)
    shapes = {"seqlens": ("(batch,)", (batch,)), "key_padding_mask": ("(batch, tokens)", (batch, tokens))}
    if kind in shapes and value.shape != shapes[kind][1]:
        raise ValueError(f"{kind} must be {shapes[kind][0]} = {shapes[kind][1]}, got {tuple(value.shape)}")
    if kind == "cu_seqlens" and (value.dim() != 1 or value.shape[0] < 2):
        raise ValueError(f"cu_seqlens must be (documents + 1,) with at least one document, got {tuple(value.shape)}")
    if kind == "cu_seqlens" and batch != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one row, got batch {batch}: "
            "flatten the batch with x.flatten(0, 1)[None], or state seqlens"
        )
    if kind == "spans":
        # Kernels look for a token's document among at least one.
        return value if len(check_spans(value, batch)) else value.new_zeros(1, 2)
    if cache is None or kind == "key_padding_mask":  # comparing masks takes about as long as reading them
        return checked_spans(value, kind, tokens)
    # Looked up by content, even on a GPU: checking them waits for their values anyway.
    key = (kind, tokens, value.device, tuple(value.tolist()))
    return cache.remember("lengths", key, lambda: checked_spans(value, kind, tokens))


def check_spans(spans: Tensor, batch: int) -> Tensor:
    """Refuse spans that `document_spans` cannot have made for this number of batch rows."""
    if check_whole_numbers("spans", spans).dim() != 2 or spans.shape[1] != 2 or (batch > 1 and spans.shape[0] != batch):
        raise ValueError(
            "spans must be (documents, 2), with one document per row if there are several rows, "
            f"got {tuple(spans.shape)} for batch {batch}: make them with document_spans"
        )
    return spans


# An operator of its own, so that reading the values does not break a compiled graph.
@torch.library.custom_op("dilated_attention_pytorch::checked_spans", mutates_args=(), **READS_VALUES)
def checked_spans(lengths: Tensor, kind: str, tokens: int) -> Tensor:
    if kind == "key_padding_mask":
        return _spans_of_mask(lengths)
    values = lengths.tolist()
    if kind == "seqlens":
        for b, value in enumerate(values):
            if not 0 <= value <= tokens:
                raise ValueError(f"seqlens[{b}] = {value} is outside [0, {tokens}], the tokens of a row")
        return torch.stack([torch.zeros_like(lengths), lengths], dim=-1).long()
    if values[0] != 0 or values[-1] > tokens or any(a > b for a, b in pairwise(values)):
        shown = values if len(values) <= 8 else [*values[:4], "...", *values[-3:]]
        raise ValueError(
            f"cu_seqlens must start at 0, never fall, and end at most at the {tokens} tokens of the row, got {shown}"
        )
    return torch.tensor(list(pairwise(values)), device=lengths.device)


@checked_spans.register_fake
def _(lengths: Tensor, kind: str, tokens: int) -> Tensor:
    documents = lengths.shape[0] - 1 if kind == "cu_seqlens" else lengths.shape[0]
    return lengths.new_empty((documents, 2), dtype=torch.int64)


def _spans_of_mask(mask: Tensor) -> Tensor:
    if mask.is_floating_point():  # nn.TransformerEncoderLayer turns its bool mask into 0 / -inf
        if not ((mask == 0) | (mask == -torch.inf)).all():
            raise ValueError("a floating key_padding_mask must hold 0 (keep) or -inf (ignore) only: pass a bool mask")
        mask = mask == -torch.inf
    elif mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool, True = ignore, got {mask.dtype}")
    if not mask.numel():
        return torch.zeros(mask.shape[0], 2, dtype=torch.int64, device=mask.device)
    start = (~mask).int().argmax(-1)
    end = start + (~mask).sum(-1)
    position = torch.arange(mask.shape[1], device=mask.device)
    hole = mask & (position >= start[:, None]) & (position < end[:, None])
    if hole.any():
        b, i = hole.nonzero()[0].tolist()
        raise ValueError(
            f"key_padding_mask row {b} has a hole at {i}: valid tokens must form one span; pack with cu_seqlens instead"
        )
    return torch.stack([start, end], dim=-1)


def document_positions(spans: Tensor, batch: int, tokens: int, first: int = 0) -> Tensor:
    """`(batch, tokens)`: each token's position within its own document; for padding, any position in range.

    The tokens begin at `first` of the rows that `spans` describe.

    >>> document_positions(torch.tensor([[0, 3], [3, 5]]), 1, 5)
    tensor([[0, 1, 2, 0, 1]])
    """
    position = torch.arange(first, first + tokens, device=spans.device)
    if batch > 1:
        return (position - spans[:, :1]).clamp_min(0)
    document = torch.searchsorted(spans[:, 1].contiguous(), position, right=True).clamp_max(spans.shape[0] - 1)
    return (position - spans[document, 0]).clamp_min(0)[None]


def documents(spans: Tensor | None, batch: int, tokens: int) -> list[tuple[slice, int, int, int]]:
    """`(batch rows, start, length, number)` of every document that has tokens; whole rows come as one."""
    if spans is None:
        return [(slice(0, batch), 0, tokens, 0)]
    found, after = [], 0
    for number, (start, end) in enumerate(spans.tolist()):
        if not (0 if batch > 1 else after) <= start <= end <= tokens:
            raise ValueError(
                f"span [{start}, {end}) does not follow the one before it within a row of {tokens} tokens: "
                "make spans with document_spans"
            )
        after = end
        row = number if batch > 1 else 0
        if end > start:
            found.append((slice(row, row + 1), start, end - start, number))
    return found


Whole = TypeVar("Whole", int, Tensor)


def segment_number(batch_row: Whole, start: Whole, document: Whole, w: int, tokens: int) -> Whole:
    """The number of the segment that starts at a token, among the segments of all documents of a batch.

    No two segments of `w` tokens or less share a number, and all are below `batch * tokens // w + documents`. It needs
    nothing but the segment's own document, so that kernels find it too.
    """
    return (batch_row * tokens + start) // min(w, tokens) + document
