"""Settings from a TOML file and flags that go before them; what a resumed run may change; what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.core.spec import branches_for
from dilated_attention_pytorch.parallel import Zero
from dilated_attention_pytorch.train import TrainConfig, command
from dilated_attention_pytorch.train.config import SMALL_MODEL, override, read_settings
from dilated_attention_pytorch.train.footprint import parameter_count
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.presets import hardware_preset, run_preset

FILE = """
steps = 7
learning_rate = 1
monitors = ["jsonl"]
engine = "deepspeed"

[model]
d_model = 32
num_heads = 2
segment_lengths = [8, 16]
dilation_rates = [1, 2]

[memory]
checkpointing = "full"
offload = true
loss_chunk = 64

[zero]
stage = 2
"""


@pytest.fixture
def started(monkeypatch) -> list[TrainConfig]:
    """The configs of runs that commands would start."""
    found: list[TrainConfig] = []
    monkeypatch.setattr(command, "train", lambda config, run, resume: found.append(config))
    return found


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(FILE)
    return path


def test_flags_go_before_the_file_and_the_file_before_defaults(file, started) -> None:
    assert main(["train", "--out", "run", "--config", str(file)]) == 0
    flags = "--steps 9 --num-heads 4 --no-offload --mlp-tile 5 --zero-stage 1 --dropout 0.1"
    assert main(["train", "--out", "run", "--config", str(file), *flags.split()]) == 0
    by_file, by_flags = started
    assert (by_file.steps, by_file.learning_rate, by_file.monitors, by_file.zero) == (7, 1, ("jsonl",), Zero(stage=2))
    assert by_file.memory == MemoryOptions(checkpointing="full", offload=True, loss_chunk=64)
    assert (by_file.model.d_model, by_file.model.dim_feedforward, by_file.model.num_heads) == (32, 128, 2)
    assert by_file.model.num_layers == SMALL_MODEL.num_layers
    assert by_file.batch_size == TrainConfig().batch_size
    assert (by_flags.steps, by_flags.zero) == (9, Zero(stage=1))
    assert by_flags.memory == MemoryOptions(checkpointing="full", loss_chunk=64, mlp_tile=5)
    assert (by_flags.model.num_heads, by_flags.model.dropout, by_flags.model.d_model) == (4, 0.1, 32)


def test_the_default_model_connects_the_length_that_is_stated(tmp_path, started) -> None:
    main(["train", "--sequence-length", "3000", "--num-heads", "8"])
    main(["train", "--sequence-length", "3000", "--segment-lengths", "64", "512", "--dilation-rates", "1", "4"])
    main(["train", "--sequence-length", "100"])
    main(["train", "--sequence-length", "100000"])
    main(["train", "--sequence-length", "2800"])  # from 64 * 43 on, two near branches of 64 would meet
    xpos = tmp_path / "xpos.toml"
    xpos.write_text('[model]\npositions = "xpos"\n')
    main(["train", "--config", str(xpos), "--stagger"])
    followed, stated, short, long, between, nested = started
    assert (followed.model.segment_lengths, followed.model.dilation_rates) == ((87, 128, 4096), (1, 1, 8))
    assert stated.model.segment_lengths == (64, 512)
    assert short.model == SMALL_MODEL
    assert (long.model.segment_lengths, long.model.dilation_rates) == ((351, 512, 131_072), (1, 1, 4))
    assert (between.model.segment_lengths, between.model.dilation_rates) == ((87, 128, 4096), (1, 1, 4))
    assert (nested.model.segment_lengths, nested.model.dilation_rates) == ((64, 128, 512), (1, 2, 4))


@pytest.mark.parametrize("nothing", [[], [""]])
def test_data_without_a_name_is_refused(nothing, started, capsys) -> None:
    assert main(["train", "--data", *nothing]) == 1
    assert "leave it out for the standard library's source" in capsys.readouterr().err
    assert not started


def test_flags_say_what_later_models_do_and_sizes_that_are_not_stated_follow(tmp_path, started) -> None:
    flags = [
        "--norm",
        "rms",
        "--activation",
        "swiglu",
        "--num-kv-heads",
        "2",
        "--qk-norm",
        "--no-tie-weights",
        "--logit-soft-cap",
        "15",
    ]
    path = tmp_path / "settings.toml"
    path.write_text("[model]\ndim_feedforward = 300\n")
    main(["train", *flags])
    main(["train", *flags, "--preset", "125m", "--hardware", "cpu"])
    main(["train", *flags, "--config", str(path), "--d-model", "64"])
    small, preset, stated = (config.model for config in started)
    for model in (small, preset, stated):
        assert (model.norm, model.activation, model.num_kv_heads, model.qk_norm) == ("rms", "swiglu", 2, True)
        assert (model.tie_weights, model.logit_soft_cap) == (False, 15.0)
    assert (small.dim_feedforward, small.dilation_rates) == (384, branches_for(512, 2, shortest=64, is_causal=True)[1])
    assert (preset.dim_feedforward, preset.dilation_rates) == (2048, branches_for(32_768, 2, is_causal=True)[1])
    assert parameter_count(preset) == pytest.approx(125e6, rel=0.05)
    assert (stated.dim_feedforward, stated.d_model) == (300, 64)


def test_a_file_goes_before_what_its_preset_stands_for(tmp_path, started) -> None:
    path = tmp_path / "settings.toml"
    stated = "batch_size = 3\n[model]\ndropout = 0.3\n[memory]\nmlp_tile = 5\n"
    path.write_text(f'preset = "125m"\nhardware = "cpu"\n{stated}')
    assert main(["train", "--out", "run", "--config", str(path)]) == 0
    path.write_text(stated)
    assert main(["train", "--out", "run", "--config", str(path), "--preset", "125m", "--hardware", "cpu"]) == 0
    expected = run_preset("125m", hardware_preset("cpu"))
    for config in started:
        assert (config.batch_size, config.learning_rate) == (3, expected["learning_rate"])
        assert config.model == dataclasses.replace(expected["model"], dropout=0.3)
        assert config.memory == dataclasses.replace(expected["memory"], mlp_tile=5)


STAGES = """
[[stages]]
sequence_length = 64
segment_lengths = [16, 32]
dilation_rates = [1, 2]
batch_size = 4
learning_rate = 1e-4
steps = 2
"""


@pytest.mark.parametrize(
    ("stated", "flags", "message"),
    [
        (
            "",
            "--batch-size 8",
            "the stages decide batch_size, which is 4 in the first, got 8: leave it out",
        ),  # the default, and yet stated
        (
            "",
            "--segment-lengths 16 --dilation-rates 1",
            "the stages decide segment_lengths, which is (16, 32) in the first, got (16,)",
        ),
        ("batch_size = 8", "", "the stages decide batch_size, which is 4 in the first, got 8: leave it out"),
        (
            "model.segment_lengths = [8]",
            "",
            "the stages decide segment_lengths, which is (16, 32) in the first, got [8]",
        ),
    ],
)
def test_what_stages_decide_cannot_be_said_beside_them(tmp_path, started, capsys, stated, flags, message) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(stated + STAGES)
    assert main(["train", "--out", "run", "--config", str(path), *flags.split()]) == 1
    assert message in capsys.readouterr().err
    path.write_text("batch_size = 4" + STAGES)
    assert main(["train", "--out", "run", "--config", str(path)]) == 0
    assert started[0].steps == 2


def test_another_engine_takes_back_what_the_file_says_of_deepspeed(file, started) -> None:
    assert main(["train", "--out", "run", "--config", str(file), "--engine", "ddp"]) == 0
    assert (started[0].engine, started[0].zero) == ("ddp", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learning_rat = 1.0", "has an unknown key learning_rat: did you mean learning_rate?"),
        ("[memory]\ncheckpoint = 'full'", "unknown key [memory] checkpoint: did you mean checkpointing?"),
        ("[model]\nd_modle = 8", "unknown key [model] d_modle: did you mean d_model?"),
        ("[memroy]\noffload = true", "unknown key memroy: did you mean memory?"),
        ("steps = '7'", "steps must be a whole number of at least 1, got '7' (in FILE, or a flag)"),
        ("steps = true", "steps must be a whole number of at least 1, got True"),
        ("learning_rate = 'high'", "learning_rate must be a finite number above 0, got 'high'"),
        ("data = 'a.txt'", "data must be a sequence such as a list or a tuple, got 'a.txt' (in FILE, or a flag)"),
        ("data = [1]", "(in FILE, or a flag)"),
        ("steps = -1", "steps must be a whole number of at least 1, got -1 (in FILE, or a flag)"),
        ("steps = 0", "steps must be a whole number of at least 1, got 0"),
        ("learning_rate = nan", "learning_rate must be a finite number above 0, got nan"),
        ("seed = 99999999999999999999", "seed must be a whole number of at most 9223372036854775807"),
        ("sequence_length = 'long'", "sequence_length must be a whole number of at least 1, got 'long'"),
        ("stages = 3", "stages must be a sequence such as a list or a tuple, got 3"),
        ("[model]\ndropout = nan", "dropout must be a finite number of at least 0 and below 1, got nan"),
        ("preset = 125", "a model's size is one of 125m, 350m"),
        ("preset = '7b'", "a model's size is one of"),
        ("memory = 3", "memory in FILE is a table: write [memory]"),
        (
            "[memory]\noffload = true",
            "[memory]: offload moves what checkpointing keeps",
        ),
        ("[zero]\nstage = 2", "need the engine deepspeed, and this one is fsdp"),
        ("steps = ", "FILE is not a TOML file"),
        (None, "no config file FILE"),
    ],
)
def test_a_file_that_is_wrong_is_told_what_and_where(tmp_path, started, capsys, content, message) -> None:
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_text(content)
    assert main(["train", "--out", str(tmp_path / "run"), "--config", str(path)]) == 1
    assert message.replace("FILE", str(path)) in capsys.readouterr().err
    assert not started


def test_a_file_begins_a_run_and_does_not_resume_one(file, tmp_path, started, capsys) -> None:
    assert main(["train", "--resume", str(tmp_path), "--config", str(file)]) == 1
    assert "--config starts a run" in capsys.readouterr().err
    (tmp_path / "options.json").write_text("{}")
    assert main(["train", "--options", str(tmp_path / "options.json"), "--config", str(file)]) == 1
    assert "--options and --config both describe the run" in capsys.readouterr().err


def test_ranks_are_told_the_parsed_config_as_a_file(file, started, monkeypatch) -> None:
    caught: list[list[str]] = []

    def torchrun(arguments: list[str]) -> None:
        caught.append(arguments)
        assert main(arguments[arguments.index("rank") :]) == 0

    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    flags = ["--config", str(file), "--no-offload", "--compile", "--mlp-tile", "5", "--zero-stage", "2"]
    assert main(["train", "--ranks", "2", "--max-restarts", "3", "--out", "run", *flags]) == 0
    assert main(["train", "--out", "run", *flags]) == 0
    assert started[0] == started[1]
    assert caught[0][:3] == ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    assert not Path(caught[0][-1]).exists()


def test_ranks_that_fail_print_one_error(started, monkeypatch, capsys) -> None:
    def fail(config, run, resume):
        raise OSError(f"rank {next(ranks)} cannot go on")

    def torchrun(arguments: list[str]) -> None:
        for restarts in ("0", "1"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
            assert [main(arguments[arguments.index("rank") :]) for _ in range(3)] == [1, 1, 1]
        raise ChildFailedError("ranks", {rank: ProcessFailure(rank, 9, code, "") for rank, code in enumerate(codes)})

    ranks, codes = itertools.count(), [1, 1, 1]
    monkeypatch.setattr(command, "train", fail)
    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    assert main(["train", "--out", "run", "--ranks", "3"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [f"dilated-attention: rank {rank} cannot go on" for rank in (0, 3)]  # once per start
    codes[:] = [1, -signal.SIGTERM, -signal.SIGTERM]  # torchrun ends the others
    assert main(["train", "--out", "run", "--ranks", "3"]) == 1
    assert "SIGTERM" not in capsys.readouterr().err
    codes[:] = [1, -signal.SIGKILL, 1]
    assert main(["train", "--out", "run", "--ranks", "3"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "dilated-attention: SIGKILL ended rank 1: the run has no complete checkpoint yet; --max-restarts N would "
        "restart the ranks"
    )


@pytest.mark.parametrize(("gpus", "flags"), [(0, ["--device", "cuda"]), (2, []), (2, ["--device", "cuda"])])
def test_more_ranks_than_gpus_are_refused_before_any_starts(gpus, flags, started, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.run.main", None)
    assert main(["train", "--out", "run", "--ranks", "3", *flags]) == 1
    assert f"3 ranks are more than the {gpus} GPUs that PyTorch finds here" in capsys.readouterr().err


def test_help_has_headings_and_shows_defaults(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    headings = ["start", "data", "steps and optimizer", "checkpoints and output", "devices and ranks", "model"]
    assert all(f" {heading} options " in shown for heading in [*headings, "memory and speed", "deepspeed"])
    words = " ".join(shown.replace("│", " ").split())
    for flag, default in {
        "--weight-decay": "0.1",
        "--no-keep-best": "off",
        "--sample-prompt": "'def '",
        "--dilation-rates": "1 1 4",
        "--d-model": "128",
        "--mlp-tile": "0",
    }.items():
        assert re.search(rf"{flag} .{{0,90}}?\(default: {re.escape(default)}\)", words), flag


def test_old_and_short_names_of_branches_are_one_flag(started) -> None:
    assert main(["train", "--segments", "64", "512", "--rates", "1", "4"]) == 0
    assert main(["train", "--segment-lengths", "64", "512", "--dilation-rates", "1", "4"]) == 0
    assert started[0].model == started[1].model
    assert (started[0].model.segment_lengths, started[0].model.dilation_rates) == ((64, 512), (1, 4))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--keep-checkpoints 0", "keep_checkpoints must be a whole number of at least 1, got 0"),
        ("--weight-decay -1", "weight_decay must be a finite number of at least 0, got -1.0"),
        ("--clip-norm 0", "clip_norm must be a number above 0, got 0.0"),
        ("--clip-norm nan", "clip_norm must be a number above 0, got nan"),
        ("--threads 0", "threads must be a whole number of at least 1 and at most 4096, got 0"),
        ("--sample-prompt=", "sample_prompt must have at least one character, got ''"),
    ],
)
def test_values_out_of_range_are_refused(started, capsys, flags, message) -> None:
    assert main(["train", *flags.split()]) == 1
    assert message in capsys.readouterr().err
    assert not started


def test_flags_that_are_wrong_are_told_before_anything_runs(started, capsys, monkeypatch) -> None:
    for flags, message in (("--step 3", "--steps"), ("--order sorted", "Expected one of ('random', 'epochs')")):
        with pytest.raises(SystemExit, match="2"):
            main(["train", *flags.split()])
        assert message in " ".join(capsys.readouterr().err.replace("│", "").split())
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train", "--steps", "3"]) == 1
    assert "the command train needs tyro: pip install 'longnet-dilated-attention[train]'" in capsys.readouterr().err
    assert not started


@pytest.fixture
def saved(tmp_path):
    """The folder of a run from before there were memory options."""
    values = json.loads(TrainConfig(steps=9).to_json())
    for name in ("memory", "accumulate", "skip_broken_steps"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_a_run_from_before_the_memory_options_resumes_with_those_that_change_nothing(saved, started, capsys) -> None:
    assert main(["train", "--resume", str(saved)]) == 0
    assert started[0] == TrainConfig(steps=9)
    changes = "--checkpointing selective --offload --mlp-tile 5 --loss-chunk 9 --accumulate 2 --skip-broken-steps 0"
    assert main(["train", "--resume", str(saved), *changes.split()]) == 0
    assert started[1].memory.checkpointing == "selective"
    assert started[1].is_same_run(started[0])
    changes = "--keep-checkpoints 5 --keep-best --threads 2"
    assert main(["train", "--resume", str(saved), *changes.split(), "--sample-prompt", "a b"]) == 0
    assert (started[2].keep_checkpoints, started[2].keep_best, started[2].sample_prompt) == (5, True, "a b")
    assert started[2].is_same_run(started[0])
    assert main(["train", "--resume", str(saved), "--clip-norm", "inf", "--weight-decay", "0"]) == 1
    assert "--clip-norm, --weight-decay cannot change when a run is resumed" in capsys.readouterr().err
    assert main(["train", "--resume", str(saved), "--precision", "bf16", "--dropout", "0.1"]) == 1
    assert "--dropout, --precision cannot change when a run is resumed" in capsys.readouterr().err
    assert not started[1].is_same_run(TrainConfig(steps=9, memory=MemoryOptions(precision="bf16")))


def test_runs_that_could_not_be_carried_out_alike_are_told_apart() -> None:
    assert not TrainConfig(batch_size=6).is_same_run(TrainConfig(batch_size=8, accumulate=8))
    half = MemoryOptions(precision="fp16")
    assert not TrainConfig(memory=half).is_same_run(TrainConfig(engine="deepspeed"))


def test_no_two_settings_of_a_run_share_a_flag() -> None:
    config = TrainConfig()
    every = [*vars(config), *vars(config.model), *vars(config.memory)]
    assert len(every) == len({*every})


def test_every_memory_option_but_the_least_bytes_has_a_flag(started) -> None:
    flags = "--checkpointing full --layers-per-checkpoint 2 --offload --mlp-tile 5 --loss-chunk 9 --precision bf16 "
    flags += "--optimizer adamw8bit-torchao --parameters bf16 --float8 --compile "
    flags += "--compile-mode max-autotune-no-cudagraphs --compile-backend eager"
    assert main(["train", "--out", "run", *flags.split()]) == 0
    assert main(["train", "--out", "run", "--structured-sparsity", "--precision", "bf16"]) == 0
    found = [started[0].memory, started[1].memory]
    left = [name for name, default in vars(MemoryOptions()).items() if {getattr(m, name) for m in found} == {default}]
    assert left == ["offload_least_bytes"]


def test_the_config_of_a_run_is_read_as_it_was_written(tmp_path, file) -> None:
    config = TrainConfig(**override({}, read_settings(file)))
    (tmp_path / "config.json").write_text(config.to_json())
    assert TrainConfig.from_json(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "deepspeed", "memory": MemoryOptions(precision="fp16")}, "use 'bf16', or engine fsdp or ddp"),
        ({"engine": "deepspeed", "memory": MemoryOptions(optimizer="adamw8bit-torchao")}, "PyTorch's AdamW"),
        ({"engine": "deepspeed", "memory": MemoryOptions(optimizer="muon")}, "use engine fsdp or ddp, or optimizer"),
        ({"engine": "deepspeed", "memory": MemoryOptions(mlp_tile=8)}, "use stage 1 or 2, engine fsdp, or"),
        (
            {"engine": "deepspeed", "memory": MemoryOptions(precision="bf16", parameters="bf16")},
            "use engine fsdp or ddp, or parameters 'fp32'",
        ),
        ({"tensor_parallel": 2, "memory": MemoryOptions(float8=True)}, "float8 replaces whole linear layers"),
        (
            {"tensor_parallel": 2, "memory": MemoryOptions(structured_sparsity=True, precision="bf16")},
            "use tensor_parallel 1, or leave structured_sparsity out",
        ),
        ({"batch_size": 8, "accumulate": 3}, "3 must divide the batch_size, which is 8"),
        ({"skip_broken_steps": -1}, "skip_broken_steps must be a whole number of at least 0"),
    ],
)
def test_what_cannot_be_combined_is_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)
