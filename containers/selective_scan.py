"""The mixer of Mamba-1 as Jamba has it: a short convolution and a selective scan; its policy and its mixer.

    x, z = split(input W_in);  x = silu(conv(x))
    dt, B, C = split(x W_x), each normed;  dt = dt W_dt
    y = (scan(x, dt, B, C) silu(z)) W_out                                       (`ops/selective_scan.py`)

A slot holds the last inputs of the convolution, in the dtype of the model, and the state of the scan in fp32. The ranks
of a tensor-parallel group share the channels; dt, B and C, which all channels read, are summed over the ranks.
transformers multiplies by the weight of W_dt itself, so that an adapter on it has no effect there, nor here. Source:
transformers, models/jamba/modeling_jamba.py.

N packed tokens, E hidden size, I channels, S state size, K width of dt before W_dt.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.cache import LayerCache, LayerCacheSpec, StateSpec
from hybrid_engine.containers.layer import Heads, RotaryRows
from hybrid_engine.containers.policy import Policy, UnsupportedModelError, attribute, submodule
from hybrid_engine.containers.short_conv import ConvView
from hybrid_engine.containers.views import HeadNormsView, NormView, Ranges, TensorParallel, TransposedLinear, cut, join
from hybrid_engine.ops import Batch, EncoderBatch, ShortConvOp, VectorMatMulOp
from hybrid_engine.ops.cpu_kernels import linears_transposed
from hybrid_engine.ops.linears import ACTIVATIONS, activate_and_multiply
from hybrid_engine.ops.selective_scan import ScanInputs, ScanWeights, SelectiveScanOp


@dataclass(frozen=True, kw_only=True)
class SelectiveScanPolicy:
    """Where a layer keeps the parts of its selective scan. Sizes are read from the module."""

    mixer: str = "mamba"
    # Path of the module in the layer, with `in_proj`, `conv1d`, `x_proj`, `dt_proj`, `out_proj`, `A_log` and `D`.
    norms: tuple[str, str, str] = ("dt_layernorm", "b_layernorm", "c_layernorm")
    # In the mixer: norms of dt, B and C.

    def build(
        self,
        policy: Policy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel,
    ) -> "SelectiveScan":
        """See `MixerPolicy`."""
        module = submodule(layer, self.mixer)
        return SelectiveScan(self, policy, module, f"layer {index} {self.mixer}", norm, parallel)


class SelectiveScan:
    """A LayerMixer: the selective scan of Mamba-1, or this rank's channels of it."""

    heads: Heads | None = None

    def __init__(
        self,
        scan_policy: SelectiveScanPolicy,
        policy: Policy,
        module: nn.Module,
        name: str,
        norm: NormView | None,
        parallel: TensorParallel,
    ):
        """`norm` is applied before the projection; None: no norm. Raises UnsupportedModelError for unknown parts."""
        self.module, self.name, self.norm, self.parallel = module, name, norm, parallel
        names = ("intermediate_size", "ssm_state_size", "time_step_rank")
        channels, state_size, step_width = (int(attribute(module, number)) for number in names)
        self.sizes, self.widths, self.channels = [channels], (step_width, state_size, state_size), channels
        even = parallel.even(channels)

        def linear(path: str, columns: Ranges | None = None, rows: Ranges | None = None) -> TransposedLinear:
            part = submodule(module, path)
            part = getattr(part, "base_layer", part) if path == "dt_proj" else part
            return TransposedLinear(part, f"{name}.{path}", parallel, columns, rows)

        self.input = linear("in_proj", columns=join(even, parallel.even(channels, channels)))
        self.x_proj, self.dt_proj = linear("x_proj", rows=even), linear("dt_proj", columns=even)
        self.output = linear("out_proj", rows=even)
        self.conv = ConvView(submodule(module, "conv1d"), f"{name}.conv1d", parallel, channels)
        self.inner_norms = [NormView(submodule(module, path), policy.norm, parallel) for path in scan_policy.norms]
        activation = attribute(module, "activation")
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"{name} activates by {activation!r}; known are {', '.join(ACTIVATIONS)}")
        self.convolve, self.vector_matmul = ShortConvOp(activation), VectorMatMulOp()
        self.scan = SelectiveScanOp(channels // parallel.size, state_size)
        self.cache_spec = LayerCacheSpec(state=(self.conv.state, StateSpec(self.scan.state_shape, torch.float32)))
        self.weights: tuple[torch.Tensor, torch.Tensor]

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMixer."""
        return [self.input, self.x_proj, self.dt_proj, self.output]

    @property
    def norms(self) -> list[NormView | HeadNormsView]:
        """See LayerMixer."""
        return [*self.inner_norms]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMixer."""
        return [*self.conv.tensors, *self.weights]

    def bind(self) -> None:
        """See LayerMixer."""
        for linear in self.linears:
            linear.bind()
        for norm in self.inner_norms:
            norm.bind()
        self.conv.bind()
        channels = cut(0, self.parallel.even(self.channels))
        parts = ((attribute(self.module, name), f"{self.name}.{name}") for name in ("A_log", "D"))
        a_log, skip = (self.parallel.take(parameter, channels, name) for parameter, name in parts)
        self.weights = a_log, skip

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
        (projected,) = linears_transposed(normed, [self.input.pair])
        x, gate = projected.chunk(2, 1)
        conv_states, scan_states = cache.states
        x = self.convolve(x, self.conv.weight, self.conv.bias, conv_states, batch)
        selected = self.parallel.all_reduce(self.vector_matmul(x, *self.x_proj.pair)).split(self.widths, 1)
        step, b, c = (norm.apply(part.contiguous()) for norm, part in zip(self.inner_norms, selected, strict=True))
        (weight, bias), (a_log, skip) = self.dt_proj.pair, self.weights
        assert bias is not None
        inputs = ScanInputs(x, self.vector_matmul(step, weight), b, c)
        context = self.scan(inputs, ScanWeights(a_log, bias, skip), scan_states, batch)
        context = activate_and_multiply(gate, context, "silu")
        if self.parallel.size == 1:
            return self.vector_matmul(context, *self.output.pair, residual=residual), normed
        output = self.parallel.all_reduce(self.vector_matmul(context, *self.output.pair))
        return output if residual is None else residual + output, normed
