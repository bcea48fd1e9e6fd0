"""What a run begins with, checked before anything is trained: prompts, rewards and the first actor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.data.encoding import encode_prompt
from hybrid_engine.recipes.data.prompts import load_prompt_rows
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.rewards.loading import load_rewards
from hybrid_engine.recipes.rewards.rewards import Rewards
from hybrid_engine.recipes.runs.adapters import check_adapter
from hybrid_engine.recipes.runs.checks import check_divides
from hybrid_engine.recipes.runs.ppo_checks import check_folder, check_positions
from hybrid_engine.recipes.runs.run_folder import RUN_RESULTS
from hybrid_engine.recipes.runs.stages import load_config, load_tokenizer, move_aside, num_positions
from hybrid_engine.recipes.tasks import arithmetic


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with."""

    source: str
    """Hugging Face name or folder of the first actor."""
    train: list[PromptRow]
    held_out: list[PromptRow]
    rewards: Rewards


def prepare(config: Any) -> Start:
    """Checks a `Config` of a recipe that learns from its own answers, and makes the first actor if none is given.

    Collective.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is nothing to resume or under other
            options, a source does not load, a number does not fit the processes, the prompts or the model.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    for name in ("rollout_size", "minibatch_size"):
        check_divides(name, getattr(config, name), get_world_size())
    check_given_together(config)
    if config.model:
        load_tokenizer(config.model)
        check_adapter(config.lora_rank, load_config(config.model), config.model)
    specs = config.reward or (arithmetic.REWARD,)
    rewards = load_rewards(specs, config.reward_weights or None, config.reward_time_limit)
    train, held_out = load_prompt_rows(config.dataset) if config.dataset else arithmetic.prompt_rows(config.seed)
    rewards.check_columns(set.intersection(*(set(row.columns) for row in [*train, *held_out])))
    held_out = held_out[: config.eval_prompts]
    if len(held_out) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} leaves {len(held_out)} held-out prompts, which must reach the "
            f"number of processes, {get_world_size()}; raise it, or give more prompts"
        )
    if config.restart:
        move_aside(folder, RUN_RESULTS)
    source = config.model or str(sft_stage.run(first_stage(config)))
    check_prompts(config, source, [*train, *held_out])
    return Start(source=source, train=train, held_out=held_out, rewards=rewards)


def check_given_together(config: Any) -> None:
    """ValueError for a data set without a model, or without the rewards that judge the answers to it."""
    for name, reason in (
        ("model", "the model that is made without --model adds numbers"),
        ("reward", "whether a sum is right says nothing of them"),
    ):
        if config.dataset and not getattr(config, name):
            raise ValueError(f"--dataset={config.dataset!r} has prompts of its own, and {reason}; give --{name}")
    if config.reward_weights and not config.reward:
        raise ValueError("--reward-weights weigh rewards; give as many --reward")


def first_stage(config: Any) -> sft_stage.Config:
    """The stage that makes a model which adds numbers as the pupil does."""
    return sft_stage.Config(
        task="sums",
        epochs=1,
        batch_size=64,
        micro_batch_size=64,
        learning_rate=3e-3,
        hidden_size=128,
        num_layers=2,
        out=config.out,
        seed=config.seed,
        zero_stage=config.zero_stage,
        tracker=config.tracker,
        metric_names=config.metric_names,
    )


def check_prompts(config: Any, source: str, rows: list[PromptRow]) -> None:
    """Whether every prompt can be encoded, and the model has positions enough for it and an answer behind it."""
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(source)
    longest = max(len(encode_prompt(tokenizer, row)) for row in rows)
    check_positions(config, longest, f"--model={source!r}", num_positions(load_config(source)))
