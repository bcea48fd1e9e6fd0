"""Ops as the planner sees them: the cost of one op for one rank, and classes of ops that are split alike.

Ops of repeated modules (`layers.0`, `layers.1`, ...) that do the same form one class, and so do tensors that are made
and read alike. `Space` and the costs of plans use these.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_engine.extensions.parallelize.graph.annotations import OpRule, local_shape
from hybrid_engine.extensions.parallelize.graph.graph import END, FIXED, FREE, RESHAPED, Graph, Op, Value
from hybrid_engine.extensions.parallelize.planning.layouts import Layout, gradient_layout
from hybrid_engine.extensions.parallelize.planning.plan import Names
from hybrid_engine.extensions.parallelize.planning.setting import Cost, PlanSetting

State = tuple[Layout, Layout]
"""The layout in which an op needs an operand, and the layout of the gradient that it returns for it."""
WITHOUT_GRADIENT = frozenset({"detach", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"})
KEEPS_NOTHING = frozenset(
    {
        *("add", "sub", "rsub", "neg", "clone", "to", "_to_copy", "contiguous", "sum", "mean", "cat", "stack", "alias"),
        *("fill", "constant_pad_nd", "pad", "slice_scatter", "select_scatter", "flip", "roll", "cumsum", "repeat"),
        *("repeat_interleave", "masked_scatter", "view", "reshape", "squeeze", "unsqueeze", "detach", "lift"),
        *("floor", "ceil", "round", "trunc", "sign", "index", "index_select", "gather", "native_dropout", "dropout"),
        *("embedding", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "split", "split_with_sizes", "unbind"),
    }
)
"""Ops whose backward pass needs neither floating-point operands nor results."""
KEEPS_RESULTS = frozenset(
    {
        *("relu", "tanh", "sigmoid", "exp", "exp2", "expm1", "sqrt", "rsqrt", "reciprocal", "softmax", "_softmax"),
        *("log_softmax", "_log_softmax", "logsumexp", "cumprod", "elu", "selu"),
    }
)
KEEPS_OTHERS = frozenset(
    {"linear", "mm", "bmm", "matmul", "einsum", "mul", "div", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"}
    | {"convolution"}
)
"""Ops whose gradient for one operand needs only the other operands."""
KEEPS_MASK = {"where": 0, "masked_fill": 1}
"""Ops that save only the operand that selects elements of the others, by its position."""
ATTENTION = "scaled_dot_product_attention"
COPIES = frozenset({"expand", "reshape", "view", "clone", "contiguous", "repeat_interleave", "transpose", "unsqueeze"})
"""Ops that can repeat keys once for each query head."""


class Reader(NamedTuple):
    """One operand of a class of ops; `op_class` None: the tensor is a result of the graph, whole on every rank."""

    op_class: int | None
    position: int
    keeps: bool
    """Whether the tensor is kept for the backward pass in this layout."""
    again: bool
    """Whether the reader is in a recomputed module."""
    way: str = FREE
    """How the tensor reaches the reader; one of `WAYS` in `hybrid_engine.extensions.parallelize.graph.graph`."""


@dataclass(kw_only=True)
class OpClass:
    """Ops that are split alike."""

    ops: list[Op]
    choices: list[Names] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    """Cost of all ops of the class, for each choice."""
    largest: list[float] = field(default_factory=list)
    """Bytes of the largest tensor that one of the ops reads or makes, for each choice."""
    states: list[tuple[State, ...]] = field(default_factory=list)
    """States of the operands, for each choice."""
    outputs: list[tuple[Layout, ...]] = field(default_factory=list)
    """Layouts of the results, for each choice."""

    @property
    def keys(self) -> list[str]:
        """The keys of the ops."""
        return [op.key for op in self.ops]


@dataclass(frozen=True, kw_only=True)
class TensorClass:
    """Tensors that are made and read alike."""

    value: Value
    maker: tuple[int, int] | None
    """The class of ops that makes the tensor, and the index of the result; None for an input of the graph."""
    readers: tuple[Reader, ...]
    has_gradient: bool
    is_view: bool
    """Whether the tensor shares the memory of another tensor."""
    kept_by_maker: bool
    made_again: bool
    """Whether a recomputed module makes the tensor."""
    enters: bool
    """Whether a recomputed module reads the tensor and another module makes it."""
    count: int

    def may_go(self, reader: Reader, source: Layout, state: State) -> bool:
        """Whether `reader` may read the tensor in `state` if it is made in layout `source`."""
        wanted, gradient = state
        if reader.way in (FIXED, RESHAPED, END) and wanted != source:
            return False
        gives_alike = not self.has_gradient or gradient == gradient_layout(wanted)
        is_whole = all(placement.is_replicate() for placement in source)
        return gives_alike or reader.way == FREE or (reader.way == RESHAPED and is_whole)


def pattern(path: str) -> str:
    """A module's path with `*` for numbers: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def kind_of(op: Op, graph: Graph, reused: set[str]) -> object:
    """A key that is equal for ops of one class."""
    ordinal = "" if reused & set(op.inputs) else op.key.rsplit(":", 1)[1]
    shapes = tuple((graph.values[key].shape, graph.values[key].dtype) for key in (*op.inputs, *op.outputs))
    return pattern(op.path), op.name, ordinal, str(op.rule.annotation), tuple(op.rule.sizes.items()), shapes


def reused_parameters(graph: Graph, ops: Sequence[Op]) -> set[str]:
    """Parameters that more than two operands read; the ops that do the same with one of them are split alike."""
    counts = Counter(key for op in ops for key in op.inputs if graph.values[key].kind == "parameter")
    return {key for key, count in counts.items() if count > 2}


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that an op saves for its backward pass."""

    operands: frozenset[int] = frozenset()
    results: bool = False
    extra_bytes_per_element: float = 0.0
    """Additional bytes for each element of the first operand."""


NOTHING = SavedTensors()


def differentiable(graph: Graph, trains: bool) -> frozenset[str]:
    """Keys of the tensors that have a gradient."""
    found = set(graph.requires_grad) if trains else set()
    for op in graph.ops.values():
        if op.name not in WITHOUT_GRADIENT and any(key in found for key in op.inputs):
            found |= {key for key in op.outputs if graph.values[key].dtype.is_floating_point}
    return frozenset(found)


def kept_by(op: Op, graph: Graph, with_gradient: frozenset[str]) -> SavedTensors:
    """The tensors that `op` saves; by default floating-point operands and, outside aten, results."""
    if not any(key in with_gradient for key in op.outputs) or is_alias(op):
        return NOTHING
    if op.name == ATTENTION:
        return SavedTensors(frozenset({0, 1, 2}), results=True)
    if op.name in ("cross_entropy_loss", "nll_loss_nd"):
        return SavedTensors(extra_bytes_per_element=4.0)  # the log-probabilities
    if op.name in ("native_dropout", "dropout"):
        return SavedTensors(extra_bytes_per_element=1.0)
    if op.name in KEEPS_MASK:
        return SavedTensors(frozenset({KEEPS_MASK[op.name]}))
    if op.name in KEEPS_RESULTS:
        return SavedTensors(results=True)
    if op.name in KEEPS_NOTHING:
        return NOTHING
    floating = [position for position, key in enumerate(op.inputs) if graph.values[key].dtype.is_floating_point]
    if op.name not in KEEPS_OTHERS:
        return SavedTensors(frozenset(floating), results="::" in op.name)
    factors = _factors(op)
    return SavedTensors(frozenset(p for p in factors if any(op.inputs[q] in with_gradient for q in factors if q != p)))


def _factors(op: Op) -> range:
    """The positions of the operands that are multiplied; a bias is not one of them."""
    start, end = {"einsum": (0, len(op.inputs)), "addmm": (1, 3), "baddbmm": (1, 3)}.get(op.name, (0, 2))
    return range(start, min(end, len(op.inputs)))


def is_alias(op: Op) -> bool:
    """Whether the op's result is a view of an operand, which takes no time and no memory."""
    result = op.node.meta["val"]
    sources = [node.meta.get("val") for node in op.node.all_input_nodes]
    results = [r for r in (result if isinstance(result, list | tuple) else [result]) if isinstance(r, Tensor)]
    storages = {_storage(source) for source in sources if isinstance(source, Tensor)}
    return bool(results) and all(_storage(one) in storages for one in results)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Work:
    """The time of an op on one rank, and the bytes of the largest tensor that it reads or makes."""

    forward_s: float
    backward_s: float
    largest_bytes: float


def work(
    op: Op, graph: Graph, names: Names, mesh: Sequence[int], setting: PlanSetting, gradients: frozenset[str]
) -> Work:
    """The work of one rank for `op`, split along `names`; `gradients` are the tensors that have a gradient."""
    weights, device = setting.weights, setting.machine.device
    reads, writes = op.rule.input_placements(names), op.rule.output_placements(names)
    sides = []
    for keys, layouts in ((op.inputs, reads), (op.outputs, writes)):
        values = [graph.values[key] for key in keys]
        sides.append(
            [
                prod(local_shape(value.shape, layout, mesh)) * weights.itemsize(value.dtype)
                for value, layout in zip(values, layouts, strict=False)
            ]
        )
    read, written = sides
    largest = max([*read, *written], default=0.0)
    if is_alias(op):
        return Work(0.0, 0.0, 0.0)
    flops = _flops(op, graph) / split_degree(op.rule, names, mesh)
    dtype = weights.dtype(graph.values[op.outputs[0]].dtype if op.outputs else torch.float32)
    forward = device.seconds(flops, sum(read) + sum(written), dtype)
    wanted = [size for size, key in zip(read, op.inputs, strict=True) if key in gradients]
    if not wanted or not any(key in gradients for key in op.outputs):
        return Work(forward, 0.0, largest)
    # The backward of a product costs the forward once per operand with a gradient. Other ops read and write their
    # tensors.
    share = len(wanted) if flops else 1
    backward = device.seconds(share * flops, sum(written) + 2 * sum(wanted), dtype)
    return Work(forward, backward, largest)


def exchange_seconds(op: Op, graph: Graph, names: Names, mesh: Sequence[int], setting: PlanSetting) -> float:
    """The time of the communication between parts of an op while it runs, forward and backward."""
    on_part = op.rule.on_part_of(names)
    if on_part is None or not on_part[0].num_reductions:
        return 0.0
    value, layout = graph.values[op.inputs[0]], op.rule.input_placements(names)[0]
    cut = layout[on_part[1][0]]
    rows = prod(local_shape(value.shape, layout, mesh)) / local_shape(value.shape, layout, mesh)[cut.dim]  # type: ignore[attr-defined]
    num_bytes = rows * setting.weights.itemsize(value.dtype)
    seconds = sum(
        setting.machine.collective_seconds("all_reduce", num_bytes, mesh[axis], prod(mesh[axis + 1 :]))
        for axis in on_part[1]
    )
    return on_part[0].num_reductions * seconds


def split_degree(rule: OpRule, names: Names, mesh: Sequence[int]) -> int:
    """Number of parts into which an op's work is cut; each term of a sum is as large as the sum."""
    return prod(size for name, size in zip(names, mesh, strict=True) if name in rule.sizes)


def _flops(op: Op, graph: Graph) -> float:
    """Two for each multiply-add; 0 for ops that are limited by memory."""
    rule = op.rule
    if op.name == ATTENTION:
        query, key, value = (graph.values[name].shape for name in op.inputs[:3])
        causal = 0.5 if op.node.kwargs.get("is_causal") or True in op.node.args[5:6] else 1.0
        return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]) * causal
    contracted = [n for n in rule.annotation.summed if sum(_has(p, n) for p in rule.annotation.inputs) > 1]
    if not contracted:
        return 0.0
    if op.name.startswith("conv"):
        weight, result = graph.values[op.inputs[1]].shape, graph.values[op.outputs[0]].shape
        return 2 * prod(result) * prod(weight[1:])
    return 2 * prod(rule.sizes.values())


def _has(pattern: object, name: str) -> bool:
    return any(name in dim.names for dim in getattr(pattern, "dims", None) or ())


def generation_bytes(graph: Graph, setting: PlanSetting, ops: Sequence[Op], num_parts: int) -> float:
    """Bytes that one process needs to generate with the layers of `ops`, in addition to its part of their parameters.

    `num_parts` processes share the parameters. If all of them generate together, each uses its own part and copies
    (`Cost.copied_bytes`). Otherwise weights are gathered. The result is 0 if the model does not generate.
    """
    generation = setting.generation
    if generation is None:
        return 0.0
    needed = generation.num_tokens * token_bytes(graph, setting, ops)
    if generation.tensor_parallel != num_parts:
        values = graph.of_kind("parameter")
        read = {key for op in ops for key in op.inputs} & values.keys()
        needed += sum(prod(values[key].shape) * setting.weights.itemsize(values[key].dtype) for key in read)
    return needed / generation.tensor_parallel


def token_bytes(graph: Graph, setting: PlanSetting, ops: Sequence[Op]) -> float:
    """Bytes of the keys and values of one token in the layers of `ops`."""
    makers = {key: op for op in graph.ops.values() for key in op.outputs}
    total = 0.0
    for op in ops:
        for key in op.inputs[1:3] if op.name == ATTENTION else ():
            shape = graph.values[key].shape
            num_tokens = shape[-2] * (shape[0] if len(shape) > 3 else 1)
            least = prod(shape)
            while key in makers and makers[key].name in COPIES:
                key = makers[key].inputs[0]
                least = min(least, prod(graph.values[key].shape))
            total += least / num_tokens * setting.weights.itemsize(graph.values[key].dtype)
    return total
