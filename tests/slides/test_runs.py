"""`slides`: runs that train, resume and stop early; what they leave; embeddings, maps and the page."""

from __future__ import annotations

import csv
import json
import re

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
from dilated_attention_pytorch.slides.pretraining import MaskedEncoder
from dilated_attention_pytorch.train.ranks import Stopped

from .studies import DIM, small_study

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


def test_survival_needs_batches_of_several_slides(study, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--max-tiles 8 and --batch-size .* every slide is alone"):
        loop.run_study(config(study, task="survival", max_tiles=8), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["classification", "survival", "regression"])
def test_every_task_leaves_a_model_predictions_and_figures(study, tmp_path, task) -> None:
    table = study / "table.csv"
    if task == "regression":
        table = tmp_path / "table.csv"
        table.write_text((study / "table.csv").read_text().replace(",a,", ",1.5,").replace(",b,", ",2.5,"))
    (results,) = loop.run_study(config(study, task=task, table=str(table), accumulate=2), tmp_path / "run")
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
    settings = config(study, start=str(tmp_path / "before"), epochs=1, learning_rate=1e-9, positions="none")
    loop.run_study(settings, tmp_path / "after")
    before, after = (
        LongNetEncoder.from_pretrained(tmp_path / run / "model").state_dict() for run in ("before", "after")
    )
    shared = [name for name in after if not name.startswith("head.")]
    assert {"input.weight", "pooled_norm.bias"} <= {*shared} <= before.keys()
    for name in shared:
        torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="do not fit the model"):
        loop.run_study(config(study, start=str(tmp_path / "before"), d_model=8), tmp_path / "other")


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
    settings = config(study, start=str(tmp_path / "slide_encoder.pth"), epochs=1, learning_rate=1e-9)
    loop.run_study(settings, tmp_path / "run")
    model = LongNetEncoder.from_pretrained(tmp_path / "run/model")
    assert (model.config.num_layers, model.config.dim_feedforward, model.config.cls_rows) == (2, 48, 1)
    assert model.config.segment_lengths[-1] == 1_048_576
    torch.testing.assert_close(model.input.weight, theirs.input.weight, atol=1e-6, rtol=0)
    torch.save(torch.zeros(3), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="is no checkpoint of Prov-GigaPath's slide encoder"):
        loop.run_study(config(study, start=str(tmp_path / "other.pth")), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_nothing_is_written_for_a_study_that_is_wrong(study, tmp_path) -> None:
    table = tmp_path / "table.csv"
    lines = ["slide,label,split", "s0,a,train", "s1,b,train", "s2,a,validation", "s3,b,validation", "s4,a,test"]
    table.write_text("\n".join(lines))
    flags = ["--table", str(table), "--features", str(study / "features"), "--out", str(tmp_path / "run")]
    assert main(["slides", "train", *flags]) == 1
    assert not (tmp_path / "run").exists()
    assert main(["slides", "train", "--table", "gone.csv", "--features", ".", "--out", str(tmp_path / "run")]) == 1


def test_the_command_trains_embeds_maps_and_reports(study, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--table", str(study / "table.csv"), "--features", str(study / "features"), "--epochs", "1"]
    small = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--pooling", "attention", "--device", "cpu"]
    assert main(["slides", "train", *flags, *small, "--out", "run", "--baseline", "--folds", "3"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"test split +loss +auc.*\nencoder +\d.*\nwithout attention +\d", said)
    alone = LongNetEncoder.from_pretrained("run/without-attention/fold-0/model")
    assert alone.config.segment_lengths == (1,)

    features = ["--features", str(study / "features"), "--device", "cpu"]
    assert main(["slides", "embed", "run", *features, "--out", "all.npy"]) == 1  # which of the folds?
    assert "name one of its folds" in capsys.readouterr().err
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "all.npy"]) == 0
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "all.npy"]) == 1  # never written over
    assert main(["slides", "embed", "run/fold-1", *features, "--out", "all.h5"]) == 0
    names, rows = (tmp_path / "all.txt").read_text().split(), numpy.load("all.npy")
    model = LongNetEncoder.from_pretrained("run/fold-1/model").eval()
    bag = read_bag(study / "features" / f"{names[3]}.npy")
    expected = model.embed(bag.features[None], bag.coordinates[None])[0].detach().numpy()
    numpy.testing.assert_allclose(rows[3], expected, atol=1e-5)

    for kind in ("attention", "gradient", "pooling"):
        assert main(["slides", "map", "run/fold-1", *features, "--slide", "s7", "--kind", kind, "--out", kind]) == 0
        weights = tile_weights(model, read_bag(study / "features/s7.npy"), kind)
        drawn = json.loads((tmp_path / kind / "s7.geojson").read_text())["features"]
        found = [one["properties"]["measurements"]["attention"] for one in drawn]
        torch.testing.assert_close(torch.tensor(found), weights, rtol=1e-5, atol=1e-7)
        assert sum(found) == pytest.approx(1.0, abs=1e-5)
        assert (tmp_path / kind / "s7.png").stat().st_size > 0

    assert main(["slides", "report", "run", "--worst", "2"]) == 0
    page = (tmp_path / "run/report.html").read_text()
    for words in ("ROC", "Calibration", "true a", "fold-2", "standard deviation", "without attention", "Worst slides"):
        assert words in page
    assert page.count("<svg") == 3 + 2 + 2
