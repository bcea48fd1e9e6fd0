"""Partial rollouts: a step trains the groups that are whole, and the next steps continue the others.

More groups are open than a step trains, so that the rows of answers that have ended go on with other prompts and the
no step waits for its longest answers. An unfinished answer keeps its tokens, their log-probabilities and the
step that drew each of them; the next step computes its prefix again under the weights of that time. Source: Kimi Team,
"Kimi k1.5", arXiv 2501.12599, section 2.6.2; the bound on staleness: Fu et al., "AReaL", arXiv 2505.24298, section 5.1.

B: this process's prompts of a step, G: answers to each, N = B * G.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from hybrid_engine.distributed.processes import gather_objects, get_rank
from hybrid_engine.generation.detokenize import answer_text, end_token_ids
from hybrid_engine.generation.live.asynchronous import Carried, Group
from hybrid_engine.rlhf.batches.sequences import build_sequences, pad_numbers, pad_prompts
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.experience.evaluation import global_means
from hybrid_engine.rlhf.experience.rollout import (
    GroupDraw,
    GroupSource,
    Rollout,
    ScoredGroups,
    columns_of,
    generate_options,
    mine,
    repeat,
)
from hybrid_engine.rlhf.rewards.scores import Answers
from hybrid_engine.rlhf.runs.stages import mix_seed


@dataclass(frozen=True)
class OpenGroups:
    """Groups of this process that a step began and none has trained yet."""

    carried: Carried | None = None
    rows: Mapping[int, int] = field(default_factory=dict)
    """Index of the prompt of each group in the data set."""
    begun: Mapping[int, int] = field(default_factory=dict)
    """Step in which each group began."""

    @property
    def num_begun(self) -> int:
        """Groups that this process has begun so far."""
        return 0 if self.carried is None else self.carried.num_prompts

    def state(self) -> dict[str, Any]:
        """The state of the groups of all processes, for a checkpoint; collective."""
        own = {"rows": dict(self.rows), "begun": dict(self.begun), "carried": self.carried and self.carried.state()}
        return {"processes": gather_objects(own)}

    @classmethod
    def restored(cls, state: Mapping[str, Any] | None) -> "OpenGroups":
        """This process's groups of a checkpoint; none without one.

        Raises:
            ValueError: the run had another number of processes.
        """
        if state is None:
            return cls()
        processes = state["processes"]
        if len(processes) != len(gather_objects(None)):
            raise ValueError(
                f"--resume: the unfinished groups of --partial-rollouts are those of {len(processes)} processes; "
                "resume with as many"
            )
        own = processes[get_rank()]
        carried = None if own["carried"] is None else Carried.restored(own["carried"])
        return cls(carried, own["rows"], own["begun"])


def num_to_begin(num_prompts: int, num_open: int, num_left: int) -> int:
    """How many groups a step begins of which `num_prompts` are trained, if the run still trains `num_left` in all.

    Half as many as are trained stay open. So each that is open for two steps is among those of the second one.
    """
    return max(0, min(num_prompts + -(-num_prompts // 2), num_left) - num_open)


class WholeGroups(NamedTuple):
    """The groups of this process that a step trains."""

    rollout: Rollout
    indices: list[int]
    """Index of the prompt of each group in the data set."""
    is_stale: torch.Tensor
    """`[N]` bool: True for answers with a token of an earlier step."""
    figures: dict[str, float]
    """Staleness over the tokens of all processes."""


def answer_whole(
    source: GroupSource,
    indices: Sequence[int],
    num_prompts: int,
    step: int,
    opened: OpenGroups,
    max_staleness: int,
) -> tuple[WholeGroups, OpenGroups]:
    """Begins groups for the prompts `indices`; returns `num_prompts` as soon as so many are whole, and the open ones.

    Groups that began `max_staleness` steps ago are among them. The same seed, rows and weights give the same groups.
    Collective; the actor must be in evaluation mode.

    Args:
        opened: of the step before.
    """
    new = range(opened.num_begun, opened.num_begun + len(indices))
    rows = {**opened.rows, **dict(zip(new, indices, strict=True))}
    begun = {**opened.begun, **dict.fromkeys(new, step)}
    due = {group for group, began in begun.items() if step - began >= max_staleness}
    carried = source.actor.generate_until(
        lambda whole: len(whole) >= num_prompts and due.issubset(whole),
        *_prompts(source, indices),
        carried=opened.carried,
        version=step,
        seed=mix_seed(source.seed, step),
        **_options(source),
    )
    chosen = sorted(carried.whole, key=lambda group: (group not in due, group))[:num_prompts]
    groups, carried = carried.take(chosen)
    trained = [rows.pop(group) for group in chosen]
    is_stale, figures = measure_staleness(groups, step)
    whole = WholeGroups(rollout_of(source, groups, trained), trained, is_stale.to(source.actor.device), figures)
    return whole, OpenGroups(carried, rows, {group: begun[group] for group in rows})


def draw_whole(
    source: GroupSource,
    num_prompts: int,
    num_left: int,
    num_drawn: int,
    step: int,
    opened: OpenGroups,
    max_staleness: int,
) -> tuple[ScoredGroups, OpenGroups]:
    """`answer_whole` of the next prompts of the series, with scores. Collective.

    Args:
        num_left: groups that this process trains from this step to the end of the run.
        num_drawn: position in the series of prompts, over all processes.
    """
    drawing = GroupDraw(num_drawn=num_drawn)
    missing = gather_objects(num_to_begin(num_prompts, len(opened.rows), num_left))
    indices: Sequence[int] = ()
    if any(missing):
        selected = source.select(num_drawn, sum(missing))
        drawing.note_selected(selected)
        indices = mine(selected.indices, missing)
    whole, opened = answer_whole(source, indices, num_prompts, step, opened, max_staleness)
    drawing.num_asked = sum(gather_objects(num_prompts))
    drawing.keep(source.judge(whole.rollout, whole.indices, drawing), torch.ones(num_prompts, dtype=torch.bool))
    scored = source.joined(drawing)
    figures = scored.figures | whole.figures | {"prompts_drawn": sum(missing)}
    return replace(scored, is_stale=whole.is_stale, figures=figures), opened


def rollout_of(source: GroupSource, groups: Sequence[Group], indices: Sequence[int]) -> Rollout:
    """The answers of `groups`, to the prompts `indices` of the data set."""
    tokenizer, ends = source.tokenizer, end_token_ids(source.actor.module, source.tokenizer)
    rows, num_samples = [source.rows[index] for index in indices], source.options.num_samples
    prompts = repeat([group.prompt_ids for group in groups], num_samples)
    answers = [answer for group in groups for answer in group.answers]
    responses = [answer.tokens for answer in answers]
    sequences = build_sequences(prompts, responses, tokenizer.pad_token_id, source.actor.device)
    return Rollout(
        answers=Answers(
            prompts=repeat([row.prompt for row in rows], num_samples),
            responses=[answer_text(tokenizer, ids, ends) for ids in responses],
            prompt_ids=prompts,
            response_ids=responses,
            is_cut_off=[answer.finish_reason == "length" for answer in answers],
            columns=columns_of(rows, num_samples),
            decode=partial(tokenizer.decode, skip_special_tokens=True),
            group_size=num_samples,
        ),
        sequences=sequences,
        logprobs=pad_numbers(
            [answer.logprobs for answer in answers], sequences.response_mask.shape[1], source.actor.device
        ),
    )


def measure_staleness(groups: Sequence[Group], step: int) -> tuple[torch.Tensor, dict[str, float]]:
    """`[N]` bool, True for answers with a token of an earlier step; and figures of all processes' tokens; collective.

    `staleness` is the mean number of steps since a token was drawn, `stale_share` the share of earlier tokens.
    """
    versions = [answer.versions for group in groups for answer in group.answers]
    is_stale = torch.tensor([min(drawn) < step for drawn in versions])
    ages = torch.tensor([step - version for drawn in versions for version in drawn], dtype=torch.float32)
    count = float(len(ages))
    means = global_means({"staleness": (float(ages.sum()), count), "stale_share": (float((ages > 0).sum()), count)})
    return is_stale, means | {"staleness_max": max(gather_objects(float(ages.max())))}


def _prompts(source: GroupSource, indices: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token ids and mask of the prompts `indices`; (None, None) without any."""
    if not indices:
        return None, None
    rows = [source.rows[index] for index in indices]
    prompts = [encode_prompt(source.tokenizer, row)[-source.options.max_prompt_tokens :] for row in rows]
    return pad_prompts(prompts, source.tokenizer.pad_token_id, source.actor.device)


def _options(source: GroupSource) -> dict[str, Any]:
    named = generate_options(source.tokenizer, source.options, end_token_ids(source.actor.module, source.tokenizer))
    return {name: value for name, value in named.items() if name != "return_dict_in_generate"}
