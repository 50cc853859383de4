"""Where the figures of a run go: `log(values, step)`, to the console, to files, or to services that watch runs.

A value is a number, or a mapping of numbers by name, such as bytes per branch:
`{"loss": 2.1, "branch_bytes": {"w2048 r1": 0, "w16384 r12": 4096}}`. Only the first rank has monitors.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from dilated_attention_pytorch.core.checks import check_instance, import_optional
from dilated_attention_pytorch.files import json_line, write_whole
from dilated_attention_pytorch.measuring import peak_resident

Kind = Literal["console", "jsonl", "tensorboard", "wandb", "prometheus"]
Values = Mapping[str, float | Mapping[str, float]]


class Monitor(Protocol):
    """One place that figures go to."""

    def log(self, values: Values, step: int) -> None: ...

    def close(self) -> None: ...


class Monitors:
    """Several monitors as one. If one of them cannot write, that is printed once, and the run goes on."""

    def __init__(self, *monitors: Monitor) -> None:
        self._monitors = list(monitors)
        self._failed: list[Monitor] = []

    def open(self, kinds: Sequence[str], run: Path, start: int, prometheus_address: str) -> None:
        """Add the monitors of a run in the folder `run` that goes on after step `start`."""
        makers: dict[str, Callable[[], Monitor]] = {
            "console": ConsoleMonitor,
            "jsonl": lambda: JsonLinesMonitor(run / "log.jsonl"),
            "tensorboard": lambda: TensorBoardMonitor(run / "tensorboard", start=start),
            "wandb": lambda: WandbMonitor(run),
            "prometheus": lambda: PrometheusMonitor(*parse_address(prometheus_address)),
        }
        for kind in kinds:
            self._monitors.append(makers[kind]())

    def log(self, values: Values, step: int) -> None:
        for monitor in self._monitors:
            with self._tolerating(monitor):
                monitor.log(values, step)

    def close(self) -> None:
        while self._monitors:
            monitor = self._monitors.pop()
            with self._tolerating(monitor):
                monitor.close()

    @contextmanager
    def _tolerating(self, monitor: Monitor) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each service raises its own
            if monitor not in self._failed:
                self._failed.append(monitor)
                why = f"{type(error).__name__}: {error}"
                print(f"{type(monitor).__name__} lost figures ({why}); the run continues", file=sys.stderr, flush=True)

    def __enter__(self) -> Monitors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ConsoleMonitor:
    """One line per step, for logs where a progress bar is of no use."""

    def log(self, values: Values, step: int) -> None:
        print(f"step {step}", *(f"{name} {value:.6g}" for name, value in flatten(values).items()), sep="  ", flush=True)

    def close(self) -> None:
        pass


class JsonLinesMonitor:
    """One JSON object per step, appended as it happens; a resumed run goes on in the same file.

    A number that is not finite is `null`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
            self._is_cut = stream.read(1) not in (b"", b"\n")  # a killed run left half a line
        self._stream = path.open("ab", buffering=0)

    def log(self, values: Values, step: int) -> None:
        line = b"\n" * self._is_cut + json_line({"step": step, **values}).encode()
        written = self._stream.write(line)
        self._is_cut = written < len(line)
        if self._is_cut:
            raise OSError(errno.ENOSPC, "only a part of a line could be written")

    def close(self) -> None:
        self._stream.close()


class TensorBoardMonitor:
    """Event files for TensorBoard; opening them drops steps after `start`, which an interrupted run left."""

    def __init__(self, folder: Path, *, start: int = 0) -> None:
        import_optional("tensorboard", "tensorboard", "the monitor")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def log(self, values: Values, step: int) -> None:
        for name, value in flatten(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """A run at Weights & Biases, which a resumed run continues; wandb's own settings apply."""

    def __init__(self, run: Path) -> None:
        wandb = import_optional("wandb", "wandb", "the monitor")
        identity = run / "wandb-id"
        if not identity.is_file():
            run.mkdir(parents=True, exist_ok=True)
            write_whole(identity, uuid.uuid4().hex[:8])
        self._run = wandb.init(dir=str(run), name=run.name, id=identity.read_text(), resume="allow")

    def log(self, values: Values, step: int) -> None:
        self._run.log(flatten(values), step=step)

    def close(self) -> None:
        self._run.finish()


class PrometheusMonitor:
    """Gauges at `http://HOST:PORT/metrics`, on this machine alone unless another host is given."""

    def __init__(self, host: str = "127.0.0.1", port: int = 9464) -> None:
        self._client = import_optional("prometheus_client", "prometheus", "the monitor")
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise OSError(
                f"cannot serve metrics at {_address(host, port)} ({error.strerror}): choose another address"
            ) from error
        self.address = _address(host, self._server.server_port)

    def log(self, values: Values, step: int) -> None:
        for name, value in {"step": step, **values}.items():
            if isinstance(value, Mapping):
                gauge = self._gauge(name, ("name",))
                for label, number in value.items():
                    gauge.labels(label).set(number)
            else:
                self._gauge(name, ()).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, labels: tuple[str, ...]) -> Any:
        if name not in self._gauges:
            known = "dilated_attention_" + re.sub(r"\W", "_", name)
            self._gauges[name] = self._client.Gauge(known, name.replace("_", " "), labels, registry=self._registry)
        return self._gauges[name]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. An empty host is refused: it would mean every network.

    An IPv6 address is in brackets.

    >>> parse_address("127.0.0.1:9464"), parse_address("[::1]:9464")
    (('127.0.0.1', 9464), ('::1', 9464))
    """
    host, _, port = check_instance("address", address, str).rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if not bare or not digits or int(port) > 65535 or bracketed != (":" in bare):
        raise ValueError(f"an address is HOST:PORT, as in 127.0.0.1:9464 or [::1]:9464, got {address!r}")
    return bare, int(port)


def flatten(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Nested values as one mapping of joined names.

    >>> flatten({"loss": 2.0, "branch_bytes": {"w64 r2": 0.0}})
    {'loss': 2.0, 'branch_bytes/w64 r2': 0.0}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = flatten(value, separator)
            flat |= {f"{name}{separator}{label}": one for label, one in inner.items()}
        else:
            flat[name] = value
    return flat


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held so far: on its GPU, or of main memory where it computes on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()
