"""Loss scaling for fp16: the loss is multiplied so that small gradients do not vanish, and the step undoes it.

The rules, names and defaults of the dynamic scaler are those of DeepSpeed's `runtime/fp16/loss_scaler.py`, so that a
run started there behaves the same here.
"""

from typing import Any


class StaticLossScaler:
    """A scale that never changes; 1.0 for fp32 and bf16, which do not need one."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Ignores the result of an optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class DynamicLossScaler:
    """Halves the scale when gradients overflow, doubles it after every `window` steps without overflow.

    As in DeepSpeed, the step that follows the start or an overflow is not counted: the first doubling comes with the
    step after `window` good ones. `hysteresis` overflows are forgiven before the scale is first halved. The credit is
    refilled when the scale grows or, with `consecutive_hysteresis`, at every step without overflow.
    """

    FACTOR = 2.0

    def __init__(
        self,
        initial_scale: float,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        self.scale = initial_scale
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = min_scale
        self._credit = hysteresis
        self._num_steps = 0
        self._last_overflow_step = -1

    def update(self, overflow: bool) -> None:
        """Records one optimizer step, skipped or not, and sets the scale of the next.

        Raises:
            ValueError: the gradients overflow at the smallest scale.
        """
        if overflow:
            self._shrink()
            self._last_overflow_step = self._num_steps
        else:
            self._grow_if_due()
        self._num_steps += 1

    def _shrink(self) -> None:
        if self._credit > 1:
            self._credit -= 1
            return
        if self.scale <= self.min_scale:
            raise ValueError(
                f"fp16: the gradients overflow at the loss scale {self.scale:g}, which is already "
                f"min_loss_scale={self.min_scale:g}; lower the learning rate, or train with bf16"
            )
        self.scale = max(self.scale / self.FACTOR, self.min_scale)

    def _grow_if_due(self) -> None:
        if self.consecutive_hysteresis:
            self._credit = self.hysteresis
        num_good = self._num_steps - self._last_overflow_step - 1
        if num_good > 0 and num_good % self.window == 0:
            self._credit = self.hysteresis
            self.scale *= self.FACTOR

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "credit": self._credit,
            "num_steps": self._num_steps,
            "last_overflow_step": self._last_overflow_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self._credit = state["credit"]
        self._num_steps = state["num_steps"]
        self._last_overflow_step = state["last_overflow_step"]


LossScaler = StaticLossScaler | DynamicLossScaler
