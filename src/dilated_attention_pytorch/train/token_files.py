"""Token files: a text of any size, tokenized once into files of which a batch reads what it needs.

A folder holds two disjoint splits. Each has its tokens, in the smallest of three integer types, and the starts of
documents. Beside them are the counts of byte pairs in both, and the checksums of all files. The text is a stream that
is never read whole, and the folder gets its name when everything is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch import files
from dilated_attention_pytorch.train.tokenizer import Tokenizer

_FORMAT = 2  # of the folder and its content

# One block in twenty is held out; blocks are spread over the text, so that both splits are alike.
_HELD_OUT = 20
_BLOCK = 1 << 16
_MOST_BLOCKS = 1 << 14  # longer texts have longer blocks, and so longer documents between them

_PIECE = 1 << 16  # bytes that are tokenized together
_LOOK_AHEAD = 1 << 12  # bytes after a piece that are searched for a better end of it
_BATCH = 16  # pieces that are tokenized at a time, in parallel where the tokenizer can
_STALE = 24 * 3600.0  # seconds after which an unfinished folder is taken to be abandoned

_SPLITS = ("training", "validation")
_SUMMARY, _PAIRS = "summary.json", "byte-pairs.bin"
_START = 256  # stands for the byte before the first
_DTYPES = {"B": torch.uint8, "H": torch.uint16, "I": torch.uint32}


@dataclass(frozen=True)
class Text:
    """Files, one document each, with the sizes and times they had when they were found."""

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    times: tuple[int, ...]
    source: str

    @classmethod
    def of(cls, files: Sequence[Path], source: str) -> Text:
        try:
            found = [file.stat() for file in files]
        except OSError as error:
            raise OSError(f"cannot read {error.filename}: {error.strerror}") from error
        return cls(tuple(files), tuple(s.st_size for s in found), tuple(s.st_mtime_ns for s in found), source)

    @cached_property
    def bytes(self) -> int:
        """The bytes of all files, with a line break after each but the last."""
        return sum(self.sizes) + max(len(self.sizes) - 1, 0)

    @property
    def block(self) -> int:
        return max(1, min(_BLOCK, self.bytes // (2 * _HELD_OUT)), self.bytes // _MOST_BLOCKS)

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """The name of the token files of this text as it is now."""
        found = hashlib.sha256(repr((_FORMAT, tokenizer.fingerprint)).encode())
        for file, size, changed in zip(self.files, self.sizes, self.times):
            found.update(repr((os.fspath(file.absolute()), size, changed)).encode())
        return found.hexdigest()[:24]


class FileNumbers:
    """Whole numbers in a file, of which a slice is read when it is asked for; a file that shrinks is an `OSError`.

    The file is not mapped into memory: a process that reads a mapped file behind its new end is killed.
    """

    def __init__(self, path: Path, dtype: torch.dtype, count: int) -> None:
        if path.stat().st_size != count * dtype.itemsize:
            raise ValueError(f"{path} should hold {count} numbers of {dtype}")
        self._file, self._dtype, self._count = path.open("rb", buffering=0), dtype, count
        self._turn = threading.Lock()
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, step = place.indices(self._count)
        if step != 1:
            raise IndexError(f"numbers of a file are read in slices of step 1, got a step of {step}")
        content, size = bytearray(), (stop - start) * self._dtype.itemsize
        with self._turn:
            self._file.seek(start * self._dtype.itemsize)
            while len(content) < size:  # one read returns 2 GiB at most
                more = self._file.read(size - len(content))
                if not more:
                    raise OSError(
                        f"{self._file.name} became shorter while it was in use: it is written again at the next start"
                    )
                content += more
        return torch.frombuffer(content, dtype=self._dtype) if content else torch.empty(0, dtype=self._dtype)


@dataclass(frozen=True)
class Split:
    """Part of a corpus: its tokens, 1-D, the places where documents begin, and the bytes of its text."""

    tokens: Tensor | FileNumbers
    documents: Tensor | FileNumbers
    bytes: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens_per_byte(self) -> float:
        """The factor from bits per token to bits per byte."""
        return len(self.tokens) / max(self.bytes, 1)


class TokenFiles(NamedTuple):
    """An opened folder; `byte_pairs` is `(2, 257, 256)`: how often a byte follows another, or begins, in each split.

    `content` is the same for the same tokens and documents, wherever and whenever they were read. `lossless` says
    whether the tokenizer gives back the text, as far as that was tried.
    """

    training: Split
    validation: Split
    byte_pairs: Tensor
    content: str
    lossless: bool


def open_token_files(folder: Path) -> TokenFiles | None:
    """The token files in `folder`, or None if they are missing or incomplete."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text())
        dtype = _DTYPES[summary["typecode"]]
        training, validation = (
            Split(
                FileNumbers(_file(folder, name, "tokens"), dtype, summary[name]["tokens"]),
                FileNumbers(_file(folder, name, "documents"), torch.int64, summary[name]["documents"]),
                summary[name]["bytes"],
            )
            for name in _SPLITS
        )
        pairs = FileNumbers(folder / _PAIRS, torch.int64, 2 * (_START + 1) * 256)[:].view(2, _START + 1, 256)
        return TokenFiles(training, validation, pairs, summary["content"], summary["lossless"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(folder: Path, split: str, what: str) -> Path:
    return folder / f"{split}.{what}.bin"


def check_token_files(folder: Path) -> Iterator[int]:
    """Compare the files with their checksums, step by step: yields the bytes that each step read, raises `DamagedFile`.

    Each start does this, because damage on a disk changes neither the time nor the size of a file.
    """
    if not (folder / files.CHECKSUMS).is_file():
        raise files.DamagedFile(f"{files.CHECKSUMS} is missing")
    yield from files.checking(folder, files.read_checksums(folder / files.CHECKSUMS))


def drop_token_files(folder: Path) -> None:
    """Remove a folder in one step; runs that have its files open go on reading them."""
    dropped = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.damaged.partial")
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        folder.rename(dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can write into; refuse an existing one that others can write into."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "getuid"):  # Windows
        return folder
    found = folder.stat()
    if {found.st_uid, folder.lstat().st_uid} != {os.getuid()}:
        why = "belongs to another user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "can be written by other users"
    else:
        return folder
    raise PermissionError(
        f"the token files in {folder} cannot be trusted, because it {why}: name a folder of your own with "
        "--token-cache, or take write permission from others and delete what is in it"
    )


def holds_token_files(folder: Path) -> bool:
    """Whether a folder holds token files, whole or not."""
    return (folder / _SUMMARY).is_file() and (folder / _PAIRS).is_file()


def write_token_files(text: Text, tokenizer: Tokenizer, folder: Path) -> Iterator[int]:
    """Fill `folder`, whole or not at all, step by step: yields the bytes of text per step."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        yield from _fill(text, tokenizer, partial)
        _publish(partial, folder)
    except _CannotRead:
        raise
    except OSError as error:
        raise OSError(
            f"cannot write token files into {folder.parent}: {error.strerror or error}; make room, or name another "
            "folder with --token-cache"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _CannotRead(OSError):
    """A file of the text is at fault, not the folder that is written."""


class _Piece(NamedTuple):
    text: bytes
    at: int  # in the whole text
    file: Path
    begins: bool  # its file
    held_out: bool


def _fill(text: Text, tokenizer: Tokenizer, folder: Path) -> Iterator[int]:
    typecode = next(code for code in _DTYPES if tokenizer.vocab_size <= 1 << 8 * array(code).itemsize)
    lossless: bool | None = None
    with contextlib.ExitStack() as opened:
        writers = [_SplitWriter(opened, folder, name) for name in _SPLITS]
        pieces = _pieces(text, tokenizer)
        while batch := list(islice(pieces, _BATCH)):
            tokens = _encode(tokenizer, batch)
            if lossless is None:  # the first pieces tell
                lossless = all(
                    tokenizer.decode(found) == p.text.decode(errors="replace") for p, found in zip(batch, tokens)
                )
            for held_out, writer in enumerate(writers):
                writer.count(b"".join(piece.text for piece in batch if piece.held_out == held_out))
            for piece, found in zip(batch, tokens):
                writers[piece.held_out].add(piece, array(typecode, found))
            yield sum(len(piece.text) for piece in batch)
        hashes = [writer.finish() for writer in writers]
    pairs = torch.stack([writer.pairs for writer in writers])
    (folder / _PAIRS).write_bytes(array("q", pairs.flatten().tolist()).tobytes())
    content = hashlib.sha256(repr((typecode, hashes)).encode()).hexdigest()
    summary = {"typecode": typecode, "content": content, "lossless": lossless is not False, "text": text.source}
    summary |= {name: writer.summary for name, writer in zip(_SPLITS, writers)}
    (folder / _SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    files.write_checksums(folder / files.CHECKSUMS, files.sum_files(folder, [path.name for path in folder.iterdir()]))


def _pieces(text: Text, tokenizer: Tokenizer) -> Iterator[_Piece]:
    """The text in pieces, each of one file and, unless the tokenizer moves a cut, of one block."""
    at = 0
    for number, (file, size) in enumerate(zip(text.files, text.sizes)):
        separator = b"\n" if number + 1 < len(text.files) else b""
        begin, end, left, buffer = at, at + size + len(separator), size, b""
        try:
            with file.open("rb", buffering=0) as stream:
                while at < end:
                    stop = min((at // text.block + 1) * text.block, at + _PIECE, end)
                    missing = min(stop + _LOOK_AHEAD, end) - at - len(buffer)
                    while missing > 0 and left:
                        more = stream.read(min(missing, left))
                        if not more:
                            raise _CannotRead(f"{file} became shorter while it was read: start again when it is whole")
                        buffer, left, missing = buffer + more, left - len(more), missing - len(more)
                    if missing > 0:
                        buffer += separator
                    cut = stop - at if stop == end else tokenizer.cut(buffer, stop - at)
                    held_out = at // text.block % _HELD_OUT == _HELD_OUT - 1
                    yield _Piece(buffer[:cut], at, file, at == begin, held_out)
                    buffer, at = buffer[cut:], at + cut
                if stream.read(1):
                    raise _CannotRead(f"{file} became longer while it was read: start again when it is whole")
        except _CannotRead:
            raise
        except OSError as error:
            raise _CannotRead(f"cannot read {file}: {error.strerror}") from error


def _encode(tokenizer: Tokenizer, batch: list[_Piece]) -> Sequence[Sequence[int]]:
    try:
        return tokenizer.encode_pieces([piece.text for piece in batch])
    except UnicodeDecodeError as error:
        wrong = next(piece for piece in batch if piece.text == error.object)
        raise ValueError(
            f"{wrong.file} is not UTF-8 ({error.reason} at byte {wrong.at + error.start:,} of the corpus), and a "
            "tokenizer takes text: convert the file, or leave --tokenizer out to train on bytes"
        ) from None


class _SplitWriter:
    """Appends to the two files of a split, and counts what goes in."""

    def __init__(self, opened: contextlib.ExitStack, folder: Path, name: str) -> None:
        kinds = ("tokens", "documents")
        self._files = {kind: opened.enter_context(_file(folder, name, kind).open("wb")) for kind in kinds}
        self._hashes = {kind: hashlib.sha256() for kind in kinds}
        self._end = -1  # in the whole text, of what was added last
        self._last = _START
        self.summary = {"tokens": 0, "documents": 0, "bytes": 0}
        self.pairs = torch.zeros((_START + 1) * 256, dtype=torch.int64)

    def count(self, text: bytes) -> None:
        if not text:
            return
        following = torch.frombuffer(bytearray(text), dtype=torch.uint8).int()
        before = torch.cat([following.new_tensor([self._last]), following[:-1]])
        self.pairs += torch.bincount(before * 256 + following, minlength=len(self.pairs))
        self._last = text[-1]

    def add(self, piece: _Piece, tokens: array[int]) -> None:
        # What follows a held-out block is a document of its own: it does not follow what precedes the block.
        if piece.begins or piece.at != self._end:
            self._write("documents", array("q", [self.summary["tokens"]]))
            self.summary["documents"] += 1
        self._write("tokens", tokens)
        self._end = piece.at + len(piece.text)
        self.summary["tokens"] += len(tokens)
        self.summary["bytes"] += len(piece.text)

    def finish(self) -> list[str]:
        """Make the files survive a power cut; returns what they hold as hashes."""
        for stream in self._files.values():
            stream.flush()
            os.fsync(stream.fileno())
        return [found.hexdigest() for found in self._hashes.values()]

    def _write(self, kind: str, values: array[int]) -> None:
        written = values.tobytes()
        self._files[kind].write(written)
        self._hashes[kind].update(written)


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)  # without checking first: another run could come between
    except OSError:
        if not folder.exists():
            raise
        if open_token_files(folder) is not None:  # another run was faster
            return
        drop_token_files(folder)
        partial.rename(folder)
    files.sync_folder(folder.parent)


def sweep_token_files(cache: Path) -> None:
    """Remove what killed runs left; a running one writes to its folder all the time."""
    for partial in cache.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - max(file.stat().st_mtime for file in [partial, *partial.iterdir()]) > _STALE:
                shutil.rmtree(partial)
