"""Lets transformers and accelerate find a `deepspeed`: they ask for the metadata of an installed package.

Both decide while they are imported, which has happened by the time of `enable_compat()`; what they left out then is
made up for here.
"""

import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hybrid_engine.extensions.deepspeed.deepspeed_names import FOLDER

VERSION = "0.19.8"
"""The version of DeepSpeed whose surface this is."""


class CompatDistribution(Distribution):
    """What `importlib.metadata` reads of the package "deepspeed"."""

    def read_text(self, filename: str) -> str | None:
        """The package's METADATA, its only file."""
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Where a file of the package would be."""
        return Path(__file__).parent / path


ANY_PACKAGE = DistributionFinder.Context()


class CompatFinder(DistributionFinder):
    """Finds that package by its name, and no module."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Modules are registered, not found."""

    def find_distributions(self, context: DistributionFinder.Context = ANY_PACKAGE) -> Iterator[Distribution]:
        """The package, if it is asked for."""
        if context.name == "deepspeed":
            yield CompatDistribution()


def is_announced() -> bool:
    """Whether this engine is the package "deepspeed" of this process."""
    is_on_path = str(FOLDER) in sys.path  # where code has found it
    return is_on_path or any(isinstance(finder, CompatFinder) for finder in sys.meta_path)


def announce() -> None:
    """Makes the package "deepspeed" present, also for code that found it absent before."""
    if not is_announced():
        sys.meta_path.insert(0, CompatFinder())
        _complete_imports()
        # Its HfDeepSpeedConfig derives from accelerate's only where there is a deepspeed. Functions imported from it
        # look names up in the module, so they see the new ones.
        integration = sys.modules.get("transformers.integrations.deepspeed")
        if integration is not None:
            importlib.reload(integration)


def _complete_imports() -> None:
    """Gives modules the names that they import from accelerate where there is a deepspeed."""
    source = importlib.import_module("accelerate.utils.deepspeed")
    own = {name: value for name, value in vars(source).items() if inspect.getmodule(value) is source}
    for name in ("accelerate.utils", "accelerate.accelerator", "transformers.trainer"):
        if name in sys.modules:
            vars(sys.modules[name]).update(own)
