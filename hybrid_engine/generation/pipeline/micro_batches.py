"""The rows of a rollout as micro-batches: while one is in one stage, the others are in the other stages.

Each micro-batch is a continuous batch of its own, with its part of the rows, the KV blocks and the waiting prompts.
Every stage runs the same schedulers and takes the same turns, in the same order; only tokens have to be told. A turn
begins when the tokens of the micro-batch's turn before are there, which the last stage drew while this one was busy
with the others.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.distributed.verdict import Partners, describe_error
from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.batching.strategy import TextGeneration
from hybrid_engine.generation.decoding.decode import DecodeStep, Draw, Drawn
from hybrid_engine.generation.decoding.open_step import Choice, OpenStep
from hybrid_engine.generation.pipeline.stage_model import StageModel
from hybrid_engine.ops import Batch


class StageTurns:
    """The model as the turns of a micro-batch see it: logits stay on the last stage."""

    def __init__(self, model: StageModel):
        self.model = model
        self.vocab_size, self.recompute_length = model.vocab_size, model.recompute_length

    def forward(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """A pass through this stage's layers: the logits on the last stage. See `StageModel.run_stage`."""
        return self.model.run_stage(batch, kv, layers)


class StageStep(OpenStep):
    """A decode step of one stage: the last draws, and tells the others.

    Args:
        drawer: draws by each row's options.
        choice: draws in its place, if there is one.
        peers: the processes of this stage.
    """

    def __init__(self, model: StageModel, kv: torch.Tensor, drawer: DecodeStep, choice: Choice | None, peers: Partners):
        super().__init__(StageTurns(model), kv, choice or (lambda rows, logits: drawer.draw(rows, logits).read()))
        self.links, self.peers = model.links, peers

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """The next token of each sequence; `logits [S, V]` count on the last stage alone."""
        self.links.pass_nothing()  # of samples that enter beside others of their prompt
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
        """One pass over the layers and one draw, or a draw alone; every token drawn before must have been read."""
        self._recompute()
        admission = self.scheduler.admit()
        if admission.sequences:
            with self.prefill_time.measure():
                self._prefill(admission)
        else:
            with self.decode_time.measure():
                self._decode()


def split_plan(plan: Plan, num_parts: int) -> list[Plan]:
    """`plan` as up to `num_parts`, as many as have rows and the KV blocks for their longest sequence.

    Whole prompts are dealt out in turn; where there are fewer prompts than parts, their samples are.
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
    """Blocks that the longest sequence needs, and the prompt that samples fork from."""
    return part.num_columns + (1 if part.options.num_return_sequences > 1 else 0)


def _separate_prompts(parts: list[Plan]) -> None:
    """Gives samples of one prompt in several parts a prompt in each: its blocks are of one part."""
    for part in parts[1:]:
        others: dict[Prompt, Prompt] = {}
        for sequence in part.sequences:
            sequence.prompt = others.setdefault(sequence.prompt, sequence.prompt.with_own_blocks())


def split_empty_plan(plan: Plan, num_parts: int) -> list[Plan]:
    """A plan without sequences in micro-batches that each have blocks for one, for a batch that is joined later."""
    for number in range(min(num_parts, plan.max_running), 1, -1):
        parts = [_part(plan, number, place, []) for place in range(number)]
        if all(part.num_blocks > part.num_columns for part in parts):  # one more for samples to fork into
            return parts
    return [plan]


def split_workspace(kv: torch.Tensor, model: StageModel, parts: list[Plan]) -> list[torch.Tensor]:
    """Each part's workspace, contiguous, in the memory of `kv`, which has at least all their blocks."""
    shapes = [model.kv_shape(part.num_blocks, part.block_size) for part in parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = kv.view(-1)[: sum(sizes)].split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
