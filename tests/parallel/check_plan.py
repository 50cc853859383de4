"""On several ranks: what `plan` computes is what travels and what is held."""

from __future__ import annotations

from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch.core import DilatedSpec
from dilated_attention_pytorch.parallel import RankGroup, ranks_of, sharded_dilated_attention
from dilated_attention_pytorch.parallel.plan import Job, make_plan
from dilated_attention_pytorch.parallel.wire import Traffic


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it, and those it is shown, held at once."""

    def __init__(self, *shown: torch.Tensor) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.look(shown)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.look(tree_leaves(made))
        return made

    def look(self, tensors) -> None:
        for x in tensors:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))


def check_plan() -> None:
    ranks = ranks_of()
    for scheme, is_causal, token_layout in (
        ("gather", False, "contiguous"),
        ("gather", True, "zigzag"),
        ("ring", True, "contiguous"),
        ("ring", False, "contiguous"),
        ("all_to_all", True, "contiguous"),
    ):
        job = Job(
            spec=DilatedSpec.of([64, 500, 2048], [1, 2, 3]),
            tokens=2001,
            gpus=ranks.size,
            heads=8,
            kv_heads=4,
            head_dim=16,
            dtype="float32",
            batch=2,
            is_causal=is_causal,
            scheme=scheme,
            token_layout=token_layout,
        )
        check(ranks, job)


def check(ranks: RankGroup, job: Job) -> None:
    plan = make_plan(job)
    mine = plan.ranks[ranks.rank]
    q, do = (torch.randn(job.batch, mine.tokens, job.heads, job.head_dim) for _ in range(2))
    k, v = (torch.randn(job.batch, mine.tokens, job.key_heads, job.head_dim) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    ranks.traffic.clear()
    saved, buffers = [], LiveBytes()

    def post(sends, receives, entry, profile=None):
        sends, receives = list(sends), list(receives)
        buffers.look([mail.buffer for mail in (*sends, *receives)])
        return RankGroup.post(ranks, sends, receives, entry)

    def save(x):
        saved.append(x.nbytes)
        return x

    with LiveBytes(q, k, v, do) as seen, mock.patch.object(ranks, "post", post):
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            out = sharded_dilated_attention(
                q,
                k,
                v,
                job.spec.segment_lengths,
                job.spec.dilation_rates,
                is_causal=job.is_causal,
                scheme=job.scheme,
                token_layout=job.token_layout,
            )
        forward_buffers = buffers.peak
        grads = torch.autograd.grad(out, (q, k, v), do)
    for stage in ("forward", "backward"):
        for index, branch in enumerate(plan.branches):
            counted = ranks.traffic.get((stage, index), Traffic(0, 0))
            assert counted == getattr(branch, stage)[ranks.rank], (job, stage, index, counted)
    assert sum(saved) == mine.saved, (job, saved, mine)
    delta = 4 * q[..., 0].numel()
    assert do.nbytes + sum(grad.nbytes for grad in grads) + delta == mine.gradients, (job, mine)
    # Buffers of branches are not all at their largest at once.
    assert 0.5 * mine.messages_forward <= forward_buffers <= mine.messages_forward, (job, forward_buffers, mine)
    assert 0.4 * mine.messages_backward <= buffers.peak <= mine.messages_backward, (job, buffers.peak, mine)
    if job.scheme != "all_to_all":  # whose scores come in chunks of a size that is large beside a small problem
        assert 0.8 <= seen.peak / mine.peak <= 2.0, (job, seen.peak, mine)
