"""Sequences of many lengths as packed batches without padding, read by worker processes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dilated_attention_pytorch.slides.features import BrokenFile, read_bag
from dilated_attention_pytorch.slides.table import Case
from dilated_attention_pytorch.train.batching import DynamicBatcher


class Batch(NamedTuple):
    """Packed sequences."""

    numbers: Tensor  # (sequences,), their places in the list of cases
    features: Tensor  # (1, rows, dim)
    coordinates: Tensor | None  # (1, rows, 2)
    cu_seqlens: Tensor  # (sequences + 1,)
    targets: Tensor  # (sequences, numbers per target)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device. A GPU copies while it computes; what is queued afterwards waits for the copies."""
        if device.type != "cuda" or self.features.is_cuda:
            return Batch._make(None if x is None else x.to(device) for x in self)
        now, copies = torch.cuda.current_stream(device), _copies(device)
        with torch.cuda.stream(copies):
            moved = [None if x is None else x.to(device, non_blocking=True) for x in self]
        now.wait_stream(copies)
        for x in filter(torch.is_tensor, moved):
            x.record_stream(now)
        return Batch._make(moved)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keywords of `LongNetEncoder`."""
        beside = {} if self.coordinates is None else {"coordinates": self.coordinates}
        return {"x": self.features, "cu_seqlens": self.cu_seqlens, **beside}


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def make_batches(lengths: Sequence[int], max_rows: int, max_batch_size: int) -> list[list[int]]:
    """The numbers of the sequences of each batch: of similar length, and at most `max_rows` rows in total.

    A longer sequence is a batch of its own.

    >>> make_batches([100, 900, 120, 90, 5000], max_rows=400, max_batch_size=8)
    [[0, 2, 3], [1], [4]]
    """
    longest = max([max_rows, *lengths])
    sizes = [1 << i for i in range(longest.bit_length() + 1)]
    batcher = DynamicBatcher(max_tokens=max_rows, max_batch_size=max_batch_size, segment_lengths=sizes)
    fitting: list[dict[str, Any]] = [{"input_ids": range(min(n, max_rows)), "number": i} for i, n in enumerate(lengths)]
    return [[item["number"] for item in batch] for batch in batcher.create_batches(fitting)]


def epoch_order(lengths: Sequence[int], max_rows: int, max_batch_size: int, seed: int) -> list[list[int]]:
    """`make_batches` of shuffled sequences, with the batches shuffled too; as many batches for every seed."""
    order = list(range(len(lengths)))
    shuffle = random.Random(seed).shuffle
    shuffle(order)
    batches = make_batches([lengths[i] for i in order], max_rows, max_batch_size)
    shuffle(batches)
    return [[order[i] for i in batch] for batch in batches]


class Bags(Dataset[Batch]):
    """The sequences of some cases; an item is a list of their numbers, and becomes a `Batch`."""

    def __init__(self, cases: Sequence[Case], *, coordinates: bool, tile_pixels: float | None = None) -> None:
        self.cases, self._coordinates, self._tile_pixels = list(cases), coordinates, tile_pixels

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, numbers: Sequence[int]) -> Batch:
        bags = [read_bag(self.cases[i].path, self._tile_pixels, coordinates=self._coordinates) for i in numbers]
        ends = torch.tensor([0, *(len(bag.features) for bag in bags)]).cumsum(0)
        places = None
        if self._coordinates:
            places = torch.cat([_stated(bag.coordinates, self.cases[i]) for bag, i in zip(bags, numbers)])[None]
        return Batch(
            torch.tensor(list(numbers)),
            torch.cat([bag.features for bag in bags])[None],
            places,
            ends,
            torch.tensor([self.cases[i].target for i in numbers], dtype=torch.float32),
        )


def _stated(coordinates: Tensor | None, case: Case) -> Tensor:
    if coordinates is None:
        raise BrokenFile(f"{case.path} has no coords, which positions from coordinates need: use --positions none")
    return coordinates


def read_batches(bags: Bags, batches: Sequence[list[int]], *, workers: int = 0) -> Iterator[Batch]:
    """The batches in order, read ahead by `workers` processes, or by this one as they are asked for.

    With a GPU, they are in pinned memory, from which copies to it are fast.
    """
    pinned = torch.cuda.is_available()
    lists: Any = batches  # any sequence is a dataset
    read: Any = functools.partial(_read_batch, bags)
    for found in DataLoader(lists, batch_size=None, collate_fn=read, num_workers=workers, pin_memory=pinned):
        if isinstance(found, BrokenFile):
            raise found
        yield found


def _read_batch(bags: Bags, numbers: Sequence[int]) -> Batch | BrokenFile:
    """A batch, or the error about a broken file: raised in a worker, it would come inside a traceback."""
    try:
        return bags[numbers]
    except BrokenFile as error:
        return error
