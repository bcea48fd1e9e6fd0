"""What training will take of a device's memory beside what lies there now, so that the KV workspace leaves room for it.

Before the first step the optimizer's state and the gradients are known from the parameters, activations are not; the
first step's peak says the rest.
"""

from typing import Protocol

import torch

from hybrid_engine.generation.memory.usage import num_bytes
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.sharding import Sharding, local_tensor

STATE_VALUES = 2
"""Values per trained one that an optimizer is expected to keep before its first step has shown it: Adam's moments."""


class PeakMeter(Protocol):
    """Measures by how much the memory that tensors take grew at most."""

    def begin(self, forgets_earlier: bool) -> None:
        """From here on; without `forgets_earlier` a peak counts only where it is above all earlier ones."""

    def growth_bytes(self) -> int:
        """The most since `begin()`, beyond what was taken then; 0 where an earlier peak hides it."""


class AllocatorPeak:
    """A PeakMeter of a CUDA device: PyTorch's allocator, whose peak scripts read too."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start, self._earlier = device, 0, 0

    def begin(self, forgets_earlier: bool) -> None:
        """Starts a measurement. See PeakMeter."""
        if forgets_earlier:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        self._earlier = 0 if forgets_earlier else torch.cuda.max_memory_allocated(self._device)

    def growth_bytes(self) -> int:
        """What the peak has grown by since `begin()`. See PeakMeter."""
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak - self._start if peak > self._earlier else 0


class TrainingMemory:
    """The bytes that training is going to take on `device`, this process's.

    Args:
        sharding: of the model.
        optimizer: None for an engine that only evaluates, which takes nothing.
        gradient_dtype: of the reduced gradients that the optimizer steps with.
        device: where the model computes.
        meter: None where nothing measures a peak, as on a CPU; activations are then left to the share that stays free.
    """

    def __init__(
        self,
        sharding: Sharding,
        optimizer: ZeroOptimizer | None,
        gradient_dtype: torch.dtype,
        device: torch.device,
        meter: PeakMeter | None,
    ) -> None:
        self._optimizer, self._device, self._meter = optimizer, device, meter
        trained = optimizer.parameters if optimizer is not None else []
        self._masters = [entry.master for entry in trained if entry.has_master]
        masters = [local_tensor(entry.master) for entry in trained]
        here = [master for master in masters if master.device.type == device.type]
        self._gradient_bytes = sum(master.numel() * gradient_dtype.itemsize for master in masters)
        if sharding.is_sharded and sharding.stage < 2:  # whole ones wait for their reduction
            self._gradient_bytes += sum(entry.param.numel() * entry.param.element_size() for entry in trained)
        self._kept_bytes = self._held_bytes() + STATE_VALUES * sum(master.nbytes for master in here)
        self._peak_bytes: int | None = None
        self._held_at_start: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the first step's peak has been seen, where there is something to measure it."""
        return self._meter is None or self._optimizer is None or self._peak_bytes is not None

    def missing_bytes(self) -> int:
        """What is not there yet: masters and optimizer state, gradients and, once a step was seen, activations."""
        if self._optimizer is None:
            return 0
        return max(0, self._kept_bytes - self._held_bytes()) + max(self._gradient_bytes, self._peak_bytes or 0)

    def begin(self) -> None:
        """Training begins: measures up to the end of the next optimizer step."""
        if self._meter is not None and self._optimizer is not None:
            self._meter.begin(forgets_earlier=self._peak_bytes is None)
            self._held_at_start = self._held_bytes()

    def finish_step(self) -> None:
        """After an optimizer step: what the optimizer keeps is known, and the peak of the step."""
        if self._optimizer is None or self._optimizer.overflow:
            return
        self._kept_bytes = held = self._held_bytes()
        if self._meter is not None and self._held_at_start is not None:
            passing = self._meter.growth_bytes() - max(0, held - self._held_at_start)
            self._peak_bytes = max(self._peak_bytes or 0, passing)
            self._held_at_start = None

    def _held_bytes(self) -> int:
        """Masters and state on the device now."""
        if self._optimizer is None:
            return 0
        state = [v for values in self._optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
        return num_bytes(t for t in (*self._masters, *state) if t.device.type == self._device.type)
