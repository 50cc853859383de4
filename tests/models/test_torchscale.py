"""torchscale's attention, stated here literally in float64, against what patched models compute."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention_pytorch import LongNet, LongNetEncoder, LongNetLM, ReachWarning, cls_attention, patch_gigapath
from dilated_attention_pytorch.core.call import Call
from dilated_attention_pytorch.core.plans import remember_of
from dilated_attention_pytorch.core.reference import reference_forward
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.models.padded_attention import PaddedAttention
from dilated_attention_pytorch.models.slide_attention import on_slide
from dilated_attention_pytorch.models.torchscale import SlidePositions, TorchscaleAttention, load_torchscale_weights

GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
# The same shape of pattern at a 128th of the length: several segments in several branches, and 1448 % 8 = 0.
SMALL = ([8, 46, 256, 1448, 8192], [1, 2, 4, 8, 16])
# 45 % 2 and 21 % 4: rates that do not divide their segments.
UNEVEN = ([8, 45, 21], [1, 2, 4])


def torchscale_attention(q, k, v, segment_lengths, dilation_rates, is_causal=False, detached=True):
    """What torchscale computes, `(B, N, H, D)`, segment by segment and head by head, with all its rows of zeros."""
    B, N, H, D = q.shape
    outs, lses = [], []
    for w, r in zip(segment_lengths, dilation_rates):
        w = min(w, N)
        length = math.ceil(w / r) * r
        out_rows, lse_rows = [], []
        for start in range(0, N, w):
            # The rows of a segment, then zeros up to a whole segment and on to a multiple of the rate.
            qs, ks, vs = (F.pad(x[:, start : start + w], (0, 0, 0, 0, 0, length - x[:, start : start + w].shape[1]))
                          for x in (q, k, v))  # fmt: skip
            out = torch.zeros(B, length, H, D, dtype=q.dtype)
            lse = torch.full((B, length, H), -torch.inf, dtype=q.dtype)
            for h in range(H):
                rows = slice(h // math.ceil(H / r), None, r)
                scores = qs[:, rows, h] @ ks[:, rows, h].transpose(1, 2) * D**-0.5
                if is_causal:
                    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
                out[:, rows, h] = scores.softmax(-1) @ vs[:, rows, h]
                lse[:, rows, h] = scores.logsumexp(-1)
            lse = lse.masked_fill(lse == 0, -torch.inf)  # what it takes for rows that are not on the grid
            out_rows.append(out)
            lse_rows.append(lse)
        # Segments follow each other at their padded lengths, and what is past N is cut off.
        outs.append(torch.cat(out_rows, 1)[:, :N])
        lses.append(torch.cat(lse_rows, 1)[:, :N])
    weights = torch.stack(lses).softmax(0).nan_to_num(0.0)
    weights = weights.detach() if detached else weights
    return (torch.stack(outs) * weights.unsqueeze(-1)).sum(0)


class DilatedAttention(nn.Module):
    """What `patch_gigapath` knows torchscale's class by, computing what is stated above."""

    def __init__(self, args, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.args, self.embed_dim, self.num_heads, self.dropout = args, embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))
        self.inner_attn_ln = nn.LayerNorm(embed_dim)
        self.dropout_module = nn.Dropout(dropout)
        self.xpos = None

    def dense_to_sparse(self): ...
    def sparse_to_dense(self): ...
    def gathering(self): ...
    def scattering(self): ...

    def forward(self, query, key, value, incremental_state=None, key_padding_mask=None, attn_mask=None, rel_pos=None,
                is_first_step=False, is_causal=False):  # fmt: skip
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, self.head_dim))
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        out = torchscale_attention(q, k, v, self.args.segment_length, self.args.dilated_ratio, is_causal)
        return self.out_proj(self.inner_attn_ln(out.flatten(2))), None


class FeedForward(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.ffn_layernorm, self.fc2 = nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.fc2(self.ffn_layernorm(F.gelu(self.fc1(x))))


class Layer(nn.Module):
    def __init__(self, args, d, heads):
        super().__init__()
        self.self_attn = DilatedAttention(args, d, heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = FeedForward(d)

    def forward(self, x, mask, is_causal):
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(query=y, key=y, value=y, key_padding_mask=mask, is_causal=is_causal)[0]
        return x + self.ffn(self.final_layer_norm(x))


class Encoder(nn.Module):
    """The names and the order of work of torchscale's `LongNetEncoder`."""

    def __init__(self, pattern=SMALL, d=32, heads=8, layers=2):
        super().__init__()
        args = SimpleNamespace(segment_length=list(pattern[0]), dilated_ratio=list(pattern[1]), flash_attention=True)
        self.layers = nn.ModuleList(Layer(args, d, heads) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(d)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x, mask=None, is_causal=False):
        mask = torch.zeros(x.shape[:2], dtype=torch.bool) if mask is None else mask
        for layer in self.layers:
            x = layer(x, mask, is_causal)
        return self.layer_norm(x)


class SlideEncoder(nn.Module):
    """Prov-GigaPath's way with tiles, coordinates and its table of positions."""

    def __init__(self, d=32, grids=20):
        super().__init__()
        self.slide_ngrids, self.tile_size = grids, 256
        self.patch_embed = nn.Linear(12, d)
        self.cls_token = nn.Parameter(torch.randn(1, 1, d))
        self.register_buffer("pos_embed", stored_table(d, grids)[None], persistent=False)
        self.encoder, self.norm = Encoder(d=d), nn.LayerNorm(d)

    def forward(self, x, coords):
        place = torch.floor(coords / self.tile_size)
        pos = (place[..., 0] * self.slide_ngrids + place[..., 1]).long() + 1
        x = self.patch_embed(x) + self.pos_embed[:, pos, :].squeeze(0)
        cls = (self.cls_token + self.pos_embed[:, :1, :]).expand(x.shape[0], -1, -1)
        return self.norm(self.encoder(torch.cat((cls, x), dim=1)))[:, 0]


def stored_table(d, grids):
    """One sine or cosine after another: of the column, then of the row; the CLS token's are zeros."""
    rows = [[0.0] * d]
    for x in range(grids):
        for y in range(grids):
            row = []
            for place in (y, x):
                angles = [place / 10000 ** (i / (d // 4)) for i in range(d // 4)]
                row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).float()


def draw(B, N, H, D, dtype=torch.float64):
    return [torch.randn(B, N, H, D, dtype=dtype, requires_grad=True) for _ in range(3)]


CASES = [
    (SMALL, 61, 16), (SMALL, 96, 16), (SMALL, 300, 8), (SMALL, 5, 4), (SMALL, 1, 2), (UNEVEN, 100, 4),
    (UNEVEN, 45, 6), (UNEVEN, 46, 3), (([4, 6], [1, 8]), 13, 5), (([6, 12], [2, 4]), 29, 4), (([5, 3], [1, 4]), 14, 4),
    (([50, 6], [1, 8]), 33, 8),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:no branch of")
@pytest.mark.parametrize("exact", [True, "forward", False])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("pattern", "N", "H"), CASES)
def test_each_semantics_gives_its_outputs_and_gradients(pattern, N, H, is_causal, exact) -> None:
    """Segments longer than the sequence, several of them, and rates that do not divide them, are among the cases."""
    inputs = draw(2, N, H, 4)
    do = torch.randn(2, N, H, 4, dtype=torch.float64)
    if exact:
        expected = torchscale_attention(*inputs, *pattern, is_causal, detached=exact is True)
    else:
        expected = by_definition(*inputs, pattern, is_causal)
    attention = patch_gigapath(Encoder(pattern, d=4 * H, heads=H, layers=1), exact).layers[0].self_attn.attention
    out = attention(*inputs, is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    found, wanted = (torch.autograd.grad(x, inputs, do) for x in (out, expected))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(attention(*inputs, is_causal=is_causal), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("N", [501, 1501])
def test_gigapaths_own_segments_and_rates_are_met_in_float32(N) -> None:
    inputs = draw(1, N, 16, 48, torch.float32)
    do = torch.randn(1, N, 16, 48)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = torchscale_attention(*exact, *GIGAPATH)
    out = PaddedAttention(*GIGAPATH)(*inputs)
    pairs = [(out, expected)]
    pairs += zip(torch.autograd.grad(out, inputs, do), torch.autograd.grad(expected, exact, do.double()))
    for found, wanted in pairs:
        assert (found.double() - wanted).norm() <= 2e-6 * wanted.norm()


def by_definition(q, k, v, pattern, is_causal=False):
    call = Call(spec=DilatedSpec.of(*pattern, "blocked"), is_causal=is_causal)
    return reference_forward(q, k, v, call, None, None)[0]


def test_zeros_matter_at_a_ragged_length_and_not_where_segments_end_with_the_sequence() -> None:
    pattern = ([8, 16], [1, 2])
    whole, ragged = draw(1, 96, 4, 4), draw(1, 19, 4, 4)
    torch.testing.assert_close(PaddedAttention(*pattern)(*whole), by_definition(*whole, pattern))
    plain = by_definition(*ragged, pattern)
    assert (PaddedAttention(*pattern)(*ragged) - plain).norm() > 0.05 * plain.norm()


@pytest.mark.parametrize("detached", [True, False])
def test_a_branch_of_the_exact_merge_gives_no_warning_of_its_own(detached, recwarn) -> None:
    pattern = ([5, 64], [2, 1])  # alone, the first branch leaves rows out and ends early, and torchscale moves its rows
    q = torch.randn(1, 40, 4, 8, requires_grad=True)
    PaddedAttention(*pattern, detached_merge=detached)(q, q, q)
    assert not [one for one in recwarn if issubclass(one.category, ReachWarning)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("N", [8, 61])
def test_a_patched_encoder_equals_the_one_it_was(N, is_causal) -> None:
    model = Encoder().double()
    x = torch.randn(2, N, 32, dtype=torch.float64)
    expected = model(x, is_causal=is_causal)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    assert patch_gigapath(model, exact_torchscale=True) is model
    assert list(model.state_dict()) == names
    assert all(parameters[name] is p for name, p in model.named_parameters())
    out = model(x, is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(patch_gigapath(copy.deepcopy(model), "forward"))))
    torch.testing.assert_close(twin(x, is_causal=is_causal), expected, rtol=1e-9, atol=1e-9)


def test_by_default_a_patched_model_computes_the_definition_and_honours_padding() -> None:
    model = patch_gigapath(Encoder().double())
    x = torch.randn(2, 61, 32, dtype=torch.float64)
    mask = torch.zeros(2, 61, dtype=torch.bool)
    whole = model(x, mask)
    mask[1, 40:] = True  # the same tensor, written to
    out = model(x, mask)
    torch.testing.assert_close(out[0], whole[0])
    torch.testing.assert_close(out[1, :40], model(x[1:, :40])[0])
    attention = model.layers[0].self_attn
    q, k, v = attention.project(x, x, x)
    torch.testing.assert_close(attention.attention(q, k, v), by_definition(q, k, v, SMALL))


class Interrupted(torch.Tensor):
    """A tensor during whose first use another thread's call comes between."""

    meanwhile = None

    def is_inference(self):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return False


def test_what_layers_share_is_right_when_threads_take_turns() -> None:
    def shared(x: torch.Tensor, make) -> str:
        return remember_of("lengths", x, "test", make)

    other = torch.zeros(1)
    mask = torch.zeros(1).as_subclass(Interrupted)
    mask.meanwhile = lambda: shared(other, lambda: "the other's")
    assert shared(mask, lambda: "the mask's") == "the mask's"
    assert shared(mask, lambda: pytest.fail("it is remembered")) == "the mask's"
    assert shared(other, lambda: pytest.fail("it is remembered")) == "the other's"
    other += 1
    assert shared(other, lambda: "changed") == "changed"
    with torch.inference_mode():
        uncounted = torch.zeros(1)
    assert [shared(uncounted, lambda made=made: made) for made in "ab"] == ["a", "b"]


def test_patching_again_changes_the_semantics() -> None:
    model = Encoder().double()
    x = torch.randn(1, 61, 32, dtype=torch.float64)
    exact = model(x)
    right = patch_gigapath(model)(x)
    assert not torch.allclose(exact, right)
    torch.testing.assert_close(patch_gigapath(model, True)(x), exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(patch_gigapath(model)(x), right)


@pytest.mark.parametrize("exact", [False, True, "forward"])
def test_a_patched_model_compiles_and_runs_in_low_precision(exact) -> None:
    model = patch_gigapath(Encoder(layers=1), exact)
    x = torch.randn(1, 61, 32)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    low = model.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - expected).norm() < 0.05 * expected.norm()


def slide(tiles=60, grids=20):
    places = torch.randperm(grids * grids)[:tiles]
    return torch.randn(1, tiles, 12), torch.stack((places // grids, places % grids), dim=-1)[None] * 256.0 + 3.0


def test_the_position_table_is_computed_to_the_same_values() -> None:
    table = SlidePositions(32, 20)
    stored = stored_table(32, 20)
    torch.testing.assert_close(table.rows(torch.arange(401)), stored, rtol=0, atol=1e-7)
    last = torch.tensor([-1, -401])
    torch.testing.assert_close(table[:, last, :], stored[None, last], rtol=0, atol=1e-7)
    assert table.holds(stored[None])
    assert not table.holds(stored[None] + 1e-3)
    assert not table.holds(stored[None, :-1])
    assert not list(table.state_dict())
    with pytest.raises(IndexError, match="by rows"):
        table[0]


def test_a_patched_slide_encoder_equals_the_one_it_was_and_stores_no_table() -> None:
    model = SlideEncoder()
    x, coords = slide()
    expected = model(x, coords)
    patch_gigapath(model, exact_torchscale=True)
    assert isinstance(model.pos_embed, SlidePositions)
    assert sum(b.numel() for b in model.buffers()) == 20 * 16
    torch.testing.assert_close(model(x, coords), expected, rtol=1e-4, atol=1e-4)
    assert model.half().pos_embed[:, :1, :].dtype == torch.float16


def test_a_state_dict_loads_with_and_without_the_table_but_not_with_another() -> None:
    state = SlideEncoder().state_dict()
    model = patch_gigapath(SlideEncoder(), True)
    x, coords = slide()
    model.load_state_dict(state)
    expected = model(x, coords)
    model.load_state_dict(state | {"pos_embed": stored_table(32, 20)[None]})
    torch.testing.assert_close(model(x, coords), expected)
    with pytest.raises(RuntimeError, match="load the weights first"):
        model.load_state_dict(state | {"pos_embed": torch.randn(1, 401, 32)})
    learned = SlideEncoder()
    learned.pos_embed = torch.randn(1, 401, 32)
    assert isinstance(patch_gigapath(learned).pos_embed, torch.Tensor)


def test_the_cls_rows_map_is_that_of_a_dense_softmax() -> None:
    model = patch_gigapath(SlideEncoder().double()).eval()
    x, coords = slide()
    seen = []
    attention = model.encoder.layers[0].self_attn
    attention.register_forward_pre_hook(lambda layer, args, named: seen.append(named["query"]), with_kwargs=True)
    found = cls_attention(model, x.double(), coords.double())
    assert found.shape == (2, 8, 61)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 8))
    q, k, _ = attention.project(seen[0], seen[0], seen[0])
    scores = torch.einsum("hd,jhd->hj", q[0, 0], k[0]) * 4**-0.5
    times = torch.zeros(8, 61)
    for (w, r), offsets in zip(zip(*SMALL), DilatedSpec.of(*SMALL, "blocked").offsets(8)):
        for h, offset in enumerate(offsets):
            if offset == 0:
                times[h, : min(w, 61) : r] += 1
    torch.testing.assert_close(found[0], (scores + times.log()).softmax(-1).float())
    assert len(attention._forward_pre_hooks) == 1  # the test's own
    # What the padded semantics give the CLS row is what these weights make of the values.
    exact = patch_gigapath(Encoder(layers=1).double(), True).layers[0].self_attn
    y = torch.randn(1, 61, 32, dtype=torch.float64)
    q, k, v = exact.project(y, y, y)
    torch.testing.assert_close(exact.attention(q, k, v)[:, 0], by_definition(q, k, v, SMALL)[:, 0])


def test_the_pages_code_runs_on_a_slide_encoder(tmp_path, monkeypatch) -> None:
    slide_encoder = ModuleType("gigapath.slide_encoder")
    slide_encoder.create_model = lambda *names: SlideEncoder()
    monkeypatch.setitem(sys.modules, "gigapath", ModuleType("gigapath"))
    monkeypatch.setitem(sys.modules, "gigapath.slide_encoder", slide_encoder)
    architecture = SimpleNamespace(config=SimpleNamespace())
    for name, module in {
        "torchscale": SimpleNamespace(architecture=architecture),
        "torchscale.architecture": architecture,
        "torchscale.architecture.config": architecture.config,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    tiles, coordinates = slide()
    names = {"tiles": tiles, "coordinates": coordinates}
    page = (Path(__file__).parents[2] / "docs/gigapath.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if ">>>" not in block]
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert architecture.config.np is numpy
    assert names["maps"].shape[:2] == (2, 8)
    assert (tmp_path / "slide.png").stat().st_size > 0


def test_weights_are_laid_over_the_slide() -> None:
    weights = torch.rand(2, 3, 4)
    coords = torch.tensor([[512, 256], [768, 256], [512, 1024], [900, 1030]])
    found = on_slide(weights, coords)
    assert found.shape == (2, 3, 4, 2)  # rows 1 to 4, columns 2 and 3
    torch.testing.assert_close(found[..., 0, :], weights[..., :2])
    torch.testing.assert_close(found[..., 3, :], weights[..., 2:])
    with pytest.raises(ValueError, match=r"leave it out: weights\[..., 1:\]"):
        on_slide(weights, coords[1:])
    with pytest.raises(ValueError, match="at least one tile"):
        on_slide(weights[..., :0], coords[:0])


def as_ours(**changes):
    settings = {"d_model": 32, "num_heads": 8, "num_layers": 2, "dim_feedforward": 64, "head_layout": "blocked",
                "segment_lengths": SMALL[0], "dilation_rates": SMALL[1], "positions": "none"}  # fmt: skip
    return settings | changes


def test_an_encoders_weights_make_our_longnet_the_same_model() -> None:
    theirs = patch_gigapath(Encoder().double())
    ours = LongNet(**as_ours(num_decoder_layers=0)).double()
    slide_state = {f"encoder.{name}": x for name, x in theirs.state_dict().items()} | {"cls_token": torch.zeros(1)}
    load_torchscale_weights(ours, slide_state, prefix="encoder.")
    x = torch.randn(1, 61, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_slide_encoders_weights_make_our_encoder_the_same_model(pooling) -> None:
    theirs = patch_gigapath(SlideEncoder().double())
    sizes = {"input_dim": 12, "positions": "coordinates", "cls_rows": 1, "pooling": pooling, "grids": 20}
    ours = LongNetEncoder(**(as_ours() | sizes), num_classes=2).double()
    state = {name.replace("patch_embed.", "patch_embed.proj."): x for name, x in theirs.state_dict().items()}
    head = ours.head.weight.clone()
    load_torchscale_weights(ours, state | {"decoder.weight": torch.zeros(1)})
    x, coords = slide()
    embedding = ours.embed(x.double(), coords)
    if pooling == "cls":
        torch.testing.assert_close(embedding, theirs(x.double(), coords))
    torch.testing.assert_close(ours(x.double(), coords), embedding @ head.T + ours.head.bias)
    with pytest.raises(ValueError, match="build it with cls_rows=1"):
        load_torchscale_weights(LongNetEncoder(**(as_ours() | sizes | {"cls_rows": 2})), state)
    with pytest.raises(ValueError, match="missing cls_token"):
        load_torchscale_weights(ours, {name: x for name, x in state.items() if name != "cls_token"})


class Turn(nn.Module):
    """xPos over neighbouring dimensions, as torchscale has it; positions count from the middle."""

    def __init__(self, head_dim):
        super().__init__()
        self.register_buffer("scale", (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim))

    def forward(self, x, offset=0, downscale=False):
        N, D = x.shape[1:]
        angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        scale = self.scale ** ((torch.arange(N)[:, None] - N // 2) / 512)
        turn = torch.polar((1 / scale if downscale else scale).double(), angle.double())
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


@pytest.mark.parametrize("scaled_embedding", [False, True])
def test_a_decoders_weights_make_our_language_model_the_same(scaled_embedding) -> None:
    pattern = ([8, 32], [1, 2])
    theirs = Encoder(pattern).double()
    for layer in theirs.layers:
        layer.self_attn.xpos = Turn(4).double()
    patch_gigapath(theirs)
    theirs.embed_tokens = nn.Embedding(11, 32).double()
    theirs.output_projection = nn.Linear(32, 11, bias=False).double()
    settings = as_ours(segment_lengths=pattern[0], dilation_rates=pattern[1], positions="xpos")
    ours = LongNetLM(**settings, vocab_size=11, tie_weights=False).double()
    load_torchscale_weights(ours, theirs.state_dict(), scaled_embedding=scaled_embedding)
    tokens = torch.randint(11, (1, 61))
    x = theirs.embed_tokens(tokens) * (32**0.5 if scaled_embedding else 1.0)
    torch.testing.assert_close(ours(tokens), theirs.output_projection(theirs(x, is_causal=True)), rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded() -> None:
    state = Encoder().state_dict()
    ours = LongNet(**as_ours(num_decoder_layers=0))
    before = {name: x.clone() for name, x in ours.state_dict().items()}
    for broken, message in (
        ({name: x for name, x in state.items() if "inner_attn_ln" not in name}, "missing layers.0.self_attn.inner"),
        (state | {"layers.0.moe_layer.gate": torch.zeros(1)}, "unexpected layers.0.moe_layer.gate"),
        (state | {"layer_norm.bias": torch.zeros(3)}, r"layer_norm.bias is \(3,\), not \(32,\)"),
        (Encoder(layers=3).state_dict(), "unexpected layers.2"),
        (state | {"layers.0.self_attn.xpos.scale": torch.zeros(2)}, "these weights need positions='xpos'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_torchscale_weights(ours, broken)
    assert all(torch.equal(before[name], x) for name, x in ours.state_dict().items())
    for change, message in (
        ({"head_layout": "interleaved"}, 'head_layout="blocked"'),
        ({"num_decoder_layers": 1}, "num_decoder_layers=0"),
        ({"positions": "rotary"}, "these weights need positions='none', got 'rotary'"),
        ({"norm": "rms", "qk_norm": True}, "has no norm='rms', qk_norm=True: build LongNet without"),
    ):
        with pytest.raises(ValueError, match=message):
            load_torchscale_weights(LongNet(**as_ours(**({"num_decoder_layers": 0} | change))), state)
    with pytest.raises(ValueError, match="tie_weights=False"):
        load_torchscale_weights(LongNetLM(**as_ours()), state)


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no torchscale DilatedAttention to swap.*MultiheadAttention"):
        patch_gigapath(nn.TransformerEncoderLayer(8, 2))
    with pytest.raises(ValueError, match="pass the model that holds it"):
        patch_gigapath(Encoder().layers[0].self_attn)
    with pytest.raises(ValueError, match="True or False or 'forward'"):
        patch_gigapath(Encoder(), "exactly")
    for attribute, value, message in (
        ("encoder_decoder_attention", True, "keep a dense attention"),
        ("dropout", 0.1, "drops attention weights in eval"),
        ("num_heads", 7, "num_heads must divide embed_dim"),
        ("args", SimpleNamespace(segment_length="[8, x]", dilated_ratio=[1, 2]), "must list whole numbers"),
        ("args", SimpleNamespace(segment_length=[8], dilated_ratio=[1, 2]), "must pair up"),
    ):
        model = Encoder()
        setattr(model.layers[1].self_attn, attribute, value)
        with pytest.raises(ValueError, match=message):
            patch_gigapath(model, exact_torchscale=True)
        assert isinstance(model.layers[0].self_attn, DilatedAttention)  # all or none
    hooked = Encoder()
    hooked.layers[0].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="patch first"):
        patch_gigapath(hooked)
    attention = patch_gigapath(Encoder()).layers[0].self_attn
    assert isinstance(attention, TorchscaleAttention)
    x = torch.randn(1, 9, 32)
    for named, message in (
        ({"incremental_state": {}}, "generate"),
        ({"rel_pos": x}, "rel_pos_buckets=0"),
        ({"attn_mask": torch.zeros(9, 9)}, "dense attn_mask"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(x, x, x, **named)
    with pytest.raises(ValueError, match="of one shape"):
        attention(x, x[:, :5], x[:, :5])
    q = torch.randn(1, 9, 2, 4)
    with pytest.raises(ValueError, match="knows no padding"):
        PaddedAttention([4], [1])(q, q, q, seqlens=torch.tensor([5]))
    with pytest.raises(ValueError, match=r"patch_gigapath\(model\) first"):
        cls_attention(nn.Linear(2, 2).eval(), x)
    model = patch_gigapath(SlideEncoder())
    with pytest.raises(ValueError, match="eval"):
        cls_attention(model, *slide())
    tiles, coords = slide()
    with pytest.raises(ValueError, match="a map shows one sequence"):
        cls_attention(model.eval(), tiles.expand(2, -1, -1), coords.expand(2, -1, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True, "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gigapaths_attention_on_a_gpu(exact, dtype) -> None:
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in draw(1, 1501, 16, 48)]
    do = torch.randn(1, 1501, 16, 48, device="cuda", dtype=dtype)
    same = [x.detach().cpu().double().requires_grad_() for x in inputs]
    if exact:
        out = PaddedAttention(*GIGAPATH, detached_merge=exact is True)(*inputs)
        expected = torchscale_attention(*same, *GIGAPATH, detached=exact is True)
    else:
        from dilated_attention_pytorch import DilatedAttention as Right

        out = Right(*GIGAPATH, head_layout="blocked")(*inputs)
        expected = Right(*GIGAPATH, head_layout="blocked", backend="reference")(*same)
    pairs = [(out, expected)]
    pairs += zip(torch.autograd.grad(out, inputs, do), torch.autograd.grad(expected, same, do.cpu().double()))
    limit = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for found, wanted in pairs:
        assert (found.cpu().double() - wanted).norm() <= limit * wanted.norm()
