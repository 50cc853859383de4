"""The options of a training run, as one frozen value: a module carries it, and `train` reads it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch

from dilated_attention_pytorch.core.checks import COUNT, MOST_ENTRIES, check_fields
from dilated_attention_pytorch.core.settings import setting
from dilated_attention_pytorch.parallel.group import Place, RankGroup, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXIS_OF = {"data_parallel": "data", "sequence_parallel": "sequence", "model_parallel": "tensor"}
_RESTARTS = 3  # of a fault-tolerant run


@dataclass(frozen=True, kw_only=True)
class Zero:
    """What DeepSpeed's ZeRO shards, and where it keeps the shards.

    Args:
        stage: 1 shards the optimizer state, 2 gradients too, 3 parameters too.
        cpu_offload: keep the optimizer state, and in stage 3 the parameters, in main memory, and update them there.
        nvme_path: keep them in this folder on a fast disk instead; stage 3 only.
    """

    stage: int = setting(3, "with --engine deepspeed: what ZeRO shards; 1, 2 or 3", flag="zero_stage")
    cpu_offload: bool = setting(False, "with --engine deepspeed: keep shards in main memory")
    nvme_path: str | None = setting(None, "with --engine deepspeed: keep shards in this folder", flag="nvme_offload")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stage not in (1, 2, 3):
            raise ValueError(f"a ZeRO stage is 1, 2 or 3, got {self.stage}: for none, train with FSDP2 or DDP")
        if self.nvme_path is not None:
            # Absolute, so that the run can be resumed from anywhere.
            object.__setattr__(self, "nvme_path", os.path.abspath(self.nvme_path))
            if self.stage != 3:
                raise ValueError(f"NVMe offload needs ZeRO stage 3, got {self.stage}: choose 3, or CPU offload")

    @property
    def offloads(self) -> bool:
        """Whether the optimizer state is kept and updated away from the GPU."""
        return self.cpu_offload or self.nvme_path is not None

    def config(self, *, batch_size: int = 1, clip_norm: float = 0.0, accumulate: int = 1) -> dict[str, Any]:
        """The configuration for `deepspeed.initialize`, for a float32 model and an optimizer of PyTorch's.

        `batch_size` is that of one rank in one of the `accumulate` backward passes of a step; a `clip_norm` of 0 clips
        no gradients.

        >>> Zero(stage=2, cpu_offload=True).config(batch_size=4, clip_norm=1.0)["zero_optimization"]
        {'stage': 2, 'offload_optimizer': {'device': 'cpu', 'pin_memory': True}}
        """
        sharding: dict[str, Any] = {"stage": self.stage}
        if self.offloads:
            place: dict[str, Any] = {"device": "cpu" if self.nvme_path is None else "nvme", "pin_memory": True}
            if self.nvme_path is not None:
                place["nvme_path"] = self.nvme_path
            sharding["offload_optimizer"] = place
            if self.stage == 3:
                sharding["offload_param"] = place
        return {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": clip_norm,
            "zero_optimization": sharding,
            # AdamW is PyTorch's here as in the other engines: its fused form needs no compiler on the machine.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run-level keywords of `RingAdvancedDistributedDilatedAttention`.

    Args:
        sequence_parallel, model_parallel, data_parallel: how many ranks share the tokens of a sequence, how many share
            the heads, and how many have different batches. True takes all ranks that the others leave, False one. None
            leaves it open: the remaining ranks share the sequence, or otherwise have different batches.
        use_deepspeed: shard the model by DeepSpeed's ZeRO instead of FSDP2.
        zero_stage: 1, 2 or 3 (the default with DeepSpeed); see `Zero`.
        cpu_offload: keep the shards in main memory.
        nvme_offload: keep them in the folder `nvme_path` instead; training needs both.
        enable_fault_tolerance: restart ranks that die, and resume; up to `max_restarts` times.
        enable_monitoring: write the figures of every step to `log.jsonl` in the run's folder.
        auto_resume: the same command starts a run or continues it.
        checkpoint_interval: steps between checkpoints.

    >>> options = RunOptions(use_deepspeed=True, zero_stage=2, cpu_offload=True, auto_resume=True)
    >>> options.zero, options.max_restarts, options.resume
    (Zero(stage=2, cpu_offload=True, nvme_path=None), 0, 'auto')
    """

    sequence_parallel: bool | int | None = None
    model_parallel: bool | int | None = None
    data_parallel: bool | int | None = None
    use_deepspeed: bool = False
    zero_stage: int | None = None
    cpu_offload: bool = False
    nvme_offload: bool = False
    nvme_path: str | None = None
    enable_fault_tolerance: bool = False
    enable_monitoring: bool = False
    auto_resume: bool = False
    checkpoint_interval: int = 100

    def __post_init__(self) -> None:
        ranks = {"least": 1, "most": MOST_ENTRIES}
        check_fields(
            self, sequence_parallel=ranks, model_parallel=ranks, data_parallel=ranks, checkpoint_interval=COUNT
        )
        if self.nvme_path is not None and not self.nvme_offload:
            raise ValueError(f"nvme_path={self.nvme_path!r} is for nvme_offload=True: pass both, or neither")
        if self.use_deepspeed:
            self._zero(self.nvme_path or ("" if self.nvme_offload else None))  # errors come when options are made
            return
        for name in ("zero_stage", "cpu_offload", "nvme_offload"):
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{name} is DeepSpeed's: pass use_deepspeed=True with it, or leave it out")

    @property
    def stated_axes(self) -> dict[str, bool | int]:
        """What was stated about each axis of a mesh, by keyword."""
        stated = {name: getattr(self, name) for name in AXIS_OF}
        return {name: ranks for name, ranks in stated.items() if ranks is not None}

    def axes(self, ranks: int) -> dict[str, int]:
        """How many of all ranks lie on each axis of a mesh.

        >>> RunOptions(model_parallel=2, sequence_parallel=True).axes(8)
        {'data': 1, 'sequence': 4, 'tensor': 2}
        """
        stated = self.stated_axes
        sizes = {
            axis: 1 if stated.get(name) in (None, True) else int(stated[name]) or 1 for name, axis in AXIS_OF.items()
        }
        left, over = divmod(ranks, math.prod(sizes.values()))
        said = ", ".join(f"{name}={value}" for name, value in stated.items())
        if over or left == 0:
            raise ValueError(f"{said} must divide the number of ranks, got {ranks}: state other numbers")
        if left > 1:
            takers = [name for name, value in stated.items() if value is True]
            takers = takers or [name for name in ("sequence_parallel", "data_parallel") if name not in stated][:1]
            if len(takers) != 1:
                raise ValueError(
                    f"{said} can share {ranks} ranks in {'several ways' if takers else 'no way'}: state numbers of "
                    "ranks, such as model_parallel=2, or pass a mesh"
                )
            sizes[AXIS_OF[takers[0]]] = left
        return sizes

    def places(self, group: ProcessGroup | None, mesh: DeviceMesh | None) -> tuple[Place | None, Place | None]:
        """Where to find the ranks that share the sequence, and those that share the heads; None if none do."""
        sequence: Place | None = Place(group, mesh)
        heads = None
        if group is not None and mesh is None:  # the group states who shares the sequence
            if self.model_parallel is True or (self.model_parallel or 1) > 1:
                raise ValueError(
                    f"the ranks of a group share a sequence, got model_parallel={self.model_parallel} beside it: pass "
                    "mesh=init_device_mesh(..., mesh_dim_names=('sequence', 'tensor'))"
                )
            size, stated = ranks_of(group).size, self.sequence_parallel
            if stated is not None and stated is not True and size != (stated or 1):
                raise ValueError(
                    f"sequence_parallel={stated} contradicts a group of {size} ranks that share a sequence: change one "
                    "of them"
                )
        else:
            if mesh is None:
                world = ranks_of()
                axes = self.axes(world.size)
                if axes["data"] == world.size > 1:
                    return None, None
                mesh = None if axes["sequence"] == world.size else _mesh_of(world, axes)
            if mesh is not None:
                self.check_axes(mesh)
                names = mesh.mesh_dim_names or ("sequence",)
                sequence = Place(group, mesh) if "sequence" in names else None
                heads = Place(group, mesh, "tensor") if "tensor" in names else None
        return None if self.sequence_parallel is False else sequence, heads

    def check_axes(self, mesh: DeviceMesh) -> None:
        """Refuse a mesh whose axes differ from what is stated about them."""
        names = mesh.mesh_dim_names or ("sequence",)
        for keyword, stated in self.stated_axes.items():
            axis = AXIS_OF[keyword]
            size = (mesh[axis] if mesh.ndim > 1 else mesh).size() if axis in names else 1
            if stated is True and axis not in names:
                raise ValueError(f"{keyword}=True needs a mesh with an axis {axis!r}, got {names}: change one of them")
            if stated is not True and size != (stated or 1):
                raise ValueError(
                    f"{keyword}={stated} contradicts a mesh with {size} ranks on its axis {axis!r}: change one of them"
                )

    @property
    def zero(self) -> Zero | None:
        """The options of DeepSpeed's ZeRO; None without DeepSpeed."""
        if not self.use_deepspeed:
            return None
        if self.nvme_offload and self.nvme_path is None:
            raise ValueError("nvme_offload=True does not say where: pass nvme_path=FOLDER, on a local NVMe disk")
        return self._zero(self.nvme_path)

    def _zero(self, nvme_path: str | None) -> Zero:
        stage = 3 if self.zero_stage is None else self.zero_stage
        return Zero(stage=stage, cpu_offload=self.cpu_offload, nvme_path=nvme_path)

    @property
    def max_restarts(self) -> int:
        """How often torchrun restarts the ranks after a death."""
        return _RESTARTS if self.enable_fault_tolerance else 0

    @property
    def resume(self) -> Literal[False, "auto"]:
        """The `resume` of `train(config, run, resume=...)`."""
        return "auto" if self.auto_resume else False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> RunOptions:
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise FileNotFoundError(f"no file {path}: it should hold the text of options.to_json()") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the options of a run: {error}") from None


OPTIONS = tuple(field.name for field in dataclasses.fields(RunOptions))

# By process group and sizes, so that the layers of a model share one mesh and its groups.
_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], DeviceMesh]] = WeakKeyDictionary()


def _mesh_of(world: RankGroup, axes: dict[str, int]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    group = world.group
    assert group is not None
    known, sizes = _meshes.setdefault(group, {}), tuple(axes.values())
    if sizes not in known:
        devices = [kind.type for kind in group._device_types if torch.get_device_module(kind).is_available()]
        known[sizes] = init_device_mesh(max(devices, key="cpu".__ne__), sizes, mesh_dim_names=tuple(axes))
    return known[sizes]
