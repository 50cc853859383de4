"""The main job on a tiny model: it runs, resumes exactly, and loses no checkpoint to bad input."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import signal

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train import TrainConfig, loop, memory, report
from dilated_attention_pytorch.train import checkpoint as checkpoints
from dilated_attention_pytorch.train.memory import make_optimizer
from dilated_attention_pytorch.train.run_folder import claim
from dilated_attention_pytorch.train.step import Stepper

FLAGS = """
    --d-model 16 --num-heads 2 --num-layers 1 --segment-lengths 8 16 --dilation-rates 1 2 --sequence-length 16
    --batch-size 2 --warmup-steps 2 --validate-every 2 --checkpoint-every 2 --sample-bytes 4 --device cpu
""".split()  # noqa: SIM905


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return path


def run(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_config_metrics_curve_sample_and_weights(tmp_path, text, drawn, capsys) -> None:
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 4, *FLAGS) == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.json",
        "corpus.json",
        "metrics.jsonl",
        "environment.jsonl",
        "lock",
        "loss.png",
        "samples",
        "checkpoints",
    }
    printed = capsys.readouterr().out
    result, to_beat = re.search(
        r"result   (.+) bits per byte on the validation split\nto beat  (\S+) by byte pairs", printed
    ).groups()
    assert float(to_beat) < float(result)  # after four steps
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    newest = checkpoints.list_checkpoints(tmp_path / "run")[-1]
    assert {path.name for path in newest.iterdir()} == {"checksums.txt", "config.json", "model.safetensors", "state"}


def test_the_log_tells_each_checkpoint_that_is_saved(tmp_path, text, caplog) -> None:
    with caplog.at_level(logging.DEBUG, "dilated_attention_pytorch"):
        assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 0
    (saved,) = checkpoints.list_checkpoints(tmp_path / "run")
    assert caplog.messages.count(f"saved checkpoint {saved}") == 1


# What later models do instead of MAGNETO.
LATER = """
    --norm rms --activation swiglu --num-kv-heads 1 --qk-norm --no-tie-weights --logit-soft-cap 15 --stagger
    --optimizer muon
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("more", "beside"), [([], False), ([], True), (LATER, False)], ids=["magneto", "saved beside", "later"]
)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, text, monkeypatch, more, beside) -> None:
    if beside:  # as a process does that trains on a GPU
        monkeypatch.setattr(checkpoints, "_saves_beside", lambda ranks: True)
    for name in ("whole", "parts"):
        assert run("--data", text, "--out", tmp_path / name, "--steps", 6, *FLAGS, *more) == 0
    # Take the second one back to step 4, as if it had been killed after step 5.
    newest = checkpoints.list_checkpoints(tmp_path / "parts")
    assert [path.name for path in newest] == ["step-00000004", "step-00000006"]
    shutil.rmtree(newest[-1])
    assert run("--resume", tmp_path / "parts") == 0
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [m["loss"] for m in whole] == [m["loss"] for m in parts]
    weights = [
        (path / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes()
        for path in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert weights[0] == weights[1]


@pytest.mark.gpu
@pytest.mark.parametrize("pack", [[], ["--pack"]], ids=["whole", "packed"])
def test_on_a_gpu_layers_are_compiled_and_a_resumed_run_is_the_same(tmp_path, text, capsys, pack) -> None:
    sizes = (
        "--d-model 128 --num-heads 2 --num-layers 2 --segments 64 256 --rates 1 2 --sequence-length 256 --batch-size 2"
    )
    often = "--steps 6 --validate-every 3 --checkpoint-every 2 --sample-bytes 4 --precision bf16"
    for name in ("whole", "parts"):
        assert run("--data", text, "--out", tmp_path / name, *sizes.split(), *often.split(), *pack) == 0
    assert capsys.readouterr().out.count("compile  done in") == 2
    shutil.rmtree(checkpoints.list_checkpoints(tmp_path / "parts")[-1])
    assert run("--resume", tmp_path / "parts") == 0
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [m["loss"] for m in whole] == [m["loss"] for m in parts]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_whether_the_update_is_fused_depends_on_where_it_runs(tmp_path, text, monkeypatch, optimizer) -> None:
    """A run moves between a CPU and a GPU; here both are a CPU, which can do both."""
    made = []

    def make(*given, **how):
        made.append(make_optimizer(*given, **how))
        return made[-1]

    monkeypatch.setattr(loop, "make_optimizer", make)
    flags = ["--data", text, "--steps", 4, *FLAGS, "--optimizer", optimizer]
    assert run(*flags, "--out", tmp_path / "plain") == 0
    shutil.copytree(tmp_path / "plain", tmp_path / "moved")
    shutil.rmtree(checkpoints.list_checkpoints(tmp_path / "moved")[-1])
    monkeypatch.setattr(memory, "_can_be_fused", lambda parameters: True)
    assert run("--resume", tmp_path / "moved") == 0
    assert [one.param_groups[-1]["fused"] for one in made] == [None, True]
    plain, moved = ([m["loss"] for m in metrics(tmp_path / name)] for name in ("plain", "moved"))
    assert moved == pytest.approx(plain, rel=1e-5)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, text, capsys, monkeypatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5, 1.5, 0.5, math.nan])
    monkeypatch.setattr(Stepper, "validate", lambda *_: next(losses))
    deleted: list[str] = []
    delete = checkpoints._delete

    def delete_after_look(folder) -> None:
        whole = checkpoints.list_checkpoints(folder.parents[1])
        assert whole.index(folder) < len(whole) - 1  # a newer one is whole
        deleted.append(folder.name[-1])
        delete(folder)

    monkeypatch.setattr(checkpoints, "_delete", delete_after_look)

    def kept() -> str:
        return "".join(sorted(path.name[-1] for path in (tmp_path / "run" / "checkpoints").iterdir()))

    few = "--steps 8 --validate-every 100 --keep-checkpoints 1 --keep-best --sample-prompt quick"
    assert run("--data", text, "--out", tmp_path / "run", *FLAGS, *few.split()) == 0
    assert (kept(), "".join(deleted)) == ("48", "26")
    printed = capsys.readouterr().out
    assert (
        f"best     {1 / math.log(2):.3f} bits per byte at step 4: {tmp_path}/run/checkpoints/step-00000004" in printed
    )
    assert "\nsample\nquick" in printed
    assert run("--resume", tmp_path / "run", "--steps", 12) == 0
    assert kept() == "2"  # the newest, of step 12, is the best
    assert run("--resume", tmp_path / "run", "--steps", 13, "--sample-prompt", "fox") == 0
    assert kept() == "23"  # what is not a number is not the best
    assert "\nsample\nfox" in capsys.readouterr().out


def test_a_deletion_that_is_cut_off_leaves_no_half_checkpoint(tmp_path, text, capsys, monkeypatch) -> None:
    def cut_off(folder, **_):
        if folder.name.endswith(".deleted.partial"):
            (folder / "config.json").unlink()
            raise KeyboardInterrupt

    few = [*FLAGS, "--keep-checkpoints", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", cut_off)
        assert run("--data", text, "--out", tmp_path / "run", "--steps", 6, *few) == 130
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "run")] == ["step-00000004"]
    assert run("--resume", tmp_path / "run") == 0
    assert ".step-00000002.deleted.partial: its save or its deletion was cut off" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000006"]


def test_threads_are_timed_once_and_stay_when_a_run_is_resumed(tmp_path, text, capsys, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(loop, "usable_cores", lambda: 4.0)
    rates = {1: 10.0, 2: 60.0, 4: 60.0}
    monkeypatch.setattr(loop, "thread_rates", lambda: rates)
    now = [7]  # more than one would wait for each other
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))

    def told(*arguments: object) -> str:
        assert run(*arguments) == 0
        return re.search(r"^threads  (.*)$", capsys.readouterr().out, re.MULTILINE)[1]

    assert told("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS).startswith(
        "2: the fastest now (GFLOP/s with 1: 10, 2: 60, 4: 60); --threads or OMP_NUM_THREADS overrides it"
    )
    assert now == [7]
    rates[1] = 99.0
    assert told("--resume", tmp_path / "run", "--steps", 3).startswith("2: as before the run was resumed")
    monkeypatch.setattr(loop, "usable_cores", lambda: 1.0)  # a smaller machine
    assert told("--resume", tmp_path / "run", "--steps", 4).startswith("1: the fastest now")
    assert told("--resume", tmp_path / "run", "--steps", 5, "--threads", 3) == "3: as --threads states"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert told("--data", text, "--out", tmp_path / "other", "--steps", 2, *FLAGS) == "7: as OMP_NUM_THREADS states"


def test_resuming_wants_something_to_do(tmp_path, text, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--resume") == 1
    assert "no run with a checkpoint below runs/" in capsys.readouterr().err
    assert run("--data", text, "--out", "runs/one", "--steps", 2, *FLAGS) == 0
    assert run("--resume") == 1
    assert "has finished its 2 steps: raise --steps" in capsys.readouterr().err
    assert run("--resume", "--steps", 3) == 0
    assert run("--resume", "--steps", 4, "--batch-size", 3) == 1
    assert "--batch-size cannot change" in capsys.readouterr().err
    assert run("--data", text, "--out", "runs/one", "--steps", 2, *FLAGS) == 1
    assert "already holds a run: continue it with --resume" in capsys.readouterr().err


def test_a_run_whose_end_failed_shows_it_when_it_is_resumed(tmp_path, text, capsys, monkeypatch, drawn) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "draw_curve", full)
        assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 1
    assert not (tmp_path / "run" / "samples").exists()
    assert run("--resume", tmp_path / "run") == 0
    assert (tmp_path / "run" / "loss.png").is_file()
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 1
    assert run("--resume", tmp_path / "run") == 1
    assert "has finished its 2 steps" in capsys.readouterr().err


def test_two_processes_do_not_train_in_one_folder(tmp_path, text, capsys) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with claim(folder):
        assert run("--data", text, "--out", folder, "--steps", 2, *FLAGS) == 1
    assert f"process {os.getpid()} is training in {folder}: wait" in capsys.readouterr().err
    assert run("--data", text, "--out", folder, "--steps", 2, *FLAGS) == 0


def test_a_second_process_asks_for_the_lock_before_it_reads(tmp_path, text, capsys, monkeypatch) -> None:
    folder = tmp_path / "run"
    assert run("--data", text, "--out", folder, "--steps", 2, *FLAGS) == 0
    broken = folder / "checkpoints" / "step-00000002" / "state" / "__0_0.distcp"
    broken.write_bytes(b"")  # as while the first process writes
    before = sorted(folder.rglob("*"))

    def read(*_, **__):
        raise AssertionError("the second process has read")

    with claim(folder):
        monkeypatch.setattr(loop, "open_corpus", read)
        monkeypatch.setattr(loop._Trainer, "_is_to_resume", read)
        for again in (("--resume", folder), ("--data", text, "--out", folder, "--steps", 2, *FLAGS)):
            assert run(*again) == 1
            assert f"process {os.getpid()} is training in {folder}: wait" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_what_killed_processes_left_of_files_is_swept(tmp_path, text) -> None:
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    left = [folder / ".config.json.1.partial", folder / ".metrics.jsonl.1.partial", folder / "samples" / ".a.1.partial"]
    for path in left:
        path.write_text("half")
    assert run("--data", text, "--out", folder, "--steps", 2, *FLAGS) == 0
    assert not any(path.exists() for path in left)


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before_it(tmp_path, text, capsys) -> None:
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 4, *FLAGS) == 0
    whole = [m["loss"] for m in metrics(tmp_path / "run")]
    newest = checkpoints.list_checkpoints(tmp_path / "run")[-1]
    state = newest / "state" / "__0_0.distcp"
    state.write_bytes(state.read_bytes()[:100])
    assert run("--resume", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert f"skipped {newest}: state/__0_0.distcp is broken or truncated" in printed
    assert ", from step 2 on cpu" in printed
    assert [m["loss"] for m in metrics(tmp_path / "run")] == whole
    names = {path.name for path in newest.parent.iterdir()}
    assert names == {"step-00000002", "step-00000004", "damaged-step-00000004"}


def test_checkpoints_stay_where_they_are_if_none_can_be_read(tmp_path, text, capsys) -> None:
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 4, *FLAGS) == 0
    found = checkpoints.list_checkpoints(tmp_path / "run")
    for folder in found:
        (folder / "model.safetensors").write_bytes(b"")
    assert run("--resume", tmp_path / "run", "--steps", 6) == 1
    assert "it has no checkpoint that can be read" in capsys.readouterr().err
    assert checkpoints.list_checkpoints(tmp_path / "run") == found


def test_sigterm_finishes_the_step_and_saves(tmp_path, text, capsys, monkeypatch) -> None:
    real = Stepper.step

    def terminated(*arguments):
        for _ in range(2):  # one of them may come through a parent
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(Stepper, "step", terminated)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 6, *FLAGS) == 128 + signal.SIGTERM
    assert "stopped after step 1; continue with --resume" in capsys.readouterr().out
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path / "run")] == ["step-00000001"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.undo()
    assert run("--out", tmp_path / "run", "--auto-resume", "--steps", 6, "--data", text, *FLAGS) == 0
    assert run("--out", tmp_path / "new", "--auto-resume", "--steps", 6, "--data", text, *FLAGS) == 0
    losses = [[m["loss"] for m in metrics(tmp_path / name)] for name in ("run", "new")]
    assert losses[0] == losses[1]


def test_a_run_that_is_killed_after_a_save_has_the_records_of_all_steps(tmp_path, text, monkeypatch) -> None:
    real = checkpoints.Checkpointer.save

    class Killed(BaseException):
        pass

    def save_and_die(self, step, validated):
        real(self, step, validated)
        raise Killed

    monkeypatch.setattr(checkpoints.Checkpointer, "save", save_and_die)
    with pytest.raises(Killed):
        run("--data", text, "--out", tmp_path / "run", "--steps", 4, *FLAGS)
    monkeypatch.undo()
    assert run("--resume", tmp_path / "run") == 0
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_with_no_step_left_is_examined_where_it_was_not(tmp_path, text, monkeypatch) -> None:
    monkeypatch.setattr(Stepper, "step", lambda *given, step=Stepper.step: signal.raise_signal(2) or step(*given))
    again = ("--data", text, "--out", tmp_path / "run", "--auto-resume", *FLAGS)
    assert run(*again, "--steps", 6) == 130  # after one step, without a validation
    monkeypatch.undo()
    assert run(*again, "--steps", 1) == 0
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert run(*again, "--steps", 1) == 0


def test_a_ctrl_c_while_the_last_save_ends_does_not_cut_it_off(tmp_path, text, monkeypatch) -> None:
    real = checkpoints.Checkpointer.close

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        real(self)

    monkeypatch.setattr(checkpoints.Checkpointer, "close", interrupted)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 0


def test_auto_resume_wants_the_same_run(tmp_path, text, capsys) -> None:
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 0
    again = ("--data", text, "--out", tmp_path / "run", "--auto-resume", *FLAGS)
    assert run(*again, "--steps", 2) == 0  # nothing is left to do
    assert run(*again, "--steps", 4, "--seed", 1) == 1
    assert "holds a run with other settings" in capsys.readouterr().err
    assert run(*again, "--steps", 4, "--resume", tmp_path / "run") == 1
    assert "leave --resume out" in capsys.readouterr().err


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path, text, capsys, monkeypatch) -> None:
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 0

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full_disk)
    assert run("--resume", tmp_path / "run", "--steps", 4) == 1
    assert "No space left" in capsys.readouterr().err
    found = list((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in found] == ["step-00000002"]
    monkeypatch.undo()
    assert run("--resume", tmp_path / "run", "--steps", 4) == 0


@pytest.mark.parametrize("moment", ["step", "validate"])
def test_ctrl_c_finishes_the_step_saves_and_can_be_resumed(tmp_path, text, monkeypatch, moment) -> None:
    assert run("--data", text, "--out", tmp_path / "whole", "--steps", 6, *FLAGS) == 0
    real, calls, before = getattr(Stepper, moment), [], signal.getsignal(signal.SIGINT)

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(Stepper, moment, interrupted)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 6, *FLAGS) == 130
    stopped = 1 if moment == "step" else 2
    assert checkpoints.list_checkpoints(tmp_path / "run")[-1].name == f"step-{stopped:08d}"
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert run("--resume", tmp_path / "run") == 0
    losses = [[m["loss"] for m in metrics(tmp_path / name)] for name in ("whole", "run")]
    assert losses[0] == losses[1]


def test_a_second_ctrl_c_stops_at_once(tmp_path, text, monkeypatch) -> None:
    def twice(*arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stepper, "step", twice)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 6, *FLAGS) == 130
    assert checkpoints.list_checkpoints(tmp_path / "run") == []


def test_the_first_signal_says_what_happens_and_what_a_second_ctrl_c_does(capfd) -> None:
    with loop.interrupts(patient=False) as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGTERM, signal.SIGINT]
    assert capfd.readouterr().err.strip() == (
        "stops after this step and saves; a second Ctrl-C stops at once, without saving"
    )
    with loop.interrupts(patient=True):
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""


def test_a_run_is_stopped_and_saved_though_nobody_reads_its_errors(monkeypatch) -> None:
    def write(*_) -> None:  # as after Ctrl-C has also ended the `tee` behind a pipe
        raise BrokenPipeError

    with monkeypatch.context() as patch, loop.interrupts(patient=False) as signals:
        patch.setattr(loop.os, "write", write)
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGINT]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, text, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Stepper, "loss", lambda self, *_: self.model.norm.weight.sum() * torch.nan)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 6, *FLAGS, "--skip-broken-steps", 0) == 1
    told = (
        "the loss is nan and the gradient's norm nan at step 1, after 0 skipped steps before it: lower --learning-rate"
    )
    assert told in capsys.readouterr().err


def test_without_matplotlib_the_curve_is_a_line_of_text(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report.plots, "find_spec", lambda name: None)
    assert report.draw_curve([{"step": 1, "bits": 8.0}], {"bytes": 4.0}, tmp_path / "loss.png") is None
    assert report.sparkline([8.0] * 100 + [1.0] * 100, width=4) == "██▁▁"


def test_broken_gradients_reach_neither_weights_nor_checkpoints(tmp_path, text, capsys, monkeypatch) -> None:
    real = Stepper.loss

    def broken(self, *batch):
        loss = real(self, *batch)
        return loss + (self.model.norm.weight * 0.0).sum().sqrt()  # finite itself, with an infinite derivative

    monkeypatch.setattr(Stepper, "loss", broken)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS, "--skip-broken-steps", 0) == 1
    assert "the gradient's norm nan at step 1" in capsys.readouterr().err
    assert checkpoints.list_checkpoints(tmp_path / "run") == []


def test_a_run_with_dropout_resumes_exactly(tmp_path, text) -> None:
    model = dataclasses.replace(
        TrainConfig().model, d_model=16, num_heads=2, num_layers=1, dropout=0.3, dim_feedforward=0
    )
    config = TrainConfig(
        data=(str(text),), model=model, sequence_length=16, steps=4, checkpoint_every=2, sample_bytes=1
    )
    loop.train(config, tmp_path / "whole")
    loop.train(dataclasses.replace(config, steps=2), tmp_path / "parts")
    # Steps set the learning rate too, so the first half is the whole run's own checkpoint.
    for name in ("metrics.jsonl", "config.json"):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "parts" / name)
    shutil.rmtree(tmp_path / "parts" / "checkpoints")
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step-00000002", tmp_path / "parts" / "checkpoints" / "step-00000002"
    )
    loop.train(config, tmp_path / "parts", resume=True)
    losses = [[m["loss"] for m in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_the_newest_run_is_the_one_last_saved(tmp_path, text, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("z-older", "a-newer"):
        assert run("--data", text, "--out", f"runs/{name}", "--steps", 2, *FLAGS) == 0
    assert run("--resume", "--steps", 3) == 0
    assert len(metrics(tmp_path / "runs" / "a-newer")) == 3


def test_what_a_killed_save_left_is_swept(tmp_path, text) -> None:
    left = tmp_path / "run" / "checkpoints" / ".step-00000001.1.partial"
    left.mkdir(parents=True)
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 0
    assert not left.exists()


@pytest.mark.parametrize("content", ["{", '{"loss": 1}', "[]"])
def test_broken_metrics_are_named(tmp_path, text, capsys, content) -> None:
    assert run("--data", text, "--out", tmp_path / "run", "--steps", 2, *FLAGS) == 0
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    assert run("--resume", tmp_path / "run", "--steps", 3) == 1
    assert "metrics.jsonl is broken" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(tmp_path, text, capsys) -> None:
    assert run("--data", text, "--out", tmp_path / "run", *FLAGS[:-2], "--device", "warp") == 1
    assert "no device 'warp' here" in capsys.readouterr().err


def test_the_learning_rate_rises_then_falls() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [config.learning_rate_at(step) for step in (1, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 0.55, 0.1])
