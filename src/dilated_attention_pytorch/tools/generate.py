"""The command `generate`: continue a prompt, a file, or a conversation with a trained model."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from dilated_attention_pytorch.core.checks import check_whole, import_optional
from dilated_attention_pytorch.models.generation import Sampling
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.models.weights import weights_to_int8
from dilated_attention_pytorch.train.ranks import find_device
from dilated_attention_pytorch.train.run_folder import load_model
from dilated_attention_pytorch.train.tokenizer import Tokenizer, saved_tokenizer


def generate(arguments: argparse.Namespace) -> None:
    """Print how the model of a run continues a prompt; figures go to stderr."""
    device = find_device(arguments.device or "auto")
    folder, model = load_model(arguments.run, device)
    if arguments.int8:
        weights_to_int8(model)
        for layer in model.layers if device.type == "cuda" else ():
            layer.compile(fullgraph=True)
    tokenizer = saved_tokenizer(folder, model.config.vocab_size)
    given = vars(arguments)
    settings: dict[str, Any] = {name: given[name] for name in ("temperature", "top_k", "top_p") if name in given}
    Sampling(**settings)  # an error comes before the prompt is printed
    if "seed" in given:  # one source for all prompts of a conversation
        seed = check_whole("seed", given["seed"], least=-(2**63), most=2**63 - 1)
        settings["generator"] = torch.Generator(device).manual_seed(seed)
    if "chunk" in given:
        check_whole("chunk", given["chunk"], least=1)
    talk = _Talk(model, tokenizer, device, given.get("chunk"))
    prompt = _prompt(arguments)
    if prompt is not None:
        if arguments.prompt is not None:  # a file is not repeated: it may be a book
            print(prompt, end="", flush=True)
        talk.answer(prompt, arguments.max_new_tokens, settings)
    for line in _lines() if arguments.interactive else ():
        talk.answer(f"{line}\n", arguments.max_new_tokens, settings)


def _prompt(arguments: argparse.Namespace) -> str | None:
    if arguments.prompt_file is not None:
        try:
            prompt = arguments.prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{arguments.prompt_file} is not text in UTF-8: {error}") from None
    elif arguments.prompt == "-":
        prompt = "" if sys.stdin is None else sys.stdin.read()
    elif arguments.prompt is None and arguments.interactive:
        return None
    elif arguments.prompt is None:
        raise ValueError("there is nothing to continue: give --prompt, --prompt-file or --interactive")
    else:
        prompt = arguments.prompt
    if not prompt:
        raise ValueError("a prompt needs at least one character")
    return prompt


def _lines() -> Iterator[str]:
    """What the user types, until the end of input; nothing if it is closed."""
    while sys.stdin is not None:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


class _Talk:
    """A model, and the cache of all that was said so far."""

    def __init__(self, model: LongNetLM, tokenizer: Tokenizer, device: torch.device, chunk: int | None) -> None:
        self._model, self._tokenizer, self._device, self._chunk = model, tokenizer, device, chunk
        self._cache = model.new_cache(batch=1)
        self._unread: list[int] = []  # the last new token, which the cache does not hold yet
        self._bar = import_optional("tqdm", "train", "the command generate").tqdm

    def answer(self, prompt: str, most: int, settings: dict[str, Any]) -> None:
        """Print the continuation as it comes, then figures."""
        encoded = self._tokenizer.encode(prompt)
        if not encoded:
            raise ValueError("the model's tokenizer makes no token of this prompt: use another prompt")
        tokens = torch.tensor([self._unread + encoded], device=self._device)
        text = self._tokenizer.stream()
        began = time.perf_counter()
        self._read(tokens[:, :-1])
        first: float | None = None
        count = 0
        for chosen in self._model.stream(tokens[:, -1:], most, cache=self._cache, **settings):
            self._unread = chosen.tolist()
            print(text.step(self._unread[0]), end="", flush=True)
            first = time.perf_counter() if first is None else first
            count += 1
        ended = time.perf_counter()
        print(text.end())
        if first is None:
            self._unread = tokens[0, -1:].tolist()
            return
        rate = "" if count < 2 else f", then {(count - 1) / (ended - first):.1f} tokens/s"
        figures = f"{tokens.shape[1]} tokens of prompt and the first new one in {first - began:.3f} s{rate}"
        print(f"{count} tokens: {figures}", file=sys.stderr)

    def _read(self, tokens: torch.Tensor) -> None:
        """Read all of a prompt but its last token, with a progress bar in a terminal."""
        if not tokens.numel():
            return
        held = int(self._cache[0].lengths)
        with self._bar(total=tokens.shape[1], unit=" tokens", desc="prompt", leave=False, disable=None) as bar:
            for _ in self._model.read(tokens, self._cache, chunk=self._chunk):
                bar.update(int(self._cache[0].lengths) - held - bar.n)  # waits for the device: what is done, not queued
