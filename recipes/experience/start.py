"""What a run begins with, checked before anything is trained: prompts, rewards and the first actor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.data.encoding import encode_prompt
from hybrid_engine.recipes.data.prompts import PromptTokens, fit_prompts, load_prompt_rows
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.experience.own_tasks import SUMS, OwnTask, stage_options
from hybrid_engine.recipes.rewards.adapter_folder import check_reward_adapter
from hybrid_engine.recipes.rewards.answers import Answers, Judge
from hybrid_engine.recipes.rewards.learned import LearnedReward, critic_source
from hybrid_engine.recipes.rewards.loading import load_rewards
from hybrid_engine.recipes.rewards.rewards import Rewards
from hybrid_engine.recipes.runs.checks import check_divides
from hybrid_engine.recipes.runs.run_checks import check_folder, check_model, check_positions, check_stage
from hybrid_engine.recipes.runs.run_folder import RUN_RESULTS
from hybrid_engine.recipes.runs.stages import load_config, load_tokenizer, move_aside, num_positions
from hybrid_engine.recipes.tasks.small_llama import MAX_POSITIONS


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with."""

    source: str
    """Hugging Face name or folder of the first actor."""
    train: list[PromptRow]
    held_out: list[PromptRow]
    rewards: Rewards
    answered: PromptTokens
    """Of the prompts."""


def prepare(config: Any, task: OwnTask = SUMS, *, has_critic: bool = False) -> Start:
    """Checks a `Config` of a recipe that learns from its own answers, and makes the actor and reward that are missing.

    Collective.

    Args:
        config: with RewardOptions, RolloutOptions, ResumeOptions, DataOptions, model, lora_rank, rollout_size and
            minibatch_size.
        task: what is learned where `config` names nothing.
        has_critic: whether a reward model of `config` is the first critic too.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is nothing to resume or under other
            options, a source does not load, a number does not fit the processes, the prompts or the model.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    for name in ("rollout_size", "minibatch_size"):
        check_divides(name, getattr(config, name), get_world_size())
    check_given_together(config, task)
    specs = config.reward or ((task.reward,) if task.reward else ())
    if not config.model:
        check_stage(folder, "sft", task.actor_stage(config).batch_size)
    if not specs:
        check_stage(folder, "reward", reward_stage.Config().batch_size)
    source = config.model or (str(folder / "sft") if (folder / "sft").exists() else None)
    if source is not None:
        check_model(source, config.lora_rank)
    load_judge = partial(LearnedReward.load, most_rows=config.rows_per_pass)
    given = (config.reward_weights or None, config.reward_time_limit)
    load_model = _on_shared_base(source) if getattr(config, "shared_base", False) else load_judge
    rewards = load_rewards(specs, *given, load_model) if specs else None

    train, held_out = load_prompt_rows(config.dataset, *config.part) if config.dataset else task.load_rows(config.seed)
    rows, held_out = [*train, *held_out], held_out[: config.eval_prompts]
    if len(held_out) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} leaves {len(held_out)} held-out prompts, which must reach the "
            f"number of processes, {get_world_size()}; raise it, or give more prompts"
        )
    if rewards is not None:
        rewards.check_rows(rows)
    lengths = check_prompts(config, source, rows, specs if has_critic else ())

    if config.restart:
        move_aside(folder, RUN_RESULTS)
    actor = config.model or str(sft_stage.run(task.actor_stage(config)))
    if rewards is None:
        rank = config.lora_rank if getattr(config, "shared_base", False) else 0
        made = reward_stage.run(reward_stage.Config(**stage_options(config), model=config.model, lora_rank=rank))
        load_model = _on_shared_base(actor) if rank else load_judge
        rewards = load_rewards([str(made)], None, config.reward_time_limit, load_model)
    tokenizer, longest = load_tokenizer(actor), config.max_prompt_tokens
    train, held_out = (fit_prompts(part, tokenizer, longest, skips=config.skip_too_long) for part in (train, held_out))
    if lengths is None:
        lengths = [len(encode_prompt(tokenizer, row)) for row in rows]
    answered = PromptTokens.of(lengths, longest)
    return Start(source=actor, train=train, held_out=held_out, rewards=rewards, answered=answered)


def _on_shared_base(source: str | None) -> Callable[[str], Judge]:
    """For `load_rewards`: what a model will judge by is built with the base that it stands on."""

    def check(spec: str) -> Judge:
        check_reward_adapter(spec, source or "the run's sft")
        return _no_base_yet

    return check


def _no_base_yet(answers: Answers) -> None:
    raise AssertionError("a reward model on a shared base judges nothing before that is built")


def check_given_together(config: Any, task: OwnTask) -> None:
    """ValueError for a data set without a model, or without rewards, where those of `task` say nothing of it."""
    for name, reason in (
        ("model", "the model that is made without --model adds numbers"),
        ("reward", "whether a sum is right says nothing of them"),
    ):
        if config.dataset and not getattr(config, name) and not task.serves_any_prompt:
            raise ValueError(f"--dataset={config.dataset!r} has prompts of its own, and {reason}; give --{name}")


def check_prompts(
    config: Any, source: str | None, rows: Sequence[PromptRow], critics: Sequence[str]
) -> list[int] | None:
    """Whether every prompt can be encoded, and actor and critic have positions enough for it and an answer behind it.

    Args:
        config: as of `prepare`.
        source: of the actor; None where it is still to be made, and its tokenizer too: a byte is a token at most.
        rows: the prompts.
        critics: rewards, of which the first that is a model with the actor's tokens becomes the critic.

    Returns:
        Tokens of each prompt; None without an actor.
    """
    if source is None:
        check_positions(config, max(map(num_bytes, rows)), "the model that stage sft makes", MAX_POSITIONS)
        return None
    tokenizer = load_tokenizer(source)
    lengths = [len(encode_prompt(tokenizer, row)) for row in rows]
    longest = max(lengths)
    check_positions(config, longest, f"--model={source!r}", num_positions(load_config(source)))
    critic = critic_source(critics, source)
    if critic is not None:
        check_positions(config, longest, f"--reward={critic!r}", num_positions(load_config(critic, "reward")))
    return lengths


def num_bytes(row: PromptRow) -> int:
    """The bytes of a prompt that is text; ValueError for a conversation."""
    if not isinstance(row.prompt, str):
        raise ValueError(
            f"{row.place} has a conversation in prompt, and the model that is made without --model reads text; give "
            "--model, or write it as text"
        )
    return len(row.prompt.encode())
