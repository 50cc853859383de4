"""The published classes on a shard give their rows of what the plain classes give on the whole."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dilated_attention_pytorch import (
    DilatedAttention,
    DistributedImprovedDilatedAttention,
    DistributedImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionV2,
    RingDilatedAttentionV3,
    RingMultiheadDilatedAttention,
    get_global_pattern_cache,
    parallelize,
)
from dilated_attention_pytorch.core.pattern import training_bytes
from dilated_attention_pytorch.parallel import (
    Shards,
    even_lengths,
    ranks_of,
    sharded_dilated_attention,
    zigzag_lengths,
    zigzag_order,
)

SPEC = {"segment_lengths": [8, 16, 64], "dilation_rates": [1, 2, 4]}
N, H, D = 50, 4, 8


def whole(heads: int = H, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, N, heads, D, dtype=torch.float64, generator=generator).unbind(0)
    return q, k, v


def part(x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    first, last = Shards(even_lengths(x.shape[dim], size)).bounds(rank)
    return x.narrow(dim, first, last - first).detach().clone()


def check_rows(module: DilatedAttention, plain: DilatedAttention, rank: int, size: int, **lengths) -> None:
    """Rows and gradients, causal, in training."""
    full = [x.requires_grad_() for x in whole()]
    shard = [part(x, rank, size).requires_grad_() for x in full]
    torch.manual_seed(5)
    expected = plain(*full, is_causal=True, **lengths)
    torch.manual_seed(5)
    found = module(*shard, is_causal=True, **lengths)
    torch.testing.assert_close(found, part(expected, rank, size))
    above = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad((expected * above).sum(), full)
    grads = torch.autograd.grad((found * part(above, rank, size)).sum(), shard)
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad, part(want, rank, size))


def check_attention(rank: int, size: int) -> None:
    plain = DilatedAttention(**SPEC)
    assert RingDilatedAttention(**SPEC, ring_size=size).ring_size == size
    check_rows(RingDilatedAttention(**SPEC, ring_size=size), plain, rank, size)
    check_rows(RingDilatedAttention(**SPEC, use_checkpointing=True), plain, rank, size)
    check_rows(RingDilatedAttentionV2(**SPEC, scheme="auto", enable_profiling=True), plain, rank, size)
    check_rows(copy.deepcopy(RingDilatedAttentionV3(**SPEC)), plain, rank, size)
    check_rows(pickle.loads(pickle.dumps(RingDilatedAttention(**SPEC, ring_size=size))), plain, rank, size)
    check_rows(DistributedImprovedDilatedAttention(**SPEC, sequence_parallel=True), plain, rank, size)
    dropping = {"attention_dropout": 0.3, "softmax_scale": 0.2, "head_layout": "blocked"}
    dropped = {"dropout": 0.3, "softmax_scale": 0.2, "head_layout": "blocked", "use_checkpointing": True}
    check_rows(RingDilatedAttention(**SPEC, **dropped), DilatedAttention(**SPEC, **dropping), rank, size)
    check_rows(RingDilatedAttentionV2(**SPEC), plain, rank, size, seqlens=torch.tensor([33, 50]))


def check_zigzag(rank: int, size: int) -> None:
    """A module in the balanced layout gives its rows, and its multihead twin too."""
    order = torch.tensor(zigzag_order(N, size)).split(zigzag_lengths(N, size))[rank]
    q, k, v = whole()
    settings = {**SPEC, "token_layout": "zigzag", "scheme": "gather"}
    for module in (RingDilatedAttention(**settings), RingDilatedAttentionV3(**settings, ring_size=size)):
        found = module(*(x[:, order] for x in (q, k, v)), is_causal=True, seqlens=torch.tensor([33, 50]))
        expected = DilatedAttention(**SPEC)(q, k, v, is_causal=True, seqlens=torch.tensor([33, 50]))
        torch.testing.assert_close(found, expected[:, order])
    torch.manual_seed(4)
    ring = RingMultiheadDilatedAttention(32, 4, **settings, dtype=torch.float64)
    plain = MultiheadDilatedAttention(32, 4, **SPEC, dtype=torch.float64)
    plain.load_state_dict(ring.state_dict())
    x = torch.randn(2, N, 32, dtype=torch.float64)
    torch.testing.assert_close(ring(*[x[:, order]] * 3, is_causal=True)[0], plain(x, x, x, is_causal=True)[0][:, order])


def check_cache(rank: int, size: int) -> None:
    """A schedule is made once, and anew when buffers are cleaned up or nothing is cached."""
    shard = [part(x, rank, size) for x in whole()]
    for module in (RingDilatedAttentionV2(**SPEC), RingDilatedAttentionV3(**SPEC, cache_on_gpu=True)):
        cache = module._pattern_cache
        cache.clear()
        for calls in range(1, 4):
            module(*shard)
            schedules = [key for key in cache._cache if key[0] == "ring schedule"]
            assert len(schedules) == 1
            assert cache.get_stats()["hits"] >= calls - 1
        module.cleanup_buffers()
        assert not [key for key in cache._cache if key[0] == "ring schedule"]
        module(*shard)
    off, before = RingDilatedAttentionV2(**SPEC, use_pattern_cache=False), get_global_pattern_cache().get_stats()
    off(*shard)
    assert get_global_pattern_cache().get_stats() == before
    pooled = RingDilatedAttentionV2(**SPEC, enable_memory_pool=True, lightweight_pool=True)
    torch.testing.assert_close(pooled(*shard), off(*shard))


def check_memory(rank: int, size: int) -> None:
    module = RingDilatedAttentionV2(**SPEC, scheme="gather")
    ranks = ranks_of()
    ranks.traffic.clear()
    module(*(part(x, rank, size) for x in whole()))
    received = torch.tensor(sum(traffic.received for traffic in ranks.traffic.values()))
    dist.all_reduce(received, dist.ReduceOp.MAX)
    estimate = module.get_memory_estimate(N, batch_size=2, num_heads=H, head_dim=D, dtype=torch.float64)
    assert estimate["received"] == received.item() > 0
    assert estimate["ring_size"] == size
    one = training_bytes(2 * N, H, D, kv_heads=H, itemsize=8)
    assert estimate["memory_reduction_factor"] == one / estimate["total"]
    assert module.get_memory_estimate(65_536)["memory_reduction_factor"] == size  # shards cut no segment
    module.cleanup_buffers()
    module(*(part(x, rank, size) for x in whole()))


def check_aligned_branches_send_nothing(rank: int, size: int) -> None:
    module = RingDilatedAttention([4, 8, 16 * size], [1, 2, 4])
    ranks = ranks_of()
    ranks.traffic.clear()
    x = torch.randn(1, 16, 4, 8)
    module(x, x, x)
    assert {branch for (_, branch), traffic in ranks.traffic.items() if sum(traffic)} == {2}
    ranks.traffic.clear()
    RingDilatedAttention([4, 8], [1, 2])(x, x, x)
    assert not ranks.traffic


def check_multihead(rank: int, size: int) -> None:
    torch.manual_seed(3)
    plain = MultiheadDilatedAttention(32, 4, **SPEC, num_kv_heads=2, dtype=torch.float64)
    ring = RingMultiheadDilatedAttention(32, 4, **SPEC, num_kv_heads=2, ring_size=size, dtype=torch.float64)
    ring.load_state_dict(plain.state_dict())
    x = torch.randn(2, N, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(N) >= torch.tensor([[N - 3], [20]])
    shard, own = part(x, rank, size), part(mask, rank, size)
    expected, _ = plain(x, x, x, key_padding_mask=mask)
    found, weights = ring(shard, shard, shard, key_padding_mask=own)
    assert weights is None
    torch.testing.assert_close(found, part(expected, rank, size))
    advanced = RingAdvancedDistributedDilatedAttention(
        32,
        4,
        **SPEC,
        num_kv_heads=2,
        dtype=torch.float64,
        sequence_parallel=True,
        use_deepspeed=True,
        nvme_offload=True,
    )
    advanced.load_state_dict(plain.state_dict())
    torch.testing.assert_close(advanced(shard, shard, shard, key_padding_mask=own), found)
    expected.square().sum().backward()
    found.square().sum().backward()
    for ours, theirs in zip(ring.parameters(), plain.parameters()):
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad)


def check_axes(rank: int, size: int) -> None:
    """What is stated about axes decides who shares tokens, who shares heads, and who has a batch of its own."""
    generator = torch.Generator().manual_seed(2)
    x, above = torch.randn(2, 2 * size, N, 32, dtype=torch.float64, generator=generator).unbind(0)
    heads = {"model_parallel": True} if size == 2 else {"model_parallel": 2, "data_parallel": 2}
    distributed = {
        "model_parallel": True,
        "mesh": init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("sequence", "tensor")),
    }
    distributed |= {"sequence_parallel": True} if size == 4 else {}
    cases = (
        (RingAdvancedDistributedDilatedAttention, {"sequence_parallel": True}, (1, size, 1)),
        (RingAdvancedDistributedDilatedAttention, {"data_parallel": True}, (size, 1, 1)),
        (RingAdvancedDistributedDilatedAttention, {"sequence_parallel": False}, (size, 1, 1)),
        (RingAdvancedDistributedDilatedAttention, heads, (size // 2, 1, 2)),
        (RingAdvancedDistributedDilatedAttention, {"model_parallel": 2}, (1, size // 2, 2)),
        (DistributedImprovedMultiheadDilatedAttention, distributed, (1, size // 2, 2)),
    )
    for kind, stated, (data, sequence, tensor) in cases:
        torch.manual_seed(3)
        settings = {**SPEC, "num_kv_heads": 2, "dtype": torch.float64}
        plain = MultiheadDilatedAttention(32, 4, **settings)
        torch.manual_seed(3 + rank % tensor)  # heads begin with the first rank's weights
        module = kind(32, 4, **settings, **stated)
        if tensor == 1:
            module.load_state_dict(plain.state_dict())
        else:
            own = {
                name: value.full_tensor() for name, value in module.state_dict().items() if isinstance(value, DTensor)
            }
            dist.broadcast_object_list(shared := [{**module.state_dict(), **own}])
            plain.load_state_dict(shared[0])
            assert module.q_proj.weight.to_local().shape == (16, 32)

        def cut(x: Tensor, data=data, sequence=sequence, tensor=tensor) -> Tensor:
            mine = x.chunk(data)[rank // (sequence * tensor)]
            return part(mine, rank // tensor % sequence, sequence)

        expected = plain(x, x, x, is_causal=True)[0]
        found = module(*[cut(x)] * 3, is_causal=True)
        found = found if isinstance(found, Tensor) else found[0]
        torch.testing.assert_close(found, cut(expected))
        (expected * above).sum().backward()
        (found * cut(above)).sum().backward()
        for name, ours in module.named_parameters():
            grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            dist.all_reduce(grad)
            torch.testing.assert_close(grad / tensor, grads_of(plain)[name])
        copy.deepcopy(module)
    with pytest.raises(ValueError, match="in several ways"):
        RingAdvancedDistributedDilatedAttention(32, 4, **SPEC, model_parallel=True, sequence_parallel=True)
    with pytest.raises(ValueError, match="must divide the 1 key/value heads"):
        RingAdvancedDistributedDilatedAttention(32, 4, **SPEC, num_kv_heads=1, model_parallel=2)
    with pytest.raises(ValueError, match="got model_parallel=True beside it"):
        RingAdvancedDistributedDilatedAttention(32, 4, **SPEC, group=dist.group.WORLD, model_parallel=True)
    refusing = RingAdvancedDistributedDilatedAttention(32, 4, **SPEC, model_parallel=False)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    with pytest.raises(
        ValueError, match=f"model_parallel=False contradicts a mesh with {size} ranks on its axis 'tensor'"
    ):
        parallelize(refusing, mesh)


def grads_of(plain: MultiheadDilatedAttention) -> dict[str, Tensor]:
    """Gradients by name, of fused and separate projections."""
    grads = {name: x.grad for name, x in plain.named_parameters()}
    for kind in ("weight", "bias"):
        grads[f"qkv_proj.{kind}"] = torch.cat([grads[f"{name}_proj.{kind}"] for name in "qkv"])
    return grads


def check_place(rank: int, size: int) -> None:
    """Inputs that are not where one rank's module expects them are an error on every rank."""
    module = RingDilatedAttention(**SPEC, dtype=torch.float64)
    shard = [part(x, rank, size) for x in whole()]
    module(*shard)
    with pytest.raises(ValueError, match=r"dtype=torch.float64, got inputs of torch.float32"):
        module(*(x.float() if rank == 0 else x for x in shard))


def check_compiled(rank: int, size: int) -> None:
    """Compiled code leaves its graph where ranks exchange messages, also in a module loaded or shared later."""
    shard = [part(x, rank, size) for x in whole()]
    module = RingDilatedAttention(**SPEC)
    for one in (module, pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(torch.compile(one, backend="eager")(*shard), module(*shard))
    x = torch.randn(2, shard[0].shape[1], 32)
    alone = [dist.new_group([one]) for one in range(size)][rank]
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("sequence",))
    shared_later = parallelize(RingMultiheadDilatedAttention(32, 4, **SPEC, group=alone), mesh, shard_parameters=False)
    for multihead in (RingMultiheadDilatedAttention(32, 4, **SPEC), shared_later):
        compiled = torch.compile(multihead, backend="eager")
        torch.testing.assert_close(compiled(x, x, x)[0], multihead(x, x, x)[0])
    new = dist.new_group(list(range(size)))  # the compiled call is the first on it
    found = torch.compile(sharded_dilated_attention, backend="eager")(*shard, **SPEC, group=new)
    torch.testing.assert_close(found, module(*shard))


def check_groups(rank: int, size: int) -> None:
    """Pairs of ranks, each pair with a sequence of its own, as groups and as an axis of a mesh."""
    pairs = [dist.new_group([r, r + 1]) for r in range(0, size, 2)]
    group = pairs[rank // 2]
    plain = DilatedAttention(**SPEC)
    module = RingDilatedAttention(**SPEC, group=group, ring_size=2)
    check_rows(module, plain, rank % 2, 2)
    check_rows(copy.deepcopy(module), plain, rank % 2, 2)
    with pytest.raises(TypeError, match="a process group lives in its own processes"):
        pickle.dumps(module)
    with pytest.raises(ValueError, match="this process belongs to"):
        RingDilatedAttention(**SPEC, group=pairs[1 - rank // 2])
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "sequence"))
    check_rows(RingDilatedAttention(**SPEC, mesh=mesh), plain, rank % 2, 2)
    for keyword, message in {
        "data_parallel": "2 ranks on its axis 'data'",
        "sequence_parallel": "axis 'sequence'",
    }.items():
        with pytest.raises(ValueError, match=message):
            RingAdvancedDistributedDilatedAttention(32, 4, **SPEC, mesh=mesh, **{keyword: False})
    check_rows(DistributedImprovedDilatedAttention(**SPEC, group=group), plain, rank % 2, 2)
    with pytest.raises(ValueError, match="say that none do: change one of them"):
        DistributedImprovedDilatedAttention(**SPEC, group=group, sequence_parallel=False)
    for stated in (4, 1, False):
        with pytest.raises(ValueError, match=f"sequence_parallel={stated} contradicts a group of 2 ranks"):
            RingAdvancedDistributedDilatedAttention(32, 4, **SPEC, group=group, sequence_parallel=stated)
    with pytest.raises(ValueError, match=r"an axis named 'tensor', got .*data.*sequence"):
        DistributedImprovedDilatedAttention(**SPEC, model_parallel=True, mesh=mesh)


def check_heads(rank: int, size: int) -> None:
    """Tokens over one axis of a mesh and heads over the other."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("sequence", "tensor"))
    plain = DilatedAttention(**SPEC, head_layout="blocked")
    settings = {"model_parallel": True, "mesh": mesh, "head_layout": "blocked"}
    full = whole(heads=8)
    heads = [part(x, rank % 2, 2, dim=2) for x in full]
    expected = part(plain(*full), rank % 2, 2, dim=2)
    found = DistributedImprovedDilatedAttention(**SPEC, **settings)(*heads)
    torch.testing.assert_close(found, expected)
    both = DistributedImprovedDilatedAttention(**SPEC, **settings, sequence_parallel=True)
    found = both(*(part(x, rank // 2, size // 2) for x in heads))
    torch.testing.assert_close(found, part(expected, rank // 2, size // 2))
    with pytest.raises(ValueError, match="cannot both cut one group"):
        DistributedImprovedDilatedAttention(**SPEC, sequence_parallel=True, model_parallel=True)


def check_names() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    checks = [check_attention, check_zigzag, check_cache, check_memory]
    checks += [check_aligned_branches_send_nothing, check_multihead, check_axes, check_place, check_compiled]
    for check in [*checks, *([check_groups, check_heads] if size == 4 else [])]:
        check(rank, size)
