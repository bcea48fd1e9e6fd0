"""GLM-4-9B: Llama's layer with one linear for gate and up, and rotary on adjacent pairs of half the dimensions.

GLM-4-0414 (`Glm4`) has norms after attention and MLP too.
"""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

GLM = register_policy(
    replace(LLAMA, layer_class="GlmDecoderLayer", gate="mlp.gate_up_proj", up="mlp.gate_up_proj", is_interleaved=True)
)

GLM4 = register_policy(
    replace(
        GLM,
        layer_class="Glm4DecoderLayer",
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
)
