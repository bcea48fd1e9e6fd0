"""What a plan knows of a run before any of its sizes: the lengths of its data and the configs of its models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.data.pass_shapes import Items
from hybrid_engine.rlhf.data.prompts import PromptTokens, select_prompts
from hybrid_engine.rlhf.rewards.adapter_folder import read_reward_adapter
from hybrid_engine.rlhf.rewards.learned import critic_source, names_model
from hybrid_engine.rlhf.runs.options import AdapterOptions
from hybrid_engine.rlhf.runs.stages import load_config


class Learned(NamedTuple):
    """What a run learns from, where that is known before it."""

    items: Items
    """At least a batch."""
    batches: list[list[int]]
    """Indices of the items of every step."""

    @classmethod
    def of(cls, items: Items, batches: list[list[int]]) -> "Learned":
        """`items` without the tokens of their prompts."""
        prompts = [tuple(prompt._replace(key=hash(prompt.key)) for prompt in item) for item in items.prompts]
        return cls(Items(items.lengths, prompts), batches)


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a plan reads of a run, whatever its batch sizes, adapters and processes are."""

    first: PretrainedConfig
    """Of the model that is trained first."""
    critic: PretrainedConfig | None = None
    """Of a critic, which has a body of its own."""
    rewards: list[PretrainedConfig] = field(default_factory=list)
    """Of reward models that have a body of their own."""
    adapters: list[AdapterOptions] = field(default_factory=list)
    """Adapters of reward models on the first model: those that `--reward` names by their rank alone."""
    learned: Learned | None = None
    """None where the run draws it itself."""
    answered: PromptTokens | None = None
    """None where no prompt is."""
    has_turns: bool = False
    """Whether a drawn answer goes on after what others say, up to the length of the longest prompt and its answer."""


def read_preferences(config: Any, first: PretrainedConfig, learned: Sequence[Encoded | EncodedPair]) -> Read:
    """What a plan reads of a recipe that learns from given answers, which meet as `select_prompts` draws them.

    Args:
        config: of the recipe, with `max_prompt_tokens` of the prompts that are answered.
        first: the actor's.
        learned: answers or pairs to learn from, at least a batch.
    """
    size = config.batch_size
    num_drawn = config.epochs * (len(learned) // size) * size
    drawn = select_prompts(len(learned), 0, num_drawn, config.seed)
    batches = [drawn[begin : begin + size] for begin in range(0, num_drawn, size)]
    items = Items.of(learned)
    lengths = [prompt.length for prompts in items.prompts for prompt in prompts]
    answered = PromptTokens.of(lengths, config.max_prompt_tokens)
    return Read(first=first, learned=Learned.of(items, batches), answered=answered)


def read_answers(
    config: Any,
    specs: Sequence[str],
    first: PretrainedConfig,
    answered: PromptTokens,
    source: str | None,
    *,
    has_critic: bool = False,
) -> Read:
    """What a plan reads of a recipe that learns from its own answers.

    Args:
        config: of the recipe.
        specs: of its rewards.
        first: the actor's.
        answered: of its prompts.
        source: of the actor; None where it is still to be made.
        has_critic: whether there is one.
    """
    models = [spec for spec in specs if names_model(spec)]
    if getattr(config, "shared_base", False):
        adapters = (
            [AdapterOptions(lora_rank=read_reward_adapter(spec).config.r) for spec in models] if specs else [config]
        )
        return Read(first=first, adapters=adapters, answered=answered)
    critic = None
    if has_critic:
        found = critic_source(specs, source) if source else None
        critic = load_config(found, "reward") if found else first
    rewards = [load_config(spec, "reward") for spec in models]
    return Read(first=first, critic=critic, rewards=rewards, answered=answered)
