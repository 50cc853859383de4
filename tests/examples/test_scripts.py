"""Every numbered example runs from top to bottom, with patterns that reach over its sequences, and shows its result."""

from __future__ import annotations

import os
import re
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from dilated_attention_pytorch import ReachWarning

from ..ranks import ROOT, run_ranks, start_server

FOLDER = ROOT / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("[0-9]*.py"))
ON_RANKS = "07_two_ranks.py"
NEEDS = {
    "04_llama_lora.py": "peft",
    "05_lightning.py": "lightning",
    "06_accelerate.py": "accelerate",
    "08_attention_maps.py": "matplotlib",
}
# A line that each one prints.
SHOWS = {
    "01_drop_in.py": r"4,096 tokens: dense +[\d.]+ s, dilated +[\d.]+ s",
    "02_classify.py": r"(9\d|100)% of 40 new sequences are classified correctly; .*",
    "03_language_model.py": r"the cache takes [\d,]+ bytes for a text of any length",
    "04_llama_lora.py": r"generated: dog jumps over the quick brown fox\. ",
    "05_lightning.py": r"epoch 5: loss 0\.\d+",
    "06_accelerate.py": r"0, 3, 6, 9, 12, 15 continues with \[18, 21, 24, 27, 30, 1, 4, 7\]",
    "08_attention_maps.py": r"wrote attention_maps\.png",
    "09_block_pattern.py": r"powers of two +computes \d+% of all pairs; \d layers connect all tokens",
}


def run(script: Path, folder: str, output: str) -> None:
    """In a process of its own: what `python SCRIPT` does in `folder`."""
    printed = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(folder)
    sys.argv[:] = [str(script)]
    warnings.filterwarnings("error", category=ReachWarning)
    runpy.run_path(str(script), run_name="__main__")


def printed_by(name: str, folder: Path) -> str:
    output = folder / "output"
    process = start_server().Process(target=run, args=(FOLDER / name, str(folder), str(output)))
    process.start()
    process.join()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != ON_RANKS])
def test_an_example_runs_and_shows_its_result(name: str, tmp_path: Path) -> None:
    if name in NEEDS and not find_spec(NEEDS[name]):
        pytest.skip(f"needs {NEEDS[name]}")
    printed = printed_by(name, tmp_path)
    assert re.search(rf"^{SHOWS[name]}$", printed, re.MULTILINE), printed


def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    ended, printed = run_ranks(2, f"examples.{ON_RANKS.removesuffix('.py')}")
    assert ended, printed
    assert "rank 1 of 2: tokens 256 to 511" in printed
    one, two = (
        [float(loss) for loss in re.findall(r"^step \d+: loss (.*)", text, re.MULTILINE)]
        for text in (printed_by(ON_RANKS, tmp_path), printed)
    )
    assert len(one) == 4
    assert one == pytest.approx(two, abs=2e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_a_notebook_in_percent_format(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.startswith("# %% [markdown]\n# # ")
    assert text.count("\n# %%\n") >= 2
    assert f"[{name}]({name})" in (FOLDER / "README.md").read_text()
