"""Reads the inputs of a plan for each recipe: the lengths of its data and the configs of its models, but no weights."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.rlhf.batches.passes import Items
from hybrid_engine.rlhf.batches.sequences import NUM_POOLED, epochs_of_similar_length
from hybrid_engine.rlhf.data.encoding import encode_completion, encode_pair
from hybrid_engine.rlhf.data.lengths import R, T, keep_fitting, limit_of
from hybrid_engine.rlhf.data.prompts import PromptTokens
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
from hybrid_engine.rlhf.options.shared import PromptRunOptions, TrainingOptions
from hybrid_engine.rlhf.planning.read import Learned, Read, read_answers, read_episodes, read_preferences
from hybrid_engine.rlhf.preference import first_actor
from hybrid_engine.rlhf.preference.answers import load_answers
from hybrid_engine.rlhf.preference.first_actor import check_enough, prompts_of
from hybrid_engine.rlhf.preference.pairs import answers_of, load_pairs
from hybrid_engine.rlhf.rewards.adapter_folder import check_reward_adapter
from hybrid_engine.rlhf.rewards.learned import load_scoring_tokenizer, names_model
from hybrid_engine.rlhf.runs.adapters import check_trainable
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer, num_positions
from hybrid_engine.rlhf.tasks.calculator import check_conversations_fit
from hybrid_engine.rlhf.tasks.corpus import load_corpus, load_pair_corpus
from hybrid_engine.rlhf.tasks.small_llama import build_small_llama


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
    check_conversations_fit(config, tokenizer)
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
