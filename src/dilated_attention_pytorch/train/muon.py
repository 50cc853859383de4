"""Muon for the matrices of a model's layers and AdamW for its other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """PyTorch's `Muon` for `matrices`, and PyTorch's `AdamW` for the parameter groups `others`.

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
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(
                f"optimizer 'muon' is PyTorch's own, from 2.9 on, and this is {torch.__version__}: update it, or use "
                "'adamw'"
            )
        self._muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, **adamw)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_muon, *others = self.param_groups
        # A state that was loaded is in new objects.
        self._adamw.param_groups, self._adamw.state, self._muon.state = others, self.state, self.state
        self._adamw.step()
        whole = [one for one in of_muon["params"] if not hasattr(one, "device_mesh")]
        self._muon.param_groups = [{**of_muon, "params": whole}]
        self._muon.step()
        sharded = [one for one in of_muon["params"] if hasattr(one, "device_mesh") and one.grad is not None]
        by_mesh: dict[Any, list[Any]] = {}
        for parameter in sharded:
            if _is_sharded_by_rows(parameter):
                by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
            else:
                self._step_gathered(parameter, of_muon)
        for mesh, parameters in by_mesh.items():
            for first in range(0, len(parameters), mesh.size()):
                self._step_in_turns(parameters[first : first + mesh.size()], mesh, of_muon)
        return loss

    @torch.no_grad()
    def _step_in_turns(self, parameters: list[Any], mesh: Any, group: dict[str, Any]) -> None:
        """Update at most one matrix per rank. Momentum stays in shards; the n-th rank gets all rows of the n-th."""
        ranks, momentum = mesh.size(), group["momentum"]
        shards = []
        for parameter in parameters:
            gradient, state = parameter.grad.to_local(), self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            buffer = state["momentum_buffer"].to_local()
            buffer.lerp_(gradient, 1 - momentum)
            shards.append(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
        own = parameters[mesh.get_local_rank()] if mesh.get_local_rank() < len(parameters) else None
        mine = [0] * ranks if own is None else [rows * own.shape[1] for rows in _rows_per_rank(own.shape[0], ranks)]
        theirs = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
        whole = _exchange(torch.cat([shard.flatten() for shard in shards]), theirs, mine, mesh)
        if own is not None:
            whole = _update(whole.view(own.shape), group).flatten()
        for parameter, update in zip(parameters, _exchange(whole, mine, theirs, mesh).split(theirs)):
            local = parameter.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view_as(local))

    @torch.no_grad()
    def _step_gathered(self, parameter: Any, group: dict[str, Any]) -> None:
        shard, state = parameter.grad, self.state[parameter]
        parameter.grad = _gathered(shard)
        for name, value in state.items():
            state[name] = _gathered(value)
        self._muon.param_groups = [{**group, "params": [parameter]}]
        self._muon.step()
        parameter.grad = shard
        for name, value in state.items():
            state[name] = value.redistribute(placements=parameter.placements)


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


def _update(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """What PyTorch's Muon adds to a matrix whose gradient, with momentum, is `matrix`."""
    parameter = nn.Parameter(torch.zeros_like(matrix))
    parameter.grad = matrix
    same = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([parameter], **same, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    return parameter.detach()


def _gathered(shard: Any) -> Tensor:
    """The whole of a tensor that ranks shard, as a tensor that all of them hold."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shard.device_mesh
    return DTensor.from_local(shard.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
