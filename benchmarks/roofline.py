"""The least time a rollout can take on a machine with given ceilings: bytes and flops counted from shapes and lengths.

Counted are the weights, read once per pass, and keys and values, read once per row and pass; and the
multiplications and additions of matrix products and attention. All rows run at once, each prompt is
prefilled once, rows that have ended cost nothing, activations and the sampler are free. Weights that fit
the processor's cache can be read faster than memory is copied: shares of bandwidth may then exceed 1.

B prompts, P prompt length, L layers, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass

from common import Ceilings
from transformers import PreTrainedModel

from hybrid_engine.zero.wrapping import find_layers


@dataclass(frozen=True)
class Pass:
    """One pass over the layers."""

    num_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """Under the roof: bound by memory or by arithmetic, whichever takes longer."""
        return max(self.num_bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


@dataclass(frozen=True)
class ModelCounts:
    """What the passes of a model are counted from."""

    layers: int
    """Weights of the layers' matrices."""
    head: int
    """Weights of the LM head."""
    vocab: int
    element: int
    """Bytes of a value."""
    kv_bytes: int
    """Bytes of the keys and values of one token."""
    attention: int
    """Operations for one query and one key in all layers and heads: a product for the score, one for the value."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelCounts":
        """Counts those of a causal language model."""
        config, head = model.config, model.get_output_embeddings().weight
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=sum(p.numel() for layer in find_layers(model) for p in layer.parameters() if p.dim() == 2),
            head=head.numel(),
            vocab=len(head),
            element=model.dtype.itemsize,
            kv_bytes=2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize,
            attention=4 * config.num_hidden_layers * heads * head_dim,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a pass reads."""
        return (self.layers + self.head) * self.element


def rollout_passes(model: PreTrainedModel, num_prompts: int, prompt_tokens: int, lengths: list[int]) -> list[Pass]:
    """The prefill of B prompts, then one decode pass per further token of the answers `lengths [B*G]`."""
    counts = ModelCounts.of(model)
    causal_pairs = prompt_tokens * (prompt_tokens + 1) / 2
    prefill = Pass(
        counts.weight_bytes + num_prompts * prompt_tokens * counts.kv_bytes,
        num_prompts * (prompt_tokens * 2 * counts.layers + 2 * counts.head + causal_pairs * counts.attention),
    )
    passes = [prefill]
    for generated in range(1, max(lengths)):
        rows = sum(length > generated for length in lengths)
        context = prompt_tokens + generated
        passes.append(
            Pass(
                counts.weight_bytes + rows * context * counts.kv_bytes,
                rows * (2 * (counts.layers + counts.head) + context * counts.attention),
            )
        )
    return passes
