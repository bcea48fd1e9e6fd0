"""Latent attention (`ops/latent_attention.py`) on views of one layer's parameters.

The layer's linears compute a query for each head, through a narrower vector with a norm or without, and one latent and
one rotary key for all heads. The latent is normed before it is kept. Ranks share the heads; the latents of all tokens
are on every rank, because every head reads them.

N packed tokens, E hidden size, H heads, L latent dimension, R rotary dimension, Dk dimension of the keys' other part,
Dv of values.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec
from hybrid_engine.containers.layer import Heads, RotaryRows
from hybrid_engine.containers.policy import (
    Policy,
    UnsupportedModelError,
    attribute,
    config_value,
    has_module,
    submodule,
)
from hybrid_engine.containers.views import HeadNormsView, NormView, TensorParallel, TransposedLinear
from hybrid_engine.ops import (
    Batch,
    EncoderBatch,
    Expansion,
    LatentAttentionOp,
    LatentHeads,
    VectorMatMulOp,
)


@dataclass(frozen=True, kw_only=True)
class LatentPolicy:
    """Policy of latent attention; paths are attributes of the layer, sizes are read from the config."""

    query: str = "self_attn.q_proj"
    # Query projection, in layers without the next three.
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    # The two linears of a query and the norm between them.
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    # Projection into the latent and the rotary key.
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    # Expansion of the latent into keys and values, by head.
    output: str = "self_attn.o_proj"
    # Projection of the context.
    scale: str = "self_attn.scaling"
    # Attribute of the layer with the factor of q.k.
    position_scaling: str | None = None
    # Key of the config's `rope_parameters` with beta: queries at position p are multiplied by
    # 1 + beta log(1 + floor(p / original_max_position_embeddings)).

    def build(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "LatentAttention":
        """See MixerPolicy."""
        return LatentAttention(self, policy, layer, config, index, norm, parallel)


@dataclass(frozen=True)
class PositionScaling:
    """Factors of queries that grow with the position: 1 + beta log(1 + floor(p / length)).

    Source: Llama 4's temperature of attention, as transformers' mistral4 has it.
    """

    beta: float
    length: int

    def apply(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`queries [N, ...]`, of which the first `len(positions)` rows are multiplied, the others padding."""
        factors = 1 + self.beta * torch.log(1 + torch.floor(positions / self.length))
        factors = functional.pad(factors, (0, len(queries) - len(factors)), value=1.0).to(queries.dtype)
        return queries * factors.view(-1, *(1,) * (queries.dim() - 1))


class LatentAttention:
    """A LayerMixer: attention over latents, or that of this rank's heads."""

    def __init__(
        self,
        latent_policy: LatentPolicy,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        key_dim, rotary_dim, value_dim, latent_dim = (config_value(config, name) for name in names)
        num_heads = config.num_attention_heads
        self.norm, self.parallel, self.latent_dim, self.rotary_dim = norm, parallel, latent_dim, rotary_dim
        self.heads = Heads(num_heads, num_heads, key_dim + rotary_dim, parallel)
        self.sizes: list[int] = []  # the heads say all
        self.cache_spec = LayerCacheSpec(kv=((1, rotary_dim + latent_dim),))

        def linear(path: str, column_dim: int = 0, row_dim: int = 0) -> TransposedLinear:
            columns, rows = (parallel.even(num_heads * dim) if dim else None for dim in (column_dim, row_dim))
            return TransposedLinear(submodule(layer, path), f"layer {index} {path}", parallel, columns, rows)

        self.query_down: TransposedLinear | None = None
        self.query_norm: NormView | None = None
        path = latent_policy.query
        if has_module(layer, latent_policy.query_down):
            self.query_down = linear(latent_policy.query_down)
            self.query_norm = NormView(submodule(layer, latent_policy.query_norm), policy.norm, parallel)
            path = latent_policy.query_up
        self.query = linear(path, column_dim=self.heads.head_dim)
        self.latent_down = linear(latent_policy.latent_down)
        self.latent_norm = NormView(submodule(layer, latent_policy.latent_norm), policy.norm, parallel)
        self.latent_up = linear(latent_policy.latent_up, column_dim=key_dim + value_dim)
        self.output = linear(latent_policy.output, row_dim=value_dim)
        self._check_sizes(rotary_dim, key_dim + value_dim, value_dim)
        self.scaling = _position_scaling(latent_policy, config)
        self.attention = LatentAttentionOp(
            self.heads.local[0], latent_dim, rotary_dim, key_dim, value_dim,
            float(attribute(layer, latent_policy.scale)), policy.is_interleaved,
        )  # fmt: skip
        self.vector_matmul = VectorMatMulOp()

    def _check_sizes(self, rotary_dim: int, expanded_dim: int, value_dim: int) -> None:
        num_heads = self.heads.num_heads
        for linear, size, expected in (
            (self.query, self.query.num_outputs, num_heads * self.heads.head_dim),
            (self.latent_down, self.latent_down.num_outputs, self.latent_dim + rotary_dim),
            (self.latent_up, self.latent_up.num_outputs, num_heads * expanded_dim),
            (self.output, self.output.num_inputs, num_heads * value_dim),
        ):
            if size != expected:
                raise UnsupportedModelError(f"{linear.name} has a size of {size}; the config's sizes give {expected}")

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        query_down = [self.query_down] if self.query_down else []
        return [*query_down, self.query, self.latent_down, self.latent_up, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return [norm for norm in (self.query_norm, self.latent_norm) if norm]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return []

    def bind(self) -> None:
        """See LayerMixer."""
        for part in (*self.linears, *self.norms):
            part.bind()

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerMixer."""
        assert isinstance(cache.blocks, torch.Tensor) and not isinstance(batch, EncoderBatch)
        normed = self.norm.apply(hidden) if self.norm else hidden
        if rotary is None:  # a rotation by 0: the family has no rope
            shape = len(batch.tokens), self.rotary_dim
            rotary = normed.new_ones(shape), normed.new_zeros(shape)
        queries = self._queries(normed, batch)
        fused = self.vector_matmul(normed, *self.latent_down.pair)
        latent = self.latent_norm.apply(fused[:, : self.latent_dim])
        heads = LatentHeads(queries, fused[:, self.latent_dim :], latent, rotary)
        context = self.attention(heads, cache.blocks, batch, Expansion(*self.latent_up.pair))
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed

    def _queries(self, normed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """`[N, E]` -> `[N, H, Dk + R]`."""
        narrow = normed
        if self.query_down and self.query_norm:
            narrow = self.query_norm.apply(self.vector_matmul(normed, *self.query_down.pair))
        queries = self.vector_matmul(narrow, *self.query.pair).unflatten(1, (-1, self.heads.head_dim))
        return self.scaling.apply(queries, batch.positions) if self.scaling else queries


def _position_scaling(policy: LatentPolicy, config: PretrainedConfig) -> PositionScaling | None:
    if policy.position_scaling is None:
        return None
    parameters = config.rope_parameters
    return PositionScaling(parameters[policy.position_scaling], parameters["original_max_position_embeddings"])
