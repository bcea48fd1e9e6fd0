"""The ops of a module's forward pass, with keys that are the same in every trace.

A key names the module, the op and its number among the module's ops of that name: `layers.0.mlp.up:linear:0`. A plan
uses these keys to say how each op is split. It is also valid for other shapes of the arguments, whose graphs have the
same keys.
"""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from hybrid_engine.extensions.parallelize.graph import layers  # noqa: F401  # its rules enter LIBRARY
from hybrid_engine.extensions.parallelize.graph.annotations import OpCall, OpRule, arguments_of, call_of, tensors_in
from hybrid_engine.extensions.parallelize.graph.library import op_name, rule_for
from hybrid_engine.extensions.parallelize.graph.tracing import trace, trace_state

KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
aten = torch.ops.aten
DROPPED = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar")
"""Checks of conditions that tracing has already fixed."""
Entry = TypeVar("Entry")
RESHAPES = ("view", "reshape", "_unsafe_view")
FREE, FIXED, RESHAPED, SHARED, END = WAYS = ("free", "fixed", "reshaped", "shared", "end")
"""How an op can read a tensor: in any layout (free); in the layout in which it was made (fixed); the same, but each
process may hold a partial sum of the gradient of a whole tensor (reshaped); in one layout for all ops that read it this
way, with the gradient in the same layout (shared); whole, as a result of the module (end).
"""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor of the graph: a parameter, a buffer, a constant, an argument, or the result of an op."""

    key: str
    """`layers.0.mlp.up.weight` for a tensor that the module holds, `op key/0` for the first result of an op."""
    kind: str
    """`parameter`, `buffer`, `constant`, `input` or `result`."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the graph."""

    key: str
    path: str
    """Path of the module whose forward calls the op; empty for the outermost module."""
    name: str
    """`linear`, or `namespace::name` for an op that is not PyTorch's."""
    rule: OpRule
    inputs: tuple[str, ...]
    """Keys of the operands, in the order of the annotation."""
    outputs: tuple[str, ...]
    """Keys of the results."""
    node: fx.Node
    """The node of the graph that calls the op."""

    def by_result(self, entries: Sequence[Entry]) -> dict[str, Entry]:
        """The `entries`, one for each of the op's results, by the keys of those results that are tensors."""
        return {key: entries[int(key.rsplit("/", 1)[1])] for key in self.outputs}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All ops of one forward pass in execution order."""

    ops: Mapping[str, Op]
    values: Mapping[str, Value]
    outputs: tuple[str | None, ...]
    """Keys of the results of the module, flattened; None for a result that is not a tensor."""
    plain_results: tuple[Any, ...]
    """The results that are not tensors, such as numbers and strings, at their places; None elsewhere."""
    mutations: Mapping[str, str]
    """Maps each buffer (by name) and argument (by key) that forward writes into to the key of its new value."""
    requires_grad: frozenset[str]
    """Names of the trained parameters."""
    aliases: Mapping[str, str]
    """Maps each additional name of a tied parameter or buffer to its name in `values`."""
    nodes: Mapping[fx.Node, str]
    """Maps each node of `module` whose value is a tensor to the key of that value."""
    module: fx.GraphModule
    original: nn.Module
    """The module that was traced, on meta: its code without its weights."""
    trace_state: Hashable
    """The modes, plain attributes and autocast dtype that the graph was traced for; see `trace_state`."""
    constants: Mapping[str, Tensor]
    out_spec: TreeSpec
    signature: str
    """SHA-256 of the model: ops, their order and operands, the parameters' shapes; not the arguments' shapes."""
    hash: str
    """SHA-256 of the same, of all shapes and of all arguments that are not tensors."""

    def of_kind(self, kind: str) -> dict[str, Value]:
        """The values of one kind, by key."""
        return {key: value for key, value in self.values.items() if value.kind == kind}

    def inputs_of(self, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors among the arguments of a forward pass, keyed by the names of their values."""
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        return dict(zip(self.of_kind("input"), tensors, strict=True))

    def result_of(self, outputs: Sequence[Tensor | None]) -> Any:
        """The module's result, with `outputs` as its tensors."""
        leaves = [plain if out is None else out for out, plain in zip(outputs, self.plain_results, strict=True)]
        return pytree.tree_unflatten(leaves, self.out_spec)


def build_graph(module: nn.Module, arguments: Mapping[str, Any], runs_code: bool = False) -> Graph:
    """The graph of `module.forward(**arguments)`; ValueError if it cannot be traced or an op has no annotation.

    `runs_code` as in `trace`.
    """
    return graph_of_trace(trace(module, arguments, runs_code), module)


def graph_of_trace(exported: ExportedProgram, module: nn.Module) -> Graph:
    """The graph of `exported`, a forward pass of `module`, which it changes; ValueError for an unannotated op."""
    normalise(exported.graph_module)
    return graph_of(exported, module)


def graph_of(exported: ExportedProgram, module: nn.Module) -> Graph:
    """The graph of the program that `module` was exported to."""
    aliases = _aliases(module)
    signature = exported.graph_signature
    values: dict[str, Value] = {}
    ops: dict[str, Op] = {}
    nodes: dict[fx.Node, str] = {}
    placeholders = {spec.arg.name: spec for spec in signature.input_specs}
    ordinals: Counter[tuple[str, str]] = Counter()
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            _enter_placeholder(node, placeholders[node.name], aliases, values, nodes)
        elif node.op == "call_function" and node.target is not getitem:
            _enter_op(node, ordinals, values, nodes, ops)
        elif node.op == "call_function":
            producer, index = node.args
            if isinstance(node.meta["val"], Tensor):
                nodes[node] = f"{nodes[producer]}/{index}"
    results = next(iter(reversed(exported.graph_module.graph.nodes))).args[0]
    specs = list(zip(signature.output_specs, results, strict=True))
    mutations = {_written(spec, aliases): nodes[node] for spec, node in specs if spec.kind in MUTATIONS}
    given = [node for spec, node in specs if spec.kind is OutputKind.USER_OUTPUT]
    outputs = tuple(nodes[node] if isinstance(node, fx.Node) else None for node in given)
    trained = frozenset(
        aliases.get(str(spec.target), str(spec.target))
        for spec in signature.input_specs
        if spec.kind is InputKind.PARAMETER and exported.state_dict[str(spec.target)].requires_grad
    )
    return Graph(
        ops=ops,
        values=values,
        outputs=outputs,
        plain_results=tuple(None if isinstance(node, fx.Node) else node for node in given),
        mutations=mutations,
        requires_grad=trained,
        aliases=aliases,
        nodes=nodes,
        module=exported.graph_module,
        original=without_weights(module),
        trace_state=trace_state(module),
        constants={name: value for name, value in exported.constants.items() if isinstance(value, Tensor)},
        out_spec=exported.call_spec.out_spec,
        signature=_digest(ops, values, with_shapes=False),
        hash=_digest(ops, values, with_shapes=True),
    )


def _written(spec: OutputSpec, aliases: Mapping[str, str]) -> str:
    """The key of the tensor that a result of the program is written into; ValueError for a parameter."""
    name = str(spec.target)
    if spec.kind is OutputKind.PARAMETER_MUTATION:
        raise ValueError(
            f"forward writes into the parameter {name!r}, which would not change: each process has a part of it; do "
            "that after the optimizer's step, or make it a buffer"
        )
    return f"input:{name}" if spec.kind is OutputKind.USER_INPUT_MUTATION else aliases.get(name, name)


def _enter_placeholder(
    node: fx.Node, spec: Any, aliases: Mapping[str, str], values: dict[str, Value], nodes: dict[fx.Node, str]
) -> None:
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor):
        return
    kind = KINDS[spec.kind]
    key = node.name if kind == "input" else aliases.get(str(spec.target), str(spec.target))
    key = f"{kind}:{key}" if kind in ("input", "constant") else key
    values[key] = Value(key=key, kind=kind, shape=tuple(tensor.shape), dtype=tensor.dtype)
    nodes[node] = key


def _enter_op(
    node: fx.Node,
    ordinals: Counter[tuple[str, str]],
    values: dict[str, Value],
    nodes: dict[fx.Node, str],
    ops: dict[str, Op],
) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"op {node.target} of the traced module is none of PyTorch's registered ops; register it")
    call = call_of(node)
    path, name = module_path(node), op_name(node.target)
    key = f"{path}:{name}:{ordinals[path, name]}"
    ordinals[path, name] += 1
    if isinstance(node.meta["val"], torch.SymInt | torch.SymFloat | torch.SymBool):
        raise ValueError(
            f"{key} makes a number of the values of a tensor, which a graph has not; compute with the tensor itself, "
            "without item(), float() and int()"
        )
    is_single = isinstance(node.meta["val"], Tensor)
    nodes[node] = f"{key}/0" if is_single else key
    outputs = [node.meta["val"]] if is_single else list(node.meta["val"])
    for position, tensor in enumerate(outputs):
        if isinstance(tensor, Tensor):
            shape = tuple(tensor.shape)
            values[f"{key}/{position}"] = Value(key=f"{key}/{position}", kind="result", shape=shape, dtype=tensor.dtype)
    arguments = [*node.args, *node.kwargs.values()]
    ops[key] = Op(
        key=key,
        path=path,
        name=name,
        rule=_rule_for(call, key),
        inputs=tuple(nodes[operand] for operand in tensors_in(arguments)),
        outputs=tuple(f"{key}/{position}" for position, tensor in enumerate(outputs) if isinstance(tensor, Tensor)),
        node=node,
    )


def _rule_for(call: OpCall, key: str) -> OpRule:
    try:
        return rule_for(call)
    except GuardOnDataDependentSymNode as error:
        raise ValueError(
            f"{key} reads a tensor whose shape depends on the values of another, as what nonzero() and x[mask] give; "
            "keep the shape, and use torch.where or multiply by the mask"
        ) from error


def without_weights(module: nn.Module) -> nn.Module:
    """A copy of `module` on meta; the module itself if all its tensors are on meta already."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return module
    empty: dict[int, Any] = {id(b): b.to("meta") for b in module.buffers()}
    empty |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, empty)


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).split("@")[0] if stack else ""


def _digest(ops: Mapping[str, Op], values: Mapping[str, Value], with_shapes: bool) -> str:
    """SHA-256 of a description of the graph that does not depend on the process."""
    digest = hashlib.sha256()
    for value in values.values():
        is_known = with_shapes or value.kind in ("parameter", "buffer")
        digest.update(f"{value.key} {value.kind} {value.dtype} {value.shape if is_known else ''}\n".encode())
    for op in ops.values():
        others = fx.node.map_arg([op.node.args, dict(op.node.kwargs)], lambda entry: "tensor") if with_shapes else ""
        digest.update(f"{op.key} {op.inputs} {op.outputs} {others}\n".encode())
    return digest.hexdigest()


def _aliases(module: nn.Module) -> dict[str, str]:
    """Maps each additional name of a tensor to the first name that the module has for it."""
    first: dict[int, str] = {}
    found = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def normalise(graph_module: fx.GraphModule) -> None:
    """Rewrites the graph in place; its results stay the same up to rounding."""
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.name.removeprefix("aten::") in DROPPED:
            graph_module.graph.erase_node(node)
        elif node.target is aten.cross_entropy_loss.default:
            _sum_cross_entropy(graph_module.graph, node)
        elif node.target is aten.mean.default:
            _sum_mean(graph_module.graph, node)
        elif node.target is aten.mse_loss.default:
            _sum_squares(graph_module.graph, node)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


def _sum_cross_entropy(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a mean over targets by the sum over all, divided by the number of targets that are not ignored."""
    arguments = arguments_of(node.target, node.args, dict(node.kwargs))  # type: ignore[arg-type]
    target = arguments["target"]
    is_mean = arguments["reduction"] == 1 and arguments["weight"] is None
    if not is_mean or target.meta["val"].is_floating_point() or target.meta["val"].dim() != 1:
        return
    names = ("label_smoothing",)
    with graph.inserting_before(node):
        total = _call(
            graph, node, aten.cross_entropy_loss.default, arguments["self"], target, None, 2, arguments["ignore_index"],
            *(arguments[name] for name in names),
        )  # fmt: skip
        counted = _call(graph, node, aten.ne.Scalar, target, arguments["ignore_index"])
        count = _call(graph, node, aten.sum.default, counted)
        mean = _call(graph, node, aten.div.Tensor, total, count)
    _replace(graph, node, mean)


def _sum_mean(graph: fx.Graph, node: fx.Node) -> None:
    operand = node.args[0]
    if node.kwargs.get("dtype") is not None or not isinstance(operand, fx.Node):
        return
    with graph.inserting_before(node):
        total = _call(graph, node, aten.sum.default, operand)
        mean = _call(graph, node, aten.div.Tensor, total, math.prod(operand.meta["val"].shape))
    _replace(graph, node, mean)


def _sum_squares(graph: fx.Graph, node: fx.Node) -> None:
    arguments = arguments_of(node.target, node.args, dict(node.kwargs))  # type: ignore[arg-type]
    left, right = (arguments[name].meta["val"] for name in ("self", "target"))
    if arguments["reduction"] != 1 or left.shape != right.shape:
        return
    with graph.inserting_before(node):
        total = _call(graph, node, aten.mse_loss.default, arguments["self"], arguments["target"], 2)
        mean = _call(graph, node, aten.div.Tensor, total, left.numel())
    _replace(graph, node, mean)


def _call(graph: fx.Graph, like: fx.Node, op: torch._ops.OpOverload, *args: Any) -> fx.Node:
    """A node for `op` with the module path of `like`. Its value is computed on fake tensors."""
    node = graph.call_function(op, args)
    node.meta = {name: like.meta[name] for name in ("nn_module_stack", "stack_trace") if name in like.meta}
    values = fx.node.map_arg(args, lambda entry: entry.meta["val"])
    with torch.no_grad(), like.meta["val"].fake_mode:
        node.meta["val"] = op(*values)
    return node


def _replace(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def paths_around(path: str) -> list[str]:
    """The paths of a module and of all modules around it, the outermost without a name excepted."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def layer_of(path: str) -> str | None:
    """The path of the outermost list layer (`layers.3`) that contains `path`; None if there is none."""
    return next((around for around in paths_around(path) if around.rpartition(".")[2].isdigit()), None)


@dataclass(frozen=True)
class Code:
    """The ops of a graph, grouped by the modules that call them."""

    graph: Graph
    leaves: frozenset[str]
    makers: dict[str, Op]
    """Maps the key of a result to the op that makes it."""

    @classmethod
    def of(cls, graph: Graph) -> "Code":
        """Groups the ops of a graph."""
        paths = {op.path for op in graph.ops.values()}
        leaves = frozenset(path for path in paths if not any(_is_inside(other, path) for other in paths))
        return cls(graph, leaves, {key: op for op in graph.ops.values() for key in op.outputs})

    def origin(self, key: str, path: str | None) -> str:
        """The tensor that code at `path` reads as `key`: the operand of a leaf's cast if the cast changed nothing.

        Such a cast returns the same tensor object that it received, which the hooks of that leaf do not change.
        """
        maker = self.makers.get(key)
        if maker is None or maker.name not in ("to", "contiguous") or maker.path == path:
            return key
        source, result = self.graph.values[maker.inputs[0]], self.graph.values[key]
        is_same = (source.dtype, source.shape) == (result.dtype, result.shape) and maker.path in self.leaves
        return self.origin(source.key, path) if is_same else key

    def is_own(self, op: Op, key: str) -> bool:
        """Whether `op` reads a result of its own module's code, or a buffer or constant."""
        kind = self.graph.values[key].kind
        return self.makers[key].path == op.path if kind == "result" else kind in ("buffer", "constant")

    def way(self, op: Op, key: str) -> str:
        """How a tensor reaches `op` if layouts change only at module borders; one of `WAYS`."""
        maker = self.makers.get(key)
        if self.graph.values[key].kind == "parameter":
            return FREE
        if op.path in self.leaves:
            if not self.is_own(op, key):
                return FREE
            return RESHAPED if maker is not None and self.is_reshaped_inside(maker, key) else FIXED
        return SHARED if maker is not None and maker.path in self.leaves else FIXED

    def is_reshaped_inside(self, maker: Op, key: str) -> bool:
        """Whether `key` is a reshape of a leaf's input that only the leaf itself reads."""
        readers = [op.path for op in self.graph.ops.values() if key in op.inputs]
        return maker.name in RESHAPES and maker.path in self.leaves and set(readers) == {maker.path}


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))
