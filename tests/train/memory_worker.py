"""Run on two ranks: memory techniques on a model that ranks share, and on a sequence that they share."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dilated_attention_pytorch import LongNetLM, RingDilatedAttention
from dilated_attention_pytorch.nn import DilatedTransformerEncoderLayer
from dilated_attention_pytorch.parallel import attention as across
from dilated_attention_pytorch.train import muon
from dilated_attention_pytorch.train.memory import MemoryOptions, loss, make_optimizer, prepare
from dilated_attention_pytorch.train.ranks import Ranks

OPTIONS = MemoryOptions(checkpointing="selective", offload=True, offload_least_bytes=1, mlp_tile=24, loss_chunk=32)
SHAPE = {"segment_lengths": (16, 64), "dilation_rates": (1, 4)}


def small_model(**sizes: int) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(d_model=32, num_heads=4, num_layers=2, vocab_size=50, **SHAPE, **sizes).double()


def check_shared_model(engine: str) -> None:
    """Gradients of the mean over both ranks' sequences, sharded or copied, are those of one process."""
    rank = dist.get_rank()
    tokens = torch.randint(50, (2, 61), generator=torch.Generator().manual_seed(1))
    plain = small_model()
    loss(plain, tokens[:, :-1], tokens[:, 1:], MemoryOptions()).backward()
    prepared = prepare(small_model(), OPTIONS)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = Ranks(device=torch.device("cpu"), rank=rank, mesh=mesh).share(prepared, engine)
    for _ in range(2):  # a second step finds what the first one left
        model.zero_grad()
        mine = tokens[rank : rank + 1]
        loss(model, mine[:, :-1], mine[:, 1:], OPTIONS).backward()
    for (name, expected), found in zip(plain.named_parameters(), prepared.parameters()):
        grad, wanted = found.grad, expected.grad
        if isinstance(grad, DTensor):
            parts = torch.chunk(wanted, 2)
            grad, wanted = grad.to_local(), parts[rank] if rank < len(parts) else wanted[:0]
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-10, msg=lambda text: f"{engine} {name}: {text}")  # noqa: B023


def check_optimizer() -> None:
    """bitsandbytes has no way with shards, whether it is installed or not."""
    shard = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ValueError, match="choose 'adamw8bit-torchao' for them"):
        make_optimizer([{"params": [torch.nn.Parameter(shard)]}], MemoryOptions(optimizer="adamw8bit-bitsandbytes"))


def check_muon() -> None:
    """Each matrix of layers is orthogonalised on one rank, and weights and momentum are those of one process."""
    rank, options, rates = dist.get_rank(), MemoryOptions(optimizer="muon"), {"lr": 1e-2, "weight_decay": 0.1}
    tokens = torch.randint(50, (2, 61), generator=torch.Generator().manual_seed(1))
    alone, prepared = (small_model(dim_feedforward=33) for _ in range(2))  # shards of 17 and of 16 rows
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = Ranks(device=torch.device("cpu"), rank=rank, mesh=mesh).share(prepared, "fsdp")
    expected, shared = make_optimizer(alone, options, **rates), make_optimizer(model, options, **rates)
    calls, real = [], muon._orthogonal
    for one, optimizer, drawn in ((alone, expected, tokens), (model, shared, tokens[rank : rank + 1])):
        if one is model:
            muon._orthogonal = lambda x: calls.append(len(x)) or real(x)
        for _ in range(2):
            optimizer.zero_grad()
            loss(one, drawn[:, :-1], drawn[:, 1:], options).backward()
            optimizer.step()
    muon._orthogonal = real
    matrices = sum(p.dim() == 2 for layer in alone.layers for p in layer.parameters())
    assert sum(calls) == 2 * matrices // 2, f"{sum(calls)} updates on rank {rank} of {matrices} matrices"
    for (name, wanted), found in zip(alone.named_parameters(), prepared.parameters()):
        pairs = [(found.full_tensor(), wanted)]
        if "momentum_buffer" in (state := expected.state[wanted]):
            pairs.append((shared.state[found]["momentum_buffer"].full_tensor(), state["momentum_buffer"]))
        for one, other in pairs:  # the orthogonalisation rounds to bfloat16
            torch.testing.assert_close(one, other, rtol=0, atol=2e-4, msg=lambda text: f"muon {name}: {text}")  # noqa: B023


def check_shared_sequence() -> None:
    """A layer whose attention crosses ranks attends once, and gives the rows and gradients of the plain one."""
    rank, calls = dist.get_rank(), []
    torch.manual_seed(0)
    layer = DilatedTransformerEncoderLayer(32, 4, **SHAPE, dropout=0.0).double()
    x = torch.randn(2, 60, 32, dtype=torch.float64)
    expected = layer(x, is_causal=True)
    expected[:, 30 * rank : 30 * (rank + 1)].square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    for gradient in wanted:  # every rank's rows count
        dist.all_reduce(gradient)
    layer.zero_grad()
    layer.self_attn.attention = RingDilatedAttention(**SHAPE)
    forward = across.Pass
    across.Pass = lambda *args: calls.append(1) or forward(*args)
    run = OPTIONS.recomputation
    part = x[:, 30 * rank : 30 * (rank + 1)].clone().requires_grad_()
    found = run(layer, part, is_causal=True)
    torch.testing.assert_close(found, expected[:, 30 * rank : 30 * (rank + 1)])
    found.square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), wanted):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9)
    assert len(calls) == 1, f"attention ran {len(calls)} times"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    check_shared_sequence()
    check_shared_model("fsdp")
    check_shared_model("ddp")
    check_optimizer()
    check_muon()
    if dist.get_rank() == 0:
        print("passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
