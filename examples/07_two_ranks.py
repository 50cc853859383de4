# %% [markdown]
# # One sequence on two ranks, with FSDP2
# Two processes (ranks) share one sequence: each holds half of its tokens. FSDP2 shards parameters, gradients and
# optimizer state between them. Attention still covers the whole sequence. Start the script with
#
#     torchrun --nproc-per-node=2 examples/07_two_ranks.py
#
# `python examples/07_two_ranks.py` runs it on one rank, with the same losses. On GPUs, call
# `torch.cuda.set_device` with the local rank first, and use "nccl" and "cuda" instead of "gloo" and "cpu".

# %%
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dilated_attention_pytorch import LongNetLM, branches_for, parallelize

if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
rank, ranks = dist.get_rank(), dist.get_world_size()

# %% [markdown]
# Every rank makes the same weights, and `parallelize` shards them. A mesh may also have the axes `data` and `tensor`.

# %%
TOKENS = 512
torch.manual_seed(0)
segment_lengths, dilation_rates = branches_for(TOKENS, heads=4, shortest=64, is_causal=True)
whole = LongNetLM(
    vocab_size=256,
    d_model=64,
    num_heads=4,
    num_layers=2,
    segment_lengths=segment_lengths,
    dilation_rates=dilation_rates,
)
total = sum(p.numel() for p in whole.parameters())
model = parallelize(whole, init_device_mesh("cpu", (ranks,), mesh_dim_names=("sequence",)))
held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

# %% [markdown]
# A rank takes its own shard, a contiguous part of the sequence. All shards have the same number of tokens here, so the
# loss of a rank is the mean over its tokens. FSDP2 averages the gradients.

# %%
text = torch.tensor(list(b"All happy families are alike; each unhappy family is unhappy in its own way. " * 20))
mine = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
report = [f"rank {rank} of {ranks}: tokens {mine.start} to {mine.stop - 1}, {held:,} of {total:,} parameters"]
for step in range(1, 21):
    start = 7 * step
    row = text[None, start : start + TOKENS + 1]
    logits = model(row[:, :-1][:, mine])
    loss = F.cross_entropy(logits.flatten(0, 1), row[:, 1:][:, mine].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0 and step % 5 == 0:
        report.append(f"step {step}: loss {mean:.4f}")
print("\n".join(report), flush=True)
dist.destroy_process_group()
