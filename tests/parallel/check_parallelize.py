"""On four ranks: a model on a mesh has the losses and gradients of one device, whatever the axes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dilated_attention_pytorch import (
    DilatedAttention,
    ImprovedMultiheadDilatedAttention,
    LongNet,
    LongNetEncoder,
    LongNetLM,
    MultiheadDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingMultiheadDilatedAttention,
    parallelize,
    patch_gigapath,
)
from dilated_attention_pytorch.models.hf import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.nn.block_sparse import BlockSparseMultiheadDilatedAttention
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.parallel import Shards, even_lengths, ranks_of

from ..models.test_torchscale import SlideEncoder
from .check_block_sparse import check_schedule_is_shared

SPEC = {"segment_lengths": (8, 16, 64), "dilation_rates": (1, 2, 4)}
SIZES = {"d_model": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "vocab_size": 50, **SPEC}
FLAT = {**SIZES, "num_layers": 1}  # where a second layer would show nothing that the first does not
MODERN = {
    "norm": "rms",
    "activation": "swiglu",
    "qk_norm": True,
    "tie_weights": False,
    "logit_soft_cap": 4.0,
    "stagger": True,
}
AXES = (
    {"sequence": 4},
    {"data": 2, "sequence": 2},
    {"sequence": 2, "tensor": 2},
    {"data": 2, "tensor": 2},
    {"tensor": 2, "data": 1, "sequence": 2},
    {"tensor": 2, "other": 2},
)
B, N = 4, 45


def meshes() -> list[DeviceMesh]:
    whole = [init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) for axes in AXES]
    return [*whole[:-1], whole[-1]["tensor"]]


def built(make: Callable[..., nn.Module], *args, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = make(*args, **settings).double()
    for x in model.parameters():  # norms and biases that are not ones and zeros
        nn.init.normal_(x, mean=x.detach().mean().item(), std=0.2)
    return model


def place(mesh: DeviceMesh, axis: str) -> tuple[int, int]:
    return (mesh.get_local_rank(axis), mesh[axis].size()) if axis in (mesh.mesh_dim_names or ()) else (0, 1)


def part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rank's tokens of a batch `(B, N, ...)`."""
    rank, size = place(mesh, "data")
    x = x.chunk(size)[rank]
    rank, size = place(mesh, "sequence")
    first, last = Shards(even_lengths(x.shape[1], size)).bounds(rank)
    return x[:, first:last]


def check_gradients(mesh: DeviceMesh, model: nn.Module, plain: nn.Module, loss: Callable[..., Tensor]) -> None:
    """`loss(model, cut)` sums over tokens; `cut` takes the rank's part of a tensor."""
    ranks = place(mesh, "data")[1] * place(mesh, "sequence")[1]
    torch.manual_seed(1)
    expected = loss(plain, lambda x: x)
    torch.manual_seed(1)
    found = loss(model, lambda x: part(x, mesh)) * ranks
    expected.backward()
    found.backward()
    total = found.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / dist.get_world_size(), expected.detach())
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    for name, ours in model.named_parameters():
        theirs = plain.get_parameter(name)
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(
            grad, theirs.grad, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
        # What all keys, or all pooled rows, have in common changes no softmax.
        assert theirs.grad.abs().max() > 1e-6 or name.endswith(("k_proj.bias", "score.bias")), name


def language_loss(**lengths) -> Callable[..., Tensor]:
    tokens = torch.randint(SIZES["vocab_size"], (B, N + 1), generator=torch.Generator().manual_seed(3))
    mask = lengths.pop("key_padding_mask", None)

    def loss(model: nn.Module, cut: Callable[[Tensor], Tensor]) -> Tensor:
        given = lengths if mask is None else {"key_padding_mask": cut(mask)}
        logits = model(cut(tokens[:, :-1]), **given)
        return F.cross_entropy(logits.flatten(0, 1), cut(tokens[:, 1:]).flatten(), reduction="sum") / (B * N)

    return loss


def check_language_model(mesh: DeviceMesh) -> None:
    dropout = 0.2 if mesh.ndim < 3 and place(mesh, "data")[1] == 1 else 0.0
    plain, model = (built(LongNetLM, **SIZES, attention_dropout=dropout) for _ in range(2))
    check_gradients(mesh, parallelize(model, mesh), plain, language_loss())


def check_modern_language_model(mesh: DeviceMesh) -> None:
    plain, model = (built(LongNetLM, **FLAT, **MODERN) for _ in range(2))
    model = parallelize(model, mesh)
    check_gradients(mesh, model, plain, language_loss())
    for name, parameter in model.named_parameters():  # an optimizer on shards needs sums, not each rank's summands
        assert not isinstance(parameter, DTensor) or parameter.grad.placements == parameter.placements, name


def check_saving(mesh: DeviceMesh) -> None:
    """The first rank writes the weights of all of them, and an error of its own is raised on every rank."""
    plain = built(LongNetLM, **FLAT)
    model = parallelize(built(LongNetLM, **FLAT), mesh)
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    model.save_pretrained(where[0])
    loaded = LongNetLM.from_pretrained(where[0])
    assert all(map(torch.equal, loaded.parameters(), plain.parameters()))
    with pytest.raises(ValueError, match="save it with save_pretrained"):
        model.generate(torch.zeros(1, 4, dtype=torch.int64), 2)
    config = LongNetConfig(**FLAT)
    parallelize(built(LongNetForCausalLM, config=config), mesh).save_pretrained(where[0])
    loaded = LongNetForCausalLM.from_pretrained(where[0])
    assert all(map(torch.equal, loaded.parameters(), built(LongNetForCausalLM, config=config).parameters()))
    (Path(where[0]) / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        model.save_pretrained(Path(where[0]) / "file")


def check_padded_language_model(mesh: DeviceMesh) -> None:
    """Recomputed, too, with other positions and another layout of heads."""
    mask = torch.arange(N) >= torch.tensor([[N - 2], [20], [N], [33]])
    plain, model = (built(LongNetLM, **FLAT, head_layout="blocked", positions="xpos") for _ in range(2))
    model.gradient_checkpointing_enable()
    check_gradients(mesh, parallelize(model, mesh), plain, language_loss(key_padding_mask=mask))


def check_packed(mesh: DeviceMesh) -> None:
    """Lengths that are not a mask speak of the whole sequence."""
    plain, model = (built(LongNetLM, **FLAT) for _ in range(2))
    lengths = {"seqlens": torch.tensor([N, 7, 30, 12])}
    check_gradients(mesh, parallelize(model, mesh, scheme="ring"), plain, language_loss(**lengths))


def check_encoder_decoder(mesh: DeviceMesh) -> None:
    src, tgt = (torch.randn(B, n, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (N, 21))
    mask = torch.arange(N) >= torch.tensor([[N], [20], [N], [33]])
    plain, model = (built(LongNet, **{**FLAT, "num_decoder_layers": 1}) for _ in range(2))

    def loss(model: nn.Module, cut: Callable[[Tensor], Tensor]) -> Tensor:
        return model(cut(src), cut(tgt), src_key_padding_mask=cut(mask)).square().sum()

    check_gradients(mesh, parallelize(model, mesh), plain, loss)


def check_multihead(mesh: DeviceMesh) -> None:
    """Three different inputs, rings, and a fused projection, with grouped queries too."""
    x, y, z = torch.randn(3, B, N, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).unbind(0)
    for make in (MultiheadDilatedAttention, RingMultiheadDilatedAttention, RingAdvancedDistributedDilatedAttention):
        plain = built(MultiheadDilatedAttention, 32, 4, **SPEC)
        model = parallelize(built(make, 32, 4, **SPEC), mesh)

        def loss(model: nn.Module, cut: Callable[[Tensor], Tensor]) -> Tensor:
            out = model(cut(x), cut(y), value=cut(z), is_causal=True)
            return (out if isinstance(out, Tensor) else out[0]).square().sum()

        check_gradients(mesh, model, plain, loss)
    for kv_heads in (2, 4):
        fused = ImprovedMultiheadDilatedAttention(32, 4, **SPEC, num_kv_heads=kv_heads).double()
        plain = built(MultiheadDilatedAttention, 32, 4, **SPEC, num_kv_heads=kv_heads)
        fused.load_state_dict(plain.state_dict())
        model = parallelize(fused, mesh)
        check_gradients(mesh, model, plain, loss)
        whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
        again = ImprovedMultiheadDilatedAttention(32, 4, **SPEC, num_kv_heads=kv_heads).double()
        again.load_state_dict(whole)
        torch.testing.assert_close(again(x, x, x), plain(x, x, x))
        heads = [x.to_local() for x in (model.q_proj.weight, model.k_proj.weight) if mesh.ndim == 1]
        assert [x.shape[0] for x in heads] in ([], [16, 4 * kv_heads])


def check_attention(mesh: DeviceMesh) -> None:
    """Without parameters there is nothing to shard: rows and heads only."""
    q, k, v = torch.randn(3, B, N, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).unbind(0)
    rank, size = place(mesh, "tensor")
    attention = parallelize(DilatedAttention(**SPEC), mesh)
    mine = [part(x, mesh).chunk(size, 2)[rank] for x in (q, k, v)]
    found = attention(*mine)
    check_schedule_is_shared(lambda: attention(*mine))
    torch.testing.assert_close(found, part(DilatedAttention(**SPEC)(q, k, v), mesh).chunk(size, 2)[rank])


def check_dropout(mesh: DeviceMesh) -> None:
    """Ranks that share features drop them independently, and go on drawing alike."""
    torch.manual_seed(0)
    attention = MultiheadDilatedAttention(32, 4, **SPEC)
    model = parallelize(nn.Sequential(attention, FeedForward(32, 4000, dropout=0.25)), mesh)
    dropout = model[1].dropout
    kept = dropout(torch.ones(2000))
    everyone = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, kept)
    assert {round(x, 4) for x in kept.unique().tolist()} == {0.0, round(1 / 0.75, 4)}
    other = everyone[dist.get_rank() ^ 2]  # of the same pair along the axis
    assert 0.7 < (kept > 0).double().mean() < 0.8
    assert 0.5 < ((kept > 0) & (other > 0)).double().mean() < 0.62  # 0.5625 when independent
    after = [torch.empty(1) for _ in everyone]
    dist.all_gather(after, torch.rand(1))
    assert len({x.item() for x in after}) == 1
    model.eval()
    assert torch.equal(dropout(kept), kept)


def check_bad_meshes() -> None:
    rank = dist.get_rank()
    tensor = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    sequence = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))
    data = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    heads = {"embed_dim": 24, "segment_lengths": [256], "dilation_rates": [1]}

    def multihead(num_heads: int = 4, make: type[nn.Module] = MultiheadDilatedAttention, **settings) -> nn.Module:
        torch.manual_seed(0)
        return make(num_heads=num_heads, **heads, **settings)

    def unlike() -> nn.Module:
        torch.manual_seed(rank)
        return MultiheadDilatedAttention(num_heads=4, **heads)

    ring = multihead(make=RingMultiheadDilatedAttention, ring_size=4)
    zigzag = multihead(make=RingMultiheadDilatedAttention, scheme="gather", token_layout="zigzag")
    sparse = multihead(make=BlockSparseMultiheadDilatedAttention)
    fused = multihead(6, make=ImprovedMultiheadDilatedAttention)
    no_names = init_device_mesh("cpu", (2, 2))
    unknown = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "model"))
    scheme = "auto" if rank else "gahter"
    cases = {
        "2 axes without names": (multihead(), no_names, {}),
        "must be of data, sequence, tensor, got \\('sequence', 'model'\\)": (multihead(), unknown, {}),
        "4 ranks of the axis 'tensor' must divide the 6 heads of the model": (multihead(6), tensor, {}),
        "must divide the 2 key/value heads": (multihead(4, num_kv_heads=2), tensor, {}),
        "must divide the 30 feed-forward features of 1": (nn.Sequential(multihead(), FeedForward(24, 30)), tensor, {}),
        "must divide the 6 heads of the model \\(Improved": (fused, tensor, {}),
        "parameter q_proj.weight": (unlike(), data, {}),
        "must be one of auto": (multihead(), sequence, {"scheme": scheme}),
        "rank 0 has memory_budget=1, rank 1 has memory_budget=0": (multihead(), data, {"memory_budget": int(not rank)}),
        "got 4 and 1: leave ring_size out": (ring, data, {}),
        "token_layout='zigzag', and a model's sequences are cut into contiguous shards": (zigzag, sequence, {}),
        "not built to attend across ranks": (sparse, sequence, {}),
        "Linear has no dilated attention": (nn.Linear(4, 4), data, {}),
    }
    for message, (model, mesh, settings) in cases.items():
        before = repr(model)
        with pytest.raises(ValueError, match=message):
            parallelize(model, mesh, **settings)
        assert repr(model) == before
        assert not any(isinstance(x, DTensor) for x in model.parameters())
    model = parallelize(multihead(), data)
    with pytest.raises(ValueError, match="parallelize it once"):
        parallelize(model, data)


def check_layers_ask_nothing(mesh: DeviceMesh) -> None:
    """A forward pass asks for the shards' lengths once, whatever its layers; an encoder-decoder asks for each side's.

    The first rank has 12 tokens of 48 and of 47, and is asked all the same. Recomputed layers ask nothing, also after
    calls without gradients, and only the rows of a forward pass travel once more.
    """
    ranks = ranks_of(mesh=mesh)
    decoder = parallelize(built(LongNetLM, **{**SIZES, "num_layers": 4}), mesh, shard_parameters=False)
    both = parallelize(built(LongNet, **SIZES, num_decoder_layers=2), mesh, shard_parameters=False)
    one, two = torch.ones(1, 48, dtype=torch.long), torch.ones(1, 48, 32, dtype=torch.float64)
    for model, inputs, rounds in ((decoder, (one,), 1), (both, (two, two), 3)):
        posts = []
        for recompute in (False, True):
            model.gradient_checkpointing_enable(recompute)
            with torch.no_grad():
                model(*(part(x[:, :47], mesh) for x in inputs))
            asked = []
            for tokens in (48, 47, 48):
                mine = [part(x[:, :tokens], mesh) for x in inputs]
                asking = mock.patch.object(ranks.agreement, "exchange", side_effect=ranks.agreement.exchange)
                posting = mock.patch.object(ranks, "post", side_effect=ranks.post)
                with asking as exchange, posting as post:
                    model(*mine).square().sum().backward()
                asked.append(exchange.call_count)
            assert asked[2] == rounds, (recompute, asked)
            assert recompute or asked[0] > rounds, asked
            posts.append(sum(call.args[2][0] == "forward" for call in post.mock_calls))
        assert posts[1] == 2 * posts[0] > 0, posts


def check_recomputed_layers_keep_their_lengths(mesh: DeviceMesh) -> None:
    """Forward and backward passes of several sequences, in any order: recomputed layers find their lengths, or ask."""
    tokens = torch.randint(SIZES["vocab_size"], (1, 48), generator=torch.Generator().manual_seed(3))
    for passes in ("f0 f1 f2 b2 b1 b0", "f0 f1 b0 f2 b1 b2"):  # the second as in a pipeline
        grads = []
        for recompute in (False, True):
            model = parallelize(built(LongNetLM, **SIZES), mesh, shard_parameters=False)
            model.gradient_checkpointing_enable(recompute)
            losses = {}
            for name, number in passes.split():
                if name == "f":
                    losses[number] = model(part(tokens[:, : 48 - int(number)], mesh)).square().sum()
                else:
                    losses[number].backward()
            grads.append([x.grad for x in model.parameters()])
        for one, other in zip(*grads):
            torch.testing.assert_close(one, other)


def check_slides() -> None:
    """Models that pool rows: every rank has the whole sequences, their predictions and the gradients of one device."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(B, N, 12, dtype=torch.float64, generator=draw)
    places, lengths = torch.randint(20 * 256, (B, N, 2), generator=draw), torch.tensor([N, 20, 7, 33])
    sizes = {key: SIZES[key] for key in ("d_model", "num_heads", "num_layers")} | {"input_dim": 12, "num_classes": 3}

    def encoder(**fields) -> nn.Module:
        return built(LongNetEncoder, **sizes, **SPEC, **fields)

    masked = {"key_padding_mask": torch.arange(N) < (N - lengths)[:, None]}
    cases = [
        (encoder, {"positions": "coordinates", "cls_rows": 1}, x, {"coordinates": places, "seqlens": lengths}),
        (encoder, {"positions": "rotary", "pooling": "attention"}, x, masked),
        (lambda: built(lambda: patch_gigapath(SlideEncoder())), {}, x, {"coords": places}),
        (encoder, {"pooling": "cls"}, x[:1], {"cu_seqlens": torch.tensor([0, 3, 20, N])}),
    ]
    size = dist.get_world_size()
    for make, fields, rows, given in cases:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("sequence",))
        model = parallelize(make(**fields), mesh)
        if fields.get("pooling") == "attention":
            model.gradient_checkpointing_enable()
        check_pooled(mesh, make(**fields), model, rows, given)
        several = parallelize(make(**fields).float(), mesh, shard_parameters=False)
        single = make(**fields).float()(rows.float(), **given)
        torch.testing.assert_close(several(rows.float(), **given), single, rtol=1e-5, atol=1e-5)
        if size == 2 and len(rows) == B:  # one rank along the axis
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "sequence"))
            check_pooled(mesh, make(**fields), parallelize(make(**fields), mesh), rows, given)
    with pytest.raises(ValueError, match="whole sequences="):
        several(rows[:, dist.get_rank() :].float())


def check_generation_is_refused(mesh: DeviceMesh) -> None:
    model = parallelize(built(LongNetLM, **FLAT), mesh, shard_parameters=False)
    with pytest.raises(ValueError, match="a cache serves whole branches on one device"):
        model.generate(torch.zeros(1, 4, dtype=torch.int64), 2)


def check_pooled(mesh: DeviceMesh, plain: nn.Module, model: nn.Module, x: Tensor, given: dict[str, Tensor]) -> None:
    rank, parts = place(mesh, "data")

    def loss(which: nn.Module, _: object) -> Tensor:
        if which is plain:
            return plain(x, **given).square().sum()
        mine = {name: value.chunk(parts)[rank] for name, value in given.items()}
        out = model(x.chunk(parts)[rank], **(mine if parts > 1 else given))
        return out.square().sum() / place(mesh, "sequence")[1]  # every rank has the whole loss

    check_gradients(mesh, model, plain, loss)


def check_parallelize() -> None:
    check_bad_meshes()
    sequence, _, both, *_, heads = every = meshes()
    for mesh in every:
        check_language_model(mesh)
    for mesh in (both, every[-2], heads):
        check_modern_language_model(mesh)
        check_saving(mesh)
    for mesh in (every[1], both):
        check_padded_language_model(mesh)
    for mesh in (sequence, both):
        check_packed(mesh)
        check_attention(mesh)
        check_encoder_decoder(mesh)
    # A group of its own: in the other, earlier checks left calls with gradients that no backward pass followed. Their
    # lengths are kept, because they may still be recomputed, and where those are ambiguous recomputed layers ask.
    fresh = DeviceMesh.from_group(dist.new_group(range(4)), "cpu", mesh_dim_names=("sequence",))
    check_layers_ask_nothing(fresh)
    check_recomputed_layers_keep_their_lengths(fresh)
    check_generation_is_refused(fresh)
    check_multihead(both)
    check_multihead(heads)
    check_dropout(heads)
