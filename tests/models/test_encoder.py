"""`LongNetEncoder`: what it pools, what its CLS rows see, and batches that change nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dilated_attention_pytorch import EncoderConfig, LongNet, LongNetEncoder, ModelConfig, ReachWarning, attention_map
from dilated_attention_pytorch.core import spec as specs
from dilated_attention_pytorch.core.reach import reach_shares
from dilated_attention_pytorch.models.config import EncoderFields
from dilated_attention_pytorch.nn.positions import SlidePositions

SIZES = {
    "input_dim": 6, "d_model": 16, "num_heads": 4, "num_layers": 2,
    "segment_lengths": (4, 64), "dilation_rates": (1, 4),
}  # fmt: skip
LENGTHS = (9, 1, 30)
KINDS = [
    {},
    {"pooling": "attention", "positions": "rotary"},
    {"pooling": "cls", "positions": "coordinates", "num_classes": 3},
    {"pooling": "mean", "positions": "coordinates", "cls_rows": 1, "head_layout": "blocked"},
]


def encoder(**changes) -> LongNetEncoder:
    torch.manual_seed(0)
    model = LongNetEncoder(**(SIZES | changes)).double().eval()
    for x in model.parameters():  # also norms, and the scores of an attention pool
        torch.nn.init.normal_(x, mean=x.detach().mean().item(), std=0.3)
    return model


def bags(model: LongNetEncoder) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    drawn = [(torch.randn(n, 6).double(), torch.randint(256_000, (n, 2))) for n in LENGTHS]
    return [one if model.config.positions == "coordinates" else one[:1] for one in drawn]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_padded_and_packed_batches_give_what_each_sequence_gives_alone(kind) -> None:
    model = encoder(**kind)
    found = bags(model)
    alone = torch.cat([model(*(x[None] for x in bag)) for bag in found])
    rows = [model.hidden(*(x[None] for x in bag))[0] for bag in found]
    right = [torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True) for x in zip(*found)]
    left = [torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True, padding_side="left") for x in zip(*found)]
    mask = torch.arange(max(LENGTHS)) < max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(model(*right, seqlens=torch.tensor(LENGTHS)), alone)
    torch.testing.assert_close(model(*left, key_padding_mask=mask), alone)
    packed = [torch.cat([*x, x[0][:2]])[None] for x in zip(*found)]  # with two rows of padding
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    torch.testing.assert_close(model(*packed, cu_seqlens=ends), alone)
    torch.testing.assert_close(model.hidden(*packed, cu_seqlens=ends)[0, : ends[-1]], torch.cat(rows))
    hidden = model.hidden(*left, key_padding_mask=mask)
    torch.testing.assert_close(hidden[~mask], torch.cat(rows))


def test_poolings_are_what_they_say() -> None:
    for kind in KINDS:
        model = encoder(**(kind | {"num_classes": 0}))
        (bag, *_) = bags(model)
        given = [x[None] for x in bag]
        rows = model.hidden(*given)[0]
        if model.config.pooling == "cls":
            assert model.cls is not None
            assert model.cls.shape == (4, 16)
            whole, _ = model._encode(*given, {})
            expected = whole[0, :4].mean(0)
        elif model.config.pooling == "attention":
            weights = model.pool.score(rows).softmax(0).repeat_interleave(4, dim=1)
            expected = (weights * rows).sum(0)
        else:
            expected = rows.mean(0)
        torch.testing.assert_close(model(*given)[0], model.pooled_norm(expected))
    fresh = LongNetEncoder(**SIZES, pooling="attention").double()
    x = torch.randn(1, 20, 6).double()
    torch.testing.assert_close(fresh(x), fresh.pooled_norm(fresh.hidden(x).mean(1)))  # at first, the mean


def test_coordinates_are_those_of_prov_gigapath() -> None:
    """`floor(x / 256) * grids + floor(y / 256) + 1` in GigaPath's table."""
    model = encoder(positions="coordinates", num_layers=1)
    x, coordinates = (one[None] for one in bags(model)[2])
    grid = coordinates // 256
    table = SlidePositions(16, 1000).rows(grid[..., 0] * 1000 + grid[..., 1] + 1)
    plain = encoder(num_layers=1)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain.input = torch.nn.Identity()
        plain.config = dataclasses.replace(plain.config, input_dim=16)
        torch.testing.assert_close(model(x, coordinates), plain(model.input(x) + table.double()))


def test_the_default_pattern_connects_every_two_rows() -> None:
    config = EncoderConfig(input_dim=4, d_model=24, num_heads=4, num_layers=2, max_length=5000)
    assert reach_shares(config.spec, 5000, 4, layers=[2]).min() == 1
    assert EncoderConfig().segment_lengths[-1] == 262_144
    assert EncoderConfig(**SIZES).segment_lengths == (4, 64)


@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
def test_each_head_of_the_longest_branch_sees_a_cls_row_and_a_single_one_warns(layout) -> None:
    model = encoder(pooling="cls", num_layers=1, head_layout=layout)
    (offsets,) = model.config.spec.offsets(4)[1:]
    assert {*offsets} <= {*range(len(model.cls))}
    specs._warned.clear()
    with pytest.warns(ReachWarning, match=r"a CLS of 1 row is on the grid of 1 of 4 heads of segments of 64 with rate"):
        LongNetEncoder(**SIZES, pooling="cls", cls_rows=1, head_layout=layout)


def test_a_saved_encoder_is_loaded_without_unpickling(tmp_path) -> None:
    for kind in KINDS:
        model = encoder(**kind)
        model.save_pretrained(tmp_path)
        again = LongNetEncoder.from_pretrained(tmp_path).eval()
        assert again.config == model.config
        (bag, *_) = bags(model)
        torch.testing.assert_close(again(*(x[None] for x in bag)), model(*(x[None] for x in bag)))
    with pytest.raises(ValueError, match="keys that ModelConfig does not know"):
        LongNet.from_pretrained(tmp_path)


def test_the_keywords_of_an_encoder_are_the_fields_of_its_config() -> None:
    fields = {field.name for field in dataclasses.fields(EncoderConfig)}
    names = EncoderFields.__annotations__.keys() | {"max_length"}
    assert fields - {field.name for field in dataclasses.fields(ModelConfig)} <= names


def test_gradients_reach_every_parameter_and_checkpointing_changes_none() -> None:
    for kind in KINDS:
        model = encoder(**(kind | {"num_classes": 2})).train()
        packed = [torch.cat(x)[None] for x in zip(*bags(model))]
        found = []
        for enable in (False, True):
            model.gradient_checkpointing_enable(enable)
            model.zero_grad()
            model(*packed, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0)).square().sum().backward()
            found.append({name: x.grad.clone() for name, x in model.named_parameters()})
        torch.testing.assert_close(*found)
        assert all(x.abs().max() > 0 for name, x in found[0].items() if not name.endswith("k_proj.bias"))


def test_wrong_calls_are_refused() -> None:
    model, placed = encoder(), encoder(positions="coordinates")
    x = torch.randn(2, 5, 6).double()
    for call, message in {
        lambda: LongNetEncoder(ModelConfig()): "takes a config of type EncoderConfig, got ModelConfig",
        lambda: LongNet(EncoderConfig(**SIZES)): "takes a config of type ModelConfig",
        lambda: LongNetEncoder(**SIZES, vocab_size=10): "has no vocab_size",
        lambda: LongNetEncoder(**SIZES, pooling="cls", cls_rows=0): "leave cls_rows out",
        lambda: LongNetEncoder(**SIZES, positions="xpos"): "positions must be one of none, rotary, coordinates",
        lambda: model(x[..., :3]): r"\(batch, tokens, 6\) .* got \(2, 5, 3\): make the encoder with input_dim=3",
        lambda: model(x.long()): r"floating-point numbers, \(batch, tokens, 6\), got torch.int64",
        lambda: model(x[:, :0]): "at least one row",
        lambda: model(x, seqlens=torch.tensor([5, 0])): "at least one row",
        lambda: model(x, torch.zeros(2, 5, 2)): "takes no coordinates",
        lambda: placed(x): "needs them",
        lambda: placed(x, torch.zeros(2, 5, 3)): r"\(2, 5, 2\)",
        lambda: placed(x, torch.full((2, 5, 2), 256_000)): "tiles from 1000 to 1000",
        lambda: placed(x, torch.full((2, 5, 2), -1)): "within 1000 tiles of 256 pixels",
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_sequences_and_maps_on_a_gpu_are_those_of_a_cpu(kind) -> None:
    model = encoder(**kind).float()
    packed = [torch.cat(x)[None] for x in zip(*bags(model))]
    packed[0] = packed[0].float()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    expected, rows = model(*packed, cu_seqlens=ends), attention_map(model, packed[:2], rows="all")
    model, packed = model.cuda(), [x.cuda() for x in packed]
    found = model(*packed, cu_seqlens=ends.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attention_map(model, packed[:2], rows="all"), rows, rtol=1e-4, atol=1e-6)
    found.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in model.parameters())
