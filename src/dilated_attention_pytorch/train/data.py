"""Text as bytes: reading a corpus, splitting it, and drawing batches that depend on (seed, step) alone."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# One block in twenty is held out; blocks are spread over the corpus, so that both splits are alike.
_HELD_OUT = 20
_BLOCK = 1 << 16
_COUNTED = 1 << 24  # pairs at a time


@dataclass(frozen=True)
class Corpus:
    """Two disjoint splits of a text, as 1-D uint8 tensors."""

    training: Tensor
    validation: Tensor
    source: str

    def unigram_bits(self) -> float:
        """Bits per byte of the validation split under the training split's byte frequencies: the model to beat."""
        counts = torch.bincount(self.training.int(), minlength=256).double() + 1.0
        bits = -(counts / counts.sum()).log2()
        return bits[self.validation.int()].mean().item()

    def bigram_bits(self) -> float:
        """Bits per byte of the validation split under the training split's counts of byte pairs, each one higher."""
        counts = torch.ones(256 * 256, dtype=torch.float64)
        for start in range(0, len(self.training) - 1, _COUNTED):
            piece = self.training[start : start + _COUNTED + 1].int()
            counts += torch.bincount(piece[:-1] * 256 + piece[1:], minlength=256 * 256)
        counts = counts.view(256, 256)  # by the byte before
        bits = -(counts / counts.sum(1, keepdim=True)).log2()
        held_out = self.validation.int()
        return bits[held_out[:-1], held_out[1:]].mean().item()

    def training_batch(self, batch_size: int, length: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Random windows and their next bytes, `(batch, length)` each; the same for the same seed and step."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - length, (batch_size,), generator=generator)
        return _windows(self.training, starts, length)

    def validation_batches(self, batch_size: int, length: int, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same evenly spread windows at every call."""
        starts = torch.linspace(0, len(self.validation) - length - 1, batch_size * batches, dtype=torch.float64).long()
        for chunk in starts.split(batch_size):
            yield _windows(self.validation, chunk, length)


def read_corpus(paths: Sequence[str], length: int) -> Corpus:
    """The corpus of some files and folders, checked to be long enough for sequences of `length`."""
    files, source = _files(paths)
    texts = []
    for file in files:
        try:
            texts.append(file.read_bytes())
        except OSError as error:
            raise OSError(f"cannot read {file}: {error.strerror}") from error
    text = b"\n".join(texts)
    block = max(1, min(_BLOCK, len(text) // (2 * _HELD_OUT)))
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    for index, start in enumerate(range(0, len(text), block)):
        splits[index % _HELD_OUT == _HELD_OUT - 1].append(text[start : start + block])
    training, validation = (b"".join(split) for split in splits)
    if min(len(training), len(validation)) <= length:
        raise ValueError(
            f"the corpus is too short: {len(text):,} bytes in {len(files)} files of {source} leave {len(training):,} "
            f"for training and {len(validation):,} for validation, and a sequence takes {length + 1:,}: "
            "give more text with --data or a smaller --sequence-length"
        )
    return Corpus(_as_tensor(training), _as_tensor(validation), f"{source} ({len(files):,} files, {len(text):,} bytes)")


def _files(paths: Sequence[str]) -> tuple[list[Path], str]:
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        apart = {"site-packages", "test", "tests"}
        files = [file for file in _below(library, "*.py") if not apart & set(file.relative_to(library).parts)]
        return files, "the Python standard library"
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found += [file for file in _below(path, "*") if _is_text(file)]
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"no file or folder {name}: --data takes text files and folders of them")
    return found, ", ".join(paths)


def _below(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob(pattern)
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" not in stream.read(4096)
    except OSError as error:
        raise OSError(f"cannot read {file}: {error.strerror}") from error


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
