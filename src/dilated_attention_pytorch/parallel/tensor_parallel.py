"""Heads and feed-forward features over the ranks of a mesh's axis, through PyTorch's tensor-parallel plans.

The first linear layer of a pair gives each rank its share of the features, and the second one sums over ranks. What
lies between works on a share: attention on some of the heads, a norm with statistics of all ranks, and dropout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dilated_attention_pytorch.core.call import wide_dtype
from dilated_attention_pytorch.core.modes import first_derivatives_only
from dilated_attention_pytorch.nn.multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.nn.transformer import FeedForward
from dilated_attention_pytorch.parallel.group import Place

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def indivisible(model: nn.Module, ranks: int) -> str | None:
    """Why `ranks` ranks cannot share the heads and features of a model; None if they can."""
    for name, module in model.named_modules():
        counts: dict[str, int] = {}
        if isinstance(module, MultiheadDilatedAttention):
            counts = {"heads": module.num_heads, "key/value heads": module.num_kv_heads}
        elif isinstance(module, FeedForward):
            counts = {"feed-forward features": module.linear1.out_features}
        for what, count in counts.items():
            if count % ranks:
                return (
                    f"the {ranks} ranks of the axis 'tensor' must divide the {count} {what} of "
                    f"{name or 'the model'} ({type(module).__name__}): choose another size of the axis, or of the model"
                )
    return None


def share_features(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the projections of every multihead attention and feed-forward network over the ranks of a mesh of one axis.

    `AcrossRanks` tells the attention which of the heads this rank has.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def cut(module: nn.Module, first: tuple[str, ...], last: str) -> None:
        plan: dict[str, ParallelStyle] = {**{name: ColwiseParallel() for name in first}, last: RowwiseParallel()}
        parallelize_module(module, mesh, plan)
        if isinstance(module.norm, nn.LayerNorm | nn.RMSNorm):
            module.norm = SharedNorm(module.norm, mesh)

    for module in list(model.modules()):
        if isinstance(module, MultiheadDilatedAttention):
            if isinstance(module, ImprovedMultiheadDilatedAttention):
                module.unfuse()  # no plan of PyTorch's cuts the rows of three projections, each by heads
            cut(module, ("q_proj", "k_proj", "v_proj"), "out_proj")
            if module.q_norm is not None and module.k_norm is not None:
                heads = SequenceParallel(sequence_dim=2, use_local_output=True)
                parallelize_module(module, mesh, {"q_norm": heads, "k_norm": heads})
                for norm in (module.q_norm, module.k_norm):
                    norm.weight.register_hook(_sum_over_ranks)
            module.register_forward_pre_hook(_EnterOnce(mesh), with_kwargs=True)
        elif isinstance(module, FeedForward):
            cut(module, ("linear1", "gate") if module.activation == "swiglu" else ("linear1",), "linear2")
            module._modules["dropout"] = SharedDropout(module.dropout.p, Place(mesh=mesh, axis="tensor"))


def share_projections(module: MultiheadDilatedAttention, heads: Place | None) -> None:
    """Cut the projections of one attention by heads over some ranks; all start from the first rank's weights."""
    if heads is None or (ranks := heads.ranks()).size == 1:
        return
    from torch.distributed.device_mesh import DeviceMesh

    if (problem := indivisible(module, ranks.size)) is not None:
        raise ValueError(problem)
    assert ranks.group is not None
    device_type = module.out_proj.weight.device.type
    share_features(module, DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("tensor",)))


class _EnterOnce:
    """Passes query, key and value that are one tensor to the projections as one replicated tensor.

    Every rank has a part of its gradient. This way the parts are summed over ranks once instead of three times.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        from torch.distributed.tensor import DTensor, Replicate

        entered: dict[int, Tensor] = {}

        def enter(x: Tensor) -> Tensor:
            if id(x) not in entered:
                entered[id(x)] = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
            return entered[id(x)]

        named = {name: enter(x) if name in ("query", "key", "value") else x for name, x in kwargs.items()}
        return (*(enter(x) for x in args[:3]), *args[3:]), named


def _sum_over_ranks(grad: Any) -> Any:
    """The gradient of a parameter that all ranks have whole, from those of each rank's heads."""
    from torch.distributed.tensor import Replicate

    return grad.redistribute(placements=[Replicate()])


class SharedNorm(nn.Module):
    """`nn.LayerNorm` or `nn.RMSNorm` over features of which each rank of a mesh has an equal share."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.eps = norm.eps
        self.features = norm.normalized_shape[0]
        self._ranks = Place(mesh=mesh, axis="tensor")
        for name, parameter in norm.named_parameters():  # an RMS norm has no bias
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    def forward(self, x: Tensor) -> Tensor:
        """`(..., features / ranks)` from the rank's share of the features."""
        from torch.distributed.tensor import DTensor

        weight, *bias = (one.to_local() for one in self.parameters() if isinstance(one, DTensor))
        return _NormAcrossRanks.apply(x, weight, bias[0] if bias else None, self.eps, self._ranks.ranks().group)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}"


class _NormAcrossRanks(torch.autograd.Function):
    """Layer norm, or without a bias RMS norm.

    Two numbers per row travel each way: mean and variance, and the two means that the gradient subtracts. An RMS norm
    subtracts no mean, and divides by the mean square instead of the variance.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, group: ProcessGroup) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        own = torch.stack([wide.mean(-1), wide.var(-1, correction=0)])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
        means, variances = torch.stack(every, 1)  # (ranks, ...) each
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
        if bias is None:
            mean, variance = torch.zeros_like(mean), variance + mean.square()
        mean, rstd = mean[..., None], (variance + eps).rsqrt()[..., None]
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.group, ctx.centers = group, bias is not None
        normal = (wide - mean) * rstd * weight
        return (normal if bias is None else normal + bias).to(x.dtype)

    @staticmethod
    @first_derivatives_only("a norm across ranks")
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad.to(wide_dtype(x.dtype))
        normal = (x - mean) * rstd
        inner = grad * weight
        means = torch.stack([inner.mean(-1), (inner * normal).mean(-1)])
        dist.all_reduce(means, group=ctx.group)
        shift, tilt = (means / dist.get_world_size(ctx.group))[..., None].unbind(0)
        dx = rstd * (inner - (shift if ctx.centers else 0.0) - normal * tilt)
        rows = tuple(range(grad.dim() - 1))
        of_bias = grad.sum(rows).to(weight.dtype) if ctx.centers else None
        return dx.to(x.dtype), (grad * normal).sum(rows).to(weight.dtype), of_bias, None, None


class SharedDropout(nn.Module):
    """`nn.Dropout` on a rank's share of the features: ranks that draw the same random numbers drop independently.

    Every rank draws a single number, so that the ranks stay in step.
    """

    def __init__(self, p: float, ranks: Place) -> None:
        super().__init__()
        self.p, self._ranks = p, ranks

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        seed = int(torch.randint(1 << 48, ()).item()) + self._ranks.ranks().rank
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=generator)
        return x * kept / (1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
