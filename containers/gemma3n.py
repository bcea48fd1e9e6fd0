"""Gemma 3n: several streams of which a layer computes one, a low-rank path next to attention, sparse activations.

Against Gemma 4, whose shared keys and values, value norms and layers' own inputs it has:

- AltUp (Baykal et al. 2023, arXiv 2301.13310): A hidden states x_1 ... x_A. With r(x) = tanh(R norm(x) / E) a layer
  predicts all of them, computes on the active one, and corrects all by what came out:

      y_i = x_i + sum_j P(r(x_a))_ij x_j
      x_i = y_i + (1 + C(r(z))_i) (z - y_a)             z: the layer's output for y_a
      x_i = x_i + norm(W (act(g (s x_a)) * p))          for all i but the first; s: a learned vector

  They begin as projections of the embedding with its root mean square, and end as their mean, projected likewise.
- Laurel: with n = norm(y_a), attention's residual is (y_a + norm(attention(n)) + n + norm(R L n)) / sqrt(2).
- Some layers keep only the gates above their mean plus a number of standard deviations: relu(gate - cutoff).

The layers pass on one tensor `[N, A E + L P]`: the A hidden states, and every layer's own input next to them.

N packed tokens, A streams, E hidden size, L layers, P size of a layer's own input, I MLP size.
Source: transformers, models/gemma3n/modeling_gemma3n.py.
"""

import math
import sys
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache
from hybrid_engine.containers.gemma4 import GEMMA4, OwnInput, OwnInputs, rounded
from hybrid_engine.containers.layer import DenseMLP, InferenceLayer, LayerMLP, LayerPart, RotaryRows
from hybrid_engine.containers.policy import Policy, register_policy, submodule
from hybrid_engine.containers.views import ALONE, EmbeddingView, NormView, Ones, TensorParallel, TransposedLinear
from hybrid_engine.ops import Batch, EncoderBatch, VectorMatMulOp
from hybrid_engine.ops.linears import activate_and_multiply


class AltUp(LayerPart):
    """A LayerPart: prediction and correction of the streams, the same on every rank."""

    def __init__(
        self, policy: Policy, layer: nn.Module, config: PretrainedConfig, index: int, parallel: TensorParallel
    ):
        self.module, self.name, self.parallel = submodule(layer, "altup"), f"layer {index} altup", parallel
        paths = ("modality_router", "prediction_coefs", "correction_coefs")
        self.linears = [
            TransposedLinear(submodule(self.module, path), f"{self.name}.{path}", parallel) for path in paths
        ]
        self.norms = [NormView(submodule(self.module, "router_norm"), policy.norm, parallel)]
        self.active, self.factor = config.altup_active_idx, 1.0 / config.hidden_size
        self.has_scale = config.altup_correct_scale
        self.scale = torch.empty(0)
        self.vector_matmul = VectorMatMulOp()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerPart."""
        return [self.scale]

    def bind(self) -> None:
        """See LayerPart."""
        super().bind()
        self.scale = self.parallel.take(self.module.correct_output_scale, None, f"{self.name}.correct_output_scale")

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """`[N, A, E]` -> the prediction of each stream, `[N, A, E]`."""
        coefficients = self._coefficients(streams[:, self.active], self.linears[1])
        return torch.bmm(coefficients.unflatten(1, streams.shape[1:2] * 2), streams) + streams

    def correct(self, predictions: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """`predictions [N, A, E]` and the layer's `output [N, E]` for the active one -> `[N, A, E]`."""
        coefficients = self._coefficients(output, self.linears[2]) + 1.0
        innovation = output - predictions[:, self.active]
        return innovation[:, None] * coefficients[:, :, None] + predictions

    def scaled(self, streams: torch.Tensor) -> torch.Tensor:
        """The active stream of `[N, A, E]` times the learned vector, if the layer has one: `[N, E]`."""
        active = streams[:, self.active]
        return active * self.scale if self.has_scale else active

    def _coefficients(self, hidden: torch.Tensor, linear: TransposedLinear) -> torch.Tensor:
        router_input = self.norms[0].apply(hidden) * rounded(self.factor, hidden.dtype)
        routed = self.vector_matmul(router_input, *self.linears[0].pair)
        return self.vector_matmul(torch.tanh(routed.float()).to(hidden.dtype), *linear.pair)


class Laurel(LayerPart):
    """A LayerPart: the low-rank path next to attention, `n + norm(R L n)`, the same on every rank."""

    def __init__(self, policy: Policy, layer: nn.Module, index: int, parallel: TensorParallel):
        paths = ("laurel.linear_left", "laurel.linear_right")
        self.linears = [TransposedLinear(submodule(layer, path), f"layer {index} {path}", parallel) for path in paths]
        self.norms = [NormView(submodule(layer, "laurel.post_laurel_norm"), policy.norm, parallel)]
        self.vector_matmul = VectorMatMulOp()

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """`[N, E]` -> `[N, E]`."""
        left, right = self.linears
        inner = self.vector_matmul(normed, *left.pair)
        return normed + self.norms[0].apply(self.vector_matmul(inner, *right.pair))


class SparseMLP(DenseMLP):
    """A gated MLP that keeps the gates above a cutoff, that of a normal distribution with their mean and variance.

    The statistics are over all I gates of a token, so ranks that hold parts of them gather the gates.
    """

    def __init__(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel = ALONE,
    ):
        super().__init__(policy, layer, config, index, norm, parallel)
        self.num_deviations = NormalDist().inv_cdf(config.activation_sparsity_pattern[index])
        self.activation = getattr(config, policy.activation)
        self.vector_matmul = VectorMatMulOp()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """See LayerMLP."""
        assert self.norm is not None and self.gate is not None
        normed = self.norm.apply(input)
        gate, up = (self.vector_matmul(normed, *linear.pair) for linear in (self.gate, self.up))
        inner = activate_and_multiply(self._keep_largest(gate), up, self.activation)
        output = self.parallel.all_reduce(self.vector_matmul(inner, *self.down.pair))
        return input + output if is_added else output

    def _keep_largest(self, gate: torch.Tensor) -> torch.Tensor:
        everything = self.parallel.all_gather(gate.contiguous())
        deviation = everything.std(-1, keepdim=True, unbiased=False)
        cutoff = everything.mean(-1, keepdim=True) + deviation * rounded(self.num_deviations, gate.dtype)
        return torch.relu(gate - cutoff)


class OtherVocabulary:
    """The embedding of a range of tokens by a table of their own: those of images, or of sound."""

    def __init__(self, policy: Policy, module: Any, stop: int, name: str, parallel: TensorParallel):
        """Tokens before `stop` are in the range."""
        self.first, self.stop, self.count = module.vocab_offset, stop, module.vocab_size
        self.table = EmbeddingView(module.embedding, parallel)
        self.norm = NormView(module.hard_embedding_norm, policy.norm, parallel)
        self.projection = TransposedLinear(module.embedding_projection, f"{name}.embedding_projection", parallel)
        ones = Ones(self.projection.num_outputs, module.embedding_projection)
        self.post_norm = NormView(module.embedding_post_projection_norm, policy.norm, parallel, ones)
        self.views: list[NormView | EmbeddingView] = [self.table, self.norm, self.post_norm]
        self.vector_matmul = VectorMatMulOp()

    def put(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """`embedded [N, E]` with the rows of tokens in the range replaced."""
        rows = self.norm.apply(self.table.look_up((tokens - self.first).clamp(0, self.count - 1)))
        rows = self.vector_matmul(rows, *self.projection.pair)
        is_in = (tokens >= self.first) & (tokens < self.stop)
        return torch.where(is_in[:, None], self.post_norm.apply(rows), embedded)


class Gemma3nStream:
    """A LayerStream: the hidden states, and the layers' own inputs next to them."""

    def __init__(self, policy: Policy, base: Any, decoder: nn.Module, parallel: TensorParallel):
        config = base.config.get_text_config()

        def linears(path: str) -> list[TransposedLinear]:
            return [TransposedLinear(linear, path, parallel) for linear in submodule(decoder, path).children()]

        self.projections, self.unembeddings = linears("altup_projections"), linears("altup_unembed_projections")
        self.shape = 1 + len(self.projections), config.hidden_size
        self.inputs = OwnInputs(policy, decoder, config, parallel, rounds=True)
        self.width = self.shape[0] * self.shape[1] + self.inputs.width
        self.vector_matmul = VectorMatMulOp()
        self.size_of_table = config.vocab_size_per_layer_input
        self.vocabularies = []
        if hasattr(base.model, "embed_vision"):
            vision, audio = base.model.embed_vision, base.model.embed_audio
            self.vocabularies.append(OtherVocabulary(policy, vision, audio.vocab_offset, "embed_vision", parallel))
            self.vocabularies.append(OtherVocabulary(policy, audio, sys.maxsize, "embed_audio", parallel))

    @staticmethod
    def is_in(config: PretrainedConfig) -> bool:
        """See LayerStream."""
        return True

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerStream."""
        others = [vocabulary.projection for vocabulary in self.vocabularies]
        return [self.inputs.projection, *self.projections, *self.unembeddings, *others]

    @property
    def views(self) -> list[NormView | EmbeddingView]:
        """See LayerStream."""
        others: list[NormView | EmbeddingView] = [view for part in self.vocabularies for view in part.views]
        return [self.inputs.norm, self.inputs.table, *others]

    def enter(self, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """See LayerStream."""
        for vocabulary in self.vocabularies:
            embedded = vocabulary.put(tokens, embedded)
        tokens = tokens.masked_fill(tokens >= self.size_of_table, 0)
        others = [_like(self.vector_matmul(embedded, *linear.pair), embedded) for linear in self.projections]
        return torch.cat((embedded, *others, self.inputs.forward(tokens, embedded)), 1)

    def leave(self, stream: torch.Tensor) -> torch.Tensor:
        """See LayerStream."""
        first, *others = hidden_states(stream, self.shape).unbind(1)
        pairs = zip(others, self.unembeddings, strict=True)
        others = [_like(self.vector_matmul(hidden, *linear.pair), first) for hidden, linear in pairs]
        return torch.stack((first, *others)).mean(0)


def hidden_states(stream: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """View `[N, A, E]` of the hidden states in `stream [N, A E + L P]`; `shape` is A and E."""
    return stream[:, : shape[0] * shape[1]].unflatten(1, shape)


def _like(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`hidden [N, E]` with the root mean square of each row of `other [N, E]`."""
    wanted = other.square().mean(-1, keepdim=True).sqrt()
    return hidden * wanted / hidden.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


class Gemma3nLayer(InferenceLayer):
    """A decoder layer of Gemma 3n on views."""

    def __init__(
        self, policy: Policy, layer: nn.Module, config: PretrainedConfig, index: int, parallel: TensorParallel = ALONE
    ):
        super().__init__(policy, layer, config, index, parallel)
        self.altup, self.laurel = AltUp(policy, layer, config, index, parallel), Laurel(policy, layer, index, parallel)
        self.own_input = OwnInput(policy, layer, config, index, parallel)
        self.parts = [self.altup, self.laurel, self.own_input]
        self.shape, size = (config.altup_num_inputs, config.hidden_size), config.hidden_size_per_layer_input
        first = self.shape[0] * self.shape[1] + index * size
        self.own_columns = slice(first, first + size)

    def build_mlp(self, config: PretrainedConfig, norm: NormView | None, parallel: TensorParallel) -> LayerMLP:
        """See InferenceLayer."""
        build = SparseMLP if config.activation_sparsity_pattern[self.index] > 0 else DenseMLP
        return build(self.policy, self.module, config, self.index, norm, parallel)

    def run(
        self, hidden: torch.Tensor, rotary: RotaryRows | None, cache: LayerCache, batch: Batch | EncoderBatch
    ) -> torch.Tensor:
        """`hidden [N, A E + L P]`, whose first A E columns this changes."""
        assert self.attention_post_norm and self.mlp_post_norm
        streams = hidden_states(hidden, self.shape)
        predictions = self.altup.predict(streams)
        active = predictions[:, self.altup.active]
        attention, normed = self.mixer.forward(active, rotary, cache, batch, residual=None)
        attended = active + self.attention_post_norm.apply(attention)
        attended = (attended + self.laurel.forward(normed)) / math.sqrt(2)
        output = attended + self.mlp_post_norm.apply(self.mlp.forward(attended, is_added=False))
        corrected = self.altup.correct(predictions, output)
        own = self.own_input.forward(self.altup.scaled(corrected), hidden[:, self.own_columns])
        streams[:, :1] = corrected[:, :1]
        streams[:, 1:] = corrected[:, 1:] + own[:, None]
        return hidden


GEMMA3N = register_policy(
    replace(
        GEMMA4,
        layer_class="Gemma3nTextDecoderLayer",
        layer=Gemma3nLayer,
        stream=Gemma3nStream,
        moe=None,
        padded_tokens=(),
    )
)
