"""Answers the same prompts at different times of a run, or with different models, and measures quality and diversity.

B: prompts over all processes, G: answers to each.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import default_device, gather_objects, get_rank, get_world_size
from hybrid_engine.rl.estimates import Interval, kl_k1, mean_interval, pass_at_k, rate_interval
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import build_sequences, in_parts, response_logprobs
from hybrid_engine.rlhf.data.parts import prompt_text
from hybrid_engine.rlhf.data.rows import PromptRow, Turns
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, Rollout, sample
from hybrid_engine.rlhf.rewards.scores import Answers, Scores, named_figures
from hybrid_engine.rlhf.runs.run_folder import PromptAnswers, write_answers
from hybrid_engine.rlhf.runs.run_log import samples_table, say
from hybrid_engine.rlhf.runs.stages import mix_seed
from hybrid_engine.rlhf.tasks.stdlib_docs import conforms

Item = TypeVar("Item")
Sums = dict[str, tuple[float, float]]
"""A (sum, count) for each figure, for `global_means`."""
EVALUATION_SEED = 20_257
PROMPTS_PER_PASS = 64
"""Prompts that one process answers at a time."""
NUM_SHOWN = 12
UNJUDGED = Scores(total=[], by_name={}, per_token=None)
NUM_FOLLOWED = 16
"""Number of prompts whose first answers are followed token by token."""


@dataclass(frozen=True, kw_only=True)
class AnswerGroup:
    """The G answers to one prompt."""

    prompt: Turns
    responses: list[str]
    scores: list[float | None]
    """Empty without a judge; None for an answer that no reward judged."""
    by_name: dict[str, list[float | None]]
    """The scores of each reward."""
    is_cut_off: list[bool]
    prompt_ids: list[int]
    response_ids: list[list[int]]
    """Token ids without padding, including the end-of-sequence token."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Values that reward functions passed to `log_extra`."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers to some prompts and the figures measured on them; the same on every process."""

    figures: dict[str, float]
    """Means over the prompts. `<name>_low` and `<name>_high` are the 95% confidence interval of `score` and of
    `pass_at_<k>`, by prompt (`rl/estimates.py`). `distinct_share` is the share of distinct responses,
    `top_opening_share` that of responses that begin with the most frequent first word.
    """
    groups: list[AnswerGroup]
    """Groups in the order of the prompts."""


@dataclass(frozen=True, kw_only=True)
class PassRule:
    """The score at which an answer passes, and the k of pass@k."""

    threshold: float
    """An answer whose score reaches this passes."""
    ks: Sequence[int]
    """The k of each pass@k, from 1 to G."""


def global_means(sums: Sums) -> dict[str, float]:
    """The mean of each figure over all processes, from this process's (sum, count); collective."""
    everyone = gather_objects(sums)
    return {
        name: sum(part[name][0] for part in everyone) / max(sum(part[name][1] for part in everyone), 1e-9)
        for name in sums
    }


def step_means(parts: Sequence[Sums]) -> dict[str, float]:
    """`global_means` of the (sum, count) of a step's micro-batches, which all have the same figures; collective."""
    return global_means(
        {name: (sum(part[name][0] for part in parts), sum(part[name][1] for part in parts)) for name in parts[0]}
    )


def score_sum(scores: torch.Tensor) -> tuple[float, float]:
    """(sum, count) of `[N]` scores, without those of answers that no reward judged."""
    total, count = torch.stack([scores.nansum().double(), (~scores.isnan()).sum()]).tolist()
    return total, count


def mean_sums(means: Mapping[str, torch.Tensor], mask: torch.Tensor) -> DeviceFigures:
    """(sum, count), not read from the device yet, for means over the True entries of `mask`; both 0 without any."""
    count = mask.sum().double()
    return {name: (torch.where(count > 0, mean.detach().double() * count, 0.0), count) for name, mean in means.items()}


def answer_sums(rollout: Rollout) -> Sums:
    """Sums for the figures of a rollout alone: tokens of a response, share that was cut off, entropy in nats.

    With recorded supports the entropy is that of the distributions over them, and their number of tokens is a figure.
    """
    mask, supports = rollout.sequences.response_mask, rollout.sequences.supports
    rows, num_tokens = mask.shape[0], float(mask.sum())
    sizes = {} if supports is None else {"support_size": (float(supports.sizes.sum()), num_tokens)}
    return sizes | {
        "length": (num_tokens, rows),
        "cut_off_share": (sum(rollout.answers.is_cut_off), rows),
        "entropy_estimate": (-rollout.logprobs.sum().item(), num_tokens),
    }


def reference_sums(rollout: Rollout, logprobs_ref: torch.Tensor) -> Sums:
    """The k1 estimate of KL(actor, reference) in nats, from the reference's log-probabilities `[B * G, T]`."""
    mask = rollout.sequences.response_mask
    kl = kl_k1(rollout.logprobs, logprobs_ref).sum().item()
    return {"kl_per_sequence": (kl, mask.shape[0]), "kl_per_token": (kl, float(mask.sum()))}


def judge_sums(rollout: Rollout) -> Sums:
    """Counts responses that are summary lines by PEP 257; only for prompts from the standard library."""
    responses = zip(rollout.answers.responses, rollout.answers.is_cut_off, strict=True)
    passed = [not cut and conforms(text) for text, cut in responses]
    return {"judge_pass_rate": (sum(passed), len(passed))}


@torch.no_grad()
def evaluate(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    judge: Callable[[Answers], Scores] | None,
    options: AnswerSampling,
    *,
    passes: PassRule | None = None,
    measure: Callable[[Rollout], Sums] = answer_sums,
    seed: int = EVALUATION_SEED,
    has_bar: bool = False,
) -> Evaluation:
    """Answers `rows`, divided among the processes, and scores the answers; collective.

    The same seed, rows and weights give the same answers on any number of processes. For a prompt that occurs in
    several passes this holds only for the same number of processes.

    Args:
        actor: a `HybridEngine` or an `InferenceEngine`; in evaluation mode afterwards.
        rows: at least as many as there are processes; the same on all of them.
        judge: the `Rewards` of the run, or the recipe's function around them; None: the figures have no score.
        passes: None: the figures have no pass@k.
        measure: returns the recipe's figures of each rollout.
        has_bar: shows progress on a terminal; not inside another bar.
    """
    actor.eval()
    parts = split_evenly(rows, PROMPTS_PER_PASS * get_world_size())
    is_shown = has_bar and len(parts) > 1 and get_rank() == 0
    groups: list[AnswerGroup] = []
    measured: list[Sums] = []
    for part, part_seed in track(list(zip(parts, _seeds(parts, seed), strict=True)), "Answering", disable=not is_shown):
        rollout = sample(actor, tokenizer, part[get_rank() :: get_world_size()], options, part_seed)
        groups += _groups(rollout.answers, judge(rollout.answers) if judge else UNJUDGED, options.num_samples)
        measured.append(measure(rollout))
    gathered = _in_order(groups, [len(part) for part in parts])
    figures = {} if judge is None else _score_figures(gathered)
    figures |= {} if passes is None else _pass_figures(gathered, passes)
    figures |= step_means(measured) | _diversity(gathered)
    return Evaluation(figures=figures, groups=gathered)


def split_evenly(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """`items` in the smallest number of parts with at most `most` each, whose lengths differ by at most one.

    So no part has fewer items than there are processes if there are at least as many items: each process gets one.
    """
    number = math.ceil(len(items) / most)
    return [items[len(items) * part // number : len(items) * (part + 1) // number] for part in range(number)]


def _seeds(parts: Sequence[Sequence[PromptRow]], seed: int) -> list[int]:
    """A seed for each part; it differs if a prompt occurs again, whose answers would otherwise repeat."""
    seeds: list[int] = []
    earlier: set[str] = set()
    for index, part in enumerate(parts):
        prompts = {prompt_text(row.prompt) for row in part}
        seeds.append(mix_seed(seed, index) if prompts & earlier else seed)
        earlier |= prompts
    return seeds


def _groups(answers: Answers, scores: Scores, num_samples: int) -> list[AnswerGroup]:
    groups = []
    for start in range(0, len(answers), num_samples):
        rows = slice(start, start + num_samples)
        groups.append(
            AnswerGroup(
                prompt=answers.prompts[start],
                responses=list(answers.responses[rows]),
                scores=[None if math.isnan(number) else number for number in scores.total[rows]],
                by_name={name: values[rows] for name, values in scores.by_name.items()},
                is_cut_off=list(answers.is_cut_off[rows]),
                prompt_ids=answers.prompt_ids[start],
                response_ids=list(answers.response_ids[rows]),
                extra={name: values[rows] for name, values in scores.extra.items()},
            )
        )
    return groups


def _in_order(groups: list[AnswerGroup], sizes: list[int]) -> list[AnswerGroup]:
    """All processes' groups in the order of the prompts; process r took every r-th of each part. Collective."""
    everyone = [iter(part) for part in gather_objects(groups)]
    return [next(everyone[index % len(everyone)]) for size in sizes for index in range(size)]


def _score_figures(groups: list[AnswerGroup]) -> dict[str, float]:
    judged = [[score for score in group.scores if score is not None] for group in groups]
    if not any(judged):
        raise ValueError(
            f"--reward scores no answer to any of the {len(groups)} held-out prompts; it must return a number for some"
        )
    interval = mean_interval([statistics.fmean(scores) for scores in judged if scores])
    share = 1 - sum(map(len, judged)) / sum(len(group.scores) for group in groups)
    names = groups[0].by_name
    rewards = {name: [value for group in groups for value in group.by_name[name]] for name in names}
    return _named("score", interval) | named_figures(rewards) | {"unjudged_share": share}


def _pass_figures(groups: list[AnswerGroup], passes: PassRule) -> dict[str, float]:
    figures: dict[str, float] = {}
    num_samples = len(groups[0].scores)
    num_passed = [sum(score is not None and score >= passes.threshold for score in group.scores) for group in groups]
    for k in passes.ks:
        rates = [pass_at_k(num_samples, number, k) for number in num_passed]
        figures |= _named(f"pass_at_{k}", rate_interval(rates, num_samples // k))
    return figures


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _diversity(groups: list[AnswerGroup]) -> dict[str, float]:
    responses = [response for group in groups for response in group.responses]
    openings = Counter(response.split(" ")[0] for response in responses)
    return {
        "distinct_share": len(set(responses)) / len(responses),
        "top_opening_share": openings.most_common(1)[0][1] / len(responses),
    }


def show_comparison(before: Evaluation, after: Evaluation, folder: Path) -> None:
    """Prints the first answers and the figures of both; writes the first answer to each prompt to `samples.json`."""
    shown = {
        "prompt": [prompt_shown(group.prompt) for group in before.groups],
        "before": [group.responses[0] for group in before.groups],
        "after": [group.responses[0] for group in after.groups],
    }
    say(
        samples_table(
            "Held-out prompts", {name: [text.strip() for text in texts[:NUM_SHOWN]] for name, texts in shown.items()}
        )
    )
    names = list(before.figures)
    columns = {"figure": names} | {
        heading: [f"{evaluation.figures[name]:.3f}" for name in names]
        for heading, evaluation in (("before", before), ("after", after))
    }
    say(samples_table(f"{len(before.groups)} held-out prompts", columns))
    if get_rank() == 0:
        rows = [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]
        (folder / "samples.json").write_text(json.dumps(rows, indent=1) + "\n")


def prompt_shown(prompt: Turns) -> str:
    """A prompt as text; of a conversation each message after its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


@dataclass(kw_only=True)
class FollowedAnswers:
    """The first evaluation's answers to its first prompts, whose likelihood is measured repeatedly during the run."""

    folder: Path
    """Folder of the run, with `answers.jsonl`."""
    actor: Any
    """`HybridEngine`."""
    tokenizer: PreTrainedTokenizerBase
    temperature: float
    """Temperature of sampling, and of the log-probabilities."""
    sizes: RunPasses
    """The sizes of the run's passes."""
    groups: list[AnswerGroup]
    latest: tuple[int, Evaluation]
    """The last evaluation that was recorded, and the number of steps before it."""

    def keep(self, step: int, evaluation: Evaluation) -> None:
        """Writes the answers after `step` steps to `answers.jsonl`; sets the actor to evaluation mode. Collective."""
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
        """The evaluation after the last of `num_steps` steps: the recorded one, or the result of `evaluate`.

        A second evaluation of the same weights would give the same result. Collective.
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
        found = in_parts(partial(response_logprobs, temperature=self.temperature), self.actor, sequences, self.sizes)
        rows = iter(row[mask].tolist() for row, mask in zip(found, sequences.response_mask, strict=True))
        return [list(islice(rows, len(group.response_ids))) for group in self.groups]

    def tokens(self) -> list[list[list[str]]]:
        """`[prompts][G][T]`: each token as text."""
        return [
            [[self.tokenizer.decode([token]) for token in ids] for ids in group.response_ids] for group in self.groups
        ]


def follow(
    folder: Path,
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    sizes: RunPasses,
    first: Evaluation,
) -> FollowedAnswers:
    """Records the answers of the `first` evaluation, before any step, and follows those to its first prompts.

    Collective; the arguments are those of `FollowedAnswers`.
    """
    followed = FollowedAnswers(
        folder=folder,
        actor=actor,
        tokenizer=tokenizer,
        temperature=temperature,
        sizes=sizes,
        groups=first.groups[:NUM_FOLLOWED],
        latest=(0, first),
    )
    followed.keep(0, first)
    return followed
