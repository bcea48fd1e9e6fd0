"""Labelled answers, and pairs of answers, with the reference's log-probabilities: preference recipes learn from them.

A log-probability of an answer is the sum over the tokens that are learned. KTO also reads mismatched answers.

B: answers, or pairs, of a forward pass.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import nn

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.ops.support_log_prob import Supports
from hybrid_engine.rl.preferences import PairLogprobs, PairLoss, alignment
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, read_figures
from hybrid_engine.rlhf.batches.passes import RunPasses, turns
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    build_sequences,
    response_logprobs,
    response_logprobs_and_sharper,
)
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.data.parts import load_parts, prompt_text
from hybrid_engine.rlhf.data.reading import label_pairs, read_labelled_rows, read_preference_rows
from hybrid_engine.rlhf.data.rows import LabelledRow, PreferenceRow
from hybrid_engine.rlhf.experience.start import check_enough
from hybrid_engine.rlhf.options.preference import DPOConfig, KTOConfig
from hybrid_engine.rlhf.tasks.stdlib_docs import build_preferences, split, stdlib_examples


@dataclass(frozen=True)
class Reading:
    """The padding, the temperature and the passes with which a model reads answers."""

    pad_token: int
    temperature: float = 1.0
    """Divisor of the logits; the sampling temperature, for answers that were sampled."""
    sizes: RunPasses = field(default_factory=RunPasses)
    """The sizes of the run's passes."""


def answer_logprobs(model: Any, answers: Sequence[Encoded], reading: Reading) -> torch.Tensor:
    """`[B]` fp32: log pi(answer | prompt) in nats over the learned tokens; collective if the model is sharded."""
    return response_logprobs(model, _sequences_of(answers, reading), reading.temperature).sum(dim=1)


def answer_alignments(model: Any, answers: Sequence[Encoded], reading: Reading) -> torch.Tensor:
    """`[B, 2]` fp32: `answer_logprobs`, and the answer's `alignment`, by one pass."""
    sequences = _sequences_of(answers, reading)
    logprobs, sharper = response_logprobs_and_sharper(model, sequences, reading.temperature)
    return torch.stack([logprobs.sum(dim=1), alignment(logprobs, sharper, sequences.response_mask)], dim=1)


def _sequences_of(answers: Sequence[Encoded], reading: Reading) -> Sequences:
    prompts, responses = [answer.prompt_ids for answer in answers], [answer.response_ids for answer in answers]
    learned = [answer.loss_mask for answer in answers]
    sequences = build_sequences(prompts, responses, reading.pad_token, default_device(), learned)
    supports = [answer.supports[None] for answer in answers if answer.supports is not None]
    routing = tuple(answer.routing for answer in answers if answer.routing is not None)
    return sequences.with_records(Supports.join(supports) if supports else None, routing or None)


@torch.no_grad()
def all_logprobs(
    model: Any,
    answers: Sequence[Encoded],
    reading: Reading,
    compute: Callable[[Any, Sequence[Encoded], Reading], torch.Tensor] = answer_logprobs,
) -> list[Any]:
    """log pi(answer | prompt) in nats of all `answers`, which are the same on every process; collective.

    Another `compute` gives what it computes of each answer. The processes divide the passes, and each makes as many:
    sharded weights are gathered together. The result does not depend on their number, and is bitwise the same if the
    model is not sharded.
    """
    lengths = [len(answer) for answer in answers]

    def of_part(turn: tuple[list[int], bool]) -> dict[int, Any]:
        part, _ = turn
        logprobs = compute(model, [answers[index] for index in part], reading)
        return dict(zip(part, logprobs.tolist(), strict=True))

    mine = reading.sizes.without_gradients(lambda rows: turns(split_by_length(lengths, rows)), of_part)
    found = dict(pair for parts in gather_objects(mine) for part in parts for pair in part.items())
    return [found[index] for index in range(len(answers))]


def split_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The indices of `lengths` in parts of `size`, of similar length within a part to reduce padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[first : first + size] for first in range(0, len(order), size)]


def without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """Disables a peft model's adapter while the context is open; does nothing for any other model."""
    return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()


class LabelledAnswer(NamedTuple):
    """An answer and its label, with the reference's log-probabilities of it and of a mismatched answer, in nats."""

    answer: Encoded
    is_desirable: bool
    logprob_ref: float
    mismatched: Encoded
    """The same prompt, with the response to another one."""
    mismatched_ref: float


def mismatch(answers: Sequence[Encoded], seed: int) -> list[Encoded]:
    """For each answer its prompt with another prompt's response, chosen once for the whole run.

    KTO's authors shift the responses within a batch. Choosing once makes the figures of a step independent of the order
    of its rows and of the processes, and the reference reads every row only once.

    Raises:
        ValueError: there is only one prompt.
    """
    order = random.Random(seed).sample(range(len(answers)), len(answers))
    chosen: dict[int, Encoded] = {}
    for position, index in enumerate(order):
        following = (answers[other] for other in [*order[position + 1 :], *order[:position]])
        other = next((answer for answer in following if answer.prompt_ids != answers[index].prompt_ids), None)
        if other is None:
            raise ValueError("--dataset has a single prompt, but KTO compares answers to several; give more prompts")
        chosen[index] = other
    return [replace(chosen[index], prompt_ids=answer.prompt_ids) for index, answer in enumerate(answers)]


def check_several_prompts(prompts: Sequence[str], what: str) -> None:
    """Raises ValueError if all answers to `what`, such as "train on", belong to one prompt."""
    if len(set(prompts)) < 2:
        raise ValueError(
            f"--dataset has a single prompt to {what}, but KTO compares answers to several; give rows with more prompts"
        )


def refer_answers(
    reference: Any, answers: Sequence[Encoded], labels: Sequence[bool], seed: int, reading: Reading
) -> list[LabelledAnswer]:
    """`answers` with their labels and the reference's log-probabilities; every process passes all, collective."""
    others = mismatch(answers, seed)
    logprobs = all_logprobs(reference, [*answers, *others], reading)
    columns = (answers, labels, logprobs[: len(answers)], others, logprobs[len(answers) :])
    return [LabelledAnswer(*row) for row in zip(*columns, strict=True)]


def reference_logprobs(rows: Sequence[LabelledAnswer]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B]` each: the reference's log-probabilities of the answers, and of the mismatched ones."""
    both = send_to_device(torch.tensor([(row.logprob_ref, row.mismatched_ref) for row in rows]), default_device())
    return both[:, 0], both[:, 1]


def labels_of(rows: Sequence[LabelledAnswer]) -> torch.Tensor:
    """The labels of `rows`, `[B]` bool."""
    return send_to_device(torch.tensor([row.is_desirable for row in rows]), default_device())


def load_answers(config: KTOConfig) -> tuple[list[LabelledRow], list[LabelledRow]]:
    """Answers to train on, and held-out ones, selected by a hash of their prompts.

    Raises:
        ValueError: the dataset cannot be read, a row is invalid, or there are too few.
    """
    if config.dataset is None:
        train, held_out = (label_pairs(build_preferences(part, config.seed)) for part in split(stdlib_examples()))
    else:
        train, held_out = load_parts(config.source, read_labelled_rows)
    random.Random(config.seed).shuffle(train)
    train = train[: config.num_answers or None]
    check_enough(config, len(train), len(held_out), "answers")
    for rows, what in ((train, "train on"), (held_out[: config.eval_rows], "evaluate on")):
        check_several_prompts([prompt_text(row.prompt) for row in rows], what)
    return train, held_out[: config.eval_rows]


class TrainingPair(NamedTuple):
    """A pair, and the reference's log-probability of each answer, in nats."""

    tokens: EncodedPair
    chosen_ref: float
    rejected_ref: float
    weight: float = 1.0
    """0 for a pair that only fills a batch."""


def refer_pairs(reference: Any, pairs: Sequence[EncodedPair], reading: Reading) -> list[TrainingPair]:
    """`pairs` with the reference's log-probabilities; every process passes all of them, collective."""
    logprobs = all_logprobs(reference, answers_of(pairs), reading)
    both = zip(logprobs[: len(pairs)], logprobs[len(pairs) :], strict=True)
    return [TrainingPair(pair, chosen, rejected) for pair, (chosen, rejected) in zip(pairs, both, strict=True)]


def pairs_without_reference(pairs: Sequence[EncodedPair]) -> list[TrainingPair]:
    """`pairs` for a loss that reads no reference, whose log-probabilities are 0."""
    return [TrainingPair(pair, 0.0, 0.0) for pair in pairs]


def answers_of(pairs: Sequence[EncodedPair]) -> list[Encoded]:
    """The chosen answers, and then the rejected ones."""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def pair_logprobs(
    policy: Any, pairs: Sequence[TrainingPair], reading: Reading, *, is_weighted: bool = False
) -> PairLogprobs:
    """Log-probabilities of `pairs` under policy and reference, in one pass over 2 B rows; collective if sharded.

    With `is_weighted` the pairs have their WPO weights.
    """
    compute = answer_alignments if is_weighted else answer_logprobs
    return _beside_reference(compute(policy, answers_of([pair.tokens for pair in pairs]), reading), pairs)


def _beside_reference(numbers: torch.Tensor, pairs: Sequence[TrainingPair]) -> PairLogprobs:
    """Log-probabilities `[2 B]`, or with alignments `[2 B, 2]`, in the order of `answers_of`, and the reference's."""
    logprobs, weights = numbers, None
    if numbers.ndim == 2:
        logprobs, alignments = numbers.unbind(1)
        weights = alignments.detach().view(2, -1).sum(dim=0).exp()
    references = torch.tensor([(pair.chosen_ref, pair.rejected_ref) for pair in pairs])
    lengths = torch.tensor([[answer.num_learned for answer in pair.tokens] for pair in pairs])
    sent = (send_to_device(numbers, logprobs.device).unbind(1) for numbers in (references, lengths))
    return PairLogprobs(*logprobs.chunk(2), *chain.from_iterable(sent))._replace(on_policy_weights=weights)


@torch.no_grad()
def pair_sums(pairs: PairLogprobs, losses: torch.Tensor, weights: torch.Tensor, loss_of: PairLoss) -> DeviceFigures:
    """(sum, count) of the usual figures of a step's pairs, not read from the device yet.

    Args:
        pairs: of B pairs.
        losses: `[B]`, of `loss_of`.
        weights: `[B]`, 0 for pairs that are not counted.
        loss_of: the loss.

    Returns:
        `loss`, the log-probabilities `chosen_logprob` and `rejected_logprob` of whole answers in nats, the loss's own
        metrics (`rl.preferences.pair_metrics`) and, if pairs are weighted, `on_policy_weight`.
    """
    figures = {"loss": losses, "chosen_logprob": pairs.chosen, "rejected_logprob": pairs.rejected}
    figures |= loss_of.metrics(pairs)
    if pairs.on_policy_weights is not None:
        figures["on_policy_weight"] = pairs.on_policy_weights
    count = weights.sum()
    return {name: ((values * weights).sum(), count) for name, values in figures.items()}


def held_out_figures(
    policy: Any, pairs: Sequence[TrainingPair], loss_of: PairLoss, reading: Reading
) -> dict[str, float]:
    """Means of `pair_sums` over pairs that are not trained on, the same on every process; collective."""
    compute = answer_alignments if loss_of.is_weighted else answer_logprobs
    numbers = all_logprobs(policy, answers_of([pair.tokens for pair in pairs]), reading, compute)
    of_pairs = _beside_reference(torch.tensor(numbers, device=default_device()), pairs)
    losses = loss_of(of_pairs)
    (sums,) = read_figures([pair_sums(of_pairs, losses, torch.ones_like(losses), loss_of)])
    return {name: total / count for name, (total, count) in sums.items()}


def load_pairs(config: DPOConfig) -> tuple[list[PreferenceRow], list[PreferenceRow]]:
    """Pairs to train on, and held-out ones, selected by a hash of their prompts.

    Raises:
        ValueError: the dataset cannot be read, a row is invalid, or there are too few.
    """
    if config.dataset is None:
        train, held_out = (build_preferences(part, config.seed) for part in split(stdlib_examples()))
    else:
        train, held_out = load_parts(config.source, read_preference_rows)
    random.Random(config.seed).shuffle(train)
    train = train[: config.max_pairs or None]
    check_enough(config, len(train), len(held_out), "pairs")
    return train, held_out[: config.eval_rows]
