"""Parts of a pattern, and a sliding window beside them, which gives rows after a segment's border nearer tokens."""

from __future__ import annotations

import warnings

from torch import Tensor

from dilated_attention_pytorch.core.merge import merge
from dilated_attention_pytorch.core.spec import DilatedSpec, ReachWarning, never_warn
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.nn.attention import DilatedAttention
from examples.recall import window_tiles

LAST = slice(-1, None)


def some_branches(spec: DilatedSpec, kept: slice) -> DilatedSpec:
    """The pattern of some branches of `spec`, which may leave rows to the others without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReachWarning)
        some = DilatedSpec(spec.branches[kept], spec.head_layout)
    never_warn(some)
    return some


class WindowedDilatedAttention(DilatedAttention):
    """A sliding window in place of all branches but the last: one softmax over the window and the last branch."""

    def __init__(self, spec: DilatedSpec, tile: int, before: int) -> None:
        far = some_branches(spec, LAST)
        super().__init__(far.segment_lengths, far.dilation_rates, head_layout=far.head_layout)
        self._window = window_tiles(tile, before)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, spans: Tensor | None) -> Tensor:
        far = self._settings(is_causal)
        window = {"segment_lengths": [query.shape[1]], "dilation_rates": [1], "sparse_config": self._window}
        partials = [
            dilated_attention(query, key, value, **settings, spans=spans, return_lse=True)
            for settings in (far | window, far)
        ]
        return merge(*partials[0], *partials[1])[0]
