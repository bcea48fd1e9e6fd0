"""Reads the inputs of a plan for each recipe: the lengths of its data and the configs of its models, but no weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.rlhf.batches.passes import Items
from hybrid_engine.rlhf.batches.sequences import NUM_POOLED, epochs_of_similar_length
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair, encode_completion, encode_pair
from hybrid_engine.rlhf.data.lengths import R, T, keep_fitting, limit_of
from hybrid_engine.rlhf.data.prompts import PromptTokens, select_prompts
from hybrid_engine.rlhf.data.rows import encode_each, told_together
from hybrid_engine.rlhf.experience import start
from hybrid_engine.rlhf.experience.start import (
    SUMMARIES,
    SUMS,
    OwnTask,
    character_stage,
    judge_nothing,
    load_named_rewards,
    load_usable_prompts,
    reward_specs,
)
from hybrid_engine.rlhf.options import agent, dpo, kto, reward, sft
from hybrid_engine.rlhf.options.preference import PreferenceOptions
from hybrid_engine.rlhf.options.shared import AdapterOptions, PromptRunOptions, TrainingOptions
from hybrid_engine.rlhf.preference import first_actor
from hybrid_engine.rlhf.preference.answers import load_answers
from hybrid_engine.rlhf.preference.first_actor import check_enough, prompts_of
from hybrid_engine.rlhf.preference.pairs import answers_of, load_pairs
from hybrid_engine.rlhf.rewards.learned import (
    check_reward_adapter,
    critic_source,
    load_scoring_tokenizer,
    names_model,
    read_reward_adapter,
)
from hybrid_engine.rlhf.runs.adapters import IS_PACKED, check_trainable
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer, num_positions
from hybrid_engine.rlhf.tasks.calculator import held_out_problems, settle_conversations
from hybrid_engine.rlhf.tasks.corpus import build_small_llama, load_corpus, load_pair_corpus

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


class ReadRun(NamedTuple):
    """The data of a run, and its `Config` with the lengths that it will have."""

    read: Read
    config: TrainingOptions


def read_run(recipe: str, config: TrainingOptions) -> ReadRun:
    """The data and model configs of a recipe with this `Config`, and the lengths that it will have.

    Raises:
        ValueError: a source that an option names cannot be read.
    """
    return READERS[recipe](config)


def _read_sft(config: sft.Config) -> ReadRun:
    tokenizer, corpus = load_corpus(config)
    lengths = [len(example) for example in corpus.train]
    num_pooled = NUM_POOLED if config.group_by_length else 1
    batches = epochs_of_similar_length(lengths, config.batch_size, config.num_epochs, config.seed, num_pooled)
    first = _adapted(config, load_config(config.model)) if config.model else _small_config(config, tokenizer)
    return ReadRun(Read(first=first, learned=Learned.of(Items.of(corpus.train), batches)), config)


def _read_reward(config: reward.Config) -> ReadRun:
    stage = Path(config.out) / "sft"
    if not config.model and not stage.exists():
        raise ValueError(f"--out={config.out!r} has no sft yet, on whose body the reward is trained; give --model")
    source = config.model or str(stage)
    corpus = load_pair_corpus(config, load_scoring_tokenizer(source), source)
    learned = Learned.of(Items.of(corpus.train), corpus.batches)
    return ReadRun(Read(first=_adapted(config, load_config(source)), learned=learned), config)


def _read_answers(config: PromptRunOptions, task: OwnTask, *, has_critic: bool = False) -> ReadRun:
    """Plan inputs of a recipe that learns from its own answers."""
    first, tokenizer = _first_actor(config, task)
    specs = reward_specs(config, task)
    rewards = load_named_rewards(config, task, lambda spec: judge_nothing)
    train, held_out, lengths = load_usable_prompts(config, task, tokenizer, rewards)
    config = start.with_lengths(config, [*train, *held_out], lengths, tokenizer, is_said=False)
    answered = PromptTokens.of(lengths, config.max_prompt_tokens)
    if config.shared_base:
        for spec in filter(names_model, specs):
            check_reward_adapter(spec, config.model or str(Path(config.out) / "sft"))
    if specs or config.shared_base:
        read = read_answers(config, specs, first, answered, config.model, has_critic=has_critic)
        return ReadRun(read, config)
    made = Path(config.out) / "reward"  # the stage makes a model of the actor's size
    model = load_config(str(made)) if made.exists() else first
    read = Read(first=first, critic=model if has_critic else None, rewards=[model], answered=answered)
    return ReadRun(read, config)


@told_together()
def _read_dpo(config: dpo.Config) -> ReadRun:
    first, tokenizer = _first_actor(config, SUMMARIES)
    parts = load_pairs(config)
    pairs = _that_fit(config, first, parts, partial(encode_pair, tokenizer), "pairs")
    prompts = prompts_of(parts[1], config)
    config = first_actor.with_lengths(config, first, tokenizer, prompts, answers_of(pairs), is_said=False)
    return ReadRun(read_preferences(config, first, pairs), config)


@told_together()
def _read_kto(config: kto.Config) -> ReadRun:
    first, tokenizer = _first_actor(config, SUMMARIES)
    parts = load_answers(config)
    answers = _that_fit(config, first, parts, partial(encode_completion, tokenizer), "answers")
    config = first_actor.with_lengths(config, first, tokenizer, prompts_of(parts[1], config), answers, is_said=False)
    return ReadRun(read_preferences(config, first, answers), config)


def _read_agent(config: agent.Config) -> ReadRun:
    if config.model:
        tokenizer, first = load_tokenizer(config.model), _adapted(config, load_config(config.model))
    else:
        tokenizer, _ = load_corpus(made := character_stage("calculator", config, group_by_length=False))
        first = _small_config(made, tokenizer)
    config = settle_conversations(config, tokenizer)
    return ReadRun(read_episodes(config, first, tokenizer), config)


READERS: dict[str, Callable[[Any], ReadRun]] = {
    "sft": _read_sft,
    "reward": _read_reward,
    "ppo": lambda config: _read_answers(config, SUMMARIES, has_critic=True),
    "grpo": lambda config: _read_answers(config, SUMS),
    "online-dpo": lambda config: _read_answers(config, SUMS),
    "agent": _read_agent,
    "dpo": _read_dpo,
    "kto": _read_kto,
}


def _first_actor(config: TrainingOptions, task: OwnTask) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of the first actor; a small one if its stage is still to be run."""
    stage = Path(config.out) / "sft"
    source = config.model or (str(stage) if stage.exists() else None)
    if source is not None:
        return _adapted(config, load_config(source)), load_tokenizer(source)
    made = task.actor_stage(config)
    tokenizer, _ = load_corpus(made)
    return _adapted(config, _small_config(made, tokenizer)), tokenizer


def _small_config(config: sft.Config, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    with torch.device("meta"):
        return build_small_llama(tokenizer, config.hidden_size, config.num_layers).config


def _adapted(config: TrainingOptions, model: PretrainedConfig) -> PretrainedConfig:
    check_trainable(config, model, config.model or config.out)
    return model


def _that_fit(
    config: PreferenceOptions,
    first: PretrainedConfig,
    parts: tuple[Sequence[R], Sequence[R]],
    encode: Callable[[R], T],
    what: str,
) -> list[T]:
    """Tokens of the training rows that fit the model's positions.

    Also encodes and checks held-out rows, and refuses what the run will refuse.
    """
    limit = limit_of(None, num_positions(first), f"--model={config.model!r}")
    found = [keep_fitting(config, *encode_each(config, rows, encode), limit)[1] for rows in parts]
    check_enough(config, len(found[0]), len(found[1]), what)
    return found[0]
