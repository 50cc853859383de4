"""Bad input gets one clear error that names the value and the way out."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.core.checks import MOST_ENTRIES, MOST_TOKENS
from dilated_attention_pytorch.functional import dilated_attention


def tensors(**changes):
    shapes = {"query": (2, 8, 4, 4), "key": (2, 8, 4, 4), "value": (2, 8, 4, 4)} | changes
    return [x if isinstance(x, torch.Tensor) else torch.randn(x) for x in shapes.values()]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": (2, 8, 16)}, ValueError, "query must be .*got 3 dimensions.*MultiheadDilatedAttention"),
        (
            {"key": torch.randn(2, 8, 4, 4).double()},
            TypeError,
            "share a dtype, got torch.float32 and key torch.float64",
        ),
        ({"value": torch.randn(2, 8, 4, 4, device="meta")}, ValueError, "share a device, got cpu and value meta"),
        ({"query": torch.ones(2, 8, 4, 4).int()}, TypeError, "query must be float32.*got torch.int32"),
        ({"key": (2, 9, 4, 4)}, ValueError, "agree in batch, tokens and head_dim.*no cross-attention"),
        ({"key": (2, 8, 3, 4), "value": (2, 8, 3, 4)}, ValueError, "H=4 and Hkv=3"),
        ({"key": (2, 8, 2, 4)}, ValueError, "as many heads, got 2 and 4"),
        (dict.fromkeys(("query", "key", "value"), (2, 0, 4, 4)), ValueError, "an empty sequence"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        dilated_attention(*tensors(**changes), [4, 8], [1, 2])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dilation_rates": [1]}, ValueError, "2 lengths .* and 1 rates"),
        ({"segment_lengths": [4, 0]}, ValueError, "segment_length must be a whole number of at least 1, got 0"),
        ({"dilation_rates": [1, -2]}, ValueError, "dilation_rate must be a whole number of at least 1, got -2"),
        ({"head_layout": "diagonal"}, ValueError, "got 'diagonal'"),
        ({"head_layout": ["blocked"]}, TypeError, "head_layout must be one of"),
        (
            {"backend": "magic"},
            ValueError,
            "backend must be one of auto, triton, vendor, eager, reference; got 'magic'",
        ),
        ({"dropout_p": 1.0}, ValueError, "below 1, got 1.0"),
        ({"head_offset": 4}, ValueError, "needs total_heads"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
        ({"attn_mask": torch.zeros(8, 8)}, ValueError, "use is_causal=True for causality, key_padding_mask"),
        ({"spans": [[0, 8], [0, 8]]}, TypeError, "spans must be a tensor, got a list"),
        ({"spans": torch.zeros(2, 2)}, TypeError, "spans must hold whole numbers"),
        ({"spans": torch.tensor([[0, 8], [5, 2]])}, ValueError, r"span \[5, 2\) does not follow"),
        ({"spans": torch.tensor([[0, 8], [0, 9]])}, ValueError, r"span \[0, 9\) .* a row of 8 tokens"),
        ({"head_offset": 4, "total_heads": 6}, ValueError, "do not lie within the 6 heads"),
        ({"spans": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, r"got \(3, 2\) for batch 2"),
        (
            {"spans": torch.zeros(2, 2, dtype=torch.int64), "seqlens": torch.tensor([1, 1])},
            ValueError,
            "seqlens and spans both state the lengths",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        dilated_attention(*tensors(), **({"segment_lengths": [4, 8], "dilation_rates": [1, 2]} | settings))


def test_an_empty_sequence_is_refused_before_its_mask_is_read() -> None:
    x = torch.randn(2, 0, 4, 4)
    with pytest.raises(ValueError, match="an empty sequence"):
        dilated_attention(x, x, x, [4], [1], key_padding_mask=torch.zeros(2, 0, dtype=torch.bool))


def test_packed_spans_may_not_overlap() -> None:
    x = torch.randn(1, 8, 4, 4)
    with pytest.raises(ValueError, match=r"span \[3, 8\) does not follow the one before it"):
        dilated_attention(x, x, x, [4], [1], spans=torch.tensor([[0, 5], [3, 8]]))


def test_autocast_casts_no_integers() -> None:
    x = torch.ones(2, 8, 4, 4, dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"got torch\.int32"):
        dilated_attention(x, x, x, [4], [1])


@pytest.mark.parametrize("head_layout", ["interleaved", "blocked", "grouped"])
@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_the_longest_segment_and_the_highest_rate_are_exact(backend, head_layout) -> None:
    q, k, v = torch.randn(3, 1, 50, 4, 8).unbind(0)
    settings = {"is_causal": True, "head_layout": head_layout, "backend": backend}
    for rate, same_rate in ((2, 2), (MOST_TOKENS, 64)):
        longest = dilated_attention(q, k, v, [8, MOST_TOKENS], [1, rate], **settings)
        assert torch.equal(longest, dilated_attention(q, k, v, [8, 64], [1, same_rate], **settings))


def test_the_last_of_very_many_heads_are_found_at_once() -> None:
    q, k, v = torch.randn(3, 1, 50, 4, 8).unbind(0)
    shard = {"head_offset": MOST_ENTRIES - 4, "total_heads": MOST_ENTRIES, "head_layout": "grouped"}
    # All of them are in the last group, whose offset is 1 on a rate of 2.
    found = dilated_attention(q, k, v, [8, 64], [1, 2], **shard)
    assert torch.equal(found[:, ::2], torch.zeros(1, 25, 4, 8))
    assert found[:, 1::2].abs().min() > 0
