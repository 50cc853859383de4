"""Profiles and timings of modules: what they write, what they leave alone, what they refuse."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    DilatedAttention,
    LongNetLM,
    MultiheadDilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    benchmark_implementations,
    profile_memory_usage,
)

SPEC = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}
CONFIG = {"seq_len": 32, "batch_size": 2, "embed_dim": 64}


def small_model() -> LongNetLM:
    return LongNetLM(d_model=32, num_heads=4, num_layers=1, **SPEC)


def test_a_profile_has_a_table_a_trace_and_a_timeline_of_a_real_step(tmp_path, capsys) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = torch.ones_like(model.norm.weight)
    model.norm.weight.grad = kept
    tokens = torch.randint(256, (2, 64))
    found = profile_memory_usage(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer=optimizer,
        trace=tmp_path / "new" / "trace.json",
        picture=tmp_path / "timeline.svg",
        row_limit=3,
    )
    assert found.table in capsys.readouterr().out
    assert "Self CPU Mem" in found.table
    names = {event["name"] for event in json.loads(found.trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "optimizer", "[memory]"} <= names
    assert list(found.phases) == ["forward", "backward", "optimizer"]
    logits = 2 * 64 * 256 * 4
    assert logits < found.phases["forward"] <= max(found.peaks.values())
    words = "".join(ElementTree.fromstring(found.picture.read_text()).itertext())
    assert "memory of a step of LongNetLM" in words
    assert "backward" in words
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    assert model.norm.weight.grad is kept
    assert model.embedding.weight.grad is None


def test_a_profile_takes_the_inputs_of_any_module_and_the_users_loss(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="a PNG needs matplotlib")
    attention = DilatedAttention(**SPEC)
    q, k, v = torch.randn(3, 1, 64, 4, 8).unbind(0)
    files = {"trace": tmp_path / "trace.json", "picture": tmp_path / "timeline.png"}
    found = profile_memory_usage(attention, (q, k, v), **files)
    assert list(found.phases) == ["forward"]  # nothing needs a gradient
    assert found.picture.read_bytes().startswith(b"\x89PNG")
    asked = []

    def compute_loss(output, labels):
        asked.append((output.shape, labels))
        return output.sum()

    layer = MultiheadDilatedAttention(32, 4, **SPEC)
    x = torch.randn(1, 64, 32)
    found = profile_memory_usage(layer, (x, x, x), compute_loss, trace=files["trace"], picture=None)
    assert asked == [((1, 64, 32), None)]
    assert list(found.phases) == ["forward", "backward"]
    assert found.picture is None


def test_without_matplotlib_a_profile_leaves_its_default_picture_out(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = profile_memory_usage(nn.Linear(8, 8), torch.randn(1, 8))
    assert found.picture is None
    assert [path.name for path in tmp_path.iterdir()] == ["memory_trace.json"]
    with pytest.raises(ModuleNotFoundError, match="a chart needs matplotlib"):
        profile_memory_usage(nn.Linear(8, 8), torch.randn(1, 8), picture="mine.svg")


def test_what_cannot_be_profiled_is_refused_before_it_runs(tmp_path) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    files = {"trace": tmp_path / "trace.json", "picture": None}
    for batch, message in (
        ({"tokens": tokens}, r"keys input_ids and optionally labels, got \['tokens'\]"),
        ({"input_ids": tokens, "attention_mask": tokens}, "pass other inputs of the model as a tuple"),
        ((tokens, None), r"sample_batch\[1\] must be a tensor, got None"),
        ((), "a tuple of tensors"),
        ({"input_ids": tokens, "labels": tokens[:, :3]}, r"labels of shape \(1, 3\) do not fit"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            profile_memory_usage(small_model(), batch, **files)
    with pytest.raises(ValueError, match=r"written as \.svg or \.png"):
        profile_memory_usage(small_model(), tokens, trace=tmp_path / "trace.json", picture="timeline.pdf")
    with pytest.raises(ValueError, match="row_limit must be a whole number of at least 1"):
        profile_memory_usage(small_model(), tokens, row_limit=0, **files)
    assert not (tmp_path / "trace.json").exists()


class TakesAnything(nn.Module):
    def forward(self, *args):
        (x,) = args
        return x * 1


@pytest.mark.parametrize("backward", [False, True])
def test_every_kind_of_module_is_timed(backward) -> None:
    modules = {
        "attention": DilatedAttention(**SPEC),
        "multihead": MultiheadDilatedAttention(64, 4, **SPEC),
        "ring": RingAdvancedDistributedDilatedAttention(64, 4, **SPEC),
        "dense": nn.MultiheadAttention(64, 4, batch_first=True),
        "model": small_model(),
        "layer": nn.Sequential(nn.Linear(64, 64)),
        "anything": TakesAnything(),
    }
    results = benchmark_implementations(modules, [CONFIG], num_runs=2, backward=backward)
    assert list(results) == list(modules)
    for entries in results.values():
        ((key, entry),) = entries.items()
        assert key == "32_2"
        assert 0 < entry["p20"] <= entry["median"] <= entry["p80"]
        assert entry["throughput"] == pytest.approx(2 * 32 / entry["avg_time"])
        assert entry["memory_gb"] > 0
    smallest = 2 * 32 * 64 * 4 / 1024**3  # the result of a call alone
    assert results["layer"]["32_2"]["memory_gb"] >= smallest
    assert all(p.grad is None for module in modules.values() for p in module.parameters())


def test_a_module_is_called_as_often_as_asked() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * 1

    counting = {runs: Counting() for runs in (1, 7)}
    for runs, module in counting.items():
        benchmark_implementations({"counting": module}, [CONFIG], num_runs=runs)
    assert counting[7].calls - counting[1].calls == 6


def test_heads_come_from_the_config() -> None:
    shapes = []

    class Watching(DilatedAttention):
        def forward(self, query, key, value):
            shapes.append(tuple(query.shape))
            return super().forward(query, key, value)

    for more in ({}, {"num_heads": 16}):
        benchmark_implementations({"a": Watching(**SPEC)}, [{**CONFIG, "embed_dim": 128, **more}], num_runs=1)
    assert set(shapes) == {(2, 32, 2, 64), (2, 32, 16, 8)}


def test_a_shape_that_does_not_fit_is_a_result_and_other_errors_are_not() -> None:
    class Greedy(nn.Module):
        def forward(self, x):
            return torch.empty(1 << 60, dtype=torch.uint8) if x.shape[1] > 16 else x * 1

    results = benchmark_implementations({"greedy": Greedy()}, [CONFIG, CONFIG | {"seq_len": 16}], num_runs=1)
    assert "can't allocate memory" in results["greedy"]["32_2"]["error"]
    assert results["greedy"]["16_2"]["throughput"] > 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        benchmark_implementations({"layer": nn.Linear(8, 8)}, [CONFIG])


def test_what_cannot_be_timed_is_refused() -> None:
    attention = {"attention": DilatedAttention(**SPEC)}
    for modules, configs, more, message in (
        ({}, [CONFIG], {}, "nothing to time"),
        (attention, [], {}, "nothing to time"),
        (attention, [CONFIG], {"num_runs": 0}, "num_runs must be a whole number of at least 1"),
        (attention, [{"seq_len": 8, "batch_size": 1}], {}, "a config has the keys seq_len, batch_size, embed_dim"),
        (attention, [CONFIG | {"heads": 4}], {}, "optionally num_heads, got"),
        (attention, [CONFIG | {"seq_len": 0}], {}, "whole numbers of at least 1"),
        (attention, [CONFIG | {"num_heads": 7}], {}, "does not divide into 7 heads"),
        (attention, [CONFIG, CONFIG | {"embed_dim": 128}], {}, "two configs share them"),
        ({"bilinear": nn.Bilinear(64, 64, 64)}, [CONFIG], {}, r"needs \['input1', 'input2'\]: wrap it"),
        ({"layer": nn.Linear(64, 64)}, [CONFIG], {"device": "meta"}, "is on cpu, not on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            benchmark_implementations(modules, configs, **more)
