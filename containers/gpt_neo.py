"""GPT-Neo: GPT-2's layer with three projections, no scaling of the scores, and local layers among the global ones."""

from dataclasses import replace

from hybrid_engine.containers.gpt2 import GPT2
from hybrid_engine.containers.policy import register_policy

GPT_NEO = register_policy(
    replace(
        GPT2,
        layer_class="GPTNeoBlock",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attention_output="attn.attention.out_proj",
        scale=1.0,
        window="window_size",
        layer_kinds="attention_layers",
        required={},
    )
)
