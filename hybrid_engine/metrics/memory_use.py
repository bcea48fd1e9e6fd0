"""Memory that a run takes on its device: as planned, and as measured.

On a GPU the measured value is the peak of PyTorch's allocator from the first training step on. The CPU's allocator
counts nothing; there bytes of tensors are counted: those that exist when a training pass begins, and the peak of those
that its ops create (`LiveBytes`). Counting slows a pass down, so a pass is counted only if its extent is not within
that of a counted pass of the same state: with or without gradients, and with or without optimizer state, which does not
exist in the first step.
A rollout counts the tensors that exist, its KV workspace, gathered weights and fused adapters; it does not count the
intermediate tensors of its passes.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from hybrid_engine.metrics.memory_plan import MemoryPlan

MIB = 2**20
Extent = tuple[int, ...]
"""Sizes that a pass's memory depends on; a pass with no larger size in any place takes no more memory."""


class Pass(NamedTuple):
    """A forward and backward pass."""

    shape: Any
    """Shape of the pass's input, in the form that its plan is made from."""
    has_gradients: bool
    """Whether gradients of earlier passes existed."""
    has_state: bool
    """Whether the optimizer had its state, which exists from the second step on."""


class Measured(NamedTuple):
    """Peaks of a process so far, in bytes."""

    total_bytes: int = 0
    training_bytes: int = 0
    """Peak of training; 0 before a pass was measured."""
    generation_bytes: int = 0
    cache_bytes: int = 0
    """Bytes of the KV workspace that was kept during training."""
    rollout_cache_bytes: int = 0
    """Bytes of the KV workspace in the rollout that took most memory."""
    largest: Pass | None = None
    """The pass that took most memory."""


class MemoryUse:
    """The plan of a run, and the peaks of its training passes and its rollouts so far."""

    def __init__(
        self,
        plan: MemoryPlan,
        device: torch.device,
        held: Callable[[], int],
        resized: Callable[[], Iterable[torch.UntypedStorage]] = tuple,
        plan_of_pass: Callable[[Pass], MemoryPlan] | None = None,
    ) -> None:
        """A run on `device`.

        Args:
            plan: plan of the run.
            device: device that it computes on.
            held: returns the bytes of all models of the run, with what training keeps of them, on this process now.
            resized: storages that weights are gathered into, which `held` leaves out.
            plan_of_pass: returns the plan of a run with this largest pass; None if the lengths of the training data
                were known before.
        """
        self.plan, self._device, self._held, self._resized = plan, device, held, resized
        self._plan_of_pass = plan_of_pass
        self._counted: dict[tuple[bool, bool], list[Extent]] = {}
        self._rank = (False, 0)  # largest pass on a GPU: whether the peak rose in it, and its extent
        self._measured = Measured()

    @property
    def planned_bytes(self) -> int:
        """The plan's peak, including the KV workspace during training if it was kept."""
        idle = self.plan.idle_cache_bytes if self._measured.cache_bytes else 0
        return max(self.plan.training_peak_bytes + idle, self.plan.generation_peak_bytes)

    def _is_beside_training(self) -> bool:
        """Whether `planned_bytes` includes the KV workspace during training, which is known only later in a run."""
        return bool(self._measured.cache_bytes) and self.planned_bytes > self.plan.peak_bytes

    def planned_for_lengths(self) -> int | None:
        """The plan's peak for the actual lengths of answers; None if these are known before, or not known yet.

        The KV workspace has its actual size. Of rollouts the value includes what is measured of them: nothing on a CPU
        when answers are served.
        """
        measured = self._measured
        if measured.largest is None or (self._plan_of_pass is None and not measured.generation_bytes):
            return None
        plan = self.plan if self._plan_of_pass is None else self._plan_of_pass(measured.largest)
        training = plan.training_peak_bytes + measured.cache_bytes
        if not measured.generation_bytes:
            return training
        has_passes = self._device.type != "cpu"
        return max(training, plan.rollout_bytes(measured.rollout_cache_bytes, has_passes=has_passes))

    def measured(self) -> Measured:
        """Returns the peaks so far, of this process or of the one that `take_largest` chose."""
        found = self._measured
        if found.total_bytes:
            return found
        if self._device.type == "cuda":
            return found._replace(total_bytes=torch.cuda.max_memory_allocated(self._device))
        most = max(found.training_bytes, found.generation_bytes) if found.training_bytes else 0
        return found._replace(total_bytes=most)

    def take_largest(self, measured: Sequence[Measured]) -> None:
        """Takes over the peaks of the process with the highest total.

        `measured` are those of all processes at the end.
        """
        self._measured = max(measured, key=lambda found: found.total_bytes)

    @contextmanager
    def training_pass(self, of: Pass, extent: Extent, cache_bytes: int) -> Iterator[None]:
        """Wraps a pass and measures it.

        Args:
            of: the pass.
            extent: sizes of everything in it that takes memory.
            cache_bytes: bytes of the KV workspace, if it was kept.
        """
        self._measured = self._measured._replace(cache_bytes=max(self._measured.cache_bytes, cache_bytes))
        if self._device.type == "cuda":
            with self._beside_allocator(of, extent):
                yield
            return
        counted = self._counted.setdefault((of.has_gradients, of.has_state), [])
        if self._device.type != "cpu" or any(is_within(extent, other) for other in counted):
            yield
            return
        held = self._held() + cache_bytes
        with LiveBytes(self._resized()) as live:
            yield
        counted[:] = [extent, *(other for other in counted if not is_within(other, extent))]
        taken = held + live.peak_bytes
        if taken > self._measured.training_bytes:
            self._measured = self._measured._replace(training_bytes=taken, largest=of)

    @contextmanager
    def _beside_allocator(self, of: Pass, extent: Extent) -> Iterator[None]:
        """Records the last pass that raised the allocator's peak or, before there is one, that of largest extent."""
        before = torch.cuda.max_memory_allocated(self._device)
        try:
            yield
        finally:  # also after an out-of-memory error
            has_risen = torch.cuda.max_memory_allocated(self._device) > before
            rank = has_risen, sum(extent)
            if has_risen or rank > self._rank:
                self._rank, self._measured = rank, self._measured._replace(largest=of)

    def note_rollout(self, cache_bytes: int, gathered_bytes: int) -> None:
        """Records the end of a rollout with a KV workspace of `cache_bytes`, gathered weights and fused adapters."""
        taken = self._held() + cache_bytes + gathered_bytes
        if taken > self._measured.generation_bytes:
            self._measured = self._measured._replace(generation_bytes=taken, rollout_cache_bytes=cache_bytes)

    def describe(self) -> str:
        """Describes planned and measured memory in one line."""
        text, planned = f"memory: planned {self.planned_bytes / MIB:.1f} MiB", self.planned_bytes
        text += " with the KV workspace beside training" if self._is_beside_training() else ""
        measured = self.measured().total_bytes
        if not measured:
            return f"{text}, not measured before the first step"
        for_lengths = self.planned_for_lengths()
        if for_lengths is not None:
            text, planned = f"{text}, {for_lengths / MIB:.1f} MiB for answers as long as they were", for_lengths
        return f"{text}, measured {measured / MIB:.1f} MiB ({planned / measured:.2f})"

    def to_json(self) -> dict[str, Any]:
        """Returns planned and measured memory as plain values."""
        measured = self.measured()
        return {
            "planned_bytes": self.planned_bytes,
            "planned_for_lengths_bytes": self.planned_for_lengths(),
            "measured_bytes": measured.total_bytes or None,
            "planned_training_bytes": self.plan.training_peak_bytes,
            "planned_generation_bytes": self.plan.generation_peak_bytes,
            "measured_training_bytes": measured.training_bytes or None,
            "measured_generation_bytes": measured.generation_bytes or None,
            "process_peak_bytes": process_peak_bytes(),
        }


def is_within(extent: Extent, other: Extent) -> bool:
    """Whether no size of a pass exceeds that of another."""
    return all(mine <= theirs for mine, theirs in zip(extent, other, strict=True))


def process_peak_bytes() -> int | None:
    """Peak of the host memory of this process in bytes, libraries included; None if the system does not report it."""
    if sys.platform == "win32":
        return None
    # Imported here, not at the top: Windows does not have this module.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class LiveBytes(TorchDispatchMode):
    """Inside, counts the storages that ops of this thread create; of shards, those of this process.

    Results inside are bitwise equal to those outside.
    """

    lets_compiled_run = True
    """For `ops/cpu_kernels.py`, whose functions would otherwise be replaced by torch's, which round differently."""

    def __init__(self, resized: Iterable[torch.UntypedStorage] = ()) -> None:
        """`resized`: existing storages that grow and shrink, such as those that shards are gathered into."""
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self._seen = WeakIdKeyDictionary()
        self._resized = list(resized)
        for storage in self._resized:
            self._seen[storage] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs were created before: a view of one, or one that an op changes in place, is not new.
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._seen.setdefault(_storage(tensor), True)
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._enter(_storage(tensor))
        taken = self.num_bytes + sum(storage.nbytes() for storage in self._resized)
        self.peak_bytes = max(self.peak_bytes, taken)
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        self.num_bytes += storage.nbytes()
        weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()
