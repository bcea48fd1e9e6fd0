"""GLM-4-9B: Llama's layer with one linear for gate and up, and rotary on adjacent pairs of half the dimensions.

GLM-4-0414 (`Glm4`) has norms after attention and MLP too. GLM-4.5 to 4.7 (`Glm4Moe`) have rotary on halves, the experts
of DeepSeek-V3 after the first layers, and optional norms of query and key heads.
"""

from dataclasses import replace

from hybrid_engine.containers.deepseek import DEEPSEEK_V3_MOE
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

GLM4_MOE = register_policy(
    replace(LLAMA, layer_class="Glm4MoeDecoderLayer", moe=DEEPSEEK_V3_MOE, required={"use_qk_norm": False})
)

GLM4_MOE_HEAD_NORMS = register_policy(
    replace(GLM4_MOE, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", required={"use_qk_norm": True})
)
