"""The user's cache folder, where verdicts and compiled code are kept between runs."""

import os
from pathlib import Path

VARIABLE = "HYBRID_ENGINE_CACHE"
"""Environment variable: the folder, by default `hybrid-engine` in $XDG_CACHE_HOME or ~/.cache."""


def cache_folder(kind: str) -> Path:
    """The folder for files of one kind; it need not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid-engine"
    return Path(os.environ.get(VARIABLE) or base) / kind
