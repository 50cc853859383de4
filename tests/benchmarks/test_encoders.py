from __future__ import annotations

import json

import pytest
import torch

from benchmarks import cases, comparisons
from benchmarks.command import main
from benchmarks.encoders import choose_encoders
from benchmarks.harness import Case, measure
from benchmarks.ratios import Row
from benchmarks.report import write_page

SMALL = {"tokens": 61, "heads": 2, "head_dim": 16, "segment_lengths": (16, 46), "dilation_rates": (1, 2),
         "head_layout": "blocked", "encoder_layers": 2, "dtype": "float32", "device": "cpu"}  # fmt: skip

# What the adapter relies on in a checkout, and one segment of attention.
FILES = {
    "__init__.py": "",
    "component/__init__.py": "",
    "component/dilated_attention.py": """
from torch import nn
from .flash_attention import flash_attn_func

class DilatedAttention(nn.Module):
    def __init__(self, args, embed_dim, num_heads, self_attention=False, subln=False):
        super().__init__()
        assert self_attention and not args.multiway and not args.xpos_rel_pos and args.layernorm_eps
        self.num_heads = num_heads
        self.project = nn.Linear(embed_dim, embed_dim) if subln else nn.Identity()

    def forward(self, query, key, value, is_causal=False):
        q, k, v = (self.project(x).unflatten(-1, (self.num_heads, -1)) for x in (query, key, value))
        return flash_attn_func(q, k, v, 0.0, None, None, is_causal)[0].flatten(2), None
""",
}


@pytest.fixture
def checkout(write_checkout):
    return write_checkout(FILES)


def test_the_gigapath_suite_measures_encoders_beside_torchscales(checkout, tmp_path, capsys, monkeypatch) -> None:
    small = [Case(**SMALL), Case(**SMALL, backward=True), Case(**(SMALL | {"encoder_layers": 0}), backward=True)]
    monkeypatch.setitem(cases.CASES, "gigapath", lambda device: iter(small))
    monkeypatch.setattr(comparisons, "measure", lambda *run: measure(*run, calls=1))
    results = tmp_path / "results.jsonl"
    command = ["gigapath", "--device", "cpu", "--out", str(results)]
    assert main([*command, "--torchscale", str(checkout)]) == 0
    printed = capsys.readouterr().out
    assert f"N=61 D=16 H=2 2 branches to {max(SMALL['segment_lengths'])} 2 layers blocked forward+backward" in printed
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [line["contender"] for line in lines] == ["ours", "ours, exact", "ours, exact fwd", "torchscale"] * 3
    assert all(line["milliseconds"] > 0 for line in (*lines[:9], lines[11]))
    assert {line["skipped"] for line in lines[9:11]} == {"measured in an encoder"}
    write_page(results, tmp_path / "page.md")
    assert "gigapath" in (tmp_path / "page.md").read_text()
    assert main([*command, "--only", "ours", "torchscale"]) == 1
    assert "needs --torchscale PATH" in capsys.readouterr().err
    assert main([*command, "--only", "ours, exact", "--cases", "forward"]) == 0


def test_contenders_of_an_encoder_give_outputs_or_every_gradient(checkout) -> None:
    for name, setup in choose_encoders(torchscale=checkout).items():
        assert setup(Case(**SMALL)).call().shape == (1, 61, 32)
        x, *weights = setup(Case(**SMALL, backward=True)).call()
        assert x.shape == (1, 61, 32)
        assert all(weight.isfinite().all() for weight in weights)
        assert name != "torchscale" or len(weights) == 2 * 12 + 2  # 10 per layer without what `subln` adds in FILES
    assert "give --torchscale PATH" in choose_encoders()["torchscale"](Case(**SMALL))


def test_contenders_without_layers_are_the_attention_alone(checkout) -> None:
    case = Case(**(SMALL | {"encoder_layers": 0, "head_layout": "blocked"}), backward=True)
    contenders = choose_encoders(torchscale=checkout)
    for name in ("ours", "torchscale"):
        grads = contenders[name](case).call()
        assert [x.numel() for x in grads] == [61 * 32] * 3


def test_an_encoders_flops_are_those_of_its_attention_and_its_linear_layers() -> None:
    attention = Case(**(SMALL | {"encoder_layers": 0})).flops
    assert Case(**SMALL).flops == 2 * (attention + 2 * 61 * 12 * 32**2)
    assert Case(**SMALL, backward=True).flops == 2 * (attention * 7 // 2 + 3 * 2 * 61 * 12 * 32**2)


def test_peak_memory_is_told_where_it_was_measured() -> None:
    case = Case(**(SMALL | {"device": "cuda"}))
    lines = {
        "ours": {"peak_bytes": 3 << 30, "milliseconds": 1.0, "tflops": 1.0},
        "torchscale": {"failed": "OutOfMemoryError"},
    }
    _, peaks = comparisons.tables([Row("gigapath", case, "a GPU", {**lines, "skips": {"skipped": "why"}})])
    assert peaks.head == ["case", "floor", "ours", "torchscale", "memory"]
    assert peaks.rows == [[case.title, "-", "3.00", "-", ""]]


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_gigapaths_encoder_runs_on_a_gpu(backward) -> None:
    case = next(case for case in cases.gigapath("cuda") if case.backward == backward)
    for setup in list(choose_encoders().values())[:3]:
        found = setup(case).call()
        assert all(x.isfinite().all() for x in (found if backward else [found]))
        torch.cuda.synchronize()
