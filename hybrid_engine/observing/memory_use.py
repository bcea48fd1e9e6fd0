"""What a run takes of its device's memory: as it was planned, and as it is measured.

On a GPU the measure is the most that PyTorch's allocator had given out at once, from the first training step on. The
CPU's allocator counts nothing; there it is counted in bytes of tensors: what lies there when a training pass begins,
and the most at once of what its ops make (`LiveBytes`). That slows a pass down, so that only passes are counted that
are wider than any before, with gradients there and without, from the second step on, when the optimizer has its state.
A rollout counts what lies there, its KV workspace, gathered weights and fused adapters; what comes and goes in its
passes does not.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.observing.live_bytes import LiveBytes
from hybrid_engine.observing.memory_plan import MemoryPlan

MIB = 2**20


class MemoryUse:
    """The plan of a run, and the most that its training passes and its rollouts had at once so far."""

    def __init__(
        self,
        plan: MemoryPlan,
        device: torch.device,
        held: Callable[[], int],
        resized: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
        plan_of_pass: Callable[[int], MemoryPlan] | None = None,
    ) -> None:
        """A run on `device`.

        Args:
            plan: of the run.
            device: where it computes.
            held: bytes of all models of the run, with what training keeps of them, on this process now.
            resized: storages that weights are gathered into, which `held` leaves out.
            plan_of_pass: the plan of a run whose largest pass has so many tokens; None where the lengths of what is
                learned were known before.
        """
        self.plan, self._device, self._held, self._resized = plan, device, held, resized
        self._plan_of_pass = plan_of_pass
        self._cache_bytes = 0
        self._widest: dict[bool, int] = {}
        self._num_tokens = 0  # of the pass that took most
        self.training_bytes = 0
        """0 before a pass was measured."""
        self.generation_bytes = 0

    @property
    def planned_bytes(self) -> int:
        """The plan's peak, with the KV workspace beside training where that stayed."""
        return self._peak_of(self.plan)

    def planned_for_lengths(self) -> int | None:
        """The plan's peak for answers as long as they came to be; None where that is known before, or not yet.

        The peak of training where no rollout was measured, as on a CPU where answers are served.
        """
        if self._plan_of_pass is None or not self._num_tokens:
            return None
        plan = self._plan_of_pass(self._num_tokens)
        return self._peak_of(plan) if self.generation_bytes else self._training_peak_of(plan)

    def _peak_of(self, plan: MemoryPlan) -> int:
        return max(self._training_peak_of(plan), plan.generation_peak_bytes)

    def _training_peak_of(self, plan: MemoryPlan) -> int:
        return plan.training_peak_bytes + (plan.idle_cache_bytes if self._cache_bytes else 0)

    @property
    def measured_bytes(self) -> int:
        """The most at once so far; 0 where nothing was measured yet."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(self.training_bytes, self.generation_bytes) if self.training_bytes else 0

    @contextmanager
    def training_pass(self, num_cells: int, has_gradients: bool, cache_bytes: int) -> Iterator[None]:
        """Around the forward and backward passes over `num_cells` tokens of a run that has stepped before.

        Args:
            num_cells: tokens, padding included.
            has_gradients: whether gradients of earlier passes are there.
            cache_bytes: of the KV workspace, where it stayed.
        """
        self._cache_bytes = max(self._cache_bytes, cache_bytes)
        if self._device.type != "cpu" or num_cells <= self._widest.get(has_gradients, 0):
            yield
            return
        held = self._held() + cache_bytes
        with LiveBytes(self._resized()) as live:
            yield
        self._widest[has_gradients] = num_cells
        if held + live.peak_bytes > self.training_bytes:
            self.training_bytes, self._num_tokens = held + live.peak_bytes, num_cells

    def note_rollout(self, num_bytes: int) -> None:
        """At the end of a rollout that has taken `num_bytes` for workspace, gathered weights and fused adapters."""
        self.generation_bytes = max(self.generation_bytes, self._held() + num_bytes)

    def describe(self) -> str:
        """Both in one line."""
        text, planned = f"memory: planned {self.planned_bytes / MIB:.1f} MiB", self.planned_bytes
        if not self.measured_bytes:
            return f"{text}, not measured before the second step"
        for_lengths = self.planned_for_lengths()
        if for_lengths is not None:
            text, planned = f"{text}, {for_lengths / MIB:.1f} MiB for answers as long as they were", for_lengths
        return f"{text}, measured {self.measured_bytes / MIB:.1f} MiB ({planned / self.measured_bytes:.2f})"

    def to_json(self) -> dict[str, Any]:
        """Plain values, of this process."""
        return {
            "planned_bytes": self.planned_bytes,
            "planned_for_lengths_bytes": self.planned_for_lengths(),
            "measured_bytes": self.measured_bytes or None,
            "planned_training_bytes": self.plan.training_peak_bytes,
            "planned_generation_bytes": self.plan.generation_peak_bytes,
            "measured_training_bytes": self.training_bytes or None,
            "measured_generation_bytes": self.generation_bytes or None,
            "process_peak_bytes": process_peak_bytes(),
        }


def process_peak_bytes() -> int | None:
    """The most that this process had of the host's memory, libraries included; None where nobody says."""
    if sys.platform == "win32":
        return None
    # Here, not at the top: Windows has no such module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
