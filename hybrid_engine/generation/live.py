"""A batch that sequences join and leave while it runs, one turn at a time."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from hybrid_engine.config.checks import check_integer
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.distributed.presence import naming_who_left
from hybrid_engine.generation.batching.plan import BLOCK_SIZE, MAX_RUNNING, Plan, plan_rollout, workspace_bytes
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.batching.strategy import TextGeneration
from hybrid_engine.generation.generator import Generator
from hybrid_engine.generation.live_link import LiveLink
from hybrid_engine.generation.model_group import PIPELINE_OPTION
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.scoring import score_prompts


class Progress(NamedTuple):
    """What a turn brought for one sequence."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """None: more is to come. "error": the model's logits are not finite, or the batch came to its end."""


class LiveBatch:
    """Takes turns for whoever is in it. One thread owns it.

    Args:
        model: what `strategy` runs.
        strategy: takes the turns, over a scheduler that may be empty.
        longest: tokens of the longest sequence that fits, the last one drawn included.
    """

    seconds_between_stays: float | None = None
    """How often `stay` must be called; None: never."""

    def __init__(self, model: InferenceModel, strategy: TextGeneration, longest: int):
        self.model, self.strategy, self.scheduler, self.longest = model, strategy, strategy.scheduler, longest
        self._num_told: dict[Sequence, int] = {}  # of each unfinished sequence, the tokens that were handed on

    @property
    def has_work(self) -> bool:
        """Whether a turn would bring something."""
        return self.strategy.has_work

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun, or begin again."""
        return len(self.scheduler.waiting)

    @property
    def unfinished(self) -> list[Sequence]:
        """All that something is still to come for."""
        return list(self._num_told)

    def add(self, sequences: list[Sequence]) -> None:
        """Lets `sequences` wait for a place. Each must fit: its prompt and answer within `longest` tokens."""
        score_prompts(self.model, (sequence.prompt for sequence in sequences))
        for sequence in sequences:
            if self.model.trained_length is not None:  # keys belong to other frequencies in a longer sequence
                sequence.is_kept = False
            self._num_told[sequence] = len(sequence.tokens)  # one that goes on has some already
            self.scheduler.add(sequence)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes `sequences` out at once, whether they run or wait; those that have finished stay as they are."""
        for sequence in sequences:
            if self._num_told.pop(sequence, None) is not None and sequence.finish_reason is None:
                self.scheduler.cancel(sequence)

    def take_out(self) -> list[Progress]:
        """Takes everything out, for another batch to go on with; returns what was drawn and not handed on yet."""
        self.strategy.read_all()
        progress = self._tell_all()
        left = self.unfinished
        self.cancel(left)
        for sequence in left:
            sequence.finish_reason = None
        return progress

    def turn(self) -> list[Progress]:
        """One pass over the layers; what it brought, in the order in which the sequences were added."""
        self.strategy.turn()
        return self._tell_all()

    def stay(self) -> None:
        """Called in that time, also where nothing is asked."""

    def _tell_all(self) -> list[Progress]:
        progress = [told for sequence in list(self._num_told) if (told := self._tell(sequence)) is not None]
        for told in progress:
            if told.finish_reason is not None:
                del self._num_told[told.sequence]
        return progress

    def _tell(self, sequence: Sequence) -> Progress | None:
        first, known = self._num_told[sequence], len(sequence.logprobs)
        # A sequence that ran out of new tokens has finished before its last tokens came back from the device.
        is_complete = sequence.finish_reason is not None and known == len(sequence.tokens)
        if known == first and not is_complete:
            return None
        tokens, logprobs = sequence.tokens[first:known], sequence.logprobs[first:known]
        if not all(map(math.isfinite, logprobs)):
            self.scheduler.cancel(sequence)
            return Progress(sequence, [], [], "error")
        self._num_told[sequence] = known
        return Progress(sequence, tokens, logprobs, sequence.finish_reason if is_complete else None)


class LeadingBatch(LiveBatch):
    """The batch of a process that leads others: they make each call that is made here."""

    seconds_between_stays = 0.5

    def __init__(self, model: InferenceModel, strategy: TextGeneration, longest: int, link: LiveLink):
        super().__init__(model, strategy, longest)
        self.link, self.is_needed = link, True
        """Whether a follower's caller still had a use for this batch when they were asked last."""

    def add(self, sequences: list[Sequence]) -> None:
        """LiveBatch's, on all processes."""
        if sequences:
            self.link.send_call("add", sequences)
        super().add(sequences)

    def cancel(self, sequences: list[Sequence]) -> None:
        """LiveBatch's, on all processes."""
        known = [sequence for sequence in sequences if sequence in self._num_told]
        if known:
            self.link.send_call("cancel", known)
        super().cancel(known)

    def take_out(self) -> list[Progress]:
        """LiveBatch's, on all processes."""
        self.link.send_call("take_out")
        return super().take_out()

    def turn(self) -> list[Progress]:
        """LiveBatch's, on all processes."""
        self.link.send_call("turn")
        return super().turn()

    def stay(self) -> None:
        """Shows the followers that the leader is there, and asks whether they still have a use for it."""
        self.link.send_call("stay")
        self.is_needed = self.link.any_of(False)


def follow(batch: LiveBatch, link: LiveLink, is_staying: Callable[[], bool]) -> None:
    """Makes the leader's calls on this process's batch until the leader says that it ends.

    `is_staying` says whether the caller of this process still has a use for the leader.
    """
    while True:
        name, sequences = link.receive_call()
        if name == "end":
            return
        if name == "fail":
            raise RuntimeError(f"rank {link.leader}, which is asked, stopped at an error")
        if name == "add":
            batch.add(sequences)
        elif name == "cancel":
            batch.cancel(sequences)
        elif name == "take_out":
            batch.take_out()
        elif name == "turn":
            batch.turn()
        else:
            assert name == "stay", name
            link.any_of(is_staying())


@contextmanager
def live_batch(
    generator: Generator, longest: int | None = None, max_running: int | None = None, link: LiveLink | None = None
) -> Iterator[LiveBatch]:
    """Inside, the weights are gathered, LoRA fused and the KV workspace taken for a batch that is empty at first.

    Collective where weights are sharded or shared: each process that has a whole model has a batch of its own, those
    that share one have the same, which one of them leads.

    Args:
        generator: whose module is in eval mode.
        longest: tokens of prompt and answer together; None: as many as the model and `max_out_tokens` allow.
        max_running: sequences that decode at once; None: as many as in a rollout.
        link: of the processes that share the model.

    Raises:
        ValueError: the model has no containers, its layers are streamed, or several processes share it and there is no
            link; or there is no memory for one sequence.
    """
    partners = generator.partners
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as release:
        bytes_to_gather = generator.bytes_to_gather if generator.model is not None else 0
        spare = workspace_bytes(generator.device, generator.workspace.allocated_bytes, bytes_to_gather)
        memory = generator.group.gather_objects(Memory(spare, generator.training_bytes))
        plan = partners.agree(lambda: _plan(generator, longest, max_running, memory, link is not None))
        native = generator.native
        assert native is not None
        kv = partners.agree(lambda: native.gather(plan, release))
        generator.is_live = True
        release.callback(setattr, generator, "is_live", False)
        strategy = partners.agree(lambda: native.start(plan, kv))
        if link is None:
            yield LiveBatch(native.model, strategy, plan.longest + 1)
            return
        release.enter_context(naming_who_left("serving()"))
        if link.is_leader:
            release.enter_context(link.leading())
            yield LeadingBatch(native.model, strategy, plan.longest + 1, link)
        else:
            yield LiveBatch(native.model, strategy, plan.longest + 1)


class Memory(NamedTuple):
    """Bytes of one process."""

    spare: int
    """For the KV workspace."""
    training: int
    """That training will take of them."""


def _plan(
    generator: Generator, longest: int | None, max_running: int | None, memory: list[Memory], is_linked: bool
) -> Plan:
    """A KV workspace for `max_running` sequences of `longest` tokens, or for as many as there is memory for."""
    config, model, native = generator.config, generator.model, generator.native
    if generator.is_live:
        raise ValueError("serving: the model is served already; wait until that ends")
    if model is None or native is None:
        raise ValueError(f"serving: {generator.fallback_reason}; only models with containers are served")
    if generator.gatherer.is_streamed or (generator.group.size > 1 and not is_linked):
        what = "layers are gathered one by one" if generator.gatherer.is_streamed else "processes share the model"
        raise ValueError(f"serving: {what}, and requests come to one process alone; serve from a process with room")
    if generator.group.num_stages > 1:
        raise ValueError(
            f"serving: the layers are dealt out to {generator.group.num_stages} stages, and a batch that requests join "
            f"at any moment runs on whole layers alone; set {PIPELINE_OPTION}=1 and raise tensor_parallel.tp_size"
        )
    limit = min(config.max_out_tokens, (model.max_positions or config.max_out_tokens) + 1)
    longest = limit if longest is None else longest
    check_integer("longest", longest, 2, limit)
    rows = config.max_running or MAX_RUNNING.get(generator.device.type, 256) if max_running is None else max_running
    check_integer("max_running", rows, 1)
    spare, training = min(process.spare for process in memory), max(process.training for process in memory)
    if generator.exact is None:
        # The next turn of a conversation goes on from the blocks of the last. On a CPU, where a rollout gives each
        # sequence one block that is its own, small ones took 0.97 to 1.03 of the seconds of CPU.
        config = replace(config, kv_block_size=config.kv_block_size or BLOCK_SIZE)
    options = GenerationOptions(max_new_tokens=longest - 1)
    shapes = [Sequence(Prompt([0]), row, options) for row in range(rows)]
    plan = plan_rollout(model, shapes, options, config, spare, native.num_reserved_blocks, training)
    return replace(plan, sequences=[], own=slice(0), longest_later=plan.longest)
