"""Builds a client for a server, with the package of its protocol."""

import importlib
from typing import Any


def build_client(url: str, api_key: str | None) -> Any:
    """An `openai.OpenAI` for `url`; ValueError if the package is not installed.

    It retries if the connection breaks or the server is overloaded.
    """
    try:
        openai = importlib.import_module("openai")
    except ModuleNotFoundError as error:
        raise ValueError(
            "client(): openai is not installed; install the extra: pip install 'hybrid-engine[agents]'"
        ) from error
    return openai.OpenAI(base_url=url, api_key=api_key or "none")
