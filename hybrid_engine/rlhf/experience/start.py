"""The start of a run: checks before anything is trained, prompts and rewards, and the first actor.

The recipes that learn from rewards call `prepare`; dpo and kto call the functions from `check_run` on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.config.checks import check_divides
from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.sequences import recompute_activations
from hybrid_engine.rlhf.data.encoding import Encoded, encode_completion, encode_prompt
from hybrid_engine.rlhf.data.parts import prompt_text
from hybrid_engine.rlhf.data.prompts import (
    PromptTokens,
    R,
    T,
    fit_prompts,
    keep_fitting,
    limit_of,
    load_prompt_rows,
    long_answer,
    long_one,
    settle_lengths,
)
from hybrid_engine.rlhf.data.reading import read_given_answer
from hybrid_engine.rlhf.data.rows import LabelledRow, PreferenceRow, PromptRow, encode_each, told_together
from hybrid_engine.rlhf.experience.evaluation import Evaluation, evaluate
from hybrid_engine.rlhf.experience.rollout import AnswerSampling
from hybrid_engine.rlhf.options.preference import PreferenceOptions
from hybrid_engine.rlhf.options.shared import AdapterOptions, DatasetOptions, PromptRunOptions, RunOptions
from hybrid_engine.rlhf.options.supervised import RewardConfig, SFTConfig
from hybrid_engine.rlhf.rewards.learned import LearnedReward, check_reward_adapter, critic_source
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.rewards.scores import Answers, Judge, Scores
from hybrid_engine.rlhf.runs.engine_config import Schedule, build_engine_config, largest_micro_batch, torch_dtype
from hybrid_engine.rlhf.runs.run_checks import (
    add_adapter,
    check_folder,
    check_model,
    check_positions,
    check_stage,
    check_top_k,
)
from hybrid_engine.rlhf.runs.run_folder import RUN_RESULTS
from hybrid_engine.rlhf.runs.stages import load_config, load_model, load_tokenizer, move_aside, num_positions
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import MAX_POSITIONS
from hybrid_engine.rlhf.tasks.stdlib_docs import conforms, split, stdlib_examples

RunT = TypeVar("RunT", bound=PromptRunOptions)
OptionsT = TypeVar("OptionsT", bound=PreferenceOptions)


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that needs no file from the user."""

    load_rows: Callable[[int], tuple[list[PromptRow], list[PromptRow]]]
    """From the run's seed to the prompts to train on, and those held out."""
    actor_stage: Callable[[RunOptions], SFTConfig]
    """The stage that trains the first actor of a run."""
    reward: str | None
    """The reward's spec; None: the stage `reward` trains a model."""
    serves_any_prompt: bool
    """Whether this actor and this reward make sense for a user's own prompts."""


def stage_options(config: RunOptions) -> dict[str, Any]:
    """The options that the earlier stages of a run, which train its first models, take from it.

    Their rows may be longer than the run's own: a budget of tokens must hold two sequences that fill a small model.
    """
    names = ("out", "seed", "zero_stage", "activation_checkpointing", "dtype", "tf32", "tracker", "metric_names")
    budget = config.tokens_per_micro_batch and max(config.tokens_per_micro_batch, 2 * MAX_POSITIONS)
    return {name: vars(config)[name] for name in names} | {"tokens_per_micro_batch": budget}


def summary_rows(seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """The standard library's signatures, split the same for every seed."""
    train, held_out = ([PromptRow(prompt=example.prompt) for example in part] for part in split(stdlib_examples()))
    return train, held_out


SUMMARIES = OwnTask(
    load_rows=summary_rows,
    actor_stage=lambda config: SFTConfig(**stage_options(config)),
    reward=None,
    serves_any_prompt=True,
)
"""Summary lines for the signatures of the standard library's functions."""


def character_stage(task: str, config: RunOptions, *, group_by_length: bool = True) -> SFTConfig:
    """The stage that trains a small model on single characters, from a pupil's work."""
    return SFTConfig(
        task=task,
        epochs=1,
        batch_size=64,
        micro_batch_size=64,
        learning_rate=3e-3,
        hidden_size=128,
        num_layers=2,
        group_by_length=group_by_length,
        **stage_options(config),
    )


SUMS = OwnTask(
    load_rows=arithmetic.prompt_rows,
    actor_stage=lambda config: character_stage("sums", config),
    reward=arithmetic.REWARD,
    serves_any_prompt=False,
)
"""Addition, with a model that imitates a pupil who forgets the carry."""


@dataclass(frozen=True, kw_only=True)
class Start(Generic[RunT]):
    """The prepared start of a run."""

    config: RunT
    """The run's options, with lengths that fit the prompts."""
    source: str
    """Hugging Face name or folder of the first actor."""
    train: list[PromptRow]
    held_out: list[PromptRow]
    rewards: Rewards
    answered: PromptTokens
    """Lengths of the prompts."""


class Stages(NamedTuple):
    """The recipes that make the models which a run lacks; each returns the folder of its model. Collective."""

    train_actor: Callable[[SFTConfig], Path]
    train_reward: Callable[[RewardConfig], Path]


def prepare(config: RunT, stages: Stages, task: OwnTask = SUMS, *, has_critic: bool = False) -> Start[RunT]:
    """Checks a `Config` of a recipe that learns from its own answers, and trains the actor and reward that are missing.

    Collective.

    Args:
        config: with RewardOptions, RolloutOptions, ResumeOptions, DataOptions, model, lora_rank, rollout_size and
            minibatch_size.
        stages: trains the first actor and the reward model.
        task: the task if `config` names no dataset.
        has_critic: whether a reward model of `config` is the first critic too.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is no run to resume or it had other
            options, a source does not load, or a number does not fit the processes, the prompts or the model.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    check_divides("rollout_size", config.rollout_size, get_world_size())
    check_divides("minibatch_size", config.update_size, get_world_size())
    check_given_together(config, task)
    specs = reward_specs(config, task)
    if not config.model:
        check_stage(folder, "sft", task.actor_stage(config).batch_size)
    if not specs:
        check_stage(folder, "reward", RewardConfig().batch_size)
    source = config.model or (str(folder / "sft") if (folder / "sft").exists() else None)
    check_model(source, config)
    load_judge = partial(LearnedReward.load, most_rows=config.rows_per_pass, dtype=torch_dtype(config.dtype))
    load_model = _on_shared_base(source) if config.shared_base else load_judge
    rewards = load_named_rewards(config, task, load_model)

    tokenizer = load_tokenizer(source) if source is not None else None
    train, held_out, lengths = load_usable_prompts(config, task, tokenizer, rewards)
    rows = [*train, *held_out]
    config = with_lengths(config, rows, lengths, tokenizer)
    held_out = held_out[: config.eval_prompts]
    if len(held_out) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} leaves {len(held_out)} held-out prompts, which must reach the "
            f"number of processes, {get_world_size()}; raise it, or give more prompts"
        )
    check_longest(config, source, max(lengths), specs if has_critic else ())

    if config.restart:
        move_aside(folder, RUN_RESULTS)
    actor = config.model or str(stages.train_actor(task.actor_stage(config)))
    check_top_k(config, load_config(actor), actor)
    if rewards is None:
        is_shared = config.shared_base
        adapter = {option.name: getattr(config, option.name) for option in fields(AdapterOptions)} if is_shared else {}
        made = stages.train_reward(RewardConfig(**stage_options(config), **adapter, model=config.model))
        load_model = _on_shared_base(actor) if is_shared else load_judge
        rewards = load_rewards([str(made)], None, config.reward_time_limit, load_model)
    rewards.begin_step(0, config.steps)
    longest = config.max_prompt_tokens
    if tokenizer is None:
        tokenizer = load_tokenizer(actor)
        lengths = [len(encode_prompt(tokenizer, row)) for row in rows]
    train, held_out = (fit_prompts(part, tokenizer, longest, skips=config.skip_too_long) for part in (train, held_out))
    answered = PromptTokens.of(lengths, longest)
    return Start(config=config, source=actor, train=train, held_out=held_out, rewards=rewards, answered=answered)


def _on_shared_base(source: str | None) -> Callable[[str], Judge]:
    """A `load_model` for `load_rewards` that only checks the adapter: the judge is built later, with its base."""

    def check(spec: str) -> Judge:
        check_reward_adapter(spec, source or "the run's sft")
        return judge_nothing

    return check


def judge_nothing(answers: Answers) -> None:
    """Stands in for a reward model that is not loaded: in a plan, or before its shared base is built."""
    raise AssertionError("a reward model that is not loaded judges nothing")


def check_given_together(config: PromptRunOptions, task: OwnTask) -> None:
    """Raises ValueError for a dataset without a model or rewards, if those of `task` do not apply to its prompts."""
    for name, value, reason in (
        ("model", config.model, "the model that is trained without --model adds numbers"),
        ("reward", config.reward, "the reward of the recipe's own task only checks sums"),
    ):
        if config.dataset and not value and not task.serves_any_prompt:
            raise ValueError(f"--dataset={config.dataset!r} has its own prompts, and {reason}; give --{name}")


def reward_specs(config: PromptRunOptions, task: OwnTask) -> Sequence[str]:
    """The specs of `--reward`, or that of `task`; empty if a reward model is still to be trained."""
    return config.reward or ((task.reward,) if task.reward else ())


def load_named_rewards(config: PromptRunOptions, task: OwnTask, load_model: Callable[[str], Judge]) -> Rewards | None:
    """The rewards that `reward_specs` name; None if it names none.

    Args:
        config: as in `prepare`.
        task: as in `prepare`.
        load_model: builds the judge from the folder or hub name of a model.

    Raises:
        ValueError: see `load_rewards`.
    """
    specs = reward_specs(config, task)
    return load_rewards(specs, config.reward_weights or None, config.reward_time_limit, load_model) if specs else None


class UsablePrompts(NamedTuple):
    """The prompts of a run that can be encoded and that its rewards can read."""

    train: list[PromptRow]
    held_out: list[PromptRow]
    lengths: list[int]
    """Tokens of each prompt: those of `train`, then those of `held_out`."""


@told_together()
def load_usable_prompts(
    config: PromptRunOptions, task: OwnTask, tokenizer: PreTrainedTokenizerBase | None, rewards: Rewards | None
) -> UsablePrompts:
    """The prompts that a run answers, from `--dataset` or from `task`; a plan counts the same ones.

    Args:
        config: as in `prepare`.
        task: as in `prepare`.
        tokenizer: the actor's; None if it is still to be trained: a byte counts as one token then.
        rewards: those that read columns of the data; None if a reward model is still to be trained.

    Raises:
        ValueError: the data cannot be read, a reward lacks a column, or a row cannot be used and may not be left out.
    """
    columns = rewards.task_columns if rewards is not None else ()
    train, held_out = load_prompt_rows(config.source, columns) if config.dataset else task.load_rows(config.seed)
    if rewards is not None:
        rewards.check_columns([*train, *held_out])
    if config.learns_given_answers:
        check_given_answers(config, train)
    train, train_lengths = keep_usable(config, train, tokenizer, rewards, has_answers=config.learns_given_answers)
    held_out, held_out_lengths = keep_usable(config, held_out, tokenizer, rewards)
    return UsablePrompts(train, held_out, [*train_lengths, *held_out_lengths])


def with_lengths(
    config: RunT,
    rows: Sequence[PromptRow],
    lengths: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    is_said: bool = True,
) -> RunT:
    """The options with lengths that fit the prompts `rows`, of `lengths` tokens; a plan has the same.

    Without `--model` the lengths are already set, and there may be no tokenizer.
    """
    answer = long_answer(rows, tokenizer) if tokenizer is not None else 0
    return settle_lengths(config, lengths, answer, is_said=is_said)


def keep_usable(
    config: DatasetOptions,
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase | None,
    rewards: Rewards | None,
    *,
    has_answers: bool = False,
) -> tuple[list[PromptRow], list[int]]:
    """The rows whose prompts can be encoded and that the rewards can read, and the tokens of each prompt.

    Without a tokenizer, which is still to be trained, a byte counts as one token. With `has_answers` their answers must
    be readable too.

    Raises:
        ValueError: there are other rows, and they may not be left out.
    """

    def measure(row: PromptRow) -> int:
        if rewards is not None:
            rewards.check_row(row)
        if has_answers:
            answer = read_given_answer(row)
            if tokenizer is not None:
                encode_completion(tokenizer, answer)
        return num_bytes(row) if tokenizer is None else len(encode_prompt(tokenizer, row))

    return encode_each(config, rows, measure)


def check_given_answers(config: PromptRunOptions, rows: Sequence[PromptRow]) -> None:
    """Raises ValueError if no row has the column `completion`."""
    if not any("completion" in row.columns for row in rows):
        raise ValueError(
            f"{config.source.shown} has no column 'completion' with the answers that the run learns from; rename the "
            "column that has them: --columns THEIRS=completion, or learn from the model's own answers alone"
        )


def check_longest(config: PromptRunOptions, source: str | None, longest: int, critics: Sequence[str]) -> None:
    """Raises ValueError if actor or critic lack positions for the longest prompt and an answer to it.

    Args:
        config: as in `prepare`.
        source: of the actor; None if it is still to be trained.
        longest: tokens of a prompt.
        critics: rewards, of which the first that is a model with the actor's tokens becomes the critic.
    """
    if source is None:
        check_positions(config, longest, "the model that stage sft makes", MAX_POSITIONS)
        return
    check_positions(config, longest, f"--model={source!r}", num_positions(load_config(source)))
    critic = critic_source(critics, source)
    if critic is not None:
        check_positions(config, longest, f"--reward={critic!r}", num_positions(load_config(critic, "reward")))


def num_bytes(row: PromptRow) -> int:
    """Bytes of a prompt that is text; ValueError for a conversation."""
    if not isinstance(row.prompt, str):
        raise ValueError(
            f"{row.place} has a conversation in prompt, but the model that is trained without --model reads text; give "
            "--model, or write it as text"
        )
    return len(row.prompt.encode())


def check_run(config: PreferenceOptions) -> None:
    """Checks that folder, processes and model fit the options; collective.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is no run to resume or it had other
            options, the model does not load, or the processes do not divide a batch.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    check_divides("batch_size", config.batch_size, get_world_size())
    if config.model:
        check_model(config.model, config)
    else:
        check_model(None, config)
        check_stage(folder, "sft", SUMMARIES.actor_stage(config).batch_size)


def find_first_actor(config: PreferenceOptions, train_actor: Callable[[SFTConfig], Path]) -> str:
    """The folder or name of the first actor: `--model`, or the run's sft, which `train_actor` makes if missing."""
    return config.model or str(train_actor(SUMMARIES.actor_stage(config)))


def check_enough(config: PreferenceOptions, num_train: int, num_held_out: int, what: str) -> None:
    """Raises ValueError if the training rows (`what`, such as "pairs") do not fill a batch, or no rows are held out."""
    if num_train < config.batch_size:
        raise ValueError(
            f"--batch-size={config.batch_size} must not exceed the {num_train} {what} to train on ({num_held_out} more "
            f"are held out for evaluation); lower it, or give more {what}"
        )
    if num_held_out:
        return
    apart = None if config.dataset is None else config.source.held_out_source
    if apart is not None:
        raise ValueError(f"{apart.shown} has 0 {what} to evaluate on; give other data, with at least one")
    raise ValueError(
        f"--held-out-share={config.held_out_share} holds out 0 {what} and leaves {num_train} to train on, but "
        f"evaluation needs at least one; raise it, give more {what}, or name other data with --held-out-dataset"
    )


def keep_what_fits(
    config: PreferenceOptions,
    first: PretrainedConfig,
    parts: tuple[Sequence[R], Sequence[R]],
    encode: Callable[[R], T],
    what: str,
) -> tuple[tuple[list[R], list[T]], tuple[list[R], list[T]]]:
    """The rows of each part that fit the model, whose config is `first`, with their tokens; a plan counts the same.

    `parts` are the training and the held-out rows.

    Raises:
        ValueError: there are rows that may not be left out, or too few are left; `what` names them, such as "pairs".
    """
    limit = limit_of(None, num_positions(first), f"--model={config.model or str(Path(config.out) / 'sft')!r}")
    train, held_out = (keep_fitting(config, *encode_each(config, rows, encode), limit) for rows in parts)
    check_enough(config, len(train[0]), len(held_out[0]), what)
    return train, held_out


def with_preference_lengths(
    config: OptionsT,
    first: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    learned: Sequence[Encoded],
    *,
    is_said: bool = True,
) -> OptionsT:
    """The options with lengths that fit the `prompts` that are answered and the answers that are `learned`.

    A plan has the same.

    Raises:
        ValueError: given lengths exceed the positions of the model, whose config is `first`.
    """
    lengths = [len(encode_prompt(tokenizer, row)) for row in prompts]
    answer = long_one(sorted(len(answer.response_ids) for answer in learned))
    config = settle_lengths(config, lengths, answer, is_said=is_said)
    model = f"--model={config.model!r}" if config.model else "the model that stage sft makes"
    check_positions(config, max(lengths), model, num_positions(first))
    return config


def build_actor(config: PreferenceOptions, source: str, schedule: Schedule) -> Any:
    """The engine of the model in `source`, without dropout; with `lora_rank` it trains an adapter. Collective."""
    model = add_adapter(recompute_activations(load_model(AutoModelForCausalLM, source), config), config)
    engine_config = build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=largest_micro_batch(config.batch_size // get_world_size(), config.micro_batch_size),
        learning_rate=config.peak_learning_rate,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        max_out_tokens=config.max_prompt_tokens + config.max_new_tokens,
        max_running=config.max_running,
    )
    actor = hybrid_engine.initialize(model=model, config=engine_config, lr_scheduler=schedule.build)[0]
    pack_where_exact(actor, config)
    return actor


def prompts_of(rows: Sequence[PreferenceRow | LabelledRow], config: PreferenceOptions) -> list[PromptRow]:
    """The first `eval_prompts` different prompts of held-out rows.

    Raises:
        ValueError: there are fewer prompts than processes.
    """
    prompts = {prompt_text(row.prompt): PromptRow(prompt=row.prompt, place=row.place) for row in reversed(rows)}
    chosen = list(prompts.values())[::-1][: config.eval_prompts]
    if len(chosen) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} of {len(prompts)} held-out prompts must reach the number of "
            f"processes, {get_world_size()}; raise it, or give more rows"
        )
    return chosen


def answer_prompts(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    config: PreferenceOptions,
    is_judged: bool,
) -> Evaluation:
    """One answer to each prompt, judged by PEP 257 or not at all; the actor is in training mode afterwards. Collective.

    Without a judge the figures have no score.
    """
    judge = judge_by_pep257 if is_judged else None
    found = evaluate(actor, tokenizer, prompts, judge, AnswerSampling.of(config))
    actor.train()
    return found


def judge_by_pep257(answers: Answers) -> Scores:
    """Scores 1 for a finished answer that is a summary line by PEP 257, else 0."""
    pairs = zip(answers.responses, answers.is_cut_off, strict=True)
    return Scores(total=[float(not cut and conforms(text)) for text, cut in pairs], by_name={}, per_token=None)
