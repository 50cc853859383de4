"""Starting ranks: one torchrun for many cases, since a process takes seconds to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dilated_attention_pytorch

HERE = Path(__file__).parent
SOURCE = Path(dilated_attention_pytorch.__file__).parent.parent


def torchrun(script: str, ranks: int, *arguments: str, timeout: float = 300.0) -> str:
    """What `script` beside this file prints when `ranks` processes run it; all must end well, and in time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [str(SOURCE), str(HERE.parent)]
    done = subprocess.run(
        [*command, str(HERE / script), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
