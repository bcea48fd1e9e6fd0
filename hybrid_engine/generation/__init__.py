"""Generation in three levels, each to be customised alone (`levels/`), over one engine (the rest of this room).

A backend runs a strategy over a wrapped model; below, the scheduler says who runs and the workspace holds KV.
"""

from hybrid_engine.extensions.megatron.levels.backends import (
    AbstractBackend,
    NativeBackend,
    TransformersBackend,
    choose_backend,
    common_generate,
)
from hybrid_engine.extensions.megatron.levels.parameters import CommonInferenceParams
from hybrid_engine.extensions.megatron.levels.strategy import SimpleTextGenerationStrategy
from hybrid_engine.extensions.megatron.levels.wrapped_model import AbstractModelInferenceWrapper, GPTInferenceWrapper

__all__ = [
    "AbstractBackend",
    "AbstractModelInferenceWrapper",
    "CommonInferenceParams",
    "GPTInferenceWrapper",
    "NativeBackend",
    "SimpleTextGenerationStrategy",
    "TransformersBackend",
    "choose_backend",
    "common_generate",
]
