"""Keeps an engine's decode steps with their graphs for later rollouts that read the same addresses."""

from typing import Any
from weakref import WeakSet

import torch

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.decode import DecodeStep, SlotTables
from hybrid_engine.generation.plan import Plan
from hybrid_engine.generation.recorders import CaptureStats, StepGraphs, StepTapes, batch_bucket
from hybrid_engine.ops import SampleOp

# Number of kinds of rollout (sampling options, slots, workspace, addresses) whose steps are kept: training, evaluation
# and one change of each. A step's graphs keep the memory of its intermediate results.
MAX_KEPT = 4


_everywhere: "WeakSet[DecodeSteps]" = WeakSet()


def drop_recorded_steps() -> None:
    """Drops the recorded steps of all engines in this process, before the process groups they use are destroyed."""
    for steps in list(_everywhere):
        steps.drop()


class DecodeSteps:
    """Builds the step of a rollout, or returns the one that an earlier rollout of the same kind left.

    Args:
        max_tokens: length of the longest sequence that a kept step must serve.
        recorder: records graphs (`CudaGraphs`); None: steps are launched as usual and not kept.
        has_tapes: whether steps that are not recorded may be played from a tape within a rollout (recorders.py).
    """

    def __init__(self, model: InferenceModel, max_tokens: int, recorder: Any, has_tapes: bool = False):
        self.model, self.max_tokens, self.recorder, self.has_tapes = model, max_tokens, recorder, has_tapes
        self.stats = CaptureStats()
        self._kept: dict[tuple, DecodeStep] = {}  # least recently used first
        _everywhere.add(self)

    def for_rollout(self, plan: Plan, kv: torch.Tensor, is_streamed: bool) -> DecodeStep:
        """Returns the step of `plan` on the workspace `kv`; weights must be bound as the rollout will read them."""
        self.stats = CaptureStats()
        if self.recorder is None or is_streamed:
            can_note = self.has_tapes and not is_streamed and self.model.parallel.size == 1
            tapes = StepTapes(len(self.model.layers), self.stats) if can_note else None
            return self._build(plan, kv, plan.max_running, plan.num_columns, None, tapes)
        num_slots, num_columns = batch_bucket(plan.max_running), -(-self.max_tokens // plan.block_size)
        addresses = (kv.data_ptr(), *self.model.addresses())
        self._forget([key for key in self._kept if key[-1] != addresses])
        key = (plan.sampling, num_slots, num_columns, tuple(kv.shape), addresses)
        step = self._kept.pop(key, None)
        if step is None:
            step = self._build(plan, kv, num_slots, num_columns, StepGraphs(self.recorder, self.model))
        self._keep(key, step)
        assert step.graphs is not None
        step.graphs.stats = self.stats
        return step

    def _keep(self, key: tuple, step: DecodeStep) -> None:
        self._kept[key] = step
        self._forget(list(self._kept)[:-MAX_KEPT])

    def _forget(self, keys: list[tuple]) -> None:
        """Drops these steps at once: their graphs, and a workspace that no longer exists, take memory."""
        had_graphs = self._has_graphs
        for key in keys:
            del self._kept[key]
        if had_graphs and not self._has_graphs:
            self.recorder.renew()

    @property
    def _has_graphs(self) -> bool:
        return any(step.graphs is not None and step.graphs.num_recorded for step in self._kept.values())

    @property
    def num_kept(self) -> int:
        """Number of kept steps."""
        return len(self._kept)

    def drop(self) -> None:
        """Drops every step with its graphs and their memory."""
        self._kept.clear()
        if self.recorder is not None:
            self.recorder.renew()

    def _build(
        self,
        plan: Plan,
        kv: torch.Tensor,
        num_slots: int,
        num_columns: int,
        graphs: StepGraphs | None,
        tapes: StepTapes | None = None,
    ) -> DecodeStep:
        tables = SlotTables(num_slots, num_columns, kv.shape[2] - 1, self.model.vocab_size, kv.device)
        return DecodeStep(
            self.model, SampleOp(plan.sampling, is_exact=self.model.runs_module), tables, kv, graphs, tapes
        )
