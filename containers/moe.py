"""The mixture-of-experts block that families share, on views of one decoder layer's parameters.

N packed tokens, X experts, E hidden size, I MLP size.

LoRA on the router and the shared expert fuses as on any linear. peft's `target_parameters` wraps a module once per
adapted parameter (`ParamWrapper`, https://github.com/huggingface/peft, src/peft/tuners/lora/layer.py). The update of
expert x is `scale * B_x A_x`, with A stored as `[X r, in]` and B as `[out, r X]`, the expert index last.

Experts that a model keeps as a list of modules are stacked into one tensor, which the grouped product reads.
DeepSpeed's MoE layers have such lists (deepspeed/moe/experts.py). Their weights are separate, so a view cannot stack
them: each `bind` copies them into the same buffer.

`ResidualMLP` is DeepSpeed's residual mixture: a dense MLP in addition to the experts, mixed with them by two
coefficients per token. Source: deepspeed/moe/layer.py (`use_residual`); column 0 of the coefficients weights the
experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.containers.device import LastingBuffer
from hybrid_engine.containers.policy import MoEPolicy, UnsupportedModelError, config_value, has_module, submodule
from hybrid_engine.containers.views import (
    ALONE,
    Cut,
    LoraAdapter,
    NormView,
    Ranges,
    TensorParallel,
    TransposedLinear,
    active_adapters,
    cut,
    halves,
    is_linear,
    join,
)
from hybrid_engine.ops.expert_gemm import CLAMPED_SWIGLU, EXPERT_ACTIVATIONS, ExpertGemmOp
from hybrid_engine.ops.expert_sum import ExpertSumOp
from hybrid_engine.ops.linears import MLPGemmOp, VectorMatMulOp
from hybrid_engine.ops.moe_gating import ExpertGroups, ExpertRouting, MoEGatingOp
from hybrid_engine.ops.moe_res_matmul import MoEResMatmulOp


def routing_dtype(num_experts: int) -> torch.dtype:
    """The dtype that records experts: 1 byte if it can, else 2."""
    return torch.uint8 if num_experts <= 256 else torch.int16


class ExpertList:
    """`tensor [X, out, in]` and `bias [X, out]` or None: the linear at `path` of every expert, or this rank's part.

    Raises UnsupportedModelError if an expert has no such linear, or one of another shape.
    """

    def __init__(
        self,
        experts: nn.Module,
        path: str,
        name: str,
        parallel: TensorParallel = ALONE,
        columns: Ranges | None = None,
        rows: Ranges | None = None,
    ):
        self.name, self.parallel = f"{name}.{path}", parallel
        self.linears = [
            TransposedLinear(submodule(expert, path), f"{name}.{index}.{path}", parallel, columns, rows)
            for index, expert in enumerate(experts.children())
        ]
        sizes = {(linear.num_outputs, linear.num_inputs) for linear in self.linears}
        if len(sizes) != 1:
            raise UnsupportedModelError(f"{self.name} has linears of {len(sizes)} shapes; expected one")
        self.shape = (len(self.linears), *sizes.pop())
        self.tensor = torch.empty(0)  # empty until `bind`
        self.bias: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.tensor] if self.bias is None else [self.tensor, self.bias]

    def bind(self) -> None:
        """Copies the current parameters, unfused."""
        for linear in self.linears:
            linear.bind()
        self.parallel.wait()
        self._copy()

    @property
    def buffer_bytes(self) -> int:
        """Returns 0: the buffer of `fuse_lora` exists already."""
        return 0

    def fuse_lora(self) -> int:
        """Copies weights with the active adapters added; returns 0, because the buffer exists already."""
        if sum(linear.fuse_lora() for linear in self.linears) > 0:
            self._copy()
            for linear in self.linears:
                linear.unfuse_lora()
        return 0

    def unfuse_lora(self) -> None:
        """Does nothing: the parameters were never written to, and `bind` copies them again."""

    def _copy(self) -> None:
        weights, biases = zip(*(linear.pair for linear in self.linears), strict=True)
        self.tensor = _stacked([weight.t() for weight in weights], self.tensor)
        self.bias = None if biases[0] is None else _stacked(list(biases), self.bias)


def _stacked(parts: list[torch.Tensor], buffer: torch.Tensor | None) -> torch.Tensor:
    """Stacks the parts into `buffer`, so that its address stays, or into a new one if they do not fit."""
    first = parts[0]
    if buffer is None or not buffer.numel() or buffer.dtype != first.dtype or buffer.device != first.device:
        return torch.stack(parts)
    for place, part in zip(buffer, parts, strict=True):
        place.copy_(part)
    return buffer


def unwrap(module: nn.Module, name: str) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the module below peft's parameter wrappers, and those wrappers.

    Raises UnsupportedModelError for any other wrapper.
    """
    wrappers = []
    while hasattr(module, "base_layer"):
        if not hasattr(module, "parameter_name"):
            raise UnsupportedModelError(f"{name} carries a {type(module).__name__}, which is not LoRA on a parameter")
        wrappers.append(module)
        module = module.base_layer
    return module, wrappers


def expert_update(
    wrapper: Any, adapter: LoraAdapter, dim: int, parallel: TensorParallel = ALONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fp32 factors whose product per expert, times the scale, is added to the whole stored parameter."""
    num_experts = wrapper.num_experts
    a, b = (parallel.take(linear.weight, None, "an adapter") for linear in (adapter.a, adapter.b))
    parallel.wait()
    a, b = a.float(), b.float()
    a = a.reshape(num_experts, -1, a.shape[-1])  # [X, r, in]
    b = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)  # [X, out, r]
    # Releases of peft without this attribute call the second dimension "in" in any case.
    is_out_first = dim == 2 or getattr(wrapper, "_did_swap_in_out_features", False)
    return (b, a) if is_out_first else (a.transpose(1, 2), b.transpose(1, 2))


class ParameterView:
    """A parameter, or this rank's part of it, with or without peft's updates fused.

    `tensor` is valid from `bind` until the weights move.

    Raises UnsupportedModelError if the module has no such parameter, or wraps it in anything but plain LoRA.
    """

    def __init__(
        self, module: nn.Module, parameter: str, name: str, parallel: TensorParallel = ALONE, part: Cut | None = None
    ):
        self.base, wrappers = unwrap(module, name)
        self.parallel, self.part = parallel, part
        self.parameter, self.name = parameter, f"{name}.{parameter}"
        if not isinstance(getattr(self.base, parameter, None), torch.Tensor):
            raise UnsupportedModelError(f"{type(self.base).__name__} has no {parameter!r}, which its policy names")
        if not getattr(self.base, parameter).is_floating_point():
            raise UnsupportedModelError(f"{self.name} packs its weights as {getattr(self.base, parameter).dtype}")
        self.wrappers: list[Any] = [wrapper for wrapper in wrappers if wrapper.parameter_name == parameter]
        for wrapper in self.wrappers:
            active_adapters(wrapper, self.name)
        self.view: torch.Tensor  # view of the parameter
        self.tensor: torch.Tensor  # input of the ops: view or fused
        self._fused = LastingBuffer()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, even while it is sharded."""
        return tuple(getattr(self.base, self.parameter).shape)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that a forward pass reads."""
        return [self.tensor]

    def bind(self) -> None:
        """Points the view at the parameter's current memory; raises RuntimeError if the parameter is not gathered."""
        self.view = self.tensor = self.parallel.take(getattr(self.base, self.parameter), self.part, self.name)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fuse_lora` will take."""
        if not any(active_adapters(wrapper, self.name) for wrapper in self.wrappers):
            return 0
        parameter = getattr(self.base, self.parameter)
        return parameter.numel() * parameter.itemsize // (1 if self.part is None else self.parallel.size)

    def fuse_lora(self) -> int:
        """Adds the active adapters into a separate buffer; returns its bytes, 0 without adapters."""
        updates = [
            (*self._cut(*expert_update(wrapper, adapter, self.view.dim(), self.parallel)), adapter.scale)
            for wrapper in self.wrappers
            for adapter in active_adapters(wrapper, self.name)
            if isinstance(adapter, LoraAdapter)  # a parameter has no other kind
        ]
        if not updates:
            return 0
        fused = self._fused.take(tuple(self.view.shape), self.view.dtype, self.view.device)
        stacked, view = (fused, self.view) if self.view.dim() == 3 else (fused[None], self.view[None])
        for expert in range(len(view)):  # one at a time: all of them in fp32 would take another two times the layer
            weight = view[expert].float()
            for left, right, scale in updates:
                weight = torch.addmm(weight, left[expert], right[expert], alpha=scale)
            stacked[expert] = weight
        self.tensor = fused
        return fused.nbytes

    def _cut(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the factors `[X, d1, r]` and `[X, r, d2]` of this rank's part of their product."""
        if self.part is None:
            return left, right
        part = self.part.of(left if self.part.dim == 1 else right, self.parallel.rank)
        return (part, right) if self.part.dim == 1 else (left, part)

    def unfuse_lora(self) -> None:
        """Restores the parameter, which fusing has not changed; frees the buffer's memory."""
        self.tensor = self.view
        self._fused.release()


class SharedExpert:
    """The MLP that every token passes through, gated or not, and the linear that computes its weight."""

    def __init__(self, policy: MoEPolicy, layer: nn.Module, activation: str, name: str, parallel: TensorParallel):
        assert policy.shared is not None
        gate, up, down = policy.shared

        def linear(path: str, columns: Ranges | None = None, rows: Ranges | None = None) -> TransposedLinear:
            return TransposedLinear(submodule(layer, path), f"{name} {path}", parallel, columns, rows)

        self.size = linear(down).num_inputs
        part = parallel.even(self.size)
        self.is_fused_gate = gate == up
        if self.is_fused_gate:
            self.linears = [linear(up, columns=join(part, parallel.even(self.size, self.size)))]
        else:
            self.linears = [linear(path, columns=part) for path in (gate, up) if path]
        self.num_inputs = len(self.linears)
        self.linears.append(linear(down, rows=part))
        if policy.shared_gate:
            weigher = submodule(layer, policy.shared_gate)
            self.linears.append(TransposedLinear(weigher, f"{name} {policy.shared_gate}", parallel))
        self.mlp_gemm, self.vector_matmul = MLPGemmOp(None, 0.0, activation), VectorMatMulOp()

    def forward(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps `[N, E]` to the output `[N, E]` and the logit of its weight `[N, 1]`, or None."""
        inputs, (down, *weigher) = self.linears[: self.num_inputs], self.linears[self.num_inputs :]
        *gates, up = halves(inputs[0].pair) if self.is_fused_gate else (linear.pair for linear in inputs)
        gate = gates[0] if gates else None
        output, _ = self.mlp_gemm(normed, None, gate, up, down.pair, None, None)
        return output, self.vector_matmul(normed, *weigher[0].pair) if weigher else None


class MoEBlock:
    """Router, experts and shared expert of one decoder layer.

    Call `bind` before `forward`, and whenever weights moved.
    """

    def __init__(
        self, policy: MoEPolicy, layer: nn.Module, config: PretrainedConfig, name: str, parallel: TensorParallel = ALONE
    ):
        """Raises UnsupportedModelError if policy and layer do not fit."""
        self.policy, self.name, self.parallel = policy, name, parallel
        router, experts = submodule(layer, policy.router), submodule(layer, policy.experts)
        experts_base = unwrap(experts, name)[0]

        def view(module: nn.Module, path: str, parameter: str | None, part: Cut | None = None) -> ParameterView | None:
            return ParameterView(module, parameter, f"{name} {path}", parallel, part) if parameter else None

        self.taken: torch.Tensor | None = None
        """`[N, top_k]` int64: the experts that the tokens of the last pass took."""
        self.router = self._take_router(router)
        self.choice_bias: ParameterView | None = None
        if policy.choice_bias:
            path, _, parameter = policy.choice_bias.rpartition(".")
            self.choice_bias = view(submodule(layer, path), path, parameter)
        if policy.is_list:
            self._take_list(experts)
        else:
            self._take_stacked(experts, view)
        activation = getattr(config, policy.activation, policy.activation) if policy.activation else CLAMPED_SWIGLU
        if activation not in EXPERT_ACTIVATIONS:
            raise UnsupportedModelError(f"activation {activation!r}; known are {', '.join(EXPERT_ACTIVATIONS)}")
        self.shared = SharedExpert(policy, layer, activation, name, parallel) if policy.shared else None
        self.latent: list[TransposedLinear] = []
        if policy.latent and is_linear(submodule(layer, policy.latent[0])):
            modules = ((submodule(layer, path), f"{name} {path}") for path in policy.latent)
            self.latent = [TransposedLinear(module, path, parallel) for module, path in modules]
        self.residual: ResidualMLP | None = None
        if policy.residual and has_module(layer, policy.residual[2]):
            self.residual = ResidualMLP(policy.residual, layer, activation, name, parallel)
        self._check_shapes()
        self._build_ops(config, activation, experts_base)

    def _take_router(self, module: nn.Module) -> tuple[ParameterView, ParameterView | None] | TransposedLinear:
        """Returns weight and bias of a family's own router module, or a linear."""
        name = f"{self.name} {self.policy.router}"
        if is_linear(module):
            return TransposedLinear(module, name, self.parallel)
        has_bias = getattr(unwrap(module, name)[0], "bias", None) is not None
        bias = ParameterView(module, "bias", name, self.parallel) if has_bias else None
        return ParameterView(module, "weight", name, self.parallel), bias

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        router = self.router
        return router.num_outputs if isinstance(router, TransposedLinear) else router[0].shape[0]

    def _take_list(self, experts: nn.Module) -> None:
        policy, parallel, name = self.policy, self.parallel, f"{self.name} {self.policy.experts}"
        self.size = size = ExpertList(experts, policy.down, name).shape[2]
        self.up: ParameterView | ExpertList = ExpertList(
            experts, policy.up, name, parallel, columns=parallel.even(size)
        )
        self.down: ParameterView | ExpertList = ExpertList(
            experts, policy.down, name, parallel, rows=parallel.even(size)
        )
        self.up_bias: ParameterView | None = None
        self.down_bias: ParameterView | None = None

    def _take_stacked(self, experts: nn.Module, view: Callable[..., ParameterView | None]) -> None:
        policy, parallel, name = self.policy, self.parallel, self.name
        into, out = (1, 2) if policy.is_stored_transposed else (2, 1)
        self.size = size = ParameterView(experts, policy.down, f"{name} {policy.experts}").shape[into]
        # Every rank has its part of each expert, so that all have the same work whatever the router chooses.
        columns = parallel.even(size)
        if policy.layout == "halves":
            columns = join(columns, parallel.even(size, size))
        elif policy.layout == "interleaved":
            columns = parallel.even(2 * size)
        up_cut, down_cut = cut(out, columns), cut(into, parallel.even(size))
        self.up = ParameterView(experts, policy.up, f"{name} {policy.experts}", parallel, up_cut)
        self.down = ParameterView(experts, policy.down, f"{name} {policy.experts}", parallel, down_cut)
        self.up_bias = view(experts, policy.experts, policy.up_bias, cut(1, columns))
        self.down_bias = view(experts, policy.experts, policy.down_bias)

    def _check_shapes(self) -> None:
        router, parts = self.router, 1 if self.policy.layout == "plain" else 2
        hidden = router.num_inputs if isinstance(router, TransposedLinear) else router[0].shape[1]
        hidden = self.latent[0].num_outputs if self.latent else hidden
        num_experts = self.num_experts
        swap = (0, 1, 2) if self.policy.is_stored_transposed else (0, 2, 1)
        up, down = (tuple(view.shape[i] for i in swap) for view in (self.up, self.down))
        size = down[1]
        if up != (num_experts, hidden, parts * size) or down != (num_experts, size, hidden):
            raise UnsupportedModelError(
                f"{self.up.name} {list(self.up.shape)} and {self.down.name} {list(self.down.shape)} do not fit "
                f"{num_experts} experts of hidden size {hidden} in layout {self.policy.layout!r}"
            )

    def _build_ops(self, config: PretrainedConfig, activation: str, experts: nn.Module) -> None:
        policy = self.policy
        normalizes = policy.normalizes if isinstance(policy.normalizes, bool) else getattr(config, policy.normalizes)
        top_k, groups = getattr(config, policy.top_k), None
        if policy.groups:
            num_groups, num_open = (config_value(config, name) for name in policy.groups)
            groups = ExpertGroups(num_groups, num_open, policy.group_best)
        factor = config_value(config, policy.factor) if policy.factor else 1.0
        jitter = config_value(config, policy.jitter) if policy.jitter else 0.0
        try:
            self.gating = MoEGatingOp(
                self.num_experts, top_k, policy.scoring, bool(normalizes), policy.fp32_weights, groups, factor, jitter
            )
        except ValueError as error:
            raise UnsupportedModelError(f"{self.name}: {error}") from error
        numbers = {key: getattr(experts, key) for key in ("alpha", "limit") if activation == CLAMPED_SWIGLU}
        self.expert_gemm = ExpertGemmOp(activation, policy.layout, **numbers)
        self.expert_sum, self.vector_matmul = ExpertSumOp(), VectorMatMulOp(fp32_output=policy.fp32_logits)
        self.project = VectorMatMulOp()

    @property
    def sizes(self) -> list[int]:
        """MLP sizes of the whole experts."""
        return [self.size, *(dense.size for dense in (self.shared, self.residual) if dense)]

    @property
    def parts(self) -> list[ParameterView | ExpertList | TransposedLinear]:
        """All parts that bind and fuse."""
        router = [self.router] if isinstance(self.router, TransposedLinear) else self.router
        views = [*router, self.choice_bias, self.up, self.up_bias, self.down, self.down_bias]
        dense = [linear for mlp in (self.shared, self.residual) if mlp for linear in mlp.linears]
        return [*(view for view in views if view is not None), *self.latent, *dense]

    def bind(self) -> None:
        """Points all views at the parameters' current memory, unfused."""
        for part in self.parts:
            part.bind()

    def fuse_lora(self) -> int:
        """Fuses all active adapters; returns the bytes of the buffers."""
        return sum(part.fuse_lora() for part in self.parts)

    def unfuse_lora(self) -> None:
        """Restores the parameters themselves."""
        for part in self.parts:
            part.unfuse_lora()

    def _score(self, normed: torch.Tensor) -> torch.Tensor:
        """The router's logits `[N, X]`."""
        if isinstance(self.router, TransposedLinear):
            weight, bias = self.router.pair
        else:
            view, bias_view = self.router
            weight, bias = view.tensor.t(), None if bias_view is None else bias_view.tensor
        if self.policy.fp32_logits and not weight.is_cuda:  # where the product would be rounded first
            weight, bias = weight.float(), None if bias is None else bias.float()
        return self.vector_matmul(normed.to(weight.dtype), weight, bias)

    def route(self, input: torch.Tensor) -> ExpertRouting:
        """The experts of each token, by the router's input `[N, E]`, and their weights."""
        choice_bias = None if self.choice_bias is None else self.choice_bias.tensor
        routing = self.gating(self._score(input), choice_bias)
        self.taken = routing.experts
        return routing

    def forward(self, normed: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`normed [N, E]` -> the block's output `[N, E]`, plus `residual [N, E]` if it is passed."""
        return self.run_experts(normed, self.route(normed), residual)

    def run_experts(
        self, normed: torch.Tensor, routing: ExpertRouting, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`forward` with each token's experts chosen before."""
        outputs = self._run_latent_experts(normed, routing) if self.latent else self._expert_outputs(normed, routing)
        if self.residual:
            mixed = self.residual.forward(normed, self.expert_sum(outputs, normed.dtype, None, None, None))
            mixed = self.parallel.all_reduce(mixed)
            return mixed if residual is None else residual + mixed
        shared, shared_logit = self.shared.forward(normed) if self.shared else (None, None)
        if self.parallel.size == 1:
            return self.expert_sum(outputs, normed.dtype, shared, shared_logit, residual)
        output = self.parallel.all_reduce(self.expert_sum(outputs, normed.dtype, shared, shared_logit, None))
        return output if residual is None else residual + output

    def _run_latent_experts(self, normed: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
        """`[N, E]` -> `[N, 1, E]`, the sum of each token's experts, which see a narrower vector."""
        before, after = self.latent
        outputs = self._expert_outputs(self.project(normed, *before.pair), routing)
        weight, bias = after.pair
        # With several ranks the sums are partial, and so is their product.
        bias = bias if self.parallel.is_first else None
        return self.project(self.expert_sum(outputs, normed.dtype, None, None, None), weight, bias)[:, None]

    def _expert_outputs(self, input: torch.Tensor, routing: ExpertRouting) -> torch.Tensor:
        """Weighted outputs `[N, top_k, E]` of the experts of each row of `input [N, E]`."""
        up, down = self.up.tensor, self.down.tensor
        if isinstance(self.up, ExpertList) and isinstance(self.down, ExpertList):
            up_bias, down_bias = self.up.bias, self.down.bias
        else:
            up_bias, down_bias = (None if view is None else view.tensor for view in (self.up_bias, self.down_bias))
        if not self.parallel.is_first:
            down_bias = None  # added on the first rank only
        if not self.policy.is_stored_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if not self.policy.scales_input:
            return self.expert_gemm(input, routing, up, up_bias, down, down_bias)
        scaled, pairs = scale_inputs(input, routing)
        outputs = self.expert_gemm(scaled, pairs, up, up_bias, down, down_bias)
        return outputs.view(*routing.weights.shape, -1)


def scale_inputs(input: torch.Tensor, routing: ExpertRouting) -> tuple[torch.Tensor, ExpertRouting]:
    """Each pair's row of `input [N, E]` times its weight, `[N top_k, E]`, and their routing to one expert each."""
    scaled = (input[:, None] * routing.weights[..., None]).flatten(0, 1)
    ones = torch.ones_like(routing.weights).view(-1, 1)
    return scaled, ExpertRouting(ones, routing.experts.view(-1, 1), routing.order, routing.offsets)


class ResidualMLP:
    """The dense MLP of a layer, or this rank's part of it, and the linear that computes the coefficients."""

    def __init__(
        self,
        paths: tuple[str, str, str],
        layer: nn.Module,
        activation: str,
        name: str,
        parallel: TensorParallel = ALONE,
    ):
        """`paths` are those of up, down and coefficients.

        Raises UnsupportedModelError if `layer` does not have such linears.
        """
        up, down, coefficient = ((submodule(layer, path), f"{name} {path}", parallel) for path in paths)
        self.size = TransposedLinear(*down).num_inputs
        part = parallel.even(self.size)
        self.linears = [
            TransposedLinear(*up, columns=part),
            TransposedLinear(*down, rows=part),
            TransposedLinear(*coefficient),
        ]
        self.mlp_gemm, self.vector_matmul, self.mix = (
            MLPGemmOp(None, 0.0, activation),
            VectorMatMulOp(),
            MoEResMatmulOp(),
        )

    def forward(self, normed: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Mixes the MLP's output for `normed [N, E]` with the experts' `[N, E]`.

        With several ranks, all are partial sums.
        """
        up, down, coefficient = self.linears
        dense, _ = self.mlp_gemm(normed, None, None, up.pair, down.pair, None, None)
        return self.mix(experts, self.vector_matmul(normed, *coefficient.pair).softmax(-1), dense)


class MoEMLP:
    """A LayerMLP (layer.py) that is a mixture of experts."""

    def __init__(
        self,
        policy: MoEPolicy,
        layer: nn.Module,
        config: PretrainedConfig,
        index: int,
        norm: NormView | None,
        parallel: TensorParallel = ALONE,
    ):
        """`norm` is applied before the block; None: no norm."""
        self.norm, self.block = norm, MoEBlock(policy, layer, config, f"layer {index}", parallel)
        self.sizes = self.block.sizes

    @staticmethod
    def is_in(policy: MoEPolicy, layer: nn.Module) -> bool:
        """Whether this layer has a mixture of experts; models may mix layers with and without."""
        return has_module(layer, policy.router)

    @property
    def linears(self) -> list[TransposedLinear]:
        """See LayerMLP."""
        return [part for part in self.block.parts if isinstance(part, TransposedLinear)]

    @property
    def adaptable(self) -> list[ParameterView | ExpertList | TransposedLinear]:
        """See LayerMLP."""
        return self.block.parts

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See LayerMLP."""
        parts = [part for part in self.block.parts if not isinstance(part, TransposedLinear)]
        return [tensor for part in parts for tensor in part.tensors]

    def bind(self) -> None:
        """See LayerMLP."""
        self.block.bind()

    def forward(self, input: torch.Tensor, is_added: bool) -> torch.Tensor:
        """See LayerMLP."""
        normed = self.norm.apply(input) if self.norm else input
        return self.block.forward(normed, input if is_added else None)
