"""The mixer of Mamba-2: a short convolution, a state space and a gated norm; its policy and its mixer.

    z, x, B, C, dt = split(input W_in);  x, B, C = silu(conv([x | B | C]))
    y = norm(space(x, B, C, dt) silu(z)) gamma W_out

Falcon-H1 multiplies the input and the projected parts by factors; it may gate after the norm, or have no norm.

A slot holds the last inputs of the convolution, in the dtype of the model, and the state of the space in fp32. Source:
transformers, models/{mamba2,falcon_h1}/modeling_*.py. The ranks of a tensor-parallel group share the heads; a group of
B and C that serves heads of several ranks is computed on each of them, and the norm's groups are gathered if ranks
share one.

N packed tokens, E hidden size, H heads of P numbers, I = H P, G groups, S state size.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec, StateSpec
from hybrid_engine.containers.layer import Heads, RotaryRows
from hybrid_engine.containers.policy import Policy, UnsupportedModelError, attribute, submodule
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
from hybrid_engine.ops import Batch, EncoderBatch, VectorMatMulOp
from hybrid_engine.ops.cpu_kernels import linears_transposed
from hybrid_engine.ops.gated_norm import GatedNormOp
from hybrid_engine.ops.linears import ACTIVATIONS, activate_and_multiply
from hybrid_engine.ops.short_conv import ShortConvOp
from hybrid_engine.ops.state_space import SpaceWeights, StateSpaceOp


@dataclass(frozen=True, kw_only=True)
class StateSpacePolicy:
    """Where a layer keeps the parts of its state space. Sizes and numbers are read from the module."""

    mixer: str = "mamba"
    # Path of the module in the layer, with `in_proj`, `conv1d`, `norm`, `out_proj`, `A_log`, `dt_bias` and `D`.

    def build(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "StateSpace":
        """See `MixerPolicy`."""
        return StateSpace(submodule(layer, self.mixer), f"layer {index} {self.mixer}", norm, parallel)


class StateSpace:
    """A LayerMixer: the state space of Mamba-2, or this rank's heads of it."""

    def __init__(self, module: nn.Module, name: str, norm: NormView | None, parallel: TensorParallel):
        """`norm` is applied before the projection; None: no norm. Raises UnsupportedModelError for unknown parts."""
        self.module, self.name, self.norm, self.parallel = module, name, norm, parallel
        names = ("num_heads", "n_groups", "head_dim", "ssm_state_size", "time_step_limit")
        num_heads, num_groups, head_dim, state_size, limits = (attribute(module, number) for number in names)
        self.heads: Heads | None = None
        self.whole = whole = Heads(num_heads, num_groups, head_dim, parallel)
        self.sizes = [num_heads] if num_groups == 1 else [num_heads, num_groups]
        inner, groups = num_heads * head_dim, num_groups * state_size
        channels = self._channels(inner, groups, state_size, 0)
        self.columns = columns = join(
            whole.queries(), self._channels(inner, groups, state_size, inner), whole.queries(1, 2 * inner + 2 * groups)
        )
        self.input = TransposedLinear(submodule(module, "in_proj"), f"{name}.in_proj", parallel, columns=columns)
        self.output = TransposedLinear(
            submodule(module, "out_proj"), f"{name}.out_proj", parallel, rows=whole.queries()
        )
        self.conv = ConvView(submodule(module, "conv1d"), f"{name}.conv1d", parallel, inner + 2 * groups, channels)
        self.input_scale, self.projection_scale = float(getattr(module, "ssm_in_multiplier", 1.0)), torch.empty(0)
        local_heads, local_groups, _ = whole.local
        self.space = StateSpaceOp(local_heads, head_dim, local_groups, state_size, tuple(limits))
        self.head_norm = self._take_norm(submodule(module, "norm"), inner)
        activation = attribute(module, "activation")
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"{name} activates by {activation!r}; known are {', '.join(ACTIVATIONS)}")
        self.convolve, self.vector_matmul = ShortConvOp(activation), VectorMatMulOp()
        self.cache_spec = LayerCacheSpec(state=(self.conv.state, StateSpec(self.space.state_shape, torch.float32)))
        self.weights: SpaceWeights

    def _take_norm(self, module: nn.Module, inner: int) -> NormView | None:
        """The gated norm of groups of the `inner` values of all heads; None if outputs are gated alone."""
        if isinstance(module, nn.Identity):
            return None
        norm = NormView(module, "rms", self.parallel)
        # The names of Mamba-2's family and of Falcon-H1; in transformers 5.17 Mamba-2's norm spans all heads.
        group = getattr(module, "group_size", inner // getattr(module, "n_groups", 1))
        self.is_gathered = self.parallel.size > 1 and (inner // group) % self.parallel.size > 0
        self.gated_norm = GatedNormOp(group, norm.eps, gates_first=not getattr(module, "norm_before_gate", False))
        return norm

    def _channels(self, inner: int, groups: int, state_size: int, offset: int) -> Ranges | None:
        """Each rank's part of [x | B | C], which begin at `offset`."""
        whole = self.whole
        parts = (whole.keys(offset + inner + part * groups, state_size) for part in range(2))
        return join(whole.queries(offset=offset), *parts)

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        return [self.input, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return [self.head_norm] if self.head_norm else []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return [*self.conv.tensors, *self.weights, self.projection_scale]

    def bind(self) -> None:
        """See LayerMixer."""
        for part in (self.input, self.output, self.conv, *self.norms):
            part.bind()
        heads = cut(0, self.whole.queries(1))
        parts = ((attribute(self.module, name), f"{self.name}.{name}") for name in ("A_log", "dt_bias", "D"))
        self.weights = SpaceWeights(*(self.parallel.take(parameter, heads, name) for parameter, name in parts))
        if (scale := getattr(self.module, "mup_vector", None)) is not None:
            self.projection_scale = self.parallel.take(scale, cut(2, self.columns), f"{self.name}.mup_vector")

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
        scaled = normed if self.input_scale == 1.0 else normed * self.input_scale
        (projected,), widths = linears_transposed(scaled, [self.input.pair]), self.space.widths
        if self.projection_scale.numel():
            projected = (projected * self.projection_scale.view(-1)).to(projected.dtype)
        gate, mixed, dt = projected.split((widths[0], sum(widths), self.space.num_heads), 1)
        conv_states, space_states = cache.states
        mixed = self.convolve(mixed, self.conv.weight, self.conv.bias, conv_states, batch)
        context = self._norm(self.space(mixed, dt, self.weights, space_states, batch), gate)
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed

    def _norm(self, context: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The gated norm of this rank's `[N, H P]`, with the others' values where ranks share its groups."""
        if self.head_norm is None:
            return activate_and_multiply(gate, context, "silu")
        gamma, (rank, width) = self.head_norm.gamma, (self.parallel.rank, context.shape[1])
        own = slice(rank * width, (rank + 1) * width)
        if not self.is_gathered:
            return self.gated_norm(context, gate, gamma[own])
        context, gate = (self.parallel.all_gather(part.contiguous()) for part in (context, gate))
        return self.gated_norm(context, gate, gamma)[:, own]
