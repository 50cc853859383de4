"""The mask function of `attn_implementation="dilated"`: it encodes a mask in a few numbers per document.

transformers makes a mask once for all layers of a forward and passes it to the attention function as `attention_mask`.
Ours is an int64 tensor of four dimensions, which transformers passes on unchanged. It has more rows than columns, which
no dense mask has. Its shape tells its kind:

- `(B, 1, 3, 2)`: `[start, end)` of the tokens of each row; all of them are queries;
- `(B, 1, 4, 3)`: the same, and where the queries begin, if there are earlier tokens;
- `(documents, 1, 5, 2)`: `[start, end)` of packed documents, counted through all rows;
- `(B, 1, 1 + n, 1)`: if there is padding between tokens, the number of padded tokens per row, and the order of its `n`
  tokens that puts padding first. All tokens are queries;
- `(B, 2, 1 + n, 1)`: the same, and where the queries begin, if there are earlier tokens;
- `(1, 1, 2, 0)`: every token of every row, and no earlier ones;
- `(1, 1, 3, 0)`: the same, stated by an `attention_mask` of ones;
- `(1, 1, 4, 0)`: the next token of every row of a bounded cache, which knows where it lies;
- `(1, 1, 1, 0)`: a mask that dilated attention cannot honour. It is refused when a layer uses it, because some models
  make masks that no layer uses.

A mask is never None. If a model ran another attention function with None, its tokens would see later ones; with these
shapes, that function fails instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from dilated_attention_pytorch.core.modes import READS_VALUES
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.models.hf.pattern import is_no_window, require_interface

_SPANS, _SPANS_AND_BEGIN, _DOCUMENTS = (3, 2), (4, 3), (5, 2)
_UNSUPPORTED, _WHOLE, _WHOLE_BY_MASK, _NEXT = (1, 0), (2, 0), (3, 0), (4, 0)


class MaskFacts(NamedTuple):
    """The content of a mask: at most one of `spans` and `documents`."""

    spans: Tensor | None = None  # (B, 2), of tokens in the stated `order`
    order: Tensor | None = None  # (B, n), the padded tokens first, if padding stands between tokens
    documents: Tensor | None = None  # (documents, 2), counted through all rows
    begin: Tensor | None = None  # a scalar: where the queries begin, if there are earlier tokens
    is_whole: bool = False  # every token, and no earlier ones
    is_next: bool = False  # the next token of a bounded cache
    is_by_mask: bool = False  # an `attention_mask` stated it; then positions do not state documents


def read_mask(mask: Tensor | None) -> MaskFacts:
    """The content of a mask that `dilated_mask` made; other masks are refused."""
    if mask is None:
        return MaskFacts()
    if mask.dim() == 4 and mask.dtype == torch.int64 and mask.shape[1] in (1, 2) and mask.shape[2] > mask.shape[3] == 1:
        order = mask[:, 0, 1:, 0]
        spans = torch.stack([mask[:, 0, 0, 0], torch.full_like(mask[:, 0, 0, 0], order.shape[1])], dim=1)
        return MaskFacts(
            spans=spans, order=order, begin=mask[0, 1, 0, 0] if mask.shape[1] == 2 else None, is_by_mask=True
        )
    kind = tuple(mask.shape[2:]) if mask.dim() == 4 and mask.shape[1] == 1 and mask.dtype == torch.int64 else None
    if kind in (_WHOLE, _WHOLE_BY_MASK):
        return MaskFacts(is_whole=True, is_by_mask=kind == _WHOLE_BY_MASK)
    if kind == _NEXT:
        return MaskFacts(is_next=True)
    if kind == _SPANS:
        return MaskFacts(spans=mask[:, 0, 0], is_by_mask=True)
    if kind == _SPANS_AND_BEGIN:
        return MaskFacts(spans=mask[:, 0, 0, :2], begin=mask[0, 0, 0, 2], is_by_mask=True)
    if kind == _DOCUMENTS:
        return MaskFacts(documents=mask[:, 0, 0])
    if kind != _UNSUPPORTED:
        raise ValueError(
            f'attn_implementation="dilated" takes masks of its own mask function, got {mask.dtype} '
            f"{tuple(mask.shape)}: pass the model a 2D attention_mask for padding, or position_ids that begin again "
            "for packed documents; a dense mask takes O(N^2) memory and is not supported"
        )
    raise ValueError(
        "this layer's mask is neither causal nor bidirectional over whole documents, which "
        'attn_implementation="dilated" cannot honour '
        "(a sliding window or chunks, tokens that see ahead within a block, cross-attention): set "
        "sliding windows off in the config (use_dilated_attention(..., replace_sliding_window=True)), or keep the "
        "model's own attention"
    )


def dilated_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **settings: Any,  # dtype
) -> Tensor:
    """The mask function that `register` registers: one of the tensors above, never `N x N`."""
    if config is not None:
        require_interface(config)
    is_next = kv_length == 0
    if isinstance(q_offset, Tensor) and not (is_next or torch.compiler.is_compiling()):
        q_offset = int(q_offset)
    first = isinstance(q_offset, int) and q_offset == 0
    if device is None and attention_mask is not None:
        device = attention_mask.device
    unsupported = _without_numbers(_UNSUPPORTED, device)
    if local_size is not None and is_no_window(local_size):
        # A window has a new function each time. A mask that transformers may leave out is plainly causal or
        # bidirectional; beside a cache or of one token, where no documents are packed, one that never sees ahead is
        # causal too.
        if allow_is_bidirectional_skip:
            mask_function = bidirectional_mask_function
        elif allow_is_causal_skip or (
            (not first or q_length == 1 or q_length != kv_length)
            and not _sees_ahead(mask_function, batch_size, q_length, q_offset, device)
        ):
            mask_function = causal_mask_function
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    if use_vmap or (mask_function is bidirectional_mask_function and not (first and q_length == kv_length)):
        return unsupported
    if not plain:
        chunked = getattr(config, "attention_chunk_size", None) is not None
        if chunked or attention_mask is not None or not first or q_length != kv_length:
            return unsupported  # packed documents come with neither padding nor earlier tokens
        documents = _packed_documents(mask_function, batch_size, q_length, device)
        return unsupported if documents is None else _with_numbers(_DOCUMENTS, documents)
    if is_next:
        return _without_numbers(_NEXT, device)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be (batch, tokens), got {tuple(attention_mask.shape)}")
    if first and attention_mask is None:
        return _without_numbers(_WHOLE, device)
    if attention_mask is not None and isinstance(q_offset, int) and not torch.compiler.is_compiling():
        ordered = _ordered(attention_mask[:, : q_offset + q_length].bool(), q_offset, q_length)
        if ordered is not None:
            return ordered
    spans = _spans(attention_mask, batch_size, q_length, q_offset, device)
    if first:
        if not torch.compiler.is_compiling() and bool((spans == spans.new_tensor([0, q_length])).all()):
            return _without_numbers(_WHOLE_BY_MASK, device)
        return _with_numbers(_SPANS, spans)
    begin = torch.as_tensor(q_offset, device=spans.device).expand(batch_size, 1)
    return _with_numbers(_SPANS_AND_BEGIN, torch.cat([spans, begin], dim=1))


def _with_numbers(kind: tuple[int, int], numbers: Tensor) -> Tensor:  # (..., columns) to (..., 1, rows, columns)
    rows, columns = kind
    assert numbers.shape[1] == columns
    return numbers[:, None, None].repeat(1, 1, rows, 1)


def _without_numbers(kind: tuple[int, int], device: Any = None) -> Tensor:
    return torch.empty(1, 1, *kind, dtype=torch.int64, device=device)


def packed_by_positions(position_ids: Tensor) -> Tensor | None:
    """`(documents, 2)` if positions begin again within rows, counted through all rows; else None."""
    joined = position_ids.diff(dim=-1) == 1
    if torch.compiler.is_compiling():
        return documents_of(joined, torch.zeros_like(joined), torch.ones_like(position_ids, dtype=torch.bool))
    return None if bool(joined.all()) else _documents(joined)


def _spans(
    attention_mask: Tensor | None, batch: int, q_length: int, q_offset: int | Tensor, device: Any
) -> Tensor:  # (B, 2)
    total = q_offset + q_length
    if attention_mask is None:
        end = torch.as_tensor(total, dtype=torch.int64, device=device).expand(batch)
        return torch.stack([torch.zeros_like(end), end], dim=1)
    if isinstance(total, int):
        if attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} tokens, the {total - q_length} in the cache and the "
                f"{q_length} new ones are {total}: state all of them, 1 for a token and 0 for padding"
            )
        attention_mask = attention_mask[:, :total]
    spans = document_spans(*attention_mask.shape, key_padding_mask=~attention_mask.bool())
    assert spans is not None
    end = spans[:, 1].clamp_max(total) if isinstance(total, int) else spans[:, 1].minimum(total)
    # A row of nothing but padding begins after all tokens so far.
    empty = spans[:, 0] == spans[:, 1]
    later = torch.as_tensor(total, device=spans.device)
    return torch.stack([torch.where(empty, later, spans[:, 0]), torch.where(empty, later, end)], dim=1)


def _ordered(real: Tensor, before: int, new: int) -> Tensor | None:
    """The mask that states an order, if padding stands between tokens, or after them in rows of a cache."""
    if real.shape[1] < before + new:
        return None  # `_spans` refuses it
    begins = real & ~F.pad(real[:, :-1], (1, 0))  # (B, n)
    is_apart = begins.sum(1) > 1
    if before:
        is_apart |= ~real[:, -1] & real.any(1)
    if not bool(is_apart.any()):
        return None
    if before:
        went_on = real[:, :before].any(1) & ~real[:, before - 1] & real[:, before:].any(1)
        if bool(went_on.any()):
            raise ValueError(
                f"row {int(went_on.int().argmax())} of attention_mask has padding between the {before} tokens in the "
                "cache and the new ones, which a right-padded prompt leaves: generate reads the next token from a "
                "row's last place, so pad prompts on the left (padding_side='left')"
            )
    elif not torch.is_grad_enabled():
        warnings.warn(
            "attention_mask has padding between tokens, which the pattern leaves out of its count. That is right for "
            "virtual tokens before left padding. If a right-padded prompt has left it in generate, pad prompts on the "
            "left (padding_side='left')",
            stacklevel=2,
        )
    padded = (~real).sum(1, keepdim=True)
    numbers = torch.cat([padded, real.int().argsort(dim=1, stable=True)], dim=1)  # (B, 1 + n)
    planes = [numbers, torch.full_like(numbers, before)] if before else [numbers]
    return torch.stack(planes, dim=1).unsqueeze(-1)


def _packed_documents(
    mask_function: Callable[..., Tensor], batch: int, tokens: int, device: Any
) -> Tensor | None:  # (documents, 2)
    """The documents of a mask function that is causal within each; None if it is something else.

    It is asked about neighbours and about each document's first token, O(N) in all: a document begins where a token
    does not see the token before it.
    """
    row = torch.arange(batch, device=device)[:, None]
    token = torch.arange(tokens, device=device)[None]
    joined = _ask(mask_function, row, token[:, 1:], token[:, :-1])  # (B, N - 1)
    ahead = _ask(mask_function, row, token[:, :-1], token[:, 1:])
    begins = torch.cat([torch.zeros_like(row), torch.where(joined, 0, token[:, 1:])], dim=1)
    reaches = _ask(mask_function, row, token, begins.cummax(dim=1).values)
    if torch.compiler.is_compiling():
        return documents_of(joined, ahead, reaches)
    return _documents(joined) if _is_packed(ahead, reaches) else None


def _sees_ahead(
    mask_function: Callable[..., Tensor], batch: int, tokens: int, offset: int | Tensor, device: Any
) -> bool:
    """Whether a query sees the token after it. While tracing, values are unknown and several queries count as yes."""
    if tokens == 1 or torch.compiler.is_compiling():
        return tokens > 1
    query = torch.arange(tokens - 1, device=device)[None] + offset
    return bool(_ask(mask_function, torch.arange(batch, device=device)[:, None], query, query + 1).any())


def _ask(mask_function: Callable[..., Tensor], row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    seen = mask_function(row, torch.zeros_like(row), query, key)
    return seen.expand(row.shape[0], query.shape[1])


def _is_packed(ahead: Tensor, reaches: Tensor) -> bool:
    return not bool(ahead.any()) and bool(reaches.all())


def _documents(joined: Tensor) -> Tensor:
    B, tokens = joined.shape[0], joined.shape[1] + 1
    begins = torch.cat([joined.new_zeros(B, 1), joined], dim=1).logical_not()
    start = begins.flatten().nonzero()[:, 0]
    return torch.stack([start, torch.cat([start[1:], start.new_tensor([B * tokens])])], dim=1)


# In a trace the number of documents must not depend on values: empty documents after the last token fill it up.
@torch.library.custom_op("dilated_attention_pytorch::documents_of", mutates_args=(), **READS_VALUES)
def documents_of(joined: Tensor, ahead: Tensor, reaches: Tensor) -> Tensor:
    if not _is_packed(ahead, reaches):
        read_mask(_without_numbers(_UNSUPPORTED))
    found = _documents(joined)
    spans = found.new_full((reaches.numel(), 2), reaches.numel())
    spans[: found.shape[0]] = found
    return spans


@documents_of.register_fake
def _(joined: Tensor, ahead: Tensor, reaches: Tensor) -> Tensor:
    return reaches.new_empty((reaches.numel(), 2), dtype=torch.int64)


# A compiled model cannot read values while it is traced, so packed documents beside a cache are refused as it runs.
@torch.library.custom_op("dilated_attention_pytorch::of_one_document", mutates_args=(), **READS_VALUES)
def of_one_document(x: Tensor, position_ids: Tensor) -> Tensor:
    """A copy of `x`, unless positions begin again within rows."""
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            "position_ids begin again within a row, which a compiled model beside a cache does not honour: call it "
            "without a cache, or without torch.compile"
        )
    return x.clone()


@of_one_document.register_fake
def _(x: Tensor, position_ids: Tensor) -> Tensor:
    return torch.empty_like(x)
