"""DeepSpeed's ZeRO trains what one process trains, in every stage; its checkpoints are those of the other engines."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.parallel import RunOptions, Zero
from dilated_attention_pytorch.train import TrainConfig, command
from dilated_attention_pytorch.train.checkpoint import list_checkpoints
from dilated_attention_pytorch.train.config import settings_of
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.zero import check_zero

from .test_ranks import launch, losses, without_newest

STEPS = 8
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install '.[deepspeed]'"
)

EVERY = ["--checkpoint-every", "4"]
OPTIONS = RunOptions(use_deepspeed=True, enable_monitoring=True, auto_resume=True, checkpoint_interval=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def flags(folder) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    # Six sequences, for two ranks and three; sizes that three do not divide.
    sizes = """
        --d-model 16 --num-heads 2 --num-layers 2 --segment-lengths 8 16 --dilation-rates 1 2 --sequence-length 16
        --batch-size 6 --warmup-steps 2 --validate-every 8 --sample-bytes 4 --device cpu
    """
    return ["train", "--data", str(text), "--steps", str(STEPS), *sizes.split()]


@pytest.fixture(scope="module")
def alone(folder, flags) -> Path:
    """The run of one process, which the others must equal."""
    assert main([*flags, "--out", str(folder / "alone"), *EVERY]) == 0
    return folder / "alone"


@pytest.fixture(scope="module")
def shared(folder, flags, alone) -> str:
    """What two ranks say that train in every stage, resume what one process did, and refuse NVMe."""
    damaged = folder / "damaged" / "checkpoints"
    shutil.copytree(alone, folder / "damaged")
    broken = damaged / f"step-{STEPS:08d}" / "state" / "__0_0.distcp"
    broken.write_bytes(broken.read_bytes()[:1000])
    (folder / "options.json").write_text(OPTIONS.to_json())
    return launch(2, "share", folder, flags, worker="zero_worker")


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_gives_the_losses_of_one_process(stage, folder, alone, shared) -> None:
    assert losses(folder / f"stage-{stage}") == pytest.approx(losses(alone), abs=1e-5)
    assert shared.count(", 2 ranks (deepspeed)") >= 3


@needs_deepspeed
def test_ranks_that_share_sequences_have_the_losses_of_one_process(folder, alone, shared) -> None:
    assert ", 2 ranks (deepspeed, sequence 2)" in shared
    assert losses(folder / "sequence") == pytest.approx(losses(alone), abs=1e-5)


@needs_deepspeed
def test_a_step_that_is_broken_on_one_rank_is_skipped_by_all(folder, alone, shared) -> None:
    assert shared.count("skipped: the loss is nan and the gradient's norm nan at step 3 (1 in a row)") == 1
    records = [json.loads(line) for line in (folder / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "skipped" in record] == [3]
    assert records[1]["loss"] == pytest.approx(losses(alone)[1], abs=1e-5)
    assert records[3]["loss"] < records[0]["loss"]


@needs_deepspeed
def test_bf16_is_that_of_autocast(folder, alone, shared) -> None:
    assert losses(folder / "bf16") != pytest.approx(losses(alone), abs=1e-5)
    assert losses(folder / "bf16") == pytest.approx(losses(alone), rel=2e-2)


@needs_deepspeed
def test_two_ranks_go_on_where_one_process_stopped_and_pass_over_what_is_damaged(folder, alone, shared) -> None:
    assert f"step-{STEPS:08d}: state/__0_0.distcp is broken or truncated" in shared
    assert losses(folder / "damaged") == pytest.approx(losses(alone), abs=1e-5)


@needs_deepspeed
def test_options_from_a_file_are_those_of_the_run(folder, shared) -> None:
    run = folder / "stage-3"
    config = TrainConfig.from_json(run / "config.json")
    assert (config.engine, config.zero, config.checkpoint_every) == ("deepspeed", Zero(), 4)
    assert [path.name for path in list_checkpoints(run)] == ["step-00000004", "step-00000008"]
    logged = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert logged == list(range(1, STEPS + 1))  # once: the second command found it finished


@needs_deepspeed
def test_nvme_without_libaio_is_refused_by_every_rank(folder, shared) -> None:
    assert shared.count("NVMe offload needs libaio and a compiler, which are not here: install libaio-dev") == 2
    assert not (folder / "nvme").exists()


@needs_deepspeed
def test_other_ranks_stages_and_engines_go_on_where_two_ranks_stopped(folder, alone, shared) -> None:
    without_newest(folder / "stage-2", folder / "three")
    without_newest(folder / "stage-3", folder / "one")
    without_newest(folder / "broken", folder / "mended")
    output = launch(3, "resume", folder, [], worker="zero_worker")
    assert ", from step 4 on cpu, 3 ranks (deepspeed)" in output
    assert main(["train", "--resume", str(folder / "one"), "--engine", "fsdp"]) == 0
    for name in ("three", "one"):
        assert losses(folder / name) == pytest.approx(losses(alone), abs=1e-5), name
    # AdamW has taken one update less than there were steps, for one was skipped.
    records = [(folder / name / "metrics.jsonl").read_text().splitlines() for name in ("mended", "broken")]
    mended, broken = ([json.loads(line).get("loss", 0.0) for line in lines] for lines in records)
    assert mended == pytest.approx(broken, abs=1e-5)


@needs_deepspeed
def test_packed_micro_batches_have_the_losses_of_one_process(folder, flags, shared) -> None:
    assert main([*flags, "--out", str(folder / "packed-alone"), "--pack"]) == 0
    assert losses(folder / "packed") == pytest.approx(losses(folder / "packed-alone"), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zero-stage", "2"], "--zero-stage needs --engine deepspeed"),
        (["--engine", "fsdp", "--cpu-offload"], "--cpu-offload needs --engine deepspeed"),
        (["--engine", "deepspeed", "--zero-stage", "5"], "a ZeRO stage is 1, 2 or 3, got 5"),
        (["--engine", "deepspeed", "--zero-stage", "1", "--nvme-offload", "x"], "NVMe offload needs ZeRO stage 3"),
        (["--engine", "deepspeed"], "the engine deepspeed needs torchrun: add --ranks P, or --ranks 1 for one process"),
        (["--engine", "deepspeed", "--tensor-parallel", "2"], "tensor_parallel=2 splits them: use engine fsdp"),
        (["--engine", "deepspeed", "--precision", "fp16"], "use 'bf16', or engine fsdp or ddp"),
        (["--engine", "deepspeed", "--optimizer", "adamw8bit-torchao"], "shards the state of PyTorch's AdamW"),
        (["--options", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(arguments, message, folder, flags, capsys) -> None:
    assert main([*flags, "--out", str(folder / "refused"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_a_package_that_is_missing_is_named_with_its_installation(monkeypatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    ranks = Ranks(device=torch.device("cpu"), mesh=object())
    with pytest.raises(ModuleNotFoundError, match=r"or '\.\[deepspeed\]' in a checkout"):
        check_zero(Zero(), ranks)


@pytest.mark.parametrize("name", ["ddp", "deepspeed"])
def test_engines_that_want_whole_parameters_refuse_ranks_that_share_heads(name) -> None:
    with pytest.raises(ValueError, match=f"engine {name} needs every parameter whole .* tensor_parallel=2 splits them"):
        TrainConfig(engine=name, tensor_parallel=2)


def test_the_settings_of_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="need the engine deepspeed, and this one is ddp"):
        TrainConfig(engine="ddp", zero=Zero())


def test_options_decide_which_ranks_share_a_sequence_and_which_share_heads(folder, flags, capsys) -> None:
    shared = RunOptions(model_parallel=2, sequence_parallel=True)
    config = TrainConfig(**settings_of(shared, ranks=8))
    assert (config.sequence_parallel, config.tensor_parallel) == (4, 2)
    config = TrainConfig(**settings_of(RunOptions(sequence_parallel=True, data_parallel=2), ranks=6))
    assert (config.sequence_parallel, config.tensor_parallel) == (3, 1)
    assert not {"sequence_parallel", "tensor_parallel"} & settings_of(RunOptions(), ranks=6).keys()
    path = folder / "shared.json"
    for options, message in (
        (RunOptions(model_parallel=2, use_deepspeed=True), "tensor_parallel=2 splits them"),
        (RunOptions(model_parallel=3), "must divide the number of ranks, got 4"),
    ):
        path.write_text(options.to_json())
        assert main([*flags, "--out", "here", "--ranks", "4", "--options", str(path)]) != 0
        assert message in capsys.readouterr().err


def test_options_decide_what_a_run_is_carried_out_with(folder, flags, monkeypatch) -> None:
    survives = RunOptions(enable_fault_tolerance=True, enable_monitoring=True, checkpoint_interval=7)
    config = TrainConfig(**settings_of(survives))
    assert (config.engine, config.zero, config.checkpoint_every) == ("fsdp", None, 7)
    assert config.monitors == ("jsonl",)
    (folder / "survives.json").write_text(survives.to_json())
    caught = []
    monkeypatch.setattr(command, "launch_ranks", lambda *told: caught.append(told) or 0)
    options = ["--options", str(folder / "survives.json")]
    assert main([*flags, "--out", "here", "--ranks", "2", *options]) == 0
    assert main([*flags, "--out", "here", "--ranks", "2", "--max-restarts", "1", *options]) == 0
    assert [told[-1] for told in caught] == [3, 1]
    assert all(told[0].checkpoint_every == 7 for told in caught)
