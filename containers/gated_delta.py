"""The gated delta net: the mixer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid layers that keep a state instead of keys.

    q, k, v = split(silu(conv([q | k | v] of x)))            a short convolution over each channel
    o       = the gated delta rule of q, k, v, a and b       (`ops/gated_delta.py`)
    y       = (norm(o) gamma silu(z)) Wo                     the norm is of each value head

A slot holds the last inputs of the convolution, in the dtype of the model, and the state of the delta rule in fp32. The
ranks of a tensor-parallel group share the key heads, each with the value heads that it serves.

N packed tokens, E hidden size, K key heads, V value heads, Dk and Dv their dimensions.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec, StateSpec
from hybrid_engine.containers.layer import Heads, RotaryRows
from hybrid_engine.containers.policy import (
    Policy,
    UnsupportedModelError,
    attribute,
    config_value,
    submodule,
)
from hybrid_engine.containers.short_conv import ConvView
from hybrid_engine.containers.views import (
    HeadNormsView,
    NormView,
    Ranges,
    TensorParallel,
    TransposedLinear,
    cut,
    join,
)
from hybrid_engine.ops import Batch, EncoderBatch, GatedDeltaOp, GatedNormOp, ShortConvOp, VectorMatMulOp
from hybrid_engine.ops.cpu_kernels import linears_transposed
from hybrid_engine.ops.gated_delta import DecayWeights, DeltaInputs
from hybrid_engine.ops.linears import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class GatedDeltaPolicy:
    """Policy of a gated delta net. Paths are relative to the decoder layer; sizes are read from its module.

    `inputs` are its projections: in the layout "separate" those of [q | k | v] in one linear or in three, of z, b and
    a. In "grouped" there are two linears, whose rows are in order of key heads: q, k, v and z of each, and b and a.
    """

    mixer: str = "linear_attn"
    # The module, with its numbers, `conv1d`, `A_log` and `dt_bias`.
    inputs: tuple[str, ...]
    layout: Literal["separate", "grouped"] = "separate"
    norm: str = "norm"
    # In the mixer: the gated norm of the heads.
    output: str = "out_proj"
    # In the mixer: the last linear.
    negative: str | None = None
    # Config attribute that doubles beta, for negative eigenvalues.

    def build(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "GatedDeltaNet":
        """See `MixerPolicy`."""
        scale = 2.0 if self.negative and config_value(config, self.negative) else 1.0
        return GatedDeltaNet(self, submodule(layer, self.mixer), f"layer {index} {self.mixer}", scale, norm, parallel)


@dataclass(frozen=True)
class DeltaSizes:
    """Heads of a gated delta net, and each rank's part of its channels."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    parallel: TensorParallel

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def local(self) -> "DeltaSizes":
        """This rank's heads."""
        size = self.parallel.size
        return DeltaSizes(
            self.num_key_heads // size, self.num_value_heads // size, self.key_dim, self.value_dim, self.parallel
        )

    def channels(self) -> Ranges | None:
        """Each rank's channels of [q | k | v]."""
        even, width = self.parallel.even, self.key_width
        return join(even(width), even(width, width), even(self.value_width, 2 * width))

    def columns(self, layout: str, num_inputs: int) -> list[Ranges | None]:
        """Each rank's columns of each projection."""
        even, heads = self.parallel.even, self.parallel.even(self.num_value_heads)
        if layout == "grouped":
            return [even(self.num_channels + self.value_width), even(2 * self.num_value_heads)]
        mixed = [self.channels()] if num_inputs == 4 else [even(self.key_width)] * 2 + [even(self.value_width)]
        return [*mixed, even(self.value_width), heads, heads]


class GatedDeltaNet:
    """A LayerMixer: the gated delta rule, or this rank's heads of it."""

    heads: Heads | None = None

    def __init__(
        self,
        policy: GatedDeltaPolicy,
        module: nn.Module,
        name: str,
        beta_scale: float,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        """`norm` is applied before the projections; None: no norm. Raises UnsupportedModelError for unknown parts."""
        self.module, self.norm, self.parallel, self.layout = module, norm, parallel, policy.layout
        names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        num_key_heads, num_value_heads, key_dim, value_dim = (attribute(module, number) for number in names)
        whole = DeltaSizes(num_key_heads, num_value_heads, key_dim, value_dim, parallel)
        self.whole, self.local, self.name = whole, whole.local, name
        self.sizes = [whole.num_key_heads]
        columns = whole.columns(policy.layout, len(policy.inputs))
        self.inputs = [
            TransposedLinear(submodule(module, path), f"{name}.{path}", parallel, columns=part)
            for path, part in zip(policy.inputs, columns, strict=True)
        ]
        output, rows = submodule(module, policy.output), parallel.even(whole.value_width)
        self.output = TransposedLinear(output, f"{name}.{policy.output}", parallel, rows=rows)
        self.head_norm = NormView(submodule(module, policy.norm), "rms", parallel)
        conv, name = submodule(module, "conv1d"), f"{name}.conv1d"
        self.conv = ConvView(conv, name, parallel, whole.num_channels, whole.channels())
        self._build_ops(beta_scale)

    def _build_ops(self, beta_scale: float) -> None:
        local, activation = self.local, attribute(self.module, "activation")
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"{self.name} activates by {activation!r}; known are {', '.join(ACTIVATIONS)}")
        self.convolve = ShortConvOp(activation)
        heads = (local.num_key_heads, local.num_value_heads, local.key_dim, local.value_dim)
        self.delta = GatedDeltaOp(*heads, beta_scale)
        self.gated_norm = GatedNormOp(local.value_dim, self.head_norm.eps)
        self.vector_matmul = VectorMatMulOp()
        self.cache_spec = LayerCacheSpec(state=(self.conv.state, StateSpec(self.delta.state_shape, torch.float32)))
        self.decay: DecayWeights

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        return [*self.inputs, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return [self.head_norm]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return [*self.conv.tensors, *self.decay]

    def bind(self) -> None:
        """See LayerMixer."""
        for linear in self.linears:
            linear.bind()
        self.head_norm.bind()
        self.conv.bind()
        heads = cut(0, self.parallel.even(self.whole.num_value_heads))
        parts = ((attribute(self.module, name), f"{self.name}.{name}") for name in ("A_log", "dt_bias"))
        self.decay = DecayWeights(*(self.parallel.take(parameter, heads, name) for parameter, name in parts))

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: RotaryRows | None,
        cache: LayerCache,
        batch: Batch | EncoderBatch,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerMixer."""
        assert not isinstance(batch, EncoderBatch), "an encoder has no states"
        normed = self.norm.apply(hidden) if self.norm else hidden
        mixed, z, b, a = self._project(normed)
        conv_states, delta_states = cache.states
        mixed = self.convolve(mixed, self.conv.weight, self.conv.bias, conv_states, batch)
        context = self.delta(DeltaInputs(mixed, a, b), self.decay, delta_states, batch)
        context = self.gated_norm(context, z, self.head_norm.gamma)
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed

    def _project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[q | k | v] `[N, 2 K Dk + V Dv]`, z `[N, V Dv]`, b and a `[N, V]`."""
        projected = linears_transposed(normed, [linear.pair for linear in self.inputs])
        if self.layout == "separate":
            *mixed, z, b, a = projected
            return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1), z, b, a
        local, (by_head, numbers) = self.local, (x.unflatten(1, (self.local.num_key_heads, -1)) for x in projected)
        group = local.num_value_heads // local.num_key_heads
        widths = (local.key_dim, local.key_dim, group * local.value_dim, group * local.value_dim)
        q, k, v, z = (part.flatten(1) for part in by_head.split(widths, 2))
        b, a = (part.flatten(1) for part in numbers.split(group, 2))
        return torch.cat((q, k, v), 1), z, b, a
