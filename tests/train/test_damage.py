"""Damage in any file of a checkpoint is found and named before the checkpoint is loaded; other errors stop the run."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import LongNet, LongNetLM, files
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.files import CHECKSUMS, DamagedFile
from dilated_attention_pytorch.models import ModelConfig
from dilated_attention_pytorch.train import checkpoint as checkpoints
from dilated_attention_pytorch.train.checkpoint import Checkpointer, list_checkpoints
from dilated_attention_pytorch.train.ranks import Ranks, join_ranks

from .test_train import FLAGS, text  # noqa: F401 - a fixture

SIZES = {"d_model": 32, "num_heads": 2, "num_layers": 1, "segment_lengths": (8, 16), "dilation_rates": (1, 2)}
PAGE = 4096


def checkpointer(run: Path, ranks: Ranks) -> Checkpointer:
    plain = LongNetLM(**SIZES)
    model = ranks.share(plain, "fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Checkpointer(run, plain, model, optimizer, scaler, ranks, keep=2, beside={"tokenizer.json": b"{}" * 200})


def damaged(content: bytes, kind: str, draw: random.Random) -> bytes:
    found = bytearray(content)
    if kind == "flip":
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        pages = [at for at in range(0, len(found), PAGE) if any(found[at : at + PAGE])]
        at = draw.choice(pages)
        found[at : at + PAGE] = bytes(len(found[at : at + PAGE]))
    else:
        del found[draw.randrange(len(found)) :]
    return bytes(found)


def count_detected(run: Path, ranks: Ranks, count: int, said) -> int:
    """Damage the newest of two checkpoints `count` times: each time the one before is loaded, and the file is named."""
    saver = checkpointer(run, ranks)
    for step in (1, 2):
        saver.save(step)
    saver.settle()
    newest = run / "checkpoints" / "step-00000002"
    names = checkpoints._files(newest)
    assert {CHECKSUMS, "model.safetensors", "config.json", "tokenizer.json"} < set(names)
    draw = random.Random(count)
    detected = 0
    for number in range(count):
        name, kind = names[number % len(names)], ("flip", "zero", "cut")[number // len(names) % 3]
        path = newest / name
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, kind, draw))
        said()
        step = saver.restore()
        aside = newest.with_name("damaged-step-00000002")
        named = f"skipped {newest}: {name} is broken" in said()
        detected += step == 1 and named and aside.is_dir()
        (aside if aside.is_dir() else newest).rename(newest)
        path.write_bytes(whole)
    assert saver.restore() == 2
    saver.close()
    return detected


def test_damage_in_a_checkpoint_of_one_process_is_always_found(tmp_path, capsys) -> None:
    ranks = Ranks(device=torch.device("cpu"))
    assert count_detected(tmp_path, ranks, 60, lambda: capsys.readouterr().out) == 60


def test_damage_in_a_checkpoint_of_ranks_is_always_found(tmp_path, capsys, monkeypatch) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with join_ranks("cpu", 60.0) as ranks:
        assert count_detected(tmp_path, ranks, 21, lambda: capsys.readouterr().out) == 21
    names = checkpoints._files(tmp_path / "checkpoints" / "step-00000002")
    assert set(names) >= {"state/.metadata", "state/__0_0.distcp"}
    assert not any(name.startswith("state/") and name.endswith(CHECKSUMS) for name in names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    saver = checkpointer(run, Ranks(device=torch.device("cpu")))
    for step in (1, 2):
        saver.save(step)
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", CHECKSUMS])
def test_a_model_is_not_loaded_from_a_damaged_checkpoint(run, name) -> None:
    newest = list_checkpoints(run)[-1]
    LongNetLM.from_pretrained(newest)
    path = newest / name
    path.write_bytes(damaged(path.read_bytes(), "flip", random.Random(0)))
    with pytest.raises(DamagedFile, match=f"{newest}: {name} is broken"):
        LongNetLM.from_pretrained(newest)


def test_weights_that_are_saved_over_those_of_a_checkpoint_are_no_damage(run) -> None:
    newest = list_checkpoints(run)[-1]
    other = LongNetLM(**SIZES)
    other.save_pretrained(newest)
    for name, found in LongNetLM.from_pretrained(newest).state_dict().items():
        assert torch.equal(found, other.state_dict()[name]), name


def test_a_checkpoint_without_checksums_is_loaded_and_said_to_have_none(run, capsys) -> None:
    for folder in list_checkpoints(run):
        (folder / CHECKSUMS).unlink()
    assert checkpointer(run, Ranks(device=torch.device("cpu"))).restore() == 2
    assert capsys.readouterr().out.count("has no checksums.txt: damage in it may go unnoticed") == 1
    shard = max((list_checkpoints(run)[-1] / "state").iterdir(), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:100])
    assert checkpointer(run, Ranks(device=torch.device("cpu"))).restore() == 1
    assert "skipped" in capsys.readouterr().out


def test_a_checkpoint_of_a_format_that_is_no_longer_read_says_so(run, capsys) -> None:
    newest = list_checkpoints(run)[-1]
    (newest / "state.pt").touch()
    assert checkpointer(run, Ranks(device=torch.device("cpu"))).restore() == 1
    assert f"skipped {newest}: it has state.pt, which earlier versions wrote" in capsys.readouterr().out


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no room")])
def test_an_error_of_the_disk_or_the_memory_is_no_damage(run, monkeypatch, error, has_checksums) -> None:
    names = [path.name for path in (run / "checkpoints").iterdir()]
    if not has_checksums:
        for folder in list_checkpoints(run):
            (folder / CHECKSUMS).unlink()
    saver = checkpointer(run, Ranks(device=torch.device("cpu")))

    def fail(*_, **__):
        raise error

    for module, name in ((files, "_summing"), (checkpoints, "load"), (checkpoints, "set_model_state_dict")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            with pytest.raises(OSError, match=r"not because it is damaged .*: nothing was renamed"):
                saver.restore()
    assert [path.name for path in (run / "checkpoints").iterdir()] == names


def test_generation_from_a_run_passes_over_a_damaged_checkpoint_and_names_it(tmp_path, text, capsys) -> None:  # noqa: F811
    assert main(["train", "--data", str(text), "--out", str(tmp_path / "run"), "--steps", "4", *FLAGS]) == 0
    newest = list_checkpoints(tmp_path / "run")[-1]
    path = newest / "model.safetensors"
    path.write_bytes(damaged(path.read_bytes(), "flip", random.Random(0)))
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--max-new-tokens", "2"]) == 0
    assert f"skipped {newest}: model.safetensors is broken" in capsys.readouterr().err


def test_all_files_of_a_run_have_the_same_permissions_and_names_are_synced(tmp_path, text, monkeypatch) -> None:  # noqa: F811
    synced = []
    real = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda folder: synced.append(Path(folder)) or real(folder))
    run = tmp_path / "run"
    before = os.umask(0o027)
    try:
        assert main(["train", "--data", str(text), "--out", str(run), "--steps", "2", *FLAGS]) == 0
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run.rglob("*") if path.is_file()}
    assert modes == {0o640}
    assert {run, run / "checkpoints"} <= set(synced)


def test_weights_that_are_not_finite_push_out_no_checkpoint(tmp_path, text, capsys, monkeypatch) -> None:  # noqa: F811
    real = torch.optim.AdamW.step
    steps = []

    def broken(self, *given):
        real(self, *given)
        steps.append(1)
        if len(steps) == 3:
            self.param_groups[0]["params"][0].data.fill_(torch.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    many = ["--steps", "40", "--skip-broken-steps", "100"]
    assert main(["train", "--data", str(text), "--out", str(tmp_path / "run"), *FLAGS, *many]) == 1
    told = "the weights are not finite after step 4 and cannot recover, so they are not saved"
    assert told in capsys.readouterr().err
    newest = list_checkpoints(tmp_path / "run")[-1]
    assert newest.name == "step-00000002"
    assert all(weight.isfinite().all() for weight in LongNetLM.from_pretrained(newest).parameters())


def test_a_config_that_claims_too_much_is_refused_before_memory_is_allocated(tmp_path) -> None:
    LongNetLM(**SIZES).save_pretrained(tmp_path)
    for change in ({"d_model": 2**20}, {"num_layers": 10**9}, {"vocab_size": 2**40}):  # 4 TiB and more
        (tmp_path / "config.json").write_text(ModelConfig(**(SIZES | change)).to_json())
        with pytest.raises(ValueError, match="does not fit the model"):
            LongNetLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(ModelConfig(**(SIZES | {"num_decoder_layers": 10**9})).to_json())
    with pytest.raises(ValueError, match=r"does not fit the model: it has .* tensors, the model 1,000,000,001 layers"):
        LongNet.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtypes", [[torch.int32], [torch.float32, torch.bfloat16], [torch.float8_e4m3fn]])
def test_weights_of_another_kind_of_number_are_refused(tmp_path, dtypes) -> None:
    from safetensors.torch import load_file, save_file

    LongNetLM(**SIZES).save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor.to(dtypes[i % len(dtypes)]) for i, (name, tensor) in enumerate(found.items())},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"does not fit the model: its tensors are .*, not all of one of F64, F32"):
        LongNetLM.from_pretrained(tmp_path)


def test_a_loaded_model_holds_no_file_and_computes_what_a_subclass_adds(tmp_path) -> None:
    class Scaled(LongNetLM):
        def __init__(self, *given, **settings) -> None:
            super().__init__(*given, **settings)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    model = Scaled(**SIZES)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(256, (1, 20))
    loaded = [kind.from_pretrained(tmp_path) for kind in (LongNetLM, Scaled)]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert all(torch.equal(one(tokens), model(tokens)) for one in loaded)
    assert loaded[1].table.tolist() == [0.0, 1.0, 2.0]
    assert all(one.head.weight is one.embedding.weight and one.head.weight.requires_grad for one in loaded)
