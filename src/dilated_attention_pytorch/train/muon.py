"""Muon for the matrices of a model's layers and AdamW for its other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """PyTorch's `Muon` for `matrices`, and PyTorch's `AdamW` for the parameter groups `others`.

    Muon's updates are scaled to the size of AdamW's, so that both take one learning rate and one weight decay. A matrix
    that ranks shard is gathered for its update, one matrix at a time, and every rank computes the same update.

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
        for parameter in of_muon["params"]:
            if hasattr(parameter, "device_mesh") and parameter.grad is not None:
                self._step_sharded(parameter, of_muon)
        return loss

    @torch.no_grad()
    def _step_sharded(self, parameter: Any, group: dict[str, Any]) -> None:
        shard, state = parameter.grad, self.state[parameter]
        parameter.grad = _gathered(shard)
        for name, value in state.items():
            state[name] = _gathered(value)
        self._muon.param_groups = [{**group, "params": [parameter]}]
        self._muon.step()
        parameter.grad = shard
        for name, value in state.items():
            state[name] = value.redistribute(placements=parameter.placements)


def _gathered(shard: Any) -> Tensor:
    """The whole of a tensor that ranks shard, as a tensor that all of them hold."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shard.device_mesh
    return DTensor.from_local(shard.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
