"""Starting ranks with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dilated_attention_pytorch

ROOT = Path(__file__).parents[2]
SOURCE = Path(dilated_attention_pytorch.__file__).parent.parent


def torchrun(module: str, ranks: int, *arguments: str, timeout: float = 300.0) -> str:
    """What the `module` beside this file prints when `ranks` processes run it, whether or not they end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return subprocess.run(
        [*command, f"tests.parallel.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    ).stdout
