"""Each field of a policy matters: with another value containers compute something else, or are refused."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hybrid_engine.containers import POLICIES, InferenceModel
from hybrid_engine.containers.policy import MoEPolicy, Policy, TemperaturePolicy
from hybrid_engine.generation.model.probe import _ProbePasses
from tests.support.family_switches import SWITCHES
from tests.support.models import BUILDERS, MORE_BUILDERS, randomised

NUM_TOKENS, BLOCK_SIZE = 24, 8
LEAST = 1e-4
"""Difference of logits that no rounding explains; those of the containers and of the model are some 1e-6 apart."""

# Field, a family that has it, and another value.
CHANGED: dict[str, tuple[str, Any]] = {
    "layer": ("gemma4", None),
    "stream": ("gemma3n", None),
    "norm": ("llama", "rms_offset"),
    "block": ("gpt-neox-parallel", "pre_norm"),
    "attention_norm": ("llama", None),
    "attention_post_norm": ("gemma2", None),
    "mlp_norm": ("llama", None),
    "mlp_post_norm": ("gemma2", None),
    "residual_scale": ("granite", None),
    "mixers": ("lfm2", {}),
    "mlp_kinds": ("nemotron-h", None),
    "qkv": ("llama", ("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj")),
    "qkv_layout": ("gpt-neox-parallel", "blocks"),
    "attention_output": ("llama", "self_attn.q_proj"),
    "gates_context": ("qwen3.5", False),
    "scale": ("llama", 0.3),
    "num_kv_heads": ("llama", "num_attention_heads"),
    "q_norm": ("qwen3-qk-norm", "self_attn.k_norm"),
    "k_norm": ("qwen3-qk-norm", "self_attn.q_norm"),
    "qk_norm_width": ("olmo2", "head"),
    "is_qk_norm_last": ("hunyuan", False),
    "norms_rotated_heads": ("llama4", False),
    "temperature": ("ministral3", None),
    "sinks": ("gpt-oss", None),
    "softcap": ("gemma2", None),
    "window": ("mistral-window", None),
    "chunk": ("llama4", None),
    "layer_kinds": ("qwen2-mixed-windows", None),
    "rotary": ("llama", None),
    "rotary_dim": ("gptj", "n_head"),
    "is_interleaved": ("gptj", False),
    "is_backwards": ("nanochat", False),
    "rope_layers": ("smollm3-some-rope", None),
    "is_rope_local": ("exaone4", False),
    "rope_factors": ("phimoe: longrope", None),
    "alibi": ("bloom", None),
    "is_alibi_rounded": ("falcon-alibi-sequential", False),
    "position_embedding": ("gpt2", None),
    "position_offset": ("opt", 0),
    "up": ("llama", "mlp.gate_proj"),
    "down": ("llama", "mlp.up_proj"),
    "gate": ("llama", None),
    "activation": ("llama", "gelu"),
    "xielu": ("apertus", None),
    "moe": ("mixtral", None),
    "embedding_scale": ("granite", None),
    "embedding_norm": ("bloom", None),
    "project_in": ("opt-post-norm-projection", None),
    "project_out": ("opt-post-norm-projection", None),
    "final_norm": ("llama", None),
    "logit_softcap": ("gemma2", None),
    "logit_scale": ("cohere", None),
    "logit_divisor": ("granite", None),
}
CHANGED_MOE: dict[str, tuple[str, Any]] = {
    "router": ("qwen2-moe", "mlp.shared_expert_gate"),
    "scoring": ("qwen2-moe", "topk_then_softmax"),
    "choice_bias": ("glm4-moe", None),
    "groups": ("glm4-moe", None),
    "group_best": ("glm4-moe", 1),
    "factor": ("glm4-moe", None),
    "normalizes": ("qwen3-moe", False),
    "top_k": ("mixtral", "num_attention_heads"),
    "experts": ("mixtral", "mlp"),
    "is_list": ("mixtral", True),
    "up": ("mixtral", "down_proj"),
    "up_bias": ("gpt-oss", None),
    "down": ("mixtral", "gate_up_proj"),
    "down_bias": ("gpt-oss", None),
    "is_stored_transposed": ("gpt-oss", False),
    "layout": ("gpt-oss", "halves"),
    "activation": ("gpt-oss", "hidden_act"),
    "shared": ("qwen2-moe", None),
    "shared_gate": ("qwen2-moe", None),
    "latent": ("nemotron-h-moe", None),
    "scales_input": ("llama4", False),
    "jitter": ("phimoe", None),
}
CHANGED_TEMPERATURE: dict[str, tuple[str, Any]] = {
    "strength": ("ministral3", "rope_parameters.factor"),
    "length": ("ministral3", "num_hidden_layers"),
    "offset": ("ministral3", 1),
    "switch": ("ministral3", "attention_dropout"),
    "has_rope": ("ministral3", False),
}
# Fields that change where 16-bit values are rounded, and nothing else.
ROUNDING: dict[str, tuple[str, Any]] = {"fp32_logits": ("glm4-moe", False), "fp32_weights": ("mixtral", False)}
# `layer_class` and `required` choose the policy, an encoder generates nothing, DeepSpeed's residual experts are tested
# in test_moe_block.py, and padded tokens are those of classes that have more than text.
ELSEWHERE = {"layer_class", "required", "is_encoder", "residual", "recomputes_longrope", "padded_tokens"}
ALL = BUILDERS | MORE_BUILDERS | SWITCHES


def policies_of(model: torch.nn.Module) -> tuple[str, list[Policy]]:
    """The layer class of a model that has policies, and these."""
    names = {type(module).__name__ for module in model.modules()}
    (name,) = names & set(POLICIES)
    return name, POLICIES[name]


def containers_of(family: str, dtype: torch.dtype = torch.float32) -> InferenceModel:
    containers = InferenceModel(randomised(ALL[family]).to(dtype))
    containers.bind()
    return containers


@torch.no_grad()
def logits(containers: InferenceModel) -> torch.Tensor:
    """Logits `[T, V]` of some tokens, prefilled."""
    tokens = (torch.arange(NUM_TOKENS) * 7 + 5) % containers.vocab_size
    return _ProbePasses(containers, lambda: containers.layers, tokens, BLOCK_SIZE).prefill(NUM_TOKENS)


def changed(policy: Policy, part: str | None, field: str, value: Any) -> Policy:
    """`policy` with another value of a field of its own, or of its part of that name."""
    if part is None:
        return replace(policy, **{field: value})
    inner = getattr(policy, part)
    return replace(policy, **{part: None if inner is None else replace(inner, **{field: value})})


@pytest.fixture
def with_policies(monkeypatch):
    """Replaces the policies of a family's layer class by changed ones."""

    def change(family, part, field, value):
        name, policies = policies_of(randomised(ALL[family]))
        monkeypatch.setitem(POLICIES, name, [changed(policy, part, field, value) for policy in policies])

    return change


CASES = [
    *((None, field, *case) for field, case in CHANGED.items()),
    *(("moe", field, *case) for field, case in CHANGED_MOE.items()),
    *(("temperature", field, *case) for field, case in CHANGED_TEMPERATURE.items()),
]


@pytest.mark.parametrize(("part", "field", "family", "value"), [case for case in CASES if case[2] in ALL])
def test_another_value_of_a_field_changes_the_logits_or_is_refused(part, field, family, value, with_policies):
    expected = logits(containers_of(family))
    with_policies(family, part, field, value)
    try:
        found = logits(containers_of(family))
    except (ValueError, RuntimeError):  # a path, a shape, or an op that does not take it
        return
    assert not (found - expected).abs().max() <= LEAST


@pytest.mark.parametrize(("field", "family", "value"), [(f, *case) for f, case in ROUNDING.items() if case[0] in ALL])
def test_a_field_of_rounding_changes_16_bit_logits(field, family, value, with_policies):
    expected = logits(containers_of(family, torch.bfloat16))
    with_policies(family, "moe", field, value)
    assert not torch.equal(logits(containers_of(family, torch.bfloat16)), expected)


def test_the_field_of_recomputed_keys_decides_the_length_at_which_they_are(with_policies):
    family = "phi3: longrope"
    assert containers_of(family).recompute_length == 12
    with_policies(family, None, "recomputes_longrope", False)
    assert containers_of(family).recompute_length is None


def test_every_field_of_a_policy_is_changed_here():
    tables = ((Policy, CHANGED), (MoEPolicy, CHANGED_MOE), (TemperaturePolicy, CHANGED_TEMPERATURE))
    for kind, table in tables:
        names = {field.name for field in fields(kind)}
        assert names - ELSEWHERE - set(ROUNDING) == set(table) & names == set(table), kind
