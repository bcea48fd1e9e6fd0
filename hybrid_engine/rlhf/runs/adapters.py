"""Builds a LoRA adapter that is trained in place of all weights, and checks that a model can train with it."""

import copy
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybrid_engine.checkpoint.saved_logits import without_renamed_attribute_warning
from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.rlhf.options.shared import AdapterOptions

IS_PACKED = (
    "is quantised: packed values whose scales lie beside them, of which FSDP2 can neither shard nor gather a part"
)
"""Why a quantized model is trained on one process."""


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
            f"--model={str(source)!r} is quantised, and packed weights cannot be trained; give --lora-rank, such as 8, "
            "or the model in full precision"
        )
    hidden_size = getattr(config.get_text_config(), "hidden_size", rank)
    if rank > hidden_size:
        raise ValueError(f"--lora-rank={rank} exceeds the width of --model={str(source)!r}, {hidden_size}; lower it")
    check_targets(options.lora_targets, config, f"--model={str(source)!r}")


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
                f"--lora-targets={target!r} names no linear in the body of {model}, which has {', '.join(known)}; "
                f"{meant}, or leave it out for all"
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
