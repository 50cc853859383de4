"""A corpus and its order: batches are functions of (seed, step), so that resuming needs the step alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sysconfig
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dilated_attention_pytorch.files import DamagedFile, write_whole
from dilated_attention_pytorch.train import token_files
from dilated_attention_pytorch.train.batching import IGNORED as NO_TARGET
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.run_folder import holds_run
from dilated_attention_pytorch.train.tokenizer import ByteTokenizer, Tokenizer

Order = Literal["random", "epochs"]

_ROUNDS = 6  # of the permutation; four already look random
_TURN_SECONDS = 5.0  # how often ranks that wait for token files hear that they are being written


@dataclass(frozen=True)
class Batch:
    """Sequences `(B, N)`, and the token that follows each of their tokens.

    A packed row holds several sequences, one after another, and its `cu_seqlens` says where documents begin; a model
    takes one packed row at a time.
    """

    tokens: Tensor
    following: Tensor
    cu_seqlens: tuple[Tensor, ...] | None = None

    @property
    def targets(self) -> int:
        """The number of tokens to predict."""
        return int((self.following != NO_TARGET).sum())

    def lengths(self, row: int, device: torch.device | str) -> dict[str, Tensor]:
        """The arguments of a model that go with the tokens of a packed row; none if rows are not packed."""
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens[row].to(device, non_blocking=True)}

    def pinned(self) -> Batch:
        """The batch in memory from which a GPU copies while the process goes on."""
        packed = None if self.cu_seqlens is None else tuple(row.pin_memory() for row in self.cu_seqlens)
        tokens, following = (x.contiguous().pin_memory() for x in (self.tokens, self.following))
        return Batch(tokens, following, packed)


@dataclass(frozen=True)
class Corpus:
    """Two disjoint splits of a text.

    `byte_pairs` is `(2, 257, 256)`: how often a byte follows another one, in training and in validation; row 256
    counts the first byte, which follows none. `content` is the same for the same tokens and documents.
    """

    training: token_files.Split
    validation: token_files.Split
    source: str
    byte_pairs: Tensor
    content: str

    def unigram_bits(self) -> float:
        """Bits per byte of the validation split under the training split's byte frequencies: the model to beat."""
        return _bits_per_byte(*self.byte_pairs.sum(1))

    def bigram_bits(self) -> float:
        """Bits per byte of the validation split under the training split's frequencies of byte pairs."""
        return _bits_per_byte(*self.byte_pairs[:, :256])

    def remember(self, path: Path, *, resuming: bool) -> None:
        """Write to `path` what this corpus is; when a run is resumed, refuse a corpus that has changed since."""
        if resuming and path.is_file():
            try:
                before = json.loads(path.read_text())["content"]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is broken ({error!r}): move it away to resume without the check") from None
            if before != self.content:
                raise ValueError(
                    f"the text of {self.source} is not what the run began with: restore it, or start a new run ({path} "
                    "tells them apart; without it nothing is compared)"
                )
            return
        sizes = {
            name: {"tokens": len(split), "documents": len(split.documents), "bytes": split.bytes}
            for name, split in (("training", self.training), ("validation", self.validation))
        }
        write_whole(path, json.dumps({"source": self.source, "content": self.content, **sizes}, indent=2) + "\n")

    def training_batch(
        self, batch_size: int, length: int, seed: int, step: int, *, order: Order = "random", rows: int = 0
    ) -> Batch:
        """The sequences of a step, counted from 1; the same for the same seed and step.

        In `random` order windows begin anywhere. In `epochs` they lie side by side, and each comes once, shuffled,
        before any comes again. `rows` packs them into this number of rows, one for each part of the batch that a model
        takes at a time; attention and loss then stay within documents.
        """
        if order == "random":
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            starts = torch.randint(len(self.training) - length, (batch_size,), generator=generator).tolist()
        else:
            taken = range((step - 1) * batch_size, step * batch_size)
            starts = [_epoch_start(number, len(self.training), length, seed) for number in taken]
        return _windows(self.training, starts, length, rows)

    def validation_batches(self, batch_size: int, length: int, batches: int, *, rows: int = 0) -> Iterator[Batch]:
        """The same evenly spread windows at every call."""
        starts = torch.linspace(0, len(self.validation) - length - 1, batch_size * batches, dtype=torch.float64).long()
        for chunk in starts.split(batch_size):
            yield _windows(self.validation, chunk.tolist(), length, rows)


def _bits_per_byte(training: Tensor, validation: Tensor) -> float:
    """The cross-entropy of validation counts `(..., 256)` under the frequencies of training counts, each plus one."""
    counts = training.double() + 1.0
    bits = -(counts / counts.sum(-1, keepdim=True)).log2()
    return ((bits * validation).sum() / validation.sum()).item()


def open_corpus(
    paths: Sequence[str],
    length: int,
    cache: Path,
    *,
    tokenizer: Tokenizer | None = None,
    ranks: Ranks | None = None,
    progress: Callable[..., Any] | None = None,
    apart: Sequence[Path] = (),
) -> Corpus:
    """The corpus of some files and folders, checked to be long enough for sequences of `length`.

    Its token files are in `cache`; if they are missing, the first rank writes them while the others wait. `progress` is
    tqdm, or works like it. Files in `cache`, in the folders `apart` and in the folders of other runs are not read.
    """
    ranks = Ranks(device=torch.device("cpu")) if ranks is None else ranks
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    work = _prepared(paths, tokenizer, cache.absolute(), progress, apart)
    while (written := ranks.on_first(lambda: next(work))) is None:
        pass  # ranks that wait must hear from the first one now and then
    folder, name, facts = written
    found = token_files.open_token_files(folder)
    seen = ranks.gather_objects(found is not None)
    if found is None or not all(seen):
        raise FileNotFoundError(
            f"rank {seen.index(False)} does not see the token files in {folder}: name a folder that the machines of "
            "all ranks share with --token-cache"
        )
    training, validation = len(found.training), len(found.validation)
    if tokenizer.content is not None:
        facts.append(f"{training + validation:,} tokens of {tokenizer.vocab_size:,}")
    if not found.lossless:
        facts.append("of a tokenizer that loses some of the text, which bits per byte do not count")
    source = f"{name} ({', '.join(facts)})"
    if min(training, validation) <= length:
        raise ValueError(
            f"the corpus is too short: {source} leaves {training:,} for training and {validation:,} for validation, "
            f"and a sequence takes {length + 1:,}: give more text with --data or a smaller --sequence-length"
        )
    return Corpus(found.training, found.validation, source, found.byte_pairs, found.content)


def _prepared(
    paths: Sequence[str], tokenizer: Tokenizer, cache: Path, progress: Callable[..., Any] | None, apart: Sequence[Path]
) -> Iterator[tuple[Path, str, list[str]] | None]:
    """Write token files unless they exist undamaged; yields None now and then, and last their folder and facts."""
    text = token_files.Text.of(*text_files(paths, tuple(folder.resolve() for folder in (cache, *apart))))
    folder = cache / text.fingerprint(tokenizer)
    token_files.sweep_token_files(cache)
    is_whole = token_files.open_token_files(folder) is not None
    if is_whole:
        size = sum(file.stat().st_size for file in folder.iterdir())
        try:
            yield from _in_turns(token_files.check_token_files(folder), size, "checking", progress)
        except DamagedFile as damage:
            print(f"tokens   written again, because in {folder} {damage}", flush=True)
            token_files.drop_token_files(folder)
            is_whole = False
    if not is_whole:
        yield from _in_turns(token_files.write_token_files(text, tokenizer, folder), text.bytes, "tokens", progress)
    yield folder, text.source, [f"{len(text.files):,} files", f"{text.bytes:,} bytes"]


def _in_turns(steps: Iterator[int], total: int, what: str, progress: Callable[..., Any] | None) -> Iterator[None]:
    """Take steps, each of which yields its number of bytes, and yield every few seconds."""
    until = time.monotonic() + _TURN_SECONDS
    with contextlib.ExitStack() as shown:
        bar = progress and shown.enter_context(
            progress(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)
        )
        for taken in steps:
            if bar is not None:
                bar.update(taken)
            if time.monotonic() > until:
                yield
                until = time.monotonic() + _TURN_SECONDS


def text_files(paths: Sequence[str], apart: Sequence[Path] = ()) -> tuple[list[Path], str]:
    """The text files of some files and folders, by name, and what to call them; without paths, the standard library's.

    Files in the folders `apart` are left out. A file that several paths lead to is listed once.
    """
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "test", "tests"}
        files = [file for file in _below(library, "*.py") if not skipped & set(file.relative_to(library).parts)]
        return files, "the Python standard library"
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found += [file for file in _below(path.resolve(), "*", apart) if _is_text(file)]
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"no file or folder {name}: --data takes text files and folders of them")
    if not found:
        raise FileNotFoundError(
            f"no text files in {', '.join(paths)}: hidden files, binary files and the files of runs do not count"
        )
    names: dict[str, Path] = {}
    for file in found:
        names.setdefault(os.path.realpath(file), file)
    return list(names.values()), ", ".join(paths)


def _below(top: Path, pattern: str, apart: Sequence[Path] = ()) -> list[Path]:
    """The files below a folder, by name: not hidden ones, nor what is in the folders `apart` or was made by runs.

    Links are followed. A file that is reached in several ways is given once, by its own name if it has one below `top`.
    """
    found: list[tuple[Path, Path]] = []  # where a file is, and what it is called below `top`
    seen: set[Path] = set()
    tops = [top]
    for start in tops:  # `tops` grows: links come last, so that a folder's own name is found before them
        for name, folders, files in os.walk(start):
            folder, place = Path(name), Path(os.path.realpath(name))
            made = folder != top and (holds_run(folder) or token_files.holds_token_files(folder))
            if made or place in seen or any(map(place.is_relative_to, apart)):
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(inside for inside in folders if not inside.startswith("."))
            tops += [folder / inside for inside in folders if (folder / inside).is_symlink()]
            for file in files:
                if not file.startswith(".") and fnmatchcase(file, pattern):
                    path = folder / file
                    found.append((Path(os.path.realpath(path)) if path.is_symlink() else place / file, path))
    names: dict[Path, Path] = {}
    for place, path in sorted(found, key=lambda one: (one[0] != one[1], one[1])):
        names.setdefault(place, path)
    return sorted(path for path in names.values() if path.is_file())


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" not in stream.read(4096)
    except OSError as error:
        raise OSError(f"cannot read {file}: {error.strerror}") from error


def _windows(split: token_files.Split, starts: Sequence[int], length: int, rows: int) -> Batch:
    windows = torch.stack([split.tokens[start : start + length + 1].long() for start in starts])
    tokens, following = windows[:, :-1], windows[:, 1:]
    if not rows:
        return Batch(tokens, following)
    following = following.clone()
    begins: list[list[int]] = [[] for _ in range(rows)]
    documents = split.documents

    def begins_until(place: int) -> int:
        return bisect_right(range(len(documents)), place, key=lambda number: int(documents[number : number + 1]))

    for number, start in enumerate(starts):
        # From the window's second token to the one behind it, which may be the first of another document.
        first, last = begins_until(start), begins_until(start + length)
        begun = sorted({begin - start for begin in documents[first:last].tolist()})
        following[number, [begin - 1 for begin in begun]] = NO_TARGET
        row, place = divmod(number, len(starts) // rows)
        begins[row] += [place * length + begin for begin in (0, *begun) if begin < length]
    end = windows.shape[0] // rows * length
    cu_seqlens = tuple(torch.tensor([*found, end]) for found in begins)
    return Batch(tokens.reshape(rows, end), following.view(rows, end), cu_seqlens)


def _epoch_start(number: int, tokens: int, length: int, seed: int) -> int:
    """The first token of a sequence, whose `number` counts over all epochs."""
    windows = (tokens - 1) // length
    epoch, place = divmod(number, windows)
    spare = tokens - 1 - windows * length  # each epoch leaves out other tokens
    return _mix(seed, epoch, -1) % (spare + 1) + length * permuted(place, windows, (seed, epoch))


def permuted(index: int, count: int, key: tuple[int, ...]) -> int:
    """Where a permutation of `range(count)` takes `index`. A Feistel network: a list of all places would be too long.

    >>> sorted(permuted(index, 10, (0, 1)) for index in range(10))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if not 0 <= index < count:
        raise ValueError(f"index must be from 0 to count - 1, got index={index} and count={count}")
    half = max(1, math.ceil((count - 1).bit_length() / 2))
    mask = (1 << half) - 1
    while True:  # repeat until the result is below `count`, which keeps the map one to one
        for turn in range(_ROUNDS):
            left, right = index >> half, index & mask
            index = right << half | (left ^ _mix(*key, turn, right) & mask)
        if index < count:
            return index


def _mix(*values: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")
