"""Muon for the matrices of a model's layers and AdamW for its other parameters, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Those of torch.optim.Muon, whose updates these are. It takes one matrix after another, which for small ones takes the
# host longer than the GPU; here matrices of one shape are orthogonalised together.
_MOMENTUM, _STEPS, _EPS = 0.95, 5, 1e-7
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TOGETHER = 1 << 24  # numbers of a batch of matrices, unless a single one has more


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for `matrices`, and PyTorch's `AdamW` for the parameter groups `others`.

    Muon's updates are scaled to the size of AdamW's, so that both take one learning rate and one weight decay. Matrices
    whose rows ranks shard (FSDP2) are updated in turns: each rank orthogonalises every n-th matrix for all of n ranks.
    A matrix that is also sharded by columns is gathered, and every rank computes the same update.

    >>> layer = nn.Linear(4, 8)
    >>> optimizer = MuonWithAdamW([layer.weight], [{"params": [layer.bias]}], lr=1e-3, weight_decay=0.1)
    >>> layer(torch.randn(2, 4)).sum().backward()
    >>> optimizer.step()
    >>> [sorted(state) for state in optimizer.state.values()]
    [['exp_avg', 'exp_avg_sq', 'step'], ['momentum_buffer']]
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        **adamw: Any,
    ) -> None:
        self._adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, **adamw)
        of_muon = {"params": matrices, "lr": lr, "weight_decay": weight_decay}
        super().__init__([of_muon, *self._adamw.param_groups], {})
        self.defaults = dict(self._adamw.defaults)  # of groups that are added later

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adamw = torch.optim.AdamW(self.param_groups[1:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_muon, *others = self.param_groups
        self._adamw.param_groups, self._adamw.state = others, self.state  # a state that was loaded is in new objects
        self._adamw.step()
        matrices = [one for one in of_muon["params"] if one.grad is not None]
        by_mesh: dict[Any, list[Any]] = {}
        for parameter in matrices:
            if hasattr(parameter, "device_mesh"):
                if _is_sharded_by_rows(parameter):
                    by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
                else:
                    self._step_gathered(parameter, of_muon)
        for mesh, parameters in by_mesh.items():
            for first in range(0, len(parameters), mesh.size()):
                self._step_in_turns(parameters[first : first + mesh.size()], mesh, of_muon)
        for some in _batches([one for one in matrices if not hasattr(one, "device_mesh")]):
            self._step_together(some, of_muon)
        return loss

    def _step_together(self, parameters: list[Any], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        gradients = [one.grad for one in parameters]
        momenta = [self._momentum(one) for one in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        update = _orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, _MOMENTUM)))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, update.unbind(), alpha=-_rate(parameters[0], group))

    def _step_in_turns(self, parameters: list[Any], mesh: Any, group: dict[str, Any]) -> None:
        """Update at most one matrix per rank. Momentum stays in shards; the n-th rank gets all rows of the n-th."""
        ranks, shards = mesh.size(), []
        for parameter in parameters:
            gradient, momentum = parameter.grad.to_local(), self._momentum(parameter).to_local()
            shards.append(gradient.lerp(momentum.lerp_(gradient, 1 - _MOMENTUM), _MOMENTUM))
        own = parameters[mesh.get_local_rank()] if mesh.get_local_rank() < len(parameters) else None
        mine = [0] * ranks if own is None else [rows * own.shape[1] for rows in _rows_per_rank(own.shape[0], ranks)]
        theirs = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
        whole = _exchange(torch.cat([shard.flatten() for shard in shards]), theirs, mine, mesh)
        if own is not None:
            whole = _orthogonal(whole.view(1, *own.shape)).flatten().to(whole.dtype)
        for parameter, update in zip(parameters, _exchange(whole, mine, theirs, mesh).split(theirs)):
            local = parameter.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.view_as(local), alpha=-_rate(parameter, group))

    def _step_gathered(self, parameter: Any, group: dict[str, Any]) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        gradient, momentum, mesh = parameter.grad, self._momentum(parameter), parameter.device_mesh
        whole = gradient.lerp(momentum.lerp_(gradient, 1 - _MOMENTUM), _MOMENTUM).full_tensor()
        update = DTensor.from_local(_orthogonal(whole[None])[0], mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.redistribute(placements=parameter.placements), alpha=-_rate(parameter, group))

    def _momentum(self, parameter: Any) -> Any:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        return state["momentum_buffer"]


def _batches(matrices: list[Any]) -> Iterator[list[Any]]:
    """Matrices of one shape, dtype and device, as many as are orthogonalised together."""
    alike: dict[Any, list[Any]] = {}
    for one in matrices:
        alike.setdefault((one.shape, one.dtype, one.device), []).append(one)
    for some in alike.values():
        most = max(1, TOGETHER // max(1, some[0].numel()))
        for first in range(0, len(some), most):
            yield some[first : first + most]


def _orthogonal(matrices: Tensor) -> Tensor:
    """Matrices `(n, rows, columns)` with singular values near 1, by Newton-Schulz iterations in bfloat16."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _rate(matrix: Tensor, group: dict[str, Any]) -> float:
    """The learning rate at which updates have the root mean square of AdamW's."""
    return group["lr"] * 0.2 * math.sqrt(max(matrix.shape))


def _is_sharded_by_rows(parameter: Any) -> bool:
    from torch.distributed.tensor import Shard

    return tuple(parameter.placements) == (Shard(0),)


def _rows_per_rank(rows: int, ranks: int) -> list[int]:
    """The rows of each rank's shard: those of `torch.chunk`, and none where there are no more."""
    most = -(-rows // ranks)
    return [min(most, max(rows - rank * most, 0)) for rank in range(ranks)]


def _exchange(sent: Tensor, sizes: list[int], expected: list[int], mesh: Any) -> Tensor:
    """Send the n-th part to the n-th rank of a mesh; returns the parts that its ranks send here."""
    received = sent.new_empty(sum(expected))
    torch.distributed.all_to_all_single(received, sent, expected, sizes, group=mesh.get_group())
    return received
