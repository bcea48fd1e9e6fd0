"""The text of Llama 4: attention in chunks with rotary embedding, or to all tokens without it; experts in some layers.

Layers with rotary embedding norm queries and keys after it, without weights, where the config says so. In the others
the temperature of attention falls with the position, which transformers counts from the first column of a padded
batch; here it is counted from a sequence's first token. An expert's input is multiplied by its weight, the sigmoid of
its logit. Source: transformers, models/llama4/modeling_llama4.py.
"""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, TemperaturePolicy, register_policy

LLAMA4 = register_policy(
    replace(
        LLAMA,
        layer_class="Llama4TextDecoderLayer",
        chunk="attention_chunk_size",
        is_interleaved=True,
        rope_layers="no_rope_layers",
        temperature=TemperaturePolicy(
            strength="attn_scale", length="floor_scale", offset=1, switch="attn_temperature_tuning", has_rope=False
        ),
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        moe=MoEPolicy(
            router="feed_forward.router",
            scoring="sigmoid_then_topk",
            normalizes=False,
            scales_input=True,
            experts="feed_forward.experts",
            is_stored_transposed=True,
            shared=(
                "feed_forward.shared_expert.gate_proj",
                "feed_forward.shared_expert.up_proj",
                "feed_forward.shared_expert.down_proj",
            ),
        ),
        required={"use_qk_norm": False},
    )
)

LLAMA4_NORMED = register_policy(
    replace(
        LLAMA4,
        q_norm="self_attn.qk_norm",
        k_norm="self_attn.qk_norm",
        is_qk_norm_last=True,
        norms_rotated_heads=True,
        required={"use_qk_norm": True},
    )
)
