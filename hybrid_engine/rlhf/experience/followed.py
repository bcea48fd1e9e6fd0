"""What the same prompts are answered as training goes on, and how likely the first answers remain.

G: answers to a prompt, T: tokens of an answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import default_device, get_rank
from hybrid_engine.rlhf.data.sequences import build_sequences, in_parts, response_logprobs
from hybrid_engine.rlhf.experience.evaluation import Evaluation, Group, prompt_shown
from hybrid_engine.rlhf.runs.answers_log import PromptAnswers, write_answers

NUM_FOLLOWED = 16
"""Prompts whose first answers are followed token by token."""


@dataclass(kw_only=True)
class FollowedAnswers:
    """The answers of the first evaluation to its first prompts, whose likelihood is measured again and again."""

    folder: Path
    """Of the run, where `answers.jsonl` is kept."""
    actor: Any
    """`HybridEngine`."""
    tokenizer: PreTrainedTokenizerBase
    temperature: float
    """Of sampling, and of the log-probabilities."""
    groups: list[Group]
    latest: tuple[int, Evaluation]
    """The last evaluation that was kept, and the steps before it."""

    def keep(self, step: int, evaluation: Evaluation) -> None:
        """Puts the answers after `step` steps into `answers.jsonl`; the actor is in evaluation mode. Collective."""
        self.actor.eval()
        self.latest = step, evaluation
        logprobs, tokens = self.logprobs(), self.tokens() if step == 0 else []
        if get_rank() == 0:
            rows = [
                PromptAnswers(
                    prompt=prompt_shown(group.prompt),
                    responses=group.responses,
                    rewards=group.scores or [None] * len(group.responses),
                    lengths=[len(ids) for ids in group.response_ids],
                    tokens=tokens[index] if index < len(tokens) else None,
                    logprobs=logprobs[index] if index < len(logprobs) else None,
                    extra=group.extra or None,
                )
                for index, group in enumerate(evaluation.groups)
            ]
            self.folder.mkdir(parents=True, exist_ok=True)
            write_answers(self.folder, step, rows)

    def after(self, num_steps: int, evaluate: Callable[[], Evaluation]) -> Evaluation:
        """The evaluation after the last of `num_steps` steps: the one that was kept then, or what `evaluate` gives.

        That of the same weights would be the same again. Collective.
        """
        if self.latest[0] != num_steps:
            self.keep(num_steps, evaluate())
        return self.latest[1]

    @torch.no_grad()
    def logprobs(self) -> list[list[list[float]]]:
        """`[prompts][G][T]` in nats under the present weights; the same on every process, collective."""
        answers = [(group.prompt_ids, ids) for group in self.groups for ids in group.response_ids]
        sequences = build_sequences(
            [prompt for prompt, _ in answers],
            [response for _, response in answers],
            self.tokenizer.pad_token_id,
            default_device(),
        )
        found = in_parts(partial(response_logprobs, temperature=self.temperature), self.actor, sequences)
        rows = iter(row[mask].tolist() for row, mask in zip(found, sequences.response_mask, strict=True))
        return [list(islice(rows, len(group.response_ids))) for group in self.groups]

    def tokens(self) -> list[list[list[str]]]:
        """`[prompts][G][T]`: each token as text."""
        return [
            [[self.tokenizer.decode([token]) for token in ids] for ids in group.response_ids] for group in self.groups
        ]


def follow(
    folder: Path, actor: Any, tokenizer: PreTrainedTokenizerBase, temperature: float, first: Evaluation
) -> FollowedAnswers:
    """Keeps the answers of the `first` evaluation, before any step, and follows those to its first prompts.

    Collective; the arguments are those of `FollowedAnswers`.
    """
    followed = FollowedAnswers(
        folder=folder,
        actor=actor,
        tokenizer=tokenizer,
        temperature=temperature,
        groups=first.groups[:NUM_FOLLOWED],
        latest=(0, first),
    )
    followed.keep(0, first)
    return followed
