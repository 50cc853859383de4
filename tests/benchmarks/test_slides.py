"""The suite `slides`: steps of a packed encoder beside torchscale's, slide by slide."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import slides
from benchmarks.command import main
from benchmarks.report import write_page

# What the suite relies on in a checkout.
FILES = {
    "__init__.py": "",
    "component/__init__.py": "",
    "component/dilated_attention.py": "",
    "architecture/__init__.py": "",
    "architecture/config.py": """
class EncoderConfig:
    def __init__(self, **settings):
        self.__dict__.update(settings)
        self.segment_length, self.dilated_ratio = map(eval, (self.segment_length, self.dilated_ratio))
""",
    "model/__init__.py": "",
    "model/LongNet.py": """
from fairscale.nn import checkpoint_wrapper, wrap
from timm.models.layers import drop_path
from torch import nn

class LongNetEncoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        assert args.flash_attention and len(args.segment_length) == len(args.dilated_ratio)
        layer = nn.Linear(args.encoder_embed_dim, args.encoder_embed_dim)
        self.layer = checkpoint_wrapper(layer) if args.checkpoint_activations else layer

    def forward(self, src_tokens, token_embeddings):
        assert src_tokens is None and token_embeddings.shape[0] == 1
        return {"encoder_out": self.layer(token_embeddings)}
""",
}


def test_the_slides_suite_measures_steps_beside_torchscales(write_checkout, tmp_path, capsys, monkeypatch) -> None:
    checkout, results = write_checkout(FILES), tmp_path / "results.jsonl"
    monkeypatch.setattr(slides, "_STEPS", 1)
    monkeypatch.setattr(slides, "_TINY_SIZES", {60: 2})
    monkeypatch.setattr(slides, "SIZES", {60: (2, 1e-9)})
    command = ["slides", "--device", "cpu", "--out", str(results)]
    assert main([*command, "--torchscale", str(checkout)]) == 0
    printed = capsys.readouterr().out
    assert "| 60 | ours, packed | 2 |" in printed
    assert "met: 60 tiles: 1e-09 times torchscale's slides per second, or better" in printed
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [(line["model"], line["slides"], line["recomputed"]) for line in lines] == [
        ("ours, packed", 2, False),
        ("torchscale, slide by slide", 2, False),
    ]
    write_page(results, tmp_path / "page.md")
    assert "Training steps of Prov-GigaPath's slide encoder" in (tmp_path / "page.md").read_text()
    assert main([*command, "--only", slides.TORCHSCALE]) == 1
    assert "needs --torchscale PATH" in capsys.readouterr().err
    assert main([*command, "--only", "theirs"]) == 1
    assert "--only takes names of" in capsys.readouterr().err


def test_a_step_without_memory_recomputes_layers_or_fails_alone(write_checkout, monkeypatch) -> None:
    options = slides.Options(torchscale=write_checkout(FILES))
    trial, real = slides.Trial(slides.TORCHSCALE, 40, 1), slides._steps

    def run_out(least: int):
        def steps(trial, options, *, recompute):
            if recompute < least:
                raise torch.OutOfMemoryError
            return real(trial, options, recompute=recompute)

        return steps

    monkeypatch.setattr(slides, "_STEPS", 1)
    monkeypatch.setattr(slides, "_steps", run_out(1))
    (found,) = slides._measure(trial, options)
    assert found["recomputed"]
    monkeypatch.setattr(slides, "_steps", run_out(2))
    (failed,) = slides._measure(trial, options)
    assert failed["failed"] == "out of memory"
    (table,) = slides._tables([found | {"on_machine": "a CPU"}, failed | {"on_machine": "a CPU"}])
    assert [row[-1] for row in table.rows] == ["layers recomputed", ""]
    assert list(slides._verdict([found, failed])) == []


@pytest.mark.gpu
def test_the_packed_step_of_gigapaths_encoder_runs_on_a_gpu() -> None:
    options = slides.Options(device="cuda")
    found = slides._steps(slides.Trial(slides.OURS, 2_000, 3), options, recompute=False)
    assert found["slides_per_second"] > 0
    assert found["peak_bytes"] > 0
