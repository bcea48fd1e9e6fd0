"""Inference containers: a policy per model family, and the layer and model they all share."""

from hybrid_engine.containers import gpt2, llama, mistral, opt, qwen
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.containers.policy import POLICIES, Policy, UnsupportedModelError, register_policy

__all__ = [
    "POLICIES",
    "InferenceModel",
    "Policy",
    "UnsupportedModelError",
    "gpt2",
    "llama",
    "mistral",
    "opt",
    "qwen",
    "register_policy",
]
