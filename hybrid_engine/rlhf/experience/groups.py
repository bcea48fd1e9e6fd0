"""Groups of answers to a step's prompts, with their scores; those that teach nothing may be drawn again.

B: prompts of this process, G: samples of each, N = B * G answers (those of a prompt stand together).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import gather_objects, get_rank
from hybrid_engine.rl.group_advantages import has_variance
from hybrid_engine.rlhf.data.prompts import select_prompts
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.rollout import Rollout, SamplingOptions, choose_groups, join, sample
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.rewards.scores import Scores, reward_figures
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import mix_seed


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """What a step learns from."""

    rollout: Rollout
    scores: torch.Tensor
    """`[N]` fp32, the rewards' weighted sum."""
    step_rewards: torch.Tensor | None = None
    """`[N, T]` fp32 where a reward gave numbers to steps: each on the token that ends its step, nan on the others."""
    num_drawn: int
    """Prompts that the run has taken so far, over all processes: the place in its endless series of them."""
    figures: dict[str, float]
    """Of all processes: the rewards by name on the first round, which is not chosen by its scores; the prompts drawn,
    and the share of groups without variance among them."""


@dataclass(frozen=True, kw_only=True)
class GroupSource:
    """From where a run draws its groups."""

    actor: Any
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    rows: Sequence[PromptRow]
    options: SamplingOptions
    seed: int

    def draw(self, num_prompts: int, max_redraws: int, num_drawn: int, step: int) -> ScoredGroups:
        """Groups for `num_prompts` prompts of this process, from the prompts behind the first `num_drawn`; collective.

        A group whose answers all have one score is drawn again, from the next prompts, as long as there are
        `max_redraws` left; what is then still without variance stays in the batch. Which prompts are drawn does not
        depend on the number of processes. The actor must be in evaluation mode.

        Source of the redraws: Yu et al., "DAPO", arXiv 2503.14476, section 3.2.
        """
        rollouts: list[Rollout] = []
        scores: list[torch.Tensor] = []
        steps: list[torch.Tensor] = []
        has_steps = False
        figures: dict[str, float] = {}
        num_missing, first_drawn, num_worthless = num_prompts, num_drawn, 0
        for round_number in range(1 + max_redraws):
            missing = gather_objects(num_missing)
            if not any(missing):
                break
            rows = self._next_rows(num_drawn, missing)
            num_drawn += sum(missing)
            rollout = sample(self.actor, self.tokenizer, rows, self.options, self._noise_seed(step, round_number))
            scored = self.rewards(rollout.answers)
            figures = figures or reward_figures(scored)
            found = torch.tensor(scored.total, dtype=torch.float32).view(-1, self.options.num_samples)  # [B, G]
            found_steps = steps_on_tokens(scored, rollout)  # [B * G, T]
            has_steps |= any(gather_objects(scored.per_token is not None))
            of_steps = found_steps.unflatten(0, found.shape).flatten(
                1
            )  # [B, G * T], which a process without B has none of
            is_varied = has_variance(of_steps if has_steps and len(found) else found)
            num_worthless += sum(gather_objects(int((~is_varied).sum())))
            is_kept = is_varied if round_number < max_redraws else torch.ones_like(is_varied)
            if is_kept.any():
                rollouts.append(rollout if is_kept.all() else choose_groups(rollout, is_kept))
                scores.append(found[is_kept].flatten())
                steps.append(found_steps[is_kept.repeat_interleave(self.options.num_samples)])
            num_missing -= int(is_kept.sum())
        figures["prompts_drawn"] = num_drawn - first_drawn
        figures["groups_without_variance"] = num_worthless / (num_drawn - first_drawn)
        if num_worthless == num_drawn - first_drawn:
            say(
                f"Step {step + 1}: the answers to each of {num_worthless} prompts have one score; none teaches anything"
            )
        rollout = join(rollouts, self.tokenizer.pad_token_id) if len(rollouts) > 1 else rollouts[0]
        num_columns = rollout.sequences.response_mask.shape[1]
        fitted = [pad(part[:, :num_columns], (0, max(0, num_columns - part.shape[1])), value=nan) for part in steps]
        return ScoredGroups(
            rollout=rollout,
            scores=torch.cat(scores).to(self.actor.device),
            step_rewards=torch.cat(fitted).to(self.actor.device) if has_steps else None,
            num_drawn=num_drawn,
            figures=figures,
        )

    def _next_rows(self, num_drawn: int, missing: Sequence[int]) -> list[PromptRow]:
        """This process's prompts among the next ones, of which each process takes as many as it is `missing`."""
        chosen = select_prompts(len(self.rows), num_drawn, sum(missing), self.seed)
        first = sum(missing[: get_rank()])
        return [self.rows[index] for index in chosen[first : first + missing[get_rank()]]]

    def _noise_seed(self, step: int, round_number: int) -> int:
        seed = mix_seed(self.seed, step)
        return mix_seed(seed, round_number) if round_number else seed


def steps_on_tokens(scores: Scores, rollout: Rollout) -> torch.Tensor:
    """`[N, T]` fp32: the number of each step on the token that ends it, nan elsewhere; else the total on the last."""
    values = torch.full(rollout.sequences.response_mask.shape, nan)
    for row, (total, tokens) in enumerate(zip(scores.total, rollout.answers.response_ids, strict=True)):
        if scores.per_token is None or scores.is_step is None:
            values[row, len(tokens) - 1] = total
        else:
            for place in (place for place, is_step in enumerate(scores.is_step[row]) if is_step):
                values[row, place] = scores.per_token[row][place]
    return values
