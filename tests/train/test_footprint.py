"""The memory model against steps on tensors without memory, and what it says fits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.nn import transformer
from dilated_attention_pytorch.train import footprint as model
from dilated_attention_pytorch.train.fitting import by_cost, cheapest_fit, choices, longest_fits, step_flops
from dilated_attention_pytorch.train.footprint import footprint, needed, parameter_count
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.presets import text_model

from ..thorough import examples
from .simulated import simulate

SMALL = ModelConfig(vocab_size=1024, d_model=256, num_heads=4, num_layers=2, num_kv_heads=2)
TOKENS = 32_768
FULL = {"checkpointing": "full", "mlp_tile": 16_384, "loss_chunk": 16_384}
GIB = 1 << 30


SELECTIVE = FULL | {"checkpointing": "selective"}
AUTOCAST, BFLOAT16 = {"precision": "bf16"}, {"precision": "bf16", "parameters": "bf16"}


@pytest.mark.parametrize(
    ("regime", "changes"),
    [
        ({}, {}),
        ({}, FULL),
        (AUTOCAST, {}),
        (AUTOCAST, {"mlp_tile": 16_384}),
        (AUTOCAST, {"checkpointing": "full"}),
        (AUTOCAST, SELECTIVE),
        (AUTOCAST, SELECTIVE | {"offload": True}),
        (BFLOAT16, {"loss_chunk": 16_384}),
        (BFLOAT16, {"checkpointing": "selective"}),
        (BFLOAT16, FULL),
        (BFLOAT16, FULL | {"offload": True}),
        (AUTOCAST, {"checkpointing": "full", "layers_per_checkpoint": 2}),
        (BFLOAT16, FULL | {"layers_per_checkpoint": 4}),
        (BFLOAT16, FULL | {"layers_per_checkpoint": 2, "offload": True}),
    ],
    ids=str,
)
def test_the_ledger_counts_what_a_step_makes(regime, changes, monkeypatch) -> None:
    options = MemoryOptions(**regime, **changes)
    layers = 9 if options.layers_per_checkpoint > 1 else 5 if options.offload else 2
    check_ledger(replace(SMALL, num_layers=layers), options, monkeypatch)


@pytest.mark.parametrize("regime", [{}, AUTOCAST, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ({"norm": "rms"}, {"checkpointing": "full", "loss_chunk": 1024}),
        ({"activation": "swiglu", "dim_feedforward": 0}, {"checkpointing": "full", "loss_chunk": 1024}),
        ({"activation": "swiglu", "dim_feedforward": 0}, FULL),
        ({"qk_norm": True, "dim_feedforward": 128}, {"loss_chunk": 1024}),
        ({"logit_soft_cap": 30.0, "vocab_size": 8192}, {}),
        ({"logit_soft_cap": 30.0, "vocab_size": 8192}, FULL),
        ({"tie_weights": False, "vocab_size": 65_536}, FULL),
    ],
    ids=str,
)
def test_the_ledger_knows_the_options_of_a_model(option, changes, regime, monkeypatch) -> None:
    check_ledger(replace(SMALL, **option), MemoryOptions(**regime, **changes), monkeypatch)


def check_ledger(config, options, monkeypatch) -> None:
    monkeypatch.setattr(model, "attention_scratch", lambda *sizes: 0)  # of kernels, which the simulation has none of
    found = footprint(config, TOKENS, options)
    counted = simulate(config, TOKENS, options, monkeypatch)
    assert (found.peak - found.parts["optimizer"]) / counted == pytest.approx(1.0, abs=0.03)


def test_a_model_of_any_size_can_be_counted(monkeypatch) -> None:
    monkeypatch.setattr(model, "attention_scratch", lambda *sizes: 0)
    config = replace(text_model("6b"), num_layers=2)
    options = MemoryOptions(precision="bf16", parameters="bf16", **FULL)
    found = footprint(config, 100_000, options)
    counted = simulate(config, 100_000, options, monkeypatch)
    assert (found.peak - found.parts["optimizer"]) / counted == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 2}, {"tie_weights": False}, {"norm": "rms"}, {"activation": "swiglu"}, {"qk_norm": True}],
    ids=str,
)
def test_parameters_are_counted_as_the_model_has_them(changes) -> None:
    config = ModelConfig(vocab_size=100, d_model=32, num_heads=4, num_layers=3, **changes)
    assert parameter_count(config) == sum(p.numel() for p in LongNetLM(config).parameters())


@settings(max_examples=examples(10))
@given(st.sampled_from(choices()), st.integers(1, 1 << 20), st.integers(1, 1 << 18))
def test_more_tokens_never_take_less_memory(options, tokens, more) -> None:
    few, many = footprint(SMALL, tokens, options), footprint(SMALL, tokens + more, options)
    assert few.peak <= many.peak
    assert few.host <= many.host
    assert bool(few.host) == options.offload


def test_two_sequences_hold_what_one_twice_as_long_does_but_for_rotations() -> None:
    options = MemoryOptions(precision="bf16", **FULL)
    one, two = footprint(SMALL, 2 * TOKENS, options), footprint(SMALL, TOKENS, options, batch=2)
    assert one.peak - two.peak == TOKENS * SMALL.head_dim // 2 * 4 * 2


@pytest.mark.parametrize("change", [{"float8": True}, {"structured_sparsity": True}], ids=str)
def test_what_the_model_does_not_know_is_refused(change) -> None:
    with pytest.raises(ValueError, match=f"the memory model does not cover {next(iter(change))}"):
        footprint(SMALL, 1024, MemoryOptions(precision="bf16", **change))
    with pytest.raises(ValueError, match=r"the memory model does not cover dropout=0\.1"):
        footprint(replace(SMALL, dropout=0.1), 1024, MemoryOptions())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "rms"},
        {"activation": "swiglu", "norm": "rms"},
        {"qk_norm": True},
        {"num_kv_heads": 2},
        {"positions": "xpos"},
    ],
    ids=str,
)
def test_a_compiled_layer_keeps_what_the_model_says(changes, monkeypatch) -> None:
    # As on a GPU, where training steps take the fused feed-forward network.
    monkeypatch.setattr(transformer, "fuses", lambda hidden, norm, linear: isinstance(norm, torch.nn.LayerNorm))
    torch.compiler.reset()
    tokens = 512
    config = ModelConfig(
        vocab_size=64, d_model=128, num_heads=4, num_layers=1, segment_lengths=(64, 512), dilation_rates=(1, 2),
        **changes,
    )  # fmt: skip
    options = MemoryOptions(precision="bf16", loss_chunk=64, compile=True)
    model = LongNetLM(config)
    model.layers[0].compile(backend="aot_eager_decomp_partition")  # inductor's cut between forward and backward
    own = {parameter.data_ptr() for parameter in model.parameters()}
    rotation = model.positions(1, tokens)
    own |= {part.data_ptr() for part in rotation if part is not None}
    saved = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.layers[0](torch.randn(1, tokens, 128, requires_grad=True), is_causal=True, rotation=rotation)
    one, two = (footprint(replace(config, num_layers=layers), tokens, options) for layers in (8, 9))
    kept = two.parts["kept"] - one.parts["kept"]
    assert one.at == two.at
    assert sum(x.untyped_storage().nbytes() for x in saved.values()) == pytest.approx(kept, rel=0.04)


def test_options_are_ordered_by_what_they_cost() -> None:
    config = text_model("350m")
    order = by_cost(config, 1 << 17, choices())
    assert order[0] == MemoryOptions(precision="bf16")
    assert len(order) == len({*order}) == 3 * (5 + 2 * 2) * 4
    exact = [one for one in order if one.optimizer == "adamw" and not one.offload]
    assert order[: len(exact)] == exact
    work = [step_flops(config, 1 << 17, one) for one in exact]
    assert work == sorted(work)
    assert [one.offload for one in order] == sorted(one.offload for one in order)


def test_the_longest_fits_and_one_step_longer_does_not() -> None:
    config, gpu = text_model("125m"), 24 * GIB
    options = [one for one in choices() if one.loss_chunk and one.mlp_tile and one.checkpointing == "full"]
    found = list(longest_fits(config, gpu, host_bytes=32 * GIB, options=options))
    assert [fit.tokens for fit in found] == sorted({fit.tokens for fit in found})
    for fit in found:
        assert fit.needed <= gpu
        assert fit.footprint.host <= 32 * GIB
        longer = footprint(config, fit.tokens + 1024, fit.options)
        assert needed(longer.peak) > gpu or longer.host > 32 * GIB
    assert found[-1].options.offload


def test_the_cheapest_that_fits_needs_nothing_where_there_is_room() -> None:
    config = text_model("125m")
    assert cheapest_fit(config, 4096, 80 * GIB).options == MemoryOptions(precision="bf16")
    tight = cheapest_fit(config, 2_000_000, 80 * GIB)
    assert tight.options.checkpointing == "full"
    assert not tight.options.offload
    assert tight.work > 1.2
    assert cheapest_fit(config, 2_000_000, 4 * GIB) is None


@pytest.mark.parametrize(
    ("size", "tokens"), [("125m", 2e6), ("350m", 500e3), ("1.3b", 400e3), ("2.7b", 200e3), ("6b", 100e3)]
)
def test_each_size_reaches_twice_its_published_length_in_80_gib(size, tokens, capsys) -> None:
    assert main(["plan", "--model", size, "--gpu", "80", "--tokens", str(int(tokens)), "--json"]) == 0
    [fit] = json.loads(capsys.readouterr().out)["fits"]
    assert fit["needed_bytes"] <= 80 * GIB
    assert not fit["options"]["offload"]


def test_the_command_says_the_longest_sequence_and_its_options(capsys) -> None:
    assert main(["plan", "--model", "125m", "--gpu", "16", "--host", "0", "--vocabulary", "256"]) == 0
    printed = capsys.readouterr().out
    assert "One GPU of 16 GiB, the longest sequence: " in printed
    answer = printed.split("the longest sequence: ")[1].split(" tokens")[0]
    assert "activations saved for backward" in printed
    assert "offload" not in printed
    assert main(["plan", "--model", "125m", "--gpu", "16", "--tokens", answer.replace(",", "")]) == 0
    assert "the cheapest options for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model 7b", "a model's size is one of 125m"),
        ("--model 6b --gpu 10", "no combination of options trains 6b on any sequence in 10 GiB"),
        ("--model 125m --tokens 1e8", "no combination of options trains 125m on 100,000,000 tokens"),
        ("--model 125m --gpus 4", "a model of fixed size, so --gpus cannot be set: leave it out"),
        ("--tokens 1e6", "plan needs --model SIZE"),
        ("--tokens 1e6 --gpus 2 --host 4", "only --model takes --host: add --model"),
    ],
)
def test_what_cannot_fit_says_why(flags, message, capsys) -> None:
    assert main(["plan", *flags.split()]) == 1
    assert message in capsys.readouterr().err


def test_parameters_in_bfloat16_train_and_hand_on_bfloat16() -> None:
    from dilated_attention_pytorch.train.memory import loss, make_optimizer, prepare

    torch.manual_seed(0)
    options = MemoryOptions(precision="bf16", parameters="bf16", checkpointing="selective", mlp_tile=16, loss_chunk=16)
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": 2, "segment_lengths": (16, 32), "dilation_rates": (1, 2)}
    network = prepare(LongNetLM(**sizes), options)
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    optimizer = make_optimizer(network.parameters(), options, lr=1e-2)
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(1))
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(network, tokens[:, :-1], tokens[:, 1:], options)
        assert value.dtype == torch.float32
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0] - 0.5
    assert network.hidden(tokens).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="choose precision='bf16', not 'fp32'"):
        MemoryOptions(parameters="bf16")


def test_updates_too_small_for_bfloat16_count_on_average_with_torchao() -> None:
    pytest.importorskip("torchao", reason="needs the extra torchao")
    from dilated_attention_pytorch.train.memory import make_optimizer

    options = MemoryOptions(optimizer="adamw8bit-torchao", precision="bf16", parameters="bf16")
    parameter = torch.nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = make_optimizer([parameter], options, lr=1e-4, weight_decay=0.0)
    for _ in range(10):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert 1 - parameter.detach().float().mean() == pytest.approx(1e-3, rel=0.3)
