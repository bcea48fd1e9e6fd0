"""Bamba and Granite 4: state spaces of Mamba-2 in most layers, attention in the others.

Bamba's attention has partial rotary embedding, Granite 4's has none, or all of it. Granite 4 has Granite's factors, and
an MLP in each layer that is the expert which sees every token where there are experts.
"""

from dataclasses import replace

from hybrid_engine.containers.granite import GRANITE
from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import MoEPolicy, register_policy
from hybrid_engine.containers.state_space import StateSpacePolicy

BAMBA = register_policy(
    replace(
        LLAMA,
        layer_class="BambaDecoderLayer",
        mixers={"linear_attention": StateSpacePolicy()},
        layer_kinds="layers_block_type",
        mlp_norm="pre_ff_layernorm",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        final_norm="final_layernorm",
    )
)

GRANITE_HYBRID = register_policy(
    replace(
        GRANITE,
        layer_class="GraniteMoeHybridDecoderLayer",
        mixers={"linear_attention": StateSpacePolicy()},
        gate="shared_mlp.input_linear",
        up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        rotary=None,
        moe=MoEPolicy(
            router="block_sparse_moe.router",
            scoring="topk_then_softmax",
            experts="block_sparse_moe.experts",
            shared=("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
        ),
    )
)

GRANITE_HYBRID_ROPE = register_policy(
    replace(GRANITE_HYBRID, rotary="rotary_emb", required={"position_embedding_type": "rope"})
)
