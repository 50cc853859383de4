"""`./run recall`: a model must recall, at the end of a long sequence, facts that were planted in its first half.

A small LongNet and the same model with a sliding window that costs no less take the same lessons, from short sequences
to long ones. A dilated branch shows a row only the keys on the grid of its head, one in `REPEATS`. Each question
therefore occupies `REPEATS` adjacent rows: one of them is on the grid of the fact, and the last one, which answers,
sees that row in the dense segment at the end. The first lesson plants each fact `REPEATS` times, so that all grids
learn to find facts; later lessons plant each fact once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.pattern import visible_pairs
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.measuring import machine
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.block_sparse import BlockSparseDilatedAttention
from dilated_attention_pytorch.nn.transformer import DilatedTransformerEncoderLayer
from dilated_attention_pytorch.pages import plots
from dilated_attention_pytorch.pages.page import figures, marked, table, write_html
from dilated_attention_pytorch.tools.command import whole_number

REPEATS = 4  # the largest dilation rate, and the number of heads
LAYERS = 2  # one finds the fact, the next passes it to the row that answers
SHORTEST = 64
LONGNET, WINDOW = "LongNet", "sliding window"
_RATES = (1, 2, REPEATS)
_LEARNED, _RECENT = 0.98, 100  # a lesson ends when this share of the recent answers is right
_PASSED = 0.95  # the share of right answers in an examination that counts as recall
_MOST_STEPS = 1500
_WARMUP = 30
_PLENTY = 256  # answers in a step
# On a CPU, small enough to learn within minutes on two cores; a GPU takes larger batches.
_ON_A_CPU: dict[str, Any] = {"d_model": 64, "learning_rate": 5e-3, "tokens_per_step": 4096}
_ON_A_GPU: dict[str, Any] = {"d_model": 128, "learning_rate": 3e-3, "tokens_per_step": 524_288}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Random filler with `facts` tokens in its first half, each of which binds a key to a value; then `questions`.

    A question is a key, repeated on `REPEATS` rows. The answer, on the last of these rows, is the fact with that key:
    one of `values` tokens, so a model that sees no fact is right once in `values` times.
    """

    fillers: int = 32
    keys: int = 8
    values: int = 16
    facts: int = 6
    questions: int = 4

    @property
    def vocab_size(self) -> int:
        return self.fillers + self.keys * self.values + self.keys

    @property
    def asked_rows(self) -> int:
        """The number of rows at the end that hold questions."""
        return self.questions * REPEATS

    def batch(self, tokens: int, sequences: int, seed: int, copies: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """The text, `(sequences, tokens)`; the facts asked for and their first places, `(sequences, questions)`."""
        generator = torch.Generator().manual_seed(seed)

        def distinct(choices: int, count: int) -> Tensor:
            # The largest of random numbers are at random places, all different.
            return torch.rand(sequences, choices, generator=generator).topk(count).indices

        text = torch.randint(self.fillers, (sequences, tokens), generator=generator)
        places = distinct(tokens // 2 // copies, self.facts) * copies
        keys = distinct(self.keys, self.facts)
        values = torch.randint(self.values, (sequences, self.facts), generator=generator)
        facts = self.fillers + keys * self.values + values
        for copy in range(copies):
            text.scatter_(1, places + copy, facts)
        asked = distinct(self.facts, self.questions)
        questions = self.fillers + self.keys * self.values + keys.gather(1, asked)
        text[:, -self.asked_rows :] = questions.repeat_interleave(REPEATS, dim=1)
        return text, facts.gather(1, asked), places.gather(1, asked)


@dataclass(frozen=True)
class Lesson:
    """Sequences of `tokens` tokens with every fact planted on `copies` adjacent rows."""

    tokens: int
    copies: int = 1


def lessons(targets: Sequence[int]) -> list[Lesson]:
    """First the shortest length with `REPEATS` copies; then lengths that grow fourfold up to the targets.

    >>> [lesson.tokens for lesson in lessons([32768, 131072])]
    [64, 64, 256, 1024, 4096, 16384, 32768, 131072]
    """
    below = []
    length = SHORTEST
    while length < min(targets):
        below.append(length)
        length *= 4
    return [Lesson(SHORTEST, REPEATS), *map(Lesson, [*below, *sorted(targets)])]


def longnet_spec(tokens: int) -> DilatedSpec:
    """Three branches: dense neighbourhoods, eight times as far at rate 2, everything at rate `REPEATS`."""
    near = max(SHORTEST // REPEATS, tokens // 64)
    lengths = [near, min(8 * near, tokens), tokens]
    return DilatedSpec.of(lengths, _RATES)


def longnet_attention(tokens: int) -> DilatedAttention:
    spec = longnet_spec(tokens)
    return DilatedAttention(spec.segment_lengths, spec.dilation_rates)


def window_attention(tokens: int) -> BlockSparseDilatedAttention:
    """A sliding window in tiles: the narrowest one that costs no less than LongNet.

    It sees all of the shortest sequences, so it can learn the task there. Where it fails, its reach is too short.
    """
    return sliding_window(tokens, *_window(tokens))


def sliding_window(tokens: int, block: int, before: int) -> BlockSparseDilatedAttention:
    """Attention in which a row sees its own tile of `block` tokens and the `before` tiles before it."""
    return BlockSparseDilatedAttention([tokens], [1], sparse_config=window_tiles(block, before))


def window_tiles(block: int, before: int) -> SparsePatternConfig:
    """The tiles of a sliding window; of a causal one, only those before a row's own count."""
    return SparsePatternConfig("local_window", 1.0, block, local_window_size=max(1, 2 * before * block))


def narrowest_window(spec: DilatedSpec, tokens: int, heads: int, block: int, least: int = 0) -> int:
    """The number of tiles before its own, at least `least`, that a row must see to cost no less than `spec`."""
    wanted = pairs_per_head(spec, tokens, heads)
    return next(m for m in range(least, tokens // block + 1) if window_pairs(tokens, block, m) >= wanted)


def _window(tokens: int) -> tuple[int, int]:
    """The size of a tile, and the number of tiles before its own that a row sees."""
    block = max(16, tokens // 1024)
    return block, narrowest_window(longnet_spec(tokens), tokens, REPEATS, block, SHORTEST // block)


def window_pairs(tokens: int, block: int, before: int) -> int:
    """(query, key) pairs of one head."""
    tiles = tokens // block
    return tiles * block * (block + 1) // 2 + sum(min(tile, before) for tile in range(tiles)) * block * block


def pairs_per_head(spec: DilatedSpec, tokens: int, heads: int) -> int:
    """(query, key) pairs per head, the mean over heads rounded up: their grids start at different rows."""
    pairs = [
        visible_pairs(branch, offset, tokens, is_causal=True)
        for branch, row in zip(spec.branches, spec.offsets(heads))
        for offset in row
    ]
    return math.ceil(sum(pairs) / heads)


def keys_per_row(name: str, tokens: int) -> float:
    """The mean number of keys that a row of one head sees."""
    is_longnet = name == LONGNET
    pairs = (
        pairs_per_head(longnet_spec(tokens), tokens, REPEATS) if is_longnet else window_pairs(tokens, *_window(tokens))
    )
    return pairs / tokens


def reach(name: str, tokens: int) -> int:
    """The farthest token that a row can depend on through all layers, counted back from the row."""
    block, before = _window(tokens)
    return tokens if name == LONGNET else min(tokens, LAYERS * (before + 1) * block)


def set_attention(model: LongNetLM, make: Callable[[int], DilatedAttention]) -> None:
    """Replace the attention of each layer by that for its number; the weights, those of the projections, stay."""
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, DilatedTransformerEncoderLayer)
        layer.self_attn.attention = make(number)


ATTENTIONS: dict[str, Callable[[int], DilatedAttention]] = {LONGNET: longnet_attention, WINDOW: window_attention}


@dataclass(frozen=True)
class Result:
    """How well a model answers after the lesson of a length."""

    model: str
    tokens: int
    accuracy: float
    answers: int
    steps: int  # since the first lesson
    seconds: float
    keys_per_row: float
    reach: int


class Pupil:
    """A model with one kind of attention. The same seed gives the same weights and sequences."""

    def __init__(self, name: str, task: Task, device: str, d_model: int, learning_rate: float, seed: int) -> None:
        self.name, self.task, self.device, self.seed = name, task, device, seed
        self.steps = 0
        self._learning_rate = learning_rate
        spec = longnet_spec(SHORTEST)
        config = ModelConfig(
            vocab_size=task.vocab_size,
            d_model=d_model,
            num_heads=REPEATS,
            num_layers=LAYERS,
            num_decoder_layers=0,
            segment_lengths=spec.segment_lengths,
            dilation_rates=spec.dilation_rates,
            positions="none",  # facts are found by content, not by place
        )
        torch.manual_seed(seed)
        self.model = LongNetLM(config).to(device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device == "cuda"
        )

    def attend(self, tokens: int) -> None:
        """Switch to the attention for that length; the weights stay."""
        set_attention(self.model, lambda _: ATTENTIONS[self.name](tokens))

    def step(self, lesson: Lesson, sequences: int) -> tuple[float, float]:
        """Train one step; return the loss and the share of right answers."""
        self.steps += 1
        text, answers, _ = self.task.batch(lesson.tokens, sequences, self._seed(self.steps), lesson.copies)
        # Batches of long sequences are small, and gradients from few answers are noisy.
        noise = min(1.0, answers.numel() / _PLENTY) ** 0.5
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * noise * min(1.0, self.steps / _WARMUP)
        logits = self._logits(text)
        # All rows of a question learn the answer: the last one reads it from the others.
        wanted = answers.to(self.device).repeat_interleave(REPEATS, dim=1)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item(), self._right(logits, answers).float().mean().item()

    @torch.no_grad()
    def examine(self, tokens: int, sequences: int, least: int) -> tuple[float, int]:
        """The share of right answers to at least `least` questions on new sequences, and their number."""
        right: list[Tensor] = []
        while sum(part.numel() for part in right) < least:
            text, answers, _ = self.task.batch(tokens, sequences, self._seed(-1 - len(right)))
            right.append(self._right(self._logits(text), answers).flatten())
        found = torch.cat(right)
        return found.float().mean().item(), found.numel()

    def _seed(self, step: int) -> int:
        return self.seed * 1_000_003 + (1 << 32) + step

    def _logits(self, text: Tensor) -> Tensor:
        """The logits of the rows that hold questions, `(sequences, asked_rows, vocabulary)`."""
        rows = self.task.asked_rows
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(text.to(self.device), finish=lambda hidden, weight: F.linear(hidden[:, -rows:], weight))
        return logits.float()

    def _right(self, logits: Tensor, answers: Tensor) -> Tensor:
        said = logits[:, REPEATS - 1 :: REPEATS].argmax(-1)  # (sequences, questions)
        return said == answers.to(self.device)


def teach(
    pupil: Pupil, targets: Sequence[int], seconds: float, tokens_per_step: int, record: Callable[[dict[str, Any]], None]
) -> list[Result]:
    """Train lesson by lesson: each until it is learned, or has taken half of the time left (the last: all of it)."""
    results = []
    began = time.perf_counter()
    course = lessons(targets)
    for number, lesson in enumerate(course, 1):
        pupil.attend(lesson.tokens)
        sequences = max(1, min(256, tokens_per_step // lesson.tokens))
        recent: deque[float] = deque(maxlen=max(10, _RECENT // (sequences * pupil.task.questions)))
        end = seconds if number == len(course) else (time.perf_counter() - began + seconds) / 2
        for _ in range(_MOST_STEPS):
            loss, accuracy = pupil.step(lesson, sequences)
            recent.append(accuracy)
            elapsed = time.perf_counter() - began
            learned = len(recent) == recent.maxlen and sum(recent) / len(recent) >= _LEARNED
            record(
                {
                    "model": pupil.name,
                    **asdict(lesson),
                    "step": pupil.steps,
                    "seconds": elapsed,
                    "loss": loss,
                    "accuracy": accuracy,
                }
            )
            if learned or elapsed > end:
                break
        if lesson.tokens in targets and lesson.copies == 1:
            accuracy, answers = pupil.examine(lesson.tokens, sequences, least=256)
            results.append(
                Result(
                    pupil.name,
                    lesson.tokens,
                    accuracy,
                    answers,
                    pupil.steps,
                    time.perf_counter() - began,
                    keys_per_row(pupil.name, lesson.tokens),
                    reach(pupil.name, lesson.tokens),
                )
            )
    return results


def run_recall(
    device: str,
    targets: Sequence[int],
    *,
    minutes: float = 4.0,
    seed: int = 0,
    out: Path | None = None,
    d_model: int | None = None,
    learning_rate: float | None = None,
    tokens_per_step: int | None = None,
    task: Task | None = None,
) -> list[Result]:
    """Train both models for `minutes` in total, print a table, and write `recall.jsonl` and `recall.html` to `out`."""
    task = Task() if task is None else task
    for tokens in targets:
        if tokens < 2 * SHORTEST or tokens & (tokens - 1):
            raise ValueError(f"a length must be a power of two, at least {2 * SHORTEST}, got {tokens}")
    if minutes <= 0:
        raise ValueError(f"minutes must be above 0, got {minutes}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and PyTorch finds none: leave it out, or pass --device cpu")
    usual = _ON_A_GPU if device == "cuda" else _ON_A_CPU
    given = {"d_model": d_model, "learning_rate": learning_rate, "tokens_per_step": tokens_per_step}
    settings = usual | {name: value for name, value in given.items() if value is not None}
    records: list[dict[str, Any]] = []
    results: list[Result] = []
    for name in ATTENTIONS:
        pupil = Pupil(name, task, device, settings["d_model"], settings["learning_rate"], seed)
        share = 60 * minutes / len(ATTENTIONS)
        results += teach(pupil, targets, share, settings["tokens_per_step"], _Narrator(records))
    rows = [_cells(result) for result in results]
    for row in [_HEAD, *rows]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, _widths([_HEAD, *rows]))))
    for result in results:
        if result.accuracy < _PASSED:
            print(_why_not_learned(result, task))
    if out is not None:
        head = {"machine": machine(device), "task": asdict(task), "settings": settings | {"seed": seed}}
        _write(out, head, records, results, task, rows)
        print(out / "recall.html")
    return results


_HEAD = ["model", "tokens", "accuracy", "answers", "keys per row", "reach", "steps", "seconds"]


def _cells(result: Result) -> list[str]:
    return [
        result.model,
        f"{result.tokens:,}",
        f"{result.accuracy:.1%}",
        f"{result.answers:,}",
        f"{result.keys_per_row:,.0f}",
        f"{result.reach:,}",
        f"{result.steps:,}",
        f"{result.seconds:.0f}",
    ]


def _why_not_learned(result: Result, task: Task) -> str:
    words = f"{result.model} did not learn {result.tokens:,} tokens: "
    words += f"{result.accuracy:.1%} right, {1 / task.values:.1%} by chance. "
    if result.reach < result.tokens // 2:
        return words + f"It cannot: it reaches {result.reach:,} tokens back, and facts are in the first half."
    return words + "The time was too short for all lessons: give more --minutes, or shorter --tokens."


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows)]


class _Narrator:
    """Keeps every record, and prints one every five seconds."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records, self._said = records, 0.0

    def __call__(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        if record["seconds"] - self._said >= 5.0:
            self._said = record["seconds"]
            print(
                f"{record['model']}: {record['tokens']:,} tokens, step {record['step']}, {record['seconds']:.0f} s, "
                f"loss {record['loss']:.3f}, accuracy {record['accuracy']:.1%}",
                flush=True,
            )


def _write(
    out: Path,
    head: dict[str, Any],
    records: Sequence[dict[str, Any]],
    results: Sequence[Result],
    task: Task,
    rows: Sequence[Sequence[str]],
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = [head, *records, *({"result": asdict(result)} for result in results)]
    (out / "recall.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = {name: _smooth([record for record in records if record["model"] == name]) for name in ATTENTIONS}
    limits = {"by chance": 1 / task.values, "learned": _PASSED}
    drawn = [("Right answers over steps, in lessons from short to long", plots.curves(curves, "step", "right", limits))]
    for tokens in sorted({result.tokens for result in results}):
        part = {
            name: _smooth([record for record in records if (record["model"], record["tokens"]) == (name, tokens)])
            for name in ATTENTIONS
        }
        drawn.append((f"The lesson of {tokens:,} tokens", plots.curves(part, "step", "right", limits)))
    words = (
        f"{task.facts} facts, one token each, are at random places in the first half of the sequence; its last "
        f"{task.asked_rows} rows ask for {task.questions} of them. Both models have {LAYERS} layers and took the same "
        "lessons. `keys per row` is the mean over rows and heads, `reach` how far back a row can see through all "
        "layers."
    )
    about = table(["", ""], [[name, str(value)] for part in head.values() for name, value in part.items()])
    body = [f"<p>{marked(words)}</p>", table(_HEAD, rows), figures(drawn), "<h2>Task, settings, machine</h2>", about]
    write_html(out / "recall.html", "Dilated attention: recall", "Recall", body)


def _smooth(records: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Every tenth step with the mean accuracy of the last ten."""
    groups = [records[i : i + 10] for i in range(0, len(records), 10)]
    return [(group[-1]["step"], sum(one["accuracy"] for one in group) / len(group)) for group in groups]


def parser() -> argparse.ArgumentParser:
    recall = argparse.ArgumentParser(
        prog="recall",
        description="Plant facts far back in long sequences and ask for them at the end. A small LongNet and the same "
        "model with a sliding window that costs no less take the same lessons. Both are tested at the given lengths.",
    )
    recall.add_argument(
        "--tokens",
        nargs="+",
        type=whole_number,
        metavar="N",
        help="powers of two (default: 32768 131072; on a CPU 1024)",
    )
    recall.add_argument("--minutes", type=float, default=4.0, help="time limit for both models together (default: 4)")
    recall.add_argument("--seed", type=int, default=0, help="seed of the weights and sequences (default: 0)")
    recall.add_argument("--d-model", type=int, help="width of the models (default: 128; on a CPU 64)")
    recall.add_argument("--learning-rate", type=float, help="peak learning rate (default: 3e-3; on a CPU 5e-3)")
    recall.add_argument(
        "--tokens-per-step",
        "--tokens-a-step",
        type=whole_number,
        metavar="N",
        help="most tokens in a batch (default: 524288; on a CPU 4096)",
    )
    recall.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    recall.add_argument("--out", type=Path, metavar="FOLDER", help="write recall.jsonl and recall.html with the curves")
    return recall


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; the exit status is 0, or 1 after an error, which is printed."""
    arguments = vars(parser().parse_args(argv))
    device = arguments.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    tokens = arguments.pop("tokens") or ([32_768, 131_072] if device == "cuda" else [1024])
    try:
        run_recall(device, tokens, **arguments)
    except (OSError, ValueError) as error:
        print(f"recall: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
