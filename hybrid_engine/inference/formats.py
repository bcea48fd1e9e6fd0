"""Checkpoints of other projects, each read by an extension that is imported when a folder is asked about."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from hybrid_engine.inference.stored import Source

FORMATS = ("hybrid_engine.extensions.megatron.checkpoints.loading",)
"""Modules with the members of `CheckpointFormat`."""


class CheckpointFormat(Protocol):
    """How checkpoints of one project are recognised and read."""

    def recognises(self, folder: Path) -> bool:
        """Whether `folder` is a checkpoint of this project."""

    def build_empty(self, folder: Path) -> PreTrainedModel:
        """Its model on the meta device. ValueError where it holds none."""

    def find_sources(self, folder: Path) -> Mapping[str, Source]:
        """Its tensors, by the names that `build_empty`'s model gives them. ValueError where it is damaged."""


def format_of(folder: Path) -> CheckpointFormat | None:
    """The format of a folder; None for one of transformers, or none at all."""
    for name in FORMATS:
        found: CheckpointFormat = importlib.import_module(name)  # type: ignore[assignment]
        if found.recognises(folder):
            return found
    return None
