"""A module that runs by a plan with its own code: tree, names and forward are the original's, and hooks change layouts.

It stays an instance of its class with all methods: a causal model also generates by its own `generate()`. Before a
module's forward its parameters become local tensors, arguments change to the layout that its ops need, and size
attributes get the values for parts. After it, results change to the layout that the surrounding code needs, and the
module is restored.

Arguments, results and parameters of a leaf can change their layouts; a leaf is a module whose forward calls ops and
does not call a module that does. Between ops of one module's code layouts cannot change: a plan that requires it is
refused with the names of the ops.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from hybrid_engine.config import EngineConfig
from hybrid_engine.extensions.parallelize.graph.annotations import local_shape
from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import Code, Graph, Op, build_graph
from hybrid_engine.extensions.parallelize.graph.library import annotate
from hybrid_engine.extensions.parallelize.graph.library import whole as whole_op
from hybrid_engine.extensions.parallelize.module import parallel_module
from hybrid_engine.extensions.parallelize.module.held_module import Meshes, UnitPasses, check_same_input, part_of
from hybrid_engine.extensions.parallelize.module.parallel_module import Latest, ParallelModule
from hybrid_engine.extensions.parallelize.module.steps import reachable, term_of_sum
from hybrid_engine.extensions.parallelize.planning.layouts import (
    Edge,
    Layout,
    edges_of,
    gradient_layout,
    parameter_layouts,
    value_layouts,
    whole,
)
from hybrid_engine.extensions.parallelize.planning.plan import Plan

REMEDY = "split both alike (plan.follow), or pass lowering='graph'"
SIZE_NAMES = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "n_heads", "n_kv_heads",
    "embed_dim", "hidden_size", "all_head_size", "inner_dim", "split_size", "nf",
)  # fmt: skip
"""Attributes of modules that code uses as numbers of heads or columns."""


@dataclass(frozen=True)
class Relay:
    """A tensor's layout, the layout in which it is read, and the layout of the gradient that its reader returns."""

    layout: Layout
    wanted: Layout
    gradient: Layout

    def is_kept(self, needs_gradient: bool) -> bool:
        """Whether no change is necessary."""
        return self.wanted == self.layout and (self.gradient == gradient_layout(self.layout) or not needs_gradient)

    def entered(self, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        """The local tensor as a DTensor over `mesh`, redistributed to `reached`.

        Raises ValueError if a dimension to split does not divide.
        """
        for dim, size in self._split_dims(mesh):
            if tensor.shape[dim] % size:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} is split along dimension {dim} over {size} processes, "
                    f"which must divide it; pad it to a multiple of {size}"
                )
        distributed = DTensor.from_local(tensor, mesh, self.layout, run_check=False)
        return distributed.redistribute(mesh, self.reached)

    def left(self, distributed: DTensor) -> Tensor:
        """The local part of the result of `entered`, as the reader needs it."""
        local = distributed.to_local(grad_placements=self.gradient)
        return term_of_sum(local, distributed.device_mesh, self.wanted, self.reached)

    @property
    def reached(self) -> Layout:
        """The layout `wanted`, without partial sums that would have to be made of tensors that are not."""
        return tuple(reachable(*pair) for pair in zip(self.wanted, self.layout, strict=True))

    def _split_dims(self, mesh: DeviceMesh) -> list[tuple[int, int]]:
        pairs = enumerate(zip(self.layout, self.wanted, strict=True))
        return [(to.dim, mesh.size(axis)) for axis, (of, to) in pairs if isinstance(to, Shard) and of != to]


@dataclass(frozen=True, kw_only=True)
class Border:
    """The changes of layout before and after the forward of one module."""

    parameters: Mapping[str, Relay] = field(default_factory=dict)
    """How the module's own code reads each of its parameters, keyed by name in the module."""
    entering: Relay | None = None
    """The change for the tensors among the arguments; None: no change."""
    leaving: Relay | None = None
    """The change for the results; None: no change."""


def borders_of(graph: Graph, plan: Plan) -> dict[str, Border]:
    """The borders, keyed by module path; ValueError if module hooks cannot carry out the plan."""
    if plan.stages:
        raise ValueError(f"lowering='eager' has no stages, and the plan has {len(plan.stages)}; pass lowering='graph'")
    if plan.recompute:
        raise ValueError(
            f"lowering='eager' recomputes nothing, and the plan has recompute={list(plan.recompute)}; use the model's "
            "own gradient checkpointing, or pass lowering='graph'"
        )
    reading = _Reading(graph, plan)
    reading.check_code()
    paths = dict.fromkeys(op.path for op in graph.ops.values())
    found = {path: reading.border(path) for path in paths}
    return {path: border for path, border in found.items() if border != Border()}


class _Reading:
    """Reads a plan as changes of layout between modules."""

    def __init__(self, graph: Graph, plan: Plan):
        self.graph, self.plan, self.whole = graph, plan, whole(plan)
        self.code = Code.of(graph)
        self.leaves, self.maker = self.code.leaves, self.code.makers
        self.reads = {
            op.key: [(self.code.origin(edge.key, op.path), edge) for edge in edges_of(plan, op)]
            for op in graph.ops.values()
        }
        self.readers: dict[str, list[tuple[Op, Edge]]] = {key: [] for key in graph.values}
        for op in graph.ops.values():
            for key, edge in self.reads[op.key]:
                self.readers[key].append((op, edge))
        self.results = {self.code.origin(key, None) for key in graph.outputs if key is not None}
        self.given = value_layouts(graph, plan)
        self.needs_gradient = values_with_gradient(graph)
        self.lies = {key: self._lies(key) for key in graph.values}
        self.summed_before = {key: gradient for key in graph.values if (gradient := self._summed_before(key))}

    def _lies(self, key: str) -> Layout:
        """The layout of a tensor for code outside the leaf that makes it."""
        maker = self.maker.get(key)
        if maker is None or maker.path not in self.leaves:
            return self.given[key]
        code = {op.key: edge.wanted for op, edge in self.readers[key] if op.path not in self.leaves}
        if key in self.results:
            code["the module's result"] = self.whole
        if len(set(code.values())) > 1:
            raise ValueError(
                f"lowering='eager': {' and '.join(code)} read the result of {maker.key} in different layouts; {REMEDY}"
            )
        return next(iter(code.values()), self.given[key])

    def _summed_before(self, key: str) -> Layout | None:
        """The gradient of a whole tensor that a leaf only reshapes before an op with a partial gradient, or None.

        A reshape passes partial sums on, so that they are added up where the tensor enters the leaf.
        """
        maker = self.maker.get(key)
        if maker is None or self.given[key] != self.whole or not self.code.is_reshaped_inside(maker, key):
            return None
        gradients = {edge.gradient for _, edge in self.readers[key]}
        return gradients.pop() if len(gradients) == 1 and gradients != {self.whole} else None

    def edges(self, op: Op) -> Iterator[tuple[str, Relay]]:
        """The operands of `op` by key, with their change of layout inside the code or across its border."""
        early = [self.summed_before[key] for key in op.outputs if key in self.summed_before]
        for key, edge in self.reads[op.key]:
            is_inside = op.path in self.leaves and self.graph.values[key].kind == "result"
            layout = self.given[key] if is_inside and self.code.is_own(op, key) else self.lies[key]
            gradient = gradient_layout(layout) if key in self.summed_before else edge.gradient
            yield key, Relay(layout, edge.wanted, early[0] if early else gradient)

    def check_code(self) -> None:
        """Raises ValueError for a change of layout between ops without a module border."""
        for op in self.graph.ops.values():
            if op.rule.on_part_of(self.plan.split_of(op)) is not None:
                names = list(self.plan.split_of(op))
                raise ValueError(
                    f"lowering='eager' cannot carry this plan: {op.key} is split along {names}, where the op of a part "
                    "is another one than the module's code calls; split it along another name, or pass lowering='graph'"
                )
            for key, relay in self.edges(op):
                is_parameter = self.graph.values[key].kind == "parameter"
                is_in_code = op.path not in self.leaves or self.code.is_own(op, key)
                if is_in_code and not is_parameter and not relay.is_kept(key in self.needs_gradient):
                    raise ValueError(self._describe_change(op, key))
        for key in (*self.results, *self.graph.mutations.values()):
            if self.lies[key] != self.whole:
                source = self.maker[key].key if key in self.maker else key
                raise ValueError(
                    f"lowering='eager': {source} is a result of the module and lies in parts; place it with out=None, "
                    "or pass lowering='graph'"
                )

    def _describe_change(self, op: Op, key: str) -> str:
        source = self.maker[key].key if key in self.maker else key
        names = [self.plan.split_of(one) for one in (self.maker.get(key), op) if one is not None]
        words = " and along ".join(str([name or "whole" for name in entry]) for entry in names)
        module = f"the code of {op.path!r}" if op.path else "the outermost module's code"
        return (
            f"lowering='eager' cannot carry this plan: {source} and {op.key}, in {module}, are split along {words}, "
            f"and layouts change at borders of modules alone; {REMEDY}"
        )

    def border(self, path: str) -> Border:
        ops = [op for op in self.graph.ops.values() if op.path == path]
        if path not in self.leaves:
            return Border(parameters=self._parameters(path, ops))
        entering = {
            relay: key in self.needs_gradient
            for op in ops
            for key, relay in self.edges(op)
            if self.graph.values[key].kind != "parameter" and not self.code.is_own(op, key)
        }
        leaving = {
            Relay(self.given[key], self.lies[key], gradient_layout(self.lies[key])): key in self.needs_gradient
            for op in ops
            for key in op.outputs
            if key in self.results or any(reader.path != path for reader, _ in self.readers[key])
        }
        return Border(
            parameters=self._parameters(path, ops),
            entering=self._one(path, "arguments", entering, ops),
            leaving=self._one(path, "results", leaving, ops),
        )

    def _one(self, path: str, what: str, relays: Mapping[Relay, bool], ops: Iterable[Op]) -> Relay | None:
        if all(relay.is_kept(needs_gradient) for relay, needs_gradient in relays.items()):
            return None
        if len(relays) > 1 or any("@" in str(name) for op in ops for name, _ in _stack(op)):
            why = "lie and are read in several layouts" if len(relays) > 1 else "change layouts, and it is called twice"
            raise ValueError(f"lowering='eager': the {what} of {path!r} {why}; split its ops alike, or {REMEDY}")
        return next(iter(relays))

    def _parameters(self, path: str, ops: Iterable[Op]) -> dict[str, Relay]:
        prefix = f"{path}." if path else ""
        names: dict[str, Relay] = {}
        for op in ops:
            for edge in edges_of(self.plan, op):
                if self.graph.values[edge.key].kind != "parameter":
                    continue
                own = [name for name in self._all_names(edge.key) if name.rpartition(".")[0] == path]
                if not own:
                    raise ValueError(
                        f"lowering='eager': {op.key} reads {edge.key}, a parameter of another module, which has no "
                        "forward of its own there; pass lowering='graph'"
                    )
                relay = Relay(self.given[edge.key], edge.wanted, edge.gradient)
                for name in own:
                    if names.setdefault(name.removeprefix(prefix), relay) != relay:
                        raise ValueError(
                            f"lowering='eager': {op.key} reads {name} in another layout than an op before; {REMEDY}"
                        )
        return names

    def _all_names(self, key: str) -> list[str]:
        return [key, *(alias for alias, first in self.graph.aliases.items() if first == key)]


def _stack(op: Op) -> Iterator[tuple[str, object]]:
    yield from (op.node.meta.get("nn_module_stack") or {}).values()


def values_with_gradient(graph: Graph) -> set[str]:
    """Tensors that can have a gradient: trained parameters, floating-point arguments, and their results."""
    found = {
        key for key, value in graph.of_kind("input").items() if value.dtype.is_floating_point
    } | graph.requires_grad
    for op in graph.ops.values():
        if op.node.target is not torch.ops.aten.detach.default and any(key in found for key in op.inputs):
            found.update(key for key in op.outputs if graph.values[key].dtype.is_floating_point)
    return set(found)


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
