"""Inference containers: a policy per model family, and the layer and model they all share.

A name is imported when it is first read: training needs the files on streams and quantised weights alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_engine.containers.encoder import InferenceEncoder
    from hybrid_engine.containers.model import InferenceModel
    from hybrid_engine.containers.policy import POLICIES, Policy, UnsupportedModelError, register_policy

FAMILIES = (
    "apertus",
    "bamba",
    "bert",
    "bloom",
    "cohere",
    "deepseek",
    "ernie",
    "exaone",
    "falcon",
    "falcon_h1",
    "gemma",
    "gemma3n",
    "gemma4",
    "glm",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "helium",
    "hunyuan",
    "lfm2",
    "jamba",
    "kimi_linear",
    "llama",
    "llama4",
    "mamba",
    "megatron",
    "minimax",
    "mistral",
    "nanochat",
    "olmo",
    "opt",
    "phi",
    "qwen",
    "qwen_hybrid",
    "smollm",
    "stablelm",
    "starcoder",
)
"""Modules that register the policies of their model family when they are imported."""

__all__ = [
    *FAMILIES,
    "POLICIES",
    "InferenceEncoder",
    "InferenceModel",
    "Policy",
    "UnsupportedModelError",
    "register_policy",
]

_MODULE_OF = {
    "POLICIES": "policy",
    "InferenceEncoder": "encoder",
    "InferenceModel": "model",
    "Policy": "policy",
    "UnsupportedModelError": "policy",
    "register_policy": "policy",
}


def __getattr__(name: str) -> Any:
    """A name of `__all__`: a family's module, or what the rest of the package reads."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _MODULE_OF:
        return importlib.import_module(f"{__name__}.{name}")
    importlib.import_module(f"{__name__}.model")  # registers our policies, so that a user's come before them
    return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name))
