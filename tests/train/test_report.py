"""The page of a run: whole, interrupted or damaged, it shows what is there and says what is not."""

from __future__ import annotations

import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.train.report import write_run_report
from dilated_attention_pytorch.train.run_folder import list_saved, read_run

from ..thorough import examples

FLAGS = """
    --d-model 16 --num-heads 2 --num-layers 1 --segment-lengths 8 16 --dilation-rates 1 2 --sequence-length 16
    --batch-size 2 --warmup-steps 2 --validate-every 2 --checkpoint-every 2 --sample-bytes 4 --device cpu --steps 4
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    assert main(["train", "--data", str(text), "--out", str(folder / "mine"), *FLAGS]) == 0
    return folder / "mine"


@pytest.fixture
def run(finished, tmp_path):
    """A copy to change."""
    return shutil.copytree(finished, tmp_path / "mine")


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order, and collects where the page would fetch from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str | None] = []

    def handle_starttag(self, tag, attributes) -> None:
        outside = [value for name, value in attributes if name in ("src", "href")]
        self.fetched += [value for value in outside if value is None or not value.startswith("#")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def page(run) -> str:
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.fetched == []
    return text


def test_the_page_of_a_finished_run_shows_everything(run) -> None:
    text = page(run)
    assert "<strong>Finished</strong>: all 4 steps." in text
    assert "What cannot be read" not in text
    for heading in ("Figures", "Curves", "Samples", "Checkpoints", "Hardware and versions", "Effective settings"):
        assert f"<h2>{heading}" in text
    for words in ("byte frequencies (unigram)", "Learning rate", "tokens/s", "Peak memory", "model.segment_lengths"):
        assert words in text
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"validation: {records[-1]['validation_bits']:.4g} bits per byte at step 4" in text
    assert "step-00000002" in text
    assert "model.safetensors" in text
    assert (run / "samples" / "step-00000004.txt").is_file()


def test_the_page_goes_where_it_is_told_and_the_sample_cannot_break_it(run, tmp_path, capsys) -> None:
    (run / "samples" / "step-00000004.txt").write_text("</pre><script>alert(1)</script>")
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out
    text = (tmp_path / "new" / "page.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_checkpoint_that_goes_while_it_is_looked_at_is_left_out(run, monkeypatch) -> None:
    real = Path.iterdir

    def gone(self):
        if self.name == "step-00000002":
            raise FileNotFoundError(self)
        return real(self)

    monkeypatch.setattr(Path, "iterdir", gone)
    assert [one.step for one in list_saved(run)] == [4]


def test_a_moving_average_of_the_loss_is_drawn_where_it_is_recorded(run) -> None:
    assert "training, moving average" in page(run)
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:  # as runs of before had them
        del record["loss_ema"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "moving average" not in page(run)


def test_an_interrupted_run_says_how_far_it_came_and_how_to_go_on(run) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    newest = run / "checkpoints" / "step-00000004"
    newest.rename(newest.with_name(".step-00000004.1.partial"))
    shutil.rmtree(run / "samples")
    (run / "log.jsonl").write_text(json.dumps({"step": 3, "loss": 2.0, "bits": 2.9}) + "\n")
    text = page(run)
    assert "<strong>Not finished</strong>: step 3 of 4" in text
    assert f"train --resume {run}" in text
    assert "<h2>Samples" not in text
    assert [record["step"] for record in read_run(run).records] == [1, 2, 3]


def test_a_run_that_has_only_begun_has_a_page(run) -> None:
    for name in ("checkpoints", "samples"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    text = page(run)
    assert "step 0 of 4" in text
    assert "it has no whole checkpoint yet" in text
    assert "No step is recorded yet" in text


def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(run) -> None:
    (run / "config.json").write_text('{"steps": 4, ')
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], '{"loss": NaN, "step": 3}', "{}"]))
    (run / "environment.jsonl").write_bytes(b"\xff\xfe\x00")
    (run / "samples" / "step-00000004.txt").write_bytes(b"\xff")
    (run / "checkpoints" / "step-00000004" / "state" / ".metadata").unlink()
    (run / "checkpoints" / ".step-00000006.1.partial").mkdir()
    (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "damaged-step-00000002")
    states = {one.path.name: one.state for one in list_saved(run)}
    assert states == {
        "damaged-step-00000002": "damaged",
        "step-00000004": "unfinished",
        ".step-00000006.1.partial": "unfinished",
    }
    text = page(run)
    assert "What cannot be read" in text
    for words in (
        "<code>config.json</code> cannot be read",
        "<code>metrics.jsonl</code>: 1 of 4 lines are broken and left out, the first is line 2",
        "<code>metrics.jsonl</code> has a line without a step",
        "<code>environment.jsonl</code> cannot be read",
        "<code>samples/step-00000004.txt</code> cannot be read",
        "<code>checkpoints/damaged-step-00000002</code> could not be read when the run was resumed",
        "<code>checkpoints/step-00000004</code> is incomplete",
        "the number of steps is unknown",
    ):
        assert words in text
    assert "<svg" in text


def test_each_start_of_a_run_is_recorded(run, capsys) -> None:
    assert main(["train", "--resume", str(run), "--steps", "6"]) == 0
    starts = read_run(run).starts
    assert [start["step"] for start in starts] == [0, 4]
    assert all(start["machine"]["torch"] and start["baselines"]["unigram_bits"] > 0 for start in starts)
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step-00000004.txt", "step-00000006.txt"]
    text = page(run)
    assert "start 2" in text
    assert "After step 6" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "no folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert "is not the folder of a run: it has none of config.json" in capsys.readouterr().err


def changed(content: bytes, draw: random.Random) -> bytes:
    """One kind of damage, or a value that JSON can spell and a run never writes."""
    found = bytearray(content)
    kind = draw.choice(["flip", "cut", "zero", "deep", "value"])
    if kind == "flip":
        for _ in range(20):
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del found[draw.randrange(len(found)) :]
    elif kind == "zero":
        found[:] = bytes(len(found))
    elif kind == "deep":
        found[:] = b"[" * 100_000
    else:
        old = draw.choice(re.findall(rb": ([^,}\]]+)", content))
        new = draw.choice([b"1" + b"0" * 400, b"1e308", b"-1e308", b"NaN", b"null", b'"\\ud800"', b'{"a": 1}', b"true"])
        found = found.replace(b": " + old, b": " + new)
    return bytes(found)


def test_any_damaged_run_has_a_page(run) -> None:
    draw = random.Random(0)
    (run / "log.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    names = ["config.json", "metrics.jsonl", "log.jsonl", "environment.jsonl"]
    whole = {name: (run / name).read_bytes() for name in names}
    for _ in range(examples(6)):
        for name in draw.sample(names, 2):
            (run / name).write_bytes(changed(whole[name], draw))
        write_run_report(run)
        for name, content in whole.items():
            (run / name).write_bytes(content)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    (run / "environment.jsonl").unlink()
    (run / "config.json").unlink()
    (run / "config.json").symlink_to("nowhere")
    text = page(run)
    assert "<code>metrics.jsonl</code> cannot be read" in text
    assert "there is no <code>environment.jsonl</code>, which every run has that has saved" in text
    assert "<code>config.json</code> cannot be read" in text


def test_a_page_is_written_whole_or_not_at_all(run, monkeypatch, capsys) -> None:
    before = page(run)
    real = Path.write_text

    def cut_off(self, text, *given, **settings):
        if "report.html" in self.name:
            real(self, text[:100])
            raise OSError(28, "No space left on device")
        return real(self, text, *given, **settings)

    monkeypatch.setattr(Path, "write_text", cut_off)
    assert main(["report", str(run)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert (run / "report.html").read_text(encoding="utf-8") == before
    assert not list(run.glob(".*.partial"))


def test_a_run_of_slides_has_a_report_of_its_own(tmp_path, capsys) -> None:
    slides = tmp_path / "my slides"
    (slides / "fold-0").mkdir(parents=True)
    (slides / "fold-0" / "study.json").write_text("{}")
    assert main(["report", str(slides)]) == 1
    assert f"{slides} is a run of slides: use `slides report '{slides}'`" in capsys.readouterr().err
    assert not (slides / "report.html").exists()
    (slides / "fold-0" / "study.json").rename(slides / "study.json")
    assert main(["report", str(tmp_path)]) == 1  # a folder of runs is not one of them
    assert "is not the folder of a run" in capsys.readouterr().err
