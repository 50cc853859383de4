"""Run a module of the benchmarks in new processes, which import what this one imports."""

from __future__ import annotations

import os
import subprocess
import sys

from dilated_attention_pytorch.train.ranks import torchrun_arguments


def environment(**variables: str) -> dict[str, str]:
    """The environment of a new process: this one's, its import path, and `variables`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables


def run_module(module: str, *arguments: str, **variables: str) -> str:
    """What a module prints in a new process with these environment variables."""
    return _run(["-m", module, *arguments], variables)


def run_on_ranks(ranks: int, module: str, *arguments: str, threads: int = 1) -> None:
    """Run a module on the ranks of a torchrun, with `threads` threads each unless OMP_NUM_THREADS is set."""
    program = torchrun_arguments(ranks, 0, ["-m", module, *arguments])
    count = os.environ.get("OMP_NUM_THREADS", str(threads))
    _run(["-m", "torch.distributed.run", *program], {"OMP_NUM_THREADS": count})


def _run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *command], env=environment(**variables), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"python {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
