"""Rewrites of a traced graph, after which ops can be split that could not be: a mean becomes a sum and a division."""

import math
from typing import Any

import torch
from torch import fx

from hybrid_engine.extensions.parallelize.graph.calls import arguments_of

aten = torch.ops.aten
DROPPED = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar")
"""Checks of what tracing has fixed already."""


def normalise(graph_module: fx.GraphModule) -> None:
    """Rewrites the graph in place; what it computes stays the same up to rounding."""
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
    """A mean over targets is the sum over all, divided by the number of those that are not ignored."""
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
    """A node for `op` that stands where `like` stands in the model, its value computed on fake tensors."""
    node = graph.call_function(op, args)
    node.meta = {name: like.meta[name] for name in ("nn_module_stack", "stack_trace") if name in like.meta}
    values = fx.node.map_arg(args, lambda entry: entry.meta["val"])
    with torch.no_grad(), like.meta["val"].fake_mode:
        node.meta["val"] = op(*values)
    return node


def _replace(graph: fx.Graph, node: fx.Node, result: fx.Node) -> None:
    node.replace_all_uses_with(result)
    graph.erase_node(node)
