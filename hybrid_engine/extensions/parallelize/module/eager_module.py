"""A module that runs by a plan with its own code: tree, names and forward are the original's, and hooks change layouts.

It stays an instance of its class with all methods: a causal model also generates by its own `generate()`. Before a
module's forward its parameters become local tensors, arguments change to the layout that its ops need, and size
attributes get the values for parts. After it, results change to the layout that the surrounding code needs, and the
module is restored.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hybrid_engine.config import EngineConfig
from hybrid_engine.extensions.parallelize.graph.annotations import local_shape
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op, build_graph
from hybrid_engine.extensions.parallelize.graph.library import annotate
from hybrid_engine.extensions.parallelize.graph.library import whole as whole_op
from hybrid_engine.extensions.parallelize.module import parallel_module
from hybrid_engine.extensions.parallelize.module.borders import Border, Relay, borders_of, term_of_sum
from hybrid_engine.extensions.parallelize.module.held_module import Meshes, UnitPasses, check_same_input, part_of
from hybrid_engine.extensions.parallelize.module.parallel_module import Latest, ParallelModule
from hybrid_engine.extensions.parallelize.planning.layouts import parameter_layouts, value_layouts, whole
from hybrid_engine.extensions.parallelize.planning.plan import Plan

SIZE_NAMES = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "n_heads", "n_kv_heads",
    "embed_dim", "hidden_size", "all_head_size", "inner_dim", "split_size", "nf",
)  # fmt: skip
"""Attributes of modules that code uses as numbers of heads or columns."""


class Hooks:
    """The hooks of one module tree. `mesh` is the mesh of the plan's splits; it can be replaced by an equal one."""

    def __init__(
        self,
        root: nn.Module,
        mesh: DeviceMesh,
        borders: Mapping[str, Border],
        sizes: Mapping[str, Mapping[str, int]],
    ):
        self.mesh = mesh
        self._last: tuple[Any, DTensor] | None = None
        for path in {**borders, **sizes}:
            _Around(self, borders.get(path, Border()), dict(sizes.get(path, {}))).attach(root.get_submodule(path))
        root.register_forward_hook(self._forget, always_call=True)

    def _forget(self, *_: Any) -> None:
        self._last = None

    def relaid(self, value: Any, relay: Relay) -> Any:
        """The nested value with each of its tensors changed to the layout that is read."""
        return pytree.tree_map(lambda leaf: self._relaid(leaf, relay) if isinstance(leaf, Tensor) else leaf, value)

    def _relaid(self, tensor: Tensor, relay: Relay) -> Tensor:
        """Consecutive modules that read one tensor, such as projections, share its DTensor and one gradient sum."""
        version = None if tensor.is_inference() else tensor._version
        key = (tensor, version, relay.layout, relay.reached, torch.is_grad_enabled())
        if self._last is None or self._last[0][0] is not tensor or self._last[0][1:] != key[1:]:
            self._last = key, relay.entered(tensor, self.mesh)
        return relay.left(self._last[1])


@dataclass
class _Around:
    """The hooks around the forward of one module, with the values to restore after it."""

    hooks: Hooks
    border: Border
    sizes: dict[str, int]
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after)
        module.register_forward_hook(self.restore, always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        parameters = {name: module._parameters[name] for name in self.border.parameters}
        self.kept.append((parameters, {name: module.__dict__[name] for name in self.sizes}))
        module._parameters.update(
            {name: _local(parameters[name], relay) for name, relay in self.border.parameters.items()}
        )
        module.__dict__.update(self.sizes)
        return (
            (args, kwargs) if self.border.entering is None else self.hooks.relaid((args, kwargs), self.border.entering)
        )

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return result if self.border.leaving is None else self.hooks.relaid(result, self.border.leaving)

    def restore(self, module: nn.Module, *_: Any) -> None:
        if self.kept:
            parameters, sizes = self.kept.pop()
            module._parameters.update(parameters)
            module.__dict__.update(sizes)


def _local(parameter: Any, relay: Relay) -> Any:
    """This process's part of a parameter as the code of its module reads it."""
    if not isinstance(parameter, DTensor):
        return parameter  # gathered already, for example while a checkpoint is exported
    mesh = parameter.device_mesh
    local = parameter.redistribute(mesh, relay.reached).to_local(grad_placements=relay.gradient)
    return term_of_sum(local, mesh, relay.wanted, relay.reached)


@torch.library.custom_op("hybrid_engine::resized", mutates_args=())
def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for a change of layout in a trace on local shapes."""
    return tensor.new_empty(shape)


resized.register_fake(lambda tensor, shape: tensor.new_empty(shape))


annotate("hybrid_engine::resized")(whole_op)


def sizes_on_parts(
    module: nn.Module, arguments: Mapping[str, Any], plan: Plan, borders: Mapping[str, Border]
) -> dict[str, dict[str, int]]:
    """Attributes that have other values on parts, with those values, keyed by module path.

    Raises ValueError that names the op if the module's code computes something else on parts than on the whole.
    """
    graph = plan.graph
    error = _difference(module, arguments, plan, borders, {})
    if error is None:
        return {}
    sizes: dict[str, dict[str, int]] = {}
    for op in graph.ops.values():
        owner = module.get_submodule(op.path)
        for size, part in _resized_dims(op, plan).items():
            found = {name: part for name in SIZE_NAMES if getattr(owner, name, None) == size}
            if found:
                sizes.setdefault(op.path, {}).update(found)
    error = _difference(module, arguments, plan, borders, sizes) if sizes else error
    if error is not None:
        raise ValueError(
            f"lowering='eager' cannot carry this plan: {error}; leave what it reads whole, or pass lowering='graph'"
        )
    return sizes


def _resized_dims(op: Op, plan: Plan) -> dict[int, int]:
    """For an op with the result's shape as an argument: maps sizes that differ on parts to the sizes there."""
    if op.rule.shape_argument is None or not any(plan.split_of(op)):
        return {}
    shape = plan.graph.values[op.outputs[0]].shape
    local = local_shape(shape, op.rule.output_placements(plan.split_of(op))[0], plan.mesh)
    return {size: part for size, part in zip(shape, local, strict=True) if size != part}


def _difference(
    module: nn.Module,
    arguments: Mapping[str, Any],
    plan: Plan,
    borders: Mapping[str, Border],
    sizes: Mapping[str, Mapping[str, int]],
) -> str | None:
    """A description of the first difference between the module on parts and the plan; None if there is none."""
    twin = _on_parts(module, plan, borders, sizes)
    try:
        found = build_graph(twin, arguments)
    except ValueError as error:
        return f"{type(module).__name__} does not run on parts ({str(error).splitlines()[0]})"
    return _compare(plan, found)


def _compare(plan: Plan, found: Graph) -> str | None:
    layouts = value_layouts(plan.graph, plan)
    for op in plan.graph.ops.values():
        for key in op.outputs:
            expected = tuple(local_shape(plan.graph.values[key].shape, layouts[key], plan.mesh))
            if key not in found.values:
                return f"on parts {op.key} is not called"
            if found.values[key].shape != expected:
                return f"on parts {op.key} gives {found.values[key].shape}, where the plan has {expected}"
    return None


def _on_parts(
    module: nn.Module, plan: Plan, borders: Mapping[str, Border], sizes: Mapping[str, Mapping[str, int]]
) -> nn.Module:
    """A copy on the meta device whose parameters and tensors between modules have local shapes."""
    shapes: dict[int, Tensor] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()
    }
    shapes |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    twin = copy.deepcopy(module, shapes)
    for path, border in borders.items():
        owner = twin.get_submodule(path)
        for name, relay in border.parameters.items():
            parameter = getattr(owner, name)
            local = torch.empty(
                local_shape(parameter.shape, relay.wanted, plan.mesh), dtype=parameter.dtype, device="meta"
            )
            setattr(owner, name, nn.Parameter(local, parameter.requires_grad))
        _resize_at(owner, border, plan)
    for path, values in sizes.items():
        for name, value in values.items():
            setattr(twin.get_submodule(path), name, value)
    return twin


def _resize_at(owner: nn.Module, border: Border, plan: Plan) -> None:
    entering, leaving = border.entering, border.leaving
    if entering is not None:
        owner.register_forward_pre_hook(
            lambda _, args, kwargs: pytree.tree_map(lambda leaf: _resized(leaf, entering, plan), (args, kwargs)),
            with_kwargs=True,
        )
    if leaving is not None:
        owner.register_forward_hook(
            lambda _, args, result: pytree.tree_map(lambda leaf: _resized(leaf, leaving, plan), result)
        )


def _resized(leaf: Any, relay: Relay, plan: Plan) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shape = list(leaf.shape)
    for lies, wanted, size in zip(relay.layout, relay.wanted, plan.mesh, strict=True):
        if lies.is_shard():
            shape[lies.dim] *= size  # type: ignore[attr-defined]
        if wanted.is_shard():
            shape[wanted.dim] //= size  # type: ignore[attr-defined]
    return leaf if shape == list(leaf.shape) else resized(leaf, shape)


class EagerModule(ParallelModule):
    """A `ParallelModule` that is lowered by hooks; its class also inherits from the original's class."""

    hooks: Hooks | None
    runs_graph = False

    # torch.compile would keep the parameters of the first call, which hooks exchange.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original's forward, never compiled. An error in it is raised on all processes of the unit."""
        with self.together():
            if self.meshes.unit is not None:
                check_same_input((args, kwargs), self, self.meshes.unit.get_all_groups())
            return super().__call__(*args, **kwargs)

    def places(self) -> dict[str, int]:
        """The positions of all parameters by name."""
        return {name: place for place, (name, _) in enumerate(self.named_parameters())}

    def adopt(self, mesh: DeviceMesh) -> None:
        """Replaces the unit's mesh by `mesh`, which has the same processes in the same order."""
        super().adopt(mesh)
        if self.hooks is not None:
            self.hooks.mesh = mesh

    def original(self) -> nn.Module:
        """Returns this module, whose own forward runs."""
        return self

    def check_engine(self, config: EngineConfig) -> None:
        """Raises ValueError if an engine with this config cannot train the module; local."""
        parallel_module.check_end2end(self.compute_config)
        parallel_module.check_options(self.compute_config, self.plan, config.zero_optimization.stage)

    def _check_forward(self, *_: Any) -> None:
        if self.compute_config.use_end2end and not self._is_in_step:
            raise ValueError("an end-to-end module has no forward of its own; call train_step or infer_step")
        self._check_runs()


class HookPlan:
    """A plan that hooks can carry out, with the hooks' changes, computed before anything is changed."""

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any], plan: Plan):
        """Raises ValueError that names the op for a plan, or a module's code, that hooks cannot carry out."""
        is_split = max(plan.mesh) > 1
        self.borders: dict[str, Border] = borders_of(plan.graph, plan) if is_split or plan.stages else {}
        self.sizes = sizes_on_parts(module, arguments, plan, self.borders) if is_split else {}


def class_of(module_class: type[nn.Module], members: Mapping[str, Any] | None = None) -> type[EagerModule]:
    """The class of eager modules made from instances of `module_class`, with the same name."""
    found = {"forward": module_class.forward, "__module__": module_class.__module__, **(members or {})}
    return type(module_class.__name__, (EagerModule, module_class), found)


def lower_eagerly(
    module: nn.Module,
    plan: Plan,
    config: ComputeConfig,
    meshes: Meshes,
    carried: HookPlan,
    kind: type[EagerModule] | None = None,
) -> EagerModule:
    """A copy of `module` on this process's parts, of the class `kind`; collective."""
    layouts = parameter_layouts(plan.graph, plan)
    parts: dict[int, Any] = {
        id(p): part_of(p, meshes.unit, layouts.get(name, whole(plan))) for name, p in module.named_parameters()
    }
    held: Any = copy.deepcopy(module, parts)
    held.__class__ = kind or class_of(type(module))
    held.plan, held.compute_config, held.meshes = plan, config, meshes
    held.__dict__["_steps"], held.__dict__["_is_in_step"] = Latest(), False
    held.register_forward_pre_hook(held._check_forward)
    held.joint_passes = None if meshes.unit is None else UnitPasses(meshes)
    held.hooks = None if meshes.unit is None else Hooks(held, meshes.unit, carried.borders, carried.sizes)
    return held  # type: ignore[no-any-return]
