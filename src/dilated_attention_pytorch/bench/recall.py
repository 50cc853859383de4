"""Recall: facts planted far back are asked for at the end, of a LongNet and of a sliding window of no less cost."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dilated_attention_pytorch.core.block_layout import keys_seen, layout_for
from dilated_attention_pytorch.core.block_pattern import SparsePatternConfig
from dilated_attention_pytorch.core.pattern import forward_flops
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.measuring import machine
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.nn.attention import DilatedAttention
from dilated_attention_pytorch.nn.block_sparse import BlockSparseDilatedAttention

# A question stands on so many rows in turn, one on the grid of each head, for heads are as many as the largest rate.
REPEATS = 4
_RATES = (1, 2, REPEATS)
_LEAST = 256


@dataclass(frozen=True, kw_only=True)
class Task:
    """Filler, and `facts` tokens at random places of its first half, each a key with a value; then `questions`.

    A question is a key, on `REPEATS` rows. The answer is the fact of that key, said on the last of them: one of
    `values`, so that who cannot look back is right once in `values` times.
    """

    fillers: int = 128
    keys: int = 16
    values: int = 16
    facts: int = 8
    questions: int = 4

    @property
    def vocab_size(self) -> int:
        return self.fillers + self.keys * self.values + self.keys

    @property
    def asked_rows(self) -> int:
        return self.questions * REPEATS

    def batch(self, tokens: int, sequences: int, seed: int, copies: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """`(sequences, tokens)`; the facts asked for, and where they lie, `(sequences, questions)`."""
        generator = torch.Generator().manual_seed(seed)
        drawn = functools.partial(torch.rand, generator=generator)
        text = torch.randint(self.fillers, (sequences, tokens), generator=generator)
        # The places of the largest of random numbers are distinct, and so are the keys.
        places = drawn(sequences, tokens // 2 // copies).topk(self.facts).indices * copies
        keys = drawn(sequences, self.keys).topk(self.facts).indices
        values = torch.randint(self.values, (sequences, self.facts), generator=generator)
        facts = self.fillers + keys * self.values + values
        for copy in range(copies):
            text.scatter_(1, places + copy, facts)
        asked = drawn(sequences, self.facts).topk(self.questions).indices
        questions = self.fillers + self.keys * self.values + keys.gather(1, asked)
        text[:, -self.asked_rows :] = questions.repeat_interleave(REPEATS, dim=1)
        return text, facts.gather(1, asked), places.gather(1, asked)
