"""Stages: what a step's number says about it, patterns that change under the same weights, and runs that follow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    LongNet,
    LongNetLM,
    ModelConfig,
    RingMultiheadDilatedAttention,
    SparsePatternConfig,
    update_attention_config,
)
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train import Stage, TrainConfig
from dilated_attention_pytorch.train.checkpoint import list_checkpoints
from dilated_attention_pytorch.train.stages import has_pattern, read_stages, stage_at

from ..ranks import run_ranks

FIRST = {"sequence_length": 16, "segment_lengths": (8, 16), "dilation_rates": (1, 2), "batch_size": 4}
SECOND = {"sequence_length": 32, "segment_lengths": (8, 16, 32), "dilation_rates": (1, 2, 4), "batch_size": 2}
STAGES = [{**FIRST, "learning_rate": 1e-2, "steps": 3}, {**SECOND, "learning_rate": 1e-3, "steps": 5}]
FLAGS = """
    --d-model 16 --num-heads 2 --num-layers 1 --warmup-steps 2 --validate-every 2 --checkpoint-every 2
    --sample-bytes 4 --device cpu
""".split()  # noqa: SIM905


# What a stage is


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, r"batch_size must be a whole number .* got 1\.5"),
        ({"steps": True}, "steps must be a whole number of at least 1, got True"),
        ({"learning_rate": 0.0}, r"learning_rate must be a finite number above 0, got 0\.0"),
        ({"learning_rate": float("nan")}, "above 0, got nan"),
        ({"dilation_rates": (1,)}, "must pair up, got 2 lengths"),
        ({"segment_lengths": (0, 8)}, "segment_length must be a whole number of at least 1"),
        ({"rate": 3}, "this one has unknown rate"),
        ({"max_seq_len": 16}, "max_seq_len and sequence_length both say"),
        ({"epochs": 2}, "epochs and steps both say"),
    ],
)
def test_a_stage_that_is_wrong_is_refused(change, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Stage.of(STAGES[0] | change)


def test_a_stage_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="has no batch_size, learning_rate and unknown lr"):
        Stage.of({name: value for name, value in STAGES[0].items() if "a" not in name or name == "dilation_rates"}
                 | {"lr": 1, "sequence_length": 3, "segment_lengths": [4], "dilation_rates": [1]})  # fmt: skip
    with pytest.raises(ValueError, match="epochs=2 need a dataset"):
        Stage.of({**FIRST, "learning_rate": 1.0, "epochs": 2})
    with pytest.raises(TypeError, match="a mapping of its settings, got list"):
        Stage.of([1, 2])


def test_every_step_has_one_stage_and_steps_of_a_stage_are_in_order() -> None:
    stages = [Stage.of(stage) for stage in STAGES]
    found = [stage_at(stages, step) for step in range(1, 11)]
    assert found == [(0, 1), (0, 2), (0, 3), *[(1, step) for step in range(1, 8)]]
    with pytest.raises(ValueError, match="at least one stage"):
        stage_at([], 1)


def test_a_stage_warms_up_to_its_own_rate_and_ends_at_a_tenth() -> None:
    stage = Stage.of(STAGES[0] | {"steps": 100})
    rates = [stage.learning_rate_at(step, warmup_steps=10) for step in range(1, 121)]
    assert max(rates) == rates[9] == 1e-2
    assert rates[4] == pytest.approx(5e-3)
    assert rates[99] == pytest.approx(1e-3)
    assert rates[119] == rates[99]
    assert stage.learning_rate_at(1) == pytest.approx(1e-2, rel=1e-2)


def test_stages_are_read_from_toml_and_json(tmp_path) -> None:
    as_json, as_toml = tmp_path / "stages.json", tmp_path / "stages.toml"
    expected = tuple(Stage.of(stage) for stage in STAGES)
    for written in (STAGES, {"stages": STAGES}):
        as_json.write_text(json.dumps(written))
        assert read_stages(as_json) == expected
    as_toml.write_text(toml_of(STAGES))
    assert read_stages(as_toml) == expected


def toml_of(stages: list[dict]) -> str:
    tables = [[f"{name} = {list(x) if isinstance(x, tuple) else x}" for name, x in stage.items()] for stage in stages]
    return "\n".join(line for table in tables for line in ("[[stages]]", *table))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("stages.toml", "[[stages]", "does not hold the stages of a run"),
        ("stages.toml", "[[stages]]\nsteps = 3", "this one has no sequence_length"),
        ("stages.toml", "steps = 3", "it has steps besides stages"),
        ("stages.json", "[]", "it has no list of stages"),
        ("stages.json", "[3]", "a mapping of its settings, got int"),
        ("stages.yaml", "", r"neither in \.toml nor in \.json"),
    ],
)
def test_a_file_without_stages_is_refused(tmp_path, name, text, message) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((TypeError, ValueError), match=message):
        read_stages(tmp_path / name)


# Patterns that change


def model_of(**changes) -> LongNetLM:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 2, "segment_lengths": (8, 16), "dilation_rates": (1, 2)}
    return LongNetLM(**(sizes | changes)).double()


def test_a_staggered_model_stays_staggered_under_another_pattern() -> None:
    model = LongNetLM(d_model=16, num_heads=2, num_layers=3, segment_lengths=(4,), dilation_rates=(1,), stagger=True)
    first, second = map(Stage.of, STAGES)
    update_attention_config(model, first)
    assert [layer.self_attn.segment_lengths for layer in model.layers] == [(8, 16), (11, 22), (8, 16)]
    assert has_pattern(model, first)
    assert not has_pattern(model, second)
    longer = Stage.of(STAGES[0] | {"segment_lengths": (11, 22)})
    assert not has_pattern(model, longer)
    plain = LongNetLM(d_model=16, num_heads=2, num_layers=3, segment_lengths=(11, 22), dilation_rates=(1, 2))
    assert has_pattern(plain, longer)
    assert not has_pattern(plain, first)


def test_layers_are_told_apart_by_their_numbers_where_both_patterns_are_one() -> None:
    model = LongNetLM(d_model=16, num_heads=2, num_layers=2, segment_lengths=(4,), dilation_rates=(1,), stagger=True)
    for layer in model.layers:
        layer.self_attn.attention.spec = model.config.spec_of(1)
    update_attention_config(model, STAGES[0])
    assert [layer.self_attn.segment_lengths for layer in model.layers] == [(8, 16), (11, 22)]
    with pytest.raises(ValueError, match="use segments of 3 tokens or more, or leave stagger out"):
        update_attention_config(model, [2, 16], [1, 2])


@pytest.mark.parametrize("stagger", [False, True])
def test_a_longnet_of_transformers_is_saved_with_its_updated_pattern_and_generates(stagger, tmp_path) -> None:
    hf = pytest.importorskip("dilated_attention_pytorch.models.hf", reason="needs the extra hf")
    model = hf.LongNetForCausalLM.from_longnet(model_of(stagger=stagger)).eval()
    tokens = torch.randint(256, (1, 20))
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model.generate(tokens, **settings)
    update_attention_config(model, [4, 12], [1, 3])
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = hf.LongNetForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(loaded(tokens).logits, expected)
    assert torch.equal(model.to_longnet()(tokens), expected)
    assert torch.equal(model.generate(tokens, **settings), loaded.generate(tokens, **settings, use_cache=False))


@pytest.mark.parametrize("positions", ["rotary", "xpos"])
def test_an_updated_model_is_one_that_was_made_with_the_pattern(positions) -> None:
    tokens = torch.randint(256, (2, 50))
    model = model_of(positions=positions, use_pattern_cache=True)
    old = model(tokens)
    new_pattern = {"segment_lengths": [12, 40], "dilation_rates": [1, 3]}
    fresh = model_of(positions=positions, **new_pattern)
    update_attention_config(model, **new_pattern)
    torch.testing.assert_close(model(tokens), fresh(tokens))
    assert not torch.allclose(model(tokens), old)
    assert model.config == fresh.config
    assert "segment_lengths=[12, 40]" in repr(model)
    assert "segment_lengths=[8, 16]" not in repr(model)
    update_attention_config(model, [8, 16], [1, 2])
    torch.testing.assert_close(model(tokens), old)


def test_an_updated_model_is_saved_with_its_pattern_and_refuses_old_caches(tmp_path) -> None:
    model, tokens = model_of().float().eval(), torch.randint(256, (1, 20))
    cache = model.new_cache(1)
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
    update_attention_config(model, Stage.of(STAGES[1]))
    with torch.no_grad(), pytest.raises(ValueError, match="make it with new_cache"):
        model(tokens[:, 4:5], cache=cache)
    torch.testing.assert_close(
        model.generate(tokens, 3, temperature=0.0), model.generate(tokens, 3, temperature=0.0, use_cache=False)
    )
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(LongNetLM.from_pretrained(tmp_path)(tokens), model(tokens))


def test_every_attention_within_a_module_is_updated() -> None:
    torch.manual_seed(0)
    parts = nn.ModuleDict(
        {
            "one": DilatedAttention([4], [1], head_layout="grouped"),
            "two": RingMultiheadDilatedAttention(16, 2, [4, 8], [1, 2]),
            "three": LongNet(d_model=16, num_heads=2, num_layers=1, num_decoder_layers=1),
        }
    )
    update_attention_config(parts, {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "epochs": 3})
    found = [part for part in parts.modules() if isinstance(part, DilatedAttention)]
    assert len(found) == 4
    assert {part.segment_lengths for part in found} == {(8, 32)}
    assert [part.spec.head_layout for part in found] == ["grouped"] + 3 * ["interleaved"]
    assert parts["three"].config.dilation_rates == (1, 4)


def test_a_compiled_model_follows_its_pattern() -> None:
    model, tokens = model_of(num_layers=1), torch.randint(256, (1, 40))
    for layer in model.layers:
        layer.compile(backend="eager")
    model(tokens)
    for pattern in (([12, 40], [1, 3]), ([8, 16], [1, 2])):
        update_attention_config(model, *pattern)
        fresh = model_of(num_layers=1, segment_lengths=pattern[0], dilation_rates=pattern[1])
        torch.testing.assert_close(model(tokens), fresh(tokens))


def test_a_pattern_that_a_part_cannot_take_changes_nothing() -> None:
    model = model_of(positions="xpos")
    with pytest.raises(ValueError, match=r"xPos over .* beyond float32"):
        update_attention_config(model, [1024, 99_991], [1, 2])
    tiles = SparsePatternConfig("local_window", sparsity_ratio=0.5, block_size=8)
    sparse = nn.ModuleList([DilatedAttention([8], [1]), BlockSparseRingDilatedAttention([8], [1], sparse_config=tiles)])
    wrong = ((sparse, ([8, 16], [1])), (model, ([8, 0], [1, 1])), (model, ([8, 16],)), (nn.Linear(2, 2), ([8], [1])))
    messages = ["must pair up", "of at least 1, got 0", "segment_lengths need dilation_rates", "no dilated attention"]
    for (part, pattern), message in zip(wrong, messages):
        with pytest.raises((TypeError, ValueError), match=message):
            update_attention_config(part, *pattern)
    with pytest.raises(TypeError, match="leave the third argument out"):
        update_attention_config(model, STAGES[0], [1, 2])
    with pytest.raises(ValueError, match="lack dilation_rates: got segment_lengths"):
        update_attention_config(model, {"segment_lengths": [4]})
    assert model.config == model_of(positions="xpos").config
    assert {part.segment_lengths for part in sparse} == {(8,)}


# Runs with stages


def test_a_run_begins_with_its_first_stage_and_has_the_steps_of_all() -> None:
    config = TrainConfig(stages=STAGES)
    assert (config.steps, config.sequence_length, config.batch_size, config.learning_rate) == (8, 16, 4, 1e-2)
    assert config.model.segment_lengths == (8, 16)
    assert [config.stage_at(step)[0].sequence_length for step in (1, 3, 4, 8, 9)] == [16, 16, 32, 32, 32]
    assert TrainConfig(stages=STAGES, steps=5).steps == 5
    assert TrainConfig().steps == 250


def test_a_run_without_stages_is_one_stage() -> None:
    config = TrainConfig(steps=20, batch_size=3, learning_rate=0.1)
    stage, step = config.stage_at(7)
    assert (stage.steps, stage.batch_size, stage.learning_rate, step) == (20, 3, 0.1, 7)
    assert (stage.segment_lengths, stage.sequence_length) == (config.model.segment_lengths, 512)


def test_the_config_of_a_staged_run_is_read_as_it_was_written(tmp_path) -> None:
    config = TrainConfig(stages=STAGES, device="cpu")
    (tmp_path / "config.json").write_text(config.to_json())
    assert TrainConfig.from_json(tmp_path / "config.json") == config


def test_what_stages_say_is_not_said_beside_them() -> None:
    with pytest.raises(ValueError, match="the stages decide batch_size, which is 4 in the first, got 7: leave it out"):
        TrainConfig(stages=STAGES, batch_size=7)
    xpos = ModelConfig(d_model=16, num_heads=2, num_layers=1, positions="xpos", scale_base=16.0)
    wrong = [STAGES[0], STAGES[1] | {"segment_lengths": (8, 9973), "dilation_rates": (1, 2)}]
    with pytest.raises(ValueError, match=r"xPos over .* beyond float32"):
        TrainConfig(stages=wrong, model=xpos)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (folder / "stages.toml").write_text(toml_of(STAGES))
    return folder


@pytest.fixture(scope="module")
def flags(folder) -> list[str]:
    return ["train", "--data", str(folder / "text.txt"), "--stages", str(folder / "stages.toml"), *FLAGS]


@pytest.fixture(scope="module")
def whole(folder, flags) -> Path:
    """A run of one process that never stopped."""
    assert main([*flags, "--out", str(folder / "whole"), "--monitors", "jsonl"]) == 0
    return folder / "whole"


def records(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def test_a_staged_run_learns_at_each_stages_rate_and_saves_each_stages_pattern(whole) -> None:
    assert [record["step"] for record in records(whole)] == list(range(1, 9))
    rates = [record["learning_rate"] for record in records(whole, "log.jsonl")]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-3])
    assert rates[3:5] == pytest.approx([5e-4, 1e-3])
    assert rates[7] == pytest.approx(1e-4)
    assert LongNetLM.from_pretrained(list_checkpoints(whole)[-1]).config.segment_lengths == (8, 16, 32)


def test_a_staged_run_that_is_resumed_in_any_stage_is_the_same_run(folder, flags, whole) -> None:
    for steps in (3, 5):
        run = folder / f"from-{steps}"
        assert main([*flags, "--out", str(run), "--steps", str(steps)]) == 0
        saved = LongNetLM.from_pretrained(list_checkpoints(run)[-1]).config
        assert saved.segment_lengths == (8, 16, 32)[: 2 + (steps > 3)]
        assert main(["train", "--resume", str(run), "--steps", "8"]) == 0
        assert losses(run) == losses(whole)
        weights = [(list_checkpoints(one)[-1] / "model.safetensors").read_bytes() for one in (run, whole)]
        assert weights[0] == weights[1]


def test_each_stage_of_a_compiled_run_is_compiled_for_its_own_lengths(folder, flags, whole, monkeypatch) -> None:
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda reset=torch.compiler.reset: resets.append(reset()))
    run = folder / "compiled"
    assert main([*flags, "--out", str(run), "--steps", "5", "--compile", "--compile-backend", "eager"]) == 0
    assert len(resets) == 1
    assert main(["train", "--resume", str(run), "--steps", "8"]) == 0  # in the second stage
    assert len(resets) == 2
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_a_finished_staged_run_that_is_asked_for_again_samples_with_its_last_pattern(folder, flags, whole) -> None:
    again = shutil.copytree(whole, folder / "again")
    (sample,) = (again / "samples").iterdir()
    sample.unlink()
    assert main([*flags, "--out", str(again), "--auto-resume", "--monitors", "jsonl"]) == 0
    assert sample.read_text() == (whole / "samples" / sample.name).read_text()


def test_flags_that_stages_decide_are_refused(folder, flags, capsys) -> None:
    assert main([*flags, "--out", str(folder / "none"), "--batch-size", "2", "--segment-lengths", "8"]) == 1
    assert "the stages decide batch_size, which is 4 in the first, got 2: leave it out" in capsys.readouterr().err
    assert main(["train", "--out", str(folder / "none"), "--stages", "absent.toml"]) == 1
    assert "no file absent.toml" in capsys.readouterr().err
    assert not (folder / "none").exists()


def test_ranks_that_share_sequences_change_stages_alike(folder, flags, whole) -> None:
    """Two ranks, a checkpoint on the border that is written while the next stage goes on, then one process."""
    run = folder / "ranks"
    options = ["--sequence-parallel", "2", "--checkpoint-every", "3", "--steps", "6", "--monitors", "jsonl"]
    ended_well, printed = run_ranks(2, "dilated_attention_pytorch.cli", *flags, "--out", str(run), *options)
    assert ended_well, printed
    assert "stage    16 tokens, (8, 16) / (1, 2), from step 1" in printed
    assert "stage    32 tokens, (8, 16, 32) / (1, 2, 4), from step 4" in printed
    assert losses(run) == pytest.approx(losses(whole)[:6], rel=1e-5)
    traffic = [record["branch_bytes"] for record in records(run, "log.jsonl")]
    assert [sorted(one) for one in (traffic[2], traffic[3])] == [["w16 r2", "w8 r1"], ["w16 r2", "w32 r4", "w8 r1"]]
    border, last = list_checkpoints(run)
    assert json.loads((border / "config.json").read_text())["segment_lengths"] == [8, 16]
    assert json.loads((last / "config.json").read_text())["segment_lengths"] == [8, 16, 32]
    shutil.rmtree(last)
    resumed = ["train", "--resume", str(run), "--sequence-parallel", "1", "--steps", "8"]
    assert main(resumed) == 0
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
