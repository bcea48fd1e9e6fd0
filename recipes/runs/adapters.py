"""Training an adapter in place of all weights."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.checkpoint.peft_models import without_renamed_attribute_warning
from hybrid_engine.distributed.processes import get_world_size

IS_PACKED = (
    "is quantised: packed values whose scales lie beside them, of which FSDP2 can neither shard nor gather a part"
)
"""Why such a model is trained on one process."""


def add_adapter(model: nn.Module, rank: int, task: str = "CAUSAL_LM") -> nn.Module:
    """The model with a LoRA adapter of `rank` on all linears of its body; with rank 0 as it is.

    `task` is peft's name of what the model does: a classifier's head (SEQ_CLS) is trained whole beside the adapter.
    """
    if rank == 0:
        return model
    with without_renamed_attribute_warning():
        return get_peft_model(model, lora_config(rank, task))


def lora_config(rank: int, task: str = "CAUSAL_LM") -> LoraConfig:
    """LoRA of `rank` on all linears of a body; `task` as of `add_adapter`."""
    return LoraConfig(r=rank, target_modules="all-linear", task_type=task)


def check_shared_base(config: Any) -> None:
    """ValueError for roles on one base without adapters, or in exact mode."""
    if config.shared_base and not config.lora_rank:
        raise ValueError("--shared-base: the roles are adapters on one base; give --lora-rank, such as --lora-rank 8")
    if config.shared_base and config.exact:
        raise ValueError("--exact computes one role's forward pass; leave it out, or --shared-base")


def check_trainable(rank: int, config: PretrainedConfig, source: str | Path) -> None:
    """ValueError unless the model of `config`, from `--model`, trains at `--lora-rank` and on these processes.

    Args:
        rank: of the adapter; 0: all weights are trained.
        config: of the model.
        source: as the option named it.
    """
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
