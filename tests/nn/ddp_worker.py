"""Run on two ranks: DDP trains models of all kinds, and no parameter is left without a gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch import ImprovedMultiheadDilatedAttention, LongNet, LongNetLM

SPEC = {"segment_lengths": [4, 8, 16], "dilation_rates": [1, 2, 3]}
SIZES = {"d_model": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2, **SPEC}
N = 21


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    models = [LongNetLM(**SIZES), LongNet(**SIZES), ImprovedMultiheadDilatedAttention(16, 4, **SPEC)]
    x = torch.full((1, N, 16), float(rank + 1)).cumsum(1)
    calls = [
        lambda m: m(torch.full((1, N), rank)),
        lambda m: m(x, x),
        lambda m: m(x, x, x)[0],
    ]
    for model, call in zip(models, calls):
        # An unused parameter makes the second step raise, since unused ones are not looked for.
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            call(wrapped).square().sum().backward()
    # If this were the last owner of the group, it would wait with the GIL for a thread that may need the GIL.
    del wrapped
    own = torch.cat([p.grad.flatten() for model in models for p in model.parameters()])
    assert own.isfinite().all()
    all_ranks = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(all_ranks, own)
    torch.testing.assert_close(*all_ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
