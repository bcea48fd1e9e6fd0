"""Checks and prepares the start of a run, before anything is trained: prompts, rewards and the first actor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from hybrid_engine.config.checks import check_divides
from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.prompts import PromptTokens, fit_prompts, load_prompt_rows, long_answer, settle_lengths
from hybrid_engine.rlhf.data.rows import PromptRow, encode_each, told_together
from hybrid_engine.rlhf.options import reward, sft
from hybrid_engine.rlhf.options.shared import AdapterOptions, DatasetOptions, PromptRunOptions, RunOptions
from hybrid_engine.rlhf.rewards.learned import LearnedReward, check_reward_adapter, critic_source
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.rewards.scores import Answers, Judge
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_checks import check_folder, check_model, check_positions, check_stage
from hybrid_engine.rlhf.runs.run_folder import RUN_RESULTS
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer, move_aside, num_positions
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import MAX_POSITIONS
from hybrid_engine.rlhf.tasks.stdlib_docs import split, stdlib_examples

RunT = TypeVar("RunT", bound=PromptRunOptions)


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that needs no file from the user."""

    load_rows: Callable[[int], tuple[list[PromptRow], list[PromptRow]]]
    """From the run's seed to the prompts to train on, and those held out."""
    actor_stage: Callable[[RunOptions], sft.Config]
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
    actor_stage=lambda config: sft.Config(**stage_options(config)),
    reward=None,
    serves_any_prompt=True,
)
"""Summary lines for the signatures of the standard library's functions."""


def character_stage(task: str, config: RunOptions, *, group_by_length: bool = True) -> sft.Config:
    """The stage that trains a small model on single characters, from a pupil's work."""
    return sft.Config(
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

    train_actor: Callable[[sft.Config], Path]
    train_reward: Callable[[reward.Config], Path]


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
        check_stage(folder, "reward", reward.Config().batch_size)
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
    if rewards is None:
        is_shared = config.shared_base
        adapter = {option.name: getattr(config, option.name) for option in fields(AdapterOptions)} if is_shared else {}
        made = stages.train_reward(reward.Config(**stage_options(config), **adapter, model=config.model))
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
    train, train_lengths = keep_usable(config, train, tokenizer, rewards)
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
) -> tuple[list[PromptRow], list[int]]:
    """The rows whose prompts can be encoded and that the rewards can read, and the tokens of each prompt.

    Without a tokenizer, which is still to be trained, a byte counts as one token.

    Raises:
        ValueError: there are other rows, and they may not be left out.
    """

    def measure(row: PromptRow) -> int:
        if rewards is not None:
            rewards.check_row(row)
        return num_bytes(row) if tokenizer is None else len(encode_prompt(tokenizer, row))

    return encode_each(config, rows, measure)


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
