"""The plain kernels compile for compute capability 9.0, with lists of tiles and without, which takes no GPU.

In processes of their own: Triton's interpreter, which tests without a GPU run in, is chosen when a kernel is defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dilated_attention_pytorch

pytest.importorskip("triton", reason="the kernels need Triton")

SCRIPT = Path(__file__).parent / "compile_plain_kernels.py"


@pytest.mark.parametrize(
    ("head_dim", "mask", "pattern", "block_size"),
    [(64, "causal", "content_adaptive", 128), (128, "whole", "random", 256), (64, "causal", "dense", 0)],
)
def test_plain_kernels_compile(head_dim, mask, pattern, block_size) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(dilated_attention_pytorch.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [sys.executable, str(SCRIPT), str(head_dim), mask, pattern, str(block_size)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    compiled = ["forward_kernel mma", "delta_kernel plain", "dkdv_kernel mma", "dq_kernel mma"]
    assert done.stdout.splitlines() == compiled, done.stderr[-3000:]
