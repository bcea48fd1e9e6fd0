"""A Megatron-LM checkpoint as a model.

    model = load_megatron_gpt("checkpoints/gpt", torch.bfloat16)
    engine = init_inference(model)

Where processes share the model, none needs to load the whole:

    model = build_empty_megatron_gpt("checkpoints/gpt", torch.bfloat16)
    engine = init_inference(model, checkpoint="checkpoints/gpt", tensor_parallel={"tp_size": 2})
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_engine.extensions.megatron.checkpoints.checkpoint import ROUTER, MegatronCheckpoint
from hybrid_engine.extensions.megatron.checkpoints.distributed import is_distributed
from hybrid_engine.extensions.megatron.checkpoints.gpt import MegatronGPT, MegatronGPTConfig
from hybrid_engine.extensions.megatron.checkpoints.rank_files import find_iteration, has_rank_files
from hybrid_engine.inference.checkpoint import compute_buffers, open_checkpoint_of
from hybrid_engine.inference.stored import Source
from hybrid_engine.optim.build import cast_module


def build_empty_megatron_gpt(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a checkpoint on the meta device, in evaluation mode: a MegatronGPT, or a Llama, Qwen2 or Qwen3.

    Its vocabulary is as long as the checkpoint's, which Megatron pads. Where the checkpoint says how long it was before
    (`vocab_size`), the model's `generation_config` suppresses the ids beyond: they are no tokens.

    Args:
        folder: the checkpoint's, or the one above with `latest_checkpointed_iteration.txt` or `latest` in it.
        dtype: of the parameters but routers, which stay fp32.

    Raises:
        ValueError: as `MegatronCheckpoint`.
    """
    checkpoint = MegatronCheckpoint(folder)
    with torch.device("meta"):
        model = _build(checkpoint.config)
        cast_module(model, dtype)
    padded, size = model.config.vocab_size, checkpoint.arguments.get("vocab_size")
    if isinstance(size, int) and 0 < size < padded:
        model.generation_config.suppress_tokens = list(range(size, padded))
    for name, module in model.named_modules():
        if f"{name}.weight".endswith(ROUTER):
            module.float()
    return model.eval()


def load_megatron_gpt(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a checkpoint on the CPU; arguments as `build_empty_megatron_gpt`.

    Raises:
        ValueError: also where tensors are missing, unknown or of another shape; it lists them.
    """
    model = build_empty_megatron_gpt(folder, dtype)
    open_checkpoint_of(model, folder).fill(torch.device("cpu"))
    compute_buffers(model, torch.device("cpu"))
    return model


def recognises(folder: Path) -> bool:
    """Whether `folder`, or its latest iteration, has files of Megatron's ranks or is a distributed checkpoint."""
    folder = find_iteration(folder)
    return has_rank_files(folder) or is_distributed(folder)


build_empty = build_empty_megatron_gpt


def find_sources(folder: Path) -> Mapping[str, Source]:
    """The tensors of a checkpoint by the names of its model. ValueError as `MegatronCheckpoint`."""
    return MegatronCheckpoint(folder).sources


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    return MegatronGPT(config) if isinstance(config, MegatronGPTConfig) else AutoModelForCausalLM.from_config(config)
