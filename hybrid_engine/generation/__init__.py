"""From a request to responses: plans, the scheduler, decode steps, sampling.

Its three public levels, each to be customised alone, are Megatron's and lie in `extensions/megatron/levels/`. Their
names are found here at their first use.
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
"""The module below `LEVELS` of each public name."""

__all__ = list(MODULE_OF)


def __getattr__(name: str) -> Any:
    """A name of the levels, whose module is imported now."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{LEVELS}.{MODULE_OF[name]}"), name)
