"""What a run learns where its user names nothing: prompts of its own, how its first actor is made, and its reward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.runs.options import RunOptions
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.small_llama import MAX_POSITIONS
from hybrid_engine.rlhf.tasks.stdlib_docs import split, stdlib_examples


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that needs no file of the user's."""

    load_rows: Callable[[int], tuple[list[PromptRow], list[PromptRow]]]
    """From the run's seed to the prompts to train on, and those held out."""
    actor_stage: Callable[[RunOptions], sft_stage.Config]
    """The stage that makes the first actor of a run."""
    reward: str | None
    """The reward's spec; None: the stage `reward` trains a model."""
    serves_any_prompt: bool
    """Whether this actor and this reward make sense for prompts of the user's."""


def stage_options(config: RunOptions) -> dict[str, Any]:
    """The options that the earlier stages of a run, which make what it begins with, take from it.

    Their rows may be longer than the run's own: a budget of tokens holds two sequences that fill a small model.
    """
    names = ("out", "seed", "zero_stage", "activation_checkpointing", "dtype", "tf32", "tracker", "metric_names")
    budget = config.tokens_per_micro_batch and max(config.tokens_per_micro_batch, 2 * MAX_POSITIONS)
    return {name: getattr(config, name) for name in names} | {"tokens_per_micro_batch": budget}


def summary_rows(seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """The standard library's signatures, which are split alike for every seed."""
    train, held_out = ([PromptRow(prompt=example.prompt) for example in part] for part in split(stdlib_examples()))
    return train, held_out


SUMMARIES = OwnTask(
    load_rows=summary_rows,
    actor_stage=lambda config: sft_stage.Config(**stage_options(config)),
    reward=None,
    serves_any_prompt=True,
)
"""Summary lines behind the signatures of the standard library's functions."""


def character_stage(task: str, config: RunOptions, *, group_by_length: bool = True) -> sft_stage.Config:
    """The stage that makes a small model of single characters, which learns from a pupil's work."""
    return sft_stage.Config(
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
"""Addition, by a model that does it as a pupil does who forgets the carry."""
