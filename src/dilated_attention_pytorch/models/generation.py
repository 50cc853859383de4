"""Generation, token by token: where the next logits come from, and how a token is chosen from them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dilated_attention_pytorch.core.checks import MOST_TOKENS, NOT_NEGATIVE, check_fields, check_instance, check_whole
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

Steps = Generator[Tensor, Tensor, None]
"""Yields logits `(B, vocab)`, and is sent the tokens `(B,)` that were chosen from them."""


_LOOK_EVERY = 64  # new tokens


class LanguageModel(Protocol):
    """What generation asks of a model."""

    head: nn.Linear

    def hidden(
        self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, cache: list[DilatedKVCache] | None = None
    ) -> Tensor: ...

    def new_cache(self, batch: int, *, padding: Tensor | None = None) -> list[DilatedKVCache]: ...


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
        # Without NaN, which would end the process on a GPU before `generated_tokens` can say what is wrong.
        return torch.multinomial(chances.nan_to_num(1.0), 1, generator=generator)[:, 0]


def cached_logits(model: LanguageModel, tokens: Tensor, key_padding_mask: Tensor | None, chunk: int | None) -> Steps:
    """Logits from a bounded cache, which takes the prompt in chunks."""
    if chunk is not None:
        check_whole("chunk", chunk, least=1, most=MOST_TOKENS)
    cache = model.new_cache(tokens.shape[0], padding=_left_padding(tokens, key_padding_mask))
    for piece in tokens.split(chunk or max(tokens.shape[1], 1), dim=1):
        last = model.hidden(piece, cache=cache)[:, -1]
    while True:
        chosen = yield model.head(last)
        last = model.hidden(chosen[:, None], cache=cache)[:, -1]


def recomputed_logits(model: LanguageModel, tokens: Tensor, key_padding_mask: Tensor | None) -> Steps:
    """Logits from the whole sequence every time."""
    _left_padding(tokens, key_padding_mask)
    mask = key_padding_mask
    while True:
        chosen = yield model.head(model.hidden(tokens, key_padding_mask=mask)[:, -1])
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
    """The chosen tokens, `(B,)` at a time; the model is in eval mode for as long as it computes.

    Logits that are not finite are a `FloatingPointError`: on a CPU before their token is chosen, elsewhere within 64.
    """
    ended: Tensor | None = None
    chosen: Tensor | None = None
    greatest: list[Tensor] = []  # logit of each row: NaN or infinite if one is NaN, one infinite, or all are -inf
    for number in range(max_new_tokens):
        with _evaluating(model):
            logits = next(steps) if chosen is None else steps.send(chosen)
        greatest.append(logits.amax(-1))
        # Looking at them waits for a GPU, so not for every token: for the first, then now and then, and for the last.
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
    """Raise where the logits of the last tokens, up to that of this number, cannot be drawn from."""
    broken = ~torch.stack(greatest).isfinite()  # (tokens, B)
    if broken.any():
        token, row = broken.nonzero()[0].tolist()
        raise FloatingPointError(
            f"the model gives logits that are not finite, at new token {number + 1 - len(greatest) + token + 1} of row "
            f"{row}: its weights are broken or overflow in {greatest[0].dtype}; load an earlier checkpoint, or compute "
            "in float32"
        )


class _evaluating:
    """Eval mode within the block, then every module in its own mode again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()

    def __exit__(self, *error: object) -> None:
        for module, training in self._modes:
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
