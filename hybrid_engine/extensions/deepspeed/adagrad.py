"""`deepspeed.ops.adagrad`: PyTorch's Adagrad with the arguments of DeepSpeedCPUAdagrad."""

from collections.abc import Iterable
from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad; its state is fp32 under the engine. Raises ValueError for `amsgrad`, which Adagrad has not."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError(f"{amsgrad=}, {fp32_optimizer_states=} are not supported; leave both out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
