"""The suite `curves`: loss curves of one model on real text, with fused and compiled pieces and with plain ones.

All variants start from the same weights and read the same sequences in the same order. The text is split into words,
white space and punctuation, of which the most frequent are tokens, and the others bytes.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.suite import Options, Record, Suite, Table, Verdict, by_machine, check_names
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.pages.plots import curves, thinned
from dilated_attention_pytorch.train.data import text_files
from dilated_attention_pytorch.train.memory import MemoryOptions, loss, make_optimizer, prepare, set_learning_rate
from dilated_attention_pytorch.train.presets import text_model

FUSED, PLAIN, EXACT = "fused and compiled", "plain", "float32"
VARIANTS = {
    FUSED: MemoryOptions(precision="bf16", loss_chunk=16_384, compile=True),
    PLAIN: MemoryOptions(precision="bf16"),  # layers as they are written, and the loss of float32 logits
    EXACT: MemoryOptions(),
}
STEPS = 300
PICTURE = "pictures/losses.svg"
WITHIN = 0.005  # of the plain loss
_LAST = 20  # steps whose mean is the final loss
_BATCH, _TOKENS = {"cuda": 2, "cpu": 2}, {"cuda": 8192, "cpu": 64}
_TINY = ModelConfig(d_model=32, num_heads=2, num_layers=2, max_length=64, vocab_size=512)
_RATE, _WARM_UP = 6e-4, 30
_PIECE = re.compile(rb"[A-Za-z0-9_]+|[ \t]+|\n+|[^A-Za-z0-9_\s]|\s")


def _setup(options: Options) -> list[str]:
    wanted = list(options.only or VARIANTS)
    check_names("only", wanted, VARIANTS)
    return wanted


def _measure(name: str, options: Options) -> Iterator[Record]:
    device = options.device
    batch, tokens = _BATCH[device], _TOKENS[device]
    config = text_model("125m", sequence_length=tokens) if device == "cuda" else _TINY
    memory = VARIANTS[name]
    if memory.compile and device == "cpu":
        memory = replace(memory, compile_backend="aot_eager")
    files, source = text_files(options.data)
    text = encode(b"".join(file.read_bytes() for file in files), config.vocab_size)
    if len(text) <= tokens:
        raise ValueError(f"{source} has {len(text):,} tokens, and a sequence takes {tokens + 1:,}: give more text")
    began = time.perf_counter()
    losses = train(config, memory, text, batch, tokens, STEPS, device)
    yield {
        "variant": name, "size": "125m" if device == "cuda" else "tiny", "tokens": tokens, "batch": batch,
        "steps": STEPS, "source": source, "text_tokens": len(text), "options": asdict(memory),
        "seconds": time.perf_counter() - began, "final_loss": _final(losses), "losses": losses,
    }  # fmt: skip


def encode(text: bytes, vocabulary: int) -> Tensor:
    """The tokens of a text: bytes are the first 256 of the vocabulary, and frequent pieces the others.

    >>> encode(b"ab ab b", 258).tolist()
    [256, 257, 256, 257, 98]
    """
    pieces = _PIECE.findall(text)
    frequent = [piece for piece, _ in Counter(p for p in pieces if len(p) > 1 or p == b" ").most_common()]
    known = {piece: [256 + i] for i, piece in enumerate(frequent[: vocabulary - 256])}
    return torch.tensor([token for piece in pieces for token in known.get(piece, piece)])


def train(
    config: ModelConfig, memory: MemoryOptions, text: Tensor, batch: int, tokens: int, steps: int, device: str
) -> list[float]:
    """The loss of each step, from weights and sequences that depend on nothing but these arguments' sizes."""
    torch.manual_seed(0)
    with torch.device(device):
        model = prepare(LongNetLM(config), memory)
    optimizer = make_optimizer(model, memory, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - tokens, (batch,), generator=generator).tolist()
        drawn = torch.stack([text[start : start + tokens + 1] for start in starts]).to(device)
        set_learning_rate(optimizer, _RATE * min(step / _WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps)))
        value = loss(model, drawn[:, :-1], drawn[:, 1:], memory)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.detach())
        if step % 50 == 0:
            print(f"curves: step {step} of {steps}, loss {losses[-1].item():.3f}", flush=True)
    found: list[float] = torch.stack(losses).tolist()
    if not all(map(math.isfinite, found)):
        raise FloatingPointError(f"a loss is not finite, first at step {[*map(math.isfinite, found)].index(False) + 1}")
    return found


def _final(losses: Sequence[float]) -> float:
    last = losses[-_LAST:]
    return sum(last) / len(last)


def _tables(records: Sequence[Record]) -> Iterator[Table]:
    head = ["variant", "final loss", "beside plain", "seconds", "options"]
    for machine, mine in by_machine(records):
        one = mine[-1]
        words = (
            f"{machine}; {one['size']}, {one['steps']} steps of {one['batch']} sequences of {one['tokens']:,} tokens "
            f"of {one['source']}, whose branches connect all of them. All variants start from the same weights and "
            f"read the same sequences. The final loss is the mean of the last {_LAST} steps; seconds include compiling."
        )
        table = Table("Loss curves", [words], head, picture=PICTURE if one["size"] == "125m" else "")
        found = {x["variant"]: x for x in mine}
        for x in mine:
            beside = f"{x['final_loss'] / found[PLAIN]['final_loss'] - 1:+.3%}" if PLAIN in found else ""
            options = MemoryOptions(**x["options"]).stated()
            table.rows.append([x["variant"], f"{x['final_loss']:.4f}", beside, f"{x['seconds']:.0f}", options])
        table.notes += map(str, _verdict(mine))
        drawn = {name: thinned(list(enumerate(x["losses"], 1)), 100) for name, x in found.items()}
        table.charts = [("Loss", partial(curves, drawn, "step", "nats per token"))]
        yield table


def _verdict(records: Sequence[Record]) -> Iterator[Verdict]:
    found = {x["variant"]: x["final_loss"] for x in records}
    if {FUSED, PLAIN} <= found.keys():
        apart = abs(found[FUSED] / found[PLAIN] - 1)
        yield Verdict(apart <= WITHIN, f"fused and compiled: final loss within {WITHIN:.1%} of plain; {apart:.3%}")


SUITE = Suite(
    name="curves",
    about="loss curves on real text, with fused and compiled pieces and with plain ones",
    flags=("device", "only", "data"),
    setup=_setup,
    measure=_measure,
    tables=_tables,
    verdict=_verdict,
    key=("size", "variant", "tokens", "steps"),
)
