"""Presets are what they say; the training snippets of the published guides run as written, at small sizes."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dilated_attention_pytorch
from dilated_attention_pytorch import (
    DilatedAttention,
    DynamicBatcher,
    LongNetLM,
    enable_fp8_training,
    enable_structured_sparsity,
    gradient_accumulation_training,
    hierarchical_training_schedule,
    optimize_large_model,
    optimize_medium_model,
    optimize_small_model,
    train_hierarchically,
    train_stage,
    update_attention_config,
)
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.core.spec import DilatedSpec
from dilated_attention_pytorch.measuring import HostMemory
from dilated_attention_pytorch.train import TrainConfig, command, presets
from dilated_attention_pytorch.train.batching import collate
from dilated_attention_pytorch.train.footprint import parameter_count
from dilated_attention_pytorch.train.memory import MemoryOptions, loss
from dilated_attention_pytorch.train.presets import (
    HARDWARE,
    MODEL_SIZES,
    expand_presets,
    float32_products,
    hardware_preset,
    memory_preset,
    model_preset,
)
from dilated_attention_pytorch.train.recipes import options_of
from dilated_attention_pytorch.train.stages import Stage

SIZES = {"d_model": 16, "num_heads": 2, "num_layers": 1, "segment_lengths": (8, 16), "dilation_rates": (1, 2)}


def small_model(**changes) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(**(SIZES | {"vocab_size": 50} | changes))


def sequences(*lengths: int, seed: int = 1) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(50, (length,), generator=generator)} for length in lengths]


# Presets by size


@pytest.mark.parametrize("size", MODEL_SIZES)
@pytest.mark.parametrize("vocab_size", [256, 50_257])
def test_a_preset_has_the_parameters_of_its_name(size, vocab_size) -> None:
    number, unit = float(size[:-1]), {"m": 1e6, "b": 1e9}[size[-1]]
    config = model_preset(size, vocab_size=vocab_size)
    assert parameter_count(config) == pytest.approx(number * unit, rel=0.025)
    assert config.head_dim in (64, 128)
    assert config.vocab_size == vocab_size


def test_a_vocabulary_that_leaves_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves too few for two layers of a 125m model: choose a larger size"):
        model_preset("125m", vocab_size=160_000)
    with pytest.raises(ValueError, match=r"one of 125m, 350m, 760m, 770m, 1\.3b, 2\.7b, 6b, got '7b'"):
        model_preset("7b")


@pytest.mark.parametrize("size", MODEL_SIZES)
@pytest.mark.parametrize("tokens", [2048, 32_768, 1_000_000])
def test_presets_connect_the_whole_sequence(size, tokens) -> None:
    config = model_preset(size, sequence_length=tokens, num_layers=2)
    assert max(config.segment_lengths) >= tokens
    assert max(config.dilation_rates) <= config.num_heads
    assert config.dilation_rates[0] == 1


def test_what_a_preset_leaves_open_can_be_said() -> None:
    config = model_preset("125m", sequence_length=4096, num_layers=3, positions="xpos")
    assert (config.num_layers, config.positions, config.segment_lengths) == (3, "xpos", (2048, 4096))
    assert not config.stagger


def test_presets_stagger_the_branches_that_they_choose_and_no_stated_ones(monkeypatch) -> None:
    config = model_preset("125m", sequence_length=8192)
    assert config.spec == DilatedSpec.for_length(8192, 12, is_causal=True)
    assert config.stagger
    assert not model_preset("125m", stagger=False).stagger
    stated = {"segment_lengths": (64, 512), "dilation_rates": (1, 4)}
    assert not model_preset("125m", **stated).stagger
    assert model_preset("125m", **stated, stagger=True).stagger
    flags = "--preset 125m --hardware cpu --num-layers 2 --segments 64 512 --rates 1 4"
    for more, staggers in (("", False), (" --stagger", True)):
        config = config_of(monkeypatch, *(flags + more).split())
        assert (config.model.spec, config.model.stagger) == (DilatedSpec.of([64, 512], [1, 4]), staggers)
    config = config_of(monkeypatch, "--preset", "125m", "--hardware", "cpu", "--segments", "1407", "2048", "65536")
    assert (config.model.dilation_rates, config.model.stagger) == ((1, 1, 12), False)
    short = {"sequence_length": 64, "segment_lengths": (64,), "dilation_rates": (1,), "batch_size": 1, "steps": 1}
    stated = {"preset": "125m", "hardware": "cpu", "stages": [Stage(**short, learning_rate=1.0)]}
    assert not expand_presets(stated)["model"].stagger
    assert expand_presets({**stated, "stagger": True})["model"].stagger


# Presets by hardware


@pytest.mark.parametrize(
    ("name", "precision", "tf32"),
    [
        ("h200", "bf16", True),
        ("h100", "bf16", True),
        ("a100", "bf16", True),
        ("v100", "fp16", False),
        ("rocm", "bf16", False),
        ("cpu", "fp32", False),
    ],
)
def test_hardware_says_precision_and_tf32(name, precision, tf32) -> None:
    found = expand_presets({"hardware": name})
    assert (found["memory"].precision, found["tf32"]) == (precision, tf32)
    assert found["device"] == ("cpu" if name == "cpu" else "cuda")
    assert found["memory"] == MemoryOptions(precision=precision)


@pytest.mark.parametrize(
    ("capability", "called", "hip", "name"),
    [
        ((9, 0), "NVIDIA H200", None, "h200"),
        ((9, 0), "NVIDIA H100 80GB HBM3", None, "h100"),
        ((10, 0), "NVIDIA B200", None, "h100"),
        ((8, 9), "NVIDIA L40S", None, "a100"),
        ((8, 0), "NVIDIA A100-SXM4-80GB", None, "a100"),
        ((7, 0), "Tesla V100-SXM2-32GB", None, "v100"),
        ((9, 4), "AMD Instinct MI300X", "6.2", "rocm"),
    ],
)
def test_hardware_is_known_by_the_device(monkeypatch, capability, called, hip, name) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: called)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert hardware_preset().name == name
    assert hardware_preset(device="cpu").name == "cpu"


def test_hardware_without_a_preset_is_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"must be one of auto, h200, .* got 'tpu'"):
        hardware_preset("tpu")
    with pytest.raises(ValueError, match="no preset for xpu: name similar hardware"):
        hardware_preset(device="xpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with pytest.raises(ValueError, match=r"compute capability 6\.1"):
        hardware_preset(device="cuda")


def test_memory_is_saved_the_more_the_larger_the_model() -> None:
    gpu, cpu = hardware_preset("h100"), hardware_preset("cpu")
    small, medium, large = (memory_preset(size, gpu) for size in ("125m", "1.3b", "6b"))
    assert [options.checkpointing for options in (small, medium, large)] == ["selective", "selective", "full"]
    assert [options.offload for options in (small, medium, large)] == [False, False, True]
    assert [options.optimizer.startswith("adamw8bit") for options in (small, medium, large)] == [False, True, True]
    on_cpu = memory_preset("6b", cpu)
    assert (on_cpu.offload, on_cpu.optimizer, on_cpu.precision) == (False, "adamw", "fp32")


def test_the_8_bit_optimizer_is_the_one_that_is_installed(monkeypatch) -> None:
    for installed, chosen in (
        (("torchao", "bitsandbytes"), "adamw8bit-torchao"),
        (("bitsandbytes",), "adamw8bit-bitsandbytes"),
        ((), "adamw8bit-torchao"),  # whose absence make_optimizer tells
    ):
        monkeypatch.setattr(presets, "find_spec", lambda name, there=installed: name in there or None)
        assert memory_preset("1.3b", hardware_preset("a100")).optimizer == chosen


def test_a_preset_for_deepspeed_leaves_out_what_that_cannot_shard() -> None:
    memory = expand_presets({"preset": "2.7b", "hardware": "h100", "engine": "deepspeed"})["memory"]
    assert (memory.optimizer, memory.mlp_tile, memory.checkpointing) == ("adamw", 0, "full")


def test_tf32_is_on_as_long_as_a_run_lasts() -> None:
    before = torch.get_float32_matmul_precision()
    with float32_products(True):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
    with float32_products(False):
        assert torch.get_float32_matmul_precision() == before
    assert torch.get_float32_matmul_precision() == before


def config_of(monkeypatch, *flags: str) -> TrainConfig:
    """The config that `train` begins a run with."""
    begun = []
    monkeypatch.setattr(command, "train", lambda config, run, resume: begun.append(config))
    monkeypatch.setattr(command, "launch_ranks", lambda config, *rest: begun.append(config) or 0)
    out = [] if "--out" in flags else ["--out", "unused"]
    assert main(["train", *out, *flags]) == 0
    return begun[0]


def test_the_flags_of_a_preset_make_a_run_and_other_flags_go_before(monkeypatch, capsys) -> None:
    config = config_of(monkeypatch, "--preset", "125m", "--hardware", "cpu")
    assert config.model == model_preset("125m")
    assert (config.sequence_length, config.batch_size, config.learning_rate) == (32_768, 8, 6e-4)
    assert config.memory == memory_preset("125m", hardware_preset("cpu"))
    assert (config.device, config.tf32) == ("cpu", False)
    stated = "--num-layers 2 --sequence-length 4096 --batch-size 3 --learning-rate 0.1 --device cpu"
    config = config_of(monkeypatch, "--preset", "125m", *stated.split())
    assert (config.model.num_layers, config.model.d_model) == (2, 768)
    assert config.model.segment_lengths == (1407, 2048, 4096)
    assert (config.sequence_length, config.batch_size, config.learning_rate) == (4096, 3, 0.1)
    config = config_of(monkeypatch, "--hardware", "h200")
    assert (config.device, config.tf32, config.memory.precision) == ("cuda", True, "bf16")
    assert config.model == TrainConfig().model


GIB = 1 << 30


def on_gpu(monkeypatch, free: float, *flags: str, total: float = 140) -> TrainConfig:
    """The config that `train` begins a run with on a GPU with this many GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    sizes = SimpleNamespace(total_memory=int(total * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), sizes.total_memory))
    monkeypatch.setattr(command, "host_memory", lambda: HostMemory(256 * GIB, 128 * GIB))
    return config_of(monkeypatch, *flags)


def test_a_gpu_compiles_layers_unless_they_are_not_to_be(monkeypatch, tmp_path, capsys) -> None:
    assert on_gpu(monkeypatch, 100).memory == MemoryOptions(compile=True)
    assert on_gpu(monkeypatch, 100, "--no-compile").memory == MemoryOptions()
    assert on_gpu(monkeypatch, 100, "--device", "cpu").memory == MemoryOptions()
    assert not on_gpu(monkeypatch, 100, "--engine", "deepspeed").memory.compile
    file = tmp_path / "run.toml"
    file.write_text("[memory]\ncompile = false\n")
    assert on_gpu(monkeypatch, 100, "--config", str(file)).memory == MemoryOptions()
    assert "memory" not in capsys.readouterr().out  # no preset, no choice


@pytest.mark.parametrize(
    ("preset", "free", "checkpointing", "accumulate", "optimizer", "offload"),
    [
        ("125m", 138, "none", 1, "adamw", False),
        ("125m", 78, "none", 2, "adamw", False),
        ("125m", 11, "selective", 4, "adamw", False),
        ("1.3b", 138, "none", 4, "adamw", False),
        ("1.3b", 78, "none", 8, "adamw", False),
        ("2.7b", 138, "selective", 1, "adamw", False),
        ("6b", 138, "selective", 1, "adamw8bit-torchao", False),
        ("6b", 78, "selective", 1, "adamw8bit-torchao", True),
    ],
)
def test_a_preset_takes_the_cheapest_options_for_the_free_memory(
    monkeypatch, capsys, preset, free, checkpointing, accumulate, optimizer, offload
) -> None:
    monkeypatch.setattr(presets, "find_spec", lambda name: name)
    config = on_gpu(monkeypatch, free, "--preset", preset)
    memory = config.memory
    assert (memory.checkpointing, config.accumulate, memory.optimizer) == (checkpointing, accumulate, optimizer)
    assert (memory.compile, memory.loss_chunk, memory.precision) == (True, 16_384, "bf16")
    assert memory.offload == offload
    assert f"memory   checkpointing={checkpointing}" in capsys.readouterr().out


def test_stated_options_stay_and_the_rest_is_fitted_around_them(monkeypatch, capsys) -> None:
    config = on_gpu(monkeypatch, 138, "--preset", "125m", "--checkpointing", "full", "--optimizer", "muon")
    assert (config.memory.checkpointing, config.accumulate, config.memory.optimizer) == ("full", 1, "muon")
    assert "checkpointing=full: a step needs about" in capsys.readouterr().out
    config = on_gpu(monkeypatch, 78, "--preset", "125m", "--accumulate", "1")
    assert (config.memory.checkpointing, config.accumulate) == ("selective", 1)
    assert "; checkpointing=none would need" in capsys.readouterr().out
    assert on_gpu(monkeypatch, 138, "--preset", "125m", "--offload").memory.checkpointing == "selective"
    config = on_gpu(monkeypatch, 3, "--preset", "1.3b")
    assert config.memory.offload
    assert "3.0 are free: it may run out of memory" in capsys.readouterr().out
    config = on_gpu(monkeypatch, 138, "--preset", "125m", "--dropout", "0.1")
    assert config.memory == dataclasses.replace(memory_preset("125m", hardware_preset("h200")), compile=True)
    assert "unchecked: the memory model does not cover dropout" in capsys.readouterr().out


def test_a_run_that_is_continued_keeps_its_choice(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(command, "list_checkpoints", lambda run: [run])
    flags = ["--preset", "125m", "--out", str(tmp_path)]
    first = on_gpu(monkeypatch, 78, *flags)
    assert first.accumulate == 2
    (tmp_path / "config.json").write_text(first.to_json())
    assert on_gpu(monkeypatch, 11, *flags, "--auto-resume") == first
    changed = on_gpu(monkeypatch, 11, *flags, "--auto-resume", "--accumulate", "8", "--no-compile")
    assert (changed.accumulate, changed.memory) == (8, dataclasses.replace(first.memory, compile=False))
    other = on_gpu(monkeypatch, 11, *flags, "--auto-resume", "--batch-size", "4")  # `train` refuses it
    assert (other.memory.checkpointing, other.batch_size) == ("selective", 4)


@pytest.mark.parametrize("ranks", ["--ranks 2", "--ranks 8", "--ranks 8 --sequence-parallel 4", "--ranks 3"])
def test_ranks_fit_their_share_of_the_batch_into_a_whole_gpu(monkeypatch, ranks) -> None:
    config = on_gpu(monkeypatch, 0, "--preset", "125m", *ranks.split())
    expected = "none" if ranks != "--ranks 3" else "selective"  # which the run refuses: 3 do not divide the batch
    assert (config.memory.checkpointing, config.accumulate) == (expected, 1)


def test_a_preset_beside_a_tokenizer_has_the_parameters_of_its_name(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(command, "read_tokenizer", lambda path: SimpleNamespace(vocab_size=50_257))
    config = config_of(monkeypatch, "--preset", "125m", "--tokenizer", str(tmp_path / "tokenizer.json"))
    assert config.model == model_preset("125m", vocab_size=50_257)


@pytest.mark.parametrize(("flag", "choices"), [("--preset", MODEL_SIZES), ("--hardware", HARDWARE)])
def test_the_command_knows_all_presets(flag, choices, capsys) -> None:
    for choice in choices:
        assert command.parse_flags([flag, choice]) == {flag.removeprefix("--"): choice}
    with pytest.raises(SystemExit, match="2"):
        command.parse_flags([flag, "7b"])
    assert f"invalid choice '7b' for argument '{flag}'" in capsys.readouterr().err


def test_a_preset_trains_on_a_cpu(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    small = "--d-model 16 --num-heads 2 --num-layers 1 --sequence-length 16 --batch-size 2 --steps 2 --sample-bytes 4"
    flags = ["--data", str(text), "--out", str(tmp_path / "run"), "--preset", "350m", "--hardware", "auto"]
    assert main(["train", *flags, "--device", "cpu", *small.split()]) == 0
    saved = TrainConfig.from_json(tmp_path / "run" / "config.json")
    assert saved.memory == memory_preset("350m", hardware_preset("cpu"))
    assert saved.model.dim_feedforward == 64


# Models by size


def test_optimizing_a_small_model_keeps_what_it_computes() -> None:
    model = small_model()
    tokens = torch.randint(50, (2, 41))
    expected = loss(copy.deepcopy(model), tokens[:, :-1], tokens[:, 1:], MemoryOptions())
    model = optimize_small_model(model)
    found = loss(model, tokens[:, :-1], tokens[:, 1:], options_of(model))
    torch.testing.assert_close(found, expected)
    found.backward()
    assert model.gradient_checkpointing
    assert options_of(model) == memory_preset("small", hardware_preset("cpu"))


class Dense(nn.Module):
    """A language model of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens), is_causal=False))


def test_optimizing_takes_any_model_with_attention_and_keeps_what_it_computes() -> None:
    torch.manual_seed(0)
    dense = Dense()
    whole = {"segment_lengths": [32], "dilation_rates": [1], "hardware": "cpu"}
    tokens = torch.randint(50, (2, 32))
    expected = dense(tokens)
    expected.square().sum().backward()
    for optimize in (
        optimize_small_model,
        lambda model, **settings: optimize_medium_model(model, **settings)[0],
        lambda model, **settings: optimize_large_model(model, False, **settings)[0],
    ):
        model = optimize(copy.deepcopy(dense), **whole)
        model.zero_grad()
        assert sum(isinstance(part, DilatedAttention) for part in model.modules()) == 2
        recomputed = []
        layer = next(part for part in model.modules() if isinstance(part, nn.TransformerEncoderLayer))
        layer.linear1.register_forward_hook(lambda *_, seen=recomputed: seen.append(1))
        found = model(tokens)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        assert len(recomputed) == 2  # the layer ran again in backward
        for name in ("embedding", "head", "encoder.layers.1.linear2"):
            torch.testing.assert_close(model.get_submodule(name).weight.grad, dense.get_submodule(name).weight.grad)
        assert not [name for name in model.state_dict() if "wrapped" in name]
        again = optimize(model, hardware="cpu")  # which wraps nothing twice
        assert sum("CheckpointWrapper" in type(part).__name__ for part in again.modules()) == 2
    options = options_of(model)
    assert (options.loss_chunk, options.mlp_tile) == (0, 0)
    losses = gradient_accumulation_training(
        model, [{"input_ids": tokens}] * 4, torch.optim.AdamW(model.parameters(), 1e-2), None, 2, 2
    )
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="loss_chunk takes the head of a LongNetLM, got Dense"):
        optimize_small_model(copy.deepcopy(dense), **whole, loss_chunk=8)
    with pytest.raises(TypeError, match=r"got Dense: replace_attention puts it in the place of nn\.MultiheadAttention"):
        optimize_small_model(dense, hardware="cpu")


def test_the_layers_of_any_model_are_compiled(monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append(type(self).__name__))
    optimize_small_model(Dense(), segment_lengths=[32], dilation_rates=[1], hardware="h100")
    assert compiled == ["TransformerEncoderLayer"] * 2


def test_optimizing_a_medium_model_gives_the_documented_optimizer() -> None:
    model, optimizer = optimize_medium_model(small_model(), use_cpu_offload=True)
    assert options_of(model).offload
    defaults = optimizer.defaults
    assert (defaults["lr"], defaults["betas"], defaults["weight_decay"]) == (1e-4, (0.9, 0.95), 0.1)
    found = gradient_accumulation_training(model, [collate(sequences(20, 16))], optimizer)
    assert math.isfinite(found[0])
    model, _ = optimize_medium_model(small_model(), mlp_tile=0, precision="bf16")
    assert (options_of(model).mlp_tile, options_of(model).precision) == (0, "bf16")


def test_a_missing_8_bit_optimizer_is_told_before_the_model_is_changed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    model = small_model()
    for optimize in (optimize_medium_model, partial(optimize_large_model, use_deepspeed=False)):
        with pytest.raises(ModuleNotFoundError, match="needs torchao"):
            optimize(model, optimizer="adamw8bit-torchao")
        assert not model.gradient_checkpointing
        assert options_of(model) is None
    assert optimize_medium_model(model)[0] is model


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_stages_set_the_learning_rate_of_an_8_bit_optimizer(library) -> None:
    pytest.importorskip(library, reason=f"needs the extra {library}")
    model, optimizer = optimize_medium_model(small_model(), optimizer=f"adamw8bit-{library}")
    stage = {"max_seq_len": 64, "segment_lengths": SIZES["segment_lengths"], "dilation_rates": SIZES["dilation_rates"],
             "epochs": 2, "batch_size": 2, "learning_rate": 1e-2}  # fmt: skip
    losses = train_hierarchically(model, [sequences(40, 40)], [stage], optimizer=optimizer)
    assert all(map(math.isfinite, losses[0]))
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-3)


def test_optimizing_a_large_model_without_deepspeed() -> None:
    model, optimizer = optimize_large_model(small_model(), use_deepspeed=False)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert options_of(model).checkpointing == "full"


def test_optimizing_a_large_model_with_deepspeed_wants_it_and_ranks(monkeypatch) -> None:
    monkeypatch.setattr("dilated_attention_pytorch.train.recipes.import_deepspeed", lambda device: None)
    with pytest.raises(ValueError, match="needs torchrun: start the program with it, or pass use_deepspeed=False"):
        optimize_large_model(small_model())


@pytest.mark.parametrize(("hardware", "dtype"), [("h100", torch.bfloat16), ("v100", None), ("cpu", torch.float32)])
def test_optimizing_a_large_model_gives_deepspeeds_engine_and_its_precision(monkeypatch, hardware, dtype) -> None:
    given = {}

    def initialize(**settings):
        given.update(settings)
        return "engine", "optimizer", None, None

    for room in ("recipes", "zero"):
        monkeypatch.setattr(
            f"dilated_attention_pytorch.train.{room}.import_deepspeed",
            lambda device: SimpleNamespace(initialize=initialize),
        )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    found = optimize_large_model(small_model(), hardware=hardware, batch_size=3, clip_norm=0.5, offload=False)
    assert found == ("engine", "optimizer")
    config = given["config"]
    assert (config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]) == (2, 3)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config.get("fp16") == (None if dtype else {"enabled": True})
    assert isinstance(given["optimizer"], torch.optim.AdamW)
    assert given["model"].gradient_checkpointing
    if dtype is not None:
        assert given["model"](torch.randint(50, (1, 20))).dtype == dtype
    with pytest.raises(ValueError, match="DeepSpeed shards the state of PyTorch's AdamW, got"):
        optimize_large_model(small_model(), optimizer="adamw8bit-torchao")


def test_attention_takes_tf32_where_the_hardware_has_it() -> None:
    model = optimize_small_model(small_model(), hardware="a100", compile=False, precision="fp32")
    assert all(layer.self_attn.attention.allow_tf32 for layer in model.layers)
    model = optimize_small_model(small_model(), hardware="v100", compile=False, precision="fp32")
    assert not any(layer.self_attn.attention.allow_tf32 for layer in model.layers)


def test_small_models_are_compiled_on_gpus_only(monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append(how))
    optimize_small_model(small_model())
    assert not compiled
    optimize_small_model(small_model(), hardware="h100")
    assert compiled[0]["mode"] == "max-autotune-no-cudagraphs"


def test_layers_that_were_made_float8_or_sparse_before_stay_known_as_such() -> None:
    model = small_model()
    model.memory_options = MemoryOptions(precision="bf16", float8=True)  # as enable_fp8_training leaves it on a GPU
    assert options_of(optimize_small_model(model, hardware="cpu", precision="bf16")).float8
    model = small_model()
    model.memory_options = MemoryOptions(precision="bf16", structured_sparsity=True)
    with pytest.raises(ValueError, match="2:4 sparse products exist in 16 bits only"):
        optimize_small_model(model, hardware="cpu")
    assert not model.gradient_checkpointing


def test_float8_and_sparsity_are_refused_where_they_cannot_run() -> None:
    for enable, needed in ((enable_fp8_training, r"9\.0"), (enable_structured_sparsity, r"8\.0")):
        model = optimize_small_model(small_model())
        before = options_of(model)
        with pytest.raises(ValueError, match=f"capability {needed} or newer, and the model is on cpu"):
            enable(model)
        assert options_of(model) == before
    with pytest.raises(ValueError, match=r"sparsity_ratio must be 0\.5, got 0\.9"):
        enable_structured_sparsity(small_model(), sparsity_ratio=0.9)
    with pytest.raises(TypeError, match=r"prepare takes a model with dilated attention, .* got Linear"):
        enable_fp8_training(nn.Linear(16, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("enable", [enable_fp8_training, enable_structured_sparsity])
def test_float8_and_sparsity_train_on_a_gpu(enable) -> None:
    if enable is enable_fp8_training:
        pytest.importorskip("torchao")
    torch.manual_seed(0)
    sizes = SIZES | {"d_model": 256, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    model = enable(optimize_small_model(LongNetLM(**sizes).cuda(), compile=False))
    assert options_of(model).precision == "bf16"
    stage = Stage(
        sequence_length=512, segment_lengths=(64, 256), dilation_rates=(1, 4), batch_size=2, learning_rate=1e-3, steps=8
    )
    found = train_stage(model, sequences(512, 512, seed=2), stage)
    assert found[-1] < found[0]


@pytest.mark.gpu
def test_a_small_model_is_compiled_and_trains_on_a_gpu() -> None:
    sizes = SIZES | {"d_model": 128, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    torch.manual_seed(0)
    model = optimize_small_model(LongNetLM(**sizes).cuda())
    assert options_of(model).precision in ("bf16", "fp16")
    dataset = sequences(512, 512, seed=2)
    losses = train_hierarchically(
        model,
        [dataset, dataset],
        [
            {"max_seq_len": 256, "segment_lengths": (64, 256), "dilation_rates": (1, 4), "epochs": 8,
             "batch_size": 2, "learning_rate": 1e-3},
            {"max_seq_len": 512, "segment_lengths": (128, 512), "dilation_rates": (1, 4), "epochs": 8,
             "batch_size": 2, "learning_rate": 1e-3},
        ],
    )  # fmt: skip
    assert losses[1][-1] < losses[0][0]


# Batches


def test_dynamic_batching_as_published() -> None:
    batcher = DynamicBatcher(max_tokens=32768, max_batch_size=32)
    assert [batcher.get_batch_size(n) for n in (512, 2048, 8192, 32768)] == [32, 16, 4, 1]
    items = sequences(2000, 5000, 2048, 9000, 100, 8192)
    batches = batcher.create_batches(items)
    assert [[len(item["input_ids"]) for item in batch] for batch in batches] == [
        [2000, 2048, 100],
        [5000, 8192],
        [9000],
    ]
    assert batches[0][0] is items[0]


def test_a_batch_never_holds_more_than_its_tokens() -> None:
    batcher = DynamicBatcher(max_tokens=100, max_batch_size=6, segment_lengths=[8, 32])
    lengths = torch.randint(1, 101, (200,)).tolist()
    batches = batcher.create_batches(sequences(*lengths))
    assert sorted(len(item["input_ids"]) for batch in batches for item in batch) == sorted(lengths)
    for batch in batches:
        assert len(batch) <= 6
        assert collate(batch)["input_ids"].numel() <= 100


def test_a_sequence_that_fits_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 101 tokens does not fit a batch of 100: raise max_tokens"):
        DynamicBatcher(100, 4, [8]).create_batches(sequences(50, 101))
    with pytest.raises(ValueError, match="seq_len must be a whole number of at least 1, got 0"):
        DynamicBatcher(100, 4, [8]).create_batches([{"input_ids": []}])
    with pytest.raises(ValueError, match="max_tokens must be a whole number of at least 1, got 0"):
        DynamicBatcher(max_tokens=0)


def test_padding_changes_no_loss() -> None:
    model, items = small_model().double(), sequences(9, 30, 17)
    whole = collate(items, length=40)
    assert whole["seqlens"].tolist() == [9, 30, 17]
    tokens, labels = whole["input_ids"], whole["labels"]
    found = loss(model, tokens, labels, MemoryOptions(), seqlens=whole["seqlens"], reduction="sum")
    alone = [collate([item]) for item in items]
    assert all("seqlens" not in one for one in alone)
    expected = sum(loss(model, one["input_ids"], one["labels"], MemoryOptions(), reduction="sum") for one in alone)
    torch.testing.assert_close(found, expected)


# Loops


def test_accumulated_gradients_are_those_of_the_large_batch(capsys) -> None:
    items = sequences(12, 20, 9, 31, 16, 5, 25, 8)  # so that batches count different numbers of labels
    found = {}
    for actual in (2, 8):
        model = small_model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = [collate(items[i : i + actual]) for i in range(0, 8, actual)]
        losses = gradient_accumulation_training(
            model, loader, optimizer, None, target_batch_size=8, actual_batch_size=actual, clip_norm=1.0
        )
        found[actual] = losses, [p.detach() for p in model.parameters()]
    assert found[2][0] == pytest.approx(found[8][0], rel=1e-12)
    for one, other in zip(found[2][1], found[8][1]):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert "Step 4, Loss: " in capsys.readouterr().out


def test_steps_count_sequences_however_they_are_spread() -> None:
    whole = collate(sequences(*[16] * 12))
    sizes = (1, 3, 4, 2, 2)  # the third ends a step and begins the next
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spread = [{name: x[at : at + n] for name, x in whole.items()} | {"seqlens": None} for at, n in zip(starts, sizes)]
    even = [{name: x[at : at + 3] for name, x in whole.items()} for at in range(0, 12, 3)]
    losses = []
    for loader in (spread, even):
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append(
            gradient_accumulation_training(model, loader, optimizer, target_batch_size=6, actual_batch_size=6)
        )
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(clip_norm) -> None:
    model = small_model()
    before = [parameter.clone() for parameter in model.parameters()]

    def broken(out, labels):
        return (out.sum() * 0).abs().sqrt() + 1  # a slope of 0 times infinity, at a loss of 1

    with pytest.raises(FloatingPointError, match=r"the loss is 1\.0 and the gradient's norm nan"):
        gradient_accumulation_training(
            model,
            [collate(sequences(16, 16))],
            torch.optim.SGD(model.parameters(), 0.1),
            compute_loss=broken,
            clip_norm=clip_norm,
        )
    assert all(map(torch.equal, before, model.parameters()))


def test_gradient_accumulation_as_published_with_what_is_left_over() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tokens = torch.randint(50, (5, 2, 17))
    dataloader = [{"input_ids": batch[:, :-1], "labels": batch[:, 1:]} for batch in tokens]
    losses = gradient_accumulation_training(
        model, dataloader, optimizer, scaler, target_batch_size=4, actual_batch_size=2
    )
    assert len(losses) == 3
    with pytest.raises(ValueError, match="divide target_batch_size, got actual_batch_size=3 and target_batch_size=64"):
        gradient_accumulation_training(model, dataloader, optimizer, scaler, actual_batch_size=3)
    with pytest.raises(ValueError, match="a batch has 2 sequences, more than actual_batch_size=1"):
        gradient_accumulation_training(model, dataloader, optimizer, scaler, actual_batch_size=1)


def test_a_scaler_means_float16() -> None:
    seen = []
    model = small_model()
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = gradient_accumulation_training(
        model, [collate(sequences(16, 16))], optimizer, torch.amp.GradScaler("cpu", init_scale=64.0)
    )
    assert seen == [torch.float16]
    assert losses[0] == pytest.approx(math.log(50), rel=0.2)


def test_a_loss_of_ones_own_and_any_model() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Embedding(50, 50)

        def forward(self, tokens):
            return self.scores(tokens)

    def compute_loss(output, labels):
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    loader = [collate(sequences(16, 16))]
    losses = []
    for how in ({}, {"compute_loss": compute_loss}):
        torch.manual_seed(0)
        model = Bigram()
        losses.append(gradient_accumulation_training(model, loader, torch.optim.SGD(model.parameters(), 0.1), **how))
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.zeros(1, 4)}, r"a mapping with input_ids and optionally .* got \['tokens'\]"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.long), "mask": None}, r"got \['input_ids', 'mask'\]"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"are \(batch, tokens\), got \(4,\)"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.long), "seqlens": torch.tensor([3])}, "pass labels too"),
        ({"input_ids": torch.zeros(1, 1, dtype=torch.long)}, "all of its labels are -100"),
    ],
)
def test_a_batch_that_is_none_is_refused(batch, message) -> None:
    model = small_model()
    with pytest.raises(ValueError, match=message):
        gradient_accumulation_training(model, [batch], torch.optim.SGD(model.parameters(), 0.1))


def test_a_loss_that_is_not_finite_does_not_reach_the_weights() -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        gradient_accumulation_training(
            model,
            [collate(sequences(16))],
            torch.optim.SGD(model.parameters(), 0.1),
            compute_loss=lambda output, labels: output.sum() * math.nan,
        )
    torch.testing.assert_close(model.state_dict(), before)


def test_an_engine_that_steps_by_itself_is_refused() -> None:
    class Engine(nn.Linear):
        def backward(self) -> None: ...

        def step(self) -> None: ...

    with pytest.raises(TypeError, match="Engine makes its own steps"):
        gradient_accumulation_training(Engine(2, 2), [], torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))


def test_the_published_schedule() -> None:
    schedule = hierarchical_training_schedule()
    assert [stage["max_seq_len"] for stage in schedule] == [4096, 8192, 16384]
    assert [stage["epochs"] for stage in schedule] == [10, 15, 20]
    assert schedule[2]["segment_lengths"] == [2048, 4096, 8192]
    assert [Stage.of(stage, sequences=16).steps for stage in schedule] == [20, 60, 160]


def shrunk_schedule(by: int = 256) -> list[dict]:
    """The published one, with everything shorter."""
    return [
        stage
        | {
            "max_seq_len": stage["max_seq_len"] // by,
            "segment_lengths": [length // by for length in stage["segment_lengths"]],
            "epochs": 2,
            "learning_rate": 1e-2,
        }
        for stage in hierarchical_training_schedule()
    ]


def test_hierarchical_training_as_published(capsys) -> None:
    schedule, model = shrunk_schedule(), small_model()
    text = {"input_ids": torch.arange(256) % 7}
    datasets = [[text, text], [text], [text]]
    losses = train_hierarchically(model, datasets, schedule)
    # 256 tokens are 16, 8 and 4 sequences, in batches of 8, 4 and 2; the first set has the text twice.
    assert [len(of_stage) for of_stage in losses] == [2 * 4, 2 * 2, 2 * 2]
    assert losses[-1][-1] < losses[0][0] / 2
    assert model.config.segment_lengths == (8, 16, 32)
    assert capsys.readouterr().out.splitlines() == [
        "Training Stage 1: 16 tokens",
        "Training Stage 2: 32 tokens",
        "Training Stage 3: 64 tokens",
    ]


def test_the_parts_of_hierarchical_training_as_published() -> None:
    schedule, model = shrunk_schedule(), small_model()
    datasets = [sequences(64, 40), sequences(64), sequences(64)]
    for stage_idx, stage_config in enumerate(schedule):
        update_attention_config(model, stage_config)
        train_stage(model, datasets[stage_idx], stage_config)
    assert model.config.dilation_rates == (1, 2, 4)


def test_a_stage_is_repeatable_and_takes_every_sequence_once_an_epoch() -> None:
    seen = []
    stage = shrunk_schedule()[0] | {"batch_size": 3}
    for _ in range(2):
        model = small_model(segment_lengths=(4, 8), dilation_rates=(1, 2))
        lengths = []
        model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[0]))  # noqa: B023
        seen.append((train_stage(model, sequences(16, 16, 40, seed=3), stage), lengths))
    assert seen[0] == seen[1]
    assert seen[0][1] == [3, 2, 3, 2]  # 40 tokens are three sequences


def test_what_is_wrong_with_a_stage_is_said_before_training() -> None:
    model, schedule = small_model(), shrunk_schedule()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="call update_attention_config"):
        train_stage(model, sequences(16), schedule[0])
    with pytest.raises(ValueError, match="got 1 for 3 stages"):
        train_hierarchically(model, [sequences(16)], schedule)
    schedule[2].pop("batch_size")
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        train_hierarchically(model, [sequences(16)] * 3, schedule)
    update_attention_config(model, schedule[0])
    with pytest.raises(ValueError, match="every one of them has a single token"):
        train_stage(model, [{"input_ids": [3]}], schedule[0])
    with pytest.raises(ValueError, match=r"input_ids and labels are \(tokens,\), got \(2, 3\)"):
        train_stage(model, [{"input_ids": torch.zeros(2, 3)}], schedule[0])
    torch.testing.assert_close(model.state_dict(), before)


def test_training_names_are_found_at_the_root() -> None:
    late = [name for name in dilated_attention_pytorch.__all__ if name not in vars(dilated_attention_pytorch)]
    assert {"DynamicBatcher", "train_stage", "update_attention_config"} <= {*late}
    for name in late:
        assert getattr(dilated_attention_pytorch, name).__module__.startswith("dilated_attention_pytorch.train.")
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        _ = dilated_attention_pytorch.optimise
