"""Pairs of a chosen and a rejected answer, with the reference's log-probabilities.

B: pairs of a forward pass.
"""

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.rl.preferences import PairLogprobs, PairLoss, pair_metrics
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, read_figures
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.data.parts import load_parts
from hybrid_engine.rlhf.data.reading import read_preference_rows
from hybrid_engine.rlhf.data.rows import PreferenceRow
from hybrid_engine.rlhf.options import dpo
from hybrid_engine.rlhf.preference.answers import Reading, all_logprobs, answer_logprobs
from hybrid_engine.rlhf.preference.first_actor import check_enough
from hybrid_engine.rlhf.tasks.stdlib_docs import build_preferences, split, stdlib_examples


class TrainingPair(NamedTuple):
    """A pair, and the reference's log-probability of each answer, in nats."""

    tokens: EncodedPair
    chosen_ref: float
    rejected_ref: float
    weight: float = 1.0
    """0 for a pair that only fills a batch."""


def refer(reference: Any, pairs: Sequence[EncodedPair], reading: Reading) -> list[TrainingPair]:
    """`pairs` with the reference's log-probabilities; every process passes all of them, collective."""
    logprobs = all_logprobs(reference, answers_of(pairs), reading)
    both = zip(logprobs[: len(pairs)], logprobs[len(pairs) :], strict=True)
    return [TrainingPair(pair, chosen, rejected) for pair, (chosen, rejected) in zip(pairs, both, strict=True)]


def answers_of(pairs: Sequence[EncodedPair]) -> list[Encoded]:
    """The chosen answers, and then the rejected ones."""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def pair_logprobs(policy: Any, pairs: Sequence[TrainingPair], reading: Reading) -> PairLogprobs:
    """Log-probabilities of `pairs` under policy and reference, in one pass over 2 B rows; collective if sharded."""
    logprobs = answer_logprobs(policy, answers_of([pair.tokens for pair in pairs]), reading)
    return _beside_reference(logprobs, pairs)


def _beside_reference(logprobs: torch.Tensor, pairs: Sequence[TrainingPair]) -> PairLogprobs:
    """`logprobs` `[2 B]`, in the order of `answers_of`, with those of the reference."""
    references = torch.tensor([(pair.chosen_ref, pair.rejected_ref) for pair in pairs])
    lengths = torch.tensor([[answer.num_learned for answer in pair.tokens] for pair in pairs])
    sent = (send_to_device(numbers, logprobs.device).unbind(1) for numbers in (references, lengths))
    return PairLogprobs(*logprobs.chunk(2), *chain.from_iterable(sent))


@torch.no_grad()
def pair_sums(pairs: PairLogprobs, losses: torch.Tensor, weights: torch.Tensor, beta: float) -> DeviceFigures:
    """(sum, count) of the usual figures of a step's pairs, not read from the device yet.

    Args:
        pairs: of B pairs.
        losses: `[B]`.
        weights: `[B]`, 0 for pairs that are not counted.
        beta: DPO's.

    Returns:
        `loss`, the log-probabilities `chosen_logprob` and `rejected_logprob` of whole answers in nats, and the figures
        of `rl.preferences.pair_metrics`.
    """
    figures = {"loss": losses, "chosen_logprob": pairs.chosen, "rejected_logprob": pairs.rejected}
    figures |= pair_metrics(pairs, beta)
    count = weights.sum()
    return {name: ((values * weights).sum(), count) for name, values in figures.items()}


def held_out_figures(
    policy: Any, pairs: Sequence[TrainingPair], loss_of: PairLoss, beta: float, reading: Reading
) -> dict[str, float]:
    """Means of `pair_sums` over pairs that are not trained on, the same on every process; collective."""
    logprobs = all_logprobs(policy, answers_of([pair.tokens for pair in pairs]), reading)
    of_pairs = _beside_reference(torch.tensor(logprobs, device=default_device()), pairs)
    losses = loss_of(of_pairs)
    (sums,) = read_figures([pair_sums(of_pairs, losses, torch.ones_like(losses), beta)])
    return {name: total / count for name, (total, count) in sums.items()}


def load_pairs(config: dpo.Config) -> tuple[list[PreferenceRow], list[PreferenceRow]]:
    """Pairs to train on, and held-out ones, selected by a hash of their prompts.

    Raises:
        ValueError: the data set cannot be read, a row is invalid, or there are too few.
    """
    if config.dataset is None:
        train, held_out = (build_preferences(part, config.seed) for part in split(stdlib_examples()))
    else:
        train, held_out = load_parts(config.source, read_preference_rows)
    random.Random(config.seed).shuffle(train)
    train = train[: config.max_pairs or None]
    check_enough(config, len(train), len(held_out), "pairs")
    return train, held_out[: config.eval_rows]
