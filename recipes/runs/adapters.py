"""Training an adapter in place of all weights."""

from pathlib import Path

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.checkpoint.peft_models import without_renamed_attribute_warning


def add_adapter(model: nn.Module, rank: int, task: str = "CAUSAL_LM") -> nn.Module:
    """The model with a LoRA adapter of `rank` on all linears of its body; with rank 0 as it is.

    `task` is peft's name of what the model does: a classifier's head (SEQ_CLS) is trained whole beside the adapter.
    """
    if rank == 0:
        return model
    adapter = LoraConfig(r=rank, target_modules="all-linear", task_type=task)
    with without_renamed_attribute_warning():
        return get_peft_model(model, adapter)


def check_adapter(rank: int, config: PretrainedConfig, source: str | Path) -> None:
    """ValueError if `--lora-rank` exceeds the width of the model of `config`, which `--model` named as `source`."""
    hidden_size = getattr(config.get_text_config(), "hidden_size", rank)
    if rank > hidden_size:
        raise ValueError(f"--lora-rank={rank} exceeds the width of --model={str(source)!r}, {hidden_size}; lower it")
