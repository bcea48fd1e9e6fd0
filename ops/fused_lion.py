"""Lion: the sign of an interpolated momentum, with decoupled weight decay.

    p = p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
    m = beta2 m + (1 - beta2) g

Source: Chen et al. (2023), algorithm 2; names and defaults from DeepSpeed, `ops/lion/`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedLion(torch.optim.Optimizer):
    """Lion with DeepSpeed's arguments; `set_grad_none` is ignored: gradients are always freed."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; `closure`, if given, computes the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                direction = state["exp_avg"].lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                state["exp_avg"].lerp_(param.grad, 1 - beta2)
        return loss


class DeepSpeedCPULion(FusedLion):
    """`FusedLion` with the arguments of DeepSpeed's; parameters may be on any device.

    `fp32_optimizer_states` is accepted and ignored: the state has the dtype of the parameters that are stepped, and an
    engine steps fp32 masters.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ):
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
