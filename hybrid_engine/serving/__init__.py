"""An OpenAI-compatible server for a model, during its training or without it."""

import importlib
from typing import Any


def import_serving() -> Any:
    """Imports `server.build_server` on use, because the web libraries are an optional dependency.

    Raises:
        ValueError: one of them is not installed.
    """
    try:
        return importlib.import_module("hybrid_engine.serving.web.server").build_server
    except ModuleNotFoundError as error:
        if str(error.name).startswith("hybrid_engine"):
            raise
        raise ValueError(
            f"serving: {error.name} is not installed; install the extra: pip install 'hybrid-engine[serve]'"
        ) from error
