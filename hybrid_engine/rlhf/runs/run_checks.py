"""Checks of any run before a model loads: its folder, its model, its earlier stages."""

import os
from pathlib import Path
from typing import Protocol

from transformers import LlamaConfig

from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.rlhf.options.shared import AdapterOptions, DataOptions, RewardOptions, TrainingOptions
from hybrid_engine.rlhf.runs.adapters import check_targets, check_trainable
from hybrid_engine.rlhf.runs.checkpoints import check_resume
from hybrid_engine.rlhf.runs.run_folder import RUN_RESULTS, check_nothing_is_lost, check_out
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer


class AnswerLengths(Protocol):
    """Options of a recipe that answers prompts."""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the longest answer."""


def check_folder(folder: Path, config: TrainingOptions) -> None:
    """Checks that the run may write to `folder`, and resumes or moves aside its content; for one process."""
    check_out(config.out)
    check_resume(folder, config, "ppo")
    if config.restart:
        check_sources_stay(folder, config)
    if not config.resume and not config.restart:
        check_nothing_is_lost(folder)


def check_sources_stay(folder: Path, config: TrainingOptions) -> None:
    """Raises ValueError if `--restart` would move aside an input of the run."""
    sources = [("model", config.model)]
    if isinstance(config, DataOptions):
        datasets = config.dataset if isinstance(config.dataset, tuple) else (config.dataset,)
        sources += [("held-out-dataset", config.held_out_dataset), *(("dataset", one) for one in datasets)]
    if isinstance(config, RewardOptions):
        sources += [("reward", spec) for spec in config.reward]
    for name, source in sources:
        for moved in RUN_RESULTS:
            if source and Path(os.path.abspath(source)).is_relative_to(os.path.abspath(folder / moved)):
                raise ValueError(
                    f"--{name}={source!r} lies in {str(folder / moved)!r}, which --restart moves aside; copy it to a "
                    "place of its own, or choose another --out"
                )


def check_model(source: str | None, adapter: AdapterOptions) -> None:
    """Raises ValueError unless the model `source` has a tokenizer and a config, and the adapter fits it.

    None is the small Llama that is trained without `--model`.
    """
    if source is None:
        check_targets(adapter.lora_targets, LlamaConfig(num_hidden_layers=1), "the model that is made without --model")
        return
    load_tokenizer(source)
    check_trainable(adapter, load_config(source), source)


def check_stage(folder: Path, name: str, batch_size: int) -> None:
    """Raises ValueError if the run's `folder` lacks the stage `name` and the processes do not divide its batches."""
    if not (folder / name).exists() and batch_size % get_world_size():
        raise ValueError(
            f"{get_world_size()} processes do not divide the {batch_size} samples of an optimizer step of {name}; "
            f"run `hybrid-engine {name}` by itself first, with another --batch-size and the same --out"
        )


def check_positions(config: AnswerLengths, longest: int, model: str, limit: int | None) -> None:
    """Raises ValueError if the longest prompt and a response exceed `limit`, the positions of `model`.

    `longest`: tokens of that prompt, before it is cut off at `--max-prompt-tokens`.
    """
    prompt_tokens = min(longest, config.max_prompt_tokens)
    total = prompt_tokens + config.max_new_tokens
    if limit is not None and total > limit:
        raise ValueError(
            f"--max-new-tokens={config.max_new_tokens} behind prompts of up to {prompt_tokens} tokens makes {total}, "
            f"more than the {limit} positions of {model}; lower it, or --max-prompt-tokens={config.max_prompt_tokens}"
        )
