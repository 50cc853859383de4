"""DeepSpeed's ZeRO as the engine of a run: it shards the model over all ranks, clips gradients and steps.

Its state is read one whole parameter at a time and saved as the other engines save theirs, so that a checkpoint fits
any engine and any number of ranks. DeepSpeed is imported only if a run asks for it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch.core.checks import import_optional
from dilated_attention_pytorch.models.longnet import LongNetLM
from dilated_attention_pytorch.parallel.options import Zero
from dilated_attention_pytorch.train.config import TrainConfig
from dilated_attention_pytorch.train.memory import MemoryOptions
from dilated_attention_pytorch.train.ranks import Ranks


class Values(NamedTuple):
    """A whole parameter, and AdamW's state of it."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def check_zero(zero: Zero, ranks: Ranks) -> None:
    """Refuse, on all ranks and before the run begins, what DeepSpeed cannot do here."""
    if ranks.mesh is None:
        raise ValueError("the engine deepspeed needs torchrun: add --ranks P, or --ranks 1 for one process")
    import_deepspeed(ranks.device)
    if zero.nvme_path is not None:
        ranks.fail_together(_nvme_problem(zero.nvme_path))


class ZeroModel(nn.Module):
    """A model that DeepSpeed trains with a given AdamW; every rank calls every method, in the same order."""

    def __init__(self, plain: LongNetLM, optimizer: torch.optim.Optimizer, config: TrainConfig, ranks: Ranks) -> None:
        super().__init__()
        assert config.zero is not None
        self._stage, self._device, self._accumulate = config.zero.stage, ranks.device, config.accumulate
        self._optimizer = optimizer
        # By name, for DeepSpeed puts its own flat tensors into the optimizer's groups.
        names = {parameter: name for name, parameter in plain.named_parameters()}
        self.groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        settings = config.zero.config(
            batch_size=config.batch_size // ranks.axis("data") // config.accumulate,
            clip_norm=config.clip_norm,
            accumulate=config.accumulate,
        )
        self._engine, _ = start_deepspeed(plain, optimizer, settings, config.memory, ranks.device)

    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        return self._engine(tokens, **how)

    def update(self, losses: Iterable[Tensor]) -> float:
        """One step of the optimizer along the clipped gradient of the ranks' mean of the sum of losses.

        There is one loss per micro-batch, computed after the backward of the one before. Returns the norm before
        clipping; if that is not finite, nothing has changed.
        """
        for loss in losses:
            self._engine.backward(loss, scale_wrt_gas=False)
            self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if math.isfinite(norm) and norm >= 0.0:
            return norm
        if not self._engine.optimizer.overflow:
            raise FloatingPointError(
                "a gradient that is not finite has reached the weights, which this version of DeepSpeed lets through: "
                "resume from the last checkpoint with a lower --learning-rate, or with --engine fsdp"
            )
        return math.nan

    def state(self) -> dict[str, Any]:
        """Model and optimizer by name, each rank with its rows of every tensor, as FSDP2 has them."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._link_moments()
        updates = next(iter(self._optimizer.state.values()))["step"].detach().to("cpu", copy=True)
        weights: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        seen: dict[int, str] = {}
        for name, tensor in self._engine.module.state_dict(keep_vars=True).items():
            if id(tensor) in seen:  # tied
                weights[name] = weights[seen[id(tensor)]]
            elif isinstance(tensor, nn.Parameter):
                seen[id(tensor)] = name
                weights[name] = self._rows(safe_get_full_fp32_param(tensor))
                moments[name] = {"step": updates} | {
                    key: self._rows(safe_get_full_optimizer_state(tensor, key)) for key in Values._fields[1:]
                }
            else:
                weights[name] = tensor
        settings = [
            # `fused` depends on where the update runs, and other engines choose their own.
            {key: group[key] for key in self._optimizer.defaults} | {"fused": None, "params": names}
            for group, names in zip(self._optimizer.param_groups, self.groups)
        ]
        return {"model": weights, "optimizer": {"state": moments, "param_groups": settings}}

    def restore(self, updates: int, read: Callable[[str, torch.Size], Values]) -> None:
        """Continue with what `read(name, shape)` returns for each parameter.

        `updates` counts AdamW's updates: fewer than steps, if some were skipped.
        """
        self._make_moments(updates)
        error: Exception | None = None
        for name, parameter in self._engine.module.named_parameters():
            values = None
            try:
                values = read(name, getattr(parameter, "ds_shape", parameter.shape))
            except Exception as caught:  # raised at the end: the other ranks wait for this one
                error = error or caught
            (self._set_sharded if self._stage == 3 else self._set)(parameter, values)
        if error is not None:
            raise error

    def _make_moments(self, updates: int) -> None:
        """Make DeepSpeed lay out AdamW's state by a step that moves nothing, and set its count of updates."""
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0  # the loop sets it at every step
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self._device)
        self.update(self(tokens).float().sum() * 0.0 for _ in range(self._accumulate))
        for state in self._optimizer.state.values():
            state["step"].fill_(updates)
        self._link_moments()

    def _link_moments(self) -> None:
        # In stages 1 and 2 DeepSpeed looks for AdamW's state when only the first group of parameters has one.
        if self._stage < 3:
            from deepspeed.utils import lazy_init_hp_params_optimizer_state

            sharded = self._engine.optimizer
            for parameters, shard in zip(sharded.bit16_groups, sharded.single_partition_of_fp32_groups):
                lazy_init_hp_params_optimizer_state(parameters, shard, self._optimizer.state)

    def _set(self, parameter: nn.Parameter, values: Values | None) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if values is None:
            return
        parameter.data.copy_(values.weight)
        safe_set_full_fp32_param(parameter, values.weight)
        for key, moment in zip(Values._fields[1:], values[1:]):
            safe_set_full_optimizer_state(parameter, moment, key)

    def _set_sharded(self, parameter: nn.Parameter, values: Values | None) -> None:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param, safe_set_local_optimizer_state

        with GatheredParameters([parameter], modifier_rank=0):
            if values is not None:
                parameter.data.copy_(values.weight)
        if values is None:
            return
        length = safe_get_local_fp32_param(parameter).numel()  # the last rank's may reach past the end
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def own(whole: Tensor) -> Tensor:
            return F.pad(whole.flatten(), (0, length * ranks - whole.numel())).narrow(0, rank * length, length)

        safe_set_local_fp32_param(parameter, own(values.weight))
        for key, moment in zip(Values._fields[1:], values[1:]):
            safe_set_local_optimizer_state(parameter, own(moment), key)

    def _rows(self, whole: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        chunks = whole.chunk(self._mesh.size())
        rank = self._mesh.get_local_rank()
        own = chunks[rank] if rank < len(chunks) else whole[:0]
        # A copy, so that the whole tensor is freed before the next one is gathered.
        own = own.detach().to("cpu", copy=True)
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )


def start_deepspeed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    memory: MemoryOptions,
    device: torch.device,
) -> tuple[Any, torch.optim.Optimizer]:
    """Let DeepSpeed train a model under the options' autocast; returns its engine and its wrapper of the optimizer."""
    if memory.precision != "fp32":
        # Within the model: DeepSpeed switches off what is around it.
        autocast: Any = memory.autocast(device)
        model.forward = autocast(model.forward)
    engine, sharded, *_ = import_deepspeed(device).initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine, sharded


def import_deepspeed(device: torch.device) -> Any:
    # Otherwise DeepSpeed takes a GPU wherever there is one.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    deepspeed = import_optional("deepspeed", "deepspeed", "the engine deepspeed")
    # On CPUs it would compile an all-reduce that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls deprecated functions of PyTorch at every step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return deepspeed


def _nvme_problem(folder: str) -> OSError | None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        return OSError(
            "NVMe offload needs libaio and a compiler, which are not here: install libaio-dev (apt) or libaio-devel "
            "(dnf), or offload to main memory (--cpu-offload)"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return OSError(f"NVMe offload cannot use {folder} ({error.strerror}): choose another folder")
    return None
