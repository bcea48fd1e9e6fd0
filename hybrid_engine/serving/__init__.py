"""The policy behind an OpenAI-compatible address, while it trains or by itself."""

import importlib
from typing import Any


def import_serving() -> Any:
    """`of_engine.build_server`, imported where it is used: the web libraries are an extra.

    Raises:
        ValueError: one of them is not installed.
    """
    try:
        return importlib.import_module("hybrid_engine.serving.of_engine").build_server
    except ModuleNotFoundError as error:
        if str(error.name).startswith("hybrid_engine"):
            raise
        raise ValueError(
            f"serving: {error.name} is not installed; install the extra: pip install 'hybrid-engine[serve]'"
        ) from error
