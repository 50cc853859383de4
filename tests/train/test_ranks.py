"""Several ranks train what one process trains; they survive a death, and their checkpoints fit any number of ranks.

The launches are few, because each costs the start of several Pythons: one checks several things.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train import checkpoint as checkpoints
from dilated_attention_pytorch.train import ranks as train_ranks

from ..ranks import Ranks, run_ranks
from .rank_worker import LATER

WORKER = Path(__file__).with_name("rank_worker.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(train_ranks.__file__).parents[2])}
STEPS = 8
FEW = 5  # steps of four ranks, which take long


@pytest.fixture(autouse=True, scope="module")
def curves() -> None:
    """Ranks draw their curve, and so does the run that they are compared with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def flags(folder) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    sizes = """
        --d-model 16 --num-heads 2 --num-layers 2 --segment-lengths 8 16 --dilation-rates 1 2 --sequence-length 16
        --batch-size 4 --warmup-steps 2 --validate-every 4 --checkpoint-every 2 --sample-bytes 4 --device cpu
    """
    (folder / "few.toml").write_text("validation_batches = 2")
    few = ["--config", str(folder / "few.toml")]
    return ["train", "--data", str(text), "--steps", str(STEPS), *few, *sizes.split()]


def launch(ranks: int, scenario: str, folder: Path, flags: list[str], worker: str = "rank_worker") -> str:
    """What the ranks that run a scenario of a worker print."""
    ended_well, printed = run_ranks(ranks, f"tests.train.{worker}", scenario, str(folder), *flags)
    assert ended_well, printed
    return printed


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    environment = {**os.environ, **ENVIRONMENT, **environment}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **output)


def finish(process: subprocess.Popen) -> str:
    """The output of a command, which leaves nobody behind."""
    try:
        return process.communicate(timeout=300)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def launch_with_restart(scenario: str, folder: Path, flags: list[str]) -> str:
    """Run a scenario on two ranks through torchrun, as `--ranks 2 --max-restarts 1` does."""
    arguments = train_ranks.torchrun_arguments(2, 1, [str(WORKER), scenario, str(folder), *flags])
    process = start([sys.executable, "-m", "torch.distributed.run", *arguments], train_ranks.RESTARTABLE)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_newest(run: Path, to: Path) -> Path:
    """A copy of a run, taken back before its last checkpoint."""
    shutil.copytree(run, to)
    shutil.rmtree(checkpoints.list_checkpoints(to)[-1])
    return to


@pytest.fixture(scope="module")
def alone(folder, flags) -> Path:
    """The run of one process, which the others must equal."""
    assert main([*flags, "--out", str(folder / "alone")]) == 0
    return folder / "alone"


@pytest.fixture(scope="module")
def shared(folder, flags, alone) -> str:
    without_newest(alone, folder / "from-one")
    return launch(2, "share", folder, flags)


EXACT = ["fsdp-exact", "ddp-exact", "sequence-exact"]


@pytest.mark.parametrize("name", ["fsdp", "ddp", "from-one", "stopped", *EXACT])
def test_two_ranks_have_the_losses_of_one_process(folder, alone, shared, name) -> None:
    assert losses(folder / name) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.parametrize("name", ["later-fsdp", "later-ddp"])
def test_two_ranks_train_what_later_models_do_as_one_process_does(folder, flags, shared, name) -> None:
    one = folder / "later"
    if not one.exists():
        assert main([*flags, "--out", str(one), *LATER]) == 0
    assert losses(folder / name) == pytest.approx(losses(one), rel=1e-4)  # Muon computes in bfloat16


def test_what_ranks_save_is_a_checkpoint_with_weights_for_use(folder, alone, shared) -> None:
    found = checkpoints.list_checkpoints(folder / "fsdp")
    assert [path.name for path in found] == ["step-00000006", "step-00000008"]
    assert {path.name for path in found[-1].iterdir()} == {"checksums.txt", "config.json", "model.safetensors", "state"}
    ours, theirs = (
        LongNetLM.from_pretrained(checkpoints.list_checkpoints(run)[-1]) for run in (folder / "fsdp", alone)
    )
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters()):
        assert one.detach().numpy() == pytest.approx(other.detach().numpy(), abs=1e-4), name
    assert {path.name for path in (folder / "fsdp").iterdir()} == {path.name for path in alone.iterdir()} | {
        "log.jsonl"
    }


def test_the_first_rank_logs_for_all(folder, shared) -> None:
    lines = [json.loads(line) for line in (folder / "fsdp" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1].keys() >= {"loss", "tokens_per_second", "step_seconds", "checkpoint_stall_seconds", "restarts"}
    assert lines[-1]["peak_memory_bytes"] > 0
    assert lines[-1]["checkpoint_stall_seconds"] > 0


def test_ranks_in_float16_scale_their_losses_alike_and_go_on_with_their_scale(folder, alone, shared) -> None:
    assert "in float16" not in shared
    assert losses(folder / "fp16") == pytest.approx(losses(alone), rel=5e-3)
    state = folder / "fp16" / "checkpoints" / f"step-{STEPS:08d}" / "state"
    known = FileSystemReader(state).read_metadata().state_dict_metadata
    assert "scaler._growth_tracker" in known


def test_a_step_that_is_broken_on_one_rank_is_skipped_by_all(folder, alone, shared) -> None:
    assert shared.count("skipped: the loss is nan and the gradient's norm nan at step 3 (1 in a row)") == 1
    records = [json.loads(line) for line in (folder / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert [record.get("skipped", 0) for record in records] == [0, 0, 1, *[0] * (STEPS - 3)]
    assert [record["loss"] for record in records[:2]] == pytest.approx(losses(alone)[:2], rel=1e-5)
    assert records[2]["loss_ema"] == records[1]["loss_ema"]


def test_sigterm_to_one_rank_stops_all_after_the_same_step(shared) -> None:
    assert shared.count("stopped after step 3; continue with --resume") == 1


def test_ctrl_c_to_a_launch_of_ranks_saves_and_ends_with_its_status_and_no_traceback(folder, flags) -> None:
    run = folder / "interrupted"
    arguments = [*flags, "--out", str(run), "--steps", "100000", "--ranks", "2"]
    # A shell that runs this in the background ignores Ctrl-C, and so would its children.
    begin = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{begin}; from dilated_attention_pytorch.cli import entry; entry()"
    process = start([sys.executable, "-c", code, *arguments], {})
    until = time.monotonic() + 120
    while not checkpoints.list_checkpoints(run) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = finish(process)
    assert process.returncode == 128 + signal.SIGINT, output
    assert output.count("; continue with --resume") == 1
    assert "Traceback" not in output
    assert "SignalException" not in output


def test_a_save_that_fails_on_one_rank_is_told_by_all(folder, shared) -> None:
    told = [line for line in shared.splitlines() if "a checkpoint could not be saved (rank 1: " in line]
    assert len(told) == 2
    assert all("No space left on device" in line for line in told)
    assert all(f"the disk of {folder / 'failed'} is full (" in line for line in told)
    assert list((folder / "failed" / "checkpoints").iterdir()) == []


def test_a_rank_that_is_killed_is_restarted_and_nothing_is_lost(folder, flags, shared) -> None:
    out = ["--out", str(folder / "killed")]
    output = launch_with_restart("kill", folder, [*flags, *out, "--monitors", "console"])
    assert ", from step " in output, output  # 2 or 4: the last save may not have ended
    assert f"step {STEPS}  " in output
    assert "restarts 1" in output
    assert losses(folder / "killed") == losses(folder / "fsdp")
    assert output.count("all ranks must have the same seed: rank 0 has 0 and rank 1 has 1") == 2


@pytest.fixture(scope="module")
def uneven(folder, flags) -> list[str]:
    """Sequences that four ranks cannot share evenly."""
    changes = f"--sequence-length 18 --num-heads 4 --num-layers 1 --steps {FEW} --validate-every {FEW}"
    changes += f" --checkpoint-every {FEW - 1}"
    flags = [*flags, *changes.split()]
    assert main([*flags, "--out", str(folder / "uneven")]) == 0
    return flags


@pytest.fixture(scope="module")
def on_four(folder, uneven, shared) -> str:
    without_newest(folder / "fsdp", folder / "four")
    without_newest(folder / "uneven", folder / "one-to-tensor")
    without_newest(folder / "uneven", folder / "one-to-ddp")
    assert main([*uneven, "--out", str(folder / "later-uneven"), *LATER]) == 0
    without_newest(folder / "later-uneven", folder / "later-one-to-tensor")
    return launch(4, "four", folder, uneven)


def test_four_ranks_go_on_where_two_stopped(folder, alone, on_four) -> None:
    assert ", from step 6 on cpu, 4 ranks (fsdp)" in on_four
    assert losses(folder / "four") == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["sequence", "sequence-data", "sequence-tensor", "sequence-tensor-exact", "one-to-tensor", "one-to-ddp"]
)
def test_ranks_that_share_sequences_heads_and_parameters_have_the_losses_of_one_process(folder, on_four, name) -> None:
    assert len(losses(folder / name)) == FEW
    assert losses(folder / name) == pytest.approx(losses(folder / "uneven"), rel=1e-5)


@pytest.mark.parametrize("name", ["later-tensor", "later-one-to-tensor"])
def test_ranks_that_share_heads_train_what_later_models_do_as_one_process_does(folder, on_four, name) -> None:
    assert len(losses(folder / name)) == FEW
    assert losses(folder / name) == pytest.approx(losses(folder / "later-uneven"), rel=1e-4)


def test_ranks_that_share_sequences_log_what_travels_for_each_branch(folder, on_four) -> None:
    lines = [json.loads(line) for line in (folder / "sequence" / "log.jsonl").read_text().splitlines()]
    received = lines[0]["branch_bytes"]
    assert list(received) == [name for name in received if name.startswith("w")]
    assert any(received.values())
    # Of one step, not of all so far. The last also validated.
    assert lines[1]["branch_bytes"] == received


def test_one_process_goes_on_where_ranks_shared_heads(folder, on_four, capsys) -> None:
    assert ", from step 3 on cpu, 4 ranks (fsdp, sequence 2, tensor 2)" in on_four
    run = without_newest(folder / "sequence-tensor", folder / "tensor-to-one")
    assert main(["train", "--resume", str(run)]) == 1
    assert "sequence_parallel=2 and tensor_parallel=2 need 4 ranks" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--sequence-parallel", "1", "--tensor-parallel", "1"]) == 0
    assert losses(run) == pytest.approx(losses(folder / "uneven"), rel=1e-5)


def test_ranks_that_do_not_divide_are_told_on_all_of_them(on_four) -> None:
    assert on_four.count("sequence_parallel=1 times tensor_parallel=3 must divide the ranks, and there are 4") == 4
    assert on_four.count("--batch-size must be a multiple of the 4 ranks that share it, got 6") == 4


def test_one_process_goes_on_where_two_stopped_and_passes_over_what_is_damaged(folder, alone, shared, capsys) -> None:
    run = folder / "one"
    shutil.copytree(folder / "fsdp", run)
    for name in ("step-00000007", ".step-00000009.1.partial"):
        shutil.copytree(run / "checkpoints" / "step-00000008", run / "checkpoints" / name)
    truncated = run / "checkpoints" / "step-00000007" / "state" / "__1_0.distcp"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    (run / "checkpoints" / "step-00000008" / "state" / ".metadata").unlink()
    assert main(["train", "--resume", str(run)]) == 0
    printed = capsys.readouterr().out
    assert ".step-00000009.1.partial: its save or its deletion was cut off" in printed
    assert "step-00000008: it has no state/.metadata, so its save was cut off" in printed
    assert "step-00000007: state/__1_0.distcp is broken or truncated (it has 1,000 bytes, " in printed
    assert ", from step 6 on cpu" in printed
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


def test_a_rank_that_hangs_ends_the_others(folder, flags) -> None:
    ranks = Ranks(2, "tests.train.rank_worker", ["hang", str(folder), *flags])
    first, second = ranks.processes
    first.join(300)
    still_runs = second.is_alive()  # it was the silent one
    printed = ranks.end()
    assert first.exitcode == 1, printed
    assert still_runs, printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "run", "--ranks", "2"], "leave --ranks out, or torchrun"),
        ([], "ranks and restarts must agree on one folder"),
        (["--resume"], "ranks and restarts must agree on one folder"),
    ],
)
def test_a_rank_needs_a_folder_and_no_launcher(arguments, message, monkeypatch, capsys) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_an_error_that_cannot_be_pickled_reaches_other_ranks_in_words() -> None:
    class Stubborn(Exception):
        def __reduce__(self):
            raise TypeError("not me")

    known = OSError(28, "No space left on device")
    assert train_ranks._picklable(known) is known
    assert str(train_ranks._picklable(Stubborn("a lock was lost"))) == "Stubborn: a lock was lost"


def test_ranks_are_started_in_one_folder_by_torchrun(monkeypatch, capsys) -> None:
    caught = []

    def torchrun(arguments) -> None:
        caught.append((arguments, json.loads(Path(arguments[-1]).read_text()), os.environ.copy()))

    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    given = "--out here --auto-resume --steps 3 --segment-lengths 8 16 --dilation-rates 1 2 --learning-rate 0.1"
    assert main(["train", "--ranks", "2", "--max-restarts", "3", *given.split()]) == 0
    arguments, told, environment = caught.pop()
    assert "--nproc-per-node=2 --max-restarts=3 -m dilated_attention_pytorch.cli rank" in " ".join(arguments)
    assert (told["run"], told["resume"], told["config"]["steps"]) == ("here", "auto", 3)
    assert (told["config"]["learning_rate"], told["config"]["model"]["segment_lengths"]) == (0.1, [8, 16])
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert main(["train", "--ranks", "2"]) == 0
    assert caught.pop()[1]["run"].startswith("runs/")  # one folder, chosen once
    assert main(["train", "--ranks", "0"]) == 1
    assert "--ranks must be at least 1" in capsys.readouterr().err
    assert main(["train", "--max-restarts", "1"]) == 1
    assert "--max-restarts needs --ranks" in capsys.readouterr().err
    assert not caught
