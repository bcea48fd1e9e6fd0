"""Tensor parallelism for models without a policy: their own modules with linears, found by name, cut.

A column-parallel linear holds rows of its [out, in] weight. A row-parallel one holds columns, and its outputs are added
up over the processes. Other modules are unchanged. Attention modules keep their code; their attributes with numbers of
heads are set to those of this process. `HeldSlices` holds the parts of models with a policy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers.linear import is_adapted
from hybrid_engine.containers.tensor_parallel import Cut, Heads, TensorParallel, check_divides, cut, read_whole
from hybrid_engine.inference.config import InferenceConfig
from hybrid_engine.zero.layer_groups import find_layers

ROW_NAMES = (
    "o_proj", "out_proj", "down_proj", "dense_4h_to_h", "fc2", "wo", "w2", "c_proj", "out_lin", "lin2", "proj_out",
    "attention.dense", "self_attention.dense", "output.dense",
)  # fmt: skip
COLUMN_NAMES = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "fc_in", "dense_h_to_4h", "c_fc", "wi", "wi_0", "wi_1",
    "w1", "w3", "wq", "wk", "wv", "q", "k", "v", "query", "key", "value", "q_lin", "k_lin", "v_lin", "lin1",
    "intermediate.dense",
)  # fmt: skip
# The order of their rows cannot be derived from the name.
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "gate_up_proj", "in_proj", "W_pack")
HEAD_NUMBERS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "all_head_size", "inner_dim",
)  # fmt: skip


class RowParallelLinear(nn.Module):
    """A linear of which each process holds columns of the weight [out, in]; the bias is added once, after the sum."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, parallel: TensorParallel):
        super().__init__()
        self.weight, self.bias, self.parallel = weight, bias, parallel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in / size]` -> `[..., out]`, the same on every process."""
        output = self.parallel.all_reduce(nn.functional.linear(input, self.weight))
        return output if self.bias is None else output + self.bias


@dataclass(frozen=True)
class LinearPlan:
    """Paths in one layer of the linears that are cut, by how they are cut."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


def share_linears(model: nn.Module, config: InferenceConfig, parallel: TensorParallel) -> int:
    """Cuts the linears of a model without a policy; returns their number. ValueError if there are none, or with
    LoRA.
    """
    for name, module in model.named_modules():
        if is_adapted(module):
            raise ValueError(
                f"tensor_parallel.tp_size={parallel.size}: {name} carries an adapter, and {type(model).__name__} has "
                "no policy that says how to share one; merge the adapters first (merge_and_unload()) or use "
                "tensor_parallel.tp_size=1"
            )
    plans = [(layer, plan) for layer, plan in plan_layers(model, config) if plan is not None]
    if not plans:
        raise ValueError(
            f"tensor_parallel.tp_size={parallel.size}: no linears of {type(model).__name__} are known by their names; "
            "pass injection_policy={LayerClass: names of the linears whose outputs are added up}, or "
            "tensor_parallel.tp_size=1"
        )
    for layer, plan in plans:
        check_layer(layer, plan, getattr(model, "config", None), parallel)
    for layer, plan in plans:
        cut_layer(layer, plan, parallel)
    return sum(len(plan.rows) + len(plan.columns) for _, plan in plans)


def plan_layers(model: nn.Module, config: InferenceConfig) -> list[tuple[nn.Module, LinearPlan | None]]:
    """The layers that are shared: those in `injection_policy`, or else the repeated layers."""
    if config.injection_policy is None:
        layers = find_layers(model)
        if config.injection_policy_tuple is not None:
            return [(layer, plan_by_policy(layer, config.injection_policy_tuple)) for layer in layers]
        return [(layer, plan_by_names(layer)) for layer in layers]
    named = {_class_name(kind): _names(names) for kind, names in config.injection_policy.items()}
    found = [layer for layer in model.modules() if type(layer).__name__ in named]
    if not found:
        raise ValueError(f"injection_policy: {type(model).__name__} has no layer of class {', '.join(named)}")
    return [(layer, plan_by_policy(layer, named[type(layer).__name__])) for layer in found]


def _class_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def plan_by_names(layer: nn.Module) -> LinearPlan | None:
    """The linears found by names; None if one is fused, or if outputs would stay cut."""
    paths = [path for path, module in layer.named_modules() if isinstance(module, nn.Linear)]
    if any(path.rpartition(".")[2] in FUSED_NAMES for path in paths):
        return None
    rows = tuple(path for path in paths if _ends(path, ROW_NAMES))
    columns = tuple(path for path in paths if path not in rows and _ends(path, COLUMN_NAMES))
    return LinearPlan(rows, columns) if rows and columns else None


def plan_by_policy(layer: nn.Module, rows: Iterable[str]) -> LinearPlan:
    """A plan in which the linears named by the user are row-parallel and all others of the layer column-parallel.

    Raises ValueError for a name that the layer does not have.
    """
    linears = {path for path, module in layer.named_modules() if isinstance(module, nn.Linear)}
    rows = tuple(rows)
    for path in rows:
        if path not in linears:
            raise ValueError(
                f"injection_policy: {type(layer).__name__} has no linear {path!r}; it has {', '.join(sorted(linears))}"
            )
    return LinearPlan(rows, tuple(sorted(linears - set(rows))))


def _ends(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def check_layer(layer: nn.Module, plan: LinearPlan, config: Any, parallel: TensorParallel) -> None:
    """Raises ValueError, with the sizes that work, if heads or outputs of the layer cannot be shared equally."""
    num_heads = getattr(config, "num_attention_heads", None) or 1
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    widths = [layer.get_submodule(path).out_features for path in plan.columns]
    if num_kv_heads < parallel.size:
        num_heads = num_kv_heads  # the modules' own code cannot hold one head in several processes
    check_divides(Heads(num_heads, num_kv_heads, 1, parallel), widths)


def cut_layer(layer: nn.Module, plan: LinearPlan, parallel: TensorParallel) -> None:
    """Replaces the weights of one layer with this process's parts, in place."""
    for path in plan.columns:
        linear = layer.get_submodule(path)
        linear.weight = _part(linear.weight, 0, parallel)
        if linear.bias is not None:
            linear.bias = _part(linear.bias, 0, parallel)
        linear.out_features //= parallel.size
    for path in plan.rows:
        linear = layer.get_submodule(path)
        layer.set_submodule(path, RowParallelLinear(_part(linear.weight, 1, parallel), linear.bias, parallel))
    owners = {path.rpartition(".")[0] for path in plan.columns}
    for owner in map(layer.get_submodule, owners):
        for name in HEAD_NUMBERS:
            number = owner.__dict__.get(name)
            if isinstance(number, int) and number % parallel.size == 0:
                setattr(owner, name, number // parallel.size)


def _part(parameter: nn.Parameter, dim: int, parallel: TensorParallel) -> nn.Parameter:
    part = parallel.take(parameter, cut(dim, parallel.even(parameter.shape[dim])), "a linear")
    return nn.Parameter(part.clone(), requires_grad=parameter.requires_grad)


class HeldSlices:
    """Reads parts for containers, each once.

    Args:
        device: device of the parts.
        source: reads a part of a parameter from its storage.
    """

    def __init__(
        self,
        device: torch.device,
        source: Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor] = read_whole,
    ):
        self.device, self.source = device, source
        self._held: dict[tuple[int, Cut | None], torch.Tensor] = {}

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of `rank`, in memory that this object owns."""
        key = (id(parameter), cut)
        if key not in self._held:
            part = self.source(parameter, cut, rank, name).to(self.device)
            # A view would keep the whole tensor alive.
            self._held[key] = part.contiguous() if part.nbytes == part.untyped_storage().nbytes() else part.clone()
        return self._held[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of the slices held now."""
        return sum(part.nbytes for part in self._held.values())

    def let_go(self, module: nn.Module) -> None:
        """Replaces the module's parameters with meta tensors, which are the keys of the parts from then on."""
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in replaced:
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                    replaced[id(parameter)] = parameter, empty
                part._parameters[name] = replaced[id(parameter)][1]
        self._held = {(id(replaced[key][1]), cut): part for (key, cut), part in self._held.items()}
