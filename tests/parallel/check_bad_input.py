"""On two ranks: what is wrong is an error on both of them at once, and the next call works."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import (
    ReachWarning,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    SparsePatternConfig,
)
from dilated_attention_pytorch.parallel import sharded_dilated_attention

SPEC = ([8, 16], [1, 2])


class _Unreadable(list):
    """Raises what no check expects."""

    def __iter__(self):
        raise KeyError("unreadable")

    __len__ = __str__ = __lt__ = __iter__


def shard(tokens: int = 8, heads: int = 4, head_dim: int = 4, dtype: torch.dtype = torch.float32, batch: int = 1):
    return [torch.randn(batch, tokens, heads, head_dim, dtype=dtype) for _ in range(3)]


def calls(rank: int) -> dict[str, tuple[object, str]]:
    """What each rank calls, and what both must hear."""
    first = rank == 0

    def attend(tensors, spec=SPEC, **settings):
        return lambda: sharded_dilated_attention(*tensors, *spec, **settings)

    hole = torch.zeros(1, 8, dtype=torch.bool)
    hole[0, 7 if first else 0] = True
    flat = [x[0] for x in shard()]

    def forward_mode():
        with forward_ad.dual_level():
            q, k, v = shard()
            dual = forward_ad.make_dual(q, torch.ones_like(q)) if first else q
            return sharded_dilated_attention(dual, k, v, *SPEC)

    def second_derivative():
        q, k, v = (x.requires_grad_() for x in shard())
        out = sharded_dilated_attention(q, k, v, *SPEC)
        torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum().backward()

    stated = {"shard_lengths": (8, 8)}
    return {
        "specs": (attend(shard(), SPEC if first else ([8, 32], [1, 2])), "rank 1 has segment_lengths=\\[8, 32\\]"),
        "stated specs": (
            attend(shard(), ([8, 48] if first else [8, 64], [1, 2]), **stated),
            "rank 0 has segment_lengths=\\[8, 48\\]",
        ),
        "dtypes": (attend(shard(dtype=torch.float32 if first else torch.float64)), "rank 0 has dtype=torch.float32"),
        "heads": (attend(shard(heads=4 if first else 2)), "must make the same call.*heads"),
        "head dims": (attend(shard(head_dim=4 if first else 8)), "must make the same call.*head_dim"),
        "batches": (attend(shard(batch=1 if first else 2)), "must make the same call.*batch"),
        "causality": (attend(shard(), is_causal=first), "rank 0 has is_causal=True, rank 1 has is_causal=False"),
        "schemes": (attend(shard(), scheme="ring" if first else "gather"), "rank 0 has scheme=ring"),
        "gradients": (attend([x.requires_grad_(first) for x in shard()]), "requires_grad=True"),
        "layouts": (
            attend(shard(), token_layout="zigzag" if first else "contiguous"),
            "rank 0 has token_layout=zigzag",
        ),
        "no layout": (attend(shard(), token_layout="zagzig"), "token_layout must be one of contiguous, zigzag"),
        "a layout that the scheme cannot": (
            attend(shard(), token_layout="zigzag", scheme="ring"),
            "'ring' needs contiguous shards.*pass scheme='gather'",
        ),
        "tokens that the layout does not give": (
            attend(shard(tokens=9 if first else 7), token_layout="zigzag"),
            "for 16 tokens \\[8, 8\\], got \\[9, 7\\]: cut the sequence by zigzag_order",
        ),
        "a layout that does not fit": (
            attend(shard(), ([16], [1]), token_layout="zigzag", memory_budget=100),
            "over the memory_budget of 100, and token_layout 'zigzag' only gathers",
        ),
        "tiles that do not fit": (
            attend(shard(), ([16], [1]), sparse_config=SparsePatternConfig(block_size=4), memory_budget=100),
            "over the memory_budget of 100, and a block layout only gathers: .*leave sparse_config out",
        ),
        "lengths": (attend(shard(), seqlens=torch.tensor([9 if first else 10])), "rank 0 has seqlens=\\[9\\]"),
        "lengths on one rank": (attend(shard(), **({"seqlens": torch.tensor([9])} if first else {})), "same call"),
        "too long": (attend(shard(), seqlens=torch.tensor([17])), "outside \\[0, 16\\]"),
        "a hole between shards": (attend(shard(), key_padding_mask=hole), "row 0 has a hole at 7 of the whole"),
        "one bad shape": (attend(shard() if first else flat), "must be \\(batch, tokens, heads, head_dim\\)"),
        "one query that is no tensor": (attend(shard() if first else [None, *shard()[1:]]), "query must be a tensor"),
        "one unexpected error": (attend(shard(), SPEC if first else (_Unreadable(), [1, 2])), "unreadable"),
        "one bad setting": (attend(shard(), dropout_p=0.0 if first else 1.5), "below 1, got 1.5"),
        "shard lengths": (attend(shard(), shard_lengths=(8, 9)), "shard_lengths must state the tokens"),
        "heads that do not divide": (attend(shard(heads=3), ([32], [1]), scheme="all_to_all"), "2 ranks, which do not"),
        "forward mode": (forward_mode, "across ranks computes no forward-mode derivatives"),
        "second derivative": (second_derivative, "across ranks has first derivatives only: do not differentiate"),
        "scheme": (attend(shard(), scheme="gahter"), "scheme must be one of"),
        "reference": (attend(shard(), backend="reference"), "computes whole sequences on one device"),
        "ring size": (lambda: RingDilatedAttention(*SPEC, ring_size=8), "got ring_size=8 and 2 ranks"),
        "multihead ring size": (lambda: RingMultiheadDilatedAttention(16, 4, *SPEC, ring_size=3), "ring_size=3 and 2"),
        "mesh": (
            lambda: RingDilatedAttention(*SPEC, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("data",))),
            "must have an axis named 'sequence'",
        ),
        "group and mesh": (
            lambda: RingDilatedAttention(*SPEC, group=dist.group.WORLD, mesh=init_device_mesh("cpu", (2,))),
            "pass one of them",
        ),
        "block size": (lambda: RingDilatedAttention(*SPEC, block_size=64), "leave block_size out"),
    }


def check_bad_input() -> None:
    rank = dist.get_rank()
    for name, (call, message) in calls(rank).items():
        try:
            with pytest.raises((KeyError, NotImplementedError, TypeError, ValueError), match=message):
                call()
        except BaseException:
            print(f"rank {rank}: {name}", flush=True)
            raise
        # The ranks are still in step.
        assert sharded_dilated_attention(*shard(), *SPEC).shape == (1, 8, 4, 4)
    check_reach_is_of_the_whole_sequence()


def check_reach_is_of_the_whole_sequence() -> None:
    """The shards of 40 tokens are shorter than the longest segment, their sequence is not; the first rank says so."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            sharded_dilated_attention(*shard(40), [16, 64], [1, 4])
    said = [str(one.message) for one in given if one.category is ReachWarning]
    assert len(said) == (dist.get_rank() == 0)
    assert all("at most 64 of 80 tokens" in words for words in said)


def check_nothing() -> None:
    """Without tokens or batch rows on any rank the result is empty on all."""
    for sizes in ({"tokens": 0}, {"batch": 0}):
        inputs = [x.requires_grad_() for x in shard(**sizes)]
        for mask in (None, torch.zeros(inputs[0].shape[:2], dtype=torch.bool)):
            out, lse = sharded_dilated_attention(*inputs, *SPEC, key_padding_mask=mask, return_lse=True)
            assert (out.shape, lse.shape) == (inputs[0].shape, inputs[0].shape[:3])
            grads = torch.autograd.grad(out.sum(), inputs)
            assert [x.shape for x in grads] == [x.shape for x in inputs]
