"""About how many bytes a pass takes, by which passes are compared; the largest are then counted on shapes.

E hidden size, I size of the MLP, L layers, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from hybrid_engine.ops.linear_log_prob import piece_bytes
from hybrid_engine.rlhf.data.packable import supports_attention_backend
from hybrid_engine.rlhf.data.pass_shapes import Extent
from hybrid_engine.rlhf.runs.precision import torch_dtype


def estimate_of(model: PretrainedConfig, config: Any, device: str) -> Callable[[Extent], float]:
    """The bytes of a pass of a causal model, given its extent.

    Some 8 E + 4 I values are kept of a token in a layer: what its two norms, four projections, attention and MLP read
    and make. Layers that are computed again keep E, and one of them at a time the rest.

    Args:
        model: its config.
        config: of the recipe.
        device: its type.
    """
    text, value = model.get_text_config(), torch_dtype(config.dtype, device).itemsize
    hidden, layers = text.hidden_size, text.num_hidden_layers
    mlp = (getattr(text, "moe_intermediate_size", 0) or 0) * (getattr(text, "num_experts_per_tok", 0) or 0)
    mlp = mlp or getattr(text, "intermediate_size", 0) or 4 * hidden
    heads = getattr(text, "num_attention_heads", 0) or 1
    width = getattr(text, "head_dim", 0) or hidden // heads
    of_layer, copied = 8 * hidden + 4 * mlp, 2 * width * (getattr(text, "num_key_value_heads", 0) or heads)
    whole = 1 if config.activation_checkpointing else layers
    per_cell = value * (whole * of_layer + (layers - whole) * hidden)
    # Attention of its own, as with ALiBi, keeps scores, their softmax and what dropout makes of it.
    is_plain = supports_attention_backend(model)
    per_pair = value if is_plain else value * whole * heads * 3
    of_head = not config.lora_rank, device, getattr(text, "final_logit_softcapping", None) is not None

    def estimate(extent: Extent) -> float:
        pieces = piece_bytes(extent.responses, hidden, text.vocab_size, *of_head)
        head = pieces.kept + pieces.tile + value * extent.responses * hidden
        return extent.cells * per_cell + value * whole * extent.copied * copied + extent.pairs * per_pair + head

    return estimate
