"""Generation, from a request to its responses: plans, the scheduler, decode steps and sampling.

The three public levels, each of which can be customized alone, follow Megatron and lie in `extensions/megatron/`. This
module exports their names lazily.
"""

from hybrid_engine.lazy import lazy_attributes

LEVELS = "hybrid_engine.extensions.megatron"
MODULE_OF = {
    "AbstractBackend": "backends",
    "AbstractModelInferenceWrapper": "wrapped_model",
    "CommonInferenceParams": "continuation",
    "GPTInferenceWrapper": "wrapped_model",
    "NativeBackend": "backends",
    "SimpleTextGenerationStrategy": "backends",
    "TransformersBackend": "backends",
    "choose_backend": "backends",
    "common_generate": "backends",
}
"""Public name to the module below `LEVELS` that defines it."""

__all__ = list(MODULE_OF)
__getattr__ = lazy_attributes(__name__, {name: f"{LEVELS}.{module}" for name, module in MODULE_OF.items()})
