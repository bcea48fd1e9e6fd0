"""Inference without a training engine: `init_inference` and the engine it returns."""

from hybrid_engine.inference.build import init_inference
from hybrid_engine.inference.config import InferenceConfig
from hybrid_engine.inference.engine import InferenceEngine

__all__ = ["InferenceConfig", "InferenceEngine", "init_inference"]
