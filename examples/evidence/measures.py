"""What is measured of a trained model: bits per byte by context and by position, and recall over a distance.

All models read the same held-out tokens. Bits per byte do not depend on the tokenizer; perplexity is per token.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.spec import ReachWarning
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.train.cross_entropy import slices
from examples.evidence.corpus import Tokens
from examples.evidence.runs import Run
from examples.recall import set_attention

_BUCKETS = 64  # of positions
_ROWS = 16_384  # whose logits exist at the same time


@dataclass(frozen=True)
class Score:
    """The nats of some tokens and their bytes, `(rows, tokens)`."""

    nats: Tensor
    bytes: Tensor

    @property
    def bits(self) -> float:
        """Per byte."""
        return (self.nats.sum() / self.bytes.sum()).item() / math.log(2.0)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats.mean().item())

    def by_position(self, length: int) -> list[float]:
        """Bits per byte by the position in sequences of `length` tokens, in equal parts of the sequence."""
        parts = min(_BUCKETS, length)
        nats, sizes = (x.reshape(-1, parts, length // parts).sum((0, 2)) for x in (self.nats, self.bytes))
        return (nats / sizes / math.log(2.0)).tolist()


def measure(model: LongNetLM, run: Run, tokens: Tokens, device: str) -> dict[str, Any]:
    """Everything about a trained model, as it goes into the record of its run."""
    scale = run.scale
    context, recalled = [], []
    for length in scale.test_lengths:
        for fitted in (False, True) if run.kind == "dilated" and length > run.length else (False,):
            with _attention(model, run, length, fitted=fitted):
                score = at_the_end(model, run, tokens, device, length)
                right = recall(model, run, tokens, device, length)
            found = {"tokens": length, "fitted": fitted}
            context.append({**found, "bits": score.bits, "perplexity": score.perplexity})
            recalled.append({**found, "right": right})
    whole = throughout(model, run, tokens, device, scale.windows)
    positions = whole.by_position(run.length)
    result = {"context": context, "recall": recalled, "validation": whole.bits, "positions": positions}
    if run.kind == "dilated" and len(run.spec().branches) > 1:
        with _attention(model, run, run.length, without_reach=True):
            score = at_the_end(model, run, tokens, device, run.length)
            cut = throughout(model, run, tokens, device, scale.windows)
        positions = cut.by_position(run.length)
        result["without_reach"] = {"bits": score.bits, "validation": cut.bits, "positions": positions}
    return result


def at_the_end(model: LongNetLM, run: Run, tokens: Tokens, device: str, length: int) -> Score:
    """The same last tokens of every held-out stretch, read in sequences of `length` tokens that end with them."""
    scored, windows = run.scale.scored, _windows(tokens, run.scale.windows)
    nats, sizes = [], []
    for some in _batches(windows, max(1, run.scale.tokens_per_step // length)):
        text = torch.stack([tokens.held_out(window)[-length - 1 :] for window in some])
        nats.append(_nats(model, run, text[:, :-1], text[:, 1:], scored, device))
        sizes.append(tokens.token_bytes[text[:, -scored:]])
    return Score(torch.cat(nats).double(), torch.cat(sizes))


def throughout(model: LongNetLM, run: Run, tokens: Tokens, device: str, windows: int) -> Score:
    """All tokens of held-out stretches, one row per stretch, read in sequences of the training length."""
    nats, sizes = [], []
    for window in _windows(tokens, windows):
        text = tokens.held_out(window)
        for rows in slices(tokens.longest, run.scale.tokens_per_step):
            part, following = text[:-1][rows].view(-1, run.length), text[1:][rows].view(-1, run.length)
            nats.append(_nats(model, run, part, following, run.length, device).flatten())
        sizes.append(tokens.token_bytes[text[1:]])
    return Score(torch.cat(nats).view(-1, tokens.longest).double(), torch.stack(sizes))


def recall(model: LongNetLM, run: Run, tokens: Tokens, device: str, length: int) -> float:
    """The share of right tokens when a passage that was planted in the first eighth of the text is repeated at its end.

    The passage has tokens of the text in random order. Only the second half of the repetition counts: the first half
    shows what is being repeated.
    """
    size = run.scale.passage
    generator = torch.Generator().manual_seed(length)
    right = total = 0
    asked = size // 2
    for window in _windows(tokens, min(16, run.scale.windows)):
        text = tokens.held_out(window)[-length:].clone()
        passage = text[torch.randint(length, (size,), generator=generator)]
        place = int(torch.randint(length // 8 - size + 1, (), generator=generator))
        text[place : place + size] = text[-size:] = passage
        logits = _finish(
            model, run, text[None, :-1], device, lambda hidden, weight: F.linear(hidden[:, -asked:], weight)
        )
        right += int((logits.argmax(-1).cpu() == text[-asked:]).sum())
        total += asked
    return right / total


def _nats(model: LongNetLM, run: Run, text: Tensor, following: Tensor, rows: int, device: str) -> Tensor:
    """The loss of the last `rows` tokens of each sequence, `(B, rows)`."""
    targets = following[:, -rows:].flatten().to(device)

    def finish(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden = hidden[:, -rows:].flatten(0, 1)
        parts = [
            F.cross_entropy(F.linear(hidden[some], weight).float(), targets[some], reduction="none")
            for some in slices(len(hidden), _ROWS)
        ]
        return torch.cat(parts).view(-1, rows)

    return _finish(model, run, text, device, finish).cpu()


def _finish(model: LongNetLM, run: Run, text: Tensor, device: str, finish: Callable[..., Tensor]) -> Tensor:
    """The result of `finish` on the final hidden states: without gradients, and not compiled for every new shape."""
    options = run.config(0, device).memory
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), options.autocast(device):
        found = model(text.to(device), finish=finish)
    model.train()
    return found


@contextmanager
def _attention(model: LongNetLM, run: Run, tokens: int, **how: bool) -> Iterator[None]:
    """Let the model read sequences of another length, or with other branches."""
    set_attention(model, lambda layer: run.attention(tokens, layer, **how))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReachWarning)  # to see less than the sequence is what is measured
        yield
    set_attention(model, lambda layer: run.attention(run.length, layer))


def _windows(tokens: Tokens, most: int) -> list[int]:
    """At most `most` of the held-out stretches, evenly spread."""
    count = min(most, len(tokens.windows))
    return [tokens.windows[len(tokens.windows) * i // count] for i in range(count)]


def _batches(windows: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(windows), size):
        yield windows[start : start + size]
