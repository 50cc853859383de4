"""The suites `capacity` and `techniques`, at sizes that a CPU takes in a moment."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import capacity, curves, step, techniques, training_step
from benchmarks.command import main
from benchmarks.report import write_page
from benchmarks.suite import Options
from benchmarks.training_step import OUT_OF_MEMORY, StepCase, attempt_step, step_in_a_process
from dilated_attention_pytorch.models.config import ModelConfig
from dilated_attention_pytorch.train.memory import MemoryOptions

from ..ranks import run_ranks

TINY = ModelConfig(
    vocab_size=32, d_model=16, num_heads=2, num_layers=1, segment_lengths=(16, 1 << 20), dilation_rates=(1, 8192)
)
PLAIN = MemoryOptions()
TILED = MemoryOptions(checkpointing="full", mlp_tile=64, loss_chunk=64)


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setattr(capacity, "SIZES", ("125m",))
    monkeypatch.setattr(capacity, "text_model", lambda size, **changes: TINY)
    monkeypatch.setattr(capacity, "REQUIRED", {"125m": 64})
    monkeypatch.setattr(capacity, "OFFLOADED", {"125m": 128})
    monkeypatch.setattr(capacity, "DENSE", ("125m", 64))
    monkeypatch.setattr(capacity, "working_eight_bit", lambda device: "adamw8bit-torchao")
    monkeypatch.setattr(capacity, "choices", lambda **_: [PLAIN, TILED, replace(TILED, offload=True)])
    monkeypatch.setattr(capacity, "step_in_a_process", lambda case, timeout: attempt_step(case))


def test_a_step_in_a_process_of_its_own_is_measured() -> None:
    found = step_in_a_process(StepCase(config=TINY, tokens=64, options=PLAIN, device="cpu"))
    assert found["tokens_per_second"] == pytest.approx(64 / found["seconds"])
    assert 0 < found["loss"] < 10
    assert found["peak_bytes"] is None


def test_dense_attention_takes_the_place_of_the_dilated_one() -> None:
    dilated, dense = (
        attempt_step(StepCase(config=TINY, tokens=64, options=PLAIN, device="cpu", dense=flag))
        for flag in (False, True)
    )
    assert dilated["loss"] != dense["loss"]
    assert dilated["loss"] == pytest.approx(dense["loss"], rel=0.2)


def test_a_step_that_fails_says_why(monkeypatch) -> None:
    case = StepCase(config=TINY, tokens=64, options=MemoryOptions(float8=True), device="cpu")
    assert attempt_step(case)["failed"].startswith("ValueError: float8 products need a GPU")
    nan = lambda *args: training_step.torch.tensor(float("nan"), requires_grad=True)  # noqa: E731
    monkeypatch.setattr(training_step, "loss", nan)
    failed = attempt_step(StepCase(config=TINY, tokens=64, options=PLAIN, device="cpu"))["failed"]
    assert failed.startswith("FloatingPointError: the loss of 64 tokens is not finite")


def test_capacity_measures_every_kind_of_row(tiny, tmp_path, capsys) -> None:
    results = tmp_path / "results.jsonl"
    flags = ["capacity", "--device", "cpu", "--out", str(results)]
    assert main([*flags, "--sizes", "125m", "--cap", "0.6"]) == 0
    printed = capsys.readouterr().out
    assert "125m required: 64 tokens, about 20 s on an H200" in printed
    assert "6 rows, each in a process of its own" in printed
    assert "| model | what | tokens |" in printed
    assert "tokens/s of this attention over those of dense attention" in printed
    _, *lines = map(json.loads, results.read_text().splitlines())
    assert [line["kind"] for line in lines] == ["required", "dilated", "dense", "longest", "uncapped", "offloaded"]
    assert [line["tokens"] for line in lines][:3] == [64] * 3
    assert lines[3]["tokens"] == lines[4]["tokens"] > 128 == lines[5]["tokens"]
    assert lines[5]["options"]["offload"]
    assert all(line["loss"] > 0 for line in lines)
    assert main([*flags, "--cases", "125m", "required"]) == 0
    assert [json.loads(line).get("kind") for line in results.read_text().splitlines()][7:] == [None, "required"]


def test_a_longest_length_that_runs_out_of_memory_is_tried_shorter(tiny, tmp_path, monkeypatch) -> None:
    tried: list[int] = []

    def fail_twice(case: StepCase, timeout: float) -> dict[str, object]:
        tried.append(case.tokens)
        return {"failed": OUT_OF_MEMORY} if len(tried) < 3 else attempt_step(case)

    monkeypatch.setattr(capacity, "step_in_a_process", fail_twice)
    assert main(["capacity", "--device", "cpu", "--cases", "longest", "--cap", "0.6"]) == 0
    assert len(tried) == 3
    assert tried == sorted(tried, reverse=True)


@pytest.mark.parametrize("size", ["125m", "8b"])
def test_the_branches_of_the_longest_sequence_connect_all_of_it(size) -> None:
    options = MemoryOptions(precision="bf16", parameters="bf16", checkpointing="full", mlp_tile=4096, loss_chunk=2048)
    config, fit = capacity.longest_with_full_reach(size, 80 << 30, [replace(options, optimizer="adamw8bit-torchao")])
    assert max(config.segment_lengths) >= fit.tokens > max(config.segment_lengths) // 2
    assert fit.needed <= 80 << 30
    assert config == capacity._model(size, fit.tokens)


def test_every_required_length_fits_with_branches_over_all_of_it(monkeypatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(capacity.torch.cuda, "mem_get_info", lambda: (139 * gib, 139 * gib))
    monkeypatch.setattr(capacity, "host_memory", lambda: SimpleNamespace(available=120 * gib))
    for kind, lengths in (("required", capacity.REQUIRED), ("offloaded", capacity.OFFLOADED)):
        for size, tokens in lengths.items():
            row = capacity._row_to_measure(size, kind, "adamw8bit-torchao", Options(device="cuda"))
            [fit] = row.fits
            assert fit.tokens == tokens <= max(row.config.segment_lengths)
            assert fit.needed <= (80 if kind == "required" else 137) * gib
            assert fit.footprint.host <= (0 if kind == "required" else 110 * gib)


def test_each_technique_stands_beside_what_it_is_held_against(tmp_path, capsys) -> None:
    results = tmp_path / "results.jsonl"
    flags = ["--only", "full checkpointing, offloaded", "float8 products", "--out", str(results)]
    assert main(["techniques", "--device", "cpu", "--tokens", "64", *flags]) == 0
    printed = capsys.readouterr().out
    assert "| full checkpointing, offloaded | full checkpointing |" in printed
    assert "float8 products need a GPU" in printed
    _, *lines = map(json.loads, results.read_text().splitlines())
    order = ["float32", "bf16 autocast", "full checkpointing", "full checkpointing, offloaded", "float8 products"]
    assert [line["technique"] for line in lines] == order
    assert lines[3]["options"]["offload"]
    assert lines[3]["options"]["precision"] == "bf16"


def test_the_page_has_both_tables(tmp_path) -> None:
    measured = {"seconds": 2.0, "tokens_per_second": 32.0, "loss": 4.0, "reserved_bytes": 3 << 30, "host_bytes": 1}
    step = {"suite": "capacity", "size": "125m", "tokens": 64, "cap_bytes": 80 << 30, "options": {}, **measured}
    sizes = {"peak_bytes": 2 << 30, "held_bytes": 1 << 30, "predicted_bytes": 2 << 30}
    base = {"suite": "techniques", "technique": "float32", "against": "", "claimed": "", "size": "350m", "tokens": 64}
    half = {
        "technique": "bf16 autocast",
        "against": "float32",
        "claimed": "half",
        "peak_bytes": 3 << 29,
        "seconds": 1.0,
    }
    attention = {
        "suite": "short", "contender": "ours", "tokens": 512, "heads": 1, "head_dim": 64, "segment_lengths": [512],
        "dilation_rates": [1], "milliseconds": 1.0, "tflops": 1.0, "peak_bytes": 1,
    }  # fmt: skip
    lines = [
        {"machine": {"gpu": "A GPU"}},
        attention,
        step | sizes | {"kind": "required", "longest_segment": 64, "pinned_bytes": 3 << 29},
        step | sizes | {"kind": "required", "tokens": 65_536},  # without full reach, which hides no row that has it
        step | {"kind": "longest", "failed": OUT_OF_MEMORY, "predicted_bytes": 1 << 30},
        base | {"options": {}} | sizes | measured,
        base | {"options": {}} | sizes | measured | half,
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| 125m | required, 80 GiB | 64 | 32 | 2.00 | 2.0 | 2.0 | 1.000 | 1.5 |" in page
    assert "65,536" not in page
    assert "| 125m | longest, 80 GiB | 64 |  | out of memory |" in page
    assert "met: the memory model within 5% of the measured peak; farthest 1.000" in page
    assert "| bf16 autocast | float32 | 1.50 | x 0.75 | x 0.50 | x 1.00 | 1000.0 | x 0.50 | 1.333 | half |" in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("capacity --sizes 7b", "--sizes takes names of '125m'"),
        ("capacity --sizes 8b --cases longest", "choose from 8b uncapped, 8b offloaded"),
        ("techniques --only magic", "--only takes names of 'float32'"),
    ],
)
def test_what_cannot_be_measured_says_why(flags, message, capsys) -> None:
    assert main([*flags.split(), "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err


def test_a_technique_is_held_against_one_before_it() -> None:
    every = techniques.techniques(1024, "adamw8bit-torchao")
    names = [one.name for one in every]
    assert all(names.index(one.against) < names.index(one.name) for one in every[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpointing": "selective", "loss_chunk": 2048},
        {"compile": True, "loss_chunk": 2048},
        {"compile": True, "checkpointing": "selective", "loss_chunk": 2048},
        {"checkpointing": "full", "mlp_tile": 4096, "loss_chunk": 2048, "parameters": "bf16"},
        {"checkpointing": "full", "mlp_tile": 4096, "loss_chunk": 2048, "parameters": "bf16", "offload": True},
    ],
    ids=str,
)
def test_the_memory_model_is_within_a_tenth_of_a_real_step(changes) -> None:
    from dilated_attention_pytorch.train.footprint import footprint

    config = ModelConfig(vocab_size=8192, num_layers=6)
    options = MemoryOptions(precision="bf16", **changes)
    found = step_in_a_process(StepCase(config=config, tokens=65_536, options=options))
    assert footprint(config, 65_536, options).peak / found["peak_bytes"] == pytest.approx(1.0, abs=0.1)


def test_steps_stand_beside_those_that_users_would_take_instead(monkeypatch, tmp_path, capsys) -> None:
    pytest.importorskip("transformers", reason="a Llama is one of the models")
    monkeypatch.setattr(step, "step_in_a_process", lambda case, timeout: attempt_step(case))
    monkeypatch.setattr(step, "SIZES", {"125m": (256, 1e-9), "350m": (512, 0.5)})
    results = tmp_path / "results.jsonl"
    assert main(["step", "--device", "cpu", "--out", str(results)]) == 0
    records = [json.loads(line) for line in results.read_text().splitlines()][1:]
    assert [x["model"] for x in records] == [step.OURS, step.PLAIN, step.DENSE, step.LLAMA]
    assert all(x["share"] == pytest.approx(x["flops"] / x["seconds"] / x["ceiling"]) for x in records)
    ours, _, dense, llama = records
    assert dense["flops"] > ours["flops"]  # over pairs that dilated attention does not see
    assert llama["parameters"] == pytest.approx(ours["parameters"], rel=0.1)
    printed = capsys.readouterr().out
    assert "| 125m: Hugging Face Llama | 256 |" in printed
    assert "met: 125m, 256 tokens: 0.00 of the ceiling" in printed
    assert main(["step", "--device", "cpu", "--only", "GPT"]) == 1
    names = "'ours', 'ours, plain', 'dense attention', 'Hugging Face Llama'"
    assert f"--only takes names of {names}; got 'GPT'" in capsys.readouterr().err


def test_fused_and_plain_pieces_train_alike_on_real_text(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(curves, "STEPS", 25)
    results = tmp_path / "results.jsonl"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "poem.txt").write_text("the rain in spain stays mainly in the plain, \n" * 40)
    flags = ["curves", "--device", "cpu", "--data", str(tmp_path / "text"), "--out", str(results)]
    for variant in (curves.FUSED, curves.PLAIN, curves.EXACT):
        assert main([*flags, "--only", variant]) == 0
    records = [x for x in map(json.loads, results.read_text().splitlines()) if "suite" in x]
    fused, plain, exact = (x["losses"] for x in records)
    assert len(fused) == 25
    assert plain[-1] < plain[0] - 1
    assert plain[0] == pytest.approx(exact[0], rel=1e-3)
    assert fused == pytest.approx(plain, rel=0.02)
    capsys.readouterr()
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "met: fused and compiled: final loss within 0.5% of plain" in page
    assert f"| plain | {records[1]['final_loss']:.4f} | +0.000% |" in page
    assert main([*flags, "--only", "half"]) == 1
    assert "--only takes names of 'fused and compiled', 'plain', 'float32'; got 'half'" in capsys.readouterr().err


def test_two_ranks_have_the_losses_of_one_process(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(step.step_ranks, "run_on_ranks", run_ranks)
    results = tmp_path / "results.jsonl"
    assert main(["step", "--ranks", "--device", "cpu", "--out", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "NOT MET" not in printed
    assert "| fsdp, muon | 256 | 5 |" in printed
    records = [json.loads(line) for line in results.read_text().splitlines()][1:]
    assert [x["model"] for x in records] == list(step.step_ranks.WAYS)
    assert all(x["losses"][-1] < x["losses"][0] - 0.5 for x in records)
    assert all(x["tokens_per_second"] is None for x in records)  # two ranks on one CPU say nothing about speed
    off = {**records[0], "losses": [2 * loss for loss in records[0]["losses"]]}
    assert [verdict.met for verdict in step.SUITE.verdict([records[0], off])] == [True, False]
