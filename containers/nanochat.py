"""nanochat: norms without weights, one of them after the embedding; rotary by the negative angle; squared ReLU."""

from dataclasses import replace

from hybrid_engine.containers.llama import LLAMA
from hybrid_engine.containers.policy import register_policy

# Norms of query and key heads come after rotary embedding, which does not change the mean square of a head.
NANOCHAT = register_policy(
    replace(
        LLAMA,
        layer_class="NanoChatDecoderLayer",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
        is_backwards=True,
        gate=None,
        up="mlp.fc1",
        down="mlp.fc2",
        embedding_norm="norm",
        logit_softcap="final_logit_softcapping",
    )
)
