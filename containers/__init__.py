"""Inference containers: a policy per model family, and the layer and model they all share."""

from hybrid_engine.containers import (
    bert,
    bloom,
    falcon,
    gemma,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    megatron,
    mistral,
    olmo,
    opt,
    phi,
    qwen,
    smollm,
    stablelm,
)
from hybrid_engine.containers.encoder import InferenceEncoder
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.containers.policy import POLICIES, Policy, UnsupportedModelError, register_policy

__all__ = [
    "POLICIES",
    "InferenceEncoder",
    "InferenceModel",
    "Policy",
    "UnsupportedModelError",
    "bert",
    "bloom",
    "falcon",
    "gemma",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "llama",
    "megatron",
    "mistral",
    "olmo",
    "opt",
    "phi",
    "qwen",
    "register_policy",
    "smollm",
    "stablelm",
]
