"""A trained run as a folder of transformers: the same logits, and the same tokens."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train.run_folder import list_checkpoints
from dilated_attention_pytorch.train.tokenizer import read_tokenizer

from .test_data import write_tokenizer
from .test_train import FLAGS

TEXT = "né €  jumps\n\tover"


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_transformers_loads_what_export_writes(tmp_path, has_tokenizer, capsys, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    file = write_tokenizer(tmp_path / "words.json") if has_tokenizer else None
    flags = list(FLAGS)
    if has_tokenizer:  # and all that later models do differently
        later = "--norm rms --activation swiglu --qk-norm --logit-soft-cap 15 --no-tie-weights --stagger"
        flags += ["--tokenizer", str(file), *later.split()]
    run, folder = tmp_path / "run", tmp_path / "deep" / "hf"
    assert main(["train", "--data", str(tmp_path / "text.txt"), "--out", str(run), "--steps", "4", *flags]) == 0
    assert main(["export", str(run), "--hf", str(folder)]) == 0
    newest = list_checkpoints(run)[-1]
    assert f"{newest} is now in {folder}" in capsys.readouterr().out
    model, plain = transformers.AutoModelForCausalLM.from_pretrained(folder), LongNetLM.from_pretrained(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(TEXT).input_ids
    assert tokens == read_tokenizer(file).encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    row = torch.tensor([tokens])
    torch.testing.assert_close(model(row).logits, plain.eval()(row))
    pipe = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    (said,) = pipe(TEXT, max_new_tokens=9, do_sample=False, stop_strings=["\0\1"], tokenizer=tokenizer)
    new = plain.generate(row, 9, temperature=0)[0, len(tokens) :]
    assert said["generated_text"] == TEXT + tokenizer.decode(new)
    monkeypatch.setattr("transformers.cli.transformers.app", lambda: None)
    runpy.run_module("dilated_attention_pytorch.models.hf", run_name="__main__")
    served = sys.modules["transformers"].LongNetForCausalLM  # where `transformers serve` looks for it
    assert type(served.from_pretrained(folder)) is type(model)
    assert {path.name for path in folder.parent.iterdir()} == {"hf"}
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode

    assert main(["export", str(newest), "--hf", str(folder)]) == 1
    assert f"--hf needs a folder that is new or empty, and {folder} is not: name another" in capsys.readouterr().err


def test_export_does_not_replace_the_folder_it_is_called_in(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "--hf", "."]) == 1
    assert "--hf cannot write the current folder: name a new one" in capsys.readouterr().err


def test_export_says_what_is_missing(tmp_path, capsys, monkeypatch) -> None:
    assert main(["export", str(tmp_path / "none"), "--hf", str(tmp_path / "hf")]) == 1
    assert "name the folder of save_pretrained, of a checkpoint or of a run" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith("dilated_attention_pytorch.models.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", str(tmp_path), "--hf", str(tmp_path / "hf")]) == 1
    assert "models.hf needs transformers: pip install 'longnet-dilated-attention[hf]'" in capsys.readouterr().err
