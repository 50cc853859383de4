"""Generation token by token: where the next logits come from, and how a token is chosen from them.

On a GPU the steps after the prompt are replays of a CUDA graph (`models.captured`). Then the host only launches: it
reads nothing back per token, and learns `AHEAD` tokens later that all rows have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.checks import NOT_NEGATIVE, check_fields, check_instance, check_whole
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.models.captured import evaluating, kept_cache, step_for

if TYPE_CHECKING:
    from dilated_attention_pytorch.models.config import ModelConfig
    from dilated_attention_pytorch.models.longnet import LongNetLM
    from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

Steps = Generator[Tensor, Tensor, None]
"""Yields logits `(B, vocab)` and is sent the tokens `(B,)` that were chosen from them."""

_LOOK_EVERY = 64  # new tokens
AHEAD = 16  # tokens that a GPU may compute before the host knows whether all rows have ended
_PROMPT_BYTES = 8 << 30  # of activations, while a chunk of a prompt is read


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
    cache: Sequence[DilatedKVCache] | None


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
        """A token for each row of `(B, vocab)` logits; does not wait for the device."""
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
        # The draw of torch.multinomial, whose checks wait for the device: the least of exponential variables with these
        # rates is the drawn one. Without NaN, which `generated_tokens` reports; a chance of 0 never wins.
        return (chances.nan_to_num(1.0) / torch.empty_like(chances).exponential_(generator=generator)).argmax(-1)


def prompt_chunk(config: ModelConfig, batch: int, itemsize: int, most: int | None = None) -> int:
    """The number of tokens of a prompt to read at once: `most`, or as many as take `_PROMPT_BYTES` of activations.

    Where it spans a segment it is a multiple of the longest such segment: a chunk that begins a segment does not read
    that branch's cached rows.

    >>> from dilated_attention_pytorch.models.config import ModelConfig
    >>> prompt_chunk(ModelConfig(segment_lengths=(2048, 8192), dilation_rates=(1, 4)), 1, 2, most=50_000)
    49152
    """
    if most is None:
        # Of a layer: inputs and projections of attention, float32 rotations, and thrice the feed-forward's hidden rows.
        per_token = (12 * config.d_model + 3 * config.dim_feedforward) * itemsize + 16 * config.d_model
        most = max(1, _PROMPT_BYTES // (batch * per_token))
    whole = math.lcm(*config.segment_lengths)
    unit = whole if whole <= most else max((w for w in config.segment_lengths if w <= most), default=1)
    return most // unit * unit


def cached_logits(
    model: LongNetLM,
    tokens: Tensor,
    key_padding_mask: Tensor | None,
    chunk: int | None,
    cache: Sequence[DilatedKVCache] | None,
) -> Steps:
    """Logits from a bounded cache, which reads the prompt in chunks; from one that this makes if `cache` is None."""
    padding = left_padding(tokens, key_padding_mask)
    with kept_cache(model, tokens, padding, cache) as cache:
        *_, last = model.read(tokens, cache, chunk=chunk)
        with evaluating(model):
            logits = model.logits(last)
        step = step_for(model, cache, tokens)
        while True:
            chosen = yield logits
            logits = step(model, chosen[:, None], cache)[:, -1]


def recomputed_logits(model: LongNetLM, tokens: Tensor, key_padding_mask: Tensor | None) -> Steps:
    """Logits computed from the whole sequence at every token."""
    left_padding(tokens, key_padding_mask)
    mask = key_padding_mask
    while True:
        with evaluating(model):
            logits = model.logits(model.hidden(tokens, key_padding_mask=mask)[:, -1])
        chosen = yield logits
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1))


class _Chosen(NamedTuple):
    """A token per row, whether all rows have ended with it (where the host can read it), and the state of the draws."""

    tokens: Tensor
    ended: Tensor
    copied: torch.cuda.Event | None
    state: Tensor | None

    @classmethod
    def of(cls, tokens: Tensor, ended: Tensor, draws: torch.Generator | None) -> _Chosen:
        flag = ended.all().to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(tokens.device).record_event() if ended.is_cuda else None
        return cls(tokens, flag, copied, None if draws is None else draws.get_state())

    def is_last(self) -> bool:
        """Waits for the device, though not for what was launched later."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.ended)


@torch.no_grad()
def generated_tokens(
    steps: Steps,
    sampling: Sampling,
    generator: torch.Generator | None,
    max_new_tokens: int,
    eos: int | None,
    ahead: int = 0,
) -> Iterator[Tensor]:
    """The chosen tokens, `(B,)` at a time.

    The last token, at which all rows have ended, may be noticed `ahead` tokens later; what was computed since is
    dropped, and its draws are taken back. Logits that are not finite raise a `FloatingPointError`: on a CPU at once, on
    a GPU within 64 tokens.
    """
    ended: Tensor | None = None
    chosen: Tensor | None = None
    greatest: list[Tensor] = []  # logit per row: not finite if one is NaN or +inf, or if all are -inf
    waiting: deque[_Chosen] = deque()
    with closing(steps):
        for number in range(max_new_tokens):
            logits = next(steps) if chosen is None else steps.send(chosen)
            greatest.append(logits.amax(-1))
            # Reading them waits for a GPU, so they are read for the first token, then every 64, and for the last.
            if logits.device.type == "cpu" or number % _LOOK_EVERY == 0 or number == max_new_tokens - 1:
                _check_finite(greatest, number)
                greatest.clear()
            chosen = sampling.choose(logits, generator)
            if eos is None:
                yield chosen
                continue
            if ended is not None:
                chosen = chosen.masked_fill(ended, eos)
            ended = chosen == eos
            draws = _draws(sampling, generator, chosen.device) if ahead else None
            waiting.append(_Chosen.of(chosen, ended, draws))
            while len(waiting) > (ahead if number < max_new_tokens - 1 else 0):
                oldest = waiting.popleft()
                yield oldest.tokens
                if oldest.is_last():
                    if looked_at := greatest[: len(greatest) - len(waiting)]:
                        _check_finite(looked_at, number - len(waiting))
                    if draws is not None and oldest.state is not None:
                        draws.set_state(oldest.state)
                    return


def _draws(sampling: Sampling, generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """The generator that draws advance, if there are any."""
    if sampling.temperature == 0:
        return None
    if generator is not None:
        return generator
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


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


def left_padding(tokens: Tensor, key_padding_mask: Tensor | None) -> Tensor | None:
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
