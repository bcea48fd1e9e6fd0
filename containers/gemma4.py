"""Gemma 4: kinds of layers with heads and rope of their own, shared keys and values, inputs of each layer, experts.

Against Gemma 3, with RMS norms of weight gamma instead of 1 + gamma:

- Full and sliding layers have head sizes and numbers of key/value heads of their own.
- Values are normed per head without weights. Where the config says so, full layers have no value projection: their
  values are the projected keys, before norm and rope.
- The last `num_kv_shared_layers` have no keys and values. They read those of the last layer of their kind before them.
- A layer's own input p_i [N, P] comes from the token and its embedding e [N, E]; i is the layer:

      p_i = (norm(W_i e / sqrt(E)) + sqrt(P) table_i[token]) / sqrt(2)

- The layer, where g is the gate of its own input and s its scalar:

      h = h + norm(attention(norm(h)))
      h = h + norm(mlp(norm(h)))            or  h + norm(norm(mlp(norm(h))) + norm(experts(norm(h))))  with experts
      h = h + norm(W (act(g h) * p_i));  h = s h

- The router sees h / rms(h) times a learned vector over sqrt(E); an expert's weight is multiplied by its own scale.

The layers pass on one tensor `[N, E + L P]`: the hidden state, and every layer's own input next to it.

N packed tokens, E hidden size, L layers, P size of a layer's own input, K key/value heads, D head dimension, X experts.
Source: transformers, models/gemma4/modeling_gemma4.py.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec
from hybrid_engine.containers.gemma import GEMMA3
from hybrid_engine.containers.layer import (
    Attention,
    DenseMLP,
    Heads,
    InferenceLayer,
    LayerMLP,
    LayerPart,
    RotaryRows,
)
from hybrid_engine.containers.moe import ExpertList, MoEBlock, MoEMLP, ParameterView
from hybrid_engine.containers.policy import (
    MoEPolicy,
    Policy,
    UnsupportedModelError,
    register_policy,
    submodule,
)
from hybrid_engine.containers.views import (
    ALONE,
    EmbeddingView,
    HeadNormsView,
    NormView,
    Ones,
    TensorParallel,
    TransposedLinear,
)
from hybrid_engine.ops import (
    QKV,
    Batch,
    EncoderBatch,
    HeadWeights,
    KVBlocks,
    VectorMatMulOp,
)
from hybrid_engine.ops.batch import read_stored
from hybrid_engine.ops.linears import ACTIVATIONS, activate_and_multiply
from hybrid_engine.ops.softmax_context import apply_rotary


@cache
def rounded(factor: float, dtype: torch.dtype) -> float:
    """`factor` rounded to `dtype`."""
    return torch.tensor(factor).to(dtype).item()


def source_layer(config: PretrainedConfig, index: int) -> int | None:
    """Index of the layer whose keys and values layer `index` reads; None: it has its own."""
    first_shared = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    if index < first_shared:
        return None
    kinds = config.layer_types
    alike = [place for place in range(first_shared) if kinds[place] == kinds[index]]
    if not alike:
        raise UnsupportedModelError(f"layer {index} shares the keys of {kinds[index]!r}, and no layer before has any")
    return alike[-1]


class SharedAttention(Attention):
    """Views and ops of one layer's attention, or of this rank's heads; keys and values may be another layer's.

    Heads are those of the module, because each kind of layer has its own.
    """

    norm: NormView
    q_norm: NormView
    k_norm: NormView | None
    alibi = None

    @classmethod
    def build(
        cls,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "SharedAttention":
        """See MixerPolicy."""
        return cls(policy, layer, config, index, norm, parallel)

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        """`norm` is applied before the projections."""
        assert norm is not None
        module = submodule(layer, "self_attn")
        num_heads, dim = config.num_attention_heads, int(module.head_dim)
        self.heads = heads = Heads(num_heads, num_heads // int(module.num_key_value_groups), dim, parallel)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.local
        self.norm, self.parallel = norm, parallel
        self.source = source_layer(config, index)
        width = self.num_kv_heads, self.head_dim
        self.cache_spec = LayerCacheSpec((width, width) if self.source is None else (), shared_with=self.source)
        self.layer, self.sinks_path, self.sinks, self.sizes = layer, None, None, []
        self.has_values = self.source is None and getattr(module, "v_proj", None) is not None
        columns = [heads.queries(), *([heads.keys()] if self.source is None else [])]
        columns += [heads.keys()] if self.has_values else []
        self.qkv = [
            TransposedLinear(submodule(layer, path), f"layer {index} {path}", parallel, columns=part)
            for path, part in zip(policy.qkv, columns, strict=False)
        ]
        self.output = TransposedLinear(
            submodule(layer, policy.attention_output), f"layer {index} output", parallel, rows=heads.queries()
        )
        self.q_norm = NormView(submodule(layer, str(policy.q_norm)), policy.norm, parallel)
        self.k_norm = (
            NormView(submodule(layer, str(policy.k_norm)), policy.norm, parallel) if self.source is None else None
        )
        ones = Ones(dim, self.output.module)
        self.value_norm = NormView(module.v_norm, policy.norm, parallel, ones) if self.source is None else None
        self.is_norm_in_op = self.source is None
        self._build_ops(policy, config, index)

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """The norms of queries, keys and values."""
        return [norm for norm in (self.q_norm, self.k_norm, self.value_norm) if norm]

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden [N, E]` -> the output `[N, E]`, plus `residual` if it is passed, and the normed input."""
        assert not isinstance(batch, EncoderBatch)
        if self.k_norm and self.value_norm:
            (q, k, v), normed = self._project(hidden)
            weights = HeadWeights(q_gamma=self.q_norm.gamma, k_gamma=self.k_norm.gamma)
            context = self.softmax_context(QKV(q, k, self.value_norm.apply(v), rotary), cache.kv, batch, weights)
        else:
            normed = self.norm.apply(hidden)
            context = self._attend_stored(self.vector_matmul(normed, *self.qkv[0].pair), rotary, cache.kv, batch)
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed

    def _project(self, hidden: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Queries `[N, K, G, D]`, keys and values `[N, K, D]`, and the normed input."""
        if self.has_values:
            weights, biases = zip(*(linear.pair for linear in self.qkv), strict=True)
            return self.qkv_gemm(hidden, weights, biases, self.norm.gamma, self.norm.beta)
        normed = self.norm.apply(hidden)
        q, k = (self.vector_matmul(normed, *linear.pair) for linear in self.qkv)
        shape = (len(normed), self.num_kv_heads, -1, self.head_dim)
        keys = k.reshape(shape)[:, :, 0]
        return (q.reshape(shape), keys, keys), normed

    def _attend_stored(self, q: torch.Tensor, rotary: RotaryRows | None, cache: KVBlocks, batch: Batch) -> torch.Tensor:
        """Attention of `q [N, H D]` to what the source layer has written in this pass and before.

        The op writes the tokens' keys and values where they are read from, and so changes nothing.
        """
        keys, values = read_stored(cache, batch)
        num_tokens, num_rows = len(keys), len(q)
        q = self.q_norm.apply(q[:num_tokens].reshape(num_tokens, self.num_heads, self.head_dim))
        if rotary is not None:
            q = apply_rotary(q, *rotary)
        q = q.view(num_tokens, self.num_kv_heads, -1, self.head_dim)
        context = self.softmax_context(QKV(q, keys, values), cache, batch)
        return context if num_tokens == num_rows else functional.pad(context, (0, 0, 0, num_rows - num_tokens))


class RoutedExperts(MoEBlock):
    """The experts, with a router that norms its own input and scales the experts it chooses."""

    def __init__(
        self, policy: MoEPolicy, layer: nn.Module, config: PretrainedConfig, name: str, parallel: TensorParallel = ALONE
    ):
        super().__init__(policy, layer, config, name, parallel)
        self.router_module = module = submodule(layer, "router")
        self.router_norm = NormView(module.norm, "rms_fp32", parallel, Ones(config.hidden_size, module.proj))
        self.input_factor = config.hidden_size**-0.5
        self.input_scale = self.expert_scale = torch.empty(0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the router other than its linear."""
        return [self.router_norm.gamma, self.input_scale, self.expert_scale]

    def bind(self) -> None:
        """See MoEBlock."""
        super().bind()
        self.input_scale = self.parallel.take(self.router_module.scale, None, f"{self.name} router.scale")
        self.expert_scale = self.parallel.take(self.router_module.per_expert_scale, None, f"{self.name} expert scales")
        self.router_norm.bind()

    def forward_routed(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """`hidden`, which the router norms, and `normed` for the experts, `[N, E]` each -> the output `[N, E]`."""
        routing = self.route(self.router_norm.apply(hidden) * self.input_scale * self.input_factor)
        weights = routing.weights * self.expert_scale[routing.experts]
        return self.run_experts(normed, routing._replace(weights=weights))


class MLPAndExperts(MoEMLP):
    """A LayerMLP of a dense MLP and experts on the same input, each with a norm before it and one after it."""

    block: RoutedExperts

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        """`norm` is applied before the dense MLP."""
        self.dense = DenseMLP(policy, layer, config, index, norm, parallel)
        assert policy.moe
        self.block = RoutedExperts(policy.moe, layer, config, f"layer {index}", parallel)
        self.sizes = [*self.dense.sizes, *self.block.sizes]
        paths = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        self.norms = [NormView(submodule(layer, path), policy.norm, parallel) for path in paths]

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMLP."""
        return [*self.dense.linears, *super().linears]

    @property
    def adaptable(self) -> list[TransposedLinear | ParameterView | ExpertList]:
        """See LayerMLP."""
        return [*self.dense.adaptable, *super().adaptable]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMLP."""
        return [*super().tensors, *self.block.tensors, *(norm.gamma for norm in self.norms)]

    def bind(self) -> None:
        """See LayerMLP."""
        self.dense.bind()
        self.block.bind()
        for norm in self.norms:
            norm.bind()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """See LayerMLP."""
        after_dense, before_experts, after_experts = self.norms
        output = after_dense.apply(self.dense.forward(input, is_added=False))
        routed = self.block.forward_routed(input, before_experts.apply(input))
        output = output + after_experts.apply(routed)
        return input + output if is_added else output


class OwnInput(LayerPart):
    """A LayerPart: what a layer adds of its own input, `norm(W (act(g h) * p))`, the same on every rank."""

    def __init__(
        self, policy: Policy, layer: nn.Module, config: PretrainedConfig, index: int, parallel: TensorParallel
    ):
        paths = ("per_layer_input_gate", "per_layer_projection")
        self.linears = [TransposedLinear(submodule(layer, path), f"layer {index} {path}", parallel) for path in paths]
        self.norms = [NormView(submodule(layer, "post_per_layer_input_norm"), policy.norm, parallel)]
        self.activation, self.vector_matmul = getattr(config, policy.activation), VectorMatMulOp()
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {self.activation!r}; known are {', '.join(ACTIVATIONS)}")

    def forward(self, hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """`hidden [N, E]`, `own [N, P]` -> `[N, E]`."""
        gate, projection = self.linears
        inner = activate_and_multiply(self.vector_matmul(hidden, *gate.pair), own, self.activation)
        return self.norms[0].apply(self.vector_matmul(inner, *projection.pair))


class OwnInputs:
    """Every layer's own input, from the tokens and their embeddings: the additional columns of the stream."""

    def __init__(
        self,
        policy: Policy,
        decoder: nn.Module,
        config: PretrainedConfig,
        parallel: TensorParallel,
        rounds: bool = False,
    ):
        """`rounds`: whether factors are rounded to the dtype of the weights."""
        self.rounds, self.size = rounds, config.hidden_size_per_layer_input
        self.width = config.num_hidden_layers * self.size
        self.table = EmbeddingView(submodule(decoder, "embed_tokens_per_layer"), parallel, is_cut=True)
        path = "per_layer_model_projection"
        self.projection = TransposedLinear(submodule(decoder, path), path, parallel)
        self.norm = NormView(submodule(decoder, "per_layer_projection_norm"), policy.norm, parallel)
        self.factors = config.hidden_size**-0.5, 2.0**-0.5
        self.vector_matmul = VectorMatMulOp()

    def forward(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`tokens [N]`, `embedded [N, E]` -> `[N, L P]`."""
        before, after = (rounded(x, embedded.dtype) if self.rounds else x for x in self.factors)
        context = self.vector_matmul(embedded, *self.projection.pair) * before
        context = self.norm.apply(context.reshape(-1, self.size)).view(len(tokens), -1)
        return (context + self.table.look_up(tokens)) * after


class Gemma4Stream:
    """A LayerStream: the hidden state, and the layers' own inputs next to it."""

    def __init__(self, policy: Policy, base: Any, decoder: nn.Module, parallel: TensorParallel):
        config = base.config.get_text_config()
        self.inputs, self.hidden_size = OwnInputs(policy, decoder, config, parallel), config.hidden_size
        self.width = self.hidden_size + self.inputs.width

    @staticmethod
    def is_in(config: PretrainedConfig) -> bool:
        """Whether layers have an input of their own."""
        return bool(config.hidden_size_per_layer_input)

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerStream."""
        return [self.inputs.projection]

    @property
    def views(self) -> list[NormView | EmbeddingView]:
        """See LayerStream."""
        return [self.inputs.norm, self.inputs.table]

    def enter(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """See LayerStream."""
        return torch.cat((embedded, self.inputs.forward(tokens, embedded)), 1)

    def leave(self, stream: torch.Tensor) -> torch.Tensor:
        """See LayerStream."""
        return stream[:, : self.hidden_size]


class Gemma4Layer(InferenceLayer):
    """A decoder layer of Gemma 4 on views."""

    def __init__(
        self, policy: Policy, layer: nn.Module, config: PretrainedConfig, index: int, parallel: TensorParallel = ALONE
    ):
        if getattr(config, "use_bidirectional_attention", None) == "all":
            raise UnsupportedModelError("use_bidirectional_attention='all': tokens see those after them")
        super().__init__(policy, layer, config, index, parallel)
        self.width, size = config.hidden_size, config.hidden_size_per_layer_input or 0
        self.own_columns = slice(self.width + index * size, self.width + (index + 1) * size)
        self.own_input = OwnInput(policy, layer, config, index, parallel) if size else None
        self.parts = [self.own_input] if self.own_input else []
        self.parallel, self.scalar = parallel, layer.layer_scalar

    def build_mlp(self, config: PretrainedConfig, norm: NormView | None, parallel: TensorParallel) -> LayerMLP:
        """See InferenceLayer."""
        assert self.policy.moe
        build = MLPAndExperts if MLPAndExperts.is_in(self.policy.moe, self.module) else DenseMLP
        return build(self.policy, self.module, config, self.index, norm, parallel)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See InferenceLayer."""
        return [*super().tensors, self.scalar]

    def bind(self) -> None:
        """See InferenceLayer."""
        super().bind()
        self.scalar = self.parallel.take(self.module.layer_scalar, None, f"layer {self.index} layer_scalar")

    def run(
        self, hidden: torch.Tensor, rotary: RotaryRows | None, cache: LayerCache, batch: Batch | EncoderBatch
    ) -> torch.Tensor:
        """`hidden [N, E + L P]`, whose first E columns this changes, or `[N, E]` without own inputs."""
        assert self.attention_post_norm and self.mlp_post_norm
        stream, hidden = hidden, hidden[:, : self.width]
        attention, _ = self.mixer.forward(hidden, rotary, cache, batch, residual=None)
        hidden = hidden + self.attention_post_norm.apply(attention)
        hidden = hidden + self.mlp_post_norm.apply(self.mlp.forward(hidden, is_added=False))
        if self.own_input is None:
            return hidden * self.scalar
        hidden = hidden + self.own_input.forward(hidden, stream[:, self.own_columns])
        stream[:, : self.width] = hidden * self.scalar
        return stream


GEMMA4 = register_policy(
    replace(
        GEMMA3,
        layer_class="Gemma4TextDecoderLayer",
        norm="rms_fp32",
        layer=Gemma4Layer,
        stream=Gemma4Stream,
        mixers={None: SharedAttention},
        padded_tokens=("image_token_id", "video_token_id", "audio_token_id"),
        moe=MoEPolicy(
            router="router.proj",
            experts="experts",
            fp32_weights=True,
            top_k="top_k_experts",
            activation="hidden_activation",
        ),
    )
)
