"""Tensors on the host between forward and backward: they come back as they were, and their buffers are used again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dilated_attention_pytorch.core.pool import WorkspacePool
from dilated_attention_pytorch.train.offload import Offload


def test_offloaded_tensors_come_back_as_they_were_and_their_buffers_go_back() -> None:
    pool = WorkspacePool(threshold_bytes=1)
    offload = Offload(least_bytes=1, pool=pool)
    given = [torch.randn(3, 4, 5).transpose(0, 1), torch.randn(6)[::2], torch.randn(2, 2).bfloat16(), torch.arange(3)]
    groups = [offload.group() for _ in range(4)]
    packed = [[group.pack(x.clone(memory_format=torch.preserve_format)) for x in given] for group in groups]
    for _ in range(2):  # as a graph that is retained unpacks twice
        for group, parcels in zip(reversed(groups), reversed(packed)):
            for parcel, x in zip(parcels, given):
                found = group.unpack(parcel)
                assert torch.equal(found, x)
                assert found.dtype == x.dtype
    assert groups[0].unpack(packed[0][0]).stride() == given[0].stride()
    assert pool.get_stats()["live_buffers"] == 16
    del packed, parcels, parcel
    assert pool.get_stats()["live_buffers"] == 0


def test_layers_before_the_last_ones_leave_the_device() -> None:
    offload = Offload(least_bytes=1, pool=WorkspacePool(threshold_bytes=1))
    x = torch.randn(8)
    kept = []
    for _ in range(5):
        group = offload.group()
        kept.append((group, group.pack(x.clone())))
    assert [parcel._on_device is None for _, parcel in kept] == [True, True, False, False, False]


def test_small_tensors_and_parameters_stay() -> None:
    group = Offload(least_bytes=100).group()
    small, parameter = torch.randn(4), nn.Parameter(torch.randn(100))
    assert group.pack(small) is small
    assert group.pack(parameter) is parameter


def test_a_kept_tensor_that_is_written_to_is_an_error() -> None:
    group = Offload(least_bytes=1).group()
    x = torch.randn(8)
    parcel = group.pack(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="written to after it had been kept"):
        group.unpack(parcel)
