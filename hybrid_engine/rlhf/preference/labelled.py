"""Single answers that are labelled desirable or not, each beside an answer that belongs to another prompt.

B: answers of a forward pass.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hybrid_engine.containers.streams import send_to_device
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.rlhf.data.encoding import Encoded
from hybrid_engine.rlhf.preference.answers import Reading, all_logprobs


class LabelledAnswer(NamedTuple):
    """An answer and its label, with what the reference says of it and of a mismatched one, in nats."""

    answer: Encoded
    is_desirable: bool
    logprob_ref: float
    mismatched: Encoded
    """The same prompt, and the response to another one."""
    mismatched_ref: float


def mismatch(answers: Sequence[Encoded], seed: int) -> list[Encoded]:
    """For each answer its prompt with another prompt's response, chosen once for the whole run.

    KTO's authors shift the responses within a batch; chosen once, what a step measures does not depend on the order of
    its rows or on how they are spread over processes, and the reference reads every row only once.

    Raises:
        ValueError: there is only one prompt.
    """
    order = random.Random(seed).sample(range(len(answers)), len(answers))
    chosen: dict[int, Encoded] = {}
    for position, index in enumerate(order):
        following = (answers[other] for other in [*order[position + 1 :], *order[:position]])
        other = next((answer for answer in following if answer.prompt_ids != answers[index].prompt_ids), None)
        if other is None:
            raise ValueError("--dataset has a single prompt, and KTO compares answers to several; give more prompts")
        chosen[index] = other
    return [replace(chosen[index], prompt_ids=answer.prompt_ids) for index, answer in enumerate(answers)]


def check_several_prompts(prompts: Sequence[str], what: str) -> None:
    """ValueError where all answers to `what`, such as "train on", belong to one prompt."""
    if len(set(prompts)) < 2:
        raise ValueError(
            f"--dataset has a single prompt to {what}, and KTO compares answers to several; give rows of more prompts"
        )


def refer(
    reference: Any, answers: Sequence[Encoded], labels: Sequence[bool], seed: int, reading: Reading
) -> list[LabelledAnswer]:
    """`answers` with their labels and what `reference` says; every process passes all of them, collective."""
    others = mismatch(answers, seed)
    logprobs = all_logprobs(reference, [*answers, *others], reading)
    columns = (answers, labels, logprobs[: len(answers)], others, logprobs[len(answers) :])
    return [LabelledAnswer(*row) for row in zip(*columns, strict=True)]


def reference_logprobs(rows: Sequence[LabelledAnswer]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B]` each: the reference's log-probabilities of the answers, and of the mismatched ones."""
    both = send_to_device(torch.tensor([(row.logprob_ref, row.mismatched_ref) for row in rows]), default_device())
    return both[:, 0], both[:, 1]


def labels_of(rows: Sequence[LabelledAnswer]) -> torch.Tensor:
    """`[B]` bool."""
    return send_to_device(torch.tensor([row.is_desirable for row in rows]), default_device())
