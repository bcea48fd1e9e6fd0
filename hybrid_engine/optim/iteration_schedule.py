"""How DeepSpeed's schedules count, as a PyTorch scheduler: what those in `lr_schedules` and `cycle_schedules` share."""

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hybrid_engine.config.checks import check_number


class IterationSchedule(LRScheduler):
    """Counts iterations one behind PyTorch: construction is iteration -1 and the first `step()` is iteration 0.

    `state_dict`, `load_state_dict` and `get_last_lr` are PyTorch's; DeepSpeed's state is read too.
    """

    @property
    def last_batch_iteration(self) -> int:
        """The current iteration; when it is set the rates follow at the next `step()`."""
        return self.last_epoch - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, iteration: int) -> None:
        self.last_epoch = iteration + 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the rates of the next iteration, or of the one given, from which it then counts on."""
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration - 1
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken; DeepSpeed's holds the iteration alone."""
        if state_dict.keys() == {"last_batch_iteration"}:
            self.last_batch_iteration = state_dict["last_batch_iteration"]
        else:
            super().load_state_dict(state_dict)


def per_group(name: str, value: float | Sequence[float], num_groups: int) -> list[float]:
    """One rate for each parameter group; raises ValueError for a list of another length."""
    if not isinstance(value, (list, tuple)):
        value = [value] * num_groups  # type: ignore[list-item]
    for rate in value:
        check_number(name, rate, 0)
    if len(value) != num_groups:
        raise ValueError(f"{name}={value} has {len(value)} rates for {num_groups} parameter groups; give one for each")
    return list(value)


def check_last_batch_iteration(value: int) -> None:
    """Raises ValueError for a place to begin at but the first, which DeepSpeed's schedules take."""
    if value != -1:
        raise ValueError(
            f"last_batch_iteration={value} is not supported; load_checkpoint() continues a schedule, and step({value}) "
            "sets the iteration"
        )
