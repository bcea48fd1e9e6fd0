"""The changes of layout at module borders by which the eager lowering carries out a plan.

Arguments, results and parameters of a leaf can change their layouts; a leaf is a module whose forward calls ops and
does not call a module that does. Between ops of one module's code layouts cannot change: a plan that requires it is
refused with the names of the ops.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hybrid_engine.extensions.parallelize.graph.graph import Code, Graph, Op
from hybrid_engine.extensions.parallelize.planning.layouts import (
    Edge,
    Layout,
    edges_of,
    gradient_layout,
    value_layouts,
    whole,
)
from hybrid_engine.extensions.parallelize.planning.plan import Plan

REMEDY = "split both alike (plan.follow), or pass lowering='graph'"


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


def reachable(wanted: Placement, placement: Placement) -> Placement:
    """The placement to redistribute to for `wanted`: DTensor does not make partial sums of other placements."""
    return Replicate() if wanted.is_partial() and not placement.is_partial() else wanted


def term_of_sum(local: Tensor, mesh: DeviceMesh, wanted: Sequence[Placement], reached: Sequence[Placement]) -> Tensor:
    """`local` divided into terms of a partial sum along the axes where `wanted` is partial and `reached` is not."""
    pairs = enumerate(zip(wanted, reached, strict=True))
    num_terms = prod(mesh.size(axis) for axis, (one, other) in pairs if one != other)
    return local if num_terms == 1 else _Term.apply(local, num_terms)


class _Term(torch.autograd.Function):
    """A tensor that every rank holds, as a sum over ranks. Every rank has the sum's gradient, which is the tensor's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_terms: int) -> Tensor:
        return tensor / num_terms

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


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
