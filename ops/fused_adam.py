"""Adam and AdamW with the arguments of DeepSpeed's FusedAdam and DeepSpeedCPUAdam, on PyTorch's fused kernels.

With gradient g, moments m and v, step t and corrections c1 = 1 - beta1^t, c2 = 1 - beta2^t (both 1 without bias
correction), one step is

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    p = p - lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p)

where Adam (adam_w_mode=False) adds weight_decay p to g instead. Source: Kingma and Ba (2015), algorithm 1;
Loshchilov and Hutter (2019), algorithm 2; names and defaults from DeepSpeed, `ops/adam/`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """AdamW, or Adam with `adam_w_mode=False`; one pass over memory on the CPU and on a GPU.

    `set_grad_none` is accepted and ignored: gradients are always freed. Raises ValueError for `amsgrad`, which
    DeepSpeed's refuses too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if amsgrad:
            raise ValueError("amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")
        super().__init__(
            params,
            lr=lr,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
            fused=True,
        )
        self.bias_correction = bias_correction

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; `closure`, if given, computes the loss that is returned."""
        if self.bias_correction:
            return super().step(closure)
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            self._step_uncorrected(group)
        return loss

    @torch.no_grad()
    def _step_uncorrected(self, group: dict[str, Any]) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        for param in (p for p in group["params"] if p.grad is not None):
            state, grad = self.state[param], param.grad
            if not state:
                # Counted in the form of torch.optim.Adam, which reads it whenever a state is loaded.
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["step"] += 1
            if group["decoupled_weight_decay"]:
                param.mul_(1 - lr * decay)
            else:
                grad = grad.add(param, alpha=decay)
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            param.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with the argument order of DeepSpeed's; parameters may be on any device.

    `fp32_optimizer_states` is accepted and ignored: the state has the dtype of the parameters that are stepped, and an
    engine steps fp32 masters.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
