"""What a plan knows of a run before any of its sizes: the lengths of its data and the configs of its models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from hybrid_engine.recipes.data.prompts import select_prompts
from hybrid_engine.recipes.rewards.adapter_folder import read_reward_adapter
from hybrid_engine.recipes.rewards.learned import critic_source, names_model
from hybrid_engine.recipes.runs.stages import load_config

Item = tuple[tuple[int, int], ...]
"""Tokens of prompt and response of the sequences that stay together in a pass."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a plan reads of a run, whatever its batch sizes, adapters and processes are."""

    first: PretrainedConfig
    """Of the model that is trained first."""
    critic: PretrainedConfig | None = None
    """Of a critic, which has a body of its own."""
    rewards: list[PretrainedConfig] = field(default_factory=list)
    """Of reward models that have a body of their own."""
    adapter_ranks: list[int] = field(default_factory=list)
    """Of reward models that are adapters on the first model."""
    items: list[Item] = field(default_factory=list)
    """What is learned from; empty where that is drawn by the run itself."""
    batches: list[list[int]] | None = None
    """The items of every step; None: any may meet."""
    prompt_tokens: int = 0
    """Of the longest prompt that is answered; 0 where none is."""


def read_preferences(config: Any, first: PretrainedConfig, items: Sequence[Item]) -> Read:
    """What a plan reads of a recipe that learns from given answers, which meet as `select_prompts` draws them.

    Args:
        config: of the recipe, with `max_prompt_tokens` of the prompts that are answered.
        first: the actor's.
        items: answers or pairs to learn from, at least a batch.
    """
    size = config.batch_size
    num_drawn = config.epochs * (len(items) // size) * size
    drawn = select_prompts(len(items), 0, num_drawn, config.seed)
    return Read(
        first=first,
        items=list(items),
        batches=[drawn[begin : begin + size] for begin in range(0, num_drawn, size)],
        prompt_tokens=min(config.max_prompt_tokens, max(length for item in items for length, _ in item)),
    )


def read_answers(
    config: Any,
    specs: Sequence[str],
    first: PretrainedConfig,
    prompt_tokens: int,
    source: str | None,
    *,
    has_critic: bool = False,
) -> Read:
    """What a plan reads of a recipe that learns from its own answers.

    Args:
        config: of the recipe.
        specs: of its rewards.
        first: the actor's.
        prompt_tokens: of the longest prompt.
        source: of the actor; None where it is still to be made.
        has_critic: whether there is one.
    """
    models = [spec for spec in specs if names_model(spec)]
    if getattr(config, "shared_base", False):
        ranks = [read_reward_adapter(spec).config.r for spec in models] if specs else [config.lora_rank]
        return Read(first=first, adapter_ranks=ranks, prompt_tokens=prompt_tokens)
    critic = None
    if has_critic:
        found = critic_source(specs, source) if source else None
        critic = load_config(found, "reward") if found else first
    rewards = [load_config(spec, "reward") for spec in models]
    return Read(first=first, critic=critic, rewards=rewards, prompt_tokens=prompt_tokens)
