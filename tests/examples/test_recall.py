"""The recall task: its sequences are right, who can solve it and who cannot, and lessons run."""

from __future__ import annotations

import json

import pytest
import torch

from dilated_attention_pytorch.core.block_layout import allowed_pairs, keys_seen, layout_for
from dilated_attention_pytorch.core.pattern import dense_mask
from examples.recall import (
    LAYERS,
    LONGNET,
    REPEATS,
    WINDOW,
    Lesson,
    Pupil,
    Task,
    keys_per_row,
    longnet_attention,
    main,
    reach,
    run_recall,
    window_attention,
)

CPU = torch.device("cpu")


def sees(attention, tokens: int) -> torch.Tensor:
    """`(tokens, tokens)` bool: what a row of a causal layer sees, in any head."""
    spec, offsets = attention.spec, attention.spec.offsets(REPEATS)
    mask = dense_mask(spec, offsets, tokens, is_causal=True)  # (branches, heads, tokens, tokens)
    if attention.sparse_config is not None:
        layout = layout_for(spec, tokens, offsets, attention.sparse_config, True, CPU)
        mask = mask & torch.stack([allowed_pairs(layout, spec, offsets, b, tokens)[0] for b in range(len(mask))])
    return mask.any(1).any(0)


def reachable(attention, tokens: int) -> torch.Tensor:
    """What a row depends on after all layers."""
    one = (sees(attention, tokens) | torch.eye(tokens, dtype=torch.bool)).float()
    return torch.linalg.matrix_power(one, LAYERS) > 0


@pytest.mark.parametrize("copies", [1, REPEATS])
def test_the_answer_is_the_one_fact_with_the_key_that_is_asked_for(copies) -> None:
    task = Task()
    text, answers, places = task.batch(256, 16, seed=3, copies=copies)
    first_question = task.fillers + task.keys * task.values
    for row, facts, where in zip(text.tolist(), answers.tolist(), places.tolist()):
        planted = [token for token in row if task.fillers <= token < first_question]
        keys = [(token - task.fillers) // task.values for token in planted]
        assert len(planted) == task.facts * copies
        asked = row[-task.asked_rows :]
        for index, (fact, place) in enumerate(zip(facts, where)):
            assert row[place : place + copies] == [fact] * copies
            assert place + copies <= 128  # in the first half
            key = (fact - task.fillers) // task.values
            assert keys.count(key) == copies
            assert asked[index * REPEATS : (index + 1) * REPEATS] == [first_question + key] * REPEATS
        assert max(row[: -task.asked_rows]) < first_question
    again, _, _ = task.batch(256, 16, seed=3, copies=copies)
    assert torch.equal(text, again)
    assert not torch.equal(text, task.batch(256, 16, seed=4, copies=copies)[0])


def test_longnet_reaches_every_fact_and_the_window_none_though_it_costs_no_less() -> None:
    tokens, task = 1024, Task()
    answering = torch.arange(tokens - task.asked_rows, tokens)[REPEATS - 1 :: REPEATS]
    longnet, window = (reachable(make(tokens), tokens)[answering] for make in (longnet_attention, window_attention))
    assert longnet[:, : tokens // 2].all()
    assert not window[:, : tokens // 2].any()
    assert window[-1].nonzero().min() >= tokens - reach(WINDOW, tokens)
    # And not only by way of rows that cannot know the question: one of its rows sees the fact, the last one that row.
    direct = sees(longnet_attention(tokens), tokens)
    for row in answering.tolist():
        asked = direct[row - REPEATS + 1 : row + 1]
        assert asked[:, : tokens // 2].any(0).all()
        assert direct[row, row - REPEATS + 1 : row + 1].all()


def test_the_window_sees_all_of_the_shortest_sequences() -> None:
    assert sees(window_attention(64), 64).equal(torch.ones(64, 64).tril().bool())


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_keys_per_row_are_those_that_are_computed(tokens) -> None:
    longnet, window = longnet_attention(tokens), window_attention(tokens)
    mask = dense_mask(longnet.spec, longnet.spec.offsets(REPEATS), tokens, is_causal=True)
    assert mask.sum().item() / tokens / REPEATS == pytest.approx(keys_per_row(LONGNET, tokens), abs=1 / tokens)
    offsets = window.spec.offsets(1)
    layout = layout_for(window.spec, tokens, offsets, window.sparse_config, True, CPU)
    pairs = int(keys_seen(layout, window.spec, offsets, tokens, is_causal=True).sum())
    assert pairs / tokens == keys_per_row(WINDOW, tokens)
    assert keys_per_row(WINDOW, tokens) >= keys_per_row(LONGNET, tokens)


@pytest.mark.parametrize("tokens", [32_768, 131_072])
def test_at_the_lengths_of_the_experiment_the_window_costs_as_much_and_falls_short(tokens) -> None:
    assert 1 <= keys_per_row(WINDOW, tokens) / keys_per_row(LONGNET, tokens) < 1.05
    assert reach(WINDOW, tokens) < tokens // 2 - Task().asked_rows
    assert reach(LONGNET, tokens) == tokens


def test_a_longnet_learns_the_first_lesson() -> None:
    easy = Task(fillers=4, keys=2, values=4, facts=2, questions=2)
    pupil = Pupil(LONGNET, easy, "cpu", d_model=32, learning_rate=5e-3, seed=0)
    pupil.attend(64)
    for _ in range(150):
        _, accuracy = pupil.step(Lesson(64, REPEATS), 16)
        if accuracy == 1.0:
            break
    assert accuracy > 0.9


def test_both_models_take_the_same_lessons_and_leave_curves(tmp_path, capsys) -> None:
    results = run_recall("cpu", [256], minutes=0.02, tokens_per_step=512, d_model=32, out=tmp_path / "recall")
    assert [(result.model, result.tokens) for result in results] == [(LONGNET, 256), (WINDOW, 256)]
    told = capsys.readouterr().out
    assert "keys per row" in told
    assert "LongNet did not learn 256 tokens" in told
    assert "give more --minutes" in told
    head, *lines = map(json.loads, (tmp_path / "recall" / "recall.jsonl").read_text().splitlines())
    assert {"machine", "task", "settings"} == set(head)
    steps = [line for line in lines if "step" in line]
    first = [next(line for line in steps if line["model"] == model) for model in (LONGNET, WINDOW)]
    assert first[0]["tokens"] == first[1]["tokens"] == 64
    assert [line["result"]["tokens"] for line in lines if "result" in line] == [256, 256]
    page = (tmp_path / "recall" / "recall.html").read_text()
    assert page.count("<svg") == 2
    assert WINDOW in page


def test_a_length_that_does_not_fit_the_lessons_is_refused(capsys) -> None:
    assert main(["--tokens", "1000", "--device", "cpu"]) == 1
    assert "a power of two, at least 128, got 1000" in capsys.readouterr().err
    assert main(["--minutes", "0", "--device", "cpu"]) == 1
    assert "minutes must be above 0" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_longnet_recalls_from_4096_tokens_back_and_the_window_does_not() -> None:
    longnet, window = run_recall("cuda", [4096], minutes=2.0)
    assert longnet.accuracy > 0.95
    assert window.accuracy < 0.3
