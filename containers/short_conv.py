"""The gated short convolution of LFM2 in place of attention: its policy and its mixer.

    b, c, x = split(input W_in);  y = c * conv(b * x);  output = y W_out

The convolution is causal and depthwise; each sequence keeps its last inputs in a slot (`ops/short_conv.py`). Source:
transformers, models/lfm2/modeling_lfm2.py. Ranks share the channels. N tokens, E hidden size and channels, W width.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec, StateSpec
from hybrid_engine.containers.layer import Heads, RotaryRows
from hybrid_engine.containers.policy import Policy, UnsupportedModelError, class_name, submodule
from hybrid_engine.containers.views import HeadNormsView, NormView, Ranges, TensorParallel, TransposedLinear, cut, join
from hybrid_engine.ops import Batch, EncoderBatch, QKVGemmOp, VectorMatMulOp
from hybrid_engine.ops.short_conv import ShortConvOp, conv_state_shape


class ConvView:
    """`weight [C, W]` and `bias [C]` or None of a depthwise convolution, or of this rank's channels.

    Args:
        channels: each rank's channels; None: equal parts.

    Raises UnsupportedModelError for a module that is none.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        parallel: TensorParallel,
        num_channels: int,
        channels: Ranges | None = None,
    ):
        if not isinstance(module, nn.Conv1d) or module.groups != num_channels:
            raise UnsupportedModelError(f"{name}: {class_name(module)} in the place of a depthwise convolution")
        self.module, self.name, self.parallel = module, name, parallel
        self._cut = cut(0, channels or parallel.even(num_channels))
        self.weight = torch.empty(0)
        self.bias: torch.Tensor | None = None

    @property
    def state(self) -> StateSpec:
        """The tensor of a sequence's last inputs."""
        num_channels = self.module.groups
        if self._cut is not None:
            num_channels = sum(stop - start for start, stop in self._cut.ranges[self.parallel.rank])
        return StateSpec(conv_state_shape(num_channels, self.module.kernel_size[0]))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def bind(self) -> None:
        """Points the views at the parameters' current memory."""
        bias = self.module.bias
        self.weight = self.parallel.take(self.module.weight, self._cut, self.name).squeeze(1)
        self.bias = None if bias is None else self.parallel.take(bias, self._cut, self.name)


@dataclass(frozen=True, kw_only=True)
class ShortConvPolicy:
    """Where a layer keeps the parts of its gated short convolution. Paths are relative to the layer."""

    input: str = "conv.in_proj"
    # Linear [3 E, E] to b, c and x.
    conv: str = "conv.conv"
    # The convolution.
    output: str = "conv.out_proj"

    def build(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "ShortConv":
        """See `MixerPolicy`."""
        return ShortConv(self, layer, config.hidden_size, index, norm, parallel)


class ShortConv:
    """A LayerMixer: the gated short convolution, or this rank's channels of it."""

    heads: Heads | None = None

    def __init__(
        self,
        policy: ShortConvPolicy,
        layer: nn.Module,
        width: int,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        """`width`: E. `norm` is applied before the projection; None: no norm."""
        self.norm, self.parallel, self.sizes = norm, parallel, [width]
        name, even = f"layer {index}", parallel.even(width)
        columns = join(*(parallel.even(width, part * width) for part in range(3)))
        self.input = TransposedLinear(
            submodule(layer, policy.input), f"{name} {policy.input}", parallel, columns=columns
        )
        self.conv = ConvView(submodule(layer, policy.conv), f"{name} {policy.conv}", parallel, width)
        self.output = TransposedLinear(submodule(layer, policy.output), f"{name} {policy.output}", parallel, rows=even)
        self.cache_spec = LayerCacheSpec(state=(self.conv.state,))
        kind, eps = (norm.kind, norm.eps) if norm else (None, 0.0)
        self.gemm = QKVGemmOp(kind, eps, 1, 1, width // parallel.size)  # three equal parts: one head of q, k and v
        self.convolve, self.vector_matmul = ShortConvOp(), VectorMatMulOp()

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        return [self.input, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return self.conv.tensors

    def bind(self) -> None:
        """See LayerMixer."""
        for part in (self.input, self.conv, self.output):
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
        assert not isinstance(batch, EncoderBatch)
        weight, bias = self.input.pair
        gamma, beta = (self.norm.gamma, self.norm.beta) if self.norm else (None, None)
        parts, normed = self.gemm(hidden, [weight], [bias], gamma, beta)
        b, c, x = (part.flatten(1) for part in parts)
        mixed = c * self.convolve(b * x, self.conv.weight, self.conv.bias, cache.states[0], batch)
        if self.parallel.size == 1:
            return self.vector_matmul(mixed, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(mixed, *self.output.pair))
        return output if residual is None else residual + output, normed
