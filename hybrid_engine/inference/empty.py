"""Builds a checkpoint's model without its weights, for `init_inference(model, checkpoint=folder)` to read in parts."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybrid_engine.inference.stored import Source

FORMATS = ("hybrid_engine.extensions.megatron.checkpoints.loading",)
"""Modules that implement `CheckpointFormat`."""


def build_empty_model(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """The causal model of a folder of transformers, or of a checkpoint of Megatron's, on the meta device.

    Raises:
        ValueError: the folder does not exist, or does not hold such a model.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"checkpoint={str(folder)!r} is no folder; name one with config.json or Megatron's files")
    if (known := format_of(Path(folder))) is not None:
        return known.build_empty(Path(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    except (OSError, KeyError, TypeError) as error:  # depends on the missing or damaged part
        raise ValueError(f"checkpoint={str(folder)!r} holds no causal model of transformers: {error}") from error


class CheckpointFormat(Protocol):
    """Recognition and reading of one project's checkpoints."""

    def recognises(self, folder: Path) -> bool:
        """Whether `folder` is a checkpoint of this project."""

    def build_empty(self, folder: Path) -> PreTrainedModel:
        """Its model on the meta device. ValueError if it does not hold one."""

    def find_sources(self, folder: Path) -> Mapping[str, Source]:
        """Its tensors, keyed by the names in `build_empty`'s model. ValueError if it is damaged."""


def format_of(folder: Path) -> CheckpointFormat | None:
    """The format of a folder; None for one of transformers, or of no known format."""
    for name in FORMATS:
        found: CheckpointFormat = importlib.import_module(name)  # type: ignore[assignment]
        if found.recognises(folder):
            return found
    return None
