"""What the same prompts are answered as training goes on, and how likely the first answers remain.

G: answers to a prompt, T: tokens of an answer.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import default_device, get_rank
from hybrid_engine.recipes.data.sequences import build_sequences, in_parts, response_logprobs
from hybrid_engine.recipes.experience.evaluation import Evaluation, Group, prompt_shown
from hybrid_engine.recipes.experience.policy import Policy
from hybrid_engine.recipes.runs.answers_log import PromptAnswers, write_answers

NUM_FOLLOWED = 16
"""Prompts whose first answers are followed token by token."""


@dataclass(frozen=True, kw_only=True)
class FollowedAnswers:
    """The answers of the first evaluation to its first prompts, whose likelihood is measured again and again."""

    groups: list[Group]
    temperature: float

    @torch.no_grad()
    def logprobs(self, policy: Policy) -> list[list[list[float]]]:
        """`[prompts][G][T]` in nats under the present weights; the same on every process, collective."""
        answers = [(group.prompt_ids, ids) for group in self.groups for ids in group.response_ids]
        sequences = build_sequences(
            [prompt for prompt, _ in answers],
            [response for _, response in answers],
            policy.tokenizer.pad_token_id,
            default_device(),
        )
        found = in_parts(lambda rows: response_logprobs(policy.actor, rows, self.temperature), sequences)
        rows = iter(row[mask].tolist() for row, mask in zip(found, sequences.response_mask, strict=True))
        return [list(islice(rows, len(group.response_ids))) for group in self.groups]

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[list[list[str]]]:
        """`[prompts][G][T]`: each token as text."""
        return [[[tokenizer.decode([token]) for token in ids] for ids in group.response_ids] for group in self.groups]


def follow(evaluation: Evaluation, temperature: float) -> FollowedAnswers:
    """The answers of the first evaluation that are followed through a run."""
    return FollowedAnswers(groups=evaluation.groups[:NUM_FOLLOWED], temperature=temperature)


def keep_answers(
    folder: Path,
    step: int,
    evaluation: Evaluation,
    followed: FollowedAnswers | None = None,
    policy: Policy | None = None,
) -> None:
    """Puts the answers after `step` steps into the run's `answers.jsonl`; collective where answers are followed."""
    logprobs = tokens = None
    if followed is not None and policy is not None:
        policy.actor.eval()
        logprobs, tokens = followed.logprobs(policy), followed.tokens(policy.tokenizer) if step == 0 else None
    if get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_answers(
            folder,
            step,
            [
                PromptAnswers(
                    prompt=prompt_shown(group.prompt),
                    responses=group.responses,
                    rewards=group.scores or [None] * len(group.responses),
                    lengths=[len(ids) for ids in group.response_ids],
                    tokens=tokens[index] if tokens and index < len(tokens) else None,
                    logprobs=logprobs[index] if logprobs and index < len(logprobs) else None,
                )
                for index, group in enumerate(evaluation.groups)
            ],
        )
