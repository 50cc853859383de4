"""The kernels compile for compute capability 9.0, which takes no GPU.

In processes of their own: Triton's interpreter, which tests without a GPU run in, is chosen when a kernel is defined.
One process compiles all cases of a script.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import dilated_attention_pytorch

pytest.importorskip("triton", reason="the kernels need Triton")

FOLDER = Path(__file__).parent
PLAIN = ["forward_kernel mma", "delta_kernel plain", "dkdv_kernel mma", "dq_kernel mma"]
SHORT = ["forward_kernel mma", "dq_kernel mma", "dkdv_kernel mma"]
DECODE = ["append_kernel plain", "split_kernel mma", "combine_kernel plain"]


def compiled(script: str, cases: list[str]) -> dict[str, list[str]]:
    """The lines that a script prints for each of its cases, which it is given as `A,B,C`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(dilated_attention_pytorch.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(FOLDER / script), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line in cases:
            lines = found[line] = []
        else:
            lines.append(line)
    return found


def test_plain_kernels_compile_with_lists_of_tiles_and_without() -> None:
    cases = ["64,causal,content_adaptive,128", "128,whole,random,256", "64,causal,dense,0"]
    packed = "64,causal,random,64,packed"
    forward, delta, *gradients = PLAIN
    clear, lists = "_clear_kernel plain", "_work_lists_kernel plain"
    expected = dict.fromkeys(cases, PLAIN) | {packed: [clear, lists, forward, delta, clear, lists, *gradients]}
    expected["64,causal,short,0"] = SHORT
    assert compiled("compile_plain_kernels.py", [*expected]) == expected


def test_feed_forward_kernels_compile_for_even_and_ragged_chunks() -> None:
    widths = ["3072", "1100", "8192"]
    both = ["forward_kernel plain", "backward_kernel plain"]
    assert compiled("compile_feed_forward.py", widths) == dict.fromkeys(widths, both)


def test_decoding_kernels_compile() -> None:
    append, *attend = DECODE
    step = ["embed_kernel plain", "linear_kernel plain", "linear_kernel plain", "token_kernel mma"]
    assert compiled("compile_decode_kernels.py", ["64,1", "128,5", "48,100", "64,step,1", "64,step,64"]) == {
        "64,step,1": step,
        "64,step,64": [step[0], *["norm_kernel plain", "linear_kernel mma"] * 2, step[-1]],
        "64,1": DECODE,
        "128,5": [*attend, append],  # several tokens are stored after they have attended
        "48,100": ["store_kernel plain", "after_cached_kernel plain"],
    }


def has_gluon() -> bool:
    return find_spec("triton.experimental.gluon.nvidia") is not None


@pytest.mark.skipif(not has_gluon(), reason="needs Gluon: pip install 'triton>=3.6'")
def test_hopper_kernels_compile_to_matrix_instructions() -> None:
    # The programs of backward wait for each other, and so must all be running; those of forward work alone.
    expected = {
        "forward,64,causal": ["compiled independent"],
        "forward,128,whole": ["compiled independent"],
        "forward,256,causal": ["compiled independent"],
        "forward,64,kept": ["compiled independent"],
        "forward,128,documents": ["compiled independent"],
        "forward,64,dropped": ["compiled independent"],
        "forward,128,folded": ["compiled independent"],
        "backward,64,folded": ["compiled cooperative"],
        "backward,128,causal-folded": ["compiled cooperative"],
        "forward,128,dropped-folded": ["compiled independent"],
        "backward,128,dropped": ["compiled cooperative"],
        "backward,64,dropped-folded": ["compiled cooperative"],
        "backward,64,documents": ["compiled cooperative"],
        "backward,64,causal": ["compiled cooperative"],
        "backward,128,whole": ["compiled cooperative"],
        "backward,128,kept": ["compiled cooperative"],
    }
    assert compiled("compile_hopper_kernels.py", [*expected]) == expected


# Kernels of one training call. Most that branches launch come twice: for the first branch, and for later ones.
ON_ANY_GPU = {"delta_kernel": 1, "dkdv_kernel": 2, "dq_kernel": 2, "forward_kernel": 2}
ON_HOPPER = {"backward_kernel": 1, "delta_kernel": 1, "forward_kernel": 2}
WITH_LENGTHS = {"_clear_kernel": 2, "_work_lists_kernel": 1, **ON_ANY_GPU, **ON_HOPPER, "forward_kernel": 4}


@pytest.mark.skipif(not has_gluon(), reason="needs Gluon: pip install 'triton>=3.6'")
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("8,call", ON_ANY_GPU),
        ("8,whole", ON_ANY_GPU),
        ("9,whole", ON_HOPPER),
        ("9,tiles", ON_HOPPER),
        ("9,lengths", WITH_LENGTHS),
    ],
)
def test_a_first_call_or_warm_up_compiles_everything_at_once_before_a_launch(
    case, kernels, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = f"{case},{sum(kernels.values())}"
    before, later, launched = compiled("compile_first_call.py", [case])[case]
    assert before == " ".join(f"{name}:{count}" for name, count in sorted(kernels.items()))
    assert later == "later 0"
    call = ["forward_kernel"] * 3 + ["delta_kernel"] + ["dkdv_kernel", "dq_kernel"] * 3
    assert launched.split() == (call * 2 if case.startswith("8") else [])
