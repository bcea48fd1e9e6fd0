"""Reads the inputs of a plan: the lengths of a run's data and the configs of its models, but no weights.

`read_run` reads what a command names, with the functions by which the run itself reads it. A run that has begun passes
what it has read to `read_answers`, `read_preferences` or `read_episodes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.rlhf.batches.passes import Items
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair, encode_completion, encode_pair
from hybrid_engine.rlhf.data.prompts import PromptTokens, select_prompts
from hybrid_engine.rlhf.data.rows import told_together
from hybrid_engine.rlhf.environments.tasks import prepare_episodes
from hybrid_engine.rlhf.experience import start
from hybrid_engine.rlhf.experience.answers import answers_of, load_answers, load_pairs
from hybrid_engine.rlhf.experience.start import (
    SUMMARIES,
    SUMS,
    OwnTask,
    character_stage,
    keep_what_fits,
    prompts_of,
    with_preference_lengths,
)
from hybrid_engine.rlhf.options.preference import DPOConfig, KTOConfig, PreferenceOptions
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.options.shared import AdapterOptions, PromptRunOptions, TrainingOptions
from hybrid_engine.rlhf.options.supervised import RewardConfig, SFTConfig
from hybrid_engine.rlhf.rewards.judges import judge_model
from hybrid_engine.rlhf.rewards.learned import (
    check_reward_adapter,
    critic_source,
    load_scoring_tokenizer,
    names_model,
    read_reward_adapter,
)
from hybrid_engine.rlhf.runs.run_checks import check_trainable
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer
from hybrid_engine.rlhf.tasks.corpus import batches_of, build_small_llama, load_corpus, load_pair_corpus


class Learned(NamedTuple):
    """The training data of a run, if it is known before the run."""

    items: Items
    """At least one batch of items."""
    batches: list[list[int]]
    """Indices of the items of every step."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """Inputs of a plan that do not depend on batch sizes, adapters and processes."""

    first: PretrainedConfig
    """Config of the model that is trained first."""
    critic: PretrainedConfig | None = None
    """Config of a critic that has a body of its own."""
    rewards: list[PretrainedConfig] = field(default_factory=list)
    """Configs of reward models that have a body of their own."""
    judges: list[PretrainedConfig] = field(default_factory=list)
    """Configs of language models that judge answers in this process."""
    teachers: list[PretrainedConfig] = field(default_factory=list)
    """Configs of the models that are learned from."""
    adapters: list[AdapterOptions] = field(default_factory=list)
    """Adapters of reward models on the first model: those that `--reward` names by their rank alone."""
    learned: Learned | None = None
    """None if the run samples its training data itself."""
    answered: PromptTokens | None = None
    """None if the run answers no prompts."""
    has_turns: bool = False
    """Whether an answer continues after turns of others, up to the length of the longest prompt and its answer."""


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
    return Read(first=first, learned=Learned(items, batches), answered=answered)


def read_answers(
    config: TrainingOptions,
    specs: Sequence[str] | None,
    first: PretrainedConfig,
    answered: PromptTokens,
    source: str | None,
    *,
    has_critic: bool = False,
) -> Read:
    """Plan inputs of a recipe that learns from its own answers.

    Args:
        config: of the recipe.
        specs: of its rewards; None: a reward model like the actor is still to be trained.
        first: config of the actor.
        answered: lengths of its prompts.
        source: of the actor; None if it is still to be trained.
        has_critic: whether there is a critic.
    """
    models = [spec for spec in specs or () if names_model(spec)]
    judges = [load_config(folder, "reward") for folder in map(judge_model, specs or ()) if folder]
    if config.shared_base:
        adapters: list[AdapterOptions] = [config]
        if specs is not None:
            adapters = [AdapterOptions(lora_rank=read_reward_adapter(spec).config.r) for spec in models]
        return Read(first=first, adapters=adapters, judges=judges, answered=answered)
    rewards = [first] if specs is None else [load_config(spec, "reward") for spec in models]
    critic = critic_source(specs, source) if specs and source and has_critic else None
    of_critic = load_config(critic, "reward") if critic else first
    return Read(
        first=first,
        critic=of_critic if has_critic else None,
        rewards=rewards,
        judges=judges,
        teachers=[load_config(name, "teacher") if name else first for name in config.learns_from],
        answered=answered,
    )


def read_episodes(config: AgentConfig, first: PretrainedConfig, answered: PromptTokens) -> Read:
    """Plan inputs of a run whose actor has the config `first`: an episode is a first message, followed by turns."""
    read = read_answers(config, config.reward, first, answered, config.model)
    return replace(read, has_turns=True)


def _read_sft(config: SFTConfig) -> ReadRun:
    tokenizer, corpus = load_corpus(config)
    first = _checked(config, load_config(config.model)) if config.model else _small_config(config, tokenizer)
    learned = Learned(Items.of(corpus.train), batches_of(config, corpus.train))
    return ReadRun(Read(first=first, learned=learned), config)


def _read_reward(config: RewardConfig) -> ReadRun:
    source = config.model or str(_stage(config, "sft") or "")
    if not source:
        raise ValueError(f"--out={config.out!r} has no sft yet, which the reward model starts from; give --model")
    corpus = load_pair_corpus(config, load_scoring_tokenizer(source), source)
    learned = Learned(Items.of(corpus.train), corpus.batches)
    return ReadRun(Read(first=_checked(config, load_config(source)), learned=learned), config)


def _read_answers(config: PromptRunOptions, task: OwnTask, *, has_critic: bool = False) -> ReadRun:
    first, tokenizer = _first_actor(config, task)
    rewards = start.load_named_rewards(config, task, lambda spec: start.judge_nothing)
    train, held_out, lengths = start.load_usable_prompts(config, task, tokenizer, rewards)
    config = start.with_lengths(config, [*train, *held_out], lengths, tokenizer, is_said=False)
    answered = PromptTokens.of(lengths, config.max_prompt_tokens)
    given, source = start.reward_specs(config, task), config.model or _stage(config, "sft")
    if config.shared_base:
        for spec in filter(names_model, given):
            check_reward_adapter(spec, source or str(Path(config.out) / "sft"))
    made = None if config.shared_base else _stage(config, "reward")
    specs = [*given] or ([made] if made else None)
    return ReadRun(read_answers(config, specs, first, answered, source, has_critic=has_critic), config)


@told_together()
def _read_dpo(config: DPOConfig) -> ReadRun:
    first, tokenizer = _first_actor(config, SUMMARIES)
    parts = load_pairs(config)
    (_, pairs), _ = keep_what_fits(config, first, parts, partial(encode_pair, tokenizer), "pairs")
    config = with_preference_lengths(
        config, first, tokenizer, prompts_of(parts[1], config), answers_of(pairs), is_said=False
    )
    return ReadRun(read_preferences(config, first, pairs), config)


@told_together()
def _read_kto(config: KTOConfig) -> ReadRun:
    first, tokenizer = _first_actor(config, SUMMARIES)
    parts = load_answers(config)
    (_, answers), _ = keep_what_fits(config, first, parts, partial(encode_completion, tokenizer), "answers")
    config = with_preference_lengths(config, first, tokenizer, prompts_of(parts[1], config), answers, is_said=False)
    return ReadRun(read_preferences(config, first, answers), config)


def _read_agent(config: AgentConfig) -> ReadRun:
    if config.model:
        first, tokenizer = _checked(config, load_config(config.model)), load_tokenizer(config.model)
    else:
        made = character_stage("calculator", config, group_by_length=False)
        tokenizer, _ = load_corpus(made)
        first = _small_config(made, tokenizer)
    prepared = prepare_episodes(config, tokenizer, lambda spec: start.judge_nothing)
    prepared.playground.close()
    return ReadRun(read_episodes(prepared.config, first, prepared.answered), prepared.config)


READERS: dict[str, Callable[[Any], ReadRun]] = {
    "sft": _read_sft,
    "reward": _read_reward,
    "ppo": lambda config: _read_answers(config, SUMMARIES, has_critic=True),
    "grpo": lambda config: _read_answers(config, SUMS),
    "online-dpo": lambda config: _read_answers(config, SUMS),
    "distill": lambda config: _read_answers(config, SUMS),
    "agent": _read_agent,
    "dpo": _read_dpo,
    "kto": _read_kto,
}


def _first_actor(config: TrainingOptions, task: OwnTask) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of the first actor; a small one if its stage is still to be run."""
    source = config.model or _stage(config, "sft")
    if source is not None:
        return _checked(config, load_config(source)), load_tokenizer(source)
    made = task.actor_stage(config)
    tokenizer, _ = load_corpus(made)
    return _checked(config, _small_config(made, tokenizer)), tokenizer


def _stage(config: TrainingOptions, name: str) -> str | None:
    """The folder of the model that a stage of the run has made; None if it is still to be run."""
    folder = Path(config.out) / name
    return str(folder) if folder.exists() else None


def _small_config(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    with torch.device("meta"):
        return build_small_llama(tokenizer, config.hidden_size, config.num_layers).config


def _checked(config: TrainingOptions, model: PretrainedConfig) -> PretrainedConfig:
    check_trainable(config, model, config.model or config.out)
    return model
