"""Takes back what was changed of an engine, so that a load that fails half way leaves it as it was."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from hybrid_engine.checkpoint.contents import COUNTERS
from hybrid_engine.checkpoint.random_state import get_random_state, set_random_state
from hybrid_engine.optim.training_state import TrainingState


class Undo:
    """What an engine that trains was before a load, except its weights, which are exchanged for others and back.

    Of the optimizer's tensors it keeps references: loading puts others in their place.
    """

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._random = get_random_state()
        self._measured = training.measured_values()
        self._counters = {name: getattr(training, name) for name in (*COUNTERS, "micro_steps")}
        # Schedulers may hand out their own lists.
        self._states = [(part, copy.deepcopy(part.state_dict())) for part in _parts(training)]
        inner: Any = training.optimizer.inner if training.optimizer is not None else None
        self._inner, self._fields = inner, dict(vars(inner)) if inner is not None else {}
        self._groups = [dict(group) for group in inner.param_groups] if inner is not None else []

    @torch.no_grad()
    def exchange(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Exchanges the contents of each two tensors."""
        for live, staged in pairs:
            before = live.clone()
            live.copy_(staged)
            staged.copy_(before)
            self._exchanged.append((live, staged))

    @torch.no_grad()
    def undo(self) -> None:
        """Makes the engine what it was."""
        for live, staged in self._exchanged:
            live.copy_(staged)
        if self._inner is not None:
            vars(self._inner).clear()
            vars(self._inner).update(self._fields)
            for group, before in zip(self._inner.param_groups, self._groups, strict=True):
                group.clear()
                group.update(before)
        for part, state in self._states:
            part.load_state_dict(state)
        for name, value in self._counters.items():
            setattr(self._training, name, value)
        set_random_state(self._random)
        self._training.restore_measured_values(self._measured)
        if self._training.optimizer is not None:
            self._training.optimizer.masters.write_back()


def _parts(training: TrainingState) -> list[Any]:
    parts: list[Any] = [training.lr_scheduler, training.training_dataloader]
    if training.optimizer is not None:
        parts.append(training.optimizer.loss_scaler)
    return [part for part in parts if part is not None]
