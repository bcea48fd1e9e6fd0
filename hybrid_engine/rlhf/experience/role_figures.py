"""What PPO says of a rollout: its scores, and its figures against the reference and by the judge of summaries."""

from functools import partial
from typing import Any

import torch

from hybrid_engine.rlhf.experience.evaluation import (
    Evaluation,
    Sums,
    answer_sums,
    evaluate,
    judge_sums,
    reference_sums,
)
from hybrid_engine.rlhf.experience.roles import Roles
from hybrid_engine.rlhf.experience.rollout import Rollout, SamplingOptions
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.rewards.answers import Answers
from hybrid_engine.rlhf.rewards.scores import Scores, penalise_cut_off, replace_cut_off


def judge(roles: Roles, config: Any, answers: Answers) -> Scores:
    """The rewards of `answers`; `missing_eos_penalty` is taken off those of answers that were cut off."""
    scores = roles.rewards(answers)
    if config.missing_eos_score is not None:
        return replace_cut_off(scores, answers, config.missing_eos_score)
    return penalise_cut_off(scores, answers, config.missing_eos_penalty)


def rollout_sums(rollout: Rollout, logprobs_ref: torch.Tensor, config: Any) -> Sums:
    """What a rollout says by itself and against the reference, and by the judge where it applies."""
    sums = answer_sums(rollout) | reference_sums(rollout, logprobs_ref)
    return sums | judge_sums(rollout) if config.dataset is None else sums


def evaluate_held_out(roles: Roles, start: Start, config: Any) -> Evaluation:
    """One answer to each held-out prompt."""
    policy = roles.policy

    def measure(rollout: Rollout) -> Sums:
        return rollout_sums(rollout, policy.reference_logprobs(rollout.sequences, config.temperature), config)

    options, scores = SamplingOptions.of(config), partial(judge, roles, config)
    return evaluate(policy.actor, policy.tokenizer, start.held_out, scores, options, measure=measure)
