"""Text to batches: what is read, how it is cut and tokenized, in which order it comes, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models import ModelConfig
from dilated_attention_pytorch.train import TrainConfig, data, loop, token_files
from dilated_attention_pytorch.train.checkpoint import list_checkpoints
from dilated_attention_pytorch.train.data import NO_TARGET, Corpus, open_corpus, permuted
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.step import Stepper
from dilated_attention_pytorch.train.token_files import Split
from dilated_attention_pytorch.train.tokenizer import ByteTokenizer, FileTokenizer, read_tokenizer, saved_tokenizer

from .test_ranks import launch, losses

FLAGS = """
    --d-model 16 --num-heads 2 --num-layers 1 --segment-lengths 8 16 --dilation-rates 1 2 --sequence-length 16
    --batch-size 2 --warmup-steps 2 --validate-every 4 --checkpoint-every 2 --sample-bytes 4 --device cpu
""".split()  # noqa: SIM905
WORDS = "the quick brown fox jumps over the lazy dög. ".split()  # noqa: SIM905
needs_tokenizers = pytest.mark.skipif(
    find_spec("tokenizers") is None, reason="needs tokenizers: pip install '.[tokenizers]'"
)


def read_corpus(paths: list[str], length: int, tokenizer=None) -> Corpus:
    """`open_corpus` with token files that nobody else sees: open files outlive their names."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return open_corpus(paths, length, Path(folder), tokenizer=tokenizer)


@pytest.fixture
def documents(tmp_path) -> Path:
    """A folder of files of very different lengths, an empty one among them."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number, words in enumerate([400, 3, 0, 40, 1, 900, 12, 7, 250, 30] * 2):
        lines = [" ".join(WORDS[(i + number) % 9 :]) for i in range(words // 5 + (words > 0))]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def tokenizer_file(tmp_path) -> Path:
    return write_tokenizer(tmp_path / "words.json")


def write_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    """A byte-level BPE tokenizer, which gives every text back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [" ".join(WORDS * 20)], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet)
    )
    made.save(str(path))
    return path


def run(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def corpus_of(tokens: list[int] | torch.Tensor, documents: list[int]) -> Corpus:
    split = Split(torch.as_tensor(tokens), torch.tensor(documents), len(tokens))
    return Corpus(split, split, "made up", torch.ones(2, 257, 256), "made up")


@pytest.mark.parametrize("kind", ["missing", "empty", "short", "unreadable", "none", "tokens"])
def test_a_corpus_that_cannot_serve_is_refused(tmp_path, capsys, kind, monkeypatch) -> None:
    path = tmp_path / "data.txt"
    expected = {
        "missing": "no file or folder",
        "empty": r"too short: .* \(1 files, 0 bytes\) leaves 0",
        "short": "give more text with --data or a smaller --sequence-length",
        "unreadable": "cannot read .*data.txt: Permission denied",
        "none": "no text files in",
        "tokens": "cannot write token files into .*No space left on device; make room, or name another folder",
    }[kind]
    if kind == "none":
        path.mkdir()
        (path / "x.bin").write_bytes(b"\0")
    elif kind != "missing":
        path.write_text({"empty": "", "short": "short text"}.get(kind, "text " * 1000))
    if kind == "unreadable":
        real = Path.open  # root reads everything, so the refusal is staged

        def refuse(self, *arguments, **settings):
            if self == path:
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(self, *arguments, **settings)

        monkeypatch.setattr(Path, "open", refuse)
    if kind == "tokens":

        def full_disk(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(token_files.os, "fsync", full_disk)
    assert run("--data", path, "--out", tmp_path / "run", *FLAGS) == 1
    assert re.search(expected, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
    if kind in ("tokens", "unreadable"):
        assert list((tmp_path / "token-cache").iterdir()) == []


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 100)
    text = token_files.Text.of([tmp_path / "a.txt"], "a")
    for content, change in (("more text " * 200, "longer"), ("less", "shorter")):
        (tmp_path / "a.txt").write_text(content)
        with pytest.raises(OSError, match=f"became {change} while it was read"):
            list(token_files.write_token_files(text, ByteTokenizer(), tmp_path / "cache" / "a"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_folders_are_read_whole_but_for_hidden_and_binary_files(tmp_path) -> None:
    for name, content in {"a.txt": b"aa" * 500, "sub/b.md": b"bb" * 500, ".hidden": b"cc", "x.bin": b"\0d"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus([str(tmp_path)], 16)
    assert set(torch.cat([corpus.training.tokens[:], corpus.validation.tokens[:]]).tolist()) == set(b"ab\n")
    assert len(corpus.training) + len(corpus.validation) == 2001


def test_linked_folders_are_read_and_nothing_twice(tmp_path) -> None:
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    for file in (top / "own" / "a.txt", elsewhere / "deep" / "b.txt", elsewhere / ".git" / "c.txt"):
        file.parent.mkdir(parents=True)
        file.write_text("some text")
    links = {
        "linked": elsewhere,
        "again": elsewhere / "deep",
        "another-own": top / "own",
        "file.txt": top / "own" / "a.txt",
        "own/up": top,
        "itself": top / "itself",
        "nowhere": tmp_path / "nowhere",
        ".hidden": tmp_path,
    }
    for name, target in links.items():
        (top / name).symlink_to(target)
    (elsewhere / "back").symlink_to(top)
    (elsewhere / "deep" / "around").symlink_to(elsewhere)
    files, _ = data.text_files([str(top)])
    assert files == [top / "again" / "b.txt", top / "own" / "a.txt"]
    files, _ = data.text_files([str(top)], apart=[elsewhere])
    assert files == [top / "own" / "a.txt"]
    files, _ = data.text_files([str(top / "own" / "a.txt"), str(elsewhere), str(top)])
    assert files == [top / "own" / "a.txt", elsewhere / "deep" / "b.txt"]


def test_the_default_corpus_is_the_standard_library(tmp_path) -> None:
    corpus = open_corpus([], 512, tmp_path)
    assert corpus.source.startswith("the Python standard library")
    assert corpus.training.bytes == len(corpus.training) > 1_000_000
    assert 3.0 < corpus.bigram_bits() < corpus.unigram_bits() < 6.0
    # The splits of the bytes in blocks of 64 KiB, of which every twentieth is held out.
    files, _ = data.text_files([])
    text = b"\n".join(file.read_bytes() for file in files)
    blocks = [text[start : start + 65536] for start in range(0, len(text), 65536)]
    for split, held_out in ((corpus.training, False), (corpus.validation, True)):
        expected = b"".join(block for number, block in enumerate(blocks) if (number % 20 == 19) == held_out)
        assert split.tokens[:].numpy().tobytes() == expected
    counts = torch.bincount(corpus.training.tokens[:].int(), minlength=256) + 1.0
    bits = -(counts / counts.sum()).log2()[corpus.validation.tokens[:].int()]
    assert corpus.unigram_bits() == pytest.approx(bits.mean().item(), rel=1e-5)
    before, after = corpus.training.tokens[:-1].int(), corpus.training.tokens[1:].int()
    pairs = torch.bincount(before * 256 + after, minlength=65536).view(256, 256) + 1.0
    bits = -(pairs / pairs.sum(1, keepdim=True)).log2()[
        corpus.validation.tokens[:-1].int(), corpus.validation.tokens[1:].int()
    ]
    assert corpus.bigram_bits() == pytest.approx(bits.mean().item(), rel=1e-5)


def test_batches_depend_on_seed_and_step_alone(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("".join(map(chr, range(32, 127))) * 50)
    corpus = read_corpus([str(tmp_path / "a.txt")], 32)
    for order in ("random", "epochs"):
        one, again = (corpus.training_batch(2, 32, 0, 5, order=order).tokens for _ in range(2))
        assert torch.equal(one, again)
        assert not torch.equal(one, corpus.training_batch(2, 32, 0, 6, order=order).tokens)
        batch = corpus.training_batch(2, 32, 1, 5, order=order)
        assert not torch.equal(one, batch.tokens)
        assert torch.equal(batch.tokens[:, 1:], batch.following[:, :-1])


def test_an_epoch_has_every_window_once() -> None:
    corpus = corpus_of(torch.arange(1_000), [0])
    windows, B = (1_000 - 1) // 37, 3
    epochs = []
    for epoch in range(3):
        taken = [divmod(number, B) for number in range(epoch * windows, (epoch + 1) * windows)]
        starts = [
            corpus.training_batch(B, 37, 7, step + 1, order="epochs").tokens[row, 0].item() for step, row in taken
        ]
        assert [start - min(starts) for start in sorted(starts)] == [37 * index for index in range(windows)]
        assert max(starts) + 37 < 1_000
        epochs.append(starts)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("count", [1, 2, 3, 16, 1_000])
def test_the_permutation_is_one_and_depends_on_its_key(count) -> None:
    found = [permuted(index, count, (0, 1)) for index in range(count)]
    assert sorted(found) == list(range(count))
    if count == 1_000:
        assert found != [permuted(index, count, (0, 2)) for index in range(count)]
        moved = sum(abs(place - index) for index, place in enumerate(found)) / count
        assert 300 < moved < 370  # a third, as of a random one


@pytest.mark.parametrize(("index", "count"), [(0, 0), (3, 3), (-1, 3), (0, -1)])
def test_an_index_outside_a_permutation_is_refused(index, count) -> None:
    with pytest.raises(ValueError, match="index must be from 0 to count - 1"):
        permuted(index, count, (0, 1))


def test_validation_windows_fit_a_split_that_float32_cannot_count() -> None:
    corpus = corpus_of(torch.zeros(16_777_219, dtype=torch.uint8), [0])
    assert {batch.tokens.shape for batch in corpus.validation_batches(8, 16, 8)} == {torch.Size([8, 16])}


def test_token_files_are_written_once_and_again_when_the_text_changes(tmp_path, monkeypatch) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("one text " * 500)
    written = []
    real = token_files.write_token_files
    monkeypatch.setattr(token_files, "write_token_files", lambda *given: written.append(given[2]) or real(*given))

    def read() -> Corpus:
        return open_corpus([str(path)], 16, cache)

    first = read()
    assert read().content == first.content
    assert len(written) == 1
    os.utime(path, ns=(1, 1))
    assert read().content == first.content
    assert len(written) == 2
    path.write_text("two text " * 500)
    assert read().content != first.content
    assert len(written) == 3
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink):
        damage(written[-1] / "training.tokens.bin")
        assert len(read().training) == len(first.training)
    damage(written[-1] / "summary.json")
    read()
    assert len(written) == 6
    assert first.training.tokens[:8].tolist() == list(b"one text")  # an open file outlives its name


def test_a_run_and_its_token_files_are_no_text(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 500)
    contents = set()
    for _ in range(2):
        corpus = open_corpus([str(tmp_path)], 16, tmp_path / "cache", apart=[tmp_path / "run"])
        contents.add(corpus.content)
        corpus.remember(tmp_path / "corpus", resuming=False)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "corpus").rename(tmp_path / "run" / "corpus.json")
    assert len(contents) == 1


def test_other_runs_and_their_token_files_are_no_text_wherever_they_are(tmp_path, monkeypatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "a.txt").write_text("some text " * 500)
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    for number, out in enumerate(["runs/one", "../here/runs/two", tmp_path / "link" / "three", "elsewhere/four"]):
        assert run("--data", ".", "--out", out, "--steps", 2, *FLAGS) == 0
        noted = json.loads((Path(out) / "corpus.json").read_text())
        assert noted["training"]["bytes"] + noted["validation"]["bytes"] == 5_000, f"run {number + 1} read more"
    # The others have begun since.
    assert run("--resume", "runs/one", "--steps", 3) == 0
    assert run("--resume", tmp_path / "link" / "runs" / "two", "--steps", 3) == 0


def test_a_run_that_is_overtaken_does_not_take_token_files_away(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 500)
    text, folder = token_files.Text.of([tmp_path / "a.txt"], "a"), tmp_path / "cache" / "a"
    one, other = (token_files.write_token_files(text, ByteTokenizer(), folder) for _ in range(2))
    next(one)
    next(other)
    look, waiting, published = token_files.open_token_files, [other], []

    def overtaken(where):
        found = look(where)
        if found is None and waiting:
            list(waiting.pop())
            published.append(folder.stat().st_ino)
        return found

    monkeypatch.setattr(token_files, "open_token_files", overtaken)
    list(one)
    published.append(folder.stat().st_ino)
    for late in waiting:
        list(late)
    assert {folder.stat().st_ino} == set(published)
    assert list(folder.parent.iterdir()) == [folder]


def test_writing_goes_on_in_turns_and_other_ranks_must_see_the_result(tmp_path, monkeypatch) -> None:
    class Blind(Ranks):
        """As if a second rank did not find the folder."""

        def on_first(self, act):
            turns.append(act)
            return super().on_first(act)

        def gather_objects(self, value):
            return [value, False]

    turns: list[object] = []
    monkeypatch.setattr(data, "_TURN_SECONDS", -1.0)
    (tmp_path / "a.txt").write_text("some text " * 500)
    with pytest.raises(FileNotFoundError, match=r"rank 1 does not see the token files in .*--token-cache"):
        open_corpus([str(tmp_path / "a.txt")], 16, tmp_path / "cache", ranks=Blind(device=torch.device("cpu")))
    assert len(turns) > 2


def test_an_order_is_one_of_two() -> None:
    assert [TrainConfig(pack=pack).settled_order for pack in (False, True)] == ["random", "epochs"]
    assert dataclasses.replace(TrainConfig(), pack=True).settled_order == "epochs"
    assert TrainConfig(pack=True, order="random").settled_order == "random"
    with pytest.raises(ValueError, match="order must be one of random, epochs; got 'sorted'"):
        TrainConfig(order="sorted")
    with pytest.raises(ValueError, match="without a tokenizer, each byte is a token: vocab_size must be 256"):
        TrainConfig(model=ModelConfig(vocab_size=300))


def test_what_a_killed_run_left_of_token_files_is_swept(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 500)
    cache = tmp_path / "cache"
    for name, age in ((".old.1.partial", 2.0), (".new.1.partial", 0.0)):
        (cache / name).mkdir(parents=True)
        then = token_files.time.time() - age * token_files._STALE
        os.utime(cache / name, (then, then))
    open_corpus([str(tmp_path / "a.txt")], 16, cache)
    assert [path.name for path in cache.glob(".*")] == [".new.1.partial"]


def test_a_text_is_never_read_whole(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 256)) * 4_000)
    monkeypatch.setattr(token_files, "_PIECE", 1_000)
    monkeypatch.setattr(token_files, "_LOOK_AHEAD", 10)
    text = token_files.Text.of([tmp_path / "a.txt"], "a")
    pieces = list(token_files._pieces(text, ByteTokenizer()))
    assert max(len(piece.text) for piece in pieces) == 1_000
    assert b"".join(piece.text for piece in pieces) == (tmp_path / "a.txt").read_bytes()


def test_long_texts_have_longer_blocks() -> None:
    def block(size: int) -> int:
        return token_files.Text((Path("a"),), (size,), (0,), "a").block

    assert [block(size) for size in (0, 400, 12_603_023, 1 << 30, 1 << 40)] == [1, 10, 1 << 16, 1 << 16, 1 << 26]


@pytest.mark.parametrize("vocab_size", [256, 257, 65_536, 65_537])
def test_tokens_are_stored_in_the_smallest_type(tmp_path, vocab_size) -> None:
    class Wide(ByteTokenizer):
        def encode_pieces(self, pieces):
            return [[vocab_size - 256 + byte for byte in piece] for piece in pieces]

        def decode(self, tokens):
            return bytes(token - vocab_size + 256 for token in tokens).decode()

    tokenizer = Wide()
    tokenizer.vocab_size = vocab_size
    (tmp_path / "a.txt").write_text("some text " * 500)
    corpus = open_corpus([str(tmp_path / "a.txt")], 16, tmp_path / "cache", tokenizer=tokenizer)
    assert corpus.training.tokens[:].dtype.itemsize == (1 if vocab_size <= 256 else 2 if vocab_size <= 65_536 else 4)
    tokens = corpus.training_batch(2, 16, 0, 1).tokens - (vocab_size - 256)
    assert bytes(tokens[0].tolist()) in b"some text " * 10


def test_packed_rows_do_not_cross_documents() -> None:
    begins = [0, 5, 6, 6, 20, 41, 44, 60]
    corpus = corpus_of(torch.arange(64) * 3, begins)
    plain = corpus.training_batch(6, 10, 0, 1, order="random")
    packed = corpus.training_batch(6, 10, 0, 1, order="random", rows=2)
    assert torch.equal(packed.tokens, plain.tokens.reshape(2, 30))
    assert plain.lengths(0, "cpu") == {}
    for row in range(2):
        position = packed.tokens[row] // 3
        starts = [0, *(i for i in range(1, 30) if i % 10 == 0 or position[i].item() in begins), 30]
        assert packed.lengths(row, "cpu")["cu_seqlens"].tolist() == starts
        follows = [p + 1 not in begins for p in position.tolist()]
        expected = torch.where(torch.tensor(follows), (position + 1) * 3, NO_TARGET)
        assert torch.equal(packed.following[row], expected)
    assert packed.targets == (packed.following >= 0).sum() < plain.targets == 60


def test_the_loss_of_packed_documents_is_that_of_each_alone() -> None:
    torch.manual_seed(0)
    model = LongNetLM(d_model=16, num_heads=2, num_layers=2, segment_lengths=[4, 16], dilation_rates=[1, 2])
    begins = [0, 5, 6, 20, 41, 44, 60]
    corpus = corpus_of(torch.randint(256, (64,)), begins)
    batch = corpus.training_batch(4, 12, 0, 1, rows=1)
    cuts = batch.lengths(0, "cpu")["cu_seqlens"].tolist()
    total = 0.0
    for first, last in pairwise(cuts):
        logits = model(batch.tokens[:, first:last])[0]
        total += F.cross_entropy(logits, batch.following[0, first:last], reduction="sum", ignore_index=NO_TARGET).item()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters()), TrainConfig(pack=True), Ranks(device=torch.device("cpu"))
    )
    assert stepper.validate([batch]) == pytest.approx(total / batch.targets, rel=1e-5)


def test_documents_are_files_but_for_held_out_blocks(documents) -> None:
    corpus = read_corpus([str(documents)], 16)
    found = []
    for split in (corpus.training, corpus.validation):
        cuts = [*split.documents[:].tolist(), len(split)]
        found += [bytes(split.tokens[first:last].tolist()) for first, last in pairwise(cuts)]
    files = [file.read_bytes() + b"\n" for file in sorted(documents.iterdir())]
    files[-1] = files[-1][:-1]
    assert sum(map(len, found)) == sum(map(len, files))
    assert all(any(part in file for file in files) for part in found)
    cut = set(files) - set(found)
    assert 0 < len(cut) <= 4  # two blocks are held out, each within a file or two
    assert b"\n" in found


def test_a_packed_run_resumes_exactly_and_a_changed_text_is_refused(tmp_path, documents, capsys) -> None:
    flags = ("--data", documents, "--pack", "--token-cache", tmp_path / "elsewhere", *FLAGS)
    for name in ("whole", "parts"):
        assert run("--out", tmp_path / name, "--steps", 4, *flags) == 0
    assert not (tmp_path / "token-cache").exists()
    config = TrainConfig.from_json(tmp_path / "parts" / "config.json")
    assert (config.pack, config.settled_order) == (True, "epochs")
    newest = list_checkpoints(tmp_path / "parts")[-1]
    newest.rename(tmp_path / "gone")
    assert run("--resume", tmp_path / "parts", "--token-cache", tmp_path / "third") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    (documents / "00.txt").write_text("another text")
    assert run("--resume", tmp_path / "parts", "--steps", 6) == 1
    assert "is not what the run began with: restore it, or start a new run" in capsys.readouterr().err
    assert run("--resume", tmp_path / "parts", "--steps", 6, "--order", "random") == 1
    assert "--order cannot change" in capsys.readouterr().err


@needs_tokenizers
def test_a_run_with_a_tokenizer_counts_bytes_and_speaks_text(tmp_path, documents, tokenizer_file, capsys) -> None:
    out = tmp_path / "run"
    flags = ("--data", documents, "--tokenizer", tokenizer_file, *FLAGS)
    assert run("--out", out, "--steps", 4, "--pack", *flags) == 0
    printed = capsys.readouterr()
    assert f"tokens of {FileTokenizer(tokenizer_file).vocab_size}" in printed.out
    assert "tokens:" in printed.err  # the progress of the token files
    noted = json.loads((out / "corpus.json").read_text())
    per_byte = noted["training"]["tokens"] / noted["training"]["bytes"]
    assert 0.1 < per_byte < 0.9
    for record in metrics(out):
        assert record["bits"] == pytest.approx(record["loss"] / torch.tensor(2.0).log().item() * per_byte)
    plain = read_corpus([str(documents)], 16)
    corpus = read_corpus([str(documents)], 16, tokenizer=read_tokenizer(tokenizer_file))
    assert corpus.content == noted["content"]
    # Cut at the same blocks, but for where words end.
    assert corpus.unigram_bits() == pytest.approx(plain.unigram_bits(), rel=0.05)
    assert corpus.training.bytes + corpus.validation.bytes == plain.training.bytes + plain.validation.bytes
    for folder in (out, list_checkpoints(out)[-1]):
        assert (folder / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    (sample,) = (out / "samples").iterdir()
    assert sample.read_text(encoding="utf-8").startswith("def ")

    # Resumed with its own copy, for the file is gone; refused with another.
    other = tokenizer_file.with_name("other.json")
    tokenizer_file.rename(other)
    assert run("--resume", out, "--steps", 6) == 0
    assert main(["generate", str(out), "--prompt", "the lazy dög", "--max-new-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the lazy dög")
    write_tokenizer(tokenizer_file, 280)
    assert run("--resume", out, "--steps", 8) == 1
    assert "is not the tokenizer that the run began with" in capsys.readouterr().err
    assert run("--out", out, "--auto-resume", "--pack", "--steps", 8, *flags) == 1
    assert "holds a run with other settings" in capsys.readouterr().err
    tokenizer_file.unlink()
    write_tokenizer(out / "tokenizer.json", 280)
    assert run("--resume", out, "--steps", 8) == 1
    assert "the model in" in (error := capsys.readouterr().err)
    assert "put the tokenizer.json there that it was trained with" in error
    (list_checkpoints(out)[-1] / "tokenizer.json").unlink()
    assert main(["generate", str(out), "--prompt", "x"]) == 1
    assert "tokenizer.json, and bytes have 256" in capsys.readouterr().err


@needs_tokenizers
@pytest.mark.parametrize("damage", ["missing", "not JSON", "truncated", "empty vocabulary", "not UTF-8", "vocab_size"])
def test_a_wrong_tokenizer_is_refused(tmp_path, documents, tokenizer_file, capsys, damage) -> None:
    expected = {
        "missing": "cannot read the tokenizer .*: No such file",
        "not JSON": "is not a tokenizer, or is damaged",
        "truncated": "is not a tokenizer, or is damaged",
        "empty vocabulary": "has an empty vocabulary",
        "not UTF-8": "03.txt is not UTF-8 .* convert the file, or leave --tokenizer out",
    }
    if damage == "vocab_size":
        config = TrainConfig(data=(str(documents),), tokenizer=str(tokenizer_file), sequence_length=16)
        with pytest.raises(ValueError, match="the model's vocab_size is 256: they must be the same"):
            loop.train(config, tmp_path / "run")
        return
    if damage == "missing":
        tokenizer_file.unlink()
    elif damage == "not UTF-8":
        (documents / "03.txt").write_bytes("dög".encode("latin-1") * 50)
    else:
        from tokenizers import Tokenizer, models

        whole = tokenizer_file.read_text()
        empty = Tokenizer(models.BPE()).to_str()
        texts = {"not JSON": "no", "truncated": whole[: len(whole) // 2], "empty vocabulary": empty}
        tokenizer_file.write_text(texts[damage])
    assert run("--data", documents, "--tokenizer", tokenizer_file, "--out", tmp_path / "run", *FLAGS) == 1
    assert re.search(expected[damage], capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@needs_tokenizers
def test_pieces_of_a_text_give_the_text_back(tmp_path, tokenizer_file, monkeypatch) -> None:
    tokenizer = FileTokenizer(tokenizer_file)
    texts = ["dög läuft\n\n  und\tspringt   weiter\n" * 30, "ö" * 500, "€uro " * 200, "\n" * 300]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(token_files, "_PIECE", 50)
    monkeypatch.setattr(token_files, "_LOOK_AHEAD", 20)
    files = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    pieces = list(token_files._pieces(token_files.Text.of(files, "some"), tokenizer))
    assert b"".join(piece.text for piece in pieces).decode() == "\n".join(texts)
    assert len(pieces) > 40
    tokens = tokenizer.encode_pieces([piece.text for piece in pieces])
    assert "".join(map(tokenizer.decode, tokens)) == "\n".join(texts)
    assert read_corpus([str(path) for path in files], 16, tokenizer=tokenizer).source.endswith("tokens of 289)")


@needs_tokenizers
def test_a_tokenizer_that_loses_text_is_said_to(tmp_path, documents) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "fox": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(tmp_path / "words.json"))
    tokenizer = FileTokenizer(tmp_path / "words.json")
    assert tokenizer.encode("a fox and a fox") == [0, 1, 0, 0, 1]  # neither cut nor padded, as the file asks
    assert "of a tokenizer that loses some of the text" in read_corpus([str(documents)], 16, tokenizer=tokenizer).source


@needs_tokenizers
@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_streamed_text_is_the_decoded_text(tmp_path, tokenizer_file, kind) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else FileTokenizer(tokenizer_file)
    whole = tokenizer.encode("the lazy dög costs 5 € ")
    for tokens in (whole, whole[:-2]):  # the second breaks off within a character
        stream = tokenizer.stream()
        assert "".join(map(stream.step, tokens)) + stream.end() == tokenizer.decode(tokens)


def test_a_model_without_its_tokenizer_is_refused(tmp_path) -> None:
    assert saved_tokenizer(tmp_path, 256).decode([104, 105]) == "hi"
    with pytest.raises(ValueError, match=r"the model in .* has 300 tokens, and there is no"):
        saved_tokenizer(tmp_path, 300)


@needs_tokenizers
def test_ranks_share_packed_batches_and_token_files(tmp_path, documents, tokenizer_file) -> None:
    flags = ["train", "--data", documents, "--tokenizer", tokenizer_file, "--pack", "--steps", "4", *FLAGS]
    flags = [str(flag) for flag in flags]
    assert main([*flags, "--out", str(tmp_path / "alone" / "run")]) == 0
    assert main([*flags, "--batch-size", "4", "--out", str(tmp_path / "alone" / "four")]) == 0
    output = launch(2, "pack", tmp_path, flags)
    for name, like in (("data", "run"), ("sequence", "run"), ("micro", "four")):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone" / like), rel=1e-5)
        checkpoint = list_checkpoints(tmp_path / name)[-1]
        assert (checkpoint / "tokenizer.json").read_bytes() == (tmp_path / name / "tokenizer.json").read_bytes()
    assert len(list((tmp_path / "token-cache").iterdir())) == 1
    assert output.count("cannot read the tokenizer") == 2  # every rank says so


def test_damaged_token_files_are_written_again_and_the_file_is_named(tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("some text " * 500)
    corpus = open_corpus([str(tmp_path / "a.txt")], 16, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert "checksums.txt" in names
    for name in names:
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1, *whole[1:]]))
        again = open_corpus([str(tmp_path / "a.txt")], 16, tmp_path / "cache")
        assert path.read_bytes() == whole
        assert again.content == corpus.content
        told = f"tokens   written again, because in {folder} {name} is broken"
        assert (told in capsys.readouterr().out) or name == "summary.json"  # which is not read at all
    (folder / "checksums.txt").unlink()
    open_corpus([str(tmp_path / "a.txt")], 16, tmp_path / "cache")
    assert "checksums.txt is missing" in capsys.readouterr().out


def test_a_token_file_that_becomes_shorter_ends_the_run_after_a_save(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    again = ("--data", tmp_path / "a.txt", "--steps", 6, *FLAGS, "--checkpoint-every", 100)
    assert run(*again, "--out", tmp_path / "whole") == 0
    real = Stepper.step

    def step_and_cut(*given):
        if given[2] == 3:
            for path in (tmp_path / "token-cache").glob("*/*.tokens.bin"):
                os.truncate(path, 10)
        return real(*given)

    monkeypatch.setattr(Stepper, "step", step_and_cut)
    assert run(*again, "--out", tmp_path / "cut") == 1
    assert "training.tokens.bin became shorter while it was in use" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "cut")] == ["step-00000003"]
    monkeypatch.undo()
    assert run("--resume", tmp_path / "cut") == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_numbers_of_a_file_are_those_in_it(tmp_path) -> None:
    (tmp_path / "numbers").write_bytes(torch.arange(100, dtype=torch.int64).numpy().tobytes())
    numbers = token_files.FileNumbers(tmp_path / "numbers", torch.int64, 100)
    assert (len(numbers), numbers[:].tolist(), numbers[90:200].tolist()) == (100, [*range(100)], [*range(90, 100)])
    assert numbers[5:5].tolist() == []
    with pytest.raises(IndexError, match="read in slices of step 1"):
        numbers[0:9:2]
    with pytest.raises(ValueError, match="should hold 99 numbers"):
        token_files.FileNumbers(tmp_path / "numbers", torch.int64, 99)


def test_the_default_folder_of_token_files_is_of_one_user_alone(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    cache = tmp_path / "token-cache"
    assert run("--data", tmp_path / "a.txt", "--out", tmp_path / "one", "--steps", 1, *FLAGS) == 0
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o770)
    assert run("--data", tmp_path / "a.txt", "--out", tmp_path / "two", "--steps", 1, *FLAGS) == 1
    assert "cannot be trusted, because it can be written by other users" in capsys.readouterr().err
    own = ("--token-cache", cache)  # named by the user
    assert run("--data", tmp_path / "a.txt", "--out", tmp_path / "two", "--steps", 1, *FLAGS, *own) == 0
    cache.chmod(0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert run("--data", tmp_path / "a.txt", "--out", tmp_path / "three", "--steps", 1, *FLAGS) == 1
    assert "cannot be trusted, because it belongs to another user" in capsys.readouterr().err
