"""Checks of any run before a model loads: its folder, its model, its earlier stages; and the adapter that it trains.

A LoRA adapter is trained in place of all weights if the options say so; the checks tell whether the model takes it.
"""

import copy
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid_engine.checkpoint.export import without_renamed_attribute_warning
from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.rlhf.options.shared import (
    AdapterOptions,
    DataOptions,
    RewardOptions,
    RolloutRunOptions,
    TrainingOptions,
)
from hybrid_engine.rlhf.runs.checkpoints import check_resume
from hybrid_engine.rlhf.runs.run_folder import RUN_RESULTS, check_nothing_is_lost, check_out
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer

IS_PACKED = "is quantized: FSDP2 can neither shard nor gather packed values with separate scales"
"""Why a quantized model is trained on one process."""


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
                    f"--{name}={source!r} lies in {str(folder / moved)!r}, which --restart moves aside; copy it "
                    "elsewhere, or choose another --out"
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
            f"--max-new-tokens={config.max_new_tokens} after prompts of up to {prompt_tokens} tokens makes {total}, "
            f"more than the {limit} positions of {model}; lower it, or --max-prompt-tokens={config.max_prompt_tokens}"
        )


def add_adapter(model: nn.Module, options: AdapterOptions, task: str = "CAUSAL_LM") -> nn.Module:
    """The model with the LoRA adapter of `options` on linears of its body; unchanged if the rank is 0.

    `task` is peft's name of the model's task: a classifier's head (SEQ_CLS) is trained in full in addition to the
    adapter.
    """
    if options.lora_rank == 0:
        return model
    with without_renamed_attribute_warning():
        return get_peft_model(model, lora_config(options, task))


def lora_config(options: AdapterOptions, task: str = "CAUSAL_LM") -> LoraConfig:
    """peft's config of the adapter; `task` as in `add_adapter`."""
    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_targets) or "all-linear",
        task_type=task,
    )


def check_trainable(options: AdapterOptions, config: PretrainedConfig, source: str | Path) -> None:
    """Raises ValueError unless the model of `config`, from `--model`, can train with that adapter on these processes.

    Args:
        options: of the adapter; with rank 0 all weights are trained.
        config: of the model.
        source: as the option named it.
    """
    rank = options.lora_rank
    is_quantised = getattr(config, "quantization_config", None) is not None
    if is_quantised and get_world_size() > 1:
        raise ValueError(
            f"--model={str(source)!r} {IS_PACKED}; train it on one process instead of {get_world_size()}, or give the "
            "model in full precision"
        )
    if rank == 0 and is_quantised:
        raise ValueError(
            f"--model={str(source)!r} is quantized, and packed weights cannot be trained; give --lora-rank, such as 8, "
            "or the model in full precision"
        )
    check_top_k(options, config, source)
    hidden_size = getattr(config.get_text_config(), "hidden_size", rank)
    if rank > hidden_size:
        raise ValueError(f"--lora-rank={rank} exceeds the width of --model={str(source)!r}, {hidden_size}; lower it")
    check_targets(options.lora_targets, config, f"--model={str(source)!r}")


def check_top_k(options: AdapterOptions, config: PretrainedConfig, source: str | Path) -> None:
    """Raises ValueError if the run samples from more tokens than the model of `config` has."""
    vocab_size = config.get_text_config().vocab_size
    if isinstance(options, RolloutRunOptions) and options.top_k > vocab_size:
        raise ValueError(
            f"--top-k={options.top_k} exceeds the {vocab_size} tokens of --model={str(source)!r}; lower it, or leave "
            "it out to sample from all"
        )


def check_targets(targets: Sequence[str], config: PretrainedConfig, model: str) -> None:
    """Raises ValueError if one of `--lora-targets` matches no linear in the body of `model`, its name in errors.

    Names are matched as in peft: the last part, or several with their dots.
    """
    if not targets:
        return
    names = _linears(config)
    known = sorted({name.rpartition(".")[2] for name in names})
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            near = get_close_matches(target, known, cutoff=0.4)
            meant = f"use {' or '.join(near)}" if near else "use one of these"
            raise ValueError(
                f"--lora-targets={target!r} matches no linear layer in the body of {model}, which has "
                f"{', '.join(known)}; {meant}, or leave it out for all"
            )


def _linears(config: PretrainedConfig) -> list[str]:
    """Names of the linears of a causal model, without its head; no weights are allocated."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head, kinds = model.get_output_embeddings(), (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]
