"""On two and four ranks: calls that were agreed before cost no message, and ranks that then differ all fail at once.

Each case has a group of its own, because a group on which ranks are out of step is closed. No case waits for the
group's timeout, whose error has another text.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch.core.plans import reset_global_pattern_cache
from dilated_attention_pytorch.kernels import op
from dilated_attention_pytorch.parallel import agreement, sharded_dilated_attention
from dilated_attention_pytorch.parallel.group import ranks_of

GLOBAL, LOCAL = ([8, 64], [1, 2]), ([8], [1])
ERRORS = (MemoryError, RuntimeError, TypeError, ValueError)


def tensors(tokens: int = 8, heads: int = 4, head_dim: int = 4, batch: int = 1, **settings):
    return [torch.randn(batch, tokens, heads, head_dim, **settings) for _ in range(3)]


def call(group, qkv=None, spec=GLOBAL, **settings) -> torch.Tensor:
    qkv = tensors() if qkv is None else qkv
    stated = {"shard_lengths": (8,) * dist.get_world_size()} | settings
    return sharded_dilated_attention(*qkv, *spec, group=group, **stated)


def all_fail(group, message: str, act: Callable[[], object]) -> None:
    """A rank that needs no messages may hear of it at one of its next calls; every later call fails as well."""

    def act_and_go_on() -> None:
        act()
        while True:
            time.sleep(0.05)
            call(group, spec=LOCAL)

    with pytest.raises(ERRORS, match=message):
        act_and_go_on()
    with pytest.raises(ERRORS, match="out of step"):
        call(group)


DIFFERENT = {
    "batch": ("batch", {"qkv": {"batch": 2}}),
    "heads": ("heads", {"qkv": {"heads": 2}}),
    "head_dim": ("head_dim", {"qkv": {"head_dim": 8}}),
    "dtype": ("dtype=torch.float64", {"qkv": {"dtype": torch.float64}}),
    "gradients": ("requires_grad=True", {"qkv": {"requires_grad": True}}),
    "pattern": ("segment_lengths=\\[8, 32\\]", {"spec": ([8, 32], [1, 2])}),
    "scale": ("scale=0.25", {"scale": 0.25}),
    "causal": ("is_causal=True", {"is_causal": True}),
    "dropout": ("dropout_p=0.5", {"dropout_p": 0.5}),
    "head layout": ("head_layout=grouped", {"head_layout": "grouped"}),
    "scheme": ("scheme=ring", {"scheme": "ring"}),
    "statement": ("shard lengths=not stated", {"shard_lengths": None}),
}
WRONG = {
    "no tensor": ("query must be a tensor", {"qkv": [None, None, None]}),
    "no number": ("number", {"scale": "wide"}),
    "a shape": ("batch, tokens, heads, head_dim", {"qkv": [torch.randn(8, 4, 4)] * 3}),
}


def check_different_calls() -> None:
    with mock.patch.object(agreement, "_LOOK_EVERY", 0.05):
        for check in (_quiet, _known, _new, _nothing_travels, _wrong, _fails, _other_pass, _other_order, _freed):
            check(dist.get_rank() == dist.get_world_size() - 1)
            dist.barrier()


def agreed(*calls: dict) -> dist.ProcessGroup:
    """A group on which these calls were made before, of which the last rank may make another one."""
    group = dist.new_group(timeout=timedelta(minutes=4))
    for settings in ({}, {"spec": LOCAL}, *calls):
        qkv = settings.get("qkv")
        call(group, **(settings | ({"qkv": tensors(**qkv)} if isinstance(qkv, dict) else {})))
    dist.barrier()  # else a slow rank hears of the next call's error while it still makes these
    return group


def _quiet(odd: bool) -> None:
    """What was agreed before asks nothing of the other ranks, forward and backward."""
    group = agreed({"qkv": {"requires_grad": True}})
    refused = mock.Mock(side_effect=AssertionError("asked"))
    with mock.patch.object(ranks_of(group).agreement, "exchange", refused):
        call(group)
        call(group, tensors(requires_grad=True)).sum().backward()


def _known(odd: bool) -> None:
    """All calls were agreed before."""
    for message, settings in (DIFFERENT[name] for name in ("head_dim", "pattern", "scale", "scheme")):
        group = agreed(settings)
        qkv = tensors(**settings.get("qkv", {})) if odd else tensors()
        mine = {**settings, "qkv": qkv} if odd else {"qkv": qkv}
        all_fail(group, f"same call.*{message}", lambda group=group, mine=mine: call(group, **mine))


def _new(odd: bool) -> None:
    """One rank makes a call that is new."""
    for message, settings in DIFFERENT.values():
        group = agreed()
        mine = {**settings, "qkv": tensors(**settings.get("qkv", {}))} if odd else {}
        all_fail(group, f"same call.*{message}", lambda group=group, mine=mine: call(group, **mine))


def _nothing_travels(odd: bool) -> None:
    group = agreed({"spec": LOCAL, "scale": 0.5})
    all_fail(group, "scale=0.5", lambda: call(group, spec=LOCAL, **({"scale": 0.5} if odd else {})))
    group = agreed()
    all_fail(group, "scale=0.25", lambda: call(group, spec=LOCAL, **({"scale": 0.25} if odd else {})))


def _wrong(odd: bool) -> None:
    """One rank's call is no call."""
    for message, settings in WRONG.values():
        for stated in ({}, {"shard_lengths": None}):
            group = agreed()
            mine = {**stated, **settings} if odd else stated
            if stated:  # all are asking each other, and stay in step
                with pytest.raises(ERRORS, match=message):
                    call(group, **mine)
                call(group)
            else:
                all_fail(group, message, lambda group=group, mine=mine: call(group, **mine))


def _fails(odd: bool) -> None:
    """One rank fails while the others wait for its rows."""
    for scheme in ("gather", "ring"):
        for computes in ("partial", "gradients"):
            group = agreed({"qkv": {"requires_grad": True}, "scheme": scheme})
            failing = mock.patch.object(op, computes, side_effect=MemoryError("no room")) if odd else mock.MagicMock()

            def act(group=group, scheme=scheme, failing=failing) -> None:
                with failing:
                    call(group, tensors(requires_grad=True), scheme=scheme).sum().backward()

            all_fail(group, "no room", act)


def _other_pass(odd: bool) -> None:
    """One rank runs no backward pass."""
    group = agreed({"qkv": {"requires_grad": True}})
    out = call(group, tensors(requires_grad=True))
    all_fail(group, "pass=backward", lambda: call(group) if odd else out.sum().backward())


def _other_order(odd: bool) -> None:
    """One rank runs its backward passes in another order."""
    group = agreed({"qkv": {"requires_grad": True}}, {"qkv": {"requires_grad": True}, "scale": 0.5})
    outs = [call(group, tensors(requires_grad=True), scale=scale) for scale in (None, 0.5)]

    def act() -> None:
        for out in outs if odd else reversed(outs):
            out.sum().backward()

    all_fail(group, "scale=0.5", act)


def _freed(odd: bool) -> None:
    """A group that is destroyed is freed, and nothing is remembered of it."""
    group = agreed()
    known = weakref.ref(group), weakref.ref(ranks_of(group).agreement)
    dist.destroy_process_group(group)
    reset_global_pattern_cache()
    del group
    until = time.monotonic() + 30  # the thread that watches it may be looking
    while any(one() is not None for one in known) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert [one() for one in known] == [None, None]
