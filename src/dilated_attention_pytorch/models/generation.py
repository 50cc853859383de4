"""Generation token by token: where the next logits come from, and how a token is chosen from them.

On a GPU the steps after the prompt are replays of a CUDA graph (`models.captured`). Then the host only launches: it
reads nothing back per token, and learns `_AHEAD` tokens later that all rows have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.checks import (
    COUNT,
    NOT_NEGATIVE,
    SIZE,
    check_fields,
    check_instance,
    check_whole,
    checked,
)
from dilated_attention_pytorch.core.spans import document_spans
from dilated_attention_pytorch.models.captured import evaluating, lend_cache, step_for
from dilated_attention_pytorch.models.weights import is_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dilated_attention_pytorch.models.config import ModelConfig
    from dilated_attention_pytorch.models.longnet import LongNetLM
    from dilated_attention_pytorch.nn.kv_cache import DilatedKVCache

Steps = Generator[Tensor, Tensor, None]
"""Yields logits `(B, vocab)` and is sent the tokens `(B,)` that were chosen from them."""

_LOOK_EVERY = 64  # new tokens
_AHEAD = 16  # tokens that a GPU may compute before the host knows whether all rows have ended
_LEAST_TEMPERATURE = 1e-30  # below it, scores would be infinite
_MOST_DRAFTED = 63  # with the token before them, as many as a cache takes in one code path
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
    draft: LongNetLM | None
    draft_tokens: int | None


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
        if seed is None:
            return generator
        if generator is not None:
            raise ValueError("seed and generator both say where draws come from: pass one of them")
        return torch.Generator(device).manual_seed(check_whole("seed", seed, least=-(2**63), most=2**63 - 1))

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token for each row of `(B, vocab)` logits; does not wait for the device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / max(self.temperature, _LEAST_TEMPERATURE)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = F.softmax(logits, -1)
        if self.top_p is not None and self.top_p < 1:
            falling, order = chances.sort(-1, descending=True)
            # The likeliest token always stays. In float64, because a GPU adds in no fixed order.
            before = falling.cumsum(-1, dtype=torch.float64) - falling
            chances = chances.scatter(-1, order, falling.masked_fill(before >= self.top_p, 0.0))
        # The draw of torch.multinomial, whose checks wait for the device: the least of exponential variables with these
        # rates is the drawn one. Without NaN, which `generated_tokens` reports; a chance of 0 never wins.
        return (chances.nan_to_num(1.0) / torch.empty_like(chances).exponential_(generator=generator)).argmax(-1)


def prompt_chunk(config: ModelConfig, batch: int, itemsize: int, most: int | None = None) -> int:
    """The number of tokens of a prompt to read at once: `most`, or as many as take `_PROMPT_BYTES` of activations.

    If that is longer than a segment, it is rounded down to a multiple of the longest such segment: a chunk that begins
    a segment does not read that branch's cached rows.

    >>> from dilated_attention_pytorch.models.config import ModelConfig
    >>> prompt_chunk(ModelConfig(segment_lengths=(2048, 8192), dilation_rates=(1, 4)), 1, 2, most=50_000)
    49152
    """
    if most is None:
        # One layer: inputs and projections of attention, float32 rotations, three times the feed-forward's hidden rows.
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
    """Logits from a bounded cache, into which the prompt is read in chunks; a new cache if `cache` is None."""
    padding = _left_padding(tokens, key_padding_mask)
    if cache is None:
        cache = lend_cache(model, tokens.shape[0], padding)
    step = step_for(model, cache, tokens)
    logits = step(model, tokens, cache)[:, -1] if tokens.shape[1] == 1 else _read(model, tokens, cache, chunk)
    while True:
        chosen = yield logits
        logits = step(model, chosen[:, None], cache)[:, -1]


def _read(model: LongNetLM, tokens: Tensor, cache: Sequence[DilatedKVCache], chunk: int | None) -> Tensor:
    """The logits `(B, vocab)` after a prompt."""
    *_, last = model.read(tokens, cache, chunk=chunk)
    with evaluating(model):
        return model.logits(last)


def drafted_logits(
    model: LongNetLM,
    draft: LongNetLM,
    count: int,
    tokens: Tensor,
    key_padding_mask: Tensor | None,
    chunk: int | None,
) -> Steps:
    """The logits of `cached_logits`, computed at once for `count` tokens that a smaller model has guessed.

    Guesses up to the first that is not the chosen token are right; both caches forget the rest. A batch goes on while
    the guesses of all its rows are right.
    """
    padding = _left_padding(tokens, key_padding_mask)
    cache, own = (lend_cache(one, tokens.shape[0], padding, rewindable=count) for one in (model, draft))
    for _ in draft.read(tokens, own, chunk=chunk):
        pass
    chosen = yield _read(model, tokens, cache, chunk)
    verify = step_for(model, cache, tokens, count + 1)
    guess = {m: step_for(draft, own, tokens, m) for m in (1, 2)}
    unread = chosen[:, None]  # the tokens that the draft has not read
    while True:
        guessed = [chosen]
        for _ in range(count):
            guessed.append(guess[unread.shape[1]](draft, unread, own)[:, -1].argmax(-1))
            unread = guessed[-1][:, None]
        block = torch.stack(guessed, 1)  # (B, count + 1)
        logits = verify(model, block, cache)
        for i in range(count + 1):
            chosen = yield logits[:, i]
            if i == count or not torch.equal(chosen, block[:, i + 1]):
                break
        for layer in cache:
            layer.take_back(count - i)
        for layer in own:  # it has read all of the block but the last
            layer.take_back(max(count - 1 - i, 0))
        unread = chosen[:, None] if i < count else torch.stack([block[:, count], chosen], 1)


def recomputed_logits(model: LongNetLM, tokens: Tensor, key_padding_mask: Tensor | None) -> Steps:
    """Logits computed from the whole sequence at every token."""
    _left_padding(tokens, key_padding_mask)
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
    greatest: list[Tensor] = []  # the largest logit per row: not finite if one is NaN or +inf, or if all are -inf
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
            f"the model's logits are not finite at new token {number + 1 - len(greatest) + token + 1} of row "
            f"{row}: its weights are broken or overflow in {greatest[0].dtype}; load an earlier checkpoint, or compute "
            "in float32"
        )


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


def _check_draft(
    model: LongNetLM, draft: LongNetLM, count: int, *, use_cache: bool, cache: Sequence[DilatedKVCache] | None
) -> None:
    check_instance("draft", draft, type(model))
    check_whole("draft_tokens", count, least=1, most=_MOST_DRAFTED)
    if not use_cache or cache is not None:
        raise ValueError("draft needs two caches of its own: leave out use_cache=False and cache=")
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"draft and model must have the same vocabulary, got {draft.config.vocab_size} and "
            f"{model.config.vocab_size} tokens"
        )


class Generates:
    """The methods of a `LongNetLM` that work token by token."""

    @checked(max_new_tokens=SIZE)
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        on_tokens: Callable[[Tensor], object] | None = None,
        **settings: Unpack[StreamSettings],
    ) -> Tensor:
        """`(B, N + new)`: the prompt and at most `max_new_tokens` tokens, fewer if all rows end before.

        Args:
            tokens: `(B, N)`, the prompt.
            on_tokens: called with the new tokens, `(B,)`, as soon as they are chosen; `stream` iterates over them.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p: draw from the `top_k` likeliest tokens, and of these from the fewest that reach `top_p`.
            seed: seeds the draws; or pass `generator`, whose state advances.
            eos: the token that ends a row; `eos` fills the rest of the row.
            key_padding_mask: `(B, N)`, True = ignore, for prompts of several lengths, padded on the left.
            use_cache: False computes every token from the whole sequence, for comparison; the tokens are the same.
            chunk: the most tokens of the prompt to read at once, as in `read`.
            cache: a cache of `new_cache`, whose tokens the prompt continues. Afterwards it also holds the prompt and
                the new tokens except the last, with which the next prompt begins. By default, the prompt is all.
            draft: a smaller model of the same vocabulary, which guesses `draft_tokens` tokens (4) that this model then
                checks at once. The tokens are the same as without it.
        """
        new = []
        for chosen in self.stream(tokens, max_new_tokens, **settings):
            new.append(chosen)
            if on_tokens is not None:
                on_tokens(chosen)
        return torch.cat([tokens, torch.stack(new, dim=1)], dim=1) if new else tokens

    @checked(max_new_tokens=SIZE, chunk=COUNT)
    def stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        eos: int | None = None,
        key_padding_mask: Tensor | None = None,
        use_cache: bool = True,
        chunk: int | None = None,
        cache: Sequence[DilatedKVCache] | None = None,
        draft: LongNetLM | None = None,
        draft_tokens: int | None = None,
    ) -> Iterator[Tensor]:
        """The tokens that `generate` appends, `(B,)` at a time, as they are chosen.

        On a GPU they are computed ahead of the host: with `eos`, up to 16 tokens before the one that you get.
        """
        model = cast("LongNetLM", self)
        model._check_tokens(tokens)
        if is_sharded(model):
            raise ValueError(
                "generate runs in one process, and ranks shard this model's parameters: save it with save_pretrained, "
                "and generate with the model that from_pretrained loads"
            )
        if eos is not None:
            check_whole("eos", eos, least=0, most=model.config.vocab_size - 1)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        draw = sampling.generator(seed, generator, tokens.device)
        if cache is not None:
            model._check_cache(cache, tokens)
            if key_padding_mask is not None:
                raise ValueError("a cache knows the padding of its rows: pass no key_padding_mask with it")
        if draft is not None:
            count = 4 if draft_tokens is None else draft_tokens
            _check_draft(model, draft, count, use_cache=use_cache, cache=cache)
            steps = drafted_logits(model, draft, count, tokens, key_padding_mask, chunk)
        elif draft_tokens is not None:
            raise ValueError(f"draft_tokens={draft_tokens!r} has no effect without a draft model: pass it as draft=")
        elif use_cache:
            steps = cached_logits(model, tokens, key_padding_mask, chunk, cache)
        elif chunk is not None or cache is not None:
            name = "cache" if chunk is None else "chunk"
            raise ValueError(f"{name} has no effect with use_cache=False: leave one of them out")
        else:
            steps = recomputed_logits(model, tokens, key_padding_mask)
        # A cache that is used afterwards holds no token that was computed after the end.
        ahead = _AHEAD if tokens.is_cuda and cache is None else 0
        return generated_tokens(steps, sampling, draw, max_new_tokens, eos, ahead)

    @checked(chunk=COUNT)
    @torch.no_grad()
    def read(self, tokens: Tensor, cache: Sequence[DilatedKVCache], *, chunk: int | None = None) -> Iterator[Tensor]:
        """Read a prompt `(B, N)` into a cache of `new_cache`; yields the last hidden states `(B, d_model)` per chunk.

        A chunk has at most `chunk` tokens, by default as many as take 8 GiB of activations. Chunks end where segments
        end, if they are long enough.

        >>> from dilated_attention_pytorch import LongNetLM
        >>> model = LongNetLM(d_model=32, num_heads=4, num_layers=2, segment_lengths=(16, 128), dilation_rates=(1, 4))
        >>> cache = model.new_cache(batch=1)
        >>> [int(cache[0].lengths) for _ in model.read(torch.randint(256, (1, 300)), cache, chunk=140)]
        [128, 256, 300]
        """
        model = cast("LongNetLM", self)
        _left_padding(tokens, None)
        model._check_cache(cache, tokens)
        size = prompt_chunk(model.config, tokens.shape[0], cache[0].keys.itemsize, chunk)
        first = 0
        held = max(cache[0].known_lengths or cache[0].lengths.tolist())  # of the row that is padded least
        while first < tokens.shape[1]:
            piece = tokens[:, first : first + size - max(held, 0) % size]
            with evaluating(model):
                last = model.hidden(piece, cache=cache)[:, -1].clone()  # a view would keep those of all tokens
            first, held = first + piece.shape[1], held + piece.shape[1]
            yield last
