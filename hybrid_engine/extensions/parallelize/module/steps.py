"""Runs the ops of a planned graph as steps on local tensors; layouts change only between steps, on edges.

Autograd differentiates through it: an edge's backward is the inverse change of layout (`DTensor.redistribute`). A
gradient that is a partial sum is added up where the layout of its tensor requires it (`to_local(grad_placements=...)`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils.checkpoint import checkpoint

from hybrid_engine.extensions.parallelize.graph.annotations import OpPart, arguments_of, tensors_in
from hybrid_engine.extensions.parallelize.graph.graph import Graph, Op, paths_around
from hybrid_engine.extensions.parallelize.planning.layouts import (
    Edge,
    Layout,
    edges_of,
    gradient_layout,
    value_layouts,
    whole,
)
from hybrid_engine.extensions.parallelize.planning.plan import Plan


@dataclass(frozen=True)
class Block:
    """Consecutive ops that run together."""

    ops: tuple[str, ...]
    read: tuple[str, ...]
    """Keys of the tensors from before the block."""
    given: tuple[str, ...]
    """Keys of the block's tensors that are read after it."""
    is_recomputed: bool


def blocks_of(graph: Graph, ops: Sequence[str], globs: Sequence[str], kept: Iterable[str]) -> list[Block]:
    """The ops in blocks: those of modules that match one of `globs`, and those between; `kept` is read at the end."""
    last_read = dict.fromkeys(kept, len(ops))
    for position, op in enumerate(ops):
        last_read |= {key: max(position, last_read.get(key, 0)) for key in graph.ops[op].inputs}
    found = []
    runs = groupby(enumerate(ops), key=lambda entry: _module(graph.ops[entry[1]].path, globs))
    for module, entries in runs:
        positions, members = zip(*entries, strict=True)
        made = [key for op in members for key in graph.ops[op].outputs]
        read = {key: None for op in members for key in graph.ops[op].inputs if key not in made}
        given = tuple(key for key in made if last_read.get(key, -1) > positions[-1])
        found.append(Block(members, tuple(read), given, module is not None))
    return found


def _module(path: str, globs: Sequence[str]) -> str | None:
    """The outermost module around `path` that matches; None if none does."""
    return next((module for module in paths_around(path) if any(fnmatchcase(module, glob) for glob in globs)), None)


def _reshape(self: Tensor, size: Sequence[int]) -> Tensor:
    return self.reshape(size)


def _rrelu(
    self: Tensor, noise: Tensor, lower: float, upper: float, training: bool, generator: Any = None
) -> tuple[Tensor, Tensor]:
    noise = torch.empty_like(noise)
    return torch.ops.aten.rrelu_with_noise(self, noise, lower, upper, training, generator), noise


IN_THE_PLACE_OF: dict[Any, Any] = {
    # These ops require certain strides, and a part that came from another layout may have others.
    torch.ops.aten.view.default: _reshape,
    torch.ops.aten._unsafe_view.default: _reshape,
    # The derivative of this op reads the noise that was passed in, not the noise that was drawn.
    torch.ops.aten.rrelu_with_noise_functional.default: _rrelu,
}
"""Replacements of ops that would be wrong on parts or in the backward pass."""


@dataclass(frozen=True)
class Slot:
    """The position of a tensor among the operands of a step."""

    position: int


@dataclass(frozen=True)
class Step:
    """One op on local tensors."""

    function: Any
    edges: tuple[Edge, ...]
    arguments: dict[str, Any]
    """Arguments by name, with a `Slot` for each operand."""
    outputs: tuple[tuple[int, str], ...]
    """Pairs of a result's index and its key."""
    is_single: bool
    last_used: tuple[str, ...]
    """Keys of the tensors that no later step reads."""


class Steps:
    """Runs a planned graph: from parameters, buffers and arguments to results, on this rank's parts.

    Without a mesh it runs on one process.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        mesh: DeviceMesh | None,
        ops: Sequence[str] | None = None,
        kept: Sequence[str] = (),
        folds: bool = False,
    ):
        """`ops` are the keys of the ops to run, by default all; `kept` are keys of additional results.

        `folds`: ops that read only constants run once, and their results are kept for later runs.
        """
        self.graph, self.plan, self.mesh = graph, plan, mesh
        self.layouts = value_layouts(graph, plan)
        self.whole = whole(plan)
        ops = list(graph.ops) if ops is None else list(ops)
        results = {*kept, *graph.mutations.values(), *(key for key in graph.outputs if key is not None)}
        last_used = _last_uses(graph, ops, results)
        self.steps = {key: _step(graph, plan, mesh, graph.ops[key], last_used.get(key, ())) for key in ops}
        self.constant_ops = constant_ops(graph, ops, results) if folds else []
        constant = set(self.constant_ops)
        rest = [key for key in ops if key not in constant]
        self._kept_constants = {key for op in rest for key in graph.ops[op].inputs if key.rsplit("/", 1)[0] in constant}
        self.blocks = blocks_of(graph, rest, plan.recompute, results)
        self._folded: dict[str, Tensor] | None = None

    def run(self, held: Mapping[str, Tensor], arguments: Mapping[str, Tensor]) -> tuple[list[Tensor | None], Any]:
        """The results of the forward pass, whole on every rank, and the new values of what it writes into, by key.

        `held` has the parameters (DTensors if there is a mesh) and buffers by name, `arguments` has the tensors among
        the arguments by the names of their values. Local tensors are read, not changed.
        """
        values = self.values(held, arguments)
        return self.outputs(values), self.mutations(values, self.graph.mutations)

    def values(self, held: Mapping[str, Tensor], arguments: Mapping[str, Tensor]) -> "Values":
        """Runs the ops; the returned values include everything that is read later."""
        values = Values(self.mesh, self.layouts, {**held, **arguments})
        values.enter({f"constant:{name}": tensor for name, tensor in self.graph.constants.items()})
        if self.constant_ops:
            values.enter(self._results_of_constants(values))
        for block in self.blocks:
            if block.is_recomputed and torch.is_grad_enabled():
                self._run_checkpointed(block, values)
            else:
                self._run(block, values)
        return values

    def _results_of_constants(self, values: "Values") -> dict[str, Tensor]:
        """Results of ops that read only constants, in the plan's layouts; computed in the first run."""
        if self._folded is None:
            inside = Values(self.mesh, self.layouts, dict(values.tensors))
            with torch.inference_mode(False), torch.no_grad():
                for key in self.constant_ops:
                    self._run_step(self.steps[key], inside)
            self._folded = {key: inside.tensors[key] for key in self._kept_constants}
        return self._folded

    def outputs(self, values: "Values") -> list[Tensor | None]:
        """The results, whole on every rank; none shares memory with values that are kept between runs."""
        kept = {_memory(tensor) for tensor in (self._folded or {}).values()} - {None}
        found = [self._whole(values, key) if key is not None else None for key in self.graph.outputs]
        return [out.clone() if out is not None and kept and _memory(out) in kept else out for out in found]

    def mutations(self, values: "Values", names: Iterable[str]) -> dict[str, Tensor]:
        """The new values of buffers and arguments by key; those of buffers are detached."""
        found = {name: self._whole(values, self.graph.mutations[name]) for name in names}
        return {name: new if self.graph.values[name].kind == "input" else new.detach() for name, new in found.items()}

    def _whole(self, values: "Values", key: str) -> Tensor:
        return values.local(Edge(key, self.whole, self.whole))

    def _run(self, block: Block, values: "Values") -> None:
        for step in map(self.steps.__getitem__, block.ops):
            self._run_step(step, values)
            for key in step.last_used:
                values.drop(key)

    def _run_step(self, step: Step, values: "Values") -> None:
        operands = [values.local(edge) for edge in step.edges]
        results = step.function(**_filled(step.arguments, operands))
        values.enter({key: (results if step.is_single else results[index]) for index, key in step.outputs})

    def _run_checkpointed(self, block: Block, values: "Values") -> None:
        """Keeps only the block's operands and results; the rest is recomputed in the backward pass."""

        def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
            inside = Values(self.mesh, self.layouts, dict(zip(block.read, tensors, strict=True)))
            self._run(block, inside)
            return tuple(inside.tensors[key] for key in block.given)

        read = (values.tensors[key] for key in block.read)
        results = checkpoint(compute, *read, use_reentrant=False)
        values.enter(dict(zip(block.given, results, strict=True)))
        for op in block.ops:
            for key in self.steps[op].last_used:
                values.drop(key)


class Values:
    """The tensors of one run, each in the layouts that were requested so far."""

    def __init__(self, mesh: DeviceMesh | None, layouts: Mapping[str, Layout], held: dict[str, Tensor]):
        self.mesh, self.layouts = mesh, layouts
        self.tensors = held
        self.distributed: dict[str, dict[Layout, DTensor]] = {}

    def enter(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds local tensors, in the layouts that the plan gives them."""
        self.tensors |= tensors

    def drop(self, key: str) -> None:
        """Removes a tensor."""
        self.tensors.pop(key, None)
        self.distributed.pop(key, None)

    def local(self, edge: Edge) -> Tensor:
        """This rank's part of a tensor in the layout that an op needs."""
        tensor, layout = self.tensors[edge.key], self.layouts[edge.key]
        if self.mesh is None:
            return tensor
        is_kept = edge.wanted == layout and (edge.gradient == gradient_layout(layout) or not tensor.requires_grad)
        if is_kept and not isinstance(tensor, DTensor):
            return tensor
        reached = tuple(reachable(*pair) for pair in zip(edge.wanted, layout, strict=True))
        local = self._distributed(edge.key, reached, tensor).to_local(grad_placements=edge.gradient)
        return term_of_sum(local, self.mesh, edge.wanted, reached)

    def _distributed(self, key: str, wanted: Layout, tensor: Tensor) -> DTensor:
        """The tensor in the layout `wanted`; it is redistributed once for all its readers."""
        found = self.distributed.setdefault(key, {})
        layout = self.layouts[key]
        if wanted not in found:
            base = tensor if isinstance(tensor, DTensor) else found.get(layout)
            if base is None:
                base = DTensor.from_local(tensor, self.mesh, layout, run_check=False)
                found[layout] = base
            if wanted != layout or isinstance(tensor, DTensor):
                # Also without a change: it brings a parameter's gradient into the parameter's layout.
                found[wanted] = base.redistribute(self.mesh, wanted)
        return found[wanted]


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if type(tensor) is Tensor else None


def _step(graph: Graph, plan: Plan, mesh: DeviceMesh | None, op: Op, last_used: Sequence[str]) -> Step:
    overload = op.node.target
    assert isinstance(overload, torch._ops.OpOverload), f"{overload=}"
    arguments = arguments_of(overload, op.node.args, dict(op.node.kwargs))
    nodes = list(tensors_in(list(arguments.values())))
    slots = iter(Slot(position) for position in range(len(nodes)))
    changed = op.rule.local_arguments(
        arguments, graph.values[op.outputs[0]].shape if op.outputs else (), plan.split_of(op), plan.mesh
    )
    template = {name: _template(value, slots) for name, value in arguments.items()} | changed
    outputs = tuple((int(key.rsplit("/", 1)[1]), key) for key in op.outputs)
    is_single = isinstance(op.node.meta["val"], Tensor)
    function = torch.no_grad()(overload) if _is_factory(overload) else IN_THE_PLACE_OF.get(overload, overload)
    on_part = op.rule.on_part_of(plan.split_of(op))
    if on_part is not None and mesh is not None:
        function = partial(on_part[0].function, part=_part_of(mesh, on_part[1]))
    return Step(function, edges_of(plan, op), template, outputs, is_single, tuple(last_used))


def _is_factory(overload: torch._ops.OpOverload) -> bool:
    """Whether the op makes a new tensor of the shape of another: called from Python, its result has no gradient."""
    name = overload._schema.name.removeprefix("aten::")
    return overload.namespace == "aten" and (name.endswith("_like") or name.startswith("new_"))


def _part_of(mesh: DeviceMesh, axes: Sequence[int]) -> OpPart:
    """This process's position in a dimension that is cut over some axes, the first one outermost."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"{mesh=}"
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + coordinate[axis]

    def all_reduce(tensor: Tensor, kind: str) -> Tensor:
        for axis in axes:
            tensor = funcol.wait_tensor(funcol.all_reduce(tensor, kind, (mesh, axis)))
        return tensor

    return OpPart(index=index, count=prod(mesh.size(axis) for axis in axes), all_reduce=all_reduce)


def _template(value: Any, slots: Any) -> Any:
    if isinstance(value, fx.Node):
        return next(slots)
    return [_template(entry, slots) for entry in value] if isinstance(value, list | tuple) else value


def _filled(template: dict[str, Any], operands: Sequence[Tensor]) -> dict[str, Any]:
    return {name: _fill(value, operands) for name, value in template.items()}


def _fill(value: Any, operands: Sequence[Tensor]) -> Any:
    if isinstance(value, Slot):
        return operands[value.position]
    return [_fill(entry, operands) for entry in value] if isinstance(value, list) else value


def constant_ops(graph: Graph, ops: Iterable[str], results: Collection[str]) -> list[str]:
    """Keys of those of `ops` that read only constants, are deterministic, and make none of `results`.

    Ops that are not PyTorch's may have side effects and run each time.
    """
    constants = {key for key, value in graph.values.items() if value.kind == "constant"}
    found = []
    for op in (graph.ops[key] for key in ops):
        overload = op.node.target
        assert isinstance(overload, torch._ops.OpOverload), f"{overload=}"
        is_pure = overload.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in overload.tags
        if is_pure and constants.issuperset(op.inputs) and op.outputs and not set(op.outputs) & set(results):
            constants.update(op.outputs)
            found.append(op.key)
    return found


def _last_uses(graph: Graph, ops: Sequence[str], kept: Collection[str]) -> dict[str, list[str]]:
    """The results that each op is the last to read, by the op's key."""
    last: dict[str, str] = {}
    for key in ops:
        last |= dict.fromkeys((*graph.ops[key].outputs, *graph.ops[key].inputs), key)
    found: dict[str, list[str]] = {}
    for value, op_key in last.items():
        if value not in kept and graph.values[value].kind == "result":
            found.setdefault(op_key, []).append(value)
    return found


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
