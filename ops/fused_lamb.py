"""LAMB: Adam's direction, rescaled for each tensor by the ratio of the norms of weights and direction.

With Adam's bias-corrected moments m and v, one step of a tensor p is

    u = m / (sqrt(v) + eps) + weight_decay p
    p = p - lr clamp(|p| / |u|, min_coeff, max_coeff) u

and the ratio is 1 where either norm is 0. Source: You et al. (2020), algorithm 2; names, defaults and the bounds of
the ratio from DeepSpeed, `ops/lamb/fused_lamb.py`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedLamb(torch.optim.Optimizer):
    """LAMB with DeepSpeed's arguments.

    `eps_inside_sqrt` divides by sqrt(v + eps) instead. Raises ValueError for `amsgrad` and for a `max_grad_norm`:
    clipping is the engine's `gradient_clipping`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ):
        if amsgrad:
            raise ValueError("amsgrad=True is not supported; LAMB has no such variant here")
        if max_grad_norm > 0:
            raise ValueError(f"{max_grad_norm=} is not supported; set gradient_clipping in the engine's config")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; `closure`, if given, computes the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_parameter(param, group)
        return loss

    def _step_parameter(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        update = self._direction(param, group).add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = param.norm(), update.norm()
        ratio = (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
        # Computed on the device: reading the norms would wait for it at every tensor.
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
        param.sub_(update.mul_(ratio), alpha=group["lr"])

    def _direction(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state, (beta1, beta2), eps = self.state[param], group["betas"], group["eps"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        correction1 = 1 - beta1 ** state["step"] if group["bias_correction"] else 1.0
        correction2 = 1 - beta2 ** state["step"] if group["bias_correction"] else 1.0
        if group["eps_inside_sqrt"]:
            denominator = (state["exp_avg_sq"] / correction2).add_(eps).sqrt_()
        else:
            denominator = state["exp_avg_sq"].sqrt().div_(math.sqrt(correction2)).add_(eps)
        return (state["exp_avg"] / correction1).div_(denominator)
