"""Rollouts on pipeline stages: micro-batches take turns until all rows of all of them have ended.

`StageModel` runs a stage. Hidden states go to the next stage, drawn tokens from the last one to all. Every stage ends
at the same turn: all know the tokens that a turn drew, and so which rows are done, before the micro-batch continues.

Each turn of a micro-batch sends one message on every link. Each is preceded by a header of two numbers: its shape, or
that the sender stopped at an error. So a stage that fails can still exchange every message of its turn, all stages end
at the same turn, and no message is left over for the next rollout.

N rows of a pass, E hidden size, S drawn rows, k likeliest tokens of each.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.cache import CacheShape, LayerCacheSpec, ModelCache
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.views import TensorParallel
from hybrid_engine.distributed.verdict import (
    ErrorNotice,
    FollowedError,
    LostError,
    Partners,
    attempt,
    describe_error,
    holding_interrupts,
)
from hybrid_engine.generation.core import CaptureStats, Draw, Drawn, Prompt, RolloutPlan, Sequence
from hybrid_engine.generation.decode import Choice, DecodeStep, OpenStep, SlotTables
from hybrid_engine.generation.model.groups import Stage
from hybrid_engine.generation.model.weights import ModelGroup
from hybrid_engine.generation.scheduler import Scheduler
from hybrid_engine.generation.step import ContainerRollouts, ContinuousBatch
from hybrid_engine.ops import Batch, SampleOp

HIDDEN, DRAWN = 2, 4
"""Tags of headers; the message that follows a header has the next tag."""
FAILED = -1


class StageFailedError(FollowedError):
    """Another stage stopped at an error in this turn; the verdict after the rollout reports the error."""


class StageLinks:
    """The messages of one process. Waits for at most the process group's timeout.

    All methods raise LostError if a process is gone.
    """

    def __init__(self, stage: Stage, device: torch.device):
        self.stage, self.device = stage, device
        self.num_awaited = 0  # number of the last stage's draws not received yet
        self._sent: deque[list[tuple[dist.Work, torch.Tensor]]] = deque([[]])  # by turn; tensors are kept until sent
        self._has_received = self._has_sent = self._has_drawn = True  # state of this turn's messages
        self.has_agreed = True
        """Whether the processes of the last stage, if this is one, have had their verdict on this turn's draw."""

    def begin_turn(self, turns_at_once: int, is_drawn: bool = True) -> None:
        """Begins a turn; `turns_at_once` are in flight. `is_drawn`: whether the last stage draws at its end."""
        self._has_received, self._has_sent = self.stage.is_first, self.stage.is_last
        self._has_drawn, self.has_agreed = not is_drawn, not (is_drawn and self.stage.is_last)
        self._sent.append([])
        while len(self._sent) > turns_at_once + 1:  # draws that have been read confirm these
            self._wait_for(self._sent.popleft())

    def receive_hidden(self, dtype: torch.dtype) -> torch.Tensor:
        """Receives `[N, E]` from the previous stage; raises StageFailedError if that has failed."""
        self._has_received = True
        return self._receive(self.stage.ranks[self.stage.index - 1], HIDDEN, dtype, self.device)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Sends `[N, E]` to the next stage."""
        self._send(self.stage.ranks[self.stage.index + 1], HIDDEN, hidden)
        self._has_sent = True

    def pass_nothing(self) -> None:
        """Exchanges the messages of a turn without a pass over the layers; does nothing after a pass."""
        if not self._has_received:
            assert len(self.receive_hidden(torch.float32)) == 0, "stages are at different turns"
        if not self._has_sent:
            self.send_hidden(torch.empty(0, 0))

    def send_drawn(self, drawn: Drawn, problems: dict[int, ErrorNotice]) -> None:
        """Sends the last stage's draw, and the errors of rows whose own rules failed, to all other stages."""
        ends = [0.0] * len(drawn.tokens)
        for row in drawn.ends:
            ends[row] = 1.0
        for row in problems:
            ends[row] = 2.0
        columns = [drawn.tokens, drawn.logprobs, ends]
        for place in range(len(drawn.tops[0]) if drawn.tops else 0):
            assert drawn.tops is not None
            columns += [[row[place][0] for row in drawn.tops], [row[place][1] for row in drawn.tops]]
        values = torch.tensor(columns, dtype=torch.float64)
        for rank in self._others:
            self._send(rank, DRAWN, values)
            if problems:
                self._send(rank, DRAWN, torch.frombuffer(bytearray(pickle.dumps(problems)), dtype=torch.uint8)[None])
        self._has_drawn = True

    def await_drawn(self) -> None:
        """Records that the last stage will draw in this turn; `receive_drawn` is called for each draw, in order."""
        self._has_drawn = True
        self.num_awaited += 1

    def receive_drawn(self) -> tuple[Drawn, dict[int, ErrorNotice]]:
        """Receives the oldest draw not received yet; raises StageFailedError if the last stage failed in that turn."""
        self.num_awaited -= 1
        values = self._receive(self.stage.ranks[-1], DRAWN, torch.float64, torch.device("cpu"))
        tokens, logprobs, ends, *tops = values.tolist()
        likeliest = None
        if tops:
            pairs = list(zip(tops[::2], tops[1::2], strict=True))
            likeliest = [[(int(ids[row]), of_ids[row]) for ids, of_ids in pairs] for row in range(len(tokens))]
        problems: dict[int, ErrorNotice] = {}
        if 2.0 in ends:
            sent = self._receive(self.stage.ranks[-1], DRAWN, torch.uint8, torch.device("cpu"))
            problems = pickle.loads(sent.numpy().tobytes())
        is_end = [row for row, end in enumerate(ends) if end == 1.0]
        return Drawn([int(token) for token in tokens], logprobs, is_end, likeliest), problems

    def fail_turn(self, dtype: torch.dtype) -> None:
        """Exchanges the messages of a turn after an error in it, which tells the others.

        `dtype` is that of hidden states.
        """
        if not self._has_received:
            with suppress(StageFailedError):
                self.receive_hidden(dtype)
        if not self._has_sent:
            self._send_header(self.stage.ranks[self.stage.index + 1], HIDDEN, FAILED, 0)
        if not self._has_drawn and self.stage.is_last:
            for rank in self._others:
                self._send_header(rank, DRAWN, FAILED, 0)
        elif not self._has_drawn:
            self.await_drawn()

    def finish(self) -> None:
        """Receives every draw in flight and waits until all messages have been sent."""
        while self.num_awaited:
            with suppress(StageFailedError):
                self.receive_drawn()
        while self._sent:
            self._wait_for(self._sent.popleft())
        self._sent.append([])

    def broadcast_logits(self, logits: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
        """Returns the last stage's `logits [R, V]` fp32 on all stages; those of other stages are ignored.

        Collective.
        """
        if not self.stage.is_last:
            logits = torch.empty(num_rows, vocab_size, device=self.device)
        logits = logits.contiguous()
        dist.broadcast(logits, src=self.stage.ranks[-1], group=self.stage.group)
        return logits

    @property
    def _others(self) -> tuple[int, ...]:
        return self.stage.ranks[:-1]

    def _send(self, rank: int, tag: int, values: torch.Tensor) -> None:
        self._send_header(rank, tag, *values.shape)
        if values.numel():
            self._start(rank, tag + 1, values.contiguous())

    def _send_header(self, rank: int, tag: int, *numbers: int) -> None:
        self._start(rank, tag, torch.tensor(numbers))

    def _start(self, rank: int, tag: int, values: torch.Tensor) -> None:
        try:
            work = dist.isend(values, rank, group=self._group_for(values), tag=tag)
        except RuntimeError as error:
            raise LostError(str(error)) from error
        assert work is not None
        self._sent[-1].append((work, values))

    def _receive(self, rank: int, tag: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        header = torch.empty(2, dtype=torch.int64)
        self._receive_into(header, rank, tag)
        num_rows, num_columns = header.tolist()
        if num_rows == FAILED:
            raise StageFailedError
        values = torch.empty(num_rows, num_columns, dtype=dtype, device=device)
        if values.numel():
            self._receive_into(values, rank, tag + 1)
        return values

    def _receive_into(self, values: torch.Tensor, rank: int, tag: int) -> None:
        try:
            dist.recv(values, rank, group=self._group_for(values), tag=tag)
        except RuntimeError as error:
            raise LostError(str(error)) from error

    def _group_for(self, values: torch.Tensor) -> dist.ProcessGroup:
        return self.stage.host_group if values.device.type == "cpu" else self.stage.group

    @staticmethod
    def _wait_for(sent: list[tuple[dist.Work, torch.Tensor]]) -> None:
        for work, _ in sent:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostError(str(error)) from error


class StageModel(InferenceModel):
    """The layers of `stage`, with the embedding on the first, and the final norm and the LM head on the last.

    Other parts of `model`, which may be on the meta device, are never bound, and so never read.
    """

    embedding: Any  # type: ignore[assignment]
    lm_head: Any  # type: ignore[assignment]

    def __init__(self, model: nn.Module, parallel: TensorParallel, group: ModelGroup, device: torch.device):
        super().__init__(model, parallel)
        stage = group.stage
        assert stage is not None
        if self.stream is not None:
            raise UnsupportedModelError(
                f"{self.layer_class}: pipeline stages pass on a hidden state, and its layers have inputs of their own"
            )
        self.group, self.stage, self.links = group, stage, StageLinks(stage, device)
        self.num_layers = len(self.layers)
        self._stage_specs = [self._specs_of(layers) for layers in stage.all_layers(self.num_layers)]
        keep_stage(self, stage.layers(self.num_layers), stage.is_first, stage.is_last)

    @property
    def weight(self) -> torch.Tensor:
        """One of the weights bound on this stage."""
        return self.layers[0].linears[0].pair[0]

    @property
    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        """Tensors that each layer of this stage keeps."""
        return self._stage_specs[self.stage.index]

    def _specs_of(self, layers: range) -> tuple[LayerCacheSpec, ...]:
        """Tensors that each of `layers` keeps; raises UnsupportedModelError if one reads the cache of another stage."""
        specs = []
        for spec in (self.layers[index].mixer.cache_spec for index in layers):
            if spec.shared_with is not None:
                if spec.shared_with not in layers:
                    raise UnsupportedModelError("layers of several pipeline stages share keys and values")
                spec = replace(spec, shared_with=spec.shared_with - layers.start)
            specs.append(spec)
        return tuple(specs)

    def bytes_per_block(self, block_size: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of a block on the stage where it takes most, so that all stages make the same plan."""
        return self._most_bytes(1, block_size, 0, dtype)

    def bytes_per_slot(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of a slot on the stage where it takes most."""
        return self._most_bytes(0, 1, 1, dtype)

    def _most_bytes(self, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype | None) -> int:
        shapes = [CacheShape(specs, num_blocks, block_size, num_slots) for specs in self._stage_specs]
        return max(shape.num_bytes(dtype or self.dtype) for shape in shapes)

    def forward(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Returns the logits `[R, V]` fp32 of a pass through all stages, on each of them; collective.

        An error of one process is raised on all. A rollout keeps the logits on the last stage: see `run_stage`.
        """
        logits = self.group.agree(lambda: self._run_alone(batch, cache, layers))
        num_rows = len(batch.tokens if batch.wanted is None else batch.wanted)
        return self.links.broadcast_logits(logits, num_rows, self.vocab_size)

    def _run_alone(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """`run_stage` as a turn of its own without a draw; when it ends or raises, all its messages have been sent."""
        self.links.begin_turn(1, is_drawn=False)
        try:
            logits = self.run_stage(batch, cache, layers)
        except LostError:
            raise
        except BaseException:
            self.links.fail_turn(self.dtype)
            self.links.finish()
            raise
        self.links.finish()
        return logits

    def run_stage(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Runs this stage's part of a pass; returns logits `[R, V]` fp32 on the last stage, `[R, 0]` on the others.

        Waits for the previous stage, not for the next one. Raises StageFailedError if the previous stage has failed. An
        error also ends the sums that other processes of this stage wait in.
        """
        with nullcontext() if self.group.sums is None else self.group.sums.ending_others():
            return self._run_stage(batch, cache, layers)

    def _run_stage(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        hidden = self._embed(batch) if self.stage.is_first else self.links.receive_hidden(self.dtype)
        hidden = self._run_layers(hidden, batch, cache, layers)
        if self.stage.is_last:
            return self._head(hidden, batch)
        self.links.send_hidden(hidden)
        num_rows = len(batch.tokens if batch.wanted is None else batch.wanted)
        return hidden.new_empty(num_rows, 0)


def keep_stage(model: Any, layers: range, is_first: bool, is_last: bool) -> None:
    """Removes all layers but these from an `InferenceModel`, and the ends that this stage does not have."""
    model.layers = [model.layers[index] for index in layers]
    for place, layer in enumerate(model.layers):
        layer.index = place  # index in the cache
    if not is_first:
        model.embedding = model.position_embedding = model.embedding_norm = model.project_in = None
    if not is_last:
        model.lm_head = model.final_norm = model.project_out = None


class StageTurns:
    """The model interface for the turns of a micro-batch: logits stay on the last stage."""

    def __init__(self, model: StageModel):
        self.model = model
        self.vocab_size, self.recompute_length = model.vocab_size, model.recompute_length

    def forward(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Runs this stage's layers; returns the logits on the last stage. See `StageModel.run_stage`."""
        return self.model.run_stage(batch, cache, layers)


class StageStep(OpenStep):
    """A decode step of one stage: the last stage draws and sends the tokens to the others.

    Args:
        drawer: draws by each row's options.
        choice: draws instead of `drawer`, or None.
        peers: the processes of this stage.
    """

    def __init__(
        self, model: StageModel, cache: ModelCache, drawer: DecodeStep, choice: Choice | None, peers: Partners
    ):
        super().__init__(StageTurns(model), cache, choice or (lambda rows, logits: drawer.draw(rows, logits).read()))
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


class MicroBatch(ContinuousBatch):
    """A continuous batch whose tokens are read before its next turn, not at the end of its last."""

    def step(self) -> None:
        """Makes one pass over the layers and one draw, or a draw alone; all tokens drawn before must have been read."""
        self._make_way()
        admission = self.scheduler.admit()
        if admission.sequences:
            with self.prefill_time.measure():
                self._prefill(admission)
        else:
            with self.decode_time.measure():
                self._decode()


def split_plan(plan: RolloutPlan, num_parts: int) -> list[RolloutPlan]:
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
        if all(part.num_blocks >= _fewest_blocks(part) and _has_slots(part, plan) for part in parts):
            _separate_prompts(parts)
            return parts
    return [plan]


def _part(plan: RolloutPlan, num_parts: int, place: int, hands: list[list[Sequence]]) -> RolloutPlan:
    first, last = (-(-plan.max_running * edge // num_parts) for edge in (place, place + 1))
    blocks, slots = (
        number * last // plan.max_running - number * first // plan.max_running
        for number in (plan.num_blocks, plan.num_state_slots)
    )
    sequences = [sequence for hand in hands for sequence in hand]
    return replace(
        plan, sequences=sequences, max_running=last - first, num_blocks=blocks, num_state_slots=slots, own=slice(None)
    )


def _fewest_blocks(part: RolloutPlan) -> int:
    """Number of blocks for the longest sequence, and one more if samples fork from its prompt."""
    return part.num_columns + (1 if part.options.num_return_sequences > 1 else 0)


def _has_slots(part: RolloutPlan, plan: RolloutPlan) -> bool:
    """Whether `part` of `plan` has state slots for a sequence and its prompt, or layers have no states."""
    return part.num_state_slots >= min(2, plan.num_state_slots)


def _separate_prompts(parts: list[RolloutPlan]) -> None:
    """Gives samples of one prompt in several parts a prompt in each, because its blocks belong to one part."""
    for part in parts[1:]:
        others: dict[Prompt, Prompt] = {}
        for sequence in part.sequences:
            sequence.prompt = others.setdefault(sequence.prompt, sequence.prompt.with_own_blocks())


def split_empty_plan(plan: RolloutPlan, num_parts: int) -> list[RolloutPlan]:
    """Splits a plan without sequences into micro-batches with blocks for one sequence each, for a live batch."""
    for number in range(min(num_parts, plan.max_running), 1, -1):
        parts = [_part(plan, number, place, []) for place in range(number)]
        # One block more for samples to fork into.
        if all(part.num_blocks > part.num_columns and _has_slots(part, plan) for part in parts):
            return parts
    return [plan]


def split_workspace(cache: ModelCache, model: StageModel, parts: list[RolloutPlan]) -> list[ModelCache]:
    """Returns each part's cache in the memory of `cache`, which has at least all their blocks."""
    return cache.split([model.cache_shape(part.num_blocks, part.block_size, part.num_state_slots) for part in parts])


class StageRollouts(ContainerRollouts):
    """Runs this process's stage of rollouts; steps are not recorded."""

    model: StageModel

    def __init__(self, *parts: Any, peers: Partners):
        """`parts`: arguments of `ContainerRollouts`; `peers`: the processes of this stage."""
        super().__init__(*parts)
        self.peers = peers

    def warm_up(self, plan: RolloutPlan, cache: ModelCache) -> CaptureStats:
        """Compiles the kernels of rollouts like `plan`, by a prefill and a decode of each micro-batch; collective."""
        self._take_turns(self._start_all(plan, cache, None), lambda: None, most=2)
        return self.steps.stats

    def run_turns(
        self, plan: RolloutPlan, cache: ModelCache, choice: Choice | None, tell: Callable[[], None] = lambda: None
    ) -> list[ContinuousBatch]:
        """Takes all turns of `plan`, and calls `tell` before each; collective.

        An error of one stage is raised on all.
        """
        batches = self.partners.agree(lambda: self._start_all(plan, cache, choice))
        self._take_turns(batches, tell)
        return list(batches)

    def _start_all(self, plan: RolloutPlan, cache: ModelCache, choice: Choice | None) -> list[MicroBatch]:
        """Starts as many micro-batches as there are stages, if there are rows for them."""
        parts = split_plan(plan, self.model.stage.size)
        workspaces = split_workspace(cache, self.model, parts)
        return [self._start(part, space, choice) for part, space in zip(parts, workspaces, strict=True)]

    def _start(self, plan: RolloutPlan, cache: ModelCache, choice: Choice | None) -> MicroBatch:
        model = self.model
        trash_block, trash_state = cache.num_blocks - 1, cache.num_slots - 1
        tables = SlotTables(
            plan.max_running, plan.num_columns, trash_block, model.vocab_size, cache.device, trash_state
        )
        drawer = DecodeStep(model, SampleOp(plan.sampling), tables, cache)
        step = StageStep(model, cache, drawer, choice, self.peers)
        return MicroBatch(StageTurns(model), Scheduler.for_plan(plan), step, self.layers)

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

    def start_live(self, plan: RolloutPlan, cache: ModelCache) -> list[MicroBatch]:
        """Starts empty micro-batches that sequences join later, as many as stages if memory suffices."""
        parts = split_empty_plan(plan, self.model.stage.size)
        workspaces = split_workspace(cache, self.model, parts)
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
        problem = attempt(begin)[1] or attempt(batch.step)[1]
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
