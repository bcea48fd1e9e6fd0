"""Inputs of a plan that do not depend on batch sizes: the lengths of a run's data and the configs of its models."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.rlhf.batches.passes import Items
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.data.prompts import PromptTokens, select_prompts
from hybrid_engine.rlhf.options import agent
from hybrid_engine.rlhf.options.preference import PreferenceOptions
from hybrid_engine.rlhf.options.shared import AdapterOptions, TrainingOptions
from hybrid_engine.rlhf.rewards.adapter_folder import read_reward_adapter
from hybrid_engine.rlhf.rewards.learned import critic_source, names_model
from hybrid_engine.rlhf.runs.adapters import IS_PACKED
from hybrid_engine.rlhf.runs.stages import load_config
from hybrid_engine.rlhf.tasks.calculator import held_out_problems

BLOCK, OUTER_BLOCK = 64, 256
"""Values that share a scale, and scales that share a scale of their own (bitsandbytes 0.50,
`functional.quantize_4bit`).
"""
CODE_4_BITS, CODE_8_BITS = 16 * 4, 256 * 4
"""Bytes of the table of values that codes stand for."""


class Learned(NamedTuple):
    """The training data of a run, if it is known before the run."""

    items: Items
    """At least one batch of items."""
    batches: list[list[int]]
    """Indices of the items of every step."""

    @classmethod
    def of(cls, items: Items, batches: list[list[int]]) -> "Learned":
        """`items` with hashes in place of their prompts' tokens."""
        prompts = [tuple(prompt._replace(key=hash(prompt.key)) for prompt in item) for item in items.prompts]
        return cls(Items(items.lengths, prompts), batches)


@dataclass(frozen=True, kw_only=True)
class Read:
    """Inputs of a plan that do not depend on batch sizes, adapters and processes."""

    first: PretrainedConfig
    """Config of the model that is trained first."""
    critic: PretrainedConfig | None = None
    """Config of a critic that has a body of its own."""
    rewards: list[PretrainedConfig] = field(default_factory=list)
    """Configs of reward models that have a body of their own."""
    adapters: list[AdapterOptions] = field(default_factory=list)
    """Adapters of reward models on the first model: those that `--reward` names by their rank alone."""
    learned: Learned | None = None
    """None if the run samples its training data itself."""
    answered: PromptTokens | None = None
    """None if the run answers no prompts."""
    has_turns: bool = False
    """Whether an answer continues after turns of others, up to the length of the longest prompt and its answer."""


def read_preferences(
    config: PreferenceOptions, first: PretrainedConfig, learned: Sequence[Encoded | EncodedPair]
) -> Read:
    """Plan inputs of a recipe that learns from given answers, whose batches are drawn by `select_prompts`.

    Args:
        config: of the recipe, with `max_prompt_tokens` of the prompts that are answered.
        first: config of the actor.
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
    config: TrainingOptions,
    specs: Sequence[str],
    first: PretrainedConfig,
    answered: PromptTokens,
    source: str | None,
    *,
    has_critic: bool = False,
) -> Read:
    """Plan inputs of a recipe that learns from its own answers.

    Args:
        config: of the recipe.
        specs: of its rewards.
        first: config of the actor.
        answered: lengths of its prompts.
        source: of the actor; None if it is still to be trained.
        has_critic: whether there is a critic.
    """
    models = [spec for spec in specs if names_model(spec)]
    if config.shared_base:
        adapters: list[AdapterOptions] = [config]
        if specs:
            adapters = [AdapterOptions(lora_rank=read_reward_adapter(spec).config.r) for spec in models]
        return Read(first=first, adapters=adapters, answered=answered)
    critic = None
    if has_critic:
        found = critic_source(specs, source) if source else None
        critic = load_config(found, "reward") if found else first
    rewards = [load_config(spec, "reward") for spec in models]
    return Read(first=first, critic=critic, rewards=rewards, answered=answered)


def check_one_process(trained: Iterable[Any], num_processes: int) -> None:
    """Raises ValueError for several processes if one of the `trained` configs is of a quantized model."""
    if num_processes > 1 and any(getattr(config, "quantization_config", None) is not None for config in trained):
        raise ValueError(
            f"--processes={num_processes}: --model {IS_PACKED}; plan and train with --processes 1, or give the model "
            "in full precision"
        )


def packed_bytes(quantisation: dict[str, Any], linear: nn.Linear) -> int:
    """The bytes of the packed weight of `linear` with its scales.

    Args:
        quantisation: the `quantization_config` of the model's config.
        linear: before quantization.

    Raises:
        ValueError: the sizes of this kind of quantization are not known.
    """
    values, rows = linear.in_features * linear.out_features, linear.out_features
    kind = quantisation.get("quant_method")
    if kind == "bitsandbytes" and quantisation.get("load_in_4bit"):
        blocks = -(-values // BLOCK)
        if not quantisation.get("bnb_4bit_use_double_quant"):
            return -(-values // 2) + 4 * blocks + CODE_4_BITS
        return -(-values // 2) + blocks + 4 * -(-blocks // OUTER_BLOCK) + CODE_4_BITS + CODE_8_BITS
    if kind == "bitsandbytes":
        return values + 4 * rows
    if "Int8WeightOnly" in str(quantisation.get("quant_type")):
        return values + (4 + 1) * rows  # a scale and a zero point
    raise ValueError(
        f"--model is quantised by {kind!r} ({quantisation.get('quant_type')}), of which plan knows no sizes; it knows "
        "bitsandbytes and torchao's Int8WeightOnlyConfig"
    )


def read_episodes(config: agent.Config, first: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Read:
    """Plan inputs of a run whose actor has the config `first`: an episode is a problem, followed by turns."""
    lengths = []
    for problem in held_out_problems():
        messages = [{"role": "user", "content": problem.text}]
        lengths.append(len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)))
    return Read(first=first, answered=PromptTokens(min(lengths), config.max_prompt_tokens), has_turns=True)
