"""The Hopper kernels compile for compute capability 9.0, which takes no GPU.

In processes of their own: Triton's interpreter, which tests without a GPU run in, is chosen when a kernel is defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import dilated_attention_pytorch

SCRIPT = Path(__file__).parent / "compile_hopper_kernel.py"


def has_gluon() -> bool:
    return find_spec("triton") is not None and find_spec("triton.experimental.gluon.nvidia") is not None


@pytest.mark.skipif(not has_gluon(), reason="needs Gluon: pip install 'triton>=3.6'")
@pytest.mark.parametrize(
    ("direction", "head_dim", "mask"),
    [
        ("forward", 64, "causal"),
        ("forward", 128, "whole"),
        ("forward", 64, "kept"),
        ("backward", 64, "causal"),
        ("backward", 128, "whole"),
        ("backward", 128, "kept"),
    ],
)
def test_a_hopper_kernel_compiles_to_its_matrix_instructions(direction, head_dim, mask) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(dilated_attention_pytorch.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [sys.executable, str(SCRIPT), direction, str(head_dim), mask]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    # The programs of backward wait for each other, and so must all be running; those of forward work alone.
    launched = "cooperative" if direction == "backward" else "independent"
    assert done.stdout.split() == ["compiled", launched], done.stderr[-3000:]
