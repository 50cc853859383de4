"""Text to tokens and back: bytes as they are, or a `tokenizer.json` of the Hugging Face tokenizers package."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.files import check_files

TOKENIZER = "tokenizer.json"  # its name in a run's folder and its checkpoints

# Where a long text may be cut, best first: a word, or a run of white space, should keep its tokens.
_CUTS = (re.compile(rb"\n(?=\S)"), re.compile(rb"\S(?=\s)"), re.compile(rb"(?s).(?![\x80-\xbf])"))


class ByteTokenizer:
    """Every byte is its own token.

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    """

    vocab_size = 256
    fingerprint = "bytes"  # the same for the same tokens
    content: bytes | None = None  # of the file that is saved with a run

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_pieces(self, pieces: Sequence[bytes]) -> Sequence[Sequence[int]]:
        """The tokens of each piece of a text."""
        return pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def stream(self) -> _ByteStream:
        return _ByteStream()

    def cut(self, text: bytes, least: int) -> int:
        """Where to cut a text so that at least `least` bytes, or a few more, stay together."""
        return least


class _ByteStream:
    """Tokens to text, one at a time; text comes when its characters are complete."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        """The rest, complete or not."""
        return self._decoder.decode(b"", final=True)


class FileTokenizer:
    """The tokenizer in a `tokenizer.json`. The file is read whole and is not needed afterwards."""

    def __init__(self, path: Path) -> None:
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise type(error)(f"cannot read the tokenizer {path}: {error.strerror}") from None
        tokenizers = import_optional("tokenizers", "tokenizers", f"reading {path}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path} is not a tokenizer, or is damaged ({error}): give a tokenizer.json of the tokenizers package"
            ) from None
        # A file may ask for them; both would change the text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if self.vocab_size < 1:
            raise ValueError(f"the tokenizer {path} has an empty vocabulary: train it first")
        self.fingerprint = hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_pieces(self, pieces: Sequence[bytes]) -> Sequence[Sequence[int]]:
        texts = [piece.decode() for piece in pieces]
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def stream(self) -> _FileStream:
        return _FileStream(self._tokenizer)

    def cut(self, text: bytes, least: int) -> int:
        for place in _CUTS:
            if found := place.search(text, least - 1):
                return found.end()
        return len(text)


class _FileStream:
    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=False)
        self._tokens: list[int] = []
        self._shown = ""

    def step(self, token: int) -> str:
        self._tokens.append(token)
        text = self._stream.step(self._tokenizer, token) or ""
        self._shown += text
        return text

    def end(self) -> str:
        # The library keeps what is incomplete to itself.
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        return whole[len(self._shown) :] if whole.startswith(self._shown) else ""


Tokenizer = ByteTokenizer | FileTokenizer


def read_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer in a file; that of bytes for None."""
    return ByteTokenizer() if path is None else FileTokenizer(Path(path))


def saved_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model in `folder`, a run or a checkpoint, that has `vocab_size` tokens."""
    path = folder / TOKENIZER
    check_files(folder, [TOKENIZER])
    tokenizer = read_tokenizer(path if path.is_file() else None)
    if tokenizer.vocab_size != vocab_size:
        kind = f"the tokenizer in {path} has" if tokenizer.content else f"there is no {path}, and bytes have"
        raise ValueError(
            f"the model in {folder} has {vocab_size:,} tokens, and {kind} {tokenizer.vocab_size:,}: put the "
            f"{TOKENIZER} there that it was trained with"
        )
    return tokenizer


def run_tokenizer(path: str | None, run: Path, vocab_size: int, *, resuming: bool) -> Tokenizer:
    """The tokenizer of a run: that of the file at `path`, or the run's own copy of it when the run is resumed."""
    if path is None:
        return ByteTokenizer()
    if not resuming:
        tokenizer = read_tokenizer(path)
        if tokenizer.vocab_size != vocab_size:
            raise ValueError(
                f"the tokenizer {path} has {tokenizer.vocab_size:,} tokens, and the model's vocab_size is "
                f"{vocab_size:,}: they must be the same"
            )
        return tokenizer
    if not (run / TOKENIZER).is_file():
        raise FileNotFoundError(f"{run / TOKENIZER} is gone: copy it back from one of the run's checkpoints")
    tokenizer = saved_tokenizer(run, vocab_size)
    if Path(path).is_file() and Path(path).read_bytes() != tokenizer.content:
        raise ValueError(
            f"{path} is not the tokenizer that the run began with, which is {run / TOKENIZER}: start a new run, "
            "or move the file away to continue with the run's own"
        )
    return tokenizer
