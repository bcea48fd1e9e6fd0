"""The inference layer that all families share: attention and MLP on the residual stream, with norms around them.

A layer holds views of the parameters of one decoder layer, found through its policy, and the ops built from the layer's
numbers. N packed tokens, E hidden size.
"""

from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.attention import Attention, layer_kind, read_heads
from hybrid_engine.containers.linear import TransposedLinear
from hybrid_engine.containers.mlp import DenseMLP, MoEMLP
from hybrid_engine.containers.policy import Policy
from hybrid_engine.containers.tensor_parallel import ALONE, TensorParallel, check_divides
from hybrid_engine.containers.views import HeadNormsView, NormView, config_value, submodule
from hybrid_engine.ops import Batch, EncoderBatch, KVBlocks

RotaryRows = tuple[torch.Tensor, torch.Tensor]


class InferenceLayer:
    """One decoder layer on views. `forward` neither reads nor changes the module's mode or hooks."""

    def __init__(self, policy: Policy, layer: nn.Module, config: Any, index: int, parallel: TensorParallel = ALONE):
        """Raises ValueError if the ranks cannot share heads or MLP equally."""
        self.index, self.policy, self.module = index, policy, layer
        self.kind = layer_kind(policy, config, index)
        self.has_rope = policy.rope_layers is None or bool(config_value(config, policy.rope_layers)[index])

        def norm(path: str | None) -> NormView | None:
            return NormView(submodule(layer, path), policy.norm, parallel) if path else None

        self.attention_norm, self.mlp_norm = norm(policy.attention_norm), norm(policy.mlp_norm)
        self.attention_post_norm, self.mlp_post_norm = norm(policy.attention_post_norm), norm(policy.mlp_post_norm)
        # Post-norm blocks apply their norms after the sum, not before the projections.
        in_front = policy.block != "post_norm"
        heads = read_heads(policy, config, parallel)
        self.attention = Attention(policy, layer, config, index, self.attention_norm if in_front else None, heads)
        mlp = MoEMLP if policy.moe and MoEMLP.is_in(policy.moe, layer) else DenseMLP
        self.mlp: MoEMLP | DenseMLP = mlp(policy, layer, config, index, self.mlp_norm if in_front else None, parallel)
        check_divides(heads, self.mlp.sizes)

        self._first_norm = next(norm for norm in (self.attention_norm, self.attention_post_norm) if norm)

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """All norms of the layer."""
        own = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return [*(norm for norm in own if norm), *self.attention.norms]

    @property
    def linears(self) -> list[TransposedLinear]:
        """All linears of the layer, including those of experts."""
        return [*self.attention.linears, *self.mlp.linears]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that a forward pass reads, as they are bound now."""
        linears = [tensor for linear in self.linears for tensor in linear.pair if tensor is not None]
        norms = [tensor for norm in self.norms for tensor in norm.tensors]
        return [*linears, *norms, *self.attention.tensors, *self.mlp.tensors]

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused."""
        for norm in self.norms:
            norm.bind()
        self.attention.bind()
        self.mlp.bind()

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fuse_lora` will take."""
        return sum(part.buffer_bytes for part in (*self.attention.linears, *self.mlp.adaptable))

    def fuse_lora(self, lender: "InferenceLayer | None" = None) -> int:
        """Dequantizes and fuses the weights that need it; returns the bytes of the buffers.

        With a `lender`, which may be this layer, linears use the buffers of its linears of the same shape and leave the
        memory allocated: no other layer may be fused in them meanwhile.
        """
        parts = (*self.attention.linears, *self.mlp.adaptable)
        if lender is None:
            return sum(part.fuse_lora() for part in parts)
        others = (*lender.attention.linears, *lender.mlp.adaptable)[: len(parts)]
        num_bytes = 0
        for part, other in zip_longest(parts, others):
            fits = isinstance(part, TransposedLinear) and isinstance(other, TransposedLinear) and part.is_like(other)
            num_bytes += part.fuse_lora(other) if fits else part.fuse_lora()
        return num_bytes

    def unfuse_lora(self, keeps_lent: bool = False) -> None:
        """Restores the parameters themselves; with `keeps_lent`, the lender's buffers stay allocated."""
        for part in (*self.attention.linears, *self.mlp.adaptable):
            if isinstance(part, TransposedLinear):
                part.unfuse_lora(keeps_lent)
            else:
                part.unfuse_lora()

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: KVBlocks,
        batch: Batch | EncoderBatch,
    ) -> torch.Tensor:
        """`hidden [N, E]` -> `[N, E]`; writes keys and values into this layer's blocks, except for an encoder.

        Raises:
            RuntimeError: the weights were gathered when they were bound and no longer are.
        """
        # A norm is never fused into a buffer of its own, as a linear may be, so its storage shows whether it is
        # gathered.
        if self._first_norm.gamma.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"layer {self.index} reads weights that are not gathered; gather them around the rollout"
            )
        added = None if self.attention_post_norm else hidden
        attention, normed = self.attention.forward(hidden, rotary, cache, batch, residual=added)
        if self.policy.block == "parallel":
            return attention + self.mlp.forward(hidden if self.mlp_norm else normed, is_added=False)
        if self.policy.block == "post_norm":
            assert self.attention_norm and self.mlp_norm
            stream = self.attention_norm.apply(attention)
            return self.mlp_norm.apply(self.mlp.forward(stream, is_added=True))
        stream = hidden + self.attention_post_norm.apply(attention) if self.attention_post_norm else attention
        if self.mlp_post_norm:
            return stream + self.mlp_post_norm.apply(self.mlp.forward(stream, is_added=False))
        return self.mlp.forward(stream, is_added=True)
