"""Batches of sequences of many lengths: which ones go together, and how they become tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import (
    COUNT,
    MOST_TOKENS,
    check_instance,
    check_sequence,
    check_whole,
    checked,
)

Item = TypeVar("Item", bound=Mapping[str, Any])
IGNORED = -100  # the label that PyTorch's cross-entropy ignores


class DynamicBatcher:
    """Groups sequences of similar length into batches of at most `max_tokens` tokens, padding included.

    Args:
        max_tokens: limit of a batch: its rows times the length of its longest row, rounded by `round_to_segment`.
        max_batch_size: the most rows of a batch.
        segment_lengths: those of the model's branches.

    >>> batcher = DynamicBatcher(max_tokens=64, max_batch_size=4, segment_lengths=[8, 16])
    >>> items = [{"input_ids": list(range(n))} for n in (5, 30, 7, 16, 8)]
    >>> [[len(item["input_ids"]) for item in batch] for batch in batcher.create_batches(items)]
    [[5, 7, 8], [30], [16]]
    """

    @checked(max_tokens=COUNT, max_batch_size=COUNT, segment_lengths=COUNT)
    def __init__(
        self, max_tokens: int = 32_768, max_batch_size: int = 32, segment_lengths: Sequence[int] = (2048, 4096, 8192)
    ) -> None:
        self.max_tokens = max_tokens
        self.max_batch_size = max_batch_size
        self.segment_lengths = tuple(sorted(segment_lengths))
        if not self.segment_lengths:
            raise ValueError("segment_lengths must have at least one entry, got none")

    def get_batch_size(self, seq_len: int) -> int:
        """The number of sequences of a length that fit into a batch."""
        if check_whole("seq_len", seq_len, least=1) > self.max_tokens:
            raise ValueError(
                f"a sequence of {seq_len:,} tokens does not fit a batch of {self.max_tokens:,}: raise max_tokens, or "
                "cut the sequence"
            )
        return min(self.max_tokens // seq_len, self.max_batch_size)

    def round_to_segment(self, length: int) -> int:
        """The shortest segment length that holds a sequence; for longer sequences, a multiple of the longest one.

        >>> [DynamicBatcher(segment_lengths=[8, 16]).round_to_segment(length) for length in (3, 9, 33)]
        [8, 16, 48]
        """
        longest, length = self.segment_lengths[-1], check_whole("length", length, least=0, most=MOST_TOKENS)
        if length > longest:
            return -(-length // longest) * longest
        return next(segment for segment in self.segment_lengths if length <= segment)

    @checked()
    def create_batches(self, dataset: Iterable[Item]) -> list[list[Item]]:
        """Lists of items, `{"input_ids": tokens, ...}`; the items of a list have one rounded length. See `collate`."""
        groups: dict[int, list[Item]] = {}
        for item in dataset:
            length = len(check_sequence("input_ids", check_item(item)["input_ids"]))
            self.get_batch_size(length)  # raises if it is too long or empty
            groups.setdefault(self.round_to_segment(length), []).append(item)
        batches = []
        for length, items in groups.items():
            size = self.get_batch_size(min(length, self.max_tokens))
            batches += [items[start : start + size] for start in range(0, len(items), size)]
        return batches


def collate(items: Sequence[Mapping[str, Any]], *, length: int | None = None, pad_token: int = 0) -> dict[str, Tensor]:
    """A batch of tensors, rows padded on the right to the longest, or to `length`: `input_ids` and `labels`, `(B, N)`.

    Rows of several lengths come with `seqlens`, `(B,)`. A label is the token that a position should predict: from the
    item's `labels`, or the next token. At the end of a row and in padding it is -100, which the loss ignores.

    >>> batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> batch["labels"].tolist(), batch["seqlens"].tolist()
    ([[2, 3, -100], [5, -100, -100]], [3, 2])
    """
    rows = [tokens_and_labels(item) for item in items]
    if not rows:
        raise ValueError("a batch has at least one item, got none")
    longest = max(len(tokens) for tokens, _ in rows)
    length = longest if length is None else length
    if length < longest:
        raise ValueError(f"a row of {longest} tokens does not fit length={length}: cut it, or leave length out")
    ids = torch.full((len(rows), length), pad_token, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, (tokens, targets) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = targets
    batch = {"input_ids": ids, "labels": labels}
    seqlens = [len(tokens) for tokens, _ in rows]
    if set(seqlens) != {length}:
        batch["seqlens"] = torch.tensor(seqlens)
    return batch


def tokens_and_labels(item: Any, dims: int = 1, beside: Sequence[str] = ()) -> tuple[Tensor, Tensor]:
    """The tokens of an item `(N,)` or a batch `(B, N)`, and what each should predict; `beside` are other valid keys."""
    check_item(item, ("labels", *beside))
    tokens = torch.as_tensor(item["input_ids"], dtype=torch.long)
    labels = next_tokens(tokens) if item.get("labels") is None else torch.as_tensor(item["labels"], dtype=torch.long)
    if tokens.dim() != dims or not tokens.numel() or labels.shape != tokens.shape:
        raise ValueError(
            f"input_ids and labels are {('(tokens,)', '(batch, tokens)')[dims - 1]}, got {tuple(tokens.shape)} and "
            f"{tuple(labels.shape)}"
        )
    return tokens, labels


def check_item(item: Any, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Refuse what is not a mapping with `input_ids`, or has unknown keys."""
    check_instance("an item", item, Mapping)
    if "input_ids" not in item or (known is not None and item.keys() - {"input_ids", *known}):
        beside = ", ".join(known or ("labels",))
        raise ValueError(f"an item is a mapping with input_ids and optionally {beside}, got {sorted(map(str, item))}")
    return item


def next_tokens(tokens: Tensor) -> Tensor:
    """The token that follows each one along the last dimension; the last one gets the ignored label."""
    return torch.cat([tokens[..., 1:], torch.full_like(tokens[..., :1], IGNORED)], dim=-1)
