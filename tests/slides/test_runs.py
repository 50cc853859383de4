"""`slides`: runs that train, resume and stop early; what they leave; embeddings, maps and the page."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil

import numpy
import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.models.encoder import LongNetEncoder
from dilated_attention_pytorch.models.torchscale import _our_names
from dilated_attention_pytorch.slides import loop
from dilated_attention_pytorch.slides.batches import Batch
from dilated_attention_pytorch.slides.config import SlidesConfig
from dilated_attention_pytorch.slides.features import read_bag
from dilated_attention_pytorch.slides.maps import tile_weights
from dilated_attention_pytorch.slides.objectives import cox_loss
from dilated_attention_pytorch.slides.pretraining import MaskedEncoder
from dilated_attention_pytorch.slides.report import compared, fold_folders, write_report
from dilated_attention_pytorch.train.ranks import Stopped

from .studies import DIM, small_study, write_bag

SMALL = {"d_model": 16, "num_layers": 1, "num_heads": 2, "max_tiles": 400, "batch_size": 6, "device": "cpu"}


def config(folder, **changes) -> SlidesConfig:
    return SlidesConfig(
        **{"table": str(folder / "table.csv"), "features": str(folder / "features"), "epochs": 2, **SMALL, **changes}
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    small_study(folder, slides=20, growth=2)
    return folder


def test_survival_needs_steps_of_several_slides(study, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--max-tiles 8 and --batch-size .* each slide is alone"):
        loop.run_study(config(study, task="survival", max_tiles=8, accumulate=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_survival_compares_all_slides_of_a_step(study, tmp_path, monkeypatch) -> None:
    class Taken(Exception):
        pass

    def gradients(model) -> list[torch.Tensor]:
        found = [x.grad.clone() for x in model.parameters() if x.grad is not None]
        model.zero_grad()
        return found

    def begin(self, losses) -> None:
        value = 0.0
        for loss in losses:
            loss.backward()
            value += loss.item()
        model, found = self._model, gradients(self._model)
        risks = torch.cat([model(**batch.inputs)[:, 0] for batch in taken])
        targets = torch.cat([batch.targets for batch in taken])
        expected = cox_loss(risks, targets[:, 0], targets[:, 1]) / len(targets)
        expected.backward()
        assert value == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(found, gradients(model), rtol=1e-3, atol=1e-6)
        raise Taken

    taken, losses_of = [], loop._Fold._losses
    monkeypatch.setattr(
        loop._Fold, "_losses", lambda fold, batches, step: taken.extend(batches) or losses_of(fold, batches, step)
    )
    monkeypatch.setattr(loop.Update, "begin", begin)
    with pytest.raises(Taken):
        loop.run_study(config(study, task="survival", max_tiles=8, accumulate=64, dropout=0.0), tmp_path / "run")
    assert len(taken) > 8
    assert all(len(batch.numbers) == 1 for batch in taken)


def test_survival_draws_the_same_dropout_in_both_passes_of_a_step(study, tmp_path, monkeypatch) -> None:
    found, loss_of = [], loop._Fold._loss

    def noted(fold, batch, draw):
        loss, outputs = loss_of(fold, batch, draw)
        if fold.model.training:
            found.append(outputs.detach())
        return loss, outputs

    monkeypatch.setattr(loop._Fold, "_loss", noted)
    sizes = {"max_tiles": 8, "accumulate": 64, "dropout": 0.3, "epochs": 1}
    loop.run_study(config(study, task="survival", **sizes), tmp_path / "run")
    half = len(found) // 2
    assert half > 8
    torch.testing.assert_close(found[:half], found[half:], rtol=0, atol=0)


@pytest.mark.parametrize("task", ["classification", "survival", "regression"])
def test_every_task_leaves_a_model_predictions_and_figures(study, tmp_path, task) -> None:
    table = study / "table.csv"
    if task == "regression":
        table = tmp_path / "table.csv"
        table.write_text((study / "table.csv").read_text().replace(",a,", ",1.5,").replace(",b,", ",2.5,"))
    (results,) = loop.run_study(
        config(study, task=task, table=str(table), accumulate=2, batch_size=2), tmp_path / "run"
    )
    first = {"classification": "auc", "survival": "c_index", "regression": "r2"}[task]
    assert list(results["test"])[:2] == ["loss", first]
    model = LongNetEncoder.from_pretrained(tmp_path / "run/model")
    assert model.config.positions == "coordinates"
    with (tmp_path / "run/predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["split"] for row in rows} == {"validation", "test"}
    case = next(row for row in rows if row["split"] == "test")
    bag = read_bag(study / "features" / f"{case['slide']}.npy")
    out = model.eval()(bag.features[None], bag.coordinates[None])[0].detach().double()
    if task == "classification":
        assert float(case["p_b"]) == pytest.approx(float(out.softmax(0)[1]), rel=1e-4)
    elif task == "survival":
        assert float(case["risk"]) == pytest.approx(float(out[0]), rel=1e-4, abs=1e-5)
        for split in ("validation", "test"):
            found = [row for row in rows if row["split"] == split]
            columns = (torch.tensor([float(row[name]) for row in found]) for name in ("risk", "time", "event"))
            assert results[split]["loss"] == pytest.approx(float(cox_loss(*columns)) / len(found), rel=1e-4)


def test_an_error_about_broken_steps_names_the_last_checkpoint(study, tmp_path, monkeypatch) -> None:
    begin = loop.Update.begin
    calls = iter(range(100))

    def broken_later(self, losses):
        outcome = begin(self, losses)()
        return lambda: outcome._replace(loss=float("nan")) if next(calls) >= 8 else outcome

    monkeypatch.setattr(loop.Update, "begin", broken_later)
    with pytest.raises(FloatingPointError) as raised:
        loop.run_study(config(study, epochs=9), tmp_path / "run")
    saved = int(loop.run_folder.list_checkpoints(tmp_path / "run")[-1].name.removeprefix("step-"))
    assert 0 < saved <= 8 + 5
    assert str(raised.value).endswith(f"before it: lower --learning-rate; step {saved} is the last checkpoint")


def test_layers_are_compiled_and_narrow_where_asked_and_by_default_on_a_gpu(study, tmp_path, monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: compiled.append(type(layer).__name__))
    loop.run_study(config(study, epochs=1, num_layers=2, compile=True), tmp_path / "run")
    assert compiled == ["DilatedTransformerEncoderLayer"] * 2
    assert (config(study).memory.compile, config(study).memory.precision) == (False, "fp32")
    monkeypatch.setattr("dilated_attention_pytorch.slides.config.find_device", lambda name: torch.device("cuda"))
    assert (config(study).memory.compile, config(study).memory.precision) == (True, "bf16")
    stated = config(study, compile=False, precision="fp32").memory
    assert (stated.compile, stated.precision) == (False, "fp32")


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["train", "pretrain"])
def test_a_study_trains_on_a_gpu_with_its_defaults(study, tmp_path, job) -> None:
    wide = {"d_model": 64, "num_heads": 2, "num_layers": 2, "accumulate": 2, "device": "cuda"}
    loop.run_study(config(study, job=job, epochs=2, **wide), tmp_path / "run")
    losses = [one["loss"] for one in loop.run_folder.read_metrics(tmp_path / "run")]
    assert len(losses) > 2
    assert numpy.isfinite(losses).all()


@pytest.mark.gpu
def test_a_batch_is_copied_to_a_gpu_beside_what_it_computes() -> None:
    first, second = (torch.randn(1, 1 << 20, 8).pin_memory() for _ in range(2))
    ends = torch.tensor([0, 1 << 20])
    moved = [Batch(ends[:1], x, None, ends, ends[:1, None]).to(torch.device("cuda")) for x in (first, second)]
    total = sum(batch.features.double().sum() for batch in moved)
    assert float(total) == pytest.approx(float(first.double().sum() + second.double().sum()))
    assert moved[0].to(torch.device("cuda")).features is moved[0].features


def test_files_are_read_ahead_while_a_step_computes(study, tmp_path, monkeypatch) -> None:
    events = []
    begin, read = loop.Update.begin, loop.read_batches

    def noted(self, losses):
        finish = begin(self, losses)
        events.append("begun")
        return lambda: events.append("ended") or finish()

    def reading(bags, batches, **how):
        for batch in read(bags, batches, **how):
            events.append("read")
            yield batch

    monkeypatch.setattr(loop.Update, "begin", noted)
    monkeypatch.setattr(loop, "read_batches", reading)
    loop.run_study(config(study, epochs=1, batch_size=4), tmp_path / "run")
    first = events.index("ended")
    assert events[: first + 1] == ["read", "begun", "read", "ended"]
    assert config(study).readers == 0
    assert config(study, workers=3).readers == 3
    monkeypatch.setattr("dilated_attention_pytorch.slides.config.find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("dilated_attention_pytorch.slides.config.usable_cores", lambda: 16.0)
    assert config(study).readers == 4
    monkeypatch.setattr("dilated_attention_pytorch.slides.config.usable_cores", lambda: 2.5)
    assert config(study).readers == 1
    monkeypatch.setattr("dilated_attention_pytorch.slides.config.usable_cores", lambda: 0.5)
    assert config(study).readers == 0


def test_a_resumed_run_equals_one_that_never_stopped(study, tmp_path, monkeypatch) -> None:
    settings = config(study, epochs=2, dropout=0.2)
    loop.run_study(settings, tmp_path / "whole")
    steps, real = [], loop._Fold._losses

    def stop_in_the_middle_of_an_epoch(fold, batches, step):
        steps.append(fold.steps_per_epoch)
        if step == fold.steps_per_epoch + 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
        return real(fold, batches, step)

    monkeypatch.setattr(loop._Fold, "_losses", stop_in_the_middle_of_an_epoch)
    with pytest.raises(Stopped):
        loop.run_study(settings, tmp_path / "stopped")
    monkeypatch.undo()
    assert len(steps) == steps[0] + 1
    with pytest.raises(FileExistsError, match="already holds a run: continue it with --resume"):
        loop.run_study(settings, tmp_path / "stopped")
    with pytest.raises(FileExistsError, match="other settings"):
        loop.run_study(config(study, epochs=3), tmp_path / "stopped", resume=True)
    loop.run_study(settings, tmp_path / "stopped", resume=True)
    for name in (loop.PREDICTIONS, loop.RESULTS):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "stopped" / name).read_text()


def test_a_run_that_stops_before_its_baseline_trains_it_when_resumed(study, tmp_path, monkeypatch) -> None:
    def stop(fold) -> None:
        raise Stopped(15)

    given = config(study, epochs=1)
    flags = ["--table", given.table, "--features", given.features, "--epochs", "1", "--num-layers", "1"]
    monkeypatch.setattr(loop._Fold, "train", stop)
    assert main(["slides", "train", *flags, "--device", "cpu", "--baseline", "--out", str(tmp_path / "run")]) == 143
    monkeypatch.undo()
    assert main(["slides", "train", "--resume", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/without-attention/results.json").is_file()


def test_folds_test_every_slide_once_and_training_stops_early(study, tmp_path) -> None:
    # A rate at which nothing is learned: the validation loss hardly falls.
    settings = config(study, folds=3, epochs=9, patience=1, learning_rate=0.3, clip_norm=100.0)
    results = loop.run_study(settings, tmp_path / "run")
    assert len(results) == 3
    tested = []
    for i in range(3):
        with (tmp_path / f"run/fold-{i}/predictions.csv").open() as stream:
            tested += [row["slide"] for row in csv.DictReader(stream) if row["split"] == "test"]
        records = [json.loads(line) for line in (tmp_path / f"run/fold-{i}/metrics.jsonl").read_text().splitlines()]
        assert sum("validation_loss" in one for one in records) < 9
    assert sorted(tested) == sorted(f"s{i}" for i in range(20))
    before = (tmp_path / "run/results.json").read_text()
    loop.run_study(settings, tmp_path / "run", resume=True)  # nothing is left to do
    assert (tmp_path / "run/results.json").read_text() == before


def test_pretraining_predicts_hidden_rows_better_than_at_first_and_gives_its_weights_on(study, tmp_path) -> None:
    (results,) = loop.run_study(
        config(study, job="pretrain", epochs=3, learning_rate=1e-2, positions="none"), tmp_path / "before"
    )
    losses = [json.loads(line) for line in (tmp_path / "before/metrics.jsonl").read_text().splitlines()]
    assert results["validation"]["loss"] < losses[0]["loss"]
    settings = config(study, start=str(tmp_path / "before"), epochs=1, learning_rate=1e-9)
    loop.run_study(settings, tmp_path / "after")
    before, after = (
        LongNetEncoder.from_pretrained(tmp_path / run / "model").state_dict() for run in ("before", "after")
    )
    shared = [name for name in after if not name.startswith("head.")]
    assert {"input.weight", "pooled_norm.bias"} <= {*shared} <= before.keys()
    for name in shared:
        torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    assert LongNetEncoder.from_pretrained(tmp_path / "after/model").config.positions == "none"
    with pytest.raises(
        ValueError, match="d_model 16, not 8, positions none, not rotary: leave --d-model, --positions out"
    ):
        loop.run_study(config(study, start=str(tmp_path / "before"), d_model=8, positions="rotary"), tmp_path / "other")
    with pytest.raises(ValueError, match="do not fit the model: missing cls"):
        loop.run_study(config(study, start=str(tmp_path / "before"), pooling="cls"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_takes_sizes_heads_and_branches_of_the_model_it_starts_from(study, tmp_path) -> None:
    sizes = {"d_model": 24, "num_layers": 2, "num_heads": 4, "segment_lengths": (8, 32), "dilation_rates": (1, 2)}
    theirs = LongNetEncoder(input_dim=DIM, positions="rotary", pooling="attention", norm="rms", **sizes)
    theirs.save_pretrained(tmp_path / "theirs")
    free = {"d_model": None, "num_layers": None, "num_heads": None, "start": str(tmp_path / "theirs"), "epochs": 1}
    loop.run_study(config(study, **free), tmp_path / "run")
    ours = LongNetEncoder.from_pretrained(tmp_path / "run/model").config
    for name in ("positions", "pooling", "norm", *sizes):
        assert getattr(ours, name) == getattr(theirs.config, name)
    assert ours.num_classes == 2
    flags = ["--table", str(study / "table.csv"), "--features", str(study / "features"), "--device", "cpu"]
    more = ["--from", str(tmp_path / "theirs"), "--epochs", "1", "--baseline", "--out", str(tmp_path / "both")]
    assert main(["slides", "train", *flags, *more]) == 0
    alone = LongNetEncoder.from_pretrained(tmp_path / "both/without-attention/model").config
    assert (alone.d_model, alone.num_heads, alone.positions) == (24, 4, "rotary")
    assert alone.segment_lengths == (1,)


def test_pretraining_hides_blocks_and_measures_errors_in_variances(monkeypatch) -> None:
    model = MaskedEncoder(input_dim=DIM, d_model=16, num_heads=2, num_layers=1, max_length=64)
    for x in (model.predict.weight, model.predict.bias):
        torch.nn.init.zeros_(x)
    torch.nn.init.constant_(model.mask, 100.0)
    seen, real = [], LongNetEncoder.hidden
    monkeypatch.setattr(MaskedEncoder, "hidden", lambda self, x, **more: (seen.append(x), real(self, x, **more))[1])
    x, ends = 7 + 50 * torch.randn(1, 90, DIM), torch.tensor([0, 60, 90])

    def loss(ends, share, block):
        batch = Batch(torch.arange(len(ends) - 1), x, None, ends, torch.zeros(len(ends) - 1, 0))
        return float(model.loss(batch, share, block, torch.Generator().manual_seed(1)).detach())

    assert loss(ends[[0, 2]], 1.0, 7) == pytest.approx(1.0, abs=1e-5)  # what the mean of the batch would get
    loss(ends, 0.4, 10)
    is_hidden = (seen[-1] == 100.0).all(-1)[0]
    assert is_hidden[ends[:-1]].all()
    changes = is_hidden.diff().nonzero().flatten() + 1
    own = [int(i) for i in changes if i not in (1, 60, 61)]
    assert len(own) >= 3
    assert len({i % 10 for i in own}) == 1  # blocks of ten
    assert 20 <= is_hidden.sum() <= 70


def test_a_run_starts_from_a_slide_encoder_of_prov_gigapath(study, tmp_path) -> None:
    sizes = {"input_dim": DIM, "d_model": 32, "num_layers": 2, "num_heads": 16, "dim_feedforward": 48, "cls_rows": 1}
    layout = {"positions": "coordinates", "head_layout": "blocked", "segment_lengths": (8,), "dilation_rates": (1,)}
    theirs = LongNetEncoder(**sizes, **layout)
    tensors = {name: theirs.state_dict()[ours].clone() for name, ours in _our_names(theirs).items()}
    tensors["cls_token"] = tensors["cls_token"][None]
    torch.save({"model": tensors}, tmp_path / "slide_encoder.pth")
    given = {"start": str(tmp_path / "slide_encoder.pth"), "epochs": 1, "learning_rate": 1e-9, "num_heads": 16}
    with pytest.raises(ValueError, match="d_model 32, not 16, num_layers 2, not 1: leave --d-model, --num-layers out"):
        loop.run_study(config(study, **given), tmp_path / "run")
    settings = config(study, **given, d_model=None, num_layers=None)
    loop.run_study(settings, tmp_path / "run")
    model = LongNetEncoder.from_pretrained(tmp_path / "run/model")
    assert (model.config.num_layers, model.config.dim_feedforward, model.config.cls_rows) == (2, 48, 1)
    assert model.config.segment_lengths[-1] == 1_048_576
    torch.testing.assert_close(model.input.weight, theirs.input.weight, atol=1e-6, rtol=0)
    torch.save(torch.zeros(3), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="is not a checkpoint of Prov-GigaPath's slide encoder"):
        loop.run_study(config(study, start=str(tmp_path / "other.pth")), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_nothing_is_written_for_a_study_that_is_wrong(study, tmp_path, capsys) -> None:
    table = tmp_path / "table.csv"
    lines = ["slide,label,split", "s0,a,train", "s1,b,train", "s2,a,validation", "s3,b,validation", "s4,a,test"]
    table.write_text("\n".join(lines))
    flags = ["--table", str(table), "--features", str(study / "features"), "--out", str(tmp_path / "run")]
    assert main(["slides", "train", *flags]) == 1
    assert not (tmp_path / "run").exists()
    gone = ["--features", str(tmp_path / "gone"), "--skip-broken", "--out", str(tmp_path / "run")]
    assert main(["slides", "train", "--table", str(table), *gone]) == 1
    assert f"there is no folder {tmp_path / 'gone'}" in capsys.readouterr().err
    assert main(["slides", "train", "--table", "gone.csv", "--features", ".", "--out", str(tmp_path / "run")]) == 1


def test_the_command_trains_embeds_maps_and_reports(study, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--table", str(study / "table.csv"), "--features", str(study / "features"), "--epochs", "1"]
    small = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--pooling", "attention", "--device", "cpu"]
    assert main(["slides", "train", *flags, *small, "--out", "run", "--baseline", "--folds", "3"]) == 0
    said = capsys.readouterr().out
    assert said.count("tiles    256 pixels in 20 files: measured") == 1
    assert re.search(r"test split +loss +auc.*\nencoder +\d.*\nwithout attention +\d", said)
    alone = LongNetEncoder.from_pretrained("run/without-attention/fold-0/model")
    assert alone.config.segment_lengths == (1,)

    features = ["--features", str(study / "features"), "--device", "cpu"]
    assert main(["slides", "embed", "run", *features, "--out", "all.npy"]) == 1  # which of the folds?
    assert "name one of its folds" in capsys.readouterr().err
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "all.npy"]) == 0
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "all.npy"]) == 1  # never written over
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "notes.npy"]) == 1  # nor what lies beside it
    assert "notes.txt exists: choose another --out" in capsys.readouterr().err
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "more.h5", "--max-tiles", "0"]) == 1
    assert "--max-tiles must be a whole number of at least 1, got 0" in capsys.readouterr().err
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "all.h5"]) == 0
    names, rows = (tmp_path / "all.txt").read_text().split(), numpy.load("all.npy")
    model = LongNetEncoder.from_pretrained("run/fold-1/model").eval()
    bag = read_bag(study / "features" / f"{names[3]}.npy")
    expected = model.embed(bag.features[None], bag.coordinates[None])[0].detach().numpy()
    numpy.testing.assert_allclose(rows[3], expected, atol=1e-5)

    for kind in ("attention", "gradient", "pooling"):
        assert main(["slides", "map", "run/fold-1", *features, "--slide", "s7", "--kind", kind]) == 0
        weights = tile_weights(model, read_bag(study / "features/s7.npy"), kind)
        file = "maps/s7" if kind == "attention" else f"maps/s7-{kind}"
        drawn = json.loads((tmp_path / f"{file}.geojson").read_text())["features"]
        found = [one["properties"]["measurements"][kind] for one in drawn]
        torch.testing.assert_close(torch.tensor(found), weights, rtol=1e-5, atol=1e-7)
        assert sum(found) == pytest.approx(1.0, abs=1e-5)
        assert (tmp_path / f"{file}.png").stat().st_size > 0

    assert main(["slides", "report", "run", "--worst", "2"]) == 0
    page = (tmp_path / "run/report.html").read_text()
    for words in ("ROC", "Calibration", "true a", "fold-2", "standard deviation", "without attention", "Worst slides"):
        assert words in page
    assert page.count("<svg") == 3 + 2 + 2


def test_a_failed_start_leaves_its_folder_free(study, tmp_path) -> None:
    with pytest.raises(ValueError, match="num_heads"):
        loop.run_study(config(study, num_heads=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(config(study, max_tiles=99).to_json())  # as if its first step had failed
    loop.run_study(config(study, epochs=1), tmp_path / "run")
    with pytest.raises(FileExistsError, match="already holds a run"):
        loop.run_study(config(study, epochs=1), tmp_path / "run")
    LongNetEncoder.from_pretrained(tmp_path / "run/model").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="is not the config of a run of slides"):
        loop.run_study(config(study), tmp_path / "model")


def test_every_fold_is_checked_before_the_first_trains(study, tmp_path) -> None:
    table = tmp_path / "table.csv"
    table.write_text((study / "table.csv").read_text().replace(",p9,b,", ",p9,c,"))
    with pytest.raises(ValueError, match=r"^fold-\d: the split 'train' has no slide of class c"):
        loop.run_study(config(study, table=str(table), folds=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_may_have_moved_but_not_have_other_slides(study, tmp_path, capsys) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(study, moved)
    settings = config(study, epochs=1, folds=3)
    loop.run_study(settings, tmp_path / "run")
    (tmp_path / "run/fold-2/results.json").unlink()
    flags = ["--table", str(moved / "table.csv"), "--features", str(moved / "features")]
    resume = ["slides", "train", "--resume", str(tmp_path / "run")]
    for wrong, told in (
        (["--out", "other"], "leave --out other out"),
        (["--epochs", "3", "--from", "x"], "other settings (--from, --epochs): leave them as they were"),
    ):
        assert main([*resume, *flags, *wrong]) == 1
        assert told in capsys.readouterr().err
    assert main(["slides", "pretrain", "--resume", str(tmp_path / "run")]) == 1
    assert "is a run of `slides train`, not of `slides pretrain`" in capsys.readouterr().err
    assert main([*resume, *flags]) == 0
    assert SlidesConfig.from_json(tmp_path / "run/config.json").features == str(moved / "features")
    lines = (moved / "table.csv").read_text().splitlines()
    (moved / "table.csv").write_text("\n".join(lines[:-1]))
    capsys.readouterr()
    assert main([*resume, *flags]) == 1
    assert "begun with other slides or splits (20 slides before, 19 now), such as s" in capsys.readouterr().err

    shutil.rmtree(moved / "features")
    assert main(["slides", "report", str(tmp_path / "run"), "--worst", "1"]) == 0
    assert re.search(r"There is no map of this slide: s\d+ has no file", (tmp_path / "run/report.html").read_text())


def test_figures_that_are_not_defined_are_null_and_left_out_of_the_mean(study, tmp_path) -> None:
    loop.run_study(config(study, epochs=1, folds=3), tmp_path / "run")
    known = []
    for i in range(3):
        path = tmp_path / f"run/fold-{i}/results.json"
        results = json.loads(path.read_text())
        known.append(results["test"]["auc"])
        if i == 1:
            results["test"]["auc"] = math.nan
            loop._write_json(path, results)
            assert json.loads(path.read_text(), parse_constant=pytest.fail)["test"]["auc"] is None
    assert f"{(known[0] + known[2]) / 2:.3f}" in compared({"encoder": tmp_path / "run"})
    page = write_report(tmp_path / "run", worst=0).read_text()
    assert f"<strong>{(known[0] + known[2]) / 2:.3f}</strong>" in page


def test_folds_come_in_the_order_of_their_numbers(tmp_path) -> None:
    for number in range(12):
        (tmp_path / f"fold-{number}").mkdir()
        (tmp_path / f"fold-{number}" / loop.PREDICTIONS).touch()
    assert [folder.name for folder in fold_folders(tmp_path)] == [f"fold-{number}" for number in range(12)]


def test_maps_refuse_outputs_that_the_model_lacks(study) -> None:
    fields = {"input_dim": DIM, "d_model": 16, "num_heads": 2, "num_layers": 1, "positions": "none", "max_length": 64}
    model, bag = LongNetEncoder(**fields, num_classes=2).eval(), read_bag(study / "features/s3.npy")
    assert tile_weights(model, bag, "gradient", 1).shape == (len(bag.features),)
    for output in (7, -1, 2):
        with pytest.raises(ValueError, match=rf"--class-number must be from 0 to 1, .*got {output}"):
            tile_weights(model, bag, "gradient", output)
    with pytest.raises(ValueError, match="--class-number 1 belongs to --kind gradient, got --kind attention"):
        tile_weights(model, bag, "attention", 1)
    with pytest.raises(ValueError, match="has no outputs"):
        tile_weights(LongNetEncoder(**fields).eval(), bag, "gradient")


def test_embeddings_and_maps_have_the_width_of_tiles_of_the_run(study, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop.run_study(config(study, epochs=1, folds=3, tile_pixels=64.0), tmp_path / "run")
    model = LongNetEncoder.from_pretrained("run/fold-1/model").eval()
    flags = ["--features", str(study / "features"), "--device", "cpu"]

    def embedding(tile_pixels: float | None) -> torch.Tensor:
        bag = read_bag(study / "features/s3.npy", tile_pixels)
        return model.embed(bag.features[None], bag.coordinates[None])[0].detach()

    for number, (own, width) in enumerate((([], 64.0), (["--tile-pixels", "128"], 128.0))):
        out = tmp_path / f"{number}.npy"
        assert main(["slides", "embed", "run/fold-1", *flags, *own, "--out", str(out)]) == 0
        found = torch.from_numpy(numpy.load(out))[out.with_suffix(".txt").read_text().split().index("s3")]
        torch.testing.assert_close(found, embedding(width), atol=1e-5, rtol=0)
        assert main(["slides", "map", "run/fold-1", *flags, *own, "--slide", "s3", "--out", str(number)]) == 0
        tiles = json.loads((tmp_path / f"{number}/s3.geojson").read_text())["features"]
        assert tiles[0]["geometry"]["coordinates"][0][1] == [width, 0.0]
    assert not torch.allclose(embedding(64.0), embedding(128.0), atol=1e-5)
    assert "measured" not in capsys.readouterr().out
    loop.run_study(config(study, epochs=1, tile_pixels=64.0), tmp_path / "fold-7")  # a run of that name, not a fold
    assert loop.run_config(tmp_path / "fold-7").tile_pixels == 64
    assert "features; classes a, b\nmodel" in (said := capsys.readouterr().out)
    assert "pooling mean, positions coordinates\n" in said
    model.save_pretrained(tmp_path / "alone")
    assert main(["slides", "map", "alone", *flags, "--slide", "s3"]) == 0
    assert "tiles    256 pixels in 1 file: measured" in capsys.readouterr().out
    assert main(["slides", "map", "alone", *flags, "--slide", "s3", "--tile-pixels", "-1"]) == 1


def test_tiles_are_as_wide_as_in_files_whatever_the_model_states(study, tmp_path) -> None:
    fields = {"input_dim": DIM, "d_model": 16, "num_heads": 2, "num_layers": 1, "max_length": 64}
    model = LongNetEncoder(**fields, positions="coordinates", tile_size=1.0).eval()  # columns and rows of tiles
    model.save_pretrained(tmp_path / "model")
    bag = read_bag(study / "features/s3.npy")
    expected = model.embed(bag.features[None], bag.coordinates[None] / 256)[0].detach().numpy()
    flags = ["--features", str(study / "features"), "--device", "cpu"]
    assert main(["slides", "embed", str(tmp_path / "model"), *flags, "--out", str(tmp_path / "all.npy")]) == 0
    number = (tmp_path / "all.txt").read_text().split().index("s3")
    numpy.testing.assert_allclose(numpy.load(tmp_path / "all.npy")[number], expected, atol=1e-5)
    free = {"d_model": None, "num_layers": None, "num_heads": None, "start": str(tmp_path / "model"), "epochs": 1}
    loop.run_study(config(study, **free), tmp_path / "run")
    assert LongNetEncoder.from_pretrained(tmp_path / "run/model").config.tile_size == 256


def test_embed_leaves_broken_files_out_if_asked(study, tmp_path, capsys) -> None:
    shutil.copytree(study / "features", tmp_path / "features")
    (tmp_path / "features/s3.npy").write_bytes(b"no array")
    model = LongNetEncoder(input_dim=DIM, d_model=16, num_heads=2, num_layers=1, positions="none", max_length=64)
    model.save_pretrained(tmp_path / "model")
    flags = ["slides", "embed", str(tmp_path / "model"), "--features", str(tmp_path / "features"), "--device", "cpu"]
    assert main([*flags, "--out", str(tmp_path / "all.npy")]) == 1
    assert "--skip-broken" in capsys.readouterr().err
    assert main([*flags, "--out", str(tmp_path / "all.npy"), "--skip-broken"]) == 0
    assert len(numpy.load(tmp_path / "all.npy")) == 19


def test_files_that_do_not_fit_a_model_are_named_before_the_work_begins(study, tmp_path, capsys) -> None:
    shutil.copytree(study, tmp_path / "study")
    features = tmp_path / "study/features"
    (features / "s3.coords.npy").unlink()
    settings = config(tmp_path / "study", positions="coordinates", epochs=1)
    with pytest.raises(ValueError, match=r"s3.npy has no coords, .*--positions none; --skip-broken leaves"):
        loop.run_study(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    loop.run_study(dataclasses.replace(settings, skip_broken=True), tmp_path / "run")
    assert "s3" not in json.loads((tmp_path / "run/study.json").read_text())["splits"]
    run = [str(tmp_path / "run"), "--features", str(features), "--device", "cpu"]
    assert main(["slides", "map", *run, "--slide", "s3"]) == 1
    assert main(["slides", "embed", *run, "--out", str(tmp_path / "all.npy")]) == 1
    assert capsys.readouterr().err.count("s3.npy has no coords") == 2
    for number in range(20):
        write_bag(features / f"s{number}.npy", dim=DIM + 2)
    assert main(["slides", "map", *run, "--slide", "s4"]) == 1
    assert main(["slides", "embed", *run, "--out", str(tmp_path / "all.npy")]) == 1
    errors = capsys.readouterr().err
    assert errors.count(f".npy has features of size {DIM + 2}, the model takes {DIM}: use") == 2
    assert main(["slides", "map", *run, "--slide", "../features/s4"]) == 1
    assert "without folder and suffix, got '../features/s4'" in capsys.readouterr().err


def test_embed_refuses_a_width_of_tiles_that_has_no_effect(study, tmp_path, capsys) -> None:
    LongNetEncoder(input_dim=DIM, d_model=16, num_heads=2, num_layers=1, max_length=64).save_pretrained(tmp_path / "x")
    flags = ["--features", str(study / "features"), "--out", str(tmp_path / "all.npy"), "--tile-pixels", "64"]
    assert main(["slides", "embed", str(tmp_path / "x"), *flags]) == 1
    assert "no effect on a model without positions from coordinates" in capsys.readouterr().err


def test_the_gradient_is_clipped_at_any_norm_or_not_at_all(study) -> None:
    assert config(study, clip_norm=math.inf).clip_norm == math.inf
    with pytest.raises(ValueError, match="clip_norm"):
        config(study, clip_norm=0.0)


def test_the_help_of_slides_shows_no_default_that_cannot_be_typed(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["slides", "train", "--help"])
    assert "None" not in capsys.readouterr().out


@pytest.mark.parametrize(("job", "flag"), [("train", "--mask-share=0.3"), ("pretrain", "--folds=3")])
def test_a_flag_of_the_other_job_is_refused(job, flag, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["slides", job, flag])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
