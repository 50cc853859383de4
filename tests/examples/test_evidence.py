"""The whole command in miniature: text to tokens, runs that stop and continue, measurements, the page."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from dilated_attention_pytorch.core.spec import DilatedSpec, branches_for
from dilated_attention_pytorch.train.data import Batch
from examples.evidence import __main__ as command
from examples.evidence import measures, report, training
from examples.evidence.corpus import open_corpus, write_corpus
from examples.evidence.patterns import WindowedDilatedAttention
from examples.evidence.results import KINDS
from examples.evidence.runs import FULL, TINY, all_runs, find_run

SMALL = dataclasses.replace(
    TINY, d_model=16, num_layers=1, vocab_size=300, lengths=(32, 64, 128, 512), tokens_per_step=512, steps=4,
    windows=2, validation_windows=1, validate_every=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(command, "TINY", SMALL)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Forty directories of a few files, in which words come again; half of them have a table too."""
    top = tmp_path_factory.mktemp("data") / "text"
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        folder = top / f"part-{number:02}"
        folder.mkdir(parents=True)
        for name in ("a.txt", "b.txt"):
            words = torch.randint(200, (300,), generator=generator).tolist()
            (folder / name).write_text(" ".join(f"word{word}" for word in words))
        if number % 2:
            (folder / "table.txt").write_text("0x1234, " * 500)
    (top / "part-00" / "latin.txt").write_bytes(b"caf\xe9")
    return top


@pytest.fixture(scope="module")
def tokens(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus([str(text)], folder, SMALL.vocab_size, SMALL.lengths[-1])
    return open_corpus(folder, SMALL.lengths[-1], SMALL.tokens_per_step)


def test_whole_directories_are_held_out_and_every_token_knows_its_bytes(text, tokens, tmp_path) -> None:
    training_names, held_out = (
        [one["name"] for one in tokens.facts[split]["directories"]] for split in ("training", "held-out")
    )
    assert sorted(training_names + held_out) == [f"text/part-{number:02}" for number in range(40)]
    assert training_names == sorted(training_names)
    assert 0 < len(held_out) < 5
    chosen = "".join((text.parent / name / file).read_text() + "\n" for name in held_out for file in ("a.txt", "b.txt"))
    split = tokens.corpus.validation
    assert split.bytes == len(chosen) == int(tokens.token_bytes[split.tokens[:].long()].sum())
    files = [file for file in text.rglob("*.txt") if file.stem in "ab"]  # neither tables nor Latin-1
    assert tokens.corpus.training.bytes + split.bytes == sum(file.stat().st_size + 1 for file in files)
    ends = split.documents[1:].tolist()
    for window in tokens.windows:
        assert len({sum(end <= place for end in ends) for place in (window, window + 512)}) == 1
    write_corpus([str(text)], tmp_path, SMALL.vocab_size, SMALL.lengths[-1])
    assert open_corpus(tmp_path, 512, 512).facts == tokens.facts


def test_a_corpus_that_lacks_a_file_or_has_another_is_refused(text, tmp_path) -> None:
    write_corpus([str(text)], tmp_path, SMALL.vocab_size, SMALL.lengths[-1])
    shard = tmp_path / "training-000.xz"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="damaged, or of another corpus: copy it again"):
        open_corpus(tmp_path, 512, 512)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks training-000\.xz: copy them there too"):
        open_corpus(tmp_path, 512, 512)


def test_a_text_too_short_for_the_lengths_is_one_error_with_the_numbers(tmp_path, capsys) -> None:
    (tmp_path / "text" / "part").mkdir(parents=True)
    (tmp_path / "text" / "part" / "a.txt").write_text("short")
    assert command.main(["--device", "cpu", "--data", str(tmp_path / "text"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "evidence: the corpus is too short: whole directories of text are held out" in said
    assert "more than 2,560 bytes (512 tokens)" in said


def test_the_runs_are_those_of_the_experiment() -> None:
    runs = {run.name: run for run in all_runs(FULL)}
    assert {"dense-2K", "dense-8K", "dense-32K", "dilated-8K", "dilated-32K", "dilated-128K", "window-8K", "window-32K",
            "converted-32K"} <= {name for name, run in runs.items() if run.seeds == (0, 1)}  # fmt: skip
    assert 45e6 < runs["dense-2K"].parameters < 47e6
    assert runs["dilated-32K"].spec().segment_lengths == branches_for(32_768, heads=8)[0]
    assert runs["dense-32K"].keys_per_row == (32_768 + 1) / 2
    for length in ("8K", "32K"):
        assert 1 <= runs[f"window-{length}"].keys_per_row / runs[f"dilated-{length}"].keys_per_row < 1.07
        assert runs[f"window-{length}"].attention(131_072).sparse_config is not None
    assert runs["local-32K"].spec().segment_lengths == (2048, 4096, 8192)
    assert runs["blocked-32K"].attention(32_768).spec.head_layout == "blocked"
    layers = [runs["staggered-8K"].attention(8192, layer).segment_lengths for layer in range(3)]
    assert layers == [(2048, 4096, 8192), (2944, 5888, 11_776), (2048, 4096, 8192)]
    assert runs["doubled-8K"].spec().segment_lengths == (1408, 2048, 4096, 8192)
    paired = runs["paired-8K"].spec()
    assert (paired.segment_lengths, paired.dilation_rates) == ((1408, 2048, 8192), (1, 1, 8))
    assert runs["paired-8K"].keys_per_row == pytest.approx(runs["dilated-8K"].keys_per_row, rel=0.02)
    layers = [runs["paired-staggered-8K"].attention(8192, layer).segment_lengths for layer in range(2)]
    assert layers == [(1408, 2048, 8192), (2024, 2944, 11_776)]
    assert 1 <= runs["windowed-8K"].keys_per_row / runs["dilated-8K"].keys_per_row < 1.07


def test_a_window_in_place_of_all_branches_but_the_last_shares_one_softmax_with_it() -> None:
    N, H, tile, before = 96, 4, 16, 2
    attention = WindowedDilatedAttention(DilatedSpec.of([32, 64, 128], [1, 2, 4]), tile, before)
    q, k, v = (torch.randn(1, N, H, 8, requires_grad=True) for _ in range(3))
    row, key = torch.arange(N)[:, None], torch.arange(N)
    shown = (row // tile - key // tile <= before).float().expand(H, N, N).clone()
    for head in range(H):
        shown[head] += (key % 4 == head) & (row % 4 == head)
    shown *= key <= row
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 + shown.log()
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    given = torch.randn_like(wanted)
    torch.testing.assert_close(attention(q, k, v, is_causal=True), wanted, rtol=1e-5, atol=1e-5)
    for found, gradient in zip(
        torch.autograd.grad(attention(q, k, v, is_causal=True), (q, k, v), given),
        torch.autograd.grad(wanted, (q, k, v), given),
    ):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_all_models_read_the_same_tokens_and_a_step_mixes_as_many_places_as_it_can() -> None:
    def training_batch(places, length, seed, step, order):
        assert (seed, order) == (7, "epochs")
        numbers = torch.arange(places * length).view(places, length) + (step - 1) * places * length
        return Batch(numbers, numbers + 1)

    tokens = SimpleNamespace(corpus=SimpleNamespace(training_batch=training_batch))
    count = 2 * SMALL.places
    for name, places in (("dense-32", 16), ("dense-64", 8), ("dilated-128", 4), ("dilated-512", 1)):
        run = find_run(name, SMALL)
        batches = list(itertools.islice(training.draw(run, 7, tokens, first=1), count))
        for batch in batches:
            assert batch.tokens.shape == (512 // run.length, run.length)
            assert torch.equal(batch.tokens + 1, batch.following)
            assert len(set((batch.tokens[:, 0] // SMALL.tokens_per_step).tolist())) == places
        for half in (batches[: SMALL.places], batches[SMALL.places :]):
            read = torch.cat([batch.tokens.flatten() for batch in half]).sort().values
            assert torch.equal(read, torch.arange(len(read)) + read[0])
        assert torch.equal(next(training.draw(run, 7, tokens, first=20)).tokens, batches[19].tokens)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tokens, tmp_path, monkeypatch) -> None:
    run = find_run("converted-128", SMALL)
    model, progress = training.train(run, 1, tokens, tmp_path / "whole", "cpu", math.inf)
    stops = 0
    while True:
        clock = itertools.count()
        monkeypatch.setattr(training.time, "monotonic", lambda clock=clock: next(clock))
        try:
            again, resumed = training.train(run, 1, tokens, tmp_path / "stopped", "cpu", deadline=4)
            break
        except training.TimeIsUp:
            stops += 1
            assert stops < 10
    assert stops > 1
    assert resumed.curve == progress.curve
    assert resumed.step == SMALL.steps + 1
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize("stops_at", [1, 2])  # validations: in the middle, and after the last step
def test_a_run_that_a_signal_stops_is_saved_and_goes_on(stops_at, tokens, tmp_path, monkeypatch) -> None:
    run, throughout, validations = find_run("dilated-128", SMALL), training.throughout, []
    _, whole = training.train(run, 0, tokens, tmp_path / "whole", "cpu", math.inf)

    def interrupt(*arguments):
        validations.append(arguments)
        if len(validations) == stops_at:
            signal.raise_signal(signal.SIGTERM)
        return throughout(*arguments)

    monkeypatch.setattr(training, "throughout", interrupt)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        training.train(run, 0, tokens, tmp_path / "stopped", "cpu", math.inf)
    _, resumed = training.train(run, 0, tokens, tmp_path / "stopped", "cpu", math.inf)
    assert len(validations) == SMALL.steps // SMALL.validate_every  # none twice
    assert resumed.curve == whole.curve


def test_bits_are_those_of_the_logits_and_the_removed_branch_changes_them(tokens) -> None:
    run = find_run("dilated-128", SMALL)
    torch.manual_seed(0)
    model, _, _ = training._make(run, 0, "cpu")
    found = measures.measure(model, run, tokens, "cpu")
    window = measures._windows(tokens, SMALL.windows)
    text = torch.stack([tokens.held_out(start)[-129:] for start in window])
    with torch.no_grad():
        logits = model(text[:, :-1])[:, -SMALL.scored :]
    wanted = text[:, -SMALL.scored :]
    nats = -logits.double().log_softmax(-1).gather(-1, wanted[..., None]).sum()
    (at_128,) = [one for one in found["context"] if one["tokens"] == 128]
    assert at_128["bits"] == pytest.approx(
        nats.item() / math.log(2) / tokens.token_bytes[wanted].sum().item(), rel=1e-5
    )
    assert at_128["perplexity"] == pytest.approx(math.exp(nats.item() / wanted.numel()), rel=1e-5)
    assert [one["tokens"] for one in found["context"] if one["fitted"]] == [256, 512]
    assert len(found["positions"]) == 64
    every = torch.cat([tokens.held_out(start)[:-1].view(-1, 128) for start in window])
    targets = torch.cat([tokens.held_out(start)[1:].view(-1, 128) for start in window])
    with torch.no_grad():
        last = -model(every).double().log_softmax(-1).gather(-1, targets[..., None])[:, -2:].sum()
    bits = last.item() / math.log(2) / tokens.token_bytes[targets[:, -2:]].sum().item()
    assert found["positions"][-1] == pytest.approx(bits, rel=1e-5)
    assert found["without_reach"]["bits"] != at_128["bits"]
    # A model that has learned nothing recalls nothing; one that is told the answer recalls everything.
    assert all(one["right"] < 0.3 for one in found["recall"])
    assert model.layers[0].self_attn.attention.spec == run.spec()  # as it was trained


def test_the_whole_command_runs_stops_continues_and_draws_its_page(text, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--data", str(text), "--out", str(out)]
    assert command.main([*arguments, "--minutes", "1e-9"]) == 0
    assert "it shows the machinery, not the result" in (said := capsys.readouterr().out)
    assert "time is up: 0 results" in said
    assert command.main([*arguments, "--only", "dense-32", "--seeds", "0"]) == 0
    assert [path.parent.name for path in out.rglob("*.pt")] == ["dense-32-0"]  # converted-128 starts as it
    assert command.main([*arguments, "--only", "converted-128", "--seeds", "0"]) == 0
    assert not [*out.rglob("*.pt")]
    assert command.main(arguments) == 0
    records = command.read_records(out / command.RECORDS)
    names = [(record["run"], record["seed"]) for record in records]
    assert len(names) == len({*names}) == 25
    assert not [*out.rglob("*.pt")]
    for record in records:
        assert all(math.isfinite(one["bits"]) and one["bits"] > 0 for one in record["context"])
        assert record["curve"][-1][0] == SMALL.steps + record["steps"] * bool(record["starts_as"])
        assert record["step_seconds"] > 0
    page = (out / report.PAGE).read_text()
    assert "It shows the machinery, not the result" in page
    assert "Not measured yet" not in page
    table = {row.split(" | ")[0].strip("| "): row for row in page.splitlines() if row.startswith("| ")}
    seeds = [record["validation"] for record in records if record["run"] == "dilated-128"]
    assert f"{sum(seeds) / 2:.4f} ± {abs(seeds[0] - seeds[1]) / 2:.4f}" in page
    assert {name for name, _ in names} <= table.keys()
    for name in report.PICTURES:
        picture = ElementTree.parse(out / "pictures" / f"evidence-{name}.svg")
        words = {"".join(element.itertext()) for element in picture.iter() if element.tag.endswith("text")}
        assert {"context": "dilated 512", "cost": "PFLOPs", "positions": "position in the sequence"}[name] in words
    # The page is drawn again from the records alone, and what is in the folder is not measured again.
    before = page
    (out / report.PAGE).unlink()
    capsys.readouterr()
    assert command.main(["--report", str(out)]) == 0
    assert (out / report.PAGE).read_text() == before
    assert command.main([*arguments, "--plan"]) == 0
    assert "dilated-128  " in capsys.readouterr().out
    assert command.main(["--plan"]) == 0
    assert "dilated-128K" in capsys.readouterr().out
    # Runs that no picture shows have a page too.
    (tmp_path / "one").mkdir()
    lines = (out / command.RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / "one" / command.RECORDS).write_text(next(line for line in lines if '"run": "converted' in line))
    assert command.main(["--report", str(tmp_path / "one")]) == 0


def test_results_of_other_settings_and_what_is_missing_are_refused(text, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--data", str(text), "--out", str(out), "--only", "dense-32", "--seeds", "0"]
    assert command.main([*arguments, "--steps", "1"]) == 0
    assert "Not measured yet" in (out / report.PAGE).read_text()
    assert command.main([*arguments, "--steps", "2"]) == 1
    assert "results of other settings or text: choose another --out" in capsys.readouterr().err
    for wrong, why in (
        (["--only", "dense-5"], "there is no run 'dense-5': choose from dense-32, "),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--minutes", "0"], "--minutes must be above 0, got 0.0"),
        (["--data", str(tmp_path)], "has the corpus of text: choose another --out"),
        (["--report", str(tmp_path)], "without --report writes it"),
        (["--seeds", "7"], "no chosen run has one of the seeds [7]"),
        (["--times"], "leave out --seeds and --minutes"),
        (["--steps", "9999"], "a run reads 5,119,488 tokens, and text has "),
    ):
        assert command.main([*arguments, *wrong]) == 1
        assert why in capsys.readouterr().err
    with (out / command.RECORDS).open("a") as stream:
        stream.write('{"run": "cut o')
    assert command.main([*arguments, "--steps", "1"]) == 1
    assert "line 2 of " in capsys.readouterr().err


def test_times_of_steps_are_measured_anew_and_nothing_else_changes(text, tmp_path, capsys) -> None:
    arguments = ["--device", "cpu", "--data", str(text), "--out", str(tmp_path), "--steps", "1"]
    assert command.main([*arguments, "--times"]) == 1
    assert "it has none: do them first, without --times" in capsys.readouterr().err
    assert command.main([*arguments, "--only", "dense-32", "dense-64", "--seeds", "0"]) == 0
    path = tmp_path / command.RECORDS
    before = [record | {"step_seconds": 99.0} for record in command.read_records(path)]
    command._write_records(path, before)
    assert command.main([*arguments, "--only", "dense-64", "dilated-64", "--times"]) == 1
    assert "it has dense-32, dense-64: leave out dilated-64" in capsys.readouterr().err
    assert command.main([*arguments, "--only", "dense-64", "--times"]) == 0
    first, second = command.read_records(path)
    assert first == before[0]
    assert 0 < second["step_seconds"] < 99
    assert second | {"step_seconds": 99.0} == before[1]
    command._write_records(path, [first, second | {"machine": {"gpu": "another"}}])
    assert command.main([*arguments, "--times"]) == 1
    assert "the results are of another: measure times there" in capsys.readouterr().err
    command._write_records(path, [first, second])
    assert command.main([*arguments, "--times"]) == 0
    assert 0 < command.read_records(path)[0]["step_seconds"] < 99


def test_the_whole_experiment_needs_a_text(tmp_path, capsys) -> None:
    assert command.main(["--prepare", "--out", str(tmp_path)]) == 1
    assert "there is no corpus in" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


def test_gaps_are_told_apart_by_the_place_in_a_segment() -> None:
    shared = {
        "settings": json.loads(json.dumps(dataclasses.asdict(FULL))),
        "seed": 0,
        "branches": [[2048, 8192], [1, 4]],
        "step_seconds": 1.0,
    }
    dense = shared | {"run": "dense-8K", "positions": [1.0] * 64, "validation": 1.0}
    own = [1.0] * 16 + ([1.5] * 4 + [1.2] * 8 + [1.1] * 4) * 3
    dilated = shared | {"run": "dilated-8K", "positions": own, "validation": 1.2}
    said = report._borders(report.Results([dense, dilated]), 8192)
    assert "In its first 2,048 tokens, dilated-8K needs 0.00 % (one seed)" in said
    assert "50.00 % (one seed) more, and in the last quarter 10.00 % (one seed) more" in said


def test_curves_are_compared_at_the_same_seconds() -> None:
    assert report._at_step([[10, 4.0], [20, 2.0]], 15) == 3.0
    assert [report._at_step([[10, 4.0], [20, 2.0]], step) for step in (1, 99)] == [4.0, 2.0]
    shared = {"settings": json.loads(json.dumps(dataclasses.asdict(FULL))), "steps": 20, "seed": 0}
    slow = shared | {"run": "dense-8K", "step_seconds": 2.0, "curve": [[10, 4.0], [20, 2.0]], "validation": 2.0}
    fast = shared | {"run": "dilated-8K", "step_seconds": 1.0, "curve": [[10, 4.0], [20, 2.2]], "validation": 2.2}
    results = report.Results([slow, fast])
    assert "10.00 % (one seed) more bits per byte" in report._compare(results, "dilated-8K", "dense-8K")
    assert "After 20 seconds dilated-8K needs 45.00 % (one seed) fewer" in report._same_seconds(
        results, "dilated-8K", "dense-8K"
    )


def test_a_step_takes_as_long_as_with_the_first_seed() -> None:
    shared = {"settings": json.loads(json.dumps(dataclasses.asdict(FULL))), "run": "dense-8K"}
    results = report.Results([shared | {"seed": seed, "step_seconds": 1.0 + seed} for seed in (1, 0)])
    assert results.figures("dense-8K", lambda record: record["step_seconds"]).values == (1.0, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", [f"{kind}-128" for kind in (*KINDS, "converted")])
def test_on_a_gpu_every_kind_of_attention_trains_compiled_and_is_measured(name, tokens, tmp_path) -> None:
    run = find_run(name, dataclasses.replace(SMALL, d_model=256, steps=10))
    model, progress = training.train(run, 0, tokens, tmp_path, "cuda", math.inf)
    found = measures.measure(model, run, tokens, "cuda")
    assert all(math.isfinite(one["bits"]) for one in found["context"])
    assert progress.curve[-1][1] < progress.curve[0][1] or run.starts_as
