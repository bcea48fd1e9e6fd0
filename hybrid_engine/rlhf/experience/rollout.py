"""Answers prompts with the actor: turns rows into padded rollouts with the sampler's log-probabilities.

B: this process's prompts, G: samples of each, N = B * G answers (those of a prompt are adjacent), P: prompt columns, T:
response columns.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from hybrid_engine.containers.towers import ImageInputs
from hybrid_engine.distributed.processes import gather_objects, get_rank
from hybrid_engine.distributed.verdict import is_out_of_memory
from hybrid_engine.generation.detokenize import answer_text, end_token_ids
from hybrid_engine.ops.support_log_prob import Supports
from hybrid_engine.rl.advantages import has_variance
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    attach_responses,
    build_sequences,
    pad_numbers,
    pad_prompts,
)
from hybrid_engine.rlhf.data.encoding import encode_completion, encode_prompt
from hybrid_engine.rlhf.data.prompts import Curriculum, SelectedPrompts, select_prompts
from hybrid_engine.rlhf.data.reading import read_given_answer
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.options.shared import AnswerOptions
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.rewards.scores import Answers, Scores, reward_figures
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import mix_seed

WARMED_DEVICES = ("cuda",)
"""Kinds of devices on which compiling and graph capture take seconds."""


@dataclass(frozen=True, kw_only=True)
class AnswerSampling:
    """How answers are sampled."""

    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_samples: int = 1
    """Answers to each prompt, G."""
    records_routing: bool = False
    """Whether the experts that tokens took are recorded."""

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, which is recorded with each of them."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    def drawing(self) -> dict[str, Any]:
        """Arguments of `generate()`: samples at the temperature; greedy at 0.

        If a filter is on, the log-probabilities are of the filtered distribution, whose supports are recorded.
        """
        recording: dict[str, Any] = {"record_routing": True} if self.records_routing else {}
        if self.temperature == 0:
            return {"do_sample": False, **recording}
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if self.is_filtered:
            recording |= {"logprobs": "processed", "record_supports": True}
        return {"do_sample": True, "temperature": self.temperature, **filters, **recording}

    @classmethod
    def of(cls, config: AnswerOptions, num_samples: int = 1) -> "AnswerSampling":
        """The sampling options of a recipe, with `num_samples` answers to each prompt."""
        return cls(
            max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            num_samples=num_samples,
            records_routing=config.router_replay,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """N answers to B prompts."""

    answers: Answers
    sequences: Sequences
    logprobs: torch.Tensor
    """Log-probabilities of the sampler, `[N, T]` fp32; 0 on padding. Over `sequences.supports`, if there are any."""


def sample(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    options: AnswerSampling,
    seed: int,
) -> Rollout:
    """`options.num_samples` answers to each of `rows`.

    The actor, a `HybridEngine`, must be in evaluation mode; collective if it is sharded. Longer prompts lose their
    beginning. Answers end with any of `end_token_ids`, which is not part of their text. The same seed, rows and weights
    give the same answers.
    """
    prompts = [encode_prompt(tokenizer, row)[-options.max_prompt_tokens :] for row in rows]
    ends = end_token_ids(actor.module, tokenizer)
    prompt_ids, prompt_mask = pad_prompts(prompts, tokenizer.pad_token_id, actor.device)
    output = actor.generate(
        prompt_ids,
        attention_mask=prompt_mask,
        **generate_options(tokenizer, options, ends),
        seed=seed,
    )
    repeated_mask = prompt_mask.repeat_interleave(options.num_samples, dim=0)
    sequences = attach_responses(repeated_mask, output.sequences, output.lengths, output.supports, output.routing)
    responses = [row[mask].tolist() for row, mask in zip(sequences.responses, sequences.response_mask, strict=True)]
    answers = Answers(
        prompts=repeat([row.prompt for row in rows], options.num_samples),
        responses=[answer_text(tokenizer, ids, ends) for ids in responses],
        prompt_ids=repeat(prompts, options.num_samples),
        response_ids=responses,
        is_cut_off=[reason == "length" for reason in output.finish_reason],
        columns=columns_of(rows, options.num_samples),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        group_size=options.num_samples,
    )
    return Rollout(answers=answers, sequences=sequences, logprobs=output.logprobs)


def given_answers(
    actor: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow], options: AnswerSampling
) -> tuple[Answers, Sequences]:
    """The answers that `rows`, at least one, have in the column `completion`, in the form of a rollout's.

    As there, longer prompts lose their beginning. Longer answers lose their end, and count as cut off.
    """
    encoded = [encode_completion(tokenizer, read_given_answer(row)) for row in rows]
    prompts = [row.prompt_ids[-options.max_prompt_tokens :] for row in encoded]
    responses = [row.response_ids[: options.max_new_tokens] for row in encoded]
    learned = [row.loss_mask and row.loss_mask[: options.max_new_tokens] for row in encoded]
    ends = end_token_ids(actor.module, tokenizer)
    answers = Answers(
        prompts=[row.prompt for row in rows],
        responses=[answer_text(tokenizer, ids, ends) for ids in responses],
        prompt_ids=prompts,
        response_ids=responses,
        is_cut_off=[len(row.response_ids) > options.max_new_tokens for row in encoded],
        columns=columns_of(rows, 1),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
    )
    return answers, build_sequences(prompts, responses, tokenizer.pad_token_id, actor.device, learned)


def generate_options(tokenizer: PreTrainedTokenizerBase, options: AnswerSampling, ends: list[int]) -> dict[str, Any]:
    """Arguments of `generate()` for answers that end with any of `ends`."""
    return {
        **options.drawing(),
        "max_new_tokens": options.max_new_tokens,
        "num_return_sequences": options.num_samples,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": ends,
        "return_dict_in_generate": True,
    }


def warm_up(
    actor: Any, tokenizer: PreTrainedTokenizerBase, options: AnswerSampling, num_prompts: int, shortest: int
) -> None:
    """Compiles and captures on a GPU what rollouts of `num_prompts` prompts need, and logs how long it took.

    The actor, a `HybridEngine`, is in evaluation mode afterwards. Collective.

    Args:
        options: of the rollouts.
        num_prompts: of this process's rollouts.
        shortest: tokens of the shortest prompt.
    """
    if actor.device.type not in WARMED_DEVICES:
        return
    actor.eval()
    try:
        chosen = generate_options(tokenizer, options, end_token_ids(actor.module, tokenizer))
        say(str(actor.warm_up(num_prompts, shortest, **chosen)))
    except RuntimeError as error:  # rollouts begin again with fewer rows
        if not is_out_of_memory(error):
            raise
        say("warm-up: out of memory; the first rollout compiles and records what it needs")


def choose_groups(rollout: Rollout, is_chosen: torch.Tensor) -> Rollout:
    """The groups of a rollout whose entry in `is_chosen`, `[B]` bool, is True."""
    size = len(rollout.answers) // len(is_chosen)
    return choose_answers(rollout, is_chosen.repeat_interleave(size).nonzero().squeeze(1))


def choose_answers(rollout: Rollout, index: torch.Tensor) -> Rollout:
    """The answers `index` of a rollout, in that order."""
    sequences = rollout.sequences.rows(index)
    return Rollout(
        answers=rollout.answers.choose(index.tolist()),
        sequences=sequences,
        logprobs=rollout.logprobs[index, : sequences.response_mask.shape[1]],
    )


def join(rollouts: Sequence[Rollout], pad_token: int) -> Rollout:
    """One rollout with the rows of several, padded to the longest prompt and the longest response among them."""
    widths = [rollout.sequences.response_mask.shape[1] for rollout in rollouts]
    before = [rollout.sequences.input_ids.shape[1] - width for rollout, width in zip(rollouts, widths, strict=True)]

    def joined(tensors: list[torch.Tensor], has_prompt: bool, value: int) -> torch.Tensor:
        sides = [
            (max(before) - left if has_prompt else 0, max(widths) - right)
            for left, right in zip(before, widths, strict=True)
        ]
        return torch.cat([pad(tensor, side, value=value) for tensor, side in zip(tensors, sides, strict=True)])

    parts = [rollout.sequences for rollout in rollouts]
    supports = [part.supports for part in parts if part.supports is not None]
    routing = [part.routing for part in parts if part.routing is not None]
    return Rollout(
        answers=Answers.join([rollout.answers for rollout in rollouts]),
        sequences=Sequences(
            input_ids=joined([part.input_ids for part in parts], True, pad_token),
            attention_mask=joined([part.attention_mask for part in parts], True, 0),
            response_mask=joined([part.response_mask for part in parts], False, 0),
            supports=Supports.join(supports) if supports else None,
            routing=tuple(chain.from_iterable(routing)) if routing else None,
            images=_join_images(parts),
        ),
        logprobs=joined([rollout.logprobs for rollout in rollouts], False, 0),
    )


def _join_images(parts: Sequence[Sequences]) -> tuple[ImageInputs | None, ...] | None:
    if all(part.images is None for part in parts):
        return None
    return tuple(chain.from_iterable(part.images or [None] * len(part.response_mask) for part in parts))


def repeat(values: Sequence[Any], times: int) -> list[Any]:
    """Each of `values` so many times, one after the other."""
    return [value for value in values for _ in range(times)]


def columns_of(rows: Sequence[PromptRow], times: int) -> Mapping[str, list[Any]]:
    """The dataset's other columns, a value for each answer; only columns that every row has."""
    names = set.intersection(*(set(row.columns) for row in rows)) if rows else set()
    return {name: repeat([row.columns[name] for row in rows], times) for name in sorted(names)}


class BestAnswer(NamedTuple):
    """An answer of an earlier step."""

    score: float
    """The weighted sum of its rewards."""
    rewards: list[float]
    """Each reward without its weight; nan where it does not judge the answer."""
    response: str
    response_ids: list[int]
    logprobs: list[float]
    """Log-probabilities of the sampler at that time, of each token."""
    is_cut_off: bool
    supports: list[str] | None = None
    """`Supports.texts` of its tokens, if they were sampled with filters."""
    routing: torch.Tensor | None = None
    """`[n, L, k]` of prompt and answer, if experts are replayed."""


@dataclass(kw_only=True)
class Replay:
    """The best answer to each prompt so far, by the prompt's index; the same on every process.

    A group whose answers all score lower gets it in place of its first answer with the lowest score. Its old
    log-probabilities are those with which it was sampled, so the ratio of a policy loss corrects for its age.

    Source: after Lu et al., "ARPO", arXiv 2505.16282, which replays a success where a whole group fails.
    """

    answers: dict[int, BestAnswer] = field(default_factory=dict)

    def note(self, answers: Iterable[tuple[int, BestAnswer]]) -> None:
        """Keeps each of `answers` that is at least as good as the one before: a newer one is closer to the policy."""
        for index, answer in answers:
            if index not in self.answers or answer.score >= self.answers[index].score:
                self.answers[index] = answer

    def better(self, index: int, scores: torch.Tensor) -> BestAnswer | None:
        """The best answer to a prompt if it beats all of a group's `scores` `[G]`, of which one must not be nan."""
        stored = self.answers.get(index)
        is_better = stored is not None and bool((scores < stored.score).logical_or(scores.isnan()).all())
        return stored if is_better and not bool(scores.isnan().all()) else None

    def state(self) -> dict[int, dict[str, Any]]:
        """The state for a checkpoint, as `load` takes it."""
        return {index: answer._asdict() for index, answer in self.answers.items()}

    def load(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Continues from the `state` of an interrupted run."""
        self.answers = {index: BestAnswer(**answer) for index, answer in state.items()}


def best_answers(
    rollout: Rollout, indices: Sequence[int], scores: torch.Tensor, rewards: torch.Tensor
) -> list[tuple[int, BestAnswer]]:
    """The first answer of each group with its highest score; a group without a judged answer has none.

    Args:
        rollout: N = B * G answers.
        indices: B, of the prompts.
        scores: `[B, G]`, nan for an answer that no reward judged.
        rewards: `[N, K]`.
    """
    found = []
    for group, index in enumerate(indices):
        if scores[group].isnan().all():
            continue
        column = int(scores[group].nan_to_num(nan=-inf).argmax())
        row = group * scores.shape[1] + column
        ids, supports = rollout.answers.response_ids[row], rollout.sequences.supports
        answer = BestAnswer(
            score=float(scores[group, column]),
            rewards=rewards[row].tolist(),
            response=rollout.answers.responses[row],
            response_ids=list(ids),
            logprobs=rollout.logprobs[row, : len(ids)].tolist(),
            is_cut_off=rollout.answers.is_cut_off[row],
            supports=None if supports is None else supports[row, : len(ids)].texts(),
            routing=None if rollout.sequences.routing is None else rollout.sequences.routing[row],
        )
        found.append((index, answer))
    return found


def with_replayed(rollout: Rollout, replayed: Mapping[int, BestAnswer], pad_token: int) -> Rollout:
    """`rollout` with the answers `replayed` in place of those in their rows."""
    rows, answers = list(replayed), list(replayed.values())
    replaced = rollout.answers.choose(rows)
    ids = [answer.response_ids for answer in answers]
    sequences = build_sequences(list(replaced.prompt_ids), ids, pad_token, rollout.logprobs.device)
    texts = [answer.supports for answer in answers if answer.supports is not None]
    if texts:
        sequences = replace(sequences, supports=Supports.of_texts(texts))
    routing = tuple(answer.routing for answer in answers if answer.routing is not None)
    if routing:
        sequences = replace(sequences, routing=routing)
    earlier = Rollout(
        answers=replace(
            replaced,
            responses=[answer.response for answer in answers],
            response_ids=ids,
            is_cut_off=[answer.is_cut_off for answer in answers],
        ),
        sequences=sequences,
        logprobs=pad_numbers(
            [answer.logprobs for answer in answers], sequences.response_mask.shape[1], rollout.logprobs.device
        ),
    )
    order = torch.arange(len(rollout.answers))
    order[rows] = len(order) + torch.arange(len(rows))
    return choose_answers(join([rollout, earlier], pad_token), order)


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """Inputs of a training step: a rollout with its scores."""

    rollout: Rollout
    scores: torch.Tensor
    """`[N]` fp32, the rewards' weighted sum."""
    rewards: torch.Tensor
    """`[N, K]` fp32, each reward without its weight; nan where it does not judge the answer."""
    reward_weights: Sequence[float]
    """`[K]`"""
    step_rewards: torch.Tensor | None = None
    """`[N, T]` fp32 if a reward scored steps: each number on the token that ends its step, nan on the others."""
    is_replayed: torch.Tensor | None = None
    """`[N]` bool: True for answers of earlier steps; None without a `Replay`."""
    is_stale: torch.Tensor | None = None
    """`[N]` bool: True for answers that an earlier step began; None without partial rollouts."""
    num_drawn: int
    """Prompts that the run has taken so far, over all processes: its position in the endless series of them."""
    figures: dict[str, float]
    """Figures over all processes: the rewards by name in the first round, which is not selected by its scores; the
    number of prompts drawn, and the share of groups without variance among them.
    """

    @property
    def is_earlier(self) -> torch.Tensor | None:
        """`[N]` bool: True for answers that are not of the present weights alone; None if all are."""
        masks = [mask for mask in (self.is_replayed, self.is_stale) if mask is not None]
        return torch.stack(masks).any(dim=0) if masks else None


class _AnsweredGroups(NamedTuple):
    """Groups of this process in one round of a draw."""

    rollout: Rollout
    scores: torch.Tensor
    """`[B, G]`"""
    rewards: torch.Tensor
    """`[B * G, K]`"""
    steps: torch.Tensor
    """`[B * G, T]`: as `steps_on_tokens`."""
    is_replayed: torch.Tensor
    """`[B * G]` bool."""
    is_varied: torch.Tensor
    """`[B]` bool: whether the group teaches."""

    def choose(self, is_kept: torch.Tensor) -> "_AnsweredGroups":
        """The groups whose entry in `is_kept`, `[B]` bool, is True."""
        rows = is_kept.repeat_interleave(self.scores.shape[1])
        rollout = self.rollout if is_kept.all() else choose_groups(self.rollout, is_kept)
        rewards, steps, is_replayed = (part[rows] for part in (self.rewards, self.steps, self.is_replayed))
        return _AnsweredGroups(rollout, self.scores[is_kept], rewards, steps, is_replayed, self.is_varied[is_kept])


@dataclass(kw_only=True)
class GroupDraw:
    """The state of a draw over its rounds; numbers are over all processes."""

    num_drawn: int
    """Position in the series of prompts."""
    kept: list[_AnsweredGroups] = field(default_factory=list)
    """Groups of this process."""
    figures: dict[str, float] = field(default_factory=dict)
    """Rewards by name in the first round."""
    has_steps: bool = False
    """Whether a reward scored steps in any round."""
    num_asked: int = 0
    num_worthless: int = 0
    """Groups that do not teach."""
    num_skipped: float = 0.0
    num_outside: float = 0.0

    def note_selected(self, selected: SelectedPrompts) -> None:
        """Moves on in the series of prompts."""
        self.num_asked += len(selected.indices)
        self.num_skipped += selected.position - self.num_drawn - len(selected.indices)
        self.num_outside += selected.num_outside
        self.num_drawn = selected.position

    def keep(self, groups: _AnsweredGroups, is_kept: torch.Tensor) -> int:
        """Keeps the groups whose entry in `is_kept`, `[B]` bool, is True; returns their number."""
        if is_kept.any():
            self.kept.append(groups.choose(is_kept))
        return int(is_kept.sum())


@dataclass(frozen=True, kw_only=True)
class GroupSource:
    """The prompts, actor and rewards from which a run draws its groups."""

    actor: Any
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    rows: Sequence[PromptRow]
    options: AnswerSampling
    seed: int
    is_decoupled: bool = False
    """Whether each reward is normalized by itself, so that a group teaches if any of them varies in it."""
    learns_from_scores: bool = True
    """Whether a group needs scores that differ to be learned from."""
    curriculum: Curriculum | None = None
    """Which prompts are left out; None: none are."""
    pass_score: float = 1.0
    """Score at which an answer passes, for the curriculum."""
    replay: Replay | None = None
    """The best answers so far; None: none are replayed."""

    def draw(self, num_prompts: int, max_redraws: int, num_drawn: int, step: int) -> ScoredGroups:
        """Groups for `num_prompts` prompts of this process, from the prompts after the first `num_drawn`; collective.

        A group whose answers all have the same score is replaced by one for the next prompts, up to `max_redraws`
        times; groups without variance in the last round stay in the batch. Which prompts are drawn does not depend on
        the number of processes. The actor must be in evaluation mode.

        Source of the redraws: Yu et al., "DAPO", arXiv 2503.14476, section 3.2.
        """
        drawing, num_missing = GroupDraw(num_drawn=num_drawn), num_prompts
        for round_number in range(1 + max_redraws):
            missing = gather_objects(num_missing)
            if not any(missing):
                break
            selected = self.select(drawing.num_drawn, sum(missing))
            drawing.note_selected(selected)
            indices = mine(selected.indices, missing)
            groups = self._answer(indices, self._noise_seed(step, round_number), drawing)
            is_last = round_number == max_redraws
            num_missing -= drawing.keep(groups, torch.ones_like(groups.is_varied) if is_last else groups.is_varied)
        if self.learns_from_scores and drawing.num_worthless == drawing.num_asked:
            say(
                f"Step {step + 1}: all answers to each of {drawing.num_worthless} prompts have the same score, so "
                "nothing is learned from them"
            )
        return self.joined(drawing)

    def _answer(self, indices: Sequence[int], seed: int, drawing: "GroupDraw") -> "_AnsweredGroups":
        """This process's groups for the prompts `indices`; collective. Adds to the figures of `drawing`."""
        rollout = sample(self.actor, self.tokenizer, [self.rows[index] for index in indices], self.options, seed)
        return self.judge(rollout, indices, drawing)

    def judge(self, rollout: Rollout, indices: Sequence[int], drawing: "GroupDraw") -> "_AnsweredGroups":
        """The scored groups of the prompts `indices`; collective. Adds to the figures of `drawing`."""
        scored = self.rewards(rollout.answers)
        drawing.figures = drawing.figures or reward_figures(scored)
        scores = torch.tensor(scored.total, dtype=torch.float32).view(-1, self.options.num_samples)
        rewards = rewards_by_name(scored)
        self._note_rates(indices, scores)
        steps = steps_on_tokens(scored, rollout)
        drawing.has_steps |= any(gather_objects(scored.per_token is not None))
        rollout, is_replayed = self._replay_best(rollout, indices, scores, rewards, has_steps=drawing.has_steps)
        is_varied = self._varies(scores, rewards, steps if drawing.has_steps else None)
        drawing.num_worthless += sum(gather_objects(int((~is_varied).sum())))
        return _AnsweredGroups(rollout, scores, rewards, steps, is_replayed, is_varied)

    def joined(self, drawing: "GroupDraw") -> ScoredGroups:
        """The groups of all rounds on the actor's device; collective."""
        device, parts = self.actor.device, drawing.kept
        figures = drawing.figures | {
            "prompts_drawn": drawing.num_asked,
            "groups_without_variance": drawing.num_worthless / drawing.num_asked,
        }
        if self.curriculum is not None:
            figures |= {"prompts_skipped": drawing.num_skipped, "prompts_outside": drawing.num_outside}
        is_replayed = None
        if self.replay is not None:
            is_replayed = torch.cat([part.is_replayed for part in parts]).to(device)
            figures["replayed_share"] = statistics.fmean(gather_objects(float(is_replayed.double().mean())))
        rollouts = [part.rollout for part in parts]
        rollout = join(rollouts, self.tokenizer.pad_token_id) if len(rollouts) > 1 else rollouts[0]
        steps = None
        if drawing.has_steps:
            width = rollout.sequences.response_mask.shape[1]
            fitted = [part.steps[:, :width] for part in parts]
            steps = torch.cat([pad(part, (0, width - part.shape[1]), value=nan) for part in fitted]).to(device)
        return ScoredGroups(
            rollout=rollout,
            scores=torch.cat([part.scores.flatten() for part in parts]).to(device),
            rewards=torch.cat([part.rewards for part in parts]).to(device),
            reward_weights=self.rewards.weights,
            step_rewards=steps,
            is_replayed=is_replayed,
            num_drawn=drawing.num_drawn,
            figures=figures,
        )

    def _replay_best(
        self, rollout: Rollout, indices: Sequence[int], scores: torch.Tensor, rewards: torch.Tensor, *, has_steps: bool
    ) -> tuple[Rollout, torch.Tensor]:
        """The rollout with replayed answers, and `[N]` bool where they are; collective.

        Writes their numbers into `scores` `[B, G]` and `rewards` `[N, K]`.

        Raises:
            ValueError: a reward scored steps, which a replayed answer does not have.
        """
        is_replayed = torch.zeros(scores.numel(), dtype=torch.bool)
        if self.replay is None:
            return rollout, is_replayed
        if has_steps:
            raise ValueError("--replay-best does not replay answers whose single steps are scored; leave it out")
        newest = best_answers(rollout, indices, scores, rewards)
        replayed: dict[int, BestAnswer] = {}
        for group, index in enumerate(indices):
            if (answer := self.replay.better(index, scores[group])) is not None:
                column = int(scores[group].nan_to_num(nan=inf).argmin())
                row = group * scores.shape[1] + column
                replayed[row], is_replayed[row] = answer, True
                scores[group, column], rewards[row] = answer.score, torch.tensor(answer.rewards)
        for part in gather_objects(newest):
            self.replay.note(part)
        return (with_replayed(rollout, replayed, self.tokenizer.pad_token_id) if replayed else rollout), is_replayed

    def _varies(self, scores: torch.Tensor, rewards: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        """`[B]` bool: whether a group has answers that differ in what they are learned from.

        Args:
            scores: `[B, G]`.
            rewards: `[B * G, K]`.
            steps: `[B * G, T]`, the rewards of steps; None if no reward scored any.
        """
        if self.is_decoupled:
            return torch.stack([has_variance(reward.view_as(scores)) for reward in rewards.unbind(dim=1)]).any(dim=0)
        if steps is None or not len(scores):  # a process without prompts has no columns of steps
            return has_variance(scores)
        return has_variance(steps.unflatten(0, scores.shape).flatten(1))

    def select(self, first: int, count: int) -> SelectedPrompts:
        """The next prompts of all processes, by index."""
        if self.curriculum is not None:
            return self.curriculum.select(first, count, self.seed)
        return SelectedPrompts(select_prompts(len(self.rows), first, count, self.seed), first + count, 0)

    def _note_rates(self, indices: Sequence[int], scores: torch.Tensor) -> None:
        """Notes the pass rates of this process's groups, with `[B, G]` scores, and of all others; collective."""
        if self.curriculum is None:
            return
        passed = torch.where(scores.isnan(), nan, (scores >= self.pass_score).double())
        for rates in gather_objects(list(zip(indices, passed.nanmean(dim=1).tolist(), strict=True))):
            self.curriculum.note(rates)

    def _noise_seed(self, step: int, round_number: int) -> int:
        seed = mix_seed(self.seed, step)
        return mix_seed(seed, round_number) if round_number else seed


def mine(chosen: Sequence[int], missing: Sequence[int]) -> Sequence[int]:
    """This process's share of the `chosen` prompts, of which each process takes `missing[rank]`."""
    first = sum(missing[: get_rank()])
    return chosen[first : first + missing[get_rank()]]


def rewards_by_name(scores: Scores) -> torch.Tensor:
    """`[N, K]` fp32: each reward of each answer, nan where it does not judge it."""
    columns = ([nan if value is None else value for value in column] for column in scores.by_name.values())
    return torch.stack([torch.tensor(column, dtype=torch.float32) for column in columns], dim=1)


def steps_on_tokens(scores: Scores, rollout: Rollout) -> torch.Tensor:
    """`[N, T]` fp32: the number of each step on its last token, nan elsewhere; without steps the total on the last."""
    values = torch.full(rollout.sequences.response_mask.shape, nan)
    for row, (total, tokens) in enumerate(zip(scores.total, rollout.answers.response_ids, strict=True)):
        if scores.per_token is None or scores.is_step is None:
            values[row, len(tokens) - 1] = total
        else:
            for place in (place for place, is_step in enumerate(scores.is_step[row]) if is_step):
                values[row, place] = scores.per_token[row][place]
    return values
