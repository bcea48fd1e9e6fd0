"""Rollouts on inference containers, which `Generator` runs if it can: paged KV, continuous batching.

`ContainerRollouts` gathers for a rollout that passed every check, and runs it. Everything that gathering takes is
registered on an ExitStack, which releases it in reverse order, even if the run raises.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.distributed.verdict import Partners, attempt, holding_interrupts
from hybrid_engine.generation.core import CaptureStats, RolloutPlan, RolloutResult
from hybrid_engine.generation.decode import Choice, DecodeStep, DecodeSteps, OpenStep
from hybrid_engine.generation.memory import KVWorkspace
from hybrid_engine.generation.model.weights import (
    LastingWeights,
    WeightGatherer,
    bound,
    bound_to_copies,
    pass_over_layers,
)
from hybrid_engine.generation.recorders import CudaGraphs
from hybrid_engine.generation.rollout.output import ScoringTurns, collect_output, score_prompts
from hybrid_engine.generation.sampling import InStep
from hybrid_engine.generation.scheduler import Scheduler
from hybrid_engine.generation.step import BatchInStep, ContinuousBatch

_FAILED = 2
"""State of a process between two turns after an error; 1 means that it has work, 0 that it has none."""


def _say_nothing() -> None:
    pass


class ContainerRollouts:
    """Runs rollouts on containers: paged KV, continuous batching, one pass over the layers per turn."""

    def __init__(
        self,
        model: InferenceModel,
        gatherer: WeightGatherer,
        lasting: LastingWeights,
        workspace: KVWorkspace,
        config: HybridEngineConfig,
        partners: Partners,
    ):
        """`lasting`: provides copies of sharded weights to `model`.

        `partners`: processes that stream weights with this one.
        """
        self.model, self.gatherer, self.workspace, self.config = model, gatherer, workspace, config
        self.lasting, self.partners = lasting, partners
        is_cuda = model.device.type == "cuda"
        is_recorded = is_cuda and config.enable_cuda_graph and model.can_be_recorded
        recorder = CudaGraphs(model.device) if is_recorded else None
        has_tapes = model.device.type == "cpu" and config.enable_cuda_graph
        self.steps = DecodeSteps(model, config.max_out_tokens, recorder, has_tapes)
        self.mixes = True  # see ContinuousBatch
        self.lag = 1 if is_cuda else 0  # turns read late, so that the host does not wait

    @property
    def num_reserved_blocks(self) -> int:
        """Workspace blocks outside the scheduler's: one that the padding rows of a graph's batch write to."""
        return 0 if self.steps.recorder is None else 1

    def new_recorder(self) -> Any:
        """Returns a new recorder with memory of its own; None if steps are not recorded."""
        return None if self.steps.recorder is None else self.steps.recorder.another()

    def warm_up(self, plan: RolloutPlan, kv: torch.Tensor) -> CaptureStats:
        """Compiles the kernels of rollouts like `plan` by a prefill and a decode; records their steps of every size.

        Its sequences are left unfinished, and their drawn tokens are not read.
        """
        strategy = self.start(plan, kv)
        for _ in range(2):
            strategy.step()
        shortest = min(len(sequence.prompt.tokens) for sequence in plan.sequences)
        rows, contexts = range(1, plan.max_running + 1), range(shortest + 1, plan.longest + 1)
        decoder = strategy.decoder
        assert isinstance(decoder, DecodeStep)
        decoder.recorder.prepare(decoder, rows, contexts, self.layers)
        return self.steps.stats

    def gather(self, plan: RolloutPlan, release: ExitStack, is_recorded: bool = True) -> torch.Tensor:
        """Gathers the weights or a stream of them, fuses LoRA and takes the KV workspace.

        Returns the workspace's tensor.

        `is_recorded`: whether steps may be recorded. Recorded steps read copies of sharded weights, which hold no other
        adapter.
        """
        # Under autocast the projections would leave the dtype of the workspace.
        release.enter_context(torch.autocast(self.model.device.type, enabled=False))
        if self.steps.recorder is not None and is_recorded:
            self.gatherer.keep_addresses()
        if self._reads_copies and is_recorded:
            release.enter_context(bound_to_copies(self.model, self.gatherer, self.lasting))
        else:
            gathered = self.gatherer.gathered_for_forward if self.model.runs_module else self.gatherer.gathered
            release.enter_context(gathered())
            release.enter_context(bound(self.model, self.gatherer, self.config.tp_gather_partition_size))
        self.model.prepare_positions(plan.longest + 1 if self.steps.recorder is None else self.config.max_out_tokens)
        release.push(self._give_back_workspace)
        return self.workspace.take(
            self.model.kv_shape(plan.num_blocks + self.num_reserved_blocks, plan.block_size),
            self.model.dtype,
            self.model.device,
        )

    @property
    def _reads_copies(self) -> bool:
        """Whether recorded steps read copies at fixed addresses: if weights are sharded, and whole in a rollout."""
        return self.steps.recorder is not None and self.gatherer.can_stream and not self.gatherer.is_streamed

    def _give_back_workspace(self, error_type: type | None, *_: object) -> None:
        """Releases the workspace if the config says so, and always after an error: it may hold non-finite numbers."""
        if error_type is not None:
            self.steps.drop()  # the tables of an interrupted step may be inconsistent
        if self.config.release_inference_cache or error_type is not None:
            self.workspace.release()

    def layers(self) -> Iterable[InferenceLayer]:
        """Returns one pass over the layers."""
        return pass_over_layers(self.model, self.gatherer)

    def start(
        self, plan: RolloutPlan, kv: torch.Tensor, choice: Choice | None = None, is_recorded: bool = True
    ) -> ContinuousBatch:
        """Builds the strategy that takes the turns of `plan`; none is taken yet. `choice` is that of `run`.

        `is_recorded`: whether its steps may be recorded, which read weights at their current addresses.
        """
        if choice is not None:
            kind = BatchInStep if isinstance(choice, InStep) else ContinuousBatch
            return kind(self.model, Scheduler.for_plan(plan), OpenStep(self.model, kv, choice), self.layers)
        step = self.steps.for_rollout(plan, kv, self.gatherer.is_streamed or not is_recorded)
        lag = 0 if self.gatherer.is_streamed else self.lag
        return ContinuousBatch(self.model, Scheduler.for_plan(plan), step, self.layers, lag, self.mixes)

    def run(
        self, plan: RolloutPlan, kv: torch.Tensor, input_ids: torch.Tensor, choice: Choice | None = None
    ) -> RolloutResult:
        """Takes turns until every sequence has finished or, if weights are streamed, those of every process have.

        `choice` draws the tokens and decides which rows end; if it is None, each sequence's options do.

        Raises:
            RuntimeError: the model's logits are not finite.
        """
        unscored = [sequence.prompt for sequence in plan.sequences if sequence.prompt.is_unscored]
        if unscored and not self.gatherer.is_streamed:
            score_prompts(self.model, unscored)
        strategies = self.run_turns(plan, kv, choice)
        if not all(math.isfinite(logprob) for sequence in plan.sequences for logprob in sequence.logprobs):
            raise RuntimeError("generate(): the model's logits are not finite; check the weights for NaN or inf")
        own = plan.sequences[plan.own]
        output = collect_output(input_ids, own, plan.options)
        return RolloutResult(
            output if plan.options.return_dict else output.sequences,
            num_samples=len(own),
            generated_tokens=sum(len(sequence.tokens) for sequence in own),
            preemptions=sum(strategy.scheduler.num_preemptions for strategy in strategies),
            prefill_seconds=sum(strategy.prefill_time.seconds() for strategy in strategies),
            decode_seconds=sum(strategy.decode_time.seconds() for strategy in strategies),
            captures=self.steps.stats,
        )

    def run_turns(
        self, plan: RolloutPlan, kv: torch.Tensor, choice: Choice | None, tell: Callable[[], None] = _say_nothing
    ) -> list[ContinuousBatch]:
        """Takes all turns of `plan` and returns their strategies. Calls `tell` between turns, unless it streams."""
        is_streamed = self.gatherer.is_streamed
        meets_others = is_streamed or self.model.parallel.size > 1
        start = partial(self.start, plan, kv, choice)
        strategy = self.partners.agree(start) if meets_others else start()
        if is_streamed:
            scoring = ScoringTurns(self.model, self.layers)
            scoring.add(sequence.prompt for sequence in plan.sequences)
            self._turn_together(strategy, scoring)
        while strategy.has_work:
            strategy.step()
            if tell is not _say_nothing:
                self.partners.agree(tell)
        return [strategy]

    def _turn_together(self, strategy: ContinuousBatch, scoring: ScoringTurns) -> None:
        """Takes turns until every process's work is done, because streamed layers are gathered by all together.

        Prompts are scored first; a process without prompts to score takes turns in the meantime.

        An error of one process is raised on all after the turn in which it occurred: until then it gathers with them.
        """
        error: BaseException | None = None

        def take_pass() -> None:
            if not scoring.turn():
                strategy.step()

        with holding_interrupts() as held:
            while True:
                state = _FAILED if error is not None else int(scoring.has_work or strategy.has_work)
                (highest,) = self.partners.highest([state])
                if highest == _FAILED:
                    self.partners.raise_together(error)
                if highest == 0:
                    return
                error = self.pass_over_stream(take_pass) or attempt(held.pass_on)[1]

    def pass_over_stream(self, action: Callable[[], object]) -> BaseException | None:
        """Runs `action`, one pass over the layers, and finishes the pass even after an error.

        Returns that error, or None.
        """
        self.gatherer.begin_pass()
        _, error = attempt(action)
        if error is not None:
            self.gatherer.finish_pass(self.model.layers)
        return error
