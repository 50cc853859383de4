"""`LongNetEncoder` in transformers' conventions."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dilated_attention_pytorch import LongNetEncoder  # noqa: E402
from dilated_attention_pytorch.models.hf import (  # noqa: E402
    LongNetConfig,
    LongNetEncoderConfig,
    LongNetForSequenceClassification,
)

SIZES = {
    "input_dim": 6, "d_model": 16, "num_heads": 4, "num_layers": 2, "segment_lengths": (4, 64),
    "dilation_rates": (1, 4), "positions": "coordinates", "pooling": "cls",
}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    x, places = torch.randn(2, 20, 6), torch.randint(256_000, (2, 20, 2))
    return {"inputs_embeds": x, "coordinates": places, "attention_mask": mask}


def test_the_model_of_transformers_is_the_encoder_and_is_saved_and_loaded(tmp_path) -> None:
    torch.manual_seed(0)
    encoder = LongNetEncoder(**SIZES, num_classes=3).eval()
    model = LongNetForSequenceClassification.from_encoder(encoder, id2label={0: "a", 1: "b", 2: "c"})
    given = batch()
    expected = encoder(given["inputs_embeds"], given["coordinates"], seqlens=torch.tensor([20, 12]))
    torch.testing.assert_close(model(**given).logits, expected)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert isinstance(again, LongNetForSequenceClassification)
    assert again.config.id2label[2] == "c"
    assert again.encoder.config == encoder.config
    torch.testing.assert_close(again(**given).logits, expected)  # with the table of positions, which no file holds
    packed = torch.cat([given["inputs_embeds"][0], given["inputs_embeds"][1, :12]])[None]
    places = torch.cat([given["coordinates"][0], given["coordinates"][1, :12]])[None]
    ends = torch.tensor([0, 20, 32])
    torch.testing.assert_close(again(packed, coordinates=places, cu_seq_lens_q=ends).logits, expected)
    with pytest.raises(TypeError, match="does not take position_ids"):
        model(**given, position_ids=ends)


@pytest.mark.parametrize("labels", [torch.tensor([0, 2]), torch.tensor([0.5, 2.0])])
def test_labels_give_a_loss_and_checkpointing_changes_no_gradient(labels) -> None:
    classes = 3 if labels.dtype == torch.long else 1
    torch.manual_seed(0)
    model = LongNetForSequenceClassification(LongNetEncoderConfig(**SIZES, num_labels=classes)).train()
    found = []
    for enable in (False, True):
        model.gradient_checkpointing_enable() if enable else model.gradient_checkpointing_disable()
        model.zero_grad()
        out = model(**batch(), labels=labels)
        out.loss.backward()
        found.append({name: x.grad.clone() for name, x in model.named_parameters()})
    torch.testing.assert_close(*found)
    wanted = (
        torch.nn.functional.cross_entropy(out.logits, labels)
        if classes > 1
        else (out.logits[:, 0] - labels).square().mean()
    )
    torch.testing.assert_close(out.loss, wanted)


@pytest.mark.parametrize("kind", [LongNetConfig, LongNetEncoderConfig])
def test_a_config_that_states_two_patterns_is_refused(kind) -> None:
    config = kind(segment_lengths=[4, 64], dilation_rates=[1, 4])
    assert kind(dilated_attention=config.dilated_attention).dilated_attention == config.dilated_attention
    with pytest.raises(ValueError, match="dilated_attention and segment_lengths both state the pattern"):
        kind(dilated_attention=config.dilated_attention, segment_lengths=[8])
