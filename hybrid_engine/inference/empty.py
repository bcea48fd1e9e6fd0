"""A checkpoint's model without its weights, for `init_inference(model, checkpoint=folder)` to read in parts."""

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_engine.inference.formats import format_of


def build_empty_model(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """The causal model of a folder of transformers, or of a checkpoint of Megatron's, on the meta device.

    Raises:
        ValueError: there is no such folder, or it holds no such model.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"checkpoint={str(folder)!r} is no folder; name one with config.json or Megatron's files")
    if (known := format_of(Path(folder))) is not None:
        return known.build_empty(Path(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    except (OSError, KeyError, TypeError) as error:  # by what is missing or damaged it is any of these
        raise ValueError(f"checkpoint={str(folder)!r} holds no causal model of transformers: {error}") from error
