"""A step of the main job in one process: exact options change nothing, resuming is exact, broken steps are skipped."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from dilated_attention_pytorch import files
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train import checkpoint as checkpoints
from dilated_attention_pytorch.train.memory import MemoryOptions, make_scaler
from dilated_attention_pytorch.train.ranks import Ranks
from dilated_attention_pytorch.train.step import Outcome, Stepper, Update, record_of

from .test_train import FLAGS

STEPS = 6
MEASURED = ("tokens_per_second", "peak_memory_bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("step")


@pytest.fixture(scope="module")
def flags(folder) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return ["train", "--data", str(text), *FLAGS, "--steps", str(STEPS), "--batch-size", "4"]


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


@pytest.fixture(scope="module")
def plain(folder, flags) -> list[dict]:
    assert main([*flags, "--out", str(folder / "plain")]) == 0
    return records(folder / "plain")


@pytest.mark.parametrize(
    "options",
    [
        "--checkpointing full",
        "--checkpointing selective --offload",
        "--mlp-tile 5",
        "--loss-chunk 7",
        "--accumulate 2",
        "--compile --compile-backend eager",
        "--accumulate 4 --checkpointing selective --mlp-tile 5 --loss-chunk 7",
    ],
)
def test_an_exact_option_leaves_losses_and_weights_as_they_are(tmp_path, folder, flags, plain, options) -> None:
    assert main([*flags, "--out", str(tmp_path / "run"), *options.split()]) == 0
    found = records(tmp_path / "run")
    for key in ("loss", "gradient_norm", "loss_ema"):
        assert [record[key] for record in found] == pytest.approx([record[key] for record in plain], rel=1e-5)
    assert found[-1]["validation_bits"] == pytest.approx(plain[-1]["validation_bits"], rel=1e-5)


@torch._dynamo.register_backend(name="broken_backend")
def broken_backend(graph: object, inputs: object) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("tile", [[], ["--mlp-tile", "5"]], ids=["whole", "tiled"])
def test_layers_that_cannot_be_compiled_run_as_they_are(tmp_path, flags, plain, capsys, tile) -> None:
    options = ["--compile", "--compile-backend", "broken_backend", *tile]
    assert main([*flags, "--out", str(tmp_path / "run"), *options]) == 0
    printed = capsys.readouterr().out
    assert "compile  the layers before the first step; --no-compile skips this" in printed
    assert re.search(r"compile  warning: failed after \d+ s, so layers run uncompiled: .*no compiler here", printed)
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert losses == pytest.approx([record["loss"] for record in plain], rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_resume_exactly_with_micro_batches_and_dropout(tmp_path, flags, plain, precision) -> None:
    options = ["--precision", precision, "--accumulate", "2", "--dropout", "0.2"]
    options += ["--checkpointing", "full", "--loss-chunk", "9"]
    whole, parts = whole_and_in_parts([*flags, *options], tmp_path)
    assert parts == whole
    assert [record["loss"] for record in whole] == pytest.approx([record["loss"] for record in plain], rel=0.2)


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_an_8_bit_optimizer_resumes_exactly(tmp_path, flags, library) -> None:
    pytest.importorskip(library, reason=f"needs the extra {library}")
    whole, parts = whole_and_in_parts([*flags, "--d-model", "64", "--optimizer", f"adamw8bit-{library}"], tmp_path)
    assert parts == whole
    assert whole[-1]["loss"] < whole[0]["loss"]


def whole_and_in_parts(flags: list[str], folder: Path) -> list[list[dict]]:
    """What a run records, and what it does where it was cut off after its first checkpoint and resumed."""
    assert main([*flags, "--out", str(folder / "whole")]) == 0
    shutil.copytree(folder / "whole", folder / "parts")
    for later in checkpoints.list_checkpoints(folder / "parts")[1:]:
        shutil.rmtree(later)
    assert main(["train", "--resume", str(folder / "parts")]) == 0
    return [
        [{key: value for key, value in record.items() if key not in MEASURED} for record in records(run)]
        for run in (folder / "whole", folder / "parts")
    ]


def test_float16_overflows_halve_the_scale_and_its_state_is_kept(folder, flags, capsys, monkeypatch) -> None:
    real, calls = Stepper.loss, []

    def overflowing(self, *batch):
        calls.append(batch)
        loss = real(self, *batch)
        return loss if len(calls) != 2 else loss + (self.model.norm.weight * 0.0).sum().sqrt()

    monkeypatch.setattr(Stepper, "loss", overflowing)
    run = folder / "overflow"
    # Not even one broken step is allowed, and an overflow is none.
    options = ["--precision", "fp16", "--skip-broken-steps", "0", "--validate-every", str(STEPS)]
    assert main([*flags, "--out", str(run), *options]) == 0
    printed = capsys.readouterr().out
    assert "at step 2 (too large for float16, so the loss scale is halved)" in printed
    assert [record["step"] for record in records(run) if "skipped" in record] == [2]
    saved = checkpoints.list_checkpoints(run)[-1] / "state"
    scaler = {"scale": 0.0, "_growth_tracker": 0}
    dcp.load({"scaler": scaler}, checkpoint_id=saved, no_dist=True)
    assert scaler == {"scale": 2.0**15, "_growth_tracker": STEPS - 2}


def test_a_scale_of_float32_does_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    scaler, ranks = make_scaler(MemoryOptions(), "cpu"), Ranks(device=torch.device("cpu"))
    update = Update(torch.nn.ParameterList([weight]), torch.optim.SGD([weight]), ranks, 1.0, scaler)
    outcome = update([(weight * math.inf).sum()])
    assert outcome.is_broken
    assert not outcome.is_overflow
    assert scaler.get_scale() == 1.0
    assert weight.tolist() == [1.0, 1.0]


def test_broken_steps_are_skipped_reported_and_end_the_run_when_there_are_too_many(
    tmp_path, flags, plain, capsys, monkeypatch
) -> None:
    real, calls, broken = Stepper.loss, [], {3, 4}

    def loss(self, *batch):
        if self.model.training:
            calls.append(batch)
        return real(self, *batch) * (math.nan if self.model.training and len(calls) in broken else 1.0)

    monkeypatch.setattr(Stepper, "loss", loss)
    run = tmp_path / "run"
    assert main([*flags, "--out", str(run), "--skip-broken-steps", "2", "--monitors", "jsonl"]) == 0
    assert "skipped: the loss is nan and the gradient's norm nan at step 4 (2 in a row)" in capsys.readouterr().out
    found = records(run)
    assert [record.get("skipped", 0) for record in found] == [0, 0, 1, 1, 0, 0]
    assert "loss" not in found[2]
    assert found[3]["loss_ema"] == found[1]["loss_ema"]
    assert all(math.isfinite(value) for record in found for value in record.values())
    logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["skipped_steps"] for line in logged] == [0, 0, 1, 2, 2, 2]
    # A row that is broken before and after an interruption is one row.
    newest = checkpoints.list_checkpoints(run)
    assert newest[0].name == "step-00000004"
    shutil.rmtree(newest[1])
    calls.clear()
    broken.add(1)
    assert main(["train", "--resume", str(run)]) == 1
    told = "at step 5, after 2 skipped steps before it: lower --learning-rate, or raise --skip-broken-steps"
    assert f"{told}; step 4 is the last checkpoint" in capsys.readouterr().err
    assert [path.name for path in checkpoints.list_checkpoints(run)] == ["step-00000004"]


def test_the_smoothed_loss_weighs_recent_losses_more_and_the_first_no_more_than_its_age() -> None:
    losses = [1.8 + 3.5 * math.exp(-step / 40) for step in range(1, 1201)]
    found: list[dict] = []
    for step, loss in enumerate(losses, 1):
        found.append(record_of(step, Outcome(math.nan if step == 3 else loss, 1.0), found))
    del losses[2]  # it was skipped
    for count in (1, 2, 10, 150, 1199):
        weights = [(1 - 2 / 51) ** age for age in range(count)][::-1]
        mean = sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)
        assert found[count if count > 2 else count - 1]["loss_ema"] == pytest.approx(mean, rel=1e-12)
    assert found[149]["loss_ema"] == pytest.approx(sum(losses[99:149]) / 50, rel=0.02)
    # A run whose records were moved away begins to average anew.
    assert record_of(501, Outcome(2.0, 1.0), [{"step": 500, "loss": 4.0, "loss_ema": 4.0}])["loss_ema"] < 3.0


@pytest.mark.parametrize("limit", [600, 20_000])
def test_a_disk_that_takes_no_more_leaves_the_last_checkpoint_and_a_clear_message(
    tmp_path, flags, capsys, limit
) -> None:
    """Files that may not grow fail in the writers of PyTorch and safetensors as a full disk does."""
    run = tmp_path / "run"
    assert main([*flags, "--out", str(run), "--steps", "2"]) == 0
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        assert main(["train", "--resume", str(run), "--steps", "4"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    told = capsys.readouterr().err
    assert "dilated-attention: " in told
    assert "Traceback" not in told
    assert "is full" not in told
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0


def test_a_full_disk_is_named_with_the_last_complete_checkpoint_by_writers_that_do_not_say_it(
    tmp_path, flags, capsys, monkeypatch
) -> None:
    run = tmp_path / "run"
    assert main([*flags, "--out", str(run), "--steps", "2"]) == 0
    real = safetensors.torch.save_file

    def cut_off(tensors, path) -> None:
        path.write_bytes(b"half a state")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5632 vs 5524")

    # As on a disk, what was written of the file is free again when it is gone.
    monkeypatch.setattr(
        files.shutil,
        "disk_usage",
        lambda folder: SimpleNamespace(free=0 if list(folder.glob(".*.partial")) else 1_234_567),
    )
    monkeypatch.setattr(safetensors.torch, "save_file", cut_off)
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 1
    told = capsys.readouterr().err
    assert "a checkpoint could not be saved ([Errno 28] No space left on device: " in told
    assert f"the disk of {run} is full (1,234,567 bytes free are not enough)" in told
    assert f"--resume {run} continues from the run's last complete checkpoint, of step 2" in told
    monkeypatch.setattr(safetensors.torch, "save_file", real)
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0


@pytest.mark.parametrize(
    ("file", "what"), [("config.json", "the settings of the run"), ("metrics.jsonl", "metrics.jsonl")]
)
def test_a_full_disk_is_named_where_settings_and_metrics_are_written(tmp_path, flags, capsys, file, what) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / f".{file}.{os.getpid()}.partial").symlink_to("/dev/full")
    assert main([*flags, "--out", str(run), "--steps", "2"]) == 1
    told = capsys.readouterr().err
    assert f"{what} could not be saved ([Errno 28] No space left on device: '{run / file}')" in told
    assert f"the disk of {run} is full (" in told
    assert "no complete checkpoint yet" in told
