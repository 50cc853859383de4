"""The options of a run: what they refuse, and what they make of what they take."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from dilated_attention_pytorch import DilatedAttention, RingAdvancedDistributedDilatedAttention
from dilated_attention_pytorch.parallel import RunOptions, Zero


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 2}, "zero_stage is DeepSpeed's: pass use_deepspeed=True"),
        ({"cpu_offload": True}, "cpu_offload is DeepSpeed's"),
        ({"nvme_offload": True}, "nvme_offload is DeepSpeed's"),
        ({"use_deepspeed": True, "zero_stage": 0}, "a ZeRO stage is 1, 2 or 3, got 0"),
        ({"use_deepspeed": True, "zero_stage": 4}, "a ZeRO stage is 1, 2 or 3, got 4"),
        ({"use_deepspeed": True, "zero_stage": 2, "nvme_offload": True}, "NVMe offload needs ZeRO stage 3, got 2"),
        ({"use_deepspeed": True, "nvme_path": "/disk"}, "is for nvme_offload=True"),
        ({"checkpoint_interval": 0}, "checkpoint_interval must be a whole number of at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        RunOptions(**settings)
    with pytest.raises(ValueError, match=message):
        RingAdvancedDistributedDilatedAttention(16, 4, [8], [1], **settings)


def test_a_switch_takes_only_true_and_false() -> None:
    with pytest.raises(TypeError, match="nvme_offload must be True or False, got '/disk'"):
        RunOptions(use_deepspeed=True, nvme_offload="/disk")
    with pytest.raises(TypeError, match="zero_level"):
        RingAdvancedDistributedDilatedAttention(16, 4, [8], [1], zero_level=2)


def test_an_nvme_offload_without_a_folder_is_refused_where_it_is_used() -> None:
    options = RunOptions(use_deepspeed=True, cpu_offload=True, nvme_offload=True)
    with pytest.raises(ValueError, match="pass nvme_path=FOLDER"):
        _ = options.zero
    zero = dataclasses.replace(options, nvme_path="disk").zero
    assert zero == Zero(stage=3, cpu_offload=True, nvme_path=os.path.abspath("disk"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offload_goes_to_the_configuration_of_deepspeed(stage) -> None:
    kept = Zero(stage=stage).config(batch_size=4, clip_norm=0.5)
    assert kept["zero_optimization"] == {"stage": stage}
    assert (kept["train_micro_batch_size_per_gpu"], kept["gradient_clipping"]) == (4, 0.5)
    moved = Zero(stage=stage, cpu_offload=True).config()["zero_optimization"]
    assert moved["offload_optimizer"]["device"] == "cpu"
    assert ("offload_param" in moved) == (stage == 3)


def test_nvme_takes_the_place_of_main_memory() -> None:
    config = Zero(cpu_offload=True, nvme_path="/disk").config()["zero_optimization"]
    assert config["offload_optimizer"] == config["offload_param"]
    assert config["offload_param"] == {"device": "nvme", "pin_memory": True, "nvme_path": "/disk"}


def test_options_are_frozen_and_survive_a_file(tmp_path) -> None:
    options = RunOptions(use_deepspeed=True, zero_stage=1, enable_fault_tolerance=True, checkpoint_interval=7)
    (tmp_path / "options.json").write_text(options.to_json())
    assert RunOptions.from_json(tmp_path / "options.json") == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.zero_stage = 2
    (tmp_path / "options.json").write_text('{"zero_level": 2}')
    with pytest.raises(ValueError, match=r"options.json does not hold the options of a run: .*zero_level"):
        RunOptions.from_json(tmp_path / "options.json")
    with pytest.raises(FileNotFoundError, match=r"no file .*other.json: it should hold the text of options.to_json"):
        RunOptions.from_json(tmp_path / "other.json")


def test_the_enterprise_module_returns_a_tensor_and_carries_its_options() -> None:
    # As the documents have it, at a smaller size.
    attention = RingAdvancedDistributedDilatedAttention(
        embed_dim=32,
        num_heads=4,
        segment_lengths=[4, 8, 16],
        dilation_rates=[1, 2, 4],
        model_parallel=True,
        sequence_parallel=True,
        data_parallel=True,
        use_deepspeed=True,
        zero_stage=3,
        cpu_offload=True,
        nvme_offload=True,
        enable_fault_tolerance=True,
        enable_monitoring=True,
        auto_resume=True,
        checkpoint_interval=100,
    )
    query = key = value = torch.randn(2, 32, 32)
    output = attention(query, key, value)
    assert output.shape == (2, 32, 32)
    assert attention(query[0], key[0], value[0]).shape == (32, 32)
    options = attention.options
    assert (options.zero_stage, options.max_restarts, options.resume, options.checkpoint_interval) == (
        3,
        3,
        "auto",
        100,
    )
    assert options.enable_monitoring


def test_without_sequence_parallel_the_module_attends_by_itself() -> None:
    attention = RingAdvancedDistributedDilatedAttention(16, 4, [8], [1], sequence_parallel=False)
    assert type(attention.attention) is DilatedAttention
    assert attention(*[torch.randn(1, 8, 16)] * 3).shape == (1, 8, 16)
    with pytest.raises(TypeError, match="ring_size"):
        RingAdvancedDistributedDilatedAttention(16, 4, [8], [1], sequence_parallel=False, ring_size=1)


@pytest.mark.parametrize(
    ("stated", "ranks", "axes"),
    [
        ({}, 8, (1, 8, 1)),
        ({"sequence_parallel": False}, 8, (8, 1, 1)),
        ({"data_parallel": True}, 8, (8, 1, 1)),
        ({"data_parallel": 2}, 8, (2, 4, 1)),
        ({"model_parallel": True}, 8, (1, 1, 8)),
        ({"model_parallel": 2, "sequence_parallel": 2, "data_parallel": 2}, 8, (2, 2, 2)),
        ({"model_parallel": True, "sequence_parallel": 4}, 8, (1, 4, 2)),
        ({"model_parallel": True, "sequence_parallel": True, "data_parallel": True}, 1, (1, 1, 1)),
    ],
)
def test_what_is_stated_says_how_many_ranks_each_axis_has(stated, ranks, axes) -> None:
    assert tuple(RunOptions(**stated).axes(ranks).values()) == axes


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"model_parallel": True, "sequence_parallel": True}, "can share 8 ranks in several ways: state numbers"),
        ({"sequence_parallel": False, "data_parallel": False}, "can share 8 ranks in no way"),
        ({"model_parallel": 3}, "model_parallel=3 must divide the number of ranks, got 8"),
        ({"data_parallel": 16}, "data_parallel=16 must divide the number of ranks, got 8"),
    ],
)
def test_ranks_that_cannot_be_shared_as_stated_are_refused(stated, message) -> None:
    with pytest.raises(ValueError, match=message):
        RunOptions(**stated).axes(8)


def test_an_axis_is_stated_by_true_false_or_a_number() -> None:
    with pytest.raises(TypeError, match="model_parallel must be True or False or a whole number, got 0"):
        RunOptions(model_parallel=0.1)
    with pytest.raises(ValueError, match="data_parallel must be a whole number of at least 1, got 0"):
        RunOptions(data_parallel=0)
    with pytest.raises(ValueError, match="model_parallel=2 must divide the number of ranks, got 1"):
        RingAdvancedDistributedDilatedAttention(16, 4, [8], [1], model_parallel=2)
