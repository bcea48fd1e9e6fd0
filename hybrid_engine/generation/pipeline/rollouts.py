"""Rollouts on pipeline stages: micro-batches in turn, until all rows of all of them have ended.

Every stage comes to the same end: the tokens that a turn drew, and so which rows are done, are known to all before the
micro-batch goes on, and an error of one stage stops all at the same turn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hybrid_engine.distributed.interrupts import holding_interrupts
from hybrid_engine.distributed.verdict import Partners
from hybrid_engine.generation.backend import ContainerRollouts
from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.batching.strategy import TextGeneration
from hybrid_engine.generation.decoding.decode import DecodeStep, SlotTables
from hybrid_engine.generation.decoding.graph import CaptureStats
from hybrid_engine.generation.decoding.open_step import Choice
from hybrid_engine.generation.pipeline.micro_batches import (
    MicroBatch,
    StageStep,
    StageTurns,
    split_empty_plan,
    split_plan,
    split_workspace,
)
from hybrid_engine.generation.pipeline.stage_model import StageModel
from hybrid_engine.generation.pipeline.turns import OrderedTurns
from hybrid_engine.ops import SampleOp


class StageRollouts(ContainerRollouts):
    """Runs this process's stage of rollouts; steps are not recorded."""

    model: StageModel

    def __init__(self, *parts: Any, peers: Partners):
        """`parts` as `ContainerRollouts` takes them; `peers`: the processes of this stage."""
        super().__init__(*parts)
        self.peers = peers

    def warm_up(self, plan: Plan, kv: torch.Tensor) -> CaptureStats:
        """Compiles what rollouts like `plan` run, by a prefill and a decode of each micro-batch; collective."""
        self._take_turns(self._start_all(plan, kv, None), lambda: None, most=2)
        return self.steps.stats

    def run_turns(
        self, plan: Plan, kv: torch.Tensor, choice: Choice | None, tell: Callable[[], None] = lambda: None
    ) -> list[TextGeneration]:
        """Takes all turns of `plan`, and calls `tell` before each; collective.

        An error of one stage is raised on all.
        """
        batches = self.partners.agree(lambda: self._start_all(plan, kv, choice))
        self._take_turns(batches, tell)
        return list(batches)

    def _start_all(self, plan: Plan, kv: torch.Tensor, choice: Choice | None) -> list[MicroBatch]:
        """Starts as many micro-batches as there are stages, where there are rows for them."""
        parts = split_plan(plan, self.model.stage.size)
        workspaces = split_workspace(kv, self.model, parts)
        return [self._start(part, space, choice) for part, space in zip(parts, workspaces, strict=True)]

    def _start(self, plan: Plan, kv: torch.Tensor, choice: Choice | None) -> MicroBatch:
        model = self.model
        tables = SlotTables(plan.max_running, plan.num_columns, kv.shape[2] - 1, model.vocab_size, kv.device)
        drawer = DecodeStep(model, SampleOp(plan.sampling), tables, kv)
        step = StageStep(model, kv, drawer, choice, self.peers)
        return MicroBatch(StageTurns(model), plan.build_scheduler(), step, self.layers)

    def _take_turns(self, batches: list[MicroBatch], tell: Callable[[], None], most: int | None = None) -> None:
        """Rounds of one turn of each micro-batch, at most `most`, until none has work.

        An error, or Ctrl-C, of one stage ends the rounds on all.
        """
        turns = OrderedTurns(self.model.links, self.model.dtype, len(batches), self.peers)
        with holding_interrupts() as held:

            def begin() -> None:
                held.pass_on()
                tell()

            while any(batch.has_work for batch in batches) and most != 0:
                most = None if most is None else most - 1
                for batch in batches:
                    turns.read(batch)
                    if batch.has_work:
                        turns.take(batch, partial(self.partners.agree, begin))
            turns.read_all()
            self.model.links.finish()

    def start_live(self, plan: Plan, kv: torch.Tensor) -> list[MicroBatch]:
        """Empty micro-batches that sequences join later, as many as stages where there is room."""
        parts = split_empty_plan(plan, self.model.stage.size)
        workspaces = split_workspace(kv, self.model, parts)
        return [self._start(part, space, None) for part, space in zip(parts, workspaces, strict=True)]
