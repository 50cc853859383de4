"""Generation token by token: where the next logits come from, and how a token is chosen from them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import MOST_TOKENS, NOT_NEGATIVE, check_fields, check_instance, check_whole
from dilated_attention_pytorch.core.spans import document_spans

if TYPE_CHECKING:
    from dilated_attention_pytorch.models.longnet import LongNetLM

Steps = Generator[Tensor, Tensor, None]
"""Yields logits `(B, vocab)` and is sent the tokens `(B,)` that were chosen from them."""

_LOOK_EVERY = 64  # new tokens


class StreamSettings(TypedDict, total=False):
    """Keywords of `LongNetLM.stream` that `generate` takes too, and passes on."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    generator: torch.Generator | None
    eos: int | None
    key_padding_mask: Tensor | None
    use_cache: bool
    chunk: int | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: temperature, then the `top_k` likeliest, then the fewest of them that reach `top_p`.

    >>> Sampling(temperature=0).choose(torch.tensor([[0.1, 0.7, 0.2]]))
    tensor([1])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, temperature=NOT_NEGATIVE, top_k={"least": 1}, top_p={"above": 0, "most": 1})

    def generator(
        self, seed: int | None, generator: torch.Generator | None, device: torch.device
    ) -> torch.Generator | None:
        if generator is not None:
            check_instance("generator", generator, torch.Generator)
        if seed is None:
            return generator
        if generator is not None:
            raise ValueError("seed and generator both say where draws come from: pass one of them")
        return torch.Generator(device).manual_seed(check_whole("seed", seed, least=-(2**63), most=2**63 - 1))

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token for each row of `(B, vocab)` logits."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = F.softmax(logits, -1)
        if self.top_p is not None and self.top_p < 1:
            falling, order = chances.sort(-1, descending=True)
            before = falling.cumsum(-1) - falling  # the likeliest token always stays
            chances = chances.scatter(-1, order, falling.masked_fill(before >= self.top_p, 0.0))
        # Without NaN, which would end the process on a GPU before `generated_tokens` can report it.
        return torch.multinomial(chances.nan_to_num(1.0), 1, generator=generator)[:, 0]


def cached_logits(model: LongNetLM, tokens: Tensor, key_padding_mask: Tensor | None, chunk: int | None) -> Steps:
    """Logits from a bounded cache, which reads the prompt in chunks of `chunk` tokens."""
    if chunk is not None:
        check_whole("chunk", chunk, least=1, most=MOST_TOKENS)
    cache = model.new_cache(tokens.shape[0], padding=_left_padding(tokens, key_padding_mask))
    for piece in tokens.split(chunk or max(tokens.shape[1], 1), dim=1):
        last = model.hidden(piece, cache=cache)[:, -1]
    while True:
        chosen = yield model.logits(last)
        last = model.hidden(chosen[:, None], cache=cache)[:, -1]


def recomputed_logits(model: LongNetLM, tokens: Tensor, key_padding_mask: Tensor | None) -> Steps:
    """Logits computed from the whole sequence at every token."""
    _left_padding(tokens, key_padding_mask)
    mask = key_padding_mask
    while True:
        chosen = yield model.logits(model.hidden(tokens, key_padding_mask=mask)[:, -1])
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1))


@torch.no_grad()
def generated_tokens(
    model: nn.Module,
    steps: Steps,
    sampling: Sampling,
    generator: torch.Generator | None,
    max_new_tokens: int,
    eos: int | None,
) -> Iterator[Tensor]:
    """The chosen tokens, `(B,)` at a time; the model is in eval mode while it computes.

    Logits that are not finite raise a `FloatingPointError`: on a CPU at once, on a GPU within 64 tokens.
    """
    ended: Tensor | None = None
    chosen: Tensor | None = None
    greatest: list[Tensor] = []  # logit per row: not finite if one is NaN or +inf, or if all are -inf
    for number in range(max_new_tokens):
        with _evaluating(model):
            logits = next(steps) if chosen is None else steps.send(chosen)
        greatest.append(logits.amax(-1))
        # Reading them waits for a GPU, so they are read for the first token, then every 64, and for the last.
        if logits.device.type == "cpu" or number % _LOOK_EVERY == 0 or number == max_new_tokens - 1:
            _check_finite(greatest, number)
            greatest.clear()
        chosen = sampling.choose(logits, generator)
        if eos is not None:
            if ended is not None:
                chosen = chosen.masked_fill(ended, eos)
            ended = chosen == eos
        yield chosen
        if ended is not None and bool(ended.all()):
            if greatest:
                _check_finite(greatest, number)
            return


def _check_finite(greatest: list[Tensor], number: int) -> None:
    """Raise if the logits of one of the last tokens, up to token `number`, are not finite."""
    broken = ~torch.stack(greatest).isfinite()  # (tokens, B)
    if broken.any():
        token, row = broken.nonzero()[0].tolist()
        raise FloatingPointError(
            f"the model gives logits that are not finite, at new token {number + 1 - len(greatest) + token + 1} of row "
            f"{row}: its weights are broken or overflow in {greatest[0].dtype}; load an earlier checkpoint, or compute "
            "in float32"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within the block; afterwards every module is in its earlier mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _left_padding(tokens: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"a prompt is (batch, tokens) with at least one token, got {tuple(tokens.shape)}")
    spans = document_spans(*tokens.shape, key_padding_mask=key_padding_mask)
    if spans is None:
        return None
    wrong = (spans[:, 1] != tokens.shape[1]) | (spans[:, 0] == spans[:, 1])
    if wrong.any():
        raise ValueError(
            f"row {int(wrong.int().argmax())} of the prompt is padded on the right or empty: generation continues at "
            "the end of every row, so pad on the left"
        )
    return spans[:, 0]
