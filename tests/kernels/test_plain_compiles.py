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

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("head_dim", "mask", "pattern", "block_size"),
    [(64, "causal", "content_adaptive", 128), (128, "whole", "random", 256), (64, "causal", "dense", 0)],
)
def test_plain_kernels_compile(head_dim, mask, pattern, block_size) -> None:
    compiled = ["forward_kernel mma", "delta_kernel plain", "dkdv_kernel mma", "dq_kernel mma"]
    check_compiled("compile_plain_kernels.py", [head_dim, mask, pattern, block_size], compiled)


@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 1), (128, 5), (48, 100)])
def test_decoding_kernels_compile(head_dim, tokens) -> None:
    compiled = ["append_kernel plain", "split_kernel mma", "combine_kernel plain"]
    if tokens > 64:
        compiled = ["store_kernel plain", "after_cached_kernel plain"]
    elif tokens > 1:  # these are stored after they have attended
        compiled = [*compiled[1:], compiled[0]]
    check_compiled("compile_decode_kernels.py", [head_dim, tokens], compiled)


def check_compiled(script, arguments, compiled) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(dilated_attention_pytorch.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == compiled, done.stderr[-3000:]
