"""Generation, from a request to its responses: plans, the scheduler, decode steps and sampling.

The three public levels, each of which can be customized alone, follow Megatron and lie in
`extensions/megatron/levels/`. This module exports their names lazily.
"""

import importlib
from typing import Any

LEVELS = "hybrid_engine.extensions.megatron.levels"
MODULE_OF = {
    "AbstractBackend": "backends",
    "AbstractModelInferenceWrapper": "wrapped_model",
    "CommonInferenceParams": "parameters",
    "GPTInferenceWrapper": "wrapped_model",
    "NativeBackend": "backends",
    "SimpleTextGenerationStrategy": "strategy",
    "TransformersBackend": "backends",
    "choose_backend": "backends",
    "common_generate": "backends",
}
"""Public name to the module below `LEVELS` that defines it."""

__all__ = list(MODULE_OF)


def __getattr__(name: str) -> Any:
    """Returns a public name of the levels; imports its module at the first use."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{LEVELS}.{MODULE_OF[name]}"), name)
