"""Kimi Linear: Kimi's delta rule in most layers, latent attention without rope in the others, experts as DeepSeek-V3's.

    q, k, v = split(silu(conv([q | k | v] of x)));  f = x W_fa W_fb
    o       = Kimi's delta rule of q, k, v, f and b              (`ops/kimi_delta.py`)
    y       = (norm(o) gamma sigmoid(x W_ga W_gb)) Wo            the norm is of each head

A slot holds the last inputs of the convolution, in the dtype of the model, and the state of the delta rule in fp32. The
ranks of a tensor-parallel group share the heads. Source: transformers, models/kimi_linear/modeling_kimi_linear.py.

N packed tokens, E hidden size, H heads of D numbers.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec, StateSpec
from hybrid_engine.containers.deepseek import DEEPSEEK_V3
from hybrid_engine.containers.latent import LatentPolicy
from hybrid_engine.containers.layer import Heads, RotaryRows
from hybrid_engine.containers.policy import Policy, UnsupportedModelError, attribute, register_policy, submodule
from hybrid_engine.containers.short_conv import ConvView
from hybrid_engine.containers.views import HeadNormsView, NormView, Ranges, TensorParallel, TransposedLinear, cut, join
from hybrid_engine.ops import Batch, EncoderBatch, ShortConvOp, VectorMatMulOp
from hybrid_engine.ops.cpu_kernels import linears_transposed
from hybrid_engine.ops.kimi_delta import KimiDecay, KimiDeltaOp, KimiInputs
from hybrid_engine.ops.linears import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class KimiDeltaPolicy:
    """Where a layer keeps the parts of Kimi's delta rule. Sizes are read from the module."""

    mixer: str = "self_attn"
    # Path of the module in the layer.

    def build(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "KimiDelta":
        """See `MixerPolicy`."""
        return KimiDelta(submodule(layer, self.mixer), f"layer {index} {self.mixer}", norm, parallel)


class KimiDelta:
    """A LayerMixer: Kimi's delta rule, or this rank's heads of it."""

    heads: Heads | None = None

    def __init__(self, module: nn.Module, name: str, norm: NormView | None, parallel: TensorParallel):
        """`norm` is applied before the projections; None: no norm. Raises UnsupportedModelError for unknown parts."""
        self.module, self.name, self.norm, self.parallel = module, name, norm, parallel
        self.num_heads, self.head_dim = (int(attribute(module, number)) for number in ("num_heads", "head_dim"))
        self.sizes, width = [self.num_heads], self.num_heads * self.head_dim
        self.width, even = width, parallel.even(width)

        def linear(path: str, columns: Ranges | None = None, rows: Ranges | None = None) -> TransposedLinear:
            return TransposedLinear(submodule(module, path), f"{name}.{path}", parallel, columns, rows)

        self.inputs = [linear(path, columns=even) for path in ("q_proj", "k_proj", "v_proj")]
        self.inputs.append(linear("b_proj", columns=parallel.even(self.num_heads)))
        self.narrow = [linear("forget_gate.f_a_proj"), linear("g_a_proj")]
        self.wide = [linear(path, columns=even) for path in ("forget_gate.f_b_proj", "g_b_proj")]
        self.output = linear("o_proj", rows=even)
        channels = join(*(parallel.even(width, part * width) for part in range(3)))
        self.conv = ConvView(submodule(module, "conv1d"), f"{name}.conv1d", parallel, 3 * width, channels)
        self.head_norm = NormView(submodule(module, "o_norm"), "rms_fp32", parallel)
        activation = attribute(module, "activation")
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"{name} activates by {activation!r}; known are {', '.join(ACTIVATIONS)}")
        self.convolve, self.vector_matmul = ShortConvOp(activation), VectorMatMulOp()
        self.delta = KimiDeltaOp(self.num_heads // parallel.size, self.head_dim)
        self.cache_spec = LayerCacheSpec(state=(self.conv.state, StateSpec(self.delta.state_shape, torch.float32)))
        self.decay: KimiDecay

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        return [*self.inputs, *self.narrow, *self.wide, self.output]

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
        even, take, name = self.parallel.even, self.parallel.take, f"{self.name}.forget_gate"
        a_log = take(attribute(self.module, "forget_gate.A_log"), cut(2, even(self.num_heads)), f"{name}.A_log")
        dt_bias = take(attribute(self.module, "forget_gate.dt_bias"), cut(0, even(self.width)), f"{name}.dt_bias")
        self.decay = KimiDecay(a_log.view(-1), dt_bias)

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
        *mixed, b = linears_transposed(normed, [linear.pair for linear in self.inputs])
        narrow = [self.vector_matmul(normed, *linear.pair) for linear in self.narrow]
        f, gate = (self.vector_matmul(x, *linear.pair) for x, linear in zip(narrow, self.wide, strict=True))
        conv_states, delta_states = cache.states
        convolved = self.convolve(torch.cat(mixed, 1), self.conv.weight, self.conv.bias, conv_states, batch)
        context = self.delta(KimiInputs(convolved, f, b), self.decay, delta_states, batch)
        context = self.head_norm.apply(context.unflatten(1, (-1, self.head_dim))).flatten(1)
        context = (context * torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))).to(gate.dtype)
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed


KIMI_LINEAR = register_policy(
    replace(
        DEEPSEEK_V3,
        layer_class="KimiLinearDecoderLayer",
        mixers={"linear_attention": KimiDeltaPolicy(), "full_attention": LatentPolicy()},
        rotary=None,
        required={},
    )
)
