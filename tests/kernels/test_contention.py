"""A backward pass ends, whatever else runs on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dilated_attention_pytorch

SCRIPT = Path(__file__).parent / "contended_backward.py"
SECONDS = 120  # a try takes a fraction of one; compiling takes most of it


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "kept"])
@pytest.mark.parametrize("held", [20, 60, 100])
def test_backward_passes_end_beside_a_kernel_that_holds_multiprocessors(held: int, kind: str) -> None:
    source = str(Path(dilated_attention_pytorch.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = [sys.executable, str(SCRIPT), str(held), kind, "20"]
    try:
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"a backward pass did not end within {SECONDS} s; of 20 tries ended: {expired.stdout}")
    assert done.stdout.splitlines()[-1:] == ["20 ended"], done.stderr[-3000:]
