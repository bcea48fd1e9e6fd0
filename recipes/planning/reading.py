"""What a plan reads of a run: the lengths of its data and the configs of its models, and no weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.recipes import dpo, kto, reward, sft
from hybrid_engine.recipes.data.corpus import load_corpus
from hybrid_engine.recipes.data.encoding import encode_completion, encode_pair, encode_prompt
from hybrid_engine.recipes.data.prompts import load_prompt_rows
from hybrid_engine.recipes.data.sequences import NUM_POOLED, epochs_of_similar_length
from hybrid_engine.recipes.experience.own_tasks import SUMMARIES, SUMS, OwnTask
from hybrid_engine.recipes.rewards.adapter_folder import check_reward_adapter, read_reward_adapter
from hybrid_engine.recipes.rewards.classifier import load_scoring_tokenizer
from hybrid_engine.recipes.rewards.learned import critic_source, names_model
from hybrid_engine.recipes.runs.adapters import check_adapter
from hybrid_engine.recipes.runs.stages import load_config, load_tokenizer
from hybrid_engine.recipes.tasks.small_llama import build_small_llama

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


def read_run(recipe: str, config: Any) -> Read:
    """What the recipe with this `Config` will work on.

    Raises:
        ValueError: there are no plans of such a recipe, or what an option names cannot be read.
    """
    if recipe not in READERS:
        raise ValueError(f"plan {recipe}: there are plans of {', '.join(READERS)}; name one of them")
    return READERS[recipe](config)


def _read_sft(config: sft.Config) -> Read:
    tokenizer, corpus = load_corpus(config)
    lengths = [len(example) for example in corpus.train]
    num_pooled = NUM_POOLED if config.group_by_length else 1
    return Read(
        first=_adapted(config, load_config(config.model)) if config.model else _small_config(config, tokenizer),
        items=[((len(example.prompt_ids), len(example.response_ids)),) for example in corpus.train],
        batches=epochs_of_similar_length(lengths, config.batch_size, config.num_epochs, config.seed, num_pooled),
    )


def _read_reward(config: reward.Config) -> Read:
    stage = Path(config.out) / "sft"
    if not config.model and not stage.exists():
        raise ValueError(f"--out={config.out!r} has no sft yet, on whose body the reward is trained; give --model")
    source = config.model or str(stage)
    corpus = reward.load_corpus(config, load_scoring_tokenizer(source), source)
    items: list[Item] = [((0, len(pair.chosen)), (0, len(pair.rejected))) for pair in corpus.train]
    return Read(first=_adapted(config, load_config(source)), items=items, batches=corpus.batches)


def _read_answers(config: Any, task: OwnTask, *, has_critic: bool = False) -> Read:
    """What a plan reads of a recipe that learns from its own answers."""
    first, tokenizer = _first_actor(config, task)
    train, held_out = load_prompt_rows(config.dataset, *config.part) if config.dataset else task.load_rows(config.seed)
    specs = config.reward or ((task.reward,) if task.reward else ())
    rows = [*train, *held_out]
    if getattr(config, "shared_base", False):
        ranks = [_rank_of(spec, config) for spec in specs if names_model(spec)] if specs else [config.lora_rank]
        return Read(first=first, adapter_ranks=ranks, prompt_tokens=_longest(config, tokenizer, rows))
    models = [load_config(spec, "reward") for spec in specs if names_model(spec)]
    made = Path(config.out) / "reward"
    if not specs:  # the stage `reward` makes one of the actor's size
        models = [load_config(str(made)) if made.exists() else first]
    critic = None
    if has_critic:
        source = critic_source(specs, config.model) if config.model and specs else None
        critic = load_config(source, "reward") if source else models[0] if not specs else first
    return Read(first=first, critic=critic, rewards=models, prompt_tokens=_longest(config, tokenizer, rows))


def _rank_of(spec: str, config: Any) -> int:
    """The rank of the adapter that a reward model is."""
    check_reward_adapter(spec, config.model or str(Path(config.out) / "sft"))
    return read_reward_adapter(spec).config.r


def _read_dpo(config: dpo.Config) -> Read:
    first, tokenizer = _first_actor(config, SUMMARIES)
    pairs = [encode_pair(tokenizer, row) for row in dpo.load_pairs(config)[0]]
    items: list[Item] = [tuple((len(answer.prompt_ids), len(answer.response_ids)) for answer in pair) for pair in pairs]
    return Read(first=first, items=items, prompt_tokens=max(length for item in items for length, _ in item))


def _read_kto(config: kto.Config) -> Read:
    first, tokenizer = _first_actor(config, SUMMARIES)
    answers = [encode_completion(tokenizer, row) for row in kto.load_answers(config)[0]]
    items: list[Item] = [((len(answer.prompt_ids), len(answer.response_ids)),) for answer in answers]
    return Read(first=first, items=items, prompt_tokens=max(length for item in items for length, _ in item))


READERS: dict[str, Callable[[Any], Read]] = {
    "sft": _read_sft,
    "reward": _read_reward,
    "ppo": lambda config: _read_answers(config, SUMMARIES, has_critic=True),
    "grpo": lambda config: _read_answers(config, SUMS),
    "online-dpo": lambda config: _read_answers(config, SUMS),
    "dpo": _read_dpo,
    "kto": _read_kto,
}


def _first_actor(config: Any, task: OwnTask) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of the actor as it begins: a stage that is still to be run makes a small one."""
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


def _adapted(config: Any, model: PretrainedConfig) -> PretrainedConfig:
    check_adapter(config.lora_rank, model, config.model or config.out)
    return model


def _longest(config: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any]) -> int:
    return min(config.max_prompt_tokens, max(len(encode_prompt(tokenizer, row)) for row in rows))
