"""Ranks without torchrun: forks of one process that has imported what ranks need.

A fresh Python takes seconds to import PyTorch, and torchrun starts one for itself and one per rank. Tests of torchrun
itself (a restart, Ctrl-C) still start it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

import dilated_attention_pytorch

ROOT = Path(__file__).parents[1]
SOURCE = Path(dilated_attention_pytorch.__file__).parents[1]
GRACE = 5.0  # seconds that the other ranks have to end after one has failed


class Ranks:
    """Processes that run `python -m MODULE ARGUMENTS`, each as one rank of a group."""

    def __init__(self, count: int, module: str, arguments: Sequence[str] = ()) -> None:
        # As torchrun does, this process keeps the store at which ranks meet, so that they need no free port.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it lasts as long as the ranks
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        context = start_server()
        self.processes: list[BaseProcess] = []
        for rank in range(count):
            place = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (module, [*arguments], place, self._output.name)
            self.processes.append(context.Process(target=_be_a_rank, args=given))
            self.processes[-1].start()

    def finish(self, timeout: float = 300.0) -> tuple[bool, str]:
        """Whether all ranks ended well, and what they printed. A rank that fails ends the others."""
        until = time.monotonic() + timeout
        running = {process.sentinel: process for process in self.processes}
        while running and (left := until - time.monotonic()) > 0:
            for ended in connection.wait(list(running), left):
                process = running.pop(ended)
                process.join()
                if process.exitcode:
                    until = min(until, time.monotonic() + GRACE)
        codes = [process.exitcode for process in self.processes]
        printed = self.end()
        ended_well = all(code == 0 for code in codes)
        if not ended_well:
            printed += f"\nexit codes of the ranks, None for those that did not end: {codes}"
        return ended_well, printed

    def end(self) -> str:
        """Kill the ranks that still run; what all printed."""
        for process in self.processes:
            process.kill()
            process.join()
        return Path(self._output.name).read_text()


def run_ranks(count: int, module: str, *arguments: str, timeout: float = 300.0) -> tuple[bool, str]:
    """Run `python -m MODULE ARGUMENTS` on `count` ranks: whether all ended well, and what they printed."""
    return Ranks(count, module, arguments).finish(timeout)


def start_server() -> multiprocessing.context.ForkServerContext:
    """The process that forks ranks; it starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_imports"])
    paths = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(ROOT)])  # the server does not get this sys.path
    try:
        forkserver.ensure_running()
    finally:
        if paths is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = paths
    return context


def _be_a_rank(module: str, arguments: list[str], place: dict[str, str], output: str) -> None:
    printed = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(place)
    sys.argv[1:] = arguments
    sys.path[:0] = [str(SOURCE), str(ROOT)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
