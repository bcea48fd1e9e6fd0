"""Rollouts on pipeline stages: micro-batches take turns until all rows of all of them have ended.

Every stage ends at the same turn: all know the tokens that a turn drew, and so which rows are done, before the
micro-batch continues, and an error of one stage stops all at the same turn.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.distributed.interrupts import holding_interrupts
from hybrid_engine.distributed.verdict import LostError, Partners, attempt, describe_error
from hybrid_engine.generation.batching.continuous_batching import TextGeneration
from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.batching.recorders import CaptureStats
from hybrid_engine.generation.batching.step import Choice, DecodeStep, Draw, Drawn, OpenStep, SlotTables
from hybrid_engine.generation.model.stages import StageFailedError, StageLinks, StageModel
from hybrid_engine.generation.request.core import Prompt, Sequence
from hybrid_engine.generation.rollout.backend import ContainerRollouts
from hybrid_engine.ops import Batch, SampleOp


class StageTurns:
    """The model interface for the turns of a micro-batch: logits stay on the last stage."""

    def __init__(self, model: StageModel):
        self.model = model
        self.vocab_size, self.recompute_length = model.vocab_size, model.recompute_length

    def forward(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Runs this stage's layers; returns the logits on the last stage. See `StageModel.run_stage`."""
        return self.model.run_stage(batch, kv, layers)


class StageStep(OpenStep):
    """A decode step of one stage: the last stage draws and sends the tokens to the others.

    Args:
        drawer: draws by each row's options.
        choice: draws instead of `drawer`, or None.
        peers: the processes of this stage.
    """

    def __init__(self, model: StageModel, kv: torch.Tensor, drawer: DecodeStep, choice: Choice | None, peers: Partners):
        super().__init__(StageTurns(model), kv, choice or (lambda rows, logits: drawer.draw(rows, logits).read()))
        self.links, self.peers = model.links, peers

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """Draws the next token of each sequence; `logits [S, V]` are used on the last stage only."""
        self.links.pass_nothing()  # for samples that enter without a pass: their prompt is prefilled
        if not self.links.stage.is_last:
            self.links.await_drawn()
            return Draw(lambda: self._receive(sequences))
        self.links.has_agreed = True
        drawn = self.peers.agree(lambda: self.choice(sequences, logits))
        errors = {row: sequence.error for row, sequence in enumerate(sequences) if sequence.error is not None}
        self.links.send_drawn(drawn, {row: describe_error(error) for row, error in errors.items()})
        return Draw(lambda: drawn)

    def _receive(self, sequences: list[Sequence]) -> Drawn:
        drawn, problems = self.links.receive_drawn()
        for row, problem in problems.items():
            sequences[row].error = problem.raised_on(self.links.stage.ranks[-1])  # type: ignore[assignment]
        return drawn


class MicroBatch(TextGeneration):
    """A continuous batch whose tokens are read before its next turn, not at the end of its last."""

    def turn(self) -> None:
        """Makes one pass over the layers and one draw, or a draw alone; all tokens drawn before must have been read."""
        self._recompute()
        admission = self.scheduler.admit()
        if admission.sequences:
            with self.prefill_time.measure():
                self._prefill(admission)
        else:
            with self.decode_time.measure():
                self._decode()


def split_plan(plan: Plan, num_parts: int) -> list[Plan]:
    """Splits `plan` into up to `num_parts`, as many as have rows and KV blocks for their longest sequence.

    Whole prompts are dealt out in turn; if there are fewer prompts than parts, their samples are.
    """
    by_prompt: dict[Prompt, list[Sequence]] = {}
    for sequence in plan.sequences:
        by_prompt.setdefault(sequence.prompt, []).append(sequence)
    num_parts = min(num_parts, len(plan.sequences), plan.max_running)
    hands = list(by_prompt.values())
    if len(hands) < num_parts:
        hands = [[sequence] for sequence in plan.sequences]
    for number in range(num_parts, 1, -1):
        parts = [_part(plan, number, place, hands[place::number]) for place in range(number)]
        if all(part.num_blocks >= _fewest_blocks(part) for part in parts):
            _separate_prompts(parts)
            return parts
    return [plan]


def _part(plan: Plan, num_parts: int, place: int, hands: list[list[Sequence]]) -> Plan:
    first, last = (-(-plan.max_running * edge // num_parts) for edge in (place, place + 1))
    blocks = plan.num_blocks * last // plan.max_running - plan.num_blocks * first // plan.max_running
    sequences = [sequence for hand in hands for sequence in hand]
    return replace(plan, sequences=sequences, max_running=last - first, num_blocks=blocks, own=slice(None))


def _fewest_blocks(part: Plan) -> int:
    """Number of blocks for the longest sequence, and one more if samples fork from its prompt."""
    return part.num_columns + (1 if part.options.num_return_sequences > 1 else 0)


def _separate_prompts(parts: list[Plan]) -> None:
    """Gives samples of one prompt in several parts a prompt in each, because its blocks belong to one part."""
    for part in parts[1:]:
        others: dict[Prompt, Prompt] = {}
        for sequence in part.sequences:
            sequence.prompt = others.setdefault(sequence.prompt, sequence.prompt.with_own_blocks())


def split_empty_plan(plan: Plan, num_parts: int) -> list[Plan]:
    """Splits a plan without sequences into micro-batches with blocks for one sequence each, for a live batch."""
    for number in range(min(num_parts, plan.max_running), 1, -1):
        parts = [_part(plan, number, place, []) for place in range(number)]
        if all(part.num_blocks > part.num_columns for part in parts):  # one more for samples to fork into
            return parts
    return [plan]


def split_workspace(kv: torch.Tensor, model: StageModel, parts: list[Plan]) -> list[torch.Tensor]:
    """Returns each part's workspace, contiguous, in the memory of `kv`, which has at least all their blocks."""
    shapes = [model.kv_shape(part.num_blocks, part.block_size) for part in parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = kv.view(-1)[: sum(sizes)].split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


class StageRollouts(ContainerRollouts):
    """Runs this process's stage of rollouts; steps are not recorded."""

    model: StageModel

    def __init__(self, *parts: Any, peers: Partners):
        """`parts`: arguments of `ContainerRollouts`; `peers`: the processes of this stage."""
        super().__init__(*parts)
        self.peers = peers

    def warm_up(self, plan: Plan, kv: torch.Tensor) -> CaptureStats:
        """Compiles the kernels of rollouts like `plan`, by a prefill and a decode of each micro-batch; collective."""
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
        """Starts as many micro-batches as there are stages, if there are rows for them."""
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
        """Takes rounds of one turn of each micro-batch, at most `most`, until none has work.

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
        """Starts empty micro-batches that sequences join later, as many as stages if memory suffices."""
        parts = split_empty_plan(plan, self.model.stage.size)
        workspaces = split_workspace(kv, self.model, parts)
        return [self._start(part, space, None) for part, space in zip(parts, workspaces, strict=True)]


class OrderedTurns:
    """Takes turns of micro-batches, of which at most `at_once` are in flight.

    Args:
        dtype: dtype of hidden states.
        peers: the processes of this stage.
    """

    def __init__(self, links: StageLinks, dtype: torch.dtype, at_once: int, peers: Partners):
        self.links, self.dtype, self.at_once, self.peers = links, dtype, at_once, peers
        self.failed: set[MicroBatch] = set()
        """Micro-batches in which this stage had an error in a turn; they must not change any more."""
        self._error: BaseException | None = None
        self._under_way: deque[MicroBatch] = deque()

    def read(self, batch: MicroBatch) -> None:
        """Reads the tokens of the last turn of `batch`, if it is in flight, and of all turns before it.

        If a stage had an error in one of these turns, raises it, or StageFailedError, on all stages.
        """
        while batch in self._under_way:
            self.read_oldest()

    def read_oldest(self) -> None:
        """Reads the tokens of the oldest turn in flight, if there is one."""
        if not self._under_way:
            return
        oldest = self._under_way.popleft()
        error = attempt(oldest.read_all)[1]
        if oldest in self.failed or isinstance(error, StageFailedError):
            self.links.finish()
            raise self._error or StageFailedError
        if error is not None:
            raise error

    def read_all(self) -> None:
        """Reads all turns in flight, the oldest first; raises the errors of `read_oldest`."""
        while self._under_way:
            self.read_oldest()

    def take(self, batch: MicroBatch, begin: Callable[[], None] = lambda: None) -> None:
        """Takes a turn of `batch`, whose tokens have been read.

        `begin` is called first and raises on all processes or on none.

        An error is stored until the turn is read, except LostError, which is raised at once, because no message can be
        sent.
        """
        self.links.begin_turn(self.at_once)
        problem = attempt(begin)[1] or attempt(batch.turn)[1]
        if isinstance(problem, LostError):
            raise problem
        if problem is not None:
            if not self.links.has_agreed:  # the other processes of the last stage may be at the draw
                problem = attempt(partial(self.peers.raise_together, problem))[1] or problem
            self.links.fail_turn(self.dtype)
            self.failed.add(batch)
            if not isinstance(problem, StageFailedError):
                self._error = self._error or problem
        self._under_way.append(batch)
