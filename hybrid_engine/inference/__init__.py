"""Inference without a training engine: `init_inference` and the engine it returns."""

from pkgutil import extend_path

from hybrid_engine.inference.build import init_inference
from hybrid_engine.inference.config import InferenceConfig
from hybrid_engine.inference.engine import InferenceEngine
from hybrid_engine.lazy import lazy_attributes

__all__ = ["InferenceConfig", "InferenceEngine", "init_inference"]

# DeepSpeed has modules below this path too: thin files of an extension, imported when they are read.
__path__ = extend_path(__path__, "hybrid_engine.below_inference")
__getattr__ = lazy_attributes(__name__)
