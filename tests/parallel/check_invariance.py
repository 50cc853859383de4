"""On any number of ranks rows and gradients are those of the reference, and bytes as the formulas say."""

from __future__ import annotations

import dataclasses
import random

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.core import DilatedSpec
from dilated_attention_pytorch.functional import dilated_attention
from dilated_attention_pytorch.parallel.attention import sharded_dilated_attention
from dilated_attention_pytorch.parallel.group import RankGroup, ranks_of
from dilated_attention_pytorch.parallel.schemes import branch_traffic
from dilated_attention_pytorch.parallel.sharding import (
    Shards,
    even_lengths,
    shared_segments,
    zigzag_lengths,
    zigzag_order,
)
from dilated_attention_pytorch.parallel.wire import Traffic, Wire

from ..conformance.checks import BASE, CORNERS, ENOUGH_ROWS, check_errors, keys_per_row
from ..conformance.draws import HEADS, LENGTHS, Draw


def random_draw(chance: random.Random) -> Draw:
    heads, kv_heads = chance.choice([*HEADS, (4, 4), (6, 6), (12, 12)])
    branches = chance.randint(1, 4)
    lengths = chance.choice(LENGTHS)
    return Draw(
        batch=1 if lengths == "packed" else chance.randint(1, 3),
        tokens=chance.randint(1, 70),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=chance.choice([4, 8]),
        segment_lengths=tuple(chance.choice([chance.randint(1, 80), 8, 16, 64]) for _ in range(branches)),
        dilation_rates=tuple(chance.choice([1, 1, 2, 3, 4, 7]) for _ in range(branches)),
        head_layout=chance.choice(["interleaved", "blocked", "grouped"]),
        is_causal=chance.random() < 0.5,
        scale=chance.choice([None, 0.3, -0.2]),
        dropout_p=chance.choice([0.0, 0.0, 0.3]),
        lengths=lengths,
        shards=chance.choice([1, 1, 3]),
        seed=chance.randrange(2**32),
    )


def cut(tokens: int, ranks: int, chance: random.Random) -> tuple[int, ...]:
    """The default cut, or one of unequal lengths."""
    if chance.random() < 0.6:
        return even_lengths(tokens, ranks)
    edges = sorted(chance.randint(0, tokens) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, tokens]))


def results(tensors, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    covered = lse != -torch.inf
    loss = (out * do).sum()
    if dlse is not None:
        loss = loss + torch.where(covered, lse * dlse, 0.0).sum()
    grads = torch.autograd.grad(loss, tensors)
    found = {"out": out, "lse": lse.masked_fill(~covered, 0.0), **dict(zip(("dq", "dk", "dv"), grads))}
    return {name: x.detach().double() for name, x in found.items()} | {"covered": covered}


def expected_of(draw: Draw, dtype: torch.dtype, through_lse: bool) -> tuple[tuple, dict[str, Tensor]]:
    """The inputs in float64, the gradients that come from above, and what the reference makes of them."""
    generator = torch.Generator().manual_seed(draw.seed + 2)
    whole = tuple(x.detach().double().requires_grad_() for x in draw.tensors(dtype))
    do = torch.randn(whole[0].shape, dtype=torch.float64, generator=generator).to(dtype).double()
    dlse = torch.randn(whole[0].shape[:3], dtype=torch.float64, generator=generator) if through_lse else None
    torch.manual_seed(draw.seed % 2**32)
    both = dilated_attention(*whole, **draw.settings(), return_lse=True, backend="reference")
    return (whole, do, dlse), results(whole, *both, do, dlse)


def tokens_of(shards: Shards, rank: int) -> Tensor:
    """Which tokens of the whole a rank has, in its order."""
    if shards.ranks is None:
        return torch.arange(*shards.bounds(rank))
    lengths = zigzag_lengths(shards.tokens, shards.size)
    return torch.tensor(zigzag_order(shards.tokens, shards.size), dtype=torch.int64).split(lengths)[rank]


def check(
    ranks: RankGroup, draw: Draw, shards: Shards, scheme: str, dtype: torch.dtype, inputs: tuple, expected, stated: bool
) -> None:
    here = tokens_of(shards, ranks.rank)
    whole, do, dlse = inputs
    settings = draw.settings()
    mine = tuple(x.detach()[:, here].to(dtype).contiguous().requires_grad_() for x in whole)
    if "key_padding_mask" in settings:
        settings["key_padding_mask"] = settings["key_padding_mask"][:, here]
    # Only the first rank's draw counts.
    torch.manual_seed(draw.seed % 2**32 if ranks.rank == 0 else ranks.rank)
    ranks.traffic.clear()
    out, lse = sharded_dilated_attention(
        *mine,
        **settings,
        ranks=ranks,
        scheme=scheme,
        return_lse=True,
        shard_lengths=[shards.tokens_of(rank) for rank in range(ranks.size)] if stated else None,
        token_layout="contiguous" if shards.ranks is None else "zigzag",
    )
    assert out.dtype == dtype
    part = None if dlse is None else dlse[:, here].to(lse.dtype)
    found = results(mine, out, lse, do[:, here].to(dtype), part)
    assert torch.equal(found["covered"], expected["covered"][:, here])
    names = ("out", "lse", "dq", "dk", "dv")
    squares = torch.stack([(found[name] - expected[name][:, here]).square().sum() for name in names])
    dist.all_reduce(squares, group=ranks.group)
    errors = {name: square**0.5 for name, square in zip(names, squares.tolist())}
    if dtype != torch.float64:
        check_errors(draw, dtype, errors, expected, keys_per_row(draw))
    else:
        assert all(error <= 1e-10 * max(1.0, expected[name].norm().item()) for name, error in errors.items()), errors
    if scheme != "auto" and ranks.size > 1:
        check_bytes(ranks, draw, shards, scheme, dtype, settings)


def check_bytes(ranks: RankGroup, draw: Draw, shards: Shards, scheme: str, dtype: torch.dtype, settings) -> None:
    if {"seqlens", "cu_seqlens", "key_padding_mask"} & set(settings):
        return  # the segments of documents are the same functions' affair
    groups = draw.heads // draw.kv_heads
    spec = DilatedSpec.of(draw.segment_lengths, draw.dilation_rates, draw.head_layout)
    first = draw.kv_heads if draw.shards > 1 else 0
    table = spec.offsets(draw.kv_heads, first=first, total=draw.kv_heads * draw.shards)
    size = dtype.itemsize
    for index, branch in enumerate(spec.branches):
        segments = shared_segments(branch, shards, [(range(draw.batch), 0, draw.tokens)])
        wire = Wire(branch, table[index], groups, draw.head_dim, size, max(4, size), draw.is_causal, shards)
        for stage in ("forward", "backward"):
            formula = branch_traffic(scheme, wire, segments, ranks.rank, backward=stage == "backward")
            counted = ranks.traffic.get((stage, index), Traffic(0, 0))
            assert counted == formula, (stage, index, counted, formula)


def able(draw: Draw, ranks: int, scheme: str) -> bool:
    """Whether the ranks that any segment may lie on divide the heads."""
    return scheme != "all_to_all" or all(draw.kv_heads % n == 0 for n in range(2, ranks + 1))


def check_invariance(seed: int, count: int, group: dist.ProcessGroup | None = None) -> None:
    """Corners and `count` random problems, on the ranks of a group."""
    chance = random.Random(seed)
    ranks = ranks_of(group)
    wide = {"heads": 12, "kv_heads": 12}
    cases = [dataclasses.replace(BASE, **change) for change in CORNERS.values()]
    cases += [
        dataclasses.replace(BASE, **wide),
        dataclasses.replace(BASE, **wide, is_causal=True, tokens=53, segment_lengths=(8, 20, 53)),
        dataclasses.replace(BASE, heads=24, kv_heads=12, is_causal=True, dropout_p=0.3, tokens=50),
        dataclasses.replace(BASE, **wide, batch=1, lengths="packed", is_causal=True, tokens=60),
        dataclasses.replace(BASE, **wide, lengths="left-padded", tokens=60),
    ]
    cases += [random_draw(chance) for _ in range(count)]
    for number, case in enumerate(cases):
        draw = dataclasses.replace(case, seed=chance.randrange(2**32))
        shards = Shards(cut(draw.tokens, ranks.size, chance))
        through_lse, stated = chance.random() < 0.3, chance.random() < 0.5
        dtype = [torch.float64, torch.float64, torch.float32, torch.bfloat16][number % 4]
        if draw.tokens < 32 or draw.head_dim < 8 or draw.dropout_p:
            dtype = torch.float64  # the budget is for many roundings, and not for dropout's cancellations
        if dtype != torch.float64:
            draw, through_lse = dataclasses.replace(draw, batch=1 if draw.lengths == "packed" else 4), False
        inputs, expected = expected_of(draw, dtype, through_lse)
        if dtype != torch.float64 and expected["covered"].sum() < ENOUGH_ROWS:
            dtype = torch.float64
            inputs, expected = expected_of(draw, dtype, through_lse)
        schemes = ("gather", "ring", "all_to_all", "auto") if ranks.size > 1 else ("auto",)
        runs = [(shards, scheme) for scheme in schemes if able(draw, ranks.size, scheme)]
        for cut_into, scheme in [*runs, (Shards.zigzag(draw.tokens, ranks.size), "gather")]:
            try:
                check(ranks, draw, cut_into, scheme, dtype, inputs, expected, stated)
            except BaseException:
                print(f"rank {ranks.rank}: {draw} {cut_into} {scheme=} {dtype=} {through_lse=} {seed=}", flush=True)
                raise
