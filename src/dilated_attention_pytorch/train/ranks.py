"""The ranks of a run: they join, lie on a mesh of named axes, and share one model.

A process that torchrun did not start is a run of one rank: no process group, no wrapper, every method is local.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from dilated_attention_pytorch.core import environment
from dilated_attention_pytorch.core.environment import (
    local_rank,
    torchrun_cannot_restart_gloo,
    torchrun_restarts,
    under_torchrun,
)
from dilated_attention_pytorch.measuring import fastest_threads, thread_rates
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.parallel.group import Place
from dilated_attention_pytorch.parallel.mesh import parallelize, token_mesh
from dilated_attention_pytorch.parallel.sharding import Shards, even_lengths

Engine = Literal["fsdp", "ddp", "deepspeed"]
Result = TypeVar("Result")

# gloo recovers a killed rank only if torchrun does not lend its own store to the workers.
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Runs of this process so far; ranks train the same runs in the same order.
_joined = itertools.count()


class Stopped(KeyboardInterrupt):
    """A signal ended the run, on all ranks, after a step that was saved; `status` is the exit status of the process."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of one run, and which of them this one is."""

    device: torch.device
    rank: int = 0
    restarts: int = 0
    timeout: timedelta = timedelta(seconds=600)
    mesh: DeviceMesh | None = None  # None: one process, not under torchrun

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints for all."""
        return self.rank == 0

    @property
    def token_rank(self) -> int:
        """The number of this rank's part of the tokens; ranks that share heads have the same."""
        return self.place("data") * self.axis("sequence") + self.place("sequence")

    def axis(self, name: str) -> int:
        """The number of ranks along an axis."""
        return 1 if self.mesh is None else self.mesh.shape[(self.mesh.mesh_dim_names or ()).index(name)]

    def place(self, name: str) -> int:
        """The number of this rank along an axis."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(name)

    def part(self, batch: Tensor) -> Tensor:
        """This rank's tokens of a batch `(B, N)` that all ranks drew alike: a shard of each of its sequences."""
        batch = batch.chunk(self.axis("data"))[self.place("data")]
        shards = Shards(even_lengths(batch.shape[1], self.axis("sequence")))
        first, last = shards.bounds(self.place("sequence"))
        return batch[:, first:last].to(self.device, non_blocking=True)

    def share(self, model: LongNetLM, engine: Engine) -> nn.Module:
        """The model as the ranks train it: parameters sharded (`fsdp`), or copied with averaged gradients (`ddp`).

        Gradients are averages over the ranks that have their own tokens; DeepSpeed shards and averages by itself.
        """
        if self.mesh is None:
            return model
        if engine == "fsdp":
            return parallelize(model, self.mesh)
        copied = parallelize(model, self.mesh, shard_parameters=False)
        if engine == "deepspeed":  # DeepSpeed takes the model together with its optimizer
            return copied
        tokens = token_mesh(self.mesh)
        assert tokens is not None
        return nn.parallel.DistributedDataParallel(copied, process_group=tokens.get_group())

    @contextlib.contextmanager
    def accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """A context for one micro-batch: ranks exchange gradients only in backward of the `last` one of a step."""
        if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
            with model.no_sync():
                yield
            return
        if self.mesh is not None:
            from torch.distributed.fsdp import FSDPModule

            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
        yield

    def clip_gradients(self, model: nn.Module, limit: float, scale: float = 1.0) -> Tensor:
        """Divide the gradients by a loss scale, and clip their norm over all ranks to `limit`.

        Returns the norm before clipping, without the scale.
        """
        from torch.distributed.tensor import DTensor

        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        if self.mesh is None or not sharded:
            norm = nn.utils.get_total_norm(gradients)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            # On the local shards: DTensor would redistribute the norm, which can abort when a CPU process exits.
            by_copies: dict[int, list[Tensor]] = {}
            for gradient in sharded:
                shards = [
                    gradient.device_mesh.size(axis)
                    for axis, placement in enumerate(gradient.placements)
                    if not placement.is_replicate()
                ]
                by_copies.setdefault(dist.get_world_size() // math.prod(shards), []).append(gradient.to_local())
            squares = [nn.utils.get_total_norm(alike).square() / copies for copies, alike in by_copies.items()]
            square = torch.stack(squares).sum()
            dist.all_reduce(square)
            norm = square.sqrt()
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        torch._foreach_mul_(local, (limit * scale / (norm + 1e-6)).clamp(max=1.0))
        if scale != 1.0:
            torch._foreach_div_(local, scale)
        return norm / scale

    def bytes_received(self, branches: int) -> list[int]:
        """Bytes received per branch since the last call; an empty list where ranks do not share sequences."""
        if self.axis("sequence") == 1:
            return []
        assert self.mesh is not None
        traffic = Place(mesh=self.mesh, axis="sequence").ranks().traffic
        received = [0] * branches
        for (_, branch), weight in traffic.items():
            received[branch] += weight.received
        traffic.clear()
        return received

    def gather(self, *values: float) -> Tensor:
        """Each rank's numbers, on every rank: `(ranks, len(values))` in float64."""
        row = torch.tensor(values, dtype=torch.float64)
        if self.mesh is None:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def mean(self, *values: Tensor) -> list[float]:
        """The mean of each number over the ranks. Waits for a GPU once."""
        return self.gather(*torch.stack(values).tolist()).mean(0).tolist()

    def gather_objects(self, value: Result) -> list[Result]:
        """Each rank's small object, on every rank."""
        if self.mesh is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def on_first(self, act: Callable[[], Result]) -> Result:
        """Let the first rank act; every rank gets its result, or raises its error."""
        if self.mesh is None:
            return act()
        told: list[Any] = [None, None]
        if self.first:
            try:
                told[0] = act()
            except Exception as error:
                told[1] = _picklable(error)
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        if told[1] is not None:
            raise told[1]
        return told[0]

    def fail_together(self, error: BaseException | None) -> None:
        """Raise on every rank if one of them has an error."""
        for failure in self.gather_objects(error and str(error)):
            if failure:
                raise OSError(failure) from error

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise on every rank if a value of one of them differs from the first rank's."""
        found = self.gather_objects(dict(values))
        for rank, others in enumerate(found):
            for name, other in others.items():
                if other != found[0][name]:
                    raise ValueError(
                        f"all ranks must have the same {name}: rank 0 has {found[0][name]} and rank {rank} has {other}"
                    )


def _picklable(error: Exception) -> Exception:
    """The error, or its text if it cannot be pickled: the other ranks would wait for it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class of another library may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextlib.contextmanager
def join_ranks(device: str, timeout: float, *, sequence: int = 1, tensor: int = 1) -> Iterator[Ranks]:
    """The ranks that torchrun started, or one process; a rank that is silent for `timeout` seconds ends the others.

    `sequence` of them share the tokens of a sequence, and `tensor` the heads of the model.
    """
    if not under_torchrun():
        if sequence * tensor > 1:
            raise ValueError(
                f"sequence_parallel={sequence} and tensor_parallel={tensor} need {sequence * tensor} ranks or a "
                f"multiple, and this is one process: start it with --ranks {sequence * tensor} or torchrun, or pass "
                "--sequence-parallel 1 --tensor-parallel 1"
            )
        yield Ranks(device=find_device(device))
        return
    if dist.is_initialized():
        raise RuntimeError("training creates its own process group: destroy yours first, or create it after training")
    check_gpus(local_rank() + 1, device)
    chosen = find_device(device)
    if chosen.type == "cuda":
        if ":" in device:
            raise ValueError(f"each rank takes the GPU of its local rank: pass --device cuda, not {device}")
        chosen = torch.device("cuda", local_rank())
        torch.cuda.set_device(chosen)
    # Numbers and checkpoints travel between CPUs, so ranks have gloo beside NCCL.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    patience = timedelta(seconds=timeout)
    store, rank, world = next(rendezvous("env://", timeout=patience))
    if world % (sequence * tensor):
        raise ValueError(
            f"sequence_parallel={sequence} times tensor_parallel={tensor} must divide the ranks, and there are {world}"
        )
    # The store outlives a group: without a prefix, gloo would connect a second run to the addresses of the first.
    store = dist.PrefixStore(f"run-{next(_joined)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    if rank == 0 and chosen.type == "cpu" and torchrun_cannot_restart_gloo():
        setting = " ".join(f"{name}={value}" for name, value in RESTARTABLE.items())
        print(f"torchrun cannot restart ranks on gloo: start it with {setting} in its environment", file=sys.stderr)
    shape = (world // (sequence * tensor), sequence, tensor)
    mesh = init_device_mesh(chosen.type, shape, mesh_dim_names=("data", "sequence", "tensor"))
    try:
        yield Ranks(device=chosen, rank=rank, restarts=torchrun_restarts(), timeout=patience, mesh=mesh)
    except Stopped:
        _leave()
        raise
    # Not after an error: the other ranks may be gone, or wait for this one. `exit_process` ends the group then.
    _leave()


def exit_process(status: int) -> NoReturn:
    """End this process with a status, also where an error has left its group of ranks alive.

    Python would take the group apart while its threads may still wait for other ranks, and abort.
    """
    if dist.is_available() and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _leave() -> None:
    # DeepSpeed, if it was used, remembers the group.
    comm = sys.modules.get("deepspeed.comm")
    (dist if comm is None or not comm.is_initialized() else comm).destroy_process_group()


def torchrun_arguments(ranks: int, max_restarts: int, program: list[str]) -> list[str]:
    """The arguments with which torchrun runs a program on `ranks` processes of this machine."""
    return ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", *program]


def check_gpus(ranks: int, device: str) -> None:
    """Refuse more ranks on this machine than it has GPUs, if they train on GPUs. This starts no GPU."""
    gpus = torch.cuda.device_count()
    if ranks > gpus and (device.startswith("cuda") or (device == "auto" and gpus)):
        raise ValueError(
            f"every rank needs a GPU of its own, and {ranks} ranks are more than the {gpus} GPUs that PyTorch finds "
            f"here: start fewer ranks, or train on the CPU (--device cpu)"
        )


def take_fastest_threads(device: torch.device) -> None:
    """On a CPU, set PyTorch's number of threads to the one that is fastest now, unless OMP_NUM_THREADS states it."""
    if device.type == "cpu" and not environment.value("OMP_NUM_THREADS"):
        torch.set_num_threads(fastest_threads(thread_rates()))


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r} here ({str(error).splitlines()[0]}): leave --device out") from None
