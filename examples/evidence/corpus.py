"""The corpus of the experiment: text in directory order, whole directories held out, as 16-bit tokens in small files.

A folder is tokenized once, into files that are compressed and small enough to be copied to a machine without network.
The text of a directory is one document: its files follow each other by name, so tokens far back belong to the subject.
Tables, such as fonts in C, teach a model of text nothing, and their bits say little: they are left out.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import lzma
import os
import string
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.files import write_whole
from dilated_attention_pytorch.train.data import Corpus, text_files
from dilated_attention_pytorch.train.token_files import FileNumbers, Split
from dilated_attention_pytorch.train.tokenizer import TOKENIZER, FileTokenizer

SUMMARY = "corpus.json"
_SPLITS = ("training", "held-out")
_SHARD_TOKENS = 1 << 24  # 32 MiB before compression
_HELD_OUT, _LARGEST = 20, 100  # one part in 20 of the text is held out, and no directory above one part in 100
_BYTES_PER_TOKEN = 5  # at least as many as a token has on average, to guess which directories are long enough
_SAMPLE = 1 << 26  # bytes of text that the tokenizer is trained on
# Tokens lie within these: a word with the character before it, three digits, signs with line breaks, white space.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = string.ascii_letters.encode() + bytes(range(128, 256))
_BATCH = 1 << 23  # bytes that are tokenized together
# Numbers of two bytes: LZMA then knows which byte of a number it looks at.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Tokens:
    """An opened corpus.

    `corpus` draws the training batches. `token_bytes`, `(vocabulary,)`, has the length of each token in bytes.
    `windows` are the starts of held-out stretches of `longest` tokens and one more, each within one directory.
    """

    corpus: Corpus
    token_bytes: Tensor
    windows: tuple[int, ...]
    longest: int
    facts: dict[str, Any]

    def held_out(self, window: int) -> Tensor:
        """The `longest + 1` tokens of a window."""
        return self.corpus.validation.tokens[window : window + self.longest + 1].long()


@dataclass(frozen=True)
class _Directory:
    name: str
    files: tuple[Path, ...]
    bytes: int


def write_corpus(data: Sequence[str], folder: Path, vocab_size: int, longest: int) -> None:
    """Train a tokenizer on the text of `data`, and write tokens, tokenizer and `corpus.json` into `folder`."""
    tokenizers = import_optional("tokenizers", "tokenizers", "preparing the corpus")
    files, _ = text_files(data, [folder.resolve()])
    source = _source(data)
    directories = _directories(files, data)
    held_out = _choose_held_out(directories, longest, source)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"corpus   {source}: training a tokenizer of {vocab_size:,} tokens", flush=True)
    training = [one for one in directories if one.name not in held_out]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, as_bytes])
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(_sample([file for one in training for file in one.files]), trainer)
    trained.save(str(folder / TOKENIZER))
    tokenizer = FileTokenizer(folder / TOKENIZER)
    # In a byte-level vocabulary a character of a token stands for one byte.
    lengths = {number: len(token) for token, number in trained.get_vocab().items()}
    facts: dict[str, Any] = {
        "source": source,
        "data": [os.path.abspath(path) for path in data],
        "vocab_size": vocab_size,
        "token_bytes": [lengths.get(number, 0) for number in range(vocab_size)],
        "longest": longest,
    }
    chosen = [one for one in directories if one.name in held_out]
    for split, parts in zip(_SPLITS, (training, chosen)):
        facts[split] = _write_split(parts, tokenizer, folder, split)
        print(f"corpus   {split}: {facts[split]['tokens']:,} tokens of {facts[split]['bytes']:,} bytes", flush=True)
    text = json.dumps(facts) + "\n"
    write_whole(folder / SUMMARY, lambda partial: partial.write_text(text))


def open_corpus(folder: Path, longest: int, tokens_per_step: int) -> Tokens:
    """The corpus in `folder`, decompressed where that is not done yet, and checked to be long enough."""
    facts = json.loads((folder / SUMMARY).read_text())
    splits = []
    for name in _SPLITS:
        fact = facts[name]
        path = folder / f"{name}.bin"
        if not path.is_file() or path.stat().st_size != 2 * fact["tokens"]:
            _decompress(folder, fact["shards"], path)
        numbers = FileNumbers(path, torch.uint16, fact["tokens"])
        begins = torch.tensor([0, *(one["tokens"] for one in fact["directories"])]).cumsum(0)
        splits.append(Split(numbers, begins, fact["bytes"]))
    training, held_out = splits
    windows = []
    for begin, end in held_out.documents[:].unfold(0, 2, 1).tolist():
        # From the end of the document backwards, side by side.
        windows += [end - 1 - longest * count for count in range(1, (end - 1 - begin) // longest + 1)]
    if len(training) <= tokens_per_step or not windows:
        raise ValueError(
            f"the corpus is too short: {facts['source']} has {len(training):,} tokens for training, and a step takes "
            f"{tokens_per_step:,}; {len(held_out):,} tokens are held out, in which a directory must have more than "
            f"{longest:,}: give more text with --data"
        )
    return Tokens(
        Corpus(training, held_out, facts["source"], torch.zeros(2, 257, 256), facts["training"]["sha256"]),
        torch.tensor(facts["token_bytes"]),
        tuple(sorted(windows)),
        longest,
        {key: value for key, value in facts.items() if key != "token_bytes"},
    )


def _source(data: Sequence[str]) -> str:
    """What the text is called: the same wherever it is.

    >>> _source(["/tmp/linux/fs", "/tmp/linux/drivers/scsi"])
    'linux (fs, drivers/scsi)'
    """
    if not data:
        return "the Python standard library"
    paths = [Path(os.path.abspath(path)) for path in data]
    if len(paths) == 1:
        return paths[0].name
    top = Path(os.path.commonpath(paths))
    return f"{top.name} ({', '.join(path.relative_to(top).as_posix() for path in paths)})"


def _directories(files: Sequence[Path], data: Sequence[str]) -> list[_Directory]:
    """The files in directory order. A directory is a folder directly below one of `data`, with all that is in it."""
    tops = [Path(path).resolve() for path in data if Path(path).is_dir()] or [Path(os.path.commonpath(files))]
    above = Path(os.path.commonpath([top.parent for top in tops]))

    def directory(file: Path) -> str:
        top = next((top for top in tops if file.is_relative_to(top)), None)
        if top is None:
            return str(file)
        parts = file.relative_to(top).parts
        return (top / parts[0] if len(parts) > 1 else top).relative_to(above).as_posix()

    found = ((name, tuple(some)) for name, some in groupby(files, directory))
    return [_Directory(name, some, sum(map(len, _texts(some)))) for name, some in found]


def _choose_held_out(directories: Sequence[_Directory], longest: int, source: str) -> set[str]:
    """Directories that hold a sequence of the longest length, chosen by the hash of their names."""
    total, least = sum(one.bytes for one in directories), longest * _BYTES_PER_TOKEN
    able = [one for one in directories if "/" in one.name and least < one.bytes <= max(total // _LARGEST, 4 * least)]
    chosen: set[str] = set()
    size = 0
    for one in sorted(able, key=lambda one: hashlib.sha256(one.name.encode()).digest()):
        if size < total / _HELD_OUT:
            chosen.add(one.name)
            size += one.bytes
    if not chosen or 2 * size > total:
        raise ValueError(
            f"the corpus is too short: whole directories of {source} are held out, which must have more than {least:,} "
            f"bytes ({longest:,} tokens) and be a small part of its {total:,} bytes; {len(able)} of its "
            f"{len(directories)} directories do: give more text with --data"
        )
    return chosen


def _texts(files: Sequence[Path]) -> Iterator[bytes]:
    """The text of each file with a line break after it, without tables and files that are not UTF-8."""
    for file in files:
        text = file.read_bytes() + b"\n"
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if not _is_table(text):
            yield text


def _is_table(text: bytes) -> bool:
    """Whether less than half of what is not white space are letters, among which other characters than ASCII count.

    >>> _is_table(b"{0x00, 0x7e, 0x81}, /* smile */"), _is_table("Größe 42, наконец".encode())
    (True, False)
    """
    signs = text.translate(None, string.whitespace.encode())
    others = signs.translate(None, _LETTERS)
    return 2 * len(others) > len(signs)


def _sample(files: Sequence[Path]) -> Iterator[str]:
    """Every so many-th file, so that a few megabytes stand for the whole text."""
    step = max(1, sum(file.stat().st_size for file in files) // _SAMPLE)
    for text in _texts(files[::step]):
        yield text.decode()


def _write_split(
    directories: Sequence[_Directory], tokenizer: FileTokenizer, folder: Path, name: str
) -> dict[str, Any]:
    """Write `name-000.xz` and so on; returns what they hold."""
    found = hashlib.sha256()
    counts: list[dict[str, Any]] = []
    shards: list[concurrent.futures.Future[dict[str, Any]]] = []
    waiting = array("H")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:

        def write(least: int) -> None:
            while len(waiting) > least:
                path = folder / f"{name}-{len(shards):03}.xz"
                shards.append(pool.submit(_compress, path, waiting[:_SHARD_TOKENS].tobytes()))
                del waiting[:_SHARD_TOKENS]

        for directory in directories:
            count: dict[str, Any] = {"name": directory.name, "tokens": 0, "bytes": 0}
            for batch in _batches(_texts(directory.files)):
                for text, tokens in zip(batch, tokenizer.encode_pieces(batch)):
                    found.update(text)
                    waiting.extend(tokens)
                    count["tokens"] += len(tokens)
                    count["bytes"] += len(text)
            counts.append(count)
            write(_SHARD_TOKENS)
        write(0)
        facts = {"tokens": sum(one["tokens"] for one in counts), "bytes": sum(one["bytes"] for one in counts)}
        written = [one.result() for one in shards]
    return {**facts, "sha256": found.hexdigest(), "directories": counts, "shards": written}


def _batches(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _compress(path: Path, tokens: bytes) -> dict[str, Any]:
    content = lzma.compress(tokens, lzma.FORMAT_XZ, filters=_FILTERS)
    write_whole(path, lambda partial: partial.write_bytes(content))
    return {"file": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _decompress(folder: Path, shards: Sequence[dict[str, Any]], path: Path) -> None:
    if missing := [one["file"] for one in shards if not (folder / one["file"]).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: copy them there too")

    def tokens(shard: dict[str, Any]) -> bytes:
        content = (folder / shard["file"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != shard["sha256"]:
            raise ValueError(f"{folder / shard['file']} is damaged, or of another corpus: copy it again")
        return lzma.decompress(content)

    def write(partial: Path) -> None:
        with partial.open("wb") as stream, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for content in pool.map(tokens, shards):
                stream.write(content)

    write_whole(path, write)
